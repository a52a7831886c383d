// ---- one gradient by weights of the scores alone ----
// out += W·x. By keys, dv: W = Pᵀ, x = dout; dk of attention_lse: W = (P S' ⊙ dlse)ᵀ, x = q. By queries, its dq: W = P
// S' ⊙ dlse, x = k. A tile has 128 rows of its own, 64 a warpgroup, and walks blocks of 128 rows y: scores are own·yᵀ.
// Sums are those of `keys`, term by term: dv has the same bits.
//
// The two warpgroups take turns at the tensor cores: what the weights of a block add, and the scores of the next
// block, of one run under the exponentials of the other.
#if RESULTS != 1
namespace weights_pass {
constexpr int STAGES = LSE ? 4 : 2;
constexpr u32 BYTES = OWN * D * 2;
// Of two tiles what they own; their results take its place. y, and x where that is another tensor, in stages.
constexpr u32 AT_Y = 2 * BYTES, AT_X = LSE ? AT_Y : AT_Y + STAGES * BYTES, AT_STATS = AT_Y + 4 * BYTES, STATS = 2 * OWN * 4;
using TileRing = Ring<2, AT_STATS + STAGES * STATS, 1, true>;  // of what a tile owns
constexpr u32 OUT_FULL = TileRing::END;
using Blocks = Ring<STAGES, OUT_FULL + 16, 2>;
constexpr int Y = 0, X = 1;  // its parts
template <bool KEYS> using Tiles = WorkTiles<2, KEYS, TileRing, Blocks::END>;
constexpr u32 VISIT = Blocks::END + 8, ALL = 1024 + VISIT + (SPANS ? 16 : 0);  // 1024 to align all

template <bool KEYS> DEV Range range_of(const BackwardArgs& c, const Work& w, const Own& s) {
  return KEYS ? query_blocks<2>(c.spans, s, w.block, w.task) : key_blocks<2, OWN>(c.spans, s, w.block);
}
template <bool KEYS> DEV void produce(u32 base, const BackwardArgs& call) {
  Tiles<KEYS> tiles = {base, 1};
  Blocks blocks = {base, 1};
  NO_UNROLL for (int t = blockIdx.x; t < call.tiles; t = claim_tile(call.counter, call.tiles)) {
    const Work w = Tiles<KEYS>::template work<false>(t, call);
    if (w.block < 0) continue;
    const Own s = sequence_of<false>(call, w.batch);
    const Range range = range_of<KEYS>(call, w, s);
    const u32 own = base + tiles.stage() * BYTES, loaded = tiles.announce(t);
    expect_bytes(loaded, BYTES);
    load5(own, KEYS ? &call.k : &call.q, loaded, (KEYS ? s.key_start : s.query_start) + w.block * OWN, w.head, s.batch);
    feed_blocks<OWN, KEYS, VISIT>(blocks, call, w, s, range, [&](int h, int row, u32 stage, u32 full) {
      const u32 stats = base + AT_STATS + stage * STATS;
      expect_bytes(full, BYTES + (KEYS ? (LSE ? 2 : 1) * OWN * 4 : 0));
      load5(base + AT_Y + stage * BYTES, KEYS ? &call.q : &call.k, full, (KEYS ? s.query_start : s.key_start) + row, h, s.batch);
      if (KEYS) load_numbers<OWN>(stats, call, s, h, row, LSE, full);
      if (!LSE) load5(base + AT_X + stage * BYTES, &call.dout, blocks.fill(BYTES, X), s.query_start + row, h, s.batch);
    });
    tiles.advance();
  }
  tiles.finish();
}

template <bool KEYS> DEV const TensorMap* result(const BackwardArgs& c) { return !LSE ? &c.dv : KEYS ? &c.dk : &c.dq; }
template <bool KEYS> DEV const Elements& result_rows(const BackwardArgs& c) {
  return !LSE ? c.dv_rows : KEYS ? c.dk_rows : c.dq_rows;
}

// Writes the result of each tile.
template <bool KEYS> DEV void store(u32 base, const BackwardArgs& call) {
  store_tiles<KEYS, OUT_FULL>(Tiles<KEYS>(base, 0), call, [&](const Work& w, const Own& s, u32 stage) {
    const int first = (KEYS ? s.key_start : s.query_start) + w.block * OWN;
    store5(result<KEYS>(call), base + stage * BYTES, first, w.head, s.batch);
  });
}

// out += weights·x, a tile of 128 rows; where tiles descend, the last 64 of these come first.
DEV void issue_weights(float (&out)[D / 2], u32 (&weights)[OWN / 4], u32 x) {
  const u64 rows = mn_major(x, OWN * 128);
  pin(weights), mma_begin();
  UNROLL(n, OWN / 16) {
    const int i = TURNS ? (n + OWN / 32) % (OWN / 16) : n;
    Mma<D>::rs<MN_MAJOR>(out, weights + 4 * i, rows + i * MN_STEP, 1);
  }
  mma_commit();
}
// Walks the blocks of a tile, of whose rows a warpgroup has those at `own`; `row`: a thread's first.
template <bool KEYS> DEV void walk(float (&out)[D / 2], Blocks& blocks, const BackwardArgs& call, const Work& w, const Own& s, u32 own, int row) {
  const u32 base = blocks.base, column = 2 * (lane_id() & 3);
  const int group = threadIdx.x / 128 - 1, each = s.heads / s.key_heads;
  auto my_turn = [&] { named_sync(3 + group, 256); };
  auto your_turn = [&] { named_arrive(4 - group, 256); };
  const PairRows<KEYS> rows(call, w, s, row);
  float p[OWN / 2];
  u32 weights[OWN / 4], before = 0;
  bool any = false, cut = false;  // cut: with SPANS by keys, whether a block hides a pair
  // Block n, of the query head h.
  auto step = [&](int h, int n, auto masked) {
    constexpr bool MASKED = decltype(masked)::value;
    const u32 stage = blocks.stage(), stats = base + AT_STATS + stage * STATS + 4 * column;
    u32 shown[2] = {~0u, ~0u};  // of 64 queries each
    if (SPANS && KEYS && MASKED && cut) {
      UNROLL(half, 2) shown[half] = visible(call.spans, call.shape, s, n * OWN + half * 64 + column, row);
    }
    blocks.wait_full(Y);
    // Rows behind the sequence; of packed ones the last block is masked.
    const int end = (KEYS ? s.queries : s.keys) - n * OWN;
    const bool is_cut = LENGTHS && (!PACKED || MASKED) && end < OWN;
    if (is_cut) zero_rows<OWN>(end, 1 + group, base + AT_Y + stage * BYTES);
    issue_shared<OWN, D, OWN, OWN>(p, k_major(opaque(own)), k_major(base + AT_Y + stage * BYTES));
    if (any) your_turn();
    mma_wait<1>(), pin(weights);  // the product of the block before: its operand's registers are free
    if (any) blocks.release(before, LSE ? Y : X);
    // By keys packed 8 columns at a time: with D = 64 0.98 of the time.
    auto pack_columns = [&](int j, const float (&)[4]) {
      UNROLL(r, 2) weights[2 * j + r] = pack(p[4 * j + 2 * r], p[4 * j + 2 * r + 1]);
    };
    if constexpr (KEYS && LSE && D == 128) {
      const Kept<OWN / 2> kept(stats);  // while scores are computed: 0.92 of the time, with D = 64 1.09
      mma_wait<0>(), pin(p);
      rows.template weigh<MASKED>(p, h, n * OWN, kept, shown, pack_columns);
    } else if constexpr (KEYS && LSE) {
      mma_wait<0>(), pin(p);
      rows.template weigh<MASKED>(p, h, n * OWN, stats, shown, pack_columns);
    } else {
      mma_wait<0>(), pin(p);
      rows.template weigh<MASKED>(p, h, n * OWN, stats, shown, [](int, const float (&)[4]) {});
      pack_all(p, weights);
    }
    if (!LSE) blocks.release(stage, Y);
    if (!LSE) blocks.wait_full(X);
    if (!LSE && is_cut) zero_rows<OWN>(end, 1 + group, base + AT_X + stage * BYTES);
    my_turn();
    issue_weights(out, weights, base + AT_X + stage * BYTES);
    before = stage, any = true;
    blocks.advance();
  };
  const Range range = range_of<KEYS>(call, w, s);
  if (TURNS) {
    NO_UNROLL for (Descent<2> at = {range.end - 1, 0}; at.block >= range.begin; at.next(range, each)) {
      // With a full mask no block hides a pair, so there is no second loop, which takes time.
      bool sees_all = (D == 64 && !WINDOW && !PACKED) || (at.block >= range.open && at.block < range.closed);
      if (SPANS) {
        blocks.wait_full(Y);
        const u32 visit = uniform<true>(load_word(base + VISIT + 4 * blocks.stage()));
        NO_UNROLL while (at.block != number_of(visit)) at.next(range, each);  // blocks that are left out
        cut = visit & CUT, sees_all = !cut;
      }
      // With options a mask is little beside the rest, and a second loop twice the time to compile.
      if (!OPTIONS && sees_all) step(w.head * each + at.head, at.block, Is<false>());
      else step(w.head * each + at.head, at.block, Is<true>());
    }
  }
  else NO_UNROLL for (int h = KEYS ? w.head * each : w.head, heads = KEYS ? each : 1; heads; h++, heads--) {
    NO_UNROLL for (int n = range.begin; n < range.end; n++) {
      bool sees_all = n >= range.open && n < range.closed;
      if (SPANS && KEYS) {
        blocks.wait_full(Y);
        const u32 visit = uniform<true>(load_word(base + VISIT + 4 * blocks.stage()));
        n = number_of(visit), cut = visit & CUT, sees_all = !cut;
      }
      // With options a mask is little beside the rest, and a second loop twice the time to compile.
      if (!OPTIONS && sees_all) step(h, n, Is<false>());
      else step(h, n, Is<true>());
    }
  }
  if (any) your_turn();
  mma_wait<0>(), pin(out);
  if (any) blocks.release(before, LSE ? Y : X);
}
template <bool KEYS> DEV void consume(u32 base, const BackwardArgs& call) {
  const int group = threadIdx.x / 128 - 1;
  Blocks blocks = {base, 0};
  if (group == 1) named_arrive(3, 256);  // group 0 begins
  Work w;
  Own s;
  NO_UNROLL for (Tiles<KEYS> tiles = {base, 0}; tiles.template take<true>(call, w, s); tiles.advance()) {
    u32 own = base + tiles.stage() * BYTES + group * 64 * 128;
    if (D == 128 || !WINDOW) own = __shfl_sync(~0u, own, 0);  // uniform: fewer instructions, but with D = 64 more time
    const int row = w.block * OWN + group * 64 + own_row();
    float out[D / 2];
    clear(out);
    walk<KEYS>(out, blocks, call, w, s, own, row);
    auto ready = [&] { named_sync(1 + group, 128); };  // what this warpgroup owns is no longer read
    const Result result = {out, LSE ? s.scale : 1, result_rows<KEYS>(call), own};
    put_results<OF_WEIGHTS, KEYS>(call, w, s, row, ready, result);
    warp_arrive(base + OUT_FULL + 8 * tiles.stage());
  }
}

template <bool KEYS> DEV void run(const BackwardArgs& call) {
  const u32 base = shared_panels();
  make_barriers([&] {
    prefetch(&call.q), prefetch(&call.k), prefetch(result<KEYS>(call));
    if (!LSE) prefetch(&call.dout);
    Tiles<KEYS>::init(base, 1, 1);
    Blocks::init(base, 1, 8 * ARRIVALS, Y), Blocks::init(base, 1, 8 * ARRIVALS, X);
    for (int i = 0; i < 2; i++) barrier_init(base + OUT_FULL + 8 * i, 8 * ARRIVALS);
  });
  divide_roles<56, 224>([&] { produce<KEYS>(base, call); }, [&] { store<KEYS>(base, call); }, [&] { consume<KEYS>(base, call); });
}
}
#if RESULTS == 0
CHECK_SHARED(keys, weights_pass::ALL);
CHECK_SHARED(queries, weights_pass::ALL);
KERNEL(keys, BackwardArgs call, 384, 1) {
  weights_pass::run<true>(call);
}
KERNEL(queries, BackwardArgs call, 384, 1) {
  weights_pass::run<false>(call);
}
#else
CHECK_SHARED(values, weights_pass::ALL);
KERNEL(values, BackwardArgs call, 384, 1) {
  weights_pass::run<true>(call);
}
#endif
#endif
