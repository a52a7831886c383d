// linear_attention of bf16 and f16 on the tensor cores of compute capability 9.0, without a decay or with one for each head. A
// block owns 64 columns of a result of one head of one segment of a sequence, and walks its chunks of 128 tokens from the first
// to the last, or back: most sequences are one segment, for others see sm90a_linear_segments.cu. The state stays in the accumulators of two warpgroups, in f32, and is shown to both, rounded, in shared
// memory: in two buffers, so that neither waits for the other but for its part of the state, and one multiplies while the other
// weighs. Of a third warpgroup a thread feeds the copy engine, and three warps weigh x for what the state gains. Barriers of a
// stage: FULL; EMPTY, y and b have been read; EMPTY_X, x has been. Of weighted x: WEIGHTED, it is there; TAKEN, it has been read.
// Of a buffer of the state: SHOWN. A block whose results are not finite walks once more, with 0 for such operands.
//
//   attend_plain      o (R21), (R22), or dq (R24), without a decay
//   attend            the same with decays
//   attend_dots       dq, and what x and w add to dg_gamma (R27); dσ (R9)
//   attend_back       dk or dv (R25), (R26), (R28)
//   attend_back_dots  dk, and what y and z add to dg_gamma

// ---- the path of a block -------------------------------------------------------------------------------------------------
struct Path {
  int segment, head, key_head, half;
  int batch, start, tokens, chunks, first_chunk;  // of the segment
  int many;                                       // query heads that a chunk of a key head is walked with
};
template <bool BACK> DEV Path path_of(const Walk& c) {
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

// Where S before a chunk is kept: 16 words of each thread, 256 words apart.
constexpr int KEPT = 256 * COLUMNS / 4;
DEV u32* kept_state(const Walk& c, const Path& p, int chunk) {
  const int halves = (c.outer + COLUMNS - 1) / COLUMNS;
  return c.states + (((i64)(p.first_chunk + chunk) * c.key_heads + p.key_head) * halves + p.half) * KEPT;
}

// The stage of a step, and the parities of barriers: a warp's place in its rings, kept from one walk to the next.
struct Ring {
  u32 stage, phase, turn;
  __device__ __forceinline__ void advance() {
    turn ^= 1;
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};
template <bool BACK> DEV int number_of(const Path& p, int n) { return BACK ? p.chunks - 1 - n : n; }
template <bool BACK> DEV int count_of(const Path& p, int n) { return min(CHUNK, p.tokens - number_of<BACK>(p, n) * CHUNK); }

// Whether the sequence begins (1) or ends (2) with the segment.
DEV bool is_at(const Walk& c, const Path& p, int end) {
  return !p.chunks || c.chunks[p.first_chunk + (end == 1 ? 0 : p.chunks - 1)].ends & end;
}

// One thread feeds the copy engine. ROWS: with y.
template <bool BACK, bool DOTS, bool ROWS = true> DEV void feed(const Walk& c, const Path& p, u32 base, Ring& ring) {
#pragma unroll 1
  for (int n = 0; n < p.chunks; n++)
#pragma unroll 1
    for (int m = 0; m < p.many; m++) {
      const u32 full = base + FULL + 8 * ring.stage, y = base + ring.stage * Y_BYTES, b = base + AT_B + ring.stage * Y_BYTES;
      const int row = p.start + number_of<BACK>(p, n) * CHUNK, other = BACK ? p.key_head * p.many + m : p.key_head;
      wait(base + EMPTY + 8 * ring.stage, ring.phase);
      expect_bytes(full, (ROWS ? 2 : 1) * Y_BYTES + PANEL);
#pragma unroll
      for (int i = 0; ROWS && i < KW / 64; i++) load4(y + i * PANEL, &c.y, full, 64 * i, row, p.head, p.batch);
#pragma unroll
      for (int i = 0; i < KW / 64; i++) load4(b + i * PANEL, &c.b, full, 64 * i, row, other, p.batch);
      if (DOTS && m == 0 && n + 1 < p.chunks) {
        prefetch4(&c.dots, p.half * COLUMNS, p.start + number_of<BACK>(p, n + 1) * CHUNK, p.head, p.batch);
        if (BACK) prefetch_bytes(kept_state(c, p, number_of<BACK>(p, n + 1)), 4 * KEPT);
      }
      wait(base + EMPTY_X + 8 * ring.stage, ring.phase);
      load4(base + AT_X + ring.stage * PANEL, &c.x, full, p.half * COLUMNS, row, other, p.batch);
      ring.advance();
    }
}

// Three warps write x times the decays of its tokens to an end of the chunk: what the state gains is bᵀ times it.
template <bool BACK> DEV void weigh_tokens(const Walk& c, const Path& p, u32 base, bool cleanse, Ring& ring) {
  constexpr int THREADS = 96, MANY = 3;
  const int thread = threadIdx.x - 32;
  named_sync(4, THREADS + 256);  // the decays are there
#pragma unroll 1
  for (int n = 0; n < p.chunks; n++) {
    const int count = count_of<BACK>(p, n);
    const u32 decays = base + AT_DECAYS + 4 * (MIDDLE + (BACK ? 1 : 1 - count));
#pragma unroll 1
    for (int m = 0; m < p.many; m++) {
      const u32 x = base + AT_X + ring.stage * PANEL;
      wait(base + FULL + 8 * ring.stage, ring.phase ^ 1);
      if (cleanse || count < CHUNK) tidy<THREADS>(x, 1, count, cleanse, thread), named_sync(7, THREADS);
      // A thread has every twelfth token, and the same piece of each.
      const u32 from = x + 16 * thread, to = base + AT_WEIGHTED + 16 * thread, weights = decays + 4 * (thread / 8);
#pragma unroll 1
      for (int i = 0; i < CHUNK; i += THREADS / 8 * MANY) {
        uint4 piece[MANY];
        float weight[MANY];
#pragma unroll
        for (int j = 0; j < MANY; j++) {
          const int token = min(i + THREADS / 8 * j, CHUNK - 1 - thread / 8);
          piece[j] = load_piece(from + 128 * token), weight[j] = __uint_as_float(load_word(weights + 4 * token));
        }
        if (i == 0) wait(base + TAKEN, ring.turn ^ 1);
#pragma unroll
        for (int j = 0; j < MANY; j++) {
          const int token = min(i + THREADS / 8 * j, CHUNK - 1 - thread / 8);
          const uint4 own = piece[j];
          if (i + THREADS / 8 * j + thread / 8 < CHUNK)
            store_piece(to + 128 * token, make_uint4(times(own.x, weight[j]), times(own.y, weight[j]), times(own.z, weight[j]), times(own.w, weight[j])));
        }
      }
      proxy_fence();
      warp_arrive(base + WEIGHTED);
      ring.advance();
    }
  }
}

// ---- what a thread does ----------------------------------------------------------------------------------------------------
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
DEV float log_of(const Walk& c, int key_head) { return c.logs ? fmaxf(c.logs[key_head] * LOG2E, -16384.0f) : 0; }

struct State {  // of a key head of a sequence or a segment; data is 0 where there is none
  float* data;
  i64 row;
};
DEV State state_of(const Tensor& x, int number, int key_head) {
  return {x.data ? (float*)x.data + number * x.batch + key_head * x.head : 0, x.row};
}
DEV i64 state_at(const Walk& c, const State& x, int row, int column) { return c.turned ? column * x.row + row : row * x.row + column; }
template <bool BACK> DEV void begin_state(const Walk& c, const Path& p, const Thread& t, bool cleanse, float (&h)[COLUMNS / 2]) {
  const bool given = is_at(c, p, BACK ? 2 : 1);
  const State from = state_of(given ? c.begin : c.between, given ? c.segments[p.segment].sequence : p.segment, p.key_head);
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) {
    int row = t.state_row + 8 * (i / 2 % 2), column = p.half * COLUMNS + t.column + i / 4 * 8 + i % 2;
    h[i] = from.data && row < c.inner && column < c.outer ? from.data[state_at(c, from, row, column)] : 0;
    if (cleanse && is_odd(h[i])) h[i] = 0;
  }
}
DEV bool end_state(const Walk& c, const Path& p, const Thread& t, const State& to, const float (&h)[COLUMNS / 2]) {
  bool odd = false;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) {
    int row = t.state_row + 8 * (i / 2 % 2), column = p.half * COLUMNS + t.column + i / 4 * 8 + i % 2;
    if (row >= c.inner || column >= c.outer) continue;
    to.data[state_at(c, to, row, column)] = h[i], odd |= is_odd(h[i]);
  }
  return odd;
}
// Rounds the state for both warpgroups, and, if asked, for another walk.
DEV void show_state(u32 to, const Thread& t, const float (&h)[COLUMNS / 2], u32* keep) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 16; j++) {
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = pack(h[8 * j + 2 * i], h[8 * j + 2 * i + 1]);
      if (keep) keep[256 * (4 * j + i)] = x[i];
    }
    if (t.owns) store_blocks(to + swizzled(t.state_row - t.lane / 4 + t.lane % 16, 2 * j + t.lane / 16), x[0], x[1], x[2], x[3]);
  }
  proxy_fence();
}
// What of <S, D> a thread has: z of (R27) but for the decay.
DEV void load_state(u32 (&to)[COLUMNS / 4], const u32* kept) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 4; i++) to[i] = kept[256 * i];
}
DEV float dot_states(const u32 (&kept)[COLUMNS / 4], const float (&h)[COLUMNS / 2]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < COLUMNS / 4; i++) {
    float2 s = unpack(kept[i]);
    sum = fmaf(s.x, h[2 * i], sum), sum = fmaf(s.y, h[2 * i + 1], sum);
  }
  return sum;
}
// The left factor P_ij (y_i·b_j) of a product with x: r rows of 8 and j columns of 8 on, the distance changes by 8 (j - r).
template <int WORDS> DEV void weigh_pairs(u32 (&to)[WORDS], const float (&p)[2 * WORDS], u32 decays) {
#pragma unroll
  for (int m = -1; m < WORDS / 2; m++) {
    float2 w = load_pair(decays + 32 * m);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int j = m + r;
      if (j >= 0 && j < WORDS / 2) to[2 * j + r] = pack(p[4 * j + 2 * r] * w.x, p[4 * j + 2 * r + 1] * w.y);
    }
  }
}
// The same, and (i - j) times that: its derivative by the decay. `distance`: i - j of the first pair.
template <int WORDS> DEV void weigh_pairs(u32 (&to)[WORDS], u32 (&tangent)[WORDS], const float (&p)[2 * WORDS], u32 decays, float distance) {
#pragma unroll
  for (int m = -1; m < WORDS / 2; m++) {
    float2 w = load_pair(decays + 32 * m);
    float2 v = make_float2(w.x * (distance - 8 * m), w.y * (distance - 8 * m - 1));
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int j = m + r;
      if (j < 0 || j >= WORDS / 2) continue;
      to[2 * j + r] = pack(p[4 * j + 2 * r] * w.x, p[4 * j + 2 * r + 1] * w.y);
      tangent[2 * j + r] = pack(p[4 * j + 2 * r] * v.x, p[4 * j + 2 * r + 1] * v.y);
    }
  }
}
// The same without decays.
template <int WORDS> DEV void mask_pairs(u32 (&to)[WORDS], const float (&p)[2 * WORDS], int distance, float scale) {
#pragma unroll
  for (int j = 0; j < WORDS / 2; j++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float x = scale * p[4 * j + 2 * r], y = scale * p[4 * j + 2 * r + 1];
      to[2 * j + r] = pack(distance + 8 * r - 8 * j >= 0 ? x : 0, distance + 8 * r - 8 * j - 1 >= 0 ? y : 0);
    }
}
// Rows of out: by the copy engine where all of the chunk's are there, from a tile of the warpgroup.
DEV void put(const Walk& c, const Path& p, const Thread& t, u32 tile, const float (&o)[COLUMNS / 2], int chunk_row, int count) {
  const float scale = c.store_scale;
  if (count < CHUNK) {
    i64 at = p.batch * c.rows.batch + p.head * c.rows.head + (p.start + chunk_row + t.row) * c.rows.row + p.half * COLUMNS + t.column;
    return store_rows(c.rows, at, count - t.row, c.outer - p.half * COLUMNS, o, scale);
  }
  named_sync(2 + t.group, 128);  // the tile has been read
#pragma unroll
  for (int j = 0; j < COLUMNS / 16; j++) {
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = pack(fmaf(o[8 * j + 2 * i], scale, 0.0f), fmaf(o[8 * j + 2 * i + 1], scale, 0.0f));
    store_blocks(tile + swizzled(t.warp * 16 + t.lane % 16, 2 * j + t.lane / 16), x[0], x[1], x[2], x[3]);
  }
  proxy_fence();
  named_sync(2 + t.group, 128);
  if (threadIdx.x % 128 == 0) {
    store4(&c.out, tile, p.half * COLUMNS, p.start + chunk_row + t.group * 64, p.head, p.batch);
    store_commit();
  }
}
// The sum over the 256 threads of a number of each, in a fixed order, in the first of them. Its place holds no tile any more.
DEV float sum_of_block(u32 place, float x) {
  const int thread = threadIdx.x - 128;
#pragma unroll
  for (int n = 16; n; n /= 2) x += __shfl_xor_sync(~0u, x, n);
  if (thread % 32 == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(place + thread / 32 * 4), "f"(x) : "memory");
  named_sync(1, 256);
  float sum = 0;
  for (int i = 0; i < 8; i++) sum += __uint_as_float(load_word(place + 4 * i));
  named_sync(1, 256);
  return sum;
}

