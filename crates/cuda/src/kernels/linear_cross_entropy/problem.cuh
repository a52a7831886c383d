// Linear cross-entropy as the host describes it to its kernels, and what a range of classes adds to a token.
//
// Compile-time: SECOND, whether the second order is computed: the motions of logits and of their sums.

// ---- the problem ----
constexpr int TILE = 256;  // classes of a leaf of the tree

struct __align__(16) Token {  // one that counts
  int index, target;
  float weight, class_weight;  // kappa, cw of the target
};

// The part of a set of classes in a token (C33), and how it moves (C39). W is kept for smoothing alone. m may lag
// behind the largest logit, which is kept for argmax.
struct Node {
  float m, l, u, s, weight, largest;
  int argmax;
#if SECOND
  float m_motion, l_motion, u_motion, s_motion;
#endif
};

// The numbers with which a token pulls its logits (C12)-(C15), (C26).
struct Pull {
  float m, ln_l, mean_shift, both, eta, dentropy;
  float own;  // da of its target
#if SECOND
  float both_motion, eta_motion, cot_entropy, m_motion, mean, entropy_motion;
  float own_motion;  // x of its target
#endif
};

// Numbers of all tokens that count, which the kernel `tokens` finds.
struct Common {
  double z_mean, z_lse, class_weight;  // Z and Z_z of (C10); sum of cw
  float largest;                       // the largest |cw|
  int counted;                         // the tokens that count
  int nothing_left;                    // 0: divide; 1: the share of a mean is 0; 2: NaN
};

KERNEL_ARGS(CrossEntropyArgs)

// The tokens of the chunk that count: the host does not know how many there are.
DEV int count_of(const CrossEntropyArgs& c) { return max(0, min(c.count, c.common->counted - c.first_token)); }

// Writes a sum to a gradient of D columns, or to one of numbers.
DEV void store(const CrossEntropyArgs& c, void* x, i64 at, float value) {
  if (c.wide) ((float*)x)[at] = value;
  else ((element*)x)[at] = rounded(value);
}
// dbias of 32 classes a block, from gradients of logits. Thread (y, x) adds up every eighth token.
template <class T> DEV void sum_bias(const CrossEntropyArgs& c, const T* gradients, float factor) {
  __shared__ float sums[8][32];
  const int x = threadIdx.x % 32, y = threadIdx.x / 32, column = blockIdx.x * 32 + x, count = count_of(c);
  float sum = 0;
  UNROLL_BY(8) for (int i = y; i < count; i += 8) sum += read(gradients[(i64)i * c.columns + column]);
  sums[y][x] = sum;
  for (int n = 4; n; n /= 2) {
    __syncthreads();
    if (y < n) sums[y][x] += sums[y + n][x];
  }
  if (y || column >= c.classes) return;
  sum = sums[0][x] * factor;
  if (!c.begins) sum = c.head_bias[column] + sum;
  if (c.ends) store(c, c.dbias, c.first_class + column, sum);
  else c.head_bias[column] = sum;
}

// ---- from a to z ----
// (C2)
DEV float logit(const CrossEntropyArgs& c, float a) {
  float scaled = a * c.factor;
  return c.ratio == 0 ? scaled : tanh_fast(scaled) * c.ratio;
}
// (C11), of the logit: at the end of the cap exactly 0.
DEV float slope(const CrossEntropyArgs& c, float z) {
  if (c.ratio == 0) return c.slope;
  float t = z / c.ratio;
  return fmaf(-t, t, 1.0f) * c.slope;
}
// r' / r of (C25), of the logit.
DEV float bend(const CrossEntropyArgs& c, float z) { return c.ratio == 0 ? 0 : z * (-2 * c.slope / c.ratio / c.ratio); }

// ---- weights that may be 0 ----
DEV bool is_nan(float x) { return x != x; }
// weight * x, but 0 * inf = 0: what has no weight adds nothing, however unlikely it is.
DEV double weigh(double weight, double x) { return weight == 0 && fabs(x) == (double)INF ? 0 : weight * x; }
DEV float weigh(float weight, float x) { return weight == 0 && fabsf(x) == INF ? 0 : weight * x; }
// The same of how x moves.
DEV double weigh_motion(double weight, double x, double motion) { return weight == 0 && fabs(x) == (double)INF ? 0 : weight * motion; }

// ---- the tree ----
// No z - m below this has a weight: e^-200 is 0 in f32. So 0 * (-inf) does not arise. NaN passes.
DEV float at_least(float shift) { return shift < -200 ? -200 : shift; }

// x > y, where NaN counts as the largest.
DEV bool exceeds(float x, float y) { return x > y || (is_nan(x) && !is_nan(y)); }

// l, u and s of a node with m in place of its own maximum.
struct Sums { float l, u, s; };
DEV Sums relative(const Node& x, float m) {
  if (x.m == m) return {x.l, x.u, x.s};                              // also where inf - inf is no shift
  if (x.m == -INF) return {0, 0, x.s - weigh(x.weight, m)};          // (-inf) * 0 is no entropy
  float shift = x.m - m, k = weight(x.m, m);
  return {__fmul_rn(k, x.l), k == 0 ? 0 : k * (x.u + shift * x.l), x.s + weigh(x.weight, shift)};
}
#if SECOND
DEV Sums relative_motion(const Node& x, float m, float motion) {
  float d = x.m_motion - motion, s = x.s_motion + x.weight * d;
  if (x.m == -INF) return {0, 0, s};
  float shift = at_least(x.m - m), k = x.m == m ? 1 : weight(shift, 0);
  return {k * (x.l_motion + d * x.l), k * ((x.u_motion + shift * x.l_motion) + d * (x.u + shift * x.l)), s};
}
#endif

// (C34) and (C40): y is of classes behind those of x.
DEV Node combined(const Node& x, const Node& y) {
  const bool second = exceeds(y.m, x.m);
  Node z = second ? y : x;
  if (exceeds(y.largest, x.largest)) z.largest = y.largest, z.argmax = y.argmax;
  else z.largest = x.largest, z.argmax = x.argmax;
  Sums a = relative(x, z.m), b = relative(y, z.m);
  z.l = a.l + b.l, z.u = a.u + b.u, z.s = a.s + b.s, z.weight = x.weight + y.weight;
#if SECOND
  a = relative_motion(x, z.m, z.m_motion), b = relative_motion(y, z.m, z.m_motion);
  z.l_motion = a.l + b.l, z.u_motion = a.u + b.u, z.s_motion = a.s + b.s;
#endif
  return z;
}

// Puts node `number` of those that the tree begins with into it: it waits where nothing is behind it so far.
DEV void push(const CrossEntropyArgs& c, int row, int number, Node node) {
  int level = 0;
  for (; number >> level & 1; level++) node = combined(c.nodes[(i64)level * c.rows + row], node);
  c.nodes[(i64)level * c.rows + row] = node;
}

// All classes of a token.
DEV Node total(const CrossEntropyArgs& c, int row) {
  const int tiles = (c.vocab + c.leaf - 1) / c.leaf;
  int level = __ffs(tiles) - 1;
  Node node = c.nodes[(i64)level * c.rows + row];
  for (level++; tiles >> level; level++)
    if (tiles >> level & 1) node = combined(c.nodes[(i64)level * c.rows + row], node);
  return node;
}
