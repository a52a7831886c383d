//! The vocabulary of etalon: *what* a kernel computes, never *how*.
//!
//! A problem is plain data: extents, options, a mask. It holds arrays only where a mask needs
//! them, does no arithmetic on tensors, and can be written to and read from JSON (feature
//! `serde`). Every tier takes the same problems, so that one conformance suite can judge them all.
//!
//! * [`Attention`], [`AttentionLse`] and [`LazyAttention`]: problems around the same [`Scores`];
//! * [`LinearAttention`], [`LinearCrossEntropy`]: problems without scores; [`slopes`]: named decays;
//! * [`Mask`], [`Sequences`]: which query sees which key; [`TokenSequences`]: which tokens share a state;
//! * [`Operand`], [`Table`]: the tensors of a pass with their axes, types and parts; [`Views`],
//!   [`ViewsMut`]: such tensors, borrowed, by name;
//! * [`Dtype`], [`Blocking`], [`Error`]; [`Walk`]: intermediate results of a kernel, tile by tile;
//! * [`docs`]: the notation and the equations, numbered as the comments of every kernel number them.
//!
//! ```
//! use etalon_problem::{Attention, Extents, Mask};
//! let extents = Extents { batch: 1, query_heads: 8, key_heads: 2, queries: 128, keys: 128, dim: 64 };
//! let problem = Attention::new(extents).mask(Mask::causal()).softcap(30.0);
//! problem.check()?;
//! assert_eq!(problem.scores.scale(), 0.125); // 1/√64, unless softmax_scale is set
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![forbid(unsafe_code)]

// `docs/assets/links.md` names the pages by the name of this crate, in every crate.
extern crate self as etalon_problem;

mod alternatives;
pub mod attention;
pub mod attention_lse;
mod blocking;
pub mod docs;
mod dtype;
mod error;
#[cfg(feature = "serde")]
mod file;
pub mod lazy_attention;
pub mod linear_attention;
pub mod linear_cross_entropy;
mod mask;
mod named;
#[cfg(feature = "schema")]
mod offsets;
mod operand;
mod options;
mod pairs;
mod scores;
mod sequences;
mod settings;
pub mod slopes;
mod structs;
pub mod tensors;
mod tokens;
mod view;
mod walk;

pub use alternatives::{Alternative, Setting, SettingKind};
pub use attention::Attention;
pub use attention_lse::AttentionLse;
pub use blocking::{Blocking, Mode};
pub use dtype::Dtype;
pub use error::{Error, Result, shortened};
pub use lazy_attention::{DistanceBias, LazyAttention, dtheta, tau_from_theta};
pub use linear_attention::{Decay, LinearAttention, LinearExtents};
pub use linear_cross_entropy::{
    LinearCrossEntropy, LseSquareWeight, NothingLeft, Reduction, TokenOutputs,
};
pub use mask::{Align, Cover, Mask, MaskNode, NamedArray, NodeArrays, NodeKind};
pub use operand::{Axis, Family, Operand, Precision, Role, Table, check_operands, find};
pub use scores::{BiasExtents, Extents, Scores};
pub use sequences::{Sequence, Sequences};
pub use tensors::Scalar;
pub use tokens::{TokenSequence, TokenSequences};
pub use view::{Stored, View, ViewMut, Views, ViewsMut};
pub use walk::{Order, SinkPlace, Walk};

use operand::Row;

named! {
    /// A pass of an algorithm.
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
    #[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    Pass, "pass" {
        /// Inputs to outputs.
        Forward = "forward",
        /// Cotangents of the outputs to gradients of the inputs.
        Backward = "backward",
        /// Cotangents of the gradients to gradients of the inputs and of the first cotangents.
        DoubleBackward = "double_backward",
        /// Tangents of the inputs to tangents of the outputs.
        Jvp = "jvp",
        /// One more token: the state before it to its output and the state after it.
        Step = "step",
        /// Inputs, and cotangents that are known before, to outputs and gradients at once.
        ForwardBackward = "forward_backward",
    }
}

