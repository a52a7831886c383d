// The backward pass of linear_attention on compute capability 9.0, behind `states`: all gradients of a chunk of a key
// head from q, k, v, dout, S before it and D behind it.
//
//   dq = P∘(dout vᵀ) k + reach dout·Sᵀ   (R24), with x and w of dg_gamma or x of dg (R27), and dσ (R9)
//   dk = P∘(v doutᵀ) q + reach v·Dᵀ      (R25), with y and z
//   dv = P∘(k qᵀ) dout + reach k·D       (R26)
//
// Two blocks have a segment of a key head, as in `states`: one walks with S from its middle to the end, and one with D
// from the middle to the begin. Each has the one state in registers, in f32, and finds the other of every chunk.
//
// Two warpgroups have 64 tokens of a chunk each; a thread feeds the copy engine, and three warps fill tables of
// log-decays of tokens. Of both scores a warpgroup has the rows of its keys, as dk and dv need them; dq takes
// P∘(v doutᵀ) of both from shared memory, transposed. Its place then holds rows of results on their way to the copy
// engine. Each tile of a chunk goes back to the copy engine by itself, after its last product. Last, the operands of
// the state are weighted in place and added to it.
//
// With many query heads to a key head, a chunk is walked with one after the other for dq, once more for dk, and then
// for dv, which is dk of another problem: k and q take the places of v and dout, and dout that of q.
//
// Parts of dg_gamma and dσ are those of a chunk and a warp.
enum { OF_V, OF_DOUT, OF_K, OF_Q, OF_S, OF_D };
constexpr u32 ITEM_STAGES = KW == 64 ? 2 : 1, STAGE_BYTES = OF_S * TILE_BYTES;
constexpr u32 AT_STATES = ITEM_STAGES * STAGE_BYTES;
// Pairs of 64 keys and 64 queries, 8 KB each: those seen, and with log-decays of heads room for all rows of a result.
constexpr u32 AT_PAIRS = AT_STATES + 2 * KEPT_BYTES, ITEM_DECAYS = AT_PAIRS + (BY_TOKEN ? 3 : 4) * 8192,
              ITEM_DECAYS_BYTES = BY_TOKEN ? TABLE_BYTES : 4 * 2 * CHUNK;
using Tiles = Ring<ITEM_STAGES, ITEM_DECAYS + ITEM_DECAYS_BYTES, OF_S>;  // each of the four is filled and read by itself
using OtherState = Ring<1, Tiles::END>;
using ItemTable = Ring<1, OtherState::END>;
constexpr u32 GRADIENTS_BYTES = ItemTable::END;

// The places of who fills, or of who reads.
struct Places {
  u32 base;
  Tiles tiles;
  OtherState other;
  ItemTable table;
  METHOD Places(u32 base, u32 parity) : base(base), tiles(base, parity), other(base, parity), table(base, parity) {}
  METHOD u32 of(int tile) const {
    return base + (tile < OF_S ? tiles.stage() * STAGE_BYTES + tile * TILE_BYTES : AT_STATES + (tile - OF_S) * KEPT_BYTES);
  }
  METHOD void release(int tile) const { tiles.release(tiles.stage(), tile); }
};
DEV Chunk chunk_of(const WalkArgs& c, const Path& p, bool back, int n) { return c.chunks[p.first_chunk + (back ? p.chunks - 1 - n : n)]; }
DEV bool is_back() { return blockIdx.x % 2; }

