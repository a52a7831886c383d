// Activity of pairs of lazy attention, on every level. Equations: docs/lazy_attention.md.
struct Numbers { float offset, share, delta, sum; };  // of a row: τ/n, 1/n, Δ - dlse, (1/n) Σ a g; 0 where it sees nothing
constexpr int STRIPES = 32;                           // of keys, at most: a bit of a word each

// e before its cut at 0, and whether the pair is active (E5): NaN is, so that it shows. Every kernel decides with the
// same bits of S, lse and τ/n.
DEV float raised(float p, float offset) { return __fadd_rn(p, offset); }
DEV bool is_active(float p, float offset) { return !(raised(p, offset) <= 0); }
// True if a pair with a score of at most `top` may be active: `weight` need not be monotone, but its errors are below
// the guard.
DEV bool may_be_active(float top, float lse, float offset) {
  return top != -INF && is_active(fmaf(weight(top, lse), 1 + 0x1p-20f, 0x1p-125f), offset);
}
// The numbers of a row when its keys are counted.
DEV Numbers counted(float tau, int n) { return {n ? __fdiv_rn(tau, n) : 0, n ? __fdiv_rn(1, n) : 0, 0, 0}; }
// The base of the weights of a row: of one that sees nothing any finite number.
DEV float base_of(float lse) { return lse == -INF ? 0 : lse; }
// P (E4) from S, hidden if the pair is not visible. `most` is above 0 or NaN where a pair is active (E5).
template <bool MASKED> DEV void weigh(float& x, float& most, float base, float offset) {
  const float p = weight(x, base);
  const bool visible = !MASKED || x != -INF;
  x = visible ? p : HIDE;
  if (visible) most = max_nan(most, raised(p, offset));
}
template <bool MASKED> DEV bool attends(float p, float offset) {
  return !(MASKED && hidden(p)) && is_active(p, offset);
}
// dS (E9) from P and g, hidden if the pair is not visible.
template <bool MASKED> DEV float pull(float p, float g, float offset, float delta) {
  const float x = __fmul_rn(p, __fsub_rn(attends<MASKED>(p, offset) ? g : 0, delta));
  return MASKED && hidden(p) ? HIDE : x;
}
