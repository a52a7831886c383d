//! AVX-512 F: 32 registers of 16 f32.

use super::x86::x86_level;
use super::{Isa, Kernel, Lanes};
use crate::tile::Registers;
use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

x86_level! {
    token Avx512: "avx512f" if is_x86_feature_detected!("avx512f");
    register F32x16: 16 lanes in __m512, flushes: true;
    // 24 sums, a row of 2 registers and a factor: 27 of 32.
    // 16 of 8 rows multiply as fast while `b` is in the L1 cache.
    tile Registers<F32x16, 12, 2>, short Registers<F32x16, 8, 2>;
    memory { splat: _mm512_set1_ps, load: _mm512_loadu_ps, store: _mm512_storeu_ps }
    operators {
        Add::add: _mm512_add_ps,
        Sub::sub: _mm512_sub_ps,
        Mul::mul: _mm512_mul_ps,
        Div::div: _mm512_div_ps
    }
    registers {
        fn mul_add(a, b, c) { _mm512_fmadd_ps(a, b, c) }
        fn max(a, b) { _mm512_max_ps(a, b) }
        fn mul_sub(a, b, c) { _mm512_fmsub_ps(a, b, c) }
        fn mul_pow2(a, n) {
            // Not-or-equal lets a NaN pass; from −127 on down the mask writes the zero.
            let normal = _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(n, _mm512_set1_ps(-127.0));
            _mm512_maskz_scalef_ps(normal, a, n)
        }
        fn select_less(a, limit, yes, no) {
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, limit), no, yes)
        }
    }
    numbers {
        fn reduce_max(a) { _mm512_reduce_max_ps(a) }
        fn reduce_add(a) { _mm512_reduce_add_ps(a) }
    }
}
