// Walks of passes on the level sm80, of attention and of lazy attention. A walk has the tiles of operands in shared
// memory, visits them, finds those that hide a pair, multiplies, raises flags, and writes the results of a backward
// pass. BODY says what a pair of a query and a key means:
//
//   load    copies what else it takes of a tile into the stage
//   pairs   makes the factors of a tile from its products; MASKED: 0 where a pair is hidden. It calls `gradients` for
//           the products of dout and v where the walk does not (EAGER)
//   rows    what a forward pass does with the scores of rows; `scale` follows with the sums before
//
// Compile-time, of either algorithm: M and KEYS, of tiles of `walk_values`; STAGES and WALK, the rows of a tile that
// `walk_keys` visits.
constexpr u32 Q_BYTES = SIDE * M * CD * BYTES, K_BYTES = KEYS * CD * BYTES, V_BYTES = VALUES ? KEYS * CE * BYTES : 0;
constexpr u32 D_BYTES = SIDE * CD * BYTES, E_BYTES = VALUES ? SIDE * CE * BYTES : 0;
constexpr u32 D_STAGE = WALK * CD * BYTES, E_STAGE = VALUES ? WALK * CE * BYTES : 0;
constexpr u32 TILE_BYTES = D_BYTES + E_BYTES + STAGES * (D_STAGE + E_STAGE);  // owned and walked

// Use of a tile: whether a factor of q or k, and of dout, may not be 0 in a warp; of q in a thread where BODY is not
// EAGER: `walk_queries` asks its warp behind the product for dv.
struct Use { bool adds, adds_values; };
// Defaults of a body. CUT: whether every tile may hide a pair; `cut`: whether a head may.
struct Body {
  static constexpr bool EAGER = true, FUSED = false, CUT = OPTIONS;
  METHOD bool cut(const Head&) const { return false; }
  template <class... ANY> METHOD void load(ANY&&...) const {}
  METHOD void begin(const KeyTile&, u32) const {}
  // The next tile from one on, and what a walk does with the sums of a row.
  template <class OWN> METHOD int next(const OWN&, int n) const { return n; }
  template <class SUM> METHOD void scale(SUM&) const {}
  // Hooks that take dS before and after the product for dk.
  template <class... ANY> METHOD void before_keys(ANY&&...) const {}
  template <class... ANY> METHOD void after_keys(ANY&&...) const {}
};

// True if products of queries and keys raise flags, too: factors of f32 overflow when they are rounded or split,
// before their sums do, and the weight of −∞, or a softcap, would hide it.
constexpr bool ZEROS = STORAGE == 0;
// Raises the flag of a group unless all sums are finite, and the products (`add_zeros`).
template <int PLACE, class... SUMS>
DEV void raise_unless_finite(const PairArgs& c, int group, const float (&products)[2], const SUMS&... sums) {
  float zero[2] = {0, 0};
  (add_zeros(zero, sums), ...);
  if (!are_zero(zero)) raise<PLACE>(c.flags, group);
  if (ZEROS && !are_zero(products)) raise<OF_PRODUCTS>(c.flags, group);
}

// ---- from queries over keys ----
// A block that owns 64·T queries of a head, and its tiles of N keys.
template <class HEAD, int T, int N> struct QueryBlock : QueryTile<HEAD> {
  using QueryTile<HEAD>::head, QueryTile<HEAD>::row;
  int first, end, from, to;  // tiles; keys that all rows of the thread see
  Span spans[2 * T];
  template <class ARGS>
  METHOD QueryBlock(const ARGS& a, const PairArgs& c, Place own) : QueryTile<HEAD>(a, c, c.tasks[own.task], own.head) {
    const Tile seen = seen_tile<T>(c, head.s, c.tasks[own.task]);
    first = seen.begin / N, end = seen.begin < seen.end ? (seen.end + N - 1) / N : first;
    UNROLL(r, 2 * T) spans[r] = head.span(row + row_of<T>(r));
    from = spans[0].begin, to = spans[0].end;
    UNROLL(r, 2 * T) from = max(from, spans[r].begin), to = min(to, spans[r].end);
  }
  METHOD Span span(int r) const { return head.span(row + row_of<T>(r)); }
  METHOD bool is_cut(int key, bool cut) const {
    cut |= from > key || to < key + N;
    return __any_sync(~0u, cut);
  }
};

