// attention and attention_lse forward for sm_90a: o and lse of 16-bit operands in f32 sums, with P in the storage
// type.
//
//   scheduler (a warp of warpgroup 0):     per work tile: claim it, find its sequence and key blocks, tell the others
//   producer (one thread of warpgroup 0):  per work tile: load q; per key block, last to first: load k, load v
//   consumer (warpgroups 1..):             64 query rows each; per key block n, last to first:
//        issue  S' = q·k_nᵀ                 (wgmma, shared × shared)  (F1)
//        issue  o += P·v_{n+1}              (wgmma, registers × shared: P of the block before)  (F5)
//        wait S';  m, P' = exp2((S' − m)·c), l;  wait o;  o *= exp2((m_old − m)·c);  P = P'  (F3), (F4)
// The products of one warpgroup run under the exponentials of the other (they take turns at the tensor cores), and the
// previous block's P·v runs under the exponentials of its own warpgroup. Blocks claim work tiles from a counter
// (`work_of`); results do not depend on the claims. Masks: spans.cuh.
//
// The exponentials wait for no maximum: whether one grows by more than SLACK is asked first (`may_grow`), and most
// blocks raise none.
//
// Columns are padded to 64 or 128; where D or E is above 128, to 192 of q and k beside 128 of v, or to 256 of all.
// There threads write o from their registers. Blocks beside 256 columns of v have 80 keys, and leave no register of a
// thread's 240 free in the loops: numbers of the tile are kept in memory.
//
// Softcap, bias, and a scale that is not above 0 are computed on the accumulators of S, in variants of their own; a
// bias is read where it lies, two elements at a time where these begin at multiples of 4 bytes; where it is all that
// is asked for and sequences have equal lengths (OPTIONS 2), the copy engine reads it in boxes, and o goes the way of
// wide rows, since its place holds a box. Packed sequences, and padded ones with options, are found in a table of
// tiles. The copy engine reads whole boxes, hence rows of the next sequence, which the mask hides; where a box ends
// beyond its sequence, threads write the rows one by one.
//
// A row subtracts its maximum before it multiplies by the scale where the block hides some key from it, with OPTIONS 2
// also where the maximum is beyond FAR, and else in one operation. That depends on the row alone: bits are the same in
// tiles of 128 and 192 rows, and for a mask as for a bias of −∞.
//
// Numbers that are not finite: pairs/tiles.cuh.
//
// Compile-time: STORAGE (1|2), D (64|128|192|256), E (128 beside D = 192; else absent, D), WINDOW (0: every pair; 2:
// spans), GROUPS (consumer warpgroups: 2 or 3, which fit the registers where D = 64), VALUES (0: attention_lse),
// LENGTHS (1: batch elements have extents of their own; 2: sequences are listed), OPTIONS (0: no softcap, no bias, a
// scale above 0; 2: a bias alone, in boxes).
#ifndef E
#define E D
#endif
constexpr bool WIDE = D > 128, WIDE_VALUES = VALUES && E > 128;
constexpr int KEYS = WIDE_VALUES ? 80 : 128, STAGES = 2;
constexpr int SLACK = 8;  // o is rescaled when the maximum of a row has grown by more than 2^SLACK

