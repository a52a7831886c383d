//! What passes the gates of a chunk:
//!
//! ```text
//! dg_t = Σ_{j < t ≤ i} w_ij + Σ_{i ≥ t} x_i + Σ_{j < t} y_j + z        (R27)
//! ```
//!
//! Nothing cancels that need not: within a pair of micro-chunks, sums of rows from the last and of
//! columns from the first.

use super::Cut;
use crate::aligned::Aligned;
use crate::lanes::{Isa, Lanes};
use crate::tile::STRIDE;
use etalon_problem::Error;
use std::ops::Range;

/// The terms of (R27), and dg of a chunk.
pub struct Flow {
    /// w of a pair of micro-chunks, rows [`STRIDE`] apart; 0 where a pair does not see.
    pub w: Aligned,
    /// x, of one query head, and y.
    pub x: Aligned,
    pub y: Aligned,
    pub dg: Aligned,
    /// Sums of the rows and columns of w over all pairs of micro-chunks before and behind; and of the
    /// pairs that lie on either side of a micro-chunk.
    row_sums: Aligned,
    col_sums: Aligned,
    across: Aligned,
    micro: usize,
}

impl Flow {
    /// Room for a chunk.
    pub fn room(cut: &Cut) -> Result<Self, Error> {
        let zeros = |len| Aligned::zeros(len, "the gates of a chunk");
        let chunk = || zeros(cut.chunk.next_multiple_of(cut.rows) + cut.cols);
        Ok(Flow {
            w: zeros(cut.micro.next_multiple_of(cut.rows) * STRIDE)?,
            x: chunk()?,
            y: chunk()?,
            dg: chunk()?,
            row_sums: chunk()?,
            col_sums: chunk()?,
            across: chunk()?,
            micro: cut.micro,
        })
    }

    /// Bytes of what it holds per pair of micro-chunks, and of the rest.
    pub fn bytes(&self) -> [usize; 2] {
        let Flow { w, x, y, dg, row_sums, col_sums, across, .. } = self;
        let lists = [x, y, dg, row_sums, col_sums, across].map(Aligned::bytes);
        [w.bytes(), lists.iter().sum()]
    }

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

    /// What passes the gates of a pair of micro-chunks, of those between, and within one.
    #[inline(always)]
    pub fn pair<I: Isa>(
        &mut self,
        isa: I,
        queries: Range<usize>,
        keys: Range<usize>,
        diagonal: bool,
    ) {
        let Flow { w, dg, row_sums, col_sums, across, micro, .. } = self;
        let rows = rows_of(w, queries.clone(), &keys);
        if diagonal {
            // Sums of columns over the rows from the last one on; w is 0 where j > i.
            let mut sums = [0.0f32; crate::tile::MAX_KEYS];
            for (t, weights) in rows.rev() {
                let here = t - keys.start;
                dg[t] += grow(isa, &mut sums[..keys.len()], weights, here);
            }
            return;
        }
        let mut all = 0.0;
        for (i, weights) in rows {
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

/// The rows of weights of some queries, with their numbers.
#[inline(always)]
fn rows_of<'w>(
    w: &'w [f32],
    queries: Range<usize>,
    keys: &Range<usize>,
) -> impl DoubleEndedIterator<Item = (usize, &'w [f32])> + use<'w> {
    let len = keys.len();
    let row = move |(row, i): (&'w [f32], usize)| (i, &row[..len]);
    w[keys.start..].chunks(STRIDE).zip(queries).map(row)
}
