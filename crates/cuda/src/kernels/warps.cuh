// Products of tiles on the tensor cores, from sm_80 on: four warps, f32 sums. A warp owns the rows 16·M·warp .. of a
// product, as M fragments of 16 rows: thread `lane` has of fragment m the rows 16 m + lane/4 and 8 below, and of every
// 8 columns the two from 2 (lane % 4) on: x[m][column / 8][2·(row below) + column % 2].
//
// A tile in shared memory lies in panels with rows of 128 bytes, whose 16-byte pieces are swizzled.
constexpr int THREADS = 128, SIDE = 64;  // rows of the host's tiles
DEV int lane_id() { return threadIdx.x % 32; }
DEV int warp_id() { return threadIdx.x / 32; }
// The order of blocks: all heads of a tile, where the mask is causal that with most keys first.
struct Place { int task, head; };
DEV Place drawn(int heads) {
  int tasks = gridDim.x / heads;
  return {tasks - 1 - (int)blockIdx.x / heads, (int)blockIdx.x % heads};
}
DEV u32 shared(const void* x) { return (u32)__cvta_generic_to_shared(x); }

// ---- tiles -----------------------------------------------------------------------------------------------------------
template <int N> DEV u32 place(u32 tile, int row, int piece) { return tile + piece / 8 * N * 128 + row * 128 + ((piece % 8 ^ (row & 7)) << 4); }
DEV u32 load_word(u32 from) { u32 x; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory"); return x; }
DEV void load_blocks(u32 from, u32 (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}
template <int M, int N> DEV void clear(float (&x)[M][N / 8][4]) {
#pragma unroll
  for (int i = 0; i < M * N / 2; i++) x[i / (N / 2)][i / 4 % (N / 8)][i % 4] = 0;
}
