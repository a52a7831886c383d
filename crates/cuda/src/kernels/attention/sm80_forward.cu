// The forward pass on the tensor cores of any GPU from sm_80 on: a block owns 64·M queries of one head and walks the
// keys, last to first: S, P, o += P·v, lse  (F1)–(F5), (L1)
//
// Usual tiles: 128 queries by 64 keys; 64 by 32 where D is above 128, and walked tiles of 32 rows of f32.
//
// Numbers that are not finite: pairs/tiles.cuh. Of f32 attention_lse raises the flags of `ZEROS` alone.
//
// Compile-time: as `sm80.cuh`. CD is 64, 128 or, of 16-bit operands, 256, CE 64 or 128: the columns that a launch
// accumulates.
CHECK_SHARED(forward, Q_BYTES + (STORAGE == 0 && VALUES ? 1 : 2) * (K_BYTES + V_BYTES));

struct Softmax : Body {
  static constexpr bool LAST_FIRST = true, APART = true;
  static constexpr u32 BESIDE = 0;
  const Unit unit;
  float m[2 * M], l[2 * M], a[2 * M];  // of a row: its maximum, its sum, and the factor of the sums before
  METHOD Softmax(const PairArgs& c) : unit(unit_of(c)) {
    UNROLL(r, 2 * M) m[r] = -INF, l[r] = 0;
  }
  METHOD void scale(Sums<M, CE>& o) const { mul_rows(o, a); }
  template <bool MASKED, class OWN> METHOD Use pairs(const OWN& own, Pairs<M, KEYS>& p, int key, int) const {
    const Unit unit = this->unit;
    UNROLL(r, 2 * M) {
      const QueryRow i(own.head, own.row + row_of<M>(r));
      const Span span = own.span(r);
      each_in_row(p, r, [&](float& x, int column) {
        float slope;
        const bool visible = score<MASKED>(own.head, unit, x, slope, i, key + column + own_column(), span);
        if (MASKED && !visible) x = -INF;
      });
    }
    return {true};
  }
  template <class OWN> METHOD void rows(const OWN&, Pairs<M, KEYS>& p, int) {
    UNROLL(r, 2 * M) {
      float top = m[r], sum = 0;
      each_in_row(p, r, [&](float& x, int) { top = fmaxf(top, x); });
      top = quad_max(top);
      const float most = top == -INF ? 0 : top, from = most * unit.log2;  // a row that has seen nothing
      a[r] = exp2_fast((m[r] - most) * unit.log2), m[r] = top;             // 1 where the maximum stays
      each_in_row(p, r, [&](float& x, int) { x = exp2_fast(fmaf(x, unit.log2, -from)), sum += x; });
      l[r] = fmaf(l[r], a[r], sum);
    }
  }
  // lse of a row, and the factor of its sums. A sink joins here: it weighs, and has no value.
  METHOD float finish(int r, float sink, float& over) const {
    const float all = quad_sum(l[r]), top = m[r] * unit.log2 * LN2;
    const bool seen = all != 0;
    over = seen ? 1 / all : 0;
    if (sink == -INF) return seen ? top + logf(all) : -INF;
    const float most = seen ? fmaxf(top, sink) : sink, share = seen ? weight(top, most) : 0;
    const float with = share * all + (seen ? weight(sink, most) : 1);
    over = seen ? share / with : 0;
    return most + logf(with);
  }
};

KERNEL(forward, PairArgs c, THREADS, CD > 128 ? 1 : 2) {
  const Place place = tile_of_block(c.heads);
  if (is_owned_before<M>(c, place)) return;
  const QueryBlock<Head, M, KEYS> walked(c, c, place);
  Softmax body(c);
  Sums<M, CE> o;
  float over[2 * M];
  walk_values<VALUES>(c, walked, body, o);
  // Anew, since the walk has no registers left for what follows.
  const QueryTile<Head> own(c, c, c.tasks[place.task], place.head);
  const Head& head = own.head;
  const Sequence& s = head.s;
  float* const to = (float*)c.lse + ((i64)s.batch * c.heads + head.head) * c.queries + s.query_start;
  const float sink = c.sinks ? c.sinks[head.head] : -INF;
  UNROLL(r, 2 * M) {
    const int i = own.row + row_of<M>(r);
    const float lse = body.finish(r, sink, over[r]);
    if (lane_id() % 4 == 0 && i < s.queries && c.first_value == 0) to[i] = lse;
  }
  if (VALUES && c.o.data) store_queries<M, CE>(c.o, head, own.row, o, over, c.first_value, c.value_dim);
}
