//! Lazy attention where numbers are not finite, on the device: each place that raises a flag is needed.

use super::tensors::{self, Tensor, Tensors};
use super::{agree, without};
use etalon_cuda::{Level, Options, Precision, Workspace, run_in};
use etalon_problem::{Extents, LazyAttention, Mask, Pass, Problem, Role, Views, ViewsMut};
use half::{bf16, f16};
use ndarray::{ArrayD, Axis, IxDyn};
use std::collections::BTreeMap;
use std::thread;

const INF: f32 = f32::INFINITY;

impl Tensor {
    /// Puts a number there.
    fn put(&mut self, at: &[usize], x: f32) {
        match self {
            Tensor::Bf16(all) => all[IxDyn(at)] = bf16::from_f32(x),
            Tensor::F32(all) => all[IxDyn(at)] = x,
        }
    }
}

/// Inputs of which a query of -∞, or a key of ∞, has scores of -∞ alone: the first columns of q are -1, those of k 1.
fn inputs(problem: &Problem, tau: f32) -> Tensors {
    let mut all = tensors::random(problem, Pass::Backward, &[Role::Input, Role::Cotangent, Role::OptionalCotangent]);
    for (name, x) in &mut all {
        match (*name, x) {
            ("tau", Tensor::F32(x)) => x.fill(tau),
            ("q", Tensor::Bf16(x)) => x.index_axis_mut(Axis(3), 0).fill(-bf16::ONE),
            ("k", Tensor::Bf16(x)) => x.index_axis_mut(Axis(3), 0).fill(bf16::ONE),
            _ => {}
        }
    }
    all
}

/// Some results of a pass, as a level computes them.
fn results(workspace: &Workspace, problem: &Problem, inputs: &Tensors, names: &[&str], level: Level) -> Tensors {
    let pass = if names[0] == "o" || names[0] == "lse" { Pass::Forward } else { Pass::Backward };
    let precision = if level == Level::Portable { Precision::Strict } else { Precision::Flash };
    let options = Options { level, precision, recompute: true, ..Options::default() };
    tensors::results(workspace, problem, pass, inputs, |name| names.contains(&name), &options).unwrap()
}

/// As numbers of 16 bits, which a bound of the tests compares.
fn rounded(all: Tensors) -> BTreeMap<&'static str, ArrayD<bf16>> {
    let of = |x| match x {
        Tensor::Bf16(x) => x,
        Tensor::F32(x) => x.mapv(bf16::from_f32),
    };
    all.into_iter().map(|(name, x)| (name, of(x))).collect()
}

/// The level, the results, a place that they need, by its number in `lazy_attention/activity.cuh` or
/// `pairs/tiles.cuh`; what is put where: an operand, its row and a number, in the first column; and τ. Rows from 128
/// on see tiles of keys as a whole, of which no pair is hidden by the mask; a τ of 8 makes all pairs active.
type Case = (Level, &'static [&'static str], i32, &'static [(&'static str, usize, f32)], f32);
const CASES: &[Case] = &[
    (Level::Sm90a, &["o"], 20, &[("q", 190, -INF)], 8.0),
    (Level::Sm90a, &["o"], 7, &[("v", 190, f32::NAN)], -0.5),
    (Level::Sm90a, &["dbias"], 21, &[("q", 130, -INF), ("dlse", 130, f32::NAN)], -0.5),
    (Level::Sm90a, &["o"], 22, &[("bias", 1, -INF)], -0.5),
    (Level::Sm90a, &["o"], 23, &[("k", 1, INF)], -0.5),
    (Level::Sm90a, &["dv"], 23, &[("bias", 1, -INF)], -0.5),
    (Level::Sm90a, &["dv"], 1, &[("dout", 0, f32::NAN)], -0.5), // without Δ
    (Level::Sm80, &["o"], 20, &[("q", 190, -INF)], 8.0),
    (Level::Sm80, &["o"], 7, &[("v", 190, f32::NAN)], -0.5),
    (Level::Sm80, &["dbias"], 21, &[("q", 130, -INF), ("dlse", 130, f32::NAN)], -0.5),
    (Level::Sm80, &["o"], 23, &[("bias", 1, -INF)], -0.5),
    (Level::Sm80, &["dv"], 23, &[("k", 1, INF)], -0.5),
    (Level::Sm80, &["dv"], 1, &[("dout", 0, f32::NAN)], -0.5), // without Δ
    (Level::Portable, &["dq"], 23, &[("k", 1, INF)], -0.5),
    (Level::Portable, &["dv"], 23, &[("bias", 1, -INF)], -0.5),
];

