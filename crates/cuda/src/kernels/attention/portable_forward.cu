// attention and attention_lse on any GPU from sm_80 on, with every option, in f32 arithmetic whatever the storage.
// Each gradient has one writer and sums in a fixed order, so that bits depend on one sequence and one key head alone.
// The forward pass: a block owns 64 queries of one head and walks the keys: S, P, o += P·v, lse       (F1)–(F5), (L1)
//
// Tiles begin where their sequence begins. Compile-time: STORAGE; OPTIONS, 0 where there is no softcap, no bias and no
// array of flags; VALUES, 0 for attention_lse; CD and CE, the columns of D and E that a block accumulates: 64, 128 or
// 256; R.
//
// A block of 128 threads owns 64 rows and walks tiles of 64; a thread has 8 × 4 pairs of a tile. Where accumulators
// are wider than 128 columns (64 in the second order) a block has 256 threads with 4 × 4. Operands pass through shared
// memory in slabs of 16 columns: one is copied (`cp.async`, where rows of f32 lie at multiples of 16 bytes) while the
// other is multiplied. Blocks of the last rows, which walk the most tiles under a causal mask, begin first.
//
// A pair that is not visible has the weight −0. Where a tile of v, k, q or dout holds a non-finite number, the product
// looks at the sign and leaves the pair out; elsewhere −0 adds nothing.
KERNEL(forward, PairArgs c, THREADS) {
  __shared__ Shared shared;
  const QueryTile<Head> own(c, c, last_first());
  const Head& head = own.head;
  const Sequence& s = head.s;
  const int row = own.row;
  Rows q = query_rows(c.q, head, row);
  float o[R][CE / 16], m[R], l[R];
  bool seen[R] = {};
  Span spans[R];
  clear<CE>(o);
  float sink = c.sinks ? c.sinks[head.head] : -INF;
  UNROLL(r, R) {
    spans[r] = head.span(row + row_of(r));
    m[r] = sink;
    l[r] = sink != -INF && tx() == 0 ? sink - sink + 1 : 0;  // e^{sink - sink}: NaN of a sink that is not finite
  }
  NO_UNROLL for (int key = own.first_key(); key < own.seen.end; key += SIDE) {
    float p[R][4], a[R];
    products(shared, p, q, key_rows(c.k, head, key), c.dim);
    UNROLL(r, R) {
      float top = -INF, sum = 0;
      UNROLL(e, 4) {
        float x, slope;
        bool visible = head.score(p[r][e], row + row_of(r), key + column_of(e), spans[r], x, slope);
        p[r][e] = visible ? x : -INF;
        top = max_nan(top, p[r][e]);
      }
      top = row_max(top);
      a[r] = 1;
      if (top == -INF) {  // the row sees nothing here
        UNROLL(e, 4) p[r][e] = HIDE;
        continue;
      }
      seen[r] = true;
      top = max_nan(m[r], top);
      a[r] = weight(m[r], top), m[r] = top;
      UNROLL(e, 4) {
        p[r][e] = p[r][e] == -INF ? HIDE : weight(p[r][e], top);
        sum += p[r][e];
      }
      l[r] = fmaf(l[r], a[r], sum);
    }
    if (!VALUES || !c.o.data) continue;
    publish(shared, p);
    mul_rows(o, a);
    accumulate<CE>(shared, o, key_rows(c.v, head, key), c.first_value, c.value_dim);
  }
  UNROLL(r, R) {
    l[r] = row_sum(l[r]);
    int i = row + row_of(r);
    if (tx() == 0 && i < s.queries && c.first_value == 0)
      ((float*)head.lse)[i] = seen[r] ? m[r] + logf(l[r]) : sink;  // whatever it is
  }
  float over[R];
  UNROLL(r, R) over[r] = seen[r] ? 1 / l[r] : 0;
  if (VALUES && c.o.data) store<CE>(c.o, s.batch, head.head, s.query_start + row, s.queries - row, o, over, c.first_value, c.value_dim, false);
}
