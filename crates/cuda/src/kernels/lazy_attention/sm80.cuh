// lazy_attention of 16-bit operands on the tensor cores of any GPU from sm_80 on: the blocks of the portable level,
// with e, P and dS rounded to the storage type before they are multiplied. `counts`, `dbias` and `dtau` are portable.
//
//   scores    a block owns 128 queries of one head and walks the keys: lse, n, stripes  (E1)–(E3), (E18)
//   values    a block owns 128 queries of one head and walks their stripes: o += e·v; or Σ a P v  (E4)–(E6), (E47)
//   means     a block owns 64 queries and walks the keys: P, g, Δ, Σ a g  (E7), (E8)
//   queries   a block owns 64 queries and walks the keys: P, g, dS, dq += dS·k  (E9), (E10)
//   keys      a block owns 64 keys of one key head and walks the queries of its heads: dS, dk, dv,
//             and what its diagonals add to dbias  (E9), (E11)–(E13)
//
// dS is rounded whole: in two parts, as the portable level sums it (E17), the roundings of a P g and of P Δ would not
// cancel. A warp leaves a product out where no pair of its rows needs it: factors of 0 hide what is not finite, too.
//
// Compile-time: STORAGE (1|2); OPTIONS, 0 where there is no bias and no array of flags; WHOLE, see `load_tile`; CD and
// CE, the columns of a row of q and of o: 64 or 128.
#define STAGES 2
#define VALUES 1
constexpr int M = 2, KEYS = SIDE, BYTES = 2, WALK = SIDE;

// ---- scores ----
// True if a tile of N queries from `row` and 64 keys from `key` has pairs with a bias.
template <int N> DEV bool is_near(const LazyHead& head, int row, int key) {
  const int distance = row + head.shift - key;
  return OPTIONS && head.distances && distance + N > 0 && distance - SIDE < head.a.width;
}
// Copies the bias of such a tile, of query i and key j of it to 63 + i - j; 0 where there is none.
template <int N> DEV void load_bias(float* to, const LazyHead& head, int row, int key) {
  if (!is_near<N>(head, row, key)) return;
  const int first = row + head.shift - key - (SIDE - 1);
  for (int t = threadIdx.x; t < N + SIDE; t += THREADS) {
    const u32 d = first + t;
    const bool there = d < (u32)head.a.width;
    copy_4(shared(to + t), there ? head.distances + d : head.distances, there);
  }
}

DEV bool is_visible(const LazyHead& head, int i, int j, Span span) {
  if (j < span.begin || j >= span.end) return false;
  return !OPTIONS || !head.allowed || head.allowed[(i64)i * head.c.keys + j];
}
// S (E1), (E2) of a tile of 64·M queries from `row` and 64 keys from `key`; MASKED: -inf where a pair is not visible.
template <bool MASKED, int M>
DEV void score_tile(Pairs<M, SIDE>& s, const LazyHead& head, int row, int key, const Span (&spans)[2 * M], const float* bias) {
  const int column = own_column();
  each(s, [&](float& x, int, int) { x = __fmul_rn(head.c.scale, x); });
  if (is_near<64 * M>(head, row, key)) {  // pairs on a diagonal of the thread's groups of 8 share their bias
    float near[2 * M + 7][2];
    UNROLL2(d, 2 * M + 7, e, 2) near[d][e] = bias[SIDE - 1 + row_of<M>(0) - column + 8 * (d - 7) - e];
    each(s, [&](float& x, int r, int behind) { x = __fadd_rn(x, near[r - behind / 8 + 7][behind % 2]); });
  }
  if (!MASKED) return;
  each(s, [&](float& x, int r, int behind) {
    if (!is_visible(head, row + row_of<M>(r), key + column + behind, spans[r])) x = -INF;
  });
}
