// The backward sweeps of sm80.cuh: `means`, `queries` and `keys`.

constexpr u32 D_BYTES = SIDE * CD * 2, E_BYTES = SIDE * CE * 2;
constexpr int NEAR = 2 * SIDE, NUMBERS = 3 * SIDE;  // the bias of a tile, and τ/n, Δ - dlse and lse of its rows
constexpr u32 BLOCK_BYTES = 3 * (D_BYTES + E_BYTES) + 8 * NEAR;
CHECK_SHARED(means, BLOCK_BYTES);
CHECK_SHARED(queries, BLOCK_BYTES);
CHECK_SHARED(keys, BLOCK_BYTES + 8 * NUMBERS);

// A block that owns 64 queries, its walk over the keys, and P of a tile.
struct Walk {
  const LazyArgs& a;
  LazyHead head;
  u32 q, dout, k, v;
  float* bias;
  int row, first, end;
  bool odd;
  float base[2], offset[2];
  Span spans[2];

  METHOD Walk(const LazyArgs& lazy, Task task, int h) : a(lazy), head(lazy, lazy.c.sequences[task.first], h) {
    q = shared_begin(), dout = q + D_BYTES, k = dout + E_BYTES, v = k + 2 * D_BYTES;
    bias = numbers_at(3 * (D_BYTES + E_BYTES));
    row = task.row_tile * SIDE, odd = *a.odd;
    Tile tile = a.c.tiles[head.s.first_tile + task.row_tile];
    first = tile.begin / SIDE, end = tile.begin < tile.end ? (tile.end + SIDE - 1) / SIDE : first;
    UNROLL(r, 2) {
      const int i = row + row_of<1>(r);
      spans[r] = head.span(i), base[r] = base_of(head.lse_at(i)), offset[r] = head.number(i).offset;
    }
    if (first == end) return;
    load_tile<SIDE, CD>(q, query_rows(a.c.q, head, row), a.c.dim), load_tile<SIDE, CE>(dout, query_rows(a.c.dout, head, row), a.c.value_dim);
    load(first, 0);
  }
  METHOD void load(int n, int stage) {
    load_tile<SIDE, CD>(k + stage * D_BYTES, key_rows(a.c.k, head, n * SIDE), a.c.dim);
    load_tile<SIDE, CE>(v + stage * E_BYTES, key_rows(a.c.v, head, n * SIDE), a.c.value_dim);
    load_bias<SIDE>(bias + stage * NEAR, head, row, n * SIDE);
    copy_commit();
  }
  // Calls `visit` for every tile of keys, when it is here, with its number and its stage.
  template <class F> METHOD void each(const F& visit) {
#pragma unroll 1
    for (int n = first, stage = 0; n < end; n++, stage ^= 1) {
      copy_wait<0>();
      __syncthreads();  // k_n and v_n are here, and all are done with the other stage
      if (n + 1 < end) load(n + 1, stage ^ 1);
      visit(n, stage);
    }
  }
  // P and, where a pair of the warp is active, g (E7) of a tile; whether there is such a pair.
  template <bool MASKED> METHOD bool weights(float (&x)[1][SIDE / 8][4], float (&g)[1][SIDE / 8][4], int n, int stage) {
    float most = 0;
    score_tile<MASKED, 1>(x, head, row, n * SIDE, spans, bias + stage * NEAR);
    UNROLL(i, SIDE / 2) weigh<MASKED>(x[0][i / 4][i % 4], most, base[i / 2 % 2], offset[i / 2 % 2]);
    const bool any = __any_sync(~0u, most != 0);
    if (any) products<1, SIDE, CE>(g, dout, v + stage * E_BYTES);
    return any;
  }
  METHOD bool is_masked(int n) const { return ::is_masked<1>(head, n * SIDE, spans, odd); }
};

