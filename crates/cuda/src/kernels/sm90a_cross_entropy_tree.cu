// Beside the products of sm90a_cross_entropy.cu: leaves are put into the tree, rows of h side by side, and da is summed for dbias.

// (C34) of m and l alone, with the bits of `combined`.
DEV float2 combined(float2 x, float2 y) {
  const float m = exceeds(y.x, x.x) ? y.x : x.x;
  auto l = [&](float2 n) { return n.x == m ? n.y : n.x == -INF ? 0 : __fmul_rn(weight(n.x, m), n.y); };
  return make_float2(m, l(x) + l(y));
}
// The tree's node of N leaves that lie `count` numbers apart, of which some are there.
template <int N, class T> DEV T node_of(const T* leaves, int count, int there) {
  if constexpr (N == 1) {
    return *leaves;
  } else {
    const T left = node_of<N / 2>(leaves, count, there);
    if (there <= N / 2) return left;
    return combined(left, node_of<N / 2>(leaves + (i64)(N / 2) * count, count, there - N / 2));
  }
}
constexpr int NODE = 32;  // leaves of a node
template <class T> DEV void put_node(T* leaves, int count, int there) {
  *leaves = there >= NODE ? node_of<NODE>(leaves, count, NODE) : node_of<NODE>(leaves, count, there);
}

// Puts 32 leaves of a token together, in place of the first of them. A thread has a token and 32 tiles of classes.
extern "C" __global__ void __launch_bounds__(128) nodes(const __grid_constant__ Product x) {
  const Call& c = x.c;
  const int tiles = (c.classes + TILE - 1) / TILE, each = (tiles + NODE - 1) / NODE;
  const int first = blockIdx.x % each * NODE, row = blockIdx.x / each * 128 + threadIdx.x;
  if (row >= count_of(c)) return;
  const i64 at = (i64)first * c.count + row;
  if (is_short(c)) put_node((float2*)x.leaves + at, c.count, tiles - first);
  else put_node((Node*)x.leaves + at, c.count, tiles - first);
}

// Puts these nodes into the tree, of a token a thread. Eight of them are read at a time.
extern "C" __global__ void __launch_bounds__(64) tree(const __grid_constant__ Product x) {
  const Call& c = x.c;
  const int nodes = (c.classes + NODE * TILE - 1) / (NODE * TILE), row = blockIdx.x * 64 + threadIdx.x;
  if (row >= count_of(c)) return;
  auto read = [&](int n) {
    const i64 at = (i64)n * NODE * c.count + row;
    if (!is_short(c)) return ((const Node*)x.leaves)[at];
    const float2 y = ((const float2*)x.leaves)[at];
    Node node = {};
    node.m = y.x, node.l = y.y;
    return node;
  };
#pragma unroll 1
  for (int first = 0; first < nodes; first += 8) {
    Node some[8];
#pragma unroll
    for (int n = 0; n < 8; n++)
      if (first + n < nodes) some[n] = read(first + n);
#pragma unroll
    for (int n = 0; n < 8; n++)
      if (first + n < nodes) push(c, row, c.first_class / (NODE * TILE) + first + n, some[n]);
  }
}

// The rows of h of the tokens of the chunk, side by side, in pieces of 16 bytes; 0 where no token counts. Where all do, they lie so.
extern "C" __global__ void __launch_bounds__(256) gather(const __grid_constant__ Product x) {
  const Call& c = x.c;
  const int pieces = c.dim / 8;
  const i64 t = (i64)blockIdx.x * 256 + threadIdx.x, row = t / pieces, piece = t - row * pieces;
  if (row >= c.count || all_count(c)) return;
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
