// Shared by the kernels of sm90a_walk.cu and its companions: the path of a block, what its threads have of the state,
// rows of results, products, and how blocks begin and repeat a path.

// ---- the path of a block ----
struct Path {
  int segment, head, key_head, half;
  int batch, start, tokens, chunks, first_chunk;  // of the segment
  int many;                                       // query heads that a chunk of a key head is walked with
};
DEV Path path_of(const WalkArgs& c, int segment) {
  Path p = {segment};
  Segment own = c.segments[segment];
  p.first_chunk = __shfl_sync(~0u, own.first, 0), p.chunks = __shfl_sync(~0u, own.chunks, 0);
  p.batch = p.start = p.tokens = 0;
  if (p.chunks) {
    Chunk first = c.chunks[p.first_chunk], last = c.chunks[p.first_chunk + p.chunks - 1];
    p.batch = __shfl_sync(~0u, first.batch, 0), p.start = __shfl_sync(~0u, first.start, 0);
    p.tokens = __shfl_sync(~0u, last.start + last.len - first.start, 0);
  }
  return p;
}
// A block owns 64 columns of a result, or BACK of the state of a key head.
template <bool BACK> DEV Path path_of(const WalkArgs& c) {
  const int halves = (c.outer + COLUMNS - 1) / COLUMNS, heads = BACK ? c.key_heads : c.heads, group = c.heads / c.key_heads;
  Path p = path_of(c, blockIdx.x / halves / heads);
  p.half = blockIdx.x % halves, p.head = blockIdx.x / halves % heads;
  p.key_head = BACK ? p.head : p.head / group, p.many = BACK ? group : 1;
  return p;
}

static_assert(STAGES == 2, "a stage has the parity of the one place of x weighted");
template <bool BACK> DEV int number_of(const Path& p, int n) { return BACK ? p.chunks - 1 - n : n; }
template <bool BACK> DEV int count_of(const Path& p, int n) { return min(CHUNK, p.tokens - number_of<BACK>(p, n) * CHUNK); }

// True if the sequence begins (1) or ends (2) with the segment.
DEV bool is_at(const WalkArgs& c, const Path& p, int end) {
  return !p.chunks || c.chunks[p.first_chunk + (end == 1 ? 0 : p.chunks - 1)].ends & end;
}

// ---- what a thread does ----
struct Thread {
  int group, warp, lane;
  int row, column;  // of its first accumulator, in the chunk and in the columns of the block
  int state_row;    // of its first accumulator of the state
  bool owns;        // whether its part of the state counts: two warpgroups have the same one where that has 64 rows
};
DEV Thread this_thread() {
  const int thread = threadIdx.x - 128, lane = lane_id(), group = thread / 128, warp = thread / 32 % 4, own = KW == 128 ? 64 * group : 0;
  return {group, warp, lane, group * 64 + warp * 16 + lane / 4, 2 * (lane & 3), own + warp * 16 + lane / 4, KW == 128 || group == 0};
}
// Below that e^g is 0 one token on; and 0 times it is 0, which it would not be of -inf.
DEV float log_of(const WalkArgs& c, int key_head) {
  return c.logs && !BY_TOKEN ? max_nan(c.logs[key_head] * LOG2E, -16384.0f) : 0;
}

