// The second order of attention of bf16 operands with D and E up to 64, without options, on the tensor cores of
// compute capability 9.0: wgmma.
//
//   tangents, queries, keys: as in portable_second_order.cu  (D1)–(D5), (D7)–(D12)
//
// A block has one warpgroup, which owns 64 queries or keys and walks tiles of 64 of the others, in two stages that
// `cp.async` fills: it issues the products of a tile, copies the next one, weighs the pairs, and adds to the sums. Two
// blocks share a multiprocessor, so that one weighs pairs while the other multiplies. Factors of sums are f32 and are
// cut into three pieces of bf16 whose sum they are, as on sm80: a piece is cut off while products of that before run,
// and those of a tile's last pieces run under the scores of the next tile.
//
// An operand that is not there is a tile of zeros: it adds 0 to sums, and all blocks run the same products.
//
// Compile-time: STORAGE 1; OPTIONS 0, WHOLE 1, VALUES 1; CD and CE 64.
constexpr u32 TILE = SIDE * 128, STAGE = 4 * TILE;
// Of walked queries, in each stage: their numbers, lse, and the first of the keys that they see with how many.
constexpr u32 AT_LSE = SIDE * 16, AT_SPANS = AT_LSE + SIDE * 4, ROW_BYTES = AT_SPANS + SIDE * 8;
CHECK_SHARED(tangents, 1024 + 2 * TILE + 2 * STAGE);  // 1024 to align all
CHECK_SHARED(queries, 1024 + 3 * STAGE);
CHECK_SHARED(keys, 1024 + 3 * STAGE + 2 * ROW_BYTES);
typedef float Numbers64[SIDE / 2];  // of a thread, in a product of 64 × 64
constexpr int CUT = 32;  // columns that are cut at a time
typedef u32 Piece[CUT / 4];

DEV const Sums<1, SIDE>& fragment(const Numbers64& x) { return (const Sums<1, SIDE>&)x; }
DEV Tiles tiles_at(u32 at) { return ::tiles_at(at, TILE, TILE); }
// Puts 0 in the tile of an operand that is not there.
DEV void clear_absent(u32 tile, const Tensor& x) {
  if (x.data) return;
  UNROLL(i, TILE / 16 / THREADS) store_piece(tile + (i * THREADS + threadIdx.x) * 16, 0, 0, 0, 0);
}
DEV void clear_absent_queries(const Tiles& at, const SecondArgs& a, bool values) {
  clear_absent(at.moved, a.ddq);
  if (values) clear_absent(at.value, a.c.dout), clear_absent(at.moved_value, a.cot_o);
}
DEV void clear_absent_keys(const Tiles& at, const SecondArgs& a) {
  clear_absent(at.moved, a.ddk), clear_absent(at.moved_value, a.ddv);
}

// Walks the tiles `first`, next(first + 1) … before `count`: load(tile, stage) copies one, and step(tile, stage,
// load_next) multiplies it and calls load_next() once nobody reads the tile before.
template <class NEXT, class LOAD, class STEP> DEV void walk(int first, int count, NEXT next, LOAD load, STEP step) {
  if (first < count) load(first, 0);
  copy_commit();
  int stage = 0;
  NO_UNROLL for (int n = first; n < count; stage ^= 1) {
    const int after = next(n + 1);
    copy_wait<0>(), proxy_fence();
    __syncthreads();
    step(n, stage, [&] {
      __syncthreads();
      if (after < count) load(after, stage ^ 1);
      copy_commit();
    });
    n = after;
  }
  mma_wait<0>();
}

