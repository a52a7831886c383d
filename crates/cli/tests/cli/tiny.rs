//! A tiny problem of attention with its inputs, for tests of what answers requests.

use etalon_conformance::tensor::{Data, Tensor, Tensors};
use etalon_problem::{Attention, Extents, Problem};

pub fn problem() -> (Problem, Tensors) {
    let extents = Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 3, keys: 4, dim: 2 };
    let problem: Problem = Attention::new(extents).into();
    let tensor = |name: &str, shape: [usize; 4]| {
        let numbers = (0..shape.iter().product()).map(|x: usize| 0.5 + x as f32);
        let data = Data::F32(numbers.collect());
        (name.to_string(), Tensor { shape: shape.to_vec(), data })
    };
    let keys = [1, 1, 4, 2];
    let inputs = [tensor("q", [1, 2, 3, 2]), tensor("k", keys), tensor("v", keys)];
    (problem, inputs.into())
}
