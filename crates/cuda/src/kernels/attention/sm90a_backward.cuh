// attention backward for sm_90a in passes with one writer for each gradient: deterministic without atomics, 7 products
// in place of 5, because scores and dP are computed twice. P and dS are rounded to the storage type; sums are f32.
//
//   delta     lse2 = lse·log2 e (+inf where a row saw nothing or is padding: P = 0), delta = Σ dout ⊙ o − dlse    (B1)
//             in tiles, and delta of the rows of the arrays for `fallback`, dsinks and dbias
//   keys      a tile is 128 keys of one key head, 64 a warpgroup, and walks the query blocks of all its query heads:
//             Sᵀ = k·qᵀ, dPᵀ = v·doutᵀ, Pᵀ = exp2(c·Sᵀ − lse2), dv += Pᵀ·dout, dSᵀ = Pᵀ ⊙ (dPᵀ − delta), dk += dSᵀ·q
//             Scores are transposed, so Pᵀ and dSᵀ are A operands from registers; q and dout are read both ways from
//             one tile.                                                                                     (B6), (B7)
//   queries   a tile is 128 queries and walks the key blocks: S, dP, dS, dq += dS·k                               (B5)
//   values    dv where dk is not asked for: Sᵀ, Pᵀ, dv += Pᵀ·dout                                                 (B6)
//   fused     dq, dk and dv by keys: as `keys`, and of each block of queries dq' = dS·k of the tile's keys, which is
//             added to sums in f32: 5 products, in place of `keys` and `queries`                      (B5), (B6), (B7)
//   collect   dq from these sums
//   unseen    0 to dbias at pairs that `fused` does not walk
//   fallback  all results of groups that have a flag, by the code of the portable kernels (fallback.cu)
// Of attention_lse dS is P ⊙ dlse (L2), and delta = -dlse: `keys` and `queries` have the loop of `values`.
//
// There are as many blocks as multiprocessors, and they claim tiles from a counter. While two warpgroups multiply, one
// thread loads what they read next, of the next tile too, and another writes the results of the tile before.
//
// In `fused` the parts of a sum of dq join it in the order of the tiles of keys, whoever computes them and when: a
// number in memory says whose turn it is. The first tile writes its part, the others add theirs by the copy engine,
// and the last one sets the number to 0 again. `fused` claims all tiles from the counter, each head's in their order,
// and waits for earlier claims alone, whose blocks run: the smallest claim that is not done waits for nobody. Tiles
// walk the queries from the last to the first (Descent): a tile waits at its first block for the one that began with
// it, and then no more, since it sees no more queries.
//
// The others have its bits, for every mask and option and lengths of every form (TURNS): `keys` and `values` walk as
// it does, and `queries` computes the part of each tile of keys as a product of its own. So whoever asks for one
// gradient has the bits of all three, and sequences those that they have alone. A table of spans, or a bias of −∞,
// gives the numbers of the mask that says the same.
//
// Numbers that are not finite: pairs/tiles.cuh. P alone is selected; dS = P · (dP − delta) keeps a NaN of dP and of
// delta. lse2 = +∞ also stands for padding and a row that saw nothing.
//
// A gradient that is not asked for is not computed and, where all results are finite, changes no bit of the others. dk
// without dv is `keys` without the product of dv: three products. dv without dk and both gradients of attention_lse
// take two (sm90a_backward_weights.cu). These kernels are modules of their own. dv alone reads neither v nor o and has
// no δ.
//
// With D or E above 128 each gradient has a kernel of its own, in 8 products: sm90a_backward_wide.cu.
//
// Compile-time: STORAGE (1|2), D (64|128; wide 192|256), E (128 beside D = 192; else absent, D), WINDOW (0: every
// pair; 2: spans), LENGTHS (1: batch elements have extents of their own; 2: sequences are listed), OPTIONS (0: no
// softcap, no bias, a scale above 0; 2: a bias alone, in boxes, of which there is `fused` with D = 128 and no `keys`
// or `queries`), RESULTS (0: `keys` for dk and `queries` for dq, of attention_lse; 1: `keys` for dk and dv, `queries`
// for dq; 2: `keys` for dk alone, `values` for dv alone; absent from wide kernels).
#ifndef RESULTS
#define RESULTS 1
#endif
#ifndef E
#define E D
#endif
constexpr bool LSE = RESULTS == 0;
// True if dq is a sum of parts by tiles of keys, and these walk the queries downwards.
constexpr bool TURNS = RESULTS != 0 && D <= 128;
constexpr bool BOXED = OPTIONS == 2;
constexpr int STAGES = 3;  // query blocks in flight in keys
constexpr int OWN = 128;   // rows of a tile
KERNEL_ARGS(BackwardArgs)
// Rows of lse2 and delta: of every head, or of listed sequences tile after tile.
DEV i64 stat_rows(const Shape& s) { return (PACKED ? 1ll : s.batch) * s.heads * s.padded; }
DEV i64 stat_row(const Own& s, int head) { return (i64)(PACKED ? head : s.batch * s.heads + head) * s.padded + s.tile * 64; }
template <bool BY_KEYS> DEV int heads_together(const BackwardArgs& c) {
  return c.shape.heads_per_group * (BY_KEYS ? 1 : c.shape.heads / c.shape.key_heads);
}
// Copies lse2 of ROWS queries of a head from `row` on, and `with_delta` delta behind it.
template <int ROWS> DEV void load_numbers(u32 to, const BackwardArgs& c, const Own& s, int head, int row, bool with_delta, u32 full) {
  const i64 at = stat_row(s, opaque(head)) + row;
  load_bytes(to, c.lse2 + at, ROWS * 4, full);
  if (with_delta) load_bytes(to + ROWS * 4, c.delta + at, ROWS * 4, full);
}
// A tile that ends with its sequence, and not with the arrays: threads write its rows.
template <bool BY_KEYS> DEV bool is_cut(const Work& w, const Own& s) {
  return PACKED && w.block * OWN + OWN > (BY_KEYS ? s.keys : s.queries);
}
// The factor of a score in an exponent of 2.
DEV float exponent_unit(const BackwardArgs& call, const Own& s) { return (OPTIONS ? call.options.unit.natural : s.scale) * LOG2E; }
// From a product S over the unit (F2) and its slope S' (B4), with a softcap.
DEV void bend(float& x, float& slope, const ScoreOptions& o) {
  const float t = tanh_of(x, o);
  x = __fmul_rn(o.cap, t), slope = fmaf(-t, t, 1.0f);
}
// The same with any options.
DEV void extend(float& x, float& slope, const ScoreOptions& o, float bias) {
  slope = 1;
  if (o.cap != 0) {
    bend(x, slope, o);
  } else if (o.unit.scale != 1) {
    x = __fmul_rn(o.unit.scale, x);
  }
  if (o.bias.data) x = with_bias(x, bias, o.unit.over);
}
// ---- P of a thread's pairs ----
// A thread's rows of an accumulator, and columns of a block: weigh<MASKED>(p, head, first column, …) puts P in place
// of products, 0 if a pair is hidden, times -S' dlse of attention_lse.
template <bool KEYS> struct PairRows;
// Rows of queries, of attention_lse; columns are keys.
template <> struct PairRows<false> {
  const BackwardArgs& call;
  const Own& s;
  const Seen seen;
  const BiasRows bias;
  float c, lse2[2], delta[2];
  METHOD PairRows(const BackwardArgs& call, const Work& w, const Own& s, int row)
      : call(call), s(s), seen(call.spans, call.shape, s, row), bias(call.options, s, w.head, row) {
    c = exponent_unit(call, s);
    const i64 at = stat_row(s, w.head) + row;
    UNROLL(r, 2) lse2[r] = call.lse2[at + 8 * r], delta[r] = call.delta[at + 8 * r];
  }
  template <bool MASKED, int N, class... IGNORED> METHOD void weigh(float (&p)[N], int, int key, IGNORED...) const {
    const bool pairs = has_pairs(call.options.bias, bias.of[0]);
    UNROLL(r, 2) {
      const int from = key + 2 * (lane_id() & 3), stop = seen.end(r) - from, start = seen.begin(r) - from;
      UNROLL(j, N / 4) {
        const int count = MASKED ? s.keys - from - 8 * j : 2;
        const float2 b = OPTIONS && bias.of[r] ? load_bias(bias.of[r] + key + 8 * j, pairs, count) : float2{0, 0};
        UNROLL(e, 2) {
          float &y = p[4 * j + 2 * r + e], slope = 1;
          if (OPTIONS) extend(y, slope, call.options, e ? b.y : b.x);
          y = exp2_fast(fmaf(y, c, -lse2[r]));
          y *= -slope * delta[r];
          if (MASKED && (8 * j + e >= stop || (WINDOW && 8 * j + e < start))) y = 0;
        }
      }
    }
  }
};
// lse2 and delta of a thread's columns, of N numbers: their place, or it with lse2 loaded beforehand.
template <int N> struct Kept {
  u32 at;
  float2 lse2[N / 4];
  METHOD explicit Kept(u32 at) : at(at) {
    UNROLL(j, N / 4) lse2[j] = load_pair(at + 32 * j);
  }
};
DEV u32 place_of(u32 stats) { return stats; }
DEV float2 lse2_of(u32 stats, int j) { return load_pair(stats + 32 * j); }
template <int N> DEV u32 place_of(const Kept<N>& stats) { return stats.at; }
template <int N> DEV float2 lse2_of(const Kept<N>& stats, int j) { return stats.lse2[j]; }
// Rows of keys; columns are queries, whose lse2 and delta are `stats`. done(j, S') of each 8 columns. `shown`: with
// SPANS bits of pairs, of 64 columns each.
template <> struct PairRows<true> {
  const BackwardArgs& call;
  const Own& s;
  int row;
  float c;
  METHOD PairRows(const BackwardArgs& call, const Work&, const Own& s, int row) : call(call), s(s), row(row) {
    c = exponent_unit(call, s);
  }
  // The bias of a pair, 0 where it is none.
  METHOD float bias(int head, int query, int key) const {
    const Elements& all = call.options.bias;
    const bool there = all.data && query < s.queries && key < s.keys;
    return there ? read(row_of(all, s.batch, head, s.query_start + query)[s.key_start + key]) : 0;
  }
  template <bool MASKED, int N, class T, class F>
  METHOD void weigh(float (&p)[N], int head, int query, const T& stats, const u32 (&shown)[N / 32], F done) const {
    const int column = query + 2 * (lane_id() & 3);
    // The query on the diagonal. Not less `column`: that, and pairs that are seen in place of hidden ones, give the
    // loops with masks another order of instructions.
    const int seen = MASKED ? opaque(row) - s.offset - query - 2 * (lane_id() & 3) : 0;
    UNROLL(j, N / 4) {
      const float2 l = lse2_of(stats, j), x = LSE ? load_pair(place_of(stats) + 8 * N + 32 * j) : float2{0, 0};
      float slope[4] = {1, 1, 1, 1};
      UNROLL(r, 2) {
        int first = seen + 8 * r - s.right, last = seen + 8 * r + s.left;  // of the queries that see this key
        if (!WINDOW) first = 0, last = 1 << 30;
        if (PACKED && MASKED) last = min(last, s.queries - 1 - column);
        UNROLL(e, 2) {
          float& y = p[4 * j + 2 * r + e];
          if (OPTIONS) extend(y, slope[2 * r + e], call.options, bias(head, column + 8 * j + e, row + 8 * r));
          y = exp2_fast(fmaf(y, c, -(e ? l.y : l.x)));
          if (LSE) y *= -slope[2 * r + e] * (e ? x.y : x.x);
          // Last: a row of the next listed sequence may have an infinite dlse.
          const bool hidden = SPANS ? !(shown[j / 8] >> (4 * (j % 8) + 2 * r + e) & 1) : 8 * j + e < first || 8 * j + e > last;
          if (MASKED && hidden) y = 0;
        }
      }
      done(j, slope);
    }
  }
};
// dSᵀ of a thread's pairs, packed, from Pᵀ S' and dPᵀ: delta(j) of the columns from 8j on.
template <int N, class F> DEV void differ(const float (&p)[N], const float (&dp)[N], u32 (&ds)[N / 2], F delta) {
  UNROLL(j, N / 4) {
    const float2 x = delta(j);
    // A dbias of 0 is +0, as a sum that begins with 0 has it.
    auto product = [](float p, float x) { return BOXED ? fmaf(p, x, 0.0f) : p * x; };
    UNROLL(r, 2) ds[2 * j + r] = pack(product(p[4 * j + 2 * r], dp[4 * j + 2 * r] - x.x), product(p[4 * j + 2 * r + 1], dp[4 * j + 2 * r + 1] - x.y));
  }
}
// A result of a warpgroup: its sums, their factor, the rows of the tensor, and the place from which a tile is copied.
struct Result {
  float (&sums)[D / 2];
  float scale;
  const Elements& rows;
  u32 place;
};
// Results of a warpgroup whose first row is `row`: raises the flag of their group, and writes them to their places, or
// to the tensors themselves where rows of the next sequence lie in the box. `ready`: the places are no longer read.
// One check and one branch for all results: of one each, the loop before gets a slower order of instructions.
template <int PLACE, bool BY_KEYS, class F, class... R>
DEV void put_results(const BackwardArgs& c, const Work& w, const Own& s, int row, F ready, R... results) {
  const int count = BY_KEYS ? s.keys : s.queries, start = BY_KEYS ? s.key_start : s.query_start;
  if (LENGTHS == 1) (clear_rows(results.sums, row, count), ...);  // rows of no sequence
  if (!(is_finite(results.sums, row, count) && ...))
    raise<PLACE>(c.flags, w.batch * c.shape.key_heads + (BY_KEYS ? w.head : w.head / (s.heads / s.key_heads)));
  if (is_cut<BY_KEYS>(w, s)) {
    (store_rows(results.rows, s.batch, w.head, start, row, count, results.sums, results.scale), ...);
  } else {
    ready();
    (put_rows<OWN>(results.place, results.sums, results.scale), ...);
    proxy_fence();
  }
}
// The order in which a tile of keys walks the blocks of 64·M queries of its `each` query heads, where sums of dq have
// turns: from the last to the first, of all heads those of 128 queries after the other, whatever M.
template <int M> struct Descent {
  int block, head;
  METHOD void next(const Range& range, int each) {
    if (M == 1 && block % 2 && block > range.begin) {
      block--;
      return;
    }
    const bool last = ++head == each;
    if (last) head = 0;
    if (M == 2) block -= last;
    else block = last ? block / 2 * 2 - 1 : min(block | 1, range.end - 1);
  }
};
// Blocks that need no mask, such that both of 128 queries have one or none.
DEV Range by_pairs(Range range) {
  range.open = min(range.end, (range.open + 1) / 2 * 2);
  if (WINDOW) range.closed = max(range.begin, range.closed / 2 * 2);
  return range;
}
// Calls load(head, row, stage, barrier) for each block of ROWS rows that a tile walks, once its stage is empty; with
// SPANS a word of a stage says which block of queries it is, and whether it needs a mask.
template <int ROWS, bool BY_KEYS, u32 VISIT, class BLOCKS, class F>
DEV void feed_blocks(BLOCKS& blocks, const BackwardArgs& call, const Work& w, const Own& s, const Range& range, F load) {
  const int each = s.heads / s.key_heads;
  if (TURNS && BY_KEYS) {
    NO_UNROLL for (Descent<ROWS / 64> at = {range.end - 1, 0}; at.block >= range.begin; at.next(range, each)) {
      const u32 visit = SPANS ? visit_of<ROWS / 64>(call.spans, s, w.block, at.block) : 0;
      if (visit == SKIPPED && SPANS) continue;
      const u32 stage = blocks.stage(), full = blocks.full();
      blocks.wait_empty();
      if (SPANS) store_word(blocks.base + VISIT + 4 * stage, visit);
      load(w.head * each + at.head, at.block * ROWS, stage, full);
      blocks.advance();
    }
  } else NO_UNROLL for (int h = BY_KEYS ? w.head * each : w.head / each; h < (BY_KEYS ? (w.head + 1) * each : w.head / each + 1); h++)
    NO_UNROLL for (int row = range.begin * ROWS; row < range.end * ROWS; row += ROWS) {
      const u32 visit = SPANS && BY_KEYS ? visit_of<ROWS / 64>(call.spans, s, w.block, row / ROWS) : 0;
      if (visit == SKIPPED) continue;
      const u32 stage = blocks.stage(), full = blocks.full();
      blocks.wait_empty();
      if (SPANS && BY_KEYS) store_word(blocks.base + VISIT + 4 * stage, visit);
      load(h, row, stage, full);
      blocks.advance();
    }
}
// Copies the results of each tile from shared memory, by one thread: `copy` those of a stage, unless threads write
// their rows. OUT_FULL: the barriers of results, one for each stage. OUT_EMPTY: that of a place of their own; without
// one they lie where the tile's operands were.
template <bool BY_KEYS, u32 OUT_FULL, u32 OUT_EMPTY = 0, class TILES, class F> DEV void store_tiles(TILES tiles, const BackwardArgs& call, F copy) {
  Work w;
  Own s;
  NO_UNROLL for (; tiles.template take<false>(call, w, s); tiles.advance()) {
    if (OUT_EMPTY) arrive(tiles.empty());
    wait(tiles.base + OUT_FULL + 8 * tiles.stage(), tiles.phase());
    if (!is_cut<BY_KEYS>(w, s)) {
      copy(w, s, tiles.stage());
      store_commit(), store_wait_read();
    }
    arrive(OUT_EMPTY ? tiles.base + OUT_EMPTY : tiles.empty());
  }
  store_wait();
}
