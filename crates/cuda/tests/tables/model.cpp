// The kernels of pairs/tables.cu beside what they must make, on random problems.
#define STORAGE 0
#include "cuda.h"
#define asm(...)  // of functions of tile/types.cuh that no kernel here calls
#include "kernels.inc"
#undef asm
#include "memory.h"

// As the Rust side has them.
static_assert(sizeof(Sequence) == 24 && sizeof(Tile) == 8 && sizeof(Span) == 8 && sizeof(Task) == 16 && sizeof(Node) == 48);

static int round_now, failures;
static void check(bool holds, const char* what, i64 at = 0) {
  if (!holds && failures++ < 20) printf("round %d: %s at %lld\n", round_now, what, at);
}
static void beyond(int) {
  printf("round %d: an access beyond an array\n", round_now);
  fflush(stdout), _exit(1);
}
static i64 clamp(i64 x, i64 most) { return std::clamp<i64>(x, 0, most); }

// ---- masks ---------------------------------------------------------------------------------------------------------
enum Form { FULL, CAUSAL, REACHES, CHUNKED, IDS, ARRAY, AND, OR };
constexpr u64 OPEN = ~0ull;
constexpr int MOST_ARRAYS = 16, MOST_LISTS = 33;
struct Mask {
  Form form;
  bool bottom;                  // aligned with the last key
  u64 left, right;              // of REACHES, or OPEN; `left` of CHUNKED is its length
  std::vector<i64> query, key;  // of IDS
  std::vector<u8> flags;        // [batches, heads, queries, keys]
  int batches, heads, array;    // `array`: where among those of the kernel its first one is
  std::vector<Mask> list;
};
struct Problem {
  enum Form { DENSE, LENGTHS, PACKED } form;
  enum Bias { NONE, SHARED, OWN } bias;
  int batch, heads, queries, keys, count;
  std::vector<i64> query, key;  // lengths or offsets
  Mask mask;
  GivenArray given[2], arrays[MOST_ARRAYS];
  int array_count = 0;
};

