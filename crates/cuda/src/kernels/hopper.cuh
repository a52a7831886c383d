// Shared by the kernels of compute capability 9.0: the problem as the host describes it to them, and what scores are
// made of beside products.
constexpr bool PACKED = LENGTHS == 2;
constexpr float LN2 = 0.6931471805599453f, LARGEST = 3.402823466e38f;

struct Shape {
  int batch, heads, key_heads, queries, keys;
  int left, right, offset;  // query i sees the keys i + offset - left .. i + offset + right
  float scale;              // above 0 in the forward pass without OPTIONS
  int heads_per_group;      // (batch × head)s whose k and v share the L2 at a time
  int padded, bottom;       // rows of lse2 and delta of a head; bottom: the last query of a sequence is aligned with its last key
  const int2* lengths;      // queries and keys of each batch element; with LENGTHS 1 alone
};
struct Task { int first, sequences, row_tile, key_tile; };  // a sequence, and tiles of 64 rows or keys of it
struct Sequence { int batch, query_start, queries, key_start, keys, first_tile; };
struct Packed {  // sequences in a list: packed ones, and those of batch elements; with LENGTHS 2 alone
  const Sequence* sequences;
  const Task *by_queries, *by_keys;
  int tasks, key_tasks;
};
// The extents of a sequence, and where it begins. `tile`: the first of its tiles of 64 queries.
struct Own : Shape {
  int batch, query_start, key_start, tile;
};
// Of a batch element, or of a listed sequence. In a whole warp the compiler is told that they are uniform.
template <bool WARP> DEV Own of_batch(const Shape& shape, const Packed& packed, int number) {
  Own s = {shape, number, 0, 0, 0};
  auto uniform = [](int x) { return WARP ? __shfl_sync(~0u, x, 0) : x; };
  if (PACKED) {
    Sequence own = packed.sequences[number];
    s.batch = uniform(own.batch), s.queries = uniform(own.queries), s.keys = uniform(own.keys);
    s.query_start = uniform(own.query_start), s.key_start = uniform(own.key_start), s.tile = uniform(own.first_tile);
  } else if (LENGTHS) {
    int2 n = shape.lengths[number];
    s.queries = uniform(n.x), s.keys = uniform(n.y);
  }
  if (LENGTHS) s.offset = shape.bottom ? s.keys - s.queries : 0;
  return s;
}

// ---- elements by their addresses -----------------------------------------------------------------------------------------
struct Elements {  // [batch, head, row, column]: strides in elements; data is 0 where there is none
  u16* data;
  i64 batch_stride, head_stride, row_stride;
  __device__ __forceinline__ u16* at(int batch, int head, int row) const {
    return data + batch * batch_stride + head * head_stride + row * row_stride;
  }
  // Whether two columns lie at a multiple of 4 bytes in every row, if they do in this one.
  __device__ __forceinline__ bool has_pairs(const u16* row) const { return ((u64)row | (u64)(2 * row_stride)) % 4 == 0; }
};
// The rows of a thread's accumulators within their sequence, those of a tensor of whole columns.
DEV void store_rows(const Elements& to, int batch, int head, int start, int row, int rows, const float (&x)[D / 2], float scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (row + 8 * r >= rows) continue;
    u32* at = (u32*)(to.at(batch, head, start + row + 8 * r) + 2 * (lane_id() & 3));
#pragma unroll
    for (int j = 0; j < D / 8; j++) at[4 * j] = pack(x[4 * j + 2 * r] * scale, x[4 * j + 2 * r + 1] * scale);
  }
}

// ---- scores ----------------------------------------------------------------------------------------------------------
// A score is kept over a unit, the scale where that is above 0 and of usual size: then, where softcap and bias say nothing, it
// is the product of query and key, and has the bits that it has without OPTIONS.
struct Unit { float scale, over, natural; };  // of products; 1/unit; the unit
struct Options {
  Elements bias;  // [batch, head, query, key]
  Unit unit;
  float cap, inverse_cap, factor;  // softcap over the unit, 0: none; 1/softcap; the scale
};
DEV float tanh_of(float product, const Options& o) { return tanh_fast(__fmul_rn(__fmul_rn(o.factor, product), o.inverse_cap)); }
// Two numbers side by side, of which `count` are there.
DEV float2 load_bias(const u16* at, bool pairs, int count) {
  if (pairs && count > 1) return unpack(*(const u32*)at);
  return unpack((count > 0 ? at[0] : 0) | (count > 1 ? (u32)at[1] << 16 : 0));
}
DEV void add_bias(float& score, float bias, const Unit& unit) {
  float x = __fadd_rn(score, __fmul_rn(bias, unit.over));
  if (fabsf(x) == INF && fabsf(bias) < INF && fabsf(score) < INF) x = copysignf(LARGEST, x);
  score = x;
}
