// Rows with numbers that are not finite, and what they add to accumulators pair by pair: of `mma.sync`, and of
// `wgmma`.
DEV bool adds(float factor, float y) { return !(fabsf(y) < INF); }
// True if a row has such a number in its first `width` columns: every warp asks for the same row.
DEV bool is_odd(const element* x, int width) {
  bool odd = false;
  for (int e = lane_id(); e < width; e += 32) odd |= (x[e] & 0x7fff) >= TOP;
  return __any_sync(~0u, odd);
}
// Adds factor[r]·x, the numbers of x that are not finite alone. Every warp comes here with the same x.
template <int M, int W> DEV void add_odd(float (&sum)[M][W / 8][4], const float (&factor)[2 * M], const bool (&seen)[2 * M], const element* x,
                                         int width) {
  UNROLL(i, W / 8)
    UNROLL(e, 2) {
      int column = 8 * i + 2 * (lane_id() % 4) + e;
      float y = column < width ? read(x[column]) : 0;
      UNROLL(r, 2 * M)
        if (seen[r] && adds(factor[r], y)) sum[r / 2][i][2 * (r & 1) + e] = fmaf(factor[r], y, sum[r / 2][i][2 * (r & 1) + e]);
    }
}
// The product of two rows: the four threads of a row have a part each.
DEV float product_of(const element* x, const element* y, int width) {
  float sum = 0;
  NO_UNROLL for (int e = lane_id() % 4; e < width; e += 4) sum = fmaf(read(x[e]), read(y[e]), sum);
  return quad_sum(sum);
}
