// Parts of CUDA that every kernel needs that is compiled for the host.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

struct int2 { int x, y; };

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

template <class To, class From> static To bits(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
static float __int_as_float(int x) { return bits<float>(x); }
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fsub_rn(float x, float y) { return x - y; }
static float __fdividef(float x, float y) { return x / y; }
using std::min, std::max;