static i64 reach(u64 x) { return std::min<u64>(x, 1ull << 62); }
static i64 own_key(const Mask& m, const Sequence& s, i64 i) { return m.bottom ? i + s.keys - s.queries : i; }
static i64 chunk_of(i64 x, i64 chunk) { return x >= 0 ? x / chunk : -((-x + chunk - 1) / chunk); }
// Mask::allows of crates/problem/src/mask.rs.
static bool allows(const Problem& p, const Mask& m, const Sequence& s, int head, int i, int j) {
  auto each = [&](const Mask& x) { return allows(p, x, s, head, i, j); };
  const i64 own = own_key(m, s, i), d = j - own, row = s.query_start + i, column = s.key_start + j;
  switch (m.form) {
    case FULL: return true;
    case CAUSAL: return d <= 0;
    case REACHES: return (m.left == OPEN || d >= -reach(m.left)) && (m.right == OPEN || d <= reach(m.right));
    case CHUNKED: return d <= 0 && chunk_of(own, reach(m.left)) == chunk_of(j, reach(m.left));
    case IDS: {
      const i64 id = m.query.at((i64)s.batch * p.queries + row);
      return id >= 0 && id == m.key.at((i64)s.batch * p.keys + column);
    }
    case ARRAY: {
      const i64 b = m.batches == 1 ? 0 : s.batch, h = m.heads == 1 ? 0 : head;
      return m.flags.at(((b * m.heads + h) * p.queries + row) * p.keys + column);
    }
    case AND: return std::all_of(m.list.begin(), m.list.end(), each);
    default: return std::any_of(m.list.begin(), m.list.end(), each);
  }
}
static bool is_plain(const Mask& m) {
  return m.form < IDS || m.form == AND && std::all_of(m.list.begin(), m.list.end(), is_plain);
}
static bool by_head(const Mask& m) {
  return m.form == ARRAY && m.heads > 1 || std::any_of(m.list.begin(), m.list.end(), by_head);
}
// Mask::row_span, of a plain mask.
static Span row_span(const Mask& m, const Sequence& s, int i) {
  i64 own = own_key(m, s, i), first = 0, last = s.keys - 1;
  if (m.form == AND) {
    Span all = {0, s.keys};
    for (const Mask& x : m.list) {
      const Span span = row_span(x, s, i);
      const int begin = max(all.begin, span.begin);
      all = {begin, max(begin, min(all.end, span.end))};
    }
    return all;
  }
  if (m.form == CAUSAL || m.form == CHUNKED) last = own;
  if (m.form == CHUNKED) first = chunk_of(own, reach(m.left)) * reach(m.left);
  if (m.form == REACHES && m.left != OPEN) first = own - reach(m.left);
  if (m.form == REACHES && m.right != OPEN) last = own + reach(m.right);
  const i64 begin = clamp(first, s.keys);
  return {(int)begin, (int)max(begin, clamp(last + 1, s.keys))};
}
// The nodes of a mask, as softmax/given.rs lists them.
static void add_nodes(const Problem& p, const Mask& m, std::vector<Node>& to) {
  auto distance = [](u64 x) { return x == OPEN ? -1ll : (i64)std::min<u64>(x, 0x7fffffff); };
  const i64 pairs = (i64)p.queries * p.keys, batch = m.batches == 1 ? 0 : m.heads * pairs, head = m.heads == 1 ? 0 : pairs;
  switch (m.form) {
    case FULL: return to.push_back({WINDOW, 0, -1, -1});
    case CAUSAL: return to.push_back({WINDOW, m.bottom, -1, 0});
    case REACHES: return to.push_back({WINDOW, m.bottom, distance(m.left), distance(m.right)});
    case CHUNKED: return to.push_back({CHUNK, m.bottom, distance(m.left)});
    case IDS: return to.push_back({SEGMENTS, 0, 0, 0, m.array, m.array + 1});
    case ARRAY: return to.push_back({FLAGS, 0, 0, 0, m.array, 0, batch, head});
    default: break;
  }
  to.push_back({m.form == AND ? ALL : ANY});
  for (const Mask& x : m.list) add_nodes(p, x, to);
  to.push_back({END});
}

