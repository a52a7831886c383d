// The backward pass and the statistics of lazy_attention in fused multiply-adds. Tiles: as portable_forward.cu.
//
//   measure   a block owns 64 queries of one head: statistics  (E37)–(E44)
//   counts    a block owns 64 queries of one head: n
//   queries   a block owns 64 queries and walks the keys: P, g, Δ, Σ a P g k, Σ P k, of them dq  (E7), (E8), (E17)
//   keys      a block owns 64 keys of one key head and walks the queries of its heads: dS, dk, dv, and
//             what its diagonals add to dbias  (E9), (E11)–(E13)
//   dbias     a block owns 32 distances of one head  (E13)
//   dtau      a block owns one head  (E14)
//
// A tile without an active pair adds nothing to o, Δ, dv and dτ: neither g nor these products are computed, and no bit
// depends on that. To dq, dk and dbias it adds -P (Δ - dlse): it is left out only where every such factor is 0.
//
// Statistics are those of docs/lazy_attention.md; n is counted from the spans, from the flags, or in the fallback by a
// walk over S. `queries` needs no Δ beforehand: it sums P g k and P k apart, with Δ and Σ a g beside them, and joins
// them at the end (E17).
//
// dbias has no atomic additions: a block with 64 keys sums each diagonal of a tile of dS in f32 and adds the sums to a
// window of its own in scratch memory, 4 bytes for each distance that occurs, query head and tile of keys; the last
// kernel adds the windows in the order of the tiles. dtau adds one number a row.

DEV void counts_of(const LazyArgs& a, Shared& shared, const LazyTile& own) {
  const PairArgs& c = a.c;
  const LazyHead& head = own.head;
  const int row = own.row;
  if (!AGAIN && may_hide<1>(own)) raise<OF_OPERAND>(c.flags, own.group());
  int n[R] = {};
  Span spans[R];
  UNROLL(r, R) {
    spans[r] = head.span(row + row_of(r));
    if (tx() == 0) n[r] = max(spans[r].end - spans[r].begin, 0);
  }
  if (AGAIN || c.allowed) {
    UNROLL(r, R) n[r] = 0;
    NO_UNROLL for (int key = own.first_key(); key < own.seen.end; key += SIDE) {
      Pairs x = {};
      float score;
      if (AGAIN) products(shared, x, query_rows(c.q, head, row), key_rows(c.k, head, key), c.dim);
      UNROLL2(r, R, e, 4) n[r] += head.score(x[r][e], row + row_of(r), key + column_of(e), spans[r], score);
    }
  }
  UNROLL(r, R) {
    n[r] = row_sum(n[r]);
    const int i = row + row_of(r);
    if (tx() == 0 && i < head.s.queries) head.numbers[i] = counted(a.tau[head.head], head.lse[i] == -INF ? 0 : n[r]);
  }
}
KERNEL(counts, LazyArgs a, THREADS) {
  __shared__ Shared shared;
  each_query_tile(a, [&](const LazyTile& own) { counts_of(a, shared, own); });
}

DEV void queries_of(const LazyArgs& a, Shared& shared, const LazyTile& own) {
  const PairArgs& c = a.c;
  const LazyHead& head = own.head;
  const int row = own.row;
  Rows q = query_rows(c.q, head, row), dout = query_rows(c.dout, head, row);
  Sums<CD> sparse, dense;
  float lse[R], offset[R], delta[R] = {}, sum[R] = {};
  Span spans[R];
  clear<CD>(sparse), clear<CD>(dense);
  UNROLL(r, R) {
    int i = row + row_of(r);
    spans[r] = head.span(i), lse[r] = head.lse_at(i), offset[r] = head.number(i).offset;
  }
  NO_UNROLL for (int key = own.first_key(); key < own.seen.end; key += SIDE) {
    Pairs x, g;
    bool weighs = false, any = false;
    Rows k = key_rows(c.k, head, key);
    products(shared, x, q, k, c.dim);
    UNROLL2(r, R, e, 4) {
      x[r][e] = head.weight_of(x[r][e], row + row_of(r), key + column_of(e), spans[r], lse[r]);
      weighs |= x[r][e] != 0, any |= !hidden(x[r][e]) && is_active(x[r][e], offset[r]);
    }
    if (any = __syncthreads_or(any)) products(shared, g, dout, key_rows(c.v, head, key), c.value_dim);  // (E7)
    UNROLL2(r, R, e, 4) {
      const float p = x[r][e];
      const bool active = any && !hidden(p) && is_active(p, offset[r]);
      if (active) sum[r] += g[r][e], g[r][e] = shown(__fmul_rn(p, g[r][e])), delta[r] += g[r][e];  // (E8)
      else g[r][e] = HIDE;
      // The sum over the row is multiplied by a finite number.
      const float dlse = head.dlse(row + row_of(r));
      if (!hidden(p) && !is_finite(dlse)) x[r][e] = shown(__fmul_rn(p, dlse));
    }
    if (!c.dq.data) continue;
    if (__syncthreads_or(weighs)) {
      publish(shared, x);
      accumulate<CD>(shared, dense, k, c.first_dim, c.dim);
    }
    if (!any) continue;
    __syncthreads();
    publish(shared, g);
    accumulate<CD>(shared, sparse, k, c.first_dim, c.dim);
  }
  UNROLL(r, R) {
    delta[r] = row_sum(delta[r]), sum[r] = row_sum(sum[r]);
    const int i = row + row_of(r);
    const float dlse = head.dlse(i);
    // A Δ that is not finite means that some dS is NaN.
    const float factor = !is_finite(delta[r]) ? delta[r] - delta[r] : is_finite(dlse) ? dlse - delta[r] : 1;
    UNROLL(e, CD / 16) sparse[r][e] = fmaf(factor, dense[r][e], sparse[r][e]);  // (E17)
    if (tx() == 0 && i < head.s.queries && c.first_dim == 0) {
      Numbers& numbers = head.numbers[i];
      numbers.delta = delta[r] - dlse, numbers.sum = __fmul_rn(numbers.share, sum[r]);
    }
  }
  if (c.dq.data) store_queries<CD>(c.dq, head, row, sparse, Same{c.scale}, c.first_dim, c.dim);
}
KERNEL(queries, LazyArgs a, THREADS) {
  __shared__ Shared shared;
  each_query_tile(a, [&](const LazyTile& own) { queries_of(a, shared, own); });
}

