// Clusters of blocks, and tensors of two axes in the copy engine.

// ---- clusters ----
DEV u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEV u32 peer_address(u32 address, u32 rank) {
  u32 r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank)); return r;
}
// The default semantics suffice: only the copy engine and wgmma touch what the barrier guards.
DEV void arrive_cluster(u32 b, u32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_address(b, rank)) : "memory");
}

// ---- bulk tensor copies ----
// What lies beyond the tensor is read as 0 and not written.
DEV void store2(const TensorMap* m, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2,%3}], [%1];" ::"l"(m), "r"(from), "r"(column), "r"(row) : "memory");
}
DEV void load2(u32 to, const TensorMap* m, u32 b, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];"
               ::"r"(to), "l"(m), "r"(b), "r"(column), "r"(row) : "memory");
}
// The same bytes to the same offset of every block in `blocks`; each block's own barrier at that offset counts them.
DEV void load2_multicast(u32 to, const TensorMap* m, u32 b, int column, int row, u16 blocks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3,%4}], [%2], %5;"
               ::"r"(to), "l"(m), "r"(b), "r"(column), "r"(row), "h"(blocks) : "memory");
}
