// Scores of lazy attention, on the levels portable and sm80. Equations: docs/lazy_attention.md.
KERNEL_ARGS(LazyArgs)

// Tiles of keys in stripes of as many tiles each.
DEV int stripe_of(const Sequence& s, int key) {
  int tiles = (s.keys + SIDE - 1) / SIDE;
  return key / SIDE / ((tiles + STRIPES - 1) / STRIPES);
}

// One head of one sequence, with its bias by distance.
struct LazyHead : Head {
  const LazyArgs& a;
  const float* distances;
  Numbers* numbers;
  int shift;  // i' - i

  METHOD LazyHead(const LazyArgs& lazy, const Sequence& sequence, int h) : Head(lazy.c, sequence, h), a(lazy) {
    distances = a.bias ? a.bias + (i64)h * a.width : 0;
    numbers = a.numbers + ((i64)s.batch * c.heads + h) * c.queries + s.query_start;
    shift = a.bottom ? s.keys - s.queries : 0;
  }
  METHOD Numbers number(int i) const { return i < s.queries ? numbers[i] : Numbers{}; }
  METHOD float lse_at(int i) const { return i < s.queries ? lse[i] : 0; }
  METHOD float dlse(int i) const { return c.dlse && i < s.queries ? c.dlse[lse - c.lse + i] : 0; }
  METHOD u32& stripes(int row) const { return a.active[(i64)(s.first_tile + row / SIDE) * c.heads + head]; }

  // From the product of a query and a key: S (E1), (E2), and whether the pair is visible. Roundings: as `Head::score`.
  METHOD bool score(float product, int i, int j, Span span, float& score) const {
    if (j < span.begin || j >= span.end) return false;
    float x = __fmul_rn(c.scale, product);
    if (OPTIONS && allowed && !allowed[(i64)i * c.keys + j]) return false;
    const u32 d = i + shift - j;
    if (OPTIONS && distances && d < (u32)a.width) x = __fadd_rn(x, distances[d]);
    score = x;
    return x != -INF;
  }
  // P (E4), hidden if the pair is not visible.
  METHOD float weight_of(float product, int i, int j, Span span, float lse) const {
    float x;
    return score(product, i, j, span, x) ? weight(x, lse) : HIDE;
  }
};

// True if the elements that a thread reads of the rows of a tile are finite.
DEV bool is_finite(const Rows& rows, int width) {
  bool finite = true;
#if WHOLE
  const int pieces = width / 8;
  NO_UNROLL for (int n = threadIdx.x; n < min(rows.count, SIDE) * pieces; n += THREADS) {
    const uint4 x = *(const uint4*)(rows.at + n / pieces * rows.stride + n % pieces * 8);
    finite &= (::finite(x.x) & ::finite(x.y) & ::finite(x.z) & ::finite(x.w)) == ~0u;
  }
#else
  UNROLL_BY(4) for (int j = threadIdx.x / 32; j < min(rows.count, SIDE); j += THREADS / 32)
    UNROLL_BY(2) for (int e = threadIdx.x % 32; e < width; e += 32) finite &= fabsf(read(rows.at[j * rows.stride + e])) < INF;
#endif
  return finite;
}

// True if scores of the group may be -inf, so that pairs that the mask shows do not count: by the bias of a block's M
// tiles of queries, or by its part of the keys; blocks of a group read all.
template <int M> DEV bool may_hide(const QueryTile<LazyHead>& own) {
  const LazyHead& head = own.head;
  const Sequence& s = head.s;
  const PairArgs& c = head.c;
  const int group = c.heads / c.key_heads, tiles = (s.queries + SIDE * M - 1) / (SIDE * M);
  bool hides = false;
  if (OPTIONS && head.distances) {
    const int near = own.row + head.shift, end = min(head.a.width, near + SIDE * M);
    for (int d = max(0, near - s.keys + 1) + (int)threadIdx.x; d < end; d += THREADS) hides |= head.distances[d] == -INF;
  }
  const int first = own.row / (SIDE * M) * group + head.head % group;
  NO_UNROLL for (int key = first * SIDE; key < s.keys; key += tiles * group * SIDE) hides |= !is_finite(key_rows(c.k, head, key), c.dim);
  return hides;
}
