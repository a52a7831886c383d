//! (R23) to (R28), with states recomputed by a forward sweep.

use super::{Head, Job};
use crate::zoo::host::{Results, through_bf16};
use crate::zoo::mutant::Mutant;
use ndarray::{Array2, Array3, Array4, s};
use std::ops::Range;

/// Tokens of a micro-chunk.
const MICRO: usize = 4;

struct Gradients {
    dq: Array4<f32>,
    dk: Array4<f32>,
    dv: Array4<f32>,
    dg: Array3<f32>,
    dscale: f32,
}

impl Job {
    pub(super) fn backward(&self) -> Results {
        let e = &self.problem.extents;
        let mut y = Gradients {
            dq: Array4::zeros(self.problem.q_shape()),
            dk: Array4::zeros(self.problem.k_shape()),
            dv: Array4::zeros(self.problem.v_shape()),
            dg: Array3::zeros(self.problem.g_shape()),
            dscale: 0.0,
        };
        let mut dinitial = Array4::zeros(self.problem.state_shape());
        for sequence in self.problem.list_sequences() {
            for h in 0..e.key_heads {
                let d = self.head(&sequence, h).gradients(&mut y);
                dinitial.slice_mut(s![sequence.index, h, .., ..]).assign(&d);
            }
        }
        let mut dg_gamma = vec![0.0; e.key_heads];
        for ((_, h, t), dg) in y.dg.indexed_iter() {
            if t == 0 && self.is(Mutant::GateGradientOfLastElement) {
                dg_gamma[h] = 0.0;
            }
            dg_gamma[h] += dg;
        }
        if self.is(Mutant::NoGateGradient) {
            dg_gamma.fill(0.0);
        }
        Results::from([
            ("dq", y.dq.into_iter().collect()),
            ("dk", y.dk.into_iter().collect()),
            ("dv", y.dv.into_iter().collect()),
            ("dg", y.dg.into_iter().collect()),
            ("dg_gamma", dg_gamma),
            ("dinitial_state", dinitial.into_iter().collect()),
            ("dscale", vec![y.dscale]),
        ])
    }
}