// Adds the diagonals of a tile of dS, the factors that were published last, to a block's sums of distances. Diagonal t
// holds the pairs of query i and key i + 63 - t of the tile.
DEV void add_diagonals(const Shared& shared, float* window, int reach, int distance) {
  const int t = threadIdx.x, off = t - (SIDE - 1), d = distance + off;
  if (t >= 2 * SIDE - 1 || d < 0 || d >= reach) return;
  float sum = 0;
  UNROLL_BY(4) for (int i = 0; i < SIDE; i++)
    if ((u32)(i - off) < SIDE) sum += shared.p[factors(i) + i - off];
  window[d] += sum;
}

DEV void keys_of(const LazyArgs& a, Shared& shared, int at, int key_head) {
  const PairArgs& c = a.c;
  const Task task = c.tasks[at];
  const Sequence s = c.sequences[task.first];
  const int key = task.key_tile * SIDE, group = c.heads / c.key_heads;
  const bool wants_dk = c.dk.data && c.first_dim < c.dim, wants_dv = c.dv.data && c.first_value < c.value_dim;
  const bool wants_ds = wants_dk || a.windows;
  Rows k = key_rows(c.k, s, key_head, key), v = key_rows(c.v, s, key_head, key);
  Sums<CD> dk;
  Sums<CE> dv;
  clear<CD>(dk), clear<CE>(dv);
  if (a.windows)
    for (i64 d = threadIdx.x; d < (i64)group * a.reach; d += THREADS) a.windows[((i64)at * c.heads + key_head * group) * a.reach + d] = 0;
  NO_UNROLL for (int h = key_head * group; h < (key_head + 1) * group; h++) {
    LazyHead head(a, s, h);
    NO_UNROLL for (int row = 0; row < s.queries; row += SIDE) {
      if (!may_see(c, s, row, key)) continue;
      Rows q = query_rows(c.q, head, row), dout = query_rows(c.dout, head, row);
      Pairs x, ds;
      bool any = false, pulls = false;
      products(shared, x, k, q, c.dim);
      UNROLL(e, 4) {
        const int i = row + column_of(e);
        const Span span = head.span(i);
        const float lse = head.lse_at(i), offset = head.number(i).offset;
        UNROLL(r, R) {
          x[r][e] = head.weight_of(x[r][e], i, key + row_of(r), span, lse);
          any |= !hidden(x[r][e]) && is_active(x[r][e], offset);
        }
      }
      if ((any = __syncthreads_or(any)) && wants_ds) products(shared, ds, v, dout, c.value_dim);  // (E7)
      UNROLL(e, 4) {
        const Numbers numbers = head.number(row + column_of(e));
        UNROLL(r, R) {
          const float p = x[r][e];
          const bool active = any && !hidden(p) && is_active(p, numbers.offset);
          const float g = active ? ds[r][e] : 0;
          x[r][e] = active ? raised(p, numbers.offset) : HIDE;  // (E5)
          ds[r][e] = hidden(p) ? HIDE : shown(__fmul_rn(p, __fsub_rn(g, numbers.delta)));  // (E9)
          pulls |= ds[r][e] != 0;
        }
      }
      if (any && wants_dv) {
        publish(shared, x);
        accumulate<CE>(shared, dv, dout, c.first_value, c.value_dim);  // (E12)
      }
      if (!__syncthreads_or(wants_ds && pulls)) continue;
      publish(shared, ds);
      const int distance = row + head.shift - key;
      if (a.windows && distance + SIDE > 0 && distance - SIDE < a.reach) {
        __syncthreads();
        add_diagonals(shared, a.windows + ((i64)at * c.heads + h) * a.reach, a.reach, distance);  // (E13)
      }
      if (wants_dk) accumulate<CD>(shared, dk, q, c.first_dim, c.dim);  // (E11)
    }
  }
  if (wants_dk) store_keys<CD>(c.dk, s, key_head, key, dk, Same{c.scale}, c.first_dim, c.dim);
  if (wants_dv) store_keys<CE>(c.dv, s, key_head, key, dv, Same{1}, c.first_value, c.value_dim);
}
KERNEL(keys, LazyArgs a, THREADS) {
  __shared__ Shared shared;
  each_tile(a, a.c.key_heads, [&](int task, int head) { keys_of(a, shared, task, head); });
}

