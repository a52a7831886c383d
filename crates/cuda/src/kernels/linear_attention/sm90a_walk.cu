// The forward pass of linear_attention of bf16 and f16 on the tensor cores of compute capability 9.0, without a decay,
// or with one for each head or token. A block owns 64 columns of o of one head of one segment of a sequence, and walks
// its chunks of 128 tokens from the first to the last: most sequences are one segment, for others see
// sm90a_segments.cu. The state stays in the accumulators of two warpgroups, in f32, and is shown to both,
// rounded, in shared memory: in two buffers, so that neither waits for the other but for its part of the state, and
// one multiplies while the other weighs. Of a third warpgroup a thread feeds the copy engine, and three warps weigh x
// for what the state gains. Barriers of a stage: FULL; EMPTY, y and b have been read; EMPTY_X, x has been. Of weighted
// x: WEIGHTED, it is there; TAKEN, it has been read. Of a buffer of the state: SHOWN. A block whose results are not
// finite walks once more, with 0 for such operands.
//
//   attend_plain  o (R21), (R22) without a decay
//   attend        the same with decays
//
// A chunk of 128 tokens has four products: y·bᵀ, y·S, the gain of S, and weighted scores times x. The first is issued
// a chunk ahead, under the last one and the stores; tiles of y and b go back to the copy engine after their last
// product. Decays within a chunk are powers of one number, from a table in shared memory. The rows of one warpgroup
// see none of the tokens of the other: it leaves these out of the scores and of what they weigh. The warpgroups meet
// where one needs the other's part of the state, and nowhere else; the second begins when the first has issued the
// products of the first chunk.
//
// The backward pass: sm90a_states.cu, sm90a_gradients.cu and, with log-decays of tokens, sm90a_flow.cu.
//
// Behind the second walk: the non-finite fallback of problem.cuh, as behind sm80.cu.
//
// A log-decay for each token: the same kernels with the tables of sm90a_gates.cuh.

// ---- what is fed ----
// One thread feeds the copy engine. ROWS: with y.
template <bool BACK, bool ROWS = true>
DEV void feed(const WalkArgs& c, const Path& p, u32 base, Chunks& at) {
  NO_UNROLL for (int n = 0; n < p.chunks; n++)
    NO_UNROLL for (int m = 0; m < p.many; m++) {
      const u32 stage = at.stage(), full = at.full(), y = base + stage * Y_BYTES, b = base + AT_B + stage * Y_BYTES;
      const int row = p.start + number_of<BACK>(p, n) * CHUNK, other = BACK ? p.key_head * p.many + m : p.key_head;
      at.fill((ROWS ? 2 : 1) * Y_BYTES + PANEL);
      UNROLL_ALL for (int i = 0; ROWS && i < KW / 64; i++) load4(y + i * PANEL, &c.y, full, 64 * i, row, p.head, p.batch);
      UNROLL(i, KW / 64) load4(b + i * PANEL, &c.b, full, 64 * i, row, other, p.batch);
      wait(base + EMPTY_X + 8 * stage, at.phase());
      load4(base + AT_X + stage * PANEL, &c.x, full, p.half * COLUMNS, row, other, p.batch);
      at.advance();
    }
}

