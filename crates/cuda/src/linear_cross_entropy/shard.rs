//! Linear cross-entropy with its classes in shards: each device holds the rows of w and the biases of some classes,
//! and the other inputs whole.
//!
//! The functions are those of the simd tier's module of this name. [`forward_shard`] returns what the classes of a
//! shard add to each token: a [`Partial`] for each node of the tree over tiles that they hold. [`combine`] makes the
//! totals of those of all shards, and [`output`] the outputs of the totals. With the totals [`backward_shard`] returns
//! the shard's rows of dw and dbias, and its part of dh in f32; [`combine_dh`] adds up the parts and rounds the sum.
//! These take and return arrays of the host. Of operands that lie on a device `prepare_forward`, `prepare_combine`,
//! `prepare_output`, `prepare_backward` and `prepare_combine_dh` make a [`DevicePass`](crate::DevicePass) each: what is
//! enqueued neither waits nor allocates, so that collectives of NCCL may lie between them on the same stream. The
//! example `gpu_shards` of the crate does that.
//!
//! Where shards begin at multiples of [`TILE`], loss, lse, logprob, entropy, argmax, dw and dbias have the bits of the
//! pass over all classes, with the same options on devices of one kind. On the portable level so has dh, if shards are
//! nodes or return sums of nodes ([`Dh::Nodes`]). Tensor cores sum dh class after class in quarters of the tree: there
//! that holds for shards that begin at such quarters. Of others it lies within the bounds, and has the bits of the same
//! shards on one device. With other cuts everything agrees within the bounds.
//!
//! ```
//! use etalon_cuda::linear_cross_entropy::shard::{Shard, combine, forward_shard, output};
//! use etalon_cuda::{Options, Workspace};
//! use etalon_problem::{Error, LinearCrossEntropy, Views, ViewsMut};
//! use ndarray::{Array2, arr0, array, s};
//!
//! fn loss() -> Result<f32, Error> {
//!     let problem = LinearCrossEntropy::new(2, 1, 600); // tokens, elements, classes
//!     let (h, targets) = (array![[1f32], [2.0]], array![2i64, 599]);
//!     let w = Array2::<f32>::zeros((600, 1));
//!     let (workspace, options) = (Workspace::new(), Options::default());
//!
//!     // What each rank does with its rows of w. Then every rank gets the partials of all.
//!     let ranks = [Shard::new(&problem, 0..512)?, Shard::new(&problem, 512..600)?];
//!     let inputs = |rank: &Shard<'_>| {
//!         Views::new().with("h", &h).with("w", w.slice(s![rank.classes(), ..])).with("targets", &targets)
//!     };
//!     let a = forward_shard(&workspace, &ranks[0], &inputs(&ranks[0]), &options)?;
//!     let b = forward_shard(&workspace, &ranks[1], &inputs(&ranks[1]), &options)?;
//!     let partials = [(0..512, a.view()), (512..600, b.view())];
//!     let totals = combine(&workspace, &problem, &partials, &options)?;
//!     let mut loss = arr0(0f32);
//!     let mut outputs = ViewsMut::new().with("loss", &mut loss);
//!     output(&workspace, &ranks[0], &inputs(&ranks[0]), totals.view(), &mut outputs, &options)?;
//!     drop(outputs);
//!     Ok(loss[[]])
//! }
//!
//! match loss() {
//!     Ok(loss) => assert!((loss - 600f32.ln()).abs() < 1e-5), // 600 equal logits
//!     Err(Error::Unsupported { reason, .. }) => println!("no CUDA: {reason}"),
//!     Err(error) => return Err(error),
//! }
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![doc = include_str!("../../../../docs/assets/links.md")]

mod device;
mod host;
mod partial;
mod table;

pub use super::TILE;
pub use device::{
    prepare_backward, prepare_combine, prepare_combine_dh, prepare_forward, prepare_output,
};
pub use host::{backward_shard, combine, combine_dh, forward_shard, output};
pub use partial::Partial;

use crate::linear_cross_entropy::tree::nodes;
use etalon_problem::{Error, LinearCrossEntropy};
use std::ops::Range;

/// Some classes of a problem. The functions take `w` and `bias` of these classes, `[classes]…`, and the other inputs
/// whole: `targets` are numbers of all classes, `class_weights` those of all.
#[derive(Debug, Clone)]
pub struct Shard<'p> {
    problem: &'p LinearCrossEntropy,
    classes: Range<usize>,
}

impl<'p> Shard<'p> {
    /// `classes` of the problem, perhaps none. Fails if the problem is unsound or lacks some of them, or has more
    /// than 2³¹ − 1.
    pub fn new(problem: &'p LinearCrossEntropy, classes: Range<usize>) -> Result<Self, Error> {
        check_problem(problem)?;
        if classes.start > classes.end || classes.end > problem.vocab {
            let expected = format!("a range within 0..{}", problem.vocab);
            return Err(Error::value("classes", expected, format!("{classes:?}")));
        }
        Ok(Shard { problem, classes })
    }

    /// Its classes.
    pub fn classes(&self) -> Range<usize> {
        self.classes.clone()
    }

    /// The largest nodes of the tree within its classes, in their order; a part of a tile at either end stands by
    /// itself. Of n tiles there are at most 2 ⌈log₂ n⌉ + 2. All classes are one node.
    pub fn nodes(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        nodes(self.problem.vocab, self.classes())
    }
}

/// Forms in which a shard returns dh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dh {
    /// The sum over its classes: on the portable level node after node, from its first class on. Where it has more
    /// than one node there, that takes further 4TD bytes of scratch memory.
    Sum,
    /// The sum over each of its nodes.
    Nodes,
}

impl Dh {
    /// The classes of each part that a shard returns.
    fn parts(self, shard: &Shard<'_>) -> Vec<Range<usize>> {
        match self {
            Dh::Nodes => shard.nodes().collect(),
            Dh::Sum => std::iter::once(shard.classes()).filter(|x| !x.is_empty()).collect(),
        }
    }

    /// The number of matrices that a shard returns: of a sum always one.
    fn count(self, shard: &Shard<'_>) -> usize {
        if self == Dh::Sum { 1 } else { shard.nodes().count() }
    }
}

/// Fails unless a problem is sound and its classes can be counted.
fn check_problem(problem: &LinearCrossEntropy) -> Result<(), Error> {
    problem.check()?;
    if problem.vocab > i32::MAX as usize {
        return Err(Error::Unsupported {
            what: format!("a vocabulary of {}", problem.vocab),
            reason: "the cuda tier counts in 32 bits".to_string(),
        });
    }
    Ok(())
}

/// Fails unless the shards of a sound problem are all of its classes, in ascending order.
fn check_shards<'c>(
    problem: &LinearCrossEntropy,
    shards: impl Iterator<Item = &'c Range<usize>>,
) -> Result<(), Error> {
    check_problem(problem)?;
    let mut end = 0;
    for (number, classes) in shards.enumerate() {
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
