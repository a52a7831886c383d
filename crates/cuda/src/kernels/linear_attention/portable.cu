// linear_attention on any GPU from sm_80 on, in f32 arithmetic whatever the storage. Each result has one writer and
// sums in a fixed order; chunks begin where their sequence begins, so that bits depend on one sequence and one key
// head alone.
//
//   fill_gates  sums of log-decays within a chunk  (R20)
//   sums        of each chunk by itself: Σ_j ω_j k_jᵀ v_j, or σ Σ_i α_i q_iᵀ dout_i over a group  (R22), (R28)
//   scan        from chunk to chunk: the sums become the states before them, or those behind  (R22), (R28)
//   attend      o, dq, dk or dv of a micro-chunk, with x_i or y_j of (R27)  (R21), (R24)–(R26)
//   mend_sums, mend   sums and attend behind kernels on tensor cores, which rarely leave them anything (problem.cuh)
//   flow        dg of a chunk  (R27)
//   sum_all, sum_heads   dσ (R9) and dg_gamma from numbers of tokens
//   step        one token  (R1), (R2)
//
// Every gradient is o of another problem (docs/linear_attention.md, Closure): `attend` computes o, dq, dk and dv. Each
// kernel is one launch over all chunks of all sequences. Only `scan` goes along a sequence, and it adds one number to
// another: one long sequence of one head occupies the device. States are kept for all chunks in f32, 4·D·E/128 bytes a
// token and key head: S, and backward D; none is computed again.
//
// A decay of 0 leaves out what it multiplies: the pair has the weight −0, as in attention, and a state that
// does not reach a token is not added. dg sums (R27) over the pairs of a chunk without a difference; dg_gamma and dσ
// are summed over tokens in f64.
//
// Compile-time: R; STORAGE; CW, the columns that a block accumulates: 64, 128 or 256.

// A block owns a chunk of a key head, a thread a token. Blocks of a level are joined to those of the next.
DEV void gates_of(const LinearArgs& c, int block) {
  __shared__ double sums[CHUNK];
  const Chunk chunk = c.chunks[block / c.key_heads];
  const int key_head = block % c.key_heads, t = threadIdx.x;
  const i64 plane = (i64)c.batch * c.key_heads * c.tokens;
  const i64 at = ((i64)chunk.batch * c.key_heads + key_head) * c.tokens + chunk.start + t;
  for (int tangents = 0; tangents < 2; tangents++) {
    const float* from = tangents ? c.log_tangents : c.logs;
    float* to = tangents ? c.slopes : c.gates;
    if (!to) continue;
    const double unit = tangents ? 1 : 1.4426950408889634;
    // From the begin of the token's block to it, and from behind it to the end of its block.
    double until = t < chunk.len ? from[c.by_head ? key_head : at] : 0, after = 0;
    for (int level = 0; level < LEVELS; level++) {
      const bool odd = t >> level & 1;
      if (t < chunk.len) to[level * plane + at] = (float)((odd ? until : after) * unit);
      __syncthreads();
      sums[t] = until;
      __syncthreads();
      const double other = sums[((t >> level ^ 1) << level) + (1 << level) - 1];
      (odd ? until : after) += other;
    }
    if (t >= chunk.len) continue;
    float begin = (float)(until * unit), end = (float)(after * unit);
    to[LEVELS * plane + at] = tangents ? begin : exp2_fast(begin);
    to[(LEVELS + 1) * plane + at] = tangents ? end : exp2_fast(end);
  }
}

// A block owns 64 rows of the state of a chunk and a key head: y are the left factors, x the right ones.
DEV void sums_of(const LinearArgs& c, Shared& shared, u32 block) {
  const int pieces = (c.dim + SIDE - 1) / SIDE, row = block % pieces * SIDE;
  const int key_head = block / pieces % c.key_heads, number = block / pieces / c.key_heads;
  const Chunk chunk = c.chunks[number];
  const Gates gates(c, c.gates, chunk, key_head);
  const int many = c.back ? group_of(c) : 1;
  Sums<CW> sum;
  clear<CW>(sum);
  NO_UNROLL for (int h = key_head * many; h < (key_head + 1) * many; h++)
    NO_UNROLL for (int t = 0; t < chunk.len; t += SIDE)
      add_tokens(c, shared, sum, gates, chunk, chunk_rows(c.y, chunk, h, t), chunk_rows(c.x, chunk, h, t), t, row);
  store_state(c.states + state_at(c, number, key_head), c, row, sum);
}

