//! Every command that prints a table, on a terminal of 80 columns.

use super::Bench;
use etalon_conformance::tensor::Tensor;
use etalon_conformance::vectors::{read_tensors, write_tensors};
use etalon_problem::Dtype;
use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::tempdir;

/// What a command prints where the environment states 80 columns.
fn at_80(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_etalon"));
    let output = command.args(arguments).env("COLUMNS", "80").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(matches!(output.status.code(), Some(0 | 1 | 3)), "{arguments:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// No line is wider, but for those that are to be copied: a command, or options.
fn fits(arguments: &[&str]) {
    let text = at_80(arguments);
    let copied = |line: &&str| line.starts_with("  etalon ") || line.contains("Options");
    let mut wide = text.lines().filter(|line| !copied(line) && line.chars().count() > 80);
    assert_eq!(wide.next(), None, "{arguments:?}\n{text}");
    assert!(text.contains("──────"), "{arguments:?} prints a table\n{text}");
}

#[test]
fn list_verify_zoo_and_power_fit() {
    fits(&["list"]);
    let algorithms = "attention_lse,linear_cross_entropy";
    let tier = ["--tier", "simd", "--depth", "smoke", "--algorithm", algorithms];
    fits(&[&["verify"][..], &tier].concat());
    fits(&["zoo", "class-tail-dropped", "--algorithm", "linear_cross_entropy"]);
    fits(&["power", "--algorithm", "attention_lse", "--profile", "f32-tf32"]);
}

#[test]
fn check_and_probe_fit() {
    let bench = Bench::new("causal", "attention");
    let paths = ["p.json", "in.safetensors", "got.safetensors"].map(|name| bench.path(name));
    let [problem, input, got] = paths.each_ref().map(|path| path.to_str().unwrap());
    let mut outputs = bench.outputs("forward", &["--tier", "simd"]);
    let wrong = outputs["o"].to_f64("o").unwrap() * 1.5;
    outputs.insert("o".to_string(), Tensor::round(&wrong, Dtype::F32));
    write_tensors(&paths[2], &outputs).unwrap();
    fits(&["check", "attention", "forward", "--problem", problem, "--in", input, "--got", got]);

    let folder = tempdir().unwrap();
    let probes = folder.path().join("probes").to_str().unwrap().to_string();
    at_80(&["probe", "--out", &probes, "--problem", problem, "--pass", "forward"]);
    for entry in fs::read_dir(&probes).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            answer(&entry);
        }
    }
    fits(&["probe", "--check", &probes]);
}

fn answer(folder: &Path) {
    let paths = ["problem.json", "inputs.safetensors", "outputs.safetensors"];
    let paths = paths.map(|name| folder.join(name).to_str().unwrap().to_string());
    let [problem, input, out] = paths.each_ref().map(String::as_str);
    at_80(&["eval", "attention", "forward", "--problem", problem, "--in", input, "--out", out]);
    assert!(!read_tensors(Path::new(out), u64::MAX).unwrap().is_empty());
}

#[test]
fn explain_and_bench_fit() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("p.json");
    let heads = r#""batch": 2, "query_heads": 8, "key_heads": 2"#;
    for problem in [
        format!(
            r#"{{ "algorithm": "attention", {heads}, "queries": 4096, "keys": 4096, "dim": 128 }}"#
        ),
        format!(
            r#"{{ "algorithm": "lazy_attention", {heads}, "queries": 512, "keys": 512, "dim": 64 }}"#
        ),
        format!(
            r#"{{ "algorithm": "linear_attention", {heads}, "tokens": 4096, "dim": 128, "decay": "per_token" }}"#
        ),
        r#"{ "algorithm": "linear_cross_entropy", "tokens": 4096, "dim": 1024, "vocab": 128256 }"#
            .to_string(),
    ] {
        fs::write(&path, problem).unwrap();
        fits(&[
            "explain",
            "--problem",
            path.to_str().unwrap(),
            "--dtype",
            "bf16",
            "--threads",
            "1",
        ]);
    }
    let size = ["--length", "32", "--dim", "16", "--heads", "2", "--seconds", "0"];
    let chosen = ["--pass", "forward,backward", "--mask", "full,segments=1024", "--tune"];
    fits(&[&["bench", "--threads", "1"][..], &size, &chosen].concat());
}
