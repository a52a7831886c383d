// attention and attention_lse forward for sm_90a: o and lse of 16-bit operands in f32 sums, with P in the storage
// type.
//
//   producer (one thread of warpgroup 0):  per work tile: load q; per key block, last to first: load k, load v
//   consumer (warpgroups 1..):             64 query rows each; per key block n, last to first:
//        issue  S' = q·k_nᵀ                 (wgmma, shared × shared)                                   (F1)
//        issue  o += P·v_{n+1}              (wgmma, registers × shared: P of the block before)         (F5)
//        wait S';  m, P' = exp2((S' − m)·c), l;  wait o;  o *= exp2((m_old − m)·c);  P = P'            (F3), (F4)
// The products of one warpgroup run under the exponentials of the other (TURNS: they take turns at the tensor cores),
// and the previous block's P·v runs under the exponentials of its own warpgroup.
//
// A work tile is (query block, query head, batch element); blocks claim tiles from a counter, heaviest query blocks
// first within a group of heads whose k and v fit the L2. No tile depends on another: results do not depend on
// the claims.
//
// Masks are windows, or show each query a range of keys, which tables tell (spans.cuh).
//
// Columns are padded to 64 or 128. Softcap, bias, and a scale that is not above 0 are computed on the accumulators of
// S, in variants of their own; a bias is read where it lies, two elements at a time where these begin at multiples of
// 4 bytes. Packed sequences, and padded ones with options, are found in a table of tiles. The copy engine reads whole
// boxes, hence rows of the next sequence, which the mask hides; where a box ends beyond its sequence, threads write
// the rows one by one.
//
// A row subtracts its maximum before it multiplies by the scale where the block hides some key from it, and else in
// one operation. That depends on the row alone: bits are the same in tiles of 128 and 192 rows, and for a mask as for
// a bias of −∞. Where a mask cuts a tile of v, non-finite elements of v are added pair by pair.
//
// Compile-time: STORAGE (1|2), D (64|128), WINDOW (0: every pair; 2: spans), GROUPS (consumer warpgroups: 2 or 3,
// which fit the registers where D = 64), VALUES (0: attention_lse), LENGTHS (1: batch elements have extents of their
// own; 2: sequences are listed), OPTIONS (0: no softcap, no bias, a scale above 0).
constexpr int KEYS = 128, STAGES = 2;
#define TURNS 1
#define LAZY 8       // rescale o only when a row maximum has grown by more than 2^LAZY

constexpr int ROWS = 64 * GROUPS;
constexpr u32 Q_BYTES = ROWS * D * 2, KV_BYTES = KEYS * D * 2, PANEL = KEYS * 128;
constexpr u32 STAGING = 8192 * ((KEYS + 63) / 64);  // of each warpgroup: o on its way out, or P for the guard
constexpr u32 AT_K = Q_BYTES, AT_V = AT_K + STAGES * KV_BYTES, AT_O = AT_V + STAGES * KV_BYTES, AT_BARRIERS = AT_O + GROUPS * STAGING;
using QRing = Ring<1, AT_BARRIERS>;
using KRing = Ring<STAGES, QRing::END>;
using VRing = Ring<STAGES, KRing::END>;
constexpr u32 TILE = VRing::END;
CHECK_SHARED(forward, 1024 + AT_BARRIERS + 256);  // the base is aligned to 1024 by hand

KERNEL_ARGS(ForwardArgs)
struct Maxima {  // of the two rows of this thread, and the sums of their weights
  float m[2] = {-INF, -INF}, l[2] = {0, 0};
};

