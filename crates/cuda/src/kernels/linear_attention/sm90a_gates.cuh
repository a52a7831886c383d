// Log-decays of tokens (R20) on compute capability 9.0: tables of decays within a chunk, in shared memory.
//
// The sum of the log-decays between two tokens is a sum of sums that lie side by side, never a difference. Tokens are
// in blocks of 16, and these in halves of 8. A decay between two blocks is the product of that from the own token to
// the end of its block that faces the other, and that from there to the other token: OWN and FAR. Between the halves
// of a block it is a product at the place where they meet, CROSS; within a half there is a table of all pairs,
// DIAGONAL. A reset makes one of the factors 0. Two tables take turns: warps without products make the next chunk's
// while the last one is read.
//
// BACK: the own token is the earlier one of a pair, else the later one.
//
// An accumulator's row has the first factor of a decay, its column the second; each is the exponential of a sum of
// log-decays that lie side by side, at most 1. The warps that weigh x fill the table of the next chunk by sums over
// their lanes: two tables of 8.5 KB, in the place of out's tile; out is stored by the threads, which exchange pieces
// of 16 bytes. The decay of a segment is the product of those of its chunks, which `sums` leaves for `scan`.

// ---- a table: places of numbers ----
constexpr int BLOCK = 16, BLOCKS = CHUNK / BLOCK, HALF = 8, HALF_PITCH = 72;  // 8 numbers between halves: other banks
constexpr int OWN = 0;                     // σ e^..: from the token to the end of its block that faces others
constexpr int CROSS = OWN + CHUNK;         // from the token to the other half of its block; σ times that of own ones
constexpr int REACH = CROSS + CHUNK;       // from the token to the state
constexpr int GAIN = REACH + CHUNK;        // σ e^..: of what a token adds to the state
constexpr int DIAGONAL = GAIN + CHUNK;     // σ P of the pairs of each half: row own, column other
constexpr int FAR = DIAGONAL + CHUNK / HALF * HALF_PITCH;  // of each block, to the tokens of the blocks it faces, these side by side
constexpr int ALL = FAR + BLOCK * BLOCKS * (BLOCKS - 1) / 2;  // of the whole chunk
constexpr u32 TABLE_BYTES = 4 * (ALL + 4);
static_assert(!BY_TOKEN || AT_TABLES + 2 * TABLE_BYTES <= AT_BARRIERS, "room for two tables");

