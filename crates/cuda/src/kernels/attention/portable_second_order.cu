// The second order of attention and attention_lse on the level portable. Compile-time: as `portable_forward.cu`.
//
//   tangents  a block owns 64 queries and walks the keys: Σ P U, Σ P (U v + ddv), Σ P v  (D1), (D2), (D4), (D5)
//   rows      a warp owns a row: delta, u, z, gdout  (B1), (D4)–(D6), (J1), (J2)
//   queries   a block owns 64 queries and walks the keys: gq  (D7)–(D10)
//   keys      a block owns 64 keys of one key head and walks the queries of its heads: gk, gv  (D11), (D12)
//   fused     as `keys`, with what its keys add to gq, which `collect` adds up  (D7)–(D12)
//   gsinks    a block owns one head  (D14)
//   gbias     a block owns a tile of 64 × 64 pairs and walks what shares its bias  (D15)
//
// o that is not stored in f32 is computed again: delta, z and u·o would multiply the rounding of a narrower one.
// In forward mode the tangents stand for ddq, ddk, ddv, ddsinks and ddbias, and the first two kernels are all.
//
// `fused` is `queries` and `keys` in one. Between the sweeps 16 bytes and 2·E numbers a row are kept in f32. What is
// read of shared memory for S serves the products of ddq and ddk with k and q, too, and what is read for dP those of
// T. The number of instructions is the limit: six products of tiles in a row do not fit the instruction cache, so that
// two terms of a sum share a loop.
#define FUSES (CD == 64 && CE == 64)

// The product s = q·k of (F1) and that of its motion, u = ddq·k + q·ddk, with queries or with keys as rows.
template <bool BY_KEYS> DEV void scores(const SecondArgs& a, Shared& shared, Pairs& s, Pairs& u, const Head& head, int row, int key) {
  Rows q = query_rows(a.c.q, head, row), k = key_rows(a.c.k, head, key);
  Rows ddq = query_rows(a.ddq, head, row), ddk = key_rows(a.ddk, head, key);
  if (a.ddq.data && a.ddk.data) {
    if (BY_KEYS) add_products_moved<true, true, 1, true, true>(shared, s, u, k, ddk, q, ddq, a.c.dim);
    else add_products_moved<true, true, 1, false, true>(shared, s, u, q, ddq, k, ddk, a.c.dim);
    return;
  }
  add_products(shared, s, BY_KEYS ? k : q, BY_KEYS ? q : k, a.c.dim);
  if (a.ddq.data) add_products(shared, u, BY_KEYS ? k : ddq, BY_KEYS ? ddq : k, a.c.dim);
  if (a.ddk.data) add_products(shared, u, BY_KEYS ? ddk : q, BY_KEYS ? q : ddk, a.c.dim);
}
// dP of (B2) and T of (D3).
template <bool BY_KEYS> DEV void turns(const SecondArgs& a, Shared& shared, Pairs& dp, Pairs& t, const Head& head, int row, int key) {
  if (!VALUES) return;
  Rows dout = query_rows(a.c.dout, head, row), v = key_rows(a.c.v, head, key);
  Rows cot_o = query_rows(a.cot_o, head, row), ddv = key_rows(a.ddv, head, key);
  const int width = a.c.value_dim;
  if (a.ddv.data && a.cot_o.data) {
    if (BY_KEYS) add_products_moved<true, true, 1, true, true>(shared, dp, t, v, ddv, dout, cot_o, width);
    else add_products_moved<true, true, 1, false, true>(shared, dp, t, dout, cot_o, v, ddv, width);
  } else if (a.ddv.data) {
    if (BY_KEYS) add_products_moved<true, false, 1, false, true>(shared, dp, t, v, ddv, dout, cot_o, width);
    else add_products_moved<false, true, 1, false, true>(shared, dp, t, dout, cot_o, v, ddv, width);
  } else {
    add_products(shared, dp, BY_KEYS ? v : dout, BY_KEYS ? dout : v, width);
    if (a.cot_o.data) add_products(shared, t, BY_KEYS ? v : cot_o, BY_KEYS ? cot_o : v, width);
  }
}