constexpr int ROWS = 64 * GROUPS;
constexpr u32 Q_BYTES = ROWS * D * 2, K_BYTES = KEYS * D * 2, V_BYTES = VALUES || !WIDE ? KEYS * E * 2 : 0;
constexpr bool BOXED = OPTIONS == 2;
constexpr bool STAGED = !WIDE && !BOXED;
constexpr u32 STAGING = STAGED ? 64 * D * 2 : 0;  // of each warpgroup: o on its way out, where it fits beside the rest
constexpr u32 BIAS_BYTES = BOXED ? ROWS * KEYS * 2 : 0;
constexpr u32 AT_K = Q_BYTES, AT_V = AT_K + STAGES * K_BYTES, AT_O = AT_V + STAGES * V_BYTES, AT_BIAS = AT_O + GROUPS * STAGING;
constexpr u32 AT_BARRIERS = AT_BIAS + STAGES * BIAS_BYTES;
using QRing = Ring<1, AT_BARRIERS>;
using KRing = Ring<STAGES, QRing::END, 1, true>;
using VRing = Ring<STAGES, KRing::END, 1, true>;
using BiasRing = Ring<STAGES, VRing::END, 1, true>;  // with BOXED alone
using TicketRing = Ring<1, BOXED ? BiasRing::END : VRing::END>;
constexpr u32 AT_TICKET = TicketRing::END;
static_assert(AT_TICKET % 16 == 0 && AT_TICKET + 48 <= AT_BARRIERS + 256, "a ticket");
constexpr int TAKEN = 15;  // the barrier of warps at which a ticket has been taken
// True if a warpgroup leaves out blocks, and half a block, behind the keys that its rows see. Two warpgroups with
// values do not: a tile ends with a block, and another begin of the loop costs as much as half a block. With LENGTHS,
// three have no registers for it.
constexpr bool SKIPS = WINDOW == 1 && !OPTIONS && (!VALUES || (GROUPS == 3 && !LENGTHS));
constexpr bool HALVES = SKIPS && KEYS == 128;
constexpr bool SKIPS_BOTH = SKIPS && VALUES;  // also before them, without values 1.03 times as long
// True if steps without a mask come in pairs, which pack P sooner. If their number is odd, the first has a mask that
// hides nothing: too much for the few steps of a causal mask.
constexpr bool BY_TWO = !WINDOW && VALUES && E == 128 && !OPTIONS;
// With BOXED: maxima beyond which exponents need not be finite before the maximum is subtracted, and the least maximum
// of an lse, over the unit.
constexpr float FAR = 1e30f, LEAST = -0.99f * LARGEST;
CHECK_SHARED(forward, 1024 + AT_BARRIERS + 256);  // the base is aligned to 1024 by hand

KERNEL_ARGS(ForwardArgs)
// A work tile as one thread tells it to the others: divisions, and loads that depend on loads, are not waited for by
// who multiplies or loads.
struct Ticket {
  Work w;
  Own own;
  Range blocks;

  // False: there are no more tiles.
  template <bool WARP> METHOD bool read(u32 base, const Shape& shape) {
    const uint4 x = load_piece(base + AT_TICKET), y = load_piece(base + AT_TICKET + 16);
    w = {uniform<WARP>(x.x), uniform<WARP>(x.y), uniform<WARP>(x.z), 0};
    blocks = {uniform<WARP>(y.x), uniform<WARP>(y.y), uniform<WARP>(y.z), uniform<WARP>(y.w)};
    own = {shape, w.batch, 0, 0, 0};
    if (LENGTHS) {
      const uint4 z = load_piece(base + AT_TICKET + 32);
      own.batch = uniform<WARP>(x.w), own.query_start = uniform<WARP>(z.x), own.queries = uniform<WARP>(z.y);
      own.key_start = uniform<WARP>(z.z), own.keys = uniform<WARP>(z.w);
      own.offset = shape.bottom ? own.keys - own.queries : 0;
    }
    return w.block >= 0;
  }
  METHOD void write(u32 base) const {
    store_piece(base + AT_TICKET, w.block, w.head, w.batch, own.batch);
    store_piece(base + AT_TICKET + 16, blocks.begin, blocks.open, blocks.closed, blocks.end);
    if (LENGTHS) store_piece(base + AT_TICKET + 32, own.query_start, own.queries, own.key_start, own.keys);
  }
};
// The maxima of the two rows of this thread, and the sums of their weights. `start`: of exponents, −m·c or 0.
struct Maxima {
  float m[2] = {-INF, -INF}, l[2] = {0, 0}, start[2] = {0, 0};
};