// Writes the block's parts of dg_gamma and dσ; whether one of them is not finite.
template <bool BACK> DEV bool end_dots(const Walk& c, const Path& p, u32 base, float gamma, float by_scale) {
  const int halves = (c.outer + COLUMNS - 1) / COLUMNS, group = BACK ? 1 : c.heads / c.key_heads;
  const int part = p.key_head * c.parts + c.first_part + (p.segment * group + p.head % group) * halves + p.half;
  named_sync(1, 256);
  gamma = c.store_scale * sum_of_block(base + AT_DECAYS, gamma);
  if (!BACK) by_scale = sum_of_block(base + AT_DECAYS, by_scale);
  if (threadIdx.x == 128 && c.gammas) c.gammas[part] = gamma;
  if (threadIdx.x == 128 && !BACK && c.scales) c.scales[blockIdx.x] = by_scale;
  return is_odd(gamma) || is_odd(by_scale);
}

// ---- products ---------------------------------------------------------------------------------------------------------------
// y bᵀ of the rows of a warpgroup, and of as many rows of b as a thread has pairs.
template <int PAIRS> DEV void multiply_rows(float (&s)[PAIRS], u32 y, u32 b) {
  pin(s), mma_begin();
#pragma unroll
  for (int i = 0; i < KW / 16; i++)
    Mma<2 * PAIRS>::template ss<K_MAJOR, K_MAJOR>(s, k_major(y + i / 4 * PANEL + i % 4 * 32), k_major(b + i / 4 * PANEL + i % 4 * 32), i > 0);
  mma_commit();
}
// y S, or more of nothing where `add`: then every 8 rows of the state are the same 8 rows of zeros.
DEV void read_state(float (&o)[COLUMNS / 2], u32 y, u32 state, u32 zeros, bool add) {
  const u64 from = add ? (u64)((zeros & 0x3ffff) >> 4) | (u64)1 << 62 : mn_major(state, 0), step = add ? 0 : 2048 >> 4;
  pin(o), mma_begin();
#pragma unroll
  for (int i = 0; i < KW / 16; i++) Mma<COLUMNS>::ss<K_MAJOR, MN_MAJOR>(o, k_major(y + i / 4 * PANEL + i % 4 * 32), from + i * step, i > 0 || add);
  mma_commit();
}
// What the state gains: bᵀ x.
DEV void add_to_state(float (&h)[COLUMNS / 2], u32 b, u32 x) {
  pin(h), mma_begin();
#pragma unroll
  for (int i = 0; i < CHUNK / 16; i++) Mma<COLUMNS>::ss<MN_MAJOR, MN_MAJOR>(h, mn_major(b + i * 2048, 0), mn_major(x + i * 2048, 0), 1);
  mma_commit();
}
// o += w x.
template <int WORDS> DEV void add_pairs(float (&o)[COLUMNS / 2], u32 (&w)[WORDS], u32 x) {
  pin(o), pin(w), mma_begin();
#pragma unroll
  for (int i = 0; i < WORDS / 4; i++) Mma<COLUMNS>::rs<MN_MAJOR>(o, w + 4 * i, mn_major(x + i * 2048, 0), 1);
  mma_commit();
}

