//! `etalon eval`: outputs within the bounds of PyTorch's, and every kind of file and argument that is refused.

use super::{Bench, etalon, fixture, refusal};
use etalon_conformance::tensor::{Data, Tensor};
use etalon_conformance::vectors::read_tensors;
use std::fs;

fn f64s(tensor: &Tensor) -> &[f64] {
    match &tensor.data {
        Data::F64(x) => x,
        _ => panic!("{} instead of f64", tensor.type_name()),
    }
}

const CASES: [(&str, &str); 3] =
    [("causal", "attention"), ("options", "attention"), ("array", "attention_lse")];

#[test]
fn the_reference_agrees_with_pytorch() {
    for (name, algorithm) in CASES {
        let bench = Bench::new(name, algorithm);
        let expected =
            read_tensors(&fixture(&format!("{name}.out.safetensors")), u64::MAX).unwrap();
        let mut seen = 0;
        for pass in ["forward", "backward"] {
            for (output, got) in bench.outputs(pass, &[]) {
                seen += 1;
                let expected = &expected[&output];
                assert_eq!(got.shape, expected.shape, "{name} {output}");
                for (got, expected) in f64s(&got).iter().zip(f64s(expected)) {
                    // Both are f64 sums of some dozen terms of size 1.
                    assert!((got - expected).abs() < 1e-14, "{name} {output}: {got} {expected}");
                }
            }
        }
        assert_eq!(seen, expected.len(), "{name}: every recorded tensor is an output");
    }
}

/// PyTorch's f64 results are exact enough to stand in for the reference: the simd tier's results
/// must lie within the stated bounds of them.
#[test]
fn the_simd_tier_stays_within_its_bounds_of_pytorch() {
    for (name, algorithm) in CASES {
        let bench = Bench::new(name, algorithm);
        let expected =
            read_tensors(&fixture(&format!("{name}.out.safetensors")), u64::MAX).unwrap();
        for pass in ["forward", "backward"] {
            let more = ["--tier", "simd", "--profile", "f32-strict", "--blocking", "8x16"];
            let mut outputs = bench.outputs(pass, &more);
            let bounds: Vec<String> =
                outputs.keys().filter(|name| name.ends_with(".bound")).cloned().collect();
            assert_eq!(2 * bounds.len(), outputs.len(), "{name}: a bound for every output");
            for bound_name in bounds {
                let output = bound_name.trim_end_matches(".bound");
                let bound = outputs.remove(&bound_name).unwrap();
                let got = outputs[output].to_f64(output).unwrap();
                let pairs = got.iter().zip(f64s(&expected[output])).zip(f64s(&bound));
                for ((got, expected), bound) in pairs {
                    assert!(
                        (got - expected).abs() <= bound + 1e-14,
                        "{name} {output}: {got} for {expected} ± {bound}"
                    );
                }
            }
        }
    }
}

#[test]
fn simd_outputs_have_the_storage_type() {
    let bench = Bench::new("options", "attention");
    let outputs = bench.outputs("forward", &["--tier", "simd"]);
    let types: Vec<(&str, &str)> =
        outputs.iter().map(|(name, tensor)| (name.as_str(), tensor.type_name())).collect();
    assert_eq!(types, [("lse", "f32"), ("o", "bf16")]);
}

#[test]
fn a_missing_tensor_is_named() {
    let bench = Bench::new("causal", "attention");
    bench.edit(|tensors| drop(tensors.remove("k")));
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "in.safetensors: `k` is missing: the pass needs it");
    let bench = Bench::new("options", "attention");
    bench.edit(|tensors| drop(tensors.remove("sinks")));
    let line = bench.refused("backward", &["--tier", "simd"]);
    assert_eq!(line, "in.safetensors: `sinks` is missing: the problem sets `sinks`");
}

#[test]
fn an_absent_optional_cotangent_counts_as_zero() {
    let bench = Bench::new("causal", "attention");
    bench.edit(|tensors| drop(tensors.remove("dlse")));
    let absent = bench.outputs("backward", &[]);
    bench.edit(|tensors| {
        let dlse = Tensor { shape: vec![2, 4, 19], data: Data::F32(vec![0.0; 2 * 4 * 19]) };
        tensors.insert("dlse".to_string(), dlse);
    });
    assert_eq!(bench.outputs("backward", &[]), absent);
}

