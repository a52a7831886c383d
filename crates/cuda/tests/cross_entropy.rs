//! linear_cross_entropy in chunks of tokens and classes: with the bits of one chunk, whatever the budget.
//! Without a device, or a compiler, the tests say that they were skipped.

use etalon_cuda::{
    DevicePass, DeviceTensors, Level, Options, Precision, Workspace, has_level, probe, run_in,
};
use etalon_problem::{
    Dtype, Error, LinearCrossEntropy, Operand, Pass, Problem, Stored, TokenOutputs, Views, ViewsMut,
};
use half::bf16;
use ndarray::{ArrayD, IxDyn};
use std::collections::BTreeMap;

fn workspace() -> Option<Workspace> {
    if let Err(absent) = probe() {
        println!("skipped: {absent}");
        return None;
    }
    Some(Workspace::new())
}

const CLASSES: usize = 1500;

/// Three tiles of tokens, six of classes, with every option that the chunks may get wrong.
fn problem() -> LinearCrossEntropy {
    let outputs = TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };
    LinearCrossEntropy::new(300, 40, CLASSES)
        .bias()
        .class_weights()
        .token_weights()
        .softcap(3.0)
        .label_smoothing(0.1)
        .lse_square_scale(1e-2)
        .outputs(outputs)
}

/// A tensor of any type.
#[derive(Debug, Clone)]
enum Tensor {
    F32(ArrayD<f32>),
    Bf16(ArrayD<bf16>),
    I64(ArrayD<i64>),
}

impl Tensor {
    /// Small numbers that no rule repeats; targets of which every eleventh is ignored.
    fn new(operand: &Operand, storage: Dtype, seed: usize) -> Tensor {
        let mut at = seed;
        let mut next = || {
            at = at.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            at >> 40
        };
        let shape = IxDyn(&operand.shape);
        let number = |at: usize| (at % 257) as f32 / 128.0 - 1.0;
        let class = |at: usize| if at.is_multiple_of(11) { -100 } else { (at % CLASSES) as i64 };
        match Stored::of(operand.precision, storage) {
            Stored::Integer => Tensor::I64(ArrayD::from_shape_simple_fn(shape, || class(next()))),
            Stored::Float(Dtype::Bf16) => {
                let x = || bf16::from_f32(number(next()));
                Tensor::Bf16(ArrayD::from_shape_simple_fn(shape, x))
            }
            _ => Tensor::F32(ArrayD::from_shape_simple_fn(shape, || number(next()))),
        }
    }

    fn read<'a>(&'a self, all: Views<'a>, name: &'a str) -> Views<'a> {
        match self {
            Tensor::F32(x) => all.with(name, x),
            Tensor::Bf16(x) => all.with(name, x),
            Tensor::I64(x) => all.with(name, x),
        }
    }

    fn write<'a>(&'a mut self, all: ViewsMut<'a>, name: &'a str) -> ViewsMut<'a> {
        match self {
            Tensor::F32(x) => all.with(name, x),
            Tensor::Bf16(x) => all.with(name, x),
            Tensor::I64(x) => all.with(name, x),
        }
    }

    /// As numbers, of which those that are equal have the same bits but for the sign of 0.
    fn numbers(&self) -> Vec<f64> {
        match self {
            Tensor::F32(x) => x.iter().map(|&x| f64::from(x)).collect(),
            Tensor::Bf16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Tensor::I64(x) => x.iter().map(|&x| x as f64).collect(),
        }
    }
}

/// The results of a pass.
fn results(
    workspace: &Workspace,
    (pass, storage): (Pass, Dtype),
    options: &Options,
) -> BTreeMap<&'static str, Vec<f64>> {
    let problem: Problem = problem().into();
    let operands = problem.operands(pass);
    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    for (seed, operand) in operands.iter().enumerate() {
        let list = if !operand.role.is_given() { &mut outputs } else { &mut inputs };
        list.push((operand.name, Tensor::new(operand, storage, seed + 1)));
    }
    let given = inputs.iter().fold(Views::new(), |all, (name, x)| x.read(all, name));
    let mut places = outputs.iter_mut().fold(ViewsMut::new(), |all, (name, x)| x.write(all, name));
    run_in(workspace, &problem, pass, &given, &mut places, options).unwrap();
    drop(places);
    outputs.iter().map(|(name, x)| (*name, x.numbers())).collect()
}

