// ---- dk, dv, and the windows of dbias ----
namespace keys_pass {
constexpr int ROWS = 64, STAGES = 3, NEAR = ROWS + KEYS;
constexpr u32 Q_BYTES = ROWS * D * 2, NUMBERS = ROWS * sizeof(Numbers);
// k and v, whose places dk and dv take; in stages q and dout of 64 queries, their numbers and their bias; sums of
// diagonals.
constexpr u32 AT_V = KV_BYTES, AT_Q = 2 * KV_BYTES, AT_DO = AT_Q + STAGES * Q_BYTES, AT_NUMBERS = AT_DO + STAGES * Q_BYTES;
constexpr u32 AT_BIAS = AT_NUMBERS + STAGES * NUMBERS, AT_PARTS = AT_BIAS + STAGES * NEAR * 4;
// Of each warpgroup: sums of the diagonals of its threads' groups of 8, twice; and of those that the next tile goes on
// with, twice.
constexpr int WIDTH = 72, PARTS = 32 * WIDTH, CARRIED = 64;
using Blocks = Ring<STAGES, AT_PARTS + 2 * 2 * (PARTS + CARRIED) * 4>;
using Tiles = Ring<1, Blocks::END>;  // of k and v
constexpr u32 TILE = Tiles::END, ACTIVE = TILE + 8;
CHECK_SHARED(keys, 1024 + ACTIVE + 4 * STAGES);  // 1024 to align all

struct Pass {
  const HopperLazyArgs& c;
  u32 base;
  float* numbers;  // the same address
  bool odd;

  METHOD Pass(const HopperLazyArgs& call) : c(call), odd(*call.odd) {
    base = shared_panels(), numbers = numbers_at(base - shared_begin());
    if (threadIdx.x == 0) {
      Tiles::init(base, 1, 8 * ARRIVALS), Blocks::init(base, 1 + ARRIVALS, 8 * ARRIVALS);
      barrier_init_fence();
    }
    __syncthreads();
  }

