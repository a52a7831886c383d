//! The double backward pass and the tangents: who writes which tile.
//!
//! A tangent is one sweep over the scores, a double backward pass three (the numbers of products are
//! those of one pair of tiles, every cotangent but `cot_o` and `cot_lse` given):
//!
//! * rows: u and gdout (D4), (D5), which are the tangents of lse and o (J1), (J2): 5 products;
//! * rows again, from memory still warm: gq (D10): 7 products;
//! * columns: gk and gv (D11), (D12): 8 products.
//!
//! Between them pass four numbers per row, lse, δ, u and z, so that memory is O(N). Where o is
//! stored in less than f32, its rounding would be multiplied by u and dout: it is computed anew, for
//! one product more.
//!
//! Every element has one writer and one order of summation: results are bitwise reproducible.

mod kernels;
mod operands;
mod sweeps;
mod tiles;

use super::SecondGradientsMut;
use crate::heads::Cut;
use crate::{Element, Options};
use etalon_problem::{Blocking, Error, Scores};
use ndarray::{ArrayView1, ArrayView3, ArrayView4};
use operands::Operands;
use sweeps::Sweep;

/// The blocking where none is asked for: four tiles of weights stay in the L2 cache.
const DEFAULT: Blocking = Blocking { queries: 96, keys: 192 };

/// How the operands of the scores move.
#[derive(Clone, Copy)]
pub(crate) struct Direction<'a, T> {
    pub q: Option<&'a ArrayView4<'a, T>>,
    pub k: Option<&'a ArrayView4<'a, T>>,
    pub sinks: Option<&'a ArrayView1<'a, f32>>,
    pub bias: Option<&'a ArrayView4<'a, T>>,
}

/// What attention has beyond attention_lse.
#[derive(Clone, Copy)]
pub(crate) struct Values<'a, T> {
    pub v: &'a ArrayView4<'a, T>,
    pub o: ArrayView4<'a, T>,
    /// How v moves.
    pub ddv: Option<&'a ArrayView4<'a, T>>,
    pub dout: Option<&'a ArrayView4<'a, T>>,
    pub cot_o: Option<&'a ArrayView4<'a, T>>,
}

/// A double backward pass or tangents of attention or of attention_lse, the operands checked.
pub(crate) struct Second<'a, T> {
    pub scores: &'a Scores,
    pub q: &'a ArrayView4<'a, T>,
    pub k: &'a ArrayView4<'a, T>,
    pub sinks: Option<&'a ArrayView1<'a, f32>>,
    pub bias: Option<&'a ArrayView4<'a, T>>,
    pub lse: ArrayView3<'a, f32>,
    pub direction: Direction<'a, T>,
    pub values: Option<Values<'a, T>>,
    pub dlse: Option<&'a ArrayView3<'a, f32>>,
    pub cot_lse: Option<&'a ArrayView3<'a, f32>>,
}

impl<T> Direction<'_, T> {
    /// Fails unless it fits the problem; its tensors are called `names`.
    pub fn check(&self, scores: &Scores, names: [&str; 4]) -> Result<(), Error> {
        let shapes = [
            self.q.map(|x| x.shape()),
            self.k.map(|x| x.shape()),
            self.sinks.map(|x| x.shape()),
            self.bias.map(|x| x.shape()),
        ];
        check_moving(scores, names, shapes)
    }
}

impl<T: Element> Second<'_, T> {
    /// Writes what is asked for.
    pub fn run(&self, out: SecondGradientsMut<'_, T>, options: &Options) -> Result<(), Error> {
        let blocking = options.blocking.unwrap_or(DEFAULT);
        let options = &Options { blocking: Some(blocking), ..*options };
        let cut = Cut::new(self.scores, options)?;
        let sequences = self.scores.sequences();
        let SecondGradientsMut { gq, gk, gv, gdout, gdlse, gsinks, gbias } = out;
        let operands = Operands::new(self, &sequences, &cut)?;
        let mut statistics = operands.statistics(&cut)?;
        let sweep = Sweep { pass: self, sequences: &sequences, operands: &operands, cut, options };
        // Trial allocation: on an error nothing has been written yet.
        drop(sweep.scratch()?);
        sweep.rows(gq, gdout, gdlse, &mut statistics)?;
        if gk.is_some() || gv.is_some() {
            sweep.columns(gk, gv, &statistics)?;
        }
        if let Some(mut gsinks) = gsinks {
            gsinks.fill(0.0);
            (0..gsinks.len()).for_each(|head| gsinks[head] = sweep.gsink(head, &statistics));
        }
        if let Some(gbias) = gbias {
            sweep.biases(gbias, &statistics)?;
        }
        Ok(())
    }
}

/// Fails unless an operand that may be absent fits.
pub(crate) fn check_shape(
    name: &str,
    expected: &[usize],
    found: Option<&[usize]>,
) -> Result<(), Error> {
    found.map_or(Ok(()), |found| Error::expect_shape(name, expected, found))
}

/// Fails unless operands that move with q, k, sinks and bias, or results for these, fit.
pub(crate) fn check_moving(
    scores: &Scores,
    names: [&str; 4],
    [q, k, sinks, bias]: [Option<&[usize]>; 4],
) -> Result<(), Error> {
    check_shape(names[0], &scores.q_shape(), q)?;
    check_shape(names[1], &scores.k_shape(), k)?;
    if sinks.is_some() {
        Error::expect_presence(names[2], "sinks", scores.sinks, true)?;
        check_shape(names[2], &[scores.extents.query_heads], sinks)?;
    }
    match (bias, scores.bias_shape()) {
        (Some(bias), Some(shape)) => Error::expect_shape(names[3], &shape, bias),
        (Some(_), None) => Error::expect_presence(names[3], "bias", false, true),
        (None, _) => Ok(()),
    }
}
