// lazy_attention forward for sm_90a, of 16-bit operands in f32 sums, with e rounded to the storage type before it is
// multiplied.
//
//   scores    a tile is 64·GROUPS queries of one head and walks the keys: lse, n, and by the largest score of each row
//             in each stripe of keys the stripes that may hold an active pair of 16 rows  (E1)–(E3), (E18)
//   values    a tile is 64·GROUPS queries of one head and walks the blocks of keys to which one of them may attend: S
//             again, e, o += e·v  (E4)–(E6)
//   sums      the same with P in place of e: Σ a P v, in f32  (E47)
//
// A warpgroup has 64 rows; while one waits for its products the others take exponentials.
//
// `scores` takes the products of a block in two halves of 64 keys, of rows of q that wait in registers: a lane has at
// most 112 registers with D and E up to 64, so that four warpgroups share a multiprocessor, else three. The largest
// scores, of all keys, wait in shared memory until lse is known. Each lane has a base of its own for each of its rows,
// one of its scores, which it raises when a score exceeds it by more than 8 ln 2; lanes meet at the end of the tile,
// so that no exponential waits for another lane.

// ---- lse, n and stripes ----
constexpr int SCORE_GROUPS = D == 64 ? 4 : 3;  // what fits the registers
using ScoreFeed = Feed<SCORE_GROUPS, SCORES>;
CHECK_SHARED(scores, ScoreFeed::BYTES);

constexpr int HALF = KEYS / 2;  // keys whose scores a warpgroup holds at a time
constexpr float LAG = 8 / LOG2E;  // the most that a score may exceed its base by: weights are at most 2^8
// Half a block whose scores all lie so far below the limit adds nothing to a thread's sum of a row. The base is a
// score of this row, so that each of these weights is below e^-17 < 2^-24 of the row's sum, and leaving it out errs by
// less than adding it may (docs/lazy_attention.md).
constexpr float FAINT = LAG + 17;

struct Sums {  // of the two rows of a thread, and its keys
  float base[2] = {-INF, -INF}, log2[2] = {0, 0};  // what is subtracted of scores, and -base·log2 e: 0 for -inf
  float limit[2] = {-INF, -INF};  // a score above it raises the base
  float l[2] = {0, 0}, top[2];  // the weights; the largest score of the stripe
  METHOD void raise(int r, float top) {
    const float next = max_nan(base[r], top);
    l[r] = __fmul_rn(l[r], weight(base[r], base_of(next)));
    base[r] = next, log2[r] = -__fmul_rn(base_of(next), LOG2E), limit[r] = next + LAG;
  }
};
// Takes the scores of half a block: the largest of them, and the sums of weights, which are not computed where they
// add nothing for any row of the warp. A row of which a key is hidden (`some`: one of the warp) subtracts before it
// multiplies: a lone key has the weight 1.
DEV void take(const float (&s)[HALF / 2], Sums& rows, bool some, const bool (&cut)[2]) {
  float top[2];
  bool faint[2];
  UNROLL(r, 2) {
    top[r] = row_max(s, r, max_nan), rows.top[r] = max_nan(rows.top[r], top[r]);
    faint[r] = top[r] < rows.limit[r] - FAINT;
  }
  if (__all_sync(~0u, faint[0] && faint[1])) return;
  if (__any_sync(~0u, top[0] > rows.limit[0] || top[1] > rows.limit[1])) {
    UNROLL(r, 2)
      if (top[r] > rows.limit[r]) rows.raise(r, top[r]);
  }
  auto add = [&](auto weigh) {
    float sum[4] = {0, 0, 0, 0};
    UNROLL(i, HALF / 2) sum[i % 4] += weigh(s[i], row_of_number(i));
    UNROLL(r, 2) rows.l[r] += faint[r] ? 0 : sum[2 * r] + sum[2 * r + 1];
  };
  if (some) add([&](float x, int r) {
    const float apart = __fmul_rn(__fsub_rn(x, base_of(rows.base[r])), LOG2E), at_once = fmaf(x, LOG2E, rows.log2[r]);
    return exp2_fast(cut[r] ? apart : at_once);
  });
  else add([&](float x, int r) { return exp2_fast(fmaf(x, LOG2E, rows.log2[r])); });
}

