// The copy engine of compute capability 9.0 (TMA): copies between global memory and tiles in shared memory.

// CUtensorMap without its header: 128 bytes that the host encodes. The copy engine reads it from the parameters of the
// kernel, through its generic address.
struct alignas(128) TensorMap { u64 opaque[16]; };

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
// A policy of the L2 cache: bytes that are read or written once leave it before those that are read again.
DEV u64 l2_policy(bool once) {
  u64 first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return once ? first : normal;
}
// Numbers of pairs are (keys, queries, 1, heads, batch), in boxes of 64 keys.
DEV void load_pairs(u32 to, const TensorMap* m, u32 b, int key, int query, int head, int batch, u64 policy) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3,%4,%7,%5,%6}], [%2], %8;"
               ::"r"(to), "l"(m), "r"(b), "r"(key), "r"(query), "r"(head), "r"(batch), "r"(0), "l"(policy) : "memory");
}
DEV void store_pairs(const TensorMap* m, u32 from, int key, int query, int head, int batch, u64 policy) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2,%3,%6,%4,%5}], [%1], %7;"
               ::"l"(m), "r"(from), "r"(key), "r"(query), "r"(head), "r"(batch), "r"(0), "l"(policy) : "memory");
}
// Contiguous bytes (a multiple of 16, as both addresses): row statistics.
DEV void load_bytes(u32 to, const void* from, u32 bytes, u32 b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(b) : "memory");
}
DEV void store_bytes(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEV void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEV void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // source may be reused
DEV void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Ordinary writes to shared memory (st, stmatrix) become visible to the copy engine and to wgmma.
DEV void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
