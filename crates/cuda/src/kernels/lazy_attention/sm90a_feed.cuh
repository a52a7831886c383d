// Feed of the kernels of sm_90a that own queries of lazy_attention: a producer warp feeds the copy engine, and copies
// the bias of a block, by distance, beside its keys.
enum Pass { SCORES, VALUES, QUERIES };
template <int GROUPS, Pass PASS> struct Feed {
  static constexpr int ROWS = 64 * GROUPS, NEAR = ROWS + KEYS;
  static constexpr int STAGES = D == 64 ? 4 : 2, TILES = D == 64 ? 2 : 1;  // of keys and of queries: as many as fit
  // q, in `queries` with dout.
  static constexpr u32 Q_BYTES = ROWS * D * 2, TILE_BYTES = PASS == QUERIES ? 2 * Q_BYTES : Q_BYTES;
  static constexpr u32 AT_K = TILES * TILE_BYTES, AT_V = AT_K + STAGES * KV_BYTES, AT_OUT = AT_V + (PASS != SCORES) * STAGES * KV_BYTES;
  // The largest scores of rows by stripe; or o of each warpgroup.
  static constexpr u32 AT_BIAS = AT_OUT + (PASS == SCORES ? ROWS * STRIPES * 4 : PASS == VALUES ? Q_BYTES : 0), TILE = AT_BIAS + STAGES * NEAR * 4;
  using Tiles = WorkTiles<GROUPS, false, Ring<TILES, TILE + 16 * TILES>, TILE, 16>;
  using Blocks = Ring<STAGES, Tiles::END, 2>;
  static constexpr int K = 0, V = 1;  // its parts
  using Values = Ring<STAGES, Tiles::END + 16 * STAGES>;  // the second one alone
  static constexpr u32 BYTES = 1024 + Blocks::END;  // the base is aligned to 1024 by hand
  u32 base;
  float* numbers;  // the same address

  METHOD Feed() {
    base = shared_panels(), numbers = numbers_at(base - shared_begin());
    make_barriers([&] {
      constexpr int WARPS = 4 * GROUPS * ARRIVALS;
      Tiles::init(base, 1, WARPS);
      Blocks::init(base, 1 + ARRIVALS, WARPS, K), Blocks::init(base, 1, WARPS, V);
    });
  }
  METHOD float* bias(u32 stage) const { return numbers + AT_BIAS / 4 + stage * NEAR; }
  METHOD float* tops() const { return numbers + AT_OUT / 4; }

  // The stripes of keys that the 64 rows of a warpgroup may attend to, in lane 4·group. For a warp.
  METHOD u32 stripes(const HopperLazyArgs& c, const Own& s, const Work& w) const {
    if (PASS != VALUES) return ~0u;
    const int tile = w.block * GROUPS + lane_id() / 4;
    const bool there = lane_id() < 4 * GROUPS && tile * SIDE < s.queries;
    u32 x = there ? c.active[((i64)(s.tile + tile) * c.shape.heads + w.head) * 4 + lane_id() % 4] : 0;
    x |= __shfl_xor_sync(~0u, x, 1);
    return x | __shfl_xor_sync(~0u, x, 2);
  }
  // The next block of keys of such stripes, from n on downwards; below `begin` there is none.
  static METHOD int next(int n, int begin, u32 stripes, int each) {
    if (PASS == VALUES)
      while (n >= begin && !(stripes >> n / each & 1)) n--;
    return n;
  }

  // Walks of `queries` over the keys.
  static METHOD int sweeps(const HopperLazyArgs& c) { return c.means + c.wants_dq; }

  // One warp feeds, `consume` multiplies.
  template <int FEEDS, int MULTIPLIES, class F> METHOD void run(const HopperLazyArgs& c, F consume) const {
    auto feed = [&] {
      if (threadIdx.x < 32) produce(c);
    };
    divide_roles<FEEDS, MULTIPLIES>(feed, consume);
  }

  // Nobody waits for ever: producer and consumers go through the same blocks in the same order, and at each block
  // every warp arrives once at K_EMPTY, and at V_EMPTY where v is loaded, also for a block that it leaves out, after
  // it has seen the block full: an arrival never counts for another phase. v of a block is left after the scores of
  // the next at the latest, which wait for k alone, and k of a block is loaded before v of it: two stages are enough.
  // q is left when its last block is.
  METHOD void produce(const HopperLazyArgs& c) const {
    const int tiles = tiles_of<GROUPS>(c.shape, c.packed);
    Tiles queries = {base, 1};
    Blocks keys = {base, 1};
    NO_UNROLL for (int t = blockIdx.x, claimed; t < tiles; t = __shfl_sync(~0u, claimed, 0)) {
      claimed = lane_id() == 0 ? claim_tile(c.counter, tiles) : 0;
      const Work w = Tiles::template work<true>(t, c);
      if (w.block < 0) continue;
      const Own s = sequence_of<true>(c, w.batch);
      const Range blocks = key_blocks<GROUPS, KEYS>(c.spans, s, w.block);
      const u32 own = stripes(c, s, w), active = __reduce_or_sync(~0u, own);
      const int each = stripe_blocks(s), first = next(blocks.end - 1, blocks.begin, active, each);
      load_tile(queries, c, w, s, t, own, first >= blocks.begin);
      NO_UNROLL for (int sweep = PASS == QUERIES ? sweeps(c) : 1; sweep; sweep--)
        NO_UNROLL for (int n = first; n >= blocks.begin; n = next(n - 1, blocks.begin, active, each)) load_block(keys, c, w, s, n);
      queries.advance();
    }
    queries.wait_empty();
    if (lane_id() == 0) store_word(queries.word(), ~0u), arrive(queries.full());
  }
  // A tile of queries, with its number and its stripes; nothing of one that `sees` no key.
  METHOD void load_tile(const Tiles& queries, const HopperLazyArgs& c, const Work& w, const Own& s, int t, u32 own, bool sees) const {
    const u32 q = base + queries.stage() * TILE_BYTES, full = queries.full(), words = queries.word();
    queries.wait_empty();
    const u32 second = __shfl_sync(~0u, own, 4), third = __shfl_sync(~0u, own, 8);
    if (lane_id()) return;
    store_word(words, t);
    if (PASS == VALUES) store_word(words + 4, own), store_word(words + 8, second), store_word(words + 12, third);
    if (!sees) return arrive(full);
    expect_bytes(full, TILE_BYTES);
    load5(q, &c.q, full, s.query_start + w.block * ROWS, w.head, s.batch);
    if (PASS == QUERIES) load5(q + Q_BYTES, &c.dout, full, s.query_start + w.block * ROWS, w.head, s.batch);
  }
  // A block of keys, with its values and its bias.
  METHOD void load_block(Blocks& keys, const HopperLazyArgs& c, const Work& w, const Own& s, int n) const {
    const int key_head = w.head / (s.heads / s.key_heads);
    const u32 at = base + AT_K + keys.stage() * KV_BYTES, row = s.key_start + n * KEYS;
    auto load = [&](int part, u32 to, const TensorMap* from) {
      keys.wait_empty(part);
      if (lane_id()) return;
      expect_bytes(keys.full(part), KV_BYTES);
      load5(to, from, keys.full(part), row, key_head, s.batch);
    };
    load(K, at, &c.k);
    const bool hides = put_bias<ROWS>(bias(keys.stage()), c, w.head, distance_of(c, s, w.block * ROWS, n * KEYS));
    if (PASS == SCORES && hides) raise<OF_BIAS>(c, w.batch, w.head);
    warp_arrive(keys.full(K));
    if (PASS != SCORES) load(V, at + AT_V - AT_K, &c.v);
    keys.advance();
  }
};

