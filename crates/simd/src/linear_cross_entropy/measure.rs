//! Measures that a filter takes of the gradients of logits of a band of tokens in a tile of classes:
//!
//! ```text
//! (C36) whether |da_iv| < ε everywhere
//! (C37) Σ_v |da_iv|           for each token
//! (C38) Σ_i |da_iv| ‖h_i‖     for each class
//! ```

use crate::lanes::{Isa, Kernel, Lanes};
use crate::tile::BAND;

/// Returns whether (C36) holds, and only then writes the sums.
pub struct Measure<'a> {
    /// da, a row of [`BAND`] tokens for every class; behind the last token 0 up to a whole register.
    pub da: &'a [f32],
    pub tokens: usize,
    /// ‖h_i‖ of [`BAND`] tokens, 0 behind the last.
    pub norms: &'a [f32],
    pub eps: f32,
    /// [`BAND`] tokens.
    pub by_token: &'a mut [f32],
    /// A sum for each row of `da`.
    pub by_class: &'a mut [f32],
}

impl Kernel<bool> for Measure<'_> {
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) -> bool {
        let small = self.is_small(isa);
        if small {
            self.sum(isa);
        }
        small
    }
}

impl Measure<'_> {
    /// (C36), up to the first class in which it does not hold. NaN is not below ε.
    #[inline(always)]
    fn is_small<I: Isa>(&self, isa: I) -> bool {
        let (zero, one) = (I::F32::splat(isa, 0.0), I::F32::splat(isa, 1.0));
        let eps = I::F32::splat(isa, self.eps);
        for row in self.da.chunks_exact(BAND) {
            let mut large = zero;
            for at in (0..self.tokens).step_by(I::F32::N) {
                let size = magnitude(isa, &row[at..]);
                large = large + size.select_less(eps, zero, one);
            }
            if large.reduce_add() > 0.0 {
                return false;
            }
        }
        true
    }

    #[inline(always)]
    fn sum<I: Isa>(&mut self, isa: I) {
        self.by_token.fill(0.0);
        for (row, sum) in self.da.chunks_exact(BAND).zip(&mut *self.by_class) {
            let mut weighted = I::F32::splat(isa, 0.0);
            for at in (0..self.tokens).step_by(I::F32::N) {
                let size = magnitude(isa, &row[at..]);
                let by_token = &mut self.by_token[at..];
                (size + I::F32::load(isa, by_token)).store(by_token); // (C37)
                weighted = size.mul_add(I::F32::load(isa, &self.norms[at..]), weighted); // (C38)
            }
            *sum = weighted.reduce_add();
        }
    }
}

/// |x|, also of NaN.
#[inline(always)]
fn magnitude<I: Isa>(isa: I, x: &[f32]) -> I::F32 {
    let x = I::F32::load(isa, x);
    x.max(I::F32::splat(isa, 0.0) - x)
}
