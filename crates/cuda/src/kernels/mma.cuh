// Products of tiles of 16-bit elements. A panel of a tile has 64 columns.
#if STORAGE == 1
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif

// ---- feed: cp.async --------------------------------------------------------------------------------------------------
// N rows of W columns, those below `width`; what is not there is 0. WHOLE: rows begin and end at multiples of 16 bytes.
template <int N, int W> DEV void load_tile(u32 to, const Rows& x, int width) {
  constexpr int LANES = W / 8, STEP = THREADS / LANES;  // threads of a row, rows at once
  const int first = threadIdx.x / LANES, piece = threadIdx.x % LANES;
  const element* from = x.at + first * x.stride + 8 * piece;
#if WHOLE
  const u32 here = place<N>(to, first, piece);
  const int count = 8 * piece < width ? x.count - first : 0;
#pragma unroll
  for (int i = 0; i < N / STEP; i++, from += STEP * x.stride) {  // the swizzle repeats every 8 rows
    bool there = i * STEP < count;
    u32 at = STEP % 8 ? place<N>(to, first + i * STEP, piece) : here + i * STEP * 128;
    copy_16(at, there ? from : x.at, there);
  }
#else
#pragma unroll 1
  for (int row = first; row < N; row += STEP, from += STEP * x.stride) {
#pragma unroll
    for (int e = 0; e < 8; e++) {
      u16 value = row < x.count && 8 * piece + e < width ? from[e] : (u16)0;
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(place<N>(to, row, piece) + 2 * e), "h"(value) : "memory");
    }
  }
#endif
}

// ---- multiply: mma.sync ----------------------------------------------------------------------------------------------
DEV void load_transposed(u32 from, u32 (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}
DEV void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {  // d (16 × 8) += a (16 × 16)·b (16 × 8)
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV u32 pack(float low, float high) { u32 x; asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low)); return x; }

// product = a·bᵀ of tiles W columns wide: 64·M rows of a, N rows of b.
template <int M, int N, int W> DEV void products(float (&product)[M][N / 8][4], u32 a, u32 b) {
  const int lane = lane_id();
  // Where the lane's rows begin, and its swizzle: 2i + 0 or 1 swizzled is 2i xor the swizzled 0 or 1.
  const u32 rows_a = a + (warp_id() * M * 16 + lane % 16) * 128, swizzle_a = (lane / 16 ^ lane % 8) << 4;
  const u32 rows_b = b + (lane / 16 * 8 + lane % 8) * 128, swizzle_b = (lane / 8 % 2 ^ lane % 8) << 4;
  clear<M, N>(product);
#pragma unroll
  for (int i = 0; i < W / 16; i++) {
    u32 x[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) load_blocks(rows_a + i / 4 * 64 * M * 128 + m * 2048 + (2 * i % 8 << 4 ^ swizzle_a), x[m]);
#pragma unroll
    for (int j = 0; j < N / 16; j++) {
      u32 y[4];
      load_blocks(rows_b + i / 4 * N * 128 + j * 2048 + (2 * i % 8 << 4 ^ swizzle_b), y);
#pragma unroll
      for (int m = 0; m < M; m++) multiply(product[m][2 * j], x[m], y[0], y[1]), multiply(product[m][2 * j + 1], x[m], y[2], y[3]);
    }
  }
}

// Rounds factors to the storage type: the left operand of `accumulate`.
template <int M, int K> using Factors = u32[M][K / 8][2];
template <int M, int K> DEV void pack_all(Factors<M, K>& to, const float (&p)[M][K / 8][4]) {
#pragma unroll
  for (int i = 0; i < M * K / 4; i++) {
    const float (&x)[4] = p[i / (K / 4)][i / 2 % (K / 8)];
    to[i / (K / 4)][i / 2 % (K / 8)][i % 2] = pack(x[2 * (i % 2)], x[2 * (i % 2) + 1]);
  }
}
// sum += p·x: x a tile of K rows, W columns wide.
template <int M, int K, int W> DEV void accumulate(float (&sum)[M][W / 8][4], const Factors<M, K>& p, u32 x) {
  const int lane = lane_id();
  const u32 rows = x + (lane / 8 % 2 * 8 + lane % 8) * 128, swizzle = (lane / 16 ^ lane % 8) << 4;
#pragma unroll
  for (int i = 0; i < K / 16; i++) {
    u32 a[M][4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int e = 0; e < 4; e++) a[m][e] = p[m][2 * i + e / 2][e % 2];
#pragma unroll
    for (int j = 0; j < W / 16; j++) {
      u32 y[4];
      load_transposed(rows + j / 4 * K * 128 + i * 2048 + (2 * j % 8 << 4 ^ swizzle), y);
#pragma unroll
      for (int m = 0; m < M; m++) multiply(sum[m][2 * j], a[m], y[0], y[1]), multiply(sum[m][2 * j + 1], a[m], y[2], y[3]);
    }
  }
}

// ---- numbers that are not finite -------------------------------------------------------------------------------------
// A hidden factor adds nothing, whatever it multiplies, but 0·inf is NaN. Where a tile hides a pair, numbers that are not
// finite are 0 for the tensor cores; what they add to the pairs that see them follows after the last tile, by `add_odd`.
DEV bool adds(float factor, float y) { return !(fabsf(y) < INF); }
constexpr u32 TOP = STORAGE == 1 ? 0x7f80 : 0x7c00;  // the exponent of infinities and NaN
DEV u32 finite(u32 x) {  // the bits of a pair that are kept
  return ((x & 0x7fff) < TOP ? 0xffff : 0) | ((x >> 16 & 0x7fff) < TOP ? 0xffff0000 : 0);
}
// Puts 0 in place of such numbers in a tile that all have loaded and none has read by `accumulate`; whether there was one.
template <int N, int W> DEV bool clear_odd(u32 tile) {
  bool odd = false;
#pragma unroll 1
  for (int i = threadIdx.x; i < N * W / 2; i += THREADS) {
    u32 x = load_word(tile + 4 * i), keep = finite(x);
    if (keep == ~0u) continue;
    odd = true;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + 4 * i), "r"(x & keep) : "memory");
  }
  return odd;
}
// Whether a row of a tensor has one in the first `width` columns: every warp asks for the same row.
DEV bool is_odd(const element* x, int width) {
  bool odd = false;
  for (int e = lane_id(); e < width; e += 32) odd |= (x[e] & 0x7fff) >= TOP;
  return __any_sync(~0u, odd);
}

// ---- results ---------------------------------------------------------------------------------------------------------
typedef u32 Packed;
DEV Packed pack_pair(float even, float odd) { return pack(even, odd); }
