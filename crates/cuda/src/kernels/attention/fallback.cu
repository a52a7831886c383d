// Results of a pass on tensor cores in groups that have a flag: o and lse, or dq, dk and dv, in the bits of the
// portable kernels. A block walks tiles of queries, then of keys, of all groups.
//
// Compile-time: BACKWARD (0: o and lse); others as portable_forward.cu.
KERNEL_ARGS(FallbackArgs)

KERNEL(fallback, FallbackArgs a, THREADS) {
  if (!a.c.flags[0]) return;
  __shared__ Shared shared;
  const PairArgs& c = a.c;
  const int blocks = a.query_blocks + a.key_blocks;
  NO_UNROLL for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    const bool by_keys = block >= a.query_blocks;
    // The last queries first, as `queries`.
    const int number = by_keys ? block - a.query_blocks : a.query_blocks - 1 - block;
    const int heads = by_keys ? c.key_heads : c.heads;
    const Task task = (by_keys ? a.key_tasks : c.tasks)[number / heads];
    const int head = number % heads, key_head = by_keys ? head : head / (c.heads / c.key_heads);
    if (!c.flags[1 + task.first * c.key_heads + key_head]) continue;
    if (!BACKWARD) outputs_of(c, shared, task, head);
    else if (by_keys) keys_of(c, shared, task, head, NoSlots());
    else queries_of(c, shared, task, head);
  }
}
