// Linear cross-entropy on the tensor cores of compute capability 9.0.
//
// One loop serves four kernels. A block computes tiles of 128 x 256 of a product; its rows are
//
//   leaves    tokens, its columns classes: of h w^T only the nodes of the tree leave the chip   (C1), (C2), (C33)
//   gradient  the same; da goes to memory in the storage type, for a chunk of classes           (C15), (C16)
//   hidden    tokens, its columns elements: da w                                                (C17)
//   head      classes, its columns elements: da^T h                                             (C18)
//
//   cluster of two blocks: two tiles of rows, the same columns; each block loads its own panel of a and half of the panel of
//     b, which it sends to both: 32 instead of 48 KiB of reads from the L2 a block and step of 64
//   producer: one thread;  consumers: two warpgroups, each 64 x 256 (128 accumulators a thread)
//
// Order of tiles: GROUP pairs of row tiles x all columns, so that tiles that run side by side share a and b in the L2.
enum Kind { LEAVES, GRADIENT, HIDDEN, HEAD };
constexpr int ROWS = 128, COLUMNS = 256, STEP = 64, STAGES = 4, GROUP = 16, PANEL = 64 * 128;
constexpr u32 A_BYTES = ROWS * STEP * 2, B_BYTES = COLUMNS * STEP * 2, STAGE = A_BYTES + B_BYTES;
// Dynamic shared memory: 1024 + AT_BARRIERS + 16 * STAGES, as `shared_bytes` says.
template <Kind K> constexpr u32 AT_BARRIERS = STAGES * STAGE + (K == GRADIENT ? 4 * PANEL : 0);

struct Product {
  TensorMap a, b, out;  // of the chunk: h and w; da and w; da and h. out: da, of `gradient`
  Call c;
  void* leaves;         // [tiles of the chunk][tokens of the chunk]
  const element* from;  // of `bias`: da; of `gather`: h
  element* to;          // of `gather`
  float* scale;         // of f16: what da of the chunk is multiplied by before it is stored
};
struct Corner { int row, column; };

// What a kernel's tiles are of.
// `count`: the tokens of the chunk that count.
template <Kind K> DEV int row_count(const Call& c, int count) { return K == HEAD ? c.classes : count; }
template <Kind K> DEV int column_count(const Call& c) { return K < HIDDEN ? c.classes : c.dim; }
template <Kind K> DEV int reduction(const Call& c, int count) { return K < HIDDEN ? c.dim : K == HIDDEN ? c.classes : count; }

DEV Corner corner(int t, int pairs, int columns) {
  int per_group = GROUP * columns, g = t / per_group, r = t - g * per_group, tall = min(GROUP, pairs - g * GROUP), c = r / tall;
  return {((g * GROUP + r - c * tall) * 2 + (int)cluster_rank()) * ROWS, c * COLUMNS};
}

// ---- feed ------------------------------------------------------------------------------------------------------------
template <Kind K> DEV void produce(u32 base, const Product& x, int count, int pairs, int columns) {
  u32 stage = 0, phase = 1;
  const u32 rank = cluster_rank();
  const int length = reduction<K>(x.c, count);
#pragma unroll 1
  for (int t = blockIdx.x / 2; t < pairs * columns; t += gridDim.x / 2) {
    const Corner at = corner(t, pairs, columns);
#pragma unroll 1
    for (int k = 0; k < length; k += STEP) {
      const u32 full = base + AT_BARRIERS<K> + 8 * stage, to = base + stage * STAGE;
      wait(full + 8 * STAGES, phase);  // both blocks have released it: the other's half lands here too
      expect_bytes(full, STAGE);
      if (K == HEAD) load2(to, &x.a, full, at.row, k), load2(to + PANEL, &x.a, full, at.row + 64, k);
      else load2(to, &x.a, full, k, at.row);
      if (K < HIDDEN) {
        load2_multicast(to + A_BYTES + rank * (B_BYTES / 2), &x.b, full, k, at.column + rank * (COLUMNS / 2), 3);
      } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int panel = 2 * rank + i;
          load2_multicast(to + A_BYTES + panel * PANEL, &x.b, full, at.column + 64 * panel, k, 3);
        }
      }
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
  }
}