// Three warps write x times the decays of its tokens to an end of the chunk: what the state gains is bᵀ times it. A
// thread has every twelfth token of a panel, and the same piece of each. `begin` is called before the first is
// written.
template <class F> DEV void weigh_panel(u32 x, u32 weighted, u32 decays, int thread, const F& begin) {
  constexpr int MANY = 3;
  const u32 from = x + 16 * thread, to = weighted + 16 * thread, weights = decays + 4 * (thread / 8);
  NO_UNROLL for (int i = 0; i < CHUNK; i += WEIGHS / 8 * MANY) {
    uint4 piece[MANY];
    float weight[MANY];
    UNROLL(j, MANY) {
      const int token = min(i + WEIGHS / 8 * j, CHUNK - 1 - thread / 8);
      piece[j] = load_piece(from + 128 * token), weight[j] = load_float(weights + 4 * token);
    }
    if (i == 0) begin();
    UNROLL(j, MANY) {
      const int token = min(i + WEIGHS / 8 * j, CHUNK - 1 - thread / 8);
      const uint4 own = piece[j];
      if (i + WEIGHS / 8 * j + thread / 8 < CHUNK)
        store_piece(to + 128 * token, make_uint4(times(own.x, weight[j]), times(own.y, weight[j]), times(own.z, weight[j]), times(own.w, weight[j])));
    }
  }
}
// Calls `weigh(tokens, their weights)` for each chunk and query head, and fills the tables of log-decays of tokens.
template <bool BACK, class F> DEV void weigh_chunks(const WalkArgs& c, const Path& p, u32 tables, float scale, const F& weigh) {
  const int thread = threadIdx.x - 32;
  named_sync(4, WEIGHS + 256);  // the decays are there
  auto gates_of = [&](int n) {
    const int chunk = number_of<BACK>(p, n);
    return load_gates(c, p.batch, p.key_head, p.start + chunk * CHUNK, n < p.chunks ? count_of<BACK>(p, n) : 0);
  };
  auto fill = [&](int n, const Gates& gates) {
    fill_table<BACK>(table_of(tables, n), gates, scale, thread / 32);
    named_sync(7, WEIGHS);
  };
  if (BY_TOKEN && p.chunks) fill(0, gates_of(0));
  NO_UNROLL for (int n = 0; n < p.chunks; n++) {
    const int count = count_of<BACK>(p, n);
    Gates next;
    if (BY_TOKEN) next = gates_of(n + 1);
    NO_UNROLL for (int m = 0; m < p.many; m++)
      weigh(count, BY_TOKEN ? table_of(tables, n) + 4 * GAIN : tables + 4 * (MIDDLE + (BACK ? 1 : 1 - count)));
    // All have taken what the chunk before the last one left: nobody reads its table any more.
    if (BY_TOKEN && n + 1 < p.chunks) fill(n + 1, next);
  }
}
constexpr u32 WALK_DECAYS = BY_TOKEN ? AT_TABLES : AT_DECAYS;
template <bool BACK> DEV void weigh_tokens(const WalkArgs& c, const Path& p, u32 base, bool cleanse, Chunks& at) {
  const int thread = threadIdx.x - 32;
  weigh_chunks<BACK>(c, p, base + WALK_DECAYS, c.scale, [&](int count, u32 decays) {
    const u32 x = base + AT_X + at.stage() * PANEL;
    at.wait_full();
    if (cleanse || count < CHUNK) tidy<WEIGHS>(x, 1, count, cleanse, thread), named_sync(7, WEIGHS);
    weigh_panel(x, base + AT_WEIGHTED, decays, thread, [&] { Weighted(base, at.stage() ^ 1).wait_empty(); });
    proxy_fence();
    warp_arrive(Weighted(base, at.stage() ^ 1).full());
    at.advance();
  });
}
// Decays, or their tables, for those that weigh x as well.
template <bool BACK> DEV void begin_decays(u32 decays, float log, float scale) {
  if (BY_TOKEN) clear_words(decays, 2 * TABLE_BYTES, threadIdx.x - 128);
  else fill_decays<BACK>(decays, threadIdx.x - 128, log, scale);
  named_arrive(4, WEIGHS + 256);
}

