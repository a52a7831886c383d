//! `etalon trace`, and `etalon check --trace`: files, errors, what is said, and reports.

use super::{Bench, etalon, refusal};
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::vectors::{read_trace, trace_to_bytes, write_tensors};
use etalon_problem::{Dtype, Walk};
use std::path::Path;
use std::process::{Command, Output};
use std::{fs, str};

fn command(bench: &Bench, name: &str, pass: &str, more: &[&str]) -> Output {
    let paths = ["p.json", "in.safetensors"].map(|name| bench.path(name));
    let [problem, input] = paths.each_ref().map(|path| path.to_str().unwrap());
    let arguments = [name, bench.algorithm, pass, "--problem", problem, "--in", input];
    etalon(&[&arguments[..], more].concat())
}

fn trace(bench: &Bench, pass: &str, more: &[&str]) -> Output {
    let out = bench.path("trace.safetensors");
    command(bench, "trace", pass, &[&["--out", out.to_str().unwrap()], more].concat())
}

fn check(bench: &Bench, pass: &str, more: &[&str]) -> Output {
    let path = bench.path("trace.safetensors");
    command(bench, "check", pass, &[&["--trace", path.to_str().unwrap()], more].concat())
}

fn said(output: &Output, status: i32) -> String {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let wrong = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{text}{wrong}");
    text
}

/// A text without its line ends.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Changes the trace of a bench.
fn change(bench: &Bench, change: impl FnOnce(&mut Tensors, &mut Walk)) {
    let path = bench.path("trace.safetensors");
    let (mut tensors, mut walk) = read_trace(&path, u64::MAX).unwrap();
    change(&mut tensors, &mut walk);
    fs::write(&path, trace_to_bytes(&path, &tensors, &walk).unwrap()).unwrap();
}

/// The tensors in f32, as a kernel would write them.
fn in_f32(tensors: &mut Tensors) {
    for (name, x) in tensors {
        *x = Tensor::store(&x.to_f64(name).unwrap(), Stored::Float(Dtype::F32));
    }
}

#[test]
fn a_trace_is_right_as_f32_and_a_changed_step_is_named() {
    let bench = Bench::new("causal", "attention");
    let text = said(&trace(&bench, "backward", &["--tile", "4x3", "--key-order", "descending"]), 0);
    assert!(text.contains("  lse    [C, B, Hq, N] ") && text.contains(" --trace FILE"), "{text}");
    let first = fs::read(bench.path("trace.safetensors")).unwrap();
    trace(&bench, "backward", &["--tile", "4x3", "--key-order", "descending"]);
    assert_eq!(first, fs::read(bench.path("trace.safetensors")).unwrap(), "the same bytes again");
    change(&bench, |tensors, _| in_f32(tensors));
    let text = said(&check(&bench, "backward", &[]), 0);
    let last = text.lines().last().unwrap();
    let words = "PASSED: 7 tensors of the trace of attention backward in f32 within the bounds of f32-strict";
    assert_eq!(last, words);
    change(&bench, |tensors, _| {
        let x = tensors.get_mut("dS").unwrap();
        let values = x.to_f64("dS").unwrap() * 1.01;
        *x = Tensor::store(&values, Stored::Float(Dtype::F32));
    });
    let [json, html] = ["r.json", "r.html"].map(|name| bench.path(name));
    let reports = [format!("json={}", json.display()), format!("html={}", html.display())];
    let text =
        said(&check(&bench, "backward", &["--report", &reports[0], "--report", &reports[1]]), 1);
    let flat = flat(&text);
    assert!(flat.contains("First off: ") && flat.contains(", step dS: error "), "{text}");
    assert!(flat.contains("Where p is right, dP and δ are left"), "{text}");
    let last = text.lines().last().unwrap();
    assert!(
        last.starts_with("FAILED: 1 of 7 tensors of the trace of attention backward"),
        "{text}"
    );
    let json: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let first = &json["trace"]["first"];
    assert_eq!((json["status"].as_str(), first["step"].as_str()), (Some("failed"), Some("dS")));
    assert!(first["query_tile"]["number"].is_u64() && first["worst"]["index"].is_array(), "{json}");
    assert_eq!(json["trace"]["walk"]["keys"].as_str(), Some("descending"));
    let html = fs::read_to_string(html).unwrap();
    assert!(html.contains("step dS: error ") && html.contains("<svg"));
}

