//! Tiles of bf16 beside the registers of AVX-512, multiplied by `tdpbf16ps` of AMX or by `vdpbf16ps`. The words of
//! AVX-512 BW, which every CPU with AVX-512 BF16 has, come into their order by `vpermw`.

use super::Lanes;
use super::amx::Tiled;
use super::avx512::{Avx512, F32x16};
use super::avx512bf16::Avx512Bf16;
use super::matrix::{CUT, Matrix, MatrixKernel, Product, SIDE, WORDS, multiply_pairs, spin_pairs};
use super::pairs::Pairs;
use std::arch::x86_64::*;
use std::mem::transmute;

/// The token of either instruction: one type, so that a kernel is compiled once for both.
#[derive(Clone, Copy)]
pub struct Multiplier<'a> {
    pairs: Avx512Bf16,
    tiles: Option<Tiled<'a>>,
}

impl<'a> Multiplier<'a> {
    /// The token of tiles that are configured, or of pairs.
    pub fn new(pairs: Avx512Bf16, tiles: Option<Tiled<'a>>) -> Self {
        Multiplier { pairs, tiles }
    }

    /// Runs a kernel with the features enabled.
    #[inline]
    pub fn enter<T>(self, kernel: impl MatrixKernel<T>) -> T {
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
        fn gate<T>(by: Multiplier<'_>, kernel: impl MatrixKernel<T>) -> T {
            kernel.run(by)
        }
        // SAFETY: a token of pairs exists only where `detect` saw the features.
        unsafe { gate(self, kernel) }
    }
}

/// Places of words that lie in two halves, those of both in turns.
const TURNS: [u16; 32] = {
    let mut places = [0; 32];
    let mut at = 0;
    while at < 32 {
        places[at] = (at / 2 + at % 2 * 16) as u16;
        at += 1;
    }
    places
};

/// Places of elements of two registers, those of both in turns, from place `first` of either on.
const fn zip_from(first: u16) -> [u16; 32] {
    let mut places = [0; 32];
    let mut at = 0;
    while at < 32 {
        places[at] = first + (at / 2 + at % 2 * 32) as u16;
        at += 1;
    }
    places
}

/// Places of the first half of the elements, and of the rest.
const ZIPPED: [[u16; 32]; 2] = [zip_from(0), zip_from(16)];

