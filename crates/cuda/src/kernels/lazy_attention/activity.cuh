// Activity of pairs of lazy attention, on every level. Equations: docs/lazy_attention.md.
struct Numbers { float offset, share, delta, sum; };  // of a row: τ/n, 1/n, Δ - dlse, (1/n) Σ a g; 0 where it sees nothing
constexpr int STRIPES = 32;                           // of keys, at most: a bit of a word each

// e before its cut at 0, and whether the pair is active (E5): NaN is, so that it shows. Every kernel decides alike, by
// the same bits of S, lse and τ/n.
DEV float raised(float p, float offset) { return __fadd_rn(p, offset); }
DEV bool is_active(float p, float offset) { return !(raised(p, offset) <= 0); }
// True if a pair with a score of at most `top` may be active: `weight` may not be monotone, but errs below the guard.
DEV bool may_be_active(float top, float lse, float offset) {
  return top != -INF && is_active(fmaf(weight(top, lse), 1 + 0x1p-20f, 0x1p-125f), offset);
}
DEV Numbers counted(float tau, int n) { return {n ? __fdiv_rn(tau, n) : 0, n ? __fdiv_rn(1, n) : 0, 0, 0}; }
// The base of the weights of a row; of one that sees nothing it is arbitrary.
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

// ---- numbers that are not finite ----
// Flags are raised as in pairs/tiles.cuh; the portable kernels then compute all results of the group again, before
// dbias and dτ are summed. Finite results are right, since what is not finite cannot leave them, but for n:
//   * A visible S that is NaN or +∞ makes lse NaN: maxima keep NaN, and ∞ - ∞ is one. One of -∞ takes its pair away,
//     which lse and P do not show. n is counted from the mask, and then is wrong: kernels that count it raise the flag
//     of a bias of -∞ and of keys that are not finite, which they look for once, and the fallback counts by S. A q
//     that is not finite makes all S of its row NaN or infinite: lse shows it, unless the row sees nothing.
//   * e and P of a hidden pair are selected, and with dS each meets its operand in a product: 0 · NaN and 0 · ∞ are
//     NaN. An inactive pair has e = 0 as well: where its v or dout is not finite the group is computed again, without
//     reading it. e of NaN is NaN (`cvt.relu` keeps it), and so a τ that is NaN shows; τ = -∞ leaves e = 0, as
//     defined.
//   * g is selected where a pair is active; what is not finite there makes Δ so, which raises the flag, since P = 0
//     would hide neither ∞ nor NaN of it. A tile without an active pair has neither g nor e, and reads no v.
//   * An lse that is given as NaN makes P NaN and Δ with it; one of +∞ makes P = 0, as defined; a row of -∞ has n = 0.
//   * Packing, and rows behind a sequence: as there. Results that are not asked for raise no flag.
// Places that raise flags.
constexpr int OF_LSE = 20, OF_DELTA = 21, OF_BIAS = 22, OF_OPERAND = 23;
