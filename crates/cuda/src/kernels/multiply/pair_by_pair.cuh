// Numbers that are not finite beside products of tiles by `mma.sync`.

// Puts 0 in place of such numbers in a tile that all have loaded and none has read by `accumulate`.
template <int N, int W> DEV void clear_odd(u32 tile) {
  NO_UNROLL for (int i = threadIdx.x; i < N * W / 2; i += THREADS) {
    u32 x = load_word(tile + 4 * i), keep = finite(x);
    if (keep != ~0u) store_word(tile + 4 * i, x & keep);
  }
}
