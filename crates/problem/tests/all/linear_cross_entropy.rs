//! Problems of linear cross-entropy: what is refused, which tensors there are, and files.

use etalon_problem::{
    Error, LinearCrossEntropy, Pass, Precision, Problem, Reduction, Role, TokenOutputs,
};

fn problem() -> LinearCrossEntropy {
    LinearCrossEntropy::new(6, 3, 5)
}

#[track_caller]
fn refused(problem: LinearCrossEntropy, name: &str, found: &str) {
    for error in [problem.check(), Problem::from(problem.clone()).check()] {
        match error {
            Err(Error::Value { name: n, found: f, .. }) => {
                assert_eq!((n.as_str(), f.as_str()), (name, found));
            }
            other => panic!("`{name}` = {found} gave {other:?}"),
        }
    }
}

#[test]
fn valid_problems_pass() {
    for problem in [
        problem(),
        LinearCrossEntropy::new(0, 1, 1),
        problem().label_smoothing(1.0).softcap(1e-30).logit_scale(0.0).lse_square_scale(-1.0),
        problem().ignore_index(2).temperature(1e30),
        problem().reduction(Reduction::By { normaliser: -1e-300 }),
    ] {
        assert_eq!(problem.check(), Ok(()));
    }
}

#[test]
fn extents_and_options_have_domains() {
    refused(LinearCrossEntropy::new(1, 0, 1), "dim", "0");
    refused(LinearCrossEntropy::new(1, 1, 0), "vocab", "0");
    refused(LinearCrossEntropy::new(1, 1, usize::MAX), "vocab", &usize::MAX.to_string());
    for cap in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        refused(problem().softcap(cap), "softcap", &cap.to_string());
    }
    for temperature in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        refused(problem().temperature(temperature), "temperature", &temperature.to_string());
    }
    for alpha in [-1e-9, 1.000_001, f64::NAN] {
        refused(problem().label_smoothing(alpha), "label_smoothing", &alpha.to_string());
    }
    for x in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        refused(problem().logit_scale(x), "logit_scale", &x.to_string());
        refused(problem().lse_square_scale(x), "lse_square_scale", &x.to_string());
    }
    for normaliser in [0.0, f64::NAN, f64::INFINITY] {
        let by = problem().reduction(Reduction::By { normaliser });
        refused(by, "reduction.by.normaliser", &normaliser.to_string());
    }
}

#[test]
fn shapes_that_cannot_be_addressed() {
    for problem in [
        LinearCrossEntropy::new(1 << 40, 1 << 40, 1),
        LinearCrossEntropy::new(1, 1 << 40, 1 << 40),
        LinearCrossEntropy::new(usize::MAX, 1, 1),
    ] {
        assert!(
            matches!(problem.check(), Err(Error::Value { expected, .. }) if expected == "addressable")
        );
    }
}

/// α′ = αV/(V − 1): what the others get is α/(V − 1) each.
#[test]
fn smoothing_over_others() {
    assert_eq!(problem().label_smoothing_over_others(0.4).label_smoothing, 0.5);
    assert_eq!(
        LinearCrossEntropy::new(1, 1, 1).label_smoothing_over_others(0.4).label_smoothing,
        0.4
    );
    refused(problem().label_smoothing_over_others(0.9), "label_smoothing", "1.125");
}

fn names(problem: &LinearCrossEntropy, pass: Pass, roles: &[Role]) -> Vec<&'static str> {
    let operands = problem.operands(pass);
    operands.iter().filter(|x| roles.contains(&x.role)).map(|x| x.name).collect()
}

