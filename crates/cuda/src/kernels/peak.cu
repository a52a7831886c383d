// The peak of a device's arithmetic: products of operands that stay in registers, or in shared memory
// where the tensor cores read them there. Compile-time: UNIT, 0: fused multiply-adds in f32, 1: mma.sync, 2: wgmma.
//
// The operands are random numbers of both signs: the power that a product takes depends on its bits.
KERNEL_ARGS(Peak)
DEV float noise(u32 x) {  // in (-1, 1)
  x = (x ^ x >> 16) * 0x7feb352du, x = (x ^ x >> 15) * 0x846ca68bu;
  return (int)(x ^ x >> 16) * 0x1p-31f;
}

#if UNIT == 0
constexpr int SUMS = 32;
extern "C" __global__ void __launch_bounds__(256) peak(const Peak c) {
  float sums[SUMS], x = noise(threadIdx.x), y = noise(threadIdx.x + 256);
  UNROLL(i, SUMS) sums[i] = noise(blockIdx.x * SUMS + i);
  NO_UNROLL for (int round = 0; round < c.rounds; round++)
    UNROLL(i, SUMS) sums[i] = fmaf(sums[i], x, y);
  float sum = 0;
  UNROLL(i, SUMS) sum += sums[i];
  if (sum == 0x1p99f) c.sink[blockIdx.x] = sum;
}
#elif UNIT == 1
constexpr int SUMS = 12;  // fragments of 16 × 8, as many as hide the latency of a product in eight warps
extern "C" __global__ void __launch_bounds__(256) peak(const Peak c) {
  float sums[SUMS][4] = {};
  u32 a[4], b[SUMS];
  UNROLL(i, 4) a[i] = pack(noise(8 * threadIdx.x + i), noise(8 * threadIdx.x + i + 4));
  UNROLL(i, SUMS) b[i] = pack(noise(threadIdx.x + 512 * i), noise(threadIdx.x + 512 * i + 256));
  NO_UNROLL for (int round = 0; round < c.rounds; round++)
    UNROLL(i, SUMS) multiply(sums[i], a, b[i], b[(i + 1) % SUMS]);
  float sum = 0;
  UNROLL(i, 4 * SUMS) sum += sums[i / 4][i % 4];
  if (sum == 0x1p99f) c.sink[blockIdx.x] = sum;
}
#else
extern "C" __global__ void __launch_bounds__(256) peak(const Peak c) {
  // A row of a for each of 64 rows of a warpgroup, and 128 rows of b: panels of 64 columns.
  __shared__ __align__(1024) u32 panels[(2 * 64 + 128) * 32];
  for (int i = threadIdx.x; i < (2 * 64 + 128) * 32; i += 256) panels[i] = pack(noise(2 * i), noise(2 * i + 1));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const u32 at = (u32)__cvta_generic_to_shared(panels), group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const u32 a = at + group * 8192, b = at + 2 * 8192;
  float sums[2][64] = {};
  NO_UNROLL for (int round = 0; round < c.rounds; round++)
    UNROLL(i, 2) {
      pin(sums[i]);
      mma_begin();
      UNROLL(step, 4) Mma<128>::ss<K_MAJOR, K_MAJOR>(sums[i], k_major(a + 32 * step), k_major(b + 32 * step), 1);
      mma_commit(), mma_wait<1>();
    }
  mma_wait<0>();
  pin(sums[0]), pin(sums[1]);
  float sum = 0;
  UNROLL(i, 128) sum += sums[i / 64][i % 64];
  if (sum == 0x1p99f) c.sink[blockIdx.x] = sum;
}
#endif
