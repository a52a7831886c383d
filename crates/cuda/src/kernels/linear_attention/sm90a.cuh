// linear_attention for compute capability 9.0: a walk along a sequence as the host describes it, decays, rows of
// threads.
//
// Compile-time: STORAGE (1|2); KW, the columns of y and b, rounded up: 64 or 128; BY_TOKEN, a log-decay for each
// token, not for each head.

// Every result is o of another problem: problem.cuh. Fields: linear_attention/args.rs.
KERNEL_ARGS(WalkArgs)

constexpr int CHUNK = 128, COLUMNS = 64, STAGES = 2;
constexpr u32 PANEL = CHUNK * 128, Y_BYTES = CHUNK * KW * 2, STATE_BYTES = KW * 128;
// In shared memory: y, b and x in two stages; x weighted; the state in two buffers; out; decays; barriers. BY_TOKEN
// out has no place, so that decays have more.
constexpr u32 AT_B = STAGES * Y_BYTES, AT_X = 2 * AT_B, AT_WEIGHTED = AT_X + STAGES * PANEL, AT_STATE = AT_WEIGHTED + PANEL,
              AT_OUT = AT_STATE + 2 * STATE_BYTES, AT_DECAYS = AT_OUT + PANEL, DECAYS_BYTES = 2568,
              AT_BARRIERS = AT_DECAYS + DECAYS_BYTES;
using Chunks = Ring<STAGES, AT_BARRIERS>;
constexpr u32 EMPTY_X = Chunks::END;  // of each stage
using Weighted = Ring<1, EMPTY_X + 8 * STAGES>;
constexpr u32 SHOWN = Weighted::END, WALK_BYTES = SHOWN + 16;
constexpr u32 AT_TABLES = AT_OUT;
constexpr int WEIGHS = 96;  // threads that weigh x

DEV u32 begin_of_tiles() {
  extern __shared__ __align__(1024) char bytes[];
  return shared(bytes);
}

// ---- bulk tensor copies ----
// Four axes: (column, row, head, batch). What lies beyond the tensor is read as 0 and not written.
DEV void load4(u32 to, const TensorMap* m, u32 b, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];"
               ::"r"(to), "l"(m), "r"(b), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
DEV void store4(const TensorMap* m, u32 from, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5}], [%1];"
               ::"l"(m), "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}

// ---- decays (R20) ----
// A table of scale·P by the distance t = j - i of other and own token: e^{γ|t|} where the own token sees the other
// (BACK: is seen by it), else 0. It lies there twice, so that a pair t, t + 1 begins at a multiple of 8 bytes whatever
// t is. The first begins with further zeros.
constexpr int MIDDLE = 256, SECOND = 385, MIDDLE_OF_SECOND = 128;
static_assert(4 * (SECOND + 257) == DECAYS_BYTES, "room for both");
template <bool BACK> DEV void fill_decays(u32 table, int thread, float log, float scale) {
  NO_UNROLL for (int i = thread; i < SECOND; i += 256) {
    int t = i - MIDDLE;
    float x = t >= -CHUNK && (BACK ? t >= 0 : t <= 0) ? scale * exp2_fast(log * (BACK ? t : -t)) : 0;
    store_float(table + 4 * i, x);
    if (t >= -CHUNK) store_float(table + 4 * (SECOND + t + MIDDLE_OF_SECOND), x);
  }
}
DEV u32 decays_at(u32 table, int t) {  // of t, t + 1, and of those at even distances from them
  return table + 4 * (t + (t & 1 ? SECOND + MIDDLE_OF_SECOND : MIDDLE));
}

DEV void clear_words(u32 from, u32 bytes, int thread, int threads = 256) {
  NO_UNROLL for (u32 at = 4 * thread; at < bytes; at += 4 * threads) store_word(from + at, 0);
}

// ---- tiles ----
// Puts 0 into the rows of a tile from `count` on, which are those of other sequences, and, where asked, in place of
// what is not finite.
template <int THREADS = 256> DEV void tidy(u32 tile, int panels, int count, bool cleanse, int thread) {
  NO_UNROLL for (int i = thread; i < panels * CHUNK * 32; i += THREADS) {
    u32 x = load_word(tile + 4 * i), keep = i / 32 % CHUNK >= count ? 0 : cleanse ? finite(x) : ~0u;
    if (x & ~keep) store_word(tile + 4 * i, x & keep);
  }
}
DEV void store_piece(u32 to, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
DEV u32 times(u32 x, float weight) {
  float2 y = unpack(x);
  return pack(y.x * weight, y.y * weight);
}

// ---- rows of a thread's accumulators ----
// Two rows, 8 apart, of a tensor: `count` of 16 bits are there from the first on, and `columns`. `at`: of the thread's
// first number.
template <int N> DEV void store_rows(const Tensor& x, i64 at, int count, int columns, const float (&o)[N], float scale) {
  UNROLL2(j, N / 4, r, 2)
    if (8 * r < count && 8 * j < columns)
      *(u32*)((u16*)x.data + at + 8 * r * x.row + 8 * j) = pack(fmaf(o[4 * j + 2 * r], scale, 0.0f), fmaf(o[4 * j + 2 * r + 1], scale, 0.0f));
}
// Of a quad's four words in each lane, those of word q of all four in lane q.
DEV void turn_quad(u32 (&x)[4]) {
  const bool odd = lane_id() & 1, high = lane_id() & 2;
  UNROLL_ALL for (int i = 0; i < 4; i += 2) {
    const u32 keep = odd ? x[i + 1] : x[i], other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
    x[i] = odd ? other : keep, x[i + 1] = odd ? keep : other;
  }
  UNROLL(i, 2) {
    const u32 keep = high ? x[2 + i] : x[i], other = __shfl_xor_sync(~0u, high ? x[i] : x[2 + i], 2);
    x[i] = high ? other : keep, x[2 + i] = high ? keep : other;
  }
}
// All rows, in pieces of 16 bytes. `at`: of the thread's first row and the block's first column.
template <int N> DEV void store_pieces(const Tensor& x, i64 at, int columns, const float (&o)[N], float scale) {
  const int lane = lane_id() & 3;
  UNROLL(r, 2)
    UNROLL_ALL for (int j = 0; j < N / 4; j += 4) {
      u32 piece[4];
      UNROLL(i, 4) {
        const int k = 4 * (j + i) + 2 * r;
        piece[i] = pack(fmaf(o[k], scale, 0.0f), fmaf(o[k + 1], scale, 0.0f));
      }
      turn_quad(piece);
      if (8 * (j + lane) < columns)
        *(uint4*)((u16*)x.data + at + 8 * r * x.row + 8 * (j + lane)) = make_uint4(piece[0], piece[1], piece[2], piece[3]);
    }
}
