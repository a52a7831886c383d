// The tables of a call whose lengths, offsets or masks' arrays lie on the device: as rows.rs makes them on the host,
// but there and in every call.
//
//   sequences   one block: the sequences, and which tiles are theirs
//   rows        a block has a tile of 64 queries: its place in the lists, the keys that its rows see, and the flags
//               of their pairs
//   intervals   of masks of which kernels of sm_90a read spans: a block has a tile of queries, the keys that all of
//               its rows see, and a tile of keys, the tiles of queries that may see some of it
//
// Whatever the numbers are, no row is read or written beyond the arrays: lengths and offsets are cut to them, and an
// offset below one before it counts as equal to that. Lists have room for the most tiles that there may be; tiles that
// do not exist belong to a sequence without rows behind the others, and are odd ones, which kernels of sm_90a leave to
// the tile before.

enum Kind { WINDOW, CHUNK, SEGMENTS, FLAGS, ALL, ANY, END };  // of a node of the mask
KERNEL_ARGS(TableArgs)
constexpr int SIDE = 64, SCAN = 1024, THREADS = 512, INTERVAL_THREADS = 128, AT_ONCE = 8;
DEV int tiles_of(int rows) { return (rows + SIDE - 1) / SIDE; }
DEV i64 number(const GivenArray& x, i64 at) { return x.wide ? ((const i64*)x.data)[at] : ((const int*)x.data)[at]; }
DEV int cut(i64 x, int most) { return x < 0 ? 0 : x > most ? most : (int)x; }

// ---- sequences ----
struct Extent { int start, count; };
// The rows of a sequence. `before`: the largest offset so far.
DEV Extent extent(const TableArgs& a, const GivenArray& x, int all, int s, int& before) {
  if (!a.packed) return {0, x.data ? cut(number(x, s), all) : all};
  before = max(before, cut(number(x, s), all));
  return {before, max(before, cut(number(x, s + 1), all)) - before};
}
// The sum, or the largest, of the numbers of the threads before this one.
DEV i64 before(i64 own, bool largest) {
  __shared__ i64 room[SCAN];
  auto join = [&](i64 x, i64 y) { return largest ? max(x, y) : x + y; };
  const int t = threadIdx.x;
  room[t] = own;
  __syncthreads();
  for (int n = 1; n < SCAN; n *= 2) {
    const i64 x = t >= n ? join(room[t - n], room[t]) : room[t];
    __syncthreads();
    room[t] = x;
    __syncthreads();
  }
  const i64 all = t ? room[t - 1] : 0;
  __syncthreads();
  return all;
}
KERNEL(sequences, TableArgs a, SCAN) {
  const int each = (a.count + SCAN - 1) / SCAN, first = min((int)threadIdx.x * each, a.count), end = min(first + each, a.count);
  int query = 0, key = 0;
  if (a.packed) {
    for (int s = first; s < end; s++) query = max(query, cut(number(a.query, s), a.queries)), key = max(key, cut(number(a.key, s), a.keys));
    query = before(query, true), key = before(key, true);
  }
  i64 of[3] = {};
  int at[2] = {query, key};
  for (int s = first; s < end; s++) {
    const int n = tiles_of(extent(a, a.query, a.queries, s, at[0]).count), m = tiles_of(extent(a, a.key, a.keys, s, at[1]).count);
    of[0] += n, of[1] += m, of[2] += (i64)n * m;
  }
  for (int i = 0; i < 3; i++) of[i] = before(of[i], false);
  auto put = [&](int s) { for (int i = 0; i < 3; i++) a.firsts[i * (a.count + 1) + s] = (int)of[i]; };
  for (int s = first; s < end; s++) {
    const Extent q = extent(a, a.query, a.queries, s, query), k = extent(a, a.key, a.keys, s, key);
    a.sequences[s] = {a.packed ? 0 : s, q.start, q.count, k.start, k.count, (int)of[0]};
    if (a.lengths) a.lengths[s] = make_int2(q.count, k.count);
    put(s);
    const int n = tiles_of(q.count), m = tiles_of(k.count);
    of[0] += n, of[1] += m, of[2] += (i64)n * m;
  }
  if (threadIdx.x < SCAN - 1) return;
  // Behind all others, so that they stay in the order of their rows; its tile behind all tiles.
  a.sequences[a.count] = {a.packed ? 0 : a.batch, a.packed ? a.queries : 0, 0, a.packed ? a.keys : 0, 0, max(a.query_tiles - 1, 0)};
  put(a.count);
}

