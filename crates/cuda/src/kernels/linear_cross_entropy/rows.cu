// Kernels without products of matrices: the tree over tiles of classes, the outputs, the gradients of logits.

// ---- the tree ----
// Where the numbers 0 .. 7 of a lane lie in a tile of classes.
DEV int of_lane(int k) { return k / 4 * 128 + threadIdx.x % 32 * 4 + k % 4; }

// (C33) and (C39) of a token and a tile of classes, computed by a warp.
DEV Node leaf(const CrossEntropyArgs& c, int row, int tile, const Token& token) {
  const int first = c.first_class + tile * TILE, classes = min(TILE, c.classes - tile * TILE);
  const i64 at = (i64)row * c.columns + tile * TILE;
  float x[8];
  Node node = {};
  node.m = -INF, node.argmax = 0x7fffffff;
  UNROLL_ALL for (int k = 0; k < 8; k += 4) read_four(x + k, c.z + at + of_lane(k));
  UNROLL(k, 8) {
    if (of_lane(k) >= classes) continue;
    if (node.argmax == 0x7fffffff || exceeds(x[k], node.m)) node.m = x[k], node.argmax = first + of_lane(k);
    if (first + of_lane(k) == token.target) c.picked[2 * (c.first_token + row)] = x[k];
  }
  UNROLL_ALL for (int n = 16; n; n /= 2) {
    float m = __shfl_xor_sync(~0u, node.m, n);
    int argmax = __shfl_xor_sync(~0u, node.argmax, n);
    if (exceeds(m, node.m) || (!exceeds(node.m, m) && argmax < node.argmax)) node.m = m, node.argmax = argmax;
  }
  node.largest = node.m;
#if SECOND
  float moved[8];
  UNROLL_ALL for (int k = 0; k < 8; k += 4) read_four(moved + k, c.motion + at + of_lane(k));
  UNROLL(k, 8) {
    if (first + of_lane(k) == node.argmax && node.m != -INF) node.m_motion = moved[k];
    if (first + of_lane(k) == token.target) c.picked[2 * (c.first_token + row) + 1] = moved[k];
  }
  node.m_motion = __shfl_sync(~0u, node.m_motion, (node.argmax - first) % 128 / 4);
#endif
  UNROLL(k, 8) {
    if (of_lane(k) >= classes) continue;
    const float cw = c.class_weights ? c.class_weights[first + of_lane(k)] : 1, shift = x[k] - node.m;
    const bool some = node.m != -INF;
    const float e = some ? weight(x[k], node.m) : 0;
    node.l += e;
    if (c.entropy && e != 0) node.u += e * shift;
    if (c.smoothing > 0) node.weight += cw, node.s += weigh(cw, some ? shift : x[k]);
#if SECOND
    const float d = moved[k] - node.m_motion;
    if (some) node.l_motion += e * d;
    if (some && c.entropy) node.u_motion += e * d * at_least(shift);
    if (c.smoothing > 0) node.s_motion += cw * d;
#endif
  }
  node.l = lane_sum(node.l), node.u = lane_sum(node.u), node.s = lane_sum(node.s), node.weight = lane_sum(node.weight);
#if SECOND
  node.l_motion = lane_sum(node.l_motion), node.u_motion = lane_sum(node.u_motion), node.s_motion = lane_sum(node.s_motion);
#endif
  return node;
}

// The tiles of the chunk, of one token: eight at a time.
KERNEL(totals, CrossEntropyArgs c, 256) {
  __shared__ Node leaves[8];
  const int row = blockIdx.x, warp = threadIdx.x / 32, tiles = (c.classes + TILE - 1) / TILE;
  if (row >= count_of(c)) return;
  const Token token = c.tokens[c.first_token + row];
  NO_UNROLL for (int tile = 0; tile < tiles; tile += 8) {
    if (tile + warp < tiles) {
      Node node = leaf(c, row, tile + warp, token);
      if (threadIdx.x % 32 == 0) leaves[warp] = node;
    }
    __syncthreads();
    if (threadIdx.x == 0)
      for (int n = 0; n < min(8, tiles - tile); n++) push(c, row, c.first_class / TILE + tile + n, leaves[n]);
    __syncthreads();
  }
}

// ---- outputs and pulls ----
// A total, as far as the outputs need it, relative to m.
struct Totals {
  double ln_l, lse, logprob, mean_shift, entropy;
  double mean, lse_motion, logprob_motion, entropy_motion;  // (C41)
};
DEV Totals totals_of(const Node& x, const float* picked) {
  Totals t = {};
  const double ln_l = log((double)x.l);
  t.ln_l = x.l == 0 ? (double)__int_as_float(0x7fffffff) : ln_l;
  t.lse = x.m + ln_l;                                  // (C3)
  t.logprob = ((double)picked[0] - x.m) - t.ln_l;      // (C5)
  t.mean_shift = (double)x.u / x.l;
  t.entropy = t.ln_l - t.mean_shift;                   // (C6)
#if SECOND
  t.mean = (double)x.l_motion / x.l;
  t.lse_motion = x.m_motion + t.mean;                                  // (C22)
  t.logprob_motion = ((double)picked[1] - x.m_motion) - t.mean;        // (C32)
  t.entropy_motion = t.mean_shift * t.mean - (double)x.u_motion / x.l; // (C24)
#endif
  return t;
}