#[test]
fn the_size_and_the_parts_of_a_trace_are_chosen() {
    let bench = Bench::new("causal", "attention");
    let text = said(
        &trace(
            &bench,
            "forward",
            &["--tile", "4x4", "--heads", "1", "--rows", "0..2", "--only", "o"],
        ),
        0,
    );
    assert!(text.contains("  o      [C, B, Hq, N, E] ") && !text.contains("lse"), "{text}");
    let large = trace(&bench, "forward", &["--tile", "4x4", "--limit", "0"]);
    assert!(refusal(&large).contains("more than 0 MiB: take some --heads"), "{}", refusal(&large));
    for (more, words) in [
        (&["--tile", "4x4", "--heads", "99"][..], "`heads` must be ascending numbers below"),
        (&["--tile", "4x4", "--rows", "0-2"], "START..END, as in 0..256"),
        (
            &["--tile", "4x4", "--only", "dq"],
            "`dq` was given, but a trace of attention forward holds lse, o, p",
        ),
        (&["--chunk", "4"], "`tile` is missing"),
        (&[], "`tile` is missing"),
    ] {
        let found = refusal(&trace(&bench, "forward", more));
        assert!(found.contains(words), "{found}");
    }
}

#[test]
fn a_file_that_is_no_trace_is_refused() {
    let bench = Bench::new("causal", "attention");
    trace(&bench, "forward", &["--tile", "4x4"]);
    change(&bench, |tensors, _| _ = tensors.insert("acc".to_string(), tensors["o"].clone()));
    let found = refusal(&check(&bench, "forward", &[]));
    assert!(
        found.contains("`acc` was given, but a trace of attention forward holds lse, o, p"),
        "{found}"
    );
    change(&bench, |tensors, _| tensors.clear());
    assert!(refusal(&check(&bench, "forward", &[])).contains("holds none of lse, o, p"));
    let found = refusal(&check(&bench, "forward", &["--profile", "auto"]));
    assert!(found.contains("judges results, no trace"), "{found}");
    let found = refusal(&check(&bench, "forward", &["--only", "o"]));
    assert!(found.contains("cannot be used with"), "{found}");
    write_tensors(&bench.path("trace.safetensors"), &Tensors::new()).unwrap();
    let found = refusal(&check(&bench, "forward", &[]));
    assert!(found.contains("its metadata has no `trace`, such as"), "{found}");
}

/// Changes of a line of the example, and what is said of them.
const MUTANTS: [(&str, &str, &str, &str); 6] = [
    ("attention", "", "", ""),
    ("linear", "", "", ""),
    (
        "attention",
        "for t, j in seen:\n            s = score(j)",
        "for t, j in (x for x in seen if x[0] != 1 or i != 64):\n            s = score(j)",
        "head 0, query tile 2 (rows 64..96), key tile 1 (keys 32..64), step lse: wrong",
    ),
    (
        "attention",
        "acc * a +",
        "acc * (a if t != 2 else 1) +",
        "head 0, query tile 2 (rows 64..96), key tile 2 (keys 64..96), step o: error",
    ),
    (
        "attention",
        " - delta)",
        ")",
        "head 0, query tile 0 (rows 0..32), key tile 0 (keys 0..32), step dS: error",
    ),
    (
        "linear",
        "np.exp(g * chunk)",
        "np.exp(g * chunk * (2 if c == 64 else 1))",
        "head 0, chunk 2 (tokens 64..96), step state: error",
    ),
];

#[test]
fn the_example_passes_and_its_mutants_are_named() {
    let has = |x: &&str| {
        Command::new(x).args(["-c", "import numpy"]).output().is_ok_and(|x| x.status.success())
    };
    let Some(python) = ["python3", "python"].into_iter().find(has) else {
        println!("skipped: no Python with NumPy");
        return;
    };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/trace/tiled_numpy.py");
    let source = fs::read_to_string(source).unwrap();
    assert!(source.lines().count() <= 60);
    for (case, line, mutant, words) in MUTANTS {
        let folder = tempfile::tempdir().unwrap();
        assert!(source.contains(line), "{line}");
        let program = folder.path().join("mutant.py");
        fs::write(&program, source.replacen(line, mutant, 1)).unwrap();
        let ran = Command::new(python).arg(&program).arg(folder.path()).output().unwrap();
        assert!(ran.status.success(), "{}", str::from_utf8(&ran.stderr).unwrap());
        let files = [".json", ".safetensors", "_trace.safetensors"]
            .map(|name| folder.path().join(format!("{case}{name}")).to_str().unwrap().to_string());
        let [problem, input, trace] = files.each_ref().map(String::as_str);
        let asked = match case {
            "linear" => ["linear_attention", "forward"],
            _ => ["attention", "backward"],
        };
        let files = ["--problem", problem, "--in", input, "--trace", trace];
        let output = etalon(&[&["check"], &asked[..], &files[..]].concat());
        let text = said(&output, i32::from(!words.is_empty()));
        assert!(words.is_empty() || flat(&text).contains(&format!("First off: {words}")), "{text}");
    }
}
