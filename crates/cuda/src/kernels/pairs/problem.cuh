// The problem as the host describes it to the levels portable and sm80, and which pairs of a tile are visible.
//
// The host gives a range of keys for each row and for each tile. Masks whose rows are no ranges (segments, arrays,
// `or`) come with a flag for each pair besides: B·N·M bytes, times Hq if the masks of the heads differ.
KERNEL_ARGS(Tensor)
KERNEL_ARGS(PairArgs)

// The order of blocks: all heads of a tile, where the mask is causal that with most keys first.
struct Place { int task, head; };
DEV Place tile_of_block(int heads) {
  int tasks = gridDim.x / heads;
  return {tasks - 1 - (int)blockIdx.x / heads, (int)blockIdx.x % heads};
}

// The keys that M tiles of queries see, from that of a task on.
template <int M> DEV Tile seen_tile(const PairArgs& c, const Sequence& s, const Task& task) {
  const Tile tile = c.tiles[s.first_tile + task.row_tile];
  return M == 2 && (task.row_tile + 1) * 64 < s.queries ? both(tile, c.tiles[s.first_tile + task.row_tile + 1]) : tile;
}

// Calls add(load(at)) for rows of a head that see something, of all batch elements in their order: a thread has each
// STEP-th. `at`: the place of a row in arrays of rows. Loads of 16 rows are in flight together.
template <int STEP, class L, class A> DEV void each_row_of_head(const PairArgs& c, int head, const L& load, const A& add) {
  constexpr int AHEAD = 16;
  for (int batch = 0; batch < c.batch; batch++) {
    const i64 at = ((i64)batch * c.heads + head) * c.queries;
    const Span* spans = c.spans + (i64)batch * c.queries;
    NO_UNROLL for (i64 first = threadIdx.x; first < c.queries; first += AHEAD * STEP) {
      decltype(load(at)) x[AHEAD];
      bool sees[AHEAD];
      UNROLL(j, AHEAD) sees[j] = first + j * STEP < c.queries && spans[first + j * STEP].begin >= 0;
      UNROLL(j, AHEAD) if (sees[j]) x[j] = load(at + first + j * STEP);
      UNROLL(j, AHEAD) if (sees[j]) add(x[j]);
    }
  }
}

// Rows of a tensor: `count` of them, the others read as 0.
template <class T> struct RowsOf {
  const T* at;
  i64 stride;
  int count;
};
using Rows = RowsOf<element>;
DEV Rows rows_of(const Tensor& x, int batch, int head, int row, int end) {
  return {(const element*)x.data + batch * x.batch + head * x.head + row * x.row, x.row, end - row};
}

// One head of one sequence, with what its scores are made of.
struct Head {
  const PairArgs& c;
  Sequence s;
  int head, key_head;
  const element* bias;
  const u8* allowed;
  const float* lse;
  const float* delta;
  const Span* spans;
  float inverse_cap;

  METHOD Head(const PairArgs& call, const Sequence& sequence, int h) : c(call), s(sequence), head(h) {
    key_head = h / (c.heads / c.key_heads);
    i64 row = ((i64)s.batch * c.heads + h) * c.queries + s.query_start;
    bias = c.bias.data ? (const element*)c.bias.data + s.batch * c.bias.batch + h * c.bias.head + s.query_start * c.bias.row + s.key_start : 0;
    allowed = c.allowed ? c.allowed + s.batch * c.allowed_batch + h * c.allowed_head + (i64)s.query_start * c.keys + s.key_start : 0;
    lse = c.lse + row;
    delta = c.delta ? c.delta + row : 0;
    spans = c.spans + (i64)s.batch * c.queries + s.query_start;
    inverse_cap = 1 / c.cap;
  }
  METHOD Span span(int i) const { return i < s.queries ? spans[i] : Span{0, 0}; }

  // From the product of a query and a key: S (F2), its slope S', and whether the pair is visible. The roundings are
  // written out: the compiler would contract them in one variant and not in another.
  METHOD bool score(float product, int i, int j, Span span, float& score, float& slope) const {
    float curvature;
    return this->score(product, i, j, span, score, slope, curvature);
  }
  // With S'' besides.
  METHOD bool score(float product, int i, int j, Span span, float& score, float& slope, float& curvature) const {
    if (j < span.begin || j >= span.end) return false;
    float x = __fmul_rn(c.scale, product);  // (F1)
    slope = 1, curvature = 0;
#if OPTIONS
    if (allowed && !allowed[(i64)i * c.keys + j]) return false;
    if (c.cap != 0) {
      float t = tanh_fast(__fmul_rn(x, inverse_cap));
      x = __fmul_rn(c.cap, t), slope = fmaf(-t, t, 1.0f), curvature = -2 * inverse_cap * t * slope;
    }
    if (bias) x = __fadd_rn(x, read(bias[i * c.bias.row + j]));
#endif
    score = x;
    return x != -INF;
  }
};
DEV float lse_of(const Head& head, int i) { return i < head.s.queries ? head.lse[i] : 0; }
DEV float delta_of(const Head& head, int i) { return !head.delta ? -1 : i < head.s.queries ? head.delta[i] : 0; }
