// attention and attention_lse of 16-bit operands on the tensor cores of any GPU from sm_80 on, with every option: the blocks
// of portable.cu, with P and dS rounded to the storage type before they are multiplied.
//
//   forward   a block owns 64·M queries of one head and walks the keys, last to first: S, P, o += P·v, lse   (F1)–(F5), (L1)
//   queries   a block owns 64 queries and walks the keys: S, dP, dS, dq += ds·k                              (B2)–(B5)
//   keys      a block owns 64 keys of one key head and walks the queries of its heads: dk, dv                (B6), (B7)
//
// Compile-time: STORAGE (1|2); OPTIONS, 0 where there is no softcap, no bias and no array of flags; WHOLE, see `load_tile`;
// VALUES, 0 for attention_lse; CD and CE, the columns of a row of q and of an accumulator of o: 64 or 128, CD also 256,
// where the second and third kernel are absent.
constexpr float LN2 = 0.6931471805599453f, LARGEST = 3.402823466e38f;

// A score is kept over a unit, the scale where that is above 0 and of usual size: then without options it is the product of query and key.
struct Unit { float scale, over, log2; };  // of products; 1/unit; unit·log2 e
DEV Unit unit_of(const Call& c) {
  if (c.scale > 1e-18f && c.scale < 1e18f) return {1, 1 / c.scale, c.scale * LOG2E};
  return {c.scale, 1, LOG2E};
}

// S/unit of a visible pair (F2), from the product of a query and a key, and the slope S'; whether the pair is visible. A pair
// has the same bits with options as without, where these say nothing about it.
template <bool CUT> DEV bool score(const Head& head, const Unit& unit, float& x, float& slope, int i, int j, Span span) {
  slope = 1;
  if (CUT && (j < span.begin || j >= span.end)) return false;
#if OPTIONS
  const Call& c = head.c;
  float product = x;
  x = __fmul_rn(unit.scale, x);
  if (head.allowed && !head.allowed[(i64)i * c.keys + j]) return false;
  if (c.cap != 0) {
    float t = tanh_fast(__fmul_rn(__fmul_rn(c.scale, product), head.inverse_cap));
    x = __fmul_rn(c.cap * unit.over, t), slope = fmaf(-t, t, 1.0f);
  }
  if (head.bias) {
    float bias = read(head.bias[i * c.bias.row + j]);
    x = __fadd_rn(x, __fmul_rn(bias, unit.over));
    if (fabsf(x) == INF && fabsf(bias) < INF && fabsf(product) < INF) x = copysignf(LARGEST, x);
  }
#else
  if (unit.scale != 1) x = __fmul_rn(unit.scale, x);
#endif
  return x != -INF;
}

// ---- forward ---------------------------------------------------------------------------------------------------------
constexpr int M = CD > 128 ? 1 : 2, ROWS = 64 * M, KEYS = CD > 128 ? 32 : 64;
constexpr u32 Q_BYTES = ROWS * CD * 2, K_BYTES = KEYS * CD * 2, V_BYTES = KEYS * CE * 2;
// Dynamic shared memory: Q_BYTES + 2 (K_BYTES + V_BYTES).

// S/unit of a tile, -inf where a pair is not visible; whether there is such a pair.
template <bool CUT>
DEV bool scores(float (&s)[M][KEYS / 8][4], const Head& head, const Unit& unit, int row, int key, const Span (&spans)[2 * M]) {
  bool hides = false;
#pragma unroll
  for (int r = 0; r < 2 * M; r++)
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = s[r / 2][j][2 * (r & 1) + e];
        float slope;
        bool visible = score<CUT>(head, unit, x, slope, row + row_of<M>(r), key + 8 * j + 2 * (lane_id() % 4) + e, spans[r]);
        if (CUT && !visible) x = -INF, hides = true;
      }
  return hides;
}

