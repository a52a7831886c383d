// Linear cross-entropy on the tensor cores of compute capability 9.0.
//
// One loop serves four kernels. A block computes tiles of 128 x 256, or 128 x 192, of a product; its rows are
//
//   leaves    tokens, its columns classes: of h w^T only the nodes of the tree leave the chip  (C1), (C2), (C33)
//   gradient  the same; da goes to memory in the storage type, for a chunk of classes  (C15), (C16)
//   hidden    tokens, its columns elements: da w  (C17)
//   head      classes, its columns elements: da^T h  (C18)
//
//   cluster of two blocks: two tiles of rows, the same columns; each block loads its own panel of a and half of the
//     panel of b, which it sends to both: 32 instead of 48 KiB of reads from the L2 a block and step of 64
//   producer: one thread, of `leaves` one for each ring
//   consumers: two warpgroups, each 64 x 256 (128 accumulators a thread)
//
// Order of tiles: a group of pairs of row tiles x all columns, so that tiles that run side by side share a and b in
// the L2.
//
// Tokens: the nodes of a token are put together by sm90a_tree.cu, along the tree of the portable
// kernels. `leaves` walks up to 32 pairs of row tiles, 8192 tokens, before the next columns, so that w is read about
// once; the others walk 8. It has a ring of stages for w, shared by the cluster, and one for the rows of h of each
// warpgroup, which thus waits for the other block's loads of w alone. Where tokens may be ignored – on a device always
// – rows of the others are copied side by side unless all count. Links, smoothing, entropy and argmax are loops of
// their own behind a product.
//
// Maxima: without bias and link the largest of the first 64 of 256 classes is m of a node. No class may weigh more
// than 2^8 relative to it, the lag that (N63) has room for: where the sum of the weights is larger, or not finite, the
// row is computed again with the largest of all. That depends on the row's logits of the tile alone, so that bits of m
// and l do not depend on what is computed beside. Without smoothing, entropy and argmax such a problem has a path of
// its own; with them a node also has its largest logit.
//
// dh is summed class after class within a block of classes, a quarter of the tree; blocks are put together along the
// tree. A chunk that begins within one has the sum so far as its accumulators, and dw of several chunks of tokens
// likewise: bits of dh and dw depend neither on `memory_budget` nor on the number of multiprocessors (f16: unless da
// underflows). How many classes a chunk has, and where tiles of dh have 192 columns: linear_cross_entropy/plan.rs. dw
// of a single chunk of tokens is written by the copy engine, in rows of 128 bytes.
//
// f16: da of a mean over many tokens would be 0; a class of probability 10^-4 and 8192 tokens leave 10^-8, half the
// smallest number. `scale` bounds |da| of a chunk of tokens by their pulls (C15), da is stored times the power of two
// that takes the bound to 32,752 … 65,504, and sums of dh, dw and dbias are divided by it, exactly. Relative to the
// largest |da| of the chunk nothing underflows above 2^-29, and what does is lost below 2^-40, where (N73) has room
// for 2^-25. The factor is below 1 only where the bound exceeds 65,504; one serves all tokens of a chunk, since dw
// sums over them.
//
// Between the products of two tiles the tensor cores wait: some 2700 of 39,500 clocks a tile, of which the
// exponentials of 128 × 256 logits are 2048. So nothing is divided there, loads run under the first products of a
// tile, and one half of da is stored while the other is computed.
enum Kind { LEAVES, GRADIENT, HIDDEN, HEAD };
constexpr int ROWS = 128, STEP = 64, PANEL = 64 * 128;
// Tiles so many columns wide, in stages of STEP of the reduction.
template <Kind K, int COLUMNS> struct Stages {
  static constexpr int COUNT = COLUMNS == 256 ? 4 : 5;
  static constexpr u32 A = ROWS * STEP * 2, B = COLUMNS * STEP * 2, BYTES = A + B;
  // Two panels for each warpgroup, from which tiles are stored.
  static constexpr u32 AT_STORE = COUNT * BYTES, AT_BARRIERS = AT_STORE + (K == GRADIENT || K == HEAD ? 4 * PANEL : 0);
  using Ring = ::Ring<COUNT, AT_BARRIERS>;
  static constexpr u32 ALL = 1024 + Ring::END;  // 1024 to align the panels
};

