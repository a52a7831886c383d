// `cleanse` and `merge` of attention/sm90a_backward.cu beside what they must do, on random problems. Compile-time:
// LENGTHS.
#define STORAGE 1
#define D 64
#define WINDOW 0
#define OPTIONS 0
#define RESULTS 1
#include "cuda.h"
#include "kernels.inc"

static u64 state;
static u32 random_word() { return (state = state * 6364136223846793005ull + 1442695040888963407ull) >> 33; }
static int below(int n) { return random_word() % n; }
static bool often() { return below(3) > 0; }

// Threads in a random order.
template <class F> static void launch(int blocks, const F& kernel) {
  std::vector<int> order(256 * blocks);
  for (size_t i = 0; i < order.size(); i++) order[i] = i;
  for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[below(i)]);
  gridDim.x = blocks;
  for (int i : order) blockIdx.x = i / 256, threadIdx.x = i % 256, kernel();
}

static int failures;
static void check(bool holds, const char* what, int round, size_t at) {
  if (!holds && failures++ < 10) printf("round %d: %s at %zu\n", round, what, at);
}

constexpr u16 BAD[] = {0x7f80, 0xff80, 0x7fc0, 0xffc1};  // ∞, −∞, NaN
static bool is_nan(u16 x) { return (x & 0x7fff) > 0x7f80; }
static bool is_inf(u16 x) { return (x & 0x7fff) == 0x7f80; }
static bool is_number(u16 x) { return !is_nan(x) && !is_inf(x); }

struct Problem {
  int batch, key_heads, group, queries, keys;
  std::vector<Sequence> sequences;
  std::vector<Task> by_queries;
  std::vector<int2> lengths;

  Problem() : batch(1 + below(3)), key_heads(1 + below(2)), group(1 + below(3)), queries(1 + below(150)), keys(1 + below(150)) {
    if (LENGTHS == 2 && below(2)) batch = 1;
    bool packed = LENGTHS == 2 && batch == 1;
    int tile = 0, query = 0, key = 0;
    for (int n = 0, count = packed ? 1 + below(5) : batch; n < count; n++) {
      int q = LENGTHS ? below(queries - query + 1) : queries, k = LENGTHS ? below(keys - key + 1) : keys;
      if (packed && !often()) q = 0;
      sequences.push_back({packed ? 0 : n, query, q, key, k, tile});
      lengths.push_back({q, k});
      for (int i = 0; i < (q + 63) / 64; i++, tile++) by_queries.push_back({n, 1, i, 0});
      if (packed) query += q, key += k;
    }
  }
  int heads(bool by_keys) const { return by_keys ? key_heads : key_heads * group; }
  int rows(bool by_keys) const { return by_keys ? keys : queries; }
  // The key head of the sequence of a row, -1 where there is none.
  int group_of(bool by_keys, int b, int h, int row) const {
    for (size_t n = 0; n < sequences.size(); n++) {
      const Sequence& s = sequences[n];
      int start = by_keys ? s.key_start : s.query_start, end = start + (by_keys ? s.keys : s.queries);
      if (s.batch == b && row >= start && row < end) return n * key_heads + (by_keys ? h : h / group);
    }
    return -1;
  }
  template <class F> void each_row(bool by_keys, const F& body) const {
    for (int b = 0; b < batch; b++)
      for (int h = 0; h < heads(by_keys); h++)
        for (int row = 0; row < rows(by_keys); row++) body(b, h, row, ((size_t)b * heads(by_keys) + h) * rows(by_keys) + row);
  }
};