// ---- the walk ----
// Issues the scores of the next tiles, which wait where they are `there`: of the rows of a warpgroup from `own` on.
template <bool DECAY, int PAIRS> DEV void issue_scores(float (&s)[PAIRS], u32 base, const Chunks& at, bool there, int count, bool cleanse, int own) {
  const u32 y = base + at.stage() * Y_BYTES, b = base + AT_B + at.stage() * Y_BYTES;
  const u32 x = base + AT_X + at.stage() * PANEL;
  const int thread = threadIdx.x - 128;
  if (there) {
    at.wait_full();
    if (cleanse || count < CHUNK) {
      tidy(y, KW / 64, count, cleanse, thread), tidy(b, KW / 64, count, cleanse, thread);
      if (!DECAY) tidy(x, 1, count, cleanse, thread);
      proxy_fence();
      named_sync(1, 256);
    }
  }
  issue_shared<2 * PAIRS, KW, CHUNK, CHUNK>(s, k_major(y + 128 * own), k_major(b));
}
// Shows the state before chunk n.
DEV void show_chunk(const Thread& t, u32 base, const float (&h)[COLUMNS / 2], int n, u32 shows) {
  show_state(base + AT_STATE + n % 2 * STATE_BYTES, t, h);
  warp_arrive(base + SHOWN + 8 * (shows & 1));
}
// Both parts of the state are shown, and who shows one has read the one before: nobody reads the other buffer any
// more.
DEV void wait_for_state(u32 base, u32& shows) { wait(base + SHOWN + 8 * (shows & 1), shows >> 1 & 1), shows++; }
// Issues y·S, and the gain of S, in chunk n; takes the decay of the chunk from S.
template <bool DECAY, int GROUP>
DEV void issue_state(float (&o)[COLUMNS / 2], float (&h)[COLUMNS / 2], u32 base, const Chunks& at, float log, int n, int count, u32& shows) {
  const u32 y = base + at.stage() * Y_BYTES, b = base + AT_B + at.stage() * Y_BYTES, x = base + AT_X + at.stage() * PANEL;
  if (DECAY && !BY_TOKEN) {
    float all = exp2_fast(log * count);
    mul_rows(h, {all, all});
    pin(h);
  }
  if (GROUP == 1 && n == 0) named_sync(6, 256);  // it begins when the other multiplies
  wait_for_state(base, shows);
  multiply_state(o, y + GROUP * 8192, base + AT_STATE + n % 2 * STATE_BYTES);
  if (DECAY) Weighted(base, at.stage()).wait_full();
  if (BY_TOKEN) {  // the table is there
    float all = number_at(table_of(base + AT_TABLES, n), ALL);
    mul_rows(h, {all, all});
  }
  add_to_state(h, b + (KW == 128 ? GROUP * PANEL : 0), DECAY ? base + AT_WEIGHTED : x);
}
// Takes the decays between the own tokens and the state.
template <bool DECAY> DEV void reach_state(float (&o)[COLUMNS / 2], const Thread& t, u32 table, float log) {
  float reach[2];
  UNROLL(r, 2) reach[r] = BY_TOKEN ? number_at(table, REACH + t.row + 8 * r) : exp2_fast(log * (t.row + 8 * r + 1));
  if (DECAY) mul_rows(o, reach);
}
// The left factor of x from scores.
template <bool DECAY, int GROUP, int WORDS>
DEV void weigh(u32 (&w)[WORDS], const float (&s)[2 * WORDS], const WalkArgs& c, const Thread& t, u32 base, u32 pairs, int n) {
  if (DECAY && BY_TOKEN) weigh_by_token<GROUP>(w, s, table_of(base + AT_TABLES, n), t);
  else if (DECAY) weigh_pairs(w, s, pairs);
  else mask_pairs(w, s, t.row - t.column, c.scale);
}
// True if a result is not finite. The rows of the first warpgroup see none of the tokens of the second's.
template <bool DECAY, int GROUP> DEV bool multiply(const WalkArgs& c, const Path& p, u32 base, bool cleanse, Chunks& at, u32& shows) {
  const Thread t = this_thread();
  constexpr int SEEN = GROUP == 0 ? 64 : 128;
  const float log = DECAY ? log_of(c, p.key_head) : 0;
  const u32 pairs = decays_at(base + AT_DECAYS, t.column - t.row);
  float h[COLUMNS / 2], o[COLUMNS / 2], s[SEEN / 2], odd = 0;
  u32 w[SEEN / 4];
  if (DECAY) begin_decays<false>(base + WALK_DECAYS, log, c.scale);
  begin_state(c, p, t, is_at(c, p, 1), c.begin, c.between, cleanse, h);
  show_chunk(t, base, h, 0, shows);
  issue_scores<DECAY>(s, base, at, p.chunks > 0, count_of<false>(p, 0), cleanse, 64 * GROUP);
  NO_UNROLL for (int n = 0; n < p.chunks; n++) {
    const int count = count_of<false>(p, n);
    const u32 own_stage = at.stage(), x = base + AT_X + own_stage * PANEL;
    mma_wait<0>(), pin(s);
    issue_state<DECAY, GROUP>(o, h, base, at, log, n, count, shows);
    weigh<DECAY, GROUP>(w, s, c, t, base, pairs, n);
    mma_wait<1>(), pin(o);
    reach_state<DECAY>(o, t, table_of(base + AT_TABLES, n), log);
    add_pairs(o, w, x);
    if (GROUP == 0 && n == 0) named_arrive(6, 256);
    mma_wait<1>(), pin(h);
    at.release(own_stage);
    if (DECAY) Weighted(base, at.stage()).release();
    show_chunk(t, base, h, n + 1, shows);
    if (threadIdx.x % 128 == 0) store_wait_read();
    at.advance();
    // A step ahead; behind the last one for nobody.
    issue_scores<DECAY>(s, base, at, n + 1 < p.chunks, count_of<false>(p, n + 1), cleanse, 64 * GROUP);
    mma_wait<1>(), pin(o);
    warp_arrive(base + EMPTY_X + 8 * own_stage);
    UNROLL(i, COLUMNS / 2) odd = fmaf(o[i], 0.0f, odd);
    if (c.rows.data) put(c, p, t, base + AT_OUT + GROUP * 8192, o, n * CHUNK, count);
  }
  wait_for_state(base, shows), mma_wait<0>(), pin(s);
  bool strange = odd != 0;
  if (c.end.data && t.owns && p.head % (c.heads / c.key_heads) == 0 && is_at(c, p, 2))
    strange |= end_state(c, p, t, state_of(c.end, c.segments[p.segment].sequence, p.key_head), h);
  if (threadIdx.x % 128 == 0) store_wait();
  return strange;
}

