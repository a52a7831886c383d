// dq of a tile of queries, dk and dv of a tile of keys, in f32 fused multiply-adds: bodies that `portable_backward.cu`
// and `fallback.cu` share. Compile-time names are those of portable_forward.cu.

// A pair's P (F4) and ds (B4), both hidden if it is not visible; returns dS (B3), 0 if it is not visible.
DEV float pair(const Head& head, float product, float dp, int i, int j, Span span, float lse, float delta, float& p,
               float& ds) {
  float score, slope;
  p = ds = HIDE;
  if (!head.score(product, i, j, span, score, slope)) return 0;
  p = weight(score, lse);
  float x = __fmul_rn(p, __fsub_rn(dp, delta));
  ds = shown(__fmul_rn(slope, x));
  return x;
}
DEV float delta_of(const Head& head, int i) { return !head.delta ? -1 : i < head.s.queries ? head.delta[i] : 0; }

// dq of a tile of queries of a head.
DEV void queries_of(const PairArgs& c, Shared& shared, Task task, int number) {
  Head head(c, c.sequences[task.first], number);
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
  store<CD>(c.dq, s.batch, head.head, s.query_start + row, s.queries - row, dq, Same{c.scale}, c.first_dim, c.dim,
            c.wide);
}

// dk and dv of a tile of keys of a key head; with SLOTS also what these keys add to the gradient of q.
template <class SLOTS>
DEV void keys_of(const PairArgs& c, Shared& shared, Task task, int key_head, const SLOTS& slots) {
  constexpr bool FUSED = FUSED_BY<SLOTS>;
  if (lacks(slots, task.key_tile)) return;
  const Sequence s = c.sequences[task.first];
  const int group = c.heads / c.key_heads, key = task.key_tile * SIDE;
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
        for (int r = 0; r < R; r++)
          pair(head, x[r][e], dp[r][e], i, key + R * ty() + r, span, lse, delta, x[r][e], ds[r][e]);
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
  const int first = s.key_start + key, count = s.keys - key;
  if (wants_dk) store<CD>(c.dk, s.batch, key_head, first, count, dk, Same{c.scale}, c.first_dim, c.dim, false);
#if VALUES
  if (wants_dv) store<CE>(c.dv, s.batch, key_head, first, count, dv, Same{1}, c.first_value, c.value_dim, false);
#endif
}
