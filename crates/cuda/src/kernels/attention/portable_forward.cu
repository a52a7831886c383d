// attention and attention_lse on any GPU from sm_80 on, with every option, in f32 arithmetic whatever the storage.
// Each gradient has one writer and sums in a fixed order, so that bits depend on one sequence and one key head alone.
// The forward pass: a block owns 64 queries of one head and walks the keys: S, P, o += P·v, lse  (F1)–(F5), (L1)
//
// Tiles begin where their sequence begins. Compile-time: STORAGE; OPTIONS, 0 where there is no softcap, no bias and no
// array of flags; VALUES, 0 for attention_lse; CD and CE, the columns of D and E that a block accumulates: 64, 128 or
// 256; R.
//
// A block of 128 threads owns 64 rows and walks tiles of 64; a thread has 8 × 4 pairs of a tile. Where accumulators
// are wider than 128 columns (64 in the second order) a block has 256 threads with 4 × 4. Slabs of operands are copied
// by `cp.async` where rows of f32 lie at multiples of 16 bytes. Blocks of the last rows, which walk the most tiles
// under a causal mask, begin first.
//
// A pair that is not visible has the weight −0 (`HIDDEN`): where a tile of v, k, q or dout holds a non-finite number,
// the product leaves the pair out; elsewhere −0 adds nothing.
KERNEL(forward, PairArgs c, THREADS) {
  __shared__ Shared shared;
  const int block = last_first();
  outputs_of(c, shared, c.tasks[block / c.heads], block % c.heads);
}
