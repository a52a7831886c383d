// Accumulators of `wgmma`: 64 rows of a warpgroup. Number 4 j + 2 r + e of a thread lies in row r of its two, which
// are 8 apart, and in column 8 j + 2 (lane % 4) + e.
DEV int row_of_number(int i) { return i / 2 % 2; }
// The first of a thread's two rows among the 64, and its first column.
DEV int own_row() { return threadIdx.x / 32 % 4 * 16 + lane_id() / 4; }
DEV u32 own_column() { return 2 * (lane_id() & 3); }
// The number of a warpgroup among those that multiply, behind the one that feeds.
DEV int own_group() { return threadIdx.x / 128 - 1; }

// Calls f(number, its row of the two, its column behind the thread's first) for each number, column by column.
template <int N, class F> DEV void each_number(float (&x)[N], F f) {
  UNROLL2(c, N / 2, r, 2) f(x[4 * (c / 2) + 2 * r + c % 2], r, 8 * (c / 2) + c % 2);
}
// Calls f(number, its column behind the first) for each number of a row.
template <int N, class F> DEV void each_in_row(float (&x)[N], int r, F f) {
  UNROLL(c, N / 2) f(x[4 * (c / 2) + 2 * r + c % 2], 8 * (c / 2) + c % 2);
}
// Puts -inf in the columns of a row before `begin` and from `end` on, both behind the first.
template <int N> DEV void hide_outside(float (&x)[N], int r, int begin, int end) {
  each_in_row(x, r, [&](float& y, int column) { if (column < begin || column >= end) y = -INF; });
}
// A bit for each of the first N numbers of a row of the thread whose column lies from `begin` to before `end`.
DEV u32 low_bits(int count) {
  u32 others;
  asm("shl.b32 %0, %1, %2;" : "=r"(others) : "r"(~0u), "r"(count));  // 0 of 32
  return ~others;
}
template <int N> DEV int columns_before(int end) { return min(max(end, 0) / 8 * 2 + min(max(end, 0) % 8, 2), N); }
template <int N> DEV u32 bits_between(int begin, int end) {
  static_assert(N <= 32, "a word");
  return low_bits(columns_before<N>(end)) & ~low_bits(columns_before<N>(begin));
}
// Puts -inf where a row of the thread has no bit, which takes fewer instructions than comparisons of columns.
template <int N> DEV void keep_bits(float (&x)[N], int r, u32 bits) {
  UNROLL(i, N / 2)
    if (!(bits >> i & 1)) x[4 * (i / 2) + 2 * r + i % 2] = -INF;
}
// The largest number of a row of the thread, by `max`.
template <int N, class F> DEV float row_max(const float (&x)[N], int r, F max) {
  float even = x[2 * r], odd = x[2 * r + 1];
  UNROLL_ALL for (int j = 1; j < N / 4; j++) even = max(even, x[4 * j + 2 * r]), odd = max(odd, x[4 * j + 2 * r + 1]);
  return max(even, odd);
}
// The largest bits of a row of the thread, as integers.
template <int N> DEV int row_max_bits(const float (&x)[N], int r) {
  int bits[2] = {-1, -1};  // every other column, two of which an instruction takes
  UNROLL(j, N / 4) bits[j % 2] = max(max(bits[j % 2], __float_as_int(x[4 * j + 2 * r])), __float_as_int(x[4 * j + 2 * r + 1]));
  return max(bits[0], bits[1]);
}
template <int N> DEV void clear(float (&x)[N]) {
  UNROLL(i, N) x[i] = 0;
}
// Puts 0 in the rows from `count` on. `row`: the thread's first one.
template <int N> DEV void clear_rows(float (&x)[N], int row, int count) {
  UNROLL(i, N)
    if (row + 8 * row_of_number(i) >= count) x[i] = 0;
}
template <int N> DEV void mul_rows(float (&x)[N], const float (&factor)[2]) {
  UNROLL(i, N) x[i] *= factor[row_of_number(i)];
}
// Pairs in the storage type: the left operand of a product.
template <int N> DEV void pack_all(const float (&x)[2 * N], u32 (&to)[N]) {
  UNROLL(i, N) to[i] = pack(x[2 * i], x[2 * i + 1]);
}
// True where the numbers of the rows before `count` are finite.
template <int N> DEV bool is_finite(const float (&x)[N], int row, int count) {
  float zero[2] = {0, 0};
  UNROLL(i, N) zero[row_of_number(i)] = fmaf(x[i], 0.0f, zero[row_of_number(i)]);  // NaN
  return (row >= count || zero[0] == 0) && (row + 8 >= count || zero[1] == 0);
}

// Packs rows into the 64 of the warpgroup in a tile of ROWS rows.
template <int ROWS, int N> DEV void put_rows(u32 tile, const float (&x)[N], float scale = 1) {
  const int row = threadIdx.x / 32 % 4 * 16 + lane_id() % 16;
  UNROLL(j, N / 8) {
    const int piece = 2 * j + lane_id() / 16;
    u32 y[4];
    UNROLL(i, 4) y[i] = pack(x[8 * j + 2 * i] * scale, x[8 * j + 2 * i + 1] * scale);
    store_blocks(tile + piece / 8 * (ROWS * 128) + swizzled(row, piece % 8), y[0], y[1], y[2], y[3]);
  }
}
// Puts rows into a tile of the warpgroup that nobody reads, from which `store` copies them.
template <int ROWS, int N, class F> DEV void store_by_copy(u32 tile, const float (&x)[N], int barrier, F store) {
  if (threadIdx.x % 128 == 0) store_wait_read();
  named_sync(barrier, 128);
  put_rows<ROWS>(tile, x);
  proxy_fence();
  named_sync(barrier, 128);
  if (threadIdx.x % 128 == 0) store(), store_commit();
}
