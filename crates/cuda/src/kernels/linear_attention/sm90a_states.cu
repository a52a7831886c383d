// The first halves of the walks of the backward pass on compute capability 9.0: a launch has two blocks for each
// segment and key head, one that walks k and v from the begin to the middle, and one that walks q and dout from the
// end. They leave the state of every chunk, S before it or D behind it, rounded, as a tile of the tensor cores of
// `gradients`: KW rows of D, KW columns of E; and the last state in f32, with which `gradients` walks on. A chunk has
// one product; x is weighted and the state is kept in f32 as in sm90a_walk.cu.
constexpr u32 TILE_BYTES = Y_BYTES, KEPT_BYTES = 2 * KW * KW;
constexpr u32 STATES_X = STAGES * TILE_BYTES, STATES_WEIGHTED = 2 * STATES_X, STATES_OUT = STATES_WEIGHTED + TILE_BYTES,
              STATES_DECAYS = STATES_OUT + KEPT_BYTES, STATES_BARRIERS = STATES_DECAYS + (BY_TOKEN ? 2 * TABLE_BYTES : DECAYS_BYTES);
using StateChunks = Ring<STAGES, STATES_BARRIERS>;
constexpr u32 STATES_EMPTY_X = StateChunks::END;
using StateWeighted = Ring<1, STATES_EMPTY_X + 8 * STAGES>;
constexpr u32 STATES_BYTES = StateWeighted::END;

// The state of a chunk of a key head, as bytes.
DEV char* kept_state(const WalkArgs& c, int chunk, int key_head) {
  return (char*)c.states + ((i64)chunk * c.key_heads + key_head) * KEPT_BYTES;
}
// Halves of the paths of two blocks of a segment and key head: its chunks up to the middle, or those from it on.
DEV Path half_path(const WalkArgs& c, bool later) {
  const int block = __shfl_sync(~0u, blockIdx.x / 2, 0);
  Path p = path_of(c, block / c.key_heads);
  p.head = p.key_head = block % c.key_heads, p.half = 0, p.many = c.heads / c.key_heads;
  const int first = p.chunks / 2, tokens = min(p.tokens, first * CHUNK);
  if (later) p.first_chunk += first, p.chunks -= first, p.start += tokens, p.tokens -= tokens;
  else p.chunks = first, p.tokens = tokens;
  return p;
}
// A thread's part of the state in the middle.
DEV float4* middle_state(const WalkArgs& c) { return (float4*)c.middle + (i64)blockIdx.x * (KW / 8 * 256) + threadIdx.x - 128; }

