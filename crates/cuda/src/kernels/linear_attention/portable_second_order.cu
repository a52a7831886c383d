// The second order of linear_attention: each kernel of portable.cu for what it computes and its tangent. Q = σ q has
// the tangent σ ddq + ddσ q, which is never written: with s = y·b and its tangent s' = y1·b + y·b1, (R29) is
//
//   A_ij = P_ij σ s,   Ȧ_ij = P_ij ((σ β_ij + ddσ) s + σ s')
//
//   tangent_sums    of each chunk by itself  (R30), (R31)
//   scan_second     from chunk to chunk, the states with their tangents  (R30), (R31)
//   attend_second   gdout, gq, gk or gv of a micro-chunk  (R32)–(R35)
//   flow_second     gg of a chunk
//
// Compile-time: as portable.cu.

// As `sums`, of the tangent: y1 and x1 are the tangents of the factors.
KERNEL(tangent_sums, LinearArgs c, THREADS) {
  __shared__ Shared shared;
  const int pieces = (c.dim + SIDE - 1) / SIDE, row = blockIdx.x % pieces * SIDE;
  const int key_head = blockIdx.x / pieces % c.key_heads, number = blockIdx.x / pieces / c.key_heads;
  const Chunk chunk = c.chunks[number];
  const Gates gates(c, c.gates, chunk, key_head), slopes(c, c.slopes, chunk, key_head);
  const int many = c.back ? group_of(c) : 1;
  const float ddscale = c.back ? ddscale_of(c) : 0;
  const bool bends = slopes.at || ddscale != 0;
  Sums<CW> sum;
  clear<CW>(sum);
  NO_UNROLL for (int h = key_head * many; h < (key_head + 1) * many; h++)
    NO_UNROLL for (int t = 0; t < chunk.len; t += SIDE) {
      const Rows left = chunk_rows(c.y, chunk, h, t), left1 = tangent_rows(c.y1, left, chunk, h, t);
      auto tangent = [&](float (&p)[4], int token, int column, int width) {
        float weight = gates.reach(t + token, !c.back), x[4], x1[4];
        if (weight == 0) return;
        float bend = fmaf(c.scale, slopes.reach_tangent(t + token, !c.back), ddscale);
        read_four(x, left, token, column, width), read_four(x1, left1, token, column, width);
        UNROLL(e, 4) {
          float y = c.scale * x1[e];
          p[e] = shown(weight * (bends ? fmaf(bend, x[e], y) : y));
        }
      };
      if (bends || c.y1.data) {
        __syncthreads();
        publish_tokens(shared, t, chunk.len, row, c.dim, tangent);
        accumulate<CW>(shared, sum, chunk_rows(c.x, chunk, h, t), c.first, c.value_dim);
      }
      if (c.x1.data) add_tokens(c, shared, sum, gates, chunk, left, chunk_rows(c.x1, chunk, h, t), t, row);
    }
  store_state(c.states1 + state_at(c, number, key_head), c, row, sum);
}

// As `scan`.
KERNEL(scan_second, LinearArgs c, 256) {
  const int elements = c.dim * c.value_dim, pieces = (elements + 255) / 256;
  const int at = blockIdx.x % pieces * 256 + threadIdx.x, slot = blockIdx.x / pieces;
  const int key_head = slot % c.key_heads, sequence = slot / c.key_heads;
  if (at >= elements) return;
  const Line line = c.lines[sequence];
  const int d = at / c.value_dim, e = at % c.value_dim;
  auto place = [&](const Tensor& x) { return (float*)x.data + sequence * x.batch + key_head * x.head + d * x.row + e; };
  float state = c.begin.data ? *place(c.begin) : 0, tangent = c.begin1.data ? *place(c.begin1) : 0;
  UNROLL_BY(4) for (int n = 0; n < line.chunks; n++) {
    int number = line.first + (c.back ? line.chunks - 1 - n : n);
    const Chunk chunk = c.chunks[number];
    const i64 to = state_at(c, number, key_head) + at;
    float sum = c.states[to], sum1 = c.states1[to];
    c.states[to] = state, c.states1[to] = tangent;
    float decay = Gates(c, c.gates, chunk, key_head).reach(chunk.len - 1, 0);
    float slope = Gates(c, c.slopes, chunk, key_head).reach_tangent(chunk.len - 1, 0);
    if (decay != 0) {
      if (c.slopes) tangent = fmaf(slope, state, tangent);
      sum1 = fmaf(decay, tangent, sum1), sum = fmaf(decay, state, sum);
    }
    state = sum, tangent = sum1;
  }
  if (c.end1.data) *place(c.end1) = tangent;
}