/// The algorithms, each with its name, the type of its problems, and its passes.
macro_rules! algorithms {
    ($($(#[$doc:meta])* $Problem:ident = $name:literal: $($Pass:ident)*;)*) => {
        named! {
            /// An algorithm, by name.
            #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
            #[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
            #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
            Algorithm, "algorithm" { $($(#[$doc])* $Problem = $name,)* }
        }

        impl Algorithm {
            /// The passes that it has.
            pub fn passes(self) -> &'static [Pass] {
                match self { $(Algorithm::$Problem => &[$(Pass::$Pass),*],)* }
            }
        }

        /// Any problem of any algorithm; in a file the key `algorithm` says which.
        #[derive(Debug, Clone, PartialEq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "serde", serde(tag = "algorithm", rename_all = "snake_case"))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub enum Problem { $($(#[$doc])* $Problem($Problem),)* }

        /// Applies an expression to the problem of whichever algorithm.
        macro_rules! each {
            ($any:expr, $x:ident => $body:expr) => {
                match $any { $(Problem::$Problem($x) => $body,)* }
            };
        }

        impl Problem {
            /// The algorithm of the problem.
            pub fn algorithm(&self) -> Algorithm {
                match self { $(Problem::$Problem(_) => Algorithm::$Problem,)* }
            }
        }

        $(
            impl From<$Problem> for Problem {
                fn from(problem: $Problem) -> Self {
                    Problem::$Problem(problem)
                }
            }

            impl<'a> TryFrom<&'a Problem> for &'a $Problem {
                type Error = Error;

                fn try_from(problem: &'a Problem) -> Result<Self, Error> {
                    match problem {
                        Problem::$Problem(problem) => Ok(problem),
                        other => Err(Error::value("algorithm", $name, other.algorithm())),
                    }
                }
            }

            impl $Problem {
                /// The tensors of a pass: as [`Problem::operands`].
                pub fn operands(&self, pass: Pass) -> Vec<Operand> {
                    self.table(pass).operands
                }

                /// The tensors of a pass, with the options of those that it does not have.
                pub fn table(&self, pass: Pass) -> Table {
                    let has = Algorithm::$Problem.passes().contains(&pass);
                    let rows = if has { self.rows() } else { Vec::new() };
                    Table::new(&rows, pass, |axis| self.extent(axis))
                }
            }
        )*
    };
}
algorithms! {
    /// Softmax attention.
    Attention = "attention": Forward Backward DoubleBackward Jvp;
    /// The log-sum-exp of attention scores.
    AttentionLse = "attention_lse": Forward Backward DoubleBackward Jvp;
    /// Linear attention with decay.
    LinearAttention = "linear_attention": Forward Backward DoubleBackward Step;
    /// Lazy attention.
    LazyAttention = "lazy_attention": Forward Backward DoubleBackward;
    /// Linear cross-entropy.
    LinearCrossEntropy = "linear_cross_entropy": Forward Backward DoubleBackward ForwardBackward;
}

impl Algorithm {
    /// The error of a pass that the algorithm does not have.
    pub fn no_pass(self, pass: Pass) -> Error {
        let passes: Vec<&str> = self.passes().iter().map(|pass| pass.name()).collect();
        Error::value("pass", format!("one of {}", passes.join(", ")), pass)
    }
}

impl Problem {
    /// The tensors of a pass, with the options of those that it does not have.
    pub fn table(&self, pass: Pass) -> Table {
        each!(self, problem => problem.table(pass))
    }

    /// The tensors of a pass: inputs, what is saved, cotangents and outputs, in this order; none where
    /// the algorithm does not have the pass. `step` takes one token of every batch element, without
    /// the axis of the tokens, and the states always.
    pub fn operands(&self, pass: Pass) -> Vec<Operand> {
        self.table(pass).operands
    }

    /// Fails unless every extent and option is in its domain and every array is bound and fits.
    pub fn check(&self) -> Result<(), Error> {
        each!(self, problem => problem.check())
    }

    /// The operand of this name, as the first pass has it that has it.
    pub fn operand(&self, name: &str) -> Option<Operand> {
        let passes = self.algorithm().passes().iter();
        passes.flat_map(|&pass| self.operands(pass)).find(|operand| operand.name == name)
    }

    /// The table of the algorithm: every tensor of the forward pass that the problem has, with those
    /// that belong to it in other passes.
    pub fn families(&self) -> Vec<Family> {
        each!(self, problem => problem.rows().iter().filter_map(Row::family).collect())
    }

    /// The extent of an axis; 1 of an axis that the algorithm does not have.
    pub fn extent(&self, axis: Axis) -> usize {
        each!(self, problem => problem.extent(axis))
    }

    /// The scores and which of them count, of an algorithm that has them.
    pub fn scores(&self) -> Option<&Scores> {
        match self {
            Problem::Attention(problem) => Some(&problem.scores),
            Problem::AttentionLse(problem) => Some(&problem.scores),
            Problem::LazyAttention(problem) => Some(&problem.scores),
            Problem::LinearAttention(_) | Problem::LinearCrossEntropy(_) => None,
        }
    }

    /// As [`Problem::scores`], to be changed.
    pub fn scores_mut(&mut self) -> Option<&mut Scores> {
        match self {
            Problem::Attention(problem) => Some(&mut problem.scores),
            Problem::AttentionLse(problem) => Some(&mut problem.scores),
            Problem::LazyAttention(problem) => Some(&mut problem.scores),
            Problem::LinearAttention(_) | Problem::LinearCrossEntropy(_) => None,
        }
    }

    /// Joins the arrays that the mask names with their elements: `ids` finds integer tensors,
    /// `flags` boolean ones. Both return `None` for a name that they do not hold.
    pub fn bind(
        &mut self,
        mut ids: impl FnMut(&str) -> Result<Option<NamedArray<i64>>, Error>,
        mut flags: impl FnMut(&str) -> Result<Option<NamedArray<bool>>, Error>,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        let Some(scores) = self.scores_mut() else { return result };
        scores.mask.visit_mut(&mut |mask| {
            let bound = match mask {
                Mask::Segments { query, key } => {
                    rebind(query, &mut ids).and_then(|()| rebind(key, &mut ids))
                }
                Mask::Array(array) => rebind(array, &mut flags),
                _ => Ok(()),
            };
            if result.is_ok() {
                result = bound;
            }
        });
        result
    }

    /// The names and shapes of the arrays that the mask holds, in the order of the tree.
    pub fn arrays(&self) -> Vec<(String, Vec<usize>)> {
        let mut names = Vec::new();
        let Some(scores) = self.scores() else { return names };
        scores.mask.clone().visit_mut(&mut |mask| match mask {
            Mask::Segments { query, key } => {
                names.extend([query, key].map(|ids| (ids.name.clone(), ids.shape.clone())));
            }
            Mask::Array(array) => names.push((array.name.clone(), array.shape.clone())),
            _ => {}
        });
        names
    }
}

fn rebind<T>(
    array: &mut NamedArray<T>,
    find: &mut impl FnMut(&str) -> Result<Option<NamedArray<T>>, Error>,
) -> Result<(), Error> {
    *array = find(&array.name)?.ok_or_else(|| array.missing())?;
    Ok(())
}
