// The backward sweeps of sm80.cuh: `means`, `queries` and `keys`.
constexpr int NEAR = 2 * SIDE, NUMBERS = 3 * SIDE;  // the bias of a tile, and τ/n, Δ - dlse and lse of its rows
CHECK_SHARED(means, TILE_BYTES + 8 * NEAR);
CHECK_SHARED(queries, TILE_BYTES + 8 * NEAR);
CHECK_SHARED(keys, TILE_BYTES + 8 * (NEAR + NUMBERS));
typedef QueryBlock<LazyHead, 1, SIDE> LazyBlock;
typedef Pairs<1, SIDE> LazyPairs;

struct LazyQueries : LazyBody {
  float base[2], offset[2];
  METHOD LazyQueries(const LazyArgs& a, const LazyHead& head, int row) : LazyBody(a) {
    UNROLL(r, 2) base[r] = base_of(head.lse_at(row + row_of<1>(r))), offset[r] = head.number(row + row_of<1>(r)).offset;
  }
  METHOD float* bias(int stage) const { return numbers_at(TILE_BYTES) + stage * NEAR; }
  METHOD void load(const LazyBlock& own, int key, int stage) const { load_bias<SIDE>(bias(stage), own.head, own.row, key); }
  // P and, where a pair of the warp is active, g (E7) of a tile; whether there is such a pair.
  template <bool MASKED, class F> METHOD bool weights(const LazyBlock& own, LazyPairs& x, int key, int stage, F gradients) const {
    float most = 0;
    score_tile<MASKED, 1>(x, own.head, own.row, key, own.spans, bias(stage));
    each(x, [&](float& p, int r, int) { weigh<MASKED>(p, most, base[r], offset[r]); });
    const bool any = __any_sync(~0u, most != 0);
    if (any) gradients(true);
    return any;
  }
};

struct Means : LazyQueries {
  float delta[2] = {}, sum[2] = {};
  using LazyQueries::LazyQueries;
  template <bool MASKED, class F> METHOD Use pairs(const LazyBlock& own, LazyPairs& x, LazyPairs& g, int key, int stage, F gradients) {
    if (!weights<MASKED>(own, x, key, stage, gradients)) return {};
    each(x, g, [&](float p, float g, int r, int) {
      const float y = attends<MASKED>(p, offset[r]) ? g : 0;
      sum[r] += y, delta[r] = fmaf(p, y, delta[r]);  // (E8)
    });
    return {};
  }
};
KERNEL(means, LazyArgs a, THREADS, CD + CE > 128 ? 2 : 3) {
  const LazyBlock own(a, a.c, tile_of_block(a.c.heads));
  Means body(a, own.head, own.row);
  walk_keys<false>(a.c, own, body);
  UNROLL(r, 2) {
    const float delta = quad_sum(body.delta[r]), sum = quad_sum(body.sum[r]);
    const int i = own.row + row_of<1>(r);
    if (lane_id() % 4 || i >= own.head.s.queries) continue;
    Numbers& numbers = own.head.numbers[i];
    numbers.delta = delta - own.head.dlse(i), numbers.sum = __fmul_rn(numbers.share, sum);
    if (!is_finite(numbers.delta)) raise<OF_DELTA>(a.c.flags, own.group());
  }
}

struct Pulls : LazyQueries {
  float delta[2];
  METHOD Pulls(const LazyArgs& a, const LazyHead& head, int row) : LazyQueries(a, head, row) {
    UNROLL(r, 2) delta[r] = head.number(row + row_of<1>(r)).delta;
  }
  template <bool MASKED, class F> METHOD Use pairs(const LazyBlock& own, LazyPairs& x, LazyPairs& g, int key, int stage, F gradients) const {
    bool pulls = false;
    if (!weights<MASKED>(own, x, key, stage, gradients)) clear<1, SIDE>(g);
    each(x, g, [&](float p, float& ds, int r, int) { ds = pull<MASKED>(p, ds, offset[r], delta[r]), pulls |= ds != 0; });
    return {__any_sync(~0u, pulls) != 0};
  }
};
KERNEL(queries, LazyArgs a, THREADS, CD + CE > 128 ? 1 : 2) {
  const LazyBlock own(a, a.c, tile_of_block(a.c.heads));
  Pulls body(a, own.head, own.row);
  walk_keys<true>(a.c, own, body);  // (E10)
}

// The place of a key and two queries in a tile of dS in f32, which takes the place of q and dout.
DEV float2* pair_at(float* ds, int j, int i) { return (float2*)(ds + j * SIDE + (i ^ j % 8 * 8)); }
// As `add_diagonals` of portable_backward.cu.
DEV void add_diagonals(float* ds, float* window, int reach, int distance) {
  const int off = (int)threadIdx.x - (SIDE - 1), d = distance + off;
  if (off >= SIDE || d < 0 || d >= reach) return;
  float sum = 0;
  UNROLL_BY(8) for (int j = 0; j < SIDE; j++)
    if ((u32)(j + off) < SIDE) sum += ds[j * SIDE + (j + off ^ j % 8 * 8)];
  window[d] += sum;
}

