//! Linear cross-entropy with its classes in shards: each device holds the rows of w and the biases of some classes,
//! and the other inputs whole.
//!
//! The functions are those of the simd tier's module of this name. [`forward_shard`] returns what the classes of a
//! shard add to each token: a [`Partial`] for each node of the tree over tiles that they hold. [`combine`] makes the
//! totals of those of all shards, and [`output`] the outputs of the totals. With the totals [`backward_shard`] returns
//! the shard's rows of dw and dbias, and its part of dh in f32; [`combine_dh`] adds up the parts and rounds the sum.
//! These take and return arrays of the host. Of operands that lie on a device `prepare_forward`, `prepare_combine`,
//! `prepare_output`, `prepare_backward` and `prepare_combine_dh` make a [`DevicePass`](crate::DevicePass) each: what
//! is enqueued neither waits nor allocates, so that collectives of NCCL may lie between them on the same stream. The
//! example `gpu_shards` of the crate does that.
//!
//! If shards begin at multiples of [`TILE`], loss, lse, logprob, entropy, argmax, dw and dbias have the bits of the
//! pass over all classes, with the same options on devices of one kind. On the portable level so has dh, if shards are
//! nodes or return sums of nodes ([`Dh::Nodes`]). Tensor cores sum dh class after class in quarters of the tree: there
//! that holds for shards that begin at such quarters. Of others it lies within the bounds, and has the bits of the
//! same shards on one device. With other cuts everything agrees within the bounds.
//!
//! ```
//! use etalon_cuda::linear_cross_entropy::shard::{Shard, combine, forward_shard, output};
//! use etalon_cuda::{Options, Workspace};
//! use etalon_problem::{Error, LinearCrossEntropy, Result, Views, ViewsMut};
//! use ndarray::{Array2, arr0, array, s};
//!
//! fn loss() -> Result<f32> {
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
#![cfg_attr(doc, doc = include_str!("../../../../docs/assets/links.md"))]

mod device;
mod host;
mod table;

pub use device::{prepare_backward, prepare_combine, prepare_combine_dh, prepare_forward, prepare_output};
pub use etalon_problem::linear_cross_entropy::shard::{Dh, Partial, Shard, TILE};
pub use host::{backward_shard, combine, combine_dh, forward_shard, output};

use crate::memory::beyond_32_bits;
use etalon_problem::{LinearCrossEntropy, Result};

/// Fails unless the classes of a problem can be counted.
fn check_vocab(problem: &LinearCrossEntropy) -> Result<()> {
    if problem.vocab > i32::MAX as usize {
        return Err(beyond_32_bits(format!("a vocabulary of {}", problem.vocab)));
    }
    Ok(())
}
