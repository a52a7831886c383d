// The first order of linear_attention for 16-bit operands on the tensor cores of any GPU from sm_80 on: the blocks of
// portable.cu, with P_ij (y_i·b_j), weighted rows and the states rounded to the storage type before they are
// multiplied.
//
//   sums     a block owns the state of a chunk and a key head  (R22), (R28)
//   attend   a block owns a micro-chunk of a head: o, dq, dk or dv  (R21), (R24)–(R26)
//   flow     a block owns a chunk of a key head: dg  (R27)
//
// Each product is rounded twice on its way (N23): weights (R23), rows that are weighted before they are added to a
// state, and S and D where they are read. `scan` writes S and D in the storage type; sums, `scan` itself and dg stay
// in f32. Numbers that are not finite: problem.cuh.
//
// Compile-time: STORAGE (1|2); WHOLE, see `load_tile`; KW and CW, the columns of y and b, and of x and out: 64 or 128.
// For `sums` and `flow` they are those of D and E.
constexpr u32 Y_BYTES = SIDE * KW * 2, X_BYTES = SIDE * CW * 2, STATE_BYTES = KW * CW * 2;
constexpr u32 STAGE_BYTES = Y_BYTES + X_BYTES > STATE_BYTES ? Y_BYTES + X_BYTES : STATE_BYTES;

// ---- states ----
CHECK_SHARED(sums, 2 * (Y_BYTES + X_BYTES));  // the left and right factors of a chunk
// A warp has 16·M rows of the state.
KERNEL(sums, LinearArgs c, THREADS) {
  if (idle(c)) return;
  constexpr int M = KW / 64;
  const u32 at_left = shared_begin(), at_right = at_left + 2 * Y_BYTES;
  const int key_head = blockIdx.x % c.key_heads, number = blockIdx.x / c.key_heads, lane = lane_id();
  const Chunk chunk = c.chunks[number];
  const Gates gates(c, c.gates, chunk, key_head);
  const int many = c.back ? group_of(c) : 1;
  Sums<M, CW> sum;
  clear<M, CW>(sum);
  NO_UNROLL for (int h = key_head * many; h < (key_head + 1) * many; h++) {
    __syncthreads();
    load_tile<CHUNK, KW>(at_left, chunk_rows(c.y, chunk, h, 0), c.dim);
    load_tile<CHUNK, CW>(at_right, chunk_rows(c.x, chunk, h, 0), c.value_dim);
    copy_commit(), copy_wait<0>();
    __syncthreads();
    if (c.mode == CLEANSE) {
      clear_odd<CHUNK, KW>(at_left), clear_odd<CHUNK, CW>(at_right);
      __syncthreads();
    }
    UNROLL(i, CHUNK / 16) {
      u32 a[M][4];
      UNROLL(m, M) {
        const int piece = (warp_id() * M + m) * 2 + lane / 8 % 2;
        load_blocks_transposed(place<CHUNK>(at_left, 16 * i + lane / 16 * 8 + lane % 8, piece), a[m]);
      }
      if (c.gates) {
        UNROLL(half, 2) {
          const int t = 16 * i + 8 * half + 2 * (lane % 4);
          float even = t < chunk.len ? gates.reach(t, !c.back) : 0, odd = t + 1 < chunk.len ? gates.reach(t + 1, !c.back) : 0;
          UNROLL2(m, M, r, 2) {
            u32& x = a[m][2 * half + r];
            x = pack(even == 0 ? 0 : even * read((element)x), odd == 0 ? 0 : odd * read((element)(x >> 16)));
          }
        }
      }
      UNROLL(j, CW / 16) {
        u32 y[4];
        load_blocks_transposed(place<CHUNK>(at_right, 16 * i + lane / 8 % 2 * 8 + lane % 8, 2 * j + lane / 16), y);
        UNROLL(m, M) multiply(sum[m][2 * j], a[m], y[0], y[1]), multiply(sum[m][2 * j + 1], a[m], y[2], y[3]);
      }
    }
  }
  float* to = c.states + state_at(c, number, key_head);
  bool odd = false;
  UNROLL2(r, 2 * M, j, CW / 8)
    UNROLL(e, 2) {
      int d = row_of<M>(r), column = 8 * j + 2 * (lane % 4) + e;
      float x = c.scale * sum[r / 2][j][2 * (r & 1) + e];
      if (d >= c.dim || column >= c.value_dim) continue;
      to[(i64)d * c.value_dim + column] = x, odd |= !is_finite(x);
    }
  tell(c, odd);
}

