//! Work that the softmax algorithms share: attention, attention_lse and lazy_attention check and wrap their
//! tensors, and the passes here compute, whatever the element type.
//!
//! ```text
//! forward           streamed ─ forward_tile; of lazy attention lazy_forward ─ lazy_tile
//! backward          key_sweep ─ ordered_sum, gradient                      ┐
//!   of lazy attention lazy_backward ─ lazy_gradient, diagonals             │
//! double_backward   key_sweep ─ second                                     │
//!   of lazy attention lazy_double_backward ─ lazy_second, diagonals        ┴ wave ─ kernels ─ block
//! block             engine: in registers of f32 or in tiles of bf16 ─ weights, scores, bf16
//! ```
//!
//! A pass is a module with the functions `run` and `plan` of its [`operands`]. First and second order
//! share their schedule, their memory, the order of their work ([`wave::Work`]), their sweeps and the
//! kernels of whole tiles; they differ in the weights of a register block ([`block::Body`]); those of
//! lazy attention are made panel by panel of keys ([`lazy_panel`]). Bodies are written once for registers and for
//! tiles ([`engine::Engine`]); attention's first order has kernels of its own in tiles.
//!
//! All memory comes from a [`Workspace`](crate::Workspace): one region for packed operands, row
//! statistics, sums of dq and the scratch of threads, and lists of tasks. [`schedule::Needs`] says how
//! much, for the pass and for its plan.

mod backward;
mod bf16;
mod bf16_gradient;
mod block;
mod cut;
mod diagonals;
mod distances;
mod double_backward;
mod engine;
mod forward;
mod forward_tile;
mod gradient;
mod kernels;
mod key_sweep;
mod lazy_backward;
mod lazy_counts;
mod lazy_double_backward;
mod lazy_forward;
mod lazy_gradient;
mod lazy_panel;
mod lazy_second;
mod lazy_stats;
mod lazy_tile;
mod named;
mod needs;
mod operands;
mod ordered_sum;
mod packs;
mod pair;
mod plan;
mod rule;
mod schedule;
mod scores;
mod scratch;
mod second;
mod stats;
mod streamed;
mod tasks;
mod wave;
mod weights;

pub use lazy_stats::{activity, figures, stats};
pub use named::run;
pub use plan::plan;