  METHOD void produce() {
    const bool first_lane = lane_id() == 0;
    Tiles tiles = {base, 1};
    Blocks blocks = {base, 1};
    int t = blockIdx.x;
#pragma unroll 1
    while (t < c.tiles) {
      int next = 0;
      if (first_lane) next = claim_tile(c.counter, c.tiles);
      const Work w = work_of<2, true>(t, c);
      if (w.block >= 0) {
        const Own s = sequence_of<true>(c, w.batch);
        const Range range = query_blocks<1>(c.spans, s, w.block, w.task);
        const int each = s.heads / s.key_heads, stripe = w.block / stripe_blocks(s);
        tiles.wait_empty(), tiles.advance();
        if (first_lane) {
          store_word(base + TILE, t);
          expect_bytes(tiles.full(), 2 * KV_BYTES);
          load5(base, &c.k, tiles.full(), s.key_start + w.block * KEYS, w.head, s.batch);
          load5(base + AT_V, &c.v, tiles.full(), s.key_start + w.block * KEYS, w.head, s.batch);
        }
#pragma unroll 1
        for (int h = w.head * each; h < (w.head + 1) * each; h++)
#pragma unroll 1
          for (int i = range.begin; i < range.end; i++) {
            const u32 stage = blocks.stage(), full = blocks.full();
            blocks.wait_empty();
            if (first_lane) {
              const u32 bytes = min(ROWS, s.queries - i * ROWS) * sizeof(Numbers);
              const bool active = !c.means || c.active[(i64)(s.tile + i) * c.shape.heads + h] >> stripe & 1;
              const u32 cut = SPANS && visit_of<1>(c.spans, s, w.block, i) != i;
              store_word(base + ACTIVE + 4 * stage, active | cut << 1);
              expect_bytes(full, 2 * Q_BYTES + bytes);
              load5(base + AT_Q + stage * Q_BYTES, &c.q, full, s.query_start + i * ROWS, h, s.batch);
              load5(base + AT_DO + stage * Q_BYTES, &c.dout, full, s.query_start + i * ROWS, h, s.batch);
              load_bytes(base + AT_NUMBERS + stage * NUMBERS, c.numbers + row_at(c, s, h, i * ROWS), bytes, full);
            }
            put_bias<ROWS>(numbers + AT_BIAS / 4 + stage * NEAR, c, h, distance_of(c, s, i * ROWS, w.block * KEYS));
            warp_arrive(full);
            blocks.advance();
          }
      }
      t = __shfl_sync(~0u, next, 0);
    }
    tiles.wait_empty();
    if (first_lane) {
      store_word(base + TILE, -1);
      arrive(tiles.full());
    }
  }
};

// Sums of the diagonals of dS of 64 keys, in rows, and 64 queries: diagonal t holds the pairs of key j and query j + t
// - 63. A thread adds up those of its groups of 8 by 8; then thread t adds up what threads have of diagonal t.
DEV float diagonal(const float (&ds)[ROWS / 2], float* parts, int barrier) {
  const int warp = threadIdx.x / 32 % 4, lane = lane_id(), t = threadIdx.x % 128;
  float* own = parts + (warp * 8 + lane / 4) * WIDTH + 2 * (lane & 3);
#pragma unroll
  for (int d = -1; d < ROWS / 8; d++) {  // groups of 8 queries less groups of 8 keys
    float2 sum = make_float2(0, 0);
    if (d >= 0) sum.x = ds[4 * d], sum.y = ds[4 * d + 1];
    if (d < ROWS / 8 - 1) sum.x += ds[4 * (d + 1) + 2], sum.y += ds[4 * (d + 1) + 3];
    *(float2*)(own + 8 * (d + 1)) = sum;
  }
  named_sync(barrier, 128);
  float sum[2] = {0, 0};
  UNROLL(i, 32) {  // rows 16·(i/8) + i%8 of each warp, and 8 below
    const int column = t - 63 + i / 8 * 16 + i % 8 + 8;
    if ((u32)column < (u32)WIDTH) sum[i % 2] += parts[i * WIDTH + column];
  }
  return sum[0] + sum[1];
}

DEV void score_turned(float (&s)[ROWS / 2], float scale, bool near, const float* bias) {
  if (!near) {
    UNROLL(i, ROWS / 2) s[i] = __fmul_rn(scale, s[i]);
    return;
  }
#pragma unroll
  for (int d = -1; d < ROWS / 8; d++)
    UNROLL(e, 2) {
      const float b = bias[8 * d + e];
      if (d >= 0) s[4 * d + e] = __fmaf_rn(scale, s[4 * d + e], b);
      if (d + 1 < ROWS / 8) s[4 * (d + 1) + 2 + e] = __fmaf_rn(scale, s[4 * (d + 1) + 2 + e], b);
    }
}

struct Consumer {
  const Pass& pass;
  const HopperLazyArgs& c;
  const int group, warp, lane;
  u32 tiles = 0;
  const u32 base, k;
  Blocks blocks;

  METHOD Consumer(const Pass& p)
      : pass(p), c(p.c), group(threadIdx.x / 128 - 1), warp(threadIdx.x / 32 - 4), lane(lane_id()), base(p.base),
        k(p.base + group * 64 * 128), blocks(p.base, 0) {}
  METHOD float* parts() const { return pass.numbers + AT_PARTS / 4 + (2 * group + (tiles & 1)) * PARTS; }
  METHOD float* carried(u32 tile) const { return pass.numbers + AT_PARTS / 4 + 4 * PARTS + (2 * group + (tile & 1)) * CARRIED; }

