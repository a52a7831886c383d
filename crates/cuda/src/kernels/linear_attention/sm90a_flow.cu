// The gradient of the log-decays of tokens on compute capability 9.0, behind `gradients_dots`, which leaves x, y and
// z:
//
//   flow   dg_t = Σ_{j < t ≤ i} w_ij + Σ_{i ≥ t} x_i + Σ_{j < t} y_j + z  (R27)
//
// A block takes chunks of key heads in turns. Two warpgroups have 64 rows each of w_ij = σ P_ij (q_i·k_j)(dout_i·v_j),
// summed over the query heads of the group; of a third one, a thread feeds the copy engine and three warps fill the
// table of P. A gate is passed by pairs whose blocks of 16 lie before and behind its own, by those of which one lies
// in its own, and by those within it: of the first two kinds, sums of columns of every block of rows, and sums of rows
// are all that is needed. Nothing is subtracted.
//
// Both products of a chunk are computed anew while the copy engine loads the next. Where a weight is 0, w is left out:
// only the gates that a non-finite number passes see it.
#if BY_TOKEN
constexpr int SLOTS = 3 * 128 / KW;  // of a pair of tiles: q and k, or dout and v
constexpr u32 SLOT_BYTES = 2 * Y_BYTES;
constexpr int PITCH = BLOCK + 1;
constexpr u32 FLOW_TABLES = SLOTS * SLOT_BYTES, AT_COLUMNS = FLOW_TABLES + 2 * TABLE_BYTES, AT_ROWS = AT_COLUMNS + 4 * BLOCKS * CHUNK,
              AT_WITHIN = AT_ROWS + 4 * CHUNK, AT_TOTALS = AT_WITHIN + 4 * CHUNK * PITCH;
using Slots = Ring<SLOTS, AT_TOTALS + 64>;
using Tables = Ring<2, Slots::END, 1, true>;
constexpr u32 FLOW_BYTES = Tables::END;

DEV void feed_pairs(const WalkArgs& c, u32 base) {
  const int group = c.heads / c.key_heads;
  Slots slot = {base, 1};
  auto load = [&](const TensorMap* own, const TensorMap* other, int head, int key_head, const Chunk& chunk) {
    const u32 full = slot.fill(SLOT_BYTES), to = base + slot.stage() * SLOT_BYTES;
    UNROLL(i, KW / 64) {
      load4(to + i * PANEL, own, full, 64 * i, chunk.start, head, chunk.batch);
      load4(to + Y_BYTES + i * PANEL, other, full, 64 * i, chunk.start, key_head, chunk.batch);
    }
    slot.advance();
  };
  NO_UNROLL for (int item = blockIdx.x; item < c.items; item += gridDim.x) {
    const Chunk chunk = c.chunks[item / c.key_heads];
    const int key_head = item % c.key_heads;
    NO_UNROLL for (int m = 0; m < group; m++) {
      load(&c.y, &c.b, key_head * group + m, key_head, chunk);
      load(&c.x, &c.dots, key_head * group + m, key_head, chunk);
    }
  }
}

DEV void fill_tables(const WalkArgs& c, u32 base) {
  auto gates_of = [&](int item) {
    const Chunk chunk = c.chunks[min(item, c.items - 1) / c.key_heads];
    return load_gates(c, chunk.batch, item % c.key_heads, chunk.start, item < c.items ? chunk.len : 0);
  };
  Gates next = gates_of(blockIdx.x);
  Tables tables = {base, 1};
  NO_UNROLL for (int item = blockIdx.x; item < c.items; item += gridDim.x, tables.advance()) {
    const Gates gates = next;
    next = gates_of(item + gridDim.x);
    tables.wait_empty();
    fill_table<false>(base + FLOW_TABLES + tables.stage() * TABLE_BYTES, gates, c.scale, threadIdx.x / 32 - 1);
    warp_arrive(tables.full());
  }
}

// The sum of four columns over the rows of a warp: a lane ends with one, that lies so many columns behind the first of
// its block.
DEV int column_of(const Thread& t) { return t.column + (t.lane & 16 ? 8 : 0) + (t.lane & 8 ? 1 : 0); }
DEV float sum_columns(const float (&x)[4]) {
  const bool second = lane_id() & 16, odd = lane_id() & 8;
  float even = (second ? x[2] : x[0]) + __shfl_xor_sync(~0u, second ? x[0] : x[2], 16);
  float other = (second ? x[3] : x[1]) + __shfl_xor_sync(~0u, second ? x[1] : x[3], 16);
  float sum = (odd ? other : even) + __shfl_xor_sync(~0u, odd ? even : other, 8);
  return sum + __shfl_xor_sync(~0u, sum, 4);
}

