// The second order of attention and attention_lse of bf16 operands on the tensor cores of any GPU from sm_80 on.
//
//   tangents, queries, keys: as in portable_second_order.cu  (D1)–(D5), (D7)–(D12)
//
// A product of two bf16 is exact in f32. The factors of sums – P, Ṗ, x and ds – are f32 and are cut into three pieces
// of bf16, 24 bits together, whose sum they are: the suite judges the results by `f32-strict`. f16 has fewer exponents
// than its factors need, and f32 more bits than three pieces: both stay with portable_second_order.cu, as do gbias,
// gsinks and the numbers of rows. sm90a_second_order.cu takes narrow operands without options on its devices.
//
// A factor that is not finite stays so in the first of its pieces.
//
// Compile-time: STORAGE 1; OPTIONS, WHOLE, VALUES; CD and CE, the columns of a row of q and of v: 64 or 128.
constexpr int WALK = 32;  // rows of a tile that a block walks
constexpr u32 D_OWN = SIDE * CD * 2, E_OWN = VALUES ? SIDE * CE * 2 : 0, D_WALK = WALK * CD * 2, E_WALK = VALUES ? WALK * CE * 2 : 0;
constexpr u32 AT_WALK = 2 * (D_OWN + E_OWN);
constexpr u32 BLOCK_BYTES = AT_WALK + 2 * (D_WALK + E_WALK);
CHECK_SHARED(tangents, BLOCK_BYTES);
CHECK_SHARED(queries, BLOCK_BYTES);
CHECK_SHARED(keys, BLOCK_BYTES);
typedef Pairs<1, WALK> Tile32;

// sum += a·bᵀ: 64 rows of a, WALK rows of b.
template <int W> DEV void add_products(Tile32& sum, u32 a, u32 b) {
  Tile32 x;
  products<1, WALK, W>(x, a, b);
  each(sum, x, [](float& y, float x, int, int) { y += x; });
}
// sum += p·x, p in pieces: each is what bf16 keeps of the rest.
template <int W> DEV void accumulate_all(Sums<1, W>& sum, Tile32& p, u32 x) {
  UNROLL(piece, 3) {
    Factors<1, WALK> packed;
    pack_all<1, WALK>(packed, p);
    accumulate<1, WALK, W>(sum, packed, x);
    if (piece == 2) break;
    UNROLL(i, WALK / 4) {
      u32 two = packed[0][i / 2][i % 2];
      float (&rest)[4] = p[0][i / 2];
      float low = __uint_as_float(two << 16), high = __uint_as_float(two & 0xffff0000);
      rest[2 * (i % 2)] = is_finite(low) ? rest[2 * (i % 2)] - low : 0;
      rest[2 * (i % 2) + 1] = is_finite(high) ? rest[2 * (i % 2) + 1] - high : 0;
    }
  }
}
// As `accumulate_all` of a factor that is needed again.
template <int W> DEV void accumulate_copy(Sums<1, W>& sum, const Tile32& p, u32 x) {
  Tile32 copy;
  UNROLL(i, WALK / 2) copy[0][i / 4][i % 4] = p[0][i / 4][i % 4];
  accumulate_all<W>(sum, copy, x);
}

DEV Tiles own_tiles() { return tiles_at(shared_begin(), D_OWN, E_OWN); }
DEV Tiles walk_tiles() { return tiles_at(shared_begin() + AT_WALK, D_WALK, E_WALK); }
DEV void arrived() {
  copy_commit(), copy_wait<0>();
  __syncthreads();
}