// Hides what a row does not see, and says in `cut` of which rows it hides something in this block.
template <bool MASK> DEV void mask(float (&s)[KEYS / 2], bool (&cut)[2], int key, const Seen& seen) {
  cut[0] = cut[1] = false;
  if constexpr (MASK) {
    UNROLL(r, 2) {
      int from = key + 2 * (lane_id() & 3), end = seen.end(r) - from;
      int begin = seen.begin(r) - from;
      cut[r] = seen.end(r) < key + KEYS || seen.begin(r) > key;
      UNROLL(j, KEYS / 8)
        UNROLL(e, 2)
          if (8 * j + e >= end || (WINDOW && 8 * j + e < begin)) s[4 * j + 2 * r + e] = -INF;
    }
  }
}
// S over the unit (F2), from products; of which rows the bias hides something.
template <bool MASK> DEV void extend(float (&s)[KEYS / 2], bool (&hides)[2], int key, const Own& own, const ScoreOptions& o, const BiasRows& x) {
  hides[0] = hides[1] = false;
  if (o.cap != 0) {
    UNROLL(i, KEYS / 2) s[i] = __fmul_rn(o.cap, tanh_of(s[i], o));
  } else if (o.unit.scale != 1) {
    UNROLL(i, KEYS / 2) s[i] = __fmul_rn(o.unit.scale, s[i]);
  }
  if (!x.of[0]) return;
  const int keys = own.keys - key - 2 * (lane_id() & 3);
  const bool pairs = has_pairs(o.bias, x.of[0]);
  UNROLL(r, 2) {
    UNROLL(j, KEYS / 8) {
      float2 b = load_bias(x.of[r] + key + 8 * j, pairs, MASK ? keys - 8 * j : 2);
      add_bias(s[4 * j + 2 * r], b.x, o.unit), add_bias(s[4 * j + 2 * r + 1], b.y, o.unit);
      hides[r] |= s[4 * j + 2 * r] == -INF || s[4 * j + 2 * r + 1] == -INF;
    }
    hides[r] = __any_sync(0xfu << (lane_id() & 28), hides[r]);
  }
}
// New maxima; s becomes P (unnormalised); returns in a[] what o and the old sums must be multiplied by. The maximum of
// a row that is cut is subtracted first: a lone key has P = 1. What is cut is the row's own: its bits depend on no
// other.
template <bool MASK> DEV bool soften(float (&s)[KEYS / 2], Maxima& rows, float (&a)[2], float c, const bool (&cut)[2]) {
  float top[2];
  bool grown = false;
  UNROLL(r, 2) {
    float x = s[2 * r], y = s[2 * r + 1];
#pragma unroll
    for (int j = 1; j < KEYS / 8; j++) x = fmaxf(x, s[4 * j + 2 * r]), y = fmaxf(y, s[4 * j + 2 * r + 1]);
    top[r] = fmaxf(rows.m[r], quad_max(fmaxf(x, y)));
    grown |= LAZY ? (top[r] - rows.m[r]) * c > LAZY : true;  // -inf − -inf is NaN: not grown
  }
  if (LAZY) grown = __any_sync(~0u, grown);
  a[0] = a[1] = 1;
  if (grown) {
    UNROLL(r, 2) {
      if (LAZY && !((top[r] - rows.m[r]) * c > LAZY)) continue;  // each row for itself
      float from = top[r] == -INF ? 0 : top[r];                  // a row that has seen nothing
      a[r] = exp2_fast((rows.m[r] - from) * c);
      rows.m[r] = top[r];
      rows.l[r] *= a[r];
    }
  }
  UNROLL(r, 2) {
    float from = rows.m[r] == -INF ? 0 : rows.m[r], sum[2] = {0, 0};
    float first = MASK && cut[r] ? from : 0, then = MASK && cut[r] ? 0 : -from * c;
    UNROLL(j, KEYS / 8)
      UNROLL(e, 2) {
        float& x = s[4 * j + 2 * r + e];
        x = exp2_fast(fmaf(MASK ? __fsub_rn(x, first) : x, c, then));
        sum[e] += x;
      }
    rows.l[r] += sum[0] + sum[1];
  }
  return grown;
}
// All of that: scores, mask, weights.
template <bool MASK> DEV bool weigh(float (&s)[KEYS / 2], Maxima& rows, float (&a)[2], float c, int key, const Seen& seen, const Own& own,
                               const ForwardArgs& call, const BiasRows& x) {
  bool cut[2];
  bool hides[2] = {};
  if (OPTIONS) extend<MASK>(s, hides, key, own, call.options, x);
  mask<MASK>(s, cut, key, seen);
  cut[0] |= hides[0], cut[1] |= hides[1];
  return soften<MASK || OPTIONS>(s, rows, a, c, cut);
}
// Before the product P·v of a block with a mask: if v holds anything but finite numbers, adds those elements over the
// allowed pairs by ordinary arithmetic and zeroes them in shared memory. Every warpgroup comes here with the same
// block and verdict.
DEV void guard(float (&o)[D / 2], const u32 (&p)[KEYS / 4], u32 v, u32 staging, int key, int& add, const Seen& seen, const BiasRows& extra) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = lane_id();
  u32 most = 0;
  UNROLL(i, int(KV_BYTES / 16 / 128)) {
    uint4 x = load_piece(v + (i * 128 + threadIdx.x % 128) * 16);
    most = max_pair(max_pair(max_pair(most, x.x & 0x7fff7fff), x.y & 0x7fff7fff), max_pair(x.z & 0x7fff7fff, x.w & 0x7fff7fff));
  }
  if (!named_any(1 + GROUPS + group, 128, (most & 0xffff) >= TOP || most >> 16 >= TOP)) return;
  if (threadIdx.x % 128 == 0) store_wait_read();
  named_sync(1 + GROUPS + group, 128);
  UNROLL(i, KEYS / 16) {  // P to this warpgroup's staging rows, to be read by key
    int piece = 2 * i + lane / 16;
    store_blocks(staging + piece / 8 * 8192 + swizzled(warp * 16 + lane % 16, piece % 8), p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
  }
  __syncwarp();
  if (!add) clear(o), add = 1;
#pragma unroll 1
  for (int j = 0; j < KEYS; j++) {
    float x[2];
    UNROLL(r, 2) {
      int begin = seen.begin(r), end = seen.end(r);
      float2 y = unpack(load_word(staging + j / 64 * 8192 + swizzled(warp * 16 + lane / 4 + 8 * r, j % 64 / 8) + j % 8 / 2 * 4));
      x[r] = key + j >= begin && key + j < end ? j % 2 ? y.y : y.x : -1;
      if (OPTIONS && x[r] >= 0 && extra.of[0] && read(extra.of[r][key + j - 2 * (lane & 3)]) == -INF) x[r] = -1;
    }
    UNROLL(i, D / 8) {
      float2 y = unpack(load_word(v + i / 8 * PANEL + swizzled(j, i % 8) + lane % 4 * 4));
      UNROLL(r, 2) {
        if (x[r] >= 0 && !(fabsf(y.x) < INF)) o[4 * i + 2 * r] += x[r] * y.x;
        if (x[r] >= 0 && !(fabsf(y.y) < INF)) o[4 * i + 2 * r + 1] += x[r] * y.y;
      }
    }
  }
  clear_odd_together<GROUPS>(KV_BYTES, v);
}

