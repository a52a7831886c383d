// attention backward for sm_90a in passes with one writer for each gradient: deterministic without atomics, 7 products
// in place of 5, because scores and dP are computed twice. P and dS are rounded to the storage type; sums are f32.
//
//   delta     lse2 = lse·log2 e (+inf where a row saw nothing or is padding: P = 0), delta = Σ dout ⊙ o − dlse    (B1)
//   keys      a tile is 128 keys of one key head, 64 a warpgroup, and walks the query blocks of all its query heads:
//             Sᵀ = k·qᵀ, dPᵀ = v·doutᵀ, Pᵀ = exp2(c·Sᵀ − lse2), dv += Pᵀ·dout, dSᵀ = Pᵀ ⊙ (dPᵀ − delta), dk += dSᵀ·q
//             Scores are transposed, so Pᵀ and dSᵀ are A operands from registers; q and dout are read both ways from
//             one tile.                                                                                     (B6), (B7)
//   queries   a tile is 128 queries and walks the key blocks: S, dP, dS, dq += dS·k                               (B5)
//   values    dv where dk is not asked for: Sᵀ, Pᵀ, dv += Pᵀ·dout                                                 (B6)
// Of attention_lse dS is P ⊙ dlse (L2), and delta = -dlse: `keys` and `queries` have the loop of `values`.
//
// There are as many blocks as multiprocessors, and they claim tiles from a counter. While two warpgroups multiply, one
// thread loads what they read next, of the next tile too, and another writes the results of the tile before.
//
// A forbidden pair has P = dS = 0, which adds nothing only to finite numbers; else the results are not finite, which
// `keys` and `queries` say in `found`, and `delta` of lse and of its sums: of the pass, and of the group, the key head
// of one sequence. Then the portable kernels compute the pass. `cleanse` puts 0 in the place of what is not finite in
// copies of the operands, these kernels compute all again, and `merge` takes their results: in a group where nothing
// was found all of them, else those where both are finite. What no NaN reaches has the bits that it would have without
// it, and a group has the bits that it has alone, whatever rows of its neighbours lie in a tile of listed sequences.
// Of a group with an infinite operand the portable results are all, but that dv, which may be computed alone without
// them, does not depend on v and delta. All that is enqueued in any case; the kernels read `found` and return at once,
// so that the host need not wait.
//
// A gradient that is not asked for is not computed and changes no bit of the others. dk without dv is `keys` without
// the product of dv: three products. dv without dk and both gradients of attention_lse take two
// (sm90a_backward_weights.cu). These kernels are modules of their own. dv alone reads neither v nor o and has no δ.
//
// Compile-time: STORAGE (1|2), D (64|128), WINDOW (0: every pair; 2: spans), LENGTHS (1: batch elements have extents of their
// own; 2: sequences are listed), OPTIONS (0: no softcap, no bias, a scale above 0), RESULTS (0: `keys` for dk and
// `queries` for dq, of attention_lse; 1: `keys` for dk and dv, `queries` for dq; 2: `keys` for dk alone, `values` for
// dv alone).
constexpr bool LSE = RESULTS == 0;
constexpr int STAGES = 3;  // query blocks in flight in keys
constexpr int OWN = 128;   // rows of a tile
KERNEL_ARGS(BackwardArgs)
constexpr u32 ALWAYS = ~0u;
constexpr int FIRST_GROUP = 3;
// Of a group: a number is not finite; v or delta is infinite, of which dv knows nothing; what all results are computed of is.
constexpr u32 STRANGE = 1, BESIDE_DV = 2, INFINITE = 3;
// A number of the group of a key head is not finite. `number`: of the sequence.
DEV void tell(const BackwardArgs& c, int number, int key_head) {
  if (c.when == ALWAYS) *c.found = 1, c.found[FIRST_GROUP + number * c.shape.key_heads + key_head] = STRANGE;
}
// Rows of lse2 and delta: of every head, or of listed sequences tile after tile.
DEV i64 stat_rows(const Shape& s) { return (PACKED ? 1ll : s.batch) * s.heads * s.padded; }
DEV i64 stat_row(const Own& s, int head) { return (i64)(PACKED ? head : s.batch * s.heads + head) * s.padded + s.tile * 64; }
// Of listed sequences the number in place of the batch element, and the place in the list.
struct Work { int block, head, batch, task; };
// Those of listed sequences are the host's tasks: block 2n of 64 rows, and the next; an odd one is none.
template <bool WARP> DEV Work packed_work(int t, const Task* tasks, int count, bool by_keys, int heads) {
  Task task = tasks[by_keys ? t / heads : count - 1 - t / heads];
  auto uniform = [](int x) { return WARP ? __shfl_sync(~0u, x, 0) : x; };
  int tile = uniform(by_keys ? task.key_tile : task.row_tile);
  return {tile % 2 ? -1 : tile / 2, t % heads, uniform(task.first), t / heads};
}
DEV Work work(int t, int blocks, int heads, int heads_per_group, const Shape& s) {  // by groups of heads that share the L2
  int all = s.batch * heads, g = t / (heads_per_group * blocks), r = t - g * heads_per_group * blocks;
  int width = min(heads_per_group, all - g * heads_per_group), b = r / width, h = g * heads_per_group + r - b * width;
  return {b, h % heads, h / heads};
}