  template <bool MASKED, bool ACTIVE>
  METHOD void step(float (&dk)[D / 2], float (&dv)[D / 2], const Work& w, const Own& s, int h, int i, int key, float* window, bool& goes_on) {
    const u32 stage = blocks.stage(), q = base + AT_Q + stage * Q_BYTES, dout = base + AT_DO + stage * Q_BYTES;
    const Numbers* rows = (const Numbers*)(pass.numbers + AT_NUMBERS / 4) + stage * ROWS + 2 * (lane & 3);
    float x[ROWS / 2], ds[ROWS / 2];
    u32 p[ROWS / 4];
    const u32 shown = SPANS && MASKED ? visible(c.spans, c.shape, s, i * ROWS + 2 * (lane & 3), key) : 0;  // before there are scores
    issue_shared<ROWS, D, KEYS, ROWS>(x, k, q);
    if (ACTIVE) {
      pin(ds), multiply_shared<ROWS, D, KEYS, ROWS>(ds, k + AT_V, dout), mma_commit(), mma_wait<1>();  // (E7)
    } else {
      mma_wait<0>();
    }
    pin(x);
    const int distance = distance_of(c, s, i * ROWS, w.block * KEYS + group * 64);
    score_turned(x, c.shape.scale, c.bias && distance + ROWS > 0 && distance - 64 < c.width,
                 pass.numbers + AT_BIAS / 4 + stage * NEAR + KEYS - 1 - warp * 16 - lane / 4 + 2 * (lane & 3));
    if (SPANS && MASKED) {
      UNROLL(e, ROWS / 2)
        if (!(shown >> e & 1)) x[e] = -INF;
    } else if (MASKED) {
      const int from = i * ROWS + 2 * (lane & 3);
      UNROLL(r, 2) {
        // The queries that see this key.
        const int seen = key + 8 * r - s.offset, first = seen - s.right - from, end = key + 8 * r < s.keys ? min(seen + s.left + 1, s.queries) - from : 0;
        UNROLL(e, ROWS / 4) {
          const int column = 8 * (e / 2) + e % 2;
          if (column < first || column >= end) x[4 * (e / 2) + 2 * r + e % 2] = -INF;
        }
      }
    }
    float most = 0;
    UNROLL(e, ROWS / 4) {
      const Numbers& row = rows[8 * (e / 2) + e % 2];
      UNROLL(r, 2) weigh<MASKED>(x[4 * (e / 2) + 2 * r + e % 2], most, row.share, row.offset);
    }
    if (ACTIVE) mma_wait<0>(), pin(ds);
    UNROLL(e, ROWS / 4) {
      const Numbers& row = rows[8 * (e / 2) + e % 2];
      UNROLL(r, 2) {
        float &y = x[4 * (e / 2) + 2 * r + e % 2], &g = ds[4 * (e / 2) + 2 * r + e % 2];
        g = pull<MASKED>(y, ACTIVE ? g : 0, row.offset, row.delta);
        y = MASKED && hidden(y) ? 0 : raised(y, row.offset);  // (E5), before its cut at 0
      }
    }
    if (MASKED && pass.odd) clear_odd_together<2>(Q_BYTES, q, dout);
    if (ACTIVE) {
      pack_above(x, p);
      pin(dv), issue_registers<ROWS, D>(dv, p, dout);  // (E12)
    }
    u32 packed[ROWS / 4];
    pack_all(ds, packed);
    pin(dk), issue_registers<ROWS, D>(dk, packed, q);  // (E11)
    if (window && distance + ROWS > 0 && distance - 64 < c.reach) {  // (E13)
      const int t = threadIdx.x % 128, d = distance + t - 63;
      float sum = diagonal(ds, parts(), 1 + group);
      if (t >= 64) carried(tiles)[t - 64] = sum;
      else if (d >= 0 && d < c.reach) window[d] = goes_on ? sum + carried(tiles + 1)[t] : sum;
      goes_on = true, tiles++;
    }
    mma_wait<0>(), pin(dk);
    if (ACTIVE) pin(dv);
    blocks.release(), blocks.advance();
  }
  // Adds what queries and cotangents that are not finite have for dk and dv.
  METHOD void add_odd_queries(float (&dk)[D / 2], float (&dv)[D / 2], const Work& w, const Own& s, int key, const Range& range) const {
    const int each = s.heads / s.key_heads;
#pragma unroll 1
    for (int h = w.head * each; h < (w.head + 1) * each; h++)
#pragma unroll 1
      for (int i = range.begin * ROWS; i < min(range.end * ROWS, s.queries); i++) {
        const u16 *q = row_of(c.q_rows, s.batch, h, s.query_start + i), *dout = row_of(c.dout_rows, s.batch, h, s.query_start + i);
        if (!(is_odd(q, D) | is_odd(dout, D))) continue;
        const Numbers row = c.numbers[row_at(c, s, h, i)];
        float e[2], ds[2], most = 0;
        bool seen[2], active[2];
        UNROLL(r, 2) {
          const int j = min(key + 8 * r, s.keys - 1);
          const float g = product_of(dout, row_of(c.v_rows, s.batch, w.head, s.key_start + j), D);
          e[r] = score_alone(c, s, h, i, j), weigh<true>(e[r], most, row.share, row.offset);
          seen[r] = !hidden(e[r]), active[r] = attends<true>(e[r], row.offset);
          ds[r] = pull<true>(e[r], g, row.offset, row.delta), e[r] = raised(e[r], row.offset);
        }
        add_odd(dk, ds, seen, q), add_odd(dv, e, active, dout);
      }
  }

