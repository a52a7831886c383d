// Linear cross-entropy: the products of a chunk of tokens and classes, in f32 fused multiply-adds. The host walks
// chunks:
//
//   logits, motions   z = link(h w^T + bias), and how they move: [tokens][classes] of the chunk  (C1), (C2), (C21)
//   totals, finish    the tree over tiles of 256 classes, then outputs and pulls of tokens  (C33), (C34)
//   gradients         da in place of z; in the second order x, and da in place of the motions  (C16), (C27)
//   hidden            dh: 128 tokens x 128 elements a block, tile by tile of classes, along the tree  (C17), (C28)
//   head, bias        dw and dbias: 128 classes x 128 elements a block, token by token  (C18), (C29)
//
// `tokens` (tokens.cu) lists what counts and finds Z and n. Logits of a chunk are f32, and in the second
// order so are their motions; da takes their place. A chunk with all classes keeps its logits for the gradients: 6TVD
// operations, else 8TVD, and 10TVD where dw has a sweep of its own (linear_cross_entropy/run.rs).
//
// Outputs, dh, and dw of the first order have the same bits for any budget. gw, dbias and gbias do not: chunks of
// tokens are terms of their sums.

// Rows of h, or of how it moves, of the tokens of the chunk.
DEV Along<element> of_tokens(const CrossEntropyArgs& c, const element* x, int first) {
  const int row = first + threadIdx.x % SIDE;
  return {row < count_of(c) ? x + (i64)c.tokens[c.first_token + row].index * c.dim : 0, c.dim, c.whole != 0};
}
// Rows of w, or of how it moves, of the classes of the chunk.
DEV Along<element> of_classes(const CrossEntropyArgs& c, const element* x, int first) {
  const int row = first + threadIdx.x % SIDE;
  return {row < c.classes ? x + (i64)(c.first_class + row) * c.dim : 0, c.dim, c.whole != 0};
}

// A block has the tile of tokens `blockIdx % tiles`: those that run side by side read the same rows of w.
struct Corner { int token, column; };
DEV Corner corner(const CrossEntropyArgs& c) {
  const int tiles = (c.count + SIDE - 1) / SIDE;  // those whose tokens do not count have nothing to do
  return {(int)(blockIdx.x % tiles) * SIDE, (int)(blockIdx.x / tiles) * SIDE};
}

// The flag by which a filter leaves out a tile of the chunk; a band is 128 tokens.
DEV i64 flag_of(const CrossEntropyArgs& c, int band, int tile) {
  return (i64)(c.first_token / SIDE + band) * ((c.vocab + TILE - 1) / TILE) + c.first_class / TILE + tile;
}
DEV bool is_left_out(const CrossEntropyArgs& c, int band, int tile) { return c.left_out && c.left_out[flag_of(c, band, tile)]; }

// Calls f(place, class, sum) with four logits of the tile at a time.
template <class F> DEV void each_four(const CrossEntropyArgs& c, const Corner& at, const float (&sum)[8][8], F f) {
  const int count = count_of(c);
  UNROLL(r, 8) {
    const int row = at.token + spread(ty(), r);
    if (row >= count) continue;
    UNROLL_ALL for (int half = 0; half < 8; half += 4) {
      const int column = at.column + spread(tx(), half);
      float x[4] = {sum[r][half], sum[r][half + 1], sum[r][half + 2], sum[r][half + 3]};
      f((i64)row * c.columns + column, column, x);
    }
  }
}
DEV void add_bias(const CrossEntropyArgs& c, const element* bias, int column, float (&x)[4]) {
  UNROLL(e, 4)
    if (bias && column + e < c.classes) x[e] += read(bias[c.first_class + column + e]);
}

KERNEL(logits, CrossEntropyArgs c, THREADS, 2) {
  __shared__ Shared shared;
  const Corner at = corner(c);
  if (at.token >= count_of(c)) return;
  float sum[8][8];
  clear(sum);
  multiply(shared, sum, of_tokens(c, c.h, at.token), of_classes(c, c.w, at.column), c.dim);
  each_four(c, at, sum, [&](i64 place, int column, float (&x)[4]) {
    add_bias(c, c.bias, column, x);
    *(float4*)(c.z + place) = make_float4(logit(c, x[0]), logit(c, x[1]), logit(c, x[2]), logit(c, x[3]));
  });
}

#if SECOND
KERNEL(motions, CrossEntropyArgs c, THREADS, 2) {
  __shared__ Shared shared;
  const Corner at = corner(c);
  if (at.token >= count_of(c)) return;
  float sum[8][8];
  clear(sum);
  if (c.ddh) multiply(shared, sum, of_tokens(c, c.ddh, at.token), of_classes(c, c.w, at.column), c.dim);
  if (c.ddw) multiply(shared, sum, of_tokens(c, c.h, at.token), of_classes(c, c.ddw, at.column), c.dim);
  each_four(c, at, sum, [&](i64 place, int column, float (&x)[4]) {
    float z[4];
    add_bias(c, c.ddbias, column, x), read_four(z, c.z + place);
    *(float4*)(c.motion + place) = make_float4(slope(c, z[0]) * x[0], slope(c, z[1]) * x[1], slope(c, z[2]) * x[2], slope(c, z[3]) * x[3]);
  });
}
#endif

