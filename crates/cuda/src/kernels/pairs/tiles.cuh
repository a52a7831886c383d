// Sequences and their tiles of 64 rows or keys, as the host lists them or tables.cu makes them.
struct Sequence { int batch, query_start, queries, key_start, keys, first_tile; };
struct Tile { int begin, end; };  // the keys that some row of a tile of 64 rows may see, in any head
struct Span { int begin, end; };  // the keys that a row may see, within its sequence; begin < 0: a row of no sequence
struct Task { int first, sequences, row_tile, key_tile; };  // tiles of the sequences first .. first + sequences

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
