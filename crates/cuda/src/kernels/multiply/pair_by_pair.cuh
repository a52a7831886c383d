// Numbers that are not finite beside products of tiles by `mma.sync`, and what they add, pair by pair.
#if STORAGE
// A hidden factor adds nothing, whatever it multiplies, but 0·inf is NaN. Where a tile hides a pair, numbers that are
// not finite are 0 for the tensor cores; what they add to the pairs that see them follows after the last tile, by
// `add_odd`. Puts 0 in place of such numbers in a tile that all have loaded and none has read by `accumulate`; whether
// there was one.
template <int N, int W> DEV bool clear_odd(u32 tile) {
  bool odd = false;
  NO_UNROLL for (int i = threadIdx.x; i < N * W / 2; i += THREADS) {
    u32 x = load_word(tile + 4 * i), keep = finite(x);
    if (keep == ~0u) continue;
    odd = true;
    store_word(tile + 4 * i, x & keep);
  }
  return odd;
}
#else
// Tiles are walked as they are. Where a sum is not finite in the end, or is of numbers that have no parts, the block
// walks once more: then such numbers are 0 for the tensor cores, and what they add to the pairs that see them follows
// after the last tile, by `add_odd`. No other sum has other bits for it.
constexpr u32 TOP = BF16X3 ? 0x7f7f8000 : 0x78800000;  // the least number that bf16 rounds to infinity; 2^114
DEV bool kept(float x) { return (__float_as_uint(x) & 0x7fffffff) < TOP; }
DEV bool adds(float factor, float y) { return !kept(factor) || !kept(y); }
// Puts 0 in place of such numbers in a tile that all have loaded and none reads.
template <int N, int W> DEV bool clear_odd(u32 tile) {
  NO_UNROLL for (int i = threadIdx.x; i < N * W; i += THREADS)
    if (!kept(load_float(tile + 4 * i))) store_word(tile + 4 * i, 0);
  return true;
}
// True if a row of a tensor may add something: its factors may be such numbers, too.
DEV bool is_odd(const element* x, int width) { return true; }
#endif
// Puts 0 in place of such numbers of f32 among factors.
template <int M, int K> DEV void drop_odd(Pairs<M, K>& p) {
#if STORAGE == 0
  each(p, [](float& x, int, int) { if (!kept(x)) x = 0; });
#endif
}