DEV void feed_round(const WalkArgs& c, const Path& p, const Chunk& chunk, Places& at, int head, bool values) {
  auto load = [&](int tile, const TensorMap* m, int head) {
    const u32 full = at.tiles.fill(TILE_BYTES, tile);
    UNROLL(i, KW / 64) load4(at.of(tile) + i * PANEL, m, full, 64 * i, chunk.start, head, chunk.batch);
  };
  load(OF_V, values ? &c.b : &c.x, p.key_head), load(OF_DOUT, values ? &c.y : &c.dots, head);
  load(OF_K, &c.b, p.key_head), load(OF_Q, values ? &c.dots : &c.y, head);
  at.tiles.advance();
}
DEV void feed_chunks(const WalkArgs& c, const Path& p, Places& at) {
  const bool back = is_back();
  NO_UNROLL for (int n = 0; n < p.chunks; n++) {
    const Chunk chunk = chunk_of(c, p, back, n);
    NO_UNROLL for (int i = 0; i < (p.many == 1 ? 1 : 3 * p.many); i++) {
      feed_round(c, p, chunk, at, p.key_head * p.many + i % p.many, i >= 2 * p.many);
      if (i) continue;
      const u32 full = at.other.fill(KEPT_BYTES);
      load_bytes(at.of(back ? OF_S : OF_D), kept_state(c, p.first_chunk + (back ? p.chunks - 1 - n : n), p.key_head), KEPT_BYTES, full);
      at.other.advance();
    }
  }
}
DEV void fill_chunk_tables(const WalkArgs& c, const Path& p, Places& at) {
  const bool back = is_back();
  NO_UNROLL for (int n = 0; n < p.chunks; n++, at.table.advance()) {
    const Chunk chunk = chunk_of(c, p, back, n);
    const Gates gates = load_gates(c, chunk.batch, p.key_head, chunk.start, chunk.len);
    at.table.wait_empty();
    fill_table<true>(at.base + ITEM_DECAYS, gates, 1, threadIdx.x / 32 - 1);
    warp_arrive(at.table.full());
  }
}

// The sums of the numbers of a thread's two rows times those of a tile.
DEV void dot_tile(float (&sum)[2], u32 tile, const Thread& t, const float (&o)[KW / 2]) {
  sum[0] = sum[1] = 0;
  UNROLL(j, KW / 16) {
    u32 x[4];
    load_blocks(place<CHUNK>(tile, t.row - t.lane / 4 + t.lane % 16, 2 * j + t.lane / 16), x);
    UNROLL(i, 4) {
      const float2 y = unpack(x[i]);
      sum[i % 2] = fmaf(o[8 * j + 2 * i], y.x, sum[i % 2]), sum[i % 2] = fmaf(o[8 * j + 2 * i + 1], y.y, sum[i % 2]);
    }
  }
}
// A thread's part of <S, D>.
DEV float dot_states(u32 s, u32 d) {
  float sum = 0;
  UNROLL_BY(4) for (u32 at = 16 * (threadIdx.x - 128); at < KEPT_BYTES; at += 16 * 256) {
    const uint4 x = load_piece(s + at), y = load_piece(d + at);
    auto add = [&](u32 x, u32 y) {
      const float2 a = unpack(x), b = unpack(y);
      sum = fmaf(a.x, b.x, sum), sum = fmaf(a.y, b.y, sum);
    };
    add(x.x, y.x), add(x.y, y.y), add(x.z, y.z), add(x.w, y.w);
  }
  return sum;
}
// x or y of (R27) of a row of the thread, with log-decays of tokens.
DEV void put_dot(const WalkArgs& c, float* to, int heads, int head, const Chunk& chunk, int row, float sum) {
  sum = quad_sum(sum);
  if (own_column() == 0 && row < chunk.len) to[((i64)chunk.batch * heads + head) * c.tokens + chunk.start + row] = sum;
}

