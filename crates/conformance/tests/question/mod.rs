//! A pass of a problem on inputs of a family, as somebody brings them to a check.

use etalon_conformance::generate::Stream;
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::oracle;
use etalon_problem::{
    Attention, Dtype, Extents, LinearCrossEntropy, Mask, Pass, Precision, Problem, Role,
};
use ndarray::ArrayD;

/// Element `at` of an operand of that name, made of a normal number.
pub type Draw = fn(&str, usize, f64) -> f64;

/// A question whose element `at` of an operand is `draw(name, at, ξ)` of a normal ξ.
pub struct Question {
    pub problem: Problem,
    pub pass: Pass,
    pub dtype: Dtype,
    pub inputs: Tensors,
}

impl Question {
    pub fn new(
        problem: impl Into<Problem>,
        (pass, dtype): (Pass, Dtype),
        seed: u64,
        draw: impl Fn(&str, usize, f64) -> f64,
    ) -> Self {
        let problem = problem.into();
        let mut question = Question { problem, pass, dtype, inputs: Tensors::new() };
        for operand in question.problem.operands(pass).iter().filter(|x| x.role.is_given()) {
            let (stream, mut at) = (Stream::new(seed, operand.name), 0..);
            let values = ArrayD::from_shape_simple_fn(operand.shape.as_slice(), || {
                let at = at.next().unwrap_or(0);
                match operand.precision {
                    Precision::Integer => stream.below(at, 7) as f64,
                    _ => draw(operand.name, at, stream.normal(at)),
                }
            });
            let stored = Stored::of(operand.precision, dtype);
            question.inputs.insert(operand.name.to_string(), Tensor::store(&values, stored));
        }
        let saved = |role| matches!(role, Role::Saved | Role::OptionalSaved);
        let names: Vec<_> =
            question.problem.operands(pass).into_iter().filter(|x| saved(x.role)).collect();
        if !names.is_empty() {
            let forward = Question {
                pass: Pass::Forward,
                inputs: question.of(Pass::Forward),
                ..question.again()
            };
            let results = forward.right();
            question
                .inputs
                .extend(names.iter().map(|x| (x.name.to_string(), results[x.name].clone())));
        }
        question
    }

    fn again(&self) -> Self {
        let (problem, inputs) = (self.problem.clone(), self.inputs.clone());
        Question { problem, inputs, ..*self }
    }

    /// Of its inputs those of another pass.
    pub fn of(&self, pass: Pass) -> Tensors {
        let operands = self.problem.operands(pass);
        let given = |name: &String| operands.iter().any(|x| x.name == name && x.role.is_given());
        self.inputs
            .iter()
            .filter(|(name, _)| given(name))
            .map(|(name, x)| (name.clone(), x.clone()))
            .collect()
    }

    pub fn request(&self) -> Request<'_> {
        let Question { problem, pass, dtype, inputs } = self;
        Request { problem, pass: *pass, dtype: *dtype, inputs, hints: Hints::default() }
    }

    /// The exact results, each rounded once.
    pub fn right(&self) -> Tensors {
        let operands = self.problem.operands(self.pass);
        let stored = |(name, x): (String, Tensor)| {
            let operand = operands.iter().find(|x| x.name == name).expect("an operand");
            let x = x.numbers(&name).expect("numbers");
            (name, Tensor::store(&x, Stored::of(operand.precision, self.dtype)))
        };
        oracle(&self.request()).expect("the reference").into_iter().map(stored).collect()
    }
}

/// Two heads of a size that kernels have.
pub const SMALL: Extents =
    Extents { batch: 1, query_heads: 2, key_heads: 2, queries: 8, keys: 48, dim: 64 };

/// Channel 3 of q is 448, and of k about −547: all scores are about −30,000.
pub fn massive(name: &str, at: usize, x: f64) -> f64 {
    match (name, at % SMALL.dim) {
        ("q", 3) => 448.0 + x,
        ("k", 3) => -547.0 + x,
        _ => x,
    }
}

/// Queries, or hidden states, that see few keys, or classes.
pub fn peaked(name: &str, _: usize, x: f64) -> f64 {
    if matches!(name, "q" | "h") { 8.0 * x } else { x }
}

/// Families of inputs: generic ones, massive ones and peaked ones.
pub const FAMILIES: [(&str, Draw); 3] =
    [("generic", |_, _, x| x), ("massive", massive), ("peaked", peaked)];

/// Questions of a family, of attention and of linear cross-entropy, with inputs of a seed.
pub fn questions(family: Draw, seed: u64) -> impl Iterator<Item = Question> {
    let problems: [Problem; 3] = [
        Attention::new(SMALL).mask(Mask::causal()).into(),
        Attention::new(SMALL).softcap(20.0).sinks().into(),
        LinearCrossEntropy::new(24, 64, 96).logit_scale(0.25).into(),
    ];
    let passes = [Pass::Forward, Pass::Backward];
    let pairs = problems.into_iter().flat_map(move |x| passes.map(|pass| (x.clone(), pass)));
    pairs.map(move |(problem, pass)| Question::new(problem, (pass, Dtype::Bf16), seed, family))
}
