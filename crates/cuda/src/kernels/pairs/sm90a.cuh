// Elements of tensors, and terms of scores beside products, of kernels of sm_90a.
constexpr float LN2 = 0.6931471805599453f, LARGEST = 3.402823466e38f;

// ---- elements by their addresses ----
KERNEL_ARGS(Elements)
DEV u16* row_of(const Elements& x, int batch, int head, int row) {
  return x.data + batch * x.batch_stride + head * x.head_stride + row * x.row_stride;
}
// True if two columns lie at a multiple of 4 bytes in every row, if they do in this one.
DEV bool has_pairs(const Elements& x, const u16* row) { return ((u64)row | (u64)(2 * x.row_stride)) % 4 == 0; }
// The rows of a thread's accumulators within their sequence, those of a tensor of whole columns.
template <int N> DEV void store_rows(const Elements& to, int batch, int head, int start, int row, int rows, const float (&x)[N], float scale = 1) {
  UNROLL(r, 2) {
    if (row + 8 * r >= rows) continue;
    u32* at = (u32*)(row_of(to, batch, head, start + row + 8 * r) + 2 * (lane_id() & 3));
    UNROLL(j, N / 4) at[4 * j] = pack(x[4 * j + 2 * r] * scale, x[4 * j + 2 * r + 1] * scale);
  }
}
// The same in pieces of 16 bytes, which the four lanes of a row gather for each other.
template <int N> DEV void store_row_pieces(const Elements& to, int batch, int head, int start, int row, int rows, const float (&x)[N]) {
  const bool odd = lane_id() & 1, upper = lane_id() & 2;
  // Lanes that differ in bit `mask` exchange a pair: one keeps `low` and gets that of the other in place of `high`.
  auto exchange = [](u32& low, u32& high, int mask, bool second) {
    const u32 other = __shfl_xor_sync(~0u, second ? low : high, mask);
    if (second) low = other;
    else high = other;
  };
  UNROLL(r, 2) {
    u16* at = row_of(to, batch, head, start + row + 8 * r) + 8 * (lane_id() & 3);
    UNROLL(j, N / 16) {
      u32 y[4];
      UNROLL(i, 4) y[i] = pack(x[16 * j + 4 * i + 2 * r], x[16 * j + 4 * i + 2 * r + 1]);
      exchange(y[0], y[1], 1, odd), exchange(y[2], y[3], 1, odd);
      exchange(y[0], y[2], 2, upper), exchange(y[1], y[3], 2, upper);
      if (row + 8 * r < rows) *(uint4*)(at + 32 * j) = {y[0], y[1], y[2], y[3]};
    }
  }
}
// The 64 rows of a warpgroup, those of its sequence from `first` on: by way of a place in shared memory, or by threads
// where rows of the next sequence lie in the box.
template <int N> DEV void store_output(const TensorMap* to, const Elements& rows, const Work& w, const Own& s, int first, u32 place, int barrier, const float (&o)[N]) {
  if (PACKED && first + 64 > s.queries) return store_rows(rows, s.batch, w.head, s.query_start, first + own_row(), s.queries, o);
  store_by_copy<64>(place, o, barrier, [&] { store5(to, place, s.query_start + first, w.head, s.batch); });
}
DEV void store_zeros(u32 at) { asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory"); }
// Clears the rows from `first` on of tiles of ROWS rows that warpgroups multiply by. Each warpgroup clears all of
// them, since they do not wait for each other: one may write zeros where another reads them, which changes nothing.
// The copy engine wrote the rows, and the tensor cores read them: through another proxy than these stores.
template <int ROWS, int COLUMNS = D, class... TILES> DEV void zero_rows(int first, int barrier, TILES... tiles) {
  if (DROP == OF_ROWS) return;
  constexpr int PIECES = COLUMNS / 8;  // of 16 bytes in a row, all of which are cleared, however they are swizzled
  const int piece = threadIdx.x % PIECES;
  NO_UNROLL for (int row = first + threadIdx.x % 128 / PIECES; row < ROWS; row += 128 / PIECES)
    (store_zeros(tiles + piece / 8 * (ROWS * 128) + row * 128 + piece % 8 * 16), ...);
  proxy_fence();
  named_sync(barrier, 128);
}
// True if the rows before `count` of a tile of ROWS rows hold finite numbers alone: for a warpgroup, of which a thread
// finds what lies in its pieces.
template <int ROWS> DEV bool is_finite_tile(u32 tile, int count) {
  constexpr int PIECES = D / 8;
  const int piece = threadIdx.x % PIECES;
  bool finite = true;
  NO_UNROLL for (int row = threadIdx.x % 128 / PIECES; row < min(ROWS, count); row += 128 / PIECES)
    UNROLL(i, 4) finite &= ::finite(load_word(tile + piece / 8 * (ROWS * 128) + row * 128 + piece % 8 * 16 + 4 * i)) == ~0u;
  return finite;
}

// ---- scores ----
// A score is kept over a unit, the scale where that is above 0 and of usual size: then, where softcap and bias say
// nothing, it is the product of query and key, and has the bits that it has without OPTIONS.
KERNEL_ARGS(ScoreOptions)
DEV float tanh_of(float product, const ScoreOptions& o) { return tanh_fast(__fmul_rn(__fmul_rn(o.factor, product), o.inverse_cap)); }
// Two numbers side by side, of which `count` are there.
DEV float2 load_bias(const u16* at, bool pairs, int count) {
  if (pairs && count > 1) return unpack(*(const u32*)at);
  return unpack((count > 0 ? at[0] : 0) | (count > 1 ? (u32)at[1] << 16 : 0));
}
// The rows of bias of a thread's two queries, from the pair of keys that it has in the first 8; 0: none.
struct BiasRows {
  const u16* of[2];
  METHOD BiasRows(const ScoreOptions& o, const Own& s, int head, int row) {
    UNROLL(r, 2) {
      const int query = s.query_start + min(row + 8 * r, s.queries - 1);
      of[r] = o.bias.data ? row_of(o.bias, s.batch, head, query) + s.key_start + 2 * (lane_id() & 3) : 0;
    }
  }
};
// A score with its bias: finite where both are, also in units of scores.
DEV float with_bias(float score, float bias, float over) {
  const float x = fmaf(bias, over, score);
  return fabsf(bias) < INF && fabsf(score) < INF ? fminf(fmaxf(x, -LARGEST), LARGEST) : x;
}
// The same without branches, but ∞ of finite numbers, whose weight is NaN and raises the flag. Where one of them is
// infinite the bound is NaN, and none.
DEV float with_bias_flagged(float score, float bias, float over) {
  const float least = fmaf(fmaf(bias, 1e-6f, score), 0.0f, -LARGEST);
  return fmaxf(fmaf(bias, over, score), least);
}
// The same of 8 numbers of an accumulator, from `first` on.
template <int N> DEV void add_biases(float (&scores)[N], int first, const u32 (&bias)[4], float over) {
  UNROLL(i, 4) {
    const float2 b = unpack(bias[i]);
    float &even = scores[first + 2 * i], &odd = scores[first + 2 * i + 1];
    even = with_bias_flagged(even, b.x, over), odd = with_bias_flagged(odd, b.y, over);
  }
}
// The coordinates of a head's bias, or of its gradient: 0 where heads or batch elements share one.
DEV int bias_head(const ScoreOptions& o, int head) { return o.bias.head_stride ? head : 0; }
DEV int bias_batch(const ScoreOptions& o, int batch) { return o.bias.batch_stride ? batch : 0; }
// A bias of its own for each head is read once.
DEV bool reads_bias_once(const ScoreOptions& o) { return o.bias.head_stride && o.bias.batch_stride; }