extern "C" __global__ void __launch_bounds__(THREADS, CD > 128 ? 1 : 2) forward(const __grid_constant__ Call c) {
  extern __shared__ __align__(128) char bytes[];
  const u32 at_q = shared(bytes), at_k = at_q + Q_BYTES, at_v = at_k + 2 * K_BYTES;
  Place own = drawn(c.heads);
  Task task = c.tasks[own.task];
  if (task.row_tile % M) return;  // with the tile before
  Head head(c, c.sequences[task.first], own.head);
  const Sequence& s = head.s;
  const int row = task.row_tile * SIDE;
  Tile tile = c.tiles[s.first_tile + task.row_tile];
  if (M == 2 && row + SIDE < s.queries) {
    Tile next = c.tiles[s.first_tile + task.row_tile + 1];
    if (tile.begin == tile.end) tile = next;
    else if (next.begin != next.end) tile = {min(tile.begin, next.begin), max(tile.end, next.end)};
  }
  const int first = tile.begin / KEYS;
  int n = tile.begin < tile.end ? (tile.end + KEYS - 1) / KEYS : first;
  auto load_k = [&](int n, int stage) {
    load_tile<KEYS, CD>(at_k + stage * K_BYTES, rows_of(c.k, s.batch, head.key_head, s.key_start + n * KEYS, s.key_start + s.keys), c.dim);
  };
  auto load_v = [&](int n, int stage) {
#if VALUES
    Rows v = rows_of(c.v, s.batch, head.key_head, s.key_start + n * KEYS, s.key_start + s.keys);
    v.at += c.first_value;
    load_tile<KEYS, CE>(at_v + stage * V_BYTES, v, c.value_dim - c.first_value);
#endif
  };
  float o[M][CE / 8][4], m[2 * M], l[2 * M];
  Span spans[2 * M];
  clear<M, CE>(o);
#pragma unroll
  for (int r = 0; r < 2 * M; r++) m[r] = -INF, l[r] = 0, spans[r] = head.span(row + row_of<M>(r));
  const Unit unit = unit_of(c);
  if (n > first) {
    load_tile<ROWS, CD>(at_q, rows_of(c.q, s.batch, head.head, s.query_start + row, s.query_start + s.queries), c.dim);
    load_k(n - 1, 0), copy_commit();
    load_v(n - 1, 0), copy_commit();
  }
  const int end = n * KEYS;
  int stage = 0;
  bool odd = false;
#pragma unroll 1
  for (n--; n >= first; n--, stage ^= 1) {
    copy_wait<1>();
    __syncthreads();  // k_n is here, and all are done with the other stage
    if (n > first) load_k(n - 1, stage ^ 1);
    copy_commit();
    u32 packed[M][KEYS / 8][2];
    float a[2 * M];
    bool cut = false, hides = false;
    {
      float p[M][KEYS / 8][4];
      products<M, KEYS, CD>(p, at_q, at_k + stage * K_BYTES);
#pragma unroll
      for (int r = 0; r < 2 * M; r++) cut |= spans[r].begin > n * KEYS || spans[r].end < (n + 1) * KEYS;
      if (OPTIONS || __any_sync(~0u, cut)) hides = scores<true>(p, head, unit, row, n * KEYS, spans);
      else scores<false>(p, head, unit, row, n * KEYS, spans);
#pragma unroll
      for (int r = 0; r < 2 * M; r++) {
        float top = m[r], sum = 0;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(p[r / 2][j][2 * (r & 1)], p[r / 2][j][2 * (r & 1) + 1]));
        top = quad_max(top);
        float most = top == -INF ? 0 : top, from = most * unit.log2;  // a row that has seen nothing
        a[r] = exp2_fast((m[r] - most) * unit.log2), m[r] = top;  // 1 where the maximum stays
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& x = p[r / 2][j][2 * (r & 1) + e];
            x = exp2_fast(fmaf(x, unit.log2, -from));
            sum += x;
          }
        l[r] = fmaf(l[r], a[r], sum);
      }
      pack_all<M, KEYS>(packed, p);
    }
#if VALUES
#pragma unroll
    for (int r = 0; r < 2 * M; r++)