// A number of each warp of a chunk, from that of each thread.
DEV void put_warp(float* to, float x) {
  x = lane_sum(x);
  if (lane_id() == 0) to[threadIdx.x / 32 - 4] = x;
}
// The own rows of a gradient; `odd` becomes NaN where one of them is not finite.
DEV void put_result(const TensorMap& map, const Tensor& to, u32 base, const Chunk& chunk, int head, const Thread& t, const float (&o)[KW / 2], int columns, float& odd) {
  if (!to.data) return;
  UNROLL(i, KW / 2) odd = fmaf(o[i], 0.0f, odd);
  const i64 at = chunk.batch * to.batch + head * to.head + (chunk.start + t.row) * to.row;
  if (BY_TOKEN) return chunk.len < CHUNK ? store_rows(to, at + t.column, chunk.len - t.row, columns, o, 1) : store_pieces(to, at, columns, o, 1);
  const u32 tile = base + AT_PAIRS + t.group * 2 * 8192;
  store_by_copy<64>(tile, o, 2 + t.group, [&] {
    UNROLL_ALL for (int i = 0; i < KW / 64 && chunk.len == CHUNK; i++) store4(&map, tile + i * 8192, 64 * i, chunk.start + 64 * t.group, head, chunk.batch);
  });
  if (chunk.len == CHUNK) return;
  const int piece = threadIdx.x % (KW / 8);
  NO_UNROLL for (int row = threadIdx.x % 128 / (KW / 8); row < min(64, chunk.len - 64 * t.group) && 8 * piece < columns; row += 1024 / KW)
    *(uint4*)((u16*)to.data + at + (64 * t.group + row - t.row) * to.row + 8 * piece) = load_piece(place<64>(tile, row, piece));
}
// Mends the tiles of a round, and the other state.
DEV void tidy_tiles(const Places& at, int count, bool cleanse, int other, bool states) {
  NO_UNROLL for (int i = 0; i < OF_S; i++) {
    at.tiles.wait_full(i);
    tidy(at.of(i), KW / 64, count, cleanse, threadIdx.x - 128);
  }
  if (states) at.other.wait_full(), tidy(at.of(other), KW / 64, CHUNK, cleanse, threadIdx.x - 128);
  proxy_fence();
  named_sync(1, 256);
}

// A block keeps from chunk to chunk its decays, those of its key head or the table of a chunk, and sums of a chunk.
struct Own {
  float log, scale, gamma, by_scale, odd;  // `odd`: 0, or NaN where a result was not finite
  u32 decays;
};
// Of log-decays of heads a table of P by the distance t = i - j of other and own token, from -128 on.
DEV void fill_distances(u32 table, int thread, float log) {
  const int t = thread - CHUNK;
  store_float(table + 4 * thread, t >= 0 ? exp2_fast(log * t) : 0);
}
// The left factor σ P b of products, of 64 own and 64 other tokens: `t` is the distance of the first pair. DOTS: with
// what the pairs add to dg_gamma and dσ, Σ (i - j) σ P a b and Σ P a b; where P is 0, they are left out.
template <bool DOTS> DEV void weigh_distances(u32 (&to)[16], const float (&b)[32], const float (&a)[32], Own& own, int t) {
  float flow = 0, sum = 0, second = 0;  // of second pairs
  const float distance = t;
  UNROLL_ALL for (int m = -1; m < 8; m++) {
    const u32 at = own.decays + 4 * (t + CHUNK + 8 * m);
    const float2 w = make_float2(load_float(at), load_float(at + 4)), scaled = make_float2(w.x * own.scale, w.y * own.scale);
    float2 dots = {};
    UNROLL(r, 2) {
      const int j = m + r, i = 4 * j + 2 * r;
      if (j < 0 || j >= 8) continue;
      to[2 * j + r] = pack(b[i] * scaled.x, b[i + 1] * scaled.y);
      if (DOTS) dots.x = fmaf(a[i], b[i], dots.x), dots.y = fmaf(a[i + 1], b[i + 1], dots.y);
    }
    if (!DOTS) continue;
    dots.x = w.x == 0 ? 0 : w.x * dots.x, dots.y = w.y == 0 ? 0 : w.y * dots.y;
    // Each with its own distance, so that a token alone adds 0: of t and 8m apart the roundings would be left.
    flow = fmaf(dots.x + dots.y, distance + 8 * m, flow), sum += dots.x, second += dots.y;
  }
  if (!DOTS) return;
  own.gamma = fmaf(own.scale, flow + second, own.gamma), own.by_scale += sum + second;
}
// With log-decays of tokens both, of tokens from the block `first` on.
template <bool DOTS> DEV void weigh_by_token(u32 (&to)[16], const float (&b)[32], const float (&a)[32], Own& own, const Thread& t, int first) {
  const u32 table = own.decays;
  const float near[2] = {number_at(table, OWN + t.row), number_at(table, OWN + t.row + HALF)};
  const u32 far = table + 4 * (far_of<true>(t.row / BLOCK) + t.column);
  UNROLL(k, 4) {
    float2 w[4];
    weigh_block<true, false>(w, table, t, near, far, first + k);
    UNROLL(i, 4) {
      const int j = 8 * k + 2 * i;
      if (DOTS) own.by_scale += (w[i].x == 0 ? 0 : w[i].x * a[j] * b[j]) + (w[i].y == 0 ? 0 : w[i].y * a[j + 1] * b[j + 1]);
      to[4 * k + i] = pack(b[j] * (w[i].x * own.scale), b[j + 1] * (w[i].y * own.scale));
    }
  }
}

