//! (R23) to (R28), with states recomputed by a forward sweep.

use super::bugs;
use super::head::{Head, add_outer, decay};
use crate::zoo::job::Job;
use crate::zoo::rows::{Results, Rows, add, dot, through_bf16};
use etalon_problem::LinearAttention;
use std::ops::Range;

/// Tokens of a micro-chunk.
const MICRO: usize = 4;

struct Gradients {
    dq: Rows,
    dk: Rows,
    dv: Rows,
    dg: Rows,
    dscale: f32,
}

pub(super) fn backward(job: &Job, problem: &LinearAttention) -> Results {
    let mut y = Gradients {
        dq: job.input("q").zeros(),
        dk: job.input("k").zeros(),
        dv: job.input("v").zeros(),
        dg: Rows::filled(&problem.g_shape(), 0.0),
        dscale: 0.0,
    };
    let mut dinitial = Rows::filled(&problem.state_shape(), 0.0);
    for sequence in problem.list_sequences() {
        for h in 0..problem.extents.key_heads {
            let d = Head::new(job, problem, sequence, h).gradients(&mut y);
            dinitial.matrix_mut(sequence.index, h).copy_from_slice(&d);
        }
    }
    let mut dg_gamma = Rows::filled(&[problem.extents.key_heads], 0.0);
    for b in 0..problem.extents.batch {
        for (h, sum) in dg_gamma.data.iter_mut().enumerate() {
            let before = if job.is(bugs::GATE_GRADIENT_OF_LAST_ELEMENT) { 0.0 } else { *sum };
            *sum = before + y.dg.matrix(b, h).iter().sum::<f32>();
        }
    }
    Results::from([
        ("dq", y.dq),
        ("dk", y.dk),
        ("dv", y.dv),
        ("dg", y.dg),
        ("dg_gamma", dg_gamma),
        ("dinitial_state", dinitial),
        ("dscale", Rows::filled(&[], y.dscale)),
    ])
}

