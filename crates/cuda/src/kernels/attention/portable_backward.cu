// The backward pass of attention and attention_lse in fused multiply-adds: tiles are those of `portable_forward.cu`.
//
//   delta     one number a row                                                                  (B1)
//   queries   a block owns 64 queries and walks the keys: S, dP, dS, dq += ds·k                 (B2)–(B5)
//   scale     a warp owns a row: dq of attention_lse from what its forward pass saved           (L2)
//   keys      a block owns 64 keys of one key head and walks the queries of its heads: dk, dv   (B6), (B7)
//   fused     as `keys`, with what its keys add to dq, which `collect` adds up                  (B2)–(B7)
//   dsinks    a block owns one head                                                             (B8)
//   dbias     a block owns a tile of 64 × 64 pairs and walks what shares its bias               (B9)
//
// `fused` takes five products a pair in place of seven. It computes 64 columns of dq at a time, beside the
// accumulators of dk and dv. `queries` adds dq tile by tile of keys, as `collect` does: both modes have the same bits.
#define FUSES 1

// A pair's P (F4) and ds (B4), both hidden if it is not visible; returns dS (B3), 0 if it is not visible.
DEV float pair(const Head& head, float product, float dp, int i, int j, Span span, float lse, float delta, float& p, float& ds) {
  float score, slope;
  p = ds = HIDE;
  if (!head.score(product, i, j, span, score, slope)) return 0;
  p = weight(score, lse);
  float x = __fmul_rn(p, __fsub_rn(dp, delta));
  ds = shown(__fmul_rn(slope, x));
  return x;
}
DEV float delta_of(const Head& head, int i) { return !head.delta ? -1 : i < head.s.queries ? head.delta[i] : 0; }

