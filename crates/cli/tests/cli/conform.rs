//! The suite on kernels that a program brings.

use etalon_cli::{Refused, Wanted, conform};
use etalon_conformance::cases::{Depth, Spec};
use etalon_conformance::report::Status;
use etalon_conformance::tensor::{Data, Tensors};
use etalon_conformance::tier::{Refusal, Request, Tier};
use etalon_conformance::tiers::Reference;
use etalon_conformance::zoo::{CONTROLS, Host, mutant};
use etalon_problem::{Algorithm, Pass, Role};
use std::sync::Mutex;

/// A kernel as they are: few head dimensions, causal, no options, without lse.
const NARROW: &str = r#"{"kernels": [{
    "algorithm": "attention", "passes": ["forward", "backward"], "dtypes": ["f32"],
    "limits": {"dim": {"one_of": [16, 32]}, "queries": {"multiple_of": 8, "at_least": 8}},
    "equal": [["queries", "keys"], ["dim", "value_dim"]],
    "masks": ["causal"], "sequences": ["dense"], "options": {}, "omits": ["lse"]}]}"#;

fn wanted(capabilities: &str) -> Wanted {
    Wanted {
        algorithm: Algorithm::Attention,
        capabilities: capabilities.to_string(),
        depth: Depth::Smoke,
        seed: 0,
        profile: "usual".to_string(),
        cases: Vec::new(),
        laws: Vec::new(),
    }
}

/// The exact results, rounded, of what the kernel was given and what it returns.
fn exact(request: &Request<'_>) -> Result<Tensors, Refusal> {
    let saved = |name: &str| {
        let operands = request.problem.operands(request.pass);
        operands.iter().any(|x| x.name == name && x.role == Role::Saved)
    };
    let mut inputs = request.inputs.clone();
    inputs.retain(|name, _| !saved(name));
    let mut outputs = Reference.run(&Request { inputs: &inputs, ..*request })?;
    outputs.remove("lse");
    Ok(outputs)
}

#[test]
fn a_narrow_kernel_is_asked_what_it_takes() {
    let asked = Mutex::new(Vec::new());
    let answer = |request: &Request<'_>| {
        let extents = request.problem.scores().expect("scores").extents;
        asked.lock().expect("no panic").push((request.pass, extents));
        if request.pass == Pass::Backward {
            assert!(request.inputs.contains_key("o") && request.inputs.contains_key("lse"));
        }
        exact(request)
    };
    let judged = conform(&wanted(NARROW), &answer).expect("a judgement");
    assert_eq!(judged.status, Status::Passed, "{}", judged.text);
    let asked = asked.into_inner().expect("no panic");
    for (_, e) in &asked {
        assert!([16, 32].contains(&e.dim) && e.queries % 8 == 0 && e.queries == e.keys, "{e:?}");
    }
    // It takes no more keys than queries: of chunks a prefix is asked.
    let report: serde_json::Value = serde_json::from_str(&judged.json).expect("JSON");
    let judged_by = |law: &str| {
        let records = report["records"].as_array().expect("records").iter();
        records.filter(|x| x["check"] == law && x["verdict"] == "pass").count()
    };
    assert!(judged_by("chunks_of_queries") > 0, "{}", judged.json);
    let passes = |wanted| asked.iter().filter(|(pass, _)| *pass == wanted).count();
    assert!(passes(Pass::Forward) > 10 && passes(Pass::Backward) > 10);
}

/// A kernel with windows that returns no lse: laws that narrow a mask judge o alone.
#[test]
fn a_kernel_with_windows_may_omit_lse() {
    let capabilities = r#"{"kernels": [{"algorithm": "attention", "passes": ["forward"],
        "dtypes": ["f32"], "omits": ["lse"]}]}"#;
    let cases = vec!["attention/f32/window/plain/square/dense/generic/no_dlse/0".to_string()];
    let judged = conform(&Wanted { cases, ..wanted(capabilities) }, &exact).expect("a judgement");
    assert_eq!(judged.status, Status::Passed, "{}", judged.text);
    let report: serde_json::Value = serde_json::from_str(&judged.json).expect("JSON");
    let mut records = report["records"].as_array().expect("records").iter();
    let passed = records.any(|x| x["check"] == "one_key" && x["verdict"] == "pass");
    assert!(passed, "{}", judged.json);
}

#[test]
fn a_wrong_kernel_fails_with_the_simplest_case() {
    let answer = |request: &Request<'_>| {
        let mut outputs = exact(request)?;
        for x in outputs.values_mut() {
            if let Data::F32(x) = &mut x.data {
                x.iter_mut().for_each(|x| *x *= 1.01);
            }
        }
        Ok(outputs)
    };
    let judged = conform(&wanted(NARROW), &answer).expect("a judgement");
    assert_eq!(judged.status, Status::Failed);
    assert!(judged.text.starts_with("FAILED: "), "{}", judged.text);
    assert!(
        judged.text.contains("simplest case for bound of forward on kernel"),
        "{}",
        judged.text
    );
}