// ---- multiply --------------------------------------------------------------------------------------------------------
// One step of 64 of a warpgroup's 64 rows.
template <Kind K> DEV void step(float (&z)[COLUMNS / 2], u32 a, u32 b, int group, bool add) {
#pragma unroll
  for (int i = 0; i < STEP / 16; i++) {
    const int more = add || i;
    if (K < HIDDEN) Mma<COLUMNS>::ss<K_MAJOR, K_MAJOR>(z, k_major(a + group * PANEL + 32 * i), k_major(b + 32 * i), more);
    else if (K == HIDDEN) Mma<COLUMNS>::ss<K_MAJOR, MN_MAJOR>(z, k_major(a + group * PANEL + 32 * i), mn_major(b + 2048 * i, PANEL), more);
    else Mma<COLUMNS>::ss<MN_MAJOR, MN_MAJOR>(z, mn_major(a + group * PANEL + 2048 * i, PANEL), mn_major(b + 2048 * i, PANEL), more);
  }
}

// Where a thread's accumulator 4j + 2r + e lies in a tile: row r of its two, and this column.
DEV int column_of(int j, int e) { return 8 * j + 2 * (threadIdx.x & 3) + e; }

// Calls f(i, class) for each accumulator of a row in the chunk's columns from `first` on; i counts from the row's first.
template <class F> DEV void each_class(int first, F f) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) f(4 * j + e, first + column_of(j, e));
}
DEV bool any_target(int target, int first) { return __any_sync(~0u, (u32)(target - first) < COLUMNS); }

// (C1), (C2): logits in place of the accumulators of both rows. What a problem does not have takes no time, here as below.
DEV void link(const Call& c, float (&z)[COLUMNS / 2], int first) {
  if (c.bias)
    each_class(first, [&](int i, int v) {
      const float bias = v < c.classes ? read(c.bias[c.first_class + v]) : 0;
      z[i] += bias, z[i + 2] += bias;
    });
  if (c.ratio != 0 || c.factor != 1)
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) z[i] = logit(c, z[i]);
}

// ---- leaves ----------------------------------------------------------------------------------------------------------
// (C33) of a row, whose logits of a tile of classes four lanes share. What lies beyond the last class is -inf.
DEV Node leaf(const Call& c, const float* z, int first) {
  Node n = {};
  float m[2] = {-INF, -INF}, l[2] = {}, u = 0, s = 0, w = 0;
  each_class(first, [&](int i, int) { m[i & 1] = max_nan(m[i & 1], z[i]); });
  n.m = max_nan(m[0], m[1]);
#pragma unroll
  for (int lane = 1; lane < 4; lane *= 2) n.m = max_nan(n.m, __shfl_xor_sync(~0u, n.m, lane));
  const float from = n.m == -INF ? 0 : n.m;
  each_class(first, [&](int i, int) { l[i & 1] += weight(z[i], from); });
  n.l = quad_sum(l[0] + l[1]);
  if (c.entropy) {
    each_class(first, [&](int i, int) { u += weight(z[i], from) * at_least(z[i] - from); });
    n.u = quad_sum(u);
  }
  if (c.smoothing > 0) {
    each_class(first, [&](int i, int v) {
      const float cw = v >= c.classes ? 0 : c.class_weights ? c.class_weights[c.first_class + v] : 1;
      w += cw, s += weigh(cw, z[i] - from);
    });
    n.s = quad_sum(s), n.weight = quad_sum(w);
  }
  if (c.argmax) {
    int best = 0x7fffffff;
    each_class(first, [&](int i, int v) {
      if (v < best && (z[i] == n.m || is_nan(z[i]))) best = v;
    });
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) best = min(best, __shfl_xor_sync(~0u, best, lane));
    n.argmax = c.first_class + best;
  }
  return n;
}

// Whether leaves have no more than m and l.
DEV bool is_short(const Call& c) { return !c.entropy && !(c.smoothing > 0) && !c.argmax; }

DEV void write_leaves(const Product& x, float (&z)[COLUMNS / 2], const Corner& at, int row, int count) {
  const Call& c = x.c;
  link(c, z, at.column);
  if (at.column + COLUMNS > c.classes)
    each_class(at.column, [&](int i, int v) { if (v >= c.classes) z[i] = z[i + 2] = -INF; });
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + 8 * r;
    const bool there = i < count;
    const int target = there ? c.tokens[c.first_token + i].target - c.first_class : -1;
    if (any_target(target, at.column))
      each_class(at.column, [&](int k, int v) { if (v == target) c.picked[2 * (c.first_token + i)] = z[2 * r + k]; });
    const Node n = leaf(c, z + 2 * r, at.column);
    if (lane_id() % 4 || !there) continue;
    const i64 to = (i64)(at.column / COLUMNS) * c.count + i;
    if (is_short(c)) ((float2*)x.leaves)[to] = make_float2(n.m, n.l);
    else ((Node*)x.leaves)[to] = n;
  }
}

