// ---- dq, dk and dv in one pass by keys, 128 columns ----
#if FUSES && D == 128
namespace fused_pass {
DEV void produce(u32 base, const BackwardArgs& call) {
  Tiles tiles = {base, 1};
  Values values = {base, 1};
  Blocks blocks = {base, 1};
  NO_UNROLL for (int t; (t = claim_in_order(call)) < call.tiles;) {
    const Work w = Tiles::work<false>(t, call);
    const Own s = sequence_of<false>(call, w.batch);
    const Range range = walked(call, w, s);
    const int each = s.heads / s.key_heads;
    auto load = [&] {
      load5(base + AT_V, &call.v, values.fill(KV_BYTES), w.block * KEYS, w.head, s.batch);
      const u32 loaded = tiles.announce(t);
      expect_bytes(loaded, KV_BYTES);
      load5(base, &call.k, loaded, w.block * KEYS, w.head, s.batch);
    };
    // Two blocks of queries come first: k and v of the tile before are read until its end.
    int ahead = 2;
    NO_UNROLL for (Descent<1> at = {range.end - 1, 0}; at.block >= range.begin; at.next(range, each)) {
      load_queries(blocks, call, s, w.head * each + at.head, at.block * ROWS);
      blocks.advance();
      if (--ahead == 0) load();
    }
    if (ahead > 0) load();
    tiles.advance(), values.advance();
  }
  tiles.finish();
}
DEV void store(u32 base, const BackwardArgs& call) {
  u32 parity = 0;
  Work w;
  Own s;
  NO_UNROLL for (Tiles tiles(base, 0); tiles.take<false>(call, w, s); tiles.advance(), parity ^= 1) {
    arrive(tiles.empty());
    wait(base + OUT_FULL, parity);
    if (call.dk_rows.data) store5(&call.dk, base + AT_DS, w.block * KEYS, w.head, s.batch);
    if (call.dv_rows.data) store5(&call.dv, base + AT_DQ, w.block * KEYS, w.head, s.batch);
    store_commit(), store_wait_read();
    arrive(base + OUT_EMPTY);
  }
  store_wait();
}

// ---- products ----
// dq' of a block of queries, those columns of a warpgroup.
DEV void issue_dq(float (&dq)[COLUMNS / 2], u32 ds, u32 k) {
  const u32 own = k + own_group() * (KEYS * 128);
  begin(dq), mma_begin();
  UNROLL(i, KEYS / 16)
    Mma<COLUMNS>::template ss<MN_MAJOR, MN_MAJOR>(dq, mn_major(ds + i * 2048, KEYS * 128), mn_major(own + i * 2048, KEYS * 128), i > 0);
  mma_commit();
}
// dk += dS·q, or dk = dS·q: both from shared memory, so that no register waits for the product.
DEV void issue_dk(float (&dk)[D / 2], u32 ds, u32 q, int add) {
  mma_begin();
  UNROLL(i, ROWS / 16)
    Mma<D>::ss<K_MAJOR, MN_MAJOR>(dk, k_major(ds + own_group() * 64 * 128 + i * 32), mn_major(q + i * 2048, ROWS * 128), i > 0 ? 1 : add);
  mma_commit();
}
// dq' to the place from which `add` takes it, as threads have it: four numbers of each thread side by side.
DEV void put_dq(const float (&dq)[COLUMNS / 2], u32 base, u32 parity) {
  wait(base + DQ_EMPTY, parity);
  const u32 to = base + AT_DQ + opaque(threadIdx.x - 128) * 16;
  UNROLL(j, COLUMNS / 8) store_vector(to + j * 4096, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  proxy_fence();
  warp_arrive(base + DQ_FULL + 8 * (parity ^ 1));
}
// dv += Pᵀ·dout of some of the four times 16 queries of a block.
template <int FROM, int COUNT> DEV void issue_dv(float (&dv)[D / 2], u32 (&pp)[ROWS / 4], u32 dout) {
  pin(pp), mma_begin();
  UNROLL(i, COUNT) Mma<D>::rs<MN_MAJOR>(dv, pp + 4 * (FROM + i), mn_major(dout + (FROM + i) * 2048, ROWS * 128), 1);
  mma_commit();
}
// Walks the queries of a tile; `n`: the blocks of queries that were walked before. The products of dS of a block run
// under the exponentials of the next one.
DEV void walk(float (&dk)[D / 2], float (&dv)[D / 2], Blocks& blocks, const Values& values, u32& n, const BackwardArgs& call, const Work& w, const Own& s, u32 keys, int row) {
  const u32 column = 2 * (lane_id() & 3);
  const float c = exponent_unit(call, s);
  u32 pp[ROWS / 4];
  int done = 0;
  // dq' and dk of the block before. Of a first block they are computed of what lies there, and left.
  auto behind = [&](float (&dq)[COLUMNS / 2], u32 base) {
    const u32 ds = base + AT_DS + (~n & 1) * DS_BYTES;
    if (done) wait(base + DS_FULL, ~n & 1);
    issue_dq(dq, ds, opaque(keys));
    issue_dk(dk, ds, base + AT_Q + blocks.before() * Q_BYTES, done > 1);
  };
  auto step = [&](int i, auto masked) {
    float p[ROWS / 2], ds[ROWS / 2], dq[COLUMNS / 2];
    u32 dsp[ROWS / 4];
    const u32 base = opaque(blocks.base), own = own_group() * 64 * 128;  // not computed beforehand: that spills
    const u32 stage = blocks.stage(), dout = base + AT_DO + stage * Q_BYTES, stats = base + AT_STATS + stage * STATS_BYTES + 4 * column;
    blocks.wait_full();
    begin(p);
    issue_shared<ROWS, D, KEYS, ROWS>(p, opaque(keys) + own, base + AT_Q + stage * Q_BYTES);
    mma_wait<1>(), pin(pp);  // dv of the block before
    behind(dq, base);
    mma_wait<2>(), pin(p);
    weigh<decltype(masked)::value>(p, pp, call, s, c, row, i * ROWS + column, [&](int j) { return load_pair(stats + 32 * j); });
    issue_dv<0, 3>(dv, pp, dout);
    mma_wait<1>(), pin(dq);
    if (done) blocks.release(blocks.before()), put_dq(dq, base, n & 1);
    values.wait_full();
    begin(ds);
    issue_shared<ROWS, D, KEYS, ROWS>(ds, base + AT_V + own, dout);
    issue_dv<3, 1>(dv, pp, dout);  // runs under what follows
    mma_wait<1>(), pin(ds);
    differ(p, ds, dsp, [&](int j) { return load_pair(stats + ROWS * 4 + 32 * j); });
    wait(base + OUT_EMPTY, values.phase() ^ 1);
    put_ds(dsp, base + AT_DS + (n & 1) * DS_BYTES);
    warp_arrive(base + DS_FULL);
    done++, n++;
    blocks.advance();
  };
  const Range range = walked(call, w, s);
  const Range pairs = by_pairs(range);
  const int each = s.heads / s.key_heads;
  Descent<1> at = {range.end - 1, 0};
  NO_UNROLL for (; at.block >= pairs.closed; at.next(range, each)) step(at.block, Is<true>());
  NO_UNROLL for (; at.block >= pairs.open; at.next(range, each)) step(at.block, Is<false>());
  NO_UNROLL for (; at.block >= range.begin; at.next(range, each)) step(at.block, Is<true>());
  float dq[COLUMNS / 2];
  const u32 base = opaque(blocks.base);
  mma_wait<0>(), pin(dv);
  values.wait_full(), values.release();
  behind(dq, base);
  mma_wait<0>(), pin(dq), pin(dk);
  if (done) put_dq(dq, base, n & 1), blocks.release(blocks.before());
  else clear(dk);
}
DEV void consume(u32 base, const BackwardArgs& call) {
  Values values = {base, 0};
  Blocks blocks = {base, 0};
  Work w;
  Own s;
  u32 n = 0;
  NO_UNROLL for (Tiles tiles = {base, 0}; tiles.take<true>(call, w, s); tiles.advance()) {
    values.at = tiles.at;
    const u32 own = own_group() * 64 * 128;
    const int row = w.block * KEYS + own_group() * 64 + own_row();
    float dk[D / 2], dv[D / 2];
    clear(dk), clear(dv);
    walk(dk, dv, blocks, values, n, call, w, s, base + tiles.stage() * KV_BYTES, row);
    tiles.release();
    auto ready = [&] {
      named_sync(1, 256);  // dS is no longer read
      wait(base + OUT_EMPTY, values.phase() ^ 1), wait(base + DQ_EMPTY, ~n & 1);
    };
    put_results<OF_KEYS, true>(call, w, s, row, ready, Result{dk, s.scale, call.dk_rows, base + AT_DS + own}, Result{dv, 1, call.dv_rows, base + AT_DQ + own});
    warp_arrive(base + OUT_FULL);
  }
}
}
KERNEL(fused, BackwardArgs call, 384, 1) {
  using namespace fused_pass;
  const u32 base = shared_panels();
  make_barriers([&] {
    prefetch(&call.q), prefetch(&call.k), prefetch(&call.v), prefetch(&call.dout);
    Tiles::init(base, 1, 8 * ARRIVALS + 3), Values::init(base, 1, 8 * ARRIVALS), Blocks::init(base, 1, 8 * ARRIVALS);
    barrier_init(base + OUT_FULL, 8 * ARRIVALS), barrier_init(base + OUT_EMPTY, 1), barrier_init(base + DS_FULL, 8 * ARRIVALS);
    barrier_init(base + DQ_FULL, 8 * ARRIVALS), barrier_init(base + DQ_FULL + 8, 8 * ARRIVALS), barrier_init(base + DQ_EMPTY, 1);
  });
  auto feed = [&] {
    if (threadIdx.x == 0) produce(base, call);
    if (threadIdx.x == 32) store(base, call);
    if (threadIdx.x == 64 || threadIdx.x == 96) add(base, call, threadIdx.x / 32 & 1);
  };
  divide_roles<24, 240>(feed, [&] { consume(base, call); });
}
#endif
