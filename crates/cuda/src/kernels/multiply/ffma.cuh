// Products of tiles in f32 fused multiply-adds.

// Numbers that lie side by side, in vectors of 16 bytes.
template <int N> DEV void fetch(float (&to)[N], const float* from) {
  UNROLL_ALL for (int i = 0; i < N; i += 4) {
    float4 x = *(const float4*)(from + i);
    to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
  }
}

// product += a·bᵀ, and moved += a1·bᵀ (if A1) + a·b1ᵀ (if B1), over `width` columns: what is read of shared memory
// serves several products. A product has the same bits with A1 and B1 as without. UNROLLED: groups of four columns of
// a slab at a time. B_FIRST: a·b1ᵀ is added first: with a and b exchanged the sum has the same bits. ROLLED: the first
// copy is by the instructions of the others.
template <bool A1, bool B1, int UNROLLED = 1, bool B_FIRST = false, bool ROLLED = false, class T, class U>
DEV void add_products_moved(Shared& shared, Pairs& product, Pairs& moved, const RowsOf<T>& a, const RowsOf<T>& a1, const RowsOf<U>& b,
                            const RowsOf<U>& b1, int width) {
  auto copy = [&](int stage, int first) {
    auto& slabs = shared.slabs[stage];
    copy_slab(slabs[0], a, first, width), copy_slab(slabs[1], b, first, width);
    if (A1) copy_slab(slabs[2], a1, first, width);
    if (B1) copy_slab(slabs[3], b1, first, width);
  };
  __syncthreads();
  if (!ROLLED) copy(0, 0), copy_commit();
  NO_UNROLL for (int first = ROLLED ? -DEPTH : 0, stage = ROLLED; first < width; first += DEPTH, stage ^= 1) {
    if (first + DEPTH < width) copy(stage ^ 1, first + DEPTH);
    copy_commit();
    if (ROLLED && first < 0) continue;
    copy_wait<1>();
    __syncthreads();
    auto& slabs = shared.slabs[stage];
    const int y = place(R * ty(), 0), x = place(4 * tx(), 0);
    UNROLL_BY(UNROLLED) for (int d = 0; d < DEPTH; d += 4) {
      float w[4][4], w1[4][4];
      UNROLL(c, 4) {
        fetch(w[c], &slabs[1][x + place(c, d)]);
        if (B1) fetch(w1[c], &slabs[3][x + place(c, d)]);
      }
      UNROLL(r, R) {
        float u[4], u1[4];
        fetch(u, &slabs[0][y + place(r, d)]);
        if (A1) fetch(u1, &slabs[2][y + place(r, d)]);
        UNROLL2(i, 4, c, 4) {
          product[r][c] = fmaf(u[i], w[c][i], product[r][c]);
          if (B1 && B_FIRST) moved[r][c] = fmaf(u[i], w1[c][i], moved[r][c]);
          if (A1) moved[r][c] = fmaf(u1[i], w[c][i], moved[r][c]);
          if (B1 && !B_FIRST) moved[r][c] = fmaf(u[i], w1[c][i], moved[r][c]);
        }
      }
    }
    __syncthreads();
  }
}

// product += a·bᵀ.
template <int UNROLLED = 1, class T, class U>
DEV void add_products(Shared& shared, Pairs& product, const RowsOf<T>& a, const RowsOf<U>& b, int width) {
  Pairs none;
  add_products_moved<false, false, UNROLLED>(shared, product, none, a, a, b, b, width);
}

// product = a·bᵀ, of slabs as a whole: with one product at a time the registers suffice.
template <class T, class U> DEV void products(Shared& shared, Pairs& product, const RowsOf<T>& a, const RowsOf<U>& b, int width) {
  clear<64>(product);
  add_products<DEPTH / 4>(shared, product, a, b, width);
}

// The place of the factors of row `t` of a reduction.
DEV int factors(int t) { return SIDE * t + t / 4 * 4; }

// Writes the factors of a following `accumulate`: those of the reduction's index 4x + c in row 4x + c.
DEV void publish(Shared& shared, const Pairs& p) {
  UNROLL(c, 4)
    UNROLL_ALL for (int r = 0; r < R; r += 4)
      *(float4*)&shared.p[factors(4 * tx()) + SIDE * c + R * ty() + r] = make_float4(p[r][c], p[r + 1][c], p[r + 2][c], p[r + 3][c]);
}

// sum += p·x over LENGTH rows of x, with factors from row `from` on. GUARDED: a hidden factor adds nothing at all.
template <int W, int LENGTH, bool GUARDED> DEV void multiply(Shared& shared, Sums<W>& sum, int from) {
  UNROLL_BY(2) for (int t = 0; t < LENGTH; t += 4)
    UNROLL(k, 4) {
      float p[R];
      fetch(p, &shared.p[factors(from + t) + SIDE * k + R * ty()]);
      UNROLL(c, W / 64) {
        float y[4];
        fetch(y, &shared.x[(t + k) * W + 64 * c + 4 * tx()]);
        UNROLL2(r, R, e, 4)
          if (!GUARDED || !hidden(p[r])) sum[r][4 * c + e] = fmaf(p[r], y[e], sum[r][4 * c + e]);
      }
    }
}

// sum += p·x over 64 rows of x, its columns from `first` on. A hidden factor adds nothing, whatever x holds: that
// takes a branch for each factor only where x holds a number that is not finite.
template <int W, class T> DEV void accumulate(Shared& shared, Sums<W>& sum, const RowsOf<T>& x, int first, int width) {
  constexpr int LENGTH = SIDE * SIDE / W, PIECES = SIDE * SIDE / 4 / THREADS;
  const bool whole = ::whole(x, width) && first % 4 == 0;
  NO_UNROLL for (int from = 0; from < SIDE; from += LENGTH) {
    const int t = 4 * thread();
    __syncthreads();
    UNROLL(i, PIECES) {
      int at = t + 4 * i * THREADS;
      copy_four(&shared.x[at], x, from + at / W, first + at % W, width, whole);
    }
    copy_commit(), copy_wait<0>();
    bool odd = false;
    UNROLL(i, PIECES) {
      float y[4];
      fetch(y, &shared.x[t + 4 * i * THREADS]);
      UNROLL(e, 4) odd |= !is_finite(y[e]);
    }
    if (__syncthreads_or(odd)) multiply<W, LENGTH, true>(shared, sum, from);
    else multiply<W, LENGTH, false>(shared, sum, from);
  }
}
