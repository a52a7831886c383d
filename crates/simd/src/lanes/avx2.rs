//! AVX2 with FMA: 16 registers of 8 f32.

use super::x86::x86_level;
use super::{Isa, Kernel, Lanes};
use crate::tile::Registers;
use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

x86_level! {
    token Avx2: "avx2,fma" if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    register F32x8: 8 lanes in __m256, flushes: false;
    // 12 sums, a row of 2 registers and a factor: 15 of 16.
    tile Registers<F32x8, 6, 2>, short Registers<F32x8, 6, 2>;
    memory { splat: _mm256_set1_ps, load: _mm256_loadu_ps, store: _mm256_storeu_ps }
    operators {
        Add::add: _mm256_add_ps,
        Sub::sub: _mm256_sub_ps,
        Mul::mul: _mm256_mul_ps,
        Div::div: _mm256_div_ps
    }
    registers {
        fn mul_add(a, b, c) { _mm256_fmadd_ps(a, b, c) }
        fn max(a, b) { _mm256_max_ps(a, b) }
        fn mul_sub(a, b, c) { _mm256_fmsub_ps(a, b, c) }
        fn mul_pow2(a, n) {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
        }
        fn select_less(a, limit, yes, no) {
            _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, limit))
        }
    }
    numbers {
        fn reduce_max(a) {
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        }
        fn reduce_add(a) {
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
    }
}
