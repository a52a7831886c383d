// ---- dk, dv, and the windows of dbias ----
namespace keys_pass {
constexpr int ROWS = 64, STAGES = 3, NEAR = ROWS + KEYS;
constexpr u32 Q_BYTES = ROWS * D * 2, NUMBERS = ROWS * sizeof(Numbers);
// k and v, whose places dk and dv take; in stages q and dout of 64 queries, their numbers and bias; sums of diagonals.
constexpr u32 AT_V = KV_BYTES, AT_Q = 2 * KV_BYTES, AT_DO = AT_Q + STAGES * Q_BYTES, AT_NUMBERS = AT_DO + STAGES * Q_BYTES;
constexpr u32 AT_BIAS = AT_NUMBERS + STAGES * NUMBERS, AT_PARTS = AT_BIAS + STAGES * NEAR * 4;
// Twice, of each warpgroup: sums of the diagonals of its threads' groups of 8; and of those that the next tile goes on
// with.
constexpr int WIDTH = 72, PARTS = 32 * WIDTH, CARRIED = 64;
using Blocks = Ring<STAGES, AT_PARTS + 2 * 2 * (PARTS + CARRIED) * 4>;
using TileRing = Ring<1, Blocks::END>;  // of k and v
using Tiles = WorkTiles<2, true, TileRing, TileRing::END>;
constexpr u32 ACTIVE = TileRing::END + 8;
CHECK_SHARED(keys, 1024 + ACTIVE + 4 * STAGES);  // 1024 to align all

struct Pass {
  const HopperLazyArgs& c;
  u32 base;
  float* numbers;  // the same address

  METHOD Pass(const HopperLazyArgs& call) : c(call) {
    base = shared_panels(), numbers = numbers_at(base - shared_begin());
    make_barriers([&] { Tiles::init(base, 1, 8 * ARRIVALS), Blocks::init(base, 1 + ARRIVALS, 8 * ARRIVALS); });
  }

