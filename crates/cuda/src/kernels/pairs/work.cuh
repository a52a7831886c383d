// Work tiles of kernels of sm_90a: sequences, blocks of queries or keys, and who computes which.
#ifndef WINDOW
#define WINDOW 1  // of lazy_attention every mask is a window, or a table of spans
#endif
constexpr bool PACKED = LENGTHS == 2, SPANS = WINDOW == 2;
KERNEL_ARGS(Shape)
KERNEL_ARGS(Packed)
// The same number in all lanes of a WARP: no product may stand on a path that the compiler thinks divergent.
template <bool WARP> DEV int uniform(int x) { return WARP ? __shfl_sync(~0u, x, 0) : x; }

// A sequence: its extents, and its begin. `tile`: the first of its tiles of 64 queries.
struct Own : Shape {
  int batch, query_start, key_start, tile;
};
// The sequence of a batch element, or a listed one.
template <bool WARP> DEV Own of_batch(const Shape& shape, const Packed& packed, int number) {
  Own s = {shape, number, 0, 0, 0};
  if (PACKED) {
    Sequence own = packed.sequences[number];
    s.batch = uniform<WARP>(own.batch), s.queries = uniform<WARP>(own.queries), s.keys = uniform<WARP>(own.keys);
    s.query_start = uniform<WARP>(own.query_start), s.key_start = uniform<WARP>(own.key_start);
    s.tile = uniform<WARP>(own.first_tile);
  } else if (LENGTHS) {
    int2 n = shape.lengths[number];
    s.queries = uniform<WARP>(n.x), s.keys = uniform<WARP>(n.y);
  }
  if (LENGTHS) s.offset = shape.bottom ? s.keys - s.queries : 0;
  return s;
}

// A block of queries of a query head, or of keys of a key head; of listed sequences the number in place of the batch
// element, and the place in the list. A negative block belongs to the tile before.
struct Work { int block, head, batch, task; };
// Blocks of 64·M queries of the arrays, or of the list, in all heads.
template <int M> DEV int tiles_of(const Shape& s, const Packed& packed) {
  return (PACKED ? packed.tasks : (s.queries + 64 * M - 1) / (64 * M) * s.batch) * s.heads;
}
// Work tile t of those of 64·M queries or keys: within groups of so many heads, whose k and v fit the L2, the last
// queries and the first keys, which see most, come first.
template <int M, bool BY_KEYS, bool WARP> DEV Work work_of(int t, const Shape& s, const Packed& packed, int heads_per_group) {
  const int heads = BY_KEYS ? s.key_heads : s.heads;
  if (PACKED) {
    const Task task = BY_KEYS ? packed.by_keys[t / heads] : packed.by_queries[packed.tasks - 1 - t / heads];
    const int tile = uniform<WARP>(BY_KEYS ? task.key_tile : task.row_tile);
    return {tile % M ? -1 : tile / M, t % heads, uniform<WARP>(task.first), t / heads};
  }
  const int blocks = ((BY_KEYS ? s.keys : s.queries) + 64 * M - 1) / (64 * M);
  const int g = t / (heads_per_group * blocks), r = t - g * heads_per_group * blocks, first = g * heads_per_group;
  const int width = min(heads_per_group, s.batch * heads - first), b = r / width, h = first + r - b * width;
  return {WINDOW && !BY_KEYS ? blocks - 1 - b : b, h % heads, h / heads};
}
// Claims the next tile from a counter, which the last claim resets. The first tile of a block has its number.
DEV int claim_tile(u32* counter, int tiles) {
  const int claimed = atomicAdd(counter, 1u);
  if (claimed == tiles - 1) *counter = 0;
  return claimed + gridDim.x;
}

// Defaults, which kernels may overload: heads of a group, and the sequence of a number.
template <bool BY_KEYS, class ARGS> DEV int heads_together(const ARGS& c) { return c.shape.heads_per_group; }
template <bool WARP, class ARGS> DEV Own sequence_of(const ARGS& c, int number) { return of_batch<WARP>(c.shape, c.packed, number); }
// Tiles of work, of 64·M queries or keys, on their way from a producer, which claims them, to its consumers. A word
// beside each stage of a ring, APART bytes from that of the stage before, holds the number of its tile, -1 behind the
// last one. ARGS: those of the kernel.
template <int M, bool BY_KEYS, class RING, u32 WORD, u32 APART = 4> struct WorkTiles : RING {
  METHOD WorkTiles(u32 base, u32 parity) : RING(base, parity) {}
  METHOD u32 word() const { return this->base + WORD + APART * this->stage(); }
  template <bool WARP, class ARGS> static METHOD Work work(int t, const ARGS& c) {
    return work_of<M, BY_KEYS, WARP>(t, c.shape, c.packed, heads_together<BY_KEYS>(c));
  }
  // Waits for a tile and finds its sequence; false behind the last one.
  template <bool WARP, class ARGS> METHOD bool take(const ARGS& c, Work& w, Own& s) const {
    this->wait_full();
    const int t = uniform<WARP>(load_word(word()));
    if (t < 0) return false;
    w = work<WARP>(t, c), s = sequence_of<WARP>(c, w.batch);
    return true;
  }
  // Waits for a stage and tells its number: the barrier on which it then expects its bytes.
  METHOD u32 announce(int t) const {
    this->wait_empty(), store_word(word(), t);
    return this->full();
  }
  // Tells that there are no more.
  METHOD void finish() const {
    announce(-1);
    arrive(this->full());
  }
};