// Pairs of DIAGONAL that are not seen stay 0: tables are cleared once.
DEV u32 table_of(u32 tables, int n) { return tables + n % 2 * TABLE_BYTES; }
// The place of token 0 among the numbers of a block in FAR.
template <bool BACK> DEV int far_of(int block) {
  const int k = BACK ? BLOCKS - 1 - block : block;
  return FAR + BLOCK / 2 * k * (k - 1) - (BACK ? BLOCK * (block + 1) : 0);
}
DEV float number_at(u32 table, int place) { return load_float(table + 4 * place); }
DEV void store_four(u32 table, int place, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(table + 4 * place), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// ---- to fill one ----
// The log-decays to base 2 of four tokens of a chunk of `count`, 0 of those that are not there.
struct Gates {
  float x[4];
};
DEV Gates load_gates(const WalkArgs& c, int batch, int key_head, int row, int count) {
  Gates g;
  const int token = 4 * lane_id();
  const float* from = c.logs + ((i64)batch * c.key_heads + key_head) * c.tokens + row + token;
  UNROLL(i, 4) g.x[i] = token + i < count ? from[i] * LOG2E : 0;
  return g;
}

// Of four tokens the sums from the begin of their block of 16 on (BACK: of what is behind them, to its end).
struct Sums {
  float until[4], after[4], block;
};
template <bool WHOLE> DEV Sums sums_of(const Gates& g) {
  Sums s;
  const int lane = lane_id();
  s.until[0] = g.x[0], s.after[3] = 0;
  UNROLL_ALL for (int i = 1; i < 4; i++) s.until[i] = s.until[i - 1] + g.x[i], s.after[3 - i] = s.after[4 - i] + g.x[4 - i];
  s.block = s.until[3];
  UNROLL_ALL for (int n = 1; n <= (WHOLE ? 2 : 1); n *= 2) {
    const float other = __shfl_xor_sync(~0u, s.block, n);
    UNROLL(i, 4) (lane & n ? s.until[i] : s.after[i]) += other;
    s.block += other;
  }
  return s;
}

// OWN, REACH, GAIN and ALL; CROSS.
template <bool BACK> DEV void fill_tokens(u32 table, const Gates& g, float scale) {
  const int lane = lane_id(), token = 4 * lane;
  float x[4];
  {
    const Sums half = sums_of<false>(g);
    const bool later = lane & 2;
    UNROLL(i, 4) x[i] = exp2_fast(later ? half.until[i] : half.after[i]) * (later == BACK ? 1 : scale);
    store_four(table, CROSS + token, x);
  }
  const Sums s = sums_of<true>(g);
  UNROLL(i, 4) x[i] = exp2_fast(BACK ? s.after[i] : s.until[i]) * scale;
  store_four(table, OWN + token, x);
  float before = __shfl_up_sync(~0u, s.block, 4), behind = __shfl_down_sync(~0u, s.block, 4);
  if (lane < 4) before = 0;
  if (lane >= 28) behind = 0;
  UNROLL_ALL for (int n = 4; n < 32; n *= 2) {
    const float left = __shfl_up_sync(~0u, before, n), right = __shfl_down_sync(~0u, behind, n);
    if (lane >= n) before += left;
    if (lane + n < 32) behind += right;
  }
  UNROLL(i, 4) x[i] = exp2_fast(before + s.until[i]) * (BACK ? scale : 1);
  store_four(table, (BACK ? GAIN : REACH) + token, x);
  if (lane == 31) store_float(table + 4 * ALL, exp2_fast(before + s.until[3]));
  UNROLL(i, 4) x[i] = exp2_fast(behind + s.after[i]) * (BACK ? 1 : scale);
  store_four(table, (BACK ? REACH : GAIN) + token, x);
}

// DIAGONAL: a lane has four columns, first of the rows among its own tokens, then of the others of its half, which it
// faces.
template <bool BACK> DEV void fill_diagonal(u32 table, const Gates& g, float scale) {
  const int lane = lane_id(), second = lane & 1, place = DIAGONAL + lane / 2 * HALF_PITCH;
  float other[4], sum[4] = {}, x[4];
  UNROLL(i, 4) other[i] = __shfl_xor_sync(~0u, g.x[i], 1);
  UNROLL(n, 4) {
    const int row = BACK ? 3 - n : n;
    UNROLL(i, 4) {
      const bool passes = BACK ? i > row : i < row;
      if (passes) sum[i] += g.x[BACK ? row + 1 : row];
      x[i] = passes ? exp2_fast(sum[i]) * scale : i == row ? scale : 0;
    }
    store_four(table, place + HALF * (4 * second + row) + 4 * second, x);
  }
  if (second != BACK) return;
  UNROLL(n, 4) {
    const int row = BACK ? 3 - n : n;
    const float next = !BACK ? other[row] : n == 0 ? g.x[0] : other[row + 1 & 3];
    UNROLL(i, 4) sum[i] += next, x[i] = exp2_fast(sum[i]) * scale;
    store_four(table, place + HALF * (BACK ? row : 4 + row) + 4 * second, x);
  }
}

// FAR: a lane has four columns of every block that its tokens face.
template <bool BACK> DEV void fill_far(u32 table, const Gates& g) {
  const int token = 4 * lane_id(), block = token / BLOCK;
  const Sums s = sums_of<true>(g);
  float between = 0, x[4];
  NO_UNROLL for (int n = 1; n < BLOCKS; n++) {
    const int own = BACK ? BLOCKS - 1 - n : n, next = BACK ? own + 1 : own - 1;
    const float whole = __shfl_sync(~0u, s.block, BLOCK / 4 * next);
    if (BACK ? block > next : block < next) between += whole;
    if (BACK ? block <= own : block >= own) continue;
    UNROLL(i, 4) x[i] = exp2_fast(between + (BACK ? s.until[i] : s.after[i]));
    store_four(table, far_of<BACK>(own) + token, x);
  }
}

// Each of three warps fills its part.
template <bool BACK> DEV void fill_table(u32 table, const Gates& g, float scale, int part) {
  if (part == 0) fill_tokens<BACK>(table, g, scale);
  else if (part == 1) fill_diagonal<BACK>(table, g, scale);
  else fill_far<BACK>(table, g);
  __syncwarp();
}

// ---- to weigh with it ----
// σ P of a thread's accumulators in a block of 16 columns: its row and columns t, its row and columns t + 8 come last,
// and between these row + 8 with columns t, and row with columns t + 8. OTHERS: a block of the other warpgroup's rows,
// which all face.
template <bool BACK, bool OTHERS> DEV void weigh_block(float2 (&w)[4], u32 table, const Thread& t, const float (&own)[2], u32 far, int block) {
  const int own_block = t.row / BLOCK;
  if (OTHERS || (BACK ? block > own_block : block < own_block)) {
    UNROLL_ALL for (int i = 0; i < 4; i += 2) {
      const float2 x = load_pair(far + 4 * (BLOCK * block + HALF / 2 * i));
      w[i] = make_float2(own[0] * x.x, own[0] * x.y), w[i + 1] = make_float2(own[1] * x.x, own[1] * x.y);
    }
  } else if (block == own_block) {
    const u32 half = table + 4 * (DIAGONAL + 2 * block * HALF_PITCH + HALF * (t.row % HALF) + t.column);
    const float cross = number_at(table, CROSS + t.row + (BACK ? 0 : HALF));
    const float2 x = load_pair(table + 4 * (CROSS + BLOCK * block + t.column + (BACK ? HALF : 0)));
    w[0] = load_pair(half), w[3] = load_pair(half + 4 * HALF_PITCH);
    w[BACK ? 2 : 1] = make_float2(cross * x.x, cross * x.y), w[BACK ? 1 : 2] = make_float2(0, 0);
  } else
    UNROLL(i, 4) w[i] = make_float2(0, 0);
}

// The left factor P_ij (y_i·b_j) of a product with x, as `weigh_pairs`.
template <int GROUP, int WORDS> DEV void weigh_by_token(u32 (&to)[WORDS], const float (&p)[2 * WORDS], u32 table, const Thread& t) {
  const float own[2] = {number_at(table, OWN + t.row), number_at(table, OWN + t.row + HALF)};
  const u32 far = table + 4 * (far_of<false>(t.row / BLOCK) + t.column);
  UNROLL(k, WORDS / 4) {
    float2 w[4];
    if (k / 4 == GROUP) weigh_block<false, false>(w, table, t, own, far, k);
    else weigh_block<false, true>(w, table, t, own, far, k);
    UNROLL(i, 4) to[4 * k + i] = pack(p[8 * k + 2 * i] * w[i].x, p[8 * k + 2 * i + 1] * w[i].y);
  }
}
