// Sequences and their tiles of 64 rows or keys, as the host lists them or tables.cu makes them.
struct Sequence { int batch, query_start, queries, key_start, keys, first_tile; };
struct Tile { int begin, end; };  // the keys that some row of a tile of 64 rows may see, in any head
struct Span { int begin, end; };  // the keys that a row may see, within its sequence; begin < 0: a row of no sequence
struct Task { int first, sequences, row_tile, key_tile; };  // tiles of the sequences first .. first + sequences

// ---- numbers that are not finite ----
// A sum in f32 that is not finite, before it is scaled, divided and rounded, raises the flag of its group, the key
// head of one sequence; `fallback` (portable kernels) then computes the results of the group again. It is always
// enqueued, so that the host need not wait, and exits where there is no flag. Finite sums are right, since what is not
// finite cannot leave them. Of attention and attention_lse (lazy attention: activity.cuh):
//   * P and ds of a hidden pair are 0, and each meets its operand in a product: 0 · NaN and 0 · ∞ are NaN. Rows behind
//     a sequence (of the next one, or padding, in a box of the copy engine) are 0 before a product sums over them, and
//     no flag looks at their own results: a group has the bits that it has alone.
//   * exp2 hides S = −∞ alone, whose weight is 0 by definition, and tanh an infinite product, whose score is the
//     softcap by definition; ∞ and NaN stay, and ∞ · 0 is NaN.
//   * Packing turns what exceeds the type into ∞, which the next product keeps.
//   * Forward, the maximum hides a NaN, and P of NaN, and of S = +∞ = m, is NaN. It reaches o, and lse, which is NaN
//     by definition then: attention_lse needs no flag. An old sum times 0 keeps NaN and ∞; a sum of no weights is 0
//     and its lse −∞. A sink joins behind the sums, and what is not finite of it is so by definition.
//   * Backward there is no maximum. lse = +∞ makes P = 0 of every finite S, as the definition does, and NaN of every
//     other. An lse or δ that is NaN makes P or ds NaN; an infinite δ makes ds infinite or NaN.
// dsinks and dbias are sums over groups: they read operands, lse and δ, no result of these kernels.
//
// Places that raise flags, and that which keeps rows of other sequences from raising them. A test compiles kernels
// without each, by its number, or without any (-1), and expects wrong results.
#ifndef DROP
#define DROP 0
#endif
constexpr int OF_KEYS = 1, OF_QUERIES = 2, OF_WEIGHTS = 3, OF_ROWS = 4, OF_PARTIALS = 5, OF_PRODUCTS = 6, OF_OUTPUTS = 7,
              OF_TANGENTS = 8;
// A sum of a group is not finite: flag 0 says so of some group, those behind it of each.
template <int PLACE> DEV void raise(u32* flags, int group) {
  if (PLACE != DROP && DROP >= 0) flags[0] = flags[1 + group] = 1;
}

// The range from the first to the last that two tiles see.
DEV Tile both(const Tile& x, const Tile& y) {
  if (x.begin >= x.end) return y;
  return y.begin < y.end ? Tile{min(x.begin, y.begin), max(x.end, y.end)} : x;
}

// The weight of a pair that is not visible: x + (-0)·y is x for every finite y, and where y is not finite the bits
// tell that it must be left out.
constexpr u32 HIDDEN = 0x80000000u;
DEV bool hidden(float p) { return __float_as_uint(p) == HIDDEN; }
DEV float shown(float p) { return p + 0.0f; }  // -0 becomes +0
#define HIDE __uint_as_float(HIDDEN)
