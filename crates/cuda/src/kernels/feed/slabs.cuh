// Copies of slabs of operands for fused multiply-adds, and of rows of vectors.

// True if rows begin at multiples of 16 bytes and hold whole vectors of f32.
template <class T> DEV bool whole(const RowsOf<T>& rows, int width) {
  return sizeof(T) == 4 && !((u64)rows.at % 16) && !(rows.stride % 4) && !(width % 4);
}

// Four numbers of a row from `column` on, of which those behind `width` and those of rows behind the last are 0.
template <class T> DEV void copy_four(float* to, const RowsOf<T>& rows, int row, int column, int width, bool whole) {
  if (whole) {
    bool inside = row < rows.count && column < width;
    u32 at = (u32)__cvta_generic_to_shared(to);
    const T* from = inside ? rows.at + row * rows.stride + column : rows.at;
    copy_16(at, from, inside);
    return;
  }
  float x[4];
  UNROLL(i, 4)
    x[i] = row < rows.count && column + i < width ? read(rows.at[row * rows.stride + column + i]) : 0;
  *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
}

// DEPTH columns from `first` on of 64 rows. Rows 2k and 2k + 1 share a line of 32 banks.
DEV int place(int row, int column) { return row / 2 * 32 + row / 4 * 4 + row % 2 * 16 + column; }
template <class T> DEV void copy_slab(float* to, const RowsOf<T>& rows, int first, int width) {
  const bool whole = ::whole(rows, width);
  const int t = thread(), column = t % 4 * 4;
  UNROLL(i, SIDE * DEPTH / 4 / THREADS) {
    int row = t / 4 + i * (THREADS / 4);
    copy_four(&to[place(row, column)], rows, row, first + column, width, whole);
  }
}