// lse and n of the rows of a tile, and which of the stripes from `stripe` to `highest` may hold an active pair.
DEV void settle_rows(const HopperLazyArgs& c, const Own& s, const Work& w, const Rows& own, const Sums& rows, int group, const float* tops, int stripe, int highest) {
  constexpr int ROWS = ScoreFeed::ROWS;
  const int warp = threadIdx.x / 32 - 4, lane = lane_id();
  float lse[2], offset[2];
  UNROLL(r, 2) {
    const int seen = max(own.seen[r].end - own.seen[r].begin, 0);
    const float most = quad_max_nan(rows.base[r]);
    const float sum = quad_sum(__fmul_rn(rows.l[r], weight(rows.base[r], base_of(most))));
    const Numbers numbers = counted(c.tau[w.head], seen);
    lse[r] = seen ? most + logf(sum) : -INF, offset[r] = numbers.offset;  // (E3)
    if (lane % 4 || own.row + 8 * r >= s.queries) continue;
    const i64 at = row_at(c, s, w.head, own.row + 8 * r);
    c.lse[at] = lse[r], c.numbers[at] = numbers;
    if (seen && !is_finite(lse[r])) raise<OF_LSE>(c, w.batch, w.head);
  }
  u32 bits = 0;
  NO_UNROLL for (int i = stripe + lane % 4; i <= highest; i += 4)  // (E18)
    UNROLL(r, 2)
      if (own.row + 8 * r < s.queries && may_be_active(tops[i * ROWS + 8 * r], lse[r], offset[r])) bits |= 1u << i;
  bits = __reduce_or_sync(~0u, bits);
  __syncwarp();
  const int at = w.block * SCORE_GROUPS + group;
  if (lane == 0 && at * SIDE < s.queries) c.active[((i64)(s.tile + at) * c.shape.heads + w.head) * 4 + warp % 4] = bits;
}

// The 16 rows of q of a warp, as the factor that products take from registers.
DEV void load_queries(u32 (&q)[D / 4], u32 tile, int row) {
  UNROLL(i, D / 16) {
    u32 x[4];
    load_blocks(tile + i / 4 * ScoreFeed::ROWS * 128 + swizzled(row + lane_id() % 16, 2 * (i % 4) + lane_id() / 16), x);
    UNROLL(e, 4) q[4 * i + e] = x[e];
  }
}
// Products with half a block of keys, by the lower word of its descriptor.
DEV void issue_half(float (&s)[HALF / 2], const u32 (&q)[D / 4], u32 k) {
  const u64 upper = k_major(0) >> 32 << 32;
  UNROLL(i, D / 16) Mma<HALF>::rs<K_MAJOR>(s, q + 4 * i, upper | (k + ((i / 4) * PANEL + (i % 4) * 32) / 16), i > 0);
}

struct ScoreWalk : QueryWalk<ScoreFeed>, QueryTile {
  static constexpr int ROWS = ScoreFeed::ROWS;
  float* const tops;
  const u32 k_first;
  int near_after, near_before;  // a half of a block whose first key lies between them has a bias