// A product s = x·yᵀ of tiles, and that of its motion: u = moved x·yᵀ + x·moved yᵀ.
DEV void issue_moved(Numbers64& s, Numbers64& u, u32 x, u32 moved_x, u32 y, u32 moved_y) {
  pin(s), pin(u), mma_begin();
  multiply_shared<SIDE, 64, SIDE, SIDE>(s, x, y);
  multiply_shared<SIDE, 64, SIDE, SIDE>(u, moved_x, y);
  multiply_shared<SIDE, 64, SIDE, SIDE>(u, x, moved_y, 1);
  mma_commit();
}
// Sums before the first product. If the assembler knew that they are 0, it would write them between products, which
// then wait for each other.
DEV void begin(Numbers64& sum) {
  UNROLL(i, SIDE / 2) sum[i] = 0;
  pin(sum);
}
// Packs the upper halves of factors and leaves them out of these: 8 bits of each, so that a third piece is the rest.
DEV void cut(Piece& piece, float* x) {
  UNROLL(i, CUT / 4) {
    const u32 low = __float_as_uint(x[2 * i]), high = __float_as_uint(x[2 * i + 1]);
    piece[i] = __byte_perm(low, high, 0x7632);
    x[2 * i] -= __uint_as_float(low & 0xffff0000), x[2 * i + 1] -= __uint_as_float(high & 0xffff0000);
  }
}
// Calls multiply(piece, its rows' place in a tile) for the pieces of factors, in halves of 32 columns, each of which
// has registers of its own. A factor that is not finite has a piece that is not, and so have the sums.
template <class F> DEV void each_piece(Piece (&pieces)[2], Numbers64& x, F multiply) {
  UNROLL2(i, 3, half, 2) {
    Piece& piece = pieces[half];
    mma_wait<1>(), pin(piece);
    cut(piece, x + half * CUT / 2);
    pin(piece), mma_begin();
    multiply(piece, half * CUT * 128);
    mma_commit();
  }
}
DEV void add_product(Numbers64& sum, const Piece& piece, u32 tile) { multiply_registers<CUT, 64>(sum, piece, tile); }

// A query: its lse, and the keys that it sees.
struct SeenRow {
  float lse;
  int begin;
  u32 count;
  METHOD SeenRow() {}
  METHOD SeenRow(const Head& head, int i) : lse(lse_of(head, i)) {
    const Span span = head.span(i);
    begin = span.begin, count = max(span.end - span.begin, 0);
  }
  METHOD bool sees(int key) const { return (u32)(key - begin) < count; }
};
// The same with its numbers, of a thread's own or as `load_numbers` puts it into shared memory.
struct NumberedRow : SeenRow {
  float delta, u, z;
  METHOD NumberedRow(const SecondArgs& a, const Head& head, int i) : SeenRow(head, i) {
    const Numbers n = i < head.s.queries ? numbers_of(a, head)[i] : Numbers{};
    delta = n.delta, u = n.u, z = n.z;
  }
  METHOD NumberedRow(u32 rows, int row) {
    const uint4 x = load_piece(rows + 16 * row);
    delta = __uint_as_float(x.x), u = __uint_as_float(x.y), z = __uint_as_float(x.z), lse = load_float(rows + AT_LSE + 4 * row);
    begin = load_word(rows + AT_SPANS + 8 * row), count = load_word(rows + AT_SPANS + 8 * row + 4);
  }
};
// Copies a query's numbers into shared memory.
DEV void load_numbers(u32 rows, int row, const SecondArgs& a, const Head& head, int i) {
  const bool there = i < head.s.queries;
  copy_16(rows + 16 * row, there ? numbers_of(a, head) + i : a.numbers, there);
  copy_4(rows + AT_LSE + 4 * row, there ? head.lse + i : a.c.lse, there);
  const SeenRow seen(head, i);
  store_word(rows + AT_SPANS + 8 * row, seen.begin), store_word(rows + AT_SPANS + 8 * row + 4, seen.count);
}

// P of a pair from its product: weighed where it is visible, since `keys` spills more of a selection behind it.
DEV float weight_of_product(float product, float scale, const SeenRow& row, int key) {
  return row.sees(key) ? weight(__fmul_rn(scale, product), row.lse) : 0;
}
// The factors of a pair, in place of its products s, u, dP and T: x (D9), dS (B4), Ṗ (D7) and P.
DEV void weigh(float& s, float& u, float& dp, float& t, float scale, const NumberedRow& n, int key) {
  const float p = weight_of_product(s, scale, n, key), g = dp - n.delta;
  const float moved = p * fmaf(scale, u, -n.u);
  s = fmaf(moved, g, p * (t - n.z)), u = p * g, dp = moved, t = p;
}

// The key of a thread's number in a tile of keys.
DEV int key_of(int tile, int n) { return tile * SIDE + own_column() + n / 4 * 8 + n % 2; }

