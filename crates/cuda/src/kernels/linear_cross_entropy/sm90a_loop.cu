// The sums and the loop of the products in sm90a_products.cu: what goes on in another launch, and the kernels.

// ---- gradients of operands ----
// dw. Calls f(element, accumulator) for each pair of columns of a thread that the classes of the chunk have.
template <class F> DEV void each_pair(const CrossEntropyArgs& c, const Corner& at, int row, F f) {
  UNROLL2(r, 2, j, TILE / 8) {
    const int column = at.column + column_of(j, 0);
    if (row + 8 * r < c.classes && column < c.dim) f((i64)(row + 8 * r) * c.dim + column, 4 * j + 2 * r);
  }
}
// The sums over the chunks of tokens before.
DEV void read_head(const CrossEntropyArgs& c, float (&z)[TILE / 2], const Corner& at, int row, float scale) {
  each_pair(c, at, row, [&](i64 to, int i) {
    const float2 x = *(const float2*)(c.head + to);
    z[i] = SCALED ? x.x * scale : x.x, z[i + 1] = SCALED ? x.y * scale : x.y;
  });
}
DEV void write_head(const CrossEntropyArgs& c, const float (&z)[TILE / 2], const Corner& at, int row) {
  const i64 first = (i64)c.first_class * c.dim;
  each_pair(c, at, row, [&](i64 to, int i) {
    if (!c.ends) *(float2*)(c.head + to) = make_float2(z[i], z[i + 1]);
    else if (c.wide) *(float2*)((float*)c.dw + first + to) = make_float2(z[i], z[i + 1]);
    else *(u32*)((element*)c.dw + first + to) = pack(z[i], z[i + 1]);
  });
}

// dh is summed over the classes of a block one after the other, and over blocks along the tree. What waits for other
// classes lies as threads hold it: [waiting][tile][warpgroup][accumulators / 4][thread]. As many sums of blocks wait
// before block n as n has bits, and behind them the sum that goes on in the next chunk.
template <int COLUMNS> struct Waiting {
  float4* first;
  i64 apart;  // from one to the next
  METHOD Waiting(const CrossEntropyArgs& c, const Corner& at, int pairs, int columns) {
    const i64 tile = (i64)(at.row / ROWS) * columns + at.column / COLUMNS;
    first = (float4*)c.hidden + (2 * tile + own_group()) * (COLUMNS / 8 * 128) + threadIdx.x % 128;
    apart = (i64)pairs * columns * (COLUMNS / 8 * 512);
  }
  // Calls f(vector, its first number) for each four of a thread.
  template <class F> METHOD void each(int n, F f) const {
    UNROLL_ALL for (int i = 0; i < COLUMNS / 2; i += 4) f(first[n * apart + i * 32], i);
  }
  METHOD void get(int n, float (&z)[COLUMNS / 2]) const {
    each(n, [&](const float4& x, int i) { z[i] = x.x, z[i + 1] = x.y, z[i + 2] = x.z, z[i + 3] = x.w; });
  }
  METHOD void put(int n, const float (&z)[COLUMNS / 2]) const {
    each(n, [&](float4& x, int i) { x = make_float4(z[i], z[i + 1], z[i + 2], z[i + 3]); });
  }
  METHOD void add(int n, float (&z)[COLUMNS / 2]) const {
    each(n, [&](const float4& x, int i) { z[i] += x.x, z[i + 1] += x.y, z[i + 2] += x.z, z[i + 3] += x.w; });
  }
};

template <int COLUMNS> DEV void write_hidden(const CrossEntropyArgs& c, const float (&z)[COLUMNS / 2], const Corner& at, int row, int count) {
  UNROLL(r, 2) {
    const int i = row + 8 * r;
    if (i >= count) continue;
    const i64 to = (i64)c.tokens[c.first_token + i].index * c.dim;
    UNROLL(j, COLUMNS / 8) {
      const int column = at.column + column_of(j, 0);
      if (column >= c.dim) continue;
      const float x = z[4 * j + 2 * r], y = z[4 * j + 2 * r + 1];
      if (c.wide) *(float2*)((float*)c.dh + to + column) = make_float2(x, y);
      else *(u32*)((element*)c.dh + to + column) = pack(x, y);
    }
  }
}

// ---- the loop ----
template <Kind K> DEV Rows read_rows(const ProductArgs& x, int row, int count) {
  const CrossEntropyArgs& c = x.c;
  Rows rows = {};
  const float scale = K == GRADIENT ? scale_of(x) : 1;
  UNROLL(r, 2) {
    const int i = row + 8 * r;
    rows.target[r] = -1;
    if (i >= count) continue;
    rows.target[r] = c.tokens[c.first_token + i].target - c.first_class;
    if (K == GRADIENT) rows.pull[r] = scaled(c.pulls[c.first_token + i], scale);
  }
  return rows;
}

