// ---- dq ------------------------------------------------------------------------------------------------------------
#if RESULTS == 1
namespace queries_pass {
constexpr int KEYS = 128, ROWS = OWN;
constexpr u32 KV_BYTES = KEYS * D * 2, Q_BYTES = ROWS * D * 2;
constexpr u32 AT_DO = Q_BYTES, AT_K = 2 * Q_BYTES, AT_V = AT_K + 2 * KV_BYTES, AT_DQ = AT_V + 2 * KV_BYTES;
constexpr u32 Q_FULL = AT_DQ + Q_BYTES, Q_EMPTY = Q_FULL + 8, OUT_FULL = Q_EMPTY + 8, OUT_EMPTY = OUT_FULL + 8, K_FULL = OUT_EMPTY + 8,
              K_EMPTY = K_FULL + 16, V_FULL = K_EMPTY + 16, V_EMPTY = V_FULL + 16, TILE = V_EMPTY + 16;
CHECK_SHARED(queries, 1024 + TILE + 8);  // 1024 to align all
DEV void produce(u32 base, const BackwardArgs& call) {
  u32 stage = 0, phase = 1, q_phase = 1;
#pragma unroll 1
  for (int t = blockIdx.x; t < call.tiles; t = draw(call)) {
    const Work w = ByQueries::work_of<false>(t, call);
    if (w.block < 0) continue;
    const Own s = of_batch<false>(call.shape, call.packed, w.batch);
    const Range range = ByQueries::blocks<KEYS>(call.spans, w, s);
    wait(base + Q_EMPTY, q_phase), q_phase ^= 1;
    put_tile(base + TILE, t);
    expect_bytes(base + Q_FULL, 2 * Q_BYTES);
    load5(base, &call.q, base + Q_FULL, s.query_start + w.block * ROWS, w.head, s.batch);
    load5(base + AT_DO, &call.dout, base + Q_FULL, s.query_start + w.block * ROWS, w.head, s.batch);
    const int kh = w.head / (s.heads / s.key_heads);
#pragma unroll 1
    for (int n = range.end - 1; n >= range.begin; n--) {
      wait(base + K_EMPTY + 8 * stage, phase);
      expect_bytes(base + K_FULL + 8 * stage, KV_BYTES);
      load5(base + AT_K + stage * KV_BYTES, &call.k, base + K_FULL + 8 * stage, s.key_start + n * KEYS, kh, s.batch);
      wait(base + V_EMPTY + 8 * stage, phase);
      expect_bytes(base + V_FULL + 8 * stage, KV_BYTES);
      load5(base + AT_V + stage * KV_BYTES, &call.v, base + V_FULL + 8 * stage, s.key_start + n * KEYS, kh, s.batch);
      if (++stage == 2) stage = 0, phase ^= 1;
    }
  }
  wait(base + Q_EMPTY, q_phase);
  put_tile(base + TILE, -1);
  arrive(base + Q_FULL);
}

// Writes dq of each tile.
DEV void store(u32 base, const BackwardArgs& call) {
  u32 phase = 0;
#pragma unroll 1
  for (;; phase ^= 1) {
    wait(base + Q_FULL, phase);
    const int t = tile_at<false>(base + TILE);
    if (t < 0) break;
    arrive(base + Q_EMPTY);
    const Work w = ByQueries::work_of<false>(t, call);
    const Own s = of_batch<false>(call.shape, call.packed, w.batch);
    wait(base + OUT_FULL, phase);
    if (!ByQueries::is_cut(w, s)) {
      store5(&call.dq, base + AT_DQ, s.query_start + w.block * ROWS, w.head, s.batch);
      store_commit(), store_wait_read();
    }
    arrive(base + OUT_EMPTY);
  }
  store_wait();
}

DEV void consume(u32 base, const BackwardArgs& call) {
  const Shape& all = call.shape;
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = lane_id();
  const u32 q = base + group * 64 * 128, dout = q + AT_DO;
  u32 stage = 0, phase = 0, before = 0, q_phase = 0;
#pragma unroll 1
  for (;; q_phase ^= 1) {
    wait(base + Q_FULL, q_phase);
    int t = tile_at<true>(base + TILE);
    if (t < 0) return;
    Work w = ByQueries::work_of<true>(t, call);
    Own s = of_batch<true>(all, call.packed, w.batch);
    const float c = UNIT * LOG2E;
    const int row = w.block * ROWS + group * 64 + warp * 16 + lane / 4;
    const Seen seen(call.spans, all, s, row);
    const size_t at = stat_row(s, w.head) + row;
    const float l[2] = {call.lse2[at], call.lse2[at + 8]}, x[2] = {call.delta[at], call.delta[at + 8]};
#if OPTIONS
    const Elements& all_bias = call.options.bias;
    const u16* bias[2];  // of the two rows, from the pair of keys of this thread in the first 8; 0: none
#pragma unroll
    for (int r = 0; r < 2; r++)
      bias[r] = all_bias.data ? row_of(all_bias, s.batch, w.head, s.query_start + min(row + 8 * r, s.queries - 1)) + s.key_start + 2 * (lane & 3) : 0;
#endif
    const Range range = ByQueries::blocks<KEYS>(call.spans, w, s);
    float dq[D / 2], p[KEYS / 2], ds[KEYS / 2];
    u32 dsp[KEYS / 4];
    int n = range.end - 1, add = 0;
    auto step = [&](auto masked) {
#if OPTIONS
      const bool pairs = has_pairs(all_bias, bias[0]);
#endif
      u32 k = base + AT_K + stage * KV_BYTES, v = base + AT_V + stage * KV_BYTES;
      wait(base + K_FULL + 8 * stage, phase);
      const bool is_cut = LENGTHS && decltype(masked)::value && s.keys - n * KEYS < KEYS;  // rows behind the sequence
      if (is_cut) zero_rows<KEYS>(s.keys - n * KEYS, group, k);
      pin(p), mma_begin();
      issue_shared<KEYS, ROWS, KEYS>(p, q, k), mma_commit();
      mma_wait<1>(), pin(dsp);  // dq of the block before: its operand's registers are free
      if (add) warp_arrive(base + K_EMPTY + 8 * before);
      wait(base + V_FULL + 8 * stage, phase);
      if (is_cut) zero_rows<KEYS>(s.keys - n * KEYS, group, v);
      pin(ds), mma_begin();
      issue_shared<KEYS, ROWS, KEYS>(ds, dout, v), mma_commit();
      mma_wait<1>(), pin(p);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        int from = n * KEYS + 2 * (lane & 3), stop = s.keys - from, start = 0;
        if (SPANS) stop = seen.end(r) - from, start = seen.begin(r) - from;
        else if (WINDOW) stop = min(stop, row + 8 * r + s.offset + s.right + 1 - from), start = row + 8 * r + s.offset - s.left - from;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
#if OPTIONS
          float2 b = bias[r] ? load_bias(bias[r] + n * KEYS + 8 * j, pairs, decltype(masked)::value ? s.keys - from - 8 * j : 2) : float2{0, 0};
#endif
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& y = p[4 * j + 2 * r + e];
#if OPTIONS
            float slope;
            extend(y, slope, call.options, e ? b.y : b.x);
#endif
            y = exp2_fast(fmaf(y, c, -l[r]));
            if (decltype(masked)::value && (8 * j + e >= stop || (WINDOW && 8 * j + e < start))) y = 0;
#if OPTIONS
            y *= slope;
#endif
          }
        }
      }
      mma_wait<0>(), pin(ds);
      warp_arrive(base + V_EMPTY + 8 * stage);
      if (n == range.begin) warp_arrive(base + Q_EMPTY);  // q and dout are no longer read
#pragma unroll
      for (int i = 0; i < KEYS / 4; i++) dsp[i] = pack(p[2 * i] * (ds[2 * i] - x[i % 2]), p[2 * i + 1] * (ds[2 * i + 1] - x[i % 2]));
      pin(dsp), mma_begin();
      issue_registers<KEYS>(dq, dsp, k, add), mma_commit();
      add = 1, before = stage;
      if (++stage == 2) stage = 0, phase ^= 1;
    };