// ---- random problems -----------------------------------------------------------------------------------------------
// Numbers for the kernel, of 64 bits or of 32, which may leave others of the list.
static GivenArray give(std::vector<i64>& list) {
  if (below(2)) return {memory.copy(list), 1};
  for (i64& x : list) x = (int)x;
  return {memory.copy(std::vector<int>(list.begin(), list.end())), 0};
}
static int some_rows() {
  constexpr int odd[] = {0, 1, 63, 64, 65, 127, 128, 129, 192};
  return below(4) ? 1 + below(200) : odd[below(9)];
}
static u64 some_distance() {
  constexpr u64 far[] = {0x7fffffff, 0x80000000, 0x100000003, 1ull << 62, (1ull << 63) + 5, OPEN - 1};
  const int kind = below(8);
  return kind == 0 ? far[below(6)] : kind == 1 ? 0 : kind < 4 ? below(8) : below(220);
}
static Mask random_array(Problem& p, Form form) {
  Mask m{form};
  m.array = p.array_count;
  if (form == IDS) {
    const int ids = 1 + below(5);
    auto some = [&](int rows) {
      std::vector<i64> list((size_t)p.batch * rows);
      for (i64& x : list) x = below(6) ? below(ids) : below(2) ? -1 - below(3) : (i64)below(ids) + (1ll << 32);
      return list;
    };
    m.query = some(p.queries), m.key = some(p.keys);
    p.arrays[p.array_count++] = give(m.query), p.arrays[p.array_count++] = give(m.key);
    return m;
  }
  m.batches = below(2) ? p.batch : 1, m.heads = below(2) ? p.heads : 1;
  m.flags.resize((size_t)m.batches * m.heads * p.queries * p.keys);
  const int rare = 2 + below(8), most = below(2);
  for (u8& x : m.flags) x = (below(rare) == 0) != most;
  p.arrays[p.array_count++] = {memory.copy(m.flags), 0};
  return m;
}
static Mask random_mask(Problem& p, bool plain, int depth) {
  if (depth < 4 && below(5) < (depth ? 2 : 4)) {
    Mask m{plain || below(2) ? AND : OR};
    for (int n = below(8) ? 1 + below(3) : 0; n > 0; n--) m.list.push_back(random_mask(p, plain, depth + 1));
    return m;
  }
  if (!plain && below(3) && p.array_count + 2 <= MOST_ARRAYS) return random_array(p, below(2) ? IDS : ARRAY);
  Mask m{Form(below(4))};
  m.bottom = below(2), m.left = some_distance(), m.right = some_distance();
  if (m.form == CHUNKED) m.left = std::max<u64>(m.left, 1);
  else if (!below(3)) m.left = OPEN;
  if (!below(3)) m.right = OPEN;
  return m;
}
// A mask within as many lists as there may be.
static Mask deep(Mask m, bool plain) {
  while (m.list.size() > 0) m = Mask(m.list[0]);
  for (int n = 0; n < MOST_LISTS; n++) {
    Mask outer{plain || below(2) ? AND : OR};
    outer.list.push_back(m);
    if (n && !below(8)) outer.list.push_back(Mask{outer.form == AND ? FULL : OR});
    m = outer;
  }
  return m;
}
// Lengths, or offsets, which may begin after 0 and end before the arrays do; if hostile, any numbers among them.
static std::vector<i64> some_numbers(const Problem& p, int rows, bool hostile) {
  constexpr i64 strange[] = {-1, -64, 0x7fffffff, -0x80000000ll, 1ll << 32, (1ll << 32) + 7, (1ll << 40) - 3, -(1ll << 32) + 5,
                             0x7fffffffffffffffll, -0x7fffffffffffffffll - 1};
  std::vector<i64> list(p.form == Problem::PACKED ? p.count + 1 : p.form == Problem::LENGTHS ? p.count : 0);
  for (i64& x : list) x = below(rows + 1);
  if (p.form == Problem::PACKED) {
    std::sort(list.begin(), list.end());
    for (size_t i = 1; i < list.size(); i++) if (!below(4)) list[i] = list[i - 1];
    if (below(2)) list[0] = 0;
    if (below(2)) list.back() = rows;
  } else {
    for (i64& x : list) if (!below(4)) x = below(2) ? rows : 0;
  }
  for (int n = hostile && list.size() ? 1 + below(4) : 0; n > 0; n--) {
    const int kind = below(3);
    list[below(list.size())] = kind == 0 ? strange[below(10)] : kind == 1 ? rows + 1 + below(70) : below(rows + 1);
  }
  return list;
}
// Arrays of so many pairs of tiles that a block writes several of them for each of its threads.
static Problem wide_problem() {
  Problem p{Problem::PACKED, Problem::OWN, 1, 1, 38400, 38500, 1 + below(20)};
  p.query = some_numbers(p, 300, false), p.key = some_numbers(p, 300, false);
  p.given[0] = give(p.query), p.given[1] = give(p.key);
  p.mask = random_mask(p, true, 0);
  return p;
}
static Problem random_problem() {
  Problem p{};
  const bool hostile = below(2), plain = !below(4);
  const bool many = round_now % 40 == 7;  // so that a thread has several sequences
  p.form = many && below(2) ? Problem::PACKED : Problem::Form(below(3));
  p.batch = p.form == Problem::PACKED ? 1 : many ? 1000 + below(1100) : below(16) ? 1 + below(3) : 0;
  p.count = p.form != Problem::PACKED ? p.batch : many ? 1000 + below(2000) : below(21);
  const bool small = many && p.form != Problem::PACKED;
  p.heads = 1 + below(3), p.queries = small ? 1 + below(3) : some_rows(), p.keys = small ? 1 + below(3) : some_rows();
  p.bias = below(3) == 0 ? Problem::NONE : p.batch > 1 && below(2) ? Problem::SHARED : Problem::OWN;
  p.query = some_numbers(p, p.queries, hostile), p.key = some_numbers(p, p.keys, hostile);
  if (p.form != Problem::DENSE) p.given[0] = give(p.query), p.given[1] = give(p.key);
  p.mask = random_mask(p, plain, 0);
  if (!below(12)) p.mask = deep(p.mask, plain);
  return p;
}