// The factors of v of a tile of keys; whether one may not be 0.
template <class OWN, class BODY>
DEV bool weigh_tile(const OWN& own, BODY& body, Factors<M, KEYS>& packed, float (&zero)[2], u32 q, u32 k, int key, int stage) {
  Use use;
  Pairs<M, KEYS> p;
  products<M, KEYS, CD>(p, q, k);
  if (ZEROS) add_zeros(zero, p);
  if (BODY::CUT || own.is_cut(key, body.cut(own.head))) use = body.template pairs<true>(own, p, key, stage);
  else use = body.template pairs<false>(own, p, key, stage);
  body.rows(own, p, key);
  pack_all<M, KEYS>(packed, p);
  return use.adds;
}

// Σ p·v of the queries of a block, if SUMS. Of BODY: LAST_FIRST: keys are walked from the last on. APART: k and v are
// loaded one after the other; of f32 in one stage, which every device has room for: v while S is computed, the next k
// while v is multiplied. BESIDE: bytes between them.
template <bool SUMS, class OWN, class BODY> DEV void walk_values(const PairArgs& c, const OWN& own, BODY& body, Sums<M, CE>& o) {
  constexpr bool APART = BODY::APART;
  constexpr int FEEDS = APART && STORAGE == 0 && SUMS ? 1 : 2;
  const u32 at_q = shared_begin(), at_k = at_q + Q_BYTES, at_v = at_k + FEEDS * K_BYTES + BODY::BESIDE;
  auto is_there = [&](int n) { return BODY::LAST_FIRST ? n >= own.first : n < own.end; };
  auto load_v = [&](int n, int stage) {
    if (!SUMS) return;
    Rows v = key_rows(c.v, own.head, n * KEYS);
    v.at += c.first_value;
    load_tile<KEYS, CE>(at_v + stage * V_BYTES, v, c.value_dim - c.first_value);
  };
  auto load_k = [&](int n, int stage) {  // and v, unless it is APART
    load_tile<KEYS, CD>(at_k + stage * K_BYTES, key_rows(c.k, own.head, n * KEYS), c.dim);
    body.load(own, n * KEYS, stage);
    if (!APART) load_v(n, stage);
  };
  if (own.first < own.end) load_tile<SIDE * M, CD>(at_q, query_rows(c.q, own.head, own.row), c.dim);
  float zero[2] = {0, 0};
  clear<M, CE>(o);
  int n = body.next(own, BODY::LAST_FIRST ? own.end - 1 : own.first), stage = 0;
  if (is_there(n)) {
    load_k(n, 0), copy_commit();
    if (APART && FEEDS == 2) load_v(n, 0), copy_commit();
  }
  NO_UNROLL for (int following; is_there(n); n = following, stage ^= FEEDS - 1) {
    copy_wait<APART ? FEEDS - 1 : 0>();
    __syncthreads();  // k_n is here, and all are done with the other stage, or with v
    following = body.next(own, BODY::LAST_FIRST ? n - 1 : n + 1);
    if (FEEDS == 1) load_v(n, 0);
    else if (is_there(following)) load_k(following, stage ^ 1);
    copy_commit();
    Factors<M, KEYS> packed;
    const bool adds = weigh_tile(own, body, packed, zero, at_q, at_k + stage * K_BYTES, n * KEYS, stage);
    if (SUMS) {
      body.scale(o);
      const u32 v = at_v + stage * V_BYTES;
      if (APART) copy_wait<FEEDS - 1>(), __syncthreads();  // v_n is here
      // Never: else both products are one block of instructions, which needs more registers.
      if (opaque(n) < own.first) return;
      if (FEEDS == 1 && is_there(following)) load_k(following, 0);
      if (APART && FEEDS == 2 && is_there(following)) load_v(following, stage ^ 1);
      if (APART) copy_commit();
      if (adds) accumulate<M, KEYS, CE>(o, packed, v);
    } else if (APART) {
      copy_commit();
    }
  }
  raise_unless_finite<OF_OUTPUTS>(c, own.group(), zero, o);
}