// x / z of (C9) and (C12), or what the problem wants where there is nothing to average.
DEV double share(const CrossEntropyArgs& c, double x, double z) {
  if (c.common->nothing_left == 0) return x / z;
  return c.common->nothing_left == 1 ? 0 : (double)__int_as_float(0x7fffffff);
}
// zeta kappa omega
DEV double square(const CrossEntropyArgs& c, const Token& token) {
  return c.square * token.weight * (c.square_weighted ? token.class_weight : 1);
}

// Writes what a token has of the outputs, and its terms of the loss; or how they move.
DEV void write(const CrossEntropyArgs& c, const Outputs& o, bool moved, int i, const Token& token, const Node& x, const Totals& t) {
  const double own = (double)token.class_weight, part = c.smoothing / c.vocab;
  double ce = 0, spread = c.common->class_weight * t.ln_l - x.s, ce_motion = 0;
  if (c.smoothing < 1) ce += (1 - c.smoothing) * weigh(own, -t.logprob);  // (C7)
  if (c.smoothing > 0) ce += part * spread;
  double terms[2] = {weigh((double)token.weight, ce), weigh(square(c, token), t.lse * t.lse)};
#if SECOND
  if (moved) {
    if (c.smoothing < 1) ce_motion += (1 - c.smoothing) * weigh_motion(own, -t.logprob, -t.logprob_motion);
    if (c.smoothing > 0) ce_motion += part * (c.common->class_weight * t.mean - x.s_motion);
    terms[0] = weigh_motion(token.weight, ce, ce_motion);
    terms[1] = weigh_motion(square(c, token), t.lse * t.lse, 2 * t.lse * t.lse_motion);
  }
#endif
  if (c.each) {
    if (o.loss) o.loss[token.index] = (float)(terms[0] + terms[1]);
  } else {
    c.terms[2 * i] = terms[0], c.terms[2 * i + 1] = terms[1];
  }
  if (o.lse) o.lse[token.index] = (float)(moved ? t.lse_motion : t.lse);
  if (o.logprob) o.logprob[token.index] = (float)(moved ? t.logprob_motion : t.logprob);
  if (o.entropy) o.entropy[token.index] = (float)(moved ? t.entropy_motion : t.entropy);
}

DEV double at(const float* x, int i) { return x ? x[i] : 0; }

// beta, lambda, eta and dentropy of cotangents (C12)-(C14).
struct Factors { double beta, lambda, eta, dentropy, gamma; };
DEV Factors factors(const CrossEntropyArgs& c, const Cotangents& x, const Token& token, double lse) {
  const double dloss = at(x.loss, c.each ? token.index : 0);
  const double g = share(c, dloss * token.weight, c.common->z_mean), gamma = share(c, dloss * square(c, token), c.common->z_lse);
  Factors f;
  // Of alpha = 1 and alpha = 0 the other part is left out, whatever it would be.
  f.eta = c.smoothing > 0 ? g * (c.smoothing / c.vocab) : 0;
  f.beta = (c.smoothing < 1 ? g * (1 - c.smoothing) * token.class_weight : 0) - at(x.logprob, token.index);
  f.lambda = (c.smoothing > 0 ? f.eta * c.common->class_weight : 0) + (gamma == 0 ? 0 : 2 * gamma * lse) + at(x.lse, token.index);
  f.dentropy = at(x.entropy, token.index), f.gamma = gamma;
  return f;
}

// The pull of a token, from its total.
DEV Pull pull_of(const CrossEntropyArgs& c, const Token& token, const Node& x, const Totals& t, const float* picked) {
  const Factors f = factors(c, c.first, token, t.lse);
  const double p = exp(t.logprob), miss = expm1(t.logprob), own = token.class_weight;  // (C20)
  const double shift = (double)picked[0] - x.m, q = (shift < -200 ? -200 : shift) - t.mean_shift;
  double dz = miss * f.beta + p * f.lambda - f.eta * own;  // (C15)
  if (c.entropy) dz -= f.dentropy * (p * q);
  Pull pull = {};
  pull.m = x.m, pull.ln_l = (float)t.ln_l, pull.mean_shift = (float)t.mean_shift;
  pull.both = (float)(f.beta + f.lambda), pull.eta = (float)f.eta, pull.dentropy = (float)f.dentropy;
  const float r = slope(c, picked[0]);
  pull.own = r * (float)dz;  // (C16)
#if SECOND
  Factors g = factors(c, c.second, token, t.lse);
  if (f.gamma != 0) g.lambda += 2 * f.gamma * t.lse_motion;
  const double both = f.beta + f.lambda, moved = t.logprob_motion;
  double X = miss * g.beta + p * (g.lambda + moved * both);  // (C26)
  if (c.entropy) X -= p * (g.dentropy * q + f.dentropy * (moved * q + moved + t.entropy_motion));
  X -= g.eta * own;
  pull.both_motion = (float)(g.beta + g.lambda), pull.eta_motion = (float)g.eta, pull.cot_entropy = (float)g.dentropy;
  pull.m_motion = x.m_motion, pull.mean = (float)t.mean, pull.entropy_motion = (float)t.entropy_motion;
  pull.own_motion = r * (float)X + bend(c, picked[0]) * picked[1] * (float)dz;  // (C27)
#endif
  return pull;
}

