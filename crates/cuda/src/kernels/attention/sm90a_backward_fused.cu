// ---- dq, dk and dv in one pass by keys ----
// With D = 128 (sm90a_backward_fused_128.cu) two warpgroups compute all five products, each dq' of half of the
// columns. With D = 64 (sm90a_backward_fused_64.cu) a third one computes dq', since there is room for its registers.
//
// BOXED: a box of the bias, 64 queries and 128 keys, is loaded to the place of the block's dS, which its threads then
// put in its stead, rows of queries and columns of keys. From there it is copied to dbias, if each head has its own
// bias. A stage less of dout makes room for a third place, and threads write dk from their registers.
#define FUSES (RESULTS == 1 && WINDOW < 2 && LENGTHS == 0)
#if FUSES
namespace fused_pass {
constexpr int KEYS = OWN, ROWS = 64, COLUMNS = D / 2;
constexpr u32 ADDERS = D == 128 ? 2 : 3, DQ_PLACES = D == 128 ? 1 : 3;
constexpr u32 KV_BYTES = KEYS * D * 2, Q_BYTES = ROWS * D * 2, DS_BYTES = KEYS * ROWS * 2, DQ_BYTES = ROWS * D * 4;
#if D == 128
// k and v; q and dout of query blocks, in stages; dS of this block of queries and of the one before, whose place dk
// takes; dq' of the one before, whose place dv takes; numbers of rows.
constexpr u32 DOUTS = BOXED ? 2 : STAGES, PLACES = BOXED ? STAGES : 2;
constexpr u32 AT_V = KV_BYTES, AT_Q = AT_V + KV_BYTES, AT_DO = AT_Q + STAGES * Q_BYTES, AT_DS = AT_DO + DOUTS * Q_BYTES;
constexpr u32 AT_DQ = AT_DS + PLACES * DS_BYTES, AT_STATS = AT_DQ + DQ_BYTES, STATS_BYTES = 2 * ROWS * 4;
using TileRing = Ring<1, AT_STATS + STAGES * STATS_BYTES, 1, true>;  // of k
using Values = Ring<1, TileRing::END, 1, true>;                      // of v
using Blocks = Ring<STAGES, Values::END, BOXED ? 2 : 1>;             // of q, dout, lse2 and delta, or of bias
constexpr int BIAS = 1;                                              // its part
using Douts = Ring<2, Blocks::END, 1, true>;                         // of dout, with BOXED alone
// Barriers of dk and dv, of dS, and of dq', of which there are two: each other block has its own.
constexpr u32 OUT_FULL = BOXED ? Douts::END : Blocks::END, OUT_EMPTY = OUT_FULL + 8, DS_FULL = OUT_EMPTY + 8;
constexpr u32 DQ_FULL = DS_FULL + (BOXED ? 8 * PLACES : 8), DQ_EMPTY = DQ_FULL + 16;
using Tiles = WorkTiles<2, true, TileRing, DQ_EMPTY + 8>;
CHECK_SHARED(fused, 1024 + DQ_EMPTY + 16);  // 1024 to align all
#else
// k and v of two tiles: dv and dk of a tile take their places. q and dout of query blocks, in stages; dS of two of
// them; dq' of as many as there are threads that add it; numbers of rows.
constexpr int STAGES = 4;
constexpr u32 AT_V = KV_BYTES, PAIR = 2 * KV_BYTES, AT_Q = 2 * PAIR, AT_DO = AT_Q + STAGES * Q_BYTES, AT_DS = AT_DO + STAGES * Q_BYTES;
constexpr u32 AT_DQ = AT_DS + 2 * DS_BYTES, AT_STATS = AT_DQ + DQ_PLACES * DQ_BYTES, STATS_BYTES = 2 * ROWS * 4;
using TileRing = Ring<2, AT_STATS + STAGES * STATS_BYTES, 1, true>;  // of k and v
using Blocks = Ring<STAGES, TileRing::END, 1, true>;                 // of q, dout, lse2 and delta
using Weighted = Ring<2, Blocks::END>;                               // of dS
// Barriers of results, one for each stage, and of dq', one for each place.
constexpr u32 OUT_FULL = Weighted::END, DQ_FULL = OUT_FULL + 16, DQ_EMPTY = DQ_FULL + 8 * DQ_PLACES;
using Tiles = WorkTiles<2, true, TileRing, DQ_EMPTY + 8 * DQ_PLACES>;
CHECK_SHARED(fused, 1024 + DQ_EMPTY + 8 * DQ_PLACES + 8);  // 1024 to align all
#endif

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
  const u32 stage = blocks.stage(), full = blocks.fill((BOXED ? 1 : 2) * Q_BYTES + STATS_BYTES), stats = blocks.base + AT_STATS + stage * STATS_BYTES;
  load5(blocks.base + AT_Q + stage * Q_BYTES, &call.q, full, row, h, s.batch);
  if (!BOXED) load5(blocks.base + AT_DO + stage * Q_BYTES, &call.dout, full, row, h, s.batch);
  load_numbers<ROWS>(stats, call, s, h, row, true, full);
}