/// What is summed over tokens in another order where chunks are others: all else has equal bits.
const SUMMED: [&str; 3] = ["dbias", "gbias", "gw"];

#[test]
fn chunks_give_the_bits_of_one() {
    let Some(workspace) = workspace() else { return };
    for pass in [Pass::ForwardBackward, Pass::DoubleBackward] {
        for storage in [Dtype::F32, Dtype::Bf16] {
            let within = |memory_budget| {
                let options = Options { memory_budget, ..Options::default() };
                results(&workspace, (pass, storage), &options)
            };
            let whole = within(64 << 20);
            // One tile of either at a time; all classes of a tile of tokens; some of either.
            for budget in [0, 2 << 20, 900 << 10] {
                let parts = within(budget);
                for (name, wanted) in &whole {
                    let what = format!("{name}, {pass} in {storage}, budget {budget}");
                    check(&parts[name], wanted, !SUMMED.contains(name), &what);
                }
            }
        }
    }
}

/// Equal numbers, or those that differ by a hundredth of the largest at most.
fn check(found: &[f64], wanted: &[f64], equal: bool, what: &str) {
    if equal {
        assert_eq!(found, wanted, "{what}");
    }
    let size = wanted.iter().fold(0.0, |size: f64, x| size.max(x.abs()));
    let near = |(x, y): (&f64, &f64)| (x - y).abs() <= 1e-2 * size;
    assert!(found.iter().zip(wanted).all(near), "{what}");
}

#[test]
fn chunks_on_tensor_cores_give_the_bits_of_one() {
    let Some(workspace) = workspace() else { return };
    if let Err(absent) = has_level(&workspace, 0, Level::Sm90a) {
        println!("skipped: {absent}");
        return;
    }
    let call = (Pass::ForwardBackward, Dtype::Bf16);
    let portable = results(&workspace, call, &Options::default());
    let within = |memory_budget| {
        let options =
            Options { level: Level::Sm90a, precision: Precision::Flash, ..Options::default() };
        results(&workspace, call, &Options { memory_budget, ..options })
    };
    let whole = within(64 << 20);
    for budget in [0, 700 << 10, 64 << 20] {
        for (name, found) in &within(budget) {
            // dh is summed chunk by chunk, too.
            let equal = budget > 1 << 20 || !["dh", "dw", "dbias"].contains(name);
            let what = format!("{name}, budget {budget}");
            check(found, &whole[name], equal, &what);
            if *name != "argmax" {
                check(found, &portable[name], false, &what);
            }
        }
    }
}

#[test]
fn what_is_not_written_yet_is_refused_with_its_reason() {
    let Some(workspace) = workspace() else { return };
    let problem: Problem = LinearCrossEntropy::new(1, 1, 2).into();
    let nothing = DeviceTensors::new();
    let options = Options::default();
    let pass = DevicePass::new(&workspace, &problem, Pass::Forward, &nothing, &nothing, &options);
    assert!(pass.is_err());
    let (h, w) = (ArrayD::<bf16>::zeros(IxDyn(&[1, 1])), ArrayD::<bf16>::zeros(IxDyn(&[2, 1])));
    let targets = ArrayD::<i64>::zeros(IxDyn(&[1]));
    let mut loss = ArrayD::<f32>::zeros(IxDyn(&[]));
    let inputs = Views::new().with("h", &h).with("w", &w).with("targets", &targets);
    let mut outputs = ViewsMut::new().with("loss", &mut loss);
    let options = Options { level: Level::Sm80, precision: Precision::Flash, ..options };
    let refused = run_in(&workspace, &problem, Pass::Forward, &inputs, &mut outputs, &options);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
}