// ---- results ----
// P_ij (y_i·b_j) of two micro-chunks from products, 0 where a pair is not seen. DIAGONAL: of the same one.
template <bool DIAGONAL, class D> DEV void weigh(Pairs<1, SIDE>& p, int own, int other, int len, bool back, float scale, const D& decay) {
  UNROLL2(r, 2, j, SIDE / 8)
    UNROLL(e, 2) {
      float& x = p[0][j][2 * r + e];
      int m = own + row_of<1>(r), n = other + 8 * j + own_column() + e;
      int i = back ? n : m, j1 = back ? m : n;
      float weight = (!DIAGONAL || j1 <= i) && i < len ? decay(j1, i) : 0;
      x = weight == 0 ? 0 : scale * (weight * x);  // (R23)
    }
}
// With the decays of a problem: none, a power for each head, sums of tokens.
DEV void weigh_all(const LinearArgs& c, const Gates& gates, float log, Pairs<1, SIDE>& p, int own, int other, int len, bool back, float scale) {
  auto one = [](int, int) { return 1.0f; };
  auto power = [&](int j, int i) { return i == j ? 1 : exp2_fast(log * (i - j)); };
  auto table = [&](int j, int i) { return gates.decay(j, i); };
  if (own == other) {
    if (!c.gates) weigh<true>(p, own, other, len, back, scale, one);
    else if (c.by_head) weigh<true>(p, own, other, len, back, scale, power);
    else weigh<true>(p, own, other, len, back, scale, table);
    return;
  }
  if (!c.gates) weigh<false>(p, own, other, len, back, scale, one);
  else if (c.by_head) weigh<false>(p, own, other, len, back, scale, power);
  else weigh<false>(p, own, other, len, back, scale, table);
}
DEV float log_of(const LinearArgs& c, int key_head) { return c.gates && c.by_head ? c.logs[key_head] * LOG2E : 0; }

// sum += y·S: y a tile of 64 rows, S one of KW rows.
DEV void add_state(Sums<1, CW>& sum, u32 y, u32 state) {
  const int lane = lane_id();
  UNROLL(i, KW / 16) {
    u32 a[4];
    load_blocks(place<SIDE>(y, warp_id() * 16 + lane % 16, 2 * i + lane / 16), a);
    UNROLL(j, CW / 16) {
      u32 b[4];
      load_blocks_transposed(place<KW>(state, 16 * i + lane / 8 % 2 * 8 + lane % 8, 2 * j + lane / 16), b);
      multiply(sum[0][2 * j], a, b[0], b[1]), multiply(sum[0][2 * j + 1], a, b[2], b[3]);
    }
  }
}

DEV void load_state(const LinearArgs& c, u32 to, int chunk, int key_head) {
  const element* state = c.narrow + state_at(c, chunk, key_head);
  if (c.turned) load_tile<CW, KW>(to, Rows{state, c.inner, c.outer}, c.inner);
  else load_tile<KW, CW>(to, Rows{state, c.outer, c.inner}, c.outer);
}
// sum = y·S, each row decayed from the begin of its chunk or to its end; `absent`: the row sees nothing of S.
DEV void add_decayed_state(const LinearArgs& c, const Gates& gates, Sums<1, CW>& sum, bool (&absent)[2], u32 y, u32 state, int row, int len) {
  if (c.turned) products<1, CW, KW>(sum, y, state);
  else add_state(sum, y, state);
  UNROLL(r, 2) {
    const int i = row + row_of<1>(r);
    const float reach = i < len ? gates.reach(i, c.back) : 0;
    absent[r] = reach == 0;
    UNROLL2(j, CW / 8, e, 2) sum[0][j][2 * r + e] = reach == 0 ? 0 : sum[0][j][2 * r + e] * (reach * c.state_scale);
  }
}