// A warp for each row of the arrays. Where a row saw nothing, o is 0 whatever its operands are, and dout is not read.
DEV void delta_of_rows(const PairArgs& c, int block) {
  i64 at = (i64)block * (THREADS / 32) + threadIdx.x / 32;
  if (at >= (i64)c.batch * c.heads * c.queries) return;
  int lane = threadIdx.x % 32, i = at % c.queries, b = at / c.queries / c.heads;
  float sum = 0;
  if (c.spans[(i64)b * c.queries + i].begin >= 0) {
#if VALUES
    int h = at / c.queries % c.heads;
    bool any = false;
    const element* o = (const element*)c.o.data + b * c.o.batch + h * c.o.head + i * c.o.row;
    const element* dout = (const element*)c.dout.data + b * c.dout.batch + h * c.dout.head + i * c.dout.row;
    for (int e = lane; e < c.value_dim; e += 32) {
      float x = read(o[e]);
      any |= x != 0;
      sum = fmaf(read(dout[e]), x, sum);
    }
#pragma unroll
    for (int n = 16; n; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
    float lse = c.lse[at];
    bool nothing = lse == (c.sinks ? c.sinks[h] : -INF) || lse == -INF;
    if (!__any_sync(~0u, any) && nothing) sum = 0;
#endif
    if (c.dlse) sum -= c.dlse[at];
  }
  if (lane == 0) c.delta[at] = sum;
}
extern "C" __global__ void __launch_bounds__(THREADS) delta(const __grid_constant__ PairArgs c) {
  if (idle(c)) return;
#pragma unroll 1
  for (int block = blockIdx.x; block < c.blocks; block += gridDim.x) delta_of_rows(c, block);
}

DEV void queries_of(const PairArgs& c, Shared& shared, int block) {
  Task task = c.tasks[block / c.heads];
  Head head(c, c.sequences[task.first], block % c.heads);
  const Sequence& s = head.s;
  const int row = task.row_tile * SIDE;
  Tile tile = c.tiles[s.first_tile + task.row_tile];
  Rows q = rows_of(c.q, s.batch, head.head, s.query_start + row, s.query_start + s.queries);
  float dq[R][CD / 16], lse[R], delta[R];
  Span spans[R];
  clear<CD>(dq);
#pragma unroll
  for (int r = 0; r < R; r++) {
    int i = row + R * ty() + r;
    spans[r] = head.span(i), lse[r] = lse_of(head, i), delta[r] = delta_of(head, i);
  }
#pragma unroll 1
  for (int key = tile.begin / SIDE * SIDE; key < tile.end; key += SIDE) {
    float x[R][4], dp[R][4] = {}, p;
    Rows k = rows_of(c.k, s.batch, head.key_head, s.key_start + key, s.key_start + s.keys);
    products(shared, x, q, k, c.dim);
#if VALUES
    products(shared, dp, rows_of(c.dout, s.batch, head.head, s.query_start + row, s.query_start + s.queries),
             rows_of(c.v, s.batch, head.key_head, s.key_start + key, s.key_start + s.keys), c.value_dim);
#endif
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        pair(head, x[r][e], dp[r][e], row + R * ty() + r, key + 4 * tx() + e, spans[r], lse[r], delta[r], p, x[r][e]);
    publish(shared, x);
    add_tile<CD, true>(dq, [&](float (&sum)[R][CD / 16]) { accumulate<CD>(shared, sum, k, c.first_dim, c.dim); });
  }
  store<CD>(c.dq, s.batch, head.head, s.query_start + row, s.queries - row, dq, Same{c.scale}, c.first_dim, c.dim, c.wide);
}
extern "C" __global__ void __launch_bounds__(THREADS) queries(const __grid_constant__ PairArgs c) {
  if (idle(c)) return;
  __shared__ Shared shared;
#pragma unroll 1
  for (int block = blockIdx.x; block < c.blocks; block += gridDim.x) queries_of(c, shared, c.blocks - 1 - block);
}

#if !VALUES
// (L2) from the gradient of lse by q, which lies in the place of q, in f32. A warp has a row of the arrays; where a row saw nothing, dlse
// is not read.
extern "C" __global__ void __launch_bounds__(THREADS) scale(const __grid_constant__ PairArgs c) {
  const i64 at = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  if (at >= (i64)c.batch * c.heads * c.queries) return;
  const int lane = threadIdx.x % 32, i = at % c.queries, h = at / c.queries % c.heads, b = at / c.queries / c.heads;
  if (c.spans[(i64)b * c.queries + i].begin < 0) return;
  const float* from = (const float*)c.q.data + b * c.q.batch + h * c.q.head + i * c.q.row;
  element* to = (element*)c.dq.data + b * c.dq.batch + h * c.dq.head + i * c.dq.row;
  bool any = false;
  for (int e = lane; e < c.dim; e += 32) any |= from[e] != 0;
  const float lse = c.lse[at];
  const bool nothing = lse == -INF || c.sinks && lse == c.sinks[h] && !__any_sync(~0u, any);
  const float dlse = nothing ? 0 : c.dlse[at];
  for (int e = lane; e < c.dim; e += 32) to[e] = rounded(nothing ? 0 : fmaf(dlse, from[e], 0.0f));  // no -0, as `store`
}
#endif

// With SLOTS also what these keys add to the gradient of q.
template <class SLOTS> DEV void keys_of(const PairArgs& c, Shared& shared, int block, const SLOTS& slots) {
  constexpr bool FUSED = FUSED_BY<SLOTS>;
  Task task = c.tasks[block / c.key_heads];
  if (lacks(slots, task.key_tile)) return;
  const Sequence s = c.sequences[task.first];
  const int key_head = block % c.key_heads, group = c.heads / c.key_heads, key = task.key_tile * SIDE;
  const bool wants_dk = c.dk.data && c.first_dim < c.dim, wants_dq = FUSED && (NARROW || c.first_dim < c.dim);
  Rows k = rows_of(c.k, s.batch, key_head, s.key_start + key, s.key_start + s.keys);
  float dk[R][CD / 16];
  clear<CD>(dk);
#if VALUES
  const bool wants_dv = c.dv.data && c.first_value < c.value_dim;
  Rows v = rows_of(c.v, s.batch, key_head, s.key_start + key, s.key_start + s.keys);
  float dv[R][CE / 16];
  clear<CE>(dv);
#endif
#pragma unroll 1
  for (int h = key_head * group; h < (key_head + 1) * group; h++) {
    Head head(c, s, h);
#pragma unroll 1
    for (int row = 0; row < s.queries; row += SIDE) {
      Tile tile = c.tiles[s.first_tile + row / SIDE];
      if (tile.end <= key || tile.begin >= key + SIDE) continue;
      Rows q = rows_of(c.q, s.batch, h, s.query_start + row, s.query_start + s.queries);
      float x[R][4], dp[R][4] = {}, ds[R][4];
      products(shared, x, k, q, c.dim);
#if VALUES
      Rows dout = rows_of(c.dout, s.batch, h, s.query_start + row, s.query_start + s.queries);
      if (wants_dq || wants_dk) products(shared, dp, v, dout, c.value_dim);
#endif
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int i = row + 4 * tx() + e;
        Span span = head.span(i);
        float lse = lse_of(head, i), delta = delta_of(head, i);
#pragma unroll
        for (int r = 0; r < R; r++) pair(head, x[r][e], dp[r][e], i, key + R * ty() + r, span, lse, delta, x[r][e], ds[r][e]);
      }
#if VALUES
      if (wants_dv) {
        publish(shared, x);
        accumulate<CE>(shared, dv, dout, c.first_value, c.value_dim);
        __syncthreads();
      }
#endif
      if (wants_dk) {
        publish(shared, ds);
        accumulate<CD>(shared, dk, q, c.first_dim, c.dim);
      }
      if (wants_dq) {
        if (wants_dk) __syncthreads();
        publish_across(shared, ds);
#pragma unroll 1
        for (int first = c.first_dim; first < (NARROW ? 1 : min(c.first_dim + CD, c.dim)); first += 64) {
          float dq[R][4];
          clear<64>(dq);
          accumulate<64>(shared, dq, k, first, c.dim);
          if constexpr (FUSED) leave(c, slots, s, h, row, task.key_tile, first, dq);
          if (!NARROW) __syncthreads();
        }
      }
    }
  }
  if (wants_dk) store<CD>(c.dk, s.batch, key_head, s.key_start + key, s.keys - key, dk, Same{c.scale}, c.first_dim, c.dim, false);
#if VALUES
  if (wants_dv) store<CE>(c.dv, s.batch, key_head, s.key_start + key, s.keys - key, dv, Same{1}, c.first_value, c.value_dim, false);
#endif
}
extern "C" __global__ void __launch_bounds__(THREADS) keys(const __grid_constant__ PairArgs c) {
  if (idle(c)) return;
  __shared__ Shared shared;
#pragma unroll 1
  for (int block = blockIdx.x; block < c.blocks; block += gridDim.x) keys_of(c, shared, block, NoSlots());
}

