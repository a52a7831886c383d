//! Traces: the end has the bits of the pass, and a part is a part of the whole.

use super::cases::attention_problems;
use super::tensors::{operands, run};
use crate::common::traces::{all, last};
use etalon_problem::{Blocking, Order, Pass, Problem, SinkPlace, Walk};
use etalon_reference::trace::trace;
use ndarray::Axis;

#[test]
fn the_end_of_attention_has_the_bits_of_its_passes() {
    let mut seen = 0;
    for (name, problem) in attention_problems() {
        let group = problem.scores.group();
        let problem = Problem::from(problem);
        for (keys, tile) in
            [(Order::Ascending, (2, 3)), (Order::Descending, (3, 2)), (Order::Ascending, (64, 64))]
        {
            let tile = Some(Blocking::new(tile.0, tile.1));
            let walk = Walk { tile, keys, sinks: SinkPlace::First, ..Walk::default() };
            let x = operands(&problem, Pass::Backward, 3);
            let forward = operands(&problem, Pass::Forward, 3);
            let mut results = run(&problem, Pass::Forward, &forward).expect("o and lse");
            results.extend(run(&problem, Pass::Backward, &x).expect("gradients"));
            for traced in all(&problem, Pass::Backward, &x, &walk) {
                let step = traced.operand.name;
                let order = if matches!(step, "dk" | "dv") { walk.queries } else { keys };
                if matches!(step, "p" | "dS") || matches!(step, "dk" | "dv") && group > 1 {
                    continue;
                }
                for (found, exact) in last(&traced, order, &results[step]) {
                    assert_eq!(found.to_bits(), exact.to_bits(), "{name} {walk:?}: {step}");
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 10_000, "{seen}");
}

#[test]
fn heads_and_rows_are_those_of_the_whole_trace() {
    let (_, problem) =
        attention_problems().into_iter().find(|(_, x)| x.scores.extents.queries > 3).expect("rows");
    let problem = Problem::from(problem);
    let x = operands(&problem, Pass::Backward, 3);
    let whole = Walk { tile: Some(Blocking::new(2, 3)), ..Walk::default() };
    let part = Walk { heads: Some(vec![1]), rows: Some([1, 3]), ..whole.clone() };
    let (whole, part) =
        (all(&problem, Pass::Backward, &x, &whole), all(&problem, Pass::Backward, &x, &part));
    assert_eq!(
        part.iter().map(|x| x.operand.name).collect::<Vec<_>>(),
        ["lse", "o", "p", "dS", "dq"]
    );
    for (whole, part) in whole.iter().zip(&part) {
        let [head, row] = [etalon_problem::Axis::QueryHeads, etalon_problem::Axis::Queries]
            .map(|axis| Axis(part.operand.position(axis).expect("an axis")));
        let own = whole.values.slice_axis(head, (1..2).into());
        let own = own.slice_axis(row, (1..3).into());
        let same = own.iter().zip(&part.values).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(own.shape() == part.values.shape() && same, "{}", part.operand.name);
    }
}

#[test]
fn a_walk_that_does_not_fit_is_refused() {
    let (_, attention) = attention_problems().remove(0);
    let attention = Problem::from(attention);
    let tile = Some(Blocking::new(2, 2));
    let refusal =
        |walk: Walk, pass| walk.tensors(&attention, pass).expect_err("a refusal").to_string();
    let good = Walk { tile, ..Walk::default() };
    for (walk, pass, words) in [
        (Walk::default(), Pass::Forward, "`tile` is missing"),
        (Walk { chunk: Some(2), ..good.clone() }, Pass::Forward, "`chunk` was given"),
        (Walk { tile: Some(Blocking::new(0, 2)), ..good.clone() }, Pass::Forward, "at least 1"),
        (Walk { heads: Some(vec![9]), ..good.clone() }, Pass::Forward, "ascending numbers below"),
        (
            Walk { heads: Some(vec![1, 0]), ..good.clone() },
            Pass::Forward,
            "ascending numbers below",
        ),
        (Walk { rows: Some([2, 2]), ..good.clone() }, Pass::Forward, "START..END"),
        (good.clone(), Pass::Jvp, "the forward and of the backward pass"),
    ] {
        let found = refusal(walk, pass);
        assert!(found.contains(words), "{found}");
    }
    let x = operands(&attention, Pass::Forward, 3);
    for name in ["dq", "x"] {
        let error = trace(&attention, Pass::Forward, &x, &good, &[name]).expect_err("a refusal");
        assert!(error.to_string().contains("holds lse, o, p"), "{error}");
    }
}
