// Linear cross-entropy with its classes in shards. The passes of a shard go over one node of the tree after the other,
// each as if its classes were all: what is different is here.
//
//   place               targets as classes of a node
//   identities, partials   what a node adds to every token  (C33)
//   combine             the totals of all shards, along the tree  (C34)
//   recall              totals where `finish` finds those of one device
//   add, sum            dh: of the nodes of a shard in their order, of all shards along the tree  (C17)
//
// w, bias, class weights, dw and dbias begin at the node. `combine` folds the partials of all shards by a list that
// the host makes of the cuts, which says how often the top of a stack is put together; `sum` has a list of the same
// kind. Chunks have as many tokens as in the pass over all classes, so that sums over tokens have its bits.

// As it travels: ten words. What no output of the problem needs is 0; argmax is then none, and the largest logit -inf.
struct Partial {
  float m, l, u, s, weight;
  u32 classes;
  float target;  // z_y, if it is one of the classes
  u32 owned, argmax;
  float largest;
};
constexpr u32 NO_CLASS = ~0u;
DEV Partial identity() { return {-INF, 0, 0, 0, 0, 0, 0, 0, NO_CLASS, -INF}; }

KERNEL_ARGS(ShardArgs)
KERNEL_ARGS(FoldArgs)

KERNEL(place, ShardArgs x, 128) {
  const CrossEntropyArgs& c = x.c;
  const int row = blockIdx.x * 128 + threadIdx.x;
  if (row >= count_of(c)) return;
  Token& token = c.tokens[c.first_token + row];
  const i64 target = c.targets[token.index];
  token.target = target >= 0 && target < x.vocab ? (int)target - x.first : -1;
}

KERNEL(identities, ShardArgs x, 128) {
  const i64 i = (i64)blockIdx.x * 128 + threadIdx.x;
  if (i < (i64)x.nodes * x.c.all) x.partials[i] = identity();
}

KERNEL(partials, ShardArgs x, 128) {
  const CrossEntropyArgs& c = x.c;
  const int row = blockIdx.x * 128 + threadIdx.x, i = c.first_token + row;
  if (row >= count_of(c)) return;
  const Token token = c.tokens[i];
  const Node n = total(c, row);
  const bool owned = (u32)token.target < (u32)c.vocab;
  Partial p = {n.m, n.l, c.entropy ? n.u : 0, 0, 0, (u32)c.vocab, owned ? c.picked[2 * i] : 0, owned, NO_CLASS, -INF};
  if (c.smoothing > 0) p.s = n.s, p.weight = n.weight;
  if (x.argmax) p.argmax = (u32)(x.first + n.argmax), p.largest = n.largest;
  x.partials[token.index] = p;
}

// A token a thread; what waits lies in shared memory.
KERNEL(combine, FoldArgs f, 32) {
  extern __shared__ char bytes[];
  Node* const waiting = (Node*)bytes + threadIdx.x;
  const i64 i = (i64)blockIdx.x * 32 + threadIdx.x;
  if (i >= f.count) return;
  Partial all = identity();
  int top = 0;
  NO_UNROLL for (int k = 0; k < f.parts; k++) {
    const Partial p = f.partials[k * f.count + i];
    Node node = {p.m, p.l, p.u, p.s, p.weight, p.largest, (int)p.argmax};
    for (u32 n = f.merges[k]; n; n--) node = combined(waiting[32 * --top], node);
    waiting[32 * top++] = node;
    all.classes += p.classes, all.owned += p.owned;
    if (p.owned) all.target = p.target;
  }
  if (all.classes) {  // else the token is ignored
    const Node n = *waiting;
    all.m = n.m, all.l = n.l;
    if (f.entropy) all.u = n.u;
    if (f.smoothing) all.s = n.s, all.weight = n.weight;
    if (f.argmax) all.argmax = (u32)n.argmax, all.largest = n.largest;
  }
  f.totals[i] = all;
}

// NaN where the shards are not all classes. A target without an owner, or with two, has no logit.
KERNEL(recall, ShardArgs x, 128) {
  const CrossEntropyArgs& c = x.c;
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= c.common->counted) return;
  const Partial p = x.partials[c.tokens[i].index];
  const bool all = p.classes == (u32)x.vocab;
  c.nodes[i] = {all ? p.m : NAN_F, all ? p.l : NAN_F, p.u, p.s, p.weight, p.largest, (int)p.argmax};
  c.picked[2 * i] = all && p.owned == 1 ? p.target : NAN_F;
}

// 1024 elements of a token a block.
KERNEL(add, ShardArgs x, 256) {
  const CrossEntropyArgs& c = x.c;
  const int parts = (c.dim + 1023) / 1024, row = blockIdx.x / parts, first = blockIdx.x % parts * 1024 + threadIdx.x;
  if (row >= count_of(c)) return;
  const i64 at = (i64)c.tokens[c.first_token + row].index * c.dim;
  UNROLL_ALL for (int e = first; e < first + 1024; e += 256)
    if (e < c.dim) x.sums[at + e] += x.part[at + e];
}

DEV float4 plus(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }

// Four elements a thread.
KERNEL(sum, FoldArgs f, 64) {
  extern __shared__ char bytes[];
  float4* const waiting = (float4*)bytes + threadIdx.x;
  const i64 at = 4 * ((i64)blockIdx.x * 64 + threadIdx.x);
  if (at >= f.count) return;
  const int there = (int)min((i64)4, f.count - at);
  int top = 0;
  NO_UNROLL for (int k = 0; k < f.parts; k++) {
    const float* from = f.sums + k * f.count + at;
    float4 x;
    if (f.whole) x = *(const float4*)from;
    else x = make_float4(from[0], there > 1 ? from[1] : 0, there > 2 ? from[2] : 0, there > 3 ? from[3] : 0);
    for (u32 n = f.merges[k]; n; n--) x = plus(waiting[64 * --top], x);
    waiting[64 * top++] = x;
  }
  const float4 y = f.parts ? *waiting : make_float4(0, 0, 0, 0);
  const float sums[4] = {y.x, y.y, y.z, y.w};
  UNROLL(e, 4) {
    if (e >= there) break;
    if (f.wide) ((float*)f.dh)[at + e] = sums[e];
    else ((element*)f.dh)[at + e] = rounded(sums[e]);
  }
}
