// Sequences and their tiles of 64 rows or keys, as the host lists them or tables.cu makes them.
struct Sequence { int batch, query_start, queries, key_start, keys, first_tile; };
struct Tile { int begin, end; };  // the keys that some row of a tile of 64 rows may see, in any head
struct Span { int begin, end; };  // the keys that a row may see, within its sequence; begin < 0: a row of no sequence
struct Task { int first, sequences, row_tile, key_tile; };  // tiles of the sequences first .. first + sequences

// Places that raise flags of groups, the key heads of sequences, and that which keeps rows of other sequences from
// raising them. A test compiles kernels without each of them, by its number, or without any (-1), and expects wrong
// results.
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
