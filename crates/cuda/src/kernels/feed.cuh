// Feed of a multiprocessor of compute capability 9.0 with tiles: roles of warpgroups, barriers in shared memory, the
// copy engine. Shared-memory addresses are u32, in the shared window.
//
// With the feature `racecheck` every lane of a warp arrives at a barrier (ARRIVALS 32), because racecheck follows only
// the lane that does.

// CUtensorMap without its header: 128 bytes that the host encodes. The copy engine reads it from the parameters of the
// kernel, through its generic address.
struct alignas(128) TensorMap { u64 opaque[16]; };

// ---- threads -------------------------------------------------------------------------------------------------------
DEV u32 lane_id() { return threadIdx.x & 31; }
DEV u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
template <int N> DEV void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
DEV void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEV void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

DEV bool named_any(int id, int threads, bool x) {  // whether x holds in any of the barrier's threads
  u32 r;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.cta.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
               : "=r"(r) : "r"((u32)x), "r"(id), "r"(threads) : "memory");
  return __shfl_sync(~0u, r, 0);
}

// ---- mbarrier ------------------------------------------------------------------------------------------------------
// A barrier flips its phase when its arrivals and its expected bytes are all in. wait(b, parity) returns once the phase
// of that parity is complete: a consumer starts with parity 0, the producer of an empty ring with parity 1.
DEV void barrier_init(u32 b, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(arrivals)); }
DEV void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void expect_bytes(u32 b, u32 bytes) {  // counts as one arrival
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEV void arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
// One arrival for the warp; __syncwarp orders the other lanes' reads before it. compute-sanitizer's racecheck follows only
// the arriving thread and reports the others' reads: ARRIVALS 32 lets every lane arrive, for that check.
#ifndef ARRIVALS
#define ARRIVALS 1
#endif
DEV void warp_arrive(u32 b) {
  __syncwarp();
  if (ARRIVALS == 32 || lane_id() == 0) arrive(b);
}
DEV void wait(u32 b, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nwait_again:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra wait_over;\nbra wait_again;\nwait_over:\n}"
      ::"r"(b), "r"(parity) : "memory");
}

// ---- bulk tensor copies --------------------------------------------------------------------------------------------
DEV void prefetch(const TensorMap* m) { asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory"); }
// Attention operands are five-dimensional: (64 columns, length, D/64, heads, batch); rows beyond the length read as 0.
DEV void load5(u32 to, const TensorMap* m, u32 b, int row, int head, int batch, int panel = 0) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%7,%5,%6}], [%2];"
               ::"r"(to), "l"(m), "r"(b), "r"(0), "r"(row), "r"(head), "r"(batch), "r"(panel) : "memory");
}
DEV void store5(const TensorMap* m, u32 from, int row, int head, int batch, int panel = 0) {  // rows beyond the length are not written
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2,%3,%6,%4,%5}], [%1];"
               ::"l"(m), "r"(from), "r"(0), "r"(row), "r"(head), "r"(batch), "r"(panel) : "memory");
}
// Contiguous bytes (a multiple of 16, as both addresses): row statistics.
DEV void load_bytes(u32 to, const void* from, u32 bytes, u32 b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(b) : "memory");
}
DEV void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEV void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // source may be reused
DEV void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Ordinary writes to shared memory (st, stmatrix) become visible to the copy engine and to wgmma.
DEV void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
