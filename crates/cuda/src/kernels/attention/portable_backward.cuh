// dq of a tile of queries, dk and dv of a tile of keys, for `portable_backward.cu`, which explains them, and
// `fallback.cu`.

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

DEV void queries_of(const PairArgs& c, Shared& shared, Task task, int number) {
  const QueryTile<Head> own(c, c, task, number);
  const Head& head = own.head;
  const int row = own.row;
  Rows q = query_rows(c.q, head, row);
  Sums<CD> dq;
  float lse[R], delta[R];
  Span spans[R];
  clear<CD>(dq);
  UNROLL(r, R) {
    int i = row + row_of(r);
    spans[r] = head.span(i), lse[r] = lse_of(head, i), delta[r] = delta_of(head, i);
  }
  NO_UNROLL for (int key = own.first_key(); key < own.seen.end; key += SIDE) {
    Pairs x, dp = {};
    float p;
    Rows k = key_rows(c.k, head, key);
    products(shared, x, q, k, c.dim);
    if (VALUES) products(shared, dp, query_rows(c.dout, head, row), key_rows(c.v, head, key), c.value_dim);
    UNROLL2(r, R, e, 4)
      pair(head, x[r][e], dp[r][e], row + row_of(r), key + column_of(e), spans[r], lse[r], delta[r], p, x[r][e]);
    publish(shared, x);
    add_tile<CD, true>(dq, [&](Sums<CD>& sum) { accumulate<CD>(shared, sum, k, c.first_dim, c.dim); });
  }
  store_queries<CD>(c.dq, head, row, dq, Same{c.scale}, c.first_dim, c.dim, c.wide);
}

// With SLOTS also what the keys add to the gradient of q.
template <class SLOTS> DEV void keys_of(const PairArgs& c, Shared& shared, Task task, int key_head, const SLOTS& slots) {
  constexpr bool FUSED = FUSED_BY<SLOTS>;
  if (lacks(slots, task.key_tile)) return;
  const Sequence s = c.sequences[task.first];
  const int group = c.heads / c.key_heads, key = task.key_tile * SIDE;
  const bool wants_dk = c.dk.data && c.first_dim < c.dim, wants_dq = FUSED && (NARROW || c.first_dim < c.dim);
  Rows k = key_rows(c.k, s, key_head, key);
  Sums<CD> dk;
  clear<CD>(dk);
  const bool wants_dv = VALUES && c.dv.data && c.first_value < c.value_dim;
  Rows v = key_rows(c.v, s, key_head, key);
  Sums<CE> dv;
  clear<CE>(dv);
  NO_UNROLL for (int h = key_head * group; h < (key_head + 1) * group; h++) {
    Head head(c, s, h);
    NO_UNROLL for (int row = 0; row < s.queries; row += SIDE) {
      if (!may_see(c, s, row, key)) continue;
      Rows q = query_rows(c.q, head, row);
      Pairs x, dp = {}, ds;
      products(shared, x, k, q, c.dim);
      Rows dout = query_rows(c.dout, head, row);
      if (VALUES && (wants_dq || wants_dk)) products(shared, dp, v, dout, c.value_dim);
      UNROLL(e, 4) {
        int i = row + column_of(e);
        Span span = head.span(i);
        float lse = lse_of(head, i), delta = delta_of(head, i);
        UNROLL(r, R) pair(head, x[r][e], dp[r][e], i, key + row_of(r), span, lse, delta, x[r][e], ds[r][e]);
      }
      if (wants_dv) {
        publish(shared, x);
        accumulate<CE>(shared, dv, dout, c.first_value, c.value_dim);
        __syncthreads();
      }
      if (wants_dk) {
        publish(shared, ds);
        accumulate<CD>(shared, dk, q, c.first_dim, c.dim);
      }
      if (wants_dq) {
        if (wants_dk) __syncthreads();
        publish_across(shared, ds);
        NO_UNROLL for (int first = c.first_dim; first < (NARROW ? 1 : min(c.first_dim + CD, c.dim)); first += 64) {
          Pairs dq;
          clear<64>(dq);
          accumulate<64>(shared, dq, k, first, c.dim);
          if constexpr (FUSED) leave(c, slots, s, h, row, task.key_tile, first, dq);
          if (!NARROW) __syncthreads();
        }
      }
    }
  }
  const int first = s.key_start + key, count = s.keys - key;
  if (wants_dk) store<CD>(c.dk, s.batch, key_head, first, count, dk, Same{c.scale}, c.first_dim, c.dim);
  if (wants_dv) store<CE>(c.dv, s.batch, key_head, first, count, dv, Same{1}, c.first_value, c.value_dim);
}