#[test]
fn a_misspelt_tensor_is_no_absent_one() {
    let bench = Bench::new("causal", "attention");
    bench.edit(|tensors| {
        let dlse = tensors.remove("dlse").unwrap();
        tensors.insert("dlze".to_string(), dlse);
    });
    let line = bench.refused("backward", &[]);
    let reason = "attention backward has no such tensor; did you mean \"dlse\"?";
    assert_eq!(line, format!("in.safetensors: `dlze` was given, but {reason}"));

    let bench = Bench::new("causal", "attention");
    bench.edit(|tensors| {
        let dout = tensors.remove("dout").unwrap();
        tensors.insert("do".to_string(), dout);
    });
    assert!(bench.refused("backward", &[]).ends_with("; did you mean \"dout\"?"));
    bench.edit(|tensors| {
        let strange = tensors.remove("do").unwrap();
        tensors.insert("colour".to_string(), strange);
    });
    assert!(bench.refused("backward", &[]).ends_with("attention backward has no such tensor"));
}

#[test]
fn a_file_without_cotangents_is_one_for_the_forward_pass() {
    let bench = Bench::new("causal", "attention");
    bench.edit(|tensors| tensors.retain(|name, _| !name.starts_with('d')));
    let line = bench.refused("backward", &[]);
    let reason = "the pass needs it; IN has no cotangent at all, as for the forward pass";
    assert_eq!(line, format!("in.safetensors: `dout` is missing: {reason}"));
}

#[test]
fn an_operand_of_an_option_that_is_not_set_is_refused() {
    let bench = Bench::new("options", "attention");
    bench.edit_problem("\"sinks\": true", "\"sinks\": false");
    let line = bench.refused("forward", &[]);
    let reason = "the problem does not set `sinks`";
    assert_eq!(line, format!("in.safetensors: `sinks` was given, but {reason}"));
}

#[test]
fn a_wrong_shape_is_reported_with_both_shapes() {
    let bench = Bench::new("causal", "attention");
    bench.edit(|tensors| tensors.get_mut("v").unwrap().shape = vec![2, 2, 16, 23]);
    let line = bench.refused("forward", &[]);
    let reason = "`v` must have shape [2, 2, 23, 16], found [2, 2, 16, 23]";
    assert_eq!(line, format!("in.safetensors: {reason}, which looks like [B, Hk, E, M]"));
}

#[test]
fn a_permuted_shape_is_reported_with_its_axes() {
    for (found, axes) in [
        (vec![2, 19, 4, 12], "[B, N, Hq, D]"),
        (vec![4, 2, 19, 12], "[Hq, B, N, D]"),
        (vec![2, 4, 12, 19], "[B, Hq, D, N]"),
    ] {
        let bench = Bench::new("causal", "attention");
        bench.edit(|tensors| tensors.get_mut("q").unwrap().shape.clone_from(&found));
        let line = bench.refused("forward", &[]);
        let reason = format!("`q` must have shape [2, 4, 19, 12], found {found:?}");
        assert_eq!(line, format!("in.safetensors: {reason}, which looks like {axes}"));
    }
    let bench = Bench::new("causal", "attention");
    bench.edit(|tensors| tensors.get_mut("dlse").unwrap().shape = vec![2, 19, 4]);
    let line = bench.refused("backward", &[]);
    assert!(line.ends_with("which looks like [B, N, Hq]"), "{line}");
}

#[test]
fn what_is_no_number_is_told_with_the_types_that_are() {
    let bench = Bench::new("causal", "attention");
    bench.edit(|tensors| {
        let q = tensors.get_mut("q").unwrap();
        q.data = Data::I64(vec![1; q.shape.iter().product()]);
    });
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "in.safetensors: `q` must hold f64, f32, bf16 or f16, found integers");
}

#[test]
fn heads_that_do_not_divide_are_refused() {
    let bench = Bench::new("causal", "attention");
    bench.edit_problem("\"query_heads\": 4", "\"query_heads\": 5");
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "p.json: line 4: `query_heads` must be a multiple of key_heads (2), found 5");
}

