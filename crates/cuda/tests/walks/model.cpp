// The blocks that kernels of sm_90a walk where a mask shows each query a range of keys, and the pairs of them that
// count, by the device code that decides it, beside what masks allow. Reads problems from the file that is its
// argument, as blocks.rs beside it writes them.
#include "cuda.h"
#include <deque>
#include "kernels.inc"

static int problem, failures;
static void check(bool holds, const char* what, int i, int j) {
  if (!holds && failures++ < 20) printf("problem %d: %s, query %d and key %d\n", problem, what, i, j);
}
static FILE* file;
static int number() {
  int x = 0;
  if (fread(&x, sizeof x, 1, file) != 1) x = -1;
  return x;
}
template <class T> static std::vector<T> list() {
  const int count = number();
  std::vector<T> all(count);
  if (count && fread(all.data(), sizeof(T), count, file) != (size_t)count) printf("a short file\n"), exit(1);
  return all;
}

// Pairs of a sequence, and how often each counted.
struct Pairs {
  const Own& s;
  const u8* allowed;
  std::vector<u8> times;
  Pairs(const Own& own, const u8* pairs) : s(own), allowed(pairs), times((size_t)own.queries * own.keys) {}
  void count(int i, int j, bool counts, const char* walk) {
    if (i >= s.queries || j >= s.keys) return;  // of no result
    check(counts == allowed[(size_t)i * s.keys + j], walk, i, j);
    times[(size_t)i * s.keys + j] += counts;
  }
  void end(const char* walk) {
    for (size_t n = 0; n < times.size(); n++) check(times[n] == allowed[n], walk, n / s.keys, n % s.keys);
    times.assign(times.size(), 0);
  }
};
struct Tables {
  BackwardArgs c;
  const Shape& all;
  const SpanTables& t;
};

// A tile of 64·M queries, as `forward`, `queries` and the kernels of lazy_attention walk keys.
template <int M> static void by_queries(const Tables& of, const Own& s, Pairs& pairs) {
  constexpr int KEYS = 128, ROWS = 64 * M;
  for (int block = 0; block * ROWS < s.queries; block++) {
    const Range b = key_blocks<M, KEYS>(of.t, s, block);
    check(b.begin <= b.open && b.open <= b.closed && b.closed <= b.end, "blocks are in order", block, 0);
    for (int n = b.begin; n < b.end; n++) {
      const bool masked = n < b.open || n >= b.closed;
      bool sees_all = true;
      for (int i = block * ROWS; i < min((block + 1) * ROWS, s.queries); i++) {
        const Span own = span_of(of.t, of.all, s, i);
        sees_all &= own.begin <= n * KEYS && (n + 1) * KEYS <= own.end;
      }
      check(masked == !sees_all, "a mask where it is needed", block * ROWS, n * KEYS);
      for (int i = block * ROWS; i < (block + 1) * ROWS; i++) {
        const Seen seen(of.t, of.all, s, i);
        for (int j = n * KEYS; j < (n + 1) * KEYS; j++) {
          const bool counts = !masked || seen.begin(0) <= j && j < seen.end(0);
          check(!counts || j < s.keys, "no key of the next sequence", i, j);
          pairs.count(i, j, counts, "a pair of a block of keys");
        }
      }
    }
  }
  pairs.end("pairs by queries");
}
// The warpgroups of lazy_attention leave blocks out for themselves.
static void by_warpgroups(const Tables& of, const Own& s) {
  for (int tile = 0; tile * 64 < s.queries; tile++) {
    const Reach all = reach_of<1>(of.t, s, tile);
    for (int i = tile * 64; i < min(tile * 64 + 64, s.queries); i++) {
      const Span own = span_of(of.t, of.all, s, i);
      check(own.begin >= own.end || all.begin <= own.begin && own.end <= all.end, "a row within its tile", i, own.begin);
      check(all.from >= all.to || own.begin <= all.from && all.to <= own.end, "keys that all rows see", i, all.from);
    }
  }
}
// A tile of 128 keys, as `keys` (M 1), `values` (2) and that of lazy_attention (1, `skips` not) walk queries.
template <int M> static void by_keys(const Tables& of, int t, const Own& s, Pairs& pairs, bool skips) {
  const Work w = work_of<2, true, false>(t, of.c.shape, of.c.packed, heads_together<true>(of.c));
  if (w.block < 0) return;
  const Range range = query_blocks<M>(of.t, s, w.block, w.task);
  std::deque<u32> visits;
  for (int i = range.begin; i < range.end; i++) {
    const u32 visit = visit_of<M>(of.t, s, w.block, i);
    if (!skips) visits.push_back(i | (visit != i ? CUT : 0));
    else if (visit != SKIPPED) visits.push_back(visit);
  }
  check(range.begin == range.end || visits.size() && number_of(visits.back()) == range.end - 1, "the last block is walked", 0, w.block);
  for (u32 visit : visits) {
    const int first = number_of(visit) * 64 * M, key = w.block * 128, end = min(key + 128, s.keys);
    bool sees_all = first + 64 * M <= s.queries;
    for (int i = first; i < min(first + 64 * M, s.queries); i++) {
      const Span own = span_of(of.t, of.all, s, i);
      sees_all &= own.begin <= key && end <= own.end;
    }
    check(visit & CUT ? !sees_all : sees_all, "a mask where it is needed", first, key);
  }
  if (failures) return;
  for (int i = range.begin; i < range.end; i++) {
    const u32 visit = visits.front();
    visits.pop_front();
    i = number_of(visit);
    for (int half = 0; half < M; half++)
      for (int lane = 0; lane < 4; lane++)
        for (int key = w.block * 128; key < w.block * 128 + 128; key += key % 8 == 7 ? 9 : 1) {
          const int query = i * 64 * M + half * 64 + 2 * lane;
          const u32 bits = visit & CUT ? visible(of.t, of.all, s, query, key) : ~0u;
          for (int n = 0; n < 32; n++) {
            const int row = query + n / 4 * 8 + n % 2, column = key + n % 4 / 2 * 8;
            check(!(bits >> n & 1) || row < s.queries, "no query of the next sequence", row, column);
            pairs.count(row, column, bits >> n & 1, "a pair of a block of queries");
          }
        }
  }
  check(visits.empty(), "all blocks are walked", 0, w.block);
}

