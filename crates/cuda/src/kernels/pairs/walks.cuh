// Walks over tiles of pairs by tables of tiles: from a tile of queries over the keys, from one of keys over the
// queries, and over all that share a bias.
DEV Rows query_rows(const Tensor& x, const Head& head, int row) {
  return rows_of(x, head.s.batch, head.head, head.s.query_start + row, head.s.query_start + head.s.queries);
}
DEV Rows key_rows(const Tensor& x, const Head& head, int key) {
  return rows_of(x, head.s.batch, head.key_head, head.s.key_start + key, head.s.key_start + head.s.keys);
}
DEV Rows key_rows(const Tensor& x, const Sequence& s, int key_head, int key) {
  return rows_of(x, s.batch, key_head, s.key_start + key, s.key_start + s.keys);
}

// Writes sums to the rows of a tile of queries of a head, or of keys, by `store`.
template <int... SHAPE, class... REST> DEV void store_queries(const Tensor& x, const Head& head, int row, const REST&... rest) {
  store<SHAPE...>(x, head.s.batch, head.head, head.s.query_start + row, head.s.queries - row, rest...);
}
template <int... SHAPE, class... REST> DEV void store_keys(const Tensor& x, const Sequence& s, int key_head, int key, const REST&... rest) {
  store<SHAPE...>(x, s.batch, key_head, s.key_start + key, s.keys - key, rest...);
}

// A tile of queries of a head, and the keys that some row of it sees. HEAD is made of ARGS, those of the kernel.
template <class HEAD> struct QueryTile {
  HEAD head;
  int sequence, row;
  Tile seen;
  template <class ARGS>
  METHOD QueryTile(const ARGS& a, const PairArgs& c, Task task, int number)
      : head(a, c.sequences[task.first], number), sequence(task.first), row(task.row_tile * SIDE), seen(c.tiles[head.s.first_tile + task.row_tile]) {}
  // The tile of a block, of those of all heads.
  template <class ARGS, class N>
  METHOD QueryTile(const ARGS& a, const PairArgs& c, N block) : QueryTile(a, c, c.tasks[block / c.heads], block % c.heads) {}
  METHOD int group() const { return sequence * head.c.key_heads + head.key_head; }
  template <int KEYS = SIDE> METHOD int first_key() const { return seen.begin / KEYS * KEYS; }
};
// True of a tile of queries that the block before owns, of blocks of M tiles: this block, half of all where M is 2,
// ends before it reads anything else.
template <int M> DEV bool is_owned_before(const PairArgs& c, Place own) { return c.tasks[own.task].row_tile % M; }
// True if some row of the tile of queries of `row` may see some of a tile of keys.
DEV bool may_see(const PairArgs& c, const Sequence& s, int row, int key) {
  const Tile tile = c.tiles[s.first_tile + row / SIDE];
  return tile.end > key && tile.begin < key + SIDE;
}

// A tile of keys of a key head.
struct KeyTile {
  Task task;
  Sequence s;
  int number, key_head, group, key;  // of the task; heads of a key head
  METHOD KeyTile(const PairArgs& c, Place own)
      : task(c.tasks[own.task]), s(c.sequences[task.first]), number(own.task), key_head(own.head), group(c.heads / c.key_heads), key(task.key_tile * SIDE) {}
};

// The next of `count` tiles of ROWS queries, head after head, that may see some of OWN keys.
template <int ROWS, int OWN> DEV int next_seen(const PairArgs& c, const Sequence& s, int n, int count, int key) {
  const int tiles = (s.queries + ROWS - 1) / ROWS;
  for (; n < count; n++) {
    const Tile tile = c.tiles[s.first_tile + n % tiles / (SIDE / ROWS)];
    if (tile.end > key && tile.begin < key + OWN) break;
  }
  return n;
}

// Calls f(head) for each head that shares the bias of a tile of pairs, and may see some.
template <class F> DEV void each_sharing(const PairArgs& c, const Task& task, int bias_head, F f) {
  const int row = task.row_tile * SIDE, key = task.key_tile * SIDE;
  NO_UNROLL for (int n = task.first; n < task.first + task.sequences; n++) {
    const Sequence s = c.sequences[n];
    if (row >= s.queries || key >= s.keys) continue;
    if (!may_see(c, s, row, key)) continue;
    NO_UNROLL for (int h = c.bias_heads == 1 ? 0 : bias_head; h < (c.bias_heads == 1 ? c.heads : bias_head + 1); h++) f(Head(c, s, h));
  }
}

// A row of the arrays, of all heads and batch elements, for each warp.
struct ArrayRow {
  i64 at;
  int query, head, batch;
  // False where there is none, or no sequence.
  METHOD bool find(const PairArgs& c) {
    at = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (at >= (i64)c.batch * c.heads * c.queries) return false;
    query = at % c.queries, head = at / c.queries % c.heads, batch = at / c.queries / c.heads;
    return true;
  }
  METHOD bool has_sequence(const PairArgs& c) const { return c.spans[(i64)batch * c.queries + query].begin >= 0; }
  template <class T> METHOD T* of(const Tensor& x) const { return (T*)x.data + batch * x.batch + head * x.head + query * x.row; }
};