// A consumer's place in the ring of stages.
template <Kind K, int COLUMNS> struct Place {
  typedef Stages<K, COLUMNS> S;
  typename S::Ring ring;
  METHOD Place(u32 base) : ring(base, 0) {}
  METHOD void wait_full() const { ring.wait_full(); }
  METHOD u32 a() const { return b() - S::A + own_group() * PANEL; }
  METHOD u32 b() const { return ring.base + ring.stage() * S::BYTES + S::A; }
  METHOD u32 at() const { return ring.stage(); }
  METHOD void next() { ring.advance(); }
  METHOD void release(u32 i) const {
    if (lane_id() < 2) arrive_cluster(ring.empty_of(i), lane_id());
  }
};
// The same in the rings of `leaves`.
template <> struct Place<LEAVES, TILE> {
  Rings s;
  Rings::RingA rows;
  Rings::RingB columns;
  METHOD Place(u32 base) : s{base}, rows(s.ring_a(own_group(), 0)), columns(base, 0) {}
  METHOD void wait_full() const { rows.wait_full(), columns.wait_full(); }
  METHOD u32 a() const { return s.a(own_group(), rows.stage()); }
  METHOD u32 b() const { return s.b(columns.stage()); }
  METHOD u32 at() const { return rows.stage() | columns.stage() << 8; }
  METHOD void next() { rows.advance(), columns.advance(); }
  METHOD void release(u32 at) const {
    if (lane_id() < 2) arrive_cluster(columns.empty_of(at >> 8), lane_id());
    else if (lane_id() == 2) arrive(rows.empty_of(at & 255));
  }
};

// Multiplies `length` of the reduction, which is not 0. ADD: to what z holds. `beside` runs under the first products.
template <bool ADD, Kind K, int COLUMNS, class F>
DEV void multiply(float (&z)[COLUMNS / 2], Place<K, COLUMNS>& ring, int length, F beside) {
  u32 before = 0;
  auto begin = [&](bool add) {
    ring.wait_full();
    pin(z), mma_begin();
    step<K, COLUMNS>(z, ring.a(), ring.b(), add);
    mma_commit();
  };
  int k = 0;
  if (ADD) {  // outside the loop: else the assembler serializes its products
    begin(true);
    before = ring.at(), ring.next(), k = STEP;
  }
  NO_UNROLL for (; k < length; k += STEP) {
    begin(ADD || k);
    if (k == 0) beside();
    mma_wait<1>(), pin(z);  // the step before is done: its stage is free
    if (k) ring.release(before);
    before = ring.at(), ring.next();
  }
  mma_wait<0>(), pin(z);
  ring.release(before);
}
template <int N> DEV void unscale(float (&z)[N], const ProductArgs& x) {
  const float factor = unscale_of(x);
  UNROLL(i, N) z[i] = SCALED ? z[i] * factor : z[i];
}

template <Kind K> DEV void consume_logits(u32 base, const ProductArgs& x, int count, int pairs, int columns) {
  const u32 store = base + Stages<K, TILE>::AT_STORE + own_group() * 2 * PANEL;
  const bool plain = is_plain(x.c);
  Place<K, TILE> ring(base);
  NO_UNROLL for (Walk<K, TILE> walk(pairs, columns); walk.there(); walk.next()) {
    const Corner at = walk.corner();
    const int row = at.row + row_in_tile();
    Rows rows = {};
    float z[TILE / 2];
    multiply<false>(z, ring, x.c.dim, [&] { rows = read_rows<K>(x, row, count); });
    if (K == LEAVES) write_leaves(x, z, rows, at, row, count, plain);
    else write_gradients(x, z, rows, at, row, count, plain, store, own_group());
  }
}

// The tiles of dh, block after block of the classes of the chunk.
template <int COLUMNS> DEV void consume_hidden(u32 base, const ProductArgs& x, int count, int pairs, int columns) {
  const CrossEntropyArgs& c = x.c;
  Place<HIDDEN, COLUMNS> ring(base);
  NO_UNROLL for (Walk<HIDDEN, COLUMNS> walk(pairs, columns); walk.there(); walk.next()) {
    NO_UNROLL for (int from = 0; from < c.classes;) {
      const u32 within = (c.first_class + from) % x.block;
      float z[COLUMNS / 2];
      if (within) Waiting<COLUMNS>(c, walk.corner(), pairs, columns).get(__popc((c.first_class + from) / x.block), z);
      else clear(z);
      const int length = min((u32)(c.classes - from), x.block - within);
      multiply<true>(z, ring, length, [] {});
      // Found again, as registers are few beside the accumulators.
      const Corner at = walk.corner();
      const Waiting<COLUMNS> waiting(c, at, pairs, columns);
      from += length;
      const u32 end = c.first_class + from, block = (end - 1) / x.block;
      const int before = __popc(block);
      const bool ends = c.ends && from == c.classes;
      if (end % x.block && !ends) {
        waiting.put(before, z);
        continue;
      }
      unscale(z, x);
      const int folds = ends ? before : before - __popc(block & (block + 1));
      NO_UNROLL for (int n = 1; n <= folds; n++) waiting.add(before - n, z);
      if (ends) write_hidden<COLUMNS>(c, z, at, at.row + row_in_tile(), count);
      else waiting.put(before - folds, z);
    }
  }
}