// ---- the walk --------------------------------------------------------------------------------------------------------------
// Whether a result is not finite. The rows of one warpgroup see none of the tokens of the other's, which it leaves out.
template <bool DECAY, bool BACK, bool DOTS, int GROUP> DEV bool multiply(const Walk& c, const Path& p, u32 base, bool cleanse, Ring& ring, u32& shows) {
  const int thread = threadIdx.x - 128;
  const Thread t = this_thread();
  constexpr int OWN = KW == 128 ? 64 * GROUP : 0, SEEN = GROUP == BACK ? 64 : 128, FIRST = GROUP && BACK ? 64 : 0;
  constexpr bool TANGENT = DOTS && !BACK;
  const float log = DECAY ? log_of(c, p.key_head) : 0;
  const u32 pairs = decays_at(base + AT_DECAYS, t.column + FIRST - t.row);
  float h[COLUMNS / 2], o[COLUMNS / 2], o1[COLUMNS / 2], s[SEEN / 2], odd = 0, gamma = 0, by_scale = 0;
  u32 w[SEEN / 4], tangent[SEEN / 4];
  if (DECAY) {
    fill_decays<BACK>(base + AT_DECAYS, thread, log, c.scale);
    named_arrive(4, 96 + 256);
  }
  begin_state<BACK>(c, p, t, cleanse, h);
  const bool keeps = TANGENT && c.states && p.head % (c.heads / c.key_heads) == 0;
  show_state(base + AT_STATE, t, h, keeps && p.chunks ? kept_state(c, p, 0) + thread : 0);
  // Rows that results are multiplied with, and z of the chunk that the walk comes to next: both are loaded a chunk before.
  u32 dot[COLUMNS / 4], kept[COLUMNS / 4];
  auto load_dot = [&](int n) {
    if (!DOTS) return;
    const int first = max(number_of<BACK>(p, n), 0) * CHUNK + t.row, count = n < p.chunks ? p.tokens - first : 0;
    load_rows(dot, c.dot, p.batch * c.dot.batch + p.head * c.dot.head + (p.start + first) * c.dot.row + p.half * COLUMNS + t.column,
              count, c.outer - p.half * COLUMNS);
  };
  auto load_kept = [&](int n) {
    if (DOTS && BACK) load_state(kept, kept_state(c, p, max(number_of<BACK>(p, n), 0)) + thread);
  };
  auto add_kept = [&](int n) {
    const int count = t.owns && n < p.chunks ? count_of<BACK>(p, n) : 0;
    if (DOTS && BACK) gamma = fmaf(count ? dot_states(kept, h) * exp2_fast(log * count) : 0, count, gamma);
  };
  warp_arrive(base + SHOWN + 8 * (shows & 1));
  // Both parts of the state are shown, and who shows one has read the one before: nobody reads the other buffer any more.
  auto wait_for_state = [&] { wait(base + SHOWN + 8 * (shows & 1), shows >> 1 & 1), shows++; };
  if (p.chunks) load_kept(0), add_kept(0), load_kept(1), load_dot(0);
  // The scores of a step whose tiles are the next ones: issued a step ahead, and behind the last one for nobody.
  auto scores = [&](bool there, int count) {
    const u32 y = base + ring.stage * Y_BYTES, b = base + AT_B + ring.stage * Y_BYTES, x = base + AT_X + ring.stage * PANEL;
    if (there) {
      wait(base + FULL + 8 * ring.stage, ring.phase);
      if (cleanse || count < CHUNK) {
        tidy(y, KW / 64, count, cleanse, thread), tidy(b, KW / 64, count, cleanse, thread);
        if (!DECAY) tidy(x, 1, count, cleanse, thread);
        proxy_fence();
        named_sync(1, 256);
      }
    }
    multiply_rows(s, y + GROUP * 8192, b + 128 * FIRST);
  };
  scores(p.chunks > 0, count_of<BACK>(p, 0));
#pragma unroll 1
  for (int n = 0; n < p.chunks; n++) {
    const int chunk_row = number_of<BACK>(p, n) * CHUNK, count = count_of<BACK>(p, n);
    const u32 state = base + AT_STATE + n % 2 * STATE_BYTES;
#pragma unroll 1
    for (int m = 0; m < p.many; m++) {
      const u32 own_stage = ring.stage, y = base + own_stage * Y_BYTES, b = base + AT_B + own_stage * Y_BYTES, x = base + AT_X + own_stage * PANEL;
      const bool last = m == p.many - 1;
      mma_wait<0>(), pin(s);
      if (DECAY && m == 0) {
        float all = exp2_fast(log * count);
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) h[i] *= all;
        pin(h);
      }
      if (GROUP == 1 && n + m == 0) named_sync(6, 256);  // it begins when the other multiplies
      if (m == 0) wait_for_state();
      read_state(o, y + GROUP * 8192, state, base + AT_DECAYS, BACK && m > 0);
      if (DECAY) wait(base + WEIGHTED, ring.turn);
      add_to_state(h, b + OWN / 64 * PANEL, DECAY ? base + AT_WEIGHTED : x);
      if (TANGENT) weigh_pairs(w, tangent, s, pairs, t.row - t.column - FIRST);
      else if (DECAY) weigh_pairs(w, s, pairs);
      else mask_pairs(w, s, t.row - t.column - FIRST, c.scale);
      mma_wait<1>(), pin(o);
      float reach[2], steps[2];  // decays, and how many, between the own token and the state
#pragma unroll
      for (int r = 0; r < 2; r++) {
        steps[r] = m > 0 ? 0 : BACK ? max(count - 1 - t.row - 8 * r, 0) : t.row + 8 * r + 1;
        reach[r] = m == 0 && DECAY ? exp2_fast(log * steps[r]) : 1;
      }
      if (DECAY) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) o[i] *= reach[i / 2 % 2];
      }
      if (DOTS && BACK) {
        gamma = fmaf(steps[0], dot_rows(dot, o, 0), fmaf(steps[1], dot_rows(dot, o, 1), gamma));  // y
        if (last) load_dot(n + 1);
      }
      if (TANGENT) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) o1[i] = steps[i / 2 % 2] * o[i];  // x
      }
      if (TANGENT) add_pairs(o1, tangent, x + 128 * FIRST);  // w
      add_pairs(o, w, x + 128 * FIRST);
      if (GROUP == 0 && n + m == 0) named_arrive(6, 256);
      if (TANGENT) mma_wait<2>(), pin(h);
      else mma_wait<1>(), pin(h);
      warp_arrive(base + EMPTY + 8 * own_stage);
      if (DECAY) warp_arrive(base + TAKEN);
      if (last) {
        show_state(base + AT_STATE + (n + 1) % 2 * STATE_BYTES, t, h, keeps && n + 1 < p.chunks ? kept_state(c, p, n + 1) + thread : 0);
        warp_arrive(base + SHOWN + 8 * (shows & 1));
      }
      if (threadIdx.x % 128 == 0) store_wait_read();
      ring.advance();
      if (TANGENT) mma_wait<0>(), pin(o), pin(o1);
      scores(!last || n + 1 < p.chunks, last ? count_of<BACK>(p, n + 1) : count);
      if (last) add_kept(n + 1), load_kept(n + 2);
      if (!TANGENT) mma_wait<1>(), pin(o);
      warp_arrive(base + EMPTY_X + 8 * own_stage);
      if (TANGENT) {
#pragma unroll
        for (int r = 0; r < 2; r++) gamma += dot_rows(dot, o1, r), by_scale += dot_rows(dot, o, r);
        load_dot(n + 1);
      }
      if (last) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) odd = fmaf(o[i], 0.0f, odd);
        if (c.rows.data) put(c, p, t, base + AT_OUT + GROUP * 8192, o, chunk_row, count);
      }
    }
  }
  wait_for_state();
  mma_wait<0>(), pin(s);
  bool strange = odd != 0;
  if (c.end.data && t.owns && (BACK || p.head % (c.heads / c.key_heads) == 0) && is_at(c, p, BACK ? 1 : 2))
    strange |= end_state(c, p, t, state_of(c.end, c.segments[p.segment].sequence, p.key_head), h);
  if (DOTS) strange |= end_dots<BACK>(c, p, base, gamma, by_scale);
  if (threadIdx.x % 128 == 0) store_wait();
  return strange;
}