// `leaves` has a ring for b and one for each warpgroup's 64 rows of a: only what is loaded for both blocks waits for
// both.
struct Rings {
  static constexpr int COUNT_A = 4, COUNT_B = 5;
  static constexpr u32 B = TILE * STEP * 2, AT_B = COUNT_A * 2 * PANEL, AT_BARRIERS = AT_B + COUNT_B * B;
  using RingA = Ring<COUNT_A, AT_BARRIERS>;  // that of the second warpgroup lies behind it
  using RingB = Ring<COUNT_B, AT_BARRIERS + 32 * COUNT_A>;
  static constexpr u32 ALL = 1024 + RingB::END;
  u32 base;
  METHOD RingA ring_a(int group, u32 parity) const { return {base + 16 * COUNT_A * group, parity}; }
  METHOD u32 a(int group, u32 i) const { return base + (2 * i + group) * PANEL; }
  METHOD u32 b(u32 i) const { return base + AT_B + i * B; }
  // Released by the 4 warps of a group, or by the 8 of both blocks.
  METHOD void begin() const {
    RingA::init(base, 1, 4), RingA::init(base + 16 * COUNT_A, 1, 4), RingB::init(base, 1, 2 * 8);
  }
};

KERNEL_ARGS(ProductArgs)
struct Corner { int row, column; };

// Extents of a kernel's tiles. `count`: the tokens of the chunk that count.
template <Kind K> DEV int row_count(const CrossEntropyArgs& c, int count) { return K == HEAD ? c.classes : count; }
template <Kind K> DEV int column_count(const CrossEntropyArgs& c) { return K < HIDDEN ? c.classes : c.dim; }
template <Kind K> DEV int reduction(const CrossEntropyArgs& c, int count) { return K < HIDDEN ? c.dim : K == HIDDEN ? c.classes : count; }

DEV bool all_count(const CrossEntropyArgs& c) { return c.common->counted == c.all; }

// The place of a block among the tiles. The tensor cores wait for what comes between the products of two tiles: so no
// division.
template <Kind K, int COLUMNS> struct Walk {
  static constexpr int GROUP = K == LEAVES ? 32 : 8;
  int pairs, columns, group, rest;
  METHOD Walk(int pairs, int columns) : pairs(pairs), columns(columns), group(0), rest(blockIdx.x / 2) { into_group(); }
  METHOD void into_group() {
    NO_UNROLL for (; rest >= GROUP * columns; rest -= GROUP * columns) group++;
  }
  METHOD void next() { rest += gridDim.x / 2, into_group(); }
  METHOD int tall() const { return min(GROUP, pairs - group * GROUP); }
  METHOD bool there() const { return rest < tall() * columns; }
  METHOD Corner corner() const {
    const int high = tall(), c = high == GROUP ? rest / GROUP : rest / high;
    return {((group * GROUP + rest - c * high) * 2 + (int)cluster_rank()) * ROWS, c * COLUMNS};
  }
};

