// attention backward for sm_90a in passes with one writer for each gradient: deterministic without atomics, 7 products in
// place of 5, because scores and dP are computed twice. P and dS are rounded to the storage type; sums are f32.
//
//   delta     lse2 = lse·log2 e (+inf where a row saw nothing or is padding: P = 0), delta = Σ dout ⊙ o − dlse     (B1)
//   keys      a block owns 128 keys of one key head, 64 a warpgroup, and walks the query blocks of all its query heads:
//             Sᵀ = k·qᵀ,  dPᵀ = v·doutᵀ,  Pᵀ = exp2(c·Sᵀ − lse2),  dv += Pᵀ·dout,  dSᵀ = Pᵀ ⊙ (dPᵀ − delta),  dk += dSᵀ·q
//             Scores are transposed, so Pᵀ and dSᵀ are A operands from registers; q and dout are read both ways from one
//             tile.                                                                                          (B6), (B7)
//   queries   a block owns 128 queries and walks the key blocks: S, dP, dS, dq += dS·k                            (B5)
//
// A forbidden pair has P = dS = 0, which adds nothing only to finite numbers: `inspect` and `delta` say in `found` whether
// all are. Where a number is infinite, the portable kernels compute the pass. Where one is NaN, they compute it too, `cleanse`
// puts 0 in the place of NaN in copies, and `merge` takes the results of these kernels where those of the others are finite:
// what no NaN reaches has the bits that it would have without it. All that is enqueued in any case; the kernels read `found`
// and return at once where it is not for them, so that the host need not wait.
//
// Compile-time: STORAGE (1|2), D (64|128), WINDOW (0: every pair), LENGTHS (1: batch elements have extents of their own; 2:
// sequences are listed), OPTIONS (0: no softcap, no bias, a scale above 0).
constexpr int STAGES = 3;    // query blocks in flight in keys
constexpr int Q_KEYS = 128;  // keys of a block in queries
struct Pieces {  // rows of D elements, in pieces of 16 bytes: strides of batch, head and row
  uint4* data;
  i64 batch, head, row;
};
struct Call {
  TensorMap q, k, v, dout, dq, dk, dv;
  float *lse2, *delta;
  const float *lse, *dlse;  // dlse 0: none
  Pieces o, dout_rows;
  u32* found;               // bit 0: a number is not finite; bit 1: one is infinite
  Pieces elements;          // for inspect, cleanse and merge
  u64 pieces;               // for cleanse
  u16* result;              // for merge, with the strides of its batch, head and row
  i64 result_batch, result_head, result_row;
  int rows, heads, columns; // of the elements; columns of the result
  u32 when;                 // keys and queries do nothing where `found` is another number; ALWAYS: they do not look
  Shape shape;
  Packed packed;
  Options options;
  Elements dq_rows, dk_rows, dv_rows;  // as the maps say, for rows that end within a box
};
constexpr u32 ALWAYS = ~0u;
constexpr int LOOK = 128;  // rows of a block that looks at elements
// Rows of lse2 and delta: of every head, or of listed sequences tile after tile.
DEV i64 stat_rows(const Shape& s) { return (PACKED ? 1ll : s.batch) * s.heads * s.padded; }
DEV i64 stat_row(const Own& s, int head) { return (i64)(PACKED ? head : s.batch * s.heads + head) * s.padded + s.tile * 64; }
struct Look { int row, rows, head, batch; };
DEV Look look(const Call& c) {
  int tiles = (c.rows + LOOK - 1) / LOOK, tile = blockIdx.x % tiles, head = blockIdx.x / tiles;
  return {tile * LOOK, min(LOOK, c.rows - tile * LOOK), head % c.heads, head / c.heads};
}
struct Work { int block, head, batch; };  // of listed sequences the number in place of the batch element
// Those of listed sequences are the host's tasks: block 2n of 64 rows, and the next; an odd one is none.
DEV Work packed_work(const Task* tasks, int count, bool by_keys, int heads) {
  Task task = tasks[by_keys ? blockIdx.x / heads : count - 1 - blockIdx.x / heads];
  int tile = __shfl_sync(~0u, by_keys ? task.key_tile : task.row_tile, 0);
  return {tile % 2 ? -1 : tile / 2, (int)blockIdx.x % heads, __shfl_sync(~0u, task.first, 0)};
}
DEV Work work(int t, int blocks, int heads, int heads_per_group, const Shape& s) {  // by groups of heads that share the L2
  int all = s.batch * heads, g = t / (heads_per_group * blocks), r = t - g * heads_per_group * blocks;
  int width = min(heads_per_group, all - g * heads_per_group), b = r / width, h = g * heads_per_group + r - b * width;
  return {b, h % heads, h / heads};
}
#if OPTIONS
#define UNIT call.options.unit.natural
// From a product S over the unit (F2) and its slope S' (B4).
DEV void extend(float& x, float& slope, const Options& o, float bias) {
  slope = 1;
  if (o.cap != 0) {
    float t = tanh_of(x, o);
    x = __fmul_rn(o.cap, t), slope = fmaf(-t, t, 1.0f);
  } else if (o.unit.scale != 1) {
    x = __fmul_rn(o.unit.scale, x);
  }
  if (o.bias.data) add_bias(x, bias, o.unit);
}
#else
#define UNIT s.scale
#endif
// Rows of this warpgroup (64×D accumulators, scaled) to shared memory as D/64 panels of 64 rows.
DEV void stage_out(const float (&d)[D / 2], u32 to, float scale) {
  int warp = threadIdx.x / 32 % 4, lane = lane_id();
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
    int piece = 2 * j + lane / 16;
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = pack(d[8 * j + 2 * i] * scale, d[8 * j + 2 * i + 1] * scale);
    store_blocks(to + piece / 8 * 8192 + swizzled(warp * 16 + lane % 16, piece % 8), x[0], x[1], x[2], x[3]);
  }
}
template <int N, int A_ROWS, int B_ROWS> DEV void issue_shared(float (&s)[N / 2], u32 a, u32 b) {  // s = a·bᵀ over D
#pragma unroll
  for (int i = 0; i < D / 16; i++)
    Mma<N>::template ss<K_MAJOR, K_MAJOR>(s, k_major(a + (i / 4) * A_ROWS * 128 + (i % 4) * 32), k_major(b + (i / 4) * B_ROWS * 128 + (i % 4) * 32), i > 0);
}
template <int N> DEV void issue_registers(float (&d)[D / 2], const u32 (&a)[N / 4], u32 b, int add) {  // d (+)= a·b, b: N rows
#pragma unroll
  for (int i = 0; i < N / 16; i++) Mma<D>::rs<MN_MAJOR>(d, a + 4 * i, mn_major(b + i * 2048, N * 128), i > 0 ? 1 : add);
}

