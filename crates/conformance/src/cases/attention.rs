//! The grid of attention and attention_lse.

mod factors;
mod family;

pub use factors::{DlseKind, MaskKind, OptionKind, SequenceKind};
pub use family::Family;

use super::Grid;
use super::axes::{Axis, Coordinates, point};
use crate::shapes::ShapeClass;
use etalon_problem::{
    Algorithm, Attention, AttentionLse, BiasExtents, Dtype, Operand, Problem, Role, Scores,
};
use ndarray::ArrayD;

point! {
    /// What a case of attention or attention_lse is made of, beside its storage type and seed.
    Point {
        /// The kind of mask.
        mask: MaskKind,
        /// The options that are set.
        options: OptionKind,
        /// The class of extents.
        shape: ShapeClass,
        /// How the rows divide into sequences.
        sequences: SequenceKind,
        /// The family of the elements.
        family: Family,
        /// Whether there is a cotangent of lse.
        dlse: DlseKind,
    }
}

impl Grid for Point {
    const STORAGE: &'static [Dtype] = &[Dtype::F32, Dtype::Bf16, Dtype::F16];

    fn sizes_of(algorithm: Algorithm) -> Vec<usize> {
        let mut sizes = Self::sizes();
        if let (Algorithm::AttentionLse, Some(dlse)) = (algorithm, sizes.last_mut()) {
            *dlse = 1; // only the first, `Present`: without it there is nothing to compute
        }
        sizes
    }

    fn problem(&self, algorithm: Algorithm, seed: u64) -> Problem {
        let mut shape = self.shape.draw(seed);
        if self.sequences == SequenceKind::Packed {
            shape.extents.batch = 1;
        }
        let mut scores = Scores::new(shape.extents);
        self.options.set(&mut scores, seed);
        if self.family == Family::Holes && scores.bias.is_none() {
            let (batch, heads) = (shape.extents.batch, shape.extents.query_heads);
            scores.bias = Some(BiasExtents { batch, heads });
        }
        scores.sequences = self.sequences.draw(&shape.extents, seed);
        scores.mask = self.mask.draw(&shape.extents, seed);
        match algorithm {
            Algorithm::AttentionLse => AttentionLse { scores }.into(),
            _ => Attention { scores, value_dim: shape.value_dim }.into(),
        }
    }

    fn values(&self, problem: &Problem, operand: &Operand, dtype: Dtype, seed: u64) -> ArrayD<f64> {
        match problem.scores() {
            Some(scores) => self.family.values(scores, operand, dtype, seed),
            None => ArrayD::zeros(operand.shape.clone()),
        }
    }

    fn given(&self, operand: &Operand) -> bool {
        !(operand.name == "dlse"
            && operand.role == Role::OptionalCotangent
            && self.dlse == DlseKind::Absent)
    }

    fn few_words(&self) -> &'static str {
        self.family.name()
    }

    fn is_rich(&self, problem: &Problem) -> bool {
        self.family == Family::Generic
            && self.sequences == SequenceKind::Dense
            && problem.scores().is_some_and(|s| s.extents.queries.min(s.extents.keys) > 15)
    }

    fn is_smooth(&self) -> bool {
        matches!(self.family, Family::Generic | Family::Peaked)
    }
}