// A thread owns an element of the states of a sequence and a key head.
DEV void scan_of(const LinearArgs& c, int block) {
  constexpr int AHEAD = 8;
  const int elements = c.dim * c.value_dim, pieces = (elements + 255) / 256;
  const int at = block % pieces * 256 + threadIdx.x, slot = block / pieces;
  const int key_head = slot % c.key_heads, sequence = slot / c.key_heads;
  if (at >= elements) return;
  const Line line = c.lines[sequence];
  const int d = at / c.value_dim, e = at % c.value_dim;
  auto place = [&](const Tensor& x) { return (float*)x.data + sequence * x.batch + key_head * x.head + d * x.row + e; };
  float state = c.begin.data ? *place(c.begin) : 0;
  for (int n = 0; n < line.chunks; n += AHEAD) {
    float sum[AHEAD], decay[AHEAD];
    float* to[AHEAD];
    UNROLL(i, AHEAD) {
      if (n + i >= line.chunks) break;
      int number = line.first + (c.back ? line.chunks - 1 - n - i : n + i);
      const Chunk chunk = c.chunks[number];
      to[i] = c.states + state_at(c, number, key_head) + at;
      sum[i] = *to[i];
      decay[i] = Gates(c, c.gates, chunk, key_head).reach(chunk.len - 1, 0);
    }
    UNROLL(i, AHEAD) {
      if (n + i >= line.chunks) break;
      if (c.narrow) c.narrow[to[i] - c.states] = rounded(state);
      else *to[i] = state;
      state = decay[i] == 0 ? sum[i] : fmaf(decay[i], state, sum[i]);
    }
  }
  if (c.end.data && writes(c, state, *place(c.end))) *place(c.end) = state;
}

// Adds y·S.
DEV void read_state(const LinearArgs& c, Shared& shared, Sums<CW>& sum, const Rows& y, const float* state) {
  if (c.turned) {
    UNROLL(i, CW / 64) {
      int column = c.first + 64 * i;
      if (column >= c.outer) break;
      Pairs part;
      products(shared, part, y, RowsOf<float>{state + (i64)column * c.inner, c.inner, c.outer - column}, c.inner);
      UNROLL2(r, R, e, 4) sum[r][4 * i + e] = part[r][e];
    }
    return;
  }
  add_state(c, shared, sum, y, state, 1);
}

DEV void attend_of(const LinearArgs& c, Shared& shared, u32 block) {
  const int heads = c.back ? c.key_heads : c.heads, head = block % heads, group = group_of(c);
  const int key_head = c.back ? head : head / group;
  const Strip strip = c.strips[block / heads];
  const Chunk chunk = c.chunks[strip.chunk];
  const Gates gates(c, c.gates, chunk, key_head);
  const Rows y = chunk_rows(c.y, chunk, head, strip.row);
  const bool blank = c.blank && chunk.ends & (c.back ? 2 : 1);
  Sums<CW> sum;
  float number[R];
  clear<CW>(sum);
  if (!blank) {
    read_state(c, shared, sum, y, c.states + state_at(c, strip.chunk, key_head));
    UNROLL(r, R) {
      int i = strip.row + R * ty() + r;
      float reach = i < chunk.len ? gates.reach(i, c.back) : 0;
      UNROLL(e, CW / 16) sum[r][e] = reach == 0 ? 0 : sum[r][e] * (reach * c.state_scale);
    }
  }
  if (c.state_dots) {
    dot_rows<CW>(number, sum, chunk_rows(c.dot, chunk, head, strip.row), c.first, c.outer);
    UNROLL(r, R)
      if (blank || gates.reach(min(strip.row + R * ty() + r, chunk.len - 1), c.back) == 0) number[r] = 0;
    put_dots(c, c.state_dots, chunk, heads, head, strip.row, number, c.dot_scale);
  }
  const int many = c.x.data ? c.back ? group : 1 : 0;
  const int begin = c.back ? strip.row : 0, end = c.back ? chunk.len : strip.row + 1;
  NO_UNROLL for (int n = 0; n < many; n++)
    NO_UNROLL for (int row = begin; row < end; row += SIDE) {
      const int h = c.back ? key_head * group + n : key_head;
      Pairs p;
      products(shared, p, y, chunk_rows(c.b, chunk, h, row), c.inner);
      UNROLL2(r, R, e, 4) {
        int own = strip.row + R * ty() + r, other = row + 4 * tx() + e;
        int i = c.back ? other : own, j = c.back ? own : other;
        float decay = j <= i && i < chunk.len ? gates.decay(j, i) : 0;
        p[r][e] = decay == 0 ? HIDE : shown(c.scale * (decay * p[r][e]));  // (R23)
      }
      publish(shared, p);
      accumulate<CW>(shared, sum, chunk_rows(c.x, chunk, h, row), c.first, c.outer);
      __syncthreads();
    }
  if (c.dots) {
    dot_rows<CW>(number, sum, chunk_rows(c.dot, chunk, head, strip.row), c.first, c.outer);
    put_dots(c, c.dots, chunk, heads, head, strip.row, number, 1);
  }
  if (c.out.data)
    put<CW>(c, c.out, chunk.batch, head, chunk.start + strip.row, chunk.len - strip.row, sum, c.store_scale, c.first, c.outer);
}