// ---- what is not finite ------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(256) inspect(const __grid_constant__ Call c) {
  const u32 top = STORAGE == 1 ? 0x7f80 : 0x7c00;  // the exponent of infinities and NaN
  Look l = look(c);
  const uint4* rows = c.elements.data + l.batch * c.elements.batch + l.head * c.elements.head + l.row * c.elements.row;
  u32 most = 0;
  for (int i = threadIdx.x; i < l.rows * (D / 8); i += 256) {
    uint4 x = rows[i / (D / 8) * c.elements.row + i % (D / 8)];
    most = max_pair(max_pair(max_pair(most, x.x & 0x7fff7fff), x.y & 0x7fff7fff), max_pair(x.z & 0x7fff7fff, x.w & 0x7fff7fff));
  }
  if ((most & 0xffff) >= top || most >> 16 >= top) *c.found = 1;
}

// 0 for NaN.
extern "C" __global__ void __launch_bounds__(256) cleanse(const __grid_constant__ Call c) {
  const u32 top = STORAGE == 1 ? 0x7f80 : 0x7c00;
  if (!*c.found) return;
  u16* elements = (u16*)c.elements.data;
  for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < 8 * c.pieces; i += gridDim.x * 256ull) {
    u32 x = elements[i] & 0x7fff;
    if (x > top) elements[i] = 0;
    if (x == top) *c.found = 3;
  }
}

// A row whose scores are NaN weighs nothing; one whose delta is NaN keeps its weights.
extern "C" __global__ void __launch_bounds__(256) cleanse_rows(const __grid_constant__ Call c) {
  i64 row = blockIdx.x * 256ll + threadIdx.x;
  if (!*c.found || row >= stat_rows(c.shape)) return;
  float l = c.lse2[row], x = c.delta[row];
  if (isnan(l)) c.lse2[row] = INF;
  if (isnan(x)) c.delta[row] = 0;
  if (l == -INF || fabsf(x) == INF) *c.found = 3;
}