// ---- feed ----
template <Kind K, int COLUMNS> DEV void produce(u32 base, const ProductArgs& x, int count, int pairs, int columns) {
  typedef Stages<K, COLUMNS> S;
  typename S::Ring ring = {base, 1};
  const u32 rank = cluster_rank();
  const int length = reduction<K>(x.c, count);
  const bool in_place = K != HIDDEN && all_count(x.c);
  const TensorMap* const a = in_place && K != HEAD ? &x.in_place : &x.a;
  const TensorMap* const b = in_place && K == HEAD ? &x.in_place : &x.b;
  NO_UNROLL for (Walk<K, COLUMNS> walk(pairs, columns); walk.there(); walk.next()) {
    const Corner at = walk.corner();
    NO_UNROLL for (int k = 0; k < length; k += STEP) {
      const u32 to = base + ring.stage() * S::BYTES, to_b = to + S::A;
      const u32 full = ring.fill(S::BYTES);  // both blocks have released it: the other's half lands here too
      if (K == HEAD) load2(to, a, full, at.row, k), load2(to + PANEL, a, full, at.row + 64, k);
      else load2(to, a, full, k, at.row);
      if (K < HIDDEN) {
        load2_multicast(to_b + rank * (S::B / 2), b, full, k, at.column + rank * (COLUMNS / 2), 3);
      } else {
        auto panel = [&](int n) { load2_multicast(to_b + n * PANEL, b, full, at.column + 64 * n, k, 3); };
        panel(rank);
        if (COLUMNS == 256) panel(2 + rank);
        else if ((k / STEP & 1) == rank) panel(2);  // of three panels the last one in turns
      }
      ring.advance();
    }
  }
}

// The same for `leaves`: rows of a warpgroup, or, as 2, of b. Boxes of a have 64 rows.
DEV void produce_rings(Rings s, const ProductArgs& x, int pairs, int columns, int group) {
  Rings::RingA rows = s.ring_a(group, 1);
  Rings::RingB classes = {s.base, 1};
  const u32 part = cluster_rank() * (Rings::B / 2), first = cluster_rank() * (TILE / 2);
  const TensorMap* const a = all_count(x.c) ? &x.in_place : &x.a;
  NO_UNROLL for (Walk<LEAVES, TILE> walk(pairs, columns); walk.there(); walk.next()) {
    const Corner at = walk.corner();
    NO_UNROLL for (int k = 0; k < x.c.dim; k += STEP) {
      if (group < 2) {
        load2(s.a(group, rows.stage()), a, rows.fill(PANEL), k, at.row + 64 * group), rows.advance();
      } else {  // both blocks have released it: the other's half lands here too
        load2_multicast(s.b(classes.stage()) + part, &x.b, classes.fill(Rings::B), k, at.column + first, 3);
        classes.advance();
      }
    }
  }
}

// ---- multiply ----
// One step of 64 of a warpgroup's 64 rows.
template <Kind K, int COLUMNS> DEV void step(float (&z)[COLUMNS / 2], u32 a, u32 b, bool add) {
  constexpr int A = K == HEAD ? MN_MAJOR : K_MAJOR, B = K < HIDDEN ? K_MAJOR : MN_MAJOR;
  UNROLL(i, STEP / 16) {
    const u64 x = A == MN_MAJOR ? mn_major(a + 2048 * i, PANEL) : k_major(a + 32 * i);
    const u64 y = B == MN_MAJOR ? mn_major(b + 2048 * i, PANEL) : k_major(b + 32 * i);
    Mma<COLUMNS>::template ss<A, B>(z, x, y, add || i);
  }
}

// The column of a thread's accumulator 4j + 2r + e in a tile, of row r of its two.
DEV int column_of(int j, int e) { return 8 * j + 2 * (threadIdx.x & 3) + e; }

// Calls f(i, class) for each accumulator of a row in the chunk's columns from `first` on; i counts from the row's
// first.
template <class F> DEV void each_class(int first, F f) {
  UNROLL2(j, TILE / 8, e, 2) f(4 * j + e, first + column_of(j, e));
}
DEV bool any_target(int target, int first) { return __any_sync(~0u, (u32)(target - first) < TILE); }

// (C1), (C2): logits in place of the accumulators of both rows. What a problem does not have takes no time, here as
// below.
DEV void link(const CrossEntropyArgs& c, float (&z)[TILE / 2], int first) {
  if (c.bias)
    each_class(first, [&](int i, int v) {
      const float bias = v < c.classes ? read(c.bias[c.first_class + v]) : 0;
      z[i] += bias, z[i + 2] += bias;
    });
  if (c.ratio != 0 || c.factor != 1)
    UNROLL(i, TILE / 2) z[i] = logit(c, z[i]);
}

