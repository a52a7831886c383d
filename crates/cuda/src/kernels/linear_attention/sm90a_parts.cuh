// Shared by the kernels of sm90a_walk.cu and its companions: the path of a block, what its threads keep of the
// state, rows of results, and products.

// ---- the path of a block ----
struct Path {
  int segment, head, key_head, half;
  int batch, start, tokens, chunks, first_chunk;  // of the segment
  int many;                                       // query heads that a chunk of a key head is walked with
};
template <bool BACK> DEV Path path_of(const WalkArgs& c) {
  Path p;
  const int halves = (c.outer + COLUMNS - 1) / COLUMNS, heads = BACK ? c.key_heads : c.heads, group = c.heads / c.key_heads;
  p.half = blockIdx.x % halves, p.head = blockIdx.x / halves % heads, p.segment = blockIdx.x / halves / heads;
  p.key_head = BACK ? p.head : p.head / group, p.many = BACK ? group : 1;
  Segment own = c.segments[p.segment];
  p.first_chunk = __shfl_sync(~0u, own.first, 0), p.chunks = __shfl_sync(~0u, own.chunks, 0);
  p.batch = p.start = p.tokens = 0;
  if (p.chunks) {
    Chunk first = c.chunks[p.first_chunk], last = c.chunks[p.first_chunk + p.chunks - 1];
    p.batch = __shfl_sync(~0u, first.batch, 0), p.start = __shfl_sync(~0u, first.start, 0);
    p.tokens = __shfl_sync(~0u, last.start + last.len - first.start, 0);
  }
  return p;
}