// ---- turns ----
DEV u32 load_turn(const u32* at) { u32 x; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory"); return x; }
DEV void store_turn(u32* at, u32 x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory"); }
DEV void all_proxies_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Adds contiguous floats of shared memory to what lies in memory.
DEV void add_floats(float* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// Adds dq' of every block of queries to its sum, when it is the tile's turn: of ADDERS threads, each those of a number
// in the order of the walk, `own` and every ADDERS-th behind it.
DEV void add(u32 base, const BackwardArgs& call, u32 own) {
  const u32 place = base + AT_DQ + own % DQ_PLACES * DQ_BYTES;
  u32 n = 0, parity = 0;  // blocks before
  Work w;
  Own s;
  NO_UNROLL for (Tiles tiles(base, 0); tiles.take<false>(call, w, s); tiles.advance()) {
    arrive(tiles.empty());
    const Range range = walked(call, w, s);
    const int each = s.heads / s.key_heads, blocks = (s.queries + ROWS - 1) / ROWS;
    NO_UNROLL for (Descent<1> to = {range.end - 1, 0}; to.block >= range.begin; to.next(range, each)) {
      if (n++ % ADDERS != own) continue;
      const int first = to.block * ROWS, block = (s.batch * s.heads + w.head * each + to.head) * blocks + to.block;
      const u32 turn = w.block - (WINDOW ? first_key(first, s) / KEYS : 0);
      const int end = WINDOW ? end_key(min(first + ROWS, s.queries) - 1, s) : s.keys;
      u32* at = call.turns + block;
      float* sums = call.dq_sums + (i64)block * (ROWS * D);
      if (turn) {
        while (load_turn(at) != turn) {}
        all_proxies_fence();
      }
      wait(base + DQ_FULL + 8 * own, parity);
      if (turn) add_floats(sums, place, DQ_BYTES);
      else store_bytes(sums, place, DQ_BYTES);
      store_commit(), store_wait_read();
      arrive(base + DQ_EMPTY + 8 * (own % DQ_PLACES));
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
DEV void store_vector(u32 at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// P S' in place of products, 0 of hidden pairs, and P packed. OPTIONS 1 is a softcap alone. `key`: the thread's first;
// `query`: its first, of the block. `lse2(j)`: those of the queries 8j behind.
template <bool MASKED, class F>
DEV void weigh(float (&p)[ROWS / 2], u32 (&pp)[ROWS / 4], const BackwardArgs& call, const Own& s, float c, int key, int query, const F& lse2) {
  UNROLL(j, ROWS / 8) {
    const float2 l = lse2(j);
    UNROLL(r, 2) {
      const int seen = key + 8 * r - s.offset - query;  // the query on the diagonal
      const int first = key + 8 * r >= s.keys ? 1 << 30 : WINDOW ? seen - s.right : 0, last = WINDOW ? seen + s.left : 1 << 30;
      float slope[2];
      UNROLL(e, 2) {
        float& y = p[4 * j + 2 * r + e];
        if (OPTIONS == 1) bend(y, slope[e], call.options);
        y = exp2_fast(fmaf(y, c, -(e ? l.y : l.x)));
        if (MASKED && (8 * j + e < first || 8 * j + e > last)) y = 0;
      }
      pp[2 * j + r] = pack(p[4 * j + 2 * r], p[4 * j + 2 * r + 1]);
      UNROLL(e, OPTIONS == 1 ? 2 : 0) {
        p[4 * j + 2 * r + e] *= slope[e];
        asm volatile("" : "+f"(p[4 * j + 2 * r + e]));  // in this order: of all pairs at once, numbers spill
      }
    }
  }
}
// dSᵀ of the warpgroup, packed, to rows of keys and columns of queries.
DEV void put_ds(const u32 (&ds)[ROWS / 4], u32 to) {
  const u32 thread = opaque(threadIdx.x - (D == 128 ? 128 : 256)), row = thread / 32 * 16 + thread % 16;
  UNROLL(j, ROWS / 16) {
    const int piece = 2 * j + thread / 16 % 2;
    store_blocks(to + swizzled(row, piece), ds[4 * j], ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]);
  }
  proxy_fence();
}
}

// 0 at pairs of dbias that no tile walks. A block has 64 queries of a head.
#if OPTIONS == 2
KERNEL(unseen, BackwardArgs c, 256) {
  using namespace fused_pass;
  const Shape& shape = c.shape;
  const int blocks = (shape.queries + ROWS - 1) / ROWS, i = blockIdx.x % blocks, head = blockIdx.x / blocks;
  const Own s = sequence_of<false>(c, head / shape.heads);
  const int row = threadIdx.x / 16, column = threadIdx.x % 16 * 8;
  NO_UNROLL for (int n = 0; n * KEYS < s.keys; n++) {
    const Range range = walked(c, {n, 0, 0, 0}, s);
    if (i >= range.begin && i < range.end) continue;
    const int key = n * KEYS + column;
    UNROLL(j, ROWS / 16) {
      const int query = i * ROWS + row + 16 * j;
      if (query >= s.queries || key >= s.keys) continue;
      u16* to = row_of(c.dbias, s.batch, head % shape.heads, query) + key;
      if (key + 8 <= s.keys) *(uint4*)to = uint4{0, 0, 0, 0};
      else for (int e = 0; key + e < s.keys; e++) to[e] = 0;
    }
  }
}
#endif
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
  // As the threads of one or of two warpgroups have it.
  constexpr int VECTORS = COLUMNS / 8, APART = D == 128 ? 256 : 128;
  const int first = D == 128 ? threadIdx.x : threadIdx.x / 128 * (VECTORS * APART) + threadIdx.x % 128;
  const float4* from = (const float4*)(c.dq_sums + (i64)blockIdx.x * (ROWS * D)) + first;
  float4 x[VECTORS];
  bool finite[2] = {true, true};
  UNROLL(j, VECTORS) {
    x[j] = keys.begin < keys.end ? from[j * APART] : float4{0, 0, 0, 0};  // rows that see nothing have no sums
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