#pragma unroll
      for (int j = 0; j < CE / 8; j++) o[r / 2][j][2 * (r & 1)] *= a[r], o[r / 2][j][2 * (r & 1) + 1] *= a[r];
    const u32 v = at_v + stage * V_BYTES;
    copy_wait<1>();
    if (__syncthreads_or(hides)) {  // v_n is here
      odd |= clear_odd<KEYS, CE>(v);
      __syncthreads();
    }
    if (n > first) load_v(n - 1, stage ^ 1);
    copy_commit();
    accumulate<M, KEYS, CE>(o, packed, v);
#else
    copy_commit();
#endif
  }
#if VALUES
  if (__syncthreads_or(odd)) {
#pragma unroll 1
    for (int j = first * KEYS; j < min(end, s.keys); j++) {
      Rows k = rows_of(c.k, s.batch, head.key_head, s.key_start + j, 0), v = rows_of(c.v, s.batch, head.key_head, s.key_start + j, 0);
      const int width = min(CE, c.value_dim - c.first_value);
      if (!is_odd(v.at + c.first_value, width)) continue;
      float factor[2 * M];
      bool seen[2 * M];
#pragma unroll 1
      for (int r = 0; r < 2 * M; r++) {
        int i = min(row + row_of<M>(r), s.queries - 1);
        float x = product_of(rows_of(c.q, s.batch, head.head, s.query_start + i, 0).at, k.at, c.dim), slope;
        bool sees = score<true>(head, unit, x, slope, i, j, head.span(i));
#pragma unroll
        for (int t = 0; t < 2 * M; t++)
          if (t == r) seen[t] = sees, factor[t] = exp2_fast((x - m[t]) * unit.log2);
      }
      add_odd<M, CE>(o, factor, seen, v.at + c.first_value, width);
    }
  }
#endif
  float over[2 * M], sink = c.sinks ? c.sinks[head.head] : -INF;
#pragma unroll
  for (int r = 0; r < 2 * M; r++) {  // a sink joins here: it weighs, and has no value
    float all = quad_sum(l[r]), top = m[r] * unit.log2 * LN2;
    bool seen = all != 0;
    over[r] = seen ? 1 / all : 0;
    float lse = seen ? top + logf(all) : -INF;
    if (sink != -INF) {
      float most = seen ? fmaxf(top, sink) : sink, share = seen ? weight(top, most) : 0;
      float with = share * all + (seen ? weight(sink, most) : 1);
      lse = most + logf(with), over[r] = seen ? share / with : 0;
    }
    int i = row + row_of<M>(r);
    if (lane_id() % 4 == 0 && i < s.queries && c.first_value == 0) ((float*)head.lse)[i] = lse;
  }
#if VALUES
  if (c.o.data) store<M, CE>(c.o, s.batch, head.head, s.query_start + row, s.queries - row, o, over, c.first_value, c.value_dim);
#endif
}

#if CD <= 128
// ---- backward --------------------------------------------------------------------------------------------------------
constexpr u32 D_BYTES = SIDE * CD * 2, E_BYTES = VALUES ? SIDE * CE * 2 : 0;
// Dynamic shared memory of both kernels: 3 (D_BYTES + E_BYTES) + 16 SIDE. What a block owns, and two stages of what it walks.

DEV float delta_of(const Head& head, int i) { return !head.delta ? -1 : i < head.s.queries ? head.delta[i] : 0; }

// From a product of a query and a key, and their dP: P (F4) and ds (B4), both hidden if the pair is not visible. lse2 is in
// powers of 2.
template <bool CUT> DEV bool weigh(const Head& head, const Unit& unit, float& x, float& dp, int i, int j, Span span, float lse2, float delta) {
  float slope;
  bool visible = score<CUT>(head, unit, x, slope, i, j, span);
  if (CUT && !visible) return x = dp = HIDE, true;
  x = exp2_fast(fmaf(x, unit.log2, -lse2));
  dp = shown(__fmul_rn(slope, __fmul_rn(x, __fsub_rn(dp, delta))));
  return false;
}
DEV float lse2_of(const Head& head, int i) { return i < head.s.queries ? __fmul_rn(head.lse[i], LOG2E) : 0; }

