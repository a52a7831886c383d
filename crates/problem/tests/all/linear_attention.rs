//! Problems of linear attention: every way in which one can be wrong, the tensors of its passes,
//! its file, and the named decays.

use etalon_problem::{
    Decay, Error, LinearAttention, LinearExtents, Operand, Pass, Precision, Problem, Role,
    TokenSequences, slopes,
};

const EXTENTS: LinearExtents =
    LinearExtents { batch: 2, query_heads: 6, key_heads: 3, tokens: 7, dim: 4 };

fn problem() -> LinearAttention {
    LinearAttention::new(EXTENTS)
}

fn with(change: impl FnOnce(&mut LinearExtents)) -> LinearAttention {
    let mut extents = EXTENTS;
    change(&mut extents);
    LinearAttention::new(extents).value_dim(5)
}

fn lengths(tokens: &[usize]) -> TokenSequences {
    TokenSequences::Lengths { tokens: tokens.to_vec() }
}

fn packed(cu_tokens: &[usize]) -> TokenSequences {
    TokenSequences::Packed { cu_tokens: cu_tokens.to_vec() }
}

#[track_caller]
fn refused(problem: LinearAttention, name: &str, found: &str) {
    for error in [problem.check(), Problem::from(problem.clone()).check()] {
        match error {
            Err(Error::Value { name: n, found: f, expected }) => {
                assert_eq!((n.as_str(), f.as_str()), (name, found), "expected {expected}");
            }
            other => panic!("`{name}` = {found} gave {other:?}"),
        }
    }
}

#[test]
fn valid_problems_pass() {
    let valid = [
        problem(),
        with(|e| e.tokens = 0),
        with(|e| e.batch = 0),
        with(|e| e.query_heads = 0),
        problem().scale(0.0).decay(Decay::PerToken).initial_state().final_state(),
        problem().scale(-2.0).sequences(lengths(&[7, 0])),
        with(|e| e.batch = 1).sequences(packed(&[0, 0, 3, 6])).decay(Decay::PerHead),
    ];
    for problem in valid {
        assert_eq!(problem.check(), Ok(()), "{problem:?}");
    }
}

#[test]
fn domains() {
    refused(with(|e| e.key_heads = 0), "key_heads", "0");
    refused(with(|e| e.dim = 0), "dim", "0");
    refused(problem().value_dim(0), "value_dim", "0");
    refused(with(|e| e.query_heads = 7), "query_heads", "7");
    for scale in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        refused(problem().scale(scale), "scale", &scale.to_string());
    }
}

#[test]
fn sequences() {
    let one = || with(|e| e.batch = 1);
    let bad = [
        problem().sequences(lengths(&[7])),
        problem().sequences(lengths(&[8, 0])),
        problem().sequences(packed(&[0, 7])),
        one().sequences(packed(&[])),
        one().sequences(packed(&[1, 7])),
        one().sequences(packed(&[0, 5, 4])),
        one().sequences(packed(&[0, 8])),
    ];
    for problem in bad {
        assert!(matches!(problem.check(), Err(Error::Value { .. })), "{problem:?}");
    }
    let list = |problem: LinearAttention| -> Vec<_> {
        let list = problem.list_sequences();
        assert_eq!(problem.sequence_count(), list.len());
        list.iter().map(|s| [s.index, s.batch, s.start, s.tokens]).collect()
    };
    assert_eq!(list(problem()), [[0, 0, 0, 7], [1, 1, 0, 7]]);
    assert_eq!(list(problem().sequences(lengths(&[5, 0]))), [[0, 0, 0, 5], [1, 1, 0, 0]]);
    let joined = one().sequences(packed(&[0, 2, 2, 6]));
    assert_eq!(list(joined.clone()), [[0, 0, 0, 2], [1, 0, 2, 0], [2, 0, 2, 4]]);
    assert_eq!(joined.state_shape(), [3, 3, 4, 5]);
    assert_eq!(problem().sequences(lengths(&[5, 0])).state_shape(), [2, 3, 4, 4]);
}

