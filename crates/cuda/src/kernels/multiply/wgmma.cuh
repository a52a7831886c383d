// Products of tiles by the tensor cores of compute capability 9.0: wgmma over swizzled panels in shared memory.

// wgmma matrix descriptors of such panels (address, leading and stride offsets in units of 16 bytes; 1<<62: 128-byte
// swizzle). Groups of 8 rows are 1024 bytes apart.
//   K-major, the reduction runs along the 64 columns: the leading offset is unused. A step of 16 of the reduction is
//   32 bytes within a panel, then the next panel.
//   MN-major, it runs along the rows: the leading offset is that of the next 64 columns (one panel). A step is 2048
//   bytes.
DEV u64 mn_major(u32 address, u32 panel_bytes) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(panel_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
DEV u64 k_major(u32 address) { return mn_major(address, 16); }
// Steps of a descriptor, each an addition in place of four instructions, since tiles end below 2^18.
constexpr u64 K_STEP = 32 / 16, MN_STEP = 2048 / 16;
// Accumulators: tile/accumulator.cuh. Packed in pairs, d[8k .. 8k+7] are the four registers of an A operand for step
// k.
DEV void mma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEV void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Keeps the compiler from moving reads or writes of an accumulator across the asynchronous product.
template <int R> DEV void pin(float (&d)[R]) {
  UNROLL(i, R) asm volatile("" : "+f"(d[i])::"memory");
}
template <int R> DEV void pin(u32 (&a)[R]) {
  UNROLL(i, R) asm volatile("" : "+r"(a[i])::"memory");
}
// Instructions behind it are issued after x is known. The assembler orders a wait against the products that it waits
// for alone, and would hoist it above the arithmetic that shall run under them; a branch never taken holds it back.
DEV void order_after(float x) { asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0fFF800000;\n@p trap;\n}" ::"f"(x) : "memory"); }
template <int N> struct Mma;  // D(64×N) (+)= A(64×16) · B(16×N)
enum Major { K_MAJOR = 0, MN_MAJOR = 1 };

#define LIST32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LIST40 LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define LIST64 LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LIST96 LIST64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define LIST128 LIST96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define ACC8(d, o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), "+f"(d[o + 7])
#define ACC32(d) ACC8(d, 0), ACC8(d, 8), ACC8(d, 16), ACC8(d, 24)
#define ACC40(d) ACC32(d), ACC8(d, 32)
#define ACC64(d) ACC32(d), ACC8(d, 32), ACC8(d, 40), ACC8(d, 48), ACC8(d, 56)
#define ACC96(d) ACC64(d), ACC8(d, 64), ACC8(d, 72), ACC8(d, 80), ACC8(d, 88)
#define ACC128(d) ACC64(d), ACC8(d, 64), ACC8(d, 72), ACC8(d, 80), ACC8(d, 88), ACC8(d, 96), ACC8(d, 104), ACC8(d, 112), ACC8(d, 120)
#define MMA(N, R, i0, i1, i2, i3, i4, i5, i6) \
  template <> struct Mma<N> { \
    template <int A, int B> DEV void ss(float (&d)[R], u64 a, u64 b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                   "k16.f32." TYPE "." TYPE " {" LIST##R "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n}" \
                   : ACC##R(d) : "l"(a), "l"(b), "r"(add), "n"(A), "n"(B)); \
    } \
    template <int B> DEV void rs(float (&d)[R], const u32* a, u64 b, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                   "k16.f32." TYPE "." TYPE " {" LIST##R "}, {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4 \
                   ", p, 1, 1, %" #i6 ";\n}" \
                   : ACC##R(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B)); \
    } \
  };
MMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
MMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
MMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
MMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
MMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

// d = a·bᵀ over W columns, or d += a·bᵀ where `add` is 1: 64 rows of a tile of A_ROWS, N rows of a tile of B_ROWS.
template <int N, int W, int A_ROWS, int B_ROWS> DEV void multiply_shared(float (&d)[N / 2], u32 a, u32 b, int add = 0) {
  UNROLL(i, W / 16)
    Mma<N>::template ss<K_MAJOR, K_MAJOR>(d, k_major(a + i / 4 * A_ROWS * 128 + i % 4 * 32),
                                          k_major(b + i / 4 * B_ROWS * 128 + i % 4 * 32), i > 0 ? 1 : add);
}
// The same from descriptors of the tiles' begins, of which those of steps follow by an addition, in loops a fifth
// shorter. From addresses each is made anew: for loops that spill otherwise, or are slower.
template <int N, int W, int A_ROWS, int B_ROWS> DEV void multiply_shared(float (&d)[N / 2], u64 a, u64 b) {
  UNROLL(i, W / 16)
    Mma<N>::template ss<K_MAJOR, K_MAJOR>(d, a + i / 4 * A_ROWS * 128 / 16 + i % 4 * K_STEP,
                                          b + i / 4 * B_ROWS * 128 / 16 + i % 4 * K_STEP, i > 0);
}
// A tile whose rows are multiplied by others, in the one form or the other.
template <bool BY_ADDITION> DEV auto rows_at(u32 address) {
  if constexpr (BY_ADDITION) return k_major(address);
  else return address;
}
// d += a·b, or d = a·b where `add` is 0: factors of a thread, and a tile of N rows, W columns wide.
template <int N, int W> DEV void multiply_registers(float (&d)[W / 2], const u32 (&a)[N / 4], u32 b, int add = 1) {
  UNROLL(i, N / 16)
    Mma<W>::template rs<MN_MAJOR>(d, a + 4 * i, mn_major(b + i * 2048, N * 128), i > 0 ? 1 : add);
}
template <int N, int W> DEV void multiply_registers(float (&d)[W / 2], const u32 (&a)[N / 4], u64 b, int add = 1) {
  UNROLL(i, N / 16)
    Mma<W>::template rs<MN_MAJOR>(d, a + 4 * i, b + i * MN_STEP, i > 0 ? 1 : add);
}
// The same as committed groups, from addresses or descriptors: until these have been waited for, none of the registers
// may be read or written.
template <int N, int W, int A_ROWS, int B_ROWS, class T> DEV void issue_shared(float (&d)[N / 2], T a, T b) {
  pin(d), mma_begin();
  multiply_shared<N, W, A_ROWS, B_ROWS>(d, a, b), mma_commit();
}
template <int N, int W, class T> DEV void issue_registers(float (&d)[W / 2], u32 (&a)[N / 4], T b, int add = 1) {
  pin(a), mma_begin();
  multiply_registers<N, W>(d, a, b, add), mma_commit();
}