  METHOD void all() {
    for (Tiles own = {base, 0};; own.advance()) {
      own.wait_full();
      const int t = uniform<true>(load_word(base + TILE));
      if (t < 0) break;
      const Work w = work_of<2, true>(t, c);
      const Own s = sequence_of<true>(c, w.batch);
      Range range = query_blocks<1>(c.spans, s, w.block, w.task);
      // A bias of -inf hides pairs; and keys of no sequence are no part of a diagonal.
      if (pass.odd || w.block * KEYS + KEYS > s.keys) range.open = range.closed = range.end;
      const int key = w.block * KEYS + warp * 16 + lane / 4, each = s.heads / s.key_heads;
      // The number of this warpgroup's 64 keys among all such.
      const int task = PACKED ? t / c.shape.key_heads + group : w.batch * ((c.shape.keys + SIDE - 1) / SIDE) + w.block * 2 + group;
      float dk[D / 2], dv[D / 2];
      clear(dk), clear(dv);
#pragma unroll 1
      for (int h = w.head * each; h < (w.head + 1) * each; h++) {
        const bool has_keys = w.block * KEYS + group * 64 < s.keys;
        float* const window = c.windows && has_keys ? c.windows + ((i64)task * c.shape.heads + h) * c.reach : 0;
        bool goes_on = false;
#pragma unroll 1
        for (int i = range.begin; i < range.end; i++) {
          blocks.wait_full();
          const u32 word = __shfl_sync(~0u, load_word(base + ACTIVE + 4 * blocks.stage()), 0);
          const bool active = SPANS ? word & 1 : word;
          if (i < range.open || i >= range.closed || SPANS && word >> 1) step<true, true>(dk, dv, w, s, h, i, key, window, goes_on);
          else if (active) step<false, true>(dk, dv, w, s, h, i, key, window, goes_on);
          else step<false, false>(dk, dv, w, s, h, i, key, window, goes_on);
        }
        // The sums of the last tile of queries for distances above its own.
        const int distance = distance_of(c, s, (range.end - 1) * ROWS, w.block * KEYS + group * 64);
        if (goes_on && window) {
          named_sync(1 + group, 128);
          const int n = threadIdx.x % 128, d = distance + n + 1;
          if (n < 63 && d >= 0 && d < c.reach) window[d] = carried(tiles + 1)[n];
        }
      }
      if (pass.odd) add_odd_queries(dk, dv, w, s, key, range);
      settle(dk, s.scale), settle(dv, 1);
      if (PACKED && w.block * KEYS + KEYS > s.keys) {  // keys of the next sequence lie in the box
        if (c.wants_dk) store_rows(c.dk_rows, s.batch, w.head, s.key_start, key, s.keys, dk);
        if (c.wants_dv) store_rows(c.dv_rows, s.batch, w.head, s.key_start, key, s.keys, dv);
      } else {
        named_sync(1 + group, 128);  // k and v of this warpgroup are no longer read: dk and dv take their places
        put_rows<128>(k, dk), put_rows<128>(k + AT_V, dv);
        proxy_fence();
        named_sync(1 + group, 128);
        if (threadIdx.x % 128 == 0) {
          UNROLL(p, D / 64) {
            if (c.wants_dk) store5(&c.dk, k + p * KEYS * 128, s.key_start + w.block * KEYS + group * 64, w.head, s.batch, p);
            if (c.wants_dv) store5(&c.dv, k + AT_V + p * KEYS * 128, s.key_start + w.block * KEYS + group * 64, w.head, s.batch, p);
          }
          store_commit(), store_wait_read();
        }
      }
      own.release();
    }
    if (threadIdx.x % 128 == 0) store_wait();
  }
};
}
extern "C" __global__ void __launch_bounds__(384, 1) keys(const __grid_constant__ HopperLazyArgs c) {
  keys_pass::Pass pass(c);
  auto feed = [&] {
    if (threadIdx.x < 32) pass.produce();
  };
  divide_roles<40, 232>(feed, [&] { keys_pass::Consumer(pass).all(); });
}