// Of each pair of two tiles S, u, dP and T, in whose registers come x, dS, the moved weight and P.
struct Seconds {
  Pairs x = {}, ds = {}, moved = {}, p = {};
};

// The second order of each pair of two tiles, with queries or with keys as rows: `each(r, e, pair)`, which may leave
// its numbers in `of`. Elsewhere they would take registers of their own.
template <bool BY_KEYS, class F> DEV void each_second(const SecondArgs& a, Shared& shared, const Head& head, int row, int key, Seconds& of, F each) {
  scores<BY_KEYS>(a, shared, of.x, of.ds, head, row, key);
  turns<BY_KEYS>(a, shared, of.moved, of.p, head, row, key);
  UNROLL(n, BY_KEYS ? 4 : R) {
    const int i = row + (BY_KEYS ? column_of(n) : row_of(n));
    const Span span = head.span(i);
    const float lse = lse_of(head, i);
    const Numbers numbers = i < head.s.queries ? numbers_of(a, head)[i] : Numbers{};
    UNROLL(m, BY_KEYS ? R : 4) {
      const int r = BY_KEYS ? m : n, e = BY_KEYS ? n : m, j = key + (BY_KEYS ? row_of(m) : column_of(m));
      each(r, e, second(a, head, of.x[r][e], of.ds[r][e], of.moved[r][e], of.p[r][e], i, j, span, lse, numbers));
    }
  }
}

// True if o of the forward pass is there in f32.
DEV bool has_o(const SecondArgs& a) { return STORAGE == 0 && a.c.o.data; }

KERNEL(tangents, SecondArgs a, THREADS) {
  __shared__ Shared shared;
  const PairArgs& c = a.c;
  const QueryTile<Head> own(c, c, last_first());
  const Head& head = own.head;
  if (is_finite(a, own.sequence, head.key_head)) return;
  const int row = own.row;
  float u[R] = {}, lse[R];
  bool seen[R] = {};
  Span spans[R];
  Sums<CE> sum, o;
  clear<CE>(sum), clear<CE>(o);
  UNROLL(r, R) spans[r] = head.span(row + row_of(r)), lse[r] = lse_of(head, row + row_of(r));
  NO_UNROLL for (int key = own.first_key(); key < own.seen.end; key += SIDE) {
    Pairs p = {}, moved = {};
    scores<false>(a, shared, p, moved, head, row, key);
    UNROLL2(r, R, e, 4) {
      int i = row + row_of(r), j = key + column_of(e);
      float score, slope;
      if (head.score(p[r][e], i, j, spans[r], score, slope)) {
        p[r][e] = shown(weight(score, lse[r]));
        moved[r][e] = shown(__fmul_rn(p[r][e], slide(a, head, moved[r][e], slope, i, j)));
        u[r] += moved[r][e], seen[r] = true;
      } else {
        p[r][e] = moved[r][e] = HIDE;
      }
    }
    if (!VALUES) continue;
    Rows v = key_rows(c.v, head, key);
    NO_UNROLL for (int term = 0; term < (a.ddv.data ? 2 : 1); term++) {
      if (term == 0) publish(shared, moved);
      else publish(shared, p);
      accumulate<CE>(shared, sum, term == 0 ? v : key_rows(a.ddv, head, key), c.first_value, c.value_dim);
      __syncthreads();
    }
    if (!has_o(a)) {
      publish(shared, p);
      accumulate<CE>(shared, o, v, c.first_value, c.value_dim);
    }
  }
  UNROLL(r, R) {
    u32 some = seen[r];
    u[r] = row_sum(u[r]);
    UNROLL_ALL for (int n = 8; n; n /= 2) some |= __shfl_xor_sync(~0u, some, n);
    int i = row + row_of(r);
    if (tx() != 0 || i >= head.s.queries) continue;
    if (a.ddsinks) u[r] += weight_of_sink(a, head.head, lse[r]) * a.ddsinks[head.head];
    numbers_of(a, head)[i] = {0, u[r], 0, (float)some};
  }
  if (!VALUES) return;
  store_queries<CE>(a.sum, head, row, sum, Same{1}, c.first_value, c.value_dim, true);
  if (!has_o(a)) store_queries<CE>(a.o32, head, row, o, Same{1}, c.first_value, c.value_dim, true);
}

