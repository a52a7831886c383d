// The forward pass on the tensor cores of any GPU from sm_80 on: a block owns 64·M queries of one head and walks the
// keys, last
// to first: S, P, o += P·v, lse                                                                        (F1)–(F5), (L1)
//
// Usual tiles: 128 queries by 64 keys; 64 by 32 where D is above 128. f32: walked tiles have 32 rows, v is loaded
// while S is computed, and the next k while v is multiplied.
//
// Compile-time: as `sm80.cuh`. CD is 64, 128 or, of 16-bit operands, 256, CE 64 or 128: the columns that a launch
// accumulates.
constexpr int M = CD > 128 || TILES == 2 ? 1 : 2, ROWS = 64 * M, KEYS = CD > 128 || STORAGE == 0 || TILES == 1 ? 32 : 64;
constexpr u32 Q_BYTES = ROWS * CD * BYTES, K_BYTES = KEYS * CD * BYTES, V_BYTES = VALUES ? KEYS * CE * BYTES : 0;
// Of f32 every device has room for one stage: v is loaded while S is computed, the next k while v is multiplied.
constexpr int FEEDS = STORAGE == 0 && VALUES ? 1 : 2;
CHECK_SHARED(forward, Q_BYTES + FEEDS * (K_BYTES + V_BYTES));

// S/unit of a tile, -inf where a pair is not visible; whether there is such a pair.
template <bool CUT>
DEV bool scores(float (&s)[M][KEYS / 8][4], const Head& head, const Unit& unit, int row, int key, const Span (&spans)[2 * M]) {
  bool hides = false;
  UNROLL(r, 2 * M)
    UNROLL(j, KEYS / 8)
      UNROLL(e, 2) {
        float& x = s[r / 2][j][2 * (r & 1) + e];
        float slope;
        bool visible = score<CUT>(head, unit, x, slope, row + row_of<M>(r), key + 8 * j + 2 * (lane_id() % 4) + e, spans[r]);
        if (CUT && !visible) x = -INF, hides = true;
      }
  return hides;
}

