// ---- dq, dk and dv in one pass by keys, 128 columns ----
#if FUSES && D == 128
namespace fused_pass {
DEV void produce(u32 base, const BackwardArgs& call) {
  Tiles tiles = {base, 1};
  Values values = {base, 1};
  Blocks blocks = {base, 1};
  Douts douts = {base, 1};
  const u64 policy = BOXED ? l2_policy(reads_bias_once(call.options)) : 0;
  // Of BOXED each comes as soon as its place is free: the bias, which lies farthest, first.
  auto load_block = [&](const Work& w, const Own& s, int h, int row) {
    if (BOXED) {
      const u32 to = base + AT_DS + blocks.stage() * DS_BYTES, full = blocks.fill(DS_BYTES, BIAS);
      UNROLL(i, 2)
        load_pairs(to + i * (DS_BYTES / 2), &call.bias, full, w.block * KEYS + 64 * i, row, bias_head(call.options, h), bias_batch(call.options, s.batch), policy);
    }
    load_queries(blocks, call, s, h, row);
    if (BOXED) load5(base + AT_DO + douts.stage() * Q_BYTES, &call.dout, douts.fill(Q_BYTES), row, h, s.batch), douts.advance();
    blocks.advance();
  };
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
      load_block(w, s, w.head * each + at.head, at.block * ROWS);
      if (--ahead == 0) load();
    }
    if (ahead > 0) load();
    tiles.advance(), values.advance();
  }
  tiles.finish();
}
// Copies dS of every block of queries of a tile to dbias.
DEV void store_bias(Blocks& blocks, const BackwardArgs& call, const Work& w, const Own& s) {
  const Range range = walked(call, w, s);
  const int each = s.heads / s.key_heads;
  NO_UNROLL for (Descent<1> at = {range.end - 1, 0}; at.block >= range.begin; at.next(range, each)) {
    const u32 stage = blocks.stage();
    wait(blocks.base + DS_FULL + 8 * stage, blocks.phase());
    UNROLL(i, 2)
      store_pairs(&call.dbias_boxes, blocks.base + AT_DS + stage * DS_BYTES + i * (DS_BYTES / 2), w.block * KEYS + 64 * i, at.block * ROWS, w.head * each + at.head, s.batch, l2_policy(true));
    store_commit(), store_wait_read();
    arrive(blocks.empty(BIAS));
    blocks.advance();
  }
}
DEV void store(u32 base, const BackwardArgs& call) {
  u32 parity = 0;
  Blocks blocks = {base, 0};
  Work w;
  Own s;
  NO_UNROLL for (Tiles tiles(base, 0); tiles.take<false>(call, w, s); tiles.advance(), parity ^= 1) {
    arrive(tiles.empty());
    if (BOXED && call.dbias.data) store_bias(blocks, call, w, s);
    wait(base + OUT_FULL, parity);
    if (!BOXED && call.dk_rows.data) store5(&call.dk, base + AT_DS, w.block * KEYS, w.head, s.batch);
    if (call.dv_rows.data) store5(&call.dv, base + AT_DQ, w.block * KEYS, w.head, s.batch);
    store_commit(), store_wait_read();
    arrive(base + OUT_EMPTY);
  }
  store_wait();
}

