// Long sequences on compute capability 9.0: segments that are walked side by side. What each adds to the state is
// summed first, from 0; then the states go from one segment to the next, in f32; then all segments are walked at once.
// How a sequence is cut depends on its number of tokens alone, so that bits do.
//
//   sums        of each segment by itself: Σ_j ω_j k_jᵀ v_j  (R22)
//   sums_back   σ Σ_i α_i q_iᵀ dout_i, over a group  (R28)
//   scan        from segment to segment: the sums become the states that walks begin with
//
// Tokens of a segment: `segment` of linear_attention/hopper.rs. States in f32, 4·D·E bytes a segment and key head, a
// thread of `scan` for each element. The first segment begins with the given state, the last one leaves the final one.
// A segment whose result is not finite walks once more with 0 for such operands and elements of its first state.

// The state behind a segment whose state before is 0; whether it is not finite. The last one of a walk has no chunks
// here.
template <bool BACK> DEV bool add_tokens(const WalkArgs& c, const Path& p, u32 base, bool cleanse, Chunks& at) {
  const int thread = threadIdx.x - 128;
  const Thread t = this_thread();
  const float log = log_of(c, p.key_head);
  float h[COLUMNS / 2], whole = 1;
  clear(h);
  begin_decays<BACK>(base + WALK_DECAYS, log, c.scale);
  NO_UNROLL for (int n = 0; n < p.chunks; n++) {
    const int count = count_of<BACK>(p, n);
    NO_UNROLL for (int m = 0; m < p.many; m++) {
      const u32 stage = at.stage(), b = base + AT_B + stage * Y_BYTES;
      at.wait_full();
      if (cleanse || count < CHUNK) {
        tidy(b, KW / 64, count, cleanse, thread);
        proxy_fence();
        named_sync(1, 256);
      }
      Weighted(base, at.stage()).wait_full();
      if (m == 0) {
        const float all = BY_TOKEN ? number_at(table_of(base + AT_TABLES, n), ALL) : exp2_fast(log * count);
        mul_rows(h, {all, all});
        whole *= all;
      }
      warp_arrive(base + EMPTY_X + 8 * stage);  // x has been read
      add_to_state(h, b + (KW == 128 ? t.group * PANEL : 0), base + AT_WEIGHTED);
      mma_wait<0>(), pin(h);
      at.release(), Weighted(base, at.stage()).release();
      at.advance();
    }
  }
  if (BY_TOKEN && p.chunks && p.half + thread == 0) c.decays[p.segment * c.key_heads + p.key_head] = whole;
  return p.chunks && t.owns && end_state(c, p, t, state_of(c.between, p.segment, p.key_head), h);
}

template <bool BACK> DEV Path path_to_next(const WalkArgs& c) {
  Path p = path_of<BACK>(c);
  p.chunks = __shfl_sync(~0u, is_at(c, p, BACK ? 1 : 2) ? 0 : p.chunks, 0);
  return p;
}

template <bool BACK> DEV void sum_segment(const WalkArgs& c) {
  walk_path<Chunks>(
      c, begin_barriers(c), [&] { return path_to_next<BACK>(c); }, [&](const Path& p, u32 base, Chunks& at) { feed<BACK, false>(c, p, base, at); },
      [&](const Path& p, u32 base, bool again, Chunks& at) { weigh_tokens<BACK>(c, p, base, again, at); },
      [&](const Path& p, u32 base, bool again, Chunks& at) { return add_tokens<BACK>(c, p, base, again, at); });
}

CHECK_SHARED(sums, WALK_BYTES);
KERNEL(sums, WalkArgs c, 384, 1) { sum_segment<false>(c); }
CHECK_SHARED(sums_back, WALK_BYTES);
KERNEL(sums_back, WalkArgs c, 384, 1) { sum_segment<true>(c); }

// A thread owns an element of the states of a sequence and a key head. What is found of a segment is the sum of it,
// and what is left is the state that its walk begins with; the first has a given one.
constexpr int SCANNED = 128;
KERNEL(scan, WalkArgs c, SCANNED) {
  constexpr int AHEAD = 16;
  const int elements = c.inner * c.outer, pieces = (elements + SCANNED - 1) / SCANNED;
  const int at = blockIdx.x % pieces * SCANNED + threadIdx.x, key_head = blockIdx.x / pieces % c.key_heads;
  const Run run = c.runs[blockIdx.x / pieces / c.key_heads];
  if (at >= elements) return;
  const State begin = state_of(c.begin, run.sequence, key_head);
  const float log = log_of(c, key_head);
  float state = begin.data ? begin.data[at / c.outer * begin.row + at % c.outer] : 0;
  NO_UNROLL for (int n = 0; n < run.segments; n += AHEAD) {
    float sum[AHEAD], decay[AHEAD];
    float* to[AHEAD];
    UNROLL(i, AHEAD) {
      if (n + i >= run.segments) break;
      const int number = run.first + (c.back ? run.segments - 1 - n - i : n + i);
      const Segment own = c.segments[number];
      const Chunk first = c.chunks[own.first], last = c.chunks[own.first + own.chunks - 1];
      to[i] = state_of(c.between, number, key_head).data + at;
      sum[i] = n + i + 1 < run.segments ? *to[i] : 0;
      if (!BY_TOKEN) decay[i] = exp2_fast(log * (last.start + last.len - first.start));
      else decay[i] = n + i + 1 < run.segments ? c.decays[number * c.key_heads + key_head] : 1;
    }
    UNROLL(i, AHEAD) {
      if (n + i >= run.segments) break;
      if (n + i > 0) *to[i] = state;
      state = decay[i] == 0 ? sum[i] : fmaf(decay[i], state, sum[i]);
    }
  }
}