// w_ij of the pairs of two micro-chunks, summed over the query heads of a group.
DEV void flow_of_pairs(const LinearArgs& c, Shared& shared, const Chunk& chunk, const Gates& gates, int key_head, int row, int key) {
  const int group = group_of(c);
  Pairs w = {};
  NO_UNROLL for (int h = key_head * group; h < (key_head + 1) * group; h++) {
    Pairs a, b;
    products(shared, a, chunk_rows(c.q, chunk, h, row), chunk_rows(c.k, chunk, key_head, key), c.dim);
    products(shared, b, chunk_rows(c.dout, chunk, h, row), chunk_rows(c.v, chunk, key_head, key), c.value_dim);
    UNROLL2(r, R, e, 4) {
      int i = row + R * ty() + r, j = key + 4 * tx() + e;
      float decay = j <= i && i < chunk.len ? gates.decay(j, i) : 0;
      if (decay != 0) w[r][e] = fmaf(c.scale * (decay * a[r][e]), b[r][e], w[r][e]);
    }
  }
  show_flow(shared.p, w);
}

// z: what passes a whole chunk.
DEV float flow_of_states(const LinearArgs& c, const Chunk& chunk, const Gates& gates, int number, int key_head) {
  const float decay = gates.reach(chunk.len - 1, 0);
  const i64 at = state_at(c, number, key_head);
  float sum = 0;
  if (decay != 0)
    for (int i = threadIdx.x; i < c.dim * c.value_dim; i += THREADS) sum = fmaf(c.states[at + i], c.other[at + i], sum);
  return decay == 0 ? 0 : decay * block_sum<THREADS>(sum);
}

KERNEL(flow, LinearArgs c, THREADS) {
  __shared__ Shared shared;
  auto pairs = [&](const LinearArgs& c, const Chunk& chunk, const Gates& gates, int key_head, int row, int key) {
    flow_of_pairs(c, shared, chunk, gates, key_head, row, key);
  };
  each_block(c, [&](int block) { flow_of_chunk(c, shared.p, pairs, flow_of_states, block); });
}

KERNEL(sums, LinearArgs c, THREADS) {
  __shared__ Shared shared;
  sums_of(c, shared, blockIdx.x);
}
KERNEL(attend, LinearArgs c, THREADS, R == 8 ? 3 : 1) {
  __shared__ Shared shared;
  attend_of(c, shared, blockIdx.x);
}

// The same behind kernels on tensor cores.
#if STORAGE
KERNEL(mend_sums, LinearArgs c, THREADS) {
  __shared__ Shared shared;
  each_block(c, [&](int block) { sums_of(c, shared, block); });
}
KERNEL(mend, LinearArgs c, THREADS) {
  __shared__ Shared shared;
  each_block(c, [&](int block) { attend_of(c, shared, block); });
}
#endif
KERNEL(fill_gates, LinearArgs c, CHUNK) {
  each_block(c, [&](int block) { gates_of(c, block); });
}
KERNEL(scan, LinearArgs c, 256) {
  each_block(c, [&](int block) { scan_of(c, block); });
}
