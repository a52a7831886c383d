//! Operands and results of a pass, without the element types.

use super::decays::{Gates, Logs};
use super::schedule::Place;
use super::state::Carry;
use crate::element::{Tensor, TensorMut};
use crate::lanes::prefetch::Queue;
use etalon_problem::Dtype;
use ndarray::{ArrayView4, ArrayViewMut1, ArrayViewMut4, Ix2, Ix4};
use std::ops::Range;

/// The inputs and cotangents of a pass; each with its tangent, of which the first order has none.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    pub q: [Option<Tensor<'a, Ix4>>; 2],
    pub k: [Option<Tensor<'a, Ix4>>; 2],
    pub v: [Option<Tensor<'a, Ix4>>; 2],
    pub dout: [Option<Tensor<'a, Ix4>>; 2],
    pub log_decays: Logs<'a>,
    pub log_tangents: Logs<'a>,
    /// The states before the first tokens, and the gradients by those after the last.
    pub initial: [Option<ArrayView4<'a, f32>>; 2],
    pub last: [Option<ArrayView4<'a, f32>>; 2],
    pub ddscale: f32,
}

impl<'a> Operands<'a> {
    /// Flags of q, k, v and dout: true for one that has a tangent. In tiles of bf16 Q̇ has no rows of its own.
    pub fn tangents(&self, bf16: bool) -> [bool; 4] {
        let scaled = self.ddscale != 0.0 && !bf16;
        let Operands { q, k, v, dout, .. } = self;
        [q[1].is_some() || scaled, k[1].is_some(), v[1].is_some(), dout[1].is_some()]
    }

    /// The types of q, k, v and dout and of their tangents, of those that are there.
    pub fn dtypes(&self) -> impl Iterator<Item = Dtype> {
        let Operands { q, k, v, dout, .. } = self;
        [q, k, v, dout].into_iter().flatten().flatten().map(Tensor::dtype)
    }

    /// The log-decays of a place, and their tangents.
    pub fn gates(&self, place: &Place<'_>) -> [Gates<'a>; 2] {
        [self.log_decays, self.log_tangents].map(|logs| logs.of(place.sequence, place.head))
    }

    /// The [`Carry`] of a state over the tokens of a place.
    pub fn carry(&self, place: &Place<'_>) -> Carry {
        let [log, log_tangent] = self.gates(place).map(|gates| gates.sum(place.tokens.clone()));
        Carry { decay: log.exp() as f32, log_tangent: log_tangent as f32 }
    }
}

impl Place<'_> {
    /// Its tokens of one head of an operand and of its tangent.
    pub fn rows<'a>(
        &self,
        operand: &[Option<Tensor<'a, Ix4>>; 2],
        head: usize,
    ) -> [Option<Tensor<'a, Ix2>>; 2] {
        let start = self.sequence.start;
        let tokens = start + self.tokens.start..start + self.tokens.end;
        operand.map(|x| x.map(|x| x.rows(self.sequence.batch, head, tokens.clone())))
    }

    /// Lets `then` ask for the rows that come next, of as many tokens behind these or, backwards, before them.
    pub fn ask_next(
        &self,
        operand: &[Option<Tensor<'_, Ix4>>; 2],
        head: usize,
        backwards: bool,
        then: &mut Queue,
    ) {
        let Range { start, end } = self.tokens;
        let next = match backwards {
            true => start.saturating_sub(end - start)..start,
            false => end..self.sequence.tokens.min(2 * end - start),
        };
        for rows in self.part(next).rows(operand, head).into_iter().flatten() {
            then.push(rows.all_lines());
        }
    }
}

/// Places of the gradients of a backward or double backward pass: by q, k, v and dout, by the log-decays, by
/// the states at both ends and by σ. A gradient that is not asked for costs nothing.
#[derive(Debug)]
pub struct Results<'o> {
    pub q: Option<TensorMut<'o, Ix4>>,
    pub k: Option<TensorMut<'o, Ix4>>,
    pub v: Option<TensorMut<'o, Ix4>>,
    pub dout: Option<TensorMut<'o, Ix4>>,
    /// By those of tokens, `[B, Hk, N, 1]`.
    pub g: Option<TensorMut<'o, Ix4>>,
    pub g_gamma: Option<ArrayViewMut1<'o, f32>>,
    pub initial: Option<ArrayViewMut4<'o, f32>>,
    pub last: Option<ArrayViewMut4<'o, f32>>,
    pub scale: Option<&'o mut f32>,
}
