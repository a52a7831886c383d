// Sums over the tokens of linear_attention, in f64 and in a fixed order; and one token of a step.

// Adds a thread's numbers, each 256th. Loads of 16 are in flight together.
DEV void add_numbers(double& sum, const float* numbers, i64 count) {
  constexpr int AHEAD = 16;
  NO_UNROLL for (i64 first = threadIdx.x; first < count; first += 256 * AHEAD) {
    float x[AHEAD];
    UNROLL(j, AHEAD) x[j] = first + 256 * j < count ? numbers[first + 256 * j] : -0.0f;  // which changes no sum
    UNROLL(j, AHEAD) sum += x[j];
  }
}

// Of every head of queries, dσ (R9).
KERNEL(sum_all, LinearArgs c, 256) {
  if (idle(c)) return;
  double sum = 0;
  add_numbers(sum, c.numbers, (i64)c.batch * c.heads * c.tokens);
  sum = block_sum<256>(sum);
  if (threadIdx.x == 0 && writes(c, (float)sum, *c.total)) *c.total = (float)sum;
}

// Of each key head, dg_gamma (R7).
KERNEL(sum_heads, LinearArgs c, 256) {
  if (idle(c)) return;
  const int head = blockIdx.x;
  double sum = 0;
  for (int batch = 0; batch < c.batch; batch++)
    add_numbers(sum, c.numbers + ((i64)batch * c.key_heads + head) * c.tokens, c.tokens);
  sum = block_sum<256>(sum);
  if (threadIdx.x == 0 && writes(c, (float)sum, c.total[head])) c.total[head] = (float)sum;
}

// A block owns 32 columns of a state; a warp has every eighth row. `begin` may be `end`.
KERNEL(step, LinearArgs c, 256) {
  constexpr int MEMBERS = 4, WARPS = 8;
  __shared__ float sums[WARPS][MEMBERS][32];
  const int pieces = (c.value_dim + 31) / 32, slot = blockIdx.x / pieces, key_head = slot % c.key_heads, batch = slot / c.key_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = blockIdx.x % pieces * 32 + lane, group = group_of(c);
  const bool inside = e < c.value_dim;
  const float decay = c.logs ? exp2_fast(c.logs[c.by_head ? key_head : slot] * LOG2E) : 1;
  const element* k = (const element*)c.k.data + batch * c.k.batch + key_head * c.k.head;
  const float value = inside ? read(((const element*)c.v.data)[batch * c.v.batch + key_head * c.v.head + e]) : 0;
  const float* from = (const float*)c.begin.data + batch * c.begin.batch + key_head * c.begin.head + e;
  float* to = (float*)c.end.data + batch * c.end.batch + key_head * c.end.head + e;
  int member = 0;
  do {
    float o[MEMBERS] = {};
    const element* q = (const element*)c.q.data + batch * c.q.batch + (key_head * group + member) * c.q.head;
    UNROLL_BY(4) for (int d = warp; d < c.dim; d += WARPS) {
      if (!inside) continue;
      float state;
      if (member) state = to[d * c.end.row];
      else {
        state = read(k[d]) * value;
        if (decay != 0) state = fmaf(decay, from[d * c.begin.row], state);
        to[d * c.end.row] = state;
      }
      UNROLL(m, MEMBERS)
        if (member + m < group) o[m] = fmaf(read(q[m * c.q.head + d]), state, o[m]);
    }
    UNROLL(m, MEMBERS) sums[warp][m][lane] = o[m];
    __syncthreads();
    if (warp < MEMBERS && member + warp < group && inside && c.out.data) {
      float sum = 0;
      UNROLL(w, WARPS) sum += sums[w][warp][lane];
      ((element*)c.out.data)[batch * c.out.batch + (key_head * group + member + warp) * c.out.head + e] = rounded(c.scale * sum);
    }
    __syncthreads();
  } while ((member += MEMBERS) < group);
}
