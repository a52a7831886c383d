//! Tensors in types of their own, results that are absent, and sequences from tensors.

use super::check::{change, check, said};
use super::{Bench, etalon, fixture, refusal};
use etalon_conformance::tensor::{Data, Stored, Tensor, Tensors};
use etalon_conformance::vectors::{read_tensors, write_tensors};
use etalon_problem::Dtype;
use std::fs;

fn cast(tensors: &mut Tensors, name: &str, dtype: Dtype) {
    let values = tensors[name].numbers(name).unwrap();
    tensors.insert(name.to_string(), Tensor::store(&values, Stored::Float(dtype)));
}

/// A bench of bf16, whose kernel has answered.
fn answered(pass: &str) -> Bench {
    let bench = Bench::new("options", "attention");
    let outputs = bench.outputs(pass, &["--tier", "simd"]);
    write_tensors(&bench.path("got.safetensors"), &outputs).unwrap();
    bench
}

const STRICT: [&str; 2] = ["--profile", "f32-strict"];

#[test]
fn a_result_is_judged_as_it_is_stored() {
    let bench = answered("backward");
    let (text, status) = said(&check(&bench, "backward", &STRICT));
    assert_eq!(status, Some(0), "{text}");
    assert!(!text.contains("Judged as stored"), "{text}");
    // The same numbers as f32 would be results that were rounded to eight bits on the way.
    change(&bench, |got| cast(got, "dv", Dtype::F32));
    let (text, status) = said(&check(&bench, "backward", &STRICT));
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("Judged as stored: dv in f32.") && text.contains("1 of "), "{text}");
    // Results that are more exact than bf16 pass as f32, and rounded to bf16 as bf16.
    let exact = bench.outputs("backward", &[]);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut got = exact.clone();
        exact.keys().for_each(|name| cast(&mut got, name, dtype));
        write_tensors(&bench.path("got.safetensors"), &got).unwrap();
        let (text, status) = said(&check(&bench, "backward", &STRICT));
        assert_eq!(status, Some(0), "{dtype}: {text}");
        // bf16: dsinks, which otherwise is f32; f32: all others.
        assert!(text.contains("Judged as stored: "), "{text}");
    }
}

#[test]
fn everything_in_f32_of_a_kernel_in_bf16_has_a_way_out() {
    let bench = answered("backward");
    let f32s = |tensors: &mut Tensors| {
        let names: Vec<String> = tensors.keys().cloned().collect();
        names.iter().for_each(|name| cast(tensors, name, Dtype::F32));
    };
    bench.edit(f32s);
    change(&bench, f32s);
    let (text, status) = said(&check(&bench, "backward", &[]));
    assert_eq!(status, Some(1), "{text}");
    assert!(text.replace('\n', " ").contains("say --dtype bf16"), "{text}");
    let own = ["--dtype", "bf16", "--profile", "f32-strict"];
    let (text, status) = said(&check(&bench, "backward", &own));
    assert_eq!(status, Some(0), "{text}");
    // Numbers that bf16 does not have were no operands of a kernel in bf16.
    bench.edit(|tensors| {
        let q = tensors["q"].to_f64("q").unwrap() * (1.0 + 1.0 / 4096.0);
        tensors.insert("q".to_string(), Tensor::round(&q, Dtype::F32));
    });
    let line = refusal(&check(&bench, "backward", &own));
    assert!(line.contains("`q` must hold numbers that bf16 has, with --dtype bf16"), "{line}");
}

#[test]
fn operands_have_types_of_their_own() {
    let bench = answered("forward");
    let before = bench.outputs("forward", &[]);
    // f32 beside bf16 where bf16 is usual, and the other way round: the same numbers, the same results.
    bench.edit(|tensors| {
        cast(tensors, "bias", Dtype::F32);
        let sinks = tensors["sinks"].to_f64("sinks").unwrap().mapv(|x| Dtype::Bf16.round(x));
        tensors.insert("sinks".to_string(), Tensor::round(&sinks, Dtype::F32));
    });
    let wide = bench.outputs("forward", &[]);
    assert_eq!(before["o"].shape, wide["o"].shape);
    bench.edit(|tensors| cast(tensors, "sinks", Dtype::Bf16));
    assert_eq!(bench.outputs("forward", &[]), wide);
    let simd = bench.outputs("forward", &["--tier", "simd"]);
    write_tensors(&bench.path("got.safetensors"), &simd).unwrap();
    assert_eq!(said(&check(&bench, "forward", &STRICT)).1, Some(0));
    // A bias with more digits than bf16 has is exact in the reference, and none that the tier takes.
    bench.edit(|tensors| {
        let bias = tensors["bias"].to_f64("bias").unwrap() + 1e-4;
        tensors.insert("bias".to_string(), Tensor::round(&bias, Dtype::F32));
    });
    assert_ne!(bench.outputs("forward", &[]), wide);
    let line = bench.refused("forward", &["--tier", "simd"]);
    assert!(line.starts_with("`bias` must hold bf16, as simd"), "{line}");
}

