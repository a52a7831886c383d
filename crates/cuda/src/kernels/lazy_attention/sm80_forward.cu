// The forward sweeps of sm80.cuh: `scores` and `values`.

constexpr int M = 2, ROWS = 64 * M;
constexpr u32 Q_BYTES = ROWS * CD * 2, K_BYTES = SIDE * CD * 2, V_BYTES = SIDE * CE * 2, BIAS = ROWS + SIDE;
CHECK_SHARED(scores, Q_BYTES + 2 * (K_BYTES + 4 * BIAS));
CHECK_SHARED(values, Q_BYTES + 2 * (K_BYTES + V_BYTES + 4 * BIAS));

extern "C" __global__ void __launch_bounds__(THREADS, 2) scores(const __grid_constant__ LazyArgs a) {
  __shared__ u32 words[THREADS / 32];
  const PairArgs& c = a.c;
  const u32 at_q = shared_begin(), at_k = at_q + Q_BYTES;
  float* const bias = numbers_at(Q_BYTES + 2 * K_BYTES);
  Place own = tile_of_block(c.heads);
  Task task = c.tasks[own.task];
  LazyHead head(a, c.sequences[task.first], own.head);
  const Sequence& s = head.s;
  if (task.row_tile % M) return;  // with the tile before
  const int row = task.row_tile * SIDE;
  const Tile tile = seen_tile<M>(c, s, task);
  const int first = tile.begin / SIDE, end = tile.begin < tile.end ? (tile.end + SIDE - 1) / SIDE : first;
  auto load = [&](int n, int stage) {
    load_tile<SIDE, CD>(at_k + stage * K_BYTES, key_rows(c.k, head, n * SIDE), c.dim);
    load_bias<ROWS>(bias + stage * BIAS, head, row, n * SIDE);
    copy_commit();
  };
  // A row sees its span if all numbers are finite and no flag hides a pair.
  const bool odd = *a.odd, counts = odd || c.allowed;
  float m[2 * M], l[2 * M], tops[2 * M][STRIPES / 4];  // the largest scores of every fourth stripe
  int seen[2 * M];
  Span spans[2 * M];
  UNROLL(r, 2 * M) {
    m[r] = -INF, l[r] = 0, spans[r] = head.span(row + row_of<M>(r));
    seen[r] = counts || lane_id() % 4 ? 0 : max(spans[r].end - spans[r].begin, 0);
    UNROLL(t, STRIPES / 4) tops[r][t] = -INF;
  }
  if (first < end) load_tile<ROWS, CD>(at_q, query_rows(c.q, head, row), c.dim), load(first, 0);
  int stage = 0;
#pragma unroll 1
  for (int n = first; n < end; n++, stage ^= 1) {
    copy_wait<0>();
    __syncthreads();  // k_n is here, and all are done with the other stage
    if (n + 1 < end) load(n + 1, stage ^ 1);
    float x[M][SIDE / 8][4];
    products<M, SIDE, CD>(x, at_q, at_k + stage * K_BYTES);
    if (is_masked<M>(head, n * SIDE, spans, odd)) score_tile<true, M>(x, head, row, n * SIDE, spans, bias + stage * BIAS);
    else score_tile<false, M>(x, head, row, n * SIDE, spans, bias + stage * BIAS);
    const int stripe = stripe_of(s, n * SIDE) - lane_id() % 4;
    UNROLL(r, 2 * M) {
      float top = -INF, sum = 0;
      UNROLL(j, SIDE / 4) top = max_nan(top, x[r / 2][j / 2][2 * (r & 1) + j % 2]);
      if (counts)
        UNROLL(j, SIDE / 4) seen[r] += x[r / 2][j / 2][2 * (r & 1) + j % 2] != -INF;
      top = quad_max_nan(top);
      UNROLL(t, STRIPES / 4)
        if (stripe == 4 * t) tops[r][t] = max_nan(tops[r][t], top);
      top = max_nan(m[r], top);
      const float most = base_of(top);
      UNROLL(j, SIDE / 4) sum += weight(x[r / 2][j / 2][2 * (r & 1) + j % 2], most);
      l[r] = fmaf(l[r], weight(m[r], most), sum), m[r] = top;
    }
  }
  u32 bits = 0;
  UNROLL(r, 2 * M) {
    seen[r] = quad_sum(seen[r]);
    const int i = row + row_of<M>(r);
    const float sum = quad_sum(l[r]), lse = seen[r] ? m[r] + logf(sum) : -INF;  // (E3)
    const Numbers numbers = counted(a.tau[head.head], seen[r]);
    if (lane_id() % 4 == 0 && i < s.queries) ((float*)head.lse)[i] = lse, head.numbers[i] = numbers;
    UNROLL(t, STRIPES / 4)
      if (may_be_active(tops[r][t], lse, numbers.offset)) bits |= 1u << (4 * t + lane_id() % 4);
  }
  bits = __reduce_or_sync(~0u, bits);
  if (lane_id() == 0) words[warp_id()] = bits;
  __syncthreads();  // the first two warps have one tile of queries, the others the next
  if (threadIdx.x < 2 && row + threadIdx.x * SIDE < s.queries) head.stripes(row + threadIdx.x * SIDE) = words[2 * threadIdx.x] | words[2 * threadIdx.x + 1];
}