// ---- the expected tables -------------------------------------------------------------------------------------------
// Counts::most of softmax/asked.rs, without the room for the empty sequence.
struct Counts { i64 by_queries, by_keys, by_pairs; };
static i64 tile_count(i64 rows) { return rows / 64 + (rows % 64 > 0); }
static Counts most(const Problem& p) {
  const bool packed = p.form == Problem::PACKED;
  auto own = [&](i64 rows) { return !packed ? p.count * tile_count(rows) : rows > 0 ? (rows + 63ll * p.count) / 64 : 0; };
  const i64 n = tile_count(p.queries), m = tile_count(p.keys);
  const i64 pairs = packed ? n * m + n + m + p.count : p.count * n * m;
  return {own(p.queries), own(p.keys), p.bias == Problem::NONE ? 0 : p.bias == Problem::SHARED ? n * m : pairs};
}

struct Wanted {
  Counts counts;
  int heads;  // of flags
  int queries;
  std::vector<Sequence> sequences;
  std::vector<int> firsts;
  std::vector<Task> by_queries, by_keys, by_pairs;
  std::vector<Span> spans;
  std::vector<Tile> tiles, common, seen_by;
  std::vector<u8> allowed;
  std::vector<int2> lengths;

  Wanted(const Problem& p) : counts(most(p)), heads(is_plain(p.mask) ? 0 : by_head(p.mask) ? p.heads : 1), queries(p.queries) {
    add_sequences(p);
    add_lists(p);
    spans.assign((size_t)p.batch * p.queries, {-1, -1});
    allowed.assign((size_t)p.batch * heads * p.queries * p.keys, Memory::UNTOUCHED);
    for (int n = 0; n < p.count; n++)
      for (int i = 0; i < sequences[n].queries; i++) add_row(p, sequences[n], i);
    tiles.resize(counts.by_queries + 1);
    add_intervals();
  }
  // The keys that all rows of a tile see, and the tiles of queries that may see a tile of keys.
  void add_intervals() {
    common.assign(counts.by_queries + 1, {0, 0}), seen_by.assign(counts.by_keys, {0, 0});
    int keys = 0;
    for (size_t n = 0; n + 1 < sequences.size(); n++) {
      const Sequence& s = sequences[n];
      for (int i = 0; i * 64 < s.queries; i++) {
        Tile all = {0, s.keys};
        for (int r = i * 64; r < min(s.queries, i * 64 + 64); r++) {
          const Span own = spans[(i64)s.batch * queries + s.query_start + r];
          all = {max(all.begin, own.begin), min(all.end, own.end)};
        }
        if (all.begin < all.end) common[s.first_tile + i] = all;
        const Tile some = tiles[s.first_tile + i];
        for (int j = some.begin / 64; j * 64 < some.end; j++) {
          Tile& own = seen_by[keys + j];
          own = {own.end ? own.begin : i, i + 1};
        }
      }
      keys += tile_count(s.keys);
    }
  }
  // Offsets as they are taken: within the arrays, and none below one before it.
  static std::vector<i64> taken(std::vector<i64> list, int rows, bool packed) {
    for (size_t i = 0; i < list.size(); i++) {
      list[i] = clamp(list[i], rows);
      if (packed && i > 0) list[i] = max(list[i], list[i - 1]);
    }
    return list;
  }
  void add_sequences(const Problem& p) {
    const bool packed = p.form == Problem::PACKED;
    const std::vector<i64> query = taken(p.query, p.queries, packed), key = taken(p.key, p.keys, packed);
    for (int n = 0; n < p.count; n++) {
      Sequence s = {n, 0, p.queries, 0, p.keys};
      if (p.form == Problem::LENGTHS) s.queries = query[n], s.keys = key[n];
      if (packed) s = {0, (int)query[n], int(query[n + 1] - query[n]), (int)key[n], int(key[n + 1] - key[n])};
      sequences.push_back(s);
      if (p.form == Problem::LENGTHS) lengths.push_back({s.queries, s.keys});
    }
    const int behind = counts.by_queries > 0 ? counts.by_queries - 1 : 0;
    sequences.push_back({packed ? 0 : p.batch, packed ? p.queries : 0, 0, packed ? p.keys : 0, 0, behind});
  }
  void add_lists(const Problem& p) {
    std::vector<Task> pairs;
    std::vector<int> first[3];
    auto put = [&] {
      first[0].push_back(by_queries.size()), first[1].push_back(by_keys.size()), first[2].push_back(pairs.size());
    };
    for (int n = 0; n < p.count; n++) {
      put();
      Sequence& s = sequences[n];
      s.first_tile = by_queries.size();
      for (int i = 0; i * 64 < s.queries; i++) by_queries.push_back({n, 1, i, 0});
      for (int i = 0; i * 64 < s.keys; i++) by_keys.push_back({n, 1, 0, i});
      for (int i = 0; i * 64 < s.queries; i++)
        for (int j = 0; j * 64 < s.keys; j++) pairs.push_back({n, 1, i, j});
    }
    put();
    for (const auto& list : first) firsts.insert(firsts.end(), list.begin(), list.end());
    if (p.bias == Problem::OWN) by_pairs = pairs;
    for (int i = 0; p.bias == Problem::SHARED && i * 64 < p.queries; i++)
      for (int j = 0; j * 64 < p.keys; j++) by_pairs.push_back({0, p.count, i, j});
    auto fill = [&](std::vector<Task>& list, i64 room) {
      check((i64)list.size() <= room, "more tiles than the most", list.size());
      list.resize(room, {p.count, 0, 1, 1});
    };
    fill(by_queries, counts.by_queries), fill(by_keys, counts.by_keys), fill(by_pairs, counts.by_pairs);
  }
  // The keys that some head of a row sees: the first, and the end behind the last.
  Span seen(const Problem& p, const Sequence& s, int i) {
    Span span = {s.keys, 0};
    for (int head = 0; head < max(heads, 1); head++) {
      u8* flags = allowed.data() + (((i64)s.batch * heads + head) * p.queries + s.query_start + i) * p.keys + s.key_start;
      for (int j = 0; j < s.keys; j++) {
        const bool own = ::allows(p, p.mask, s, head, i, j);
        if (heads) flags[j] = own;
        if (own) span = {min(span.begin, j), j + 1 > span.end ? j + 1 : span.end};
      }
    }
    return span.end ? span : Span{0, 0};
  }
  void add_row(const Problem& p, const Sequence& s, int i) {
    const Span span = seen(p, s, i);
    Span& own = spans[(i64)s.batch * p.queries + s.query_start + i] = heads ? span : row_span(p.mask, s, i);
    check(own.begin == own.end ? span.end == 0 : own.begin == span.begin && own.end == span.end, "the model's span of a row", i);
    const size_t tile = s.first_tile + i / 64;
    if (tile >= tiles.size()) tiles.resize(tile + 1);
    Tile& all = tiles[tile];
    if (span.end) all = all.end ? Tile{min(all.begin, span.begin), max(all.end, span.end)} : Tile{span.begin, span.end};
  }
};