#pragma unroll 1
    for (; n >= range.closed; n--) step(Is<true>());
#pragma unroll 1
    for (; n >= range.open; n--) step(Is<false>());
#if WINDOW
#pragma unroll 1
    for (; n >= range.begin; n--) step(Is<true>());
#endif
    mma_wait<0>(), pin(dq);
    warp_arrive(add ? base + K_EMPTY + 8 * before : base + Q_EMPTY);  // what was read last
    if (!add) {
#pragma unroll
      for (int i = 0; i < D / 2; i++) dq[i] = 0;
    }
    if (LENGTHS == 1) {  // queries of no sequence
#pragma unroll
      for (int i = 0; i < D / 2; i++)
        if (row + (i & 2) * 4 >= s.queries) dq[i] = 0;
    }
    if (!is_finite(dq, row, s.queries)) raise<OF_QUERIES>(call, w.batch, w.head / (s.heads / s.key_heads));
    if (ByQueries::is_cut(w, s)) {  // rows of the next sequence lie in the box
      store_rows(call.dq_rows, s.batch, w.head, s.query_start, row, s.queries, dq, s.scale);
    } else {
      wait(base + OUT_EMPTY, q_phase ^ 1);
      stage_out(dq, base + AT_DQ + group * 64 * 128, s.scale);
      proxy_fence();
    }
    warp_arrive(base + OUT_FULL);
  }
}
}
extern "C" __global__ void __launch_bounds__(384, 1) queries(const __grid_constant__ BackwardArgs call) {
  using namespace queries_pass;
  extern __shared__ char bytes[];
  u32 base = (shared(bytes) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    prefetch(&call.q), prefetch(&call.k), prefetch(&call.v), prefetch(&call.dout), prefetch(&call.dq);
    barrier_init(base + Q_FULL, 1), barrier_init(base + Q_EMPTY, 8 * ARRIVALS + 1);
    barrier_init(base + OUT_FULL, 8 * ARRIVALS), barrier_init(base + OUT_EMPTY, 1);
    for (int i = 0; i < 2; i++) {
      barrier_init(base + K_FULL + 8 * i, 1), barrier_init(base + K_EMPTY + 8 * i, 8 * ARRIVALS);
      barrier_init(base + V_FULL + 8 * i, 1), barrier_init(base + V_EMPTY + 8 * i, 8 * ARRIVALS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_down<24>();
    if (threadIdx.x == 0) produce(base, call);
    if (threadIdx.x == 32) store(base, call);
  } else {
    registers_up<240>();
    consume(base, call);
  }
}
#endif