// A warpgroup's rows of a work tile.
struct Rows {
  int row;       // the first of this thread's two
  Span seen[2];  // the keys that they see
  Reach all;     // of the warpgroup
  Span before;   // the keys that some of the 64 rows before sees; all keys, where it is not the first head of its group
  METHOD Rows() {}
  METHOD Rows(const HopperLazyArgs& c, const Work& w, const Own& s, int rows) {
    const int group = __shfl_sync(~0u, own_group(), 0), first = w.block * rows + group * 64, last = min(first + 63, s.queries - 1);
    row = first + own_row();
    const Seen own(c.spans, c.shape, s, row);
    all = SPANS ? reach_of<1>(c.spans, s, first / 64) : reach_of(s, first, last);
    UNROLL(r, 2) seen[r] = {own.begin(r), SPANS || row + 8 * r < s.queries ? own.end(r) : 0};
    if (!SPANS && first > last) all.end = 0;
    before = w.head % (s.heads / s.key_heads) ? Span{0, 1 << 30} : Span{1 << 30, 0};
    if (first && before.end == 0) {
      const Reach some = SPANS ? reach_of<1>(c.spans, s, first / 64 - 1) : reach_of(s, first - 64, first - 1);
      before = {some.begin, some.end};
    }
  }
  // True if some row of the warpgroup sees some of a block of keys; if all see all.
  METHOD bool sees(int key, int keys = KEYS) const { return key < all.end && key + keys > all.begin; }
  METHOD bool sees_all(int key, int keys = KEYS) const { return key >= all.from && key + keys <= all.to; }
  // True if no rows before see some of it.
  METHOD bool sees_first(int key) const { return sees(key) && !(key < before.end && key + KEYS > before.begin); }
  // True if a row of the warp, or a row of this thread, does not see all of it.
  METHOD bool is_cut(int key) const { return __any_sync(~0u, cuts(0, key, KEYS) || cuts(1, key, KEYS)); }
  METHOD bool cuts(int r, int key, int keys) const { return seen[r].begin > key || seen[r].end < key + keys; }
};

