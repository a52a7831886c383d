// The backward pass of attention and attention_lse in fused multiply-adds. Tiles, compile-time: as
// portable_forward.cu.
//
//   delta     one number a row  (B1)
//   queries   a block owns 64 queries and walks the keys: S, dP, dS, dq += ds·k  (B2)–(B5)
//   scale     a warp owns a row: dq of attention_lse from what its forward pass saved  (L2)
//   keys      a block owns 64 keys of one key head and walks the queries of its heads: dk, dv  (B6), (B7)
//   fused     as `keys`, with what its keys add to dq, which `collect` adds up  (B2)–(B7)
//   dsinks    a block owns one head  (B8)
//   dbias     a block owns a tile of 64 × 64 pairs and walks what shares its bias  (B9)
//
// The loops over blocks of `queries` and `keys` have one turn: without them more registers are spilt.
//
// `fused` takes five products a pair in place of seven. It computes 64 columns of dq at a time, beside the
// accumulators of dk and dv.
#define FUSES 1

// A row that saw nothing has o = 0 whatever its operands are; dout is not read there.
KERNEL(delta, PairArgs c, THREADS) {
  ArrayRow row;
  if (!row.find(c)) return;
  const int lane = threadIdx.x % 32;
  float sum = 0;
  if (row.has_sequence(c)) {
#if VALUES
    bool any = false;
    const element *o = row.of<const element>(c.o), *dout = row.of<const element>(c.dout);
    for (int e = lane; e < c.value_dim; e += 32) {
      float x = read(o[e]);
      any |= x != 0;
      sum = fmaf(read(dout[e]), x, sum);
    }
    sum = lane_sum(sum);
    float lse = c.lse[row.at];
    bool nothing = lse == (c.sinks ? c.sinks[row.head] : -INF) || lse == -INF;
    if (!__any_sync(~0u, any) && nothing) sum = 0;
#endif
    if (c.dlse) sum -= c.dlse[row.at];
  }
  if (lane == 0) c.delta[row.at] = sum;
}

KERNEL(queries, PairArgs c, THREADS) {
  __shared__ Shared shared;
  NO_UNROLL for (int n = blockIdx.x; n < c.blocks; n += gridDim.x) {
    const int block = c.blocks - 1 - n;
    queries_of(c, shared, c.tasks[block / c.heads], block % c.heads);
  }
}

#if !VALUES
// (L2) from the gradient of lse by q, which lies in the place of q, in f32. Where a row saw nothing, dlse is not read.
KERNEL(scale, PairArgs c, THREADS) {
  ArrayRow row;
  if (!row.find(c) || !row.has_sequence(c)) return;
  const int lane = threadIdx.x % 32;
  const float* from = row.of<const float>(c.q);
  element* to = row.of<element>(c.dq);
  bool any = false;
  for (int e = lane; e < c.dim; e += 32) any |= from[e] != 0;
  const float lse = c.lse[row.at];
  const bool nothing = lse == -INF || c.sinks && lse == c.sinks[row.head] && !__any_sync(~0u, any);
  const float dlse = nothing ? 0 : c.dlse[row.at];
  for (int e = lane; e < c.dim; e += 32) to[e] = rounded(nothing ? 0 : fmaf(dlse, from[e], 0.0f));  // no -0, as `store`
}
#endif

KERNEL(keys, PairArgs c, THREADS) {
  __shared__ Shared shared;
  NO_UNROLL for (int block = blockIdx.x; block < c.blocks; block += gridDim.x)
    keys_of(c, shared, c.tasks[block / c.key_heads], block % c.key_heads, NoSlots());
}

KERNEL(fused, FusedArgs a, THREADS) {
  __shared__ Shared shared;
  const PairArgs& c = a.c;
  keys_of(c, shared, c.tasks[blockIdx.x / c.key_heads], blockIdx.x % c.key_heads, a.slots);
}

#if OPTIONS
KERNEL(dbias, PairArgs c, THREADS) {
  __shared__ Shared shared;
  const Task task = c.tasks[blockIdx.x / c.bias_heads];
  const int own = blockIdx.x % c.bias_heads, row = task.row_tile * SIDE, key = task.key_tile * SIDE;
  Pairs sum = {};
  each_sharing(c, task, own, [&](const Head& head) {
    Pairs x, dp = {};
    float p, ds;
    products(shared, x, query_rows(c.q, head, row), key_rows(c.k, head, key), c.dim);
    if (VALUES) products(shared, dp, query_rows(c.dout, head, row), key_rows(c.v, head, key), c.value_dim);
    UNROLL(r, R) {
      int i = row + row_of(r);
      Span span = head.span(i);
      float lse = lse_of(head, i), delta = delta_of(head, i);
      UNROLL(e, 4) sum[r][e] += pair(head, x[r][e], dp[r][e], i, key + column_of(e), span, lse, delta, p, ds);
    }
  });
  store_pairs(c, task, c.dbias, own, sum);
}
#endif

KERNEL(dsinks, PairArgs c, THREADS) {
  const int h = blockIdx.x;
  float sink = c.sinks[h], sum = 0;
  auto load = [&](i64 at) { return float2{c.lse[at], c.delta[at]}; };
  auto add = [&](const float2& x) { sum = fmaf(weight_of_sink(sink, x.x), x.y, sum); };
  if (sink != -INF) each_row_of_head<THREADS>(c, h, load, add);
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) c.dsinks[h] = -sum;
}
