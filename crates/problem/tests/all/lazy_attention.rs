//! Problems of lazy attention: what is refused, their operands, their distances, their files.

use etalon_problem::{
    Align, BiasExtents, DistanceBias, Error, Extents, LazyAttention, Operand, Pass, Precision,
    Role, Sequence, dtheta, tau_from_theta,
};

const EXTENTS: Extents =
    Extents { batch: 2, query_heads: 6, key_heads: 3, queries: 5, keys: 7, dim: 4 };

fn lazy() -> LazyAttention {
    LazyAttention::new(EXTENTS)
}

#[track_caller]
fn refused(problem: LazyAttention, name: &str, found: &str) {
    for error in [problem.check(), etalon_problem::Problem::from(problem).check()] {
        match error {
            Err(Error::Value { name: n, found: f, .. }) => {
                assert_eq!((n.as_str(), f.as_str()), (name, found));
            }
            other => panic!("`{name}` = {found} gave {other:?}"),
        }
    }
}

#[test]
fn what_is_outside_the_domain_is_refused() {
    assert_eq!(lazy().check(), Ok(()));
    assert_eq!(lazy().bias(1).value_dim(9).softmax_scale(-2.0).check(), Ok(()));
    refused(lazy().value_dim(0), "value_dim", "0");
    refused(lazy().bias(0), "bias.width", "0");
    refused(lazy().softmax_scale(f64::NAN), "softmax_scale", "NaN");
    let mut uneven = lazy();
    uneven.scores.extents.query_heads = 7;
    refused(uneven, "query_heads", "7");
    let mut wide = lazy().bias(usize::MAX);
    refused(wide.clone(), "shape of bias", &format!("[6, {}]", usize::MAX));
    wide = lazy().value_dim(usize::MAX);
    refused(wide, "shape of v", &format!("[2, 3, 7, {}]", usize::MAX));
}

#[test]
fn the_options_of_attention_are_refused() {
    let mut capped = lazy();
    capped.scores.softcap = Some(30.0);
    refused(capped, "softcap", "set");
    let mut sunk = lazy();
    sunk.scores.sinks = true;
    refused(sunk, "sinks", "set");
    let mut biased = lazy();
    biased.scores.bias = Some(BiasExtents { batch: 1, heads: 1 });
    refused(biased, "scores.bias", "set");
}

#[test]
fn operands_follow_the_pass() {
    use Role::{Cotangent, Input, OptionalCotangent, Output};
    let problem = lazy().bias(9).value_dim(3);
    let names = |pass: Pass, role: Role| -> Vec<&'static str> {
        problem.operands(pass).iter().filter(|o| o.role == role).map(|o| o.name).collect()
    };
    for pass in [Pass::Forward, Pass::Backward, Pass::DoubleBackward] {
        assert_eq!(names(pass, Input), ["q", "k", "v", "bias", "tau"]);
    }
    assert_eq!(names(Pass::Forward, Output), ["o", "lse"]);
    assert_eq!(names(Pass::Backward, Cotangent), ["dout"]);
    assert_eq!(names(Pass::Backward, OptionalCotangent), ["dlse"]);
    assert_eq!(names(Pass::Backward, Output), ["dq", "dk", "dv", "dbias", "dtau"]);
    let second = ["dlse", "ddq", "ddk", "ddv", "ddbias", "ddtau", "cot_o", "cot_lse"];
    assert_eq!(names(Pass::DoubleBackward, OptionalCotangent), second);
    let second = ["gq", "gk", "gv", "gbias", "gtau", "gdout", "gdlse"];
    assert_eq!(names(Pass::DoubleBackward, Output), second);
    assert!(problem.operands(Pass::Jvp).is_empty() && problem.operands(Pass::Step).is_empty());

    let shapes: Vec<(&str, &[usize], Precision)> = vec![
        ("q", &[2, 6, 5, 4], Precision::Storage),
        ("k", &[2, 3, 7, 4], Precision::Storage),
        ("v", &[2, 3, 7, 3], Precision::Storage),
        ("bias", &[6, 9], Precision::Wide),
        ("tau", &[6], Precision::Wide),
        ("lse", &[2, 6, 5], Precision::Wide),
        ("pv_sum", &[2, 6, 5, 3], Precision::Wide),
        ("dout", &[2, 6, 5, 3], Precision::Storage),
        ("dlse", &[2, 6, 5], Precision::Wide),
        ("dq", &[2, 6, 5, 4], Precision::Storage),
        ("dk", &[2, 3, 7, 4], Precision::Storage),
        ("dv", &[2, 3, 7, 3], Precision::Storage),
        ("dbias", &[6, 9], Precision::Wide),
        ("dtau", &[6], Precision::Wide),
    ];
    let operands = problem.operands(Pass::Backward);
    let found = operands
        .iter()
        .map(|Operand { name, shape, precision, .. }| (*name, shape.as_slice(), *precision));
    assert_eq!(found.collect::<Vec<_>>(), shapes);

    let bare = lazy();
    assert_eq!(bare.bias_shape(), None);
    assert!(bare.operands(Pass::DoubleBackward).iter().all(|o| !o.name.ends_with("bias")));
}

