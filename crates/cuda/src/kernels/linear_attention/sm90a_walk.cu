// linear_attention of bf16 and f16 on the tensor cores of compute capability 9.0, without a decay, or with one for
// each head or token. A block owns 64 columns of a result of one head of one segment of a sequence, and walks its
// chunks of 128 tokens from the first to the last, or back: most sequences are one segment, for others see
// sm90a_segments.cu. The state stays in the accumulators of two warpgroups, in f32, and is shown to both,
// rounded, in shared memory: in two buffers, so that neither waits for the other but for its part of the state, and
// one multiplies while the other weighs. Of a third warpgroup a thread feeds the copy engine, and three warps weigh x
// for what the state gains. Barriers of a stage: FULL; EMPTY, y and b have been read; EMPTY_X, x has been. Of weighted
// x: WEIGHTED, it is there; TAKEN, it has been read. Of a buffer of the state: SHOWN. A block whose results are not
// finite walks once more, with 0 for such operands.
//
//   attend_plain      o (R21), (R22), or dq (R24), without a decay
//   attend            the same with decays
//   attend_dots       dq, and what x and w add to dg_gamma (R27), or x of dg; dσ (R9)
//   attend_back       dk or dv (R25), (R26), (R28)
//   attend_back_dots  dk, and what y and z add to dg_gamma, or y and z of dg
//
// A chunk of 128 tokens has four products: y·bᵀ, y·S, the gain of S, and weighted scores times x. The first is issued
// a chunk ahead, under the last one and the stores; tiles of y and b go back to the copy engine after their last
// product. Decays within a chunk are powers of one number, from a table in shared memory. The rows of one warpgroup
// see none of the tokens of the other: it leaves these out of the scores and of what they weigh. The warpgroups meet
// where one needs the other's part of the state, and nowhere else; the second begins when the first has issued the
// products of the first chunk. With many query heads to a key head, dk and dv walk each chunk with one after the
// other.
//
// dg_gamma has four parts, (R27) summed over t: w and x come with dq, where one more product multiplies the scores by
// their distances; y and z come with dk, z from the states that the walk for dq leaves in memory, rounded. No other
// state leaves the chip. What dg_gamma multiplies is loaded a chunk ahead. Sums are those of sm80 in number and kind,
// so that N23 holds.
//
// The non-finite fallback is that of sm80.cu behind the second walk; `fill_gates`, `scan`, `flow`, `mend_sums`
// and `mend` (in place of `sums` and `attend`) have at most 256 blocks, each with the work of several, because there
// is mostly none. `Options.assume_finite` leaves it out.
//
// A log-decay for each token: the same kernels with the tables of sm90a_gates.cuh.

// ---- what is fed ----
// One thread feeds the copy engine. ROWS: with y.
template <bool BACK, bool DOTS, bool ROWS = true>
DEV void feed(const WalkArgs& c, const Path& p, u32 base, Chunks& at) {
  NO_UNROLL for (int n = 0; n < p.chunks; n++)
    NO_UNROLL for (int m = 0; m < p.many; m++) {
      const u32 stage = at.stage(), full = at.full(), y = base + stage * Y_BYTES, b = base + AT_B + stage * Y_BYTES;
      const int row = p.start + number_of<BACK>(p, n) * CHUNK, other = BACK ? p.key_head * p.many + m : p.key_head;
      at.fill((ROWS ? 2 : 1) * Y_BYTES + PANEL);
      UNROLL_ALL for (int i = 0; ROWS && i < KW / 64; i++) load4(y + i * PANEL, &c.y, full, 64 * i, row, p.head, p.batch);
      UNROLL(i, KW / 64) load4(b + i * PANEL, &c.b, full, 64 * i, row, other, p.batch);
      if (DOTS && m == 0 && n + 1 < p.chunks) {
        prefetch4(&c.dots, p.half * COLUMNS, p.start + number_of<BACK>(p, n + 1) * CHUNK, p.head, p.batch);
        if (BACK) prefetch_bytes(kept_state(c, p, number_of<BACK>(p, n + 1)), 4 * KEPT);
      }
      wait(base + EMPTY_X + 8 * stage, at.phase());
      load4(base + AT_X + stage * PANEL, &c.x, full, p.half * COLUMNS, row, other, p.batch);
      at.advance();
    }
}