impl Head<'_> {
    /// Adds the gradients of this head, and returns that of its initial state.
    fn gradients(&self, y: &mut Gradients) -> Array2<f32> {
        let (job, chunks) = (self.job, self.chunks());
        let mut state = self.stored(&job.initial);
        let mut states = Vec::new();
        for chunk in &chunks {
            states.push(state.clone());
            self.advance(chunk, &mut state);
        }
        let mut d = match job.is(Mutant::FinalCotangentIgnored) {
            true => Array2::zeros((self.dim(), self.width())),
            false => self.stored(&job.dfinal),
        };
        for (chunk, state) in chunks.iter().zip(&states).rev() {
            let mut rows: Vec<usize> = chunk.clone().collect();
            if job.style.backwards {
                rows.reverse();
            }
            for i in rows {
                self.row(chunk, i, state, y);
            }
            let after = d.clone();
            self.pass_back(chunk, &mut d);
            let used = if job.is(Mutant::CotangentBeforeUse) { &d } else { &after };
            self.from_state(chunk, state, used, y);
        }
        d
    }

    fn dout(&self, head: usize, t: usize, e: usize) -> f32 {
        let dout = self.job.dout.as_ref();
        dout.map_or(0.0, |dout| dout[[self.s.batch, head, self.s.start + t, e]])
    }

    /// The query heads whose gradients of k and v count.
    fn summed(&self, head: usize) -> bool {
        let last = self.job.queries(self.h).last().copied();
        !self.job.is(Mutant::StateGroupNotSummed) || last == Some(head)
    }

    /// Whether a pair of a chunk takes part.
    fn visited(&self, chunk: &Range<usize>, j: usize, i: usize) -> bool {
        let half = (self.job.style.tile / 2).max(1);
        let part = |t: usize| (t - chunk.start) / half;
        !self.job.is(Mutant::ChunksOfTwoSizes) || part(i) == part(j)
    }

    /// (R23)–(R27) of what token i reads.
    fn row(&self, chunk: &Range<usize>, i: usize, state: &Array2<f32>, y: &mut Gradients) {
        let (job, b, at) = (self.job, self.s.batch, self.s.start);
        let (sigma, dim, width) = (job.scale(), self.dim(), self.width());
        for head in job.queries(self.h) {
            let mut sum = vec![0.0; dim];
            let mut w = vec![0.0; chunk.len()];
            for j in (chunk.start..i + 1).filter(|&j| self.visited(chunk, j, i)) {
                let Some(p) = self.pair(chunk.start, j, i) else { continue };
                let score: f32 = (0..dim).map(|d| self.query(head, i, d) * self.key(j, d)).sum();
                let dp: f32 = (0..width).map(|e| self.dout(head, i, e) * self.value(j, e)).sum();
                let (a, b_ij) = (p * score, p * dp);
                w[j - chunk.start] = sigma * a * dp;
                let diagonal = (i - chunk.start) / MICRO == (j - chunk.start) / MICRO;
                if !job.is(Mutant::QueriesOfDiagonal) || diagonal {
                    (0..dim).for_each(|d| sum[d] += b_ij * self.key(j, d));
                }
                if self.summed(head) {
                    let back = if job.is(Mutant::NoScaleInKeys) { 1.0 } else { sigma };
                    for d in 0..dim {
                        y.dk[[b, self.h, at + j, d]] += back * b_ij * self.query(head, i, d);
                    }
                    for e in 0..width {
                        y.dv[[b, self.h, at + j, e]] += sigma * a * self.dout(head, i, e);
                    }
                }
            }
            if job.is(Mutant::QueryGradientRoundedTwice) {
                sum.iter_mut().for_each(|x| *x = through_bf16(*x));
            }
            let mut x = 0.0;
            if let Some(alpha) = self.state(chunk.start, i) {
                for d in 0..dim {
                    let read: f32 = (0..width).map(|e| self.dout(head, i, e) * state[[d, e]]).sum();
                    sum[d] += alpha * read;
                    x += sigma * alpha * self.query(head, i, d) * read;
                }
            }
            for d in 0..dim {
                y.dq[[b, head, at + i, d]] = sigma * sum[d];
                y.dscale += self.query(head, i, d) * sum[d];
            }
            self.gates(chunk.start, i, x, &w, y);
        }
    }

    /// (R27): partial sums of what passes the gates up to token `last`.
    fn gates(&self, start: usize, last: usize, from_state: f32, from: &[f32], y: &mut Gradients) {
        let mut sum = from_state;
        for t in start..last + 1 {
            if self.job.is(Mutant::GateCountsItsToken) {
                sum += from[t - start];
            }
            // What a reset forgets does not pass it.
            if self.raw_g(t) == f32::NEG_INFINITY {
                sum = 0.0;
            }
            y.dg[[self.s.batch, self.h, self.s.start + t]] += sum;
            if !self.job.is(Mutant::GateCountsItsToken) {
                sum += from[t - start];
            }
        }
    }

    /// (R25)–(R27) of what the state after the chunk is read for.
    fn from_state(
        &self,
        chunk: &Range<usize>,
        state: &Array2<f32>,
        d: &Array2<f32>,
        y: &mut Gradients,
    ) {
        let (dim, width, last) = (self.dim(), self.width(), chunk.end - 1);
        let mut from = vec![0.0; chunk.len()];
        for j in chunk.clone() {
            let Some(omega) = self.pair(chunk.start, j, last) else { continue };
            let turned = self.job.is(Mutant::StateNotTransposed) && dim == width;
            for c in 0..dim {
                let element = |e: usize| if turned { d[[e, c]] } else { d[[c, e]] };
                let read: f32 = (0..width).map(|e| self.value(j, e) * element(e)).sum();
                y.dk[[self.s.batch, self.h, self.s.start + j, c]] += omega * read;
                from[j - chunk.start] += omega * self.key(j, c) * read;
            }
            for e in 0..width {
                let read: f32 = (0..dim).map(|c| self.key(j, c) * d[[c, e]]).sum();
                y.dv[[self.s.batch, self.h, self.s.start + j, e]] += omega * read;
            }
        }
        let through = self
            .state(chunk.start, last)
            .map_or(0.0, |alpha| alpha * state.iter().zip(d).map(|(x, y)| x * y).sum::<f32>());
        self.gates(chunk.start, last, through, &from, y);
    }

    /// (R28)
    fn pass_back(&self, chunk: &Range<usize>, d: &mut Array2<f32>) {
        Self::decay(d, self.state(chunk.start, chunk.end - 1));
        let sigma = if self.job.is(Mutant::NoScaleInKeys) { 1.0 } else { self.job.scale() };
        for i in chunk.clone() {
            let Some(alpha) = self.state(chunk.start, i) else { continue };
            for head in self.job.queries(self.h).into_iter().filter(|&head| self.summed(head)) {
                for ((c, e), x) in d.indexed_iter_mut() {
                    *x += sigma * alpha * self.query(head, i, c) * self.dout(head, i, e);
                }
            }
        }
    }
}
