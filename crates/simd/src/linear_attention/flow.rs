//! Gradients that pass the gates of a chunk:
//!
//! ```text
//! dg_t = Σ_{j < t ≤ i} w_ij + Σ_{i ≥ t} x_i + Σ_{j < t} y_j + z        (R27)
//! ```
//!
//! Nothing cancels that need not: within a pair of micro-chunks, sums of rows from the last and of
//! columns from the first.

use super::cut::Cut;
use crate::lanes::{Isa, Lanes};
use crate::tile::STRIDE;
use crate::workspace::Parts;
use std::ops::Range;

/// The terms of (R27), and dg of a chunk.
pub struct Flow<'m> {
    /// w of a pair of micro-chunks, rows [`STRIDE`] apart; 0 where a pair does not see.
    pub w: &'m mut [f32],
    /// x, of one query head, and y.
    pub x: &'m mut [f32],
    pub y: &'m mut [f32],
    pub dg: &'m mut [f32],
    /// Sums of the rows and columns of w over all pairs of micro-chunks before and behind; and of the
    /// pairs that lie on either side of a micro-chunk.
    row_sums: &'m mut [f32],
    col_sums: &'m mut [f32],
    across: &'m mut [f32],
    micro: usize,
}

impl<'m> Flow<'m> {
    /// For a chunk.
    pub fn new(parts: &mut Parts<'m>, cut: &Cut) -> Self {
        let chunk = cut.chunk.next_multiple_of(cut.rows) + cut.cols;
        Flow {
            w: parts.room(cut.micro.next_multiple_of(cut.rows) * STRIDE),
            x: parts.room(chunk),
            y: parts.room(chunk),
            dg: parts.room(chunk),
            row_sums: parts.zeros(chunk),
            col_sums: parts.zeros(chunk),
            across: parts.zeros(chunk),
            micro: cut.micro,
        }
    }
}

impl Flow<'_> {
    /// dg from y and z, where `y` has been written.
    #[inline(always)]
    pub fn begin(&mut self, len: usize, z: f32) {
        self.dg.fill(z);
        let mut before = 0.0;
        for (dg, y) in self.dg.iter_mut().zip(&*self.y).take(len) {
            *dg += before;
            before += y;
        }
    }

    /// Adds up the gradients that pass the gates of two micro-chunks and of those between them, or of one.
    #[inline(always)]
    pub fn pair<I: Isa>(&mut self, isa: I, queries: Range<usize>, keys: Range<usize>) {
        let Flow { w, dg, row_sums, col_sums, across, micro, .. } = self;
        if queries.start == keys.start {
            // Sums of columns over the rows from the last one on; w is 0 where j > i.
            let mut sums = [0.0f32; crate::tile::MAX_KEYS];
            for t in queries.clone().rev() {
                let weights = &w[(t - queries.start) * STRIDE + keys.start..][..keys.len()];
                dg[t] += grow(isa, &mut sums[..keys.len()], weights, t - keys.start);
            }
            return;
        }
        let mut all = 0.0;
        for i in queries.clone() {
            let weights = &w[(i - queries.start) * STRIDE + keys.start..][..keys.len()];
            grow(isa, &mut col_sums[keys.clone()], weights, 0);
            let sum = total(isa, weights);
            row_sums[i] += sum;
            all += sum;
        }
        for between in (keys.start / *micro + 1)..(queries.start / *micro) {
            across[between] += all;
        }
    }

    /// dg from x and from the sums over pairs of micro-chunks, which are 0 again for the next head.
    #[inline(always)]
    pub fn finish(&mut self, len: usize) {
        let Flow { dg, row_sums, col_sums, across, x, micro, .. } = self;
        let mut of_state = 0.0;
        for t in (0..len).rev() {
            of_state += x[t];
            dg[t] += of_state;
        }
        for (number, tokens) in (0..len).step_by(*micro).map(|t| t..len.min(t + *micro)).enumerate()
        {
            let mut from = 0.0;
            for t in tokens.clone().rev() {
                from += row_sums[t];
                dg[t] += from + across[number];
            }
            let mut before = 0.0;
            for t in tokens {
                dg[t] += before;
                before += col_sums[t];
            }
        }
        row_sums.fill(0.0);
        col_sums.fill(0.0);
        across.fill(0.0);
    }
}

/// sums += x; the sum of the first `first` of them.
#[inline(always)]
fn grow<I: Isa>(isa: I, sums: &mut [f32], x: &[f32], first: usize) -> f32 {
    let whole = sums.len() / I::F32::N * I::F32::N;
    for (sums, x) in sums[..whole].chunks_exact_mut(I::F32::N).zip(x.chunks_exact(I::F32::N)) {
        (I::F32::load(isa, sums) + I::F32::load(isa, x)).store(sums);
    }
    for (sum, x) in sums[whole..].iter_mut().zip(&x[whole..]) {
        *sum += x;
    }
    total(isa, &sums[..first])
}

/// Σ x, of the lanes of a register side by side.
#[inline(always)]
fn total<I: Isa>(isa: I, x: &[f32]) -> f32 {
    let mut sum = I::F32::splat(isa, 0.0);
    let parts = x.chunks_exact(I::F32::N);
    let rest: f32 = parts.remainder().iter().sum();
    for part in parts {
        sum = sum + I::F32::load(isa, part);
    }
    sum.reduce_add() + rest
}
