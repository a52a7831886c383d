// The tokens that count, and by what their losses are divided (C10), of one block: targets may lie where no host
// looks.
//
// Only the device knows how many tokens count. Chunks are those of all tokens, so that an operand on the device gives
// the bits of one from the host. Rows of h of other tokens are not read.
constexpr int TOKEN_THREADS = 1024, TOKEN_WARPS = TOKEN_THREADS / 32, TOKENS_EACH = 8;

// The sum of n of the warps before this one, and of all.
struct Before { int own, all; };
DEV Before before(int n, int (&warps)[TOKEN_WARPS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) warps[warp] = n;
  __syncthreads();
  int sum = warps[lane];
  UNROLL_ALL for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  return {__shfl_sync(~0u, sum, warp) - n, __shfl_sync(~0u, sum, 31)};
}

// The numbers of all threads, put together by `join`, pairs of halves first.
template <class F> DEV double join_block(double x, double (&all)[TOKEN_THREADS], F join) {
  __syncthreads();
  all[threadIdx.x] = x;
  for (int n = TOKEN_THREADS / 2; n; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) all[threadIdx.x] = join(all[threadIdx.x], all[threadIdx.x + n]);
  }
  __syncthreads();
  return all[0];
}

// A token whose target is no class weighs NaN: so do its outputs and all that it adds to.
DEV Token token_of(const CrossEntropyArgs& c, int i, i64 target) {
  if (target < 0 || target >= c.vocab) return {i, -1, NAN_F, NAN_F};
  return {i, (int)target, c.token_weights ? c.token_weights[i] : 1, c.class_weights ? c.class_weights[target] : 1};
}

KERNEL(tokens, CrossEntropyArgs c, TOKEN_THREADS) {
  __shared__ int warps[TOKEN_WARPS];
  __shared__ double all[TOKEN_THREADS];
  auto sum = [&](double x) { return join_block(x, all, [](double a, double b) { return a + b; }); };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int counted = 0;
  bool wrong = false;  // whether a target is no class
  NO_UNROLL for (int first = 0; first < c.all; first += TOKEN_THREADS * TOKENS_EACH) {
    const int own = first + warp * 32 * TOKENS_EACH + lane;
    i64 target[TOKENS_EACH];
    u32 counts[TOKENS_EACH];  // a bit for each lane
    int n = 0;
    UNROLL(e, TOKENS_EACH) target[e] = own + 32 * e < c.all ? c.targets[own + 32 * e] : c.ignore_index;
    UNROLL(e, TOKENS_EACH) n += __popc(counts[e] = __ballot_sync(~0u, target[e] != c.ignore_index));
    const Before b = before(n, warps);
    int at = counted + b.own;
    UNROLL_ALL for (int e = 0; e < TOKENS_EACH; at += __popc(counts[e]), e++) {
      if (target[e] == c.ignore_index) continue;
      const int to = at + __popc(counts[e] & ((1u << lane) - 1));
      const Token token = token_of(c, own + 32 * e, target[e]);
      c.tokens[to] = token, wrong |= token.target < 0;
      ((float2*)c.picked)[to] = make_float2(NAN_F, NAN_F);  // where no tile of classes has the target
    }
    counted += b.all;
  }
  // Whatever is ignored between them, the tokens that count are summed alike.
  double z = 0, weights = 0;
  float largest = 0;
  if (c.mean && !c.token_weights && !c.class_weights) {  // ones, or NaN
    z = __syncthreads_or(wrong) ? NAN_F : counted;
  } else if (c.mean) {
    __syncthreads();
    for (int i = threadIdx.x; i < counted; i += TOKEN_THREADS) z += (double)c.tokens[i].weight * c.tokens[i].class_weight;
    z = sum(z);
  }
  if (c.class_weights) {
    UNROLL_BY(8) for (int v = threadIdx.x; v < c.vocab; v += TOKEN_THREADS) {
      const float cw = c.class_weights[v];
      weights += cw, largest = max(largest, fabsf(cw));
    }
    weights = sum(weights), largest = (float)join_block(largest, all, [](double a, double b) { return max(a, b); });
  }
  if (threadIdx.x) return;
  Common s = {c.divisor, c.divisor, (double)c.vocab, 1, counted, 0};
  if (c.class_weights) s.class_weight = weights, s.largest = largest;
  if (c.mean) s.z_mean = z, s.z_lse = c.square_weighted ? z : counted, s.nothing_left = z == 0 ? 1 + (c.nan_of_nothing != 0) : 0;
  *c.common = s;
}