#[test]
fn the_bound_of_a_result_is_that_of_its_type() {
    let bench = Bench::new("options", "attention");
    let bound = |more: &[&str]| {
        let more = [&["--profile", "f32-strict"][..], more].concat();
        let outputs = bench.outputs("backward", &more);
        let sum = |name: &str| outputs[name].to_f64(name).unwrap().sum();
        [sum("dv.bound"), sum("dk.bound")]
    };
    let ([dv, dk], [own, other]) = (bound(&[]), bound(&["--stored", "dv=f32"]));
    // The roundoff of bf16 is most of the one, and none of the other. No o enters dv.
    assert!(own < 0.1 * dv && other == dk, "{own} {dv} {other} {dk}");
    let line = bench.refused("backward", &["--profile", "usual", "--stored", "dp=f32"]);
    assert!(line.contains("`dp` was given, but the pass returns no such"), "{line}");
}

#[test]
fn absent_and_extra_results_are_named() {
    let bench = answered("backward");
    change(&bench, |got| {
        got.remove("dsinks");
        let lse = got["dq"].clone();
        got.insert("scratch".to_string(), lse);
    });
    let line = refusal(&check(&bench, "backward", &STRICT));
    assert!(line.contains("`scratch` was given"), "{line}");
    let extra = ["--profile", "f32-strict", "--allow-extra"];
    let line = refusal(&check(&bench, "backward", &extra));
    assert!(line.contains("`dsinks` is missing"), "{line}");
    let both = ["--profile", "f32-strict", "--allow-extra", "--allow-missing"];
    let (text, status) = said(&check(&bench, "backward", &both));
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("Ignored: scratch."), "{text}");
    assert!(text.contains("Not judged, being absent: dsinks."), "{text}");
    change(&bench, |got| got.retain(|name, _| name == "scratch"));
    let line = refusal(&check(&bench, "backward", &both));
    assert!(line.ends_with("it holds no result of backward"), "{line}");
}

/// Scratch tensors have any type: what is ignored is not read.
#[test]
fn what_is_ignored_may_have_any_type() {
    let bench = answered("forward");
    let path = bench.path("got.safetensors");
    let outputs = read_tensors(&path, u64::MAX).unwrap();
    let Data::Bf16(numbers) = &outputs["o"].data else { panic!("bf16") };
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let (shape, end) = (&outputs["o"].shape, bytes.len());
    let header = format!(
        r#"{{"o":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[0,{end}]}},
        "scratch":{{"dtype":"I16","shape":[2],"data_offsets":[{end},{}]}}}}"#,
        end + 4
    );
    let length = (header.len() as u64).to_le_bytes();
    fs::write(&path, [&length, header.as_bytes(), &bytes, &[1, 0, 2, 0]].concat()).unwrap();
    let strict = ["--profile", "f32-strict", "--allow-missing"];
    let line = refusal(&check(&bench, "forward", &strict));
    assert!(line.contains("`scratch` must hold ") && line.ends_with("found I16"), "{line}");
    let (text, status) =
        said(&check(&bench, "forward", &[&strict[..], &["--allow-extra"]].concat()));
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("Ignored: scratch."), "{text}");
}