/// Bugs of the zoo that show in parts of a case, not in the case itself.
#[test]
fn a_kernel_that_contradicts_itself_fails() {
    let judged = |host: &Host, case: &str, law: &str| {
        let algorithm = case.parse::<Spec>().expect("a case").algorithm;
        let capabilities = format!(r#"{{"kernels": [{{"algorithm": "{algorithm}"}}]}}"#);
        let (cases, laws) = (vec![case.to_string()], vec![law.to_string()]);
        let wanted = Wanted { algorithm, cases, laws, ..wanted(&capabilities) };
        conform(&wanted, &|request| host.run(request)).expect("a judgement")
    };
    for (bug, law, case) in [
        (
            "one-query-uncapped",
            "chunks_of_queries",
            "attention/f32/segments/everything/dims/dense/descending/dlse/0",
        ),
        (
            "bias-capped-without-sinks",
            "chunks_of_keys",
            "attention/f32/window_right/everything/value_wide/dense/large/dlse/0",
        ),
        (
            "one-token-without-bias",
            "chunks_of_tokens",
            "linear_cross_entropy/f32/ragged/bias/smoothing/sum/class/others/raised/0",
        ),
        (
            "final-state-transposed",
            "two_halves",
            "linear_attention/f32/none/weak/no_dfinal/lattice/dense/root/generic/0",
        ),
        ("packed-leak", "sequences_alone", "attention/f32/full/plain/square/packed/generic/dlse/0"),
    ] {
        let right = judged(&Host::sound(CONTROLS[0]), case, law);
        assert_eq!(right.status, Status::Passed, "{}", right.text);
        let wrong = judged(&Host::mutant(mutant(bug).expect("a bug")), case, law);
        assert_eq!(wrong.status, Status::Failed, "{bug}");
        let said = ["FAILED kernel", law, " = ", ", expected ", " within "];
        assert!(said.iter().all(|words| wrong.text.contains(words)), "{}", wrong.text);
        let bound = judged(&Host::mutant(mutant(bug).expect("a bug")), case, "bound");
        let alone = bug.starts_with("one-") || bug.starts_with("bias-");
        assert_eq!(bound.status == Status::Passed, alone, "{bug}: {}", bound.text);
    }
}

/// Laws that go on from a state are not asked of a kernel that returns none.
#[test]
fn a_kernel_without_a_final_state_is_judged_by_the_rest() {
    let algorithm = Algorithm::LinearAttention;
    let wanted = Wanted {
        algorithm,
        cases: vec![
            "linear_attention/f32/none/weak/no_dfinal/lattice/dense/root/generic/0".to_string(),
        ],
        laws: ["bound", "two_halves", "token_by_token"].map(String::from).to_vec(),
        ..wanted(r#"{"kernels": [{"algorithm": "linear_attention", "omits": ["final_state"]}]}"#)
    };
    let answer = |request: &Request<'_>| {
        let mut outputs = exact(request)?;
        outputs.remove("final_state");
        Ok(outputs)
    };
    let judged = conform(&wanted, &answer).expect("a judgement");
    assert_eq!(judged.status, Status::Passed, "{}", judged.text);
}

#[test]
fn a_run_without_a_check_is_no_verdict() {
    let none = NARROW.replace(r#""masks": ["causal"]"#, r#""masks": []"#);
    let refused = conform(&wanted(&none), &exact).expect_err("nothing is taken");
    assert!(refused.to_string().starts_with("nothing was checked"), "{refused}");
    let declines = |_: &Request<'_>| Err(Refusal::Unsupported("not today".to_string()));
    let refused = conform(&wanted(NARROW), &declines).expect_err("it declines all");
    assert!(refused.to_string().contains("not today"), "{refused}");
}

#[test]
fn what_does_not_fit_is_named() {
    let errors = [
        (Wanted { profile: "auto".to_string(), ..wanted(NARROW) }, "`profile`"),
        (Wanted { laws: vec!["bounds".to_string()], ..wanted(NARROW) }, "did you mean \"bound\"?"),
        (Wanted { cases: vec!["x/y".to_string()], ..wanted(NARROW) }, "`case`"),
        (wanted(r#"{"kernels": [{"algorithm": "attention", "mask": []}]}"#), "`mask`"),
    ];
    for (wanted, part) in errors {
        let refused: Refused = conform(&wanted, &exact).expect_err(part);
        assert!(refused.to_string().contains(part), "{refused}");
    }
}