#[test]
fn shapes_that_cannot_be_addressed() {
    let huge = [
        with(|e| e.tokens = usize::MAX),
        with(|e| e.dim = usize::MAX),
        problem().value_dim(usize::MAX),
        with(|e| (e.batch, e.tokens) = (1 << 32, 1 << 32)),
        // q, k and v fit, but no state does: every pass works with one.
        with(|e| (e.tokens, e.dim) = (0, 1 << 33)).value_dim(1 << 33),
    ];
    for problem in huge {
        let found = problem.check();
        let shape = matches!(&found, Err(Error::Value { name, expected, .. })
            if name.starts_with("shape of ") && expected == "addressable");
        assert!(shape, "{problem:?} gave {found:?}");
    }
}

fn names(problem: &LinearAttention, pass: Pass, roles: &[Role]) -> Vec<&'static str> {
    let operands = Problem::from(problem.clone()).operands(pass);
    operands.iter().filter(|o| roles.contains(&o.role)).map(|o| o.name).collect()
}

#[test]
fn operands_follow_the_pass() {
    let full = problem().value_dim(5).initial_state().final_state();
    let per_head = full.clone().decay(Decay::PerHead);
    let per_token = full.clone().decay(Decay::PerToken);
    let given = [Role::Cotangent];
    let optional = [Role::OptionalCotangent];
    for (problem, decay) in [(&full, None), (&per_head, Some("g_gamma")), (&per_token, Some("g"))] {
        let prefixed = |prefix: &str, inputs: &[&str]| -> Vec<String> {
            inputs.iter().map(|input| format!("{prefix}{input}")).collect()
        };
        let inputs: Vec<&str> =
            ["q", "k", "v"].into_iter().chain(decay).chain(["initial_state"]).collect();
        let gradients: Vec<&str> = inputs.iter().copied().chain(["scale"]).collect();
        for pass in [Pass::Forward, Pass::Backward, Pass::DoubleBackward, Pass::Step] {
            assert_eq!(names(problem, pass, &[Role::Input]), inputs);
        }
        for pass in [Pass::Forward, Pass::Step] {
            assert_eq!(names(problem, pass, &[Role::Output]), ["o", "final_state"]);
            assert!(names(problem, pass, &[given, optional].concat()).is_empty());
        }
        for pass in [Pass::Backward, Pass::DoubleBackward] {
            assert_eq!(names(problem, pass, &given), ["dout"]);
        }
        assert_eq!(names(problem, Pass::Backward, &optional), ["dfinal_state"]);
        assert_eq!(names(problem, Pass::Backward, &[Role::Output]), prefixed("d", &gradients));
        let mut second = vec!["dfinal_state".to_string()];
        second.extend(prefixed("dd", &gradients));
        second.extend(prefixed("cot_", &["o", "final_state"]));
        assert_eq!(names(problem, Pass::DoubleBackward, &optional), second);
        let mut second = prefixed("g", &gradients);
        second.extend(prefixed("gd", &["out", "final_state"]));
        assert_eq!(names(problem, Pass::DoubleBackward, &[Role::Output]), second);
        assert!(problem.operands(Pass::Jvp).is_empty());
    }
    // Without options there are no states but in a step.
    assert_eq!(names(&problem(), Pass::Forward, &[Role::Input]), ["q", "k", "v"]);
    assert_eq!(names(&problem(), Pass::Forward, &[Role::Output]), ["o"]);
    assert_eq!(names(&problem(), Pass::Backward, &optional), [""; 0]);
    assert_eq!(names(&problem(), Pass::Step, &[Role::Input]), ["q", "k", "v", "initial_state"]);
    assert_eq!(names(&problem(), Pass::Step, &[Role::Output]), ["o", "final_state"]);
}