#[test]
fn operands_follow_the_pass() {
    let outputs = TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };
    let full = problem().bias().class_weights().token_weights().outputs(outputs);
    let inputs = ["h", "w", "bias", "targets", "class_weights", "token_weights"];
    let given = [Role::Cotangent, Role::OptionalCotangent];
    for pass in [Pass::Forward, Pass::Backward, Pass::DoubleBackward] {
        assert_eq!(names(&full, pass, &[Role::Input]), inputs);
    }
    assert_eq!(
        names(&full, Pass::Forward, &[Role::Output]),
        ["loss", "lse", "logprob", "entropy", "argmax", "n_valid", "normaliser"]
    );
    let first = ["dloss", "dlse", "dlogprob", "dentropy"];
    assert_eq!(names(&full, Pass::Backward, &given), first);
    assert_eq!(names(&full, Pass::Backward, &[Role::Output]), ["dh", "dw", "dbias"]);
    let second = ["ddh", "ddw", "ddbias", "cot_loss", "cot_lse", "cot_logprob", "cot_entropy"];
    assert_eq!(names(&full, Pass::DoubleBackward, &given), [&first[..], &second].concat());
    assert_eq!(
        names(&full, Pass::DoubleBackward, &[Role::Output]),
        ["gh", "gw", "gbias", "gdloss", "gdlse", "gdlogprob", "gdentropy"]
    );
    assert_eq!(names(&problem(), Pass::Forward, &[Role::Input]), ["h", "w", "targets"]);
    assert_eq!(
        names(&problem(), Pass::Forward, &[Role::Output]),
        ["loss", "n_valid", "normaliser"]
    );
    for pass in [Pass::Jvp, Pass::Step] {
        assert_eq!(problem().operands(pass), []);
    }
    let shapes = |problem: &LinearCrossEntropy, pass| -> Vec<(&str, Vec<usize>)> {
        problem.operands(pass).into_iter().map(|x| (x.name, x.shape)).collect()
    };
    let reduced = shapes(&full, Pass::Backward);
    assert!(reduced.contains(&("dloss", vec![])) && reduced.contains(&("dw", vec![5, 3])));
    let each = shapes(&full.clone().reduction(Reduction::None), Pass::Forward);
    assert!(each.contains(&("loss", vec![6])) && each.contains(&("normaliser", vec![])));
    let integers = full.operands(Pass::Forward).into_iter();
    let integers = integers.filter(|x| x.precision == Precision::Integer).map(|x| x.name);
    assert_eq!(integers.collect::<Vec<_>>(), ["targets", "argmax", "n_valid"]);
}

#[cfg(feature = "serde")]
mod files {
    use super::*;
    use etalon_problem::{LseSquareWeight, NothingLeft};
    use serde_json::{Value, json};

    fn parse(value: Value) -> Result<Problem, String> {
        serde_json::from_str(&value.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_left_out() {
        let expected =
            json!({"algorithm": "linear_cross_entropy", "tokens": 6, "dim": 3, "vocab": 5});
        assert_eq!(serde_json::to_value(Problem::from(problem())).expect("json"), expected);
        assert_eq!(parse(expected), Ok(problem().into()));
    }

    #[test]
    fn every_option_survives_its_file() {
        let all = problem()
            .bias()
            .class_weights()
            .token_weights()
            .logit_scale(0.1)
            .softcap(30.0)
            .temperature(0.7)
            .ignore_index(i64::MIN)
            .label_smoothing(0.3)
            .lse_square_scale(1e-4)
            .lse_square_weight(LseSquareWeight::ClassWeight)
            .nothing_left(NothingLeft::Error)
            .outputs(TokenOutputs { lse: true, logprob: false, entropy: true, argmax: false });
        for reduction in
            [Reduction::None, Reduction::Mean, Reduction::Sum, Reduction::By { normaliser: 0.1 }]
        {
            let problem = Problem::from(all.clone().reduction(reduction));
            let value = serde_json::to_value(problem.clone()).expect("json");
            assert_eq!(parse(value), Ok(problem));
        }
    }

    #[test]
    fn what_is_misspelt_or_missing_is_named() {
        let with = |key: &str, value: Value| {
            let mut problem = serde_json::to_value(Problem::from(problem())).expect("json");
            problem[key] = value;
            parse(problem).expect_err(key)
        };
        assert!(with("label_smooth", json!(0.1)).contains("label_smooth"));
        assert!(with("outputs", json!({"lsee": true})).contains("lsee"));
        assert!(with("reduction", json!("average")).contains("average"));
        assert!(with("reduction", json!({"by": {}})).contains("normaliser"));
        assert!(with("ignore_index", json!(1.5)).contains("1.5"));
        for key in ["tokens", "dim", "vocab"] {
            let mut value = serde_json::to_value(Problem::from(problem())).expect("json");
            value.as_object_mut().expect("an object").remove(key);
            assert!(parse(value).expect_err(key).contains(key));
        }
    }
}

#[test]
fn wide_gradients_are_wide_in_every_pass() {
    let problem = problem().bias().wide_gradients();
    for (pass, wide) in
        [(Pass::Backward, ["dh", "dw", "dbias"]), (Pass::DoubleBackward, ["gh", "gw", "gbias"])]
    {
        for operand in problem.table(pass).operands {
            let stored = ["h", "w", "bias", "ddh", "ddw", "ddbias"].contains(&operand.name);
            let precision = if stored { Precision::Storage } else { Precision::Wide };
            if operand.name != "targets" {
                assert_eq!(operand.precision, precision, "{} of {pass}", operand.name);
            }
        }
        let operands = problem.table(pass).operands;
        assert!(wide.iter().all(|name| operands.iter().any(|x| x.name == *name)));
    }
}