  METHOD void produce() {
    Tiles tiles = {base, 1};
    Blocks blocks = {base, 1};
    NO_UNROLL for (int t = blockIdx.x, claimed; t < c.tiles; t = __shfl_sync(~0u, claimed, 0)) {
      claimed = lane_id() == 0 ? claim_tile(c.counter, c.tiles) : 0;
      const Work w = Tiles::work<true>(t, c);
      if (w.block < 0) continue;
      const Own s = sequence_of<true>(c, w.batch);
      const Range range = query_blocks<1>(c.spans, s, w.block, w.task);
      const int each = s.heads / s.key_heads, stripe = w.block / stripe_blocks(s);
      tiles.wait_empty(), tiles.advance();
      if (lane_id() == 0) {
        store_word(tiles.word(), t);
        expect_bytes(tiles.full(), 2 * KV_BYTES);
        load5(base, &c.k, tiles.full(), s.key_start + w.block * KEYS, w.head, s.batch);
        load5(base + AT_V, &c.v, tiles.full(), s.key_start + w.block * KEYS, w.head, s.batch);
      }
      NO_UNROLL for (int h = w.head * each; h < (w.head + 1) * each; h++)
        NO_UNROLL for (int i = range.begin; i < range.end; i++) load_block(blocks, w, s, h, i, stripe);
    }
    tiles.wait_empty();
    if (lane_id() == 0) store_word(tiles.word(), -1), arrive(tiles.full());
  }
  // A block of queries of a head, with its numbers and its bias; a word: whether it is active, and needs a mask.
  METHOD void load_block(Blocks& blocks, const Work& w, const Own& s, int h, int i, int stripe) {
    const u32 stage = blocks.stage(), full = blocks.full();
    blocks.wait_empty();
    if (lane_id() == 0) {
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
};

// Sums of the diagonals of dS of 64 keys, in rows, and 64 queries: diagonal t holds the pairs of key j and query j + t
// - 63. A thread adds up those of its groups of 8 by 8; then thread t adds up the threads' sums of diagonal t.
DEV float diagonal(const float (&ds)[ROWS / 2], float* parts, int barrier) {
  const int warp = threadIdx.x / 32 % 4, lane = lane_id(), t = threadIdx.x % 128;
  float* own = parts + (warp * 8 + lane / 4) * WIDTH + 2 * (lane & 3);
  UNROLL_ALL for (int d = -1; d < ROWS / 8; d++) {  // groups of 8 queries less groups of 8 keys
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

struct Consumer {
  const Pass& pass;
  const HopperLazyArgs& c;
  const int group;
  u32 tiles = 0;
  const u32 base, k;
  Blocks blocks;
  // Of a tile: the first of this thread's keys; of a head: its window, and whether it has begun.
  Work w;
  Own s;
  int key;
  float* window;
  bool goes_on;

  METHOD Consumer(const Pass& p)
      : pass(p), c(p.c), group(own_group()), base(p.base), k(p.base + group * 64 * 128), blocks(p.base, 0) {}
  METHOD float* parts() const { return pass.numbers + AT_PARTS / 4 + (2 * group + (tiles & 1)) * PARTS; }
  METHOD float* carried(u32 tile) const { return pass.numbers + AT_PARTS / 4 + 4 * PARTS + (2 * group + (tile & 1)) * CARRIED; }
  METHOD int first_key() const { return w.block * KEYS + group * 64; }

  // Puts -inf where a query of block i does not see a key. `shown`: with SPANS a bit for each pair.
  METHOD void hide(float (&x)[ROWS / 2], int i, u32 shown) const {
    if (SPANS) {
      UNROLL(e, ROWS / 2)
        if (!(shown >> e & 1)) x[e] = -INF;
      return;
    }
    const int from = i * ROWS + own_column();
    UNROLL(r, 2) {
      // The queries that see this key.
      const int seen = key + 8 * r - s.offset, first = seen - s.right - from, end = key + 8 * r < s.keys ? min(seen + s.left + 1, s.queries) - from : 0;
      hide_outside(x, r, first, end);
    }
  }
  METHOD void add_diagonals(const float (&ds)[ROWS / 2], int distance) {
    if (!(window && distance + ROWS > 0 && distance - 64 < c.reach)) return;
    const int t = threadIdx.x % 128, d = distance + t - 63;
    float sum = diagonal(ds, parts(), 1 + group);
    if (t >= 64) carried(tiles)[t - 64] = sum;
    else if (d >= 0 && d < c.reach) window[d] = goes_on ? sum + carried(tiles + 1)[t] : sum;
    goes_on = true, tiles++;
  }
  // The sums of the last tile of queries for distances above its own.
  METHOD void end_window(int last) const {
    const int distance = distance_of(c, s, last * ROWS, first_key());
    if (!goes_on || !window) return;
    named_sync(1 + group, 128);
    const int n = threadIdx.x % 128, d = distance + n + 1;
    if (n < 63 && d >= 0 && d < c.reach) window[d] = carried(tiles + 1)[n];
  }

  template <bool MASKED, bool ACTIVE> METHOD void step(float (&dk)[D / 2], float (&dv)[D / 2], int i) {
    const u32 stage = blocks.stage(), q = base + AT_Q + stage * Q_BYTES, dout = base + AT_DO + stage * Q_BYTES;
    const int column = own_column();
    const Numbers* rows = (const Numbers*)(pass.numbers + AT_NUMBERS / 4) + stage * ROWS + column;
    float x[ROWS / 2], ds[ROWS / 2];
    u32 p[ROWS / 4];
    const u32 shown = SPANS && MASKED ? visible(c.spans, c.shape, s, i * ROWS + column, key) : 0;  // before there are scores
    issue_shared<ROWS, D, KEYS, ROWS>(x, k_major(k), k_major(q));
    if (ACTIVE) {
      pin(ds), multiply_shared<ROWS, D, KEYS, ROWS>(ds, k_major(k + AT_V), k_major(dout)), mma_commit(), mma_wait<1>();  // (E7)
    } else {
      mma_wait<0>();
    }
    pin(x);
    const int distance = distance_of(c, s, i * ROWS, first_key());
    score<1>(x, c.shape.scale, c.bias && distance + ROWS > 0 && distance - 64 < c.width,
             pass.numbers + AT_BIAS / 4 + stage * NEAR + KEYS - 1 - row_in_tile() + column);
    if (MASKED) hide(x, i, shown);
    float most = 0;
    each_number(x, [&](float& y, int, int n) { weigh<MASKED>(y, most, rows[n].share, rows[n].offset); });
    if (ACTIVE) mma_wait<0>(), pin(ds);
    UNROLL(e, ROWS / 4) {
      const Numbers& row = rows[8 * (e / 2) + e % 2];
      UNROLL(r, 2) {
        float &y = x[4 * (e / 2) + 2 * r + e % 2], &g = ds[4 * (e / 2) + 2 * r + e % 2];
        g = pull<MASKED>(y, ACTIVE ? g : 0, row.offset, row.delta);
        y = MASKED && hidden(y) ? 0 : raised(y, row.offset);  // (E5), before its cut at 0
      }
    }
    if (!PACKED) order_after(ds[0]);  // or with D = 128 more is spilt
    if (PACKED && MASKED && i * ROWS + ROWS > s.queries) zero_rows<ROWS>(s.queries - i * ROWS, 1 + group, q, dout);
    if (ACTIVE) {
      pack_above(x, p);
      pin(dv), issue_registers<ROWS, D>(dv, p, mn_major(dout, ROWS * 128));  // (E12)
    }
    u32 packed[ROWS / 4];
    pack_all(ds, packed);
    pin(dk), issue_registers<ROWS, D>(dk, packed, mn_major(q, ROWS * 128));  // (E11)
    add_diagonals(ds, distance);  // (E13)
    mma_wait<0>(), pin(dk);
    if (ACTIVE) pin(dv);
    blocks.release(), blocks.advance();
  }
  // Walks the queries of head h. `task`: the number of this warpgroup's 64 keys among all such.
  METHOD void walk(float (&dk)[D / 2], float (&dv)[D / 2], int h, int task, const Range& range) {
    const bool has_keys = first_key() < s.keys;  // apart from what follows, or with SPANS more is spilt
    window = c.windows && has_keys ? c.windows + ((i64)task * c.shape.heads + h) * c.reach : 0;
    goes_on = false;
    NO_UNROLL for (int i = range.begin; i < range.end; i++) {
      blocks.wait_full();
      const u32 word = __shfl_sync(~0u, load_word(base + ACTIVE + 4 * blocks.stage()), 0);
      const bool active = SPANS ? word & 1 : word;
      if (i < range.open || i >= range.closed || SPANS && word >> 1) step<true, true>(dk, dv, i);
      else if (active) step<false, true>(dk, dv, i);
      else step<false, false>(dk, dv, i);
    }
    end_window(range.end - 1);
  }

  METHOD void all() {
    for (Tiles own = {base, 0}; own.take<true>(c, w, s); own.advance()) {
      Range range = query_blocks<1>(c.spans, s, w.block, w.task);
      // Rows of no sequence are no part of a diagonal.
      if (w.block * KEYS + KEYS > s.keys) range.open = range.closed = range.end;
      key = w.block * KEYS + row_in_tile();
      const int each = s.heads / s.key_heads;
      const int task = PACKED ? w.task + group : w.batch * ((c.shape.keys + SIDE - 1) / SIDE) + w.block * 2 + group;
      float dk[D / 2], dv[D / 2];
      clear(dk), clear(dv);
      NO_UNROLL for (int h = w.head * each; h < (w.head + 1) * each; h++) walk(dk, dv, h, task, range);
      const bool finite = (!c.wants_dk || is_finite(dk, key, s.keys)) && (!c.wants_dv || is_finite(dv, key, s.keys));
      if (!finite) raise<OF_KEYS>(c, w.batch, w.head * each);
      settle(dk, s.scale), settle(dv, 1);
      put_results(s, w.head, s.key_start, first_key(), key, s.keys, Result{dk, c.dk_rows, &c.dk, k, c.wants_dk},
                  Result{dv, c.dv_rows, &c.dv, k + AT_V, c.wants_dv});  // in the places of k and v
      own.release();
    }
    if (threadIdx.x % 128 == 0) store_wait();
  }
};
}
KERNEL(keys, HopperLazyArgs c, 384, 1) {
  keys_pass::Pass pass(c);
  auto feed = [&] {
    if (threadIdx.x < 32) pass.produce();
  };
  divide_roles<40, 232>(feed, [&] { keys_pass::Consumer(pass).all(); });
}