static void run() {
  const int queries = number(), keys = number();
  const auto sequences = list<Sequence>();
  const auto spans = list<Span>();
  const auto tiles = list<Tile>(), common = list<Tile>(), seen_by = list<Tile>();
  const auto tasks = list<Task>();
  const auto allowed = list<u8>();
  Tables of = {{}, of.c.shape, of.c.spans};
  of.c.shape.heads = of.c.shape.key_heads = 1, of.c.shape.queries = queries, of.c.shape.keys = keys;
  of.c.packed.sequences = sequences.data(), of.c.packed.by_keys = tasks.data(), of.c.packed.key_tasks = tasks.size();
  of.c.spans = {spans.data(), tiles.data(), common.data(), seen_by.data()};
  size_t at = 0;
  for (size_t n = 0; n < sequences.size(); n++) {
    const Own s = of_batch<false>(of.c.shape, of.c.packed, n);
    Pairs pairs(s, allowed.data() + at);
    by_queries<1>(of, s, pairs), by_queries<2>(of, s, pairs), by_queries<3>(of, s, pairs), by_queries<4>(of, s, pairs);
    by_warpgroups(of, s);
    auto each = [&](auto walk, const char* name) {
      for (size_t t = 0; t < tasks.size(); t++)
        if (tasks[t].first == (int)n) walk(t);
      pairs.end(name);
    };
    each([&](int t) { by_keys<1>(of, t, s, pairs, true); }, "pairs by keys");
    each([&](int t) { by_keys<2>(of, t, s, pairs, true); }, "pairs by keys, of 128 queries");
    each([&](int t) { by_keys<1>(of, t, s, pairs, false); }, "pairs by keys of lazy_attention");
    at += (size_t)s.queries * s.keys;
  }
}
int main(int, char** arguments) {
  file = fopen(arguments[1], "rb");
  const int problems = number();
  for (problem = 0; problem < problems && failures < 20; problem++) run();
  printf("%d problems\n", problem);
  return failures != 0 || problem != problems;
}