// From the totals of the tokens of the chunk: outputs, and what the tokens pull with.
KERNEL(finish, CrossEntropyArgs c, 128) {
  const int row = blockIdx.x * 128 + threadIdx.x, i = c.first_token + row;
  if (row >= count_of(c)) return;
  const Token token = c.tokens[i];
  const Node x = total(c, row);
  const float* picked = &c.picked[2 * i];
  const Totals t = totals_of(x, picked);
#if SECOND
  write(c, c.motions, true, i, token, x, t);
#else
  write(c, c.outputs, false, i, token, x, t);
  if (c.argmax) c.argmax[token.index] = x.argmax;
#endif
  if (c.pulls) c.pulls[i] = pull_of(c, token, x, t, picked);
}

// (C9) or (C31) from the terms of all tokens that count: of one block. Thread t adds up every 256th.
KERNEL(loss, CrossEntropyArgs c, 256) {
  __shared__ double sums[256][2];
  const int t = threadIdx.x;
  double a = 0, b = 0;
  const int counted = c.each ? 0 : c.common->counted;
  const double2* const terms = (const double2*)c.terms;
  int i = t;
  NO_UNROLL for (; i + 15 * 256 < counted; i += 16 * 256) {
    double2 some[16];  // read side by side
    UNROLL(k, 16) some[k] = terms[i + 256 * k];
    UNROLL(k, 16) a += some[k].x, b += some[k].y;
  }
  for (; i < counted; i += 256) a += terms[i].x, b += terms[i].y;
  sums[t][0] = a, sums[t][1] = b;
  for (int n = 128; n; n /= 2) {
    __syncthreads();
    if (t < n) sums[t][0] += sums[t + n][0], sums[t][1] += sums[t + n][1];
  }
  if (t) return;
  const Outputs& o = SECOND ? c.motions : c.outputs;
  if (o.loss && !c.each) *o.loss = (float)(share(c, sums[0][0], c.common->z_mean) + share(c, sums[0][1], c.common->z_lse));
  if (c.n_valid) *c.n_valid = c.common->counted;
  if (c.normaliser) *c.normaliser = (float)c.common->z_mean;
}

// ---- gradients of logits ----
// (C16) in place of a logit; in the second order (C27), and (C16) in place of its motion.
DEV void gradient(const CrossEntropyArgs& c, const Pull& y, float cw, float& z, float& motion) {
  const float shift = z - y.m, p = exp2_fast((shift - y.ln_l) * LOG2E), r = slope(c, z);  // (C4)
  const float q = at_least(shift) - y.mean_shift;
  float dz = p * y.both;
  if (c.entropy) dz -= y.dentropy * (p * q);
  if (c.smoothing > 0) dz -= y.eta * cw;
#if SECOND
  const float t = (motion - y.m_motion) - y.mean;
  float X = fmaf(t, y.both, y.both_motion);
  if (c.entropy) X -= y.cot_entropy * q + y.dentropy * (fmaf(t, q, t) + y.entropy_motion);
  X *= p;  // (C23), (C26)
  if (c.smoothing > 0) X -= y.eta_motion * cw;
  X *= r;
  if (c.ratio != 0) X += bend(c, z) * motion * dz;
  z = X, motion = r * dz;
#else
  z = r * dz;
#endif
}

// 1024 classes of a token a block. What lies beyond the last class becomes 0.
KERNEL(gradients, CrossEntropyArgs c, 256) {
  const int parts = (c.columns + 1023) / 1024, row = blockIdx.x / parts, first = blockIdx.x % parts * 1024 + threadIdx.x * 4;
  if (first >= c.columns || row >= count_of(c)) return;
  const int i = c.first_token + row, target = c.tokens[i].target - c.first_class;
  const Pull y = c.pulls[i];
  float* const at = c.z + (i64)row * c.columns + first;
  float z[4], motion[4] = {};
  read_four(z, at);
#if SECOND
  float* const moved = c.motion + (i64)row * c.columns + first;
  read_four(motion, moved);
#endif
  UNROLL(e, 4) {
    const int v = first + e;
    if (v >= c.classes) {
      z[e] = motion[e] = 0;
      continue;
    }
    gradient(c, y, c.class_weights ? c.class_weights[c.first_class + v] : 1, z[e], motion[e]);
#if SECOND
    if (v == target) z[e] = y.own_motion, motion[e] = y.own;
#else
    if (v == target) z[e] = y.own;
#endif
  }
  *(float4*)at = make_float4(z[0], z[1], z[2], z[3]);
#if SECOND
  *(float4*)moved = make_float4(motion[0], motion[1], motion[2], motion[3]);
#endif
}
