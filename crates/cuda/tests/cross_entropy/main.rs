//! linear_cross_entropy in chunks of tokens and classes: with the bits of one chunk, whatever the budget; and of
//! operands on the device. Without a device, or a compiler, the tests say that they were skipped.

mod filter;
mod on_device;
mod shards;
mod tensor;

use etalon_cuda::{Level, Options, Precision, Settings, Workspace, probe, run_in};
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Problem, TokenOutputs, Views, ViewsMut};
use half::bf16;
use ndarray::{ArrayD, Axis, IxDyn};
use std::collections::BTreeMap;
use tensor::Tensor;

fn workspace() -> Option<Workspace> {
    if let Err(absent) = probe() {
        println!("skipped: {absent}");
        return None;
    }
    Some(Workspace::with(Settings::user()))
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

/// The results of a pass.
fn results(
    workspace: &Workspace,
    (pass, storage): (Pass, Dtype),
    options: &Options,
) -> BTreeMap<&'static str, Vec<f64>> {
    let problem: Problem = problem().into();
    let (inputs, _) = operands(&problem, (pass, storage));
    let outputs = outputs(workspace, &problem, (pass, storage), &inputs, options);
    outputs.into_iter().map(|(name, x)| (name, x.numbers())).collect()
}

/// Tensors by name.
type Tensors = Vec<(&'static str, Tensor)>;

/// Inputs and cotangents of a pass, and places for its results.
fn operands(problem: &Problem, (pass, storage): (Pass, Dtype)) -> (Tensors, Tensors) {
    let operands = problem.operands(pass);
    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    for (seed, operand) in operands.iter().enumerate() {
        let list = if !operand.role.is_given() { &mut outputs } else { &mut inputs };
        list.push((operand.name, Tensor::new(operand, storage, seed + 1)));
    }
    (inputs, outputs)
}

fn outputs(
    workspace: &Workspace,
    problem: &Problem,
    call: (Pass, Dtype),
    inputs: &Tensors,
    options: &Options,
) -> Tensors {
    let (_, mut outputs) = operands(problem, call);
    let given = inputs.iter().fold(Views::new(), |all, (name, x)| x.read(all, name));
    let mut places = outputs.iter_mut().fold(ViewsMut::new(), |all, (name, x)| x.write(all, name));
    run_in(workspace, problem, call.0, &given, &mut places, options).unwrap();
    drop(places);
    outputs
}

/// Outputs that are summed over tokens in another order where chunks are others: all else has equal bits.
const SUMMED: [&str; 3] = ["dbias", "gbias", "gw"];

#[test]
fn chunks_give_the_bits_of_one() {
    let Some(workspace) = workspace() else { return };
    for pass in [Pass::ForwardBackward, Pass::DoubleBackward] {
        for storage in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
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
    if workspace.capability(0) != Ok((9, 0)) {
        println!("skipped: no device of compute capability 9.0");
        return;
    }
    for storage in [Dtype::Bf16, Dtype::F16] {
        chunks_on_tensor_cores((Pass::ForwardBackward, storage), &workspace);
    }
}

fn chunks_on_tensor_cores(call: (Pass, Dtype), workspace: &Workspace) {
    let portable = results(workspace, call, &Options::default());
    let within = |memory_budget| {
        let options = Options { level: Level::Sm90a, precision: Precision::Flash, ..Options::default() };
        results(workspace, call, &Options { memory_budget, ..options })
    };
    let whole = within(64 << 20);
    for budget in [0, 700 << 10, 64 << 20] {
        for (name, found) in &within(budget) {
            // Chunks of tokens are terms of dbias, and in f16 have factors of their own, with which little of da
            // underflows.
            let summed = match call.1 {
                Dtype::F16 => &["dh", "dw", "dbias"][..],
                _ => &["dbias"],
            };
            let equal = budget > 1 << 20 || !summed.contains(name);
            let what = format!("{name}, budget {budget}");
            check(found, &whole[name], equal, &what);
            if *name != "argmax" {
                check(found, &portable[name], false, &what);
            }
        }
    }
}

/// Tensor cores find m of plain logits among the first 64 classes of a tile, and of all of them where others are far
/// above.
#[test]
fn a_class_far_above_the_others_counts_wherever_it_lies_in_its_tile() {
    let Some(workspace) = workspace() else { return };
    if workspace.capability(0) != Ok((9, 0)) {
        println!("skipped: no device of compute capability 9.0");
        return;
    }
    let outputs_of = TokenOutputs { lse: true, logprob: true, ..TokenOutputs::default() };
    let asks = |outputs| Problem::from(LinearCrossEntropy::new(300, 40, CLASSES).outputs(outputs));
    let problem = asks(outputs_of);
    let call = (Pass::ForwardBackward, Dtype::Bf16);
    let (mut inputs, _) = operands(&problem, call);
    for (name, tensor) in &mut inputs {
        match (*name, tensor) {
            ("h", Tensor::Bf16(h)) => h.mapv_inplace(|x| bf16::from_f32(x.to_f32().abs())),
            // Behind the first 64 classes of a tile, a little above and far; among them; in the last tile.
            ("w", Tensor::Bf16(w)) => {
                for (class, x) in [(200, 0.25), (700, 0.75), (900, 3.0), (300, 1.5), (1400, 2.0)] {
                    w.index_axis_mut(Axis(0), class).fill(bf16::from_f32(x));
                }
            }
            _ => {}
        }
    }
    let portable = outputs(&workspace, &problem, call, &inputs, &Options::default());
    let flash = Options { level: Level::Sm90a, precision: Precision::Flash, ..Options::default() };
    let found = outputs(&workspace, &problem, call, &inputs, &flash);
    for ((name, found), (_, wanted)) in found.iter().zip(&portable) {
        let (found, wanted) = (found.numbers(), wanted.numbers());
        let size = wanted.iter().fold(0.0, |size: f64, x| size.max(x.abs()));
        let most = if matches!(*name, "dh" | "dw") { 1e-2 } else { 1e-5 } * size;
        assert!(found.iter().zip(&wanted).all(|(x, y)| (x - y).abs() <= most), "{name}");
    }
    // Whatever is computed beside them, they have the same bits.
    let forward = |outputs, options: &Options| {
        let problem = asks(outputs);
        let (given, _) = operands(&problem, (Pass::Forward, Dtype::Bf16));
        let of = |name| inputs.iter().find(|(own, _)| *own == name).cloned();
        let given = given.into_iter().map(|(name, x)| of(name).unwrap_or((name, x))).collect();
        let call = (Pass::Forward, Dtype::Bf16);
        let found = self::outputs(&workspace, &problem, call, &given, options);
        found.into_iter().map(|(name, x)| (name, x.numbers())).collect::<BTreeMap<_, _>>()
    };
    let alone = forward(outputs_of, &flash);
    let argmax = TokenOutputs { argmax: true, ..outputs_of };
    let all = TokenOutputs { entropy: true, ..argmax };
    for outputs in [argmax, all] {
        let found = forward(outputs, &flash);
        assert!(alone.iter().all(|(name, x)| *x == found[name]), "{outputs:?}");
        assert_eq!(found["argmax"], forward(outputs, &Options::default())["argmax"]);
    }
}

#[test]
fn what_is_not_written_yet_is_refused_with_its_reason() {
    let Some(workspace) = workspace() else { return };
    let problem: Problem = LinearCrossEntropy::new(1, 1, 2).into();
    let options = Options::default();
    let (h, w) = (ArrayD::<bf16>::zeros(IxDyn(&[1, 1])), ArrayD::<bf16>::zeros(IxDyn(&[2, 1])));
    let targets = ArrayD::<i64>::zeros(IxDyn(&[1]));
    let mut loss = ArrayD::<f32>::zeros(IxDyn(&[]));
    let inputs = Views::new().with("h", &h).with("w", &w).with("targets", &targets);
    let mut outputs = ViewsMut::new().with("loss", &mut loss);
    let options = Options { level: Level::Sm80, precision: Precision::Flash, ..options };
    let refused = run_in(&workspace, &problem, Pass::Forward, &inputs, &mut outputs, &options);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
}