KERNEL(rows, SecondArgs a, THREADS) {
  const PairArgs& c = a.c;
  ArrayRow row;
  if (!row.find(c) || !row.has_sequence(c)) return;
  const int lane = threadIdx.x % 32;
  const i64 at = row.at;
  Numbers n = a.numbers[at];
  float delta = 0, z = 0;
#if VALUES
  const float* sum = (const float*)a.sum.data + at * c.value_dim;
  const float* o = has_o(a) ? row.of<const float>(c.o) : (const float*)a.o32.data + at * c.value_dim;
  const element *dout = row.of<const element>(c.dout), *cot_o = row.of<const element>(a.cot_o);
  for (int e = lane; e < c.value_dim; e += 32) {
    float g = n.seen != 0 ? fmaf(-n.u, o[e], sum[e]) : 0;
    if (a.gdout.data) row.of<element>(a.gdout)[e] = rounded(g);
    if (n.seen == 0) continue;
    if (c.dout.data) delta = fmaf(read(dout[e]), o[e], delta), z = fmaf(read(dout[e]), g, z);
    if (a.cot_o.data) z = fmaf(read(cot_o[e]), o[e], z);
  }
  delta = lane_sum(delta), z = lane_sum(z);
#endif
  if (lane != 0) return;
  if (c.dlse) delta -= c.dlse[at];
  if (a.cot_lse) z -= a.cot_lse[at];
  a.numbers[at] = {delta, n.u, z, n.seen};
  if (a.gdlse) a.gdlse[at] = n.u;
}

KERNEL(queries, SecondArgs a, THREADS) {
  __shared__ Shared shared;
  const PairArgs& c = a.c;
  const QueryTile<Head> own(c, c, last_first());
  const Head& head = own.head;
  if (is_finite(a, own.sequence, head.key_head)) return;
  const int row = own.row;
  Sums<CD> gq;
  clear<CD>(gq);
  NO_UNROLL for (int key = own.first_key(); key < own.seen.end; key += SIDE) {
    Seconds of;
    each_second<false>(a, shared, head, row, key, of, [&](int r, int e, const Pair& pair) {
      of.x[r][e] = pair.x, of.ds[r][e] = pair.ds;
    });
    auto add_pairs = [&](Sums<CD>& sum) {
      NO_UNROLL for (int term = 0; term < (a.ddk.data ? 2 : 1); term++) {
        if (term == 0) publish(shared, of.x);
        else publish(shared, of.ds);
        accumulate<CD>(shared, sum, key_rows(term == 0 ? c.k : a.ddk, head, key), c.first_dim, c.dim);
        __syncthreads();
      }
    };
    add_tile<CD, NARROW>(gq, add_pairs);
  }
  store_queries<CD>(a.gq, head, row, gq, Same{c.scale}, c.first_dim, c.dim);
}

