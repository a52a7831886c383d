// Products of tiles of 16-bit elements. A panel of a tile has 64 columns.
MMA_SYNC("m16n8k16.row.col.f32." TYPE "." TYPE)

// product = a·bᵀ of tiles W columns wide: 64·M rows of a, N rows of b.
template <int M, int N, int W> DEV void products(Pairs<M, N>& product, u32 a, u32 b) {
  const LanePlace<M> at(a, b);
  clear<M, N>(product);
  UNROLL(i, W / 16) {
    u32 x[M][4];
    UNROLL(m, M) load_blocks(at.a(i / 4, m, 2 * i), x[m]);
    UNROLL(j, N / 16) {
      u32 y[4];
      load_blocks(at.template b<N>(i / 4, j, 2 * i), y);
      UNROLL(m, M) multiply(product[m][2 * j], x[m], y[0], y[1]), multiply(product[m][2 * j + 1], x[m], y[2], y[3]);
    }
  }
}

// Rounds factors to the storage type: the left operand of `accumulate`.
template <int M, int K> using Factors = u32[M][K / 8][2];
template <int M, int K> DEV void pack_all(Factors<M, K>& to, const Pairs<M, K>& p) {
  UNROLL(i, M * K / 4) {
    const float (&x)[4] = p[i / (K / 4)][i / 2 % (K / 8)];
    to[i / (K / 4)][i / 2 % (K / 8)][i % 2] = pack(x[2 * (i % 2)], x[2 * (i % 2) + 1]);
  }
}
// sum += p·x: x a tile of K rows, W columns wide.
template <int M, int K, int W> DEV void accumulate(Sums<M, W>& sum, const Factors<M, K>& p, u32 x) {
  const int lane = lane_id();
  const u32 rows = x + (lane / 8 % 2 * 8 + lane % 8) * 128, swizzle = (lane / 16 ^ lane % 8) << 4;
  UNROLL(i, K / 16) {
    u32 a[M][4];
    UNROLL2(m, M, e, 4) a[m][e] = p[m][2 * i + e / 2][e % 2];
    UNROLL(j, W / 16) {
      u32 y[4];
      load_blocks_transposed(rows + j / 4 * K * 128 + i * 2048 + (2 * j % 8 << 4 ^ swizzle), y);
      UNROLL(m, M) multiply(sum[m][2 * j], a[m], y[0], y[1]), multiply(sum[m][2 * j + 1], a[m], y[2], y[3]);
    }
  }
}