/// Three queries and five keys: at the bottom right the first query is aligned with key 2.
#[test]
fn distances_count_back_from_the_aligned_key() {
    let sequence = Sequence { batch: 0, query_start: 10, queries: 3, key_start: 20, keys: 5 };
    let row = |align, width, i| -> Vec<Option<usize>> {
        (0..5).map(|j| DistanceBias { width, align }.distance(&sequence, i, j)).collect()
    };
    let (top_left, bottom_right) = (Align::TopLeft, Align::BottomRight);
    assert_eq!(row(bottom_right, 9, 0), [Some(2), Some(1), Some(0), None, None]);
    assert_eq!(row(bottom_right, 9, 2), [Some(4), Some(3), Some(2), Some(1), Some(0)]);
    assert_eq!(row(bottom_right, 2, 2), [None, None, None, Some(1), Some(0)]);
    assert_eq!(row(top_left, 9, 0), [Some(0), None, None, None, None]);
    assert_eq!(row(top_left, 9, 2), [Some(2), Some(1), Some(0), None, None]);
    assert_eq!(row(top_left, 1, 2), [None, None, Some(0), None, None]);
    // More queries than keys: the first is aligned with no key.
    let tall = Sequence { queries: 6, keys: 4, ..sequence };
    let reach = DistanceBias { width: 9, align: bottom_right };
    assert_eq!((reach.distance(&tall, 1, 0), reach.distance(&tall, 2, 0)), (None, Some(0)));
}

/// τ = −|θ + 1|: below 0 on both sides of −1, with slope ∓1, and 0 for the slope between them.
#[test]
fn tau_and_theta() {
    for (theta, tau, slope) in [
        (0.0, -1.0, -1.0),
        (0.25, -1.25, -1.0),
        (-0.75, -0.25, -1.0),
        (-1.0, 0.0, 0.0),
        (-3.0, -2.0, 1.0),
    ] {
        assert_eq!(tau_from_theta(theta), tau);
        assert_eq!(dtheta(theta, 3.0), 3.0 * slope);
        if slope != 0.0 {
            let step = (-20f64).exp2(); // exact, and does not cross −1
            let found =
                (tau_from_theta(theta + step) - tau_from_theta(theta - step)) / (2.0 * step);
            assert_eq!(found, slope);
        }
    }
    assert!(tau_from_theta(f64::NAN).is_nan() && dtheta(f64::NAN, 1.0).is_nan());
    assert_eq!(dtheta(-1.0, f64::INFINITY), 0.0);
}

/// Problems as JSON files: `cargo test -p etalon-problem --features serde`.
#[cfg(feature = "serde")]
mod files {
    use super::*;
    use etalon_problem::{Mask, Problem, Sequences};
    use serde_json::{Value, json};

    fn write(problem: &LazyAttention) -> Value {
        serde_json::to_value(Problem::from(problem.clone())).expect("a problem has a JSON form")
    }

    fn read(file: &Value) -> Result<Problem, String> {
        serde_json::from_str(&file.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_left_out_and_options_return() {
        let plain = json!({
            "algorithm": "lazy_attention",
            "batch": 2, "query_heads": 6, "key_heads": 3, "queries": 5, "keys": 7, "dim": 4,
        });
        assert_eq!(write(&lazy()), plain);
        assert_eq!(read(&plain), Ok(lazy().into()));

        let mut problem = lazy()
            .value_dim(3)
            .softmax_scale(0.1)
            .mask(Mask::Full)
            .sequences(Sequences::Lengths { query: vec![1, 5], key: vec![7, 0] });
        problem.bias = Some(DistanceBias { width: 9, align: Align::TopLeft });
        let mut file = plain.clone();
        file["value_dim"] = json!(3);
        file["softmax_scale"] = json!(0.1);
        file["mask"] = json!("full");
        file["bias"] = json!({"width": 9, "align": "top_left"});
        file["sequences"] = json!({"lengths": {"query": [1, 5], "key": [7, 0]}});
        assert_eq!(write(&problem), file);
        assert_eq!(read(&file), Ok(problem.into()));

        // Without an alignment distances are counted from the bottom right.
        let mut file = plain.clone();
        file["bias"] = json!({"width": 9});
        assert_eq!(read(&file), Ok(lazy().bias(9).into()));
        // And a mask that is spelt out is the one that is left out.
        let mut file = plain;
        file["mask"] = json!({"causal": {}});
        assert_eq!(read(&file), Ok(lazy().into()));
    }

    #[test]
    fn what_lazy_attention_does_not_have_is_refused() {
        for (key, value) in [
            ("softcap", json!(30.0)),
            ("sinks", json!(true)),
            ("tau", json!(-1.0)),
            ("bias", json!({"batch": 1, "heads": 1})),
            ("bias", json!({"width": 3, "reach": 3})),
        ] {
            let mut file = write(&lazy());
            file[key] = value;
            read(&file).expect_err(key);
        }
    }
}
