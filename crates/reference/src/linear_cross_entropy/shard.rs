//! The classes in shards: what each adds, and how it is put together.
//!
//! Every rank holds the rows of w and the biases of its classes, and the other inputs whole. It
//! computes its [`Partial`]s; [`combine`] makes totals of those of all ranks; from the totals each
//! rank has the output, and its part of the gradients; [`combine_dh`] adds up those of h.
//!
//! ```
//! use etalon_problem::LinearCrossEntropy;
//! use etalon_reference::linear_cross_entropy::{Inputs, forward, shard};
//! use ndarray::{array, s};
//!
//! let problem = LinearCrossEntropy::new(2, 1, 3);
//! let (h, w, targets) = (array![[1f64], [2.0]], array![[0.5], [0.0], [1.0]], array![2, 0]);
//! let whole = Inputs {
//!     h: h.view(),
//!     w: w.view(),
//!     bias: None,
//!     targets: targets.view(),
//!     class_weights: None,
//!     token_weights: None,
//! };
//! let mut parts = Vec::new();
//! for classes in [0..1, 1..3] {
//!     let inputs = Inputs { w: w.slice(s![classes.clone(), ..]), ..whole };
//!     parts.push((classes.clone(), shard::Shard::new(&problem, classes, &inputs)?.partials()?));
//! }
//! let totals = shard::combine(parts)?;
//! let inputs = Inputs { w: w.slice(s![0..1, ..]), ..whole };
//! let loss = shard::Shard::new(&problem, 0..1, &inputs)?.output(&totals)?.loss;
//! assert!((&loss - &forward(&problem, &whole)?.loss)[[]].abs() < 1e-15);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub use super::partial::Partial;
pub use super::tree::TILE;

use super::Inputs;
use super::head::Head;
use super::tokens::{Token, Tokens};
use super::tree::{fold, tiles};
use crate::named::{Named, check};
use crate::parallel::try_map;
use crate::scalar::Real;
use etalon_problem::{Error, LinearCrossEntropy, Pass};
use ndarray::Array2;
use std::ops::Range;

/// A problem with the inputs that belong to a range of its classes, checked.
pub struct Shard<'a, T: Clone> {
    pub(super) problem: &'a LinearCrossEntropy,
    pub(super) head: Head<'a, T>,
    pub(super) tokens: Tokens<'a, T>,
}

impl<'a, T: Real> Shard<'a, T> {
    /// `classes` of the problem; `inputs.w` and `inputs.bias` are theirs. May be empty.
    pub fn new(
        problem: &'a LinearCrossEntropy,
        classes: Range<usize>,
        inputs: &'a Inputs<'_, T>,
    ) -> Result<Self, Error> {
        problem.check()?;
        if classes.start > classes.end || classes.end > problem.vocab {
            let expected = format!("a range within 0..{}", problem.vocab);
            return Err(Error::value("classes", expected, format!("{classes:?}")));
        }
        let mut table = problem.table(Pass::Forward);
        for operand in table.operands.iter_mut().filter(|x| ["w", "bias"].contains(&x.name)) {
            operand.shape[0] = classes.len();
        }
        check(&table, &[inputs.shapes()])?;
        let head = Head::new(problem, classes, inputs)?;
        Ok(Shard { problem, head, tokens: Tokens::new(problem, inputs)? })
    }

    /// One for each token `[T]`: what the classes add to it. Ignored tokens: the identity.
    pub fn partials(&self) -> Result<Vec<Partial<T>>, Error> {
        let tiles = tiles(&self.head.classes);
        let blocks = try_map(self.tokens.blocks(), |(numbers, h)| {
            let tokens = &self.tokens.counted[numbers];
            let mut leaf = |tile: &Range<usize>| {
                let mut z = self.head.tile(h, tile)?; // (C1)
                z.iter_mut().for_each(|a| *a = self.head.link.logit(*a)); // (C2)
                let weights = self.tokens.class_weights(tile);
                let partial = |(token, z): (&Token<T>, _)| {
                    Partial::new(tile.start, z, weights, Some(token.target))
                };
                Ok(tokens.iter().zip(z.chunks_exact(tile.len())).map(partial).collect::<Vec<_>>())
            };
            fold(&tiles, &mut leaf, &combine_rows)
        })?;
        // Without classes there is nothing to spread.
        let partials = blocks.into_iter().flatten().flatten();
        self.tokens.spread("the partials", Partial::identity(), partials)
    }

