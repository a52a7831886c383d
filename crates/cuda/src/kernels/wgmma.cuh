// Products of tiles by the tensor cores of compute capability 9.0: wgmma over swizzled panels in shared memory.
#if STORAGE == 1
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif

// ---- shared tiles --------------------------------------------------------------------------------------------------
// Every tile is a stack of panels, 64 columns (128 bytes) wide, as the copy engine writes them with SWIZZLE_128B: row r of
// a panel is at 128·r, its 16-byte piece c at ((c ^ r%8)·16). Panels start at multiples of 1024 bytes.
DEV u32 swizzled(u32 row, u32 piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// wgmma matrix descriptors of such panels (address, leading and stride offsets in units of 16 bytes; 1<<62: 128-byte swizzle).
// K-major, the reduction runs along the 64 columns: groups of 8 rows are 1024 bytes apart; the leading offset is unused.
//   step of 16 along the reduction: +32 bytes within a panel, then the next panel.
// MN-major, the reduction runs along the rows: the leading offset is that of the next 64 columns (one panel), and 8 rows
//   of the reduction are 1024 bytes apart. Step of 16 along the reduction: +2048 bytes.
DEV u64 k_major(u32 address) { return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62; }
DEV u64 mn_major(u32 address, u32 panel_bytes) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(panel_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// ---- wgmma ---------------------------------------------------------------------------------------------------------
// Accumulator of thread (warp w of its warpgroup, lane l): d[4j+0,1] = row 16w + l/4, columns 8j + 2(l%4) + 0,1;
// d[4j+2,3] = the same columns of row + 8. Packed in pairs, d[8k .. 8k+7] are the four registers of an A operand for step k.
DEV void mma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEV void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Keeps the compiler from moving reads or writes of an accumulator across the asynchronous product.
template <int R> DEV void pin(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int R> DEV void pin(u32 (&a)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+r"(a[i])::"memory");
}
// What follows is issued after x is known. The assembler orders a wait only against the products that it waits for and
// would hoist it above the arithmetic meant to run under them; a branch never taken holds it back.
DEV void order_after(float x) { asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0fFF800000;\n@p trap;\n}" ::"f"(x) : "memory"); }
template <int N> struct Mma;  // D(64×N) (+)= A(64×16) · B(16×N)
enum Major { K_MAJOR = 0, MN_MAJOR = 1 };

#define LIST32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LIST64 LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define ACC8(d, o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), "+f"(d[o + 7])
#define ACC32(d) ACC8(d, 0), ACC8(d, 8), ACC8(d, 16), ACC8(d, 24)
#define ACC64(d) ACC32(d), ACC8(d, 32), ACC8(d, 40), ACC8(d, 48), ACC8(d, 56)
#define MMA(N, R, i0, i1, i2, i3, i4, i5, i6)                                                                        \
  template <> struct Mma<N> {                                                                                       \
    template <int A, int B> DEV void ss(float (&d)[R], u64 a, u64 b, int add) {                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N            \
                   "k16.f32." TYPE "." TYPE " {" LIST##R "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n}"      \
                   : ACC##R(d) : "l"(a), "l"(b), "r"(add), "n"(A), "n"(B));                                           \
    }                                                                                                               \
    template <int B> DEV void rs(float (&d)[R], const u32* a, u64 b, int add) {                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N            \
                   "k16.f32." TYPE "." TYPE " {" LIST##R "}, {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4             \
                   ", p, 1, 1, %" #i6 ";\n}"                                                                        \
                   : ACC##R(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B));               \
    }                                                                                                               \
  };
MMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
MMA(128, 64, 64, 65, 66, 67, 68, 69, 70)

// ---- elements ------------------------------------------------------------------------------------------------------
DEV u32 pack(float low, float high) { u32 r; asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEV float2 unpack(u32 x) {
  float2 y;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32." TYPE " %0, l;\ncvt.f32." TYPE " %1, h;\n}" : "=f"(y.x), "=f"(y.y) : "r"(x));
  return y;
}
DEV float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// Four 8×8 blocks of 16-bit elements; lane l gives the address of row l%8 of block l/8.
DEV void store_blocks(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEV void load_blocks_transposed(u32 address, u32 (&x)[4]) {  // the thread holds rows 2(l%4) + 0,1 of column l/4
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
DEV uint4 load_piece(u32 address) {
  uint4 x; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory"); return x;
}
DEV u32 load_word(u32 address) { u32 x; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory"); return x; }
DEV u32 max_pair(u32 x, u32 y) { u32 r; asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y)); return r; }
DEV float2 load_pair(u32 address) {
  float2 x; asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory"); return x;
}
DEV float quad_max(float x) {  // over the four lanes that share a row of an accumulator
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEV float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
