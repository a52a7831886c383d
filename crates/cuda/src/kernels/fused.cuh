// The gradient of q in the pass by keys: a block leaves what its 64 keys add to 64 rows in a slot of its own, and `collect`
// adds the slots of a row in the order of the keys. The pass by queries adds the tiles of keys in the same way: the bits are
// equal. Slots hold some tiles of keys at a time, in the memory that the host has for them.
//
// Only where CD and CE are 64: more accumulators would not fit the registers. The other compile-time names are those of portable.cu.

// The number of the block, those of the last rows first: under a causal mask they walk the most tiles.
DEV int last_first() { return gridDim.x - 1 - blockIdx.x; }

// In place of slots, where the gradient of q is not computed.
struct NoSlots {
  static constexpr bool FUSED = false;
  __device__ __forceinline__ bool lacks(int) const { return false; }
};

// Adds what a tile adds: as a whole where slots could hold it.
template <int W, class ADD> DEV void add_tile(float (&sum)[R][W / 16], ADD add) {
#if CD == 64 && CE == 64
  float tile[R][W / 16];
  clear<W>(tile);
  add(tile);
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int e = 0; e < W / 16; e++) sum[r][e] += tile[r][e];
#else
  add(sum);
#endif
}

struct Slots {
  float* at;        // [key tiles, batch, heads, queries, CD]: the tiles of keys first .. end
  float* totals;    // [batch, heads, queries, CD]: the sums of the tiles before; 0 where there are none
  int first, end;
  int last;         // whether there are no tiles behind
  static constexpr bool FUSED = true;
  __device__ __forceinline__ bool lacks(int tile) const { return tile < first || tile >= end; }
};

struct Collected {
  Call c;
  Slots slots;
};

// Where a row of 64 queries begins in a slot.
DEV i64 slot_row(const Call& c, const Sequence& s, int head, int row) {
  return (((i64)s.batch * c.heads + head) * c.queries + s.query_start + row) * CD;
}
DEV i64 slot_size(const Call& c) { return (i64)c.batch * c.heads * c.queries * CD; }

// As `publish`, where the reduction is over the rows of a thread's tile: its index R·y + r lies in row R·y + r.
DEV void publish_across(Shared& shared, const float (&p)[R][4]) {
#pragma unroll
  for (int r = 0; r < R; r++) *(float4*)&shared.p[factors(R * ty() + r) + 4 * tx()] = make_float4(p[r][0], p[r][1], p[r][2], p[r][3]);
}

// Writes what a tile of keys adds to the rows from `row` on.
DEV void leave(const Call& c, const Slots& slots, const Sequence& s, int head, int row, int key_tile, const float (&sum)[R][CD / 16]) {
  float* to = slots.at + (key_tile - slots.first) * slot_size(c) + slot_row(c, s, head, row);
#pragma unroll
  for (int r = 0; r < R; r++)
    if (row + R * ty() + r < s.queries)
      *(float4*)&to[(R * ty() + r) * CD + 4 * tx()] = make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}

#if CD == 64 && CE == 64
// A block owns 16 queries of a head.
extern "C" __global__ void __launch_bounds__(THREADS) collect(const __grid_constant__ Collected a) {
  const Call& c = a.c;
  const int block = last_first() / 4, h = block % c.heads;
  Task task = c.tasks[block / c.heads];
  const Sequence s = c.sequences[task.first];
  const int row = task.row_tile * SIDE + blockIdx.x % 4 * (SIDE / 4);
  Tile tile = c.tiles[s.first_tile + task.row_tile];
  const int begin = max(tile.begin / SIDE, a.slots.first), end = min((tile.end + SIDE - 1) / SIDE, a.slots.end);
  const i64 size = slot_size(c);
  for (int n = threadIdx.x; n < SIDE / 4 * CD / 4; n += THREADS) {
    int r = n / (CD / 4), column = n % (CD / 4) * 4;
    if (row + r >= s.queries) return;
    i64 at = slot_row(c, s, h, row + r) + column;
    float sum[4] = {};
    if (a.slots.first > 0) fetch(sum, a.slots.totals + at);
#pragma unroll 4
    for (int t = begin; t < end; t++) {
      float x[4];
      fetch(x, a.slots.at + (t - a.slots.first) * size + at);
#pragma unroll
      for (int e = 0; e < 4; e++) sum[e] += x[e];
    }
    if (!a.slots.last) {
      *(float4*)&a.slots.totals[at] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      continue;
    }
    element* to = (element*)c.dq.data + s.batch * c.dq.batch + h * c.dq.head + (s.query_start + row + r) * c.dq.row;
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (column + e < c.dim) to[column + e] = rounded(fmaf(c.scale, sum[e], 0.0f));  // no -0, as `store`
  }
}
#endif