// ---- gradients of logits ---------------------------------------------------------------------------------------------
// In f16 da of a chunk is stored times a power of two, so that its largest is near the largest number: a gradient of a mean
// over many tokens would be 0 else. With |da| <= M, M scale lies in [2^14, 2^15); down to 2^-28 M nothing underflows, and
// (N73) has room for what does. Both products are divided by it.
constexpr bool SCALED = STORAGE == 2;
DEV float scale_of(const Product& x) { return SCALED ? *x.scale : 1; }
DEV float unscale_of(const Product& x) { return SCALED ? __int_as_float((254 << 23) - __float_as_int(*x.scale)) : 1; }
DEV Pull scaled(Pull y, float scale) {
  if (SCALED) y.both *= scale, y.eta *= scale, y.dentropy *= scale, y.own *= scale;
  return y;
}
// |da| of a token is at most this, from (C15): p |ln p| <= 1/e. What is not finite has no say.
DEV float bound_of(const Call& c, const Pull& y) {
  const float terms = fabsf(y.both) + fabsf(y.dentropy) * (0.5f + fabsf(y.ln_l - y.mean_shift)) + fabsf(y.eta) * c.common->largest;
  const float bound = max(fabsf(c.slope) * terms, fabsf(y.own));
  return bound < INF ? bound : 0;
}
extern "C" __global__ void __launch_bounds__(1024) scale(const __grid_constant__ Product x) {
  __shared__ float warps[32];
  const Call& c = x.c;
  const int count = count_of(c);
  float bound = 0;
  for (int i = threadIdx.x; i < count; i += 1024) bound = max(bound, bound_of(c, c.pulls[c.first_token + i]));
#pragma unroll
  for (int lane = 1; lane < 32; lane *= 2) bound = max(bound, __shfl_xor_sync(~0u, bound, lane));
  if (lane_id() == 0) warps[threadIdx.x / 32] = bound;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < 32; i++) bound = max(bound, warps[i]);
  const int exponent = __float_as_int(bound) >> 23;  // of 2^(exponent - 127) <= bound
  *x.scale = bound == 0 ? 1 : __int_as_float(min(268 - exponent, 227) << 23);
}

// (C15), (C16) in place of the logits of a row.
DEV void pull_row(const Call& c, float* z, const Pull& y, int first, int target) {
  const float ln_l = y.ln_l * LOG2E, both = y.both * c.slope;
  auto p = [&](float z) { return exp2_fast(fmaf(z - y.m, LOG2E, -ln_l)); };  // (C4)
  if (c.ratio == 0 && !c.entropy && !(c.smoothing > 0)) {
    each_class(first, [&](int i, int) { z[i] = p(z[i]) * both; });
  } else {
    each_class(first, [&](int i, int v) {
      float dz = p(z[i]) * y.both;
      if (c.entropy) dz -= y.dentropy * (p(z[i]) * (at_least(z[i] - y.m) - y.mean_shift));
      if (c.smoothing > 0 && v < c.classes) dz -= y.eta * (c.class_weights ? c.class_weights[c.first_class + v] : 1);
      z[i] = slope(c, z[i]) * dz;
    });
  }
  if (any_target(target, first)) each_class(first, [&](int i, int v) { if (v == target) z[i] = y.own; });
  if (first + COLUMNS > c.classes) each_class(first, [&](int i, int v) { if (v >= c.classes) z[i] = 0; });
}

DEV void write_gradients(const Product& x, float (&z)[COLUMNS / 2], const Corner& at, int row, int count, u32 to, int group) {
  const Call& c = x.c;
  const int warp = threadIdx.x / 32 % 4, lane = lane_id();
  const float scale = scale_of(x);
  link(c, z, at.column);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + 8 * r;
    Pull y = {};
    int target = -1;
    if (i < count) y = scaled(c.pulls[c.first_token + i], scale), target = c.tokens[c.first_token + i].target - c.first_class;
    pull_row(c, z + 2 * r, y, at.column, target);
    // `head` multiplies whole steps: rows without a token are 0.
    if (i >= count) each_class(at.column, [&](int k, int) { z[2 * r + k] = 0; });
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (threadIdx.x % 128 == 0) store_wait_read();
    named_sync(1 + group, 128);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float* y = z + 64 * half + 8 * j;
      store_blocks(to + j / 4 * PANEL + swizzled(warp * 16 + lane % 16, (2 * j + lane / 16) % 8), pack(y[0], y[1]), pack(y[2], y[3]),
                   pack(y[4], y[5]), pack(y[6], y[7]));
    }
    proxy_fence();
    named_sync(1 + group, 128);
    if (threadIdx.x % 128 == 0) {
      const int column = at.column + half * 128, first = at.row + group * 64;
      store2(&x.out, to, column, first), store2(&x.out, to + PANEL, column + 64, first);
      store_commit();
    }
  }
}