// Three warps write x times the decays of its tokens to an end of the chunk: what the state gains is bᵀ times it.
template <bool BACK> DEV void weigh_tokens(const WalkArgs& c, const Path& p, u32 base, bool cleanse, Chunks& at) {
  constexpr int THREADS = 96, MANY = 3;
  const int thread = threadIdx.x - 32;
  named_sync(4, THREADS + 256);  // the decays are there
  auto gates_of = [&](int n) {
    const int chunk = number_of<BACK>(p, n);
    return load_gates(c, p.batch, p.key_head, p.start + chunk * CHUNK, n < p.chunks ? count_of<BACK>(p, n) : 0);
  };
  auto fill = [&](int n, const Gates& gates) {
    fill_table<BACK>(table_of(base, n), gates, c.scale, thread / 32);
    named_sync(7, THREADS);
  };
  if (BY_TOKEN && p.chunks) fill(0, gates_of(0));
  NO_UNROLL for (int n = 0; n < p.chunks; n++) {
    const int count = count_of<BACK>(p, n);
    const u32 decays = BY_TOKEN ? table_of(base, n) + 4 * GAIN : base + AT_DECAYS + 4 * (MIDDLE + (BACK ? 1 : 1 - count));
    Gates next;
    if (BY_TOKEN) next = gates_of(n + 1);
    NO_UNROLL for (int m = 0; m < p.many; m++) {
      const u32 x = base + AT_X + at.stage() * PANEL;
      at.wait_full();
      if (cleanse || count < CHUNK) tidy<THREADS>(x, 1, count, cleanse, thread), named_sync(7, THREADS);
      // A thread has every twelfth token, and the same piece of each.
      const u32 from = x + 16 * thread, to = base + AT_WEIGHTED + 16 * thread, weights = decays + 4 * (thread / 8);
      NO_UNROLL for (int i = 0; i < CHUNK; i += THREADS / 8 * MANY) {
        uint4 piece[MANY];
        float weight[MANY];
        UNROLL(j, MANY) {
          const int token = min(i + THREADS / 8 * j, CHUNK - 1 - thread / 8);
          piece[j] = load_piece(from + 128 * token), weight[j] = load_float(weights + 4 * token);
        }
        if (i == 0) Weighted(base, at.stage() ^ 1).wait_empty();
        UNROLL(j, MANY) {
          const int token = min(i + THREADS / 8 * j, CHUNK - 1 - thread / 8);
          const uint4 own = piece[j];
          if (i + THREADS / 8 * j + thread / 8 < CHUNK)
            store_piece(to + 128 * token, make_uint4(times(own.x, weight[j]), times(own.y, weight[j]), times(own.z, weight[j]), times(own.w, weight[j])));
        }
      }
      proxy_fence();
      warp_arrive(Weighted(base, at.stage() ^ 1).full());
      at.advance();
    }
    // All have taken what the chunk before the last one left: nobody reads its table any more.
    if (BY_TOKEN && n + 1 < p.chunks) fill(n + 1, next);
  }
}