// Each row's numbers times those of `with`, in all four threads of the row; 0 where `absent`.
DEV void dot_rows(float (&out)[2], const Sums<1, CW>& sum, const Rows& with, int width, const bool (&absent)[2]) {
  UNROLL(r, 2) {
    int row = row_of<1>(r);
    float all = 0;
    if (row < with.count)
      UNROLL2(j, CW / 8, e, 2) {
        int column = 8 * j + own_column() + e;
        if (column < width) all = fmaf(sum[0][j][2 * r + e], read(with.at[row * with.stride + column]), all);
      }
    all = quad_sum(all);
    out[r] = absent[r] ? 0 : all;
  }
}
DEV void put_dots(const LinearArgs& c, float* to, const Chunk& chunk, int heads, int head, int row, const float (&x)[2], float scale) {
  UNROLL(r, 2) {
    int i = row + row_of<1>(r);
    if (lane_id() % 4 == 0 && i < chunk.len) to[((i64)chunk.batch * heads + head) * c.tokens + chunk.start + i] = scale * x[r];
  }
}

// Tiles of pairs of a micro-chunk: of each head those that it sees or is seen by, the diagonal one first.
struct StripTiles {
  const LinearArgs& c;
  const Chunk& chunk;
  const int key_head, row, rows, count;
  METHOD StripTiles(const LinearArgs& c, const Chunk& chunk, int key_head, int row)
      : c(c), chunk(chunk), key_head(key_head), row(row), rows(c.back ? (chunk.len - row + SIDE - 1) / SIDE : row / SIDE + 1),
        count(c.x.data ? c.back ? group_of(c) * rows : rows : 0) {}
  METHOD int head_of(int n) const { return c.back ? key_head * group_of(c) + n / rows : key_head; }
  METHOD int row_of(int n) const { return c.back ? row + n % rows * SIDE : row - n * SIDE; }
  METHOD void load(int n, u32 to) const {
    if (n >= count) return;
    load_tile<SIDE, KW>(to, chunk_rows(c.b, chunk, head_of(n), row_of(n)), c.inner);
    load_tile<SIDE, CW>(to + Y_BYTES, chunk_rows(c.x, chunk, head_of(n), row_of(n)), c.outer);
  }
};

// y; b and x of the first tile; the state, then b and x of every second tile.
CHECK_SHARED(attend, 2 * Y_BYTES + X_BYTES + STAGE_BYTES);
KERNEL(attend, LinearArgs c, THREADS, 2) {
  if (idle(c)) return;
  const u32 at_y = shared_begin(), at_first = at_y + Y_BYTES, at_state = at_first + Y_BYTES + X_BYTES;
  const int heads = c.back ? c.key_heads : c.heads, head = blockIdx.x % heads;
  const int key_head = c.back ? head : head / group_of(c);
  const Strip strip = c.strips[blockIdx.x / heads];
  const Chunk chunk = c.chunks[strip.chunk];
  const Gates gates(c, c.gates, chunk, key_head);
  const bool blank = c.blank && chunk.ends & (c.back ? 2 : 1);
  const StripTiles tiles(c, chunk, key_head, strip.row);
  auto stage = [&](int n) { return n % 2 ? at_state : at_first; };
  load_tile<SIDE, KW>(at_y, chunk_rows(c.y, chunk, head, strip.row), c.inner);
  if (!blank) load_state(c, at_state, strip.chunk, key_head);
  copy_commit();
  tiles.load(0, stage(0)), copy_commit();
  copy_wait<1>();
  __syncthreads();
  if (c.mode == CLEANSE) {
    clear_odd<SIDE, KW>(at_y);
    if (!blank) c.turned ? clear_odd<CW, KW>(at_state) : clear_odd<KW, CW>(at_state);
    __syncthreads();
  }
  Sums<1, CW> sum;
  float number[2];
  clear<1, CW>(sum);
  bool absent[2] = {true, true};
  if (!blank) add_decayed_state(c, gates, sum, absent, at_y, at_state, strip.row, chunk.len);
  const Rows dot = tangent_rows(c.dot, Rows{}, chunk, head, strip.row);
  if (c.state_dots) {
    dot_rows(number, sum, dot, c.outer, absent);
    put_dots(c, c.state_dots, chunk, heads, head, strip.row, number, c.dot_scale);
  }
  const float log = log_of(c, key_head);
  NO_UNROLL for (int n = 0; n < tiles.count; n++) {
    copy_wait<0>();
    __syncthreads();  // tile n is here, and all are done with the other stage
    tiles.load(n + 1, stage(n + 1)), copy_commit();
    const u32 b = stage(n), x = b + Y_BYTES;
    if (c.mode == CLEANSE) {
      clear_odd<SIDE, KW>(b), clear_odd<SIDE, CW>(x);
      __syncthreads();
    }
    Factors<1, SIDE> packed;
    {
      Pairs<1, SIDE> p;
      products<1, SIDE, KW>(p, at_y, b);
      weigh_all(c, gates, log, p, strip.row, tiles.row_of(n), chunk.len, c.back, c.scale);
      pack_all<1, SIDE>(packed, p);
    }
    accumulate<1, SIDE, CW>(sum, packed, x);
  }
  if (c.dots) {
    absent[0] = absent[1] = false;
    dot_rows(number, sum, dot, c.outer, absent);
    put_dots(c, c.dots, chunk, heads, head, strip.row, number, 1);
  }
  bool odd = false;
  UNROLL(j, CW / 2) odd |= !is_finite(sum[0][j / 4][j % 4]);
  tell(c, odd);
  if (c.out.data) store<1, CW>(c.out, chunk.batch, head, chunk.start + strip.row, chunk.len - strip.row, sum, Same{c.store_scale}, 0, c.outer);
}