// Sparsity of the weights (E37)–(E44).
KERNEL_ARGS(MeasureArgs)
constexpr int FIGURES = 6;

KERNEL(measure, MeasureArgs of, THREADS) {
  __shared__ Shared shared;
  const PairArgs& c = of.lazy.c;
  const LazyTile own(of.lazy, c, blockIdx.x);
  const LazyHead& head = own.head;
  const Sequence& s = head.s;
  const int row = own.row;
  const i64 at = ((i64)s.batch * c.heads + head.head) * c.queries + s.query_start + row;
  const i64 columns = (c.keys + of.tile_keys - 1) / of.tile_keys, rows = (c.queries + of.tile_queries - 1) / of.tile_queries;
  u32* states = of.states + ((i64)s.batch * c.heads + head.head) * rows * columns;
  NO_UNROLL for (int key = own.first_key(); key < own.seen.end; key += SIDE) {
    Pairs x;
    products(shared, x, query_rows(c.q, head, row), key_rows(c.k, head, key), c.dim);
    NO_UNROLL for (int r = 0; r < R; r++) {
      const int i = row + row_of(r);
      const float lse = head.lse_at(i), offset = head.number(i).offset;
      float sums[4] = {};  // visible, active, Σ e, Σ P of the inactive
      UNROLL(e, 4) {
        float product = 0;
        UNROLL(t, R)
          if (t == r) product = x[t][e];
        const int j = key + column_of(e);
        const float p = head.weight_of(product, i, j, head.span(i), lse);
        if (hidden(p)) continue;
        const bool active = is_active(p, offset);
        const float kept = active ? raised(p, offset) : 0;
        sums[0] += 1, sums[1] += active, sums[2] += kept, sums[3] += active ? 0 : p;
        float* first = of.figures + (at + i - row) * FIGURES + 4;
        if (j == 0) first[0] = p, first[1] = kept;
        u32* state = states + (s.query_start + i) / of.tile_queries * columns + (s.key_start + j) / of.tile_keys;
        if (*(volatile u32*)state < 1u + active) atomicMax(state, 1u + active);  // of whole numbers: any order will do
      }
      UNROLL(t, 4) {
        sums[t] = row_sum(sums[t]);
        if (tx() == 0 && i < s.queries) of.figures[(at + i - row) * FIGURES + t] += sums[t];
      }
    }
  }
}

// dbias (E13): the sums of the tiles of keys, in their order. A warp has 32 distances and every n-th task.
KERNEL(dbias, LazyArgs a, THREADS) {
  __shared__ float sums[THREADS / 32][32];
  const int groups = (a.width + 31) / 32, head = blockIdx.x / groups, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int d = blockIdx.x % groups * 32 + lane;
  float sum = 0;
  if (d < a.reach)
    UNROLL_BY(4) for (int task = warp; task < a.windowed; task += THREADS / 32) sum += a.windows[((i64)task * a.c.heads + head) * a.reach + d];
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp || d >= a.width) return;
  for (int w = 1; w < THREADS / 32; w++) sum += sums[w][lane];
  a.dbias[(i64)head * a.width + d] = sum;
}

// dτ (E14): a block has one head.
KERNEL(dtau, LazyArgs a, THREADS) {
  const PairArgs& c = a.c;
  float sum = 0;
  for (int batch = 0; batch < c.batch; batch++) {
    const Numbers* numbers = a.numbers + ((i64)batch * c.heads + blockIdx.x) * c.queries;
    UNROLL_BY(4) for (int i = threadIdx.x; i < c.queries; i += THREADS)
      if (c.spans[(i64)batch * c.queries + i].begin >= 0) sum += numbers[i].sum;
  }
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) a.dtau[blockIdx.x] = sum;
}