// dq of 64 queries, if SUMS.
template <bool SUMS, class OWN, class BODY> DEV void walk_keys(const PairArgs& c, const OWN& own, BODY& body) {
  const u32 at_q = shared_begin(), at_dout = at_q + D_BYTES, at_k = at_dout + E_BYTES, at_v = at_k + STAGES * D_STAGE;
  const auto& head = own.head;
  const int row = own.row;
  auto load = [&](int n, int stage) {
    load_tile<WALK, CD>(at_k + stage * D_STAGE, key_rows(c.k, head, n * WALK), c.dim);
    if (VALUES) load_tile<WALK, CE>(at_v + stage * E_STAGE, key_rows(c.v, head, n * WALK), c.value_dim);
    body.load(own, n * WALK, stage), copy_commit();
  };
  if (own.first < own.end) {
    load_tile<SIDE, CD>(at_q, query_rows(c.q, head, row), c.dim);
    if (VALUES) load_tile<SIDE, CE>(at_dout, query_rows(c.dout, head, row), c.value_dim);
    load(own.first, 0);
  }
  Sums<1, CD> dq;
  float zero[2] = {0, 0};
  clear<1, CD>(dq);
  int stage = 0;
  NO_UNROLL for (int n = own.first; n < own.end; n++, stage ^= STAGES - 1) {
    copy_wait<0>();
    __syncthreads();  // k_n and v_n are here, and all are done with the other stage
    if (STAGES == 2 && n + 1 < own.end) load(n + 1, stage ^ 1);
    const u32 k = at_k + stage * D_STAGE;
    Pairs<1, WALK> x, ds;
    auto gradients = [&](bool wanted) {
      if (VALUES && wanted) products<1, WALK, CE>(ds, at_dout, at_v + stage * E_STAGE);
      else clear<1, WALK>(ds);
    };
    products<1, WALK, CD>(x, at_q, k);
    if (ZEROS) add_zeros(zero, x);
    if (BODY::EAGER) gradients(true);
    Use use;
    if (BODY::CUT || own.is_cut(n * WALK, body.cut(head))) use = body.template pairs<true>(own, x, ds, n * WALK, stage, gradients);
    else use = body.template pairs<false>(own, x, ds, n * WALK, stage, gradients);
    if (SUMS && use.adds) {
      Factors<1, WALK> packed;
      pack_all<1, WALK>(packed, ds);
      accumulate<1, WALK, CD>(dq, packed, k);
    }
    if (STAGES == 1 && n + 1 < own.end) __syncthreads(), load(n + 1, 0);
  }
  if constexpr (SUMS) {
    raise_unless_finite<OF_QUERIES>(c, own.group(), zero, dq);
    store_queries<1, CD>(c.dq, head, row, dq, Same{c.scale}, 0, c.dim);
  }
}

// ---- from keys over queries: dk, dv ----
// A block that owns 64·M keys of a key head: its tiles of W queries, and its operands in shared memory. It has dk if
// DK, and dv if DV.
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
  METHOD void load_keys(const PairArgs& c) const {
    load_tile<OWN, CD>(k, key_rows(c.k, s, key_head, key), c.dim);
    if (VALUES && DK) load_tile<OWN, CE>(v, key_rows(c.v, s, key_head, key), c.value_dim);
  }
  METHOD void load_queries(const PairArgs& c, const Head& head, int row, int stage) const {
    const u32 at = q + stage * STAGE;
    load_tile<W, CD>(at, query_rows(c.q, head, row), c.dim);
    if (VALUES) load_tile<W, CE>(at + Q_STAGE, query_rows(c.dout, head, row), c.value_dim);
  }
  METHOD bool is_cut(const Head& head, int row, bool cut) const {
    UNROLL_ALL for (int half = 0; half < W; half += 32) {
      const Span span = head.span(row + half + lane_id());
      cut |= span.begin > key || span.end < key + OWN;
    }
    return __any_sync(~0u, cut);
  }
};

