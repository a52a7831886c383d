// The backward pass on the tensor cores of any GPU from sm_80 on.
//
//   queries   a block owns 64 queries and walks the keys: S, dP, dS, dq += ds·k                              (B2)–(B5)
//   keys      a block owns 64 keys of one key head and walks the queries of its heads: dk, dv               (B6), (B7)
//   values    the same for dv alone: where dk is not asked for, and where the columns of both leave no registers:
//             then `keys` has dk. 128 keys, tiles of 32 queries (64 where D and E are at most 64): half the reads of
//             shared memory
//   dbias     a block owns a tile of 64 × 64 pairs and walks what shares its bias                            (B9)
//
// S and dP are computed by queries and by keys: seven products. Where D or E is above 128, the accumulators of dk and
// dv together have more columns than there are registers. Walked tiles then have two stages where the device gives a
// block the shared memory (128 KiB where both are above 128), else one. f32: two stages, one where D + E is above 192.
//
// Compile-time: as `sm80.cuh`. CD and CE are 64 or 128. With STAGES, one of them is 256 and none 64: tiles that are
// walked have 32 rows in so many stages, 2 where a block may have the shared memory. Those of f32 have 32 rows, too.
// FUSES: in place of these kernels that of `sm80_backward_fused.cu`.
#ifdef STAGES
#define WIDE 1
#else
#define WIDE 0
#define STAGES (STORAGE == 0 && CD + VALUES * CE > 192 ? 1 : 2)
#endif
#if WIDE || CD <= 128
constexpr int WALK = WIDE || STORAGE == 0 || TILES == 1 ? 32 : SIDE;  // rows of a tile that a block walks
constexpr u32 D_BYTES = SIDE * CD * BYTES, E_BYTES = VALUES ? SIDE * CE * BYTES : 0;
constexpr u32 D_STAGE = WALK * CD * BYTES, E_STAGE = VALUES ? WALK * CE * BYTES : 0;
constexpr u32 BLOCK_BYTES = D_BYTES + E_BYTES + STAGES * (D_STAGE + E_STAGE + 8 * WALK);  // owned and walked

// From a product of a query and a key, and their dP: P (F4) and ds (B4), both hidden if the pair is not visible. lse2
// is in powers of 2.
template <bool CUT> DEV bool weigh(const Head& head, const Unit& unit, float& x, float& dp, int i, int j, Span span, float lse2, float delta) {
  float slope;
  bool visible = score<CUT>(head, unit, x, slope, i, j, span);
  if (CUT && !visible) return x = dp = HIDE, true;
  x = exp2_fast(fmaf(x, unit.log2, -lse2));
  dp = shown(__fmul_rn(slope, __fmul_rn(x, __fsub_rn(dp, delta))));
  return false;
}
DEV float lse2_of(const Head& head, int i) { return i < head.s.queries ? __fmul_rn(head.lse[i], LOG2E) : 0; }

// True if numbers that are not finite are cleared in the tiles at hand, which all have read.
DEV bool clears(bool hides, bool again) {
  if (!TWICE) return __syncthreads_or(hides);
  if (again) __syncthreads();
  return again;
}

// P and ds of one pair, for `add_odd`; whether it is visible. The four threads of a row ask for the same pair.
DEV bool weigh_alone(const Head& head, const Unit& unit, int i, int j, float& p, float& ds) {
  const PairArgs& c = head.c;
  p = product_of(query_rows(c.q, head, i).at, key_rows(c.k, head, j).at, c.dim);
  ds = 0;
  if (VALUES) ds = product_of(query_rows(c.dout, head, i).at, key_rows(c.v, head, j).at, c.value_dim);
  return !weigh<true>(head, unit, p, ds, i, j, head.span(i), lse2_of(head, i), delta_of(head, i));
}

