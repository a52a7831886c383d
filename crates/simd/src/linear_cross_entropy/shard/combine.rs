//! Results of shards, put together along the tree.

use super::partial::join;
use crate::Element;
use crate::element::TensorMut;
use crate::memory::{reserved, zeros};
use crate::parallel::share;
use crate::tiles::{cut_along, tiles};
use etalon_problem::linear_cross_entropy::shard::{
    Dh, Partial, check_partials, check_parts, check_shards, fold,
};
use etalon_problem::{Error, LinearCrossEntropy};
use ndarray::{Array1, Array2, ArrayView2, ArrayView3, ArrayViewMut2, Axis, Ix2, s};
use std::ops::Range;

/// Tokens of a task.
const TASK: usize = 64;

/// Elements of dh that are added up at a time.
const SLICE: usize = 256;

/// The totals of all tokens `[T]`, from what all shards returned, `[nodes][T]` each, in the order of their
/// classes. Fails unless these are all classes, each once; unless each partial has the classes of its node
/// or, of an ignored token, none; and where two own a target, whose token it names.
///
/// lse, logprob, entropy, argmax and the loss that follow from the totals have the bits of the unsharded
/// ones if shards begin at multiples of [`TILE`](super::TILE).
pub fn combine(
    problem: &LinearCrossEntropy,
    shards: &[(Range<usize>, ArrayView2<'_, Partial>)],
) -> Result<Array1<Partial>, Error> {
    let tokens = problem.tokens;
    check_shards(problem, shards.iter().map(|(classes, _)| classes))?;
    let shapes = shards.iter().map(|(classes, rows)| (classes, Dh::Nodes, rows.shape()));
    let classes = &check_parts(problem, shapes, &[tokens])?;
    let values: Vec<_> = shards.iter().flat_map(|(_, rows)| rows.outer_iter()).collect();
    let mut totals = reserved(tokens, "totals")?;
    check_partials(classes, tokens, |node, token| values[node][token])?;
    totals.resize(tokens, Partial::identity());
    share(
        0..rayon::current_num_threads(),
        |_| (),
        totals.chunks_mut(TASK).enumerate(),
        |(task, totals), ()| {
            for (i, total) in totals.iter_mut().enumerate() {
                let leaf = |part: usize| values[part][task * TASK + i];
                *total = fold(classes, &leaf, &join).unwrap_or(*total);
            }
        },
    );
    Ok(Array1::from_vec(totals))
}

/// The gradient of h `[T][D]`, from what all shards returned of it, in the order of their classes: of each
/// the sum over its classes, `[1][T][D]`, or those over its nodes, `[nodes][T][D]`. It is added up in f32
/// and rounded once. Fails unless the shards are all classes, each once.
///
/// It has the bits of the unsharded one if shards begin at multiples of [`TILE`](super::TILE) and return
/// sums of nodes, or are nodes.
pub fn combine_dh<T: Element>(
    problem: &LinearCrossEntropy,
    shards: &[(Range<usize>, ArrayView3<'_, f32>)],
) -> Result<Array2<T>, Error> {
    problem.check()?;
    let mut dh = zeros(problem.h_shape(), "dh")?;
    combine_dh_into(problem, shards, dh.view_mut())?;
    Ok(dh)
}

/// As [`combine_dh`], into an array of the caller, `[T][D]`; on an error nothing has been written.
pub fn combine_dh_into<T: Element>(
    problem: &LinearCrossEntropy,
    shards: &[(Range<usize>, ArrayView3<'_, f32>)],
    dh: ArrayViewMut2<'_, T>,
) -> Result<(), Error> {
    let [tokens, dim] = problem.h_shape();
    check_shards(problem, shards.iter().map(|(classes, _)| classes))?;
    Error::expect_shape("dh", &[tokens, dim], dh.shape())?;
    let of = |x: &ArrayView3<'_, f32>| Dh::of(x.len_of(Axis(0)));
    let shapes = shards.iter().map(|(classes, dh)| (classes, of(dh), dh.shape()));
    let classes = &check_parts(problem, shapes, &[tokens, dim])?;
    let with_classes = shards.iter().filter(|(classes, _)| !classes.is_empty());
    let values: Vec<_> = with_classes.flat_map(|(_, dh)| dh.outer_iter()).collect();
    // From here on nothing fails.
    let rows = cut_along(TensorMut::<Ix2>::from(dh), 0, tiles(0..tokens, TASK));
    share(
        0..rayon::current_num_threads(),
        |_| (),
        rows.zip(tiles(0..tokens, TASK)),
        |(mut dh, tokens), ()| {
            for (i, token) in tokens.enumerate() {
                for elements in tiles(0..dim, SLICE) {
                    let leaf = |part: usize| {
                        let mut sums = [0.0; SLICE];
                        let row = values[part].slice(s![token, elements.clone()]);
                        sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum = x);
                        sums
                    };
                    let add = |mut x: [f32; SLICE], y: [f32; SLICE]| {
                        x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
                        x
                    };
                    let sums = fold(classes, &leaf, &add).unwrap_or([0.0; SLICE]);
                    dh.view_mut().slice(s![i, elements]).write(&sums, 1.0);
                }
            }
        },
    );
    Ok(())
}