// Puts what is needed of w of a warp's 16 rows, from products of which hidden ones may be anything.
template <int GROUP, int PAIRS> DEV void put_flow(u32 base, u32 table, const Thread& t, const float (&a)[PAIRS], int count) {
  const int own_block = t.row / BLOCK;
  const float own[2] = {number_at(table, OWN + t.row), number_at(table, OWN + t.row + HALF)};
  const u32 far = table + 4 * (far_of<false>(own_block) + t.column);
  const bool there[2] = {t.row < count, t.row + HALF < count};
  float rows[2] = {};
  UNROLL(k, PAIRS / 8) {
    if (k / 4 == GROUP && k > own_block) break;
    float2 w[4];
    if (k / 4 == GROUP) weigh_block<false, false>(w, table, t, own, far, k);
    else weigh_block<false, true>(w, table, t, own, far, k);
    UNROLL(i, 4) {
      const bool none = !there[i & 1];
      w[i].x = none || w[i].x == 0 ? 0 : w[i].x * a[8 * k + 2 * i], w[i].y = none || w[i].y == 0 ? 0 : w[i].y * a[8 * k + 2 * i + 1];
    }
    if (k / 4 == GROUP && k == own_block) {
      UNROLL(i, 4) {
        const u32 at = base + AT_WITHIN + 4 * ((t.row + (i & 1 ? HALF : 0)) * PITCH + t.column + (i & 2 ? HALF : 0));
        store_float(at, w[i].x), store_float(at + 4, w[i].y);
      }
      continue;
    }
    const float columns[4] = {w[0].x + w[1].x, w[0].y + w[1].y, w[2].x + w[3].x, w[2].y + w[3].y};
    const float sum = sum_columns(columns);
    if (!(t.lane & 4)) store_float(base + AT_COLUMNS + 4 * (own_block * CHUNK + BLOCK * k + column_of(t)), sum);
    UNROLL(r, 2) rows[r] += (w[r].x + w[r].y) + (w[2 + r].x + w[2 + r].y);
  }
  UNROLL(r, 2) {
    const float sum = quad_sum(rows[r]);
    if (t.column == 0) store_float(base + AT_ROWS + 4 * (t.row + 8 * r), sum);
  }
}

// Sums of lanes before (BACK: from) the own one on, of so many in a row.
template <int LANES, bool BACK> DEV float scan_lanes(float x) {
  const int lane = lane_id() % LANES;
  if (!BACK) {
    x = __shfl_up_sync(~0u, x, 1, LANES);
    if (lane == 0) x = 0;
  }
  UNROLL_ALL for (int n = 1; n < LANES; n *= 2) {
    const float other = BACK ? __shfl_down_sync(~0u, x, n, LANES) : __shfl_up_sync(~0u, x, n, LANES);
    if (BACK ? lane + n < LANES : lane >= n) x += other;
  }
  return x;
}

// The flow through the gate of token t of a chunk by pairs. A warp has the tokens of two blocks.
DEV float flow_of_pairs(u32 base, int t) {
  const int block = t / BLOCK, own = t % BLOCK;
  const u32 columns = base + AT_COLUMNS, within = base + AT_WITHIN + 4 * block * BLOCK * PITCH;
  float sum = 0, flow = 0;  // sums of rows of the block's own pairs: those of the columns before each
  UNROLL(j, BLOCK) {
    const u32 at = within + 4 * (own * PITCH + j);
    const float next = load_float(at);
    store_float(at, sum);
    sum += next;
  }
  __syncwarp();
  UNROLL_ALL for (int i = BLOCK - 1; i >= 0; i--)
    if (i >= own) flow += load_float(within + 4 * (i * PITCH + own));
  sum = 0;  // of the own column, over later blocks of rows
  NO_UNROLL for (int i = BLOCKS - 1; i > block; i--) sum += load_float(columns + 4 * (i * CHUNK + t));
  flow += scan_lanes<BLOCK, false>(sum) + scan_lanes<BLOCK, true>(load_float(base + AT_ROWS + 4 * t));
  NO_UNROLL for (int k = 0; k < 2; k++) {  // of all columns of earlier blocks, over later blocks of rows
    const int middle = t / 32 * 2 + k;
    sum = 0;
    NO_UNROLL for (int i = BLOCKS - 1; i > middle; i--)
      NO_UNROLL for (int j = t % 32; j < middle * BLOCK; j += 32) sum += load_float(columns + 4 * (i * CHUNK + j));
    sum = lane_sum(sum);
    if (middle == block) flow += sum;
  }
  return flow;
}

