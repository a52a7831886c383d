// The gradient filter: which tiles of 128 tokens and 256 classes are left out of dh and dw, and what is certain of
// that (C36)-(C38). A tile is left out by both products. Never left out are tiles with a number that is not finite.
//
//   norms     ||h_i|| of the tokens that count; the largest ||w_v|| of each tile of classes
//   measure   of each tile of a chunk: its largest |da|, and what leaving it out would add to B_i and to C_v
//   certify   adds that up, of tiles below the threshold;  choose: takes tiles as long as no bound exceeds its budget
//
// `norms` reads h and w once. With budgets `choose` takes the tiles in turn, those of a diagonal – one tile of each
// band of tokens – in one launch. Where dw has a sweep of its own, it leaves out the same tiles. Beside the budget of
// the pass this takes an eightieth of the logits, 8 bytes a token, 4 a class and one a tile.
#if !SECOND
KERNEL_ARGS(FilterArgs)

// A sum of at most 257 terms, rounded to nearest, is at most this; so is what a few roundings make of it.
DEV float enlarged(float x) { return x * (1 + 1.0f / 32768); }
DEV float up(float x) { return x * (1 + 1.0f / 4194304); }
// The most that products below the normal range may lose.
constexpr float LOST = 1.7936620343357659e-43f;  // 2^-142

// The norm of a row, rounded up, by a warp; infinite where an element is not finite.
DEV float norm(const element* row, int dim) {
  double sum = 0;
  for (int d = threadIdx.x % 32; d < dim; d += 32) {
    const double x = read(row[d]);
    sum += x * x;
  }
  sum = lane_sum(sum);
  return sum < (double)INF ? up((float)sqrt(sum)) : INF;
}

// Blocks of 8 tokens, then of a tile of classes.
KERNEL(norms, FilterArgs f, 256) {
  __shared__ float warps[8];
  const CrossEntropyArgs& c = f.c;
  const int tokens = (c.all + 7) / 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if ((int)blockIdx.x < tokens) {
    const int i = blockIdx.x * 8 + warp;
    if (i >= c.common->counted) return;
    const float x = norm(c.h + (i64)c.tokens[i].index * c.dim, c.dim);
    if (lane == 0) f.of_tokens[i] = x;
    return;
  }
  const int tile = blockIdx.x - tokens;
  float most = 0;
  for (int v = tile * TILE + warp; v < min(c.vocab, tile * TILE + TILE); v += 8) most = max(most, norm(c.w + (i64)v * c.dim, c.dim));
  if (lane == 0) warps[warp] = most;
  __syncthreads();
  if (threadIdx.x) return;
  for (int n = 1; n < 8; n++) most = max(most, warps[n]);
  f.of_classes[tile] = most;
}

// A block has a tile, a warp every eighth of its tokens: a lane sums eight classes.
KERNEL(measure, FilterArgs f, 256) {
  __shared__ float sums[8][TILE];
  const CrossEntropyArgs& c = f.c;
  const int tiles = (c.classes + TILE - 1) / TILE, band = blockIdx.x / tiles, tile = blockIdx.x % tiles, count = count_of(c);
  const int warp = threadIdx.x / 32, first = band * SIDE;
  if (first >= count) return;
  const float widest = f.of_classes[c.first_class / TILE + tile];
  float classes[8] = {}, most = 0;
  bool kept = false;
  for (int row = first + warp; row < min(count, first + SIDE); row += 8) {
    const float size = f.of_tokens[c.first_token + row];
    float sum = 0;
    UNROLL_ALL for (int k = 0; k < 8; k += 4) {
      float x[4];
      read_four(x, c.z + (i64)row * c.columns + tile * TILE + of_lane(k));
      UNROLL(e, 4) most = max_nan(most, fabsf(x[e])), sum += fabsf(x[e]), classes[k + e] += fabsf(x[e]) * size;
    }
    sum = lane_sum(sum);
    const float bound = sum == 0 && widest < INF ? 0 : up(enlarged(sum) * widest) + LOST;
    kept |= !(bound < INF);
    if (threadIdx.x % 32 == 0) f.by_token[(i64)row * tiles + tile] = bound;
  }
  UNROLL(k, 8) sums[warp][of_lane(k)] = classes[k];
  __syncthreads();
  float sum = 0;
  for (int n = 0; n < 8; n++) sum += sums[n][threadIdx.x];
  sum = enlarged(sum) + LOST;
  f.by_class[(i64)band * c.columns + tile * TILE + threadIdx.x] = sum;
  kept |= !(sum < INF) || !(most < f.eps);
  kept = __syncthreads_or(kept);
  if (threadIdx.x == 0) f.left_out[flag_of(c, band, tile)] = !kept;
}

// A thread has a token, or a class: it adds up what is left out of its row.
KERNEL(certify, FilterArgs f, 256) {
  const CrossEntropyArgs& c = f.c;
  const int t = blockIdx.x * 256 + threadIdx.x, tiles = (c.classes + TILE - 1) / TILE, count = count_of(c);
  if (t < count) {
    float& sum = f.dh[c.tokens[c.first_token + t].index];
    for (int tile = 0; tile < tiles; tile++)
      if (f.left_out[flag_of(c, t / SIDE, tile)]) sum = up(sum + f.by_token[(i64)t * tiles + tile]);
  }
  const int v = t - c.count;
  if (v >= 0 && v < c.classes) {
    float& sum = f.dw[c.first_class + v];
    for (int band = 0; band * SIDE < count; band++)
      if (f.left_out[flag_of(c, band, v / TILE)]) sum = up(sum + f.by_class[(i64)band * c.columns + v]);
  }
}

// Of every band of tokens the tiles take their turn in the order of classes, of every tile of classes in that of
// tokens. So those of a diagonal, from the first band's tile `diagonal` on, are chosen side by side. A thread has a
// class of the tile, half of them a token of the band.
KERNEL(choose, FilterArgs f, 256) {
  const CrossEntropyArgs& c = f.c;
  const int t = threadIdx.x, tiles = (c.classes + TILE - 1) / TILE, count = count_of(c);
  const int band = max(0, f.diagonal - tiles + 1) + blockIdx.x, tile = f.diagonal - band, row = band * SIDE + t, v = tile * TILE + t;
  if (tile < 0 || band * SIDE >= count) return;
  const i64 flag = flag_of(c, band, tile);
  if (!f.left_out[flag]) return;
  const bool has_token = t < SIDE && row < count, has_class = v < c.classes;
  float* const of_token = &f.dh[has_token ? c.tokens[c.first_token + row].index : 0];
  float* const of_class = &f.dw[c.first_class + (has_class ? v : 0)];
  const float b = has_token ? up(*of_token + f.by_token[(i64)row * tiles + tile]) : 0;
  const float d = has_class ? up(*of_class + f.by_class[(i64)band * c.columns + v]) : 0;
  if (__syncthreads_or(!(b <= f.most_dh) || !(d <= f.most_dw))) {
    if (t == 0) f.left_out[flag] = 0;
    return;
  }
  if (has_token) *of_token = b;
  if (has_class) *of_class = d;
}
#endif
