// The backward pass on the tensor cores of any GPU from sm_80 on.
//
//   queries   a block owns 64 queries and walks the keys: S, dP, dS, dq += ds·k  (B2)–(B5)
//   keys      a block owns 64 keys of one key head and walks the queries of its heads: dk, dv  (B6), (B7)
//   values    the same for dv alone, where dk is not asked for, and where the columns of both leave no registers: then
//             `keys` has dk. 128 keys, tiles of 32 queries (64 where D and E are at most 64)
//   dbias     a block owns a tile of 64 × 64 pairs and walks what shares its bias  (B9); for sm90a, too: where `fused`
//             there writes dbias, of groups that have a flag alone
//
// S and dP are computed by queries and by keys: seven products. Where D or E is above 128, walked tiles have two
// stages where the device gives a block the shared memory (128 KiB where both are above 128), else one. f32: two
// stages, one where D + E is above 192.
//
// Numbers that are not finite: pairs/tiles.cuh, and of f32 `ZEROS` of pairs/sm80_walks.cuh. `collect` looks at dq of
// partial sums. A pair adds to dbias where it is visible alone; its products of f32 that are not finite are computed
// again (`mend`).
//
// Compile-time: as `sm80.cuh`. CD and CE are 64 or 128; with STAGES, the stages of walked tiles, one of them is 256
// and none 64. Walked tiles have 32 rows then, and of f32. FUSES: `sm80_backward_fused.cu` in place of these kernels.
#if WIDE || CD <= 128
constexpr u32 BLOCK_BYTES = TILE_BYTES + STAGES * 8 * WALK;  // with two numbers of each row

// P (F4) and ds (B4) from a product of a query and a key, and their dP; 0 if the pair is hidden. lse2: to base 2.
template <bool CUT> DEV void weigh(const Head& head, const Unit& unit, float& x, float& dp, int i, int j, Span span, float lse2, float delta) {
  float slope;
  bool visible = score<CUT>(head, unit, x, slope, i, j, span);
  if (CUT && !visible) {
    x = dp = 0;
    return;
  }
  x = exp2_fast(fmaf(x, unit.log2, -lse2));
  dp = __fmul_rn(slope, __fmul_rn(x, __fsub_rn(dp, delta)));
}
DEV float lse2_of(const Head& head, int i) { return i < head.s.queries ? __fmul_rn(head.lse[i], LOG2E) : 0; }

typedef QueryBlock<Head, 1, WALK> SoftmaxBlock;
struct SoftmaxPairs : Body {
  const PairArgs& c;
  const Unit unit;
  METHOD SoftmaxPairs(const PairArgs& c) : c(c), unit(unit_of(c)) {}
};

#if !FUSES
struct SoftmaxQueries : SoftmaxPairs {
  float lse[2], delta[2];
  METHOD SoftmaxQueries(const PairArgs& c, const Head& head, int row) : SoftmaxPairs(c) {
    UNROLL(r, 2) lse[r] = lse2_of(head, row + row_of<1>(r)), delta[r] = delta_of(head, row + row_of<1>(r));
  }
  template <bool MASKED, class F> METHOD Use pairs(const SoftmaxBlock& own, Pairs<1, WALK>& x, Pairs<1, WALK>& ds, int key, int, F) const {
    each(x, ds, [&](float& p, float& dp, int r, int column) {
      const int j = key + column + own_column();
      weigh<MASKED>(own.head, unit, p, dp, own.row + row_of<1>(r), j, own.spans[r], lse[r], delta[r]);
    });
    return {true};
  }
};
CHECK_SHARED(queries, BLOCK_BYTES);
KERNEL(queries, PairArgs c, THREADS, WIDE ? 1 : 2) {
  const SoftmaxBlock own(c, c, tile_of_block(c.heads));
  SoftmaxQueries body(c, own.head, own.row);
  walk_keys<true>(c, own, body);
}
#endif

// 64·M keys that walk W queries. A stage has lse2 and delta of its queries.
template <int M, int W> struct SoftmaxKeys : SoftmaxPairs {
  static constexpr int NUMBERS = 2 * W;
  using SoftmaxPairs::SoftmaxPairs;
  METHOD Head head(const Sequence& s, int h) const { return Head(c, s, h); }
  METHOD void load(const Head& head, int row, int, float* numbers) const {
    const int i = row + threadIdx.x % W;
    if (threadIdx.x < 2 * W) numbers[threadIdx.x] = threadIdx.x < W ? lse2_of(head, i) : delta_of(head, i);
  }
  template <bool MASKED, class F>
  METHOD Use pairs(const Head& head, Pairs<M, W>& x, Pairs<M, W>& ds, int row, int key, const float* numbers, F) const {
    UNROLL(j, W / 8) {
      const int column = 8 * j + own_column();
      const float2 lse2 = *(const float2*)&numbers[column], delta = *(const float2*)&numbers[W + column];
      UNROLL(e, 2) {
        const Span span = MASKED ? head.span(row + column + e) : Span{0, 0};
        UNROLL(r, 2 * M)
          weigh<MASKED>(head, unit, x[r / 2][j][2 * (r % 2) + e], ds[r / 2][j][2 * (r % 2) + e], row + column + e, key + row_of<M>(r), span,
                        e ? lse2.y : lse2.x, e ? delta.y : delta.x);
      }
    }
    return {true, true};
  }
};

