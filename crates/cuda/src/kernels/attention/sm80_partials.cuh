// dq partials (slots) that the pass by keys of sm80 leaves: 64 keys, tiles of 64 queries, operands of 16 bits. dS lies
// in registers with a row for each key. It goes through shared memory, in the place of dout, and is read back
// transposed (`ldmatrix.trans`): a warp multiplies 16 queries with all keys of the block.
#define FUSES 1

// Writes dS of the keys of a warp to a tile.
template <int N> DEV void put(u32 tile, const Factors<1, N>& ds) {
  UNROLL2(j, N / 8, r, 2)
    store_word(place<SIDE>(tile, row_of<1>(r), j) + 4 * (lane_id() % 4), ds[0][j][r]);
}

// Multiplies dS with k, 64 columns at a time, and writes what this tile of keys adds to the queries from `row` on.
DEV void leave(const PairArgs& c, const Slots& slots, const Head& head, int row, int key_tile, u32 tile, u32 k) {
  const int lane = lane_id(), columns = slot_columns(c);
  Factors<1, SIDE> ds;
  UNROLL(i, SIDE / 16) {
    u32 x[4];
    load_blocks_transposed(place<SIDE>(tile, 16 * i + lane / 16 * 8 + lane % 8, 2 * warp_id() + lane / 8 % 2), x);
    UNROLL(e, 4) ds[0][2 * i + e / 2][e % 2] = x[e];
  }
  float* to = slots.at + (key_tile - slots.first) * slot_size(c) + slot_row(c, head.s, head.head, row);
  NO_UNROLL for (int panel = 0; panel < CD / 64; panel++) {
    Sums<1, 64> dq;
    clear<1, 64>(dq);
    accumulate<1, SIDE, 64>(dq, ds, k + panel * SIDE * 128);
    UNROLL(r, 2) {
      if (row + row_of<1>(r) >= head.s.queries) continue;
      float* at = to + row_of<1>(r) * columns + 64 * panel + 2 * (lane % 4);
      UNROLL(j, 8) *(float2*)(at + 8 * j) = make_float2(dq[0][j][2 * r], dq[0][j][2 * r + 1]);
    }
  }
}