// sum += the gradients of logits of a tile of classes times its rows of x.
DEV void add_classes(const CrossEntropyArgs& c, Shared& shared, float (&sum)[8][8], const float* gradients, const element* x, int token, int tile, int column) {
  const int row = token + threadIdx.x % SIDE, first = tile * TILE, classes = min(TILE, c.classes - first);
  const Along<float> a = {row < count_of(c) ? gradients + (i64)row * c.columns + first : 0, classes, true};
  const element* from = x + (i64)(c.first_class + first) * c.dim + column;
  const i64 stride = c.dim;
  multiply(shared, sum, a, across<element>([=](int k) { return from + k * stride; }, classes, c.dim - column, c.whole != 0), classes);
}

KERNEL(hidden, CrossEntropyArgs c, THREADS, 2) {
  __shared__ Shared shared;
  const Corner at = corner(c);
  if (at.token >= count_of(c)) return;
  const int tiles = (c.classes + TILE - 1) / TILE, all = (c.vocab + TILE - 1) / TILE;
  auto waiting = [&](int level) { return c.hidden + ((i64)level * gridDim.x + blockIdx.x) * (SIDE * SIDE); };
  float sum[8][8];
  NO_UNROLL for (int tile = 0; tile < tiles; tile++) {
    clear(sum);
    if (!is_left_out(c, at.token / SIDE, tile)) add_classes(c, shared, sum, c.z, c.w, at.token, tile, at.column);
#if SECOND
    if (c.ddw) add_classes(c, shared, sum, c.motion, c.ddw, at.token, tile, at.column);
#endif
    const int number = c.first_class / TILE + tile;
    int level = 0;
    for (; number >> level & 1; level++) add_kept(waiting(level), sum);
    keep(waiting(level), sum);
  }
  if (!c.ends) return;
  clear(sum);
  for (int level = 0, first = 1; all >> level; level++)
    if (all >> level & 1) {
      if (first) fetch_kept(waiting(level), sum);
      else add_kept(waiting(level), sum);
      first = 0;
    }
  UNROLL(r, 8) {
    const int row = at.token + spread(ty(), r);
    if (row >= count_of(c)) continue;
    const i64 to = (i64)c.tokens[c.first_token + row].index * c.dim;
    UNROLL(e, 8) {
      const int column = at.column + spread(tx(), e);
      if (column < c.dim) store(c, c.dh, to + column, sum[r][e]);
    }
  }
}

// sum += the gradients of logits of the tokens of the chunk, for some classes, times their rows of x. A filter leaves
// out bands of tokens.
DEV void add_tokens(const CrossEntropyArgs& c, Shared& shared, float (&sum)[8][8], const float* gradients, const element* x, int first, int column) {
  const i64 columns = c.columns, stride = c.dim;
  const element* to = x + column;
  const int count = count_of(c);
  NO_UNROLL for (int begin = 0, end; begin < count; begin = end) {
    end = c.left_out ? min(count, begin + SIDE) : count;
    if (is_left_out(c, begin / SIDE, first / TILE)) continue;
    const float* from = gradients + begin * columns + first;
    const Token* tokens = c.tokens + c.first_token + begin;
    auto a = across<float>([=](int k) { return from + k * columns; }, end - begin, SIDE, true);
    auto b = across<element>([=](int k) { return to + tokens[k].index * stride; }, end - begin, c.dim - column, c.whole != 0);
    multiply(shared, sum, a, b, end - begin);
  }
}

KERNEL(head, CrossEntropyArgs c, THREADS, 2) {
  __shared__ Shared shared;
  const int parts = (c.dim + SIDE - 1) / SIDE, first = blockIdx.x / parts * SIDE, from = blockIdx.x % parts * SIDE;
  float sum[8][8];
  auto each = [&](auto f) {
    UNROLL(r, 8) {
      const int row = first + spread(ty(), r);
      if (row >= c.classes) continue;
      const i64 at = (i64)row * c.dim + from;
      UNROLL(e, 8)
        if (from + spread(tx(), e) < c.dim) f(at + spread(tx(), e), sum[r][e]);
    }
  };
  clear(sum);
  if (!c.begins) each([&](i64 at, float& x) { x = c.head[at]; });
  add_tokens(c, shared, sum, c.z, c.h, first, from);
#if SECOND
  if (c.ddh) add_tokens(c, shared, sum, c.motion, c.ddh, first, from);
#endif
  if (c.ends) each([&](i64 at, float x) { store(c, c.dw, (i64)c.first_class * c.dim + at, x); });
  else each([&](i64 at, float x) { c.head[at] = x; });
}

// (C19), (C30)
KERNEL(bias, CrossEntropyArgs c, 256) { sum_bias(c, c.z, 1); }
