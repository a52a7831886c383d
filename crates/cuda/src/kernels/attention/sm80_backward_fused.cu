// The pass by keys of sm80 with what its keys add to dq, which `collect` adds up.                    (B2)–(B7)
//
// Compile-time: as `sm80_backward.cu`, of 16-bit operands, CD and CE 64 or 128.
CHECK_SHARED(fused, BLOCK_BYTES + (VALUES ? 0 : SIDE * SIDE * BYTES));
extern "C" __global__ void __launch_bounds__(THREADS, 2) fused(const __grid_constant__ FusedArgs a) {
  of_keys<1, WALK, true, true>(a.c, a.slots);
}