extern "C" __global__ void __launch_bounds__(THREADS) fused(const __grid_constant__ FusedArgs a) {
  __shared__ Shared shared;
  keys_of(a.c, shared, blockIdx.x, a.slots);
}

#if OPTIONS
extern "C" __global__ void __launch_bounds__(THREADS) dbias(const __grid_constant__ PairArgs c) {
  if (idle(c)) return;
  __shared__ Shared shared;
  Task task = c.tasks[blockIdx.x / c.bias_heads];
  const int own = blockIdx.x % c.bias_heads, row = task.row_tile * SIDE, key = task.key_tile * SIDE;
  float sum[R][4] = {};
#pragma unroll 1
  for (int n = task.first; n < task.first + task.sequences; n++) {
    const Sequence s = c.sequences[n];
    if (row >= s.queries || key >= s.keys) continue;
    Tile tile = c.tiles[s.first_tile + task.row_tile];
    if (tile.end <= key || tile.begin >= key + SIDE) continue;
#pragma unroll 1
    for (int h = c.bias_heads == 1 ? 0 : own; h < (c.bias_heads == 1 ? c.heads : own + 1); h++) {
      Head head(c, s, h);
      float x[R][4], dp[R][4] = {}, p, ds;
      products(shared, x, rows_of(c.q, s.batch, h, s.query_start + row, s.query_start + s.queries),
               rows_of(c.k, s.batch, head.key_head, s.key_start + key, s.key_start + s.keys), c.dim);
#if VALUES
      products(shared, dp, rows_of(c.dout, s.batch, h, s.query_start + row, s.query_start + s.queries),
               rows_of(c.v, s.batch, head.key_head, s.key_start + key, s.key_start + s.keys), c.value_dim);
#endif
#pragma unroll
      for (int r = 0; r < R; r++) {
        int i = row + R * ty() + r;
        Span span = head.span(i);
        float lse = lse_of(head, i), delta = delta_of(head, i);
#pragma unroll
        for (int e = 0; e < 4; e++) sum[r][e] += pair(head, x[r][e], dp[r][e], i, key + 4 * tx() + e, span, lse, delta, p, ds);
      }
    }
  }
  store_pairs(c, task, c.dbias, own, sum);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) dsinks(const __grid_constant__ PairArgs c) {
  if (idle(c)) return;
  const int h = blockIdx.x;
  float sink = c.sinks[h], sum = 0;
  for (i64 n = threadIdx.x; n < (i64)c.batch * c.queries; n += THREADS) {
    if (c.spans[n].begin < 0) continue;
    i64 at = (n / c.queries * c.heads + h) * c.queries + n % c.queries;
    if (sink != -INF) sum = fmaf(weight_of_sink(sink, c.lse[at]), c.delta[at], sum);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) c.dsinks[h] = -sum;
}
