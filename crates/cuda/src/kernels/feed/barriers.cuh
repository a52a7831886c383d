// Barriers in shared memory (mbarrier), from sm_90 on; addresses are u32, in the shared window.

// A barrier flips its phase when its arrivals and its expected bytes are all in. wait(b, parity) returns once the
// phase of that parity is complete: a consumer starts with parity 0, the producer of an empty ring with parity 1.
DEV void barrier_init(u32 b, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(arrivals)); }
DEV void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Before anyone in the block uses barriers, one thread makes them.
template <class F> DEV void make_barriers(F init) {
  if (threadIdx.x == 0) init(), barrier_init_fence();
  __syncthreads();
}
DEV void expect_bytes(u32 b, u32 bytes) {  // counts as one arrival
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEV void arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
// One arrival for the warp; __syncwarp orders the other lanes' reads before it, and behind it the lanes meet again.
// Without that ptxas may let the other lanes jump over an arrival that stands before a jump, and none waits at the
// target: both parts of the warp then advance a stage that lies in a uniform register, which deadlocked the ring.
// compute-sanitizer's racecheck follows only the arriving thread and reports the others' reads: with the feature
// `racecheck` every lane arrives (ARRIVALS 32).
#ifndef ARRIVALS
#define ARRIVALS 1
#endif
DEV void warp_arrive(u32 b) {
  __syncwarp();
  if (ARRIVALS == 32 || lane_id() == 0) arrive(b);
  __syncwarp();
}
DEV void wait(u32 b, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nwait_again:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra wait_over;\nbra wait_again;\nwait_over:\n}"
      ::"r"(b), "r"(parity) : "memory");
}