// ---- which pairs count ----
// The key with which a query is aligned.
DEV i64 aligned(const Node& x, const Sequence& s, int i) { return x.bottom ? (i64)i + s.keys - s.queries : i; }
// The keys that a node lets a query see.
DEV Span span_of(const Node& x, const Sequence& s, int i) {
  const i64 own = aligned(x, s, i);
  i64 first = 0, last = s.keys;
  if (x.kind == WINDOW) {
    if (x.left >= 0) first = own - x.left;
    if (x.right >= 0) last = own + x.right;
  } else {
    first = own - (int)own % (int)x.left, last = own;  // before the first key the row is empty in any case
  }
  const int begin = cut(first, s.keys);
  return {begin, max(begin, cut(last + 1, s.keys))};
}
DEV bool is_span(const Node& x) { return x.kind == WINDOW || x.kind == CHUNK; }
// Of a mask whose nodes are spans, and lists of which all must hold.
DEV Span span_of(const TableArgs& a, const Sequence& s, int i) {
  Span all = {0, s.keys};
  for (int n = 0; n < a.node_count; n++) {
    if (!is_span(a.nodes[n])) continue;
    const Span own = span_of(a.nodes[n], s, i);
    all.begin = max(all.begin, own.begin), all.end = max(all.begin, min(all.end, own.end));
  }
  return all;
}
typedef bool Some[AT_ONCE];  // of keys of a sequence, each 32 behind the last: their loads overlap
template <class F> DEV void each(Some& own, int first, int keys, const F& holds) {
  UNROLL(e, AT_ONCE) own[e] = first + 32 * e < keys && holds(first + 32 * e);
}
DEV void holds(const TableArgs& a, const Node& x, const Sequence& s, int head, int i, int first, Some& own) {
  const i64 row = (i64)s.query_start + i;
  if (is_span(x)) {
    const Span span = span_of(x, s, i);
    each(own, first, s.keys, [&](int j) { return span.begin <= j && j < span.end; });
  } else if (x.kind == SEGMENTS) {
    const i64 id = number(a.arrays[x.query], s.batch * (i64)a.queries + row), at = s.batch * (i64)a.keys + s.key_start;
    const GivenArray ids = a.arrays[x.key];
    each(own, first, s.keys, [&](int j) { return id >= 0 && number(ids, at + j) == id; });
  } else {
    const u8* flags = (const u8*)a.arrays[x.query].data + s.batch * x.batch + head * x.head + row * a.keys + s.key_start;
    each(own, first, s.keys, [&](int j) { return flags[j] != 0; });
  }
}
// The keys that a query sees. Bit 0 of `all` is the result of the innermost list so far, bit 0 of `any` whether one is
// enough: lists are at most 33 deep.
DEV void allows(const TableArgs& a, const Sequence& s, int head, int i, int first, Some& own) {
  u64 all[AT_ONCE], any = 0;
  UNROLL(e, AT_ONCE) all[e] = 1;
  for (int n = 0; n < a.node_count; n++) {
    const Node x = a.nodes[n];
    const bool begins = x.kind == ALL || x.kind == ANY, ends = x.kind == END;
    if (begins) any = any << 1 | (x.kind == ANY);
    else if (ends) any >>= 1;
    else holds(a, x, s, head, i, first, own);
    UNROLL(e, AT_ONCE) {
      if (begins) {
        all[e] = all[e] << 1 | (x.kind == ALL);
        continue;
      }
      if (ends) own[e] = all[e] & 1, all[e] >>= 1;
      if (any & 1) all[e] |= own[e]; else if (!own[e]) all[e] &= ~1ull;
    }
  }
  UNROLL(e, AT_ONCE) own[e] = all[e] & 1;
}
// Writes the flags of a row, whose keys a warp shares, and finds the span that holds those of all heads.
DEV Span flagged(const TableArgs& a, const Sequence& s, int i) {
  int begin = s.keys, end = 0;
  for (int head = 0; head < a.heads; head++) {
    u8* flags = a.allowed + (((i64)s.batch * a.heads + head) * a.queries + s.query_start + i) * a.keys + s.key_start;
    for (int first = threadIdx.x % 32; first < s.keys; first += 32 * AT_ONCE) {
      Some own;
      allows(a, s, head, i, first, own);
      UNROLL(e, AT_ONCE) {
        const int j = first + 32 * e;
        if (j >= s.keys) break;
        flags[j] = own[e];
        if (own[e]) begin = min(begin, j), end = max(end, j + 1);
      }
    }
  }
  begin = __reduce_min_sync(~0u, begin), end = __reduce_max_sync(~0u, end);
  return {min(begin, end), end};
}