// With SLOTS also what these keys add to gq.
template <class SLOTS> DEV void keys_of(const SecondArgs& a, const SLOTS& slots) {
  constexpr bool FUSED = FUSED_BY<SLOTS>;
  __shared__ Shared shared;
  const PairArgs& c = a.c;
  Task task = c.tasks[blockIdx.x / c.key_heads];
  const Sequence s = c.sequences[task.first];
  const int key_head = blockIdx.x % c.key_heads, group = c.heads / c.key_heads, key = task.key_tile * SIDE;
  if (is_finite(a, task.first, key_head) || lacks(slots, task.key_tile)) return;
  const bool wants_gk = a.gk.data && c.first_dim < c.dim, wants_gv = VALUES && a.gv.data && c.first_value < c.value_dim;
  Sums<CD> gk;
  Sums<CE> gv;
  clear<CD>(gk), clear<CE>(gv);
  NO_UNROLL for (int h = key_head * group; h < (key_head + 1) * group; h++) {
    Head head(c, s, h);
    NO_UNROLL for (int row = 0; row < s.queries; row += SIDE) {
      if (!may_see(c, s, row, key)) continue;
      Seconds of;
      Sums<CD> gq;
      each_second<true>(a, shared, head, row, key, of, [&](int r, int e, const Pair& pair) {
        of.x[r][e] = pair.x, of.ds[r][e] = pair.ds, of.moved[r][e] = pair.moved, of.p[r][e] = pair.p;
      });
      if (wants_gv) {
        NO_UNROLL for (int term = 0; term < (a.cot_o.data ? 2 : 1); term++) {
          if (term == 0) publish(shared, of.moved);
          else publish(shared, of.p);
          accumulate<CE>(shared, gv, query_rows(term == 0 ? c.dout : a.cot_o, head, row), c.first_value, c.value_dim);
          __syncthreads();
        }
      }
      if (FUSED) clear<CD>(gq);
      NO_UNROLL for (int term = 0; term < 2; term++) {
        if (wants_gk && (term == 0 || a.ddq.data)) {
          if (term == 0) publish(shared, of.x);
          else publish(shared, of.ds);
          accumulate<CD>(shared, gk, query_rows(term == 0 ? c.q : a.ddq, head, row), c.first_dim, c.dim);
          __syncthreads();
        }
        if (FUSED && (term == 0 || a.ddk.data)) {
          if (term == 0) publish_across(shared, of.x);
          else publish_across(shared, of.ds);
          accumulate<CD>(shared, gq, key_rows(term == 0 ? c.k : a.ddk, head, key), c.first_dim, c.dim);
          __syncthreads();
        }
      }
      if constexpr (FUSED) leave(c, slots, s, h, row, task.key_tile, 0, gq);
    }
  }
  if (wants_gk) store_keys<CD>(a.gk, s, key_head, key, gk, Same{c.scale}, c.first_dim, c.dim);
  if (wants_gv) store_keys<CE>(a.gv, s, key_head, key, gv, Same{1}, c.first_value, c.value_dim);
}
KERNEL(keys, SecondArgs a, THREADS) { keys_of(a, NoSlots()); }

#if FUSES
KERNEL_ARGS(FusedSecondArgs)
KERNEL(fused, FusedSecondArgs f, THREADS) { keys_of(f.a, f.slots); }
#endif

#if OPTIONS
KERNEL(gbias, SecondArgs a, THREADS) {
  __shared__ Shared shared;
  const PairArgs& c = a.c;
  Task task = c.tasks[blockIdx.x / c.bias_heads];
  const int own = blockIdx.x % c.bias_heads, row = task.row_tile * SIDE, key = task.key_tile * SIDE;
  Pairs sum = {};
  each_sharing(c, task, own, [&](const Head& head) {
    Seconds of;
    each_second<false>(a, shared, head, row, key, of, [&](int r, int e, const Pair& pair) { sum[r][e] += pair.score; });
  });
  store_pairs(c, task, a.gbias, own, sum);
}
#endif

KERNEL(gsinks, SecondArgs a, THREADS) {
  const PairArgs& c = a.c;
  const int h = blockIdx.x;
  float sum = 0, dds = a.ddsinks ? a.ddsinks[h] : 0;
  struct Row { Numbers of; float lse; };
  auto load = [&](i64 at) { return Row{a.numbers[at], c.lse[at]}; };
  auto add = [&](const Row& x) { sum = fmaf(weight_of_sink(a, h, x.lse), fmaf(dds - x.of.u, x.of.delta, x.of.z), sum); };
  if (c.sinks[h] != -INF) each_row_of_head<THREADS>(c, h, load, add);
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) a.gsinks[h] = -sum;
}