template <int M, int W, bool DK, bool DV> DEV void of_keys(const PairArgs& c) {
  const KeyBlock<M, W, DK, DV> own(c);
  if (own.task.key_tile % M) return;  // of the block of a tile before
  SoftmaxKeys<M, W> body(c);
  walk_queries(c, own, body);
}
#if !FUSES
CHECK_SHARED(keys, BLOCK_BYTES);
KERNEL(keys, PairArgs c, THREADS, WIDE ? 1 : 2) { of_keys<1, WALK, true, !WIDE>(c); }
#endif
#if VALUES && !FUSES && (WIDE || STORAGE != 0)
// Without accumulators of dk there are registers for twice as many keys, which halves what is read of shared memory,
// and, of 64 columns, for 64 queries at a time, which halves the barriers.
constexpr int WALK_VALUES = !WIDE && CD == 64 && CE == 64 ? 64 : 32;
CHECK_SHARED(values, WIDE ? BLOCK_BYTES : 2 * D_BYTES + STAGES * WALK_VALUES * ((CD + CE) * BYTES + 8));
KERNEL(values, PairArgs c, THREADS, WIDE ? 1 : 2) { of_keys<WIDE ? 1 : 2, WALK_VALUES, false, true>(c); }
#endif

#if OPTIONS && !WIDE && !FUSES
constexpr bool IN_TURN = STORAGE == 0;  // dout and v take the place of q and k
CHECK_SHARED(dbias, 2 * (!IN_TURN ? D_BYTES + E_BYTES : D_BYTES > E_BYTES ? D_BYTES : E_BYTES));
DEV void bias_of(const PairArgs& c, const Task& task, int own) {
  const u32 at_q = shared_begin(), at_k = at_q + D_BYTES;
  const u32 at_dout = IN_TURN ? at_q : at_k + D_BYTES, at_v = at_dout + E_BYTES;
  const int row = task.row_tile * SIDE, key = task.key_tile * SIDE;
  const Unit unit = unit_of(c);
  Pairs<1, SIDE> sum;
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
    Pairs<1, SIDE> x, dp;
    products<1, SIDE, CD>(x, at_q, at_k);
#if STORAGE == 0
    mend<1, SIDE, CD>(x, at_q, at_k);
#endif
    if (VALUES && IN_TURN) {
      __syncthreads();  // all are done with q and k
      load_values();
      copy_commit(), copy_wait<0>();
      __syncthreads();
    }
    if (VALUES) products<1, SIDE, CE>(dp, at_dout, at_v);
    else clear<1, SIDE>(dp);
#if STORAGE == 0 && VALUES
    mend<1, SIDE, CE>(dp, at_dout, at_v);
#endif
    UNROLL(r, 2) {
      const int i = row + row_of<1>(r);
      const Span span = head.span(i);
      const float lse2 = lse2_of(head, i), delta = delta_of(head, i);
      each_in_row(x, r, [&](float y, int column) {  // dS (B3); a hidden pair adds nothing
        float slope, &all = sum[0][column / 8][2 * r + column % 2];
        const bool visible = score<true>(head, unit, y, slope, i, key + column + own_column(), span);
        if (visible) all += __fmul_rn(exp2_fast(fmaf(y, unit.log2, -lse2)), __fsub_rn(dp[0][column / 8][2 * r + column % 2], delta));
      });
    }
  });
  // Sequences that share a bias begin where the arrays begin.
  const Sequence s = c.sequences[task.first];
  const int rows = task.sequences > 1 ? c.queries : s.queries, keys = task.sequences > 1 ? c.keys : s.keys;
  Tensor to = c.dbias;
  to.data = (element*)to.data + s.key_start;
  store<1, SIDE>(to, s.batch, own, s.query_start + row, rows - row, sum, Same{1}, key, keys);
}
// Of all tiles, or with flags of those of groups that have one: then each head has its own bias.
KERNEL(dbias, PairArgs c, THREADS, 2) {
  if (c.flags && !c.flags[0]) return;
  NO_UNROLL for (int block = blockIdx.x; block < c.blocks; block += gridDim.x) {
    const Task task = c.tasks[block / c.bias_heads];
    const int own = block % c.bias_heads;
    if (c.flags && !c.flags[1 + task.first * c.key_heads + own / (c.heads / c.key_heads)]) continue;
    bias_of(c, task, own);
  }
}
#endif
#endif