// The tangent of what y contributes through a state, without its reach: a y·S + y1·S + y·S1, with σ and ddσ.
DEV void read_states(const LinearArgs& c, Shared& shared, Sums<CW>& sum, const Rows& y, const Rows& y1, const float (&bend)[R], bool bends, i64 at) {
  const float *state = c.states + at, *state1 = c.states1 + at;
  if (c.turned) {
    UNROLL(i, CW / 64) {
      int column = c.first + 64 * i;
      if (column >= c.outer) break;
      i64 from = (i64)column * c.inner;
      RowsOf<float> s{state + from, c.inner, c.outer - column}, s1{state1 + from, c.inner, c.outer - column};
      Pairs value = {}, moved = {};
      add_products_moved<true, true>(shared, value, moved, y, y1, s, s1, c.inner);
      UNROLL2(r, R, e, 4) {
        float x = c.state_scale * moved[r][e];
        sum[r][4 * i + e] = bends ? fmaf(bend[r], value[r][e], x) : x;
      }
    }
    return;
  }
  if (bends) add_state(c, shared, sum, y, state, 1), mul_rows(sum, bend);
  if (c.y1.data) add_state(c, shared, sum, y1, state, c.state_scale);
  add_state(c, shared, sum, y, state1, c.state_scale);
}

// The weights of a tile of pairs: those of x, and in `side` those of x1.
DEV void weigh(const LinearArgs& c, Pairs& p, Pairs& side, const Gates& gates, const Gates& slopes, float ddscale, int own, int other, int len) {
  UNROLL2(r, R, e, 4) {
    int m = own + R * ty() + r, n = other + 4 * tx() + e;
    int i = c.back ? n : m, j = c.back ? m : n;
    float decay = j <= i && i < len ? gates.decay(j, i) : 0, s = p[r][e], tangent = c.scale * side[r][e];
    p[r][e] = side[r][e] = HIDE;
    if (decay == 0) continue;
    if (slopes.at || ddscale != 0) tangent = fmaf(fmaf(c.scale, slopes.tangent(j, i), ddscale), s, tangent);
    p[r][e] = shown(decay * tangent), side[r][e] = shown(c.scale * (decay * s));  // (R29)
  }
}

KERNEL(attend_second, LinearArgs c, THREADS) {
  __shared__ Shared shared;
  const int heads = c.back ? c.key_heads : c.heads, head = blockIdx.x % heads, group = group_of(c);
  const int key_head = c.back ? head : head / group;
  const Strip strip = c.strips[blockIdx.x / heads];
  const Chunk chunk = c.chunks[strip.chunk];
  const Gates gates(c, c.gates, chunk, key_head), slopes(c, c.slopes, chunk, key_head);
  const Rows y = chunk_rows(c.y, chunk, head, strip.row), y1 = tangent_rows(c.y1, y, chunk, head, strip.row);
  const float ddscale = ddscale_of(c);
  Sums<CW> sum;
  float number[R], bend[R], reach[R];
  clear<CW>(sum);
  UNROLL(r, R) {
    int i = strip.row + R * ty() + r;
    bool inside = i < chunk.len;
    bend[r] = fmaf(c.state_scale, inside ? slopes.reach_tangent(i, c.back) : 0, c.back ? 0 : ddscale);
    reach[r] = inside ? gates.reach(i, c.back) : 0;
  }
  const bool bends = slopes.at || (!c.back && ddscale != 0);
  read_states(c, shared, sum, y, y1, bend, bends, state_at(c, strip.chunk, key_head));
  UNROLL2(r, R, e, CW / 16) sum[r][e] = reach[r] == 0 ? 0 : sum[r][e] * reach[r];
  if (c.state_dots) {
    dot_rows<CW>(number, sum, chunk_rows(c.dot, chunk, head, strip.row), c.first, c.outer);
    UNROLL(r, R)
      if (reach[r] == 0) number[r] = 0;
    put_dots(c, c.state_dots, chunk, heads, head, strip.row, number, c.dot_scale);
  }
  const int many = c.x.data ? c.back ? group : 1 : 0;
  const int begin = c.back ? strip.row : 0, end = c.back ? chunk.len : strip.row + 1;
  NO_UNROLL for (int n = 0; n < many; n++)
    NO_UNROLL for (int row = begin; row < end; row += SIDE) {
      const int h = c.back ? key_head * group + n : key_head;
      const Rows b = chunk_rows(c.b, chunk, h, row), b1 = tangent_rows(c.b1, b, chunk, h, row);
      Pairs p = {}, side = {};
      add_products_moved<true, true>(shared, p, side, y, y1, b, b1, c.inner);
      weigh(c, p, side, gates, slopes, ddscale, strip.row, row, chunk.len);
      publish(shared, p);
      accumulate<CW>(shared, sum, chunk_rows(c.x, chunk, h, row), c.first, c.outer);
      __syncthreads();
      if (!c.x1.data) continue;
      publish(shared, side);
      accumulate<CW>(shared, sum, chunk_rows(c.x1, chunk, h, row), c.first, c.outer);
      __syncthreads();
    }
  if (c.dots) {
    dot_rows<CW>(number, sum, chunk_rows(c.dot, chunk, head, strip.row), c.first, c.outer);
    put_dots(c, c.dots, chunk, heads, head, strip.row, number, 1);
  }
  if (c.out.data) store<CW>(c.out, chunk.batch, head, chunk.start + strip.row, chunk.len - strip.row, sum, Same{1}, c.first, c.outer);
}