#[test]
fn sequences_may_be_tensors() {
    let problem = |sequences: &str| {
        format!(
            r#"{{ "algorithm": "attention", "batch": 1, "query_heads": 3, "key_heads": 1, "queries": 21,
            "keys": 21, "dim": 16, "sequences": {sequences} }}"#
        )
    };
    let bench = Bench::new("options", "attention");
    bench.edit(|tensors| {
        tensors.retain(|name, _| !matches!(name.as_str(), "bias" | "sinks"));
        let list = Tensor { shape: vec![3], data: Data::I64(vec![0, 5, 21]) };
        tensors.insert("cu_seqlens".to_string(), list);
    });
    let outputs = |sequences: &str| {
        fs::write(bench.path("p.json"), problem(sequences)).unwrap();
        bench.outputs("forward", &[])
    };
    let named = outputs(r#"{ "packed": { "cu_query": "cu_seqlens", "cu_key": "cu_seqlens" } }"#);
    // The tensors that are not named have to go.
    bench.edit(|tensors| {
        tensors.remove("cu_seqlens");
        let list = Tensor { shape: vec![1], data: Data::I64(vec![13]) };
        tensors.insert("lengths".to_string(), list);
    });
    let named_length = outputs(r#"{ "lengths": { "query": "lengths", "key": [21] } }"#);
    bench.edit(|tensors| drop(tensors.remove("lengths")));
    assert_eq!(named, outputs(r#"{ "packed": { "cu_query": [0, 5, 21], "cu_key": [0, 5, 21] } }"#));
    assert_eq!(named_length, outputs(r#"{ "lengths": { "query": [13], "key": [21] } }"#));
    let packed = r#"{ "packed": { "cu_query": "cu", "cu_key": [0, 5, 21] } }"#;
    fs::write(bench.path("p.json"), problem(packed)).unwrap();
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "in.safetensors: `cu` is missing: `sequences` names it");
    bench.edit(|tensors| {
        let floats = Tensor { shape: vec![3], data: Data::F32(vec![0.0, 5.0, 21.0]) };
        tensors.insert("cu".to_string(), floats);
    });
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "in.safetensors: `cu` must hold i64 or i32, found f32");
}

/// The results of loss.backward(), whose cotangent no file has.
#[test]
fn a_loss_without_a_cotangent_counts_once_where_it_is_a_mean() {
    let folder = fixture("dloss-absent");
    let path = |name: &str| folder.join(name).to_str().unwrap().to_string();
    let run = |problem: &str| {
        let (input, got) = (path("in.safetensors"), path("got.safetensors"));
        let mut words = vec!["check", "linear_cross_entropy", "forward_backward", "--problem"];
        words.extend([problem, "--in", &input, "--got", &got, "--profile", "bf16-flash"]);
        etalon(&words)
    };
    let (text, status) = said(&run(&path("problem.json")));
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("dloss is absent and counts as 1, as for loss.backward()."), "{text}");
    let other = tempfile::tempdir().unwrap();
    let sum = other.path().join("sum.json");
    let text = fs::read_to_string(path("problem.json")).unwrap();
    fs::write(&sum, text.replace("\"tokens\"", "\"reduction\": \"sum\", \"tokens\"")).unwrap();
    let line = refusal(&run(sum.to_str().unwrap()));
    assert!(
        line.contains("`dloss` is missing: the gradients are those of the loss times"),
        "{line}"
    );
}

/// An o or lse that a forward pass stored in fewer digits widens the bounds of the gradients.
#[test]
fn what_a_forward_pass_stored_counts_in_its_type() {
    let bench = Bench::new("options", "attention");
    let before = bench.outputs("backward", &["--profile", "f32-strict"]);
    let forward = bench.outputs("forward", &["--tier", "simd"]);
    let with = |name: &str, dtype: Dtype| {
        bench.edit(|tensors| {
            let values = forward[name].to_f64(name).unwrap();
            tensors.insert(name.to_string(), Tensor::round(&values, dtype));
        });
        let outputs = bench.outputs("backward", &["--profile", "f32-strict"]);
        bench.edit(|tensors| drop(tensors.remove(name)));
        outputs
    };
    // Types that are usual, or more exact, change nothing.
    for (name, dtype) in [("lse", Dtype::F32), ("o", Dtype::Bf16), ("o", Dtype::F32)] {
        assert_eq!(with(name, dtype), before, "{name} in {dtype}");
    }
    let narrow = with("lse", Dtype::Bf16);
    let sum = |outputs: &Tensors| outputs["dv.bound"].to_f64("dv.bound").unwrap().sum();
    assert!(sum(&narrow) > 1.5 * sum(&before), "{} {}", sum(&narrow), sum(&before));
    assert_eq!(narrow["dv"], before["dv"], "the exact results are the same");
    let stored = read_tensors(&bench.path("in.safetensors"), u64::MAX).unwrap();
    assert!(!stored.contains_key("lse"));
}

/// Logits and their gradients in bf16, everywhere, as Liger stores them: a profile that declares so passes
/// them, and one with exact logits does not.
#[test]
fn stored_logits_pass_where_they_are_declared() {
    let folder = fixture("stored-logits");
    let path = |name: &str| folder.join(name).to_str().unwrap().to_string();
    let [problem, input, got] = ["problem.json", "in.safetensors", "got.safetensors"].map(path);
    let run = |profile: &str| {
        let mut words = vec!["check", "linear_cross_entropy", "forward_backward"];
        words.extend(["--problem", &problem, "--in", &input, "--got", &got, "--profile", profile]);
        etalon(&words)
    };
    let (text, status) = said(&run("bf16-chunked"));
    assert_eq!(status, Some(0), "{text}");
    assert_eq!(run("f32-strict").status.code(), Some(1));
    let own = tempfile::tempdir().unwrap();
    let file = own.path().join("mine.json");
    fs::write(&file, r#"{ "score_store": "bf16", "ds_store": "bf16" }"#).unwrap();
    let (text, status) = said(&run(file.to_str().unwrap()));
    assert_eq!(status, Some(0), "{text}");
}