struct State {  // of a key head of a sequence or a segment; data is 0 where there is none
  float* data;
  i64 row;
};
DEV State state_of(const Tensor& x, int number, int key_head) {
  return {x.data ? (float*)x.data + number * x.batch + key_head * x.head : 0, x.row};
}
// The state with which a path begins: that of a sequence where it is `given`, or that between segments.
template <int N> DEV void begin_state(const WalkArgs& c, const Path& p, const Thread& t, bool given, const Tensor& begin, const Tensor& between, bool cleanse, float (&h)[N]) {
  const State from = state_of(given ? begin : between, given ? c.segments[p.segment].sequence : p.segment, p.key_head);
  UNROLL(i, N) {
    int row = t.state_row + 8 * (i / 2 % 2), column = p.half * COLUMNS + t.column + i / 4 * 8 + i % 2;
    h[i] = from.data && row < c.inner && column < c.outer ? from.data[row * from.row + column] : 0;
    if (cleanse && !is_finite(h[i])) h[i] = 0;
  }
}
template <int N> DEV bool end_state(const WalkArgs& c, const Path& p, const Thread& t, const State& to, const float (&h)[N]) {
  bool odd = false;
  UNROLL(i, N) {
    int row = t.state_row + 8 * (i / 2 % 2), column = p.half * COLUMNS + t.column + i / 4 * 8 + i % 2;
    if (row >= c.inner || column >= c.outer) continue;
    to.data[row * to.row + column] = h[i], odd |= !is_finite(h[i]);
  }
  return odd;
}
// Rounds the state for both warpgroups.
DEV void show_state(u32 to, const Thread& t, const float (&h)[COLUMNS / 2]) {
  UNROLL(j, COLUMNS / 16) {
    u32 x[4];
    UNROLL(i, 4) x[i] = pack(h[8 * j + 2 * i], h[8 * j + 2 * i + 1]);
    if (t.owns) store_blocks(to + swizzled(t.state_row - t.lane / 4 + t.lane % 16, 2 * j + t.lane / 16), x[0], x[1], x[2], x[3]);
  }
  proxy_fence();
}
// The left factor P_ij (y_i·b_j) of a product with x, from the decay of the first pair on; r rows of 8 and j columns
// of 8 further, the distance changes by 8 (j - r).
template <int WORDS> DEV void weigh_pairs(u32 (&to)[WORDS], const float (&p)[2 * WORDS], u32 decays) {
  UNROLL_ALL for (int m = -1; m < WORDS / 2; m++) {
    float2 w = load_pair(decays + 32 * m);
    UNROLL(r, 2) {
      const int j = m + r;
      if (j < 0 || j >= WORDS / 2) continue;
      to[2 * j + r] = pack(p[4 * j + 2 * r] * w.x, p[4 * j + 2 * r + 1] * w.y);
    }
  }
}
// The same without decays.
template <int WORDS> DEV void mask_pairs(u32 (&to)[WORDS], const float (&p)[2 * WORDS], int distance, float scale) {
  UNROLL2(j, WORDS / 2, r, 2) {
    float x = scale * p[4 * j + 2 * r], y = scale * p[4 * j + 2 * r + 1];
    to[2 * j + r] = pack(distance + 8 * r - 8 * j >= 0 ? x : 0, distance + 8 * r - 8 * j - 1 >= 0 ? y : 0);
  }
}
// Rows of out: by the copy engine where all of the chunk's are there, from a tile of the warpgroup. BY_TOKEN there is
// no such tile.
DEV void put(const WalkArgs& c, const Path& p, const Thread& t, u32 tile, const float (&o)[COLUMNS / 2], int chunk_row, int count) {
  const float scale = c.store_scale;
  const i64 at = p.batch * c.rows.batch + p.head * c.rows.head + (p.start + chunk_row + t.row) * c.rows.row + p.half * COLUMNS;
  if (count < CHUNK) return store_rows(c.rows, at + t.column, count - t.row, c.outer - p.half * COLUMNS, o, scale);
  if (BY_TOKEN) return store_pieces(c.rows, at, c.outer - p.half * COLUMNS, o, scale);
  named_sync(2 + t.group, 128);  // the tile has been read
  UNROLL(j, COLUMNS / 16) {
    u32 x[4];
    UNROLL(i, 4) x[i] = pack(fmaf(o[8 * j + 2 * i], scale, 0.0f), fmaf(o[8 * j + 2 * i + 1], scale, 0.0f));
    store_blocks(tile + swizzled(t.warp * 16 + t.lane % 16, 2 * j + t.lane / 16), x[0], x[1], x[2], x[3]);
  }
  proxy_fence();
  named_sync(2 + t.group, 128);
  if (threadIdx.x % 128 == 0) {
    store4(&c.out, tile, p.half * COLUMNS, p.start + chunk_row + t.group * 64, p.head, p.batch);
    store_commit();
  }
}

// ---- products ----
// y bᵀ of the rows of a warpgroup, and of as many rows of b as a thread has pairs. From addresses: with log-decays of
// tokens the gradients would spill.
template <int PAIRS> DEV void multiply_rows(float (&s)[PAIRS], u32 y, u32 b) { issue_shared<2 * PAIRS, KW, CHUNK, CHUNK>(s, y, b); }
// y S of a tile of the state.
template <int N> DEV void multiply_state(float (&o)[N], u32 y, u32 state) {
  const u64 rows = k_major(y), columns = mn_major(state, KW * 128);
  pin(o), mma_begin();
  UNROLL(i, KW / 16) Mma<2 * N>::template ss<K_MAJOR, MN_MAJOR>(o, rows + i / 4 * (PANEL / 16) + i % 4 * K_STEP, columns + i * MN_STEP, i > 0);
  mma_commit();
}
// Adds bᵀ x to the state.
template <int N> DEV void add_to_state(float (&h)[N], u32 b, u32 x) {
  const u64 rows = mn_major(b, 0), columns = mn_major(x, PANEL);
  pin(h), mma_begin();
  UNROLL(i, CHUNK / 16) Mma<2 * N>::template ss<MN_MAJOR, MN_MAJOR>(h, rows + i * MN_STEP, columns + i * MN_STEP, 1);
  mma_commit();
}
// o += w x.
template <int WORDS, int N> DEV void add_pairs(float (&o)[N], u32 (&w)[WORDS], u32 x) {
  const u64 columns = mn_major(x, PANEL);
  pin(o), pin(w), mma_begin();
  UNROLL(i, WORDS / 4) Mma<2 * N>::template rs<MN_MAJOR>(o, w + 4 * i, columns + i * MN_STEP, 1);
  mma_commit();
}

constexpr int FEEDS = BY_TOKEN ? 56 : 40, COMPUTES = BY_TOKEN ? 224 : 232;  // registers of a thread
// Walks a path by the warps of a block, and once more with 0 for numbers that are not finite, where a result is not.
// `feeds` feeds the copy engine, `weighs` has three warps, `computes` says whether a result is not finite.
template <class R, class P, class F, class W, class M> DEV void walk_path(const WalkArgs& c, u32 base, P path, F feeds, W weighs, M computes) {
  bool again = false;
  if (threadIdx.x < 128) {
    registers_down<FEEDS>();
    const auto p = path();
    R at = {base, threadIdx.x == 0};
    do {
      if (threadIdx.x == 0) feeds(p, base, at);
      else if (threadIdx.x >= 32) weighs(p, base, again, at);
      __syncwarp();
      again = named_any(5, 384, false);
    } while (again);
  } else {
    registers_up<COMPUTES>();
    const auto p = path();
    R at = {base, 0};
    do {
      const bool strange = computes(p, base, again, at);
      again = named_any(5, 384, strange && c.found && !again);
      if (again) *c.found = 1;
    } while (again);
  }
}
