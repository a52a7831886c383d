//! The grid of linear_cross_entropy.

use super::Grid;
use super::axes::{axis, point};
use crate::generate::Stream;
use etalon_problem::{Algorithm, Dtype, LinearCrossEntropy, Operand, Problem, Reduction};
use ndarray::{ArrayD, IxDyn};

axis! {
    "vocab",
    /// How many classes there are.
    VocabKind {
        /// One.
        One = "one",
        /// No multiple of any tile.
        Ragged = "ragged",
    }
}

axis! {
    "reduction",
    /// What becomes of the losses of the tokens.
    ReductionKind {
        /// Nothing.
        None = "none",
        /// Their mean.
        Mean = "mean",
        /// Their sum.
        Sum = "sum",
    }
}

point! {
    /// What a case of linear_cross_entropy is made of, beside its storage type and seed.
    Point {
        /// How many classes there are.
        vocab: VocabKind,
        /// What becomes of the losses of the tokens.
        reduction: ReductionKind,
    }
}

impl Grid for Point {
    const STORAGE: &'static [Dtype] = &[Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64];

    fn problem(&self, _: Algorithm, _: u64) -> Problem {
        let vocab = match self.vocab {
            VocabKind::One => 1,
            VocabKind::Ragged => 137,
        };
        let reduction = match self.reduction {
            ReductionKind::None => Reduction::None,
            ReductionKind::Mean => Reduction::Mean,
            ReductionKind::Sum => Reduction::Sum,
        };
        LinearCrossEntropy::new(9, 16, vocab).reduction(reduction).into()
    }

    fn values(&self, problem: &Problem, operand: &Operand, _: Dtype, seed: u64) -> ArrayD<f64> {
        let stream = Stream::new(seed, operand.name);
        let vocab = match problem {
            Problem::LinearCrossEntropy(problem) => problem.vocab,
            _ => 1,
        };
        let mut at = 0;
        ArrayD::from_shape_simple_fn(IxDyn(&operand.shape), || {
            at += 1;
            match operand.name {
                "targets" => stream.below(at, vocab) as f64,
                _ => stream.normal(at),
            }
        })
    }

    fn given(&self, _: &Operand) -> bool {
        true
    }

    fn few_words(&self) -> &'static str {
        "generic"
    }

    fn is_rich(&self, _: &Problem) -> bool {
        false
    }

    fn is_smooth(&self) -> bool {
        true
    }
}
