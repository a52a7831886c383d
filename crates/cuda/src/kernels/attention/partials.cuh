// dq partials (slots) of the pass by keys: a block leaves what its 64 keys add to a tile of queries in a slot of its
// own, in f32, and `collect` adds the slots of a row in the order of the keys. Slots hold as many tiles of keys at a
// time as the host has memory for; the sums do not depend on that.

// The number of the block, those of the last rows first: under a causal mask they walk the most tiles.
DEV int last_first() { return gridDim.x - 1 - blockIdx.x; }

// In place of slots, where the gradient of q is not computed.
struct NoSlots {};
KERNEL_ARGS(FusedArgs)
template <class SLOTS> constexpr bool FUSED_BY = true;
template <> constexpr bool FUSED_BY<NoSlots> = false;
// True if there are slots, and none for a tile of keys.
DEV bool lacks(const NoSlots&, int) { return false; }
DEV bool lacks(const Slots& slots, int tile) { return tile < slots.first || tile >= slots.end; }

// The columns of a slot: those of q, rounded up to groups of 64.
DEV int slot_columns(const PairArgs& c) { return CD == 64 ? 64 : (c.dim + 63) / 64 * 64; }
// The begin of a row of a head in a slot.
DEV i64 slot_row(const PairArgs& c, const Sequence& s, int head, int row) {
  return (((i64)s.batch * c.heads + head) * c.queries + s.query_start + row) * slot_columns(c);
}
DEV i64 slot_size(const PairArgs& c) { return (i64)c.batch * c.heads * c.queries * slot_columns(c); }
