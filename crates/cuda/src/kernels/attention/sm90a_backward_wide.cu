// ---- gradients of wide operands ----
// Each gradient has a kernel of its own, since a sum of 64 rows and 256 columns takes half of a thread's registers: 8
// products in place of 7. A tile has 128 rows of its own, 64 a warpgroup, and walks blocks of 64 rows y and x:
//
//   keys      dk: own k and v, walks q = y and dout = x: Sᵀ = k·yᵀ, dPᵀ = v·xᵀ, dk += dSᵀ·y                      (B7)
//   queries   dq: own q and dout, walks k = y and v = x: S = q·yᵀ, dP = dout·xᵀ, dq += dS·y                      (B5)
//   values    dv: own k, walks q = y and dout = x: Sᵀ = k·yᵀ, dv += Pᵀ·x                                         (B6)
//
// A thread's registers hold the sum, scores, dP and the factor of the product before, which runs under this block's
// scores and dP. The two warpgroups take turns at the tensor cores: a turn is the product of a block, and the scores
// and dP of the next one, under which the other one weighs. Threads write results from their registers. Blocks claim
// tiles from a counter, as in the other files.
enum Gradient { OF_K, OF_Q, OF_V };
namespace wide_pass {
constexpr int ROWS = 64;  // of a block
constexpr u32 Y_BYTES = ROWS * D * 2, X_BYTES = ROWS * E * 2;
template <Gradient G> struct Layout {
  static constexpr bool BY_KEYS = G != OF_Q, BY_WEIGHTS = G == OF_V;
  static constexpr int COLUMNS = BY_WEIGHTS ? E : D;  // of the result
  // Stages of y and of x, as many as fit.
  static constexpr int OF_Y = E == 128 ? 3 : 2, OF_X = E == 128 ? 3 : BY_WEIGHTS ? 2 : 1;
  static constexpr u32 AT_X_OWN = OWN * D * 2, AT_Y = AT_X_OWN + (BY_WEIGHTS ? 0 : OWN * E * 2);
  static constexpr u32 AT_X = AT_Y + OF_Y * Y_BYTES;
  // lse2 and delta of the queries of a block, beside y.
  static constexpr u32 AT_STATS = AT_X + OF_X * X_BYTES, STATS = BY_WEIGHTS ? ROWS * 4 : 2 * ROWS * 4;
  using TileRing = Ring<1, AT_STATS + (BY_KEYS ? OF_Y * STATS : 0)>;
  using YRing = Ring<OF_Y, TileRing::END>;
  using XRing = Ring<OF_X, YRing::END>;
  using Tiles = WorkTiles<2, BY_KEYS, TileRing, XRing::END>;
  static constexpr u32 VISIT = XRing::END + 8, ALL = 1024 + VISIT + (SPANS && BY_KEYS ? 16 : 0);  // 1024 to align all
};
// Descriptors by addition: with D = 192 and a full mask they take 1.014 times as long, and with a causal one 0.987.
constexpr bool BY_ADDITION = WINDOW || D == E;
template <Gradient G> DEV Range range_of(const BackwardArgs& c, const Work& w, const Own& s) {
  if (G == OF_Q) return key_blocks<2, ROWS, false>(c.spans, s, w.block);
  return query_blocks<1>(c.spans, s, w.block, w.task);
}
template <Gradient G> DEV void produce(u32 base, const BackwardArgs& call) {
  using L = Layout<G>;
  constexpr bool KEYS = L::BY_KEYS;
  typename L::Tiles tiles = {base, 1};
  typename L::YRing ys = {base, 1};
  typename L::XRing xs = {base, 1};
  NO_UNROLL for (int t = blockIdx.x; t < call.tiles; t = claim_tile(call.counter, call.tiles)) {
    const Work w = L::Tiles::template work<false>(t, call);
    if (w.block < 0) continue;
    const Own s = sequence_of<false>(call, w.batch);
    const Range range = range_of<G>(call, w, s);
    const u32 loaded = tiles.announce(t);
    tiles.advance();
    expect_bytes(loaded, L::AT_Y);
    const int own = (KEYS ? s.key_start : s.query_start) + w.block * OWN;
    load5(base, KEYS ? &call.k : &call.q, loaded, own, w.head, s.batch);
    if (G != OF_V) load5(base + L::AT_X_OWN, KEYS ? &call.v : &call.dout, loaded, own, w.head, s.batch);
    feed_blocks<ROWS, KEYS, L::VISIT>(ys, call, w, s, range, [&](int h, int row, u32 stage, u32 full) {
      const int start = (KEYS ? s.query_start : s.key_start) + row;
      expect_bytes(full, Y_BYTES + (KEYS ? L::STATS : 0));
      load5(base + L::AT_Y + stage * Y_BYTES, KEYS ? &call.q : &call.k, full, start, h, s.batch);
      if (KEYS) load_numbers<ROWS>(base + L::AT_STATS + stage * L::STATS, call, s, h, row, G == OF_K, full);
      const u32 x = base + L::AT_X + xs.stage() * X_BYTES;
      load5(x, KEYS ? &call.dout : &call.v, xs.fill(X_BYTES), start, h, s.batch);
      xs.advance();
    });
  }
  tiles.finish();
}

// P in place of the products of a thread's two rows of queries with the keys from `key` on; 0 if a pair is hidden.
template <bool MASKED, int N> DEV void weigh(float (&p)[N], const Seen& seen, const float (&lse2)[2], float c, int key) {
  const int from = key + own_column();
  UNROLL(r, 2) {
    const u32 bits = MASKED ? bits_between<N / 2>(WINDOW ? seen.begin(r) - from : 0, seen.end(r) - from) : 0;
    UNROLL(i, N / 2) {
      float& y = p[4 * (i / 2) + 2 * r + i % 2];
      y = exp2_fast(fmaf(y, c, -lse2[r]));
      if (MASKED && !(bits >> i & 1)) y = 0;
    }
  }
}
// A thread's rows of P: by queries with their lse2 and delta, by keys with those at `stats`.
template <bool KEYS> struct Rows;
template <> struct Rows<true> {
  const PairRows<true> rows;
  METHOD Rows(const BackwardArgs& call, const Work& w, const Own& s, int row) : rows(call, w, s, row) {}
  template <bool MASKED, int N> METHOD void weigh(float (&p)[N], int n, u32 stats, u32 bits) const {
    const u32 shown[1] = {bits};
    rows.weigh<MASKED>(p, 0, n * ROWS, stats, shown, [](int, const float (&)[4]) {});
  }
  METHOD float2 delta(int j, int, u32 stats) const { return load_pair(stats + ROWS * 4 + 32 * j); }
};
template <> struct Rows<false> {
  const Seen seen;
  float c, lse2[2], of[2];
  METHOD Rows(const BackwardArgs& call, const Work& w, const Own& s, int row) : seen(call.spans, call.shape, s, row), c(s.scale * LOG2E) {
    const i64 at = stat_row(s, w.head) + row;
    UNROLL(r, 2) lse2[r] = call.lse2[at + 8 * r], of[r] = call.delta[at + 8 * r];
  }
  template <bool MASKED, int N> METHOD void weigh(float (&p)[N], int n, u32, u32) const {
    wide_pass::weigh<MASKED>(p, seen, lse2, c, n * ROWS);
  }
  METHOD float2 delta(int, int r, u32) const { return {of[r], of[r]}; }
};

// The walk of a tile, of whose rows a warpgroup has those from `own` on; `row`: a thread's first.
template <Gradient G> DEV void walk(float (&sum)[Layout<G>::COLUMNS / 2], typename Layout<G>::YRing& ys, typename Layout<G>::XRing& xs,
                                    const typename Layout<G>::Tiles& tiles, const BackwardArgs& call, const Work& w, const Own& s, u32 own, int row) {
  using L = Layout<G>;
  constexpr bool KEYS = L::BY_KEYS, WEIGHTS = L::BY_WEIGHTS;
  const u32 base = ys.base, column = 2 * (lane_id() & 3);
  const int group = uniform<true>(own_group()), each = KEYS ? s.heads / s.key_heads : 1;
  const Rows<KEYS> rows(call, w, s, row);
  u32 factors[ROWS / 4], before = 0;
  bool cut = false;  // with SPANS by keys, whether a block hides a pair
  int add = 0;
  auto my_turn = [&] { named_sync(3 + group, 256); };  // at the tensor cores
  auto your_turn = [&] { named_arrive(4 - group, 256); };
  auto step = [&](int n, auto masked) {
    constexpr bool MASKED = decltype(masked)::value;
    float p[ROWS / 2];
    const u32 y = base + L::AT_Y + ys.stage() * Y_BYTES, x = base + L::AT_X + xs.stage() * X_BYTES;
    const u32 stats = base + L::AT_STATS + ys.stage() * L::STATS + 4 * column;
    const u32 shown = SPANS && KEYS && cut ? visible(call.spans, call.shape, s, n * ROWS + column, opaque(row)) : ~0u;
    ys.wait_full();
    // Rows behind the sequence; of packed ones the last block is masked.
    const int end = (KEYS ? s.queries : s.keys) - n * ROWS;
    const bool is_cut = LENGTHS && (!PACKED || MASKED) && end < ROWS;
    if (is_cut) zero_rows<ROWS, D>(end, 1 + group, y);
    issue_shared<ROWS, D, OWN, ROWS>(p, rows_at<BY_ADDITION>(opaque(own)), rows_at<BY_ADDITION>(y));
    if (WEIGHTS && add) your_turn();
    mma_wait<1>(), pin(factors);  // the product of the block before: its operand's registers are free
    if (add && WEIGHTS) xs.release(before);
    if (add && !WEIGHTS) ys.release(before);
    if constexpr (WEIGHTS) {
      mma_wait<0>(), pin(p);
      rows.template weigh<MASKED>(p, n, stats, shown);
      pack_all(p, factors);
      ys.release();
      xs.wait_full();
      if (is_cut) zero_rows<ROWS, E>(end, 1 + group, x);
      my_turn();
      issue_registers<ROWS, E>(sum, factors, x, add);
      before = xs.stage();
    } else {
      xs.wait_full();
      if (is_cut) zero_rows<ROWS, E>(end, 1 + group, x);
      float ds[ROWS / 2];
      issue_shared<ROWS, E, OWN, ROWS>(ds, rows_at<BY_ADDITION>(opaque(own) + L::AT_X_OWN), rows_at<BY_ADDITION>(x));
      if (add) your_turn();
      mma_wait<1>(), pin(p);
      rows.template weigh<MASKED>(p, n, stats, shown);
      mma_wait<0>(), pin(ds);
      xs.release();
      UNROLL(j, ROWS / 8)
        UNROLL(r, 2) {
          const float2 delta = rows.delta(j, r, stats);
          factors[2 * j + r] = pack(p[4 * j + 2 * r] * (ds[4 * j + 2 * r] - delta.x), p[4 * j + 2 * r + 1] * (ds[4 * j + 2 * r + 1] - delta.y));
        }
      my_turn();
      issue_registers<ROWS, D>(sum, factors, y, add);
      before = ys.stage();
    }
    add = 1;
    ys.advance(), xs.advance();
  };
  const Range range = range_of<G>(call, w, s);
  NO_UNROLL for (int h = 0; h < each; h++) {
    int n = range.begin;
#if WINDOW == 2
    NO_UNROLL for (; n < range.end; n++) {
      if (KEYS) {
        ys.wait_full();
        const u32 visit = uniform<true>(load_word(base + L::VISIT + 4 * ys.stage()));
        n = number_of(visit), cut = visit & CUT;
      }
      step(n, Is<true>());
    }
#else
    NO_UNROLL for (; n < range.open; n++) step(n, Is<true>());
    NO_UNROLL for (; n < range.closed; n++) step(n, Is<false>());
    NO_UNROLL for (; n < range.end; n++) step(n, Is<true>());
#endif
  }
  if (add) your_turn();
  mma_wait<0>(), pin(sum);
  if (add && WEIGHTS) xs.release(before);
  if (add && !WEIGHTS) ys.release(before);
  tiles.release();
  if (!add) clear(sum);
}
template <Gradient G> DEV const Elements& result(const BackwardArgs& c) {
  return G == OF_K ? c.dk_rows : G == OF_Q ? c.dq_rows : c.dv_rows;
}
template <Gradient G> DEV void consume(u32 base, const BackwardArgs& call) {
  using L = Layout<G>;
  constexpr bool KEYS = L::BY_KEYS;
  constexpr int PLACE = G == OF_K ? OF_KEYS : G == OF_Q ? OF_QUERIES : OF_WEIGHTS;
  const int group = uniform<true>(own_group());
  typename L::YRing ys = {base, 0};
  typename L::XRing xs = {base, 0};
  if (group == 1) named_arrive(3, 256);  // group 0 begins
  Work w;
  Own s;
  NO_UNROLL for (typename L::Tiles tiles = {base, 0}; tiles.template take<true>(call, w, s); tiles.advance()) {
    const int row = w.block * OWN + group * 64 + own_row();
    float sum[L::COLUMNS / 2];
    walk<G>(sum, ys, xs, tiles, call, w, s, base + group * 64 * 128, row);
    const int count = KEYS ? s.keys : s.queries;
    if (LENGTHS == 1) clear_rows(sum, row, count);  // rows of no sequence
    if (!is_finite(sum, row, count))
      raise<PLACE>(call.flags, w.batch * call.shape.key_heads + (KEYS ? w.head : w.head / (s.heads / s.key_heads)));
    UNROLL(i, L::COLUMNS / 2) sum[i] *= G == OF_V ? 1 : s.scale;
    const int end = LENGTHS == 1 ? (KEYS ? call.shape.keys : call.shape.queries) : count;
    store_row_pieces(result<G>(call), s.batch, w.head, KEYS ? s.key_start : s.query_start, row, end, sum);
  }
}
template <Gradient G> DEV void run(const BackwardArgs& call) {
  using L = Layout<G>;
  const u32 base = shared_panels();
  make_barriers([&] {
    prefetch(&call.q), prefetch(&call.k), prefetch(&call.dout);
    if (G != OF_V) prefetch(&call.v);
    L::Tiles::init(base, 1, 8 * ARRIVALS);
    L::YRing::init(base, 1, 8 * ARRIVALS), L::XRing::init(base, 1, 8 * ARRIVALS);
  });
  auto feed = [&] {
    if (threadIdx.x == 0) produce<G>(base, call);
  };
  divide_roles<24, 240>(feed, [&] { consume<G>(base, call); });
}
}
CHECK_SHARED(keys, wide_pass::Layout<OF_K>::ALL);
CHECK_SHARED(queries, wide_pass::Layout<OF_Q>::ALL);
CHECK_SHARED(values, wide_pass::Layout<OF_V>::ALL);
KERNEL(keys, BackwardArgs call, 384, 1) {
  wide_pass::run<OF_K>(call);
}
KERNEL(queries, BackwardArgs call, 384, 1) {
  wide_pass::run<OF_Q>(call);
}
KERNEL(values, BackwardArgs call, 384, 1) {
  wide_pass::run<OF_V>(call);
}
