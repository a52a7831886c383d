// Products of tiles of 16-bit elements. A panel of a tile has 64 columns.
DEV void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {  // d (16 × 8) += a (16 × 16)·b (16 × 8)
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// product = a·bᵀ of tiles W columns wide: 64·M rows of a, N rows of b.
template <int M, int N, int W> DEV void products(float (&product)[M][N / 8][4], u32 a, u32 b) {
  const int lane = lane_id();
  // The begin of the lane's rows, and its swizzle: 2i + 0 or 1 swizzled is 2i xor the swizzled 0 or 1.
  const u32 rows_a = a + (warp_id() * M * 16 + lane % 16) * 128, swizzle_a = (lane / 16 ^ lane % 8) << 4;
  const u32 rows_b = b + (lane / 16 * 8 + lane % 8) * 128, swizzle_b = (lane / 8 % 2 ^ lane % 8) << 4;
  clear<M, N>(product);
  UNROLL(i, W / 16) {
    u32 x[M][4];
    UNROLL(m, M) load_blocks(rows_a + i / 4 * 64 * M * 128 + m * 2048 + (2 * i % 8 << 4 ^ swizzle_a), x[m]);
    UNROLL(j, N / 16) {
      u32 y[4];
      load_blocks(rows_b + i / 4 * N * 128 + j * 2048 + (2 * i % 8 << 4 ^ swizzle_b), y);
      UNROLL(m, M) multiply(product[m][2 * j], x[m], y[0], y[1]), multiply(product[m][2 * j + 1], x[m], y[2], y[3]);
    }
  }
}

// Rounds factors to the storage type: the left operand of `accumulate`.
template <int M, int K> using Factors = u32[M][K / 8][2];
template <int M, int K> DEV void pack_all(Factors<M, K>& to, const float (&p)[M][K / 8][4]) {
  UNROLL(i, M * K / 4) {
    const float (&x)[4] = p[i / (K / 4)][i / 2 % (K / 8)];
    to[i / (K / 4)][i / 2 % (K / 8)][i % 2] = pack(x[2 * (i % 2)], x[2 * (i % 2) + 1]);
  }
}
// sum += p·x: x a tile of K rows, W columns wide.
template <int M, int K, int W> DEV void accumulate(float (&sum)[M][W / 8][4], const Factors<M, K>& p, u32 x) {
  const int lane = lane_id();
  const u32 rows = x + (lane / 8 % 2 * 8 + lane % 8) * 128, swizzle = (lane / 16 ^ lane % 8) << 4;
  UNROLL(i, K / 16) {
    u32 a[M][4];
    UNROLL(m, M)
      UNROLL(e, 4) a[m][e] = p[m][2 * i + e / 2][e % 2];
    UNROLL(j, W / 16) {
      u32 y[4];
      load_blocks_transposed(rows + j / 4 * K * 128 + i * 2048 + (2 * j % 8 << 4 ^ swizzle), y);
      UNROLL(m, M) multiply(sum[m][2 * j], a[m], y[0], y[1]), multiply(sum[m][2 * j + 1], a[m], y[2], y[3]);
    }
  }
}