// The product s = q·k of (F1), and that of its motion, u = ddq·k + q·ddk, of owned and walked tiles.
DEV void scores(Tile32& s, Tile32& u, const Tiles& own, const Tiles& walk, bool own_moves, bool walk_moves) {
  products<1, WALK, CD>(s, own.x, walk.x);
  clear<1, WALK>(u);
  if (own_moves) add_products<CD>(u, own.moved, walk.x);
  if (walk_moves) add_products<CD>(u, own.x, walk.moved);
}
// dP of (B2) and T of (D3).
template <bool BY_KEYS> DEV void turns(const SecondArgs& a, Tile32& dp, Tile32& t, const Tiles& own, const Tiles& walk) {
  clear<1, WALK>(dp), clear<1, WALK>(t);
  if (!VALUES) return;
  products<1, WALK, CE>(dp, own.value, walk.value);
  if (a.cot_o.data) add_products<CE>(t, BY_KEYS ? own.value : own.moved_value, BY_KEYS ? walk.moved_value : walk.value);
  if (a.ddv.data) add_products<CE>(t, BY_KEYS ? own.moved_value : own.value, BY_KEYS ? walk.value : walk.moved_value);
}
KERNEL(tangents, SecondArgs a, THREADS) {
  const Tiles own = own_tiles(), walk = walk_tiles();
  const PairArgs& c = a.c;
  const QueryTile<Head> block(c, c, blockIdx.x);
  const Head& head = block.head;
  if (!is_finite(a, block.sequence, head.key_head)) return;
  const int row = block.row;
  float moves[2] = {}, lse[2];
  bool seen[2] = {};
  Span spans[2];
  Sums<1, CE> sum, o;
  clear<1, CE>(sum), clear<1, CE>(o);
  UNROLL(r, 2) spans[r] = head.span(row + row_of<1>(r)), lse[r] = lse_of(head, row + row_of<1>(r));
  load_queries<SIDE>(own, a, head, row, false);
  NO_UNROLL for (int key = block.first_key<WALK>(); key < block.seen.end; key += WALK) {
    load_keys<WALK>(walk, a, head, key);
    arrived();
    Tile32 p, moved;
    scores(p, moved, own, walk, a.ddq.data, a.ddk.data);
    UNROLL(n, WALK / 2) {
      const int r = n / 2 % 2, i = row + row_of<1>(r), j = key + n / 4 * 8 + own_column() + n % 2;
      float &x = p[0][n / 4][n % 4], &y = moved[0][n / 4][n % 4], score, slope;
      if (head.score(x, i, j, spans[r], score, slope)) {
        x = shown(weight(score, lse[r]));
        y = shown(__fmul_rn(x, slide(a, head, y, slope, i, j)));
        moves[r] += y, seen[r] = true;
      } else {
        x = y = 0;
      }
    }
    if (VALUES) accumulate_all<CE>(sum, moved, walk.value);
    if (VALUES && a.ddv.data) accumulate_copy<CE>(sum, p, walk.moved_value);
    if (VALUES) accumulate_all<CE>(o, p, walk.value);
    __syncthreads();
  }
  UNROLL(r, 2) {
    float u = quad_sum(moves[r]);
    bool some = __any_sync(0xfu << (lane_id() & 28), seen[r]);
    int i = row + row_of<1>(r);
    if (lane_id() % 4 != 0 || i >= head.s.queries) continue;
    put_numbers(a, head, i, u, some, lse[r]);
  }
  if (!VALUES) return;
  raise_unless_finite<OF_TANGENTS>(c, block.sequence, head.key_head, sum, o);
  const Sequence& s = head.s;
  store_wide<1, CE>(a.sum, s.batch, head.head, s.query_start + row, s.queries - row, sum, 0, c.value_dim);
  store_wide<1, CE>(a.o32, s.batch, head.head, s.query_start + row, s.queries - row, o, 0, c.value_dim);
}