#[test]
fn an_unknown_key_is_refused() {
    let bench = Bench::new("causal", "attention");
    bench.edit_problem("\"batch\"", "\"colour\": 1, \"batch\"");
    let line = bench.refused("forward", &[]);
    assert!(
        line.starts_with(
            "p.json: not a valid problem file: line 3: unknown key `colour`, expected"
        ),
        "{line}"
    );
    let bench = Bench::new("options", "attention");
    bench.edit_problem("\"left\"", "\"links\"");
    let line = bench.refused("forward", &[]);
    assert!(line.starts_with("p.json: not a valid problem file: line 18: unknown key `links` of `mask.window`, expected"), "{line}");
    assert!(!line.contains("did you mean"), "{line}");
    let bench = Bench::new("causal", "attention");
    bench.edit_problem("\"query_heads\"", "\"queryheads\"");
    let line = bench.refused("forward", &[]);
    assert!(line.ends_with("; did you mean \"query_heads\"?"), "{line}");
    let bench = Bench::new("causal", "attention");
    bench.edit_problem("\"causal\"", "\"casual\"");
    let line = bench.refused("forward", &[]);
    assert!(line.ends_with("; did you mean \"causal\"?"), "{line}");
}

#[test]
fn a_mask_without_its_parameters_is_answered_with_its_form() {
    let bare = |mask: &str| {
        let bench = Bench::new("array", "attention_lse");
        let text = fs::read_to_string(bench.path("p.json")).unwrap();
        let mut problem: serde_json::Value = serde_json::from_str(&text).unwrap();
        problem["mask"] = serde_json::from_str(mask).unwrap();
        fs::write(bench.path("p.json"), problem.to_string()).unwrap();
        bench.refused("forward", &[])
    };
    for mask in [r#""causal""#, r#"{ "and": ["full", { "or": ["causal"] }] }"#] {
        let line = bare(mask);
        assert!(line.ends_with(r#"; write { "causal": {} }"#), "{line}");
    }
    let line = bare(r#""window""#);
    assert!(line.ends_with(r#"; write { "window": { "left": 128, "right": 0 } }"#), "{line}");
    let line = bare(r#""casual""#);
    assert!(line.ends_with("; did you mean \"causal\"?"), "{line}");
}

#[test]
fn a_file_cut_short_is_refused() {
    let bench = Bench::new("causal", "attention");
    let whole = fs::read(bench.path("in.safetensors")).unwrap();
    fs::write(bench.path("in.safetensors"), &whole[..whole.len() - 1]).unwrap();
    let line = bench.refused("forward", &[]);
    let reason = "no valid safetensors file, or cut short: ";
    assert!(line.starts_with(&format!("in.safetensors: {reason}")), "{line}");
}

#[test]
fn files_of_another_kind_are_refused() {
    let bench = Bench::new("causal", "attention");
    fs::write(bench.path("in.safetensors"), "a poem").unwrap();
    let line = bench.refused("forward", &[]);
    assert!(line.starts_with("in.safetensors: no valid safetensors file"), "{line}");

    let bench = Bench::new("causal", "attention");
    fs::write(bench.path("p.json"), "a poem").unwrap();
    let line = bench.refused("forward", &[]);
    assert!(
        line.starts_with("p.json: not a valid problem file: line 1, column 1: no JSON value"),
        "{line}"
    );

    let bench = Bench::new("causal", "attention");
    fs::remove_file(bench.path("p.json")).unwrap();
    let line = bench.refused("forward", &[]);
    assert!(line.starts_with("p.json: cannot be read: "), "{line}");
}

#[test]
fn a_mask_of_the_wrong_extent_is_refused() {
    let bench = Bench::new("array", "attention_lse");
    bench.edit(|tensors| tensors.get_mut("allowed").unwrap().shape = vec![1, 2, 18, 15]);
    let line = bench.refused("forward", &[]);
    let reason = "`allowed` must have shape [1, 2, 15, 18], found [1, 2, 18, 15]";
    assert_eq!(line, format!("in.safetensors: {reason}, which looks like [B|1, Hq|1, M, N]"));
    bench.edit(|tensors| drop(tensors.remove("allowed")));
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "in.safetensors: `allowed` is missing: the mask names it");
}

#[test]
fn a_block_of_size_0_is_refused() {
    let bench = Bench::new("causal", "attention");
    for (text, reason) in [
        ("0x32", "`blocking.queries` must be at least 1, found 0"),
        ("32x0", "`blocking.keys` must be at least 1, found 0"),
        ("32", "`blocking` must be QUERIESxKEYS, as in 96x128, found 32"),
        ("-1x3", "`blocking` must be QUERIESxKEYS, as in 96x128, found -1x3"),
        ("1x2x3", "`blocking` must be QUERIESxKEYS, as in 96x128, found 1x2x3"),
    ] {
        let blocking = format!("--blocking={text}");
        let line = bench.refused("forward", &["--tier", "simd", &blocking]);
        assert!(line.ends_with(reason), "{line}");
    }
}

#[test]
fn an_output_that_cannot_be_written_is_refused() {
    let bench = Bench::new("causal", "attention");
    let absent = bench.path("absent/out.safetensors");
    let [problem, input] = ["p.json", "in.safetensors"].map(|name| bench.path(name));
    for out in [absent.as_path(), bench.folder.path()] {
        let paths = [&problem, &input].map(|path| path.to_str().unwrap());
        let before = bench.files();
        let output = etalon(&[
            "eval",
            "attention",
            "forward",
            "--problem",
            paths[0],
            "--in",
            paths[1],
            "--out",
            out.to_str().unwrap(),
        ]);
        let line = refusal(&output);
        assert!(line.starts_with(&format!("{}: cannot be written: ", out.display())), "{line}");
        assert_eq!(bench.files(), before);
    }
}

#[test]
fn a_refused_evaluation_leaves_an_earlier_output_alone() {
    let bench = Bench::new("causal", "attention");
    fs::write(bench.path("out.safetensors"), "earlier").unwrap();
    bench.edit(|tensors| drop(tensors.remove("v")));
    bench.refused("forward", &[]);
    assert_eq!(fs::read_to_string(bench.path("out.safetensors")).unwrap(), "earlier");
}

#[test]
fn unknown_names_are_answered_with_the_known_ones() {
    let bench = Bench::new("causal", "attention");
    let line = bench.refused("sideways", &[]);
    let passes = "forward, backward, double_backward, jvp, step, forward_backward";
    assert_eq!(line, format!("invalid value 'sideways' for '<PASS>' [possible values: {passes}]"));
    let bench = Bench { algorithm: "attentoin", ..bench };
    let line = bench.refused("forward", &[]);
    let algorithms =
        "attention, attention_lse, linear_attention, lazy_attention, linear_cross_entropy";
    assert!(line.contains(&format!("'<ALGORITHM>' [possible values: {algorithms}]; ")), "{line}");
    assert!(line.contains("similar value") && line.contains("'attention'"), "{line}");
    let bench = Bench { algorithm: "attention_lse", ..bench };
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "p.json: is a problem of attention, not attention_lse");
    let bench = Bench { algorithm: "attention", ..bench };
    let line = bench.refused("forward", &["--tier", "abacus"]);
    assert!(line.starts_with("`tier` must be one of reference, simd/"), "{line}");
    let line = bench.refused("forward", &["--tier", "simd/avx"]);
    assert!(line.contains(", found simd/avx; did you mean \"simd/avx"), "{line}");
    let line = bench.refused("forward", &["--profile", "f8-flash"]);
    assert!(
        line.starts_with("`profile` must be one of f64, f32-strict, f32-bf16x3, f32-tf32"),
        "{line}"
    );
    assert!(line.contains("did you mean \"f16-flash\"?"), "{line}");
    let line = bench.refused("forward", &["--profile", "auto"]);
    assert_eq!(line, "--profile auto needs the results of a kernel");
    let line = bench.refused("forward", &["--profile", "absent.json"]);
    assert!(line.starts_with("absent.json: cannot be read: "), "{line}");
    let line = bench.refused("forward", &["--blokcing", "8x8"]);
    assert_eq!(
        line,
        "unexpected argument '--blokcing' found; a similar argument exists: '--blocking'"
    );
    let line = bench.refused("forward", &["--threads", "0"]);
    assert_eq!(line, "`threads` must be at least 1, found 0");
}

#[test]
fn passes_without_bounds_say_so() {
    let bench = Bench::new("causal", "attention");
    let line = bench.refused("jvp", &["--profile", "f16-flash"]);
    assert!(line.ends_with("`f16-flash` stores weights in a low precision"), "{line}");
    assert_eq!(bench.outputs("jvp", &[]).len(), 2, "without a profile it is evaluated");
}
