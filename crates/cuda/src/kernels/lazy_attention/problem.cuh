// Numbers with which a row and a pair of lazy attention take part. Equations: docs/lazy_attention.md.

// ---- the problem ----
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

  // From the product of a query and a key: S (E1), (E2), and whether the pair is visible. Roundings are written out,
  // as in `Head::score`.
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