// The tangents of w: P_ij (Ȧ_ij / P_ij (u_i·v_j) + σ q_i·k_j (u̇_i·v_j + u_i·v̇_j)).
DEV void tangents_of_pairs(const LinearArgs& c, Shared& shared, const Chunk& chunk, const Gates& gates, int key_head, int row, int key) {
  const int group = group_of(c);
  const Gates slopes(c, c.slopes, chunk, key_head);
  const float ddscale = ddscale_of(c);
  Pairs w = {};
  const Rows k = chunk_rows(c.k, chunk, key_head, key), k1 = tangent_rows(c.k1, k, chunk, key_head, key);
  const Rows v = chunk_rows(c.v, chunk, key_head, key), v1 = tangent_rows(c.v1, v, chunk, key_head, key);
  NO_UNROLL for (int h = key_head * group; h < (key_head + 1) * group; h++) {
    const Rows q = chunk_rows(c.q, chunk, h, row), q1 = tangent_rows(c.q1, q, chunk, h, row);
    const Rows u = chunk_rows(c.dout, chunk, h, row), u1 = tangent_rows(c.dout1, u, chunk, h, row);
    Pairs s = {}, s1 = {}, x = {}, x1 = {};
    add_products_moved<true, true>(shared, s, s1, q, q1, k, k1, c.dim);
    add_products_moved<true, true>(shared, x, x1, u, u1, v, v1, c.value_dim);
    UNROLL2(r, R, e, 4) {
      int i = row + R * ty() + r, j = key + 4 * tx() + e;
      float decay = j <= i && i < chunk.len ? gates.decay(j, i) : 0, tangent = c.scale * s1[r][e];
      if (decay == 0) continue;
      if (slopes.at || ddscale != 0) tangent = fmaf(fmaf(c.scale, slopes.tangent(j, i), ddscale), s[r][e], tangent);
      w[r][e] += decay * fmaf(tangent, x[r][e], c.scale * s[r][e] * x1[r][e]);
    }
  }
  show_flow(shared.p, w);
}

// The tangent of z.
DEV float tangent_of_states(const LinearArgs& c, const Chunk& chunk, const Gates& gates, int number, int key_head) {
  const float decay = gates.reach(chunk.len - 1, 0), slope = Gates(c, c.slopes, chunk, key_head).reach_tangent(chunk.len - 1, 0);
  const i64 at = state_at(c, number, key_head);
  float sum = 0;
  if (decay != 0)
    for (int i = threadIdx.x; i < c.dim * c.value_dim; i += THREADS) {
      float s = c.states[at + i], d = c.other[at + i];
      sum = fmaf(c.states1[at + i], d, fmaf(s, c.other1[at + i], sum));
      if (c.slopes) sum = fmaf(slope * s, d, sum);
    }
  return decay == 0 ? 0 : decay * block_sum<THREADS>(sum);
}

KERNEL(flow_second, LinearArgs c, THREADS) {
  __shared__ Shared shared;
  auto pairs = [&](const LinearArgs& c, const Chunk& chunk, const Gates& gates, int key_head, int row, int key) {
    tangents_of_pairs(c, shared, chunk, gates, key_head, row, key);
  };
  flow_of_chunk(c, shared.p, pairs, tangent_of_states, blockIdx.x);
}