// A tile of work, as a warpgroup walks it. `c`: the scale of products, to base 2; `over`: 1/c.
struct WarpgroupTile {
  const ForwardArgs& call;
  const Own& own;
  const Range& blocks;
  const Seen& seen;
  const BiasRows& bias;
  float c, over;
  float of_bias, of_scores;  // with BOXED: factors of the bias and of products in scores
  int first;  // row of the warpgroup
  int end;    // of the blocks that its rows see,
  bool half;  // of the last of which they see the first half at most
};
// Hides what a row does not see; `cut`: the rows of which it hides something in this block.
template <bool MASK, int N> DEV void mask(float (&s)[N], bool (&cut)[2], int key, const Seen& seen) {
  cut[0] = cut[1] = false;
  if constexpr (MASK) {
    UNROLL(r, 2) {
      const int from = key + own_column();
      cut[r] = seen.end(r) < key + KEYS || seen.begin(r) > key;
      keep_bits(s, r, bits_between<N / 2>(WINDOW ? seen.begin(r) - from : 0, seen.end(r) - from));
    }
  }
}
// S over the unit (F2), from products; of which rows the bias hides something.
template <bool MASK, int N> DEV void extend(float (&s)[N], bool (&hides)[2], int key, const Own& own, const ScoreOptions& o, const BiasRows& x) {
  hides[0] = hides[1] = false;
  if (o.cap != 0) {
    UNROLL(i, N) s[i] = __fmul_rn(o.cap, tanh_of(s[i], o));
  } else if (o.unit.scale != 1) {
    UNROLL(i, N) s[i] = __fmul_rn(o.unit.scale, s[i]);
  }
  if (!x.of[0]) return;
  const int keys = own.keys - key - own_column();
  const bool pairs = has_pairs(o.bias, x.of[0]);
  UNROLL(r, 2) {
    UNROLL(j, N / 4) {
      float2 b = load_bias(x.of[r] + key + 8 * j, pairs, MASK ? keys - 8 * j : 2);
      float &even = s[4 * j + 2 * r], &odd = s[4 * j + 2 * r + 1];
      even = with_bias(even, b.x, o.unit.over), odd = with_bias(odd, b.y, o.unit.over);
      hides[r] |= fminf(even, odd) == -INF;
    }
    hides[r] = __any_sync(0xfu << (lane_id() & 28), hides[r]);
  }
}
// The same of a bias in boxes alone: `t` has the factors of both.
template <int N> DEV void extend_boxed(float (&s)[N], bool (&hides)[2], const BiasRing& biases, const WarpgroupTile& t) {
  const u32 row = threadIdx.x / 32 * 16 - 64 + lane_id() % 16;
  const u32 first = biases.base + AT_BIAS + biases.stage() * BIAS_BYTES + swizzled(row, lane_id() / 16);
  u32 most[2] = {0, 0};  // bits of biases of a row, in pairs: those of -∞ exceed those of all others but some NaN
  biases.wait_full();
  UNROLL(j, N / 8) {
    u32 x[4];
    load_blocks((first ^ j % 4 << 5) + j / 4 * (ROWS * 128), x);
    UNROLL(i, 4) {
      const float2 b = unpack(x[i]);
      float &even = s[8 * j + 2 * i], &odd = s[8 * j + 2 * i + 1];
      even = fmaf(b.x, t.of_bias, even * t.of_scores), odd = fmaf(b.y, t.of_bias, odd * t.of_scores);
    }
    UNROLL(r, 2) most[r] = __vimax3_u16x2(most[r], x[r], x[r + 2]);
  }
  biases.release();
  // One vote of the warp: those of four lanes take longer, and places of tiles lose their uniform registers.
  UNROLL(r, 2) hides[r] = __ballot_sync(~0u, max(most[r] & 0xffff, most[r] >> 16) >= (0x8000 | TOP)) & 0xfu << (lane_id() & 28);
}
// True if the maximum of a row of the warp may have grown by more than SLACK. Bits are asked as integers, of which an
// instruction takes three. The largest is that of the largest number, if this is above 0, and those of NaN exceed all
// limits but where their sign is set; a row that has such a NaN keeps its maximum, and has NaN in its sum.
template <int N> DEV bool may_grow(const float (&s)[N], const Maxima& rows, float over) {
  bool may[2];
  UNROLL(r, 2) {
    const float limit = fmaf(SLACK - 1, over, rows.m[r]);  // 1: of roundings
    may[r] = !(limit > 0) | (row_max_bits(s, r) >= __float_as_int(limit));
  }
  return __any_sync(~0u, may[0] | may[1]);
}
// Maxima that have grown by more than SLACK, and `a`, the factors of o and the old sums; whether there is one.
template <int N> DEV bool raise_maxima(const float (&s)[N], Maxima& rows, float (&a)[2], const WarpgroupTile& t) {
  float top[2];
  bool grown = false;
  UNROLL(r, 2) {
    top[r] = fmaxf(rows.m[r], quad_max(row_max(s, r, [](float x, float y) { return fmaxf(x, y); })));
    grown |= (top[r] - rows.m[r]) * t.c > SLACK;  // -inf − -inf is NaN: not grown
  }
  if (!__any_sync(~0u, grown)) return false;
  UNROLL(r, 2) {
    if (!((top[r] - rows.m[r]) * t.c > SLACK)) continue;  // each row for itself
    float from = top[r] == -INF ? 0 : top[r];             // a row that has seen nothing
    a[r] = exp2_fast((rows.m[r] - from) * t.c);
    rows.m[r] = top[r], rows.start[r] = -from * t.c;
    rows.l[r] *= a[r];
  }
  return true;
}
// The start of the exponents of a row; OPTIONS leave no registers to keep it.
DEV float start_of(const Maxima& rows, int r, float c) {
  if (OPTIONS) return rows.m[r] == -INF ? 0 : -rows.m[r] * c;
  return rows.start[r];
}
// New maxima; s becomes P (unnormalised), `a` the factors of o and the old sums. The maximum of a row that is cut is
// subtracted first: a lone key has P = 1.
template <bool MASK, int N> DEV bool soften(float (&s)[N], Maxima& rows, float (&a)[2], const WarpgroupTile& t, const bool (&cut)[2]) {
  a[0] = a[1] = 1;
  bool grown = false;
  if (__builtin_expect(may_grow(s, rows, t.over), false)) grown = raise_maxima(s, rows, a, t);
  UNROLL(r, 2) {
    float sum[2] = {0, 0};
    const bool subtracts = MASK && (cut[r] || (BOXED && fabsf(rows.m[r]) > FAR));
    float first = subtracts && rows.m[r] != -INF ? rows.m[r] : 0, then = subtracts ? 0 : start_of(rows, r, t.c);
    each_in_row(s, r, [&](float& x, int column) {
      x = exp2_fast(fmaf(MASK ? __fsub_rn(x, first) : x, t.c, then));
      sum[column % 2] += x;
    });
    rows.l[r] += sum[0] + sum[1];
  }
  return grown;
}
// `biases`: the place of the block's bias.
template <bool MASK, int N>
DEV bool weigh(float (&s)[N], Maxima& rows, float (&a)[2], int key, const BiasRing& biases, const WarpgroupTile& t) {
  bool cut[2];
  bool hides[2] = {};
  if constexpr (BOXED) extend_boxed(s, hides, biases, t);
  else if (OPTIONS) extend<MASK>(s, hides, key, t.own, t.call.options, t.bias);
  mask<MASK>(s, cut, key, t.seen);
  cut[0] |= hides[0], cut[1] |= hides[1];
  return soften<MASK || OPTIONS>(s, rows, a, t, cut);
}
// By a warp, which sleeps at a barrier: who asks a barrier in shared memory again and again takes slots from others.
DEV void schedule(u32 base, const ForwardArgs& c) {
  const int tiles = tiles_of<GROUPS>(c.shape, c.packed);
  TicketRing tickets = {base, 1};
  auto tell = [&](const Ticket& x) {
    tickets.wait_empty();
    if (lane_id() == 0) x.write(base), arrive(tickets.full());
    tickets.advance();
  };
  NO_UNROLL for (int t = blockIdx.x; t < tiles;) {
    Ticket x;
    x.w = work_of<GROUPS, false, true>(t, c.shape, c.packed, c.shape.heads_per_group);
    if (x.w.block >= 0) {
      x.own = of_batch<true>(c.shape, c.packed, x.w.batch);
      x.blocks = key_blocks<GROUPS, KEYS>(c.spans, x.own, x.w.block);
      tell(x);
      named_sync(TAKEN, 32 + 128 * GROUPS);  // claims no tile before the one told has begun
    }
    if (lane_id() == 0) t = claim_tile(c.counter, tiles);
    t = uniform<true>(t);
  }
  tell({{-1}});
}
DEV void produce(u32 base, const ForwardArgs& c) {
  const Shape& shape = c.shape;
  TicketRing tickets = {base, 0};
  QRing queries = {base, 1};
  KRing k_ring = {base, 1};
  VRing v_ring = {base, 1};
  BiasRing biases = {base, 1};
  const u64 policy = BOXED ? l2_policy(reads_bias_once(c.options)) : 0;
  auto load_k = [&](int row, int h, int b) {
    load5(base + AT_K + k_ring.stage() * K_BYTES, &c.k, k_ring.fill(K_BYTES), row, h, b), k_ring.advance();
  };
  auto load_v = [&](int row, int h, int b) {
    if (VALUES) load5(base + AT_V + v_ring.stage() * V_BYTES, &c.v, v_ring.fill(V_BYTES), row, h, b), v_ring.advance();
  };
  auto load_bias = [&](const Work& w, const Own& own, int key) {
    if (!BOXED) return;
    const u32 to = base + AT_BIAS + biases.stage() * BIAS_BYTES, full = biases.fill(BIAS_BYTES);
    const int head = bias_head(c.options, w.head), batch = bias_batch(c.options, own.batch);
    load_pairs(to, &c.bias, full, key, w.block * ROWS, head, batch, policy);
    load_pairs(to + ROWS * 128, &c.bias, full, key + 64, w.block * ROWS, head, batch, policy);
    biases.advance();
  };
  NO_UNROLL for (Ticket x;;) {
    tickets.wait_full();
    const bool more = x.read<false>(base, shape);
    arrive(tickets.empty()), tickets.advance();
    if (!more) break;
    const Own& own = x.own;
    const Work& w = x.w;
    const Range& blocks = x.blocks;
    int n = blocks.end, kh = w.head / (shape.heads / shape.key_heads);
    if (n == blocks.begin) continue;
    load5(base, &c.q, queries.fill(Q_BYTES), own.query_start + w.block * ROWS, w.head, own.batch), queries.advance();
    load_k(own.key_start + --n * KEYS, kh, own.batch);
    load_bias(w, own, n * KEYS);
    NO_UNROLL for (; n > blocks.begin; n--) {
      load_k(own.key_start + (n - 1) * KEYS, kh, own.batch), load_bias(w, own, (n - 1) * KEYS);
      load_v(own.key_start + n * KEYS, kh, own.batch);
    }
    load_v(own.key_start + n * KEYS, kh, own.batch);
  }
}