// ---- tiles ----
// The sequence of a tile of queries (0), keys (1) or pairs (2); `count` where it is none.
DEV int find(const TableArgs& a, int of, int tile) {
  const int* first = a.firsts + of * (a.count + 1);
  return tile < first[a.count] ? last_where(a.count, [&](int s) { return first[s] <= tile; }) : a.count;
}
DEV Task none(const TableArgs& a) { return {a.count, 0, 1, 1}; }
DEV Task pair_of(const TableArgs& a, int tile) {
  if (a.shared) return {0, a.count, tile / tiles_of(a.keys), tile % tiles_of(a.keys)};
  const int s = find(a, 2, tile);
  if (s == a.count) return none(a);
  const int own = tile - a.firsts[2 * (a.count + 1) + s], keys = tiles_of(a.sequences[s].keys);
  return {s, 1, own / keys, own % keys};
}
KERNEL(rows, TableArgs a, THREADS, 1) {
  __shared__ Tile seen;
  const int tile = blockIdx.x;
  for (i64 t = (i64)tile * THREADS + threadIdx.x; t < a.pair_tiles; t += (i64)gridDim.x * THREADS) a.by_pairs[t] = pair_of(a, t);
  if (threadIdx.x == 0 && tile < a.key_tiles) {
    const int s = find(a, 1, tile);
    a.by_keys[tile] = s < a.count ? Task{s, 1, 0, tile - a.firsts[a.count + 1 + s]} : none(a);
  }
  if (tile > a.query_tiles) return;
  const int n = find(a, 0, tile);
  const Sequence s = a.sequences[n];
  const int own = n < a.count ? tile - s.first_tile : 0;
  if (threadIdx.x == 0) seen = {s.keys, 0};
  __syncthreads();
  for (int r = threadIdx.x / 32; r < SIDE && own * SIDE + r < s.queries; r += THREADS / 32) {
    const int i = own * SIDE + r;
    const Span span = a.heads ? flagged(a, s, i) : span_of(a, s, i);
    if (threadIdx.x % 32) continue;
    a.spans[(i64)s.batch * a.queries + s.query_start + i] = span;
    if (span.begin < span.end) atomicMin(&seen.begin, span.begin), atomicMax(&seen.end, span.end);
  }
  __syncthreads();
  if (threadIdx.x) return;
  if (tile < a.query_tiles) a.by_queries[tile] = n < a.count ? Task{n, 1, own, 0} : none(a);
  a.tiles[tile] = seen.begin < seen.end ? seen : Tile{0, 0};
}

// ---- spans for sm_90a ----
KERNEL(intervals, TableArgs a, INTERVAL_THREADS) {
  __shared__ Tile common, seen_by;
  const int tile = blockIdx.x, t = threadIdx.x;
  if (t == 0) common = {0, a.keys}, seen_by = {a.query_tiles, 0};
  __syncthreads();
  const int n = find(a, 0, tile), m = find(a, 1, tile);
  if (n < a.count && t < SIDE) {
    const Sequence s = a.sequences[n];
    const int i = (tile - s.first_tile) * SIDE + t;
    if (i < s.queries) {
      const Span own = a.spans[(i64)s.batch * a.queries + s.query_start + i];
      atomicMax(&common.begin, own.begin), atomicMin(&common.end, own.end);
    }
  }
  if (m < a.count) {
    const Sequence s = a.sequences[m];
    const int first = (tile - a.firsts[a.count + 1 + m]) * SIDE;
    for (int i = t; i * SIDE < s.queries; i += INTERVAL_THREADS) {
      const Tile own = a.tiles[s.first_tile + i];
      if (own.begin < first + SIDE && own.end > first) atomicMin(&seen_by.begin, i), atomicMax(&seen_by.end, i + 1);
    }
  }
  __syncthreads();
  if (t) return;
  if (tile <= a.query_tiles) a.common[tile] = n < a.count && common.begin < common.end ? common : Tile{0, 0};
  if (tile < a.key_tiles) a.seen_by[tile] = seen_by.begin < seen_by.end ? seen_by : Tile{0, 0};
}