DEV void produce(u32 base, const ForwardArgs& c) {
  const TensorMap *qm = &c.q, *km = &c.k, *vm = &c.v;
  const Shape& shape = c.shape;
  const int tiles = tiles_of<GROUPS>(shape, c.packed);
  int t = blockIdx.x;
  QRing queries = {base, 1};
  KRing k_ring = {base, 1};
  VRing v_ring = {base, 1};
  auto load_k = [&](int row, int h, int b) {
    load5(base + AT_K + k_ring.stage() * KV_BYTES, km, k_ring.fill(KV_BYTES), row, h, b), k_ring.advance();
  };
  auto load_v = [&](int row, int h, int b) {
    if (VALUES) load5(base + AT_V + v_ring.stage() * KV_BYTES, vm, v_ring.fill(KV_BYTES), row, h, b), v_ring.advance();
  };
#pragma unroll 1
  while (t < tiles) {
    const int next = claim_tile(c.counter, tiles);  // early: its latency hides under the tile's loads
    const Work w = work_of<GROUPS, false, false>(t, shape, c.packed, shape.heads_per_group);
    if (w.block < 0) { t = next; continue; }
    const Own own = of_batch<false>(shape, c.packed, w.batch);
    const Range blocks = key_blocks<GROUPS, KEYS>(c.spans, own, w.block);
    int n = blocks.end, kh = w.head / (shape.heads / shape.key_heads);
    queries.wait_empty(), queries.advance();
    store_word(base + TILE, t);
    if (n == blocks.begin) {
      arrive(queries.full());
    } else {
      expect_bytes(queries.full(), Q_BYTES);
      load5(base, qm, queries.full(), own.query_start + w.block * ROWS, w.head, own.batch);
      load_k(own.key_start + --n * KEYS, kh, own.batch);
#pragma unroll 1
      for (; n > blocks.begin; n--) load_k(own.key_start + (n - 1) * KEYS, kh, own.batch), load_v(own.key_start + n * KEYS, kh, own.batch);
      load_v(own.key_start + n * KEYS, kh, own.batch);
    }
    t = next;
  }
  queries.wait_empty();
  store_word(base + TILE, -1);
  arrive(queries.full());
}