// The elements of a wide copy, where the result is finite.
extern "C" __global__ void __launch_bounds__(256) merge(const __grid_constant__ Call c) {
  const u32 top = STORAGE == 1 ? 0x7f80 : 0x7c00;
  if (*c.found != 1) return;
  Look l = look(c);
  const u16* rows = (const u16*)(c.elements.data + l.batch * c.elements.batch + l.head * c.elements.head + l.row * c.elements.row);
  u16* result = c.result + l.batch * c.result_batch + l.head * c.result_head + l.row * c.result_row;
  for (int i = threadIdx.x; i < l.rows * c.columns; i += 256) {
    int row = i / c.columns, column = i - row * c.columns;
    u16& x = result[row * c.result_row + column];
    if ((x & 0x7fff) < top) x = rows[row * 8 * c.elements.row + column];
  }
}

// ---- delta -----------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(256) delta(const __grid_constant__ Call c) {
  const Shape& s = c.shape;
  i64 t = blockIdx.x * 256ll + threadIdx.x, row = t / (D / 8);
  int piece = t % (D / 8);
  if (row >= stat_rows(s)) return;
  i64 head = row / s.padded;
  i64 batch = PACKED ? 0 : head / s.heads, h = head - batch * s.heads;
  int i = row % s.padded, end = s.queries;
  if (PACKED) {  // tiles of the sequences follow each other
    Task task = c.packed.by_queries[min(i / 64, c.packed.tasks - 1)];
    Sequence own = c.packed.sequences[task.first];
    end = i / 64 < c.packed.tasks ? own.query_start + own.queries : 0;
    i = own.query_start + task.row_tile * 64 + i % 64, batch = own.batch;
  }
  float sum = 0;
  if (i < end) {
    uint4 a = c.o.data[batch * c.o.batch + h * c.o.head + i * c.o.row + piece];
    uint4 b = c.dout_rows.data[batch * c.dout_rows.batch + h * c.dout_rows.head + i * c.dout_rows.row + piece];
    auto dot = [](u32 x, u32 y) { float2 p = unpack(x), q = unpack(y); return p.x * q.x + p.y * q.y; };
    sum = (dot(a.x, b.x) + dot(a.y, b.y)) + (dot(a.z, b.z) + dot(a.w, b.w));
  }
#pragma unroll
  for (int n = D / 16; n; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
  if (piece == 0) {
    int length = LENGTHS == 1 ? s.lengths[batch].x : end;
    i64 at = (batch * s.heads + h) * s.queries + i;
    float x = i < length ? c.lse[at] : -INF;
    if (c.dlse && i < length) sum -= c.dlse[at];
    if (x != -INF && !(fabsf(x) + fabsf(sum) < INF)) *c.found = 1;
    c.lse2[row] = x == -INF ? INF : x * LOG2E;
    c.delta[row] = x == -INF ? 0 : sum;
  }
}

