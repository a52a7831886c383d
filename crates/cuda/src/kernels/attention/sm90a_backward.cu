// Numbers of rows for the backward pass of sm_90a, and what follows where a number is not finite.

// ---- delta -----------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(256) delta(const __grid_constant__ BackwardArgs c) {
  const Shape& s = c.shape;
  i64 t = blockIdx.x * 256ll + threadIdx.x, row = t / (D / 8);
  int piece = t % (D / 8);
  if (row >= stat_rows(s)) return;
  i64 head = row / s.padded;
  i64 batch = PACKED ? 0 : head / s.heads, h = head - batch * s.heads;
  int i = row % s.padded, end = s.queries, number = batch;
  if (PACKED) {  // tiles of the sequences follow each other
    Task task = c.packed.by_queries[min(i / 64, c.packed.tasks - 1)];
    number = task.first;
    Sequence own = c.packed.sequences[number];
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
    if (x != -INF && !(fabsf(x) + fabsf(sum) < INF)) tell(c, number, h / (s.heads / s.key_heads));
    c.lse2[row] = x == -INF ? INF : x * LOG2E;
    c.delta[row] = x == -INF ? 0 : sum;
  }
}

// ---- what is not finite ------------------------------------------------------------------------------------------------
KERNEL_ARGS(MendArgs)
constexpr int OPERAND_V = 2, RESULT_DV = 2;  // the number of v among the operands, and of dv among the results
constexpr u32 TOP = STORAGE == 1 ? 0x7f80 : 0x7c00;  // the exponent of infinities and NaN

// The group of a row of an operand or a result; -1 where it belongs to no sequence.
DEV int group_of(const MendArgs& m, bool by_keys, int batch, int head, int row) {
  const Shape& s = m.shape;
  int number = batch, end = by_keys ? s.keys : s.queries;
  if (PACKED) {
    auto start = [&](const Sequence& x) { return by_keys ? x.key_start : x.query_start; };
    number = last_where(m.sequences, [&](int n) {
      const Sequence& x = m.packed.sequences[n];
      return x.batch < batch || x.batch == batch && start(x) <= row;
    });
    if (number < 0) return -1;
    const Sequence& own = m.packed.sequences[number];
    end = own.batch < batch ? 0 : start(own) + (by_keys ? own.keys : own.queries);
  } else if (LENGTHS) {
    end = by_keys ? s.lengths[batch].y : s.lengths[batch].x;
  }
  return row < end ? number * s.key_heads + (by_keys ? head : head / (s.heads / s.key_heads)) : -1;
}
// That of a row of lse2 and delta.
DEV int group_of_stats(const MendArgs& m, i64 row) {
  const Shape& s = m.shape;
  int head = row / s.padded, number = head / s.heads, tile = row % s.padded / 64;
  if (PACKED) number = tile < m.packed.tasks ? m.packed.by_queries[tile].first : -1;
  return number < 0 ? -1 : number * s.key_heads + head % s.heads / (s.heads / s.key_heads);
}
// An operand of a group is infinite, `what` says of which results. Where nothing was found of these, nobody sees that operand.
DEV void tell_infinite(const MendArgs& m, int group, u32 what) {
  u32& found = m.found[FIRST_GROUP + group];
  if (found) atomicMax(&found, what);
}
DEV bool is_infinite(u32 x) { return (x & 0x7fff) == TOP || (x >> 16 & 0x7fff) == TOP; }
DEV u32 finite(u32 x) { return x & (((x & 0x7fff) >= TOP ? 0 : 0xffff) | ((x >> 16 & 0x7fff) >= TOP ? 0 : 0xffff0000)); }

// 0 for what is not finite: a tile of listed sequences also holds rows of their neighbours, and of no sequence. A row whose scores are NaN
// weighs nothing; one whose delta is NaN keeps its weights.
extern "C" __global__ void __launch_bounds__(256) cleanse(const __grid_constant__ MendArgs m) {
  if (!*m.found) return;
  const u64 first = blockIdx.x * 256ull + threadIdx.x, step = gridDim.x * 256ull;
#pragma unroll 1
  for (int n = 0; n < 4; n++) {
    const Cleansed& c = m.operands[n];
#pragma unroll 1
    for (u64 i = first; i < c.pieces; i += step) {
      const u64 line = i / (D / 8), head = line / c.rows;
      const int batch = head / c.heads, h = head % c.heads, row = line % c.rows;
      const uint4 x = c.from.data[batch * c.from.batch + h * c.from.head + row * c.from.row + i % (D / 8)];
      c.to[i] = make_uint4(finite(x.x), finite(x.y), finite(x.z), finite(x.w));
      if (is_infinite(x.x) || is_infinite(x.y) || is_infinite(x.z) || is_infinite(x.w)) {
        const int group = group_of(m, c.by_keys, batch, h, row);
        if (group >= 0) tell_infinite(m, group, n == OPERAND_V ? BESIDE_DV : INFINITE);
      }
    }
  }
#pragma unroll 1
  for (i64 i = first; i < m.stats; i += step) {
    float l = m.lse2[i], x = m.delta[i];
    if (isnan(l)) m.lse2[i] = INF;
    if (isnan(x)) m.delta[i] = 0;
    if (l == -INF || fabsf(x) == INF) {
      const int group = group_of_stats(m, i);
      if (group >= 0) tell_infinite(m, group, l == -INF ? INFINITE : BESIDE_DV);
    }
  }
}

// Results that were computed of finite numbers: in a group where nothing was found all, else where both are finite.
extern "C" __global__ void __launch_bounds__(256) merge(const __grid_constant__ MendArgs m) {
  if (!*m.found) return;
#pragma unroll 1
  for (int n = 0; n < 3; n++) {
    const Merged& r = m.results[n];
#pragma unroll 1
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; r.to.data && i < r.elements; i += gridDim.x * 256ull) {
      const u64 line = i / r.columns, head = line / r.rows;
      const int batch = head / r.heads, h = head % r.heads, row = line % r.rows;
      const int group = group_of(m, r.by_keys, batch, h, row);
      const u32 found = group < 0 ? STRANGE : m.found[FIRST_GROUP + group];
      u16& x = row_of(r.to, batch, h, row)[i % r.columns];
      const u16 y = r.from[line * D + i % r.columns];
      if (found == 0 || found < (n == RESULT_DV ? INFINITE : BESIDE_DV) && (x & 0x7fff) < TOP && (y & 0x7fff) < TOP) x = y;
    }
  }
}
