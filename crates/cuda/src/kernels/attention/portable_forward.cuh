// o and lse of a tile of queries, for `portable_forward.cu`, which explains it, and `fallback.cu`.
DEV void outputs_of(const PairArgs& c, Shared& shared, Task task, int number) {
  const QueryTile<Head> own(c, c, task, number);
  const Head& head = own.head;
  const int row = own.row;
  Rows q = query_rows(c.q, head, row);
  Sums<CE> o;
  float m[R], l[R];
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
    Pairs p;
    float a[R];
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
    if (tx() == 0 && i < head.s.queries && c.first_value == 0)
      ((float*)head.lse)[i] = seen[r] ? m[r] + logf(l[r]) : sink;  // whatever it is
  }
  float over[R];
  UNROLL(r, R) over[r] = seen[r] ? 1 / l[r] : 0;
  if (VALUES && c.o.data) store_queries<CE>(c.o, head, row, o, over, c.first_value, c.value_dim);
}