DEV u32 begin_barriers(const WalkArgs& c) {
  const u32 base = begin_of_tiles();
  make_barriers([&] {
    prefetch(&c.y), prefetch(&c.b), prefetch(&c.x), prefetch(&c.out);
    Chunks::init(base, 1, 8 * ARRIVALS), Weighted::init(base, 3 * ARRIVALS, 8 * ARRIVALS);
    for (int i = 0; i < STAGES; i++) barrier_init(base + EMPTY_X + 8 * i, 8 * ARRIVALS);
    barrier_init(base + SHOWN, 8 * ARRIVALS), barrier_init(base + SHOWN + 8, 8 * ARRIVALS);
  });
  return base;
}
template <bool DECAY> DEV void walk(const WalkArgs& c) {
  u32 shows = 0;
  walk_path<Chunks>(
      c, begin_barriers(c), [&] { return path_of<false>(c); }, [&](const Path& p, u32 base, Chunks& at) { feed<false>(c, p, base, at); },
      [&](const Path& p, u32 base, bool again, Chunks& at) {
        if (DECAY) weigh_tokens<false>(c, p, base, again, at);
      },
      [&](const Path& p, u32 base, bool again, Chunks& at) {
        if (threadIdx.x < 256) return multiply<DECAY, 0>(c, p, base, again, at, shows);
        return multiply<DECAY, 1>(c, p, base, again, at, shows);
      });
}

#if !BY_TOKEN
CHECK_SHARED(attend_plain, WALK_BYTES);
KERNEL(attend_plain, WalkArgs c, 384, 1) { walk<false>(c); }
#endif
CHECK_SHARED(attend, WALK_BYTES);
KERNEL(attend, WalkArgs c, 384, 1) { walk<true>(c); }