impl Head<'_> {
    /// Adds the gradients of this head, and returns the gradient of its initial state.
    fn gradients(&self, y: &mut Gradients) -> Vec<f32> {
        let (job, chunks) = (self.job, self.chunks());
        let mut state = self.stored("initial_state");
        let mut states = Vec::new();
        for chunk in &chunks {
            states.push(state.clone());
            self.advance(chunk, &mut state);
        }
        let mut d = self.stored("dfinal_state");
        for (chunk, state) in chunks.iter().zip(&states).rev() {
            for i in job.order(chunk.len()).map(|n| chunk.start + n) {
                self.row(chunk, i, state, y);
            }
            let after = d.clone();
            self.pass_back(chunk, &mut d);
            let used = if job.is(bugs::COTANGENT_BEFORE_USE) { &d } else { &after };
            self.through_state(chunk, state, used, y);
        }
        d
    }

    /// True if a query head's part of the gradients of k and v counts.
    fn summed(&self, head: usize) -> bool {
        !self.job.is(bugs::STATE_GROUP_NOT_SUMMED) || self.queries().last() == Some(&head)
    }

    /// True if a pair of a chunk takes part.
    fn visited(&self, chunk: &Range<usize>, j: usize, i: usize) -> bool {
        let half = (self.job.style.tile / 2).max(1);
        let part = |t: usize| (t - chunk.start) / half;
        !self.job.is(bugs::CHUNKS_OF_TWO_SIZES) || part(i) == part(j)
    }

    /// σ, as dk and the gradient of the state have it.
    fn scale_of_keys(&self) -> f32 {
        if self.job.is(bugs::NO_SCALE_IN_KEYS) { 1.0 } else { self.scale }
    }

    /// (R23)–(R27) for the outputs of token i.
    fn row(&self, chunk: &Range<usize>, i: usize, state: &[f32], y: &mut Gradients) {
        let (job, sigma) = (self.job, self.scale);
        for head in self.queries() {
            let (q, dout) = (self.query(head, i), self.dout(head, i));
            let mut sum = vec![0.0; q.len()];
            let mut w = vec![0.0; chunk.len()];
            for j in (chunk.start..i + 1).filter(|&j| self.visited(chunk, j, i)) {
                let Some(p) = self.pair(chunk.start, j, i) else { continue };
                let (a, dp) = (p * dot(q, self.key(j)), dot(dout, self.value(j)));
                w[j - chunk.start] = sigma * a * dp;
                let diagonal = (i - chunk.start) / MICRO == (j - chunk.start) / MICRO;
                if !job.is(bugs::QUERIES_OF_DIAGONAL) || diagonal {
                    add(&mut sum, p * dp, self.key(j));
                }
                if self.summed(head) {
                    add(y.dk.row_mut(self.at(j)), self.scale_of_keys() * p * dp, q);
                    add(y.dv.row_mut(self.at(j)), sigma * a, dout);
                }
            }
            if job.is(bugs::QUERY_GRADIENT_ROUNDED_TWICE) {
                sum.iter_mut().for_each(|x| *x = through_bf16(*x));
            }
            let mut x = 0.0;
            if let Some(alpha) = self.state(chunk.start, i) {
                for (d, row) in state.chunks_exact(dout.len()).enumerate() {
                    let read = alpha * dot(dout, row);
                    sum[d] += read;
                    x += sigma * q[d] * read;
                }
            }
            add(y.dq.row_mut([self.s.batch, head, self.s.start + i]), sigma, &sum);
            y.dscale += dot(q, &sum);
            self.gates(chunk.start, i, x, &w, y);
        }
    }

    /// (R27): partial sums of what passes the gates up to token `last`.
    fn gates(&self, start: usize, last: usize, from_state: f32, from: &[f32], y: &mut Gradients) {
        let early = self.job.is(bugs::GATE_COUNTS_ITS_TOKEN);
        let mut sum = from_state;
        for t in start..last + 1 {
            sum += if early { from[t - start] } else { 0.0 };
            // Contributions before a reset do not pass it.
            if self.g[t] == f32::NEG_INFINITY {
                sum = 0.0;
            }
            y.dg.row_mut(self.at(t))[0] += sum;
            sum += if early { 0.0 } else { from[t - start] };
        }
    }

    /// (R25)–(R27) for the readers of the state after the chunk, whose gradient is `d`.
    fn through_state(&self, chunk: &Range<usize>, state: &[f32], d: &[f32], y: &mut Gradients) {
        let (dim, width, last) = (self.problem.extents.dim, self.problem.value_dim, chunk.end - 1);
        let turned = self.job.is(bugs::STATE_NOT_TRANSPOSED) && dim == width;
        let mut from = vec![0.0; chunk.len()];
        for j in chunk.clone() {
            let Some(omega) = self.pair(chunk.start, j, last) else { continue };
            let (k, v) = (self.key(j), self.value(j));
            for (c, row) in d.chunks_exact(width).enumerate() {
                let read = match turned {
                    true => v.iter().enumerate().map(|(e, v)| v * d[e * width + c]).sum(),
                    false => dot(v, row),
                };
                y.dk.row_mut(self.at(j))[c] += omega * read;
                from[j - chunk.start] += omega * k[c] * read;
                add(y.dv.row_mut(self.at(j)), omega * k[c], row);
            }
        }
        let through = self.state(chunk.start, last).map_or(0.0, |alpha| alpha * dot(state, d));
        self.gates(chunk.start, last, through, &from, y);
    }

    /// (R28)
    fn pass_back(&self, chunk: &Range<usize>, d: &mut [f32]) {
        decay(d, self.state(chunk.start, chunk.end - 1));
        for i in chunk.clone() {
            let Some(alpha) = self.state(chunk.start, i) else { continue };
            for head in self.queries().into_iter().filter(|&head| self.summed(head)) {
                let scale = self.scale_of_keys() * alpha;
                add_outer(d, scale, self.query(head, i), self.dout(head, i));
            }
        }
    }
}
