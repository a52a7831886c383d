// Walks of backward passes on the level sm80, of attention and of lazy attention. A walk owns the tiles of operands in
// shared memory, which of them it visits, which hide a pair, the products, numbers that are not finite and the results.
// BODY says what a pair of a query and a key means:
//
//   load    copies what else it takes of a tile into the stage
//   pairs   makes the factors of a tile from its products; MASKED: 0 where a pair is hidden. It calls `gradients` for
//           the products of dout and v where the walk does not (EAGER)
//   alone   the factors of one pair
//
// Compile-time, of either algorithm: STAGES; WALK, the rows of a tile that `walk_keys` visits; KNOWN, whether BODY knows
// beforehand if operands are finite, and TWICE, whether a block that finds a sum that is not finite walks again: else
// numbers that are not finite are cleared in tiles that hide a pair.
constexpr u32 D_BYTES = SIDE * CD * BYTES, E_BYTES = VALUES ? SIDE * CE * BYTES : 0;
constexpr u32 D_STAGE = WALK * CD * BYTES, E_STAGE = VALUES ? WALK * CE * BYTES : 0;
constexpr u32 TILE_BYTES = D_BYTES + E_BYTES + STAGES * (D_STAGE + E_STAGE);  // owned and walked

// Of the pairs of a warp in a tile: whether one is hidden; whether a factor of q or k, and of dout, may not be 0.
struct Use { bool hides, adds, adds_values; };
// What bodies do unless they say otherwise. CUT: whether every tile may hide a pair; `cut`: whether a head may.
struct Body {
  static constexpr bool EAGER = true, FUSED = false, CUT = OPTIONS, odd = false;
  METHOD bool cut(const Head&) const { return false; }
  template <class... ANY> METHOD void load(ANY&&...) const {}
  METHOD void begin(const KeyTile&, u32) const {}
  // What is done with dS before and after the product for dk.
  template <class... ANY> METHOD void before_keys(ANY&&...) const {}
  template <class... ANY> METHOD void after_keys(ANY&&...) const {}
};

// True if numbers that are not finite are cleared in the tiles at hand, which all have read.
DEV bool clears(bool hides, bool again) {
  if (!TWICE && !KNOWN) return __syncthreads_or(hides);
  if (again) __syncthreads();
  return again;
}

// ---- from queries over keys: dq ----
// A block that owns 64 queries of a head: its tiles of keys, and its operands in shared memory.
template <class HEAD> struct QueryBlock : QueryTile<HEAD> {
  using QueryTile<HEAD>::head, QueryTile<HEAD>::row, QueryTile<HEAD>::seen;
  u32 q, dout, k, v;
  int first, end;
  Span spans[2];
  template <class ARGS>
  METHOD QueryBlock(const ARGS& a, const PairArgs& c, Place own) : QueryTile<HEAD>(a, c, c.tasks[own.task], own.head) {
    q = shared_begin(), dout = q + D_BYTES, k = dout + E_BYTES, v = k + STAGES * D_STAGE;
    first = seen.begin / WALK, end = seen.begin < seen.end ? (seen.end + WALK - 1) / WALK : first;
    UNROLL(r, 2) spans[r] = head.span(row + row_of<1>(r));
  }
  METHOD bool is_cut(int key, bool cut) const {
    UNROLL(r, 2) cut |= spans[r].begin > key || spans[r].end < key + WALK;
    return __any_sync(~0u, cut);
  }
  // Adds to dq what numbers of k that are not finite add to pairs that see them.
  template <class BODY> METHOD void add_odd_keys(const BODY& body, float (&dq)[1][CD / 8][4]) const {
#pragma unroll 1
    for (int j = first * WALK; j < min(end * WALK, head.s.keys); j++) {
      const element* k = key_rows(head.c.k, head, j).at;
      if (!is_odd(k, head.c.dim)) continue;
      float p, ds[2];
      bool seen[2], adds;
      UNROLL(r, 2) seen[r] = body.alone(head, min(row + row_of<1>(r), head.s.queries - 1), j, p, ds[r], adds);
      add_odd<1, CD>(dq, ds, seen, k, head.c.dim);
    }
  }
};

