// Copies of tiles for the tensor cores from sm_80 on, by all threads of a block.
//
// N rows of W columns, those below `width`; what is not there is 0. WHOLE: rows begin and end at multiples of 16
// bytes.
#if STORAGE
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
    UNROLL(e, 8) {
      u16 value = row < x.count && 8 * piece + e < width ? from[e] : (u16)0;
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(place<N>(to, row, piece) + 2 * e), "h"(value) : "memory");
    }
  }
#endif
}
#else
template <int N, int W> DEV void load_tile(u32 to, const Rows& x, int width) {
  constexpr int LANES = W / 4, STEP = THREADS / LANES;  // threads of a row, rows at once
  const int first = threadIdx.x / LANES, piece = threadIdx.x % LANES;
  const element* from = x.at + first * x.stride + 4 * piece;
#if WHOLE
#pragma unroll
  for (int i = 0; i < N / STEP; i++, from += STEP * x.stride) {
    bool there = first + i * STEP < x.count && 4 * piece < width;
    copy_16(place<N>(to, first + i * STEP, piece), there ? from : x.at, there);
  }
#else
#pragma unroll 1
  for (int row = first; row < N; row += STEP, from += STEP * x.stride) {
    UNROLL(e, 4) {
      bool there = row < x.count && 4 * piece + e < width;
      copy_4(place<N>(to, row, piece) + 4 * e, there ? from + e : x.at, there);
    }
  }
#endif
}
#endif
