// The pass by keys of sm80 with what its keys add to dq, which `collect` adds up.  (B2)–(B7)
//
// Compile-time: as `sm80_backward.cu`, of 16-bit operands, CD and CE 64 or 128.
struct FusedKeys : SoftmaxKeys<1, WALK> {
  static constexpr bool FUSED = true;
  const Slots& slots;
  METHOD FusedKeys(const FusedArgs& a) : SoftmaxKeys<1, WALK>(a.c), slots(a.slots) {}
  // There is room for dS where dout was, which all have read, or behind the numbers.
  METHOD u32 across(u32 dout) const { return VALUES ? dout : shared_begin() + BLOCK_BYTES; }
  METHOD void before_keys(const Factors<1, WALK>& ds, u32 dout) const {
    __syncthreads();
    put<WALK>(across(dout), ds);
  }
  METHOD void after_keys(const KeyTile& own, const Head& head, int row, const Pairs<1, WALK>&, u32, u32 dout, u32 k) const {
    __syncthreads();
    leave(c, slots, head, row, own.task.key_tile, across(dout), k);
  }
};

CHECK_SHARED(fused, BLOCK_BYTES + (VALUES ? 0 : SIDE * SIDE * BYTES));
KERNEL(fused, FusedArgs a, THREADS, 2) {
  const KeyBlock<1, WALK, true, true> own(a.c);
  if (lacks(a.slots, own.task.key_tile)) return;
  FusedKeys body(a);
  walk_queries(a.c, own, body);
}