#[test]
fn shapes_and_precisions() {
    let full = problem().value_dim(5).initial_state().final_state().decay(Decay::PerToken);
    let find = |pass: Pass, name: &str| -> (Vec<usize>, Precision) {
        let operands = full.operands(pass);
        let found = operands.into_iter().find(|o: &Operand| o.name == name).expect(name);
        (found.shape, found.precision)
    };
    let (storage, wide) = (Precision::Storage, Precision::Wide);
    let double = Pass::DoubleBackward;
    for (pass, name, shape, precision) in [
        (Pass::Backward, "q", vec![2, 6, 7, 4], storage),
        (Pass::Backward, "dk", vec![2, 3, 7, 4], storage),
        (Pass::Backward, "dv", vec![2, 3, 7, 5], storage),
        (Pass::Backward, "dout", vec![2, 6, 7, 5], storage),
        (Pass::Backward, "dg", vec![2, 3, 7], wide),
        (Pass::Backward, "dinitial_state", vec![2, 3, 4, 5], wide),
        (Pass::Backward, "dfinal_state", vec![2, 3, 4, 5], wide),
        (Pass::Backward, "dscale", vec![], wide),
        (double, "ddq", vec![2, 6, 7, 4], storage),
        (double, "cot_o", vec![2, 6, 7, 5], storage),
        (double, "cot_final_state", vec![2, 3, 4, 5], wide),
        (double, "gdout", vec![2, 6, 7, 5], storage),
        (double, "gdfinal_state", vec![2, 3, 4, 5], wide),
        (double, "gscale", vec![], wide),
        (Pass::Step, "q", vec![2, 6, 4], storage),
        (Pass::Step, "k", vec![2, 3, 4], storage),
        (Pass::Step, "v", vec![2, 3, 5], storage),
        (Pass::Step, "g", vec![2, 3], wide),
        (Pass::Step, "initial_state", vec![2, 3, 4, 5], wide),
        (Pass::Step, "o", vec![2, 6, 5], storage),
        (Pass::Step, "final_state", vec![2, 3, 4, 5], wide),
    ] {
        assert_eq!(find(pass, name), (shape, precision), "{name} of {pass:?}");
    }
    let per_head = full.clone().decay(Decay::PerHead);
    for (pass, name) in [(Pass::Forward, "g_gamma"), (Pass::Step, "g_gamma")] {
        let operands = per_head.operands(pass);
        let shape = operands.iter().find(|o| o.name == name).map(|o| o.shape.clone());
        assert_eq!(shape, Some(vec![3]));
    }
}

#[cfg(feature = "serde")]
#[test]
fn a_problem_survives_its_file() {
    use serde_json::json;
    let plain = json!({"algorithm": "linear_attention",
        "batch": 1, "query_heads": 4, "key_heads": 2, "tokens": 9, "dim": 8});
    let extents = LinearExtents { batch: 1, query_heads: 4, key_heads: 2, tokens: 9, dim: 8 };
    let mut full = plain.clone();
    full["value_dim"] = json!(3);
    full["scale"] = json!(0.1);
    full["decay"] = json!("per_token");
    full["initial_state"] = json!(true);
    full["final_state"] = json!(true);
    full["sequences"] = json!({"packed": {"cu_tokens": [0, 2, 9]}});
    let all = LinearAttention::new(extents)
        .value_dim(3)
        .scale(0.1)
        .decay(Decay::PerToken)
        .initial_state()
        .final_state()
        .sequences(packed(&[0, 2, 9]));
    for (problem, file) in [(LinearAttention::new(extents), plain), (all, full)] {
        let problem = Problem::from(problem);
        assert_eq!(serde_json::to_value(&problem).expect("a file"), file);
        assert_eq!(serde_json::from_value::<Problem>(file.clone()).expect("a problem"), problem);
        for (key, value) in [("softmax_scale", json!(1.0)), ("decay", json!("per_channel"))] {
            let mut wrong = file.clone();
            wrong[key] = value;
            let error = serde_json::from_value::<Problem>(wrong).expect_err(key).to_string();
            assert!(error.contains("softmax_scale") || error.contains("per_channel"), "{error}");
        }
    }
}

