// ---- dq ----
#if RESULTS == 1 && OPTIONS != 2
namespace queries_pass {
constexpr int KEYS = 128, ROWS = OWN;
constexpr u32 KV_BYTES = KEYS * D * 2, Q_BYTES = ROWS * D * 2;
constexpr u32 AT_DO = Q_BYTES, AT_K = 2 * Q_BYTES, AT_V = AT_K + 2 * KV_BYTES, AT_DQ = AT_V + 2 * KV_BYTES;
using TileRing = Ring<1, AT_DQ + Q_BYTES>;  // of q and dout
constexpr u32 OUT_FULL = TileRing::END, OUT_EMPTY = OUT_FULL + 8;
using Blocks = Ring<2, OUT_EMPTY + 8, 2>;
constexpr int K = 0, V = 1;  // its parts
using Tiles = WorkTiles<2, false, TileRing, Blocks::END>;
CHECK_SHARED(queries, 1024 + Blocks::END + 8);  // 1024 to align all
DEV void produce(u32 base, const BackwardArgs& call) {
  Tiles tiles = {base, 1};
  Blocks blocks = {base, 1};
  NO_UNROLL for (int t = blockIdx.x; t < call.tiles; t = claim_tile(call.counter, call.tiles)) {
    const Work w = Tiles::work<false>(t, call);
    if (w.block < 0) continue;
    const Own s = sequence_of<false>(call, w.batch);
    const Range range = key_blocks<2, KEYS, false>(call.spans, s, w.block);
    const u32 full = tiles.announce(t);
    tiles.advance();
    expect_bytes(full, 2 * Q_BYTES);
    load5(base, &call.q, full, s.query_start + w.block * ROWS, w.head, s.batch);
    load5(base + AT_DO, &call.dout, full, s.query_start + w.block * ROWS, w.head, s.batch);
    const int kh = w.head / (s.heads / s.key_heads);
    NO_UNROLL for (int n = range.begin; n < range.end; n++) {
      const u32 at = base + AT_K + blocks.stage() * KV_BYTES, to_v = at + AT_V - AT_K;
      load5(at, &call.k, blocks.fill(KV_BYTES, K), s.key_start + n * KEYS, kh, s.batch);
      load5(to_v, &call.v, blocks.fill(KV_BYTES, V), s.key_start + n * KEYS, kh, s.batch);
      blocks.advance();
    }
  }
  tiles.finish();
}
DEV void store(u32 base, const BackwardArgs& call) {
  store_tiles<false, OUT_FULL, OUT_EMPTY>(Tiles(base, 0), call, [&](const Work& w, const Own& s, u32) {
    store5(&call.dq, base + AT_DQ, s.query_start + w.block * ROWS, w.head, s.batch);
  });
}

// Descriptors by addition, which spill with OPTIONS.
constexpr bool BY_ADDITION = !OPTIONS;
// Puts P S' in place of the products of a thread's two rows, the first of which is `row`, and the keys of block n; 0
// if a pair is hidden. A function of numbers alone: of a struct of them, or with the bounds of Seen, that are at least
// 0 where the mask is a window, the loop gets up to 32 more moves between uniform registers.
template <bool MASKED, int N>
DEV void weigh(float (&p)[N], const BackwardArgs& call, const Own& s, const Seen& seen, const BiasRows& bias, const float (&lse2)[2], float c, int row, int n) {
  const bool pairs = has_pairs(call.options.bias, bias.of[0]);
  const int from = n * KEYS + 2 * (lane_id() & 3);
  UNROLL(r, 2) {
    int stop = s.keys - from, start = 0;
    if (SPANS) stop = seen.end(r) - from, start = seen.begin(r) - from;
    else if (WINDOW) stop = min(stop, row + 8 * r + s.offset + s.right + 1 - from), start = row + 8 * r + s.offset - s.left - from;
    UNROLL(j, N / 4) {
      const int count = MASKED ? s.keys - from - 8 * j : 2;
      const float2 b = OPTIONS && bias.of[r] ? load_bias(bias.of[r] + n * KEYS + 8 * j, pairs, count) : float2{0, 0};
      UNROLL(e, 2) {
        float &y = p[4 * j + 2 * r + e], slope;
        if (OPTIONS) extend(y, slope, call.options, e ? b.y : b.x);
        y = exp2_fast(fmaf(y, c, -lse2[r]));
        if (MASKED && (8 * j + e >= stop || (WINDOW && 8 * j + e < start))) y = 0;
        if (OPTIONS) y *= slope;
      }
    }
  }
}
// dq as `fused` adds it: each block of keys has a part of its own, a product that begins anew, which joins the sum of
// those before. With D = 128 the registers hold one part beside the sum, so no product of the next block runs under
// it; those of the other warpgroup do. With D = 64 and a full mask it joins the sum a block later (LATER). Where q
// lies is uniform, which the shuffle tells the compiler: 3 % of the instructions.
constexpr bool LATER = D == 64 && !WINDOW;
DEV void consume(u32 base, const BackwardArgs& call) {
  const int group = own_group();
  const u32 q = __shfl_sync(~0u, base + group * 64 * 128, 0), dout = q + AT_DO;
  Blocks blocks = {base, 0};
  Work w;
  Own s;
  NO_UNROLL for (Tiles tiles = {base, 0}; tiles.take<true>(call, w, s); tiles.advance()) {
    const int row = w.block * ROWS + group * 64 + own_row();
    const float c = exponent_unit(call, s);
    const Seen seen(call.spans, call.shape, s, row);
    const size_t at = stat_row(s, w.head) + row;
    const float lse2[2] = {call.lse2[at], call.lse2[at + 8]}, delta[2] = {call.delta[at], call.delta[at + 8]};
    const BiasRows bias(call.options, s, w.head, row);
    const Range range = key_blocks<2, KEYS, false>(call.spans, s, w.block);
    float sum[D / 2], later[D / 2];
    u32 factors[KEYS / 4], before = 0;
    bool any = false;
    int n = range.begin;
    UNROLL(i, D / 2) sum[i] = later[i] = -0.0f;  // 0 would hide the sign of another
    auto step = [&](auto masked, auto halved) {
      constexpr int SEEN = decltype(halved)::value ? KEYS / 2 : KEYS;
      float part[D / 2], p[SEEN / 2], ds[SEEN / 2];
      u32 dsp[SEEN / 4];
      const u32 k = base + AT_K + blocks.stage() * KV_BYTES, v = base + AT_V + blocks.stage() * KV_BYTES;
      blocks.wait_full(K);
      const bool is_cut = LENGTHS && decltype(masked)::value && s.keys - n * KEYS < KEYS;  // rows behind the sequence
      if (is_cut) zero_rows<KEYS>(s.keys - n * KEYS, 1 + group, k);
      issue_shared<SEEN, D, ROWS, KEYS>(p, rows_at<BY_ADDITION>(q), rows_at<BY_ADDITION>(k));
      if (LATER) {
        mma_wait<0>(), pin(later), pin(factors);
        if (any) blocks.release(before, K);
      }
      blocks.wait_full(V);
      if (is_cut) zero_rows<KEYS>(s.keys - n * KEYS, 1 + group, v);
      issue_shared<SEEN, D, ROWS, KEYS>(ds, rows_at<BY_ADDITION>(dout), rows_at<BY_ADDITION>(v));
      if (LATER) {
        UNROLL(i, D / 2) sum[i] += later[i];
      } else {
        mma_wait<1>();
      }
      pin(p);
      weigh<decltype(masked)::value>(p, call, s, seen, bias, lse2, c, row, n);
      mma_wait<0>(), pin(ds);
      blocks.release(blocks.stage(), V);
      if (n == range.end - 1) tiles.release();  // q and dout are no longer read
      UNROLL(i, SEEN / 4) (LATER ? factors[i] : dsp[i]) = pack(p[2 * i] * (ds[2 * i] - delta[i % 2]), p[2 * i + 1] * (ds[2 * i + 1] - delta[i % 2]));
      auto multiply = [&](float(&x)[D / 2], auto& by) {
        const u64 rows = mn_major(k, KEYS * 128);
        pin(by), mma_begin();
        UNROLL(i, SEEN / 16) Mma<D>::rs<MN_MAJOR>(x, by + 4 * i, rows + i * MN_STEP, i > 0);
        mma_commit();
      };
      if (LATER) {
        multiply(later, factors);
        any = true, before = blocks.stage();
      } else {
        multiply(part, dsp);
        mma_wait<0>(), pin(part);
        blocks.release(blocks.stage(), K);
        UNROLL(i, D / 2) sum[i] += part[i];
      }
      blocks.advance();
    };
    NO_UNROLL for (; n < range.open; n++) step(Is<true>(), Is<false>());
    NO_UNROLL for (; n < range.closed; n++) step(Is<false>(), Is<false>());
    // The last key that a row of the warpgroup sees: on the diagonal the first one sees half of a block.
    const int last = w.block * ROWS + (__shfl_sync(~0u, group, 0) + 1) * 64 - 1 + s.offset + s.right;
    NO_UNROLL for (; n < range.end; n++) {
      if (WINDOW == 1 && !LATER && last < n * KEYS + KEYS / 2) step(Is<true>(), Is<true>());
      else step(Is<true>(), Is<false>());
    }
    if (LATER) {
      mma_wait<0>(), pin(later), pin(factors);
      UNROLL(i, D / 2) sum[i] += later[i];
      if (any) blocks.release(before, K);
    }
    if (range.begin == range.end) clear(sum), warp_arrive(tiles.empty());
    auto ready = [&] { wait(base + OUT_EMPTY, tiles.phase() ^ 1); };
    const Result result = {sum, s.scale, call.dq_rows, base + AT_DQ + group * 64 * 128};
    put_results<OF_QUERIES, false>(call, w, s, row, ready, result);
    warp_arrive(base + OUT_FULL);
  }
}
}
KERNEL(queries, BackwardArgs call, 384, 1) {
  using namespace queries_pass;
  const u32 base = shared_panels();
  make_barriers([&] {
    prefetch(&call.q), prefetch(&call.k), prefetch(&call.v), prefetch(&call.dout), prefetch(&call.dq);
    Tiles::init(base, 1, 8 * ARRIVALS + 1);
    barrier_init(base + OUT_FULL, 8 * ARRIVALS), barrier_init(base + OUT_EMPTY, 1);
    Blocks::init(base, 1, 8 * ARRIVALS, K), Blocks::init(base, 1, 8 * ARRIVALS, V);
  });
  divide_roles<24, 240>([&] { produce(base, call); }, [&] { store(base, call); }, [&] { consume(base, call); });
}
#endif
