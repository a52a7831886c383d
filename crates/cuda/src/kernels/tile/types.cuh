// Element types and exponentials, of every kernel. NVRTC compiles this text as it stands, without headers.
//
// Exponentials are `ex2.approx` of the difference times log2 e: 2 ulp and three roundings of the argument, within the
// 4 + 4|x| roundoffs of the profiles (docs/numerics.md).
//
// Compile-time: STORAGE, the type of the tensors that are not wide: 0 f32, 1 bf16, 2 f16.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEV static __device__ __forceinline__
#define METHOD __device__ __forceinline__  // of a struct
#define INLINE __attribute__((always_inline))  // of a function object that is large
// A kernel with its one argument, and the bounds of its launches.
#define KERNEL(name, args, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ args)
// A kernel that is not compiled: a template that nobody instantiates. The host writes it in place of `KERNEL` of all
// kernels of a module but one.
#define LEFT_OUT(name, args, ...) template <int> __global__ void name(const args)
// Before a loop: it stays one, is written out, or is written out by so many rounds.
#define PRAGMA(text) _Pragma(#text)
#define NO_UNROLL PRAGMA(unroll 1)
#define UNROLL_ALL PRAGMA(unroll)
#define UNROLL_BY(rounds) PRAGMA(unroll rounds)
// A loop that is written out: i = 0, 1 … count - 1.
#define UNROLL(i, count) UNROLL_ALL for (int i = 0; i < (count); i++)
// Two such loops, one within the other.
#define UNROLL2(i, rows, j, columns) UNROLL(i, rows) UNROLL(j, columns)
#define INF __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fffffff)
constexpr float LOG2E = 1.4426950408889634f;
// Asserts that a kernel lays out the dynamic shared memory of its launches (`shared_bytes`).
#define CHECK_SHARED(kernel, bytes) static_assert((bytes) == SHARED_##kernel, "the shared memory of " #kernel)

// ---- elements ----
#if STORAGE == 0
typedef float element;
DEV float read(element x) { return x; }
DEV element rounded(float x) { return x; }
#elif STORAGE == 1
#define TYPE "bf16"
typedef u16 element;
DEV float read(element x) { return __uint_as_float((u32)x << 16); }
DEV element rounded(float x) { element y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
#else
#define TYPE "f16"
typedef u16 element;
DEV float read(element x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
DEV element rounded(float x) { element y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
#endif
#if STORAGE != 0
DEV float read(float x) { return x; }
DEV u32 pack(float low, float high) { u32 r; asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
DEV float2 unpack(u32 x) {
  float2 y;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32." TYPE " %0, l;\ncvt.f32." TYPE " %1, h;\n}" : "=f"(y.x), "=f"(y.y) : "r"(x));
  return y;
}
constexpr u32 TOP = STORAGE == 1 ? 0x7f80 : 0x7c00;  // the exponent of infinities and NaN
DEV u32 finite(u32 x) {                              // the bits of the finite numbers of a pair
  return ((x & 0x7fff) < TOP ? 0xffff : 0) | ((x >> 16 & 0x7fff) < TOP ? 0xffff0000 : 0);
}
#endif

// 2^x: 1 at 0, 0 at -inf, 2 ulp. e^(x - m) is exp2((x - m)·log2 e), subtracted first: 3 roundings of the argument.
DEV float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float weight(float x, float m) { return exp2_fast(__fmul_rn(__fsub_rn(x, m), LOG2E)); }
// The weight of a sink: 1 in a row that sees nothing else, also where both are infinite.
DEV float weight_of_sink(float sink, float lse) { return sink == lse ? 1 : weight(sink, lse); }
// 1/x: 1 ulp, 0 at infinities.
DEV float reciprocal_fast(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// 1 - 2/(e^{2|x|} + 1) with the sign of x: 5 roundoffs of 1 at most, and 0 at 0.
DEV float tanh_fast(float x) { return copysignf(fmaf(-2, reciprocal_fast(exp2_fast(fabsf(x) * (2 * LOG2E)) + 1), 1), x); }
DEV bool is_finite(float x) { return fabsf(x) < INF; }
// The larger; NaN if either is.
DEV float max_nan(float x, float y) { float z; asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z; }

// The sum over LANES lanes that follow each other, in all of them.
template <int LANES = 32, class T> DEV T lane_sum(T x) {
  UNROLL_ALL for (int n = LANES / 2; n; n /= 2) x += __shfl_xor_sync(~0u, x, n);
  return x;
}
// The sum of a number of each of so many threads of a block, in a fixed order. Once in a kernel.
template <int COUNT, class T> DEV T block_sum(T x) {
  __shared__ T sums[COUNT];
  sums[threadIdx.x] = x;
  for (int n = COUNT / 2; n; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) sums[threadIdx.x] += sums[threadIdx.x + n];
  }
  __syncthreads();
  return sums[0];
}

// Of so many numbers the last for which something holds that holds for the first ones alone; -1: for none.
template <class F> DEV int last_where(int count, const F& holds) {
  int first = -1;
  for (int end = count; first + 1 < end;) {
    const int middle = (first + end) / 2;
    if (holds(middle)) first = middle; else end = middle;
  }
  return first;
}
// The same number, of which the compiler knows nothing: it is neither used beforehand nor computed again.
template <class T> DEV T opaque(T x) { asm volatile("" : "+r"(x)); return x; }
// A condition that the compiler knows, as an argument.
template <bool B> struct Is { static constexpr bool value = B; };
// A factor of all rows alike.
struct Same {
  float factor;
  METHOD float operator[](int) const { return factor; }
};
