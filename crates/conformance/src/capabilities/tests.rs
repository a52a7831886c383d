use super::*;
use etalon_problem::{Attention, Decay, Extents, LinearAttention, LinearExtents, Mask, Sequences};
use std::fs;
use tempfile::tempdir;

fn read(text: &str) -> Result<Capabilities, String> {
    let folder = tempdir().unwrap();
    let path = folder.path().join("mine.json");
    fs::write(&path, text).unwrap();
    read_capabilities(&path)
        .map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
}

fn attention() -> Attention {
    Attention::new(Extents {
        batch: 1,
        query_heads: 4,
        key_heads: 2,
        queries: 64,
        keys: 64,
        dim: 64,
    })
}

const FLASH: &str = r#"{ "kernels": [
    { "algorithm": "attention", "passes": ["forward", "backward"], "dtypes": ["bf16", "f16"],
      "limits": { "dim": { "one_of": [64, 128] }, "queries": { "multiple_of": 32 },
                  "window_right": { "one_of": [0] }, "group": { "at_most": 8 } },
      "equal": [["dim", "value_dim"], ["queries", "keys"]],
      "masks": ["causal", "window"], "align": ["bottom_right"], "sequences": ["dense"],
      "options": { "softmax_scale": {}, "softcap": { "one_of": [null, 50] } } },
    { "algorithm": "linear_attention", "options": { "decay": { "one_of": ["per_head"] } } }
] }"#;

#[test]
fn a_refusal_names_what_is_not_taken() {
    let capabilities = read(FLASH).unwrap();
    let takes = |problem: Attention, pass, dtype| capabilities.takes(&problem.into(), pass, dtype);
    let (causal, forward) = (attention().mask(Mask::causal()), Pass::Forward);
    let softcap = causal.clone().softcap(50.0).softmax_scale(0.3);
    let window = attention().mask(Mask::window(5, 0));
    for problem in [causal.clone(), softcap, window] {
        assert_eq!(takes(problem, forward, Dtype::Bf16), Ok(()));
    }
    let other = |change: fn(&mut Attention)| {
        let mut problem = causal.clone();
        change(&mut problem);
        takes(problem, forward, Dtype::Bf16).unwrap_err()
    };
    assert_eq!(
        takes(causal.clone(), Pass::Jvp, Dtype::F16).unwrap_err(),
        "pass jvp: it takes forward, backward"
    );
    assert_eq!(
        takes(causal.clone(), forward, Dtype::F32).unwrap_err(),
        "dtype f32: it takes bf16, f16"
    );
    assert_eq!(other(|x| x.scores.extents.dim = 80), "dim = 80: it takes 64, 128");
    assert_eq!(other(|x| x.scores.extents.queries = 72), "queries = 72: it takes multiples of 32");
    assert_eq!(other(|x| x.scores.extents.query_heads = 32), "group = 16: it takes at most 8");
    assert_eq!(other(|x| x.value_dim = 128), "dim = 64, value_dim = 128: it takes equal ones");
    assert_eq!(other(|x| x.scores.mask = Mask::Full), "mask full: it takes causal, window");
    assert_eq!(other(|x| x.scores.mask = Mask::window(5, 1)), "window_right = 1: it takes 0");
    assert_eq!(other(|x| x.scores.mask = Mask::And(vec![])), "mask and: it takes causal, window");
    let cut = |x: &mut Attention| {
        x.scores.sequences = Sequences::Lengths { query: vec![64], key: vec![64] }
    };
    assert_eq!(other(cut), "sequences lengths: it takes dense");
    assert_eq!(other(|x| x.scores.sinks = true), "sinks = true: it does not take the option");
    assert_eq!(other(|x| x.scores.softcap = Some(30.0)), "softcap 30.0: it takes absent, 50");
}