// ---- the tables of the device --------------------------------------------------------------------------------------
// Tables for as many tiles as there may be, before the kernels have run.
static TableArgs tables_of(const Problem& p, const Wanted& w, int heads) {
  std::vector<Node> nodes;
  add_nodes(p, p.mask, nodes);
  TableArgs a{p.given[0], p.given[1]};
  std::copy(p.arrays, p.arrays + MOST_ARRAYS, a.arrays);
  const Counts room = w.counts;
  a.nodes = memory.copy(nodes), a.node_count = nodes.size();
  a.sequences = memory.array<Sequence>(p.count + 1), a.firsts = memory.array<int>(3 * (p.count + 1));
  a.spans = memory.copy(std::vector<Span>((size_t)p.batch * p.queries, {-1, -1}));
  a.tiles = memory.array<Tile>(room.by_queries + 1);
  a.by_queries = memory.array<Task>(room.by_queries), a.by_keys = memory.array<Task>(room.by_keys);
  a.by_pairs = memory.array<Task>(room.by_pairs);
  a.allowed = memory.array<u8>((size_t)p.batch * heads * p.queries * p.keys);
  a.common = memory.array<Tile>(room.by_queries + 1), a.seen_by = memory.array<Tile>(room.by_keys);
  if (p.form == Problem::LENGTHS) a.lengths = memory.array<int2>(p.count);
  a.batch = p.batch, a.queries = p.queries, a.keys = p.keys, a.count = p.count, a.packed = p.form == Problem::PACKED;
  a.heads = heads, a.shared = p.bias == Problem::SHARED;
  a.query_tiles = room.by_queries, a.key_tiles = room.by_keys, a.pair_tiles = room.by_pairs;
  return a;
}
template <class T> static void same(const T* own, const std::vector<T>& wanted, const char* what) {
  for (size_t i = 0; i < wanted.size(); i++) check(!memcmp(own + i, &wanted[i], sizeof(T)), what, i);
}
// No row lies beyond the arrays or in two sequences.
static void check_rows(const TableArgs& a) {
  std::vector<u8> query((size_t)a.batch * a.queries), key((size_t)a.batch * a.keys);
  auto take = [&](std::vector<u8>& of, int rows, const Sequence& s, int start, int count) {
    const bool inside = s.batch >= 0 && s.batch < a.batch && start >= 0 && count >= 0 && count <= rows - start;
    check(inside, "a sequence within the arrays", &s - a.sequences);
    for (int i = 0; inside && i < count; i++) check(!of[(i64)s.batch * rows + start + i]++, "a row of one sequence", start + i);
  };
  for (int n = 0; n < a.count; n++) {
    const Sequence& s = a.sequences[n];
    take(query, a.queries, s, s.query_start, s.queries), take(key, a.keys, s, s.key_start, s.keys);
  }
}
static void run() {
  state = (round_now + 1) * 0x9e3779b97f4a7c15ull;
  for (int i = 0; i < 8; i++) state ^= (u64)random_word() << 30;  // so that rounds are not like those beside them
  memory.clear();
  const Problem p = round_now == 100 ? wide_problem() : random_problem();
  const Wanted w(p);
  const TableArgs a = tables_of(p, w, w.heads);
  launch(1, SCAN, [&] { sequences(a); });
  check_rows(a);
  same(a.sequences, w.sequences, "a sequence");
  same(a.firsts, w.firsts, "the first tile of a sequence");
  if (a.lengths) same(a.lengths, w.lengths, "the lengths of a batch element");
  if (failures) return;  // what follows would wander off
  launch(max(a.query_tiles + 1, a.key_tiles), THREADS, [&] { rows(a); });
  same(a.by_queries, w.by_queries, "a task by queries");
  same(a.by_keys, w.by_keys, "a task by keys");
  same(a.by_pairs, w.by_pairs, "a task by pairs");
  same(a.spans, w.spans, "the span of a row");
  same(a.tiles, w.tiles, "the span of a tile");
  same(a.allowed, w.allowed, "the flag of a pair");
  launch(max(a.query_tiles + 1, a.key_tiles), INTERVAL_THREADS, [&] { intervals(a); });
  same(a.common, w.common, "what rows of a tile see in common");
  same(a.seen_by, w.seen_by, "the tiles of queries that see a tile of keys");
  check(memory.is_intact(), "bytes beyond an array");
}
int main() {
  signal(SIGSEGV, beyond), signal(SIGBUS, beyond);
  for (round_now = 0; round_now < 400 && failures < 20; round_now++) run();
  return failures != 0;
}
