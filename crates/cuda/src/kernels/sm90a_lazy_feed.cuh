// How tiles come to the kernels of sm_90a that own queries of lazy_attention: a producer warp feeds the copy engine, and copies
// the bias of a block, by distance, beside its keys.
enum Pass { SCORES, VALUES, QUERIES };
template <int GROUPS, Pass PASS> struct Feed {
  static constexpr int ROWS = 64 * GROUPS, NEAR = ROWS + KEYS;
  static constexpr u32 Q_BYTES = ROWS * D * 2, AT_K = Q_BYTES, AT_V = AT_K + 2 * KV_BYTES, AT_OUT = AT_V + (PASS != SCORES) * 2 * KV_BYTES;
  // The largest scores of rows by stripe; o of each warpgroup; or dout.
  static constexpr u32 AT_BIAS = AT_OUT + (PASS == SCORES ? ROWS * STRIPES * 4 : Q_BYTES), Q_FULL = AT_BIAS + 2 * NEAR * 4, Q_EMPTY = Q_FULL + 8,
                       K_FULL = Q_EMPTY + 8, K_EMPTY = K_FULL + 16, V_FULL = K_EMPTY + 16, V_EMPTY = V_FULL + 16, TILE = V_EMPTY + 16;
  // Dynamic shared memory: 1024 + TILE + 8; the base is aligned to 1024 by hand.
  u32 base;
  float* numbers;  // the same address

  __device__ __forceinline__ Feed() {
    extern __shared__ char bytes[];
    const u32 at = shared(bytes);
    base = (at + 1023) & ~1023u, numbers = (float*)(bytes + (base - at));
    if (threadIdx.x == 0) {
      barrier_init(base + Q_FULL, 1), barrier_init(base + Q_EMPTY, 4 * GROUPS * ARRIVALS);
      for (int i = 0; i < 2; i++) {
        barrier_init(base + K_FULL + 8 * i, 1 + ARRIVALS), barrier_init(base + K_EMPTY + 8 * i, 4 * GROUPS * ARRIVALS);
        barrier_init(base + V_FULL + 8 * i, 1), barrier_init(base + V_EMPTY + 8 * i, 4 * GROUPS * ARRIVALS);
      }
      barrier_init_fence();
    }
    __syncthreads();
  }
  __device__ __forceinline__ float* bias(u32 stage) const { return numbers + AT_BIAS / 4 + stage * NEAR; }
  __device__ __forceinline__ float* tops() const { return numbers + AT_OUT / 4; }

  // Which stripes of keys the rows of a tile may attend to. For a warp.
  __device__ __forceinline__ u32 stripes(const Call& c, const Own& s, const Work& w) const {
    if (PASS != VALUES) return ~0u;
    const int tile = w.block * GROUPS + lane_id() / 4;
    const bool there = lane_id() < 4 * GROUPS && tile * SIDE < s.queries;
    return __reduce_or_sync(~0u, there ? c.active[((i64)(s.tile + tile) * c.shape.heads + w.head) * 4 + lane_id() % 4] : 0);
  }
  // The next block of keys of such stripes, from n on downwards; below `begin` there is none.
  static __device__ __forceinline__ int next(int n, int begin, u32 stripes, int each) {
    if (PASS == VALUES)
      while (n >= begin && !(stripes >> n / each & 1)) n--;
    return n;
  }

  // How often `queries` walks the keys.
  static __device__ __forceinline__ int sweeps(const Call& c) { return c.means + c.wants_dq; }

  __device__ __forceinline__ void produce(const Call& c) {
    const int tiles = tiles_of<GROUPS>(c);
    const bool first_lane = lane_id() == 0;
    u32 stage = 0, phase = 1, q_phase = 1;
    int t = blockIdx.x;
#pragma unroll 1
    while (t < tiles) {
      int drawn = 0;
      if (first_lane) {
        drawn = atomicAdd(c.counter, 1u);
        if (drawn == tiles - 1) *c.counter = 0;  // each block draws once too often: this is the last draw
      }
      const Work w = work<GROUPS, true>(t, c);
      if (w.block >= 0) {
        const Own s = sequence_of<true>(c, w.batch);
        const Blocks blocks = key_blocks<GROUPS>(w.block, s);
        const u32 active = stripes(c, s, w);
        const int each = stripe_blocks(s), key_head = w.head / (s.heads / s.key_heads);
        int n = next(blocks.end - 1, blocks.begin, active, each);
        wait(base + Q_EMPTY, q_phase), q_phase ^= 1;
        if (first_lane) {
          asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(base + TILE), "r"(t), "r"(active) : "memory");
          if (n < blocks.begin) {
            arrive(base + Q_FULL);
          } else {
            expect_bytes(base + Q_FULL, PASS == QUERIES ? 2 * Q_BYTES : Q_BYTES);
            load5(base, &c.q, base + Q_FULL, s.query_start + w.block * ROWS, w.head, s.batch);
            if (PASS == QUERIES) load5(base + AT_OUT, &c.dout, base + Q_FULL, s.query_start + w.block * ROWS, w.head, s.batch);
          }
        }
        const int first = n;
#pragma unroll 1
        for (int sweep = PASS == QUERIES ? sweeps(c) : 1; sweep; sweep--)
#pragma unroll 1
        for (n = first; n >= blocks.begin; n = next(n - 1, blocks.begin, active, each)) {
          wait(base + K_EMPTY + 8 * stage, phase);
          if (first_lane) {
            expect_bytes(base + K_FULL + 8 * stage, KV_BYTES);
            load5(base + AT_K + stage * KV_BYTES, &c.k, base + K_FULL + 8 * stage, s.key_start + n * KEYS, key_head, s.batch);
          }
          put_bias<ROWS>(bias(stage), c, w.head, distance_of(c, s, w.block * ROWS, n * KEYS));
          warp_arrive(base + K_FULL + 8 * stage);
          if (PASS != SCORES) {
            wait(base + V_EMPTY + 8 * stage, phase);
            if (first_lane) {
              expect_bytes(base + V_FULL + 8 * stage, KV_BYTES);
              load5(base + AT_V + stage * KV_BYTES, &c.v, base + V_FULL + 8 * stage, s.key_start + n * KEYS, key_head, s.batch);
            }
          }
          if (++stage == 2) stage = 0, phase ^= 1;
        }
      }
      t = __shfl_sync(~0u, drawn, 0) + gridDim.x;
    }
    wait(base + Q_EMPTY, q_phase);
    if (first_lane) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + TILE), "r"(-1) : "memory");
      arrive(base + Q_FULL);
    }
  }
};

// A warpgroup's rows of a work tile.
struct Rows {
  int row, begin[2], end[2];  // the first of this thread's two, and the keys that they see
  __device__ __forceinline__ Rows(const Work& w, const Own& s, int rows) {
    row = w.block * rows + (threadIdx.x / 32 - 4) * 16 + lane_id() / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) begin[r] = first_key(row + 8 * r, s), end[r] = row + 8 * r < s.queries ? end_key(row + 8 * r, s) : 0;
  }
};
// The number of a work tile, below 0 after the last, and which stripes of keys it walks.
DEV int tile_at(u32 at, u32& stripes) {
  int t;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(t), "=r"(stripes) : "r"(at) : "memory");
  stripes = __shfl_sync(~0u, stripes, 0);
  return __shfl_sync(~0u, t, 0);  // tells the compiler that it is uniform
}