template <bool BACK> DEV void feed_states(const WalkArgs& c, const Path& p, u32 base, StateChunks& at) {
  NO_UNROLL for (int n = 0; n < p.chunks; n++)
    NO_UNROLL for (int m = 0; m < p.many; m++) {
      const u32 stage = at.stage(), full = at.fill(2 * TILE_BYTES), b = base + stage * TILE_BYTES;
      const int row = p.start + number_of<BACK>(p, n) * CHUNK, head = BACK ? p.key_head * p.many + m : p.key_head;
      UNROLL(i, KW / 64) load4(b + i * PANEL, BACK ? &c.y : &c.b, full, 64 * i, row, head, p.batch);
      wait(base + STATES_EMPTY_X + 8 * stage, at.phase());
      UNROLL(i, KW / 64) load4(b + STATES_X + i * PANEL, BACK ? &c.dots : &c.x, full, 64 * i, row, head, p.batch);
      at.advance();
    }
}
template <bool BACK> DEV void weigh_states(const WalkArgs& c, const Path& p, u32 base, bool cleanse, StateChunks& at) {
  const int thread = threadIdx.x - 32;
  weigh_chunks<BACK>(c, p, base + STATES_DECAYS, BACK ? c.store_scale : 1, [&](int count, u32 decays) {
    const u32 stage = at.stage(), x = base + STATES_X + stage * TILE_BYTES;
    at.wait_full();
    if (cleanse || count < CHUNK) tidy<WEIGHS>(x, KW / 64, count, cleanse, thread), named_sync(7, WEIGHS);
    UNROLL(i, KW / 64)
      weigh_panel(x + i * PANEL, base + STATES_WEIGHTED + i * PANEL, decays, thread, [&] {
        if (i == 0) StateWeighted(base, stage ^ 1).wait_empty();
      });
    proxy_fence();
    warp_arrive(StateWeighted(base, stage ^ 1).full());
    warp_arrive(base + STATES_EMPTY_X + 8 * stage);
    at.advance();
  });
}
// True if the last state is not finite, as it is where any before it is not.
template <bool BACK> DEV bool keep_states(const WalkArgs& c, const Path& p, u32 base, bool cleanse, StateChunks& at) {
  const int thread = threadIdx.x - 128;
  const Thread t = this_thread();
  const float log = log_of(c, p.key_head);
  const u32 own = base + STATES_OUT + (KW == 128 ? t.group * 8192 : 0);
  float h[KW / 2], odd = 0;
  begin_decays<BACK>(base + STATES_DECAYS, log, BACK ? c.store_scale : 1);
  begin_state(c, p, t, is_at(c, path_of(c, p.segment), BACK ? 2 : 1), BACK ? c.begin_back : c.begin, BACK ? c.between_back : c.between, cleanse, h);
  NO_UNROLL for (int n = 0; n < p.chunks; n++) {
    const int number = number_of<BACK>(p, n), count = count_of<BACK>(p, n);
    char* const to = kept_state(c, p.first_chunk + number, p.key_head);
    if (t.owns)
      store_by_copy<KW>(own, h, 2 + t.group, [&] {
        UNROLL(i, KW / 64) store_bytes(to + (own - base - STATES_OUT) + i * KW * 128, own + i * KW * 128, 8192);
      });
    NO_UNROLL for (int m = 0; m < p.many; m++) {
      const u32 stage = at.stage(), b = base + stage * TILE_BYTES;
      at.wait_full();
      if (cleanse || count < CHUNK) {
        tidy(b, KW / 64, count, cleanse, thread);
        proxy_fence();
        named_sync(1, 256);
      }
      StateWeighted(base, stage).wait_full();
      if (m == 0) {
        const float all = BY_TOKEN ? number_at(table_of(base + STATES_DECAYS, n), ALL) : exp2_fast(log * count);
        mul_rows(h, {all, all});
      }
      add_to_state(h, b + (KW == 128 ? t.group * PANEL : 0), base + STATES_WEIGHTED);
      mma_wait<0>(), pin(h);
      at.release(), StateWeighted(base, stage).release();
      at.advance();
    }
  }
  UNROLL(i, KW / 2) odd = fmaf(h[i], 0.0f, odd);
  UNROLL(i, KW / 8) middle_state(c)[256 * i] = make_float4(h[4 * i], h[4 * i + 1], h[4 * i + 2], h[4 * i + 3]);
  if (thread % 128 == 0) store_wait();
  return odd != 0;
}
template <bool BACK> DEV void walk_states(const WalkArgs& c, u32 base) {
  walk_path<StateChunks>(
      c, base, [&] {
        Path p = half_path(c, BACK);
        if (!BACK) p.many = 1;
        return p;
      },
      [&](const Path& p, u32 base, StateChunks& at) { feed_states<BACK>(c, p, base, at); },
      [&](const Path& p, u32 base, bool again, StateChunks& at) { weigh_states<BACK>(c, p, base, again, at); },
      [&](const Path& p, u32 base, bool again, StateChunks& at) { return keep_states<BACK>(c, p, base, again, at); });
}

CHECK_SHARED(states, STATES_BYTES);
KERNEL(states, WalkArgs c, 384, 1) {
  const u32 base = begin_of_tiles();
  make_barriers([&] {
    prefetch(&c.y), prefetch(&c.b), prefetch(&c.x), prefetch(&c.dots);
    StateChunks::init(base, 1, 8 * ARRIVALS), StateWeighted::init(base, 3 * ARRIVALS, 8 * ARRIVALS);
    for (int i = 0; i < STAGES; i++) barrier_init(base + STATES_EMPTY_X + 8 * i, 3 * ARRIVALS);
  });
  if (blockIdx.x % 2 == 0) walk_states<false>(c, base);
  else walk_states<true>(c, base);
}