extern "C" __global__ void __launch_bounds__(THREADS, CD > 128 ? 1 : 2) forward(const __grid_constant__ PairArgs c) {
  const u32 at_q = shared_begin(), at_k = at_q + Q_BYTES, at_v = at_k + FEEDS * K_BYTES;
  Place own = tile_of_block(c.heads);
  Task task = c.tasks[own.task];
  if (task.row_tile % M) return;  // with the tile before
  Head head(c, c.sequences[task.first], own.head);
  const Sequence& s = head.s;
  const int row = task.row_tile * SIDE;
  const Tile tile = seen_tile<M>(c, s, task);
  const int first = tile.begin / KEYS;
  const int last = tile.begin < tile.end ? (tile.end + KEYS - 1) / KEYS : first, end = last * KEYS;
  auto load_k = [&](int n, int stage) {
    load_tile<KEYS, CD>(at_k + stage * K_BYTES, key_rows(c.k, head, n * KEYS), c.dim);
  };
  auto load_v = [&](int n, int stage) {
    if (!VALUES) return;
    Rows v = key_rows(c.v, head, n * KEYS);
    v.at += c.first_value;
    load_tile<KEYS, CE>(at_v + stage * V_BYTES, v, c.value_dim - c.first_value);
  };
  float o[M][CE / 8][4], m[2 * M], l[2 * M];
  Span spans[2 * M];
  UNROLL(r, 2 * M) spans[r] = head.span(row + row_of<M>(r));
  const Unit unit = unit_of(c);
  if (last > first) load_tile<ROWS, CD>(at_q, query_rows(c.q, head, row), c.dim);
  bool odd, again = false;
  do {
    clear<M, CE>(o);
    UNROLL(r, 2 * M) m[r] = -INF, l[r] = 0;
    if (last > first) {
      load_k(last - 1, 0), copy_commit();
      if (FEEDS == 2) load_v(last - 1, 0), copy_commit();
    }
    int stage = 0;
    odd = false;
#pragma unroll 1
    for (int n = last - 1; n >= first; n--, stage ^= FEEDS - 1) {
      copy_wait<FEEDS - 1>();
      __syncthreads();  // k_n is here, and all are done with the other stage, or with v
      if (FEEDS == 1) load_v(n, 0);
      else if (n > first) load_k(n - 1, stage ^ 1);
      copy_commit();
      Factors<M, KEYS> packed;
      float a[2 * M];
      bool cut = false, hides = false;
      {
        float p[M][KEYS / 8][4];
        products<M, KEYS, CD>(p, at_q, at_k + stage * K_BYTES);
        UNROLL(r, 2 * M) cut |= spans[r].begin > n * KEYS || spans[r].end < (n + 1) * KEYS;
        if (OPTIONS || __any_sync(~0u, cut)) hides = scores<true>(p, head, unit, row, n * KEYS, spans);
        else scores<false>(p, head, unit, row, n * KEYS, spans);
        UNROLL(r, 2 * M) {
          float top = m[r], sum = 0;
          UNROLL(j, KEYS / 8) top = fmaxf(top, fmaxf(p[r / 2][j][2 * (r & 1)], p[r / 2][j][2 * (r & 1) + 1]));
          top = quad_max(top);
          float most = top == -INF ? 0 : top, from = most * unit.log2;  // a row that has seen nothing
          a[r] = exp2_fast((m[r] - most) * unit.log2), m[r] = top;  // 1 where the maximum stays
          UNROLL(j, KEYS / 8)
            UNROLL(e, 2) {
              float& x = p[r / 2][j][2 * (r & 1) + e];
              x = exp2_fast(fmaf(x, unit.log2, -from));
              sum += x;
            }
          l[r] = fmaf(l[r], a[r], sum);
        }
        pack_all<M, KEYS>(packed, p);
      }
#if VALUES
      UNROLL(r, 2 * M)
        UNROLL(j, CE / 8) o[r / 2][j][2 * (r & 1)] *= a[r], o[r / 2][j][2 * (r & 1) + 1] *= a[r];
      const u32 v = at_v + stage * V_BYTES;
      copy_wait<FEEDS - 1>();
      if (__syncthreads_or(TWICE ? again : hides)) {  // v_n is here
        odd |= clear_odd<KEYS, CE>(v);
        __syncthreads();
      }
      if (FEEDS == 1 && n > first) load_k(n - 1, 0);
      if (FEEDS == 2 && n > first) load_v(n - 1, stage ^ 1);
      copy_commit();
      accumulate<M, KEYS, CE>(o, packed, v);
#else
      copy_commit();
#endif
    }
  } while (TWICE && VALUES && !again && (again = __syncthreads_or(has_odd<M, CE>(o))));
  if (VALUES && __syncthreads_or(odd)) {
#pragma unroll 1
    for (int j = first * KEYS; j < min(end, s.keys); j++) {
      Rows k = key_rows(c.k, head, j), v = key_rows(c.v, head, j);
      const int width = min(CE, c.value_dim - c.first_value);
      if (!is_odd(v.at + c.first_value, width)) continue;
      float factor[2 * M];
      bool seen[2 * M];
#pragma unroll 1
      for (int r = 0; r < 2 * M; r++) {
        int i = min(row + row_of<M>(r), s.queries - 1);
        float x = product_of(query_rows(c.q, head, i).at, k.at, c.dim), slope;
        bool sees = score<true>(head, unit, x, slope, i, j, head.span(i));
        UNROLL(t, 2 * M)
          if (t == r) seen[t] = sees, factor[t] = exp2_fast((x - m[t]) * unit.log2);
      }
      add_odd<M, CE>(o, factor, seen, v.at + c.first_value, width);
    }
  }
  float over[2 * M], sink = c.sinks ? c.sinks[head.head] : -INF;
  UNROLL(r, 2 * M) {  // a sink joins here: it weighs, and has no value
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
  if (VALUES && c.o.data) store<M, CE>(c.o, s.batch, head.head, s.query_start + row, s.queries - row, o, over, c.first_value, c.value_dim);
}
