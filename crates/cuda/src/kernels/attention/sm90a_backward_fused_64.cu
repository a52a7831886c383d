// ---- dq, dk and dv in one pass by keys, 64 columns ----
// Two warpgroups have 64 keys of a tile each, and compute all but dq'. While they weigh a block, dP of it and dk of
// the one before are computed. A third warpgroup multiplies dS of both by k, and hands dq' to the threads that add
// it.
#if FUSES && D == 64
namespace fused_pass {
constexpr int DQ_GROUP = 1;  // the warpgroup that computes dq'; those of keys follow

// Place of a tile's results; `any`: there is a tile whose results are not stored.
struct Results {
  int block, head, batch;
  u32 stage, phase;
  bool any;
};
// Copies the results of a tile to their tensors, and leaves its places to the next tile but one.
DEV void store(u32 base, const BackwardArgs& call, Results& x) {
  if (!x.any) return;
  x.any = false;
  wait(base + OUT_FULL + 8 * x.stage, x.phase);
  const u32 from = base + x.stage * PAIR;
  if (call.dk_rows.data) store5(&call.dk, from, x.block * KEYS, x.head, x.batch);
  if (call.dv_rows.data) store5(&call.dv, from + AT_V, x.block * KEYS, x.head, x.batch);
  store_commit(), store_wait_read();
  arrive(TileRing(base, 0).empty_of(x.stage));
}
DEV void produce(u32 base, const BackwardArgs& call) {
  Tiles tiles = {base, 1};
  Blocks blocks = {base, 1};
  Results before = {};
  NO_UNROLL for (int t; (t = claim_in_order(call)) < call.tiles;) {
    const Work w = Tiles::work<false>(t, call);
    const Own s = sequence_of<false>(call, w.batch);
    const Range range = walked(call, w, s);
    const int each = s.heads / s.key_heads;
    const u32 k = base + tiles.stage() * PAIR, loaded = tiles.announce(t);
    expect_bytes(loaded, PAIR);
    load5(k, &call.k, loaded, w.block * KEYS, w.head, s.batch);
    load5(k + AT_V, &call.v, loaded, w.block * KEYS, w.head, s.batch);
    int ahead = STAGES + 1;
    NO_UNROLL for (Descent<1> at = {range.end - 1, 0}; at.block >= range.begin; at.next(range, each)) {
      load_queries(blocks, call, s, w.head * each + at.head, at.block * ROWS);
      blocks.advance();
      if (--ahead == 0) store(base, call, before);  // this tile's first block has been read: the one before is done
    }
    store(base, call, before);
    before = {w.block, w.head, s.batch, tiles.stage(), tiles.phase() ^ 1, true};
    tiles.advance();
  }
  store(base, call, before);
  store_wait();
  tiles.finish();
}

// ---- products ----
// Descriptors of tiles of one panel: the low word of one, and that of a place so many bytes behind.
DEV u32 low_word(u32 address) { return address >> 4 | 1 << 16; }
DEV u64 tile_at(u32 low, u32 bytes) {
  u64 x;
  asm("mov.b64 %0, {%1, %2};" : "=l"(x) : "r"(low + bytes / 16), "n"(1 << 30 | 1024 >> 4));
  return x;
}
// Sᵀ or dPᵀ: a·bᵀ over the columns.
DEV void issue_pairs(float (&x)[ROWS / 2], u32 a, u32 b) {
  begin(x), mma_begin();
  UNROLL(i, D / 16) Mma<ROWS>::ss<K_MAJOR, K_MAJOR>(x, tile_at(a, 32 * i), tile_at(b, 32 * i), i > 0);
  mma_commit();
}
// dv += Pᵀ·dout, dk += dSᵀ·q.
DEV void issue_weights(float (&x)[D / 2], u32 (&a)[ROWS / 4], u32 b) {
  pin(a), mma_begin();
  UNROLL(i, ROWS / 16) Mma<D>::rs<MN_MAJOR>(x, a + 4 * i, tile_at(b, 2048 * i), 1);
  mma_commit();
}
typedef float2 Stats[ROWS / 8];  // lse2 or delta of a thread's columns
DEV void load_stats(Stats& x, u32 at) { UNROLL(j, ROWS / 8) x[j] = load_pair(at + 32 * j); }
// Walks the queries of a tile, whose k lies at `k`: a step takes dS of a block, and P of the next one. Across the edge
// of the loop dP is in flight, for which a step then waits with all else: what crosses an edge is serialised by ptxas
// (C7514) where a wait leaves other products.
DEV void walk(float (&dk)[D / 2], float (&dv)[D / 2], Blocks& blocks, Weighted& weighted, const BackwardArgs& call, const Work& w, const Own& s, u32 k, u32 group, int row) {
  const u32 base = blocks.base, column = 2 * (lane_id() & 3), own = group * 64 * 128;
  const float c = exponent_unit(call, s);
  const Range range = walked(call, w, s);
  const Range pairs = by_pairs(range);
  const int each = s.heads / s.key_heads;
  int left = (range.end - range.begin) * each;
  Descent<1> at = {range.end - 1, 0};
  float p[ROWS / 2], ds[ROWS / 2];
  u32 pp[ROWS / 4], dsp[ROWS / 4];
  Stats lse2, delta;
  const u32 own_k = low_word(k + own), own_v = low_word(k + AT_V + own), at_q = low_word(base + AT_Q), at_dout = low_word(base + AT_DO);
  auto place = [&](u32 n, u32 first) { return first + n % STAGES * (Q_BYTES / 16); };
  auto stats = [&](u32 n) { return base + AT_STATS + n % STAGES * STATS_BYTES + 4 * column; };
  // Waits for a block ahead: while others are computed, so that none waits for the barrier.
  auto wait_ahead = [&](u32 n) {
    Blocks ahead = blocks;
    ahead.at = n;
    ahead.wait_full();
  };
  auto lse2_of = [&](int j) { return lse2[j]; };
  auto delta_of = [&](int j) { return delta[j]; };
  blocks.wait_full();
  load_stats(lse2, stats(blocks.at));
  issue_pairs(p, own_k, place(blocks.at, at_q));
  issue_pairs(ds, own_v, place(blocks.at, at_dout));
  mma_wait<1>(), pin(p);
  weigh<true>(p, pp, call, s, c, row, at.block * ROWS + column, lse2_of);
  load_stats(delta, stats(blocks.at) + ROWS * 4);
  weighted.wait_empty();
  if (left > 1) wait_ahead(blocks.at + 1);
  auto step = [&](auto masked) {
    const u32 n = blocks.at;
    blocks.advance();
    mma_wait<0>(), pin(ds);
    issue_weights(dv, pp, place(n, at_dout));
    differ(p, ds, dsp, delta_of), pin(dsp);
    issue_pairs(p, own_k, place(n + 1, at_q));
    issue_weights(dk, dsp, place(n, at_q));
    put_ds(dsp, base + AT_DS + weighted.stage() * DS_BYTES);
    warp_arrive(weighted.full());
    load_stats(lse2, stats(n + 1));
    issue_pairs(ds, own_v, place(n + 1, at_dout));
    if (--left > 1) wait_ahead(n + 2);
    mma_wait<1>(), pin(p), pin(pp), pin(dsp);
    weigh<decltype(masked)::value>(p, pp, call, s, c, row, at.block * ROWS + column, lse2_of);
    weighted.advance();
    load_stats(delta, stats(n + 1) + ROWS * 4);
    weighted.wait_empty();
    blocks.release(n % STAGES);
  };
  at.next(range, each);
  NO_UNROLL for (; at.block >= pairs.closed; at.next(range, each)) step(Is<true>());
  NO_UNROLL for (; at.block >= pairs.open; at.next(range, each)) step(Is<false>());
  NO_UNROLL for (; at.block >= range.begin; at.next(range, each)) step(Is<true>());
  const u32 n = blocks.at, last = weighted.stage(), parity = weighted.phase() ^ 1;
  blocks.advance();
  mma_wait<0>(), pin(ds);
  issue_weights(dv, pp, place(n, at_dout));
  differ(p, ds, dsp, delta_of), pin(dsp);
  issue_weights(dk, dsp, place(n, at_q));
  put_ds(dsp, base + AT_DS + last * DS_BYTES);
  warp_arrive(weighted.full());
  weighted.advance();
  mma_wait<0>(), pin(dk), pin(dv), pin(dsp), pin(pp);
  blocks.release(n % STAGES);
  wait(weighted.empty_of(last), parity);  // k is no longer read
}
DEV void consume(u32 base, const BackwardArgs& call) {
  const u32 group = __shfl_sync(~0u, threadIdx.x / 128 - (DQ_GROUP + 1), 0);
  Blocks blocks = {base, 0};
  Weighted weighted = {base, 1};
  Work w;
  Own s;
  NO_UNROLL for (Tiles tiles = {base, 0}; tiles.take<true>(call, w, s); tiles.advance()) {
    const u32 own = group * 64 * 128, k = base + tiles.stage() * PAIR;
    const int row = w.block * KEYS + group * 64 + own_row();
    const Range range = walked(call, w, s);
    float dk[D / 2], dv[D / 2];
    clear(dk), clear(dv);
    if (range.begin < range.end) walk(dk, dv, blocks, weighted, call, w, s, k, group, row);
    put_results<OF_KEYS, true>(call, w, s, row, [] {}, Result{dk, s.scale, call.dk_rows, k + own}, Result{dv, 1, call.dv_rows, k + AT_V + own});
    warp_arrive(base + OUT_FULL + 8 * tiles.stage());
  }
}
// dq' of each block of queries: to the place from which `add` takes it, four numbers of each thread side by side.
DEV void multiply_dq(u32 base, const BackwardArgs& call) {
  Weighted weighted = {base, 0};
  Work w;
  Own s;
  u32 n = 0;  // blocks before
  NO_UNROLL for (Tiles tiles = {base, 0}; tiles.take<true>(call, w, s); tiles.advance()) {
    const Range range = walked(call, w, s);
    const u32 k = low_word(base + tiles.stage() * PAIR);
    NO_UNROLL for (int left = (range.end - range.begin) * (s.heads / s.key_heads); left > 0; left--, n++) {
      float dq[D / 2];
      weighted.wait_full();
      const u32 ds = low_word(base + AT_DS + weighted.stage() * DS_BYTES);
      begin(dq), mma_begin();
      UNROLL(i, KEYS / 16) Mma<D>::ss<MN_MAJOR, MN_MAJOR>(dq, tile_at(ds, 2048 * i), tile_at(k, 2048 * i), i > 0);
      mma_commit();
      mma_wait<0>(), pin(dq);
      weighted.release(), weighted.advance();
      const u32 place = n % DQ_PLACES, to = base + AT_DQ + place * DQ_BYTES + threadIdx.x % 128 * 16;
      wait(base + DQ_EMPTY + 8 * place, (n / DQ_PLACES & 1) ^ 1);
      UNROLL(j, D / 8) store_vector(to + j * 2048, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
      proxy_fence();
      warp_arrive(base + DQ_FULL + 8 * place);
    }
    tiles.release();
  }
}
}
KERNEL(fused, BackwardArgs call, 512, 1) {
  using namespace fused_pass;
  const u32 base = __shfl_sync(~0u, shared_panels(), 0);
  make_barriers([&] {
    prefetch(&call.q), prefetch(&call.k), prefetch(&call.v), prefetch(&call.dout);
    // Arrivals: the thread that stores a tile's results, those that add its dq', the warps that compute it.
    Tiles::init(base, 1, 1 + ADDERS + 4 * ARRIVALS);
    Blocks::init(base, 1, 8 * ARRIVALS), Weighted::init(base, 8 * ARRIVALS, 4 * ARRIVALS);
    for (int i = 0; i < 2; i++) barrier_init(base + OUT_FULL + 8 * i, 8 * ARRIVALS);
    for (u32 i = 0; i < DQ_PLACES; i++) barrier_init(base + DQ_FULL + 8 * i, 4 * ARRIVALS), barrier_init(base + DQ_EMPTY + 8 * i, 1);
  });
  // 32 + 64 + 2 · 208 are all registers of 128 threads; fewer than 64 for dq' make ptxas ignore the division.
  if (threadIdx.x < 128 * DQ_GROUP) {
    registers_down<32>();
    if (threadIdx.x == 0) produce(base, call);
    else if (threadIdx.x % 32 == 0) add(base, call, threadIdx.x / 32 - 1);
  } else if (threadIdx.x < 128 * (DQ_GROUP + 1)) {
    registers_down<64>(), multiply_dq(base, call);
  } else {
    registers_up<208>(), consume(base, call);
  }
}
#endif
