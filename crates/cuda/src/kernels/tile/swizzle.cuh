// Tiles in shared memory as the tensor cores read them: swizzled panels, and loads and stores of their parts.
// Addresses are u32, in the shared window.
DEV u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// The dynamic shared memory of a kernel: its begin, the first multiple of 1024 bytes, and numbers in it.
extern __shared__ __align__(128) char dynamic_shared[];
DEV u32 shared_begin() { return shared(dynamic_shared); }
DEV u32 shared_panels() { return (shared_begin() + 1023) & ~1023u; }
DEV float* numbers_at(u32 offset) { return (float*)(dynamic_shared + offset); }

// Every tile is a stack of panels, 64 columns (128 bytes) wide, as the copy engine writes them with SWIZZLE_128B: row
// r of a panel is at 128·r, its 16-byte piece c at ((c ^ r%8)·16). Panels start at multiples of 1024 bytes.
DEV u32 swizzled(u32 row, u32 piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
// Piece `piece` of a row of a tile: panels of N rows.
template <int N> DEV u32 place(u32 tile, int row, int piece) { return tile + piece / 8 * N * 128 + row * 128 + ((piece % 8 ^ (row & 7)) << 4); }
DEV void load_blocks(u32 from, u32 (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}
// Four 8×8 blocks of 16-bit elements; lane l gives the address of row l%8 of block l/8.
DEV void store_blocks(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEV void store_blocks_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {  // as a thread holds blocks by the next
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEV void load_blocks_transposed(u32 address, u32 (&x)[4]) {  // the thread holds rows 2(l%4) + 0,1 of column l/4
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
DEV uint4 load_piece(u32 address) {
  uint4 x; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory"); return x;
}
DEV void store_piece(u32 address, u32 a, u32 b, u32 c, u32 d) { asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory"); }
DEV float2 load_pair(u32 address) {
  float2 x; asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory"); return x;
}
DEV u32 load_word(u32 address) { u32 x; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory"); return x; }
DEV float load_float(u32 address) { return __uint_as_float(load_word(address)); }
DEV void store_float(u32 address, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory"); }
DEV void store_word(u32 address, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }

// ---- rows of fragments ----
DEV float quad_max(float x) {  // over the four lanes that share a row of an accumulator
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEV float quad_max_nan(float x) {
  x = max_nan(x, __shfl_xor_sync(~0u, x, 1));
  return max_nan(x, __shfl_xor_sync(~0u, x, 2));
}
template <class T> DEV T quad_sum(T x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