// ---- the walk ----
// Of a chunk: the rows that results are multiplied with, and z of the chunk that the walk comes to next.
template <bool BACK> DEV void load_dot(u32 (&dot)[COLUMNS / 4], const WalkArgs& c, const Path& p, const Thread& t, int n) {
  const int first = max(number_of<BACK>(p, n), 0) * CHUNK + t.row, count = n < p.chunks ? p.tokens - first : 0;
  load_rows(dot, c.dot, p.batch * c.dot.batch + p.head * c.dot.head + (p.start + first) * c.dot.row + p.half * COLUMNS + t.column,
            count, c.outer - p.half * COLUMNS);
}
DEV void load_kept(u32 (&kept)[COLUMNS / 4], const WalkArgs& c, const Path& p, int n) {
  load_state(kept, kept_state(c, p, max(number_of<true>(p, n), 0)) + threadIdx.x - 128);
}
DEV void add_kept(float& gamma, const u32 (&kept)[COLUMNS / 4], const float (&h)[COLUMNS / 2], const WalkArgs& c, const Path& p, const Thread& t, float log,
                  int n) {
  const int count = t.owns && n < p.chunks ? count_of<true>(p, n) : 0;
  if (BY_TOKEN && n < p.chunks) put_states_dot(c, p, number_of<true>(p, n), count ? dot_states(kept, h) : 0);
  else gamma = fmaf(count ? dot_states(kept, h) * exp2_fast(log * count) : 0, count, gamma);
}
// Issues the scores of the next tiles, which wait where they are `there`: of the rows of a warpgroup from `own` on,
// and tokens from `first` on.
template <bool DECAY, int PAIRS> DEV void issue_scores(float (&s)[PAIRS], u32 base, const Chunks& at, bool there, int count, bool cleanse, int own, int first) {
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
  multiply_rows(s, y + 128 * own, b + 128 * first);
}
// Decays, or their tables, for those that weigh x as well.
template <bool BACK> DEV void begin_decays(const WalkArgs& c, u32 base, float log) {
  if (BY_TOKEN) clear_tables(base, threadIdx.x - 128);
  else fill_decays<BACK>(base + AT_DECAYS, threadIdx.x - 128, log, c.scale);
  named_arrive(4, 96 + 256);
}
// Shows the state before chunk n; `keeps`: it is kept for another walk, too.
DEV void show_chunk(const WalkArgs& c, const Path& p, const Thread& t, u32 base, const float (&h)[COLUMNS / 2], bool keeps, int n, u32 shows) {
  show_state(base + AT_STATE + n % 2 * STATE_BYTES, t, h, keeps && n < p.chunks ? kept_state(c, p, n) + threadIdx.x - 128 : 0);
  warp_arrive(base + SHOWN + 8 * (shows & 1));
}
// Both parts of the state are shown, and who shows one has read the one before: nobody reads the other buffer any
// more.
DEV void wait_for_state(u32 base, u32& shows) { wait(base + SHOWN + 8 * (shows & 1), shows >> 1 & 1), shows++; }
// Issues y·S, and the gain of S, of head m in chunk n; the first one takes the decay of the chunk from S.
template <bool DECAY, bool BACK, int GROUP>
DEV void issue_state(float (&o)[COLUMNS / 2], float (&h)[COLUMNS / 2], u32 base, const Chunks& at, float log, int n, int m, int count, u32& shows) {
  const u32 y = base + at.stage() * Y_BYTES, b = base + AT_B + at.stage() * Y_BYTES, x = base + AT_X + at.stage() * PANEL;
  if (DECAY && !BY_TOKEN && m == 0) {
    float all = exp2_fast(log * count);
    mul_rows(h, {all, all});
    pin(h);
  }
  if (GROUP == 1 && n + m == 0) named_sync(6, 256);  // it begins when the other multiplies
  if (m == 0) wait_for_state(base, shows);
  read_state(o, y + GROUP * 8192, base + AT_STATE + n % 2 * STATE_BYTES, base + AT_ZEROS, BACK && m > 0);
  if (DECAY) Weighted(base, at.stage()).wait_full();
  if (BY_TOKEN && m == 0) {  // the table is there
    float all = number_at(table_of(base, n), ALL);
    mul_rows(h, {all, all});
  }
  add_to_state(h, b + (KW == 128 ? GROUP * PANEL : 0), DECAY ? base + AT_WEIGHTED : x);
}
// Takes the decays between the own tokens and the state, of which the first of the heads that share a chunk has some,
// and how many: `steps`.
template <bool DECAY, bool BACK> DEV void reach_state(float (&o)[COLUMNS / 2], float (&steps)[2], const Thread& t, u32 table, float log, int m, int count) {
  float reach[2];
  UNROLL(r, 2) {
    steps[r] = m > 0 ? 0 : BACK ? max(count - 1 - t.row - 8 * r, 0) : t.row + 8 * r + 1;
    reach[r] = m > 0 || !DECAY ? 1 : BY_TOKEN ? number_at(table, REACH + t.row + 8 * r) : exp2_fast(log * steps[r]);
  }
  if (DECAY) mul_rows(o, reach);
}
// The terms of a tile for dg (x or y) or dg_gamma (y).
template <bool BACK> DEV void take_dots(float& gamma, const u32 (&dot)[COLUMNS / 4], const float (&o)[COLUMNS / 2], const float (&steps)[2], const WalkArgs& c,
                                        const Path& p, const Thread& t, int chunk_row, int count, int m) {
  if (BY_TOKEN) {
    float* to = BACK ? c.y_dots : c.x_dots;
    if (to && m == 0) put_dots(c, p, t, to, dot, o, chunk_row, count);
  } else if (BACK) {
    gamma = fmaf(steps[0], dot_rows(dot, o, 0), fmaf(steps[1], dot_rows(dot, o, 1), gamma));
  }
}
// The left factor of x from scores of tokens from `first` on.
template <bool DECAY, bool BACK, int GROUP, int WORDS>
DEV void weigh(u32 (&w)[WORDS], const float (&s)[2 * WORDS], const WalkArgs& c, const Thread& t, u32 table, u32 pairs, int first) {
  if (DECAY && BY_TOKEN) weigh_by_token<BACK, GROUP>(w, s, table, t);
  else if (DECAY) weigh_pairs(w, s, pairs);
  else mask_pairs(w, s, t.row - t.column - first, c.scale);
}
// Writes the state behind a walk, and sums of it; true if one of them is not finite.
template <bool BACK, bool DOTS>
DEV bool end_walk(const WalkArgs& c, const Path& p, const Thread& t, u32 base, const float (&h)[COLUMNS / 2], float gamma, float by_scale) {
  bool strange = false;
  if (c.end.data && t.owns && (BACK || p.head % (c.heads / c.key_heads) == 0) && is_at(c, p, BACK ? 1 : 2))
    strange |= end_state(c, p, t, state_of(c.end, c.segments[p.segment].sequence, p.key_head), h);
  if (DOTS) strange |= end_dots<BACK>(c, p, base, gamma, by_scale);
  if (threadIdx.x % 128 == 0) store_wait();
  return strange;
}
// True if a result is not finite. The rows of one warpgroup see none of the tokens of the other's, which it leaves
// out.
template <bool DECAY, bool BACK, bool DOTS, int GROUP>
DEV bool multiply(const WalkArgs& c, const Path& p, u32 base, bool cleanse, Chunks& at, u32& shows) {
  const Thread t = this_thread();
  constexpr int SEEN = GROUP == BACK ? 64 : 128, FIRST = GROUP && BACK ? 64 : 0;
  constexpr bool TANGENT = DOTS && !BACK && !BY_TOKEN;
  const float log = DECAY ? log_of(c, p.key_head) : 0;
  const u32 pairs = decays_at(base + AT_DECAYS, t.column + FIRST - t.row);
  const bool keeps = DOTS && !BACK && c.states && p.head % (c.heads / c.key_heads) == 0;
  float h[COLUMNS / 2], o[COLUMNS / 2], o1[COLUMNS / 2], s[SEEN / 2], odd = 0, gamma = 0, by_scale = 0;
  u32 w[SEEN / 4], tangent[SEEN / 4], dot[COLUMNS / 4], kept[COLUMNS / 4];  // the last two are loaded a chunk before
  if (DECAY) begin_decays<BACK>(c, base, log);
  begin_state<BACK>(c, p, t, cleanse, h);
  show_chunk(c, p, t, base, h, keeps, 0, shows);
  if (DOTS && BACK && p.chunks) load_kept(kept, c, p, 0), add_kept(gamma, kept, h, c, p, t, log, 0), load_kept(kept, c, p, 1);
  if (DOTS && p.chunks) load_dot<BACK>(dot, c, p, t, 0);
  issue_scores<DECAY>(s, base, at, p.chunks > 0, count_of<BACK>(p, 0), cleanse, 64 * GROUP, FIRST);
  NO_UNROLL for (int n = 0; n < p.chunks; n++) {
    const int chunk_row = number_of<BACK>(p, n) * CHUNK, count = count_of<BACK>(p, n);
    NO_UNROLL for (int m = 0; m < p.many; m++) {
      const u32 own_stage = at.stage(), x = base + AT_X + own_stage * PANEL;
      const bool last = m == p.many - 1;
      float steps[2];
      mma_wait<0>(), pin(s);
      issue_state<DECAY, BACK, GROUP>(o, h, base, at, log, n, m, count, shows);
      if (TANGENT) weigh_pairs<true>(w, s, pairs, tangent, t.row - t.column - FIRST);
      else weigh<DECAY, BACK, GROUP>(w, s, c, t, table_of(base, n), pairs, FIRST);
      mma_wait<1>(), pin(o);
      reach_state<DECAY, BACK>(o, steps, t, table_of(base, n), log, m, count);
      if (DOTS) take_dots<BACK>(gamma, dot, o, steps, c, p, t, chunk_row, count, m);
      if (DOTS && BACK && last) load_dot<BACK>(dot, c, p, t, n + 1);
      if (TANGENT) {
        UNROLL(i, COLUMNS / 2) o1[i] = steps[row_of_number(i)] * o[i];  // x of dg_gamma
        add_pairs(o1, tangent, x + 128 * FIRST);                        // w
      }
      add_pairs(o, w, x + 128 * FIRST);
      if (GROUP == 0 && n + m == 0) named_arrive(6, 256);
      mma_wait<TANGENT ? 2 : 1>(), pin(h);
      at.release(own_stage);
      if (DECAY) Weighted(base, at.stage()).release();
      if (last) show_chunk(c, p, t, base, h, keeps, n + 1, shows);
      if (threadIdx.x % 128 == 0) store_wait_read();
      at.advance();
      if (TANGENT) mma_wait<0>(), pin(o), pin(o1);
      const int next = last ? count_of<BACK>(p, n + 1) : count;  // a step ahead; behind the last one for nobody
      issue_scores<DECAY>(s, base, at, !last || n + 1 < p.chunks, next, cleanse, 64 * GROUP, FIRST);
      if (DOTS && BACK && last) add_kept(gamma, kept, h, c, p, t, log, n + 1), load_kept(kept, c, p, n + 2);
      if (!TANGENT) mma_wait<1>(), pin(o);
      warp_arrive(base + EMPTY_X + 8 * own_stage);
      UNROLL(r, DOTS && !BACK ? 2 : 0) gamma += TANGENT ? dot_rows(dot, o1, r) : 0, by_scale += dot_rows(dot, o, r);
      if (DOTS && !BACK) load_dot<BACK>(dot, c, p, t, n + 1);
      if (!last) continue;
      UNROLL(i, COLUMNS / 2) odd = fmaf(o[i], 0.0f, odd);
      if (c.rows.data) put(c, p, t, base + AT_OUT + GROUP * 8192, o, chunk_row, count);
    }
  }
  wait_for_state(base, shows), mma_wait<0>(), pin(s);
  return end_walk<BACK, DOTS>(c, p, t, base, h, gamma, by_scale) | (odd != 0);
}