KERNEL(tangents, SecondArgs a, THREADS, 2) {
  const PairArgs& c = a.c;
  const Place place = tile_of_block(c.heads);
  const QueryTile<Head> block(c, c, c.tasks[place.task], place.head);
  const Head& head = block.head;
  if (!is_finite(a, block.sequence, head.key_head)) return;
  const int row = block.row;
  const u32 base = shared_panels();
  const Tiles own = tiles_at(base);
  auto stage_at = [&](int stage) { return tiles_at(base + 2 * TILE + stage * STAGE); };
  const SeenRow rows[2] = {{head, row + row_of<1>(0)}, {head, row + row_of<1>(1)}};
  Numbers64 sum, o;
  Piece pieces[2];
  float moves[2] = {};
  begin(sum), begin(o);
  clear_absent_queries(own, a, false), clear_absent_keys(stage_at(0), a), clear_absent_keys(stage_at(1), a);
  load_queries<SIDE>(own, a, head, row, false);
  auto next = [](int n) { return n; };
  auto load = [&](int n, int stage) { load_keys<SIDE>(stage_at(stage), a, head, n * SIDE); };
  const int end = block.seen.begin < block.seen.end ? (block.seen.end + SIDE - 1) / SIDE : 0;
  walk(block.seen.begin / SIDE, end, next, load, [&](int n, int stage, auto load_next) {
    const Tiles keys = stage_at(stage);
    Numbers64 p, moved;
    issue_moved(p, moved, own.x, own.moved, keys.x, keys.moved);
    mma_wait<1>(), pin(sum), pin(o), pin(pieces[0]), pin(pieces[1]);
    load_next();
    mma_wait<0>(), pin(p), pin(moved);
    UNROLL(i, SIDE / 2) {
      p[i] = weight_of_product(p[i], c.scale, rows[i / 2 % 2], key_of(n, i));
      moved[i] = p[i] * (c.scale * moved[i]);
      moves[i / 2 % 2] += moved[i];
    }
    each_piece(pieces, moved, [&](const Piece& piece, u32 at) { add_product(sum, piece, keys.value + at); });
    each_piece(pieces, p, [&](const Piece& piece, u32 at) {
      add_product(sum, piece, keys.moved_value + at), add_product(o, piece, keys.value + at);
    });
  });
  pin(sum), pin(o), pin(pieces[0]), pin(pieces[1]);
  UNROLL(r, 2) {
    const float u = quad_sum(moves[r]);
    const int i = row + row_of<1>(r);
    if (lane_id() % 4 == 0 && i < head.s.queries) put_numbers(a, head, i, u, rows[r].count > 0, rows[r].lse);
  }
  raise_unless_finite<OF_TANGENTS>(c, block.sequence, head.key_head, fragment(sum), fragment(o));
  const Sequence& s = head.s;
  store_wide<1, CE>(a.sum, s.batch, head.head, s.query_start + row, s.queries - row, fragment(sum), 0, c.value_dim);
  store_wide<1, CE>(a.o32, s.batch, head.head, s.query_start + row, s.queries - row, fragment(o), 0, c.value_dim);
}

KERNEL(queries, SecondArgs a, THREADS, 2) {
  const PairArgs& c = a.c;
  const Place place = tile_of_block(c.heads);
  const QueryTile<Head> block(c, c, c.tasks[place.task], place.head);
  const Head& head = block.head;
  if (!is_finite(a, block.sequence, head.key_head)) return;
  const int row = block.row;
  const u32 base = shared_panels();
  const Tiles own = tiles_at(base);
  auto stage_at = [&](int stage) { return tiles_at(base + STAGE + stage * STAGE); };
  const NumberedRow rows[2] = {{a, head, row + row_of<1>(0)}, {a, head, row + row_of<1>(1)}};
  Numbers64 gq;
  Piece pieces[2];
  begin(gq);
  clear_absent_queries(own, a, true), clear_absent_keys(stage_at(0), a), clear_absent_keys(stage_at(1), a);
  load_queries<SIDE>(own, a, head, row, true);
  auto next = [](int n) { return n; };
  auto load = [&](int n, int stage) { load_keys<SIDE>(stage_at(stage), a, head, n * SIDE); };
  const int end = block.seen.begin < block.seen.end ? (block.seen.end + SIDE - 1) / SIDE : 0;
  walk(block.seen.begin / SIDE, end, next, load, [&](int n, int stage, auto load_next) {
    const Tiles keys = stage_at(stage);
    Numbers64 s, u, dp, t;
    issue_moved(s, u, own.x, own.moved, keys.x, keys.moved);
    issue_moved(dp, t, own.value, own.moved_value, keys.value, keys.moved_value);
    mma_wait<2>(), pin(gq), pin(pieces[0]), pin(pieces[1]);
    load_next();
    mma_wait<0>(), pin(s), pin(u), pin(dp), pin(t);
    UNROLL(i, SIDE / 2) weigh(s[i], u[i], dp[i], t[i], c.scale, rows[i / 2 % 2], key_of(n, i));
    each_piece(pieces, s, [&](const Piece& piece, u32 at) { add_product(gq, piece, keys.x + at); });
    each_piece(pieces, u, [&](const Piece& piece, u32 at) { add_product(gq, piece, keys.moved + at); });
  });
  pin(gq), pin(pieces[0]), pin(pieces[1]);
  raise_unless_finite<OF_QUERIES>(c, block.sequence, head.key_head, fragment(gq));
  store_queries<1, CD>(a.gq, head, row, fragment(gq), Same{c.scale}, 0, c.dim);
}

