//! Traces: the end has the bits of the pass.

use super::cases::{Case, cases};
use super::tensors::run;
use crate::common::traces::{all, last};
use etalon_problem::{LinearAttention, Order, Pass, Walk};

#[test]
fn the_end_of_linear_attention_has_the_bits_of_its_passes() {
    let mut seen = 0;
    for case in cases() {
        let Case { name, problem, .. } = &case;
        let problem =
            &LinearAttention { initial_state: true, final_state: true, ..problem.clone() };
        let case = Case { name: name.clone(), problem: problem.clone(), gates: case.gates };
        let x = case.operands(Pass::Backward, 5);
        let forward = case.operands(Pass::Forward, 5);
        let results = [
            (
                "state",
                Order::Ascending,
                run(problem, Pass::Forward, &forward).expect("a state"),
                "final_state",
            ),
            (
                "dstate",
                Order::Descending,
                run(problem, Pass::Backward, &x).expect("gradients"),
                "dinitial_state",
            ),
        ];
        for chunk in [1, 2, 64] {
            let walk = Walk { chunk: Some(chunk), ..Walk::default() };
            let traced = all(&problem.clone().into(), Pass::Backward, &x, &walk);
            for (step, order, results, end) in &results {
                let own = traced.iter().find(|own| own.operand.name == *step).expect("a tensor");
                for (found, exact) in last(own, *order, &results[*end]) {
                    assert_eq!(found.to_bits(), exact.to_bits(), "{name} {chunk}: {step}");
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 1000, "{seen}");
}