// Of a tile that owns keys, or queries: the blocks of the others from `begin` to before `end` see some of it; from `open` to
// before `closed` they see all, and others need a mask. A tile that ends with its sequence, and not with the arrays, `is_cut`:
// threads write its rows.
struct Range { int begin, open, closed, end; };
struct ByKeys {
  template <bool WARP> DEV Work work_of(int t, const BackwardArgs& c) {  // the first key blocks see most queries
    if (PACKED) return packed_work<WARP>(t, c.packed.by_keys, c.packed.key_tasks, true, c.shape.key_heads);
    return work(t, (c.shape.keys + OWN - 1) / OWN, c.shape.key_heads, c.shape.heads_per_group, c.shape);
  }
  DEV bool is_cut(const Work& w, const Own& s) { return PACKED && w.block * OWN + OWN > s.keys; }
  template <int ROWS> DEV Range blocks(const SpanTables& t, const Work& w, const Own& s) {  // of so many queries
    if (SPANS) {  // which of these see some or all of it, the producer says
      const Span own = query_blocks<ROWS / 64>(t, s, w.block, w.task);
      return {own.begin, own.begin, own.end, own.end};
    }
    int block = w.block;
    int begin = 0, open = 0, closed = (s.queries + ROWS - 1) / ROWS, end = closed;
    if (WINDOW) {
      int first = block * OWN - s.offset, last = first + OWN - 1;
      end = min(end, (max(0, last + s.left + 1) + ROWS - 1) / ROWS);
      begin = min(end, max(0, first - s.right) / ROWS);
      open = min(end, max(begin, (max(0, last - s.right) + ROWS - 1) / ROWS));
      closed = min(end, max(open, max(0, first + s.left + 1) / ROWS));
      if (PACKED) closed = max(open, min(closed, s.queries / ROWS));  // the next sequence's rows are hidden
    }
    return {begin, open, closed, end};
  }
};
struct ByQueries {
  DEV int tiles(const BackwardArgs& c) { return (c.shape.queries + OWN - 1) / OWN; }
  template <bool WARP> DEV Work work_of(int t, const BackwardArgs& c) {
    const Shape& s = c.shape;
    if (PACKED) return packed_work<WARP>(t, c.packed.by_queries, c.packed.tasks, false, s.heads);
    Work w = work(t, tiles(c), s.heads, s.heads_per_group * (s.heads / s.key_heads), s);
    if (WINDOW) w.block = tiles(c) - 1 - w.block;  // the last query blocks see most keys
    return w;
  }
  DEV bool is_cut(const Work& w, const Own& s) { return PACKED && w.block * OWN + OWN > s.queries; }
  template <int KEYS> DEV Range blocks(const SpanTables& t, const Work& w, const Own& s) {  // of so many keys
    if (SPANS) {
      const Blocks own = key_blocks<OWN / 64, KEYS>(t, s, w.block);
      return {own.begin, own.closed, own.open, own.end};
    }
    int block = w.block, begin = 0, open = 0, closed = s.keys / KEYS, n = (s.keys + KEYS - 1) / KEYS;
    if (WINDOW) {
      int first = block * OWN + s.offset, last = min((block + 1) * OWN, s.queries) - 1 + s.offset;
      int from = max(0, first - s.left), end = min(s.keys, last + s.right + 1);
      if (end <= from) end = from = 0;
      begin = from / KEYS, n = (end + KEYS - 1) / KEYS;
      closed = min(n, max(begin, min(s.keys, max(0, first + s.right + 1)) / KEYS));
      open = min(closed, max(begin, (max(0, last - s.left) + KEYS - 1) / KEYS));
    }
    return {begin, open, closed, n};
  }
};
#if OPTIONS
#define UNIT call.options.unit.natural
// From a product S over the unit (F2) and its slope S' (B4).
DEV void extend(float& x, float& slope, const ScoreOptions& o, float bias) {
  slope = 1;
  if (o.cap != 0) {
    float t = tanh_of(x, o);
    x = __fmul_rn(o.cap, t), slope = fmaf(-t, t, 1.0f);
  } else if (o.unit.scale != 1) {
    x = __fmul_rn(o.unit.scale, x);
  }
  if (o.bias.data) add_bias(x, bias, o.unit);
}
#else
#define UNIT s.scale
#endif
// Rows of this warpgroup (64×D accumulators, scaled) to the panels of a tile of 128 rows.
DEV void stage_out(const float (&d)[D / 2], u32 to, float scale) {
  int warp = threadIdx.x / 32 % 4, lane = lane_id();
#pragma unroll
  for (int j = 0; j < D / 16; j++) {
    int piece = 2 * j + lane / 16;
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = pack(d[8 * j + 2 * i] * scale, d[8 * j + 2 * i + 1] * scale);
    store_blocks(to + piece / 8 * (128 * 128) + swizzled(warp * 16 + lane % 16, piece % 8), x[0], x[1], x[2], x[3]);
  }
}
// Whether the numbers of a thread's accumulators are finite in the rows that are there.
DEV bool is_finite(const float (&d)[D / 2], int row, int rows) {
  float zero[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < D / 2; i++) zero[i / 2 % 2] = fmaf(d[i], 0.0f, zero[i / 2 % 2]);  // NaN
  return (row >= rows || zero[0] == 0) && (row + 8 >= rows || zero[1] == 0);
}
template <int N, int A_ROWS, int B_ROWS> DEV void issue_shared(float (&s)[N / 2], u32 a, u32 b) {  // s = a·bᵀ over D
#pragma unroll
  for (int i = 0; i < D / 16; i++)
    Mma<N>::template ss<K_MAJOR, K_MAJOR>(s, k_major(a + (i / 4) * A_ROWS * 128 + (i % 4) * 32), k_major(b + (i / 4) * B_ROWS * 128 + (i % 4) * 32), i > 0);
}
template <int N> DEV void issue_registers(float (&d)[D / 2], const u32 (&a)[N / 4], u32 b, int add) {  // d (+)= a·b, b: N rows
#pragma unroll
  for (int i = 0; i < N / 16; i++) Mma<D>::rs<MN_MAJOR>(d, a + 4 * i, mn_major(b + i * 2048, N * 128), i > 0 ? 1 : add);
}

// Blocks draw tiles from a counter, those that see most first; no tile depends on another. The first draw is the block's number.
DEV int draw(const BackwardArgs& c) {
  int drawn = atomicAdd(c.counter, 1u);
  if (drawn + 1 == c.tiles) *c.counter = 0;  // each block draws once too often: this is the last draw
  return drawn + gridDim.x;
}
// The same number, from which the compiler computes nothing beforehand: what it would keep over a loop does not fit the registers.
template <class T> DEV T hidden(T x) {
  asm volatile("" : "+r"(x));
  return x;
}
DEV void put_tile(u32 at, int t) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(t) : "memory"); }
template <bool WARP> DEV int tile_at(u32 at) {
  int t;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(t) : "r"(at) : "memory");
  return WARP ? __shfl_sync(~0u, t, 0) : t;
}