  METHOD ScoreWalk(const ScoreFeed& f, const HopperLazyArgs& call)
      : QueryWalk(f, call, opaque(f.base), __shfl_sync(~0u, own_group(), 0)), tops(f.tops() + row_in_tile()),
        k_first(opaque((u32)k_major(base + ScoreFeed::AT_K))) {}
  // Leaves out blocks of which no row of the warpgroup sees a key.
  METHOD void pass(int& n, int begin) {
    NO_UNROLL for (; n >= begin && !own.sees(n * KEYS); n--) blocks.wait_full(), blocks.release(), blocks.advance();
  }
  METHOD void multiply(float (&x)[HALF / 2], u32 (&q)[D / 4], u32 k) const {
    pin(x), pin(q), mma_begin();
    issue_half(x, q, k);
    mma_commit(), mma_wait<0>(), pin(x);
  }
  // Takes half a block, from `key` on.
  METHOD void weigh(float (&x)[HALF / 2], Sums& rows, int key, const float* bias) const {
    if (!own.sees(key, HALF)) return;
    score<-1>(x, c.shape.scale, near_after < key && key < near_before, bias);
    bool cut[2] = {}, some = false;
    if (!own.sees_all(key, HALF)) {
      hide(x, own.seen, key), some = true;
      UNROLL(r, 2) cut[r] = own.cuts(r, key, HALF);
    }
    take(x, rows, some, cut);
  }
  // Walks a tile, whose q lies in registers.
  METHOD void walk(u32 (&q)[D / 4], Sums& rows, int& stripe, int& highest) {
    const int each = stripe_blocks(s);
    int n = range.end - 1;
    pass(n, range.begin);
    stripe = n >= range.begin ? n / each : STRIPES, highest = n >= range.begin ? stripe : -1;
    int rest = n - stripe * each;
    rows.top[0] = rows.top[1] = -INF;
    NO_UNROLL for (; n >= range.begin && own.sees(n * KEYS); n--) {
      float x[HALF / 2];
      blocks.wait_full();
      check_keys(*this, n);
      const u32 k = __shfl_sync(~0u, k_first + blocks.stage() * (KV_BYTES / 16), 0);
      const float* const bias = feed.bias(blocks.stage()) + near;
      if (rest < 0) stripe--, rest = each - 1, rows.top[0] = rows.top[1] = -INF;
      rest--;
      multiply(x, q, k + HALF * 128 / 16);
      weigh(x, rows, n * KEYS + HALF, bias - HALF);
      multiply(x, q, k);
      weigh(x, rows, n * KEYS, bias);
      blocks.release(), blocks.advance();
      UNROLL(r, 2) {
        const float top = quad_max_nan(rows.top[r]);
        if (lane_id() % 4 == 0) tops[stripe * ROWS + 8 * r] = top;
      }
    }
    pass(n, range.begin);
  }
  METHOD void all() {
    for (; tiles.take<true>(c, w, s); tiles.advance()) {
      find_rows(*this);
      const int distance = distance_of(c, s, first_row(*this), 0);
      near_after = opaque(c.bias ? distance - HALF - c.width : 0);
      near_before = opaque(c.bias ? distance + 64 : 0);
      Sums rows;
      u32 q[D / 4];
      load_queries(q, base + tiles.stage() * ScoreFeed::TILE_BYTES, (threadIdx.x / 32 - 4) * 16);
      int stripe, highest;
      walk(q, rows, stripe, highest);
      tiles.release();
      settle_rows(c, s, w, own, rows, group, tops, stripe, highest);
    }
  }
};
KERNEL(scores, HopperLazyArgs c, 128 * (SCORE_GROUPS + 1), 1) {
  ScoreFeed feed;
  feed.run<32, SCORE_GROUPS == 4 ? 112 : 160>(c, [&] { ScoreWalk(feed, c).all(); });
}

// ---- o and Σ a P v ----
constexpr int VALUE_GROUPS = D == 64 ? 3 : 2;  // what fits the registers
using ValueFeed = Feed<VALUE_GROUPS, VALUES>;
CHECK_SHARED(values, ValueFeed::BYTES);
CHECK_SHARED(sums, ValueFeed::BYTES);

// The factor of v where it is above 0: e, or P where Σ a P v is wanted, from S (E4), (E5).
template <bool MASKED, bool PV> DEV void activate(float (&s)[KEYS / 2], const float (&base)[2], const float (&offset)[2]) {
  UNROLL(i, KEYS / 2) {
    const float x = s[i], p = weight(x, base[i / 2 % 2]), e = raised(p, offset[i / 2 % 2]);
    s[i] = PV ? (e <= 0 ? 0 : p) : e;
    if (MASKED && x == -INF) s[i] = 0;
  }
}
// Σ a P v of this thread's rows.
DEV void store_wide(const HopperLazyArgs& c, const Own& s, const Work& w, int row, float (&o)[D / 2]) {
  UNROLL(r, 2) {
    const int first = own_column(), count = row + 8 * r < s.queries ? c.columns - first : 0;
    float* to = c.pv.data + s.batch * c.pv.batch + w.head * c.pv.head + (s.query_start + row + 8 * r) * c.pv.row + first;
    each_in_row(o, r, [&](float x, int column) { if (column < count) to[column] = x; });
  }
}