#[test]
fn an_option_may_be_required_and_an_alignment_matters_where_it_shows() {
    let capabilities = read(FLASH).unwrap();
    let e = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: 1, dim: 1 };
    let takes = |decay| {
        let problem = LinearAttention::new(e).decay(decay).into();
        capabilities.takes(&problem, Pass::Step, Dtype::F64)
    };
    assert_eq!(takes(Decay::PerHead), Ok(()));
    assert_eq!(takes(Decay::None).unwrap_err(), r#"decay absent: it takes "per_head""#);
    let lcm = etalon_problem::LinearCrossEntropy::new(1, 1, 1).into();
    let reason = capabilities.takes(&lcm, Pass::Forward, Dtype::F32).unwrap_err();
    assert_eq!(reason, "algorithm linear_cross_entropy: it takes attention, linear_attention");

    let top_left = attention().mask(Mask::Causal { align: Align::TopLeft });
    let one = Kernel { align: Some(vec![Align::BottomRight]), ..Kernel::of(Algorithm::Attention) };
    let one = Capabilities { kernels: vec![one] };
    assert_eq!(one.takes(&top_left.clone().into(), Pass::Forward, Dtype::F32), Ok(()));
    let mut longer = top_left;
    longer.scores.extents.keys = 65;
    let reason = one.takes(&longer.into(), Pass::Forward, Dtype::F32).unwrap_err();
    assert_eq!(reason, "align top_left: it takes bottom_right");
}

#[test]
fn several_kernels_take_what_one_of_them_takes() {
    let text = r#"{ "kernels": [
        { "algorithm": "attention", "passes": ["forward"], "omits": ["lse"] },
        { "algorithm": "attention", "limits": { "dim": { "at_most": 32 } } } ] }"#;
    let capabilities = read(text).unwrap();
    let takes = |pass| capabilities.takes(&attention().into(), pass, Dtype::F32);
    assert_eq!(takes(Pass::Forward), Ok(()));
    let reason = takes(Pass::Backward).unwrap_err();
    assert_eq!(reason, "pass backward: it takes forward; another: dim = 64: it takes at most 32");
    assert_eq!(capabilities.omitted(Algorithm::Attention, Pass::Forward), ["lse"]);
    assert!(capabilities.omitted(Algorithm::Attention, Pass::Backward).is_empty());
}

#[test]
fn errors_name_the_key_and_the_line() {
    for (text, part) in [
        ("", "mine.json: not a valid capabilities file: the file is empty"),
        ("[]", "`the file` must be an object"),
        (r#"{ "kernels": [] }"#, "`kernels` must be at least one kernel, found 0"),
        (r#"{ "kernels": [["attention"]] }"#, "`kernels[0]` must be an object"),
        (
            "{ \"kernels\": [{\n\"algorithm\": \"attention\",\n\"maks\": []\n}] }",
            "line 3: unknown key `maks` of `kernels[0]`",
        ),
        (
            r#"{ "kernels": [{ "algorithm": "flash" }] }"#,
            "unknown value `flash` of `kernels[0].algorithm`",
        ),
        (
            r#"{ "kernels": [{ "algorithm": "attention", "limits": { "dims": {} } }] }"#,
            "unknown key `dims`",
        ),
        (
            r#"{ "kernels": [{ "algorithm": "attention", "limits": { "dim": { "multiple_of": 0 } } }] }"#,
            "`kernels[0].limits.dim.multiple_of` must be at least 1",
        ),
        (
            r#"{ "kernels": [{ "algorithm": "attention", "options": { "softcpa": {} } }] }"#,
            "softmax_scale, found softcpa",
        ),
        (
            r#"{ "kernels": [{ "algorithm": "attention", "passes": ["step"] }] }"#,
            "`kernels[0].passes` must be of forward",
        ),
        (
            r#"{ "kernels": [{ "algorithm": "attention", "cotangents": ["dout"] }] }"#,
            "`kernels[0].cotangents` must be of ",
        ),
        (
            r#"{ "kernels": [{ "algorithm": "attention", "omits": ["p"] }] }"#,
            "`kernels[0].omits` must be of ",
        ),
    ] {
        let error = read(text).unwrap_err();
        assert!(error.contains(part), "{error}");
        assert!(error.starts_with("mine.json: ") && !error.contains('\n'), "{error}");
    }
}

#[test]
fn the_options_of_an_algorithm_are_those_of_its_schema() {
    assert_eq!(options_of(Algorithm::Attention), ["bias", "sinks", "softcap", "softmax_scale"]);
    assert_eq!(
        options_of(Algorithm::LinearAttention),
        ["decay", "final_state", "initial_state", "scale"]
    );
    for algorithm in Algorithm::ALL {
        assert!(!options_of(algorithm).is_empty(), "{algorithm}");
    }
}
