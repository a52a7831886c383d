//! (R21) and (R22).

use super::bugs;
use super::head::{Head, add_outer, decay};
use crate::zoo::job::Job;
use crate::zoo::rows::{Results, Rows, add, dot, through_bf16};
use etalon_problem::{Decay, LinearAttention, TokenSequences};
use std::ops::Range;

pub(super) fn forward(job: &Job, problem: &LinearAttention) -> Results {
    let mut o = Rows::filled(&problem.o_shape(), 0.0);
    let mut final_state = Rows::filled(&problem.state_shape(), 0.0);
    let leaks = job.is(bugs::STATE_OF_PREVIOUS_SEQUENCE)
        && matches!(problem.sequences, TokenSequences::Packed { .. })
        && !problem.initial_state;
    for h in 0..problem.extents.key_heads {
        let mut carried = None;
        for sequence in problem.list_sequences() {
            let head = Head::new(job, problem, sequence, h);
            let mut state = carried.take().unwrap_or_else(|| head.stored("initial_state"));
            for chunk in head.chunks() {
                head.outputs(&chunk, &mut state, &mut o);
            }
            head.read_padding(&mut state);
            if !job.is(bugs::EMPTY_SEQUENCE_FORGETS) || sequence.tokens > 0 {
                final_state.matrix_mut(sequence.index, h).copy_from_slice(&state);
            }
            carried = leaks.then_some(state);
        }
    }
    Results::from([("o", o), ("final_state", final_state)])
}

impl Head<'_> {
    fn outputs(&self, chunk: &Range<usize>, state: &mut [f32], o: &mut Rows) {
        let early = self.job.is(bugs::STATE_BEFORE_USE);
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
        let job = self.job;
        for j in job.order(i + 1 - chunk.start).map(|n| chunk.start + n) {
            if let Some(p) = self.pair(chunk.start, j, i) {
                add(o, p * dot(q, self.key(j)), self.value(j));
            }
        }
        if let Some(alpha) = self.state(chunk.start, i) {
            let rows = state.chunks_exact(o.len());
            q.iter().zip(rows).for_each(|(q, row)| add(o, alpha * q, row));
        }
        o.iter_mut().for_each(|x| *x *= self.scale);
    }

    /// (R22)
    pub(super) fn advance(&self, chunk: &Range<usize>, state: &mut [f32]) {
        let (job, last) = (self.job, chunk.end - 1);
        let one = job.is(bugs::ONE_DECAY_PER_CHUNK);
        decay(state, if one { self.left(last..last + 1) } else { self.state(chunk.start, last) });
        for j in chunk.clone() {
            if let Some(omega) = self.pair(chunk.start, j, last) {
                add_outer(state, omega, self.key(j), self.value(j));
            }
        }
        let missing = job.style.tile - chunk.len();
        let constant = self.problem.decay == Decay::PerHead;
        if job.is(bugs::TAIL_DECAYS_AS_CHUNK) && constant && missing > 0 {
            decay(state, Some(job.exp(missing as f32 * self.g[last], 0.0)));
        }
        if job.is(bugs::STATE_IN_BF16) {
            state.iter_mut().for_each(|x| *x = through_bf16(*x));
        }
    }

    /// Padding that is multiplied by 0 instead of being left alone.
    fn read_padding(&self, state: &mut [f32]) {
        let problem = self.problem;
        let lengths = matches!(problem.sequences, TokenSequences::Lengths { .. });
        if self.job.is(bugs::PADDING_TIMES_ZERO) && lengths {
            for t in self.s.tokens..problem.extents.tokens {
                add_outer(state, 0.0, self.key(t), self.value(t));
            }
        }
    }
}