// ---- leaves ----
// True if leaves have no more than m and l.
DEV bool is_short(const CrossEntropyArgs& c) { return !c.entropy && !(c.smoothing > 0) && !c.argmax; }

// The largest logit of both rows, of the first COUNT classes of a tile, which four lanes share.
template <int COUNT> DEV void find_largest(const float (&z)[TILE / 2], float (&largest)[2]) {
  float m[4] = {-INF, -INF, -INF, -INF};
  UNROLL(i, COUNT / 2) m[i & 3] = max_nan(m[i & 3], z[i]);
  UNROLL(r, 2) largest[r] = quad_max_nan(max_nan(m[2 * r], m[2 * r + 1]));
}
// The m of differences: 0 where no class has a weight.
DEV float origin(float m) { return m == -INF ? 0 : m; }

// l of both rows. Their exponentials follow one another without a gap.
DEV void find_sums(const float (&z)[TILE / 2], const float (&m)[2], float (&sums)[2]) {
  float l[4] = {};
  UNROLL(i, TILE / 2) l[i & 3] += weight(z[i], origin(m[i / 2 & 1]));
  UNROLL(r, 2) sums[r] = quad_sum(l[2 * r] + l[2 * r + 1]);
}

// (C33) of a row, given m, l and its largest logit. What lies beyond the last class is -inf.
DEV Node leaf(const CrossEntropyArgs& c, const float* z, float m, float l, float largest, int first) {
  Node n = {};
  n.m = m, n.l = l, n.largest = largest;
  const float from = origin(m);
  if (c.entropy) {
    each_class(first, [&](int i, int) { n.u += weight(z[i], from) * at_least(z[i] - from); });
    n.u = quad_sum(n.u);
  }
  if (c.smoothing > 0) {
    each_class(first, [&](int i, int v) {
      const float cw = v >= c.classes ? 0 : c.class_weights ? c.class_weights[c.first_class + v] : 1;
      n.weight += cw, n.s += weigh(cw, z[i] - from);
    });
    n.s = quad_sum(n.s), n.weight = quad_sum(n.weight);
  }
  if (c.argmax) {
    int best = 0x7fffffff;
    each_class(first, [&](int i, int v) {
      if (v < best && (z[i] == largest || is_nan(z[i]))) best = v;
    });
    UNROLL_ALL for (int lane = 1; lane < 4; lane *= 2) best = min(best, __shfl_xor_sync(~0u, best, lane));
    n.argmax = c.first_class + best;
  }
  return n;
}

// Numbers of both rows of a thread that are known before they are multiplied.
struct Rows { int target[2]; Pull pull[2]; };

// Element i of 2N, by halves.
template <int N> DEV float element_of(const float (&x)[2 * N], int i) {
  float half[N];
  UNROLL(k, N) half[k] = i & N ? x[k + N] : x[k];
  if constexpr (N == 1) return half[0];
  else return element_of<N / 2>(half, i);
}
// The logit of the target of a row, if the tile has it: of 256,000 classes a warp meets one in every 60th tile.
DEV void pick(const CrossEntropyArgs& c, const float* z, int target, int first, int token) {
  const u32 i = target - first;
  float of_lane[64];
  UNROLL(k, 64) of_lane[k] = z[4 * (k % 32) + k / 32];
  const float picked = element_of<32>(of_lane, i / 8 + 32 * (i & 1));
  if (i < TILE && i / 2 % 4 == lane_id() % 4) c.picked[2 * token] = picked;
}
// True if logits are the accumulators themselves.
DEV bool is_bare(const CrossEntropyArgs& c) { return !c.bias && c.ratio == 0 && c.factor == 1; }
// The same, and of them no more than m and l are asked for, or da.
DEV bool is_plain(const CrossEntropyArgs& c) { return is_bare(c) && is_short(c); }
// The most that a class may weigh relative to m (N63); none weighs more than the sum.
constexpr float MOST_LAG = 256;