// Scores of the own rows of y and those of b which they see, weighted: of the own 64 tokens, and of the first
// warpgroup also of the others. DOTS: with those of a second pair of tiles. Both warpgroups run the same code: what
// the instruction caches hold is all that runs fast.
struct Pairs {
  u32 own[16], other[16];
};
template <bool DOTS> DEV void add_scores(Pairs& to, Own& own, u32 y, u32 b, u32 y1, u32 b1, const Thread& t) {
  UNROLL(i, 16) to.own[i] = to.other[i] = 0;  // or they would take registers before
  NO_UNROLL for (int half = 1; half >= t.group; half--) {
    float s[32], s1[32];
    multiply_rows(s, y + t.group * 8192, b + half * 8192);
    if (DOTS) multiply_rows(s1, y1 + t.group * 8192, b1 + half * 8192);
    mma_wait<0>(), pin(s);
    if (DOTS) pin(s1);
    UNROLL(i, 16) to.other[i] = to.own[i];
    if (BY_TOKEN) weigh_by_token<DOTS>(to.own, s, s1, own, t, 4 * half);
    else weigh_distances<DOTS>(to.own, s, s1, own, t.column + 64 * half - t.row);
  }
}
// The place of P∘(v doutᵀ) of 64 keys and 64 queries.
DEV u32 pairs_of(u32 base, int keys, int queries) { return base + AT_PAIRS + (keys + queries) * 8192; }
DEV void put_pairs(u32 to, const u32 (&x)[16], const Thread& t) {
  UNROLL(j, 4) store_blocks(to + swizzled(t.warp * 16 + t.lane % 16, 2 * j + t.lane / 16), x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
}
// Puts the own ones, where results have been that the copy engine has taken.
DEV void put_pairs(u32 base, const Pairs& x, const Thread& t) {
  if (threadIdx.x % 128 == 0) store_wait_read();
  named_sync(2 + t.group, 128);
  put_pairs(pairs_of(base, t.group, t.group), x.own, t);
  if (t.group == 0) put_pairs(pairs_of(base, 0, 1), x.other, t);
  proxy_fence();
}
DEV void add_all_pairs(float (&o)[KW / 2], Pairs& x, u32 with, const Thread& t) {
  add_pairs(o, x.own, with + t.group * 8192);
  mma_wait<0>(), pin(o);
  if (t.group == 0) {
    add_pairs(o, x.other, with + 8192);
    mma_wait<0>(), pin(o);
  }
}

// Tokens between a row and the state behind its chunk, and the decay on the way.
struct Ways {
  float steps[2], decay[2];
};
template <bool BACK> DEV Ways ways_of(const Own& own, const Chunk& chunk, const Thread& t) {
  Ways w;
  UNROLL(r, 2) {
    const int row = t.row + 8 * r;
    w.steps[r] = BACK ? max(chunk.len - 1 - row, 0) : row + 1;
    w.decay[r] = BY_TOKEN ? number_at(own.decays, (BACK ? REACH : GAIN) + row) : exp2_fast(own.log * w.steps[r]);
  }
  return w;
}

// dq of a query head, of which both warpgroups have put their pairs.
template <bool DOTS> DEV void add_queries(Own& own, const WalkArgs& c, const Places& at, const Thread& t, const Chunk& chunk, int head) {
  float o[KW / 2], dots[2];
  issue_shared<KW, KW, CHUNK, KW>(o, k_major(at.of(OF_DOUT) + t.group * 8192), k_major(at.of(OF_S)));
  Ways way = ways_of<false>(own, chunk, t);
  mma_wait<0>(), pin(o);
  if (DOTS) {
    dot_tile(dots, at.of(OF_Q), t, o);
    UNROLL(r, 2) {
      const float dot = way.decay[r] * dots[r];
      own.by_scale += dot;
      if (!BY_TOKEN) own.gamma = fmaf(way.steps[r], own.scale * dot, own.gamma);
      else if (c.x_dots) put_dot(c, c.x_dots, c.heads, head, chunk, t.row + 8 * r, own.scale * dot);
    }
  }
  UNROLL(r, 2) way.decay[r] *= own.scale;
  mul_rows(o, way.decay);
  NO_UNROLL for (int keys = 0; keys <= t.group; keys++) {
    const u64 pairs = mn_major(pairs_of(at.base, keys, t.group), 0), columns = mn_major(at.of(OF_K) + keys * 8192, PANEL);
    pin(o), mma_begin();
    UNROLL(i, 4) Mma<KW>::template ss<MN_MAJOR, MN_MAJOR>(o, pairs + i * MN_STEP, columns + i * MN_STEP, 1);
    mma_commit(), mma_wait<0>(), pin(o);
  }
  named_sync(1, 256);  // pairs have been read
  put_result(c.out, c.rows, at.base, chunk, head, t, o, c.inner, own.odd);
}
// The part of dk, or of dv, that D adds.
template <bool DOTS> DEV void begin_keys(float (&o)[KW / 2], bool values, u32 y, Own& own, const WalkArgs& c, const Places& at, const Thread& t, const Chunk& chunk, int key_head) {
  if (values) multiply_state(o, y + t.group * 8192, at.of(OF_D));
  else issue_shared<KW, KW, CHUNK, KW>(o, k_major(y + t.group * 8192), k_major(at.of(OF_D)));
  const Ways way = ways_of<true>(own, chunk, t);
  mma_wait<0>(), pin(o);
  mul_rows(o, way.decay);
  if (!DOTS || values) return;
  float dots[2];
  dot_tile(dots, at.of(OF_K), t, o);
  UNROLL(r, 2)
    if (!BY_TOKEN) own.gamma = fmaf(way.steps[r], dots[r], own.gamma);
    else if (c.y_dots) put_dot(c, c.y_dots, c.key_heads, key_head, chunk, t.row + 8 * r, dots[r]);
}
// The part of S and D in the gradient of the log-decays.
DEV void add_dot_of_states(Own& own, const WalkArgs& c, const Places& at, const Chunk& chunk, int number, int key_head) {
  if (!c.gammas && !c.z_dots) return;
  const float z = dot_states(at.of(OF_S), at.of(OF_D));
  if (BY_TOKEN) put_warp(c.z_dots + 8 * ((i64)number * c.key_heads + key_head), z);
  else own.gamma = fmaf(z * exp2_fast(own.log * chunk.len), chunk.len, own.gamma);
}
// Rounds the own state into its tile.
DEV void put_state(u32 tile, const float (&h)[KW / 2], const Thread& t) {
  UNROLL(j, KW / 16) {
    u32 x[4];
    UNROLL(i, 4) x[i] = pack(h[8 * j + 2 * i], h[8 * j + 2 * i + 1]);
    if (t.owns) store_blocks(place<KW>(tile, t.state_row - t.lane / 4 + t.lane % 16, 2 * j + t.lane / 16), x[0], x[1], x[2], x[3]);
  }
  proxy_fence();
}
// Adds a chunk to the own state, whose rows x are weighted in place. All have read them before.
DEV void add_chunk(float (&h)[KW / 2], bool back, bool first, Own& own, const Places& at, const Thread& t, const Chunk& chunk) {
  const u32 x = at.of(back ? OF_DOUT : OF_V), b = at.of(back ? OF_Q : OF_K);
  const int thread = threadIdx.x - 128, piece = thread % (KW / 8);
  UNROLL_BY(2) for (int row = thread / (KW / 8); row < CHUNK; row += 2048 / KW) {
    const float steps = back ? row + 1 : max(chunk.len - 1 - row, 0);
    const float weight = (back ? own.scale : 1) * (BY_TOKEN ? number_at(own.decays, (back ? GAIN : REACH) + row) : exp2_fast(own.log * steps));
    const u32 to = place<CHUNK>(x, row, piece);
    const uint4 own = load_piece(to);
    store_piece(to, make_uint4(times(own.x, weight), times(own.y, weight), times(own.z, weight), times(own.w, weight)));
  }
  if (first) {
    const float all = BY_TOKEN ? number_at(own.decays, ALL) : exp2_fast(own.log * chunk.len);
    mul_rows(h, {all, all});
  }
  proxy_fence();
  named_sync(1, 256);
  add_to_state(h, b + (KW == 128 ? t.group * PANEL : 0), x);
  mma_wait<0>(), pin(h);
}

// dk, or dv, of a chunk of many query heads. `mend`: tiles are mended first, for which `other` is the other state.
template <bool DOTS>
DEV void add_grouped_keys(bool values, Own& own, const WalkArgs& c, const Path& p, Places& at, const Thread& t, const Chunk& chunk, bool mend, bool cleanse, int other) {
  float o[KW / 2];
  clear(o);  // or it would take registers before
  NO_UNROLL for (int m = 0; m < p.many; m++) {
    Pairs x;
    if (mend) tidy_tiles(at, chunk.len, cleanse, other, false);
    UNROLL(i, OF_S) at.tiles.wait_full(i);
    add_scores<false>(x, own, at.of(OF_V), at.of(OF_DOUT), 0, 0, t);
    if (m == 0) begin_keys<DOTS>(o, values, at.of(OF_V), own, c, at, t, chunk, p.key_head);
    add_all_pairs(o, x, at.of(OF_Q), t);
    UNROLL(i, OF_S) at.release(i);
    at.tiles.advance();
  }
  put_result(values ? c.out_dv : c.out_dk, values ? c.dv : c.dk, at.base, chunk, p.key_head, t, o, values ? c.outer : c.inner, own.odd);
}

// A path of chunks; whether one of their results is not finite. ALONE: with one query head.
template <bool DOTS, bool ALONE> DEV bool walk_chunks(const WalkArgs& c, const Path& p, u32 base, bool cleanse, Places& at) {
  Thread t = this_thread();
  t.group = __shfl_sync(~0u, t.group, 0);  // the compiler knows then that it is one of a warp
  const bool back = is_back();
  const int other = back ? OF_S : OF_D, carried = back ? OF_D : OF_S;
  Own own = {log_of(c, p.key_head), c.store_scale};
  own.decays = base + ITEM_DECAYS;
  if (BY_TOKEN) named_sync(1, 256);
  else named_sync(1, 256), fill_distances(own.decays, threadIdx.x - 128, own.log);
  float h[KW / 2];
  UNROLL(i, KW / 8) {
    const float4 x = middle_state(c)[256 * i];
    h[4 * i] = x.x, h[4 * i + 1] = x.y, h[4 * i + 2] = x.z, h[4 * i + 3] = x.w;
  }
  put_state(at.of(carried), h, t);
  named_sync(1, 256);
  NO_UNROLL for (int n = 0; n < p.chunks; n++) {
    const int number = p.first_chunk + (back ? p.chunks - 1 - n : n);
    const Chunk chunk = c.chunks[number];
    own.gamma = own.by_scale = 0;
    if (BY_TOKEN) at.table.wait_full();
    const bool mend = cleanse || chunk.len < CHUNK;
    NO_UNROLL for (int m = 0; m < (ALONE ? 1 : p.many); m++) {
      const int head = p.key_head * (ALONE ? 1 : p.many) + m;
      Pairs x;
      if (mend) tidy_tiles(at, chunk.len, cleanse, other, m == 0);
      at.tiles.wait_full(OF_V), at.tiles.wait_full(OF_DOUT);
      add_scores<false>(x, own, at.of(OF_V), at.of(OF_DOUT), 0, 0, t);
      put_pairs(base, x, t);
      at.tiles.wait_full(OF_K), at.tiles.wait_full(OF_Q), at.other.wait_full();
      named_sync(1, 256);  // pairs are there, and the own state
      if (DOTS && m == 0) add_dot_of_states(own, c, at, chunk, number, p.key_head);
      add_queries<DOTS>(own, c, at, t, chunk, head);
      if (ALONE) {
        float o[KW / 2];
        begin_keys<DOTS>(o, false, at.of(OF_V), own, c, at, t, chunk, p.key_head);
        add_all_pairs(o, x, at.of(OF_Q), t);
        put_result(c.out_dk, c.dk, base, chunk, p.key_head, t, o, c.inner, own.odd);
        Pairs y;
        add_scores<DOTS>(y, own, at.of(OF_K), at.of(OF_Q), at.of(OF_V), at.of(OF_DOUT), t);
        at.release(back ? OF_V : OF_Q);
        begin_keys<DOTS>(o, true, at.of(OF_K), own, c, at, t, chunk, p.key_head);
        add_all_pairs(o, y, at.of(OF_DOUT), t);
        at.release(back ? OF_K : OF_DOUT);
        at.other.release();
        put_result(c.out_dv, c.dv, base, chunk, p.key_head, t, o, c.outer, own.odd);
      } else {
        if (DOTS) add_scores<true>(x, own, at.of(OF_K), at.of(OF_Q), at.of(OF_V), at.of(OF_DOUT), t);
        at.release(back ? OF_V : OF_Q), at.release(back ? OF_K : OF_DOUT);
      }
      named_sync(1, 256);  // all have read what is weighted now
      if (ALONE || back || m == 0) add_chunk(h, back, m == 0, own, at, t, chunk);
      at.release(back ? OF_Q : OF_V), at.release(back ? OF_DOUT : OF_K);
      at.tiles.advance();
    }
    NO_UNROLL for (int result = 0; result < (ALONE ? 0 : 2); result++)
      add_grouped_keys<DOTS>(result == 1, own, c, p, at, t, chunk, mend, cleanse, other);
    if (!ALONE) at.other.release(), named_sync(1, 256);
    put_state(at.of(carried), h, t);
    at.other.advance();
    if (BY_TOKEN) at.table.release(), at.table.advance();
    if (!DOTS) continue;
    const i64 part = 8 * ((i64)p.key_head * (c.items / c.key_heads) + number);
    if (c.gammas) put_warp(c.gammas + part, own.gamma), own.odd = fmaf(own.gamma, 0.0f, own.odd);
    if (c.scales) put_warp(c.scales + part, own.by_scale), own.odd = fmaf(own.by_scale, 0.0f, own.odd);
  }
  bool odd = own.odd != 0;
  const Path whole = path_of(c, p.segment);
  if (back && c.end.data && t.owns && is_at(c, whole, 1)) odd |= end_state(c, p, t, state_of(c.end, c.segments[p.segment].sequence, p.key_head), h);
  if (threadIdx.x % 128 == 0) store_wait();
  return odd;
}

template <bool DOTS, bool ALONE> DEV void walk_gradients(const WalkArgs& c) {
  const u32 base = begin_of_tiles();
  if (BY_TOKEN) clear_words(base + ITEM_DECAYS, TABLE_BYTES, threadIdx.x, 384);
  make_barriers([&] {
    prefetch(&c.y), prefetch(&c.b), prefetch(&c.x), prefetch(&c.dots);
    for (int i = 0; i < OF_S; i++) Tiles::init(base, 1, 8 * ARRIVALS, i);
    OtherState::init(base, 1, 8 * ARRIVALS), ItemTable::init(base, 3 * ARRIVALS, 8 * ARRIVALS);
  });
  Places filled = {base, 1}, read = {base, 0};
  walk_path<Tiles>(
      c, base, [&] { return half_path(c, !is_back()); }, [&](const Path& p, u32, Tiles&) { feed_chunks(c, p, filled); },
      [&](const Path& p, u32, bool, Tiles&) {
        if (BY_TOKEN) fill_chunk_tables(c, p, filled);
      },
      [&](const Path& p, u32 base, bool again, Tiles&) INLINE {
        return walk_chunks<DOTS, ALONE>(c, p, base, again, read);
      });
}

CHECK_SHARED(gradients, GRADIENTS_BYTES);
KERNEL(gradients, WalkArgs c, 384, 1) { walk_gradients<false, true>(c); }
CHECK_SHARED(gradients_dots, GRADIENTS_BYTES);
KERNEL(gradients_dots, WalkArgs c, 384, 1) { walk_gradients<true, true>(c); }
CHECK_SHARED(gradients_grouped, GRADIENTS_BYTES);
KERNEL(gradients_grouped, WalkArgs c, 384, 1) { walk_gradients<true, false>(c); }
