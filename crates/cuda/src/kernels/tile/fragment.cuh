// Products of tiles on the tensor cores, from sm_80 on: four warps, f32 sums. A warp owns the rows 16·M·warp .. of a
// product, as M fragments of 16 rows: thread `lane` has of fragment m the rows 16 m + lane/4 and 8 below, and of every
// 8 columns the two from 2 (lane % 4) on: x[m][column / 8][2·(row below) + column % 2].
constexpr int THREADS = 128, SIDE = 64;  // rows of the host's tiles
DEV int lane_id() { return threadIdx.x % 32; }
DEV int warp_id() { return threadIdx.x / 32; }
// The numbers of a thread in M fragments of N columns.
template <int M, int N> using Pairs = float[M][N / 8][4];
// Calls f(number, its row of 2 M, its column but for the thread's 2 (lane % 4)) for each number of M fragments.
template <int M, int J, class T, class F> DEV void each(T (&x)[M][J][4], F f) {
  UNROLL(i, M * J * 4)
    f(x[i / (4 * J)][i / 4 % J][i % 4], i / (4 * J) * 2 + i / 2 % 2, 8 * (i / 4 % J) + i % 2);
}
// The same of two fragments: f(number, number of the other, row, column).
template <int M, int J, class F> DEV void each(float (&x)[M][J][4], float (&y)[M][J][4], F f) {
  UNROLL(i, M * J * 4)
    f(x[i / (4 * J)][i / 4 % J][i % 4], y[i / (4 * J)][i / 4 % J][i % 4], i / (4 * J) * 2 + i / 2 % 2, 8 * (i / 4 % J) + i % 2);
}
// Calls f(number, its column) for each number of a thread in a row.
template <int M, int J, class F> DEV void each_in_row(float (&x)[M][J][4], int r, F f) {
  UNROLL(j, 2 * J) f(x[r / 2][j / 2][2 * (r & 1) + j % 2], 8 * (j / 2) + j % 2);
}
template <int M, int J, class F> DEV void mul_rows(float (&x)[M][J][4], const F& factor) {
  each(x, [&](float& y, int r, int) { y *= factor[r]; });
}
// Adds zeros to zeros, or NaN where one of the numbers is not finite.
template <int M, int J> DEV void add_zeros(float (&zero)[2], const float (&x)[M][J][4]) {
  UNROLL(i, M * J * 4) zero[i % 2] = fmaf(x[i / (4 * J)][i / 4 % J][i % 4], 0.0f, zero[i % 2]);
}
DEV bool are_zero(const float (&zero)[2]) { return zero[0] + zero[1] == 0; }
template <int M, int N> DEV void clear(float (&x)[M][N / 8][4]) { each(x, [](float& y, int, int) { y = 0; }); }
// Row r of this thread, of 2·M.
template <int M> DEV int row_of(int r) { return (warp_id() * M + r / 2) * 16 + r % 2 * 8 + lane_id() / 4; }

// Two results side by side.
#if STORAGE
typedef u32 Packed;
DEV Packed pack_pair(float even, float odd) { return pack(even, odd); }
#else
typedef float2 Packed;
DEV Packed pack_pair(float even, float odd) { return make_float2(even, odd); }
#endif
// Writes factor[r]·sum to the rows below `count` of a tensor, its columns from `first` on.
template <int M, int W, class F> DEV void store(const Tensor& x, int batch, int head, int row, int count, const float (&sum)[M][W / 8][4],
                                                const F& factor, int first, int width) {
  constexpr int BYTES = sizeof(element);
  const bool pairs = ((u64)x.data | (u64)(BYTES * x.batch) | (u64)(BYTES * x.head) | (u64)(BYTES * x.row) | (u64)(BYTES * width)) % (2 * BYTES) == 0;
  UNROLL(r, 2 * M) {
    int i = row_of<M>(r);
    if (i >= count) continue;
    element* to = (element*)x.data + batch * x.batch + head * x.head + (row + i) * x.row + first;
    UNROLL(j, W / 8) {
      int column = 8 * j + 2 * (lane_id() % 4);
      // No -0: what nobody adds to is 0 under any scale.
      float even = fmaf(factor[r], sum[r / 2][j][2 * (r & 1)], 0.0f), odd = fmaf(factor[r], sum[r / 2][j][2 * (r & 1) + 1], 0.0f);
      if (pairs && first + column < width) *(Packed*)(to + column) = pack_pair(even, odd);
      if (!pairs && first + column < width) to[column] = rounded(even);
      if (!pairs && first + column + 1 < width) to[column + 1] = rounded(odd);
    }
  }
}
// Writes f32 to the rows below `count` of a tensor, its columns from `first` on.
template <int M, int W> DEV void store_wide(const Tensor& x, int batch, int head, int row, int count, const float (&sum)[M][W / 8][4],
                                            int first, int width) {
  UNROLL(r, 2 * M) {
    float* to = (float*)x.data + batch * x.batch + head * x.head + (row + row_of<M>(r)) * x.row + first;
    UNROLL(j, W / 4) {
      const int column = 8 * (j / 2) + 2 * (lane_id() % 4) + j % 2;
      if (row_of<M>(r) < count && first + column < width) to[column] = sum[r / 2][j / 2][2 * (r & 1) + j % 2];
    }
  }
}
