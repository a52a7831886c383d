// linear_attention of bf16 and f16 on the tensor cores of compute capability 9.0, without a decay or with one for each head. A
// block owns 64 columns of a result of one head of one sequence, and walks its chunks of 128 tokens from the first to the
// last, or back. The state stays in the accumulators of two warpgroups, in f32, and is shown to both, rounded, in shared
// memory: in two buffers, so that a chunk needs one barrier. A third warpgroup feeds the copy engine. Barriers of a stage: FULL;
// EMPTY, y and b have been read; EMPTY_X, x has been.
//
//   attend_plain      o (R21), (R22), or dq (R24), without a decay
//   attend            the same with decays
//   attend_dots       dq, and what x and w add to dg_gamma (R27); dσ (R9)
//   attend_back       dk or dv (R25), (R26), (R28)
//   attend_back_dots  dk, and what y and z add to dg_gamma

// ---- the path of a block -------------------------------------------------------------------------------------------------
struct Path {
  int sequence, head, key_head, half;
  int batch, start, tokens, chunks, first_chunk;  // of the sequence
  int many;                                       // query heads that a chunk of a key head is walked with
};
template <bool BACK> DEV Path path_of(const Walk& c) {
  Path p;
  const int halves = (c.outer + COLUMNS - 1) / COLUMNS, heads = BACK ? c.key_heads : c.heads, group = c.heads / c.key_heads;
  p.half = blockIdx.x % halves, p.head = blockIdx.x / halves % heads, p.sequence = blockIdx.x / halves / heads;
  p.key_head = BACK ? p.head : p.head / group, p.many = BACK ? group : 1;
  Line line = c.lines[p.sequence];
  p.first_chunk = __shfl_sync(~0u, line.first, 0), p.chunks = __shfl_sync(~0u, line.chunks, 0);
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

// One thread feeds the copy engine.
template <bool BACK, bool DOTS> DEV void feed(const Walk& c, const Path& p, u32 base) {
  u32 stage = 0, phase = 1;
#pragma unroll 1
  for (int n = 0; n < p.chunks; n++)
#pragma unroll 1
    for (int m = 0; m < p.many; m++) {
      const u32 full = base + FULL + 8 * stage;
      const int row = p.start + (BACK ? p.chunks - 1 - n : n) * CHUNK, other = BACK ? p.key_head * p.many + m : p.key_head;
      wait(base + EMPTY + 8 * stage, phase);
      expect_bytes(full, 2 * Y_BYTES + PANEL);
#pragma unroll
      for (int i = 0; i < KW / 64; i++) load4(base + stage * Y_BYTES + i * PANEL, &c.y, full, 64 * i, row, p.head, p.batch);
#pragma unroll
      for (int i = 0; i < KW / 64; i++) load4(base + AT_B + stage * Y_BYTES + i * PANEL, &c.b, full, 64 * i, row, other, p.batch);
      if (DOTS && m == 0) {  // what the threads read by themselves
        prefetch4(&c.dots, p.half * COLUMNS, row, p.head, p.batch);
        if (BACK) prefetch_bytes(kept_state(c, p, BACK ? p.chunks - 1 - n : n), 4 * KEPT);
      }
      wait(base + EMPTY_X + 8 * stage, phase);
      load4(base + AT_X + stage * PANEL, &c.x, full, p.half * COLUMNS, row, other, p.batch);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}

// ---- what a thread does ----------------------------------------------------------------------------------------------------
struct Thread {
  int group, warp, lane;
  int row, column;  // of its first accumulator, in the chunk and in the columns of the block
  int state_row;    // of its first accumulator of the state
  bool owns;        // whether its part of the state counts: two warpgroups have the same one where that has 64 rows
};

DEV i64 state_at(const Walk& c, const Tensor& x, const Path& p, int row, int column) {
  i64 at = p.sequence * x.batch + p.key_head * x.head;
  return at + (c.turned ? column * x.row + row : row * x.row + column);
}
DEV void begin_state(const Walk& c, const Path& p, const Thread& t, float (&h)[COLUMNS / 2]) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) {
    int row = t.state_row + 8 * (i / 2 % 2), column = p.half * COLUMNS + t.column + i / 4 * 8 + i % 2;
    h[i] = c.begin.data && row < c.inner && column < c.outer ? ((const float*)c.begin.data)[state_at(c, c.begin, p, row, column)] : 0;
    if (c.mode && is_odd(h[i])) h[i] = 0;
  }
}
DEV bool end_state(const Walk& c, const Path& p, const Thread& t, const float (&h)[COLUMNS / 2]) {
  bool odd = false;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) {
    int row = t.state_row + 8 * (i / 2 % 2), column = p.half * COLUMNS + t.column + i / 4 * 8 + i % 2;
    if (row >= c.inner || column >= c.outer) continue;
    ((float*)c.end.data)[state_at(c, c.end, p, row, column)] = h[i], odd |= is_odd(h[i]);
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
// bᵀ with the decays of its tokens to an end of the chunk, as the left factor of what the state gains.
DEV void weigh_tokens(u32 (&a)[CHUNK / 16][4], u32 b, u32 decays, const Thread& t) {
#pragma unroll
  for (int i = 0; i < CHUNK / 16; i++) {
    load_blocks_transposed(b + swizzled(16 * i + t.lane / 16 * 8 + t.lane % 8, t.warp * 2 + t.lane / 8 % 2), a[i]);
#pragma unroll
    for (int m = 0; m < 2; m++) {
      float2 w = load_pair(decays + 4 * (16 * i + 8 * m));
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float2 x = unpack(a[i][2 * m + n]);
        a[i][2 * m + n] = pack(x.x * w.x, x.y * w.y);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < CHUNK / 16; i++) pin(a[i]);
}
// The left factor P_ij (y_i·b_j) of a product with x: r rows of 8 and j columns of 8 on, the distance changes by 8 (j - r).
DEV void weigh_pairs(u32 (&to)[CHUNK / 4], const float (&p)[CHUNK / 2], u32 decays) {
#pragma unroll
  for (int m = -1; m < CHUNK / 8; m++) {
    float2 w = load_pair(decays + 32 * m);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int j = m + r;
      if (j >= 0 && j < CHUNK / 8) to[2 * j + r] = pack(p[4 * j + 2 * r] * w.x, p[4 * j + 2 * r + 1] * w.y);
    }
  }
}
// (i - j) times that: its derivative by the decay.
DEV void derive_pairs(u32 (&to)[CHUNK / 4], const u32 (&p)[CHUNK / 4], float distance) {
#pragma unroll
  for (int j = 0; j < CHUNK / 8; j++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float2 x = unpack(p[2 * j + r]);
      to[2 * j + r] = pack(x.x * (distance - 8 * (j - r)), x.y * (distance - 8 * (j - r) - 1));
    }
}
// The same without decays.
DEV void mask_pairs(u32 (&to)[CHUNK / 4], const float (&p)[CHUNK / 2], int distance, float scale) {
#pragma unroll
  for (int j = 0; j < CHUNK / 8; j++)
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
  const int part = p.key_head * c.parts + c.first_part + (p.sequence * group + p.head % group) * halves + p.half;
  named_sync(1, 256);
  gamma = c.store_scale * sum_of_block(base + AT_ZEROS, gamma);
  if (!BACK) by_scale = sum_of_block(base + AT_ZEROS, by_scale);
  if (threadIdx.x == 128 && c.gammas) c.gammas[part] = gamma;
  if (threadIdx.x == 128 && !BACK && c.scales) c.scales[blockIdx.x] = by_scale;
  return is_odd(gamma) || is_odd(by_scale);
}

// ---- products ---------------------------------------------------------------------------------------------------------------
// y bᵀ of the rows of a warpgroup.
DEV void multiply_rows(float (&s)[CHUNK / 2], u32 y, u32 b) {
  pin(s), mma_begin();
#pragma unroll
  for (int i = 0; i < KW / 16; i++)
    Mma<CHUNK>::ss<K_MAJOR, K_MAJOR>(s, k_major(y + i / 4 * PANEL + i % 4 * 32), k_major(b + i / 4 * PANEL + i % 4 * 32), i > 0);
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
// What the state gains: bᵀ x, or weighted bᵀ times x.
template <bool WEIGHTED> DEV void add_to_state(float (&h)[COLUMNS / 2], const u32 (&a)[CHUNK / 16][4], u32 b, u32 x) {
  pin(h), mma_begin();
#pragma unroll
  for (int i = 0; i < CHUNK / 16; i++) {
    if (WEIGHTED) Mma<COLUMNS>::rs<MN_MAJOR>(h, a[i], mn_major(x + i * 2048, 0), 1);
    else Mma<COLUMNS>::ss<MN_MAJOR, MN_MAJOR>(h, mn_major(b + i * 2048, 0), mn_major(x + i * 2048, 0), 1);
  }
  mma_commit();
}
// o (+)= w x.
template <bool ADD> DEV void multiply_pairs(float (&o)[COLUMNS / 2], u32 (&w)[CHUNK / 4], u32 x) {
  pin(o), pin(w), mma_begin();
#pragma unroll
  for (int i = 0; i < CHUNK / 16; i++) Mma<COLUMNS>::rs<MN_MAJOR>(o, w + 4 * i, mn_major(x + i * 2048, 0), ADD || i > 0);
  mma_commit();
}

// ---- the walk --------------------------------------------------------------------------------------------------------------
template <bool DECAY, bool BACK, bool DOTS> DEV void multiply(const Walk& c, const Path& p, u32 base) {
  const int thread = threadIdx.x - 128, lane = lane_id(), group = thread / 128, warp = thread / 32 % 4;
  const int own = KW == 128 ? 64 * group : 0;
  const Thread t = {group, warp, lane, group * 64 + warp * 16 + lane / 4, 2 * (lane & 3), own + warp * 16 + lane / 4, KW == 128 || group == 0};
  constexpr bool TANGENT = DOTS && !BACK;
  // Below that e^g is 0 one token on; and 0 times it is 0, which it would not be of -inf.
  const float log = DECAY && c.logs ? fmaxf(c.logs[p.key_head] * LOG2E, -16384.0f) : 0;
  const u32 pairs = decays_at(base + AT_DECAYS, t.column - t.row), zeros = base + AT_ZEROS;
  float h[COLUMNS / 2], o[COLUMNS / 2], s[CHUNK / 2], odd = 0, gamma = 0, by_scale = 0;
  u32 a[CHUNK / 16][4], w[CHUNK / 4], tangent[CHUNK / 4], dot[COLUMNS / 4];
  if (DECAY || BACK) fill_decays<BACK>(base + AT_DECAYS, thread, log, c.scale), fill_decays<BACK>(base + AT_DECAYS, thread + 256, log, c.scale);
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(zeros + 4 * thread), "r"(0) : "memory");
  begin_state(c, p, t, h);
  const bool keeps = TANGENT && c.states && p.head % (c.heads / c.key_heads) == 0;
  show_state(base + AT_STATE, t, h, keeps && p.chunks ? kept_state(c, p, 0) + thread : 0);
  auto count_of = [&](int n) { return min(CHUNK, p.tokens - (BACK ? p.chunks - 1 - n : n) * CHUNK); };
  // z of the chunk that the walk comes to next, of numbers that are loaded before.
  u32 kept[COLUMNS / 4];
  auto load_kept = [&](int n) {
    if (DOTS && BACK) load_state(kept, kept_state(c, p, max(p.chunks - 1 - n, 0)) + thread);
  };
  auto add_kept = [&](int n) {
    const int count = t.owns && n < p.chunks ? count_of(n) : 0;
    if (DOTS && BACK) gamma = fmaf(count ? dot_states(kept, h) * exp2_fast(log * count) : 0, count, gamma);
  };
  if (p.chunks) load_kept(0), add_kept(0);
  // The scores of a step whose tiles are the next ones: issued a step ahead, and behind the last one for nobody.
  u32 stage = 0, phase = 0;
  auto scores = [&](bool there, int count) {
    const u32 y = base + stage * Y_BYTES, b = base + AT_B + stage * Y_BYTES, x = base + AT_X + stage * PANEL;
    if (there) {
      wait(base + FULL + 8 * stage, phase);
      if (c.mode || count < CHUNK) {
        tidy(y, KW / 64, count, c.mode, thread), tidy(b, KW / 64, count, c.mode, thread), tidy(x, 1, count, c.mode, thread);
        proxy_fence();
        named_sync(1, 256);
      }
    }
    multiply_rows(s, y + t.group * 8192, b);
  };
  scores(p.chunks > 0, count_of(0));
#pragma unroll 1
  for (int n = 0; n < p.chunks; n++) {
    const int number = BACK ? p.chunks - 1 - n : n, chunk_row = number * CHUNK, count = count_of(n);
    const u32 state = base + AT_STATE + n % 2 * STATE_BYTES;
#pragma unroll 1
    for (int m = 0; m < p.many; m++) {
      const u32 own_stage = stage, y = base + stage * Y_BYTES, b = base + AT_B + stage * Y_BYTES, x = base + AT_X + stage * PANEL;
      mma_wait<0>(), pin(s);
      if (DECAY && m == 0) {
        float all = exp2_fast(log * count);
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) h[i] *= all;
        pin(h);
      }
      named_sync(1, 256);  // both parts of the state are shown, and nobody reads the other buffer any more
      read_state(o, y + t.group * 8192, state, base + AT_ZEROS, BACK && m > 0);
      if (DOTS)
        load_rows(dot, c.dot, p.batch * c.dot.batch + p.head * c.dot.head + (p.start + chunk_row + t.row) * c.dot.row + p.half * COLUMNS + t.column,
                  m == 0 ? count - t.row : 0, c.outer - p.half * COLUMNS);
      if (DECAY) weigh_tokens(a, b + own / 64 * PANEL, decays_at(base + AT_DECAYS, t.column + (BACK ? 1 : 1 - count)), t);
      add_to_state<DECAY>(h, a, b + own / 64 * PANEL, x);
      if (DECAY) weigh_pairs(w, s, pairs);
      else mask_pairs(w, s, t.row - t.column, c.scale);
      mma_wait<1>(), pin(o);
      if (DECAY) warp_arrive(base + EMPTY + 8 * own_stage);  // y and b have been read
      float reach[2], steps[2];  // decays, and how many, between the own token and the state
#pragma unroll
      for (int r = 0; r < 2; r++) {
        steps[r] = BACK ? max(count - 1 - t.row - 8 * r, 0) : t.row + 8 * r + 1;
        reach[r] = m == 0 && DECAY ? exp2_fast(log * steps[r]) : 1;
      }
      if (DECAY) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) o[i] *= reach[i / 2 % 2];
      }
      if (DOTS) gamma = fmaf(steps[0], dot_rows(dot, o, 0), fmaf(steps[1], dot_rows(dot, o, 1), gamma));  // x, or y
      float o1[COLUMNS / 2];
      multiply_pairs<true>(o, w, x);
      load_kept(n + 1);
      mma_wait<1>(), pin(h);
      if (m == p.many - 1) add_kept(n + 1);
      if (!DECAY) warp_arrive(base + EMPTY + 8 * own_stage);
      if (TANGENT) {
        derive_pairs(tangent, w, t.row - t.column);
        multiply_pairs<false>(o1, tangent, x);
      }
      if (m == p.many - 1)
        show_state(base + AT_STATE + (n + 1) % 2 * STATE_BYTES, t, h, keeps && n + 1 < p.chunks ? kept_state(c, p, n + 1) + thread : 0);
      if (threadIdx.x % 128 == 0) store_wait_read();
      if (++stage == STAGES) stage = 0, phase ^= 1;
      const bool next = m + 1 < p.many;
      if (TANGENT) mma_wait<0>(), pin(o), pin(o1);
      scores(next || n + 1 < p.chunks, next ? count : count_of(n + 1));
      if (!TANGENT) mma_wait<1>(), pin(o);
      warp_arrive(base + EMPTY_X + 8 * own_stage);
      if (TANGENT) {
#pragma unroll
        for (int r = 0; r < 2; r++) gamma += dot_rows(dot, o1, r), by_scale += dot_rows(dot, o, r);  // w
      }
      if (m == p.many - 1) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) odd = fmaf(o[i], 0.0f, odd);
        if (c.rows.data) put(c, p, t, base + AT_OUT + t.group * 8192, o, chunk_row, count);
      }
    }
  }
  mma_wait<0>(), pin(s);
  bool strange = odd != 0;
  if (c.end.data && t.owns && (BACK || p.head % (c.heads / c.key_heads) == 0)) strange |= end_state(c, p, t, h);
  if (DOTS) strange |= end_dots<BACK>(c, p, base, gamma, by_scale);
  if (strange && c.found && !c.mode) *c.found = 1;
  if (threadIdx.x % 128 == 0) store_wait();
}