static void run(int round) {
  state = round + 1;
  const Problem p;
  const int groups = p.sequences.size() * p.key_heads;
  if (p.by_queries.empty()) return;
  std::vector<u32> found(FIRST_GROUP + groups);
  found[0] = 1;
  for (int g = 0; g < groups; g++) found[FIRST_GROUP + g] = below(2);  // what the kernels for tiles have told
  std::vector<u32> wanted = found;
  auto infinite = [&](int group, bool beside_dv) {
    if (group < 0 || !wanted[FIRST_GROUP + group]) return;
    u32& told = wanted[FIRST_GROUP + group];
    if (!beside_dv) told = INFINITE;
    else if (told != INFINITE) told = BESIDE_DV;
  };
  MendArgs m{};
  m.shape.batch = p.batch, m.shape.heads = p.heads(false), m.shape.key_heads = p.key_heads;
  m.shape.queries = p.queries, m.shape.keys = p.keys, m.shape.lengths = p.lengths.data();
  m.shape.padded = LENGTHS == 2 ? 64 * (p.by_queries.size() + 1) : (p.queries + 127) / 128 * 128;
  m.packed = {p.sequences.data(), p.by_queries.data(), 0, (int)p.by_queries.size(), 0};
  m.sequences = p.sequences.size(), m.found = found.data();

  // q, k, v, dout, with gaps between rows, heads and batch elements.
  std::vector<u16> from[4], to[4], clean[4];
  const int many = below(3);
  for (int n = 0; n < 4; n++) {
    const bool by_keys = n == 1 || n == 2;
    const i64 row_stride = 8 + below(2), head_stride = row_stride * p.rows(by_keys) + below(3), batch_stride = head_stride * p.heads(by_keys) + below(3);
    from[n].resize(8 * batch_stride * p.batch);
    for (u16& x : from[n]) x = 0x3f80 + below(64);
    auto at = [&](int b, int h, int row) { return &from[n][8 * (b * batch_stride + h * head_stride + row * row_stride)]; };
    for (int i = 0; i < 3 * many; i++) at(below(p.batch), below(p.heads(by_keys)), below(p.rows(by_keys)))[below(D)] = BAD[below(4)];
    to[n].assign((size_t)p.batch * p.heads(by_keys) * p.rows(by_keys) * D, 1);
    clean[n] = to[n];
    p.each_row(by_keys, [&](int b, int h, int row, size_t line) {
      const u16* x = at(b, h, row);
      const int group = p.group_of(by_keys, b, h, row);
      for (int piece = 0; piece < D; piece += 8) {
        const bool odd = std::any_of(x + piece, x + piece + 8, is_inf);
        if (odd) infinite(group, n == 2);
        for (int c = piece; c < piece + 8; c++) clean[n][line * D + c] = is_number(x[c]) ? x[c] : 0;
      }
    });
    m.operands[n] = {{(uint4*)from[n].data(), batch_stride, head_stride, row_stride}, (uint4*)to[n].data(), p.heads(by_keys), p.rows(by_keys), by_keys, (i64)to[n].size() / 8};
  }
  // lse2 and delta, one of which may be infinite.
  m.stats = (i64)(LENGTHS == 2 ? 1 : p.batch) * m.shape.heads * m.shape.padded;
  std::vector<float> lse2(m.stats, 0.5f), delta(m.stats, NAN);
  const int task = below(p.by_queries.size()), number = p.by_queries[task].first, h = below(m.shape.heads);
  if (below(2)) {
    const Sequence& s = p.sequences[number];
    const i64 head = LENGTHS == 2 ? h : s.batch * m.shape.heads + h, row = LENGTHS == 2 ? 64 * task : 64 * p.by_queries[task].row_tile;
    const bool of_delta = below(2);
    (of_delta ? delta : lse2)[head * m.shape.padded + row] = -INFINITY;
    infinite(number * p.key_heads + h / p.group, of_delta);
  }
  m.lse2 = lse2.data(), m.delta = delta.data();

  launch(3, [&] { cleanse(m); });
  for (int n = 0; n < 4; n++)
    for (size_t i = 0; i < to[n].size(); i++) check(to[n][i] == clean[n][i], "an operand of finite numbers", round, i);
  for (int g = 0; g < groups; g++) check(found[FIRST_GROUP + g] == wanted[FIRST_GROUP + g], "the flags of a group", round, g);
  for (i64 i = 0; i < m.stats; i++) check(!isnan(delta[i]), "delta", round, i);

  // dq, dk, dv: of the portable kernels in place, of the tensor cores beside.
  std::vector<u16> ours[3], theirs[3], merged[3];
  for (int n = 0; n < 3; n++) {
    const bool by_keys = n > 0;
    const int columns = 1 + below(D), stride = columns + below(3), heads = p.heads(by_keys), rows = p.rows(by_keys);
    auto some = [](u16 base) { return below(20) ? base + below(100) : BAD[below(4)]; };
    ours[n].resize((size_t)p.batch * heads * rows * D), theirs[n].resize((size_t)p.batch * heads * rows * stride);
    for (u16& x : ours[n]) x = some(0x4000);
    for (u16& x : theirs[n]) x = some(0x3f00);
    merged[n] = theirs[n];
    p.each_row(by_keys, [&](int b, int h, int row, size_t line) {
      const int group = p.group_of(by_keys, b, h, row);
      const u32 told = group < 0 ? STRANGE : wanted[FIRST_GROUP + group];
      for (int c = 0; c < columns; c++) {
        u16 &x = merged[n][line * stride + c], y = ours[n][line * D + c];
        if (told == 0 || (told == STRANGE || told == BESIDE_DV && n == 2) && is_number(x) && is_number(y)) x = y;
      }
    });
    m.results[n] = {ours[n].data(), {theirs[n].data(), (i64)heads * rows * stride, (i64)rows * stride, stride}, heads, rows, columns, by_keys, (i64)p.batch * heads * rows * columns};
  }
  launch(2, [&] { merge(m); });
  for (int n = 0; n < 3; n++)
    for (size_t i = 0; i < theirs[n].size(); i++) check(theirs[n][i] == merged[n][i], "a merged result", round, i);
}

int main() {
  for (int round = 0; round < 200; round++) run(round);
  return failures != 0;
}
