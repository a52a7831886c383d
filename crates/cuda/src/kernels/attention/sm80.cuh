// attention and attention_lse on the tensor cores of any GPU from sm_80 on, with every option: the blocks and tables
// of the portable level. P and dS of 16-bit operands are rounded to the storage type before they are multiplied, those
// of f32 as in `multiply/mma_sync_f32.cuh`. Their scores.
//
// A block has four warps. Copies are `cp.async` in two stages; rows that begin and end at multiples of 16 bytes are
// copied in pieces, others element by element (WHOLE). All tiles but those of wide operands fit 99 KiB of shared
// memory, hence every device.
//
// Scores are kept over softmax_scale. A finite bias that overflows f32 when it is divided by the scale counts as the
// largest number: o is right, and lse is that number times the scale.
//
// Compile-time: STORAGE, OPTIONS, VALUES: as portable_forward.cu; WHOLE; CD and CE, the columns of a row of q and of
// v; TILES, of 16-bit operands with CD up to 128: 0, forward 128 queries by 64 keys and backward 64 by 64; 1, walked
// tiles of 32 rows; 2, forward 64 queries by 64 keys.
#ifndef TILES
#define TILES 0
#endif
#ifdef STAGES
#define WIDE 1
#else
#define WIDE 0
#define STAGES (STORAGE == 0 && CD + VALUES * CE > 192 ? 1 : 2)
#endif
constexpr int M = CD > 128 || TILES == 2 ? 1 : 2, KEYS = CD > 128 || STORAGE == 0 || TILES == 1 ? 32 : 64;
constexpr int BYTES = sizeof(element), WALK = WIDE || STORAGE == 0 || TILES == 1 ? 32 : SIDE;
constexpr float LN2 = 0.6931471805599453f, LARGEST = 3.402823466e38f;

// The unit of scores, the scale where that is above 0 and of usual size: then without options a score is the product
// of query and key.
struct Unit { float scale, over, log2; };  // of products; 1/unit; unit·log2 e
DEV Unit unit_of(const PairArgs& c) {
  if (c.scale > 1e-18f && c.scale < 1e18f) return {1, 1 / c.scale, c.scale * LOG2E};
  return {c.scale, 1, LOG2E};
}

// A query: the places of its flags and of its bias are computed once.
struct QueryRow {
#if OPTIONS
  const element* bias;
  const u8* allowed;
  METHOD QueryRow(const Head& head, int i) : bias(head.bias + i * head.c.bias.row), allowed(head.allowed + (i64)i * head.c.keys) {}
#else
  METHOD QueryRow(const Head&, int) {}
#endif
};
template <class QUERY> constexpr bool IS_ROW = false;
template <> constexpr bool IS_ROW<QueryRow> = true;

// S/unit of a visible pair (F2), from the product of a query and a key, and the slope S'; whether the pair is visible.
// A pair has the same bits with options as without, where these say nothing about it. QUERY: a number or a `QueryRow`.
template <bool CUT, class QUERY> DEV bool score(const Head& head, const Unit& unit, float& x, float& slope, QUERY i, int j, Span span) {
  slope = 1;
  if (CUT && (j < span.begin || j >= span.end)) return false;
#if OPTIONS
  const PairArgs& c = head.c;
  float product = x;
  x = __fmul_rn(unit.scale, x);
  if constexpr (IS_ROW<QUERY>) {
    if (head.allowed && !i.allowed[j]) return false;
  } else if (head.allowed && !head.allowed[(i64)i * c.keys + j]) {
    return false;
  }
  if (c.cap != 0) {
    float t = tanh_fast(__fmul_rn(__fmul_rn(c.scale, product), head.inverse_cap));
    x = __fmul_rn(c.cap * unit.over, t), slope = fmaf(-t, t, 1.0f);
  }
  if (head.bias) {
    float bias;
    if constexpr (IS_ROW<QUERY>) bias = read(i.bias[j]);
    else bias = read(head.bias[i * c.bias.row + j]);
    x = __fadd_rn(x, __fmul_rn(bias, unit.over));
    if (fabsf(x) == INF && fabsf(bias) < INF && fabsf(product) < INF) x = copysignf(LARGEST, x);
  }
#else
  if (unit.scale != 1) x = __fmul_rn(unit.scale, x);
#endif
  return x != -INF;
}
