//! The grid of linear_attention.

use super::Grid;
use super::axes::{axis, point};
use crate::generate::Stream;
use crate::shapes::ShapeClass;
use etalon_problem::{Algorithm, Decay, Dtype, LinearAttention, LinearExtents, Operand, Problem};
use ndarray::{ArrayD, IxDyn};

axis! {
    "decay",
    /// How states decay.
    DecayKind {
        /// Not at all.
        None = "none",
        /// By a constant of the head.
        PerHead = "per_head",
        /// By a gate of the token.
        PerToken = "per_token",
    }
}

point! {
    /// What a case of linear_attention is made of, beside its storage type and seed.
    Point {
        /// How states decay.
        decay: DecayKind,
        /// The class of extents.
        shape: ShapeClass,
    }
}

impl Grid for Point {
    const STORAGE: &'static [Dtype] = &[Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64];

    fn problem(&self, _: Algorithm, seed: u64) -> Problem {
        let shape = self.shape.draw(seed);
        let e = shape.extents;
        let extents = LinearExtents {
            batch: e.batch,
            query_heads: e.query_heads,
            key_heads: e.key_heads,
            tokens: e.queries,
            dim: e.dim,
        };
        let decay = match self.decay {
            DecayKind::None => Decay::None,
            DecayKind::PerHead => Decay::PerHead,
            DecayKind::PerToken => Decay::PerToken,
        };
        LinearAttention::new(extents).value_dim(shape.value_dim).decay(decay).into()
    }

    fn values(&self, _: &Problem, operand: &Operand, _: Dtype, seed: u64) -> ArrayD<f64> {
        let stream = Stream::new(seed, operand.name);
        let mut at = 0;
        ArrayD::from_shape_simple_fn(IxDyn(&operand.shape), || {
            at += 1;
            match operand.name {
                "g" | "g_gamma" => -stream.uniform(at),
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
