// lazy_attention backward for sm_90a, deterministic without atomics. P and dS are rounded to the storage type before
// they are multiplied; sums are f32.
//
//   queries   a tile is 128 queries of one head and walks the keys twice: P, g, Δ, Σ a g, and which stripes of keys
//             hold an active pair; then P, g, dS, dq += dS·k  (E7)–(E10)
//   keys      a tile is 128 keys of one key head and walks the queries of its heads: dS, dk, dv, and what its
//             diagonals add to dbias  (E9), (E11)–(E13)
//
// The first walk of `queries` keeps a bit for each stripe with an active pair of 64 queries: where it is not set,
// neither kernel computes g, and dv gets nothing. `keys` adds each diagonal of a tile of dS first within a thread,
// whose groups of 8 by 8 lie on nine of them, then over the threads; a distance occurs in two successive tiles of
// queries, so that a window is written once and never read.

// Results are scaled, and have no -0: what nobody adds to is 0 under any scale.
DEV void settle(float (&d)[D / 2], float scale) {
  UNROLL(i, D / 2) d[i] = fmaf(d[i], scale, 0.0f);
}
// A result of a warpgroup: its sums, its tensor, and the tile of 128 rows from which it is copied.
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
// Writes results of 64 rows, from `first` on, of a sequence that begins at `start` and has `count`. `row`: a thread's
// first.
template <class... R> DEV void put_results(const Own& s, int head, int start, int first, int row, int count, R... results) {
  const int group = own_group();
  if (PACKED && first + 64 > count) {  // rows of the next sequence lie in the box
    (results.store(s, head, start, row, count), ...);
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

// Not a part of the walk, which lives as long as its kernel: there it is spilt where dq is computed.
struct Tile : QueryTile {
  float delta[2], sum[2];
};
struct Walk : QueryWalk<Feed> {
  u32 q, dout;  // of a tile

  METHOD Walk(const Feed& f, const HopperLazyArgs& call) : QueryWalk(f, call, f.base, own_group()) {}
  METHOD u32 k() const { return base + Feed::AT_K + blocks.stage() * KV_BYTES; }
  METHOD u32 v() const { return base + Feed::AT_V + blocks.stage() * KV_BYTES; }
  METHOD void leave(int part) const { blocks.release(blocks.stage(), part); }
  // Leaves out a block of which no row of the warpgroup sees a key.
  METHOD void pass() {
    blocks.wait_full(Feed::K), blocks.wait_full(Feed::V);
    leave(Feed::K), leave(Feed::V), blocks.advance();
  }
  // S, then P, of the block n; whether a pair of this thread is active.
  template <bool MASKED> METHOD bool weights(const Tile& t, float (&x)[KEYS / 2], int n) const {
    score_block(x, t, n);
    if (MASKED) hide(x, t.own.seen, n * KEYS);
    float most = 0;
    UNROLL(i, KEYS / 2) weigh<MASKED>(x[i], most, t.lse[row_of_number(i)], t.offset[row_of_number(i)]);
    return most != 0;
  }
  // Δ and Σ a g of a block; whether it holds an active pair.
  template <bool MASKED> METHOD bool mean(Tile& t, int n) {
    float x[KEYS / 2];
    blocks.wait_full(Feed::K);
    issue_shared<KEYS, D, ROWS, KEYS>(x, k_major(q), k_major(k())), mma_wait<0>(), pin(x);
    const bool any = named_any(1 + group, 128, weights<MASKED>(t, x, n));
    leave(Feed::K);
    blocks.wait_full(Feed::V);
    if (any) {
      float g[KEYS / 2];
      issue_shared<KEYS, D, ROWS, KEYS>(g, k_major(dout), k_major(v())), mma_wait<0>(), pin(g);  // (E7)
      UNROLL(i, KEYS / 2) {
        const int r = row_of_number(i);
        const float y = attends<MASKED>(x[i], t.offset[r]) ? g[i] : 0;
        t.sum[r] += y, t.delta[r] = fmaf(x[i], y, t.delta[r]);  // (E8)
      }
    }
    leave(Feed::V), blocks.advance();
    return any;
  }
  // The first walk: which stripes hold an active pair.
  METHOD u32 means(Tile& t, int each) {
    u32 active = 0;
    auto visit = [&](int n, auto masked) {
      if (mean<decltype(masked)::value>(t, n)) active |= 1u << n / each;
    };
    int n = t.range.end - 1;
    NO_UNROLL for (; n >= t.range.begin; n--) {
      if (t.own.sees(n * KEYS) && !t.own.sees_all(n * KEYS)) visit(n, Is<true>());
      else if (t.own.sees(n * KEYS)) visit(n, Is<false>());
      else pass();
    }
    return active;
  }
  // Numbers of the rows, and the stripes, for `keys`.
  METHOD void write_numbers(Tile& t, u32 active) {
    UNROLL(r, 2) {
      t.delta[r] = quad_sum(t.delta[r]), t.sum[r] = quad_sum(t.sum[r]);
      const int i = t.own.row + 8 * r;
      if (i >= t.s.queries) continue;
      const i64 at = row_at(c, t.s, t.w.head, i);
      if (c.dlse) t.delta[r] -= c.dlse[at];
      if (!is_finite(t.delta[r])) raise<OF_DELTA>(c, t.w.batch, t.w.head);
      // From here on 1/n is not wanted, and lse is.
      const float share = c.numbers[at].share;
      __syncwarp(0xfu << (lane_id() & 28));
      if (lane_id() % 4 == 0) c.numbers[at] = {t.offset[r], t.lse[r], t.delta[r], __fmul_rn(share, t.sum[r])};
    }
    const int at = t.w.block * GROUPS + group;
    if (threadIdx.x % 128 == 0 && at * SIDE < t.s.queries) c.active[(i64)(t.s.tile + at) * c.shape.heads + t.w.head] = active;
  }
  // Adds a block to dq.
  template <bool MASKED, bool ACTIVE> METHOD void step(const Tile& t, float (&dq)[D / 2], int n) {
    float x[KEYS / 2], g[KEYS / 2];
    u32 ds[KEYS / 4];
    blocks.wait_full(Feed::K), blocks.wait_full(Feed::V);
    issue_shared<KEYS, D, ROWS, KEYS>(x, k_major(q), k_major(k()));
    if (ACTIVE) {
      pin(g), multiply_shared<KEYS, D, ROWS, KEYS>(g, k_major(dout), k_major(v())), mma_commit(), mma_wait<1>();
    } else {
      mma_wait<0>();
    }
    pin(x);
    weights<MASKED>(t, x, n);
    if (ACTIVE) mma_wait<0>(), pin(g);
    leave(Feed::V);
    UNROLL(i, KEYS / 4) {
      const int r = i % 2;
      auto pulled = [&](int k) { return pull<MASKED>(x[k], ACTIVE ? g[k] : 0, t.offset[r], t.delta[r]); };
      ds[i] = pack(pulled(2 * i), pulled(2 * i + 1));
    }
    if (PACKED && MASKED && n * KEYS + KEYS > t.s.keys) zero_rows<KEYS>(t.s.keys - n * KEYS, 1 + group, k());
    pin(dq), issue_registers<KEYS, D>(dq, ds, mn_major(k(), KEYS * 128)), mma_wait<0>(), pin(dq);  // (E10)
    leave(Feed::K), blocks.advance();
  }
  // The second walk: dq.
  METHOD void gradient(const Tile& t, u32 active, int each) {
    float dq[D / 2];
    clear(dq);
    NO_UNROLL for (int n = t.range.end - 1; n >= t.range.begin; n--) {
      const bool holds = active >> n / each & 1;
      if (!t.own.sees(n * KEYS)) pass();
      else if (!t.own.sees_all(n * KEYS)) step<true, true>(t, dq, n);
      else if (holds) step<false, true>(t, dq, n);
      else step<false, false>(t, dq, n);
    }
    if (!is_finite(dq, t.own.row, t.s.queries)) raise<OF_QUERIES>(c, t.w.batch, t.w.head);
    settle(dq, t.s.scale);
    put_results(t.s, t.w.head, t.s.query_start, first_row(t), t.own.row, t.s.queries, Result{dq, c.dq_rows, &c.dq, q});
  }

  METHOD void all() {
    for (;; tiles.advance()) {
      Tile t;
      if (!tiles.take<true>(c, t.w, t.s)) break;
      q = base + tiles.stage() * Feed::TILE_BYTES + group * 64 * 128, dout = q + Feed::Q_BYTES;
      find_rows(t);
      const int each = stripe_blocks(t.s);
      load_numbers(t);
      UNROLL(r, 2) t.delta[r] = t.sum[r] = 0;
      const u32 active = c.means ? means(t, each) : 0;
      write_numbers(t, active);
      if (c.wants_dq) gradient(t, active, each);
      tiles.release();
    }
    if (threadIdx.x % 128 == 0) store_wait();
  }
};
}
KERNEL(queries, HopperLazyArgs c, 384, 1) {
  queries_pass::Feed feed;
  feed.run<40, 232>(c, [&] { queries_pass::Walk(feed, c).all(); });
}