// P and ds of one pair, for `add_odd`; whether it is visible. The four threads of a row ask for the same pair.
DEV bool weigh_alone(const Head& head, const Unit& unit, int i, int j, float& p, float& ds) {
  const Call& c = head.c;
  const Sequence& s = head.s;
  p = product_of(rows_of(c.q, s.batch, head.head, s.query_start + i, 0).at, rows_of(c.k, s.batch, head.key_head, s.key_start + j, 0).at, c.dim);
  ds = 0;
#if VALUES
  ds = product_of(rows_of(c.dout, s.batch, head.head, s.query_start + i, 0).at, rows_of(c.v, s.batch, head.key_head, s.key_start + j, 0).at, c.value_dim);
#endif
  return !weigh<true>(head, unit, p, ds, i, j, head.span(i), lse2_of(head, i), delta_of(head, i));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) queries(const __grid_constant__ Call c) {
  if (idle(c)) return;
  extern __shared__ __align__(128) char bytes[];
  const u32 at_q = shared(bytes), at_dout = at_q + D_BYTES, at_k = at_dout + E_BYTES, at_v = at_k + 2 * D_BYTES;
  Place own = drawn(c.heads);
  Task task = c.tasks[own.task];
  Head head(c, c.sequences[task.first], own.head);
  const Sequence& s = head.s;
  const int row = task.row_tile * SIDE;
  Tile tile = c.tiles[s.first_tile + task.row_tile];
  const int first = tile.begin / SIDE, end = tile.begin < tile.end ? (tile.end + SIDE - 1) / SIDE : first;
  auto load = [&](int n, int stage) {
    load_tile<SIDE, CD>(at_k + stage * D_BYTES, rows_of(c.k, s.batch, head.key_head, s.key_start + n * SIDE, s.key_start + s.keys), c.dim);
#if VALUES
    load_tile<SIDE, CE>(at_v + stage * E_BYTES, rows_of(c.v, s.batch, head.key_head, s.key_start + n * SIDE, s.key_start + s.keys), c.value_dim);
#endif
    copy_commit();
  };
  float dq[1][CD / 8][4], lse[2], delta[2], scale[2];
  Span spans[2];
  clear<1, CD>(dq);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    int i = row + row_of<1>(r);
    spans[r] = head.span(i), lse[r] = lse2_of(head, i), delta[r] = delta_of(head, i), scale[r] = c.scale;
  }
  if (first < end) {
    load_tile<SIDE, CD>(at_q, rows_of(c.q, s.batch, head.head, s.query_start + row, s.query_start + s.queries), c.dim);
#if VALUES
    load_tile<SIDE, CE>(at_dout, rows_of(c.dout, s.batch, head.head, s.query_start + row, s.query_start + s.queries), c.value_dim);
#endif
    load(first, 0);
  }
  const Unit unit = unit_of(c);
  int stage = 0;
  bool odd = false;
