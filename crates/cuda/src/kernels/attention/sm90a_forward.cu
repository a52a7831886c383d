// attention and attention_lse forward for sm_90a: o and lse of 16-bit operands in f32 sums, with P in the storage
// type.
//
//   producer (one thread of warpgroup 0):  per work tile: load q; per key block, last to first: load k, load v
//   consumer (warpgroups 1..):             64 query rows each; per key block n, last to first:
//        issue  S' = q·k_nᵀ                 (wgmma, shared × shared)  (F1)
//        issue  o += P·v_{n+1}              (wgmma, registers × shared: P of the block before)  (F5)
//        wait S';  m, P' = exp2((S' − m)·c), l;  wait o;  o *= exp2((m_old − m)·c);  P = P'  (F3), (F4)
// The products of one warpgroup run under the exponentials of the other (they take turns at the tensor cores), and the
// previous block's P·v runs under the exponentials of its own warpgroup. Blocks claim work tiles from a counter
// (`work_of`); results do not depend on the claims. Masks: spans.cuh.
//
// Columns are padded to 64 or 128. Softcap, bias, and a scale that is not above 0 are computed on the accumulators of
// S, in variants of their own; a bias is read where it lies, two elements at a time where these begin at multiples of
// 4 bytes. Packed sequences, and padded ones with options, are found in a table of tiles. The copy engine reads whole
// boxes, hence rows of the next sequence, which the mask hides; where a box ends beyond its sequence, threads write
// the rows one by one.
//
// A row subtracts its maximum before it multiplies by the scale where the block hides some key from it, and else in
// one operation. That depends on the row alone: bits are the same in tiles of 128 and 192 rows, and for a mask as for
// a bias of −∞.
//
// Numbers that are not finite: pairs/tiles.cuh.
//
// Compile-time: STORAGE (1|2), D (64|128), WINDOW (0: every pair; 2: spans), GROUPS (consumer warpgroups: 2 or 3,
// which fit the registers where D = 64), VALUES (0: attention_lse), LENGTHS (1: batch elements have extents of their
// own; 2: sequences are listed), OPTIONS (0: no softcap, no bias, a scale above 0).
constexpr int KEYS = 128, STAGES = 2;
constexpr int SLACK = 8;  // o is rescaled when the maximum of a row has grown by more than 2^SLACK

constexpr int ROWS = 64 * GROUPS;
constexpr u32 Q_BYTES = ROWS * D * 2, KV_BYTES = KEYS * D * 2;
constexpr u32 STAGING = 64 * D * 2;  // of each warpgroup: o on its way out
constexpr u32 AT_K = Q_BYTES, AT_V = AT_K + STAGES * KV_BYTES, AT_O = AT_V + STAGES * KV_BYTES, AT_BARRIERS = AT_O + GROUPS * STAGING;
using QRing = Ring<1, AT_BARRIERS>;
using KRing = Ring<STAGES, QRing::END>;
using VRing = Ring<STAGES, KRing::END>;
using Tiles = WorkTiles<GROUPS, false, QRing, VRing::END>;
CHECK_SHARED(forward, 1024 + AT_BARRIERS + 256);  // the base is aligned to 1024 by hand

KERNEL_ARGS(ForwardArgs)
struct Maxima {  // of the two rows of this thread, and the sums of their weights
  float m[2] = {-INF, -INF}, l[2] = {0, 0};
};

