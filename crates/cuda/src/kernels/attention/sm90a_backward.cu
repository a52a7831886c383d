// ---- delta ----
// Most numbers of rows fit 32 bits, in which a division takes a tenth of the time.
DEV i64 quotient(i64 x, int y) { return x >> 32 ? x / y : (u32)x / (u32)y; }
KERNEL(delta, BackwardArgs c, 256) {
  const Shape& s = c.shape;
  constexpr int PIECES = LSE ? 1 : E / 8;  // of 16 bytes in a row of o and dout, which a thread each reads
  i64 t = blockIdx.x * 256ll + threadIdx.x, row = t / PIECES;
  int piece = t % PIECES;
  if (row >= stat_rows(s)) return;
  i64 head = quotient(row, s.padded);
  i64 batch = PACKED ? 0 : quotient(head, s.heads), h = head - batch * s.heads;
  int i = row - head * s.padded, end = s.queries;
  if (PACKED) {  // tiles of the sequences follow each other
    Task task = c.packed.by_queries[min(i / 64, c.packed.tasks - 1)];
    Sequence own = c.packed.sequences[task.first];
    end = i / 64 < c.packed.tasks ? own.query_start + own.queries : 0;
    i = own.query_start + task.row_tile * 64 + i % 64, batch = own.batch;
  }
  float sum = 0;
  bool any = false;  // of o is not 0
  if (i < end && c.o.data) {
    uint4 a = c.o.data[batch * c.o.batch + h * c.o.head + i * c.o.row + piece];
    uint4 b = c.dout_rows.data[batch * c.dout_rows.batch + h * c.dout_rows.head + i * c.dout_rows.row + piece];
    auto dot = [](u32 x, u32 y) { float2 p = unpack(x), q = unpack(y); return p.x * q.x + p.y * q.y; };
    sum = (dot(a.x, b.x) + dot(a.y, b.y)) + (dot(a.z, b.z) + dot(a.w, b.w));
    any = ((a.x | a.y | a.z | a.w) & 0x7fff7fff) != 0;
  }
  UNROLL_ALL for (int n = PIECES / 2; n; n /= 2)
    sum += __shfl_xor_sync(~0u, sum, n), any |= __shfl_xor_sync(~0u, any, n);
  if (piece == 0) {
    const bool there = i < (LENGTHS == 1 ? s.lengths[batch].x : end);
    const i64 at = (batch * s.heads + h) * s.queries + i;
    const float x = there ? c.lse[at] : -INF;
    // Of a row that saw nothing o is 0, whatever its operands are, and dout is not read.
    if (!any && (x == -INF || c.sinks && x == c.sinks[h])) sum = 0;
    if (c.dlse && there) sum -= c.dlse[at];
    if (c.delta_rows && there) c.delta_rows[at] = sum;
    c.lse2[row] = x == -INF ? INF : x * LOG2E;
    c.delta[row] = x == -INF ? 0 : sum;
  }
}
