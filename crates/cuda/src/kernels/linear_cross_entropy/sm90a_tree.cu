// Beside the products of sm90a_products.cu: leaves are put into the tree, rows of h side by side, and da is
// summed for dbias.
//
// 32 nodes are put together by a thread, these by the warps of a block, level by level.

// (C34) of m and l alone, with the bits of `combined`, and without a branch.
DEV float2 combined(float2 x, float2 y) {
  const bool second = exceeds(y.x, x.x);
  const float m = second ? y.x : x.x, l = second ? y.y : x.y, other = second ? x.x : y.x, its = second ? x.y : y.y;
  const float moved = __fmul_rn(weight(other, m), its), adds = other == m ? its : other == -INF ? 0 : moved;
  return make_float2(m, is_nan(m) ? __int_as_float(0x7fffffff) : l + adds);
}
// The tree's node of N leaves that lie `count` numbers apart, of which some are there.
template <int N> DEV Node node_of(const Node* leaves, int count, int there) {
  if constexpr (N == 1) {
    return *leaves;
  } else {
    const Node left = node_of<N / 2>(leaves, count, there);
    if (there <= N / 2) return left;
    return combined(left, node_of<N / 2>(leaves + (i64)(N / 2) * count, count, there - N / 2));
  }
}
constexpr int NODE = 32;  // leaves of a node
DEV Node node(const Node* leaves, int count, int there) {
  return there >= NODE ? node_of<NODE>(leaves, count, NODE) : node_of<NODE>(leaves, count, there);
}
// The same of m and l: those of half of a node are read side by side.
DEV float2 half_node(const float2* leaves, int count, int there) {
  float2 x[NODE / 2];
  UNROLL(i, NODE / 2)
    if (i < there) x[i] = leaves[(i64)i * count];
  UNROLL_ALL for (int n = 1; n < NODE / 2; n *= 2)
    UNROLL_ALL for (int i = 0; i < NODE / 2; i += 2 * n)
      if (i + n < there) x[i] = combined(x[i], x[i + n]);
  return x[0];
}
DEV float2 node(const float2* leaves, int count, int there) {
  const float2* const right = leaves + (i64)(NODE / 2) * count;
  if (there >= NODE) {
    const float2 left = half_node(leaves, count, NODE);
    return combined(left, half_node(right, count, NODE));
  }
  const float2 left = half_node(leaves, count, there);
  return there > NODE / 2 ? combined(left, half_node(right, count, there - NODE / 2)) : left;
}

// Puts the leaves of the chunk into the tree: of 32 tokens a block, a lane for each. A warp makes nodes of 32 leaves;
// of up to 32 of these, those of a whole multiple, pairs are put together level by level. The node of number k at a
// level lies where its first one lay. One that has nothing behind it waits; one that has nothing before it finds what
// waited.
constexpr int TREE_TOKENS = 32, TREE_WARPS = 16;
DEV float2 to_leaf(const Node& x, float2) { return make_float2(x.m, x.l); }
DEV Node to_leaf(const Node& x, const Node&) { return x; }
DEV Node to_node(const Node& x) { return x; }
DEV Node to_node(float2 x) {
  Node node = {};
  node.m = x.x, node.l = x.y;
  return node;
}
template <class T> DEV void put_into_tree(const CrossEntropyArgs& c, const T* leaves, T (*nodes)[TREE_TOKENS]) {
  const int lane = lane_id(), warp = threadIdx.x / 32, row = blockIdx.x * TREE_TOKENS + lane;
  const int tiles = (c.classes + TILE - 1) / TILE, all = (tiles + NODE - 1) / NODE, before = c.first_class / (NODE * TILE);
  const bool there = row < count_of(c);
  int n = 0;
  NO_UNROLL for (int from = 0; from < all; from += n) {
    int a = before + from;
    n = min(all - from, 32 - a % 32);
    NO_UNROLL for (int k = warp; k < n && there; k += TREE_WARPS) {
      const int first = (from + k) * NODE;
      const T* const own = leaves + (i64)first * c.count + row;
      nodes[(a + k) % 32][lane] = node(own, c.count, tiles - first);
    }
    __syncthreads();
    NO_UNROLL for (int level = 0, b = a + n; a < b; a >>= 1, b >>= 1, level++) {
      Node* const waiting = &c.nodes[(i64)level * c.rows + row];
      auto at = [&](int k) -> T& { return nodes[(k << level) % 32][lane]; };
      const int pair = a / 2 + warp;
      if (pair < b / 2 && there) {
        const T left = 2 * pair < a ? to_leaf(*waiting, T()) : at(2 * pair);
        at(2 * pair) = combined(left, at(2 * pair + 1));
      }
      __syncthreads();
      if (b % 2 && warp == 0 && there) *waiting = to_node(at(b - 1));
    }
    __syncthreads();
  }
}
KERNEL(tree, ProductArgs x, 32 * TREE_WARPS, 2) {
  __shared__ Node nodes[32][TREE_TOKENS];
  if (blockIdx.x * TREE_TOKENS >= count_of(x.c)) return;
  if (is_short(x.c)) put_into_tree(x.c, (const float2*)x.leaves, (float2(*)[TREE_TOKENS])nodes);
  else put_into_tree(x.c, (const Node*)x.leaves, nodes);
}

// The rows of h of the tokens of the chunk, side by side, in pieces of 16 bytes; 0 where no token counts. Where all
// do, they lie so.
KERNEL(gather, ProductArgs x, 256) {
  const CrossEntropyArgs& c = x.c;
  if (all_count(c)) return;
  const int count = count_of(c), pieces = c.dim / 8;
  UNROLL_BY(4) for (i64 t = (i64)blockIdx.x * 256 + threadIdx.x; t < (i64)c.count * pieces; t += (i64)gridDim.x * 256) {
    const i64 row = t / pieces, piece = t - row * pieces;
    ((uint4*)x.to)[t] = row < count ? ((const uint4*)x.from)[(i64)c.tokens[c.first_token + row].index * pieces + piece] : make_uint4(0, 0, 0, 0);
  }
}

// (C19) of da in the storage type.
KERNEL(bias, ProductArgs p, 256) { sum_bias(p.c, p.from, unscale_of(p)); }
