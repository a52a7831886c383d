// Rows whose parts lie in warps: what numbers that are not finite add to them, and results.

// Adds factor[r]·x, the numbers of x that are not finite alone. Every warp comes here with the same x.
template <int M, int W> DEV void add_odd(float (&sum)[M][W / 8][4], const float (&factor)[2 * M], const bool (&seen)[2 * M], const element* x, int width) {
#pragma unroll
  for (int i = 0; i < W / 8; i++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int column = 8 * i + 2 * (lane_id() % 4) + e;
      float y = column < width ? read(x[column]) : 0;
#pragma unroll
      for (int r = 0; r < 2 * M; r++)
        if (seen[r] && adds(factor[r], y)) sum[r / 2][i][2 * (r & 1) + e] = fmaf(factor[r], y, sum[r / 2][i][2 * (r & 1) + e]);
    }
}
// The product of two rows: the four threads of a row have a part each.
DEV float product_of(const element* x, const element* y, int width) {
  float sum = 0;
  for (int e = lane_id() % 4; e < width; e += 4) sum = fmaf(read(x[e]), read(y[e]), sum);
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

// ---- rows ------------------------------------------------------------------------------------------------------------
DEV float quad_max(float x) { x = fmaxf(x, __shfl_xor_sync(~0u, x, 1)); return fmaxf(x, __shfl_xor_sync(~0u, x, 2)); }
DEV float quad_sum(float x) { x += __shfl_xor_sync(~0u, x, 1); return x + __shfl_xor_sync(~0u, x, 2); }
// Row r of this thread, of 2·M.
template <int M> DEV int row_of(int r) { return (warp_id() * M + r / 2) * 16 + r % 2 * 8 + lane_id() / 4; }

// Writes factor[r]·sum to the rows below `count` of a tensor, its columns from `first` on.
template <int M, int W> DEV void store(const Tensor& x, int batch, int head, int row, int count, const float (&sum)[M][W / 8][4],
                                       const float (&factor)[2 * M], int first, int width) {
  constexpr int BYTES = sizeof(element);
  const bool pairs = ((u64)x.data | (u64)(BYTES * x.batch) | (u64)(BYTES * x.head) | (u64)(BYTES * x.row) | (u64)(BYTES * width)) % (2 * BYTES) == 0;
#pragma unroll
  for (int r = 0; r < 2 * M; r++) {
    int i = row_of<M>(r);
    if (i >= count) continue;
    element* to = (element*)x.data + batch * x.batch + head * x.head + (row + i) * x.row + first;
#pragma unroll
    for (int j = 0; j < W / 8; j++) {
      int column = 8 * j + 2 * (lane_id() % 4);
      // No -0: what nobody adds to is 0 under any scale.
      float even = fmaf(factor[r], sum[r / 2][j][2 * (r & 1)], 0.0f), odd = fmaf(factor[r], sum[r / 2][j][2 * (r & 1) + 1], 0.0f);
      if (pairs && first + column < width) *(Packed*)(to + column) = pack_pair(even, odd);
      if (!pairs && first + column < width) to[column] = rounded(even);
      if (!pairs && first + column + 1 < width) to[column + 1] = rounded(odd);
    }
  }
}
