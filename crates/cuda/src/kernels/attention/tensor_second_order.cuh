// Flags of sums and copies of tiles, which the second order on tensor cores has on every level. Numbers that are not
// finite raise flags as in pairs/tiles.cuh, which also says why factors of 0 and rows behind a sequence are safe. Each
// kernel is followed by that of portable_second_order.cu, which computes groups with a flag and exits elsewhere;
// kernels behind leave these groups to it, too. u and S are sums and products of visible pairs alone, as there.

// Raises the flag of a key head of a sequence unless all sums are finite.
template <int PLACE, class... SUMS> DEV void raise_unless_finite(const PairArgs& c, int sequence, int key_head, const SUMS&... sums) {
  float zero[2] = {0, 0};
  (add_zeros(zero, sums), ...);
  if (!are_zero(zero)) raise<PLACE>(c.flags, sequence * c.key_heads + key_head);
}

// A tile of an operand, if it is there.
template <int N, int W> DEV void load(u32 to, const Tensor& x, const Rows& rows, int width) {
  if (x.data) load_tile<N, W>(to, rows, width);
}
// The tiles of four operands, of queries or of keys: q, ddq, dout and cot_o, or k, ddk, v and ddv.
struct Tiles { u32 x, moved, value, moved_value; };
DEV Tiles tiles_at(u32 at, u32 d, u32 e) { return {at, at + d, at + 2 * d, at + 2 * d + e}; }
template <int N> DEV void load_queries(const Tiles& to, const SecondArgs& a, const Head& head, int row, bool values) {
  load<N, CD>(to.x, a.c.q, query_rows(a.c.q, head, row), a.c.dim);
  load<N, CD>(to.moved, a.ddq, query_rows(a.ddq, head, row), a.c.dim);
  if (!VALUES || !values) return;
  load<N, CE>(to.value, a.c.dout, query_rows(a.c.dout, head, row), a.c.value_dim);
  load<N, CE>(to.moved_value, a.cot_o, query_rows(a.cot_o, head, row), a.c.value_dim);
}
template <int N> DEV void load_keys(const Tiles& to, const SecondArgs& a, const Head& head, int key) {
  load<N, CD>(to.x, a.c.k, key_rows(a.c.k, head, key), a.c.dim);
  load<N, CD>(to.moved, a.ddk, key_rows(a.ddk, head, key), a.c.dim);
  if (!VALUES) return;
  load<N, CE>(to.value, a.c.v, key_rows(a.c.v, head, key), a.c.value_dim);
  load<N, CE>(to.moved_value, a.ddv, key_rows(a.ddv, head, key), a.c.value_dim);
}

// Writes what `tangents` finds of a row: u, and whether it sees a key.
DEV void put_numbers(const SecondArgs& a, const Head& head, int i, float u, bool some, float lse) {
  if (a.ddsinks) u += weight_of_sink(a, head.head, lse) * a.ddsinks[head.head];
  numbers_of(a, head)[i] = {0, u, 0, (float)some};
}
