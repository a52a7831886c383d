// lazy_attention backward for sm_90a in passes with one writer for each gradient: deterministic without atomics. P and
// dS are rounded to the storage type before they are multiplied; sums are f32.
//
//   queries   a tile is 128 queries of one head and walks the keys twice: P, g, Δ, Σ a g, and which stripes of keys
//             hold an active pair; then P, g, dS, dq += dS·k                                                (E7)–(E10)
//   keys      a tile is 128 keys of one key head and walks the queries of its heads: dS, dk, dv, and what its
//             diagonals add to dbias                                                                 (E9), (E11)–(E13)
//
// A tile without an active pair takes no g and adds nothing to dv: a warpgroup leaves these products out.
//
// The first walk of `queries` keeps a bit for each stripe with an active pair of 64 queries: where it is not set,
// neither kernel computes g, and dv gets nothing. `keys` adds each diagonal of a tile of dS first within a thread,
// whose groups of 8 by 8 lie on nine of them, then over the threads; a distance occurs in two successive tiles of
// queries, so that a window is written once and never read.

// Results are scaled, and have no -0: what nobody adds to is 0 under any scale.
DEV void settle(float (&d)[D / 2], float scale) {
  UNROLL(i, D / 2) d[i] = fmaf(d[i], scale, 0.0f);
}
// A result of a warpgroup: its sums, its tensor, and the place of its tile of 128 rows that is copied; `wanted`.
struct Result {
  const float (&sums)[D / 2];
  const Elements& rows;
  const TensorMap* map;
  u32 place;
  bool wanted = true;
  METHOD void store(const Own& s, int head, int start, int row, int count) const {
    if (wanted) store_rows(rows, s.batch, head, start, row, count, sums);
  }
  METHOD void copy(const Own& s, int head, int row, int panel) const {
    if (wanted) store5(map, place + panel * 128 * 128, row, head, s.batch, panel);
  }
};
// Writes results of 64 rows, those of a sequence from `first` on, which begins at `start` and has `count`.
template <class... R> DEV void put_results(const Own& s, int head, int start, int first, int count, R... results) {
  const int group = threadIdx.x / 128 - 1;
  if (PACKED && first + 64 > count) {  // rows of the next sequence lie in the box
    (results.store(s, head, start, first + own_row(), count), ...);
    return;
  }
  named_sync(1 + group, 128);  // the places are no longer read
  (put_rows<128>(results.place, results.sums), ...);
  proxy_fence();
  named_sync(1 + group, 128);
  if (threadIdx.x % 128) return;
  UNROLL(p, D / 64) (results.copy(s, head, start + first, p), ...);
  store_commit(), store_wait_read();
}
// ---- dq ----
namespace queries_pass {
constexpr int GROUPS = 2, ROWS = 64 * GROUPS;
using Feed = ::Feed<GROUPS, QUERIES>;
CHECK_SHARED(queries, Feed::BYTES);

struct Walk : QueryWalk<Feed> {
  u32 q, dout;  // of a tile
  float delta[2], sum[2];

