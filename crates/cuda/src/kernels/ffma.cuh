// Products of tiles in f32 fused multiply-adds: 256 threads, tiles of 64 × 64. Thread (y, x) = (t / 16, t % 16) has
// rows 4y .. 4y + 3 and columns 4x .. 4x + 3 of a product, and of an accumulator W columns wide every 64th group of 4.
constexpr int SIDE = 64, DEPTH = 32, THREADS = 256;
constexpr int PITCH = SIDE + 4;  // 16-byte vectors in every row, and other banks

struct Shared {
  union {
    struct { float a[DEPTH * PITCH], b[DEPTH * PITCH]; };
    float x[SIDE * SIDE];
  };
  float p[SIDE * PITCH];  // [reduction][row]: of P or dS
};
DEV int ty() { return threadIdx.x / 16; }
DEV int tx() { return threadIdx.x % 16; }

// DEPTH columns from `first` on of 64 rows, transposed.
DEV void stage(float* to, const Rows& rows, int first, int width) {
  int column = threadIdx.x % DEPTH, from = threadIdx.x / DEPTH;
#pragma unroll
  for (int i = 0; i < SIDE * DEPTH / THREADS; i++) {
    int row = from + i * (THREADS / DEPTH);
    bool inside = row < rows.count && first + column < width;
    to[column * PITCH + row] = inside ? read(rows.at[row * rows.stride + first + column]) : 0;
  }
}

// product += a·bᵀ over `width` columns.
DEV void add_products(Shared& shared, float (&product)[4][4], const Rows& a, const Rows& b, int width) {
#pragma unroll 1
  for (int first = 0; first < width; first += DEPTH) {
    __syncthreads();
    stage(shared.a, a, first, width), stage(shared.b, b, first, width);
    __syncthreads();
#pragma unroll 8
    for (int d = 0; d < DEPTH; d++) {
      float4 x = *(const float4*)&shared.a[d * PITCH + 4 * ty()], y = *(const float4*)&shared.b[d * PITCH + 4 * tx()];
      float u[4] = {x.x, x.y, x.z, x.w}, w[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) product[r][c] = fmaf(u[r], w[c], product[r][c]);
    }
  }
}

// product = a·bᵀ.
DEV void products(Shared& shared, float (&product)[4][4], const Rows& a, const Rows& b, int width) {
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int c = 0; c < 4; c++) product[r][c] = 0;
  add_products(shared, product, a, b, width);
}

// Writes the factors of a following `accumulate`: those of the reduction's index 4x + c in row 4x + c.
DEV void publish(Shared& shared, const float (&p)[4][4]) {
#pragma unroll
  for (int c = 0; c < 4; c++) *(float4*)&shared.p[(4 * tx() + c) * PITCH + 4 * ty()] = make_float4(p[0][c], p[1][c], p[2][c], p[3][c]);
}

// sum += p·x over 64 rows of x, its columns from `first` on. A hidden factor adds nothing, whatever x holds: only where
// x holds a number that is not finite does that take a branch for each factor.
template <int W> DEV void accumulate(Shared& shared, float (&sum)[4][W / 16], const Rows& x, int first, int width) {
  constexpr int LENGTH = SIDE * SIDE / W;
#pragma unroll 1
  for (int from = 0; from < SIDE; from += LENGTH) {
    bool odd = false;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < LENGTH * W / THREADS; i++) {
      int at = threadIdx.x + i * THREADS, row = at / W, column = first + at % W;
      bool inside = from + row < x.count && column < width;
      float value = inside ? read(x.at[(from + row) * x.stride + column]) : 0;
      odd |= !(fabsf(value) < INF);
      shared.x[at] = value;
    }
    odd = __syncthreads_or(odd);
#pragma unroll 2
    for (int t = 0; t < LENGTH; t++) {
      float4 f = *(const float4*)&shared.p[(from + t) * PITCH + 4 * ty()];
      float p[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
      for (int c = 0; c < W / 64; c++) {
        float4 g = *(const float4*)&shared.x[t * W + 64 * c + 4 * tx()];
        float y[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (!odd || !hidden(p[r])) sum[r][4 * c + e] = fmaf(p[r], y[e], sum[r][4 * c + e]);
      }
    }
  }
}
template <int W> DEV void clear(float (&sum)[4][W / 16]) {
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int e = 0; e < W / 16; e++) sum[r][e] = 0;
}

// Writes factor[r]·sum to the rows below `count` of a tensor.
template <int W> DEV void store(const Tensor& x, int batch, int head, int row, int count, const float (&sum)[4][W / 16],
                                const float (&factor)[4], int first, int width, bool wide) {
#pragma unroll
  for (int r = 0; r < 4; r++) {
    if (4 * ty() + r >= count) continue;
    i64 at = batch * x.batch + head * x.head + (row + 4 * ty() + r) * x.row + first;
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
DEV void store_pairs(const Call& c, const Task& task, const Tensor& x, int head, const float (&sum)[4][4]) {
  const Sequence s = c.sequences[task.first];
  int rows = task.sequences > 1 ? c.queries : s.queries, keys = task.sequences > 1 ? c.keys : s.keys;
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int i = task.row_tile * SIDE + 4 * ty() + r, j = task.key_tile * SIDE + 4 * tx() + e;
      if (i < rows && j < keys)
        ((element*)x.data)[s.batch * x.batch + head * x.head + (s.query_start + i) * x.row + s.key_start + j] = rounded(sum[r][e]);
    }
}