// A tile of work, as a warpgroup walks it. `c`: the scale of products, to base 2.
struct WarpgroupTile {
  const ForwardArgs& call;
  const Own& own;
  const Range& blocks;
  const Seen& seen;
  const BiasRows& bias;
  float c;
};
// Hides what a row does not see; `cut`: the rows of which it hides something in this block.
template <bool MASK> DEV void mask(float (&s)[KEYS / 2], bool (&cut)[2], int key, const Seen& seen) {
  cut[0] = cut[1] = false;
  if constexpr (MASK) {
    UNROLL(r, 2) {
      const int from = key + own_column();
      cut[r] = seen.end(r) < key + KEYS || seen.begin(r) > key;
      hide_outside(s, r, WINDOW ? seen.begin(r) - from : 0, seen.end(r) - from);
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
  const int keys = own.keys - key - own_column();
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
// New maxima; s becomes P (unnormalised), `a` the factors of o and the old sums. The maximum of a row that is cut is
// subtracted first: a lone key has P = 1.
template <bool MASK> DEV bool soften(float (&s)[KEYS / 2], Maxima& rows, float (&a)[2], float c, const bool (&cut)[2]) {
  float top[2];
  bool grown = false;
  UNROLL(r, 2) {
    top[r] = fmaxf(rows.m[r], quad_max(row_max(s, r, [](float x, float y) { return fmaxf(x, y); })));
    grown |= (top[r] - rows.m[r]) * c > SLACK;  // -inf − -inf is NaN: not grown
  }
  grown = __any_sync(~0u, grown);
  a[0] = a[1] = 1;
  if (grown) {
    UNROLL(r, 2) {
      if (!((top[r] - rows.m[r]) * c > SLACK)) continue;  // each row for itself
      float from = top[r] == -INF ? 0 : top[r];           // a row that has seen nothing
      a[r] = exp2_fast((rows.m[r] - from) * c);
      rows.m[r] = top[r];
      rows.l[r] *= a[r];
    }
  }
  UNROLL(r, 2) {
    float from = rows.m[r] == -INF ? 0 : rows.m[r], sum[2] = {0, 0};
    float first = MASK && cut[r] ? from : 0, then = MASK && cut[r] ? 0 : -from * c;
    each_in_row(s, r, [&](float& x, int column) {
      x = exp2_fast(fmaf(MASK ? __fsub_rn(x, first) : x, c, then));
      sum[column % 2] += x;
    });
    rows.l[r] += sum[0] + sum[1];
  }
  return grown;
}
template <bool MASK> DEV bool weigh(float (&s)[KEYS / 2], Maxima& rows, float (&a)[2], int key, const WarpgroupTile& t) {
  bool cut[2];
  bool hides[2] = {};
  if (OPTIONS) extend<MASK>(s, hides, key, t.own, t.call.options, t.bias);
  mask<MASK>(s, cut, key, t.seen);
  cut[0] |= hides[0], cut[1] |= hides[1];
  return soften<MASK || OPTIONS>(s, rows, a, t.c, cut);
}
DEV void produce(u32 base, const ForwardArgs& c) {
  const Shape& shape = c.shape;
  const int tiles = tiles_of<GROUPS>(shape, c.packed);
  Tiles queries = {base, 1};
  KRing k_ring = {base, 1};
  VRing v_ring = {base, 1};
  auto load_k = [&](int row, int h, int b) {
    load5(base + AT_K + k_ring.stage() * KV_BYTES, &c.k, k_ring.fill(KV_BYTES), row, h, b), k_ring.advance();
  };
  auto load_v = [&](int row, int h, int b) {
    if (VALUES) load5(base + AT_V + v_ring.stage() * KV_BYTES, &c.v, v_ring.fill(KV_BYTES), row, h, b), v_ring.advance();
  };
  NO_UNROLL for (int t = blockIdx.x, next; t < tiles; t = next) {
    next = claim_tile(c.counter, tiles);  // early: its latency hides under the tile's loads
    const Work w = Tiles::work<false>(t, c);
    if (w.block < 0) continue;
    const Own own = sequence_of<false>(c, w.batch);
    const Range blocks = key_blocks<GROUPS, KEYS>(c.spans, own, w.block);
    int n = blocks.end, kh = w.head / (shape.heads / shape.key_heads);
    const u32 full = queries.announce(t);
    queries.advance();
    if (n == blocks.begin) {
      arrive(full);
      continue;
    }
    expect_bytes(full, Q_BYTES);
    load5(base, &c.q, full, own.query_start + w.block * ROWS, w.head, own.batch);
    load_k(own.key_start + --n * KEYS, kh, own.batch);
    NO_UNROLL for (; n > blocks.begin; n--) load_k(own.key_start + (n - 1) * KEYS, kh, own.batch), load_v(own.key_start + n * KEYS, kh, own.batch);
    load_v(own.key_start + n * KEYS, kh, own.batch);
  }
  queries.finish();
}

// A consumer's place in the rings.
struct Places {
  u32 base;
  KRing k;
  VRing v;
  METHOD Places(u32 base) : base(base), k(base, 0), v(base, 0) {}
  METHOD u32 k_tile() const { return base + AT_K + k.stage() * KV_BYTES; }
  METHOD u32 v_tile() const { return base + AT_V + v.stage() * KV_BYTES; }
};
// The blocks of keys of a tile, which has some: o, not yet normalised, and the maxima and sums of rows.
DEV void walk(float (&o)[D / 2], Maxima& rows, Places& at, const Tiles& queries, const WarpgroupTile& t) {
  const int group = own_group();
  const u32 q = at.base + group * 64 * 128;
  const Range& blocks = t.blocks;
  u32 p[KEYS / 4];
  float a[2], s[KEYS / 2];
  int n = blocks.end - 1, add = 0;
  // Rows of v behind the sequence, which the last block may hold.
  const int behind = t.own.keys - n * KEYS;
  at.k.wait_full();
  issue_shared<KEYS, D, ROWS, KEYS>(s, q, at.k_tile());
  mma_wait<0>(), pin(s);
  at.k.release(), at.k.advance();
  weigh<true>(s, rows, a, n * KEYS, t);
  pack_all(s, p);
  if (VALUES && LENGTHS && behind < KEYS) at.v.wait_full(), zero_rows<KEYS>(behind, 1 + GROUPS + group, at.v_tile());
  auto step = [&](auto masked) {
    at.k.wait_full();
    named_sync(1 + group, 256);  // its turn at the tensor cores
    pin(s), pin(o), pin(p), mma_begin();
    multiply_shared<KEYS, D, ROWS, KEYS>(s, q, at.k_tile());
    mma_commit();
    if (VALUES) {
      at.v.wait_full();
      mma_begin();
      multiply_registers<KEYS, D>(o, p, at.v_tile(), add);
      mma_commit();
    }
    named_arrive(1 + (group + 1) % GROUPS, 256);
    mma_wait<VALUES>(), pin(s);
    at.k.release(), at.k.advance();
    bool grown = weigh<decltype(masked)::value>(s, rows, a, n * KEYS, t);
    if (!VALUES) return;
    order_after(rows.l[0] + rows.l[1]);  // or the assembler moves the wait above the exponentials
    mma_wait<0>(), pin(o);
    at.v.release(), at.v.advance();
    if (grown) mul_rows(o, a);
    pack_all(s, p);
    add = 1;
  };
  NO_UNROLL for (n--; n >= max(blocks.closed, blocks.begin); n--) step(Is<true>());
  NO_UNROLL for (; n >= blocks.open; n--) step(Is<false>());
#if WINDOW
  NO_UNROLL for (; n >= blocks.begin; n--) step(Is<true>());
#endif
  queries.release();
  if (!VALUES) return;
  at.v.wait_full();
  pin(o), issue_registers<KEYS, D>(o, p, at.v_tile(), add);
  mma_wait<0>(), pin(o);
  at.v.release(), at.v.advance();
}
// lse of the rows, and the factors of o in `over`. A sink joins here: it weighs, and has no value.
DEV void end_rows(const ForwardArgs& call, const Work& w, const Own& own, int row, float unit, const Maxima& rows, float (&over)[2]) {
  float sink = call.sinks ? call.sinks[w.head] : -INF;
  UNROLL(r, 2) {
    float l = quad_sum(rows.l[r]), m = rows.m[r] * unit;
    bool seen = l != 0;
    over[r] = seen ? 1 / l : 0;
    float sum = seen ? m + logf(l) : -INF;
    if (sink != -INF) {
      float top = seen ? fmaxf(m, sink) : sink, own = seen ? weight(m, top) : 0, all = own * l + (seen ? weight(sink, top) : 1);
      sum = top + logf(all), over[r] = seen ? own / all : 0;
    }
    if (lane_id() % 4 == 0 && row + 8 * r < own.queries)
      call.lse[((size_t)own.batch * call.shape.heads + w.head) * call.shape.queries + own.query_start + row + 8 * r] = sum;
  }
}

DEV void consume(u32 base, const ForwardArgs& call) {
  const int group = own_group();
  const float unit = OPTIONS ? call.options.unit.natural : call.shape.scale;  // of products
  Places at(base);
  if (group == GROUPS - 1) named_arrive(1, 256);  // group 0 begins
  Work w;
  Own own;
  for (Tiles queries = {base, 0}; queries.take<true>(call, w, own); queries.advance()) {
    const Range blocks = key_blocks<GROUPS, KEYS>(call.spans, own, w.block);
    const int first = w.block * ROWS + group * 64, row = first + own_row();
    const Seen seen(call.spans, call.shape, own, row);
    const BiasRows bias(call.options, own, w.head, row);
    Maxima rows;
    float o[D / 2], over[2];
    if (blocks.end > blocks.begin) walk(o, rows, at, queries, {call, own, blocks, seen, bias, unit * LOG2E});
    else clear(o), queries.release();
    end_rows(call, w, own, row, unit, rows, over);
    if (!VALUES) continue;
    if (!is_finite(o, row, own.queries)) {
      const Shape& shape = call.shape;
      raise<OF_OUTPUTS>(call.flags, w.batch * shape.key_heads + w.head / (shape.heads / shape.key_heads));
    }
    mul_rows(o, over);
    if (LENGTHS == 1) clear_rows(o, row, own.queries);  // what q holds beyond a sequence is not to be seen
    store_output(&call.o, call.o_rows, w, own, first, base + AT_O + group * STAGING, 1 + GROUPS + group, o);
  }
  if (threadIdx.x % 128 == 0) store_wait();
}

KERNEL(forward, ForwardArgs c, 128 * (GROUPS + 1), 1) {
  const u32 base = shared_panels();
  make_barriers([&] {
    prefetch(&c.q), prefetch(&c.k);
    if (VALUES) prefetch(&c.v), prefetch(&c.o);
    QRing::init(base, 1, 4 * GROUPS * ARRIVALS);
    KRing::init(base, 1, 4 * GROUPS * ARRIVALS), VRing::init(base, 1, 4 * GROUPS * ARRIVALS);
  });
  auto feed = [&] {
    if (threadIdx.x == 0) produce(base, c);
  };
  divide_roles<GROUPS == 2 ? 40 : 32, GROUPS == 2 ? 232 : 160>(feed, [&] { consume(base, c); });
}