// dw. Where no token of a chunk counts, nothing is multiplied.
DEV void write_nothing(const CrossEntropyArgs& c, int pairs, int columns) {
  for (Walk<HEAD, TILE> walk(pairs, columns); walk.there(); walk.next()) {
    const Corner at = walk.corner();
    float z[TILE / 2];
    clear(z);
    if (!c.begins) read_head(c, z, at, at.row + row_in_tile(), 1);
    write_head(c, z, at, at.row + row_in_tile());
  }
}
DEV void consume_head(u32 base, const ProductArgs& x, int count, int pairs, int columns) {
  const CrossEntropyArgs& c = x.c;
  const u32 store = base + Stages<HEAD, TILE>::AT_STORE + own_group() * 2 * PANEL;
  Place<HEAD, TILE> ring(base);
  NO_UNROLL for (Walk<HEAD, TILE> walk(pairs, columns); walk.there(); walk.next()) {
    const Corner at = walk.corner();
    const int row = at.row + row_in_tile();
    float z[TILE / 2];
    clear(z);
    if (!c.begins) read_head(c, z, at, row, scale_of(x));
    multiply<true>(z, ring, count, [] {});
    unscale(z, x);
    // The copy engine writes rows of the storage type to which nothing else is added.
    if (c.begins && c.ends && !c.wide) store_tile(&x.out, z, at, store, own_group());
    else write_head(c, z, at, row);
  }
}

template <Kind K, int COLUMNS> DEV void run(const ProductArgs& x) {
  typedef Stages<K, COLUMNS> S;
  const u32 base = shared_panels();  // the same in both blocks
  const int count = count_of(x.c);
  const int pairs = (row_count<K>(x.c, count) + 2 * ROWS - 1) / (2 * ROWS), columns = (column_count<K>(x.c) + COLUMNS - 1) / COLUMNS;
  if (threadIdx.x == 0) {
    prefetch(&x.a), prefetch(&x.b);
    if (K == LEAVES) Rings{base}.begin();
    else S::Ring::init(base, 1, 2 * 8);
    barrier_init_fence();
  }
  cluster_sync();  // no block sends before the other's barriers exist
  if (threadIdx.x < 128) {
    registers_down<40>();
    if (K != LEAVES && threadIdx.x == 0) produce<K, COLUMNS>(base, x, count, pairs, columns);
    if (K == LEAVES && threadIdx.x < 96 && lane_id() == 0) produce_rings({base}, x, pairs, columns, threadIdx.x / 32);
  } else {
    registers_up<232>();
    if constexpr (K < HIDDEN) consume_logits<K>(base, x, count, pairs, columns);
    else if constexpr (K == HIDDEN) consume_hidden<COLUMNS>(base, x, count, pairs, columns);
    else if (count) consume_head(base, x, count, pairs, columns);
    else write_nothing(x.c, pairs, columns);
    if (S::AT_STORE != S::AT_BARRIERS && threadIdx.x % 128 == 0) store_wait();
  }
  cluster_sync();  // no block leaves while the other may still arrive at its barriers
}

CHECK_SHARED(leaves, Rings::ALL);
CHECK_SHARED(gradient, (Stages<GRADIENT, 256>::ALL));
CHECK_SHARED(hidden, (Stages<HIDDEN, 256>::ALL));
CHECK_SHARED(hidden_192, (Stages<HIDDEN, 192>::ALL));
CHECK_SHARED(head, (Stages<HEAD, 256>::ALL));
#define CLUSTER_KERNEL(name, args) extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) name(const __grid_constant__ args)
CLUSTER_KERNEL(leaves, ProductArgs x) { run<LEAVES, 256>(x); }
CLUSTER_KERNEL(gradient, ProductArgs x) { run<GRADIENT, 256>(x); }
CLUSTER_KERNEL(hidden, ProductArgs x) { run<HIDDEN, 256>(x); }
CLUSTER_KERNEL(hidden_192, ProductArgs x) { run<HIDDEN, 192>(x); }
CLUSTER_KERNEL(head, ProductArgs x) { run<HEAD, 256>(x); }