// m and l of both rows, relative to the largest of the first quarter of a tile. Returns for which rows that one lags
// too far behind. Logits that are not bare have the largest of all for m.
struct Lags { bool of[2]; };
DEV Lags find_leaves(const float (&z)[TILE / 2], float (&m)[2], float (&l)[2]) {
  find_largest<TILE / 4>(z, m);
  find_sums(z, m, l);
  Lags lags;
  UNROLL(r, 2) lags.of[r] = !(l[r] <= MOST_LAG && fabsf(m[r]) < INF);
  return lags;
}

DEV void write_leaves(const ProductArgs& x, float (&z)[TILE / 2], const Rows& rows, const Corner& at, int row, int count, bool plain) {
  const CrossEntropyArgs& c = x.c;
  const i64 to = (i64)(at.column / TILE) * c.count + row;
  auto writes = [&](int r) { return lane_id() % 4 == 0 && row + 8 * r < count; };
  auto write = [&](const float (&m)[2], const float (&l)[2]) {
    UNROLL(r, 2)
      if (writes(r)) ((float2*)x.leaves)[to + 8 * r] = make_float2(m[r], l[r]);
  };
  float m[2], l[2];
  Lags lags = {true, true};
  if (plain && at.column + TILE <= c.classes) {
    lags = find_leaves(z, m, l);
    const bool rare = lags.of[0] || lags.of[1] || (u32)(rows.target[0] - at.column) < TILE || (u32)(rows.target[1] - at.column) < TILE;
    if (!__any_sync(~0u, rare)) return write(m, l);
  } else {
    link(c, z, at.column);
    if (at.column + TILE > c.classes)
      each_class(at.column, [&](int i, int v) { if (v >= c.classes) z[i] = z[i + 2] = -INF; });
    if (is_bare(c)) lags = find_leaves(z, m, l);
  }
  UNROLL(r, 2)
    if (any_target(rows.target[r], at.column)) pick(c, z + 2 * r, rows.target[r], at.column, c.first_token + row + 8 * r);
  float largest[2], sums[2];
  find_largest<TILE>(z, largest);
  if (__any_sync(~0u, lags.of[0] || lags.of[1])) {
    find_sums(z, largest, sums);
    UNROLL(r, 2)
      if (lags.of[r]) m[r] = largest[r], l[r] = sums[r];
  }
  if (is_short(c)) return write(m, l);
  UNROLL(r, 2) {
    const Node n = leaf(c, z + 2 * r, m[r], l[r], largest[r], at.column);
    if (writes(r)) ((Node*)x.leaves)[to + 8 * r] = n;
  }
}

// ---- gradients of logits ----
// The factor of da in f16.
constexpr bool SCALED = STORAGE == 2;
DEV float scale_of(const ProductArgs& x) { return SCALED ? *x.scale : 1; }
DEV float unscale_of(const ProductArgs& x) { return SCALED ? __int_as_float((254 << 23) - __float_as_int(*x.scale)) : 1; }
DEV Pull scaled(Pull y, float scale) {
  if (SCALED) y.both *= scale, y.eta *= scale, y.dentropy *= scale, y.own *= scale;
  return y;
}
// |da| of a token is at most this, from (C15): p |ln p| <= 1/e. What is not finite has no say.
DEV float bound_of(const CrossEntropyArgs& c, const Pull& y) {
  const float terms = fabsf(y.both) + fabsf(y.dentropy) * (0.5f + fabsf(y.ln_l - y.mean_shift)) + fabsf(y.eta) * c.common->largest;
  const float bound = max(fabsf(c.slope) * terms, fabsf(y.own));
  return bound < INF ? bound : 0;
}
KERNEL(scale, ProductArgs x, 1024) {
  __shared__ float warps[32];
  const CrossEntropyArgs& c = x.c;
  const int count = count_of(c);
  float bound = 0;
  for (int i = threadIdx.x; i < count; i += 1024) bound = max(bound, bound_of(c, c.pulls[c.first_token + i]));
  UNROLL_ALL for (int lane = 1; lane < 32; lane *= 2) bound = max(bound, __shfl_xor_sync(~0u, bound, lane));
  if (lane_id() == 0) warps[threadIdx.x / 32] = bound;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < 32; i++) bound = max(bound, warps[i]);
  // 2^(exponent - 127) <= bound 65536/65504, at which the largest number of f16 would be passed.
  const int exponent = __float_as_int(bound * (65536.f / 65504)) >> 23;
  *x.scale = bound == 0 ? 1 : __int_as_float(min(269 - exponent, 227) << 23);
}

