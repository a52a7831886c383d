// The blocks of keys, and of queries, that a tile walks on sm_90a, and the pairs of a block that count.
//
// WINDOW 0: every pair. 1: query i sees the keys i + offset - left .. i + offset + right. 2 (SPANS): each query sees
// any range of keys, by the tables that rows.rs makes, or tables.cu on the device:
//
//   spans     of each row the keys that it sees
//   tiles     of each tile of 64 queries the keys between the first and the last that some row sees
//   common    of each tile of 64 queries the keys that all of its rows see
//   seen_by   of each tile of 64 keys the tiles of queries between the first and the last that may see some of it
//
// Blocks that hide no pair need no mask. A tile of queries walks all blocks between the first and the last that it
// sees. A tile of keys leaves out blocks of queries that see nothing of it: the producer says of each other one which
// it is, and whether it needs a mask.
KERNEL_ARGS(SpanTables)

// ---- keys of queries ----
// The keys that some row of M tiles of 64 queries sees, and those that all rows see.
struct Reach { int begin, end, from, to; };
template <int M> DEV Reach reach_of(const SpanTables& t, const Own& s, int block) {
  Reach all = {1 << 30, 0, 0, 1 << 30};
  UNROLL(m, M) {
    const int tile = block * M + m;
    if (tile * 64 >= s.queries) break;
    const Tile some = t.tiles[s.tile + tile], common = t.common[s.tile + tile];
    if (some.begin < some.end) all.begin = min(all.begin, some.begin), all.end = max(all.end, some.end);
    all.from = max(all.from, common.begin), all.to = min(all.to, common.end);
  }
  return all;
}
// The keys that a row sees by a window, and those of the rows `first` to `last`.
DEV int first_key(int row, const Own& s) { return max(0, row + s.offset - s.left); }
DEV int end_key(int row, const Own& s) { return min(s.keys, row + s.offset + s.right + 1); }
DEV Reach reach_of(const Own& s, int first, int last) {
  return {first_key(first, s), end_key(last, s), first_key(last, s), end_key(first, s)};
}
// Blocks of keys or queries from `begin` to before `end`, which see some of a tile; from `open` to before `closed`
// they see all, and the others need a mask.
struct Range { int begin, open, closed, end; };
// Blocks of keys of a block of 64·M queries. BRANCH: whether a branch or a selection handles one that sees no key: the
// order of instructions in the loops of `queries` is better after the second.
template <int M, int KEYS, bool BRANCH = true> DEV Range key_blocks(const SpanTables& t, const Own& s, int block) {
  constexpr int ROWS = 64 * M;
  if (!WINDOW) return {0, 0, s.keys / KEYS, (s.keys + KEYS - 1) / KEYS};
  const Reach all = SPANS ? reach_of<M>(t, s, block) : Reach{};
  const int first = block * ROWS + s.offset, last = min((block + 1) * ROWS, s.queries) - 1 + s.offset;
  int begin = SPANS ? all.begin : max(0, first - s.left), end = SPANS ? all.end : min(s.keys, last + s.right + 1);
  if (BRANCH && end <= begin) return {0, 0, 0, 0};
  if (end <= begin) begin = end = 0;
  Range r;
  r.begin = begin / KEYS, r.end = (end + KEYS - 1) / KEYS;
  r.closed = min(r.end, max(r.begin, (SPANS ? all.to : min(s.keys, max(0, first + s.right + 1))) / KEYS));
  r.open = min(r.closed, max(r.begin, ((SPANS ? all.from : max(0, last - s.left)) + KEYS - 1) / KEYS));
  return r;
}
// The keys that any row sees; none beyond the sequence. `all`: the extents of the arrays.
DEV Span span_of(const SpanTables& t, const Shape& all, const Own& s, int row) {
  if (!SPANS) return {first_key(row, s), row < s.queries ? end_key(row, s) : 0};
  return row < s.queries ? t.spans[(i64)s.batch * all.queries + s.query_start + row] : Span{0, 0};
}
// The keys that the two rows of a thread see, `row` and 8 below.
struct Seen {
#if WINDOW == 2
  Span of[2];
  METHOD Seen(const SpanTables& t, const Shape& all, const Own& s, int row)
      : of{span_of(t, all, s, row), span_of(t, all, s, row + 8)} {}
  METHOD int begin(int r) const { return of[r].begin; }
  METHOD int end(int r) const { return of[r].end; }
#else
  const Own& s;
  int row;
  METHOD Seen(const SpanTables&, const Shape&, const Own& own, int first) : s(own), row(first) {}
  METHOD int begin(int r) const { return WINDOW ? first_key(row + 8 * r, s) : 0; }
  METHOD int end(int r) const { return WINDOW ? end_key(row + 8 * r, s) : s.keys; }
#endif
};

// ---- queries of keys ----
// Blocks of 64·M queries of a block of 128 keys, whose first tile is a task of the list by keys; with SPANS all
// between the first and the last that see some of it.
template <int M> DEV Range query_blocks(const SpanTables& t, const Own& s, int block, int task) {
  constexpr int ROWS = 64 * M;
  if (SPANS) {
    Tile all = t.seen_by[task];
    if (block * 128 + 64 < s.keys) all = both(all, t.seen_by[task + 1]);
    const int begin = all.begin / M, end = (all.end + M - 1) / M;
    return {begin, begin, end, end};
  }
  const int count = (s.queries + ROWS - 1) / ROWS, first = block * 128 - s.offset;
  const int last = min(block * 128 + 128, s.keys) - 1 - s.offset;
  if (!WINDOW) return {0, 0, count, count};
  Range r;
  r.end = min(count, (max(0, last + s.left + 1) + ROWS - 1) / ROWS);
  r.begin = min(r.end, max(0, first - s.right) / ROWS);
  r.open = min(r.end, max(r.begin, (max(0, last - s.right) + ROWS - 1) / ROWS));
  r.closed = min(s.queries / ROWS, max(0, first + s.left + 1) / ROWS);  // rows behind the sequence are hidden
  r.closed = min(r.end, max(r.open, r.closed));
  return r;
}
// A block of queries that a block of keys walks: its number, and whether it needs a mask; SKIPPED: it sees nothing.
constexpr u32 CUT = 1u << 31, SKIPPED = ~0u;
template <int M> DEV u32 visit_of(const SpanTables& t, const Own& s, int block, int queries) {
  const Reach all = reach_of<M>(t, s, queries);
  const int key = block * 128, end = min(key + 128, s.keys);
  if (all.begin >= end || all.end <= key) return SKIPPED;
  // Rows of the next sequence may lie in the box.
  const bool sees_all = all.from <= key && end <= all.to && (queries + 1) * 64 * M <= s.queries;
  return queries | (sees_all ? 0 : CUT);
}
DEV int number_of(u32 visit) { return visit & ~CUT; }
// A bit for each pair of a thread with 64 queries, from `query` on: bit 4·j + 2·r + e for query 8·j + e and key
// `key` + 8·r.
DEV u32 visible(const SpanTables& t, const Shape& all, const Own& s, int query, int key) {
  const Span* spans = t.spans + (i64)s.batch * all.queries + s.query_start;
  u32 bits = 0;
  UNROLL2(j, 8, e, 2) {
    const int i = query + 8 * j + e;
    const Span span = i < s.queries ? spans[i] : Span{0, 0};
    UNROLL(r, 2)
      if (span.begin <= key + 8 * r && key + 8 * r < span.end) bits |= 1u << (4 * j + 2 * r + e);
  }
  return bits;
}