DEV u32 begin_barriers(const WalkArgs& c) {
  extern __shared__ __align__(1024) char bytes[];
  const u32 base = shared(bytes);
  make_barriers([&] {
    prefetch(&c.y), prefetch(&c.b), prefetch(&c.x), prefetch(&c.out);
    Chunks::init(base, 1, 8 * ARRIVALS), Weighted::init(base, 3 * ARRIVALS, 8 * ARRIVALS);
    for (int i = 0; i < STAGES; i++) barrier_init(base + EMPTY_X + 8 * i, 8 * ARRIVALS);
    barrier_init(base + SHOWN, 8 * ARRIVALS), barrier_init(base + SHOWN + 8, 8 * ARRIVALS);
  });
  return base;
}

// Walks a path by the warps of a block, and once more with 0 for numbers that are not finite, where a result is not.
// `feeds` feeds the copy engine, `weighs` weighs x, `computes` says whether a result is not finite.
template <class P, class F, class W, class M> DEV void walk_path(const WalkArgs& c, P path, F feeds, W weighs, M computes) {
  const u32 base = begin_barriers(c);
  bool again = false;
  if (threadIdx.x < 128) {
    registers_down<BY_TOKEN ? 56 : 40>();
    const Path p = path();
    Chunks at = {base, threadIdx.x == 0};
    do {
      if (threadIdx.x == 0) feeds(p, base, at);
      else if (threadIdx.x >= 32) weighs(p, base, again, at);
      __syncwarp();
      again = named_any(5, 384, false);
    } while (again);
  } else {
    registers_up<BY_TOKEN ? 224 : 232>();
    const Path p = path();
    Chunks at = {base, 0};
    do {
      const bool strange = computes(p, base, again, at);
      again = named_any(5, 384, strange && c.found && !again);
      if (again) *c.found = 1;
    } while (again);
  }
}
template <bool DECAY, bool BACK, bool DOTS> DEV void walk(const WalkArgs& c) {
  u32 shows = 0;
  walk_path(
      c, [&] { return path_of<BACK>(c); }, [&](const Path& p, u32 base, Chunks& at) { feed<BACK, DOTS>(c, p, base, at); },
      [&](const Path& p, u32 base, bool again, Chunks& at) {
        if (DECAY) weigh_tokens<BACK>(c, p, base, again, at);
      },
      [&](const Path& p, u32 base, bool again, Chunks& at) {
        if (threadIdx.x < 256) return multiply<DECAY, BACK, DOTS, 0>(c, p, base, again, at, shows);
        return multiply<DECAY, BACK, DOTS, 1>(c, p, base, again, at, shows);
      });
}

#if !BY_TOKEN
CHECK_SHARED(attend_plain, WALK_BYTES);
KERNEL(attend_plain, WalkArgs c, 384, 1) { walk<false, false, false>(c); }
#endif
CHECK_SHARED(attend, WALK_BYTES);
KERNEL(attend, WalkArgs c, 384, 1) { walk<true, false, false>(c); }
CHECK_SHARED(attend_dots, WALK_BYTES);
KERNEL(attend_dots, WalkArgs c, 384, 1) { walk<true, false, true>(c); }
CHECK_SHARED(attend_back, WALK_BYTES);
KERNEL(attend_back, WalkArgs c, 384, 1) { walk<true, true, false>(c); }
CHECK_SHARED(attend_back_dots, WALK_BYTES);
KERNEL(attend_back_dots, WalkArgs c, 384, 1) { walk<true, true, true>(c); }