/// Faults of a case: wrong results with all flags, and right ones without its flag.
fn faults(whole: &Workspace, (level, names, part, struck, tau): Case) -> Vec<String> {
    let extents = Extents { batch: 1, query_heads: 4, key_heads: 2, queries: 200, keys: 200, dim: 64 };
    let problem = Problem::from(LazyAttention::new(extents).bias(8).mask(Mask::causal()));
    let mut inputs = inputs(&problem, tau);
    for (name, row, x) in struck.iter().copied() {
        let at: &[usize] = match name {
            "bias" => &[0, row],
            "dlse" => &[0, 0, row],
            _ => &[0, 0, row, 0],
        };
        inputs.get_mut(name).unwrap().put(at, x);
    }
    if names[0].starts_with('d') {
        inputs.extend(results(whole, &problem, &inputs, &["lse"], Level::Portable));
    }
    let wanted = rounded(results(whole, &problem, &inputs, names, Level::Portable));
    let is_right = |of: &Workspace| agree(&rounded(results(of, &problem, &inputs, names, level)), &wanted);
    let mutant = without(part).expect("a device, as for the first");
    let faults =
        [(is_right(whole), "with all flags".to_string()), (!is_right(&mutant), format!("without flag {part}"))];
    let wrong = faults.into_iter().filter(|(holds, _)| !holds);
    wrong.map(|(_, how)| format!("{level} {names:?} {struck:?} {how}")).collect()
}

/// Cases side by side: a mutant compiles its kernels anew, which takes most of the time.
#[test]
fn each_flag_of_lazy_attention_is_needed() {
    let Some(whole) = without(0) else { return };
    let wrong: Vec<String> = thread::scope(|scope| {
        let cases: Vec<_> = CASES.iter().map(|case| scope.spawn(|| faults(&whole, *case))).collect();
        cases.into_iter().flat_map(|case| case.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The first dq of pairs whose dS of f16 overflow: 64 keys of equal weight, of which the first alone has a g, of
/// 6·10⁶. What is not finite in operands has the flag of keys or of Δ.
fn dq_of_overflow(workspace: &Workspace, level: Level) -> f32 {
    let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries: 64, keys: 64, dim: 64 };
    let problem = LazyAttention::new(extents).into();
    let of = |first: f32, others: f32| {
        let at_row = move |row| f16::from_f32(if row == 0 { first } else { others });
        ArrayD::from_shape_fn(IxDyn(&[1, 1, 64, 64]), |at| if at[3] == 0 { at_row(at[2]) } else { f16::ZERO })
    };
    let (q, k, v, dout) = (of(0.0, 0.0), of(1.0 / 1024.0, 0.0), of(100.0, 0.0), of(6e4, 6e4));
    let lse = ArrayD::from_elem(IxDyn(&[1, 1, 64]), 64_f32.ln());
    let (tau, mut dq) = (ArrayD::from_elem(IxDyn(&[1]), 0.0_f32), q.clone());
    let inputs = [("q", &q), ("k", &k), ("v", &v), ("dout", &dout)];
    let inputs = inputs.into_iter().fold(Views::new(), |all, (name, x)| all.with(name, x));
    let inputs = inputs.with("tau", &tau).with("lse", &lse);
    let mut results = ViewsMut::new().with("dq", &mut dq);
    let options = Options { level, precision: Precision::Flash, ..Options::default() };
    run_in(workspace, &problem, Pass::Backward, &inputs, &mut results, &options).unwrap();
    drop(results);
    dq[IxDyn(&[0, 0, 0, 0])].to_f32()
}

#[test]
fn a_ds_of_lazy_attention_that_overflows_raises_a_flag() {
    let (Some(whole), Some(mutant)) = (without(0), without(2)) else { return };
    // (g - Δ) / 64 · k / √64.
    let wanted = 6e6 * (1.0 - 1.0 / 64.0) / 64.0 / 1024.0 / 8.0;
    for level in [Level::Sm90a, Level::Sm80] {
        let found = dq_of_overflow(&whole, level);
        assert!((found - wanted).abs() <= wanted / 1024.0, "{level}: {found}, not {wanted}");
        assert!(!dq_of_overflow(&mutant, level).is_finite(), "{level}");
    }
}
