// Copies of tiles for the tensor cores from sm_80 on, by all threads of a block.
#if STORAGE
DEV void copy_element(u32 to, const element* from, bool there, const element*) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(there ? *from : (u16)0) : "memory");
}
#else
DEV void copy_element(u32 to, const element* from, bool there, const element* begin) { copy_4(to, there ? from : begin, there); }
#endif
// N rows of W columns, those below `width`; others are 0. WHOLE: rows begin and end at multiples of 16 bytes.
template <int N, int W> DEV void load_tile(u32 to, const Rows& x, int width) {
  constexpr int PIECE = 16 / sizeof(element), LANES = W / PIECE, STEP = THREADS / LANES;  // threads of a row, rows at once
  const int first = threadIdx.x / LANES, piece = threadIdx.x % LANES;
  const element* from = x.at + first * x.stride + PIECE * piece;
#if WHOLE
  const u32 here = place<N>(to, first, piece);
  const int count = PIECE * piece < width ? x.count - first : 0;
  UNROLL_ALL for (int i = 0; i < N / STEP; i++, from += STEP * x.stride) {  // the swizzle repeats every 8 rows
    bool there = i * STEP < count;
    u32 at = STEP % 8 ? place<N>(to, first + i * STEP, piece) : here + i * STEP * 128;
    copy_16(at, there ? from : x.at, there);
  }
#else
  NO_UNROLL for (int row = first; row < N; row += STEP, from += STEP * x.stride)
    UNROLL(e, PIECE)
      copy_element(place<N>(to, row, piece) + sizeof(element) * e, from + e, row < x.count && PIECE * piece + e < width, x.at);
#endif
}