// ---- dk, dv ----------------------------------------------------------------------------------------------------------
namespace keys_pass {
constexpr int KEYS = 128, ROWS = 64;
constexpr u32 KV_BYTES = KEYS * D * 2, Q_BYTES = ROWS * D * 2;
constexpr u32 AT_V = KV_BYTES, AT_Q = 2 * KV_BYTES, AT_DO = AT_Q + STAGES * Q_BYTES, AT_STATS = AT_DO + STAGES * Q_BYTES;
constexpr u32 KV_FULL = AT_STATS + STAGES * 2 * ROWS * 4, FULL = KV_FULL + 8, EMPTY = FULL + 8 * STAGES;  // + 1024 in all
}
extern "C" __global__ void __launch_bounds__(384, 1) keys(const __grid_constant__ Call call) {
  using namespace keys_pass;
  if (call.when != ALWAYS && *call.found != call.when) return;
#if LENGTHS == 2
  Work w = packed_work(call.packed.by_keys, call.packed.key_tasks, true, call.shape.key_heads);
  if (w.block < 0) return;
#endif
  extern __shared__ char bytes[];
  u32 base = (shared(bytes) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    prefetch(&call.q), prefetch(&call.k), prefetch(&call.v), prefetch(&call.dout), prefetch(&call.dk), prefetch(&call.dv);
    barrier_init(base + KV_FULL, 1);
    for (int i = 0; i < STAGES; i++) barrier_init(base + FULL + 8 * i, 1), barrier_init(base + EMPTY + 8 * i, 8 * ARRIVALS);
    barrier_init_fence();
  }
  __syncthreads();
#if LENGTHS != 2
  Work w = work(blockIdx.x, (call.shape.keys + KEYS - 1) / KEYS, call.shape.key_heads, call.shape.heads_per_group, call.shape);  // first key blocks see most queries
#endif
  const Own s = of_batch<true>(call.shape, call.packed, w.batch);
  int each = s.heads / s.key_heads, offset = s.offset;
  // Query blocks from `begin` to before `end` see some of these keys; from `open` to before `closed` they see all.
  int begin = 0, open = 0, closed = (s.queries + ROWS - 1) / ROWS, end = closed;
  if (WINDOW) {
    int first = w.block * KEYS - offset, last = first + KEYS - 1;
    end = min(end, (max(0, last + s.left + 1) + ROWS - 1) / ROWS);
    begin = min(end, max(0, first - s.right) / ROWS);
    open = min(end, max(begin, (max(0, last - s.right) + ROWS - 1) / ROWS));
    closed = min(end, max(open, max(0, first + s.left + 1) / ROWS));
    if (PACKED) closed = max(open, min(closed, s.queries / ROWS));  // the next sequence's rows are hidden
  }
  u32 stage = 0;
  if (threadIdx.x < 128) {
    registers_down<24>();
    if (threadIdx.x == 0) {
    expect_bytes(base + KV_FULL, 2 * KV_BYTES);
    load5(base, &call.k, base + KV_FULL, s.key_start + w.block * KEYS, w.head, s.batch);
    load5(base + AT_V, &call.v, base + KV_FULL, s.key_start + w.block * KEYS, w.head, s.batch);
    u32 phase = 1;
#pragma unroll 1
    for (int h = w.head * each; h < (w.head + 1) * each; h++)
#pragma unroll 1
      for (int i = begin; i < end; i++) {
        u32 full = base + FULL + 8 * stage, stats = base + AT_STATS + stage * 2 * ROWS * 4;
        wait(base + EMPTY + 8 * stage, phase);
        expect_bytes(full, 2 * Q_BYTES + 2 * ROWS * 4);
        load5(base + AT_Q + stage * Q_BYTES, &call.q, full, s.query_start + i * ROWS, h, s.batch);
        load5(base + AT_DO + stage * Q_BYTES, &call.dout, full, s.query_start + i * ROWS, h, s.batch);
        size_t at = stat_row(s, h) + i * ROWS;
        load_bytes(stats, call.lse2 + at, ROWS * 4, full);
        load_bytes(stats + ROWS * 4, call.delta + at, ROWS * 4, full);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
    }
  } else {
  registers_up<240>();
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = lane_id();
  const float c = UNIT * LOG2E;
  const u32 k = base + group * 64 * 128, v = k + AT_V;
  const int key = w.block * KEYS + group * 64 + warp * 16 + lane / 4;
  float dk[D / 2], dv[D / 2], p[ROWS / 2], ds[ROWS / 2];
  u32 pp[ROWS / 4], dsp[ROWS / 4];
  u32 phase = 0, before = 0;
  int add = 0;
#if OPTIONS
  // The bias of a pair of this thread, 0 where it is none.
  auto bias = [&](int h, int i, int j, int r, int e) {
    int query = i * ROWS + 8 * j + 2 * (lane & 3) + e;
    bool there = call.options.bias.data && query < s.queries && key + 8 * r < s.keys;
    return there ? read(call.options.bias.at(s.batch, w.head * each + h, s.query_start + query)[s.key_start + key + 8 * r]) : 0;
  };
#endif
  auto step = [&](int h, int i, auto masked) {
    u32 q = base + AT_Q + stage * Q_BYTES, dout = base + AT_DO + stage * Q_BYTES, stats = base + AT_STATS + stage * 2 * ROWS * 4 + 8 * (lane & 3);
    wait(base + FULL + 8 * stage, phase);
    pin(p), mma_begin();
    issue_shared<ROWS, KEYS, ROWS>(p, k, q), mma_commit();
    mma_wait<1>(), pin(dsp), pin(pp);  // the products of the block before: their operands' registers are free
    if (add) warp_arrive(base + EMPTY + 8 * before);
    pin(ds), mma_begin();
    issue_shared<ROWS, KEYS, ROWS>(ds, v, dout), mma_commit();
    mma_wait<1>(), pin(p);
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      float2 l = load_pair(stats + 32 * j);
#if OPTIONS
      float slope[4];
#endif
#pragma unroll
      for (int r = 0; r < 2; r++) {
        int first = key + 8 * r - offset - s.right - i * ROWS - 2 * (lane & 3);  // of the queries that see this key
        int last = key + 8 * r - offset + s.left - i * ROWS - 2 * (lane & 3);
        if (PACKED && decltype(masked)::value) last = min(last, s.queries - 1 - i * ROWS - 2 * (lane & 3));
#if OPTIONS
        extend(p[4 * j + 2 * r], slope[2 * r], call.options, bias(h, i, j, r, 0));
        extend(p[4 * j + 2 * r + 1], slope[2 * r + 1], call.options, bias(h, i, j, r, 1));
#endif
        p[4 * j + 2 * r] = exp2_fast(fmaf(p[4 * j + 2 * r], c, -l.x));
        p[4 * j + 2 * r + 1] = exp2_fast(fmaf(p[4 * j + 2 * r + 1], c, -l.y));
        if (decltype(masked)::value) {
          if (8 * j < first || 8 * j > last) p[4 * j + 2 * r] = 0;
          if (8 * j + 1 < first || 8 * j + 1 > last) p[4 * j + 2 * r + 1] = 0;
        }
      }
      pp[2 * j] = pack(p[4 * j], p[4 * j + 1]), pp[2 * j + 1] = pack(p[4 * j + 2], p[4 * j + 3]);
#if OPTIONS
#pragma unroll
      for (int e = 0; e < 4; e++) p[4 * j + e] *= slope[e];
#endif
    }
    pin(pp), mma_begin();
    issue_registers<ROWS>(dv, pp, dout, add), mma_commit();
    mma_wait<1>(), pin(ds);  // dP; dv runs under what follows
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      float2 x = load_pair(stats + ROWS * 4 + 32 * j);
#pragma unroll
      for (int r = 0; r < 2; r++) dsp[2 * j + r] = pack(p[4 * j + 2 * r] * (ds[4 * j + 2 * r] - x.x), p[4 * j + 2 * r + 1] * (ds[4 * j + 2 * r + 1] - x.y));
    }
    pin(dsp), mma_begin();
    issue_registers<ROWS>(dk, dsp, q, add), mma_commit();
    add = 1, before = stage;
    if (++stage == STAGES) stage = 0, phase ^= 1;
  };
  wait(base + KV_FULL, 0);
#pragma unroll 1
  for (int h = 0; h < each; h++) {
    int i = begin;
#pragma unroll 1
    for (; i < open; i++) step(h, i, Is<true>());
#pragma unroll 1
    for (; i < closed; i++) step(h, i, Is<false>());
#if WINDOW
#pragma unroll 1
    for (; i < end; i++) step(h, i, Is<true>());
#endif
  }
  mma_wait<0>(), pin(dk), pin(dv);
  if (!add) {
#pragma unroll
    for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0;
  }
  if (LENGTHS == 1) {  // keys of no sequence
#pragma unroll
    for (int i = 0; i < D / 2; i++)
      if (key + (i & 2) * 4 >= s.keys) dk[i] = dv[i] = 0;
  }
  named_sync(1, 256);  // k and v are no longer read: their space takes the results
  if (PACKED && w.block * KEYS + group * 64 + 64 > s.keys) {  // keys of the next sequence lie in the box
    store_rows(call.dk_rows, s.batch, w.head, s.key_start, key, s.keys, dk, s.scale);
    store_rows(call.dv_rows, s.batch, w.head, s.key_start, key, s.keys, dv, 1);
    return;
  }
  u32 out = base + group * 64 * D * 2;
  stage_out(dk, out, s.scale), stage_out(dv, out + AT_V, 1);
  proxy_fence();
  named_sync(2 + group, 128);
  if (threadIdx.x % 128 == 0) {
    store5(&call.dk, out, s.key_start + w.block * KEYS + group * 64, w.head, s.batch);
    store5(&call.dv, out + AT_V, s.key_start + w.block * KEYS + group * 64, w.head, s.batch);
    store_commit(), store_wait();
  }
  }
}

