// lazy_attention on any GPU from sm_80 on, in f32 arithmetic whatever the storage. Bits depend on one sequence and one
// key head alone, as in attention/portable_forward.cu; dbias and dτ are sums over all sequences, in order.
//
//   scores    a block owns 64 queries of one head and walks the keys: lse, n, and the largest score of each row in
//             each stripe, which tells the stripes that may hold an active pair  (E1)–(E3), (E18)
//   values    a block owns 64 queries of one head and walks those stripes: e, o += e·v; or Σ a P v  (E4)–(E6), (E47)
//
// A stripe is a tile of 64 keys up to 2048 keys, and a multiple of that beyond: at most 32 stripes, one word for 64
// queries. It tells by (E18), with a guard for the roundings of the exponential, which stripes `values` walks.
//
// Compile-time: as attention/portable_forward.cu, without VALUES; AGAIN (1: the fallback, of groups that have a flag).
using LazyTile = QueryTile<LazyHead>;

// The tile of a block by its task and its head; in the fallback all tiles of groups that have a flag, in turns.
template <class F> DEV void each_tile(const LazyArgs& a, int heads, F body) {
  if (!AGAIN) return body(blockIdx.x / heads, blockIdx.x % heads);
  if (!a.c.flags[0]) return;
  NO_UNROLL for (int number = blockIdx.x; number < a.tiles; number += gridDim.x) {
    const int task = number / heads, head = number % heads, key_head = head / (heads / a.c.key_heads);
    if (!a.c.flags[1 + a.c.tasks[task].first * a.c.key_heads + key_head]) continue;
    body(task, head);
    __syncthreads();  // the next tile takes the same shared memory
  }
}
template <class F> DEV void each_query_tile(const LazyArgs& a, F body) {
  each_tile(a, a.c.heads, [&](int task, int head) { body(LazyTile(a, a.c, a.c.tasks[task], head)); });
}

DEV void scores_of(const LazyArgs& a, Shared& shared, u32* words, const LazyTile& own) {
  const PairArgs& c = a.c;
  const LazyHead& head = own.head;
  const int row = own.row;
  Rows q = query_rows(c.q, head, row);
  float m[R], l[R] = {}, tops[R][2];  // the largest scores of the stripes tx and tx + 16
  int n[R] = {};
  Span spans[R];
  UNROLL(r, R) spans[r] = head.span(row + row_of(r)), m[r] = tops[r][0] = tops[r][1] = -INF;
  NO_UNROLL for (int key = own.first_key(); key < own.seen.end; key += SIDE) {
    Pairs x;
    products(shared, x, q, key_rows(c.k, head, key), c.dim);
    const int stripe = stripe_of(head.s, key) - tx();
    UNROLL(r, R) {
      float top = -INF;
      UNROLL(e, 4) {
        float score = -INF;
        bool visible = head.score(x[r][e], row + row_of(r), key + column_of(e), spans[r], score);
        x[r][e] = visible ? score : -INF;
        n[r] += visible;
        top = max_nan(top, x[r][e]);
      }
      top = row_max(top);
      if (stripe == 0) tops[r][0] = max_nan(tops[r][0], top);
      if (stripe == 16) tops[r][1] = max_nan(tops[r][1], top);
      if (top == -INF) continue;  // the row sees nothing here
      top = max_nan(m[r], top);
      float sum = 0;
      UNROLL(e, 4) sum += x[r][e] == -INF ? 0 : weight(x[r][e], top);
      l[r] = fmaf(l[r], weight(m[r], top), sum), m[r] = top;
    }
  }
  u32 bits = 0;
  UNROLL(r, R) {
    l[r] = row_sum(l[r]), n[r] = row_sum(n[r]);
    const int i = row + row_of(r);
    const float lse = n[r] ? m[r] + logf(l[r]) : -INF;  // (E3)
    const Numbers numbers = counted(a.tau[head.head], n[r]);
    if (tx() == 0 && i < head.s.queries) ((float*)head.lse)[i] = lse, head.numbers[i] = numbers;
    UNROLL(half, 2)
      if (may_be_active(tops[r][half], lse, numbers.offset)) bits |= 1u << (16 * half + tx());
  }
  bits = __reduce_or_sync(~0u, bits);
  if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = bits;
  __syncthreads();
  if (threadIdx.x) return;
  for (int w = 1; w < THREADS / 32; w++) bits |= words[w];
  head.stripes(row) = bits;
}
KERNEL(scores, LazyArgs a, THREADS) {
  __shared__ Shared shared;
  __shared__ u32 words[THREADS / 32];
  each_query_tile(a, [&](const LazyTile& own) { scores_of(a, shared, words, own); });
}

DEV void values_of(const LazyArgs& a, Shared& shared, const LazyTile& own) {
  const PairArgs& c = a.c;
  const LazyHead& head = own.head;
  const int row = own.row;
  Rows q = query_rows(c.q, head, row);
  const u32 stripes = head.stripes(row);
  Sums<CE> o;
  float lse[R], offset[R];
  Span spans[R];
  clear<CE>(o);
  UNROLL(r, R) {
    int i = row + row_of(r);
    spans[r] = head.span(i), lse[r] = head.lse_at(i), offset[r] = head.number(i).offset;
  }
  NO_UNROLL for (int key = own.first_key(); key < own.seen.end; key += SIDE) {
    if (!(stripes >> stripe_of(head.s, key) & 1)) continue;
    Pairs x;
    bool any = false;
    products(shared, x, q, key_rows(c.k, head, key), c.dim);
    UNROLL2(r, R, e, 4) {
      float p = head.weight_of(x[r][e], row + row_of(r), key + column_of(e), spans[r], lse[r]);
      bool active = !hidden(p) && is_active(p, offset[r]);
      x[r][e] = !active ? HIDE : a.pv.data ? shown(p) : raised(p, offset[r]);  // (E5)
      any |= active;
    }
    if (!__syncthreads_or(any)) continue;
    publish(shared, x);
    accumulate<CE>(shared, o, key_rows(c.v, head, key), c.first_value, c.value_dim);  // (E6)
  }
  store_queries<CE>(a.pv.data ? a.pv : c.o, head, row, o, Same{1}, c.first_value, c.value_dim, (bool)a.pv.data);
}
KERNEL(values, LazyArgs a, THREADS) {
  __shared__ Shared shared;
  each_query_tile(a, [&](const LazyTile& own) { values_of(a, shared, own); });
}