DEV void consume(u32 base, const ForwardArgs& call) {
  const Shape& shape = call.shape;
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = lane_id();
  const float unit = OPTIONS ? call.options.unit.natural : shape.scale;  // of products
  const float c = unit * LOG2E;
  const u32 q = base + group * 64 * 128, staging = base + AT_O + group * STAGING;
  QRing queries = {base, 0};
  KRing k_ring = {base, 0};
  VRing v_ring = {base, 0};
  auto my_turn = [&] { if (TURNS) named_sync(1 + group, 256); };
  auto your_turn = [&] { if (TURNS) named_arrive(1 + (group + 1) % GROUPS, 256); };
  if (TURNS && group == GROUPS - 1) named_arrive(1, 256);  // group 0 begins

  for (;;) {
    queries.wait_full(), queries.advance();
    const int t = uniform<true>(load_word(base + TILE));
    if (t < 0) break;
    const Work w = work_of<GROUPS, false, true>(t, shape, call.packed, shape.heads_per_group);
    const Own own = of_batch<true>(shape, call.packed, w.batch);
    const Range blocks = key_blocks<GROUPS, KEYS>(call.spans, own, w.block);
    int n = blocks.end;
    const int row = w.block * ROWS + group * 64 + own_row();
    const Seen seen(call.spans, shape, own, row);
    const BiasRows extra(call.options, own, w.head, row);
    const bool hides = OPTIONS && call.options.bias.data;  // whether any block may hide a pair
    Maxima rows;
    float o[D / 2];
    if (n == blocks.begin) {
      clear(o);
      queries.release();
    } else {
      u32 p[KEYS / 4];
      float a[2], s[KEYS / 2];
      int add = 0;
      n--;
      k_ring.wait_full();
      issue_shared<KEYS, D, ROWS, KEYS>(s, q, base + AT_K + k_ring.stage() * KV_BYTES);
      mma_wait<0>(), pin(s);
      k_ring.release(), k_ring.advance();
      weigh<true>(s, rows, a, c, n * KEYS, seen, own, call, extra);
      pack_all(s, p);
      auto step = [&](auto masked) {
        if (VALUES && (hides || n + 1 >= blocks.closed || (WINDOW && n + 1 < blocks.open))) {
          v_ring.wait_full();
          guard(o, p, base + AT_V + v_ring.stage() * KV_BYTES, staging, (n + 1) * KEYS, add, seen, extra);
        }
        k_ring.wait_full();
        my_turn();
        pin(s), pin(o), pin(p), mma_begin();
        multiply_shared<KEYS, D, ROWS, KEYS>(s, q, base + AT_K + k_ring.stage() * KV_BYTES);
        mma_commit();
        if (VALUES) {
          v_ring.wait_full();
          mma_begin();
          multiply_registers<KEYS, D>(o, p, base + AT_V + v_ring.stage() * KV_BYTES, add);
          mma_commit();
        }
        your_turn();
        mma_wait<VALUES>(), pin(s);
        k_ring.release(), k_ring.advance();
        bool grown = weigh<decltype(masked)::value>(s, rows, a, c, n * KEYS, seen, own, call, extra);
        if (!VALUES) return;
        order_after(rows.l[0] + rows.l[1]);  // or the assembler moves the wait above the exponentials
        mma_wait<0>(), pin(o);
        v_ring.release(), v_ring.advance();
        if (grown) mul_rows(o, a);
        pack_all(s, p);
        add = 1;
      };
#pragma unroll 1
      for (n--; n >= max(blocks.closed, blocks.begin); n--) step(Is<true>());
#pragma unroll 1
      for (; n >= blocks.open; n--) step(Is<false>());
#if WINDOW
#pragma unroll 1
      for (; n >= blocks.begin; n--) step(Is<true>());
#endif
      queries.release();
      if (VALUES) {
        v_ring.wait_full();
        if (hides || blocks.begin >= blocks.closed || (WINDOW && blocks.begin < blocks.open))
          guard(o, p, base + AT_V + v_ring.stage() * KV_BYTES, staging, blocks.begin * KEYS, add, seen, extra);
        pin(o), issue_registers<KEYS, D>(o, p, base + AT_V + v_ring.stage() * KV_BYTES, add);
        mma_wait<0>(), pin(o);
        v_ring.release(), v_ring.advance();
      }
    }

    // Epilogue: normalise, lse, and o through shared memory to its tensor map, which clips the rows beyond the length.
    // A sink joins here: it weighs, and has no value.
    float over[2], sink = call.sinks ? call.sinks[w.head] : -INF;
    UNROLL(r, 2) {
      float l = quad_sum(rows.l[r]), m = rows.m[r] * unit;
      bool seen = l != 0;
      over[r] = seen ? 1 / l : 0;
      float sum = seen ? m + logf(l) : -INF;
      if (sink != -INF) {
        float top = seen ? fmaxf(m, sink) : sink, own = seen ? weight(m, top) : 0, all = own * l + (seen ? weight(sink, top) : 1);
        sum = top + logf(all), over[r] = seen ? own / all : 0;
      }
      if (lane % 4 == 0 && row + 8 * r < own.queries)
        call.lse[((size_t)own.batch * shape.heads + w.head) * shape.queries + own.query_start + row + 8 * r] = sum;
    }
    if (!VALUES) continue;
    mul_rows(o, over);
    if (LENGTHS == 1) clear_rows(o, row, own.queries);  // what q holds beyond a sequence is not to be seen
    store_output(&call.o, call.o_rows, w, own, w.block * ROWS + group * 64, staging, 1 + GROUPS + group, o);
  }
  if (threadIdx.x % 128 == 0) store_wait();
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) forward(const __grid_constant__ ForwardArgs c) {
  const u32 base = shared_panels();
  if (threadIdx.x == 0) {
    prefetch(&c.q), prefetch(&c.k);
    if (VALUES) prefetch(&c.v), prefetch(&c.o);
    QRing::init(base, 1, 4 * GROUPS * ARRIVALS);
    KRing::init(base, 1, 4 * GROUPS * ARRIVALS), VRing::init(base, 1, 4 * GROUPS * ARRIVALS);
    barrier_init_fence();
  }
  __syncthreads();
  auto feed = [&] {
    if (threadIdx.x == 0) produce(base, c);
  };
  divide_roles<GROUPS == 2 ? 40 : 32, GROUPS == 2 ? 232 : 160>(feed, [&] { consume(base, c); });
}
