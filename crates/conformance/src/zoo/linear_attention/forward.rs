//! (R21) and (R22).

use super::head::{Head, Linear, add_outer, decay};
use crate::zoo::job::{Results, Rows, add, dot, through_bf16};
use crate::zoo::mutant::Mutant;
use etalon_problem::{Decay, TokenSequences};
use std::ops::Range;

pub(super) fn forward(linear: &Linear<'_>) -> Results {
    let (job, problem) = (linear.job, linear.problem);
    let mut o = Rows::filled(&problem.o_shape(), 0.0);
    let mut final_state = Rows::filled(&problem.state_shape(), 0.0);
    let leaks = job.is(Mutant::StateOfPreviousSequence)
        && matches!(problem.sequences, TokenSequences::Packed { .. })
        && !problem.initial_state;
    for h in 0..problem.extents.key_heads {
        let mut carried = None;
        for sequence in problem.list_sequences() {
            let head = linear.head(&sequence, h);
            let mut state = carried.take().unwrap_or_else(|| head.stored("initial_state"));
            for chunk in head.chunks() {
                head.outputs(&chunk, &mut state, &mut o);
            }
            head.read_padding(&mut state);
            if !job.is(Mutant::EmptySequenceForgets) || sequence.tokens > 0 {
                final_state.matrix_mut(sequence.index, h).copy_from_slice(&state);
            }
            carried = leaks.then_some(state);
        }
    }
    Results::from([("o", o), ("final_state", final_state)])
}

impl Head<'_> {
    fn outputs(&self, chunk: &Range<usize>, state: &mut [f32], o: &mut Rows) {
        let early = self.of.job.is(Mutant::StateBeforeUse);
        if early {
            self.advance(chunk, state);
        }
        for i in chunk.clone() {
            for head in self.queries() {
                let at = [self.s.batch, head, self.s.start + i];
                self.output(chunk, (self.query(head, i), i), state, o.row_mut(at));
            }
        }
        if !early {
            self.advance(chunk, state);
        }
    }

    /// (R21)
    fn output(&self, chunk: &Range<usize>, (q, i): (&[f32], usize), state: &[f32], o: &mut [f32]) {
        let job = self.of.job;
        for j in job.order(i + 1 - chunk.start).map(|n| chunk.start + n) {
            if let Some(p) = self.pair(chunk.start, j, i) {
                add(o, p * dot(q, self.key(j)), self.value(j));
            }
        }
        if let Some(alpha) = self.state(chunk.start, i) {
            let rows = state.chunks_exact(o.len());
            q.iter().zip(rows).for_each(|(q, row)| add(o, alpha * q, row));
        }
        o.iter_mut().for_each(|x| *x *= self.of.scale);
    }

    /// (R22)
    pub(super) fn advance(&self, chunk: &Range<usize>, state: &mut [f32]) {
        let (job, last) = (self.of.job, chunk.end - 1);
        let one = job.is(Mutant::OneDecayPerChunk);
        decay(state, if one { self.left(last..last + 1) } else { self.state(chunk.start, last) });
        for j in chunk.clone() {
            if let Some(omega) = self.pair(chunk.start, j, last) {
                add_outer(state, omega, self.key(j), self.value(j));
            }
        }
        let missing = job.style.tile - chunk.len();
        let constant = self.of.problem.decay == Decay::PerHead;
        if job.is(Mutant::TailDecaysAsChunk) && constant && missing > 0 {
            decay(state, Some(job.exp(missing as f32 * self.g[last])));
        }
        if job.is(Mutant::StateInBf16) {
            state.iter_mut().for_each(|x| *x = through_bf16(*x));
        }
    }

    /// Padding that is multiplied by 0 instead of being left alone.
    fn read_padding(&self, state: &mut [f32]) {
        let problem = self.of.problem;
        let lengths = matches!(problem.sequences, TokenSequences::Lengths { .. });
        if self.of.job.is(Mutant::PaddingTimesZero) && lengths {
            for t in self.s.tokens..problem.extents.tokens {
                add_outer(state, 0.0, self.key(t), self.value(t));
            }
        }
    }
}