// The factor of v: e, or P where Σ a P v is wanted, from S (E4), (E5); 0 if the pair is not active.
template <bool MASKED> DEV float activate(float x, float base, float offset, bool pv) {
  const float p = weight(x, base), e = raised(p, offset);
  if (MASKED && x == -INF || pv && e <= 0) return 0;
  return pv ? p : max_nan(e, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) values(const __grid_constant__ LazyArgs a) {
  const PairArgs& c = a.c;
  const u32 at_q = shared_begin(), at_k = at_q + Q_BYTES, at_v = at_k + 2 * K_BYTES + 8 * BIAS;
  float* const bias = numbers_at(Q_BYTES + 2 * K_BYTES);
  Place own = tile_of_block(c.heads);
  Task task = c.tasks[own.task];
  LazyHead head(a, c.sequences[task.first], own.head);
  const Sequence& s = head.s;
  if (task.row_tile % M) return;  // with the tile before
  const int row = task.row_tile * SIDE;
  const Tile tile = seen_tile<M>(c, s, task);
  const int first = tile.begin / SIDE, end = tile.begin < tile.end ? (tile.end + SIDE - 1) / SIDE : first;
  const u32 stripes = head.stripes(row) | (row + SIDE < s.queries ? head.stripes(row + SIDE) : 0);
  auto next = [&](int n) {
    while (n < end && !(stripes >> stripe_of(s, n * SIDE) & 1)) n++;
    return n;
  };
  auto load = [&](int n, int stage) {
    load_tile<SIDE, CD>(at_k + stage * K_BYTES, key_rows(c.k, head, n * SIDE), c.dim);
    load_bias<ROWS>(bias + stage * BIAS, head, row, n * SIDE);
    Rows v = key_rows(c.v, head, n * SIDE);
    v.at += c.first_value;
    load_tile<SIDE, CE>(at_v + stage * V_BYTES, v, c.value_dim - c.first_value);
    copy_commit();
  };
  const bool odd = *a.odd, pv = a.pv.data;
  float o[M][CE / 8][4], base[2 * M], offset[2 * M], one[2 * M];
  Span spans[2 * M];
  clear<M, CE>(o);
  UNROLL(r, 2 * M) {
    const int i = row + row_of<M>(r);
    spans[r] = head.span(i), base[r] = base_of(head.lse_at(i)), offset[r] = head.number(i).offset, one[r] = 1;
  }
  int n = next(first), stage = 0;
  if (n < end) load_tile<ROWS, CD>(at_q, query_rows(c.q, head, row), c.dim), load(n, 0);
#pragma unroll 1
  for (int following; n < end; n = following, stage ^= 1) {
    copy_wait<0>();
    __syncthreads();  // k_n and v_n are here, and all are done with the other stage
    following = next(n + 1);
    if (following < end) load(following, stage ^ 1);
    u32 packed[M][SIDE / 8][2];
    float most = 0;
    {
      float x[M][SIDE / 8][4];
      products<M, SIDE, CD>(x, at_q, at_k + stage * K_BYTES);
      auto all = [&](auto masked) {
        constexpr bool MASKED = decltype(masked)::value;
        score_tile<MASKED, M>(x, head, row, n * SIDE, spans, bias + stage * BIAS);
        UNROLL(i, M * SIDE / 2) {
          const int r = i / (SIDE / 2) * 2 + i / 2 % 2;
          float& y = x[r / 2][i / 4 % (SIDE / 8)][i % 4];
          y = activate<MASKED>(y, base[r], offset[r], pv), most = max_nan(most, y);
        }
      };
      if (is_masked<M>(head, n * SIDE, spans, odd)) all(Is<true>());
      else all(Is<false>());
      pack_all<M, SIDE>(packed, x);
    }
    const u32 v = at_v + stage * V_BYTES;
    if (odd) clear_odd<SIDE, CE>(v), __syncthreads();
    if (__any_sync(~0u, most != 0)) accumulate<M, SIDE, CE>(o, packed, v);  // (E6)
  }
  if (odd) {
    const int width = min(CE, c.value_dim - c.first_value);
#pragma unroll 1
    for (int j = first * SIDE; j < min(end * SIDE, s.keys); j++) {
      const element* v = key_rows(c.v, head, j).at + c.first_value;
      if (!is_odd(v, width)) continue;
      float factor[2 * M];
      bool seen[2 * M];
      UNROLL(r, 2 * M) {
        const float score = score_alone(head, min(row + row_of<M>(r), s.queries - 1), j);
        seen[r] = score != -INF && is_active(weight(score, base[r]), offset[r]);
        factor[r] = activate<true>(score, base[r], offset[r], pv);
      }
      add_odd<M, CE>(o, factor, seen, v, width);
    }
  }
  if (pv) store_wide<M, CE>(a.pv, s.batch, head.head, s.query_start + row, s.queries - row, o, c.first_value, c.value_dim);
  else store<M, CE>(c.o, s.batch, head.head, s.query_start + row, s.queries - row, o, one, c.first_value, c.value_dim);
}
