// Roles of warpgroups of a multiprocessor of compute capability 9.0: their registers, and barriers between them.
DEV u32 lane_id() { return threadIdx.x & 31; }
template <int N> DEV void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
// Divides a block: the first warpgroup feeds, with FEEDS registers a thread, and the others multiply.
template <int FEEDS, int MULTIPLIES, class F, class M> DEV void divide_roles(F feed, M multiply) {
  if (threadIdx.x < 128) registers_down<FEEDS>(), feed();
  else registers_up<MULTIPLIES>(), multiply();
}
// The same where two threads feed: one loads, the other stores.
template <int FEEDS, int MULTIPLIES, class L, class S, class M> DEV void divide_roles(L load, S store, M multiply) {
  auto feed = [&] {
    if (threadIdx.x == 0) load();
    if (threadIdx.x == 32) store();
  };
  divide_roles<FEEDS, MULTIPLIES>(feed, multiply);
}
DEV void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEV void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

DEV bool named_any(int id, int threads, bool x) {  // whether x holds in any of the barrier's threads
  u32 r;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.cta.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(r) : "r"((u32)x), "r"(id), "r"(threads) : "memory");
  return __shfl_sync(~0u, r, 0);
}
