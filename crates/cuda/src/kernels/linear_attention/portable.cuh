// Rows, states and results of the kernels of linear_attention in fused multiply-adds.

// Four numbers of a row, of which those that are not there are 0.
template <class T> DEV void read_four(float (&to)[4], const RowsOf<T>& rows, int row, int column, int width) {
  UNROLL(i, 4) to[i] = row < rows.count && column + i < width ? read(rows.at[row * rows.stride + column + i]) : 0;
}

// The factors of a following `accumulate`: 64 columns of 64 rows, from `first` on, times `factor`.
DEV void publish_rows(Shared& shared, const Rows& rows, int first, int width, float factor) {
  Pairs p;
  UNROLL(r, R) {
    read_four(p[r], rows, R * ty() + r, first + 4 * tx(), width);
    UNROLL(e, 4) p[r][e] = shown(factor * p[r][e]);
  }
  publish(shared, p);
}

// out = the sum of each row times that of `with`, in every thread of the row.
template <int W> DEV void dot_rows(float (&out)[R], const Sums<W>& sum, const Rows& with, int first, int width) {
  UNROLL(r, R) {
    float all = 0;
    UNROLL(i, W / 64) {
      float x[4];
      read_four(x, with, R * ty() + r, first + 64 * i + 4 * tx(), width);
      UNROLL(e, 4) all = fmaf(sum[r][4 * i + e], x[e], all);
    }
    out[r] = row_sum(all);
  }
}

// Writes a number of each row of a micro-chunk, or adds it to that of an earlier launch.
DEV void put_dots(const LinearArgs& c, float* to, const Chunk& chunk, int heads, int head, int row, const float (&x)[R], float scale) {
  UNROLL(r, R) {
    int i = row + R * ty() + r;
    if (tx() || i >= chunk.len) continue;
    float* at = to + ((i64)chunk.batch * heads + head) * c.tokens + chunk.start + i;
    float value = scale * x[r];
    *at = c.first || c.add ? *at + value : value;
  }
}

// Writes factor·sum to the rows below `count` of a tensor, as the mode says.
template <int W>
DEV void put(const LinearArgs& c, const Tensor& x, int batch, int head, int row, int count, const Sums<W>& sum, float factor, int first, int width) {
  if (c.mode != MERGE) return store<W>(x, batch, head, row, count, sum, Same{factor}, first, width);
  UNROLL2(r, R, i, W / 16) {
    int column = first + 64 * (i / 4) + 4 * tx() + i % 4;
    if (R * ty() + r >= count || column >= width) continue;
    element& to = ((element*)x.data)[batch * x.batch + head * x.head + (row + R * ty() + r) * x.row + column];
    float value = factor * sum[r][i];
    if (!is_finite(value) || !is_finite(read(to))) to = rounded(value);
  }
}

// Puts w of two micro-chunks where all threads see it.
DEV void show_flow(float* to, const Pairs& w) {
  __syncthreads();
  UNROLL2(r, R, e, 4) to[PITCH * (R * ty() + r) + 4 * tx() + e] = w[r][e];
  __syncthreads();
}

// ---- states: products over the tokens of a chunk ----
// Factors of tokens t .. t + 63 and 64 columns from `first` on, those of a token in a row. Factors of a token that
// does not reach the state add nothing.
template <class F> DEV void publish_tokens(Shared& shared, int t, int len, int first, int width, const F& factor) {
  UNROLL(i, SIDE * SIDE / 4 / THREADS) {
    int at = thread() + i * THREADS, token = at / 16, column = at % 16 * 4;
    float p[4] = {HIDE, HIDE, HIDE, HIDE};
    if (t + token < len) factor(p, token, first + column, width);
    *(float4*)&shared.p[factors(token) + column] = make_float4(p[0], p[1], p[2], p[3]);
  }
}

template <class T> DEV void store_state(float* to, const LinearArgs& c, int row, const T& sum) {
  UNROLL2(r, R, i, CW / 16) {
    int d = row + R * ty() + r, e = c.first + 64 * (i / 4) + 4 * tx() + i % 4;
    if (d < c.dim && e < c.value_dim) to[(i64)d * c.value_dim + e] = sum[r][i];
  }
}

// sum += (ω σ y)ᵀ·x over 64 tokens from `t` of a chunk: 64 rows of the state from `row` on.
DEV void add_tokens(const LinearArgs& c, Shared& shared, Sums<CW>& sum, const Gates& gates, const Chunk& chunk, const Rows& y, const Rows& x, int t, int row) {
  auto factor = [&](float (&p)[4], int token, int column, int width) {
    float weight = gates.reach(t + token, !c.back), z[4];
    if (weight == 0) return;
    read_four(z, y, token, column, width);
    UNROLL(e, 4) p[e] = shown(weight * (c.scale * z[e]));
  };
  __syncthreads();
  publish_tokens(shared, t, chunk.len, row, c.dim, factor);
  accumulate<CW>(shared, sum, x, c.first, c.value_dim);
}
// sum += factor·y·S.
DEV void add_state(const LinearArgs& c, Shared& shared, Sums<CW>& sum, const Rows& y, const float* state, float factor) {
  NO_UNROLL for (int d = 0; d < c.inner; d += SIDE) {
    __syncthreads();
    publish_rows(shared, y, d, c.inner, factor);
    accumulate<CW>(shared, sum, RowsOf<float>{state + (i64)d * c.outer, c.outer, c.inner - d}, c.first, c.outer);
  }
}