/// Powers of two are computed exactly; other powers within a unit in the last place.
fn assert_near(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let error = (found - expected).abs();
        assert!(error <= 2.0 * f64::EPSILON * expected.abs(), "{found}, not {expected}");
    }
}

#[test]
fn slopes_of_alibi() {
    let powers = |exponents: &[f64]| -> Vec<f64> {
        exponents.iter().map(|&exponent| -2f64.powf(exponent)).collect()
    };
    assert_eq!(slopes::alibi(1), Ok(powers(&[-8.0])));
    assert_eq!(slopes::alibi(8), Ok(powers(&[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0])));
    // 2 heads as of 2, then the first of 4; 4 as of 4, then the first and third of 8.
    assert_eq!(slopes::alibi(3), Ok(powers(&[-4.0, -8.0, -2.0])));
    assert_eq!(slopes::alibi(6), Ok(powers(&[-2.0, -4.0, -6.0, -8.0, -1.0, -3.0])));
    // 12 heads: the last four are the first, third, fifth and seventh of 16.
    let twelve = slopes::alibi(12).expect("slopes");
    assert_near(&twelve[8..], &powers(&[-0.5, -1.5, -2.5, -3.5]));
}

#[test]
fn slopes_by_layer() {
    let alibi = slopes::alibi(6).expect("slopes");
    for (layer, layers, factor) in
        [(0, 1, 1.00001), (0, 24, 1.00001), (2, 5, 0.50001), (4, 5, 0.00001)]
    {
        let expected: Vec<f64> = alibi.iter().map(|slope| slope * factor).collect();
        let found = slopes::geometric(6, layer, layers).expect("slopes");
        // The factor is a sum of three terms of the size of 1: absolutely near.
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() <= 4.0 * f64::EPSILON, "{found}, not {expected}");
        }
        assert!(found.iter().all(|&slope| slope < 0.0));
    }
    // flash-linear-attention with 8 heads: 0, 1, … 7 in the first layer, half of it in the middle.
    let first: Vec<f64> = (0..8).map(|h| -f64::from(h)).collect();
    assert_eq!(slopes::linear(8, 0, 4), Ok(first.clone()));
    assert_eq!(slopes::linear(8, 2, 4), Ok(first.iter().map(|g| g / 2.0).collect()));
    assert!(slopes::linear(8, 0, 4).expect("slopes")[0].is_sign_positive(), "0, not −0");
}

#[test]
fn slopes_of_retention() {
    let found = slopes::retention(3).expect("slopes");
    assert_near(&found, &[(31.0f64 / 32.0).ln(), (63.0f64 / 64.0).ln(), (127.0f64 / 128.0).ln()]);
    // The logarithm is still there where 1 − 2^{−5−h} is 1 in f64: −2^{−65}.
    let far = slopes::retention(61).expect("slopes")[60];
    assert_near(&[far], &[-2f64.powi(-65)]);
}

#[test]
fn slopes_that_do_not_exist() {
    for error in [slopes::alibi(0), slopes::geometric(0, 0, 1), slopes::linear(0, 0, 1)] {
        assert_eq!(error, Err(Error::value("heads", "at least 1", 0)));
    }
    assert_eq!(slopes::retention(0), Err(Error::value("heads", "at least 1", 0)));
    for (layer, layers) in [(0, 0), (3, 3), (4, 3)] {
        let expected = Err(Error::value("layer", format!("below layers ({layers})"), layer));
        assert_eq!(slopes::geometric(4, layer, layers), expected);
        assert_eq!(slopes::linear(4, layer, layers), expected);
    }
    for found in [slopes::alibi(usize::MAX), slopes::retention(usize::MAX)] {
        assert_eq!(
            found,
            Err(Error::Memory { what: "a log-decay per head".to_string(), bytes: usize::MAX })
        );
    }
}
