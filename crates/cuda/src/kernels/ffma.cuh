// Products of tiles of 64 × 64 in f32 fused multiply-adds. Compile-time: R, the rows of a tile that a thread has, 8 or 4:
// as many as registers hold. Thread (y, x) = (t / 16, t % 16) has rows R·y .. R·y + R - 1 and columns
// 4x .. 4x + 3 of a product, and of an accumulator W columns wide every 64th group of 4.
constexpr int SIDE = 64, DEPTH = 32, THREADS = SIDE / R * 16;
constexpr int PITCH = SIDE + 4;  // 16-byte vectors in every row, and other banks

struct Shared {
  union {
    struct { float a[DEPTH * PITCH], b[DEPTH * PITCH]; };
    float four[4][DEPTH / 2 * PITCH];
    float x[SIDE * SIDE];
  };
  float p[SIDE * PITCH];  // [reduction][row]: of P or dS
};
DEV int ty() { return threadIdx.x / 16; }
DEV int tx() { return threadIdx.x % 16; }

// The number of the thread, of which the compiler knows nothing: else it would keep the address of every row in registers
// over the whole kernel.
DEV int thread() {
  int t = threadIdx.x;
  asm volatile("" : "+r"(t));
  return t;
}

// COLUMNS columns from `first` on of 64 rows, transposed.
template <int COLUMNS> DEV void stage(float* to, const Rows& rows, int first, int width) {
  int t = thread(), column = t % COLUMNS, from = t / COLUMNS;
#pragma unroll
  for (int i = 0; i < SIDE * COLUMNS / THREADS; i++) {
    int row = from + i * (THREADS / COLUMNS);
    bool inside = row < rows.count && first + column < width;
    to[column * PITCH + row] = inside ? read(rows.at[row * rows.stride + first + column]) : 0;
  }
}

// Numbers that lie side by side, in vectors of 16 bytes.
template <int N> DEV void fetch(float (&to)[N], const float* from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    float4 x = *(const float4*)(from + i);
    to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
  }
}

// product += a·bᵀ over `width` columns.
DEV void add_products(Shared& shared, float (&product)[R][4], const Rows& a, const Rows& b, int width) {
#pragma unroll 1
  for (int first = 0; first < width; first += DEPTH) {
    __syncthreads();
    stage<DEPTH>(shared.a, a, first, width), stage<DEPTH>(shared.b, b, first, width);
    __syncthreads();
#pragma unroll 8
    for (int d = 0; d < DEPTH; d++) {
      float u[R], w[4];
      fetch(u, &shared.a[d * PITCH + R * ty()]), fetch(w, &shared.b[d * PITCH + 4 * tx()]);
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) product[r][c] = fmaf(u[r], w[c], product[r][c]);
    }
  }
}

// product = a·bᵀ.
DEV void products(Shared& shared, float (&product)[R][4], const Rows& a, const Rows& b, int width) {
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int c = 0; c < 4; c++) product[r][c] = 0;
  add_products(shared, product, a, b, width);
}

// product += a·bᵀ, and moved += a1·bᵀ (if A1) + a·b1ᵀ (if B1): what is read of shared memory serves several products. A
// product has the bits that `add_products` gives it.
template <bool A1, bool B1>
DEV void add_products_moved(Shared& shared, float (&product)[R][4], float (&moved)[R][4], const Rows& a, const Rows& a1, const Rows& b,
                            const Rows& b1, int width) {
  constexpr int HALF = DEPTH / 2;
  auto& four = shared.four;
#pragma unroll 1
  for (int first = 0; first < width; first += HALF) {
    __syncthreads();
    stage<HALF>(four[0], a, first, width), stage<HALF>(four[1], b, first, width);
    if (A1) stage<HALF>(four[2], a1, first, width);
    if (B1) stage<HALF>(four[3], b1, first, width);
    __syncthreads();
#pragma unroll 4
    for (int d = 0; d < HALF; d++) {
      const int y = d * PITCH + R * ty(), x = d * PITCH + 4 * tx();
      float u[R], w[4], u1[R], w1[4];
      fetch(u, &four[0][y]), fetch(w, &four[1][x]);
      if (A1) fetch(u1, &four[2][y]);
      if (B1) fetch(w1, &four[3][x]);
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
          product[r][c] = fmaf(u[r], w[c], product[r][c]);
          if (A1) moved[r][c] = fmaf(u1[r], w[c], moved[r][c]);
          if (B1) moved[r][c] = fmaf(u[r], w1[c], moved[r][c]);
        }
    }
  }
}