#if !FUSES
CHECK_SHARED(queries, BLOCK_BYTES);
extern "C" __global__ void __launch_bounds__(THREADS, WIDE ? 1 : 2) queries(const __grid_constant__ PairArgs c) {
  const u32 at_q = shared_begin(), at_dout = at_q + D_BYTES, at_k = at_dout + E_BYTES, at_v = at_k + STAGES * D_STAGE;
  Place own = tile_of_block(c.heads);
  Task task = c.tasks[own.task];
  Head head(c, c.sequences[task.first], own.head);
  if (c.found && !c.found[task.first * c.key_heads + head.key_head]) return;  // here a number for each sequence and key head
  const Sequence& s = head.s;
  const int row = task.row_tile * SIDE;
  Tile tile = c.tiles[s.first_tile + task.row_tile];
  const int first = tile.begin / WALK, end = tile.begin < tile.end ? (tile.end + WALK - 1) / WALK : first;
  auto load = [&](int n, int stage) {
    load_tile<WALK, CD>(at_k + stage * D_STAGE, key_rows(c.k, head, n * WALK), c.dim);
    if (VALUES) load_tile<WALK, CE>(at_v + stage * E_STAGE, key_rows(c.v, head, n * WALK), c.value_dim);
    copy_commit();
  };
  float dq[1][CD / 8][4], lse[2], delta[2], scale[2];
  Span spans[2];
  UNROLL(r, 2) {
    int i = row + row_of<1>(r);
    spans[r] = head.span(i), lse[r] = lse2_of(head, i), delta[r] = delta_of(head, i), scale[r] = c.scale;
  }
  if (first < end) {
    load_tile<SIDE, CD>(at_q, query_rows(c.q, head, row), c.dim);
    if (VALUES) load_tile<SIDE, CE>(at_dout, query_rows(c.dout, head, row), c.value_dim);
  }
  const Unit unit = unit_of(c);
  bool odd, again = false;
  do {
    clear<1, CD>(dq);
    if (first < end) load(first, 0);
    int stage = 0;
    odd = false;
#pragma unroll 1
    for (int n = first; n < end; n++, stage = (stage + 1) % STAGES) {
      copy_wait<0>();
      __syncthreads();  // k_n and v_n are here, and all are done with the other stage
      if (STAGES == 2 && n + 1 < end) load(n + 1, stage ^ 1);
      const u32 k = at_k + stage * D_STAGE;
      float x[1][WALK / 8][4], ds[1][WALK / 8][4];
      products<1, WALK, CD>(x, at_q, k);
      if (VALUES) products<1, WALK, CE>(ds, at_dout, at_v + stage * E_STAGE);
      else clear<1, WALK>(ds);
      bool cut = false, hides = false;
      UNROLL(r, 2) cut |= spans[r].begin > n * WALK || spans[r].end < (n + 1) * WALK;
      auto all = [&](auto masked) {
        UNROLL(i, WALK / 2) {
          int j = i / 4, r = i / 2 % 2, e = i % 4, key = n * WALK + 8 * j + 2 * (lane_id() % 4) + i % 2;
          hides |= weigh<decltype(masked)::value>(head, unit, x[0][j][e], ds[0][j][e], row + row_of<1>(r), key, spans[r], lse[r], delta[r]);
        }
      };
      if (OPTIONS || __any_sync(~0u, cut)) all(Is<true>());
      else all(Is<false>());
      if (clears(hides, again)) {
        odd |= clear_odd<WALK, CD>(k);
        __syncthreads();
      }
      Factors<1, WALK> packed;
#if STORAGE == 0
      if (again) drop_odd<1, WALK>(ds);
#endif
      pack_all<1, WALK>(packed, ds);
      accumulate<1, WALK, CD>(dq, packed, k);
      if (STAGES == 1 && n + 1 < end) {
        __syncthreads();
        load(n + 1, 0);
      }
    }
  } while (TWICE && !again && (again = __syncthreads_or(has_odd<1, CD>(dq))));
  if (__syncthreads_or(odd)) {
#pragma unroll 1
    for (int j = first * WALK; j < min(end * WALK, s.keys); j++) {
      Rows k = key_rows(c.k, head, j);
      if (!is_odd(k.at, c.dim)) continue;
      float p, factor[2];
      bool seen[2];
      UNROLL(r, 2) seen[r] = weigh_alone(head, unit, min(row + row_of<1>(r), s.queries - 1), j, p, factor[r]);
      add_odd<1, CD>(dq, factor, seen, k.at, c.dim);
    }
  }
  store<1, CD>(c.dq, s.batch, head.head, s.query_start + row, s.queries - row, dq, scale, 0, c.dim);
}
#endif

