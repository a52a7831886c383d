// The forward sweeps of sm80.cuh: `scores` and `values`.
constexpr int BIAS = SIDE * M + SIDE;  // of a tile
CHECK_SHARED(scores, Q_BYTES + 2 * (K_BYTES + 4 * BIAS));
CHECK_SHARED(values, Q_BYTES + 2 * (K_BYTES + V_BYTES + 4 * BIAS));
typedef QueryBlock<LazyHead, M, KEYS> LazyRows;

struct LazyBody : Body {
  static constexpr bool EAGER = false, CUT = false;
  const LazyArgs& a;
  METHOD LazyBody(const LazyArgs& a) : a(a) {}
  METHOD bool cut(const LazyHead& head) const { return OPTIONS && head.allowed; }
};

// S of tiles of 128 queries.
struct LazyForward : LazyBody {
  static constexpr bool LAST_FIRST = false, APART = false;
  static constexpr u32 BESIDE = 8 * BIAS;
  using LazyBody::LazyBody;
  METHOD float* bias(int stage) const { return numbers_at(Q_BYTES + 2 * K_BYTES) + stage * BIAS; }
  METHOD void load(const LazyRows& own, int key, int stage) const { load_bias<SIDE * M>(bias(stage), own.head, own.row, key); }
  template <bool MASKED> METHOD void score(const LazyRows& own, Pairs<M, KEYS>& x, int key, int stage) const {
    score_tile<MASKED, M>(x, own.head, own.row, key, own.spans, bias(stage));
  }
};

struct Scores : LazyForward {
  const bool counts;  // else a row sees its span: no flag hides a pair
  float m[2 * M], l[2 * M], tops[2 * M][STRIPES / 4];  // the largest scores of every fourth stripe
  int seen[2 * M];
  METHOD Scores(const LazyArgs& a, const LazyRows& own) : LazyForward(a), counts(a.c.allowed) {
    UNROLL(r, 2 * M) {
      m[r] = -INF, l[r] = 0;
      seen[r] = counts || lane_id() % 4 ? 0 : max(own.spans[r].end - own.spans[r].begin, 0);
      UNROLL(t, STRIPES / 4) tops[r][t] = -INF;
    }
  }
  template <bool MASKED> METHOD Use pairs(const LazyRows& own, Pairs<M, KEYS>& x, int key, int stage) {
    score<MASKED>(own, x, key, stage);
    return {};
  }
  METHOD void rows(const LazyRows& own, Pairs<M, KEYS>& x, int key) {
    const int stripe = stripe_of(own.head.s, key) - lane_id() % 4;
    UNROLL(r, 2 * M) {
      float top = -INF, sum = 0;
      each_in_row(x, r, [&](float& y, int) { top = max_nan(top, y); });
      if (counts) each_in_row(x, r, [&](float& y, int) { seen[r] += y != -INF; });
      top = quad_max_nan(top);
      UNROLL(t, STRIPES / 4)
        if (stripe == 4 * t) tops[r][t] = max_nan(tops[r][t], top);
      top = max_nan(m[r], top);
      const float most = base_of(top);
      each_in_row(x, r, [&](float& y, int) { sum += weight(y, most); });
      l[r] = fmaf(l[r], weight(m[r], most), sum), m[r] = top;
    }
  }
  // Writes lse and the numbers of rows; the stripes of a tile in which a pair may be active.
  METHOD u32 finish(const LazyRows& own) {
    const LazyHead& head = own.head;
    const int row = own.row, group = own.group();
    u32 bits = 0;
    if (may_hide<M>(own)) raise<OF_OPERAND>(head.c.flags, group);
    UNROLL(r, 2 * M) {
      seen[r] = quad_sum(seen[r]);
      const int i = row + row_of<M>(r);
      const float sum = quad_sum(l[r]), lse = seen[r] ? m[r] + logf(sum) : -INF;  // (E3)
      const Numbers numbers = counted(a.tau[head.head], seen[r]);
      if (lane_id() % 4 == 0 && i < head.s.queries) ((float*)head.lse)[i] = lse, head.numbers[i] = numbers;
      if (i < head.s.queries && seen[r] && !is_finite(lse)) raise<OF_LSE>(head.c.flags, group);
      UNROLL(t, STRIPES / 4)
        if (may_be_active(tops[r][t], lse, numbers.offset)) bits |= 1u << (4 * t + lane_id() % 4);
    }
    return __reduce_or_sync(~0u, bits);
  }
};
KERNEL(scores, LazyArgs a, THREADS, 2) {
  __shared__ u32 words[THREADS / 32];
  const Place place = tile_of_block(a.c.heads);
  if (is_owned_before<M>(a.c, place)) return;
  const LazyRows own(a, a.c, place);
  Scores body(a, own);
  Sums<M, CE> none;
  walk_values<false>(a.c, own, body, none);
  const u32 bits = body.finish(own);
  if (lane_id() == 0) words[warp_id()] = bits;
  __syncthreads();  // the first two warps have one tile of queries, the others the next
  const int row = own.row + threadIdx.x * SIDE;
  if (threadIdx.x < 2 && row < own.head.s.queries) own.head.stripes(row) = words[2 * threadIdx.x] | words[2 * threadIdx.x + 1];
}

struct Values : LazyForward {
  const bool pv;
  const u32 stripes;
  float base[2 * M], offset[2 * M];
  METHOD Values(const LazyArgs& a, const LazyHead& head, int row)
      : LazyForward(a), pv(a.pv.data), stripes(head.stripes(row) | (row + SIDE < head.s.queries ? head.stripes(row + SIDE) : 0)) {
    UNROLL(r, 2 * M) base[r] = base_of(head.lse_at(row + row_of<M>(r))), offset[r] = head.number(row + row_of<M>(r)).offset;
  }
  METHOD int next(const LazyRows& own, int n) const {
    while (n < own.end && !(stripes >> stripe_of(own.head.s, n * SIDE) & 1)) n++;
    return n;
  }
  // The factor of v: e, or P where Σ a P v is wanted, from S (E4), (E5); 0 if the pair is not active.
  template <bool MASKED> METHOD float activate(float x, float base, float offset) const {
    const float p = weight(x, base), e = raised(p, offset);
    if (MASKED && x == -INF || pv && e <= 0) return 0;
    return pv ? p : max_nan(e, 0);
  }
  template <bool MASKED> METHOD Use pairs(const LazyRows& own, Pairs<M, KEYS>& x, int key, int stage) const {
    float most = 0;
    score<MASKED>(own, x, key, stage);
    each(x, [&](float& y, int r, int) { y = activate<MASKED>(y, base[r], offset[r]), most = max_nan(most, y); });
    return {__any_sync(~0u, most != 0) != 0};
  }
  METHOD void rows(const LazyRows&, Pairs<M, KEYS>&, int) const {}
};
KERNEL(values, LazyArgs a, THREADS, 2) {
  const PairArgs& c = a.c;
  const Place place = tile_of_block(c.heads);
  if (is_owned_before<M>(c, place)) return;
  const LazyRows own(a, c, place);
  Values body(a, own.head, own.row);
  Sums<M, CE> o;
  walk_values<true>(c, own, body, o);  // (E6)
  const Sequence& s = own.head.s;
  const int first = s.query_start + own.row, count = s.queries - own.row;
  if (body.pv) store_wide<M, CE>(a.pv, s.batch, own.head.head, first, count, o, c.first_value, c.value_dim);
  else store<M, CE>(c.o, s.batch, own.head.head, first, count, o, Same{1}, c.first_value, c.value_dim);
}
