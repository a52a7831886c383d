//! Linear cross-entropy with its classes in shards: the parts that all tiers have in common, so that one tier reads
//! what another has written.
//!
//! A [`Shard`] is a range of classes. It returns a [`Partial`] for each token and each of its [`nodes`] in the tree
//! over tiles of [`TILE`] classes; [`fold`] and [`merges`] are the order in which results of nodes are put together.
//! [`check_shards`], [`check_partials`] and [`Partial::check_total`] refuse shards, partials and totals that do not
//! belong together. The passes themselves are those of the tiers.
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/links.md"))]

mod partial;
mod tree;

pub use partial::Partial;
pub use tree::{TILE, depth, fold, merges, nodes};

use crate::{Error, LinearCrossEntropy, Pass, Table};
use std::ops::Range;

/// Some classes of a problem. Its passes take `w` and `bias` of these classes, `[classes]…`, and the other inputs
/// whole: `targets` are numbers of all classes, `class_weights` those of all.
#[derive(Debug, Clone)]
pub struct Shard<'p> {
    problem: &'p LinearCrossEntropy,
    classes: Range<usize>,
}

impl<'p> Shard<'p> {
    /// `classes` of the problem, perhaps none. Fails if the problem is unsound, lacks some of them, or has more than
    /// 2³² − 1, which partials do not count.
    pub fn new(problem: &'p LinearCrossEntropy, classes: Range<usize>) -> Result<Self, Error> {
        check_problem(problem)?;
        if classes.start > classes.end || classes.end > problem.vocab {
            let expected = format!("a range within 0..{}", problem.vocab);
            return Err(Error::value("classes", expected, format!("{classes:?}")));
        }
        Ok(Shard { problem, classes })
    }

    /// The problem of which it has some classes.
    pub fn problem(&self) -> &'p LinearCrossEntropy {
        self.problem
    }

    /// Its classes.
    pub fn classes(&self) -> Range<usize> {
        self.classes.clone()
    }

    /// The largest nodes of the tree within its classes, in their order; a part of a tile at either end stands by
    /// itself. Of n tiles there are at most 2 ⌈log₂ n⌉ + 2. All classes are one node.
    pub fn nodes(&self) -> impl Iterator<Item = Range<usize>> + Clone + use<> {
        nodes(self.problem.vocab, self.classes())
    }

    /// The tensors of a pass of the problem; `w`, `bias`, `dw` and `dbias` have rows for the classes of the shard
    /// alone.
    pub fn table(&self, pass: Pass) -> Table {
        let mut table = self.problem.table(pass);
        for operand in &mut table.operands {
            if ["w", "bias", "dw", "dbias"].contains(&operand.name) {
                operand.shape[0] = self.classes.len();
            }
        }
        table
    }
}

/// The form in which a shard returns its part of dh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dh {
    /// The sum over its classes, `[1][T][D]`: in the simd tier and on the portable level of the cuda tier node after
    /// node, from its first class on. Of several nodes that takes 4TD bytes more of scratch memory on a device.
    Sum,
    /// The sum over each of its nodes, `[nodes][T][D]`.
    Nodes,
}

impl Dh {
    /// The form of so many matrices: one is a sum.
    pub fn of(matrices: usize) -> Self {
        if matrices == 1 { Dh::Sum } else { Dh::Nodes }
    }

    /// The number of matrices that a shard returns: of a sum one, even without classes.
    pub fn matrices(self, shard: &Shard<'_>) -> usize {
        if self == Dh::Sum { 1 } else { shard.nodes().count() }
    }

    /// The classes of each matrix that adds something: a shard without classes has none.
    pub fn parts(self, shard: &Shard<'_>) -> Vec<Range<usize>> {
        match self {
            Dh::Nodes => shard.nodes().collect(),
            Dh::Sum => std::iter::once(shard.classes()).filter(|x| !x.is_empty()).collect(),
        }
    }
}

/// Fails unless a problem is sound and partials can count its classes.
fn check_problem(problem: &LinearCrossEntropy) -> Result<(), Error> {
    problem.check()?;
    if u32::try_from(problem.vocab).is_err() {
        let expected = format!("at most {} in shards", u32::MAX);
        return Err(Error::value("vocab", expected, problem.vocab));
    }
    Ok(())
}

/// Fails unless the problem is sound and the shards are all of its classes, each once, in ascending order.
pub fn check_shards<'c>(
    problem: &LinearCrossEntropy,
    shards: impl IntoIterator<Item = &'c Range<usize>>,
) -> Result<(), Error> {
    check_problem(problem)?;
    let mut end = 0;
    for (number, classes) in shards.into_iter().enumerate() {
        if classes.start != end || classes.end < end || classes.end > problem.vocab {
            let expected = format!("classes from {end} on, of {}", problem.vocab);
            let name = format!("shards[{number}]");
            return Err(Error::value(name, expected, format!("{classes:?}")));
        }
        end = classes.end;
    }
    if end < problem.vocab {
        let expected = format!("all {} classes together", problem.vocab);
        return Err(Error::value("shards", expected, format!("0..{end}")));
    }
    Ok(())
}

/// The classes of all that shards return, shard after shard: of each in this form, and an array of this shape; a shard
/// without classes adds nothing. Fails unless each array has a matrix for each part of its form, and `axes` behind.
pub fn check_parts<'c>(
    problem: &LinearCrossEntropy,
    shards: impl IntoIterator<Item = (&'c Range<usize>, Dh, &'c [usize])>,
    axes: &[usize],
) -> Result<Vec<Range<usize>>, Error> {
    let mut all = Vec::new();
    for (number, (classes, form, shape)) in shards.into_iter().enumerate() {
        let shard = Shard::new(problem, classes.clone())?;
        let expected = [&[form.matrices(&shard)], axes].concat();
        Error::expect_shape(&format!("shards[{number}]"), &expected, shape)?;
        all.extend(form.parts(&shard));
    }
    Ok(all)
}

/// Fails where a partial has not the classes of its node (of an ignored token: none), or where two nodes own the
/// target of a token. `partial` finds that of a node, by its number in `nodes`, and a token.
pub fn check_partials(
    nodes: &[Range<usize>],
    tokens: usize,
    partial: impl Fn(usize, usize) -> Partial,
) -> Result<(), Error> {
    for i in 0..tokens {
        let mut owner = None;
        for (number, node) in nodes.iter().enumerate() {
            let Partial { classes, target, .. } = partial(number, i);
            if classes != 0 && classes as usize != node.len() {
                let name = format!("partial of token {i} and classes {node:?}");
                return Err(Error::value(name, format!("of {} classes", node.len()), classes));
            }
            let other = target.and_then(|_| owner.replace(node));
            if let Some(other) = other {
                let found = format!("one with {other:?} and one with {node:?}");
                return Err(Error::value(format!("owner of targets[{i}]"), "one shard", found));
            }
        }
    }
    Ok(())
}
