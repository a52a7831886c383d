// attention and attention_lse on any GPU from sm_80 on, with every option, in f32 arithmetic whatever the storage.
// Each gradient has one writer and sums in a fixed order, so that bits depend on one sequence and one key head alone.
//
//   forward   a block owns 64 queries of one head and walks the keys: S, P, o += P·v, lse       (F1)–(F5), (L1)
//   delta     one number a row                                                                  (B1)
//   queries   a block owns 64 queries and walks the keys: S, dP, dS, dq += ds·k                 (B2)–(B5)
//   scale     a warp owns a row: dq of attention_lse from what its forward pass saved           (L2)
//   keys      a block owns 64 keys of one key head and walks the queries of its heads: dk, dv   (B6), (B7)
//   fused     as `keys`, with what its keys add to dq, which `collect` adds up                  (B2)–(B7)
//   dsinks    a block owns one head                                                             (B8)
//   dbias     a block owns a tile of 64 × 64 pairs and walks what shares its bias               (B9)
//
// Tiles begin where their sequence begins. Compile-time: STORAGE; OPTIONS, 0 where there is no softcap, no bias and no
// array of flags; VALUES, 0 for attention_lse; CD and CE, the columns
// of D and E that a block accumulates: 64, 128 or 256; R.
//
// A block of 128 threads owns 64 rows and walks tiles of 64; a thread has 8 × 4 pairs of a tile. Where accumulators
// are wider than 128 columns (64 in the second order) a block has 256 threads with 4 × 4. Operands pass through shared
// memory in slabs of 16 columns: one is copied (`cp.async`, where rows of f32 lie at multiples of 16 bytes) while the
// other is multiplied. Blocks of the last rows, which walk the most tiles under a causal mask, begin first.
//
// A pair that is not visible has the weight −0. Where a tile of v, k, q or dout holds a non-finite number, the product
// looks at the sign and leaves the pair out; elsewhere −0 adds nothing.
//
// The loops over blocks of `queries` and `keys` have one turn: without them more registers are spilt.
//
// `fused` takes five products a pair in place of seven. It computes 64 columns of dq at a time, beside the
// accumulators of dk and dv. `queries` adds dq tile by tile of keys, as `collect` does: both modes have the same bits.
#define FUSES 1

extern "C" __global__ void __launch_bounds__(THREADS) forward(const __grid_constant__ PairArgs c) {
  __shared__ Shared shared;
  const int block = last_first();
  Task task = c.tasks[block / c.heads];
  Head head(c, c.sequences[task.first], block % c.heads);
  const Sequence& s = head.s;
  const int row = task.row_tile * SIDE;
  Tile tile = c.tiles[s.first_tile + task.row_tile];
  Rows q = rows_of(c.q, s.batch, head.head, s.query_start + row, s.query_start + s.queries);
  float o[R][CE / 16], m[R], l[R];
  bool seen[R] = {};
  Span spans[R];
  clear<CE>(o);
  float sink = c.sinks ? c.sinks[head.head] : -INF;
#pragma unroll
  for (int r = 0; r < R; r++) {
    spans[r] = head.span(row + R * ty() + r);
    m[r] = sink;
    l[r] = sink != -INF && tx() == 0 ? sink - sink + 1 : 0;  // e^{sink - sink}: NaN of a sink that is not finite
  }
#pragma unroll 1
  for (int key = tile.begin / SIDE * SIDE; key < tile.end; key += SIDE) {
    float p[R][4], a[R];
    products(shared, p, q, rows_of(c.k, s.batch, head.key_head, s.key_start + key, s.key_start + s.keys), c.dim);
#pragma unroll
    for (int r = 0; r < R; r++) {
      float top = -INF;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float x, slope;
        bool visible = head.score(p[r][e], row + R * ty() + r, key + 4 * tx() + e, spans[r], x, slope);
        p[r][e] = visible ? x : -INF;
        top = max_nan(top, p[r][e]);
      }
#pragma unroll
      for (int n = 8; n; n /= 2) top = max_nan(top, __shfl_xor_sync(~0u, top, n));
      a[r] = 1;
      if (top == -INF) {  // the row sees nothing here
#pragma unroll
        for (int e = 0; e < 4; e++) p[r][e] = HIDE;
        continue;
      }
      seen[r] = true;
      top = max_nan(m[r], top);
      a[r] = weight(m[r], top), m[r] = top;
      float sum = 0;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        p[r][e] = p[r][e] == -INF ? HIDE : weight(p[r][e], top);
        sum += p[r][e];
      }
      l[r] = fmaf(l[r], a[r], sum);
    }
#if VALUES
    if (!c.o.data) continue;
    publish(shared, p);
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int e = 0; e < CE / 16; e++) o[r][e] *= a[r];
    accumulate<CE>(shared, o, rows_of(c.v, s.batch, head.key_head, s.key_start + key, s.key_start + s.keys), c.first_value, c.value_dim);
#endif
  }
#pragma unroll
  for (int r = 0; r < R; r++) {
#pragma unroll
    for (int n = 8; n; n /= 2) l[r] += __shfl_xor_sync(~0u, l[r], n);
    int i = row + R * ty() + r;
    if (tx() == 0 && i < s.queries && c.first_value == 0)
      ((float*)head.lse)[i] = seen[r] ? m[r] + logf(l[r]) : sink;  // whatever it is
  }
#if VALUES
  float over[R];
#pragma unroll
  for (int r = 0; r < R; r++) over[r] = seen[r] ? 1 / l[r] : 0;
  if (c.o.data) store<CE>(c.o, s.batch, head.head, s.query_start + row, s.queries - row, o, over, c.first_value, c.value_dim, false);
#endif
}

// A warp for each row of the arrays. Where a row saw nothing, o is 0 whatever its operands are, and dout is not read.
extern "C" __global__ void __launch_bounds__(THREADS) delta(const __grid_constant__ PairArgs c) {
  i64 at = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
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

extern "C" __global__ void __launch_bounds__(THREADS) queries(const __grid_constant__ PairArgs c) {
  __shared__ Shared shared;
#pragma unroll 1
  for (int n = blockIdx.x; n < c.blocks; n += gridDim.x) {
    const int block = c.blocks - 1 - n;
    queries_of(c, shared, c.tasks[block / c.heads], block % c.heads);
  }
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

extern "C" __global__ void __launch_bounds__(THREADS) keys(const __grid_constant__ PairArgs c) {
  __shared__ Shared shared;
#pragma unroll 1
  for (int block = blockIdx.x; block < c.blocks; block += gridDim.x)
    keys_of(c, shared, c.tasks[block / c.key_heads], block % c.key_heads, NoSlots());
}

extern "C" __global__ void __launch_bounds__(THREADS) fused(const __grid_constant__ FusedArgs a) {
  __shared__ Shared shared;
  const PairArgs& c = a.c;
  keys_of(c, shared, c.tasks[blockIdx.x / c.key_heads], blockIdx.x % c.key_heads, a.slots);
}

#if OPTIONS
extern "C" __global__ void __launch_bounds__(THREADS) dbias(const __grid_constant__ PairArgs c) {
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