// dk and dv, or one of them, of 64·M keys, which walk tiles of W queries: neither changes a bit. With SLOTS also what
// these keys add to dq, of D and E up to 128, with M = 1 and W = WALK.
template <int M, int W, bool DK, bool DV, class SLOTS> DEV void of_keys(const PairArgs& c, const SLOTS& slots) {
  constexpr bool FUSED = FUSED_BY<SLOTS>;
  constexpr int OWN = SIDE * M;
  constexpr u32 OWN_K = M * D_BYTES, OWN_V = DK ? M * E_BYTES : 0, Q_STAGE = W * CD * BYTES, DOUT_STAGE = VALUES ? W * CE * BYTES : 0;
  const u32 at_k = shared_begin(), at_v = at_k + OWN_K, at_q = at_v + OWN_V, at_dout = at_q + STAGES * Q_STAGE;
  float* numbers = numbers_at(OWN_K + OWN_V + STAGES * (Q_STAGE + DOUT_STAGE));  // of each stage: lse in powers of 2, and delta, of its queries
  Place own = tile_of_block(c.key_heads);
  Task task = c.tasks[own.task];
  if (lacks(slots, task.key_tile)) return;
  if (task.key_tile % M) return;  // of the block of a tile before
  const Sequence s = c.sequences[task.first];
  const int key_head = own.head, group = c.heads / c.key_heads, key = task.key_tile * SIDE, tiles = (s.queries + W - 1) / W;
  const bool wants_dk = DK && c.dk.data, wants_dv = VALUES && DV && c.dv.data;
  float dk[M][CD / 8][4], scale[2 * M];  // of what is not asked for nothing is left
  load_tile<OWN, CD>(at_k, key_rows(c.k, s, key_head, key), c.dim);
  float dv[M][CE / 8][4], one[2 * M];
  if (VALUES && DK) load_tile<OWN, CE>(at_v, key_rows(c.v, s, key_head, key), c.value_dim);
  for (int r = 0; r < 2 * M; r++) one[r] = 1, scale[r] = c.scale;
  auto next = [&](int n) { return next_seen<W, OWN>(c, s, n, group * tiles, key); };
  auto load = [&](int n, int stage) {
    const Head head(c, s, key_head * group + n / tiles);
    const int row = n % tiles * W, i = row + threadIdx.x % W;
    load_tile<W, CD>(at_q + stage * Q_STAGE, query_rows(c.q, head, row), c.dim);
    if (VALUES) load_tile<W, CE>(at_dout + stage * DOUT_STAGE, query_rows(c.dout, head, row), c.value_dim);
    if (threadIdx.x < 2 * W) numbers[stage * 2 * W + threadIdx.x] = threadIdx.x < W ? lse2_of(head, i) : delta_of(head, i);
  };
#if FUSES
  find_odd<CD>(slots, task.first * c.key_heads + key_head, at_k);
#endif
  const Unit unit = unit_of(c);
  bool odd, again = false;
  do {
    clear<M, CD>(dk), clear<M, CE>(dv);
    int n = next(0), stage = 0;
    odd = false;
    if (n < group * tiles) load(n, 0);
    copy_commit();
#pragma unroll 1
    while (n < group * tiles) {
      copy_wait<0>();
      __syncthreads();  // q and dout of tile n are here, and all are done with the other stage
      const int following = next(n + 1), row = n % tiles * W;
      if (STAGES == 2 && following < group * tiles) load(following, stage ^ 1);
      copy_commit();
      Head head(c, s, key_head * group + n / tiles);
      const u32 q = at_q + stage * Q_STAGE, dout = at_dout + stage * DOUT_STAGE;
      float x[M][W / 8][4], ds[M][W / 8][4];
      products<M, W, CD>(x, at_k, q);
      if (VALUES && (FUSED || wants_dk)) products<M, W, CE>(ds, at_v, dout);
      else clear<M, W>(ds);
      bool hides = false;
      auto all = [&](auto masked) {
        constexpr bool CUT = decltype(masked)::value;
        UNROLL(j, W / 8) {
          const int column = 8 * j + 2 * (lane_id() % 4);
          const float2 lse2 = *(const float2*)&numbers[stage * 2 * W + column], delta = *(const float2*)&numbers[stage * 2 * W + W + column];
          UNROLL(e, 2) {
            Span span = CUT ? head.span(row + column + e) : Span{0, 0};
            UNROLL(r, 2 * M)
              hides |= weigh<CUT>(head, unit, x[r / 2][j][2 * (r % 2) + e], ds[r / 2][j][2 * (r % 2) + e], row + column + e, key + row_of<M>(r), span,
                                  e ? lse2.y : lse2.x, e ? delta.y : delta.x);
          }
        }
      };
      bool cut = false;
#pragma unroll
      for (int half = 0; half < W; half += 32) {
        Span span = head.span(row + half + lane_id());
        cut |= span.begin > key || span.end < key + OWN;
      }
      if (OPTIONS || __any_sync(~0u, cut)) all(Is<true>());
      else all(Is<false>());
      if (clears(hides, again)) {
        odd |= clear_odd<W, CD>(q);
        if (VALUES) odd |= clear_odd<W, CE>(dout);
        __syncthreads();
      }
      Factors<M, W> packed;
#if STORAGE == 0
      if (again) drop_odd<M, W>(x), drop_odd<M, W>(ds);
#endif
      pack_all<M, W>(packed, x);
      if (wants_dv) accumulate<M, W, CE>(dv, packed, dout);
      pack_all<M, W>(packed, ds);
#if FUSES
      // There is room for dS where dout was, which all have read, or behind the numbers.
      const u32 across = VALUES ? dout : at_q + STAGES * (D_STAGE + 8 * WALK);
      __syncthreads();
      put<WALK>(across, packed);
#endif
      if (wants_dk) accumulate<M, W, CD>(dk, packed, q);
#if FUSES
      __syncthreads();
      leave(c, slots, head, row, task.key_tile, across, at_k);
#endif
      if (STAGES == 1 && following < group * tiles) {
        __syncthreads();
        load(following, 0), copy_commit();
      }
      n = following, stage = (stage + 1) % STAGES;
    }
  } while (TWICE && !again && (again = __syncthreads_or(has_odd<M, CD>(dk) || VALUES && has_odd<M, CE>(dv))));
  if (__syncthreads_or(odd)) {
#pragma unroll 1
    for (int at = 0; at < group * s.queries; at++) {
      const Head head(c, s, key_head * group + at / s.queries);
      const int i = at % s.queries;
      const element* q = query_rows(c.q, head, i).at;
      const element* dout = query_rows(c.dout, head, i).at;
      bool found = is_odd(q, c.dim);
      if (VALUES) found |= is_odd(dout, c.value_dim);
      if (!found) continue;
      float p[2 * M], factor[2 * M];
      bool seen[2 * M];
      UNROLL(r, 2 * M) seen[r] = weigh_alone(head, unit, i, min(key + row_of<M>(r), s.keys - 1), p[r], factor[r]);
      if (DK) add_odd<M, CD>(dk, factor, seen, q, c.dim);
      if (VALUES && DV) add_odd<M, CE>(dv, p, seen, dout, c.value_dim);
    }
  }
  if (wants_dk) store<M, CD>(c.dk, s.batch, key_head, s.key_start + key, s.keys - key, dk, scale, 0, c.dim);
  if (wants_dv) store<M, CE>(c.dv, s.batch, key_head, s.key_start + key, s.keys - key, dv, one, 0, c.value_dim);
}
#if !FUSES
CHECK_SHARED(keys, BLOCK_BYTES);
extern "C" __global__ void __launch_bounds__(THREADS, WIDE ? 1 : 2) keys(const __grid_constant__ PairArgs c) {
  of_keys<1, WALK, true, !WIDE>(c, NoSlots());
}
#endif
#if VALUES && !FUSES && (WIDE || STORAGE != 0)
// Without accumulators of dk there are registers for twice as many keys, which halves what is read of shared memory,
// and, of 64 columns, for 64 queries at a time, which halves the barriers.
constexpr int WALK_VALUES = !WIDE && CD == 64 && CE == 64 ? 64 : 32;
CHECK_SHARED(values, WIDE ? BLOCK_BYTES : 2 * D_BYTES + STAGES * WALK_VALUES * ((CD + CE) * BYTES + 8));
extern "C" __global__ void __launch_bounds__(THREADS, WIDE ? 1 : 2) values(const __grid_constant__ PairArgs c) {
  of_keys<WIDE ? 1 : 2, WALK_VALUES, false, true>(c, NoSlots());
}
#endif