impl Matrix for Multiplier<'_> {
    type Isa = Avx512;

    #[inline(always)]
    fn isa(self) -> Avx512 {
        Pairs::isa(self.pairs)
    }

    #[inline(always)]
    fn neighbours(self, low: F32x16, high: F32x16) -> F32x16 {
        #[target_feature(enable = "avx512f,avx512bf16")]
        #[inline]
        fn op(low: __m512, high: __m512) -> __m512 {
            // SAFETY: 64 bytes that any f32 may have.
            unsafe { transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low)) }
        }
        // SAFETY: a token is in hand, so the features are present.
        F32x16(unsafe { op(low.0, high.0) })
    }

    #[inline(always)]
    fn stacked(self, even: F32x16, odd: F32x16) -> F32x16 {
        #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
        #[inline]
        fn op(even: __m512, odd: __m512) -> __m512 {
            // SAFETY: both are 64 bytes, of which any are words and any are f32.
            unsafe {
                let places = transmute::<[u16; 32], __m512i>(TURNS);
                let halves = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(odd, even));
                _mm512_castsi512_ps(_mm512_permutexvar_epi16(places, halves))
            }
        }
        // SAFETY: a token is in hand, so the features are present.
        F32x16(unsafe { op(even.0, odd.0) })
    }

    #[inline(always)]
    fn split(self, x: F32x16) -> [F32x16; 2] {
        #[target_feature(enable = "avx512f")]
        #[inline]
        fn op(x: __m512) -> [__m512; 2] {
            let digits = _mm512_set1_epi32(CUT as i32);
            let high = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), digits));
            let infinity = _mm512_set1_ps(f32::INFINITY);
            let finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(x), infinity);
            [high, _mm512_maskz_sub_ps(finite, x, high)]
        }
        // SAFETY: a token is in hand, so the features are present.
        let [high, rest] = unsafe { op(x.0) };
        [F32x16(high), F32x16(rest)]
    }

    #[inline(always)]
    fn zipped(self, even: F32x16, odd: F32x16) -> [F32x16; 2] {
        #[target_feature(enable = "avx512f,avx512bw")]
        #[inline]
        fn op(even: __m512, odd: __m512, places: [u16; 32]) -> __m512 {
            // SAFETY: 64 bytes that any numbers of 16 bits may have.
            let places = unsafe { transmute::<[u16; 32], __m512i>(places) };
            let (even, odd) = (_mm512_castps_si512(even), _mm512_castps_si512(odd));
            _mm512_castsi512_ps(_mm512_permutex2var_epi16(even, places, odd))
        }
        // SAFETY: a token is in hand, so the features are present.
        let [low, high] = unsafe { [op(even.0, odd.0, ZIPPED[0]), op(even.0, odd.0, ZIPPED[1])] };
        [F32x16(low), F32x16(high)]
    }

    #[inline(always)]
    fn halves(self, words: F32x16) -> [F32x16; 2] {
        #[target_feature(enable = "avx512f")]
        #[inline]
        fn op(words: __m512) -> [__m512; 2] {
            let words = _mm512_castps_si512(words);
            let odd = _mm512_and_si512(words, _mm512_set1_epi32(CUT as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)), _mm512_castsi512_ps(odd)]
        }
        // SAFETY: a token is in hand, so the features are present.
        let [even, odd] = unsafe { op(words.0) };
        [F32x16(even), F32x16(odd)]
    }

    #[inline(always)]
    fn turn(self, from: &[f32], to: &mut [f32]) {
        // Sixteen registers that a call would pass in memory: one function, from memory to memory.
        #[target_feature(enable = "avx512f")]
        #[inline(never)]
        fn gate(isa: Avx512, from: &[f32], to: &mut [f32]) {
            let mut rows = [F32x16::splat(isa, 0.0).0; SIDE];
            for (row, from) in rows.iter_mut().zip(from[..WORDS].chunks_exact(SIDE)) {
                *row = F32x16::load(isa, from).0;
            }
            let columns = turned(rows);
            for (column, to) in columns.into_iter().zip(to[..WORDS].chunks_exact_mut(SIDE)) {
                F32x16(column).store(to);
            }
        }
        // SAFETY: a token is in hand, so the features are present.
        unsafe { gate(self.isa(), from, to) }
    }

    #[inline(always)]
    fn multiply(self, product: Product<'_>) {
        #[target_feature(enable = "avx512f,avx512bf16")]
        #[inline(never)]
        fn gate(pairs: Avx512Bf16, product: Product<'_>) {
            multiply_pairs(pairs, product);
        }
        match self.tiles {
            Some(tiles) => tiles.gate(product),
            // SAFETY: a token is in hand, so the features are present.
            None => unsafe { gate(self.pairs, product) },
        }
    }

    #[inline(always)]
    fn spin(self, rounds: usize) -> usize {
        match self.tiles {
            Some(tiles) => tiles.spin(rounds),
            None => spin_pairs(self.pairs, rounds),
        }
    }
}

/// The columns of 16 rows of 16 words: pairs of rows are interleaved, then pairs of these, which leaves each quarter
/// of a register with a word of four rows; then quarters move.
#[target_feature(enable = "avx512f")]
#[inline]
fn turned(rows: [__m512; SIDE]) -> [__m512; SIDE] {
    let (mut by_two, mut by_four, mut columns) = (rows, rows, rows);
    for row in (0..SIDE).step_by(2) {
        by_two[row] = _mm512_unpacklo_ps(rows[row], rows[row + 1]);
        by_two[row + 1] = _mm512_unpackhi_ps(rows[row], rows[row + 1]);
    }
    for row in (0..SIDE).step_by(4) {
        for half in 0..2 {
            let low = _mm512_castps_pd(by_two[row + half]);
            let high = _mm512_castps_pd(by_two[row + half + 2]);
            by_four[row + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            by_four[row + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    for column in 0..4 {
        let [a, b] = [by_four[column], by_four[4 + column]];
        let [c, d] = [by_four[8 + column], by_four[12 + column]];
        let [first, second] =
            [_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0x44>(c, d)];
        let [third, fourth] =
            [_mm512_shuffle_f32x4::<0xee>(a, b), _mm512_shuffle_f32x4::<0xee>(c, d)];
        columns[column] = _mm512_shuffle_f32x4::<0x88>(first, second);
        columns[column + 4] = _mm512_shuffle_f32x4::<0xdd>(first, second);
        columns[column + 8] = _mm512_shuffle_f32x4::<0x88>(third, fourth);
        columns[column + 12] = _mm512_shuffle_f32x4::<0xdd>(third, fourth);
    }
    columns
}
