//! (R21) and (R22).

use super::{Head, Job};
use crate::zoo::host::{Results, through_bf16};
use crate::zoo::mutant::Mutant;
use etalon_problem::TokenSequences;
use ndarray::{Array2, Array4, s};
use std::ops::Range;

impl Job {
    pub(super) fn forward(&self) -> Results {
        let mut o = Array4::zeros(self.problem.o_shape());
        let mut final_state = Array4::zeros(self.problem.state_shape());
        for h in 0..self.problem.extents.key_heads {
            let mut carried = None;
            for sequence in self.problem.list_sequences() {
                let head = self.head(&sequence, h);
                let mut state = head.stored(&self.initial);
                let packed = matches!(self.problem.sequences, TokenSequences::Packed { .. });
                if self.is(Mutant::StateOfPreviousSequence) && packed && self.initial.is_none() {
                    state = carried.take().unwrap_or(state);
                }
                for chunk in head.chunks() {
                    head.outputs(&chunk, &mut state, &mut o);
                }
                head.read_padding(&mut state);
                let empty = self.is(Mutant::EmptySequenceForgets) && sequence.tokens == 0;
                let mut target = final_state.slice_mut(s![sequence.index, h, .., ..]);
                if !empty {
                    target.assign(&state);
                }
                if self.is(Mutant::LastSliceOfState) && head.dim() > 32 {
                    target.slice_mut(s![..32, ..]).fill(0.0);
                }
                carried = Some(state);
            }
        }
        Results::from([
            ("o", o.into_iter().collect()),
            ("final_state", final_state.into_iter().collect()),
        ])
    }
}

impl Head<'_> {
    fn outputs(&self, chunk: &Range<usize>, state: &mut Array2<f32>, o: &mut Array4<f32>) {
        if self.job.is(Mutant::StateBeforeUse) {
            self.advance(chunk, state);
        }
        for i in chunk.clone() {
            for head in self.job.queries(self.h) {
                let row = self.output(chunk, head, i, state);
                let place = s![self.s.batch, head, self.s.start + i, ..];
                o.slice_mut(place).assign(&ndarray::Array1::from(row));
            }
        }
        if !self.job.is(Mutant::StateBeforeUse) {
            self.advance(chunk, state);
        }
    }

    /// (R21)
    fn output(&self, chunk: &Range<usize>, head: usize, i: usize, state: &Array2<f32>) -> Vec<f32> {
        let mut row = vec![0.0; self.width()];
        let mut order: Vec<usize> = (chunk.start..i + 1).collect();
        if self.job.style.backwards {
            order.reverse();
        }
        for j in order {
            let Some(p) = self.pair(chunk.start, j, i) else { continue };
            let score: f32 = (0..self.dim()).map(|d| self.query(head, i, d) * self.key(j, d)).sum();
            for (e, x) in row.iter_mut().enumerate() {
                *x += p * score * self.value(j, e);
            }
        }
        if let Some(alpha) = self.state(chunk.start, i) {
            for (e, x) in row.iter_mut().enumerate() {
                let read = |d: usize| self.query(head, i, d) * state[[d, e]];
                *x += alpha * (0..self.dim()).map(read).sum::<f32>();
            }
        }
        row.into_iter().map(|x| self.job.scale() * x).collect()
    }

    /// (R22)
    pub(super) fn advance(&self, chunk: &Range<usize>, state: &mut Array2<f32>) {
        let last = chunk.end - 1;
        let factor = match self.job.is(Mutant::OneDecayPerChunk) {
            true => self.left(last..last + 1),
            false => self.state(chunk.start, last),
        };
        Self::decay(state, factor);
        for j in chunk.clone() {
            if let Some(omega) = self.pair(chunk.start, j, last) {
                for ((d, e), x) in state.indexed_iter_mut() {
                    *x += omega * self.key(j, d) * self.value(j, e);
                }
            }
        }
        if self.job.is(Mutant::TailDecaysAsChunk) && self.constant() {
            let missing = self.job.style.tile - chunk.len();
            let more = self.job.exp(missing as f32 * self.g(last));
            Self::decay(state, Some(if missing == 0 { 1.0 } else { more }));
        }
        if self.job.is(Mutant::StateInBf16) {
            state.mapv_inplace(through_bf16);
        }
    }

    /// Padding that is multiplied by 0 instead of being left alone.
    fn read_padding(&self, state: &mut Array2<f32>) {
        let lengths = matches!(self.job.problem.sequences, TokenSequences::Lengths { .. });
        if self.job.is(Mutant::PaddingTimesZero) && lengths {
            for t in self.s.tokens..self.job.problem.extents.tokens {
                for ((d, e), x) in state.indexed_iter_mut() {
                    *x += 0.0 * self.key(t, d) * self.value(t, e);
                }
            }
        }
    }
}