#if OPTIONS && !WIDE && !FUSES
constexpr bool IN_TURN = STORAGE == 0;  // dout and v take the place of q and k
CHECK_SHARED(dbias, 2 * (!IN_TURN ? D_BYTES + E_BYTES : D_BYTES > E_BYTES ? D_BYTES : E_BYTES));
extern "C" __global__ void __launch_bounds__(THREADS, 2) dbias(const __grid_constant__ PairArgs c) {
  const u32 at_q = shared_begin(), at_k = at_q + D_BYTES;
  const u32 at_dout = IN_TURN ? at_q : at_k + D_BYTES, at_v = at_dout + E_BYTES;
  Task task = c.tasks[blockIdx.x / c.bias_heads];
  const int own = blockIdx.x % c.bias_heads, row = task.row_tile * SIDE, key = task.key_tile * SIDE;
  const Unit unit = unit_of(c);
  float sum[1][SIDE / 8][4];
  clear<1, SIDE>(sum);
  each_sharing(c, task, own, [&](const Head& head) {
    __syncthreads();  // all are done with the tiles before
    load_tile<SIDE, CD>(at_q, query_rows(c.q, head, row), c.dim), load_tile<SIDE, CD>(at_k, key_rows(c.k, head, key), c.dim);
    auto load_values = [&] {
      load_tile<SIDE, CE>(at_dout, query_rows(c.dout, head, row), c.value_dim);
      load_tile<SIDE, CE>(at_v, key_rows(c.v, head, key), c.value_dim);
    };
    if (VALUES && !IN_TURN) load_values();
    copy_commit(), copy_wait<0>();
    __syncthreads();
    float x[1][SIDE / 8][4], dp[1][SIDE / 8][4];
    products<1, SIDE, CD>(x, at_q, at_k);
    if (VALUES && IN_TURN) {
      __syncthreads();  // all are done with q and k
      load_values();
      copy_commit(), copy_wait<0>();
      __syncthreads();
    }
    if (VALUES) products<1, SIDE, CE>(dp, at_dout, at_v);
    else clear<1, SIDE>(dp);
    UNROLL(r, 2) {
      const int i = row + row_of<1>(r);
      const Span span = head.span(i);
      const float lse2 = lse2_of(head, i), delta = delta_of(head, i);
      UNROLL(j, SIDE / 8)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; e++) {  // dS (B3); a hidden pair adds nothing
          float slope, y = x[0][j][e];
          bool visible = score<true>(head, unit, y, slope, i, key + 8 * j + 2 * (lane_id() % 4) + e % 2, span);
          if (visible) sum[0][j][e] += __fmul_rn(exp2_fast(fmaf(y, unit.log2, -lse2)), __fsub_rn(dp[0][j][e], delta));
        }
    }
  });
  // Sequences that share a bias begin where the arrays begin.
  const Sequence s = c.sequences[task.first];
  const int rows = task.sequences > 1 ? c.queries : s.queries, keys = task.sequences > 1 ? c.keys : s.keys;
  const float one[2] = {1, 1};
  Tensor to = c.dbias;
  to.data = (element*)to.data + s.key_start;
  store<1, SIDE>(to, s.batch, own, s.query_start + row, rows - row, sum, one, key, keys);
}
#endif
#endif
