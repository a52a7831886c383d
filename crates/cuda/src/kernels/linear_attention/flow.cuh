// Gradient of the gates of a chunk, (R27), from the terms of either order and of any products:
//
//   dg_t = Σ_{j < t ≤ i} w_ij + Σ_{i ≥ t} x_i + Σ_{j < t} y_j + z
//
// Nothing cancels that need not: sums of rows run from the last one on, of columns from the first.

// w of two micro-chunks in shared memory: 64 rows, PITCH numbers apart.
constexpr int PITCH = 65;

// A block owns a chunk of a key head. `pairs` puts w of two micro-chunks into `w`, for all threads; `states` is z.
template <class P, class Z> DEV void flow_of_chunk(const LinearArgs& c, float* w, const P& pairs, const Z& states, int block) {
  __shared__ float within[CHUNK], rows[MICRO], columns[MICRO], behind[CHUNK], before[CHUNK], whole;
  const int number = block / c.key_heads, key_head = block % c.key_heads, t = threadIdx.x, group = group_of(c);
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
  if (t < MICRO) rows[t] = columns[t] = 0;
  NO_UNROLL for (int row = 0; row < chunk.len; row += MICRO)
    NO_UNROLL for (int key = 0; key <= row; key += MICRO) {
      float sum = 0;
      __syncthreads();
      pairs(c, chunk, gates, key_head, row, key);
      if (key < row) {
        if (t < MICRO) {
          for (int j = 0; j < MICRO; j++) sum += w[PITCH * t + j];
          rows[t] = sum;
        } else if (t < 2 * MICRO) {
          for (int i = 0; i < MICRO; i++) sum += w[PITCH * i + t - MICRO];
          columns[t - MICRO] = sum;
        }
        continue;
      }
      if (t < MICRO)  // of each row, what its first columns have
        for (int j = 0; j < MICRO; j++) {
          float next = w[PITCH * t + j];
          w[PITCH * t + j] = sum;
          sum += next;
        }
      __syncthreads();
      if (t >= MICRO) continue;
      sum = 0;
      for (int i = MICRO - 1; i >= t; i--) sum += w[PITCH * i + t];
      within[row + t] = sum;
    }
  __syncthreads();
  if (t >= chunk.len) return;
  float sum = 0, next = 0;
  if (t < MICRO)
    for (int j = 0; j < t; j++) next += columns[j];
  else
    for (int i = MICRO - 1; i >= t - MICRO; i--) next += rows[i];
  for (int i = chunk.len - 1; i >= t; i--) sum += behind[i];
  next += sum, sum = 0;
  for (int j = 0; j < t; j++) sum += before[j];
  sum = within[t] + next + sum + whole;
  tell(c, !is_finite(sum));
  float& to = c.dg[((i64)chunk.batch * c.key_heads + key_head) * c.tokens + chunk.start + t];
  if (writes(c, sum, to)) to = sum;
}
