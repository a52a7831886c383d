// Elements from one tensor to another of the same shape, each with strides of its own; columns that the source does
// not have are 0. Without a source a word is written everywhere.
//
// Compile-time: WORD, the bytes of an element: 2 or 4.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#if WORD == 2
typedef unsigned short word;
#else
typedef u32 word;
#endif
constexpr int ROWS = 8;  // of a block, all of one head

// A copy from `from`, or where that is 0 a fill with `fill`. Strides: batch, head, row, column; extents: of the
// target, but `columns`.
KERNEL_ARGS(Move)

extern "C" __global__ void __launch_bounds__(256) move(const __grid_constant__ Move m) {
  u32 tiles = (m.rows + ROWS - 1) / ROWS, row = blockIdx.x % tiles * ROWS, head = blockIdx.x / tiles, batch = head / m.heads;
  head -= batch * m.heads;
  u32 rows = min((u32)ROWS, m.rows - row);
  const word* from = m.from ? m.from + batch * m.from_strides[0] + head * m.from_strides[1] + row * m.from_strides[2] : 0;
  word* to = m.to + batch * m.to_strides[0] + head * m.to_strides[1] + row * m.to_strides[2];
  for (u64 t = threadIdx.x; t < (u64)rows * m.width; t += 256) {
    i64 r = t / m.width, c = t - r * m.width;
    word x = !from ? (word)m.fill : c < m.columns ? from[r * m.from_strides[2] + c * m.from_strides[3]] : 0;
    to[r * m.to_strides[2] + c * m.to_strides[3]] = x;
  }
}
