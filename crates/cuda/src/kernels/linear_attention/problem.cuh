// linear_attention: the problem as the host describes it, and decays within a chunk, for the kernels of both orders.
//
// A sequence is cut into chunks of 128 tokens, a chunk into two micro-chunks of 64, a tile each. Pairs of tokens of
// one chunk are computed tile by tile and forgotten; what is before or behind a chunk comes through a state. Places i,
// j and t count from the begin of a chunk.

constexpr int CHUNK = 128, MICRO = 64, LEVELS = 7;

// Every gradient is o of another problem (the closure of R4–R6): out_i = Σ_j w_ij x_j + reach_i y_i·state, with w_ij =
// P_ij (y_i·b_j). x1, y1, b1, states1 are tangents, of the second order alone. Fields: linear_attention/args.rs.
KERNEL_ARGS(LinearArgs)

// Numbers that are not finite, where tensor cores compute a pass: 0·inf is NaN, in a state as in a pair. The kernels
// say whether a result is not finite (mode 0). Then they compute all results again, with 0 for such operands
// (CLEANSE), and the portable kernels write theirs over those that are not finite, or where their own are not (MERGE):
// what no NaN reaches keeps its bits, and what overflows in f16 alone is right. AFRESH: what is written is no result,
// and nobody has written it yet. All of it is always enqueued and exits where nothing was found;
// `Options.assume_finite` leaves it out.
enum { CLEANSE = 1, MERGE = 2, AFRESH = 3 };
DEV bool idle(const LinearArgs& c) { return c.mode && !*c.found; }
DEV bool writes(const LinearArgs& c, float x, const float& old) { return c.mode != MERGE || !is_finite(x) || !is_finite(old); }
DEV void tell(const LinearArgs& c, bool odd) {
  if (odd && c.found && !c.mode) *c.found = 1;
}

// Does the work of all blocks, if there is any: a launch that mostly has nothing to do has at most 256.
template <class F> DEV void each_block(const LinearArgs& c, const F& compute) {
  if (idle(c)) return;
  NO_UNROLL for (int block = blockIdx.x; block < c.blocks; block += gridDim.x) {
    compute(block);
    __syncthreads();
  }
}

DEV int group_of(const LinearArgs& c) { return c.heads / c.key_heads; }
DEV float ddscale_of(const LinearArgs& c) { return c.ddscale ? *c.ddscale : 0; }
DEV i64 state_at(const LinearArgs& c, int chunk, int key_head) { return ((i64)chunk * c.key_heads + key_head) * c.dim * c.value_dim; }

// The rows of a head from `row` of a chunk on; none of a tensor that is not there.
DEV Rows chunk_rows(const Tensor& x, const Chunk& chunk, int head, int row) {
  return rows_of(x, chunk.batch, head, chunk.start + row, chunk.start + chunk.len);
}
DEV Rows tangent_rows(const Tensor& x, const Rows& otherwise, const Chunk& chunk, int head, int row) {
  return x.data ? chunk_rows(x, chunk, head, row) : Rows{otherwise.at, otherwise.stride, 0};
}

// ---- decays (R20) ----
// Sums of the log-decays (to base 2), or of their tangents, of one key head in one chunk. Level n has, for each token
// t, the sum from the begin of its block of 2ⁿ tokens to t where the block is an odd one, and from behind t to its end
// where it is even. The log-decay between j and i is the sum of two of them, of the level at which their blocks meet.
// Nothing is subtracted: a decay is as exact behind a gate of −10³⁰ as elsewhere. Plane 7 has α, of tangents a; plane
// 8 has ω, of tangents b.
struct Gates {
  const float* at;
  i64 plane;
  METHOD Gates(const LinearArgs& c, const float* tables, const Chunk& chunk, int key_head)
      : at(tables ? tables + ((i64)chunk.batch * c.key_heads + key_head) * c.tokens + chunk.start : 0),
        plane((i64)c.batch * c.key_heads * c.tokens) {}
  METHOD float between(int j, int i) const {  // j < i
    i64 level = (31 - __clz(i ^ j)) * plane;
    return at[level + i] + at[level + j];
  }
  METHOD float decay(int j, int i) const { return !at || i == j ? 1 : exp2_fast(between(j, i)); }  // P_ij
  METHOD float tangent(int j, int i) const { return !at || i == j ? 0 : between(j, i); }           // β_ij
  METHOD float reach(int t, int back) const { return at ? at[(LEVELS + back) * plane + t] : 1; }
  METHOD float reach_tangent(int t, int back) const { return at ? at[(LEVELS + back) * plane + t] : 0; }
};
