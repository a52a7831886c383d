//! What shards return, put together along the tree.

use super::super::tokens::check_vocab;
use super::partial::Partial;
use super::tree::{fold, nodes};
use crate::Element;
use crate::element::TensorMut;
use crate::memory::{reserved, zeros};
use crate::parallel::share;
use crate::tiles::{cut_along, tiles};
use etalon_problem::{Error, LinearCrossEntropy};
use ndarray::{Array1, Array2, ArrayView1, ArrayView2, ArrayView3, ArrayViewMut2, Axis, Ix2, s};
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
    check(problem, shards.iter().map(|(classes, _)| classes))?;
    let mut parts = Parts::new(problem, shards.iter().map(|(classes, _)| classes))?;
    for (number, (classes, rows)) in shards.iter().enumerate() {
        let nodes = nodes(problem.vocab, classes.clone());
        let expected = [parts.count(classes), tokens];
        Error::expect_shape(&format!("shards[{number}]"), &expected, rows.shape())?;
        nodes.zip(rows.outer_iter()).for_each(|(node, rows)| parts.push(node, rows));
    }
    let mut totals = reserved(tokens, "totals")?;
    check_rows(tokens, &parts)?;
    let Parts { classes, values, .. } = &parts;
    totals.resize(tokens, Partial::identity());
    share(
        0..rayon::current_num_threads(),
        |_| (),
        totals.chunks_mut(TASK).enumerate(),
        |(task, totals), ()| {
            for (i, total) in totals.iter_mut().enumerate() {
                let leaf = |part: usize| values[part][task * TASK + i];
                *total = fold(classes, &leaf, &Partial::join).unwrap_or(*total);
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
    check(problem, shards.iter().map(|(classes, _)| classes))?;
    Error::expect_shape("dh", &[tokens, dim], dh.shape())?;
    let mut parts = Parts::new(problem, shards.iter().map(|(classes, _)| classes))?;
    for (number, (classes, dh)) in shards.iter().enumerate() {
        let summed = dh.len_of(Axis(0)) == 1;
        let expected = [if summed { 1 } else { parts.count(classes) }, tokens, dim];
        Error::expect_shape(&format!("shards[{number}]"), &expected, dh.shape())?;
        match summed {
            // A shard without classes adds nothing.
            true if classes.is_empty() => {}
            true => parts.push(classes.clone(), dh.index_axis(Axis(0), 0)),
            false => nodes(problem.vocab, classes.clone())
                .zip(dh.outer_iter())
                .for_each(|(node, dh)| parts.push(node, dh)),
        }
    }
    let Parts { classes, values, .. } = &parts;
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

/// Fails unless the shards of a sound problem are all of its classes, in ascending order.
fn check<'c>(
    problem: &LinearCrossEntropy,
    shards: impl Iterator<Item = &'c Range<usize>>,
) -> Result<(), Error> {
    problem.check()?;
    check_vocab(problem)?;
    let mut end = 0;
    for (number, classes) in shards.enumerate() {
        if classes.start != end || classes.end < end || classes.end > problem.vocab {
            let expected = format!("classes from {end} on, of {}", problem.vocab);
            return Err(Error::value(
                format!("shards[{number}]"),
                expected,
                format!("{classes:?}"),
            ));
        }
        end = classes.end;
    }
    if end < problem.vocab {
        let expected = format!("all {} classes together", problem.vocab);
        return Err(Error::value("shards", expected, format!("0..{end}")));
    }
    Ok(())
}

/// Disjoint ranges of classes, ascending and not empty, each with what it adds.
struct Parts<V> {
    vocab: usize,
    classes: Vec<Range<usize>>,
    values: Vec<V>,
}

impl<V> Parts<V> {
    /// Room for the nodes of all shards.
    fn new<'c>(
        problem: &LinearCrossEntropy,
        shards: impl Iterator<Item = &'c Range<usize>>,
    ) -> Result<Self, Error> {
        let mut parts = Parts { vocab: problem.vocab, classes: Vec::new(), values: Vec::new() };
        let count = shards.map(|classes| parts.count(classes)).sum();
        (parts.classes, parts.values) = (reserved(count, "nodes")?, reserved(count, "nodes")?);
        Ok(parts)
    }

    /// The nodes of some classes.
    fn count(&self, classes: &Range<usize>) -> usize {
        nodes(self.vocab, classes.clone()).count()
    }

    fn push(&mut self, classes: Range<usize>, value: V) {
        self.classes.push(classes);
        self.values.push(value);
    }
}

/// Fails where a partial has not the classes of its node, or a target has two owners.
fn check_rows(tokens: usize, parts: &Parts<ArrayView1<'_, Partial>>) -> Result<(), Error> {
    for i in 0..tokens {
        let mut owner = None;
        for (node, rows) in parts.classes.iter().zip(&parts.values) {
            let Partial { classes, target, .. } = rows[i];
            if classes != 0 && classes as usize != node.len() {
                let name = format!("partial of token {i} and classes {node:?}");
                return Err(Error::value(name, format!("of {} classes", node.len()), classes));
            }
            let owned = target.and_then(|_| owner.replace(node));
            if let Some(other) = owned {
                let found = format!("one with {other:?} and one with {node:?}");
                return Err(Error::value(format!("owner of targets[{i}]"), "one shard", found));
            }
        }
    }
    Ok(())
}