extern "C" __global__ void __launch_bounds__(THREADS, CD + CE > 128 ? 2 : 3) means(const __grid_constant__ LazyArgs a) {
  Place own = tile_of_block(a.c.heads);
  Walk walk(a, a.c.tasks[own.task], own.head);
  float delta[2] = {}, sum[2] = {};
  walk.each([&](int n, int stage) {
    float x[1][SIDE / 8][4], g[1][SIDE / 8][4];
    products<1, SIDE, CD>(x, walk.q, walk.k + stage * D_BYTES);
    auto all = [&](auto masked) {
      constexpr bool MASKED = decltype(masked)::value;
      if (!walk.weights<MASKED>(x, g, n, stage)) return;
      UNROLL(i, SIDE / 2) {
        const int r = i / 2 % 2;
        const float p = x[0][i / 4][i % 4], y = attends<MASKED>(p, walk.offset[r]) ? g[0][i / 4][i % 4] : 0;
        sum[r] += y, delta[r] = fmaf(p, y, delta[r]);  // (E8)
      }
    };
    if (walk.is_masked(n)) all(Is<true>());
    else all(Is<false>());
  });
  UNROLL(r, 2) {
    delta[r] = quad_sum(delta[r]), sum[r] = quad_sum(sum[r]);
    const int i = walk.row + row_of<1>(r);
    if (lane_id() % 4 || i >= walk.head.s.queries) continue;
    Numbers& numbers = walk.head.numbers[i];
    numbers.delta = delta[r] - walk.head.dlse(i), numbers.sum = __fmul_rn(numbers.share, sum[r]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CD + CE > 128 ? 1 : 2) queries(const __grid_constant__ LazyArgs a) {
  const PairArgs& c = a.c;
  Place own = tile_of_block(c.heads);
  Walk walk(a, c.tasks[own.task], own.head);
  const LazyHead& head = walk.head;
  const Sequence& s = head.s;
  const int row = walk.row;
  float dq[1][CD / 8][4], delta[2], scale[2];
  clear<1, CD>(dq);
  UNROLL(r, 2) delta[r] = head.number(row + row_of<1>(r)).delta, scale[r] = c.scale;
  walk.each([&](int n, int stage) {
    const u32 k = walk.k + stage * D_BYTES;
    float x[1][SIDE / 8][4], g[1][SIDE / 8][4];
    bool pulls = false;
    clear<1, SIDE>(g);
    products<1, SIDE, CD>(x, walk.q, k);
    auto all = [&](auto masked) {
      constexpr bool MASKED = decltype(masked)::value;
      walk.weights<MASKED>(x, g, n, stage);
      UNROLL(i, SIDE / 2) {
        float& p = x[0][i / 4][i % 4];
        p = pull<MASKED>(p, g[0][i / 4][i % 4], walk.offset[i / 2 % 2], delta[i / 2 % 2]), pulls |= p != 0;
      }
    };
    if (walk.is_masked(n)) all(Is<true>());
    else all(Is<false>());
    if (walk.odd) __syncthreads(), clear_odd<SIDE, CD>(k), __syncthreads();
    if (!__any_sync(~0u, pulls)) return;
    u32 packed[1][SIDE / 8][2];
    pack_all<1, SIDE>(packed, x);
    accumulate<1, SIDE, CD>(dq, packed, k);  // (E10)
  });
  if (walk.odd) {
#pragma unroll 1
    for (int j = walk.first * SIDE; j < min(walk.end * SIDE, s.keys); j++) {
      const element* k = key_rows(c.k, head, j).at;
      if (!is_odd(k, c.dim)) continue;
      float ds[2], most = 0;
      bool seen[2];
      UNROLL(r, 2) {
        const int i = min(row + row_of<1>(r), s.queries - 1);
        ds[r] = score_alone(head, i, j);
        const float g = product_of(query_rows(c.dout, head, i).at, key_rows(c.v, head, j).at, c.value_dim);
        weigh<true>(ds[r], most, walk.base[r], walk.offset[r]), seen[r] = !hidden(ds[r]);
        ds[r] = pull<true>(ds[r], g, walk.offset[r], delta[r]);
      }
      add_odd<1, CD>(dq, ds, seen, k, c.dim);
    }
  }
  store<1, CD>(c.dq, s.batch, head.head, s.query_start + row, s.queries - row, dq, scale, 0, c.dim);
}

// The place of a key and two queries in a tile of dS in f32, which replaces the tiles of q and dout that it came from.
DEV float2* pair_at(float* ds, int j, int i) { return (float2*)(ds + j * SIDE + (i ^ j % 8 * 8)); }
// Adds the diagonals of such a tile to what a block has of each distance. Diagonal t holds the pairs of query i and
// key i + 63 - t.
DEV void add_diagonals(float* ds, float* window, int reach, int distance) {
  const int off = (int)threadIdx.x - (SIDE - 1), d = distance + off;
  if (off >= SIDE || d < 0 || d >= reach) return;
  float sum = 0;
#pragma unroll 8
  for (int j = 0; j < SIDE; j++)
    if ((u32)(j + off) < SIDE) sum += ds[j * SIDE + (j + off ^ j % 8 * 8)];
  window[d] += sum;
}

// As `score_tile`, of 64 keys in rows and 64 queries in columns.
template <bool MASKED> DEV void score_turned(float (&s)[1][SIDE / 8][4], const LazyHead& head, int row, int key, const float* bias) {
  const int column = 2 * (lane_id() % 4);
  UNROLL(i, SIDE / 2) s[0][i / 4][i % 4] = __fmul_rn(head.c.scale, s[0][i / 4][i % 4]);
  if (is_near<SIDE>(head, row, key)) {
    float near[9][2];
    UNROLL(d, 9)
      UNROLL(e, 2) near[d][e] = bias[SIDE - 1 + column - row_of<1>(0) + 8 * (d - 1) + e];
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

extern "C" __global__ void __launch_bounds__(THREADS, CD + CE > 128 ? 1 : 2) keys(const __grid_constant__ LazyArgs a) {
  const PairArgs& c = a.c;
  const u32 at_k = shared_begin(), at_v = at_k + D_BYTES, at_q = at_v + E_BYTES;
  float* const near = numbers_at(3 * (D_BYTES + E_BYTES));
  float* const rows = near + 2 * NEAR;
  Place own = tile_of_block(c.key_heads);
  Task task = c.tasks[own.task];
  const Sequence s = c.sequences[task.first];
  const int key_head = own.head, group = c.heads / c.key_heads, key = task.key_tile * SIDE, tiles = (s.queries + SIDE - 1) / SIDE;
  const bool wants_dk = c.dk.data, wants_dv = c.dv.data, wants_ds = wants_dk || a.windows, odd = *a.odd;
  float* const windows = a.windows ? a.windows + (i64)own.task * c.heads * a.reach : 0;
  float dk[1][CD / 8][4], dv[1][CE / 8][4], scale[2] = {c.scale, c.scale}, one[2] = {1, 1};
  clear<1, CD>(dk), clear<1, CE>(dv);
  if (windows)
    for (i64 d = threadIdx.x; d < (i64)group * a.reach; d += THREADS) windows[(i64)key_head * group * a.reach + d] = 0;
  load_tile<SIDE, CD>(at_k, key_rows(c.k, s, key_head, key), c.dim);
  load_tile<SIDE, CE>(at_v, key_rows(c.v, s, key_head, key), c.value_dim);
  auto next = [&](int n) { return next_seen<SIDE, SIDE>(c, s, n, group * tiles, key); };
  auto load = [&](int n, int stage) {
    const LazyHead head(a, s, key_head * group + n / tiles);
    const int row = n % tiles * SIDE, i = row + threadIdx.x % SIDE;
    const u32 q = at_q + stage * (D_BYTES + E_BYTES), to = shared(rows + stage * NUMBERS + threadIdx.x);
    const Numbers* numbers = i < s.queries ? head.numbers + i : a.numbers;
    load_tile<SIDE, CD>(q, query_rows(c.q, head, row), c.dim);
    load_tile<SIDE, CE>(q + D_BYTES, query_rows(c.dout, head, row), c.value_dim);
    load_bias<SIDE>(near + stage * NEAR, head, row, key);
    copy_4(to, threadIdx.x < SIDE ? &numbers->offset : &numbers->delta, i < s.queries);
    if (threadIdx.x < SIDE) copy_4(to + 8 * SIDE, i < s.queries ? head.lse + i : c.lse, i < s.queries);
  };
  int n = next(0), stage = 0;
  if (n < group * tiles) load(n, 0);
  copy_commit();
#pragma unroll 1
  for (int following; n < group * tiles; n = following, stage ^= 1) {
    copy_wait<0>();
    __syncthreads();  // q and dout of tile n are here, and all are done with the other stage
    following = next(n + 1);
    if (following < group * tiles) load(following, stage ^ 1);
    copy_commit();
    const LazyHead head(a, s, key_head * group + n / tiles);
    const int row = n % tiles * SIDE;
    const u32 q = at_q + stage * (D_BYTES + E_BYTES), dout = q + D_BYTES;
    const float *numbers = rows + stage * NUMBERS + 2 * (lane_id() % 4), *bias = near + stage * NEAR;
    float x[1][SIDE / 8][4], ds[1][SIDE / 8][4];
    bool cut = odd || OPTIONS && head.allowed, any = false, pulls = false;
    products<1, SIDE, CD>(x, at_k, q);
#pragma unroll
    for (int half = 0; half < SIDE; half += 32) {
      Span span = head.span(row + half + lane_id());
      cut |= span.begin > key || span.end < key + SIDE;
    }
    auto all = [&](auto masked) {
      constexpr bool MASKED = decltype(masked)::value;
      float most = 0;
      score_turned<MASKED>(x, head, row, key, bias);
      UNROLL(e, SIDE / 4) {
        const int column = 8 * (e / 2) + e % 2;
        const float base = base_of(numbers[2 * SIDE + column]);
        UNROLL(r, 2) weigh<MASKED>(x[0][e / 2][2 * r + e % 2], most, base, numbers[column]);
      }
      any = __any_sync(~0u, most != 0);
      if (any && wants_ds) products<1, SIDE, CE>(ds, at_v, dout);  // (E7)
      else clear<1, SIDE>(ds);
      UNROLL(e, SIDE / 4) {
        const int column = 8 * (e / 2) + e % 2;
        const float offset = numbers[column], delta = numbers[SIDE + column];
        UNROLL(r, 2) {
          float &p = x[0][e / 2][2 * r + e % 2], &g = ds[0][e / 2][2 * r + e % 2];
          g = pull<MASKED>(p, g, offset, delta), pulls |= g != 0;
          p = MASKED && hidden(p) ? 0 : max_nan(raised(p, offset), 0);  // (E5)
        }
      }
    };
    if (__any_sync(~0u, cut)) all(Is<true>());
    else all(Is<false>());
    if (odd) __syncthreads(), clear_odd<SIDE, CD>(q), clear_odd<SIDE, CE>(dout), __syncthreads();
    u32 packed[1][SIDE / 8][2];
    if (wants_dv && any) {
      pack_all<1, SIDE>(packed, x);
      accumulate<1, SIDE, CE>(dv, packed, dout);  // (E12)
    }
    if (wants_dk && __any_sync(~0u, pulls)) {
      pack_all<1, SIDE>(packed, ds);
      accumulate<1, SIDE, CD>(dk, packed, q);  // (E11)
    }
    const int distance = row + head.shift - key;
    if (windows && distance + SIDE > 0 && distance - SIDE < a.reach) {
      float* const tile = numbers_at(D_BYTES + E_BYTES + stage * (D_BYTES + E_BYTES));
      __syncthreads();  // all are done with q and dout
      UNROLL(i, SIDE / 4) {
        const int r = i % 2, j = i / 2;
        *pair_at(tile, row_of<1>(r), 8 * j + 2 * (lane_id() % 4)) = make_float2(ds[0][j][2 * r], ds[0][j][2 * r + 1]);
      }
      __syncthreads();
      add_diagonals(tile, windows + (i64)head.head * a.reach, a.reach, distance);  // (E13)
    }
  }
  if (odd) {
#pragma unroll 1
    for (int at = 0; at < group * s.queries; at++) {
      const LazyHead head(a, s, key_head * group + at / s.queries);
      const int i = at % s.queries;
      const element *q = query_rows(c.q, head, i).at, *dout = query_rows(c.dout, head, i).at;
      if (!(is_odd(q, c.dim) | is_odd(dout, c.value_dim))) continue;
      float e[2], ds[2], most = 0;
      bool seen[2], active[2];
      UNROLL(r, 2) {
        const int j = min(key + row_of<1>(r), s.keys - 1);
        const Numbers numbers = head.number(i);
        const float g = product_of(dout, key_rows(c.v, head, j).at, c.value_dim);
        e[r] = score_alone(head, i, j), weigh<true>(e[r], most, base_of(head.lse_at(i)), numbers.offset);
        seen[r] = !hidden(e[r]), active[r] = attends<true>(e[r], numbers.offset);
        ds[r] = pull<true>(e[r], g, numbers.offset, numbers.delta), e[r] = raised(e[r], numbers.offset);
      }
      add_odd<1, CD>(dk, ds, seen, q, c.dim), add_odd<1, CE>(dv, e, active, dout, c.value_dim);
    }
  }
  if (wants_dk) store<1, CD>(c.dk, s.batch, key_head, s.key_start + key, s.keys - key, dk, scale, 0, c.dim);
  if (wants_dv) store<1, CE>(c.dv, s.batch, key_head, s.key_start + key, s.keys - key, dv, one, 0, c.value_dim);
}