// As `score_tile`, of 64 keys in rows and 64 queries in columns.
template <bool MASKED> DEV void score_turned(LazyPairs& s, const LazyHead& head, int row, int key, const float* bias) {
  const int column = own_column();
  UNROLL(i, SIDE / 2) s[0][i / 4][i % 4] = __fmul_rn(head.c.scale, s[0][i / 4][i % 4]);
  if (is_near<SIDE>(head, row, key)) {
    float near[9][2];
    UNROLL2(d, 9, e, 2) near[d][e] = bias[SIDE - 1 + column - row_of<1>(0) + 8 * (d - 1) + e];
    UNROLL(i, SIDE / 2) s[0][i / 4][i % 4] = __fadd_rn(s[0][i / 4][i % 4], near[i / 4 - i / 2 % 2 + 1][i % 2]);
  }
  if (!MASKED) return;
  UNROLL(e, SIDE / 4) {
    const int i = row + 8 * (e / 2) + column + e % 2;
    const Span span = head.span(i);
    UNROLL(r, 2)
      if (!is_visible(head, i, key + row_of<1>(r), span)) s[0][e / 2][2 * r + e % 2] = -INF;
  }
}

// A stage has the bias of its tile, and τ/n, Δ - dlse and lse of its queries.
struct LazyKeys : LazyBody {
  static constexpr int NUMBERS = NEAR + ::NUMBERS;
  using LazyBody::LazyBody;
  METHOD LazyHead head(const Sequence& s, int h) const { return LazyHead(a, s, h); }
  // The sums of distances of a head that a tile of keys leaves.
  METHOD float* windows(const KeyTile& own, int head) const { return a.windows + ((i64)own.number * a.c.heads + head) * a.reach; }
  METHOD void begin(const KeyTile& own, u32) const {
    if (!a.windows) return;
    float* const at = windows(own, own.key_head * own.group);
    for (i64 d = threadIdx.x; d < (i64)own.group * a.reach; d += THREADS) at[d] = 0;
  }
  METHOD void load(const LazyHead& head, int row, int key, float* near) const {
    const int i = row + threadIdx.x % SIDE;
    const u32 to = shared(near + NEAR + threadIdx.x);
    const Numbers* numbers = i < head.s.queries ? head.numbers + i : a.numbers;
    load_bias<SIDE>(near, head, row, key);
    copy_4(to, threadIdx.x < SIDE ? &numbers->offset : &numbers->delta, i < head.s.queries);
    if (threadIdx.x < SIDE) copy_4(to + 8 * SIDE, i < head.s.queries ? head.lse + i : a.c.lse, i < head.s.queries);
  }
  template <bool MASKED, class F>
  METHOD Use pairs(const LazyHead& head, LazyPairs& x, LazyPairs& ds, int row, int key, const float* near, F gradients) const {
    const float* numbers = near + NEAR + own_column();
    float most = 0;
    bool pulls = false;
    score_turned<MASKED>(x, head, row, key, near);
    UNROLL(e, SIDE / 4) {
      const int column = 8 * (e / 2) + e % 2;
      const float base = base_of(numbers[2 * SIDE + column]);
      UNROLL(r, 2) weigh<MASKED>(x[0][e / 2][2 * r + e % 2], most, base, numbers[column]);
    }
    const bool any = __any_sync(~0u, most != 0);
    gradients(any && (a.c.dk.data || a.windows));  // (E7)
    UNROLL(e, SIDE / 4) {
      const int column = 8 * (e / 2) + e % 2;
      const float offset = numbers[column], delta = numbers[SIDE + column];
      UNROLL(r, 2) {
        float &p = x[0][e / 2][2 * r + e % 2], &g = ds[0][e / 2][2 * r + e % 2];
        g = pull<MASKED>(p, g, offset, delta), pulls |= g != 0;
        p = MASKED && hidden(p) ? 0 : max_nan(raised(p, offset), 0);  // (E5)
      }
    }
    return {pulls, any};
  }
  METHOD void after_keys(const KeyTile& own, const LazyHead& head, int row, const LazyPairs& ds, u32 q, u32, u32) const {
    const int distance = row + head.shift - own.key;
    if (!a.windows || distance + SIDE <= 0 || distance - SIDE >= a.reach) return;
    float* const tile = numbers_at(q - shared_begin());
    __syncthreads();  // all are done with q and dout
    UNROLL(i, SIDE / 4) {
      const int r = i % 2, j = i / 2;
      *pair_at(tile, row_of<1>(r), 8 * j + 2 * (lane_id() % 4)) = make_float2(ds[0][j][2 * r], ds[0][j][2 * r + 1]);
    }
    __syncthreads();
    add_diagonals(tile, windows(own, head.head), a.reach, distance);  // (E13)
  }
};
KERNEL(keys, LazyArgs a, THREADS, CD + CE > 128 ? 1 : 2) {
  const KeyBlock<1, SIDE, true, true> own(a.c);
  LazyKeys body(a);
  walk_queries(a.c, own, body);  // (E11), (E12)
}