DEV u32 begin_barriers(const Walk& c) {
  extern __shared__ __align__(1024) char bytes[];
  const u32 base = shared(bytes);
  if (threadIdx.x == 0) {
    prefetch(&c.y), prefetch(&c.b), prefetch(&c.x), prefetch(&c.out);
    for (int i = 0; i < STAGES; i++)
      barrier_init(base + FULL + 8 * i, 1), barrier_init(base + EMPTY + 8 * i, 8 * ARRIVALS), barrier_init(base + EMPTY_X + 8 * i, 8 * ARRIVALS);
    barrier_init(base + WEIGHTED, 3 * ARRIVALS), barrier_init(base + TAKEN, 8 * ARRIVALS);
    barrier_init(base + SHOWN, 8 * ARRIVALS), barrier_init(base + SHOWN + 8, 8 * ARRIVALS);
    barrier_init_fence();
  }
  __syncthreads();
  return base;
}

template <bool DECAY, bool BACK, bool DOTS> DEV void walk(const Walk& c) {
  const u32 base = begin_barriers(c);
  if (threadIdx.x < 128) {
    registers_down<40>();
    const Path p = path_of<BACK>(c);
    Ring ring = {0, 1, 0};
    bool again = false;
    do {
      if (threadIdx.x == 0) feed<BACK, DOTS>(c, p, base, ring);
      else if (DECAY && threadIdx.x >= 32) weigh_tokens<BACK>(c, p, base, again, ring);
      __syncwarp();
      again = named_any(5, 384, false);
    } while (again);
  } else {
    registers_up<232>();
    const Path p = path_of<BACK>(c);
    Ring ring = {0, 0, 0};
    u32 shows = 0;
    bool again = false;
    do {
      bool strange;
      if (threadIdx.x < 256) strange = multiply<DECAY, BACK, DOTS, 0>(c, p, base, again, ring, shows);
      else strange = multiply<DECAY, BACK, DOTS, 1>(c, p, base, again, ring, shows);
      again = named_any(5, 384, strange && c.found && !again);
      if (again) *c.found = 1;
    } while (again);
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) attend_plain(const __grid_constant__ Walk c) { walk<false, false, false>(c); }
extern "C" __global__ void __launch_bounds__(384, 1) attend(const __grid_constant__ Walk c) { walk<true, false, false>(c); }
extern "C" __global__ void __launch_bounds__(384, 1) attend_dots(const __grid_constant__ Walk c) { walk<true, false, true>(c); }
extern "C" __global__ void __launch_bounds__(384, 1) attend_back(const __grid_constant__ Walk c) { walk<true, true, false>(c); }
extern "C" __global__ void __launch_bounds__(384, 1) attend_back_dots(const __grid_constant__ Walk c) { walk<true, true, true>(c); }
