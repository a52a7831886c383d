// Numbers of rows for the backward pass of sm_90a, and what follows where a number is not finite.

// ---- delta -----------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(256) delta(const __grid_constant__ Call c) {
  const Shape& s = c.shape;
  i64 t = blockIdx.x * 256ll + threadIdx.x, row = t / (D / 8);
  int piece = t % (D / 8);
  if (row >= stat_rows(s)) return;
  i64 head = row / s.padded;
  i64 batch = PACKED ? 0 : head / s.heads, h = head - batch * s.heads;
  int i = row % s.padded, end = s.queries;
  if (PACKED) {  // tiles of the sequences follow each other
    Task task = c.packed.by_queries[min(i / 64, c.packed.tasks - 1)];
    Sequence own = c.packed.sequences[task.first];
    end = i / 64 < c.packed.tasks ? own.query_start + own.queries : 0;
    i = own.query_start + task.row_tile * 64 + i % 64, batch = own.batch;
  }
  float sum = 0;
  if (i < end && c.o.data) {
    uint4 a = c.o.data[batch * c.o.batch + h * c.o.head + i * c.o.row + piece];
    uint4 b = c.dout_rows.data[batch * c.dout_rows.batch + h * c.dout_rows.head + i * c.dout_rows.row + piece];
    auto dot = [](u32 x, u32 y) { float2 p = unpack(x), q = unpack(y); return p.x * q.x + p.y * q.y; };
    sum = (dot(a.x, b.x) + dot(a.y, b.y)) + (dot(a.z, b.z) + dot(a.w, b.w));
  }
#pragma unroll
  for (int n = D / 16; n; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
  if (piece == 0) {
    int length = LENGTHS == 1 ? s.lengths[batch].x : end;
    i64 at = (batch * s.heads + h) * s.queries + i;
    float x = i < length ? c.lse[at] : -INF;
    if (c.dlse && i < length) sum -= c.dlse[at];
    if (x != -INF && !(fabsf(x) + fabsf(sum) < INF)) *c.found = 1;
    c.lse2[row] = x == -INF ? INF : x * LOG2E;
    c.delta[row] = x == -INF ? 0 : sum;
  }
}

// ---- what is not finite ------------------------------------------------------------------------------------------------
struct Cleansed {  // an operand, and a dense copy of it, which may be itself
  Pieces from;
  uint4* to;
  int heads, rows;
  u64 pieces;
};
struct Merged {  // a result of whole columns, computed without NaN, and the tensor that has that of the portable kernels
  const u16* from;
  Elements to;  // data 0: it is not wanted
  int heads, rows, columns;
  u64 elements;
};
struct Mend {
  Cleansed operands[4];
  Merged results[3];
  float *lse2, *delta;
  i64 stats;
  u32* found;
};
constexpr u32 TOP = STORAGE == 1 ? 0x7f80 : 0x7c00;  // the exponent of infinities and NaN

// 0 for NaN. A row whose scores are NaN weighs nothing; one whose delta is NaN keeps its weights.
extern "C" __global__ void __launch_bounds__(256) cleanse(const __grid_constant__ Mend m) {
  if (!*m.found) return;
  const u64 first = blockIdx.x * 256ull + threadIdx.x, step = gridDim.x * 256ull;
  bool infinite = false;
  auto clean = [&](u32 x) {
    infinite |= (x & 0x7fff) == TOP || (x >> 16 & 0x7fff) == TOP;
    return x & (((x & 0x7fff) > TOP ? 0 : 0xffff) | ((x >> 16 & 0x7fff) > TOP ? 0 : 0xffff0000));
  };
#pragma unroll 1
  for (int n = 0; n < 4; n++) {
    const Cleansed& c = m.operands[n];
#pragma unroll 1
    for (u64 i = first; i < c.pieces; i += step) {
      const u64 line = i / (D / 8), head = line / c.rows;
      uint4 x = c.from.data[head / c.heads * c.from.batch + head % c.heads * c.from.head + line % c.rows * c.from.row + i % (D / 8)];
      c.to[i] = make_uint4(clean(x.x), clean(x.y), clean(x.z), clean(x.w));
    }
  }
#pragma unroll 1
  for (i64 i = first; i < m.stats; i += step) {
    float l = m.lse2[i], x = m.delta[i];
    if (isnan(l)) m.lse2[i] = INF;
    if (isnan(x)) m.delta[i] = 0;
    infinite |= l == -INF || fabsf(x) == INF;
  }
  if (infinite) *m.found = 3;
}

// Results that were computed without NaN, where both are finite.
extern "C" __global__ void __launch_bounds__(256) merge(const __grid_constant__ Mend m) {
  if (*m.found != 1) return;
#pragma unroll 1
  for (int n = 0; n < 3; n++) {
    const Merged& r = m.results[n];
#pragma unroll 1
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; r.to.data && i < r.elements; i += gridDim.x * 256ull) {
      const u64 line = i / r.columns, head = line / r.rows;
      u16& x = r.to.at(head / r.heads, head % r.heads, line % r.rows)[i % r.columns];
      const u16 y = r.from[line * D + i % r.columns];
      if ((x & 0x7fff) < TOP && (y & 0x7fff) < TOP) x = y;
    }
  }
}