// SUMS: whether there is a dq.
template <bool SUMS, class HEAD, class BODY> DEV void walk_keys(const PairArgs& c, const QueryBlock<HEAD>& own, BODY& body) {
  const HEAD& head = own.head;
  const int row = own.row;
  auto load = [&](int n, int stage) {
    load_tile<WALK, CD>(own.k + stage * D_STAGE, key_rows(c.k, head, n * WALK), c.dim);
    if (VALUES) load_tile<WALK, CE>(own.v + stage * E_STAGE, key_rows(c.v, head, n * WALK), c.value_dim);
    body.load(own, n * WALK, stage), copy_commit();
  };
  if (own.first < own.end) {
    load_tile<SIDE, CD>(own.q, query_rows(c.q, head, row), c.dim);
    if (VALUES) load_tile<SIDE, CE>(own.dout, query_rows(c.dout, head, row), c.value_dim);
  }
  float dq[1][CD / 8][4];
  bool odd, again = KNOWN && body.odd;
  do {
    clear<1, CD>(dq);
    if (own.first < own.end) load(own.first, 0);
    int stage = 0;
    odd = false;
#pragma unroll 1
    for (int n = own.first; n < own.end; n++, stage = (stage + 1) % STAGES) {
      copy_wait<0>();
      __syncthreads();  // k_n and v_n are here, and all are done with the other stage
      if (STAGES == 2 && n + 1 < own.end) load(n + 1, stage ^ 1);
      const u32 k = own.k + stage * D_STAGE;
      Pairs<1, WALK> x, ds;
      auto gradients = [&](bool wanted) {
        if (VALUES && wanted) products<1, WALK, CE>(ds, own.dout, own.v + stage * E_STAGE);
        else clear<1, WALK>(ds);
      };
      products<1, WALK, CD>(x, own.q, k);
      if (BODY::EAGER) gradients(true);
      Use use;
      if (BODY::CUT || own.is_cut(n * WALK, body.cut(head))) use = body.template pairs<true>(own, x, ds, n * WALK, stage, gradients);
      else use = body.template pairs<false>(own, x, ds, n * WALK, stage, gradients);
      if (SUMS && clears(use.hides, again)) {
        odd |= clear_odd<WALK, CD>(k);
        __syncthreads();
      }
      if (SUMS && use.adds) {
        if (TWICE && again) drop_odd<1, WALK>(ds);
        Factors<1, WALK> packed;
        pack_all<1, WALK>(packed, ds);
        accumulate<1, WALK, CD>(dq, packed, k);
      }
      if (STAGES == 1 && n + 1 < own.end) __syncthreads(), load(n + 1, 0);
    }
  } while (TWICE && !again && (again = __syncthreads_or(has_odd<1, CD>(dq))));
  if constexpr (SUMS) {
    if (KNOWN ? again : __syncthreads_or(odd)) own.add_odd_keys(body, dq);
    store<1, CD>(c.dq, head.s.batch, head.head, head.s.query_start + row, head.s.queries - row, dq, Same{c.scale}, 0, c.dim);
  }
}

// ---- from keys over queries: dk, dv ----
// A block that owns 64·M keys of a key head: its tiles of W queries, and its operands in shared memory. DK and DV: those
// of dk and dv that it has.
template <int M, int W, bool DK, bool DV> struct KeyBlock : KeyTile {
  static constexpr int OWN = SIDE * M;
  static constexpr u32 OWN_K = M * D_BYTES, OWN_V = DK ? M * E_BYTES : 0, Q_STAGE = W * CD * BYTES;
  static constexpr u32 STAGE = Q_STAGE + (VALUES ? W * CE * BYTES : 0);
  const u32 k, v, q;
  float* const numbers;  // beside the operands
  const int tiles, count;
  METHOD KeyBlock(const PairArgs& c)
      : KeyTile(c, tile_of_block(c.key_heads)), k(shared_begin()), v(k + OWN_K), q(v + OWN_V), numbers(numbers_at(OWN_K + OWN_V + STAGES * STAGE)),
        tiles((s.queries + W - 1) / W), count(group * tiles) {}
  METHOD int head_of(int n) const { return key_head * group + n / tiles; }
  METHOD int row_of_tile(int n) const { return n % tiles * W; }
  METHOD bool is_cut(const Head& head, int row, bool cut) const {
#pragma unroll
    for (int half = 0; half < W; half += 32) {
      const Span span = head.span(row + half + lane_id());
      cut |= span.begin > key || span.end < key + OWN;
    }
    return __any_sync(~0u, cut);
  }
  // Adds to dk and dv what numbers of q and dout that are not finite add to pairs that see them.
  template <class BODY> METHOD void add_odd_queries(const PairArgs& c, const BODY& body, float (&dk)[M][CD / 8][4], float (&dv)[M][CE / 8][4]) const {
#pragma unroll 1
    for (int at = 0; at < group * s.queries; at++) {
      const auto head = body.head(s, key_head * group + at / s.queries);
      const int i = at % s.queries;
      const element *q = query_rows(c.q, head, i).at, *dout = query_rows(c.dout, head, i).at;
      bool found = is_odd(q, c.dim);
      if (VALUES) found |= is_odd(dout, c.value_dim);
      if (!found) continue;
      float p[2 * M], ds[2 * M];
      bool seen[2 * M], adds[2 * M];
      UNROLL(r, 2 * M) seen[r] = body.alone(head, i, min(key + row_of<M>(r), s.keys - 1), p[r], ds[r], adds[r]);
      if (DK) add_odd<M, CD>(dk, ds, seen, q, c.dim);
      if (VALUES && DV) add_odd<M, CE>(dv, p, adds, dout, c.value_dim);
    }
  }
};