// ---- dq --------------------------------------------------------------------------------------------------------------
namespace queries_pass {
constexpr int KEYS = Q_KEYS, ROWS = 128;
constexpr u32 KV_BYTES = KEYS * D * 2, Q_BYTES = ROWS * D * 2;
constexpr u32 AT_DO = Q_BYTES, AT_K = 2 * Q_BYTES, AT_V = AT_K + 2 * KV_BYTES, Q_FULL = AT_V + 2 * KV_BYTES, K_FULL = Q_FULL + 8,
              K_EMPTY = K_FULL + 16, V_FULL = K_EMPTY + 16, V_EMPTY = V_FULL + 16;
}
extern "C" __global__ void __launch_bounds__(384, 1) queries(const __grid_constant__ Call call) {
  using namespace queries_pass;
  if (call.when != ALWAYS && *call.found != call.when) return;
#if LENGTHS == 2
  Work w = packed_work(call.packed.by_queries, call.packed.tasks, false, call.shape.heads);
  if (w.block < 0) return;
#endif
  extern __shared__ char bytes[];
  u32 base = (shared(bytes) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    prefetch(&call.q), prefetch(&call.k), prefetch(&call.v), prefetch(&call.dout), prefetch(&call.dq);
    barrier_init(base + Q_FULL, 1);
    for (int i = 0; i < 2; i++) {
      barrier_init(base + K_FULL + 8 * i, 1), barrier_init(base + K_EMPTY + 8 * i, 8 * ARRIVALS);
      barrier_init(base + V_FULL + 8 * i, 1), barrier_init(base + V_EMPTY + 8 * i, 8 * ARRIVALS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const Shape& all = call.shape;
#if LENGTHS != 2
  int blocks = (all.queries + ROWS - 1) / ROWS;
  Work w = work(blockIdx.x, blocks, all.heads, all.heads_per_group * (all.heads / all.key_heads), all);
  if (WINDOW) w.block = blocks - 1 - w.block;
#endif
  Own s = of_batch<true>(all, call.packed, w.batch);
  const int offset = s.offset;
  // Key blocks from `begin` to before `n` are seen; those before `closed` and from `open` on need a mask.
  int begin = 0, closed = 0, open = s.keys / KEYS, n = (s.keys + KEYS - 1) / KEYS;
  if (WINDOW) {
    int first = w.block * ROWS + offset, last = min((w.block + 1) * ROWS, s.queries) - 1 + offset;
    int from = max(0, first - s.left), end = min(s.keys, last + s.right + 1);
    if (end <= from) end = from = 0;
    begin = from / KEYS, n = (end + KEYS - 1) / KEYS;
    open = min(n, max(begin, min(s.keys, max(0, first + s.right + 1)) / KEYS));
    closed = min(open, max(begin, (max(0, last - s.left) + KEYS - 1) / KEYS));
  }
  u32 stage = 0;
  if (threadIdx.x < 128) {
    registers_down<24>();
    if (threadIdx.x == 0) {
    expect_bytes(base + Q_FULL, 2 * Q_BYTES);
    load5(base, &call.q, base + Q_FULL, s.query_start + w.block * ROWS, w.head, s.batch);
    load5(base + AT_DO, &call.dout, base + Q_FULL, s.query_start + w.block * ROWS, w.head, s.batch);
    int kh = w.head / (s.heads / s.key_heads);
    u32 phase = 1;
#pragma unroll 1
    while (n-- > begin) {
      wait(base + K_EMPTY + 8 * stage, phase);
      expect_bytes(base + K_FULL + 8 * stage, KV_BYTES);
      load5(base + AT_K + stage * KV_BYTES, &call.k, base + K_FULL + 8 * stage, s.key_start + n * KEYS, kh, s.batch);
      wait(base + V_EMPTY + 8 * stage, phase);
      expect_bytes(base + V_FULL + 8 * stage, KV_BYTES);
      load5(base + AT_V + stage * KV_BYTES, &call.v, base + V_FULL + 8 * stage, s.key_start + n * KEYS, kh, s.batch);
      if (++stage == 2) stage = 0, phase ^= 1;
    }
    }
  } else {
  registers_up<240>();
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = lane_id();
  const float c = UNIT * LOG2E;
  const u32 q = base + group * 64 * 128, dout = q + AT_DO;
  const int row = w.block * ROWS + group * 64 + warp * 16 + lane / 4;
  const size_t at = stat_row(s, w.head) + row;
  const float l[2] = {call.lse2[at], call.lse2[at + 8]}, x[2] = {call.delta[at], call.delta[at + 8]};
#if OPTIONS
  const Elements& all_bias = call.options.bias;
  const u16* bias[2];  // of the two rows, from the pair of keys of this thread in the first 8; 0: none
#pragma unroll
  for (int r = 0; r < 2; r++)
    bias[r] = all_bias.data ? all_bias.at(s.batch, w.head, s.query_start + min(row + 8 * r, s.queries - 1)) + s.key_start + 2 * (lane & 3) : 0;
#endif
  float dq[D / 2], p[KEYS / 2], ds[KEYS / 2];
  u32 dsp[KEYS / 4], phase = 0, before = 0;
  int add = 0;
  auto step = [&](auto masked) {
#if OPTIONS
    const bool pairs = all_bias.has_pairs(bias[0]);
#endif
    u32 k = base + AT_K + stage * KV_BYTES, v = base + AT_V + stage * KV_BYTES;
    wait(base + K_FULL + 8 * stage, phase);
    pin(p), mma_begin();
    issue_shared<KEYS, ROWS, KEYS>(p, q, k), mma_commit();
    mma_wait<1>(), pin(dsp);  // dq of the block before: its operand's registers are free
    if (add) warp_arrive(base + K_EMPTY + 8 * before);
    wait(base + V_FULL + 8 * stage, phase);
    pin(ds), mma_begin();
    issue_shared<KEYS, ROWS, KEYS>(ds, dout, v), mma_commit();
    mma_wait<1>(), pin(p);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int from = n * KEYS + 2 * (lane & 3), stop = s.keys - from, start = 0;
      if (WINDOW) stop = min(stop, row + 8 * r + offset + s.right + 1 - from), start = row + 8 * r + offset - s.left - from;
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
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) dsp[i] = pack(p[2 * i] * (ds[2 * i] - x[i % 2]), p[2 * i + 1] * (ds[2 * i + 1] - x[i % 2]));
    pin(dsp), mma_begin();
    issue_registers<KEYS>(dq, dsp, k, add), mma_commit();
    add = 1, before = stage;
    if (++stage == 2) stage = 0, phase ^= 1;
  };
  wait(base + Q_FULL, 0);
#pragma unroll 1
  for (n--; n >= open; n--) step(Is<true>());
#pragma unroll 1
  for (; n >= closed; n--) step(Is<false>());
#if WINDOW
#pragma unroll 1
  for (; n >= begin; n--) step(Is<true>());
#endif
  mma_wait<0>(), pin(dq);
  if (!add) {
#pragma unroll
    for (int i = 0; i < D / 2; i++) dq[i] = 0;
  }
  named_sync(1, 256);  // q is no longer read
#if LENGTHS == 2
  // Read once more: the loop leaves no register to keep it.
  w = packed_work(call.packed.by_queries, call.packed.tasks, false, call.shape.heads);
  s = of_batch<true>(all, call.packed, w.batch);
#endif
  if (PACKED && w.block * ROWS + group * 64 + 64 > s.queries) {  // rows of the next sequence lie in the box
    store_rows(call.dq_rows, s.batch, w.head, s.query_start, row, s.queries, dq, s.scale);
    return;
  }
  stage_out(dq, base + group * 64 * D * 2, s.scale);
  proxy_fence();
  named_sync(2 + group, 128);
  if (threadIdx.x % 128 == 0) {
    store5(&call.dq, base + group * 64 * D * 2, s.query_start + w.block * ROWS + group * 64, w.head, s.batch);
    store_commit(), store_wait();
  }
  }
}
