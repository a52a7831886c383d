//! A backward pass that leaves out what is small, and says how much that is.
//!
//! A tile of tokens and classes whose gradients of the logits are small can be left out of (C17)
//! and (C18). The error of the results is then bounded without computing them (C37), (C38): the
//! [`Certificate`]. Nothing is left out of dbias. Off unless called: a threshold that does no harm
//! at the end of a training drops every gradient but those of the targets at its beginning. A tile
//! has at most 64 tokens and 256 classes.

pub use etalon_problem::linear_cross_entropy::Filter;

use super::head::{matrix, matrix_mut};
use super::shard::Shard;
use super::tokens::{Token, scatter};
use super::tree::{fold, tiles};
use super::{Cotangents, Gradients, Inputs};
use crate::scalar::Real;
use crate::tensor::{add, filled, full};
use etalon_problem::{Error, LinearCrossEntropy};
use ndarray::{Array1, ArrayView1, ArrayView2, Axis, Slice};
use std::ops::Range;

/// Bounds of the error of leaving tiles out. They hold in exact arithmetic; the rounding of either side comes
/// on top.
#[derive(Debug, Clone, PartialEq)]
pub struct Certificate<T> {
    /// B_i ≥ ‖error of dh_i‖ (C37), `[T]`.
    pub dh: Array1<T>,
    /// C_v ≥ ‖error of dw_v‖ (C38), `[V]`.
    pub dw: Array1<T>,
    /// Tiles that were kept, and all of them.
    pub tiles: (usize, usize),
}

/// dh, dw and dbias without the tiles that `filter` leaves out, and what is certain about them. A threshold
/// of 0 leaves out nothing and gives the bits of [`backward`](super::backward()).
pub fn backward<T: Real>(
    problem: &LinearCrossEntropy,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    filter: Filter,
) -> Result<(Gradients<T>, Certificate<T>), Error> {
    filter.check()?;
    let shard = Shard::new(problem, 0..problem.vocab, inputs)?;
    let pulls = shard.pulls(&shard.partials()?, cotangents)?;
    let dim = problem.dim;
    let mut dh = full("dh", problem.h_shape(), T::ZERO)?;
    let mut dw = full("dw", problem.w_shape(), T::ZERO)?;
    let mut dbias = full("dbias", [problem.vocab], T::ZERO)?;
    let mut certificate = Certificate {
        dh: full("the bounds of dh", [problem.tokens], T::ZERO)?,
        dw: full("the bounds of dw", [problem.vocab], T::ZERO)?,
        tiles: (0, 0),
    };
    for (numbers, h) in shard.tokens.blocks() {
        let tokens = &shard.tokens.counted[numbers.clone()];
        let norms: Vec<T> = h.rows().into_iter().map(norm).collect();
        let mut leaf = |tile: &Range<usize>| {
            let da = shard.logit_gradients(&pulls[numbers.clone()], h, tile)?;
            let (da, w) = (matrix(&da, tile.len()), shard.head.rows(tile));
            let classes = Slice::from(tile.clone());
            let mut sums = dbias.slice_axis_mut(Axis(0), classes);
            da.rows().into_iter().for_each(|row| sums += &row); // (C19)
            let mut rows = filled("a part of dh", h.len(), T::ZERO)?;
            if !certificate.leave_out(filter, tokens, &norms, tile, da, w) {
                T::add_product(matrix_mut(&mut rows, dim), da, w); // (C17)
                T::add_product(dw.slice_axis_mut(Axis(0), classes), da.reversed_axes(), h); // (C18)
            }
            Ok(rows)
        };
        let sum = |mut x: Vec<T>, y: Vec<T>| {
            add(&mut x, &y);
            Ok(x)
        };
        // From the first tile to the last, summed along their tree.
        let rows = fold(&tiles(&shard.head.classes), &mut leaf, &sum)?.unwrap_or_default();
        scatter(&mut dh, tokens, rows.chunks_exact(dim));
    }
    let gradients = Gradients { dh: Some(dh), dw: Some(dw), dbias: problem.bias.then_some(dbias) };
    Ok((gradients, certificate))
}

impl<T: Real> Certificate<T> {
    /// True if the tile of these tokens, with their ‖h_i‖, is left out; then its part of the bounds is added
    /// to them.
    fn leave_out(
        &mut self,
        filter: Filter,
        tokens: &[Token<T>],
        norms: &[T],
        classes: &Range<usize>,
        da: ArrayView2<'_, T>,
        w: ArrayView2<'_, T>,
    ) -> bool {
        let (kept, all) = &mut self.tiles;
        *all += 1;
        let widest = w.rows().into_iter().map(norm).fold(T::ZERO, larger);
        let by_token = |i: usize| absolute_sum(da.row(i)) * widest; // (C37)
        let by_class = |v: usize| weighted_sum(da.column(v), norms); // (C38)
        let (dh, mut dw) =
            (&mut self.dh, self.dw.slice_axis_mut(Axis(0), Slice::from(classes.clone())));
        let tokens = tokens.iter().map(|token| token.index).enumerate();
        let small = match filter {
            Filter::Below { eps } => da.iter().all(|&da| magnitude(da) < T::from_f64(eps)),
            Filter::Within { dh: most_h, dw: most_w } => {
                let within = |bound: T, most: f64| bound <= T::from_f64(most);
                tokens.clone().all(|(i, index)| within(dh[index] + by_token(i), most_h))
                    && dw.iter().enumerate().all(|(v, &dw)| within(dw + by_class(v), most_w))
            }
        };
        if small {
            tokens.for_each(|(i, index)| dh[index] += by_token(i));
            dw.iter_mut().enumerate().for_each(|(v, dw)| *dw += by_class(v));
        } else {
            *kept += 1;
        }
        small
    }
}

fn magnitude<T: Real>(x: T) -> T {
    if x < T::ZERO { -x } else { x }
}

/// The larger of the two, NaN if either is.
fn larger<T: Real>(x: T, y: T) -> T {
    if x > y || x.is_nan() { x } else { y }
}

fn absolute_sum<T: Real>(row: ArrayView1<'_, T>) -> T {
    row.iter().fold(T::ZERO, |sum, &x| sum + magnitude(x))
}

fn norm<T: Real>(row: ArrayView1<'_, T>) -> T {
    row.iter().fold(T::ZERO, |sum, &x| sum + x * x).sqrt()
}

/// Σ |x_i| y_i
fn weighted_sum<T: Real>(x: ArrayView1<'_, T>, y: &[T]) -> T {
    x.iter().zip(y).fold(T::ZERO, |sum, (&x, &y)| sum + magnitude(x) * y)
}