#pragma unroll 1
  for (int n = first; n < end; n++, stage ^= 1) {
    copy_wait<0>();
    __syncthreads();  // k_n and v_n are here, and all are done with the other stage
    if (n + 1 < end) load(n + 1, stage ^ 1);
    const u32 k = at_k + stage * D_BYTES;
    float x[1][SIDE / 8][4], ds[1][SIDE / 8][4];
    products<1, SIDE, CD>(x, at_q, k);
#if VALUES
    products<1, SIDE, CE>(ds, at_dout, at_v + stage * E_BYTES);
#else
    clear<1, SIDE>(ds);
#endif
    bool cut = false, hides = false;
#pragma unroll
    for (int r = 0; r < 2; r++) cut |= spans[r].begin > n * SIDE || spans[r].end < (n + 1) * SIDE;
    auto all = [&](auto masked) {
#pragma unroll
      for (int i = 0; i < SIDE / 2; i++) {
        int j = i / 4, r = i / 2 % 2, e = i % 4, key = n * SIDE + 8 * j + 2 * (lane_id() % 4) + i % 2;
        hides |= weigh<decltype(masked)::value>(head, unit, x[0][j][e], ds[0][j][e], row + row_of<1>(r), key, spans[r], lse[r], delta[r]);
      }
    };
    if (OPTIONS || __any_sync(~0u, cut)) all(Is<true>());
    else all(Is<false>());
    if (__syncthreads_or(hides)) {
      odd |= clear_odd<SIDE, CD>(k);
      __syncthreads();
    }
    u32 packed[1][SIDE / 8][2];
    pack_all<1, SIDE>(packed, ds);
    accumulate<1, SIDE, CD>(dq, packed, k);
  }
  if (__syncthreads_or(odd)) {
#pragma unroll 1
    for (int j = first * SIDE; j < min(end * SIDE, s.keys); j++) {
      Rows k = rows_of(c.k, s.batch, head.key_head, s.key_start + j, 0);
      if (!is_odd(k.at, c.dim)) continue;
      float p, factor[2];
      bool seen[2];
#pragma unroll
      for (int r = 0; r < 2; r++) seen[r] = weigh_alone(head, unit, min(row + row_of<1>(r), s.queries - 1), j, p, factor[r]);
      add_odd<1, CD>(dq, factor, seen, k.at, c.dim);
    }
  }
  store<1, CD>(c.dq, s.batch, head.head, s.query_start + row, s.queries - row, dq, scale, 0, c.dim);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) keys(const __grid_constant__ Call c) {
  if (idle(c)) return;
  extern __shared__ __align__(128) char bytes[];
  const u32 at_k = shared(bytes), at_v = at_k + D_BYTES, at_q = at_v + E_BYTES, at_dout = at_q + 2 * D_BYTES;
  float* numbers = (float*)(bytes + 3 * (D_BYTES + E_BYTES));  // of each stage: lse in powers of 2, and delta, of its queries
  Place own = drawn(c.key_heads);
  Task task = c.tasks[own.task];
  const Sequence s = c.sequences[task.first];
  const int key_head = own.head, group = c.heads / c.key_heads, key = task.key_tile * SIDE, tiles = (s.queries + SIDE - 1) / SIDE;
  const bool wants_dk = c.dk.data, wants_dv = VALUES && c.dv.data;
  float dk[1][CD / 8][4], scale[2] = {c.scale, c.scale};
  clear<1, CD>(dk);
  load_tile<SIDE, CD>(at_k, rows_of(c.k, s.batch, key_head, s.key_start + key, s.key_start + s.keys), c.dim);
#if VALUES
  float dv[1][CE / 8][4], one[2] = {1, 1};
  clear<1, CE>(dv);
  load_tile<SIDE, CE>(at_v, rows_of(c.v, s.batch, key_head, s.key_start + key, s.key_start + s.keys), c.value_dim);
#endif
  // Tiles of queries of all heads, those that see a key of the block: from `n` on.
  auto next = [&](int n) {
    while (n < group * tiles) {
      Tile tile = c.tiles[s.first_tile + n % tiles];
      if (tile.end > key && tile.begin < key + SIDE) break;
      n++;
    }
    return n;
  };
  auto load = [&](int n, int stage) {
    const Head head(c, s, key_head * group + n / tiles);
    const int row = n % tiles * SIDE, i = row + threadIdx.x % SIDE;
    load_tile<SIDE, CD>(at_q + stage * D_BYTES, rows_of(c.q, s.batch, head.head, s.query_start + row, s.query_start + s.queries), c.dim);
#if VALUES
    load_tile<SIDE, CE>(at_dout + stage * E_BYTES, rows_of(c.dout, s.batch, head.head, s.query_start + row, s.query_start + s.queries), c.value_dim);
#endif
    numbers[stage * 2 * SIDE + threadIdx.x] = threadIdx.x < SIDE ? lse2_of(head, i) : delta_of(head, i);
  };
  const Unit unit = unit_of(c);
  int n = next(0), stage = 0;
  bool odd = false;
  if (n < group * tiles) load(n, 0);
  copy_commit();
#pragma unroll 1
  while (n < group * tiles) {
    copy_wait<0>();
    __syncthreads();  // q and dout of tile n are here, and all are done with the other stage
    const int following = next(n + 1), row = n % tiles * SIDE;
    if (following < group * tiles) load(following, stage ^ 1);
    copy_commit();
    Head head(c, s, key_head * group + n / tiles);
    const u32 q = at_q + stage * D_BYTES, dout = at_dout + stage * E_BYTES;
    float x[1][SIDE / 8][4], ds[1][SIDE / 8][4];
    products<1, SIDE, CD>(x, at_k, q);
#if VALUES
    if (wants_dk) products<1, SIDE, CE>(ds, at_v, dout);
    else clear<1, SIDE>(ds);
#else
    clear<1, SIDE>(ds);
#endif
    bool hides = false;
    auto all = [&](auto masked) {
      constexpr bool CUT = decltype(masked)::value;
#pragma unroll
      for (int j = 0; j < SIDE / 8; j++) {
        const int column = 8 * j + 2 * (lane_id() % 4);
        const float2 lse2 = *(const float2*)&numbers[stage * 2 * SIDE + column], delta = *(const float2*)&numbers[stage * 2 * SIDE + SIDE + column];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          Span span = CUT ? head.span(row + column + e) : Span{0, 0};
#pragma unroll
          for (int r = 0; r < 2; r++)
            hides |= weigh<CUT>(head, unit, x[0][j][2 * r + e], ds[0][j][2 * r + e], row + column + e, key + row_of<1>(r), span,
                                e ? lse2.y : lse2.x, e ? delta.y : delta.x);
        }
      }
    };
    bool cut = false;
#pragma unroll
    for (int half = 0; half < SIDE; half += 32) {
      Span span = head.span(row + half + lane_id());
      cut |= span.begin > key || span.end < key + SIDE;
    }
    if (OPTIONS || __any_sync(~0u, cut)) all(Is<true>());
    else all(Is<false>());
    if (__syncthreads_or(hides)) {
      odd |= clear_odd<SIDE, CD>(q);
#if VALUES
      odd |= clear_odd<SIDE, CE>(dout);
#endif
      __syncthreads();
    }
    u32 packed[1][SIDE / 8][2];
#if VALUES
    pack_all<1, SIDE>(packed, x);
    if (wants_dv) accumulate<1, SIDE, CE>(dv, packed, dout);
#endif
    pack_all<1, SIDE>(packed, ds);
    if (wants_dk) accumulate<1, SIDE, CD>(dk, packed, q);
    n = following, stage ^= 1;
  }
  if (__syncthreads_or(odd)) {
#pragma unroll 1
    for (int at = 0; at < group * s.queries; at++) {
      const Head head(c, s, key_head * group + at / s.queries);
      const int i = at % s.queries;
      const element* q = rows_of(c.q, s.batch, head.head, s.query_start + i, 0).at;
      bool found = is_odd(q, c.dim);
#if VALUES
      const element* dout = rows_of(c.dout, s.batch, head.head, s.query_start + i, 0).at;
      found |= is_odd(dout, c.value_dim);
#endif
      if (!found) continue;
      float p[2], factor[2];
      bool seen[2];
#pragma unroll
      for (int r = 0; r < 2; r++) seen[r] = weigh_alone(head, unit, i, min(key + row_of<1>(r), s.keys - 1), p[r], factor[r]);
      add_odd<1, CD>(dk, factor, seen, q, c.dim);
#if VALUES
      add_odd<1, CE>(dv, p, seen, dout, c.value_dim);
#endif
    }
  }
  if (wants_dk) store<1, CD>(c.dk, s.batch, key_head, s.key_start + key, s.keys - key, dk, scale, 0, c.dim);
#if VALUES
  if (wants_dv) store<1, CE>(c.dv, s.batch, key_head, s.key_start + key, s.keys - key, dv, one, 0, c.value_dim);
#endif
}
#endif