// A consumer's place in the rings. Those of v and bias follow from that of k, since all have as many stages and
// blocks. Behind the branch of `order_after` it could not advance in uniform registers.
struct Places {
  u32 base;
  KRing k;
  METHOD Places(u32 base) : base(base), k(base, 0) {}
  METHOD u32 k_tile() const { return base + AT_K + k.stage() * K_BYTES; }
  // The place of v of the block so many behind that of k.
  METHOD VRing v(u32 behind) const {
    VRing ring(base, 0);
    ring.at = k.at - behind;
    return ring;
  }
  METHOD BiasRing bias(u32 behind) const {
    BiasRing ring(base, 0);
    ring.at = k.at - behind;
    return ring;
  }
};
DEV u32 v_tile(const VRing& v) { return v.base + AT_V + v.stage() * V_BYTES; }
// The blocks of keys of a tile, which has some: o, not yet normalised, and the maxima and sums of rows.
DEV void walk(float (&o)[E / 2], Maxima& rows, Places& at, const QRing& queries, const WarpgroupTile& t) {
  const int group = uniform<true>(own_group());
  const u64 q = k_major(at.base + group * 64 * 128);
  const Range& blocks = t.blocks;
  u32 p[KEYS / 4];
  float a[2], s[KEYS / 2];
  int n = blocks.end - 1, add = 0;
  auto take_turn = [&] { named_sync(1 + group, 256); };  // at the tensor cores
  auto give_turn = [&] { named_arrive(1 + (group + 1) % GROUPS, 256); };
  // Leaves out blocks that the rows of the warpgroup do not see. All blocks of a tile but one have a turn.
  auto skip_to = [&](int end, bool behind) {
    NO_UNROLL for (; n >= end; n--) {
      at.k.wait_full(), at.k.release(), at.k.advance();
      if (VALUES) at.v(1).wait_full(), at.v(1).release();
      if (behind || n > blocks.begin) take_turn(), give_turn();
    }
  };
  if (SKIPS) {
    skip_to(t.end, false);
    if (n < blocks.begin) return clear(o), queries.release();
  }
  const bool lone = n == blocks.begin;
  // Rows of v behind the sequence, which the last block may hold.
  const int behind = t.own.keys - n * KEYS;
  queries.wait_full(), at.k.wait_full();
  auto begin = [&](auto& s) {
    constexpr int N = 2 * sizeof(s) / sizeof(s[0]);
    pin(s), mma_begin();
    multiply_shared<N, D, ROWS, KEYS>(s, q, k_major(at.k_tile()));
    mma_commit();
    mma_wait<0>(), pin(s);
    at.k.release();
    weigh<true>(s, rows, a, n * KEYS, at.bias(0), t);
    UNROLL(i, KEYS / 4) p[i] = i < N / 4 ? pack(s[2 * i % (N / 2)], s[2 * i % (N / 2) + 1]) : 0;
  };
  if (HALVES && t.half) {
    float half[KEYS / (HALVES ? 4 : 2)];
    begin(half);
  } else {
    begin(s);
  }
  at.k.advance();
  if (VALUES && LENGTHS && behind < KEYS) at.v(1).wait_full(), zero_rows<KEYS, E>(behind, 1 + GROUPS + group, v_tile(at.v(1)));
  // From factors `p`, which the product reads, to those of the next one. `ahead`: these are packed under it, into
  // registers of their own.
  auto step = [&](auto masked, auto ahead, u32 (&p)[KEYS / 4], u32 (&to)[KEYS / 4]) {
    at.k.wait_full();
    take_turn();
    pin(s), pin(o), pin(p), mma_begin();
    multiply_shared<KEYS, D, ROWS, KEYS>(s, q, k_major(at.k_tile()));
    mma_commit();
    if (VALUES) {
      at.v(1).wait_full();
      mma_begin();
      multiply_registers<KEYS, E>(o, p, mn_major(v_tile(at.v(1)), KEYS * 128), add);
      mma_commit();
    }
    give_turn();
    mma_wait<VALUES>(), pin(s);
    at.k.release(), at.k.advance();
    if (PACKED && n == blocks.begin) queries.release();  // early: the next tile is there before this one ends
    bool grown = weigh<decltype(masked)::value>(s, rows, a, n * KEYS, at.bias(1), t);
    if (!VALUES) return;
    if (decltype(ahead)::value) pack_all(s, to);
    order_after(rows.l[0] + rows.l[1]);  // or the assembler moves the wait above the exponentials
    mma_wait<0>(), pin(o);
    at.v(2).release();
    if (grown) mul_rows(o, a);
    if (!decltype(ahead)::value) pack_all(s, to);
    add = 1;
  };
  auto masked_step = [&] { step(Is<true>(), Is<false>(), p, p); };
  auto is_masked = [&] { return n >= max(blocks.closed, blocks.begin); };
  if (BY_TWO) {
    u32 other[KEYS / 4];
    NO_UNROLL for (n--; is_masked() || (n >= blocks.open && (n - blocks.open) % 2 == 0); n--) masked_step();
    NO_UNROLL for (; n >= blocks.open; n--) {
      step(Is<false>(), Is<true>(), p, other);
      n--, step(Is<false>(), Is<true>(), other, p);
    }
  } else {
    NO_UNROLL for (n--; is_masked(); n--) masked_step();
    NO_UNROLL for (; n >= blocks.open; n--) step(Is<false>(), Is<false>(), p, p);
  }
#if WINDOW
  const int begin_seen = SKIPS_BOTH ? max(blocks.begin, first_key(t.first, t.own) / KEYS) : blocks.begin;
  NO_UNROLL for (; n >= begin_seen; n--) masked_step();
#endif
  if (!PACKED || lone) queries.release();
  if (!VALUES) return;
  at.v(1).wait_full();
  pin(o), pin(p), mma_begin();
  multiply_registers<KEYS, E>(o, p, mn_major(v_tile(at.v(1)), KEYS * 128), add);
  mma_commit();
  mma_wait<0>(), pin(o);
  at.v(1).release();
  if (SKIPS_BOTH) skip_to(blocks.begin, true), at.k.at = uniform<true>(at.k.at);  // or the loops lose uniform registers
}
// lse of the rows, and the factors of o in `over`. A sink joins here: it weighs, and has no value.
DEV void end_rows(const ForwardArgs& call, const Work& w, const Own& own, int row, float unit, const Maxima& rows, float (&over)[2]) {
  float sink = call.sinks ? call.sinks[w.head] : -INF;
  UNROLL(r, 2) {
    float l = quad_sum(rows.l[r]), m = rows.m[r] * unit;
    // Scores of the backward pass end at -LARGEST: their weights are 0 where all lie below.
    if (BOXED) m = m < LEAST * call.options.unit.natural ? LEAST * call.options.unit.natural : m;
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

// The factor of products with BOXED, a power of two of 1/4 at most, with which that of the bias is below 1/2: no sum
// of a finite product and a finite bias overflows.
DEV float smaller_by(float over) { return __uint_as_float((252u << 23) - (max(__float_as_uint(over), 127u << 23) & 255u << 23)); }

// The same number in registers of lanes: an FFMA with a uniform register takes twice as long.
DEV float in_lanes(float x) { return __shfl_sync(~0u, x, lane_id()); }

DEV void consume(u32 base, const ForwardArgs& call) {
  const int group = uniform<true>(own_group());
  const float natural = OPTIONS ? call.options.unit.natural : call.shape.scale;  // the unit of products
  const float smaller = BOXED ? in_lanes(smaller_by(call.options.unit.over)) : 1, unit = natural / smaller;
  const float c = in_lanes(unit * LOG2E), of_bias = BOXED ? in_lanes(call.options.unit.over * smaller) : 0;
  Places at(base);
  if (group == GROUPS - 1) named_arrive(1, 256);  // group 0 begins
  TicketRing tickets = {base, 0};
  QRing queries = {base, 0};
  for (Ticket x;;) {
    tickets.wait_full();
    const bool more = x.read<true>(base, call.shape);
    tickets.release(), tickets.advance();
    if (!more) break;
    named_arrive(TAKEN, 32 + 128 * GROUPS);
    const Work& w = x.w;
    const Own& own = x.own;
    const Range& blocks = x.blocks;
    const int first = w.block * ROWS + group * 64, row = first + own_row();
    const Seen seen(call.spans, call.shape, own, row);
    const BiasRows bias(call.options, own, w.head, row);
    Maxima rows;
    float o[E / 2], over[2];
    // The keys that a window shows to its rows.
    const int keys = !SKIPS || first >= own.queries ? 0 : max(0, end_key(min(first + 64, own.queries) - 1, own));
    const int end = SKIPS ? max(blocks.begin, min(blocks.end, (keys + KEYS - 1) / KEYS)) : blocks.end;
    const WarpgroupTile tile = {call, own, blocks, seen, bias, c, 1 / c, of_bias, smaller, first, end, keys <= end * KEYS - KEYS / 2};
    if (blocks.end > blocks.begin) walk(o, rows, at, queries, tile), queries.advance();
    else clear(o);
    end_rows(call, w, own, row, unit, rows, over);
    if (!VALUES) continue;
    if (!is_finite(o, row, own.queries)) {
      const Shape& shape = call.shape;
      raise<OF_OUTPUTS>(call.flags, w.batch * shape.key_heads + w.head / (shape.heads / shape.key_heads));
    }
    mul_rows(o, over);
    if (LENGTHS == 1) clear_rows(o, row, own.queries);  // what q holds beyond a sequence is not to be seen
    if (!STAGED) {
      const int end = LENGTHS == 1 ? call.shape.queries : own.queries;
      store_row_pieces(call.o_rows, own.batch, w.head, own.query_start, row, end, o);
      continue;
    }
    store_output(&call.o, call.o_rows, w, own, first, base + AT_O + group * STAGING, 1 + GROUPS + group, o);
  }
  if (threadIdx.x % 128 == 0) store_wait();
}

KERNEL(forward, ForwardArgs c, 128 * (GROUPS + 1), 1) {
  const u32 base = shared_panels();
  make_barriers([&] {
    prefetch(&c.q), prefetch(&c.k);
    if (VALUES) prefetch(&c.v);
    if (VALUES && STAGED) prefetch(&c.o);
    if (BOXED) prefetch(&c.bias), BiasRing::init(base, 1, 4 * GROUPS * ARRIVALS);
    TicketRing::init(base, 1, 4 * GROUPS * ARRIVALS + 1), QRing::init(base, 1, 4 * GROUPS * ARRIVALS);
    KRing::init(base, 1, 4 * GROUPS * ARRIVALS), VRing::init(base, 1, 4 * GROUPS * ARRIVALS);
  });
  auto feed = [&] {
    if (threadIdx.x == 0) produce(base, c);
    if (threadIdx.x / 32 == 1) schedule(base, c);
  };
  constexpr int FEEDS = WIDE_VALUES ? 24 : GROUPS == 2 ? 40 : 32;
  divide_roles<FEEDS, WIDE_VALUES ? 240 : GROUPS == 2 ? 232 : 160>(feed, [&] { consume(base, c); });
}
