//! The grid of lazy_attention.

use super::Grid;
use super::attention::{MaskKind, SequenceKind};
use super::axes::point;
use crate::generate::Stream;
use crate::shapes::ShapeClass;
use etalon_problem::{Algorithm, Dtype, LazyAttention, Operand, Problem};
use ndarray::{ArrayD, IxDyn};

point! {
    /// What a case of lazy_attention is made of, beside its storage type and seed.
    Point {
        /// The kind of mask.
        mask: MaskKind,
        /// The class of extents.
        shape: ShapeClass,
        /// How the rows divide into sequences.
        sequences: SequenceKind,
    }
}

impl Grid for Point {
    const STORAGE: &'static [Dtype] = &[Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64];

    fn problem(&self, _: Algorithm, seed: u64) -> Problem {
        let mut shape = self.shape.draw(seed);
        if self.sequences == SequenceKind::Packed {
            shape.extents.batch = 1;
        }
        LazyAttention::new(shape.extents)
            .value_dim(shape.value_dim)
            .bias(7)
            .mask(self.mask.draw(&shape.extents, seed))
            .sequences(self.sequences.draw(&shape.extents, seed))
            .into()
    }

    fn values(&self, _: &Problem, operand: &Operand, _: Dtype, seed: u64) -> ArrayD<f64> {
        let stream = Stream::new(seed, operand.name);
        let mut at = 0;
        ArrayD::from_shape_simple_fn(IxDyn(&operand.shape), || {
            at += 1;
            match operand.name {
                "tau" => -stream.uniform(at),
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
