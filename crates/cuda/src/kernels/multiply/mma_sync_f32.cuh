// Products of tiles of f32, with sums in f32. A panel of a tile has 32 columns.
//
// Tiles lie in shared memory as f32. A factor is rounded to tf32, or split into two bf16, when it is read into
// registers: four times for a number that four warps read, but copies stay asynchronous and take no more memory. P and
// dS stay in registers: of 16 terms of a sum a thread multiplies those that it has, and reads the rows of v (k, q,
// dout) that go with them. Walked tiles have 32 rows: all fit 99 KiB, and with D and E up to 128 two blocks a
// multiprocessor.
//
// Infinities have no two parts, bf16 rounds numbers next to the largest f32 to infinity, and the rounding to tf32
// overflows from 2^115 on: a product that is not finite may be of finite numbers, and raises a flag.
//
// Compile-time: BF16X3, what is multiplied of a factor:  (docs/numerics.md)
//   0   the factor rounded to tf32, which has 11 bits
//   1   high + low, both bf16: high·high, high·low and low·high, the small products first, without low·low

#if BF16X3
constexpr int TERMS = 3;
constexpr int LEFT[TERMS] = {1, 0, 0}, RIGHT[TERMS] = {0, 1, 0};  // parts: high is 0, low 1
MMA_SYNC("m16n8k16.row.col.f32.bf16.bf16")
DEV u32 pack(float low, float high) { u32 x; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low)); return x; }
// Two factors side by side as high + low. The difference is exact.
DEV void split(float x, float y, u32& high, u32& low) {
  high = pack(x, y);
  low = pack(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}
#else
constexpr int TERMS = 2;
constexpr int LEFT[TERMS] = {0, 1}, RIGHT[TERMS] = {0, 1};  // the first and the second half of 16 terms
MMA_SYNC("m16n8k8.row.col.f32.tf32.tf32")
// x rounded to 11 bits: 8193·x is rounded to a multiple of 2^-10 of the power of 2 below x, and so is what is left.
// Two fused multiply-adds, where cvt.rna.tf32 is four other instructions on sm_90; infinities and what is near them
// become NaN or infinite.
DEV u32 narrow(float x) { return __float_as_uint(fmaf(x, -8192.0f, fmaf(x, 8192.0f, x))); }
#endif

// A thread's factors of 16 terms, in two steps of 8; of each step it has two terms, any two that no other thread of
// its row has, so long as both factors take the same. Of the left factor two rows.
struct Left { u32 x[2][4]; };
struct Right { u32 x[2][2]; };
DEV Left left(const float (&x)[2][4]) {  // of each step the first term of both rows, then the second
  Left y;
  UNROLL(s, 2) {
#if BF16X3
    split(x[s][0], x[s][2], y.x[0][2 * s], y.x[1][2 * s]), split(x[s][1], x[s][3], y.x[0][2 * s + 1], y.x[1][2 * s + 1]);
#else
    UNROLL(e, 4) y.x[s][e] = narrow(x[s][e]);
#endif
  }
  return y;
}
DEV Right right(const float (&x)[2][2]) {
  Right y;
  UNROLL(s, 2) {
#if BF16X3
    split(x[s][0], x[s][1], y.x[0][s], y.x[1][s]);
#else
    y.x[s][0] = narrow(x[s][0]), y.x[s][1] = narrow(x[s][1]);
#endif
  }
  return y;
}

// Computes elements of a product that are not finite once more, by fused multiply-adds, where no flag helps: for
// dbias. The tiles are those of `products`.
template <int M, int N, int W> DEV void mend(Pairs<M, N>& product, u32 a, u32 b) {
  static_assert(M * N <= 64, "a bit for each element of a thread");
  u32 odd = 0;
  UNROLL(e, M * N / 2)
    if (!is_finite(product[e / (N / 2)][e / 4 % (N / 8)][e % 4])) odd |= 1u << e;
  NO_UNROLL for (; odd; odd &= odd - 1) {
    const int e = __ffs(odd) - 1, row = (warp_id() * M + e / (N / 2)) * 16 + e % 4 / 2 * 8 + lane_id() / 4;
    const int column = e / 4 % (N / 8) * 8 + own_column() + e % 2;
    float sum = 0;
    NO_UNROLL for (int i = 0; i < W; i++)
      sum = fmaf(load_float(place<64 * M>(a, row, i / 4) + i % 4 * 4), load_float(place<N>(b, column, i / 4) + i % 4 * 4), sum);
    UNROLL(t, M * N / 2)
      if (t == e) product[t / (N / 2)][t / 4 % (N / 8)][t % 4] = sum;
  }
}

// product = a·bᵀ of tiles W columns wide: 64·M rows of a, N rows of b.
template <int M, int N, int W> DEV void products(Pairs<M, N>& product, u32 a, u32 b) {
  const LanePlace<M> at(a, b);
  clear<M, N>(product);
  UNROLL(i, W / 16) {
    Left x[M];
    Right y[N / 8];
    UNROLL(m, M) {
      float z[2][4];
      UNROLL(s, 2) {
        u32 w[4];
        load_blocks(at.a(i / 2, m, 4 * i + 2 * s), w);
        UNROLL(e, 4) z[s][e] = __uint_as_float(w[e]);
      }
      x[m] = left(z);
    }
    UNROLL(j, N / 16) {
      float z[2][2][2];
      UNROLL(s, 2) {
        u32 w[4];
        load_blocks(at.template b<N>(i / 2, j, 4 * i + 2 * s), w);
        UNROLL(e, 4) z[e / 2][s][e % 2] = __uint_as_float(w[e]);
      }
      y[2 * j] = right(z[0]), y[2 * j + 1] = right(z[1]);
    }
    UNROLL2(t, TERMS, j, N / 8)
      UNROLL(m, M) multiply(product[m][j], x[m].x[LEFT[t]], y[j].x[RIGHT[t]][0], y[j].x[RIGHT[t]][1]);
  }
}

// The left operand of `accumulate`: factors as they are.
template <int M, int K> using Factors = float[M][K / 8][4];
template <int M, int K> DEV void pack_all(Factors<M, K>& to, const Pairs<M, K>& p) {
  UNROLL(i, M * K / 2) to[i / (K / 2)][i / 4 % (K / 8)][i % 4] = p[i / (K / 2)][i / 4 % (K / 8)][i % 4];
}
// sum += p·x: x a tile of K rows, W columns wide. The terms of a thread are the columns of p that it has.
template <int M, int K, int W> DEV void accumulate(Sums<M, W>& sum, const Factors<M, K>& p, u32 x) {
  const int lane = lane_id(), row = lane % 4 * 2, column = lane / 4;
  u32 from[2];  // of both terms the row, with the swizzled piece of the column
  UNROLL(e, 2) from[e] = x + (row + e) * 128 + column % 4 * 4;
  const u32 swizzle[2] = {(u32)(column / 4 ^ row) << 4, (u32)(column / 4 ^ (row + 1)) << 4};
  UNROLL(i, K / 16) {
    Left a[M];
    UNROLL(m, M) {
      float z[2][4];
      UNROLL(e, 8) z[e / 4][e % 4] = p[m][2 * i + e / 4][e % 2 * 2 + e % 4 / 2];
      a[m] = left(z);
    }
    UNROLL(panel, W / 32) {
      Right y[4];
      UNROLL(j, 4) {
        float z[2][2];
        UNROLL(e, 4) z[e / 2][e % 2] = load_float(from[e % 2] + panel * K * 128 + (16 * i + 8 * (e / 2)) * 128 + (2 * j << 4 ^ swizzle[e % 2]));
        y[j] = right(z);
      }
      UNROLL2(t, TERMS, j, 4)
        UNROLL(m, M) multiply(sum[m][4 * panel + j], a[m].x[LEFT[t]], y[j].x[RIGHT[t]][0], y[j].x[RIGHT[t]][1]);
    }
  }
}
