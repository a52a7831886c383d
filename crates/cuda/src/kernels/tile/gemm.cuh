// Products of matrices in f32 fused multiply-adds: a block of 256 threads computes a tile of 128 × 128. Thread (y, x)
// has rows 4y .. 4y + 3 and columns 4x .. 4x + 3 of each quarter. Every sum runs along the reduction in its order,
// whatever the tile.
//
// Operands pass through registers into shared memory, 16 of the reduction at a time: one stage is filled while the
// other is multiplied. There they lie [reduction][row], and so serve a thread in vectors. A thread has 8 × 8 sums.
constexpr int SIDE = 128, DEPTH = 16, THREADS = 256;
struct Shared {
  float a[2][DEPTH][SIDE], b[2][DEPTH][SIDE];
};

// A warp has 4 × 8 threads: it reads 4 vectors of a and 8 of b.
DEV int ty() { return threadIdx.x / 64 * 4 + threadIdx.x % 32 / 8; }
DEV int tx() { return threadIdx.x / 32 % 2 * 8 + threadIdx.x % 8; }
// The place of the thread's rows or columns 0 .. 7 in a tile.
DEV int spread(int at, int n) { return n / 4 * 64 + 4 * at + n % 4; }

DEV void read_four(float* to, const float* from) {
  float4 x = *(const float4*)from;
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}
#if STORAGE
DEV void read_two(float* to, u32 x) { to[0] = read((element)x), to[1] = read((element)(x >> 16)); }
DEV void read_four(float* to, const element* from) {
  uint2 x = *(const uint2*)from;
  read_two(to, x.x), read_two(to + 2, x.y);
}
#endif

// Four numbers side by side, of which `there` can be read, and others are 0. `whole`: they may be read as a vector.
template <class T> DEV void four(float* to, const T* from, int there, bool whole) {
  if (whole && there >= 4) return read_four(to, from);
  UNROLL(i, 4) to[i] = i < there ? read(from[i]) : 0;
}

DEV void clear(float (&sum)[8][8]) {
  UNROLL2(r, 8, c, 8) sum[r][c] = 0;
}

// The place of sums that the same thread alone reads again: vectors of all threads side by side.
DEV float4* place(float* tile, int vector) { return (float4*)tile + vector * THREADS + threadIdx.x; }
DEV void keep(float* tile, const float (&sum)[8][8]) {
  UNROLL(i, 16) {
    const float* x = &sum[i / 2][i % 2 * 4];
    *place(tile, i) = make_float4(x[0], x[1], x[2], x[3]);
  }
}
DEV void fetch_kept(float* tile, float (&sum)[8][8]) {
  UNROLL(i, 16) read_four(&sum[i / 2][i % 2 * 4], (const float*)place(tile, i));
}
// sum = kept + sum.
DEV void add_kept(float* tile, float (&sum)[8][8]) {
  UNROLL(i, 16) {
    float x[4];
    read_four(x, (const float*)place(tile, i));
    UNROLL(e, 4) sum[i / 2][i % 2 * 4 + e] = x[e] + sum[i / 2][i % 2 * 4 + e];
  }
}