template <bool DECAY, bool BACK, bool DOTS> DEV void walk(const Walk& c) {
  if (c.mode && !*c.found) return;
  extern __shared__ char bytes[];
  const u32 base = (shared(bytes) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    prefetch(&c.y), prefetch(&c.b), prefetch(&c.x), prefetch(&c.out);
    for (int i = 0; i < STAGES; i++)
      barrier_init(base + FULL + 8 * i, 1), barrier_init(base + EMPTY + 8 * i, 8 * ARRIVALS), barrier_init(base + EMPTY_X + 8 * i, 8 * ARRIVALS);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_down<40>();
    const Path p = path_of<BACK>(c);
    if (threadIdx.x == 0) feed<BACK, DOTS>(c, p, base);
  } else {
    registers_up<232>();
    multiply<DECAY, BACK, DOTS>(c, path_of<BACK>(c), base);
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) attend_plain(const __grid_constant__ Walk c) { walk<false, false, false>(c); }
extern "C" __global__ void __launch_bounds__(384, 1) attend(const __grid_constant__ Walk c) { walk<true, false, false>(c); }
extern "C" __global__ void __launch_bounds__(384, 1) attend_dots(const __grid_constant__ Walk c) { walk<true, false, true>(c); }
extern "C" __global__ void __launch_bounds__(384, 1) attend_back(const __grid_constant__ Walk c) { walk<true, true, false>(c); }
extern "C" __global__ void __launch_bounds__(384, 1) attend_back_dots(const __grid_constant__ Walk c) { walk<true, true, true>(c); }