// The copy of S before a chunk: 16 words of each thread, 256 words apart.
constexpr int KEPT = 256 * COLUMNS / 4;
DEV u32* kept_state(const WalkArgs& c, const Path& p, int chunk) {
  const int halves = (c.outer + COLUMNS - 1) / COLUMNS;
  return c.states + (((i64)(p.first_chunk + chunk) * c.key_heads + p.key_head) * halves + p.half) * KEPT;
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
DEV i64 state_at(const WalkArgs& c, const State& x, int row, int column) { return c.turned ? column * x.row + row : row * x.row + column; }
template <bool BACK> DEV void begin_state(const WalkArgs& c, const Path& p, const Thread& t, bool cleanse, float (&h)[COLUMNS / 2]) {
  const bool given = is_at(c, p, BACK ? 2 : 1);
  const State from = state_of(given ? c.begin : c.between, given ? c.segments[p.segment].sequence : p.segment, p.key_head);
  UNROLL(i, COLUMNS / 2) {
    int row = t.state_row + 8 * (i / 2 % 2), column = p.half * COLUMNS + t.column + i / 4 * 8 + i % 2;
    h[i] = from.data && row < c.inner && column < c.outer ? from.data[state_at(c, from, row, column)] : 0;
    if (cleanse && !is_finite(h[i])) h[i] = 0;
  }
}
DEV bool end_state(const WalkArgs& c, const Path& p, const Thread& t, const State& to, const float (&h)[COLUMNS / 2]) {
  bool odd = false;
  UNROLL(i, COLUMNS / 2) {
    int row = t.state_row + 8 * (i / 2 % 2), column = p.half * COLUMNS + t.column + i / 4 * 8 + i % 2;
    if (row >= c.inner || column >= c.outer) continue;
    to.data[state_at(c, to, row, column)] = h[i], odd |= !is_finite(h[i]);
  }
  return odd;
}
// Rounds the state for both warpgroups, and, if asked, for another walk.
DEV void show_state(u32 to, const Thread& t, const float (&h)[COLUMNS / 2], u32* keep) {
  UNROLL(j, COLUMNS / 16) {
    u32 x[4];
    UNROLL(i, 4) {
      x[i] = pack(h[8 * j + 2 * i], h[8 * j + 2 * i + 1]);
      if (keep) keep[256 * (4 * j + i)] = x[i];
    }
    if (t.owns) store_blocks(to + swizzled(t.state_row - t.lane / 4 + t.lane % 16, 2 * j + t.lane / 16), x[0], x[1], x[2], x[3]);
  }
  proxy_fence();
}
// A thread's part of <S, D>: z of (R27) but for the decay.
DEV void load_state(u32 (&to)[COLUMNS / 4], const u32* kept) {
  UNROLL(i, COLUMNS / 4) to[i] = kept[256 * i];
}
DEV float dot_states(const u32 (&kept)[COLUMNS / 4], const float (&h)[COLUMNS / 2]) {
  float sum = 0;
  UNROLL(i, COLUMNS / 4) {
    float2 s = unpack(kept[i]);
    sum = fmaf(s.x, h[2 * i], sum), sum = fmaf(s.y, h[2 * i + 1], sum);
  }
  return sum;
}
// The left factor P_ij (y_i·b_j) of a product with x: r rows of 8 and j columns of 8 on, the distance changes by 8 (j
// - r). Of TANGENT also (i - j) times that, its derivative by the decay; `distance`: i - j of the first pair.
template <bool TANGENT = false, int WORDS>
DEV void weigh_pairs(u32 (&to)[WORDS], const float (&p)[2 * WORDS], u32 decays, u32* tangent = 0, float distance = 0) {
  UNROLL_ALL for (int m = -1; m < WORDS / 2; m++) {
    float2 w = load_pair(decays + 32 * m);
    float2 v = make_float2(w.x * (distance - 8 * m), w.y * (distance - 8 * m - 1));
    UNROLL(r, 2) {
      const int j = m + r;
      if (j < 0 || j >= WORDS / 2) continue;
      to[2 * j + r] = pack(p[4 * j + 2 * r] * w.x, p[4 * j + 2 * r + 1] * w.y);
      if (TANGENT) tangent[2 * j + r] = pack(p[4 * j + 2 * r] * v.x, p[4 * j + 2 * r + 1] * v.y);
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
// The sum over the 256 threads of a number of each, in a fixed order, in the first of them. Its place holds no tile
// any more.
DEV float sum_of_block(u32 place, float x) {
  const int thread = threadIdx.x - 128;
  x = lane_sum(x);
  if (thread % 32 == 0) store_float(place + thread / 32 * 4, x);
  named_sync(1, 256);
  float sum = 0;
  for (int i = 0; i < 8; i++) sum += load_float(place + 4 * i);
  named_sync(1, 256);
  return sum;
}

// x or y of (R27) of two rows, and <S, D> of a chunk, BY_TOKEN.
DEV void put_dots(const WalkArgs& c, const Path& p, const Thread& t, float* to, const u32 (&dot)[COLUMNS / 4], const float (&o)[COLUMNS / 2], int chunk_row, int count) {
  const int halves = (c.outer + COLUMNS - 1) / COLUMNS, heads = to == c.y_dots ? c.key_heads : c.heads;
  UNROLL(r, 2) {
    const float sum = c.store_scale * quad_sum(dot_rows(dot, o, r));
    const i64 row = ((i64)p.batch * heads + p.head) * c.tokens + p.start + chunk_row + t.row + 8 * r;
    if (t.column == 0 && t.row + 8 * r < count) to[row * halves + p.half] = sum;
  }
}
DEV void put_states_dot(const WalkArgs& c, const Path& p, int chunk, float sum) {
  const int halves = (c.outer + COLUMNS - 1) / COLUMNS;
  sum = lane_sum(sum);
  if (lane_id() == 0) c.z_dots[(((i64)(p.first_chunk + chunk) * c.key_heads + p.key_head) * halves + p.half) * 8 + threadIdx.x / 32 - 4] = sum;
}

// Writes the block's parts of dg_gamma and dσ; whether one of them is not finite.
template <bool BACK> DEV bool end_dots(const WalkArgs& c, const Path& p, u32 base, float gamma, float by_scale) {
  const int halves = (c.outer + COLUMNS - 1) / COLUMNS, group = BACK ? 1 : c.heads / c.key_heads;
  const int part = p.key_head * c.parts + c.first_part + (p.segment * group + p.head % group) * halves + p.half;
  named_sync(1, 256);
  if (!BY_TOKEN) gamma = c.store_scale * sum_of_block(base + AT_DECAYS, gamma);
  if (!BACK) by_scale = sum_of_block(base + AT_DECAYS, by_scale);
  if (!BY_TOKEN && threadIdx.x == 128 && c.gammas) c.gammas[part] = gamma;
  if (threadIdx.x == 128 && !BACK && c.scales) c.scales[blockIdx.x] = by_scale;
  return !is_finite(gamma) || !is_finite(by_scale);
}

// ---- products ----
// y bᵀ of the rows of a warpgroup, and of as many rows of b as a thread has pairs.
template <int PAIRS> DEV void multiply_rows(float (&s)[PAIRS], u32 y, u32 b) { issue_shared<2 * PAIRS, KW, CHUNK, CHUNK>(s, y, b); }
// y S, or more of nothing where `add`: then every 8 rows of the state are the same 8 rows of zeros.
DEV void read_state(float (&o)[COLUMNS / 2], u32 y, u32 state, u32 zeros, bool add) {
  const u64 from = add ? (u64)((zeros & 0x3ffff) >> 4) | (u64)1 << 62 : mn_major(state, 0), step = add ? 0 : 2048 >> 4;
  pin(o), mma_begin();
  UNROLL(i, KW / 16) Mma<COLUMNS>::ss<K_MAJOR, MN_MAJOR>(o, k_major(y + i / 4 * PANEL + i % 4 * 32), from + i * step, i > 0 || add);
  mma_commit();
}
// Adds bᵀ x to the state.
DEV void add_to_state(float (&h)[COLUMNS / 2], u32 b, u32 x) {
  pin(h), mma_begin();
  UNROLL(i, CHUNK / 16) Mma<COLUMNS>::ss<MN_MAJOR, MN_MAJOR>(h, mn_major(b + i * 2048, 0), mn_major(x + i * 2048, 0), 1);
  mma_commit();
}
// o += w x.
template <int WORDS> DEV void add_pairs(float (&o)[COLUMNS / 2], u32 (&w)[WORDS], u32 x) {
  pin(o), pin(w), mma_begin();
  UNROLL(i, WORDS / 4) Mma<COLUMNS>::rs<MN_MAJOR>(o, w + 4 * i, mn_major(x + i * 2048, 0), 1);
  mma_commit();
}