// ---- products ----
// dq' of a block of queries, those columns of a warpgroup.
DEV void issue_dq(float (&dq)[COLUMNS / 2], u32 ds, u32 k, int group) {
  const u64 x = BOXED ? k_major(ds) : mn_major(ds, KEYS * 128), y = mn_major(k + group * (KEYS * 128), KEYS * 128);
  begin(dq), mma_begin();
  UNROLL(i, KEYS / 16) {
    if constexpr (BOXED) Mma<COLUMNS>::template ss<K_MAJOR, MN_MAJOR>(dq, x + (i / 4 * (DS_BYTES / 2) + i % 4 * 32) / 16, y + i * MN_STEP, i > 0);
    else Mma<COLUMNS>::template ss<MN_MAJOR, MN_MAJOR>(dq, x + i * MN_STEP, y + i * MN_STEP, i > 0);
  }
  mma_commit();
}
// dk += dS·q, or dk = dS·q: both from shared memory, so that no register waits for the product.
DEV void issue_dk(float (&dk)[D / 2], u32 ds, u32 q, int group, int add) {
  mma_begin();
  const u32 own = ds + group * 64 * 128;
  const u64 x = BOXED ? mn_major(own, ROWS * 128) : k_major(own), y = mn_major(q, ROWS * 128);
  UNROLL(i, ROWS / 16) {
    if constexpr (BOXED) Mma<D>::ss<MN_MAJOR, MN_MAJOR>(dk, x + i * MN_STEP, y + i * MN_STEP, i > 0 ? 1 : add);
    else Mma<D>::ss<K_MAJOR, MN_MAJOR>(dk, x + i * K_STEP, y + i * MN_STEP, i > 0 ? 1 : add);
  }
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
// dSᵀ of the warp, packed, in place of its bias.
DEV void put_boxed(const u32 (&ds)[ROWS / 4], u32 to) {
  UNROLL(i, ROWS / 16) store_blocks_transposed(to + i * 2048, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
  proxy_fence();
}
// The block before is no longer read.
DEV void release_block(const Blocks& blocks) {
  blocks.release(blocks.before());
  if (BOXED) blocks.release(blocks.before(), BIAS);
}
// Waits for dout of block n.
DEV void wait_dout(u32 base, u32 n) {
  Douts douts = {base, 0};
  douts.at = n;
  douts.wait_full();
}
// dv += Pᵀ·dout of some of the four times 16 queries of a block.
template <int FROM, int COUNT> DEV void issue_dv(float (&dv)[D / 2], u32 (&pp)[ROWS / 4], u32 dout) {
  const u64 y = mn_major(dout, ROWS * 128);
  pin(pp), mma_begin();
  UNROLL(i, COUNT) Mma<D>::rs<MN_MAJOR>(dv, pp + 4 * (FROM + i), y + (FROM + i) * MN_STEP, 1);
  mma_commit();
}
// With BOXED dS lies in the stage of its block.
DEV u32 ds_place(u32 base, u32 stage, u32 n) { return base + AT_DS + (BOXED ? stage : n & 1) * DS_BYTES; }
DEV u32 ds_full(u32 base, u32 stage) { return base + DS_FULL + (BOXED ? 8 * stage : 0); }
// A thread's address of the first four 8×8 blocks, of 16 queries and 16 keys, that its warp has of a box.
DEV u32 own_blocks(u32 place) {
  const u32 warp = threadIdx.x / 32 % 4, row = lane_id() / 16 * 8 + lane_id() % 8;
  return place + own_group() * (DS_BYTES / 2) + swizzled(row, 2 * warp + lane_id() / 8 % 2);
}
// Walks the queries of a tile; `n`: the blocks of queries that were walked before. The products of dS of a block run
// under the exponentials of the next one.
DEV void walk(float (&dk)[D / 2], float (&dv)[D / 2], Blocks& blocks, const Values& values, u32& n, const BackwardArgs& call, const Work& w, const Own& s, u32 keys, int group, int row) {
  const u32 column = 2 * (lane_id() & 3);
  const float c = exponent_unit(call, s);
  u32 pp[ROWS / 4];
  int done = 0;
  // dq' and dk of the block before. Of a first block they are computed of what lies there, and left.
  auto behind = [&](float (&dq)[COLUMNS / 2], u32 base) {
    const u32 ds = ds_place(base, blocks.before(), ~n);
    // The phase of the stage before: with BOXED that of this one, unless it is the first.
    if (done) wait(ds_full(base, blocks.before()), BOXED ? blocks.phase() ^ (blocks.stage() == 0) : ~n & 1);
    issue_dq(dq, ds, opaque(keys), group);
    issue_dk(dk, ds, base + AT_Q + blocks.before() * Q_BYTES, group, done > 1);
  };
  auto step = [&](int i, auto masked) {
    float p[ROWS / 2], ds[ROWS / 2], dq[COLUMNS / 2];
    u32 dsp[ROWS / 4];
    const u32 base = opaque(blocks.base), own = group * 64 * 128;  // not computed beforehand: that spills
    const u32 stage = blocks.stage(), dout = base + AT_DO + (BOXED ? n % DOUTS : stage) * Q_BYTES, stats = base + AT_STATS + stage * STATS_BYTES + 4 * column;
    blocks.wait_full();
    begin(p);
    issue_shared<ROWS, D, KEYS, ROWS>(p, k_major(opaque(keys) + own), k_major(base + AT_Q + stage * Q_BYTES));
    mma_wait<1>(), pin(pp);  // dv of the block before
    if (BOXED && done) Douts(base, 0).release(~n % DOUTS);
    behind(dq, base);
    mma_wait<2>(), pin(p);
    const u32 boxed = own_blocks(ds_place(base, stage, n));
    if (BOXED) blocks.wait_full(BIAS);
    UNROLL(i, BOXED ? ROWS / 16 : 0) {
      u32 bias[4];
      load_blocks_transposed(boxed + i * 2048, bias);
      add_biases(p, 8 * i, bias, call.options.unit.over);
      __syncwarp();  // in this order: of all pairs at once, numbers spill
    }
    weigh<decltype(masked)::value>(p, pp, call, s, c, row, i * ROWS + column, [&](int j) { return load_pair(stats + 32 * j); });
    if (BOXED) wait_dout(base, n);
    issue_dv<0, 3>(dv, pp, dout);
    mma_wait<1>(), pin(dq);
    if (done) release_block(blocks), put_dq(dq, base, n & 1);
    values.wait_full();
    begin(ds);
    issue_shared<ROWS, D, KEYS, ROWS>(ds, k_major(base + AT_V + own), k_major(dout));
    issue_dv<3, 1>(dv, pp, dout);  // runs under what follows
    mma_wait<1>(), pin(ds);
    differ(p, ds, dsp, [&](int j) { return load_pair(stats + ROWS * 4 + 32 * j); });
    wait(base + OUT_EMPTY, values.phase() ^ 1);
    if (BOXED) put_boxed(dsp, boxed);
    else put_ds(dsp, ds_place(base, stage, n));
    warp_arrive(ds_full(base, stage));
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
  if (BOXED && done) Douts(base, 0).release(~n % DOUTS);
  if (done) put_dq(dq, base, n & 1), release_block(blocks);
  else clear(dk);
}
DEV void consume(u32 base, const BackwardArgs& call) {
  const int group = uniform<true>(own_group());
  Values values = {base, 0};
  Blocks blocks = {base, 0};
  Work w;
  Own s;
  u32 n = 0;
  NO_UNROLL for (Tiles tiles = {base, 0}; tiles.take<true>(call, w, s); tiles.advance()) {
    values.at = tiles.at;
    const u32 own = group * 64 * 128;
    const int row = w.block * KEYS + group * 64 + own_row();
    float dk[D / 2], dv[D / 2];
    clear(dk), clear(dv);
    walk(dk, dv, blocks, values, n, call, w, s, base + tiles.stage() * KV_BYTES, group, row);
    tiles.release();
    auto ready = [&] {
      named_sync(1, 256);  // dS is no longer read
      wait(base + OUT_EMPTY, values.phase() ^ 1), wait(base + DQ_EMPTY, ~n & 1);
    };
    const Result of_v = {dv, 1, call.dv_rows, base + AT_DQ + own};
    if constexpr (BOXED) put_results<OF_KEYS, true>(call, w, s, row, ready, of_v);
    else put_results<OF_KEYS, true>(call, w, s, row, ready, Result{dk, s.scale, call.dk_rows, base + AT_DS + own}, of_v);
    warp_arrive(base + OUT_FULL);
    if constexpr (BOXED) {
      if (!is_finite(dk, row, s.keys)) raise<OF_KEYS>(call.flags, w.batch * s.key_heads + w.head);
      UNROLL(i, D / 2) dk[i] *= s.scale;
      if (call.dk_rows.data) store_row_pieces(call.dk_rows, s.batch, w.head, 0, row, s.keys, dk);
    }
  }
}
}
KERNEL(fused, BackwardArgs call, 384, 1) {
  using namespace fused_pass;
  const u32 base = shared_panels();
  make_barriers([&] {
    prefetch(&call.q), prefetch(&call.k), prefetch(&call.v), prefetch(&call.dout);
    Tiles::init(base, 1, 8 * ARRIVALS + 3), Values::init(base, 1, 8 * ARRIVALS), Blocks::init(base, 1, 8 * ARRIVALS);
    barrier_init(base + OUT_FULL, 8 * ARRIVALS), barrier_init(base + OUT_EMPTY, 1);
    for (u32 i = 0; i < (BOXED ? PLACES : 1); i++) barrier_init(base + DS_FULL + 8 * i, 8 * ARRIVALS);
    if (BOXED) prefetch(&call.bias), prefetch(&call.dbias_boxes), Douts::init(base, 1, 8 * ARRIVALS);
    if (BOXED) Blocks::init(base, 1, 8 * ARRIVALS + (call.dbias.data ? 1 : 0), BIAS);
    barrier_init(base + DQ_FULL, 8 * ARRIVALS), barrier_init(base + DQ_FULL + 8, 8 * ARRIVALS), barrier_init(base + DQ_EMPTY, 1);
  });
  auto feed = [&] {
    if (threadIdx.x == 0) produce(base, call);
    if (threadIdx.x == 32) store(base, call);
    if (threadIdx.x == 64 || threadIdx.x == 96) add(base, call, threadIdx.x / 32 & 1);
  };
  divide_roles<BOXED ? 40 : 24, BOXED ? 232 : 240>(feed, [&] { consume(base, call); });
}
#endif
