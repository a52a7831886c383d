// Adds the slots of a row in the order of the keys: `partials.cuh`. FUSES: whether the kernels before leave such.
#if FUSES
// A block owns 16 queries of a head.
KERNEL(collect, FusedArgs a, THREADS) {
  const PairArgs& c = a.c;
  const int block = last_first() / 4, h = block % c.heads, columns = slot_columns(c);
  Task task = c.tasks[block / c.heads];
  const Sequence s = c.sequences[task.first];
  const int row = task.row_tile * SIDE + blockIdx.x % 4 * (SIDE / 4);
  Tile tile = c.tiles[s.first_tile + task.row_tile];
  const int begin = max(tile.begin / SIDE, a.slots.first), end = min((tile.end + SIDE - 1) / SIDE, a.slots.end);
  const i64 size = slot_size(c);
  for (int n = threadIdx.x; n < SIDE / 4 * (columns / 4); n += THREADS) {
    int r = n / (columns / 4), column = n % (columns / 4) * 4;
    if (row + r >= s.queries) return;
    i64 at = slot_row(c, s, h, row + r) + column;
    float4 sum = make_float4(0, 0, 0, 0);
    if (a.slots.first > 0) sum = *(const float4*)(a.slots.totals + at);
    UNROLL_BY(4) for (int t = begin; t < end; t++) {
      float4 x = *(const float4*)(a.slots.at + (t - a.slots.first) * size + at);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    if (!a.slots.last) {
      *(float4*)&a.slots.totals[at] = sum;
      continue;
    }
    const float all[4] = {sum.x, sum.y, sum.z, sum.w};
    if (c.flags && !(sum.x * 0 + sum.y * 0 + sum.z * 0 + sum.w * 0 == 0))  // of tensor cores
      raise<OF_PARTIALS>(c.flags, task.first * c.key_heads + h / (c.heads / c.key_heads));
    element* to = (element*)c.dq.data + s.batch * c.dq.batch + h * c.dq.head + (s.query_start + row + r) * c.dq.row;
    UNROLL(e, 4)
      if (column + e < c.dim) to[column + e] = rounded(fmaf(c.scale, all[e], 0.0f));  // no -0, as `store`
  }
}
#endif
