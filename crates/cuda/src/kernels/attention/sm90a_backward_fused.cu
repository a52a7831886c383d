// ---- dq, dk and dv in one pass by keys ----
#if RESULTS == 1 && WINDOW < 2 && LENGTHS == 0 && OPTIONS == 0 && D == 128
namespace fused_pass {
constexpr int KEYS = OWN, ROWS = 64, COLUMNS = D / 2;  // of dq' of a warpgroup, which has all rows
constexpr u32 KV_BYTES = KEYS * D * 2, Q_BYTES = ROWS * D * 2, DS_BYTES = KEYS * ROWS * 2, DQ_BYTES = ROWS * D * 4;
// k and v; q and dout of query blocks, in stages; dS of this block of queries and of the one before, whose place dk
// takes; dq' of the one before, whose place dv takes; numbers of rows.
constexpr u32 AT_V = KV_BYTES, AT_Q = AT_V + KV_BYTES, AT_DO = AT_Q + STAGES * Q_BYTES, AT_DS = AT_DO + STAGES * Q_BYTES;
constexpr u32 AT_DQ = AT_DS + 2 * DS_BYTES, AT_STATS = AT_DQ + DQ_BYTES, STATS_BYTES = 2 * ROWS * 4;
using TileRing = Ring<1, AT_STATS + STAGES * STATS_BYTES, 1, true>;  // of k
using Values = Ring<1, TileRing::END, 1, true>;                      // of v
using Blocks = Ring<STAGES, Values::END>;                            // of q, dout, lse2 and delta
// Barriers of dk and dv, of dS, and of dq', of which there are two: each other block has its own.
constexpr u32 OUT_FULL = Blocks::END, OUT_EMPTY = OUT_FULL + 8, DS_FULL = OUT_EMPTY + 8, DQ_FULL = DS_FULL + 8, DQ_EMPTY = DQ_FULL + 16;
using Tiles = WorkTiles<2, true, TileRing, DQ_EMPTY + 8>;
CHECK_SHARED(fused, 1024 + DQ_EMPTY + 16);  // 1024 to align all

// Claims the next tile, the first one too: a block's number says nothing of when it runs.
DEV int claim_in_order(const BackwardArgs& call) {
  const u32 claimed = atomicAdd(call.counter, 1u);
  if (claimed == call.tiles + gridDim.x - 1) *call.counter = 0;
  return claimed;
}
// The blocks of queries that a tile walks; a tile beyond the last key needs masks, lest 0 · ∞ reach dq.
DEV Range walked(const BackwardArgs& call, const Work& w, const Own& s) {
  Range range = query_blocks<ROWS / 64>(call.spans, s, w.block, w.task);
  if (w.block * KEYS + KEYS > s.keys) range.open = range.closed = range.end;
  return range;
}
DEV void load_queries(const Blocks& blocks, const BackwardArgs& call, const Own& s, int h, int row) {
  const u32 stage = blocks.stage(), full = blocks.fill(2 * Q_BYTES + STATS_BYTES), stats = blocks.base + AT_STATS + stage * STATS_BYTES;
  load5(blocks.base + AT_Q + stage * Q_BYTES, &call.q, full, row, h, s.batch);
  load5(blocks.base + AT_DO + stage * Q_BYTES, &call.dout, full, row, h, s.batch);
  const i64 at = stat_row(s, opaque(h)) + row;
  load_bytes(stats, call.lse2 + at, ROWS * 4, full);
  load_bytes(stats + ROWS * 4, call.delta + at, ROWS * 4, full);
}
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

// ---- turns ----
DEV u32 load_turn(const u32* at) { u32 x; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory"); return x; }
DEV void store_turn(u32* at, u32 x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory"); }
DEV void all_proxies_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Contiguous floats of shared memory: to memory, or added to what lies there.
DEV void store_floats(float* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEV void add_floats(float* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// Adds dq' of every other block of queries to its sum, when it is the tile's turn: the first thread those of even
// number in the order of the walk, the second the others.
DEV void add(u32 base, const BackwardArgs& call, u32 odd) {
  u32 n = 0, parity = 0;  // blocks before
  Work w;
  Own s;
  NO_UNROLL for (Tiles tiles(base, 0); tiles.take<false>(call, w, s); tiles.advance()) {
    arrive(tiles.empty());
    const Range range = walked(call, w, s);
    const int each = s.heads / s.key_heads, blocks = (s.queries + ROWS - 1) / ROWS;
    NO_UNROLL for (Descent<1> to = {range.end - 1, 0}; to.block >= range.begin; to.next(range, each)) {
      if ((n++ & 1) != odd) continue;
      const int first = to.block * ROWS, block = (s.batch * s.heads + w.head * each + to.head) * blocks + to.block;
      const u32 turn = w.block - (WINDOW ? first_key(first, s) / KEYS : 0);
      const int end = WINDOW ? end_key(min(first + ROWS, s.queries) - 1, s) : s.keys;
      u32* at = call.turns + block;
      float* sums = call.dq_sums + (i64)block * (ROWS * D);
      if (turn) {
        while (load_turn(at) != turn) {}
        all_proxies_fence();
      }
      wait(base + DQ_FULL + 8 * odd, parity);
      if (turn) add_floats(sums, base + AT_DQ, DQ_BYTES);
      else store_floats(sums, base + AT_DQ, DQ_BYTES);
      store_commit(), store_wait_read();
      arrive(base + DQ_EMPTY);
      store_wait();
      store_turn(at, w.block == (end - 1) / KEYS ? 0 : turn + 1);
      parity ^= 1;
    }
  }
}

// ---- products ----
// Sums that a product begins anew: until then they take no registers.
template <int N> DEV void begin(float (&x)[N]) {
  UNROLL(i, N) asm volatile("" : "=f"(x[i])::"memory");
}
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
DEV void store_vector(u32 at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// dq' to the place from which `add` takes it, as threads have it: four numbers of each thread side by side.
DEV void put_dq(const float (&dq)[COLUMNS / 2], u32 base, u32 parity) {
  wait(base + DQ_EMPTY, parity);
  const u32 to = base + AT_DQ + opaque(threadIdx.x - 128) * 16;
  UNROLL(j, COLUMNS / 8) store_vector(to + j * 4096, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  proxy_fence();
  warp_arrive(base + DQ_FULL + 8 * (parity ^ 1));
}
// dSᵀ of the warpgroup, packed, to rows of keys and columns of queries.
DEV void put_ds(const u32 (&ds)[ROWS / 4], u32 to) {
  const u32 thread = opaque(threadIdx.x - 128), row = thread / 32 * 16 + thread % 16;
  UNROLL(j, ROWS / 16) {
    const int piece = 2 * j + thread / 16 % 2;
    store_blocks(to + swizzled(row, piece), ds[4 * j], ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]);
  }
  proxy_fence();
}
// P in place of products, 0 of hidden pairs, and packed. `key`: the thread's first; `query`: its first, of the block.
template <bool MASKED> DEV void weigh(float (&p)[ROWS / 2], u32 (&pp)[ROWS / 4], const Own& s, float c, int key, int query, u32 stats) {
  UNROLL(j, ROWS / 8) {
    const float2 l = load_pair(stats + 32 * j);
    UNROLL(r, 2) {
      const int seen = key + 8 * r - s.offset - query;  // the query on the diagonal
      const int first = key + 8 * r >= s.keys ? 1 << 30 : WINDOW ? seen - s.right : 0, last = WINDOW ? seen + s.left : 1 << 30;
      UNROLL(e, 2) {
        float& y = p[4 * j + 2 * r + e];
        y = exp2_fast(fmaf(y, c, -(e ? l.y : l.x)));
        if (MASKED && (8 * j + e < first || 8 * j + e > last)) y = 0;
      }
      pp[2 * j + r] = pack(p[4 * j + 2 * r], p[4 * j + 2 * r + 1]);
    }
  }
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
  const float c = s.scale * LOG2E;
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
    weigh<decltype(masked)::value>(p, pp, s, c, row, i * ROWS + column, stats);
    issue_dv<0, 3>(dv, pp, dout);
    mma_wait<1>(), pin(dq);
    if (done) blocks.release(blocks.before()), put_dq(dq, base, n & 1);
    values.wait_full();
    begin(ds);
    issue_shared<ROWS, D, KEYS, ROWS>(ds, base + AT_V + own, dout);
    issue_dv<3, 1>(dv, pp, dout);  // runs under what follows
    mma_wait<1>(), pin(ds);
    UNROLL(j, ROWS / 8) {
      const float2 x = load_pair(stats + ROWS * 4 + 32 * j);
      UNROLL(r, 2) dsp[2 * j + r] = pack(p[4 * j + 2 * r] * (ds[4 * j + 2 * r] - x.x), p[4 * j + 2 * r + 1] * (ds[4 * j + 2 * r + 1] - x.y));
    }
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

// Gives lane q of four the words number q of all four, in the order of lanes.
DEV void turn_quads(u32 (&x)[4]) {
  UNROLL(b, 2) {
    const bool high = lane_id() >> b & 1;
    const int one = b ? 2 : 1, other = b ? 1 : 2;  // words that are exchanged: 0 and `one`, and those after `other`
    const u32 first = __shfl_xor_sync(~0u, high ? x[0] : x[one], 1 << b), second = __shfl_xor_sync(~0u, high ? x[other] : x[3], 1 << b);
    if (high) x[0] = first, x[other] = second;
    else x[one] = first, x[3] = second;
  }
}
// dq of 64 rows from their sums.
KERNEL(collect, BackwardArgs c, 256) {
  using namespace fused_pass;
  const Shape& shape = c.shape;
  const int blocks = (shape.queries + ROWS - 1) / ROWS, i = blockIdx.x % blocks, head = blockIdx.x / blocks;
  const Own s = sequence_of<false>(c, head / shape.heads);
  const Range keys = key_blocks<ROWS / 64, KEYS>(c.spans, s, i);
  const int row = i * ROWS + own_row(), h = head % shape.heads;
  const float4* from = (const float4*)(c.dq_sums + (i64)blockIdx.x * (ROWS * D)) + threadIdx.x;
  constexpr int VECTORS = COLUMNS / 8;
  float4 x[VECTORS];
  bool finite[2] = {true, true};
  UNROLL(j, VECTORS) {
    x[j] = keys.begin < keys.end ? from[j * 256] : float4{0, 0, 0, 0};  // rows that see nothing have no sums
    finite[0] &= is_finite(x[j].x) && is_finite(x[j].y), finite[1] &= is_finite(x[j].z) && is_finite(x[j].w);
  }
  UNROLL(r, 2) {
    const bool there = row + 8 * r < s.queries;
    if (there && !finite[r]) raise<OF_QUERIES>(c.flags, s.batch * s.key_heads + h / (s.heads / s.key_heads));
    UNROLL(g, VECTORS / 4) {
      u32 y[4];
      UNROLL(j, 4) {
        const float4 z = x[4 * g + j];
        y[j] = r ? pack(z.z * s.scale, z.w * s.scale) : pack(z.x * s.scale, z.y * s.scale);
      }
      turn_quads(y);
      const int column = threadIdx.x / 128 * COLUMNS + 32 * g + 8 * (lane_id() & 3);
      if (there) *(uint4*)(row_of(c.dq_rows, s.batch, h, row + 8 * r) + column) = uint4{y[0], y[1], y[2], y[3]};
    }
  }
}
#endif
