// dq partials (slots) that the pass by keys of the portable kernels leaves. The pass by queries adds the tiles of keys
// in the same way: the bits are equal. Compile-time: as portable_forward.cu.

// True if one launch has all columns of D and E.
constexpr bool NARROW = CD == 64 && CE == 64;

// Adds what a tile adds: as a whole where slots could hold it.
template <int W, bool WHOLE, class ADD> DEV void add_tile(Sums<W>& sum, ADD add) {
  if constexpr (WHOLE) {
    Sums<W> tile;
    clear<W>(tile);
    add(tile);
    each(sum, [&](float& x, int r, int e) { x += tile[r][e]; });
  } else {
    add(sum);
  }
}

// As `publish`, where the reduction is over the rows of a thread's tile: its index R·y + r lies in row R·y + r.
DEV void publish_across(Shared& shared, const Pairs& p) {
  UNROLL(r, R) *(float4*)&shared.p[factors(R * ty() + r) + 4 * tx()] = make_float4(p[r][0], p[r][1], p[r][2], p[r][3]);
}

// Writes 64 columns from `first` on of what a tile of keys adds to the rows from `row` on.
DEV void leave(const PairArgs& c, const Slots& slots, const Sequence& s, int head, int row, int key_tile, int first, const Pairs& sum) {
  float* to = slots.at + (key_tile - slots.first) * slot_size(c) + slot_row(c, s, head, row) + first;
  UNROLL(r, R)
    if (row + R * ty() + r < s.queries)
      *(float4*)&to[(R * ty() + r) * slot_columns(c) + 4 * tx()] = make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}
