// Products of matrices in f32 fused multiply-adds.

// sum += a·b over `length` of the reduction.
template <class A, class B> DEV void multiply(Shared& shared, float (&sum)[8][8], const A& a, const B& b, int length) {
  float x[8], y[8];
  a.fetch(x, 0), b.fetch(y, 0);
  a.put(shared.a[0], x), b.put(shared.b[0], y);
  __syncthreads();
  NO_UNROLL for (int first = 0, stage = 0; first < length; first += DEPTH, stage ^= 1) {
    const bool more = first + DEPTH < length;
    if (more) a.fetch(x, first + DEPTH), b.fetch(y, first + DEPTH);
    UNROLL(k, DEPTH) {
      float u[8], v[8];
      UNROLL(half, 2) {
        read_four(u + 4 * half, &shared.a[stage][k][spread(ty(), 4 * half)]);
        read_four(v + 4 * half, &shared.b[stage][k][spread(tx(), 4 * half)]);
      }
      UNROLL2(r, 8, c, 8) sum[r][c] = fmaf(u[r], v[c], sum[r][c]);
    }
    if (more) a.put(shared.a[stage ^ 1], x), b.put(shared.b[stage ^ 1], y);
    __syncthreads();
  }
}
