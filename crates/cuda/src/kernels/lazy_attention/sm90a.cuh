// Work tiles of lazy_attention for sm_90a, and scores with the bias by distance (E1), (E2).
//
// The bias is the same along the diagonals of an accumulator: a thread reads 34 numbers for 64 pairs. Stripes have 128
// keys up to 4096, and a multiple of that beyond. A warpgroup has 64 rows, and masks and leaves out blocks for itself,
// by a word of the stripes that its queries may attend to: the producer loads what one of them needs.
//
// Compile-time: STORAGE (1|2), D (64|128): D and E, rounded up; LENGTHS (2: sequences are listed; 0: all are those of
// the arrays); WINDOW (2: spans; without it: a window).
constexpr int KEYS = 128, SIDE = 64;  // keys of a block; rows of the host's tiles
constexpr u32 PANEL = KEYS * 128, KV_BYTES = KEYS * D * 2;

KERNEL_ARGS(HopperLazyArgs)
// Raises the flag of the group of a head of queries, of a sequence by its number.
template <int PLACE> DEV void raise(const HopperLazyArgs& c, int sequence, int head) {
  raise<PLACE>(c.flags, sequence * c.shape.key_heads + head / (c.shape.heads / c.shape.key_heads));
}

// ---- work tiles ----
template <bool BY_KEYS> DEV int heads_together(const HopperLazyArgs& c) {
  const int heads = c.shape.heads_per_group;
  return BY_KEYS ? max(1, heads / (c.shape.heads / c.shape.key_heads)) : heads;
}
template <bool WARP> DEV Own sequence_of(const HopperLazyArgs& c, int number) {
  Own s = of_batch<WARP>(c.shape, c.packed, number);
  if (!PACKED) s.tile = number * ((c.shape.queries + SIDE - 1) / SIDE);
  return s;
}
// Blocks of keys in at most 32 stripes of as many blocks each.
DEV int stripe_blocks(const Own& s) { return ((s.keys + KEYS - 1) / KEYS + STRIPES - 1) / STRIPES; }
DEV i64 row_at(const HopperLazyArgs& c, const Own& s, int head, int row) {
  return ((i64)s.batch * c.shape.heads + head) * c.shape.queries + s.query_start + row;
}

// ---- scores ----
// The distance of the first query of some rows and the first key of a block; whether some pair has a bias.
DEV int distance_of(const HopperLazyArgs& c, const Own& s, int row, int key) { return row + (c.bottom ? s.keys - s.queries : 0) - key; }
DEV bool is_near(const HopperLazyArgs& c, int distance, int rows) { return c.bias && distance + rows > 0 && distance - KEYS < c.width; }
// Puts the bias of query i and key j of such a block at KEYS - 1 + i - j, 0 where there is none, by a warp. True if
// one of the thread is -inf.
template <int ROWS> DEV bool put_bias(float* to, const HopperLazyArgs& c, int head, int distance) {
  bool hides = false;
  if (!is_near(c, distance, ROWS)) return hides;
  const float* from = c.bias + (i64)head * c.width;
  const int first = distance - (KEYS - 1) + (int)lane_id();
  UNROLL(t, (ROWS + KEYS) / 32) {
    const u32 d = first + 32 * t;
    const float bias = d < (u32)c.width ? from[d] : 0;
    hides |= bias == -INF, to[32 * t + lane_id()] = bias;
  }
  return hides;
}
// S (E1), (E2) from products of 64 rows and a block of keys, or half of one, rounded once: a bias of 0 changes no bit.
// `bias`: that of this thread's first row and column. SIGN: -1 if the columns are keys, 1 if they are queries.
template <int SIGN, int R> DEV void score(float (&s)[R], float scale, bool near, const float* bias) {
  if (!near) {
    UNROLL(i, R) s[i] = __fmul_rn(scale, s[i]);
    return;
  }
  UNROLL_ALL for (int d = -1; d < R / 4; d++)  // pairs on a diagonal of the thread's groups of 8 share their bias
    UNROLL(e, 2) {
      const float b = bias[SIGN * (8 * d + e)];
      if (d >= 0) s[4 * d + e] = __fmaf_rn(scale, s[4 * d + e], b);
      if (d + 1 < R / 4) s[4 * (d + 1) + 2 + e] = __fmaf_rn(scale, s[4 * (d + 1) + 2 + e], b);
    }
}
// Puts -inf where a row does not see a key.
template <int R> DEV void hide(float (&s)[R], const Span (&seen)[2], int key) {
  UNROLL(r, 2) {
    const int from = key + own_column();
    hide_outside(s, r, seen[r].begin - from, seen[r].end - from);
  }
}

// A pair in the storage type, 0 in place of what is below; NaN stays.
DEV u32 pack_above(float low, float high) { u32 r; asm("cvt.rn.relu." TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
template <int N> DEV void pack_above(const float (&x)[2 * N], u32 (&to)[N]) {
  UNROLL(i, N) to[i] = pack_above(x[2 * i], x[2 * i + 1]);
}
