//! Questions with random inputs, and what a check of changed results says.

use etalon_conformance::check::{Check, check};
use etalon_conformance::generate::Stream;
use etalon_conformance::profile::Profile;
use etalon_conformance::tensor::{Stored, Tensor, Tensors, Values, values};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers;
use etalon_problem::{
    Attention, Decay, Dtype, Extents, LinearAttention, LinearExtents, Mask, Pass, Precision,
    Problem,
};
use etalon_reference::{Arithmetic, evaluate_in};
use ndarray::ArrayD;

pub const EXTENTS: Extents =
    Extents { batch: 2, query_heads: 4, key_heads: 2, queries: 37, keys: 41, dim: 16 };

/// One whole tile of 16 and five rows more: it has all that a mistake needs which no third tile shows, at a third of
/// the pairs.
pub const SHORT: Extents = Extents { queries: 21, keys: 25, ..EXTENTS };

pub fn attention() -> Attention {
    Attention::new(EXTENTS).mask(Mask::causal())
}

pub fn linear() -> LinearAttention {
    let extents = LinearExtents { batch: 2, query_heads: 8, key_heads: 4, tokens: 37, dim: 16 };
    LinearAttention::new(extents).scale(0.25).decay(Decay::PerHead)
}

pub fn short_attention() -> Attention {
    Attention::new(SHORT).mask(Mask::causal())
}

pub fn short_linear() -> LinearAttention {
    let extents = LinearExtents { tokens: SHORT.queries, ..linear().extents };
    LinearAttention { extents, ..linear() }
}

/// A question with random inputs; log-decays are negative.
pub struct Bench {
    pub problem: Problem,
    pub pass: Pass,
    pub dtype: Dtype,
    pub inputs: Tensors,
}

impl Bench {
    pub fn new(problem: impl Into<Problem>, pass: Pass, dtype: Dtype) -> Self {
        let problem = problem.into();
        let operands = problem.operands(pass);
        let given = operands.iter().filter(|x| x.role.is_given());
        let tensor = |operand: &etalon_problem::Operand| {
            let stream = Stream::new(1, operand.name);
            let mut at = 0;
            let values = ArrayD::from_shape_simple_fn(operand.shape.as_slice(), || {
                at += 1;
                match operand.precision {
                    Precision::Integer => (at % 7) as f64,
                    _ if operand.name.starts_with("g") => -0.02 - 0.1 * stream.uniform(at),
                    _ => stream.normal(at),
                }
            });
            let stored = Stored::of(operand.precision, dtype);
            (operand.name.to_string(), Tensor::store(&values, stored))
        };
        let inputs = given.map(tensor).collect();
        Bench { problem, pass, dtype, inputs }
    }

    pub fn request(&self) -> Request<'_> {
        let Bench { problem, pass, dtype, inputs } = self;
        Request { problem, pass: *pass, dtype: *dtype, inputs, hints: Hints::default() }
    }

    /// The exact results of a problem on these inputs, rounded once.
    pub fn exact(&self, problem: &Problem, inputs: &Tensors) -> Tensors {
        let request = Request { problem, inputs, ..self.request() };
        let numbers = |(name, x): (String, Tensor)| {
            let numbers = x.numbers(&name).expect("numbers");
            (name, numbers)
        };
        let exact = tiers::oracle(&request).expect("the reference").into_iter();
        self.stored(&exact.map(numbers).collect())
    }

    /// Results of the reference in f64, of a problem and of inputs that may be others than those of the bench.
    pub fn evaluate(&self, problem: &Problem, values: &Values) -> Values {
        evaluate_in(Arithmetic::F64, problem, self.pass, values).expect("the reference")
    }

    /// Results, each rounded once to where it is stored.
    pub fn stored(&self, results: &Values) -> Tensors {
        let operands = self.problem.operands(self.pass);
        let stored = |(name, x): (&String, &ArrayD<f64>)| {
            let operand = operands.iter().find(|x| x.name == name).expect("an operand");
            (name.clone(), Tensor::store(x, Stored::of(operand.precision, self.dtype)))
        };
        results.iter().map(stored).collect()
    }

    /// The inputs in f64.
    pub fn values(&self) -> Values {
        values(&self.problem, self.pass, &self.inputs).expect("the inputs")
    }

    /// Results of a right kernel.
    pub fn right(&self) -> Tensors {
        self.exact(&self.problem, &self.inputs)
    }

    pub fn check(&self, got: &Tensors) -> Check {
        check(&self.request(), &Profile::flash(self.dtype), got, &[]).expect("a check")
    }

    /// The check of right results in which one output is changed.
    pub fn changed(&self, name: &str, change: impl FnOnce(ArrayD<f64>) -> ArrayD<f64>) -> Check {
        let mut got = self.right();
        let x = got.get_mut(name).expect("an output");
        *x = Tensor::store(&change(x.numbers(name).expect("numbers")), x.stored().expect("a type"));
        self.check(&got)
    }
}

/// The text of the first explanation, which must have this name.
pub fn explained(check: &Check, id: &str) -> String {
    assert!(!check.passed);
    let all: Vec<_> = check.explanations.iter().map(|x| (&x.id, x.left, &x.text)).collect();
    let found = check.explanations.iter().find(|x| x.id == id);
    found.unwrap_or_else(|| panic!("no {id} in {all:?}")).text.clone()
}

pub fn place<'a>(check: &'a Check, output: &str) -> &'a str {
    let output = check.outputs.iter().find(|x| x.name == output).expect("an output");
    &output.places[0]
}
