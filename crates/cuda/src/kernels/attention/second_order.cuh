// The second order of attention and attention_lse: kernel arguments, and the numbers of a pair.
struct Numbers { float delta, u, z, seen; };  // of a row; seen is 0 where it sees nothing
KERNEL_ARGS(SecondArgs)
DEV Numbers* numbers_of(const SecondArgs& a, const Head& head) {
  return a.numbers + ((i64)head.s.batch * a.c.heads + head.head) * a.c.queries + head.s.query_start;
}
DEV float weight_of_sink(const SecondArgs& a, int head, float lse) {
  float sink = a.c.sinks ? a.c.sinks[head] : -INF;
  return sink == -INF ? 0 : ::weight_of_sink(sink, lse);
}

// True if the kernels on tensor cores compute the rows and keys of a key head of a sequence: it has no flag.
DEV bool is_finite(const SecondArgs& a, int sequence, int key_head) { return a.c.flags && !a.c.flags[1 + sequence * a.c.key_heads + key_head]; }

// The factors of a pair, hidden where it is not visible.
struct Pair {
  float p, moved, x, ds;  // P, Ṗ (D7), x (D9), ds (B4)
  float score;            // X (D8), 0 where it is not visible
};
// U of (D2), from the product ddq·k + q·ddk. Roundings are written out here, as in `Head::score`.
DEV float slide(const SecondArgs& a, const Head& head, float product, float slope, int i, int j) {
  float u = __fmul_rn(slope, __fmul_rn(a.c.scale, product));
#if OPTIONS
  if (a.ddbias.data) {
    const element* at = (const element*)a.ddbias.data + head.s.batch * a.ddbias.batch + head.head * a.ddbias.head;
    u = __fadd_rn(u, read(at[(head.s.query_start + i) * a.ddbias.row + head.s.key_start + j]));
  }
#endif
  return u;
}
DEV Pair second(const SecondArgs& a, const Head& head, float s, float u, float dp, float t, int i, int j, Span span, float lse, const Numbers& n) {
  Pair pair = {HIDE, HIDE, HIDE, HIDE, 0};
  float score, slope, curvature;
  if (!head.score(s, i, j, span, score, slope, curvature)) return pair;
  float p = weight(score, lse), g = __fsub_rn(dp, n.delta), ds = __fmul_rn(p, g);
  float moved = __fmul_rn(p, __fsub_rn(slide(a, head, u, slope, i, j), n.u));
  float x = fmaf(moved, g, __fmul_rn(p, __fsub_rn(t, n.z)));
  pair.p = shown(p), pair.moved = shown(moved), pair.ds = shown(__fmul_rn(slope, ds));
  pair.x = shown(fmaf(__fmul_rn(curvature, __fmul_rn(a.c.scale, u)), ds, __fmul_rn(slope, x)));
  pair.score = x;
  return pair;
}
