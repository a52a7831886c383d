// What passes the gates of a chunk, (R27), from the terms of either order:
//
//   dg_t = Σ_{j < t ≤ i} w_ij + Σ_{i ≥ t} x_i + Σ_{j < t} y_j + z
//
// Nothing cancels that need not: sums of rows from the last one on, of columns from the first.

// w of two micro-chunks in shared memory, rows 65 numbers apart.
DEV float& flow_at(Shared& shared, int i, int j) { return shared.p[i * (SIDE + 1) + j]; }
DEV void show_flow(Shared& shared, const float (&w)[R][4]) {
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int e = 0; e < 4; e++) flow_at(shared, R * ty() + r, 4 * tx() + e) = w[r][e];
}

// A block owns a chunk of a key head. `pairs` and `states` compute w and z.
template <class P, class Z> DEV void flow_of_chunk(const Linear& c, const P& pairs, const Z& states) {
  __shared__ Shared shared;
  __shared__ float within[CHUNK], rows[SIDE], columns[SIDE], behind[CHUNK], before[CHUNK], whole;
  const int number = blockIdx.x / c.key_heads, key_head = blockIdx.x % c.key_heads, t = threadIdx.x, group = group_of(c);
  const Chunk chunk = c.chunks[number];
  const Gates gates(c, c.gates, chunk, key_head);
  float z = states(c, chunk, gates, number, key_head);
  if (t == 0) whole = z;
  if (t < chunk.len) {
    float x = 0;
    for (int h = key_head * group; h < (key_head + 1) * group; h++)
      x += c.x_dots[((i64)chunk.batch * c.heads + h) * c.tokens + chunk.start + t];
    behind[t] = x;
    before[t] = c.y_dots[((i64)chunk.batch * c.key_heads + key_head) * c.tokens + chunk.start + t];
  }
  if (t < SIDE) rows[t] = columns[t] = 0;
#pragma unroll 1
  for (int row = 0; row < chunk.len; row += SIDE)
#pragma unroll 1
    for (int key = 0; key <= row; key += SIDE) {
      float w[R][4] = {}, sum = 0;
      pairs(c, shared, w, chunk, gates, key_head, row, key);
      __syncthreads();
      show_flow(shared, w);
      __syncthreads();
      if (key < row) {
        if (t < SIDE) {
          for (int j = 0; j < SIDE; j++) sum += flow_at(shared, t, j);
          rows[t] = sum;
        } else if (t < 2 * SIDE) {
          for (int i = 0; i < SIDE; i++) sum += flow_at(shared, i, t - SIDE);
          columns[t - SIDE] = sum;
        }
        continue;
      }
      if (t < SIDE)  // of each row, what its first columns have
        for (int j = 0; j < SIDE; j++) {
          float next = flow_at(shared, t, j);
          flow_at(shared, t, j) = sum;
          sum += next;
        }
      __syncthreads();
      if (t >= SIDE) continue;
      sum = 0;
      for (int i = SIDE - 1; i >= t; i--) sum += flow_at(shared, i, t);
      within[row + t] = sum;
    }
  __syncthreads();
  if (t >= chunk.len) return;
  float sum = 0, next = 0;
  if (t < SIDE)
    for (int j = 0; j < t; j++) next += columns[j];
  else
    for (int i = SIDE - 1; i >= t - SIDE; i--) next += rows[i];
  for (int i = chunk.len - 1; i >= t; i--) sum += behind[i];
  next += sum, sum = 0;
  for (int j = 0; j < t; j++) sum += before[j];
  c.dg[((i64)chunk.batch * c.key_heads + key_head) * c.tokens + chunk.start + t] = within[t] + next + sum + whole;
}
