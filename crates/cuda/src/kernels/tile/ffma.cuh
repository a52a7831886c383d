// Products of tiles of 64 × 64 in f32 fused multiply-adds. Compile-time: R, the rows of a tile that a thread has: 8,
// or 4 where registers hold no more. Thread (y, x) = (t / 16, t % 16) has rows R·y .. R·y + R - 1 and columns 4x .. 4x
// + 3 of a product, and of an accumulator W columns wide every 64th group of 4.
//
// Operands lie in shared memory row by row, in slabs of DEPTH columns: one is copied while the other is multiplied.
constexpr int SIDE = 64, DEPTH = 16, THREADS = SIDE / R * 16;
constexpr int SLAB = SIDE * DEPTH + SIDE, FACTORS = SIDE * SIDE + SIDE;  // 4 numbers of padding behind every 4 rows

struct alignas(16) Shared {
  union {
    float slabs[2][4][SLAB];
    struct {
      float x[SIDE * SIDE];
      float p[FACTORS];  // [reduction][row]: of P or dS
    };
  };
};
DEV int ty() { return threadIdx.x / 16; }
DEV int tx() { return threadIdx.x % 16; }

// The number of the thread. If the compiler knew it, it would keep the address of every row in registers.
DEV int thread() { return opaque((int)threadIdx.x); }

// The numbers of a thread: of pairs, and sums of W columns.
using Pairs = float[R][4];
template <int W> using Sums = float[R][W / 16];
// The row of a thread's number, and the column in a tile of pairs.
DEV int row_of(int r) { return R * ty() + r; }
DEV int column_of(int e) { return 4 * tx() + e; }
// Calls f(number, r, e) for each number of a thread, row by row.
template <int N, class T, class F> DEV void each(T (&x)[R][N], F f) {
  UNROLL2(r, R, e, N) f(x[r][e], r, e);
}
template <int N> DEV void mul_rows(float (&x)[R][N], const float (&factor)[R]) {
  UNROLL2(r, R, e, N) x[r][e] *= factor[r];
}
template <int W> DEV void clear(Sums<W>& sum) { each(sum, [](float& x, int, int) { x = 0; }); }
// The sum, and the largest, over the 16 threads that share rows; NaN if one is.
template <class T> DEV T row_sum(T x) { return lane_sum<16>(x); }
DEV float row_max(float x) {
  UNROLL_ALL for (int n = 8; n; n /= 2) x = max_nan(x, __shfl_xor_sync(~0u, x, n));
  return x;
}

// Writes factor[r]·sum to the rows below `count` of a tensor.
template <int W, class F>
DEV void store(const Tensor& x, int batch, int head, int row, int count, const Sums<W>& sum, const F& factor, int first, int width, bool wide = false) {
  UNROLL(r, R) {
    if (row_of(r) >= count) continue;
    i64 at = batch * x.batch + head * x.head + (row + R * ty() + r) * x.row + first;
    UNROLL(i, W / 16) {
      int column = 64 * (i / 4) + 4 * tx() + i % 4;
      if (first + column >= width) continue;
      float value = fmaf(factor[r], sum[r][i], 0.0f);  // no -0: what nobody adds to is 0 under any scale
      if (wide) ((float*)x.data)[at + column] = value;
      else ((element*)x.data)[at + column] = rounded(value);
    }
  }
}

// Writes a tile of pairs to a tensor in the shape of the bias. Sequences that share one begin where the arrays begin.
DEV void store_pairs(const PairArgs& c, const Task& task, const Tensor& x, int head, const Pairs& sum) {
  const Sequence s = c.sequences[task.first];
  const int rows = task.sequences > 1 ? c.queries : s.queries, keys = task.sequences > 1 ? c.keys : s.keys;
  each(sum, [&](float y, int r, int e) {
    const int i = task.row_tile * SIDE + row_of(r), j = task.key_tile * SIDE + column_of(e);
    if (i >= rows || j >= keys) return;
    ((element*)x.data)[s.batch * x.batch + head * x.head + (s.query_start + i) * x.row + s.key_start + j] = rounded(y);
  });
}
