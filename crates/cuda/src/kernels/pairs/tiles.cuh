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