// dk and dv: neither M nor W changes a bit. BODY::NUMBERS: the numbers of a stage.
template <int M, int W, bool DK, bool DV, class BODY>
DEV void walk_queries(const PairArgs& c, const KeyBlock<M, W, DK, DV>& own, BODY& body) {
  typedef KeyBlock<M, W, DK, DV> OWN;
  const bool wants_dk = DK && c.dk.data, wants_dv = VALUES && DV && c.dv.data;
  load_tile<OWN::OWN, CD>(own.k, key_rows(c.k, own.s, own.key_head, own.key), c.dim);
  if (VALUES && DK) load_tile<OWN::OWN, CE>(own.v, key_rows(c.v, own.s, own.key_head, own.key), c.value_dim);
  auto next = [&](int n) { return next_seen<W, OWN::OWN>(c, own.s, n, own.count, own.key); };
  auto load = [&](int n, int stage) {
    const auto head = body.head(own.s, own.head_of(n));
    const int row = own.row_of_tile(n);
    const u32 q = own.q + stage * OWN::STAGE;
    load_tile<W, CD>(q, query_rows(c.q, head, row), c.dim);
    if (VALUES) load_tile<W, CE>(q + OWN::Q_STAGE, query_rows(c.dout, head, row), c.value_dim);
    body.load(head, row, own.key, own.numbers + stage * BODY::NUMBERS);
  };
  body.begin(own, own.k);
  float dk[M][CD / 8][4], dv[M][CE / 8][4];  // of what is not asked for nothing is left
  bool odd, again = KNOWN && body.odd;
  do {
    clear<M, CD>(dk), clear<M, CE>(dv);
    int n = next(0), stage = 0;
    odd = false;
    if (n < own.count) load(n, 0);
    copy_commit();
#pragma unroll 1
    for (int following; n < own.count; n = following, stage = (stage + 1) % STAGES) {
      copy_wait<0>();
      __syncthreads();  // q and dout of tile n are here, and all are done with the other stage
      following = next(n + 1);
      if (STAGES == 2 && following < own.count) load(following, stage ^ 1);
      copy_commit();
      const auto head = body.head(own.s, own.head_of(n));
      const int row = own.row_of_tile(n);
      const u32 q = own.q + stage * OWN::STAGE, dout = q + OWN::Q_STAGE;
      const float* numbers = own.numbers + stage * BODY::NUMBERS;
      Pairs<M, W> x, ds;
      auto gradients = [&](bool wanted) {
        if (VALUES && wanted) products<M, W, CE>(ds, own.v, dout);
        else clear<M, W>(ds);
      };
      products<M, W, CD>(x, own.k, q);
      if (BODY::EAGER) gradients(BODY::FUSED || wants_dk);
      Use use;
      if (BODY::CUT || own.is_cut(head, row, body.cut(head))) use = body.template pairs<true>(head, x, ds, row, own.key, numbers, gradients);
      else use = body.template pairs<false>(head, x, ds, row, own.key, numbers, gradients);
      if (clears(use.hides, again)) {
        odd |= clear_odd<W, CD>(q);
        if (VALUES) odd |= clear_odd<W, CE>(dout);
        __syncthreads();
      }
      if (TWICE && again) drop_odd<M, W>(x), drop_odd<M, W>(ds);
      Factors<M, W> packed;
      pack_all<M, W>(packed, x);
      if (wants_dv && use.adds_values) accumulate<M, W, CE>(dv, packed, dout);
      pack_all<M, W>(packed, ds);
      body.before_keys(packed, dout);
      if (wants_dk && use.adds) accumulate<M, W, CD>(dk, packed, q);
      body.after_keys(own, head, row, ds, q, dout, own.k);
      if (STAGES == 1 && following < own.count) __syncthreads(), load(following, 0), copy_commit();
    }
  } while (TWICE && !again && (again = __syncthreads_or(has_odd<M, CD>(dk) || VALUES && has_odd<M, CE>(dv))));
  if (KNOWN ? again : __syncthreads_or(odd)) own.add_odd_queries(c, body, dk, dv);
  const int first = own.s.key_start + own.key, count = own.s.keys - own.key;
  if (wants_dk) store<M, CD>(c.dk, own.s.batch, own.key_head, first, count, dk, Same{c.scale}, 0, c.dim);
  if (wants_dv) store<M, CE>(c.dv, own.s.batch, own.key_head, first, count, dv, Same{1}, 0, c.value_dim);
}
