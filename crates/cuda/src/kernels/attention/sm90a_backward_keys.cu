// ---- dk, dv ----
#if RESULTS && OPTIONS != 2
namespace keys_pass {
constexpr bool DV = RESULTS == 1;  // or dk alone: no bit of it is another
constexpr int KEYS = OWN, ROWS = 64;
constexpr u32 KV_BYTES = KEYS * D * 2, Q_BYTES = ROWS * D * 2;
// k and v of two tiles: dv and dk of a tile take their places. q and dout of query blocks, in stages.
constexpr u32 AT_V = KV_BYTES, PAIR = 2 * KV_BYTES, AT_Q = 2 * PAIR, AT_DO = AT_Q + STAGES * Q_BYTES, AT_STATS = AT_DO + STAGES * Q_BYTES;
using TileRing = Ring<2, AT_STATS + STAGES * 2 * ROWS * 4, 1, true>;  // of k and v
constexpr u32 OUT_FULL = TileRing::END;
using Blocks = Ring<STAGES, OUT_FULL + 16>;  // of q, dout, lse2 and delta
using Tiles = WorkTiles<2, true, TileRing, Blocks::END>;
constexpr u32 VISIT = Blocks::END + 8;
CHECK_SHARED(keys, 1024 + VISIT + (SPANS ? 16 : 0));  // 1024 to align all
DEV void produce(u32 base, const BackwardArgs& call) {
  Tiles tiles = {base, 1};
  Blocks blocks = {base, 1};
  NO_UNROLL for (int t = blockIdx.x; t < call.tiles; t = claim_tile(call.counter, call.tiles)) {
    const Work w = Tiles::work<false>(t, call);
    if (w.block < 0) continue;
    const Own s = sequence_of<false>(call, w.batch);
    const Range range = query_blocks<ROWS / 64>(call.spans, s, w.block, w.task);
    const u32 k = base + tiles.stage() * PAIR, loaded = tiles.announce(t);
    expect_bytes(loaded, PAIR);
    load5(k, &call.k, loaded, s.key_start + w.block * KEYS, w.head, s.batch);
    load5(k + AT_V, &call.v, loaded, s.key_start + w.block * KEYS, w.head, s.batch);
    feed_blocks<ROWS, true, VISIT>(blocks, call, w, s, range, [&](int h, int row, u32 stage, u32 full) {
      const u32 stats = base + AT_STATS + stage * 2 * ROWS * 4;
      expect_bytes(full, 2 * Q_BYTES + 2 * ROWS * 4);
      load5(base + AT_Q + stage * Q_BYTES, &call.q, full, s.query_start + row, h, s.batch);
      load5(base + AT_DO + stage * Q_BYTES, &call.dout, full, s.query_start + row, h, s.batch);
      load_numbers<ROWS>(stats, call, s, h, row, true, full);
    });
    tiles.advance();
  }
  tiles.finish();
}
DEV void store(u32 base, const BackwardArgs& call) {
  Tiles tiles = {base, 0};
  store_tiles<true, OUT_FULL>(tiles, call, [&](const Work& w, const Own& s, u32 stage) {
    const u32 from = base + stage * PAIR;
    store5(&call.dk, from, s.key_start + w.block * KEYS, w.head, s.batch);
    if (DV) store5(&call.dv, from + AT_V, s.key_start + w.block * KEYS, w.head, s.batch);
  });
}

// Walks the queries of a tile, of whose keys a warpgroup has those at `own`; `row`: a thread's first.
DEV void walk(float (&dk)[D / 2], float (&dv)[D / 2], Blocks& blocks, const BackwardArgs& call, const Work& w, const Own& s, u32 own, int row) {
  const u32 base = blocks.base, column = 2 * (lane_id() & 3);
  const int group = threadIdx.x / 128 - 1, each = s.heads / s.key_heads;
  const PairRows<true> rows(call, w, s, row);
  u32 pp[ROWS / 4], dsp[ROWS / 4];
  bool any = false, cut = false;  // cut: with SPANS, whether a block hides a pair
  auto step = [&](int h, int i, auto masked) {
    constexpr bool MASKED = decltype(masked)::value;
    float p[ROWS / 2], ds[ROWS / 2];
    const u32 k = opaque(own), v = k + AT_V;
    const u32 stage = blocks.stage(), q = base + AT_Q + stage * Q_BYTES, dout = base + AT_DO + stage * Q_BYTES;
    const u32 stats = base + AT_STATS + stage * 2 * ROWS * 4 + 4 * column;
    // Before there are scores: one register for the pairs of a thread. One step for all blocks: two spill.
    const u32 shown[1] = {SPANS && cut ? visible(call.spans, call.shape, s, i * ROWS + column, opaque(row)) : ~0u};
    blocks.wait_full();
    // Of packed sequences the last block is masked.
    if (LENGTHS && (!PACKED || MASKED) && s.queries - i * ROWS < ROWS) zero_rows<ROWS>(s.queries - i * ROWS, 1 + group, q, dout);
    issue_shared<ROWS, D, KEYS, ROWS>(p, k_major(k), k_major(q));
    mma_wait<1>(), pin(dsp);  // the products of the block before: their operands' registers are free
    if (DV) pin(pp);
    if (any) blocks.release(blocks.before());
    issue_shared<ROWS, D, KEYS, ROWS>(ds, k_major(v), k_major(dout));
    mma_wait<1>(), pin(p);
    rows.weigh<MASKED>(p, w.head * each + h, i * ROWS, stats, shown, [&](int j, const float (&slope)[4]) {
      if (DV) pp[2 * j] = pack(p[4 * j], p[4 * j + 1]), pp[2 * j + 1] = pack(p[4 * j + 2], p[4 * j + 3]);
      UNROLL(e, OPTIONS ? 4 : 0) p[4 * j + e] *= slope[e];
    });
    if (DV) issue_registers<ROWS, D>(dv, pp, mn_major(dout, ROWS * 128));
    mma_wait<DV>(), pin(ds);  // dP; dv runs under what follows
    differ(p, ds, dsp, [&](int j) { return load_pair(stats + ROWS * 4 + 32 * j); });
    issue_registers<ROWS, D>(dk, dsp, mn_major(q, ROWS * 128));
    any = true;
    blocks.advance();
  };
  const Range range = query_blocks<ROWS / 64>(call.spans, s, w.block, w.task);
  Descent<1> at = {range.end - 1, 0};
#if WINDOW == 2
  NO_UNROLL for (; at.block >= range.begin; at.next(range, each)) {
    blocks.wait_full();
    const u32 visit = uniform<true>(load_word(base + VISIT + 4 * blocks.stage()));
    NO_UNROLL while (at.block != number_of(visit)) at.next(range, each);  // blocks that are left out
    cut = visit & CUT;
    step(at.head, at.block, Is<true>());
  }
#else
  const Range pairs = by_pairs(range);
#if WINDOW
  NO_UNROLL for (; at.block >= pairs.closed; at.next(range, each)) step(at.head, at.block, Is<true>());
#endif
  NO_UNROLL for (; at.block >= pairs.open; at.next(range, each)) step(at.head, at.block, Is<false>());
  NO_UNROLL for (; at.block >= range.begin; at.next(range, each)) step(at.head, at.block, Is<true>());
#endif
  mma_wait<0>(), pin(dk);
  if (DV) pin(dv);
  if (any) blocks.release(blocks.before());
}
DEV void consume(u32 base, const BackwardArgs& call) {
  const int group = threadIdx.x / 128 - 1;
  Blocks blocks = {base, 0};
  Work w;
  Own s;
  NO_UNROLL for (Tiles tiles = {base, 0}; tiles.take<true>(call, w, s); tiles.advance()) {
    u32 own = base + tiles.stage() * PAIR + group * 64 * 128;
    if (D == 64) own = __shfl_sync(~0u, own, 0);  // uniform: fewer instructions
    const int row = w.block * KEYS + group * 64 + own_row();
    float dk[D / 2], dv[D / 2];
    clear(dk), clear(dv);
    walk(dk, dv, blocks, call, w, s, own, row);
    auto ready = [&] { named_sync(1 + group, 128); };  // k and v of this warpgroup are no longer read
    const Result of_k = {dk, s.scale, call.dk_rows, own};
    if constexpr (DV) put_results<OF_KEYS, true>(call, w, s, row, ready, of_k, Result{dv, 1, call.dv_rows, own + AT_V});
    else put_results<OF_KEYS, true>(call, w, s, row, ready, of_k);
    warp_arrive(base + OUT_FULL + 8 * tiles.stage());
  }
}
}
KERNEL(keys, BackwardArgs call, 384, 1) {
  using namespace keys_pass;
  const u32 base = shared_panels();
  make_barriers([&] {
    prefetch(&call.q), prefetch(&call.k), prefetch(&call.v), prefetch(&call.dout), prefetch(&call.dk);
    if (DV) prefetch(&call.dv);
    Tiles::init(base, 1, 1), Blocks::init(base, 1, 8 * ARRIVALS);
    for (int i = 0; i < 2; i++) barrier_init(base + OUT_FULL + 8 * i, 8 * ARRIVALS);
  });
  // With SPANS whoever loads looks into tables, which takes registers.
  divide_roles<SPANS ? 40 : 24, SPANS ? 232 : 240>([&] { produce(base, call); }, [&] { store(base, call); }, [&] { consume(base, call); });
}
#endif