    /// The tokens that count with their totals, which must be of all classes.
    pub(super) fn totals<'b>(
        &'b self,
        totals: &'b [Partial<T>],
    ) -> Result<impl Iterator<Item = (&'b Token<T>, &'b Partial<T>)> + Clone, Error> {
        let LinearCrossEntropy { tokens, vocab, .. } = *self.problem;
        Error::expect_shape("totals", &[tokens], &[totals.len()])?;
        for token in &self.tokens.counted {
            let (i, total) = (token.index, &totals[token.index]);
            if total.classes != vocab {
                let expected = format!("of all {vocab} classes");
                return Err(Error::value(format!("totals[{i}]"), expected, total.classes));
            }
            if total.target.is_none() {
                let expected = "a class of one of the shards";
                return Err(Error::value(format!("targets[{i}]"), expected, token.target));
            }
        }
        Ok(self.tokens.counted.iter().map(|token| (token, &totals[token.index])))
    }
}

fn combine_rows<T: Real>(
    mut rows: Vec<Partial<T>>,
    others: Vec<Partial<T>>,
) -> Result<Vec<Partial<T>>, Error> {
    Error::expect_shape("partials", &[rows.len()], &[others.len()])?;
    for (row, other) in rows.iter_mut().zip(others) {
        *row = row.combine(other)?;
    }
    Ok(rows)
}

/// The partials of disjoint shards, in ascending order, as those of all their classes. Where every
/// shard is a node of the tree, the result has the bits of the unsharded one.
pub fn combine<T: Real>(
    shards: Vec<(Range<usize>, Vec<Partial<T>>)>,
) -> Result<Vec<Partial<T>>, Error> {
    Ok(fold_shards(shards, combine_rows)?.unwrap_or_default())
}

/// The sum of what disjoint shards, in ascending order, add to the gradient of h; in the same
/// order as [`combine`].
pub fn combine_dh<T: Real>(shards: Vec<(Range<usize>, Array2<T>)>) -> Result<Array2<T>, Error> {
    let add = |mut x: Array2<T>, y: Array2<T>| {
        Error::expect_shape("dh", x.shape(), y.shape())?;
        x.zip_mut_with(&y, |x, &y| *x += y);
        Ok(x)
    };
    Ok(fold_shards(shards, add)?.unwrap_or_else(|| Array2::from_elem((0, 0), T::ZERO)))
}

fn fold_shards<X>(
    shards: Vec<(Range<usize>, X)>,
    combine: impl Fn(X, X) -> Result<X, Error>,
) -> Result<Option<X>, Error> {
    let mut end = 0;
    for (classes, _) in &shards {
        if classes.start < end || classes.end < classes.start {
            let found = format!("{classes:?} after class {end}");
            return Err(Error::value("shards", "ranges in ascending order", found));
        }
        end = classes.end;
    }
    // Shards without classes add nothing; if there are no others, one of them is the result.
    let (mut some, none): (Vec<_>, Vec<_>) =
        shards.into_iter().partition(|(classes, _)| !classes.is_empty());
    if some.is_empty() {
        return Ok(none.into_iter().next().map(|(_, value)| value));
    }
    let ranges: Vec<_> = some.iter().map(|(classes, _)| classes.clone()).collect();
    let mut values = some.drain(..).map(|(_, value)| value);
    let unexpected = || Error::value("shards", "one value each", "fewer");
    fold(&ranges, &mut |_| values.next().ok_or_else(unexpected), &combine)
}