// Writes the factors of a following `accumulate`: those of the reduction's index 4x + c in row 4x + c.
DEV void publish(Shared& shared, const float (&p)[R][4]) {
#pragma unroll
  for (int c = 0; c < 4; c++)
#pragma unroll
    for (int r = 0; r < R; r += 4)
      *(float4*)&shared.p[(4 * tx() + c) * PITCH + R * ty() + r] = make_float4(p[r][c], p[r + 1][c], p[r + 2][c], p[r + 3][c]);
}

// sum += p·x over 64 rows of x, its columns from `first` on. A hidden factor adds nothing, whatever x holds: only where
// x holds a number that is not finite does that take a branch for each factor.
template <int W> DEV void accumulate(Shared& shared, float (&sum)[R][W / 16], const Rows& x, int first, int width) {
  constexpr int LENGTH = SIDE * SIDE / W;
#pragma unroll 1
  for (int from = 0; from < SIDE; from += LENGTH) {
    bool odd = false;
    const int thread = ::thread();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < LENGTH * W / THREADS; i++) {
      int at = thread + i * THREADS, row = at / W, column = first + at % W;
      bool inside = from + row < x.count && column < width;
      float value = inside ? read(x.at[(from + row) * x.stride + column]) : 0;
      odd |= !(fabsf(value) < INF);
      shared.x[at] = value;
    }
    odd = __syncthreads_or(odd);
#pragma unroll 2
    for (int t = 0; t < LENGTH; t++) {
      float p[R];
      fetch(p, &shared.p[(from + t) * PITCH + R * ty()]);
#pragma unroll
      for (int c = 0; c < W / 64; c++) {
        float y[4];
        fetch(y, &shared.x[t * W + 64 * c + 4 * tx()]);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (!odd || !hidden(p[r])) sum[r][4 * c + e] = fmaf(p[r], y[e], sum[r][4 * c + e]);
      }
    }
  }
}
template <int W> DEV void clear(float (&sum)[R][W / 16]) {
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int e = 0; e < W / 16; e++) sum[r][e] = 0;
}

// A factor of all rows alike.
struct Same {
  float factor;
  __device__ __forceinline__ float operator[](int) const { return factor; }
};

// Writes factor[r]·sum to the rows below `count` of a tensor.
template <int W, class F> DEV void store(const Tensor& x, int batch, int head, int row, int count, const float (&sum)[R][W / 16],
                                const F& factor, int first, int width, bool wide) {
#pragma unroll
  for (int r = 0; r < R; r++) {
    if (R * ty() + r >= count) continue;
    i64 at = batch * x.batch + head * x.head + (row + R * ty() + r) * x.row + first;
#pragma unroll
    for (int i = 0; i < W / 16; i++) {
      int column = 64 * (i / 4) + 4 * tx() + i % 4;
      if (first + column >= width) continue;
      float value = fmaf(factor[r], sum[r][i], 0.0f);  // no -0: what nobody adds to is 0 under any scale
      if (wide) ((float*)x.data)[at + column] = value;
      else ((element*)x.data)[at + column] = rounded(value);
    }
  }
}

// The sum of a number of each thread, in a fixed order, in thread 0.
DEV float block_sum(float x) {
  __shared__ float sums[THREADS];
  sums[threadIdx.x] = x;
  for (int n = THREADS / 2; n; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) sums[threadIdx.x] += sums[threadIdx.x + n];
  }
  return sums[0];
}

DEV float lse_of(const Head& head, int i) { return i < head.s.queries ? head.lse[i] : 0; }

// Writes a tile of pairs to a tensor that is shaped as the bias. Sequences that share one begin where the arrays begin.
DEV void store_pairs(const Call& c, const Task& task, const Tensor& x, int head, const float (&sum)[R][4]) {
  const Sequence s = c.sequences[task.first];
  int rows = task.sequences > 1 ? c.queries : s.queries, keys = task.sequences > 1 ? c.keys : s.keys;
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int i = task.row_tile * SIDE + R * ty() + r, j = task.key_tile * SIDE + 4 * tx() + e;
      if (i < rows && j < keys)
        ((element*)x.data)[s.batch * x.batch + head * x.head + (s.query_start + i) * x.row + s.key_start + j] = rounded(sum[r][e]);
    }
}