KERNEL(keys, SecondArgs a, THREADS, 2) {
  const PairArgs& c = a.c;
  const Task task = c.tasks[blockIdx.x / c.key_heads];
  const Sequence s = c.sequences[task.first];
  const int key_head = blockIdx.x % c.key_heads, group = c.heads / c.key_heads, key = task.key_tile * SIDE;
  if (!is_finite(a, task.first, key_head)) return;
  const u32 base = shared_panels();
  const Tiles own = tiles_at(base);
  auto stage_at = [&](int stage) { return tiles_at(base + STAGE + stage * STAGE); };
  auto rows_at = [&](int stage) { return base + 3 * STAGE + stage * ROW_BYTES; };
  Numbers64 gk, gv;
  Piece pieces[2];
  begin(gk), begin(gv);
  clear_absent_keys(own, a), clear_absent_queries(stage_at(0), a, true), clear_absent_queries(stage_at(1), a, true);
  load_keys<SIDE>(own, a, Head(c, s, key_head * group), key);
  const int tiles = (s.queries + SIDE - 1) / SIDE, count = group * tiles;
  auto next = [&](int n) { return next_seen<SIDE, SIDE>(c, s, n, count, key); };
  auto load = [&](int n, int stage) {
    const Head head(c, s, key_head * group + n / tiles);
    const int row = n % tiles * SIDE;
    load_queries<SIDE>(stage_at(stage), a, head, row, true);
    if (threadIdx.x < SIDE) load_numbers(rows_at(stage), threadIdx.x, a, head, row + threadIdx.x);
  };
  walk(next(0), count, next, load, [&](int n, int stage, auto load_next) {
    const Tiles queries = stage_at(stage);
    Numbers64 x, u, dp, t;
    issue_moved(x, u, own.x, own.moved, queries.x, queries.moved);
    issue_moved(dp, t, own.value, own.moved_value, queries.value, queries.moved_value);
    mma_wait<2>(), pin(gk), pin(gv), pin(pieces[0]), pin(pieces[1]);
    load_next();
    mma_wait<0>(), pin(x), pin(u), pin(dp), pin(t);
    UNROLL2(j, SIDE / 8, e, 2) {
      const int column = 8 * j + own_column() + e;
      const NumberedRow of(rows_at(stage), column);
      UNROLL(r, 2) {
        const int i = 4 * j + 2 * r + e;
        weigh(x[i], u[i], dp[i], t[i], c.scale, of, key + row_of<1>(r));
      }
    }
    each_piece(pieces, x, [&](const Piece& piece, u32 at) { add_product(gk, piece, queries.x + at); });
    each_piece(pieces, u, [&](const Piece& piece, u32 at) { add_product(gk, piece, queries.moved + at); });
    each_piece(pieces, dp, [&](const Piece& piece, u32 at) { add_product(gv, piece, queries.value + at); });
    each_piece(pieces, t, [&](const Piece& piece, u32 at) { add_product(gv, piece, queries.moved_value + at); });
  });
  pin(gk), pin(gv), pin(pieces[0]), pin(pieces[1]);
  raise_unless_finite<OF_KEYS>(c, task.first, key_head, fragment(gk), fragment(gv));
  if (a.gk.data) store_keys<1, CD>(a.gk, s, key_head, key, fragment(gk), Same{c.scale}, 0, c.dim);
  if (a.gv.data) store_keys<1, CE>(a.gv, s, key_head, key, fragment(gv), Same{1}, 0, c.value_dim);
}