// ---- gradients of operands -------------------------------------------------------------------------------------------
// Adds what the chunks before have summed; writes the sum, or the gradient after the last chunk.
template <Kind K> DEV void write_product(const Product& p, const float (&z)[COLUMNS / 2], const Corner& at, int row, int count) {
  const Call& c = p.c;
  const float unscale = unscale_of(p);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int i = row + 8 * r;
    if (i >= row_count<K>(c, count)) continue;
    float* const kept = (K == HIDDEN ? c.hidden : c.head) + (i64)i * c.dim;
    const i64 place = K == HIDDEN ? c.tokens[c.first_token + i].index : c.first_class + i;
    void* const to = K == HIDDEN ? c.dh : c.dw;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
      const int column = at.column + column_of(j, 0);
      if (column >= c.dim) continue;
      float2 x = make_float2(z[4 * j + 2 * r], z[4 * j + 2 * r + 1]);
      if (K == HEAD && count == 0) x = make_float2(0, 0);  // nothing was multiplied
      if (SCALED) x.x *= unscale, x.y *= unscale;
      if (!c.begins) {
        const float2 y = *(const float2*)(kept + column);
        x.x += y.x, x.y += y.y;
      }
      const i64 out = place * c.dim + column;
      if (!c.ends) *(float2*)(kept + column) = x;
      else if (c.wide) *(float2*)((float*)to + out) = x;
      else *(u32*)((element*)to + out) = pack(x.x, x.y);
    }
  }
}

// ---- the loop --------------------------------------------------------------------------------------------------------
template <Kind K> DEV void consume(u32 base, const Product& x, int count, int pairs, int columns) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = lane_id(), length = reduction<K>(x.c, count);
  const u32 full = base + AT_BARRIERS<K>, empty = full + 8 * STAGES;
  u32 stage = 0, phase = 0;
  auto release = [&](u32 i) { if (lane < 2) arrive_cluster(empty + 8 * i, lane); };
#pragma unroll 1
  for (int t = blockIdx.x / 2; t < pairs * columns; t += gridDim.x / 2) {
    const Corner at = corner(t, pairs, columns);
    const int row = at.row + group * 64 + warp * 16 + lane / 4;
    float z[COLUMNS / 2];
    u32 before = 0;
#pragma unroll 1
    for (int k = 0; k < length; k += STEP) {
      const u32 a = base + stage * STAGE;
      wait(full + 8 * stage, phase);
      pin(z), mma_begin();
      step<K>(z, a, a + A_BYTES, group, k > 0);
      mma_commit(), mma_wait<1>(), pin(z);  // the step before is done: its stage is free
      if (k) release(before);
      before = stage;
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    mma_wait<0>(), pin(z);
    release(before);
    if (K == LEAVES) write_leaves(x, z, at, row, count);
    else if (K == GRADIENT) write_gradients(x, z, at, row, count, base + STAGES * STAGE + group * 2 * PANEL, group);
    else write_product<K>(x, z, at, row, count);
  }
  if (K == GRADIENT && threadIdx.x % 128 == 0) store_wait();
}

template <Kind K> DEV void run(const Product& x) {
  extern __shared__ char bytes[];
  const u32 base = (shared(bytes) + 1023) & ~1023u;  // the same in both blocks
  const int count = count_of(x.c);
  const int pairs = (row_count<K>(x.c, count) + 2 * ROWS - 1) / (2 * ROWS), columns = (column_count<K>(x.c) + COLUMNS - 1) / COLUMNS;
  if (threadIdx.x == 0) {
    prefetch(&x.a), prefetch(&x.b);
    const u32 full = base + AT_BARRIERS<K>;
    for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(full + 8 * STAGES + 8 * i, 2 * 8);
    barrier_init_fence();
  }
  cluster_sync();  // no block sends before the other's barriers exist
  if (threadIdx.x < 128) {
    registers_down<40>();
    if (threadIdx.x == 0) produce<K>(base, x, count, pairs, columns);
  } else {
    registers_up<232>();
    consume<K>(base, x, count, pairs, columns);
  }
  cluster_sync();  // no block leaves while the other may still arrive at its barriers
}

