//! Lazy attention where numbers are not finite, on the device: each place that raises a flag is needed.

use super::{agree, numbers, without};
use etalon_cuda::{Level, Options, Precision, Workspace, run_in};
use etalon_problem::{Extents, LazyAttention, Mask, Pass, Problem, Role, Views, ViewsMut};
use half::bf16;
use ndarray::{ArrayD, IxDyn};
use std::collections::BTreeMap;

const INF: f32 = f32::INFINITY;

/// Operands and results, those of 16 bits and the wide ones; and results as one list.
#[derive(Default)]
struct Operands {
    narrow: BTreeMap<&'static str, ArrayD<bf16>>,
    wide: BTreeMap<&'static str, ArrayD<f32>>,
}

/// Inputs of which a query of -∞, or a key of ∞, has scores of -∞ alone: the first columns of q are -1, those of k 1.
fn inputs(problem: &Problem, tau: f32) -> Operands {
    let mut all = Operands::default();
    for (seed, x) in problem.operands(Pass::Backward).iter().enumerate() {
        if !matches!(x.role, Role::Input | Role::Cotangent | Role::OptionalCotangent) {
            continue;
        }
        let mut values = numbers(&x.shape, seed + 1);
        let first = match x.name {
            "q" => -1.0,
            "k" => 1.0,
            "tau" | "bias" | "dlse" => {
                let values = values.mapv(|y| if x.name == "tau" { tau } else { y.to_f32() });
                all.wide.insert(x.name, values);
                continue;
            }
            _ => values[IxDyn(&[0, 0, 0, 0])].to_f32(),
        };
        if matches!(x.name, "q" | "k") {
            values.indexed_iter_mut().filter(|(at, _)| at[3] == 0).for_each(|(_, y)| *y = bf16::from_f32(first));
        }
        all.narrow.insert(x.name, values);
    }
    all
}

/// Some results of a pass, as a level computes them.
fn results(workspace: &Workspace, problem: &Problem, inputs: &Operands, names: &[&str], level: Level) -> Operands {
    let pass = if names[0] == "o" || names[0] == "lse" { Pass::Forward } else { Pass::Backward };
    let precision = if level == Level::Portable { Precision::Strict } else { Precision::Flash };
    let options = Options { level, precision, recompute: true, ..Options::default() };
    let mut found = Operands::default();
    for x in problem.operands(pass).iter().filter(|x| names.contains(&x.name)) {
        if matches!(x.name, "lse" | "dbias" | "dtau") {
            found.wide.insert(x.name, ArrayD::zeros(x.shape.clone()));
        } else {
            found.narrow.insert(x.name, ArrayD::from_elem(x.shape.clone(), bf16::ZERO));
        }
    }
    let given: Vec<_> = problem.operands(pass).iter().map(|x| x.name).collect();
    let mut views = Views::new();
    for (name, x) in inputs.narrow.iter().filter(|(name, _)| given.contains(name)) {
        views = views.with(name, x);
    }
    for (name, x) in inputs.wide.iter().filter(|(name, _)| given.contains(name)) {
        views = views.with(name, x);
    }
    let mut places = ViewsMut::new();
    for (name, x) in &mut found.narrow {
        places = places.with(name, x);
    }
    for (name, x) in &mut found.wide {
        places = places.with(name, x);
    }
    run_in(workspace, problem, pass, &views, &mut places, &options).unwrap();
    drop(places);
    found
}

/// As numbers of 16 bits, which a bound of the tests compares.
fn rounded(x: &Operands) -> BTreeMap<&'static str, ArrayD<bf16>> {
    let wide = x.wide.iter().map(|(name, x)| (*name, x.mapv(bf16::from_f32)));
    wide.chain(x.narrow.iter().map(|(name, x)| (*name, x.clone()))).collect()
}

/// The level, the results, a place that they need, by its number in `lazy_attention/activity.cuh` or
/// `pairs/tiles.cuh`; what is put where: an operand, its row and a number, in the first column; and τ.
type Case = (Level, &'static [&'static str], i32, &'static [(&'static str, usize, f32)], f32);
const CASES: &[Case] = &[
    (Level::Sm90a, &["o"], 20, &[("q", 50, -INF)], 0.5),
    (Level::Sm90a, &["o"], 7, &[("v", 190, f32::NAN)], -0.5),
    (Level::Sm90a, &["dbias"], 21, &[("q", 50, -INF), ("dlse", 50, f32::NAN)], -0.5),
    (Level::Sm90a, &["o"], 22, &[("bias", 1, -INF)], -0.5),
    (Level::Sm90a, &["o"], 23, &[("k", 1, INF)], -0.5),
    (Level::Sm90a, &["dv"], 23, &[("bias", 1, -INF)], -0.5),
    (Level::Sm90a, &["dk", "dv"], 1, &[("q", 0, f32::NAN)], -0.5),
    (Level::Sm90a, &["dq"], 2, &[("k", 190, f32::NAN)], -0.5),
    (Level::Sm80, &["o"], 20, &[("q", 50, -INF)], 0.5),
    (Level::Sm80, &["o"], 7, &[("v", 190, f32::NAN)], -0.5),
    (Level::Sm80, &["dbias"], 21, &[("q", 50, -INF), ("dlse", 50, f32::NAN)], -0.5),
    (Level::Sm80, &["o"], 23, &[("bias", 1, -INF)], -0.5),
    (Level::Sm80, &["dv"], 23, &[("k", 1, INF)], -0.5),
    (Level::Sm80, &["dk", "dv"], 1, &[("q", 0, f32::NAN)], -0.5),
    (Level::Sm80, &["dq"], 2, &[("k", 190, f32::NAN)], -0.5),
    (Level::Portable, &["dq"], 23, &[("k", 1, INF)], -0.5),
    (Level::Portable, &["dv"], 23, &[("bias", 1, -INF)], -0.5),
];

#[test]
fn each_flag_of_lazy_attention_is_needed() {
    let Some(whole) = without(0) else { return };
    let extents = Extents { batch: 1, query_heads: 4, key_heads: 2, queries: 200, keys: 200, dim: 64 };
    let problem = Problem::from(LazyAttention::new(extents).bias(8).mask(Mask::causal()));
    let mut wrong = Vec::new();
    for (level, names, part, struck, tau) in CASES.iter().copied() {
        let mut inputs = inputs(&problem, tau);
        for (name, row, x) in struck.iter().copied() {
            match name {
                "bias" => inputs.wide.get_mut(name).unwrap()[IxDyn(&[0, row])] = x,
                "dlse" => inputs.wide.get_mut(name).unwrap()[IxDyn(&[0, 0, row])] = x,
                _ => inputs.narrow.get_mut(name).unwrap()[IxDyn(&[0, 0, row, 0])] = bf16::from_f32(x),
            }
        }
        if names[0].starts_with('d') {
            let lse = results(&whole, &problem, &inputs, &["lse"], Level::Portable);
            inputs.wide.extend(lse.wide);
        }
        let wanted = rounded(&results(&whole, &problem, &inputs, names, Level::Portable));
        let of = |workspace: &Workspace| rounded(&results(workspace, &problem, &inputs, names, level));
        if !agree(&of(&whole), &wanted) {
            wrong.push(format!("{level} {names:?} {struck:?} with all flags"));
        }
        let Some(mutant) = without(part) else { return };
        if agree(&of(&mutant), &wanted) {
            wrong.push(format!("{level} {names:?} {struck:?} without the flag {part}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
