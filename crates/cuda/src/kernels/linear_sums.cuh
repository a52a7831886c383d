// Products over the tokens of a chunk: what its state is made of.

// Factors of tokens t .. t + 63 and 64 columns from `first` on: row by row they are the factors of a product over tokens.
// Those of a token that does not reach the state add nothing.
template <class F> DEV void publish_tokens(Shared& shared, int t, int len, int first, int width, const F& factor) {
#pragma unroll
  for (int i = 0; i < SIDE * SIDE / 4 / THREADS; i++) {
    int at = thread() + i * THREADS, token = at / 16, column = at % 16 * 4;
    float p[4] = {HIDE, HIDE, HIDE, HIDE};
    if (t + token < len) factor(p, token, first + column, width);
    *(float4*)&shared.p[factors(token) + column] = make_float4(p[0], p[1], p[2], p[3]);
  }
}

template <class T> DEV void store_state(float* to, const LinearArgs& c, int row, const T& sum) {
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int i = 0; i < CW / 16; i++) {
      int d = row + R * ty() + r, e = c.first + 64 * (i / 4) + 4 * tx() + i % 4;
      if (d < c.dim && e < c.value_dim) to[(i64)d * c.value_dim + e] = sum[r][i];
    }
}