KERNEL(queries, SecondArgs a, THREADS) {
  const Tiles own = own_tiles(), walk = walk_tiles();
  const PairArgs& c = a.c;
  const QueryTile<Head> block(c, c, blockIdx.x);
  const Head& head = block.head;
  if (!is_finite(a, block.sequence, head.key_head)) return;
  const int row = block.row;
  Sums<1, CD> gq;
  float lse[2];
  Span spans[2];
  Numbers numbers[2];
  clear<1, CD>(gq);
  UNROLL(r, 2) {
    int i = row + row_of<1>(r);
    spans[r] = head.span(i), lse[r] = lse_of(head, i), numbers[r] = i < head.s.queries ? numbers_of(a, head)[i] : Numbers{};
  }
  load_queries<SIDE>(own, a, head, row, true);
  NO_UNROLL for (int key = block.first_key<WALK>(); key < block.seen.end; key += WALK) {
    load_keys<WALK>(walk, a, head, key);
    arrived();
    Tile32 s, u, dp, t;
    scores(s, u, own, walk, a.ddq.data, a.ddk.data);
    turns<false>(a, dp, t, own, walk);
    UNROLL(n, WALK / 2) {
      const int r = n / 2 % 2, j = key + n / 4 * 8 + own_column() + n % 2;
      float &x = s[0][n / 4][n % 4], &y = u[0][n / 4][n % 4];
      Pair pair = second(a, head, x, y, dp[0][n / 4][n % 4], t[0][n / 4][n % 4], row + row_of<1>(r), j, spans[r], lse[r], numbers[r]);
      x = shown(pair.x), y = shown(pair.ds);
    }
    accumulate_all<CD>(gq, s, walk.x);
    if (a.ddk.data) accumulate_all<CD>(gq, u, walk.moved);
    __syncthreads();
  }
  raise_unless_finite<OF_QUERIES>(c, block.sequence, head.key_head, gq);
  store_queries<1, CD>(a.gq, head, row, gq, Same{c.scale}, 0, c.dim);
}

KERNEL(keys, SecondArgs a, THREADS) {
  const Tiles own = own_tiles(), walk = walk_tiles();
  const PairArgs& c = a.c;
  Task task = c.tasks[blockIdx.x / c.key_heads];
  const Sequence s = c.sequences[task.first];
  const int key_head = blockIdx.x % c.key_heads, group = c.heads / c.key_heads, key = task.key_tile * SIDE;
  if (!is_finite(a, task.first, key_head)) return;
  Sums<1, CD> gk;
  Sums<1, CE> gv;
  clear<1, CD>(gk), clear<1, CE>(gv);
  load_keys<SIDE>(own, a, Head(c, s, key_head * group), key);
  NO_UNROLL for (int h = key_head * group; h < (key_head + 1) * group; h++) {
    Head head(c, s, h);
    NO_UNROLL for (int row = 0; row < s.queries; row += WALK) {
      if (!may_see(c, s, row, key)) continue;
      load_queries<WALK>(walk, a, head, row, true);
      arrived();
      Tile32 x, u, dp, t;
      scores(x, u, own, walk, a.ddk.data, a.ddq.data);
      turns<true>(a, dp, t, own, walk);
      UNROLL(n, WALK / 2) {
        const int column = n / 4 * 8 + own_column() + n % 2, i = row + column;
        const int j = key + row_of<1>(n / 2 % 2);
        const Numbers numbers = i < s.queries ? numbers_of(a, head)[i] : Numbers{};
        float &y = x[0][n / 4][n % 4], &z = u[0][n / 4][n % 4], &v = dp[0][n / 4][n % 4], &w = t[0][n / 4][n % 4];
        Pair pair = second(a, head, y, z, v, w, i, j, head.span(i), lse_of(head, i), numbers);
        y = shown(pair.x), z = shown(pair.ds), v = shown(pair.moved), w = shown(pair.p);
      }
      accumulate_all<CD>(gk, x, walk.x);
      if (a.ddq.data) accumulate_all<CD>(gk, u, walk.moved);
      if (VALUES) accumulate_all<CE>(gv, dp, walk.value);
      if (VALUES && a.cot_o.data) accumulate_all<CE>(gv, t, walk.moved_value);
      __syncthreads();
    }
  }
  raise_unless_finite<OF_KEYS>(c, task.first, key_head, gk, gv);
  if (a.gk.data) store_keys<1, CD>(a.gk, s, key_head, key, gk, Same{c.scale}, 0, c.dim);
  if (VALUES && a.gv.data) store_keys<1, CE>(a.gv, s, key_head, key, gv, Same{1}, 0, c.value_dim);
}