#define KERNEL extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
KERNEL leaves(const __grid_constant__ Product x) { run<LEAVES>(x); }
KERNEL gradient(const __grid_constant__ Product x) { run<GRADIENT>(x); }
KERNEL hidden(const __grid_constant__ Product x) { run<HIDDEN>(x); }
KERNEL head(const __grid_constant__ Product x) { run<HEAD>(x); }

// ---- beside the products ---------------------------------------------------------------------------------------------
// The node of the tiles of a warp's lanes, of which there are `tiles`, in lane 0.
template <class T> DEV T of_next(T x, int lanes) { return __shfl_down_sync(~0u, x, lanes); }
DEV Node group_node(const Call& c, Node n, int tiles) {
  const bool is_short = ::is_short(c);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    Node other = n;
    other.m = of_next(n.m, lanes), other.l = of_next(n.l, lanes);
    if (!is_short) {
      other.u = of_next(n.u, lanes), other.s = of_next(n.s, lanes);
      other.weight = of_next(n.weight, lanes), other.argmax = of_next(n.argmax, lanes);
    }
    if ((int)lane_id() + lanes < tiles) n = combined(n, other);
  }
  return n;
}

// Puts the leaves of the chunk into the tree, 32 tiles at a time, of 32 tokens. They are read with a token a lane and put
// together with a tile a lane; then the nodes of 32 tiles are put into the tree with a token a lane.
extern "C" __global__ void __launch_bounds__(256) tree(const __grid_constant__ Product x) {
  __shared__ Node leaves[32][33], nodes[32];
  const Call& c = x.c;
  const int tiles = (c.classes + TILE - 1) / TILE, warp = threadIdx.x / 32, lane = lane_id(), first = blockIdx.x * 32;
  const int count = count_of(c);
  for (int group = 0; group < tiles; group += 32) {
    __syncthreads();
    for (int n = warp; n < 32; n += 8) {
      if (group + n >= tiles || first + lane >= count) continue;
      const i64 at = (i64)(group + n) * c.count + first + lane;
      Node leaf = {};
      if (is_short(c)) {
        const float2 y = ((const float2*)x.leaves)[at];
        leaf.m = y.x, leaf.l = y.y;
      } else {
        leaf = ((const Node*)x.leaves)[at];
      }
      leaves[n][lane] = leaf;
    }
    __syncthreads();
    for (int n = warp; n < 32 && first + n < count; n += 8) {
      Node node = group_node(c, leaves[lane][n], tiles - group);
      if (lane == 0) nodes[n] = node;
    }
    __syncthreads();
    if (warp == 0 && first + lane < count) push(c, first + lane, c.first_class / (32 * TILE) + group / 32, nodes[lane]);
  }
}

// The rows of h of the tokens of the chunk, side by side, in pieces of 16 bytes; 0 where no token counts.
extern "C" __global__ void __launch_bounds__(256) gather(const __grid_constant__ Product x) {
  const Call& c = x.c;
  const int pieces = c.dim / 8;
  const i64 t = (i64)blockIdx.x * 256 + threadIdx.x, row = t / pieces, piece = t - row * pieces;
  if (row >= c.count) return;
  const bool there = row < count_of(c);
  ((uint4*)x.to)[row * pieces + piece] = there ? ((const uint4*)x.from)[(i64)c.tokens[c.first_token + row].index * pieces + piece] : make_uint4(0, 0, 0, 0);
}

// (C19) as `bias` of cross_entropy.cu, of da in the storage type.
extern "C" __global__ void __launch_bounds__(256) bias(const __grid_constant__ Product p) {
  __shared__ float sums[8][32];
  const Call& c = p.c;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32, column = blockIdx.x * 32 + x, count = count_of(c);
  float sum = 0;
#pragma unroll 8
  for (int i = y; i < count; i += 8) sum += read(p.from[(i64)i * c.columns + column]);
  sums[y][x] = sum;
  for (int n = 4; n; n /= 2) {
    __syncthreads();
    if (y < n) sums[y][x] += sums[y + n][x];
  }
  if (y || column >= c.classes) return;
  sum = sums[0][x] * unscale_of(p);
  if (!c.begins) sum = c.head_bias[column] + sum;
  const i64 to = c.first_class + column;
  if (!c.ends) c.head_bias[column] = sum;
  else if (c.wide) ((float*)c.dbias)[to] = sum;
  else ((element*)c.dbias)[to] = rounded(sum);
}