// x and y of a token, and a part of <S, D> of the chunk.
struct Ends {
  float x, y, z;
};
DEV Ends load_ends(const WalkArgs& c, const Chunk& chunk, int item, int t) {
  Ends e = {};
  const int group = c.heads / c.key_heads, key_head = item % c.key_heads;
  if (t < 8) e.z = c.z_dots[8 * (i64)item + t];
  if (t >= chunk.len) return e;
  for (int m = 0; m < group; m++) e.x += c.x_dots[((i64)chunk.batch * c.heads + key_head * group + m) * c.tokens + chunk.start + t];
  e.y = c.y_dots[((i64)chunk.batch * c.key_heads + key_head) * c.tokens + chunk.start + t];
  return e;
}
// The sum of x from the token on, and of y before it, and z; of 128 threads.
DEV float flow_of_ends(u32 base, const Ends& e, float all, int t) {
  const u32 totals = base + AT_TOTALS;
  const int warp = t / 32;
  float x = scan_lanes<32, true>(e.x), y = scan_lanes<32, false>(e.y), z = lane_sum(e.z);
  if (t % 32 == 0) store_float(totals + 4 * warp, x);
  if (t % 32 == 31) store_float(totals + 16 + 4 * warp, y + e.y);
  if (t == 0) store_float(totals + 32, z);
  named_sync(3, 128);
  for (int w = 3; w > warp; w--) x += load_float(totals + 4 * w);
  float before = 0;
  for (int w = 0; w < warp; w++) before += load_float(totals + 16 + 4 * w);
  z = load_float(totals + 32);
  named_sync(3, 128);
  return x + (before + y) + (all == 0 ? 0 : all * z);
}

template <int GROUP> DEV void sum_flow(const WalkArgs& c, u32 base) {
  const int token = threadIdx.x - 128, group = c.heads / c.key_heads;
  const Thread t = this_thread();
  constexpr int SEEN = GROUP == 0 ? 64 : 128;
  Slots slot = {base, 0};
  Tables tables = {base, 0};
  NO_UNROLL for (int item = blockIdx.x; item < c.items; item += gridDim.x, tables.advance()) {
    const Chunk chunk = c.chunks[item / c.key_heads];
    const u32 table = base + FLOW_TABLES + tables.stage() * TABLE_BYTES;
    Ends ends;
    if (GROUP == 0) ends = load_ends(c, chunk, item, token);
    float a[SEEN / 2], b[SEEN / 2], sum[SEEN / 2];
    clear(sum);
    auto multiply = [&](float (&to)[SEEN / 2]) {
      const u32 from = base + slot.stage() * SLOT_BYTES, empty = slot.empty();
      slot.wait_full();
      multiply_rows(to, from + GROUP * 8192, from + Y_BYTES);
      slot.advance();
      return empty;
    };
    NO_UNROLL for (int m = 0; m < group; m++) {
      const u32 first = multiply(a), second = multiply(b);
      mma_wait<1>(), pin(a);
      warp_arrive(first);
      mma_wait<0>(), pin(b);
      warp_arrive(second);
      UNROLL(i, SEEN / 2) sum[i] = fmaf(a[i], b[i], sum[i]);
    }
    tables.wait_full();
    const float all = number_at(table, ALL);
    if (tables.at) named_sync(2, 256);  // the sums of the chunk before have been read
    put_flow<GROUP>(base, table, t, sum, chunk.len);
    tables.release();
    named_sync(1, 256);
    if (GROUP == 1) continue;
    const float dg = flow_of_pairs(base, token) + flow_of_ends(base, ends, all, token);
    if (token < chunk.len) {
      if (!is_finite(dg) && c.found) *c.found = 1;
      c.dg[((i64)chunk.batch * c.key_heads + item % c.key_heads) * c.tokens + chunk.start + token] = dg;
    }
    __syncwarp();
  }
}

DEV void flow_of_all(const WalkArgs& c) {
  const u32 base = begin_of_tiles();
  for (u32 at = 4 * threadIdx.x; at < 2 * TABLE_BYTES; at += 4 * 384) store_word(base + FLOW_TABLES + at, 0);
  make_barriers([&] {
    prefetch(&c.y), prefetch(&c.b), prefetch(&c.x), prefetch(&c.dots);
    Slots::init(base, 1, 8 * ARRIVALS), Tables::init(base, 3 * ARRIVALS, 8 * ARRIVALS);
  });
  auto feed = [&] {
    if (threadIdx.x == 0) feed_pairs(c, base);
    else if (threadIdx.x >= 32) fill_tables(c, base);
  };
  divide_roles<56, 224>(feed, [&] {
    if (threadIdx.x < 256) sum_flow<0>(c, base);
    else sum_flow<1>(c, base);
  });
}

CHECK_SHARED(flow, FLOW_BYTES);
KERNEL(flow, WalkArgs c, 384, 1) { flow_of_all(c); }
#endif