template <bool PV> struct ValueWalk : QueryWalk<ValueFeed>, QueryTile {
  static constexpr int ROWS = ValueFeed::ROWS;
  ValueFeed::Values v_ring;
  bool flies;  // whether the product of the block before is on its way

  METHOD ValueWalk(const ValueFeed& f, const HopperLazyArgs& call) : QueryWalk(f, call, f.base, own_group()), v_ring(f.base, 0) {}
  METHOD void leave_k() { blocks.release(), blocks.advance(); }
  METHOD void leave_v() { v_ring.release(), v_ring.advance(); }
  METHOD void land() {
    if (flies) leave_v();
    flies = false;
  }
  // Adds a block that the rows attend to.
  METHOD void step(float (&o)[D / 2], u32 (&p)[KEYS / 4], u32 q, int n) {
    float x[KEYS / 2];
    issue_shared<KEYS, D, ROWS, KEYS>(x, k_major(q), k_major(base + ValueFeed::AT_K + blocks.stage() * KV_BYTES));
    mma_wait<0>(), pin(x), pin(o), pin(p);
    land();
    score_block(x, *this, n);
    leave_k();
    if (own.is_cut(n * KEYS)) {
      hide(x, own.seen, n * KEYS);
      activate<true, PV>(x, lse, offset);
    } else {
      activate<false, PV>(x, lse, offset);
    }
    pack_above(x, p);
    v_ring.wait_full();
    const u32 v = base + ValueFeed::AT_V + v_ring.stage() * KV_BYTES;
    if (PACKED && n * KEYS + KEYS > s.keys) zero_rows<KEYS>(s.keys - n * KEYS, 1 + group, v);
    pin(o), issue_registers<KEYS, D>(o, p, mn_major(v, KEYS * 128));  // (E6)
    flies = true;
  }
  // Walks the blocks of `stripes`, of which it attends to `mine`.
  METHOD void walk(float (&o)[D / 2], u32 q, u32 stripes, u32 mine) {
    const int each = stripe_blocks(s);
    u32 p[KEYS / 4];
    flies = false;
    NO_UNROLL for (int n = ValueFeed::next(range.end - 1, range.begin, stripes, each); n >= range.begin; n = ValueFeed::next(n - 1, range.begin, stripes, each)) {
      blocks.wait_full();
      if (mine >> n / each & 1 && own.sees(n * KEYS)) {
        step(o, p, q, n);
        continue;
      }
      mma_wait<0>(), pin(o), pin(p);
      land();
      leave_k();
      v_ring.wait_full();
      leave_v();
    }
    mma_wait<0>(), pin(o), pin(p);
    land();
  }
  METHOD void all() {
    const u32 staging = base + ValueFeed::AT_OUT + group * 64 * D * 2;
    for (; tiles.take<true>(c, w, s); tiles.advance()) {
      find_rows(*this);
      // The stripes that the warpgroups walk, and those that this one attends to.
      auto word = [&](int of) { return (u32)uniform<true>(load_word(tiles.word() + 4 + 4 * of)); };
      const u32 stripes = word(0) | word(1) | word(2), mine = word(group);
      float o[D / 2];
      load_numbers(*this);
      clear(o);
      walk(o, base + tiles.stage() * ValueFeed::TILE_BYTES + group * 64 * 128, stripes, mine);
      tiles.release();
      if (!is_finite(o, own.row, s.queries)) raise<OF_OUTPUTS>(c, w.batch, w.head);
      if (PV) store_wide(c, s, w, own.row, o);
      else store_output(&c.o, c.o_rows, w, s, first_row(*this), staging, 1 + group, o);
    }
    if (threadIdx.x % 128 == 0) store_wait();
  }
};
template <bool PV> DEV void all_values(const HopperLazyArgs& c) {
  ValueFeed feed;
  feed.run<VALUE_GROUPS == 2 ? 40 : 32, VALUE_GROUPS == 2 ? 232 : 160>(c, [&] { ValueWalk<PV>(feed, c).all(); });
}
KERNEL(values, HopperLazyArgs c, 128 * (VALUE_GROUPS + 1), 1) { all_values<false>(c); }
KERNEL(sums, HopperLazyArgs c, 128 * (VALUE_GROUPS + 1), 1) { all_values<true>(c); }
