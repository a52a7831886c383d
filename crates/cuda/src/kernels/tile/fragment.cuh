// Products of tiles on the tensor cores, from sm_80 on: four warps, f32 sums. A warp owns the rows 16·M·warp .. of a
// product, as M fragments of 16 rows: thread `lane` has of fragment m the rows 16 m + lane/4 and 8 below, and of every
// 8 columns the two from 2 (lane % 4) on: x[m][column / 8][2·(row below) + column % 2].
constexpr int THREADS = 128, SIDE = 64;  // rows of the host's tiles
DEV int lane_id() { return threadIdx.x % 32; }
DEV int warp_id() { return threadIdx.x / 32; }
DEV int own_column() { return 2 * (lane_id() % 4); }  // the first of a thread
// The numbers of a thread in M fragments of N columns: of pairs, or sums.
template <int M, int N> using Pairs = float[M][N / 8][4];
template <int M, int N> using Sums = Pairs<M, N>;
// Calls f(number, its row of 2 M, its column behind the thread's first) for each number of M fragments.
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
template <int M, int N> DEV void clear(Sums<M, N>& x) { each(x, [](float& y, int, int) { y = 0; }); }
// Row r of this thread, of 2·M.
template <int M> DEV int row_of(int r) { return (warp_id() * M + r / 2) * 16 + r % 2 * 8 + lane_id() / 4; }
// d (16 × 8) += a·b: a (16 × 16) and b (16 × 8), or half as many of tf32.
#define MMA_SYNC(shape) \
  DEV void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { \
    asm volatile("mma.sync.aligned." shape ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
  }
// The begin of a lane's rows in tiles of 64·M rows and of N, and its swizzle: piece 2i + 0 or 1 swizzled is 2i xor the
// swizzled 0 or 1. Blocks: of a panel, of 16 rows, from a piece on.
template <int M> struct LanePlace {
  u32 rows_a, rows_b, swizzle_a, swizzle_b;
  METHOD LanePlace(u32 a, u32 b) {
    const int lane = lane_id();
    rows_a = a + (warp_id() * M * 16 + lane % 16) * 128, swizzle_a = (lane / 16 ^ lane % 8) << 4;
    rows_b = b + (lane / 16 * 8 + lane % 8) * 128, swizzle_b = (lane / 8 % 2 ^ lane % 8) << 4;
  }
  METHOD u32 a(int panel, int block, int piece) const { return rows_a + panel * 64 * M * 128 + block * 2048 + (piece % 8 << 4 ^ swizzle_a); }
  template <int N> METHOD u32 b(int panel, int block, int piece) const { return rows_b + panel * N * 128 + block * 2048 + (piece % 8 << 4 ^ swizzle_b); }
};

// Two results side by side.
#if STORAGE
typedef u32 Packed;
DEV Packed pack_pair(float even, float odd) { return pack(even, odd); }
#else
typedef float2 Packed;
DEV Packed pack_pair(float even, float odd) { return make_float2(even, odd); }
#endif
// Writes factor[r]·sum to the rows below `count` of a tensor, its columns from `first` on.
template <int M, int W, class F>
DEV void store(const Tensor& x, int batch, int head, int row, int count, const Sums<M, W>& sum, const F& factor, int first, int width) {
  constexpr int BYTES = sizeof(element);
  const bool pairs = ((u64)x.data | (u64)(BYTES * x.batch) | (u64)(BYTES * x.head) | (u64)(BYTES * x.row) | (u64)(BYTES * width)) % (2 * BYTES) == 0;
  UNROLL(r, 2 * M) {
    int i = row_of<M>(r);
    if (i >= count) continue;
    element* to = (element*)x.data + batch * x.batch + head * x.head + (row + i) * x.row + first;
    UNROLL(j, W / 8) {
      int column = 8 * j + own_column();
      // No -0: what nobody adds to is 0 under any scale.
      float even = fmaf(factor[r], sum[r / 2][j][2 * (r & 1)], 0.0f), odd = fmaf(factor[r], sum[r / 2][j][2 * (r & 1) + 1], 0.0f);
      if (pairs && first + column < width) *(Packed*)(to + column) = pack_pair(even, odd);
      if (!pairs && first + column < width) to[column] = rounded(even);
      if (!pairs && first + column + 1 < width) to[column + 1] = rounded(odd);
    }
  }
}
// Writes f32 to the rows below `count` of a tensor, its columns from `first` on.
template <int M, int W>
DEV void store_wide(const Tensor& x, int batch, int head, int row, int count, const Sums<M, W>& sum, int first, int width) {
  UNROLL(r, 2 * M) {
    float* to = (float*)x.data + batch * x.batch + head * x.head + (row + row_of<M>(r)) * x.row + first;
    UNROLL(j, W / 4) {
      const int column = 8 * (j / 2) + own_column() + j % 2;
      if (row_of<M>(r) < count && first + column < width) to[column] = sum[r / 2][j / 2][2 * (r & 1) + j % 2];
    }
  }
}
