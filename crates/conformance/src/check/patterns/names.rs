//! Factors that have a name in a problem.

use etalon_problem::{Axis, Operand, Pass, Problem};
use std::f64::consts::{LN_2, LOG2_E};

/// Distance within which a ratio counts as a number that has a name.
const NEAR: f64 = 5e-3;

/// A factor and its name, if it is near one that a problem has.
pub(super) fn name(problem: &Problem, operand: &Operand, ratio: f64) -> Option<(f64, String)> {
    let base = match operand.primal == "lse" {
        true => "log₂e: a logarithm to base 2 (convention lse-base-2)",
        false => "log₂e: an exponential taken for one to base 2?",
    };
    let mut known = vec![
        (LOG2_E, base.to_string()),
        (LN_2, "ln 2: an exponential to base 2, or a logarithm taken for one to base 2?".into()),
        (-1.0, "−1: a sign?".into()),
    ];
    let of_problem = |(number, words): (f64, String)| {
        if (number - 1.0).abs() <= NEAR || number == 0.0 {
            return Vec::new();
        }
        vec![
            (number, format!("{words} ({number:.4}): applied once too often?")),
            (1.0 / number, format!("1/{words} (1/{number:.4}): not applied?")),
        ]
    };
    known.extend(factors(problem).into_iter().flat_map(of_problem));
    known.push((2.0, "2: counted twice?".into()));
    known.push((0.5, "½: half of it is missing?".into()));
    known.extend(extents(problem).into_iter().flat_map(of_problem));
    let mut near = known.into_iter().filter(|(x, _)| (ratio / x - 1.0).abs() < NEAR);
    let (number, first) = near.next()?;
    // A group of two is also a factor of 2: the reader knows which it can be.
    let names = near.take(2).fold(first, |all, (_, name)| format!("{all} Or {name}"));
    Some((number, names))
}

/// The numbers of a problem by which something is multiplied.
fn factors(problem: &Problem) -> Vec<(f64, String)> {
    let (scale, group, dim) = match problem {
        Problem::LinearAttention(x) => (x.scale, x.group(), x.extents.dim),
        Problem::LinearCrossEntropy(x) => (x.logit_scale / x.temperature, 1, x.dim),
        _ => problem.scores().map_or((1.0, 1, 1), |x| (x.scale(), x.group(), x.extents.dim)),
    };
    vec![
        (scale, "the scale".to_string()),
        (group as f64, "the group size, Hq/Hk".to_string()),
        ((dim as f64).sqrt(), "√D".to_string()),
    ]
}

/// The extent of every axis, by which sums and means differ.
fn extents(problem: &Problem) -> Vec<(f64, String)> {
    let mut axes: Vec<Axis> = Vec::new();
    for operand in problem.operands(Pass::Forward) {
        for axis in operand.axes {
            let known = axes.iter().any(|other| other.symbol() == axis.symbol());
            if !known && !matches!(axis, Axis::BatchOr1 | Axis::QueryHeadsOr1) {
                axes.push(axis);
            }
        }
    }
    axes.iter().map(|&axis| (problem.extent(axis) as f64, axis.symbol().to_string())).collect()
}