  METHOD Walk(const Feed& f, const HopperLazyArgs& call) : QueryWalk(f, call, f.base, threadIdx.x / 128 - 1) {}
  METHOD u32 k() const { return base + Feed::AT_K + blocks.stage() * KV_BYTES; }
  METHOD u32 v() const { return base + Feed::AT_V + blocks.stage() * KV_BYTES; }
  METHOD void leave(int part) const { blocks.release(blocks.stage(), part); }
  // Leaves out a block of which no row of the warpgroup sees a key.
  METHOD void pass() {
    blocks.wait_full(Feed::K), blocks.wait_full(Feed::V);
    leave(Feed::K), leave(Feed::V), blocks.advance();
  }
  // S, then P, of the block n; whether a pair of this thread is active.
  template <bool MASKED> METHOD bool weights(float (&x)[KEYS / 2], int n) const {
    score_block(x, n);
    if (MASKED) hide(x, own.seen, n * KEYS);
    float most = 0;
    UNROLL(i, KEYS / 2) weigh<MASKED>(x[i], most, lse[row_of_number(i)], offset[row_of_number(i)]);
    return most != 0;
  }
  // Δ and Σ a g of a block; whether it holds an active pair.
  template <bool MASKED> METHOD bool mean(int n) {
    float x[KEYS / 2];
    blocks.wait_full(Feed::K);
    issue_shared<KEYS, D, ROWS, KEYS>(x, q, k()), mma_wait<0>(), pin(x);
    const bool any = named_any(1 + group, 128, weights<MASKED>(x, n));
    leave(Feed::K);
    blocks.wait_full(Feed::V);
    if (any) {
      float g[KEYS / 2];
      issue_shared<KEYS, D, ROWS, KEYS>(g, dout, v()), mma_wait<0>(), pin(g);  // (E7)
      UNROLL(i, KEYS / 2) {
        const int r = row_of_number(i);
        const float y = attends<MASKED>(x[i], offset[r]) ? g[i] : 0;
        sum[r] += y, delta[r] = fmaf(x[i], y, delta[r]);  // (E8)
      }
    }
    leave(Feed::V), blocks.advance();
    return any;
  }
  // The first walk: which stripes hold an active pair.
  METHOD u32 means(int each) {
    u32 active = 0;
    auto visit = [&](int n, auto masked) {
      if (mean<decltype(masked)::value>(n)) active |= 1u << n / each;
    };
    int n = range.end - 1;
#pragma unroll 1
    for (; n >= range.begin; n--) {
      if (odd || own.sees(n * KEYS) && !own.sees_all(n * KEYS)) visit(n, Is<true>());  // odd: a bias of -inf hides pairs
      else if (own.sees(n * KEYS)) visit(n, Is<false>());
      else pass();
    }
    return active;
  }
  // Numbers of the rows for `keys`, and the stripes.
  METHOD void write_numbers(u32 active) {
    UNROLL(r, 2) {
      delta[r] = quad_sum(delta[r]), sum[r] = quad_sum(sum[r]);
      const int i = own.row + 8 * r;
      if (i >= s.queries) continue;
      const i64 at = row_at(c, s, w.head, i);
      if (c.dlse) delta[r] -= c.dlse[at];
      // From here on 1/n is not wanted, and lse is.
      const float share = c.numbers[at].share;
      __syncwarp(0xfu << (lane_id() & 28));
      if (lane_id() % 4 == 0) c.numbers[at] = {offset[r], lse[r], delta[r], __fmul_rn(share, sum[r])};
    }
    const int at = w.block * GROUPS + group;
    if (threadIdx.x % 128 == 0 && at * SIDE < s.queries) c.active[(i64)(s.tile + at) * c.shape.heads + w.head] = active;
  }
  // Adds a block to dq.
  template <bool MASKED, bool ACTIVE> METHOD void step(float (&dq)[D / 2], int n) {
    float x[KEYS / 2], g[KEYS / 2];
    u32 ds[KEYS / 4];
    blocks.wait_full(Feed::K), blocks.wait_full(Feed::V);
    issue_shared<KEYS, D, ROWS, KEYS>(x, q, k());
    if (ACTIVE) {
      pin(g), multiply_shared<KEYS, D, ROWS, KEYS>(g, dout, v()), mma_commit(), mma_wait<1>();
    } else {
      mma_wait<0>();
    }
    pin(x);
    weights<MASKED>(x, n);
    if (ACTIVE) mma_wait<0>(), pin(g);
    leave(Feed::V);
    UNROLL(i, KEYS / 4) {
      const int r = i % 2;
      ds[i] = pack(pull<MASKED>(x[2 * i], ACTIVE ? g[2 * i] : 0, offset[r], delta[r]), pull<MASKED>(x[2 * i + 1], ACTIVE ? g[2 * i + 1] : 0, offset[r], delta[r]));
    }
    if (MASKED && odd) clear_odd_together<GROUPS>(KV_BYTES, k());
    pin(dq), issue_registers<KEYS, D>(dq, ds, k()), mma_wait<0>(), pin(dq);  // (E10)
    leave(Feed::K), blocks.advance();
  }
  // Adds what keys that are not finite have for dq.
  METHOD void add_odd_keys(float (&dq)[D / 2]) const {
    const int key_head = w.head / (s.heads / s.key_heads);
#pragma unroll 1
    for (int j = range.begin * KEYS; j < min(range.end * KEYS, s.keys); j++) {
      const u16* at = row_of(c.k_rows, s.batch, key_head, s.key_start + j);
      if (!is_odd(at, D)) continue;
      float ds[2];
      bool seen[2];
      UNROLL(r, 2) {
        const int i = min(own.row + 8 * r, s.queries - 1);
        const float g = product_of(row_of(c.dout_rows, s.batch, w.head, s.query_start + i), row_of(c.v_rows, s.batch, key_head, s.key_start + j), D);
        const float p = weight_alone(c, s, w.head, i, j, lse[r], offset[r]);
        seen[r] = !hidden(p), ds[r] = pull<true>(p, g, offset[r], delta[r]);
      }
      add_odd(dq, ds, seen, at);
    }
  }
  // The second walk: dq.
  METHOD void gradient(u32 active, int each) {
    float dq[D / 2];
    clear(dq);
#pragma unroll 1
    for (int n = range.end - 1; n >= range.begin; n--) {
      const bool holds = active >> n / each & 1;
      if (!odd && !own.sees(n * KEYS)) pass();
      else if (odd || !own.sees_all(n * KEYS)) step<true, true>(dq, n);
      else if (holds) step<false, true>(dq, n);
      else step<false, false>(dq, n);
    }
    if (odd) add_odd_keys(dq);
    settle(dq, s.scale);
    put_results(s, w.head, s.query_start, first_row(), s.queries, Result{dq, c.dq_rows, &c.dq, q});
  }

  METHOD void all() {
    for (; tiles.take<true>(c, w, s); tiles.advance()) {
      find_rows();
      q = base + tiles.stage() * Feed::TILE_BYTES + group * 64 * 128, dout = q + Feed::Q_BYTES;
      const int each = stripe_blocks(s);
      load_numbers();
      delta[0] = delta[1] = sum[0] = sum[1] = 0;
      const u32 active = c.means ? means(each) : 0;
      write_numbers(active);
      if (c.wants_dq) gradient(active, each);
      tiles.release();
    }
    if (threadIdx.x % 128 == 0) store_wait();
  }
};
}
extern "C" __global__ void __launch_bounds__(384, 1) queries(const __grid_constant__ HopperLazyArgs c) {
  queries_pass::Feed feed;
  feed.run<40, 232>(c, [&] { queries_pass::Walk(feed, c).all(); });
}