// (C4)
DEV float probability(float z, const Pull& y, float ln_l) { return exp2_fast(fmaf(z - y.m, LOG2E, -ln_l)); }
DEV void put_own(float* z, const Pull& y, int first, int target) {
  if (any_target(target, first)) each_class(first, [&](int i, int v) { if (v == target) z[i] = y.own; });
}
// (C15), (C16) in place of the logits of a row.
DEV void pull_row(const CrossEntropyArgs& c, float* z, const Pull& y, int first, int target) {
  const float ln_l = y.ln_l * LOG2E, both = y.both * c.slope;
  if (c.ratio == 0 && !c.entropy && !(c.smoothing > 0)) {
    each_class(first, [&](int i, int) { z[i] = probability(z[i], y, ln_l) * both; });
  } else {
    each_class(first, [&](int i, int v) {
      const float p = probability(z[i], y, ln_l);
      float dz = p * y.both;
      if (c.entropy) dz -= y.dentropy * (p * (at_least(z[i] - y.m) - y.mean_shift));
      if (c.smoothing > 0 && v < c.classes) dz -= y.eta * (c.class_weights ? c.class_weights[c.first_class + v] : 1);
      z[i] = slope(c, z[i]) * dz;
    });
  }
  put_own(z, y, first, target);
  if (first + TILE > c.classes) each_class(first, [&](int i, int v) { if (v >= c.classes) z[i] = 0; });
}

// Stores a half of the 64 x 256 of a warpgroup, in the storage type.
DEV void store_half(const TensorMap* out, const float* z, const Corner& at, u32 to, int group, int half) {
  store_by_copy<64>(to, *(const float(*)[64])(z + 64 * half), 1 + group, [&] {
    const int column = at.column + half * 128, first = at.row + group * 64;
    store2(out, to, column, first), store2(out, to + PANEL, column + 64, first);
  });
}
DEV void store_tile(const TensorMap* out, const float (&z)[TILE / 2], const Corner& at, u32 to, int group) {
  UNROLL(half, 2) store_half(out, z, at, to, group, half);
}

// da of a tile, and stores it.
DEV void write_gradients(const ProductArgs& x, float (&z)[TILE / 2], const Rows& rows, const Corner& at, int row, int count, bool plain, u32 to,
                         int group) {
  const CrossEntropyArgs& c = x.c;
  if (plain && at.column + TILE <= c.classes && at.row + ROWS <= count) {
    const float ln_l[2] = {rows.pull[0].ln_l * LOG2E, rows.pull[1].ln_l * LOG2E};
    const float both[2] = {rows.pull[0].both * c.slope, rows.pull[1].both * c.slope};
    // A half is copied while the other is computed.
    UNROLL(half, 2) {
      UNROLL_ALL for (int i = 64 * half; i < 64 * half + 64; i++) {
        const int r = i / 2 & 1;
        z[i] = probability(z[i], rows.pull[r], ln_l[r]) * both[r];
      }
      UNROLL(r, 2) put_own(z + 2 * r, rows.pull[r], at.column, rows.target[r]);
      store_half(&x.out, z, at, to, group, half);
    }
    return;
  }
  link(c, z, at.column);
  UNROLL(r, 2) {
    pull_row(c, z + 2 * r, rows.pull[r], at.column, rows.target[r]);
    // `head` multiplies whole steps: rows without a token are 0.
    if (row + 8 * r >= count) each_class(at.column, [&](int k, int) { z[2 * r + k] = 0; });
  }
  store_tile(&x.out, z, at, to, group);
}

// The first of a thread's two rows in a tile.
DEV int row_in_tile() { return 64 * own_group() + own_row(); }