// dk and dv: neither M nor W changes a bit. BODY::NUMBERS: the numbers of a stage.
template <int M, int W, bool DK, bool DV, class BODY>
DEV void walk_queries(const PairArgs& c, const KeyBlock<M, W, DK, DV>& own, BODY& body) {
  const bool wants_dk = DK && c.dk.data, wants_dv = VALUES && DV && c.dv.data;
  own.load_keys(c);
  auto next = [&](int n) { return next_seen<W, SIDE * M>(c, own.s, n, own.count, own.key); };
  auto load = [&](int n, int stage) {
    const auto head = body.head(own.s, own.head_of(n));
    own.load_queries(c, head, own.row_of_tile(n), stage);
    body.load(head, own.row_of_tile(n), own.key, own.numbers + stage * BODY::NUMBERS);
  };
  body.begin(own, own.k);
  Sums<M, CD> dk;
  Sums<M, CE> dv;  // one that is not asked for leaves no instruction
  float zero[2] = {0, 0};
  clear<M, CD>(dk), clear<M, CE>(dv);
  int n = next(0), stage = 0;
  if (n < own.count) load(n, 0);
  copy_commit();
  NO_UNROLL for (int following; n < own.count; n = following, stage ^= STAGES - 1) {
    copy_wait<0>();
    __syncthreads();  // q and dout of tile n are here, and all are done with the other stage
    following = next(n + 1);
    if (STAGES == 2 && following < own.count) load(following, stage ^ 1);
    copy_commit();
    const auto head = body.head(own.s, own.head_of(n));
    const int row = own.row_of_tile(n);
    const u32 q = own.q + stage * own.STAGE, dout = q + own.Q_STAGE;
    const float* numbers = own.numbers + stage * BODY::NUMBERS;
    Pairs<M, W> x, ds;
    auto gradients = [&](bool wanted) {
      if (VALUES && wanted) products<M, W, CE>(ds, own.v, dout);
      else clear<M, W>(ds);
    };
    products<M, W, CD>(x, own.k, q);
    if (ZEROS) add_zeros(zero, x);
    if (BODY::EAGER) gradients(BODY::FUSED || wants_dk);
    Use use;
    if (BODY::CUT || own.is_cut(head, row, body.cut(head))) use = body.template pairs<true>(head, x, ds, row, own.key, numbers, gradients);
    else use = body.template pairs<false>(head, x, ds, row, own.key, numbers, gradients);
    Factors<M, W> packed;
    if (BODY::EAGER || wants_dv && use.adds_values) pack_all<M, W>(packed, x);
    if (wants_dv && use.adds_values) accumulate<M, W, CE>(dv, packed, dout);
    const bool adds = wants_dk && (BODY::EAGER ? use.adds : __any_sync(~0u, use.adds) != 0);
    if (BODY::EAGER || adds) pack_all<M, W>(packed, ds);
    body.before_keys(packed, dout);
    if (adds) accumulate<M, W, CD>(dk, packed, q);
    body.after_keys(own, head, row, ds, q, dout, own.k);
    if (STAGES == 1 && following < own.count) __syncthreads(), load(following, 0), copy_commit();
  }
  raise_unless_finite<OF_KEYS>(c, own.task.first * c.key_heads + own.key_head, zero, dk, dv);
  if (wants_dk) store_keys<M, CD>(c.dk, own.s, own.key_head, own.key, dk, Same{c.scale}, 0, c.dim);
  if (wants_dv) store_keys<M, CE>(c.dv, own.s, own.key_head, own.key, dv, Same{1}, 0, c.value_dim);
}