// ---- gates ----
// q, k, dout and v of a micro-chunk; numbers of its pairs.
CHECK_SHARED(flow, 2 * (Y_BYTES + X_BYTES) + 4 * MICRO * PITCH);
KERNEL(flow, LinearArgs c, THREADS) {
  if (idle(c)) return;
  const u32 at_q = shared_begin(), at_k = at_q + Y_BYTES, at_dout = at_k + Y_BYTES, at_v = at_dout + X_BYTES;
  float* w = numbers_at(2 * (Y_BYTES + X_BYTES));
  auto pairs = [&](const LinearArgs& c, const Chunk& chunk, const Gates& gates, int key_head, int row, int key) {
    const int group = group_of(c);
    const float log = log_of(c, key_head);
    Pairs<1, SIDE> sum;
    clear<1, SIDE>(sum);
    NO_UNROLL for (int h = key_head * group; h < (key_head + 1) * group; h++) {
      __syncthreads();
      load_tile<SIDE, KW>(at_q, chunk_rows(c.q, chunk, h, row), c.dim), load_tile<SIDE, KW>(at_k, chunk_rows(c.k, chunk, key_head, key), c.dim);
      load_tile<SIDE, CW>(at_dout, chunk_rows(c.dout, chunk, h, row), c.value_dim);
      load_tile<SIDE, CW>(at_v, chunk_rows(c.v, chunk, key_head, key), c.value_dim);
      copy_commit(), copy_wait<0>();
      __syncthreads();
      if (c.mode == CLEANSE) {
        clear_odd<SIDE, KW>(at_q), clear_odd<SIDE, KW>(at_k), clear_odd<SIDE, CW>(at_dout), clear_odd<SIDE, CW>(at_v);
        __syncthreads();
      }
      Pairs<1, SIDE> a, b;
      products<1, SIDE, KW>(a, at_q, at_k);
      products<1, SIDE, CW>(b, at_dout, at_v);
      weigh_all(c, gates, log, a, row, key, chunk.len, false, c.scale);
      UNROLL2(j, SIDE / 8, e, 4)
        if (a[0][j][e] != 0) sum[0][j][e] = fmaf(a[0][j][e], b[0][j][e], sum[0][j][e]);
    }
    each(sum, [&](float x, int r, int column) { w[PITCH * row_of<1>(r) + column + own_column()] = x; });
    __syncthreads();
  };
  auto states = [](const LinearArgs& c, const Chunk& chunk, const Gates& gates, int number, int key_head) {
    const float decay = gates.reach(chunk.len - 1, 0);
    const i64 at = state_at(c, number, key_head);
    float sum = 0;
    if (decay != 0)
      for (int i = threadIdx.x; i < c.dim * c.value_dim; i += THREADS) {
        float s = read(c.narrow[at + i]), d = read(c.other_narrow[at + i]);
        if (c.mode != CLEANSE || !(!is_finite(s) || !is_finite(d))) sum = fmaf(s, d, sum);
      }
    return decay == 0 ? 0.0f : decay * block_sum<THREADS>(sum);
  };
  flow_of_chunk(c, w, pairs, states, blockIdx.x);
}