// A work tile that a warpgroup took: its rows, what they see, and their numbers.
struct QueryTile {
  Work w;
  Own s;
  Range range;
  Rows own;
  float lse[2], offset[2];
};
// The first of a thread's two rows in its tile: consumers' warps follow the four of the producer's group.
DEV int row_in_tile() { return (threadIdx.x / 32 - 4) * 16 + lane_id() / 4; }
// A consumer of such a feed: its places in the rings.
template <class FEED> struct QueryWalk {
  const FEED& feed;
  const HopperLazyArgs& c;
  const u32 base;
  const int group, near;  // near: where the bias of this thread's first row and key lies
  typename FEED::Tiles tiles;
  typename FEED::Blocks blocks;

  METHOD QueryWalk(const FEED& f, const HopperLazyArgs& call, u32 base, int group)
      : feed(f), c(call), base(base), group(group), near(KEYS - 1 + row_in_tile() - own_column()), tiles(base, 0), blocks(base, 0) {}
  METHOD int first_row(const QueryTile& t) const { return t.w.block * FEED::ROWS + group * 64; }
  METHOD void find_rows(QueryTile& t) const {
    t.range = key_blocks<FEED::ROWS / 64, KEYS>(c.spans, t.s, t.w.block), t.own = Rows(c, t.w, t.s, FEED::ROWS);
  }
  METHOD void load_numbers(QueryTile& t) const {
    UNROLL(r, 2) {
      const i64 at = row_at(c, t.s, t.w.head, min(t.own.row + 8 * r, t.s.queries - 1));
      t.lse[r] = base_of(c.lse[at]), t.offset[r] = c.numbers[at].offset;
    }
  }
  // Raises the flag of the group if a key of block n is not finite.
  METHOD void check_keys(const QueryTile& t, int n) const {
    if (!t.own.sees_first(n * KEYS)) return;
    if (!is_finite_tile<KEYS>(base + FEED::AT_K + blocks.stage() * KV_BYTES, t.s.keys - n * KEYS)) raise<OF_OPERAND>(c, t.w.batch, t.w.head);
  }
  // S of block n, from products.
  METHOD void score_block(float (&x)[KEYS / 2], const QueryTile& t, int n) const {
    score<-1>(x, c.shape.scale, is_near(c, distance_of(c, t.s, first_row(t), n * KEYS), 64), feed.bias(blocks.stage()) + near);
  }
};
