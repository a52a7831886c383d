//! The real binary on real files.

use etalon_conformance::cases::{Depth, Spec, specs};
use etalon_conformance::tensor::{Data, Tensor, Tensors};
use etalon_conformance::vectors::{read_tensors, write_tensors};
use etalon_problem::{Algorithm, Dtype};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::{TempDir, tempdir};

#[path = "cli/check.rs"]
mod check;
#[path = "cli/cuda.rs"]
mod cuda;
#[path = "cli/hostile.rs"]
mod hostile;
#[path = "cli/probe.rs"]
mod probe;

fn etalon(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_etalon")).args(arguments).output().expect("etalon starts")
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A folder with a problem and its operands, which a test may spoil before it evaluates them.
struct Bench {
    folder: TempDir,
    algorithm: &'static str,
}

impl Bench {
    fn new(name: &str, algorithm: &'static str) -> Self {
        let folder = tempdir().unwrap();
        for (from, to) in [("json", "p.json"), ("in.safetensors", "in.safetensors")] {
            fs::copy(fixture(&format!("{name}.{from}")), folder.path().join(to)).unwrap();
        }
        Bench { folder, algorithm }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn eval(&self, pass: &str, more: &[&str]) -> Output {
        let paths = ["p.json", "in.safetensors", "out.safetensors"].map(|name| self.path(name));
        let [problem, input, out] = paths.each_ref().map(|path| path.to_str().unwrap());
        let mut arguments =
            vec!["eval", self.algorithm, pass, "--problem", problem, "--in", input, "--out", out];
        arguments.extend(more);
        etalon(&arguments)
    }

    fn outputs(&self, pass: &str, more: &[&str]) -> Tensors {
        let output = self.eval(pass, more);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), said.as_str()), (Some(0), ""));
        read_tensors(&self.path("out.safetensors"), u64::MAX).unwrap()
    }

    fn edit(&self, change: impl FnOnce(&mut Tensors)) {
        let path = self.path("in.safetensors");
        let mut tensors = read_tensors(&path, u64::MAX).unwrap();
        change(&mut tensors);
        write_tensors(&path, &tensors).unwrap();
    }

    fn edit_problem(&self, from: &str, to: &str) {
        let text = fs::read_to_string(self.path("p.json")).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(self.path("p.json"), text.replace(from, to)).unwrap();
    }

    /// Evaluates what cannot be evaluated: exit status 2, one line on stderr, no file more than
    /// before. Returns the line, with the folder left out.
    fn refused(&self, pass: &str, more: &[&str]) -> String {
        let before = self.files();
        let output = self.eval(pass, more);
        assert_eq!(self.files(), before, "a file was left behind");
        let line = refusal(&output);
        line.replace(&format!("{}/", self.folder.path().display()), "")
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// The one line on stderr of a refused command.
fn refusal(output: &Output) -> String {
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty());
    let line = said.strip_suffix('\n').expect("a whole line");
    assert!(!line.contains('\n'), "more than one line: {said}");
    line.strip_prefix("error: ").expect("an error").to_string()
}

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
fn a_wrong_type_is_told_with_both_types() {
    let bench = Bench::new("options", "attention");
    let f32s = |tensor: &Tensor| {
        let values = tensor.to_f64("").unwrap();
        Tensor::round(&values, Dtype::F32)
    };
    bench.edit(|tensors| {
        let wide = f32s(&tensors["k"]);
        tensors.insert("k".to_string(), wide);
    });
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "in.safetensors: `k` must hold bf16, as q does, found f32");

    let bench = Bench::new("options", "attention");
    bench.edit(|tensors| {
        let low = Tensor::round(&tensors["sinks"].to_f64("").unwrap(), Dtype::Bf16);
        tensors.insert("sinks".to_string(), low);
    });
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "in.safetensors: `sinks` must hold f32, as q holds bf16, found bf16");

    let bench = Bench::new("causal", "attention");
    bench.edit(|tensors| {
        let q = tensors.get_mut("q").unwrap();
        q.data = Data::I64(vec![1; q.shape.iter().product()]);
    });
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "in.safetensors: `q` must hold f64, f32, bf16 or f16, found i64");
}

#[test]
fn heads_that_do_not_divide_are_refused() {
    let bench = Bench::new("causal", "attention");
    bench.edit_problem("\"query_heads\": 4", "\"query_heads\": 5");
    let line = bench.refused("forward", &[]);
    assert_eq!(line, "p.json: `query_heads` must be a multiple of key_heads (2), found 5");
}

#[test]
fn an_unknown_key_is_refused() {
    let bench = Bench::new("causal", "attention");
    bench.edit_problem("\"batch\"", "\"colour\": 1, \"batch\"");
    let line = bench.refused("forward", &[]);
    assert!(line.starts_with("p.json: no problem: unknown field `colour`, expected"), "{line}");
    let bench = Bench::new("options", "attention");
    bench.edit_problem("\"left\"", "\"links\"");
    let line = bench.refused("forward", &[]);
    assert!(line.starts_with("p.json: no problem: unknown field `links`, expected"), "{line}");
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
    assert_eq!(line, "p.json: no problem: expected value at line 1 column 1");

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
    assert!(line.starts_with("`profile` must be one of f64, f32-strict, f32-tf32"), "{line}");
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
    let line = bench.refused("jvp", &["--profile", "bf16-flash"]);
    assert!(line.ends_with("`bf16-flash` stores weights in a low precision"), "{line}");
    assert_eq!(bench.outputs("jvp", &[]).len(), 2, "without a profile it is evaluated");
}

#[test]
fn verify_refuses_before_it_runs() {
    let folder = tempdir().unwrap();
    let absent = folder.path().join("absent/report.xml");
    let report = format!("junit={}", absent.display());
    for (arguments, part) in [
        (["--report", report.as_str()], "absent/report.xml: cannot be written: "),
        (["--report", "xml=report.xml"], "`report` must be junit=PATH, json=PATH or md=PATH"),
        (
            ["--depth", "deep"],
            "'deep' for '--depth <DEPTH>' [possible values: smoke, core, full, soak]",
        ),
        (["--tier", "abacus"], "`tier` must be one of reference, simd/"),
        (["--level", "avx9"], "`tier` must be one of reference, simd/"),
        (["--algorithm", "attentoin"], "[possible values: attention, attention_lse"),
        (["--seed", "dice"], "`seed` must be a number below 2⁶⁴"),
        (["--seed", "ff"], "`seed` must be a number below 2⁶⁴"),
    ] {
        let start = std::time::Instant::now();
        let line = refusal(&etalon(&["verify", arguments[0], arguments[1]]));
        assert!(line.contains(part), "{line}");
        // A core run takes many times as long.
        assert!(start.elapsed().as_secs() < 5, "{arguments:?}: refused only after the run");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A whole core run of the cheapest tier on the cheaper algorithm, with every report.
#[test]
fn verify_passes_and_reports() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let report = |kind: &str| format!("{kind}={}", path(kind).display());
    let [junit, json, md] = ["junit", "json", "md"].map(report);
    let output = etalon(&[
        "verify",
        "--tier",
        "simd",
        "--level",
        "portable",
        "--algorithm",
        "attention_lse",
        "--depth",
        "smoke",
        "--seed",
        "0xFf",
        "--progress",
        "0",
        "--report",
        &junit,
        "--report",
        &json,
        "--report",
        &md,
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
    let progress = String::from_utf8(output.stderr).unwrap();
    assert!(progress.lines().all(|line| line.contains(" s: attention_lse/")), "{progress}");
    assert!(progress.lines().count() > 0, "a line for each case, without a bar");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("simd/portable") && !table.contains("simd/avx"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
    let last = table.lines().last().unwrap();
    assert!(last.starts_with("PASSED: ") && last.contains(" checks, 0 negative, "), "{last}");
    let file: serde_json::Value = serde_json::from_slice(&fs::read(path("json")).unwrap()).unwrap();
    let records = file["records"].as_array().unwrap();
    assert_eq!(
        (&file["passed"], &file["schema"], &file["seed"]),
        (&true.into(), &1.into(), &255.into())
    );
    assert_eq!((&file["depth"], &file["profile"]), (&"smoke".into(), &"strict".into()));
    assert!(file["date"].as_str().unwrap().ends_with('Z') && file["threads"].as_u64() > Some(0));
    for pass in ["forward", "backward"] {
        let checked = |record: &&serde_json::Value| {
            (&record["pass"], &record["check"], &record["verdict"])
                == (&pass.into(), &"bound".into(), &"pass".into())
        };
        assert!(records.iter().filter(checked).count() >= 2, "{pass}: hardly a case was checked");
    }
    let xml = fs::read_to_string(path("junit")).unwrap();
    assert!(
        xml.contains(r#"failures="0" errors="0""#) && xml.contains("simd/portable attention_lse")
    );
    let tests = xml.matches("<testcase ").count();
    assert!((20..400).contains(&tests), "{tests}: a test for each pass and law");
    assert!(fs::read_to_string(path("md")).unwrap().starts_with("# etalon: passed\n"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "three reports and nothing else");
}

#[test]
fn a_case_is_explained_in_words() {
    let mut specs = specs(Algorithm::Attention, Depth::Core, 0);
    let name = specs.next().unwrap().to_string();
    let output = etalon(&["explain", &name]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    for part in
        [name.as_str(), "a query sees ", "\"algorithm\": \"attention\"", "Laws of forward: "]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    for part in ["The simd tier, simd/", "backward", "fused", "chosen", "sums of dq: "] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let line = refusal(&etalon(&["explain", "attention/f32/diagonal"]));
    assert!(line.contains("`case` must be algorithm/dtype/mask/"), "{line}");
}

#[test]
fn the_memory_of_a_problem_is_explained() {
    // What the seed of the project computed for its partials of dq: 128 MiB and 8 GiB. The sums of
    // one head are 8 B·Hq times smaller, and one thread works on one head at a time.
    for (length, partials, sums) in [(2048, "128 MiB", "1.03 MiB"), (8192, "8.00 GiB", "4.03 MiB")]
    {
        let path =
            format!("{}/../../docs/examples/attention-{length}.json", env!("CARGO_MANIFEST_DIR"));
        let output = etalon(&["explain", "--problem", &path, "--threads", "1"]);
        let text = String::from_utf8(output.stdout).unwrap();
        let end = format!("every 128 keys would hold {partials}; this one keeps {sums} in sums");
        assert!(text.contains(&end), "{text}");
        let poor = ["explain", "--problem", &path, "--threads", "1", "--budget", "1000000"];
        let text = String::from_utf8(etalon(&poor).stdout).unwrap();
        let chosen = text.lines().find(|line| line.contains("chosen")).unwrap();
        assert!(chosen.contains("separate"), "{text}");
    }
    let line = refusal(&etalon(&["explain"]));
    assert!(line.contains("--problem"), "{line}");
}

#[test]
fn the_chunks_of_a_problem_are_explained() {
    let path = format!("{}/../../docs/examples/linear-4096.json", env!("CARGO_MANIFEST_DIR"));
    let chunks = ["explain", "--problem", &path, "--threads", "1", "--blocking", "80x24"];
    let text = String::from_utf8(etalon(&chunks).stdout).unwrap();
    assert!(text.contains("backward: chunks of 80 tokens, micro-chunks of 24"), "{text}");
    // 52 chunks, with states of 16 KiB: 53 of them are less than a megabyte.
    assert!(text.contains("a state kept every chunk; "), "{text}");
    assert!(text.contains("  step: workspace "), "{text}");
    // What the seed of the project printed as 76 KB: with micro-chunks of 32, 96 KiB at D = E = 64.
    let row = text.lines().find(|line| line.trim_start().starts_with("99 KiB")).unwrap();
    assert!(row.contains("96.0 KiB"), "{text}");
}

#[test]
fn the_sparsity_of_tensors_is_explained() {
    let mut specs = specs(Algorithm::LazyAttention, Depth::Core, 0);
    let plain = |spec: &Spec| spec.dtype == Dtype::Bf16 && spec.problem().arrays().is_empty();
    let case = specs.find(plain).unwrap().build();
    let folder = tempdir().unwrap();
    let [problem, input] = ["p.json", "in.safetensors"].map(|name| folder.path().join(name));
    fs::write(&problem, serde_json::to_string(&case.problem).unwrap()).unwrap();
    write_tensors(&input, &case.inputs).unwrap();
    let [problem, input] = [&problem, &input].map(|path| path.to_str().unwrap());
    let explain = ["explain", "--problem", problem, "--threads", "1"];
    let with = etalon(&[&explain[..], &["--in", input]].concat());
    let text = String::from_utf8(with.stdout).unwrap();
    for part in ["active pairs, of the visible ones", "(E46)", "measured", "at tau = 0"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let without = String::from_utf8(etalon(&explain).stdout).unwrap();
    assert!(without.contains("backward") && !without.contains("active pairs"), "{without}");
}

#[test]
fn a_bench_leaves_its_figures() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("bench.json");
    let json = path.to_str().unwrap();
    let size = ["--length", "32", "--dim", "16", "--heads", "2", "--seconds", "0"];
    let output = etalon(&[&["bench", "--threads", "1", "--json", json][..], &size].concat());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let file: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let figures = file["figures"].as_array().unwrap();
    // Four passes of two algorithms and three of lazy attention, with two masks; four of linear attention
    // and three of linear cross-entropy.
    assert_eq!(figures.len(), 29);
    let linear: Vec<_> =
        figures.iter().filter(|figure| figure["algorithm"] == "linear_attention").collect();
    // 2 heads of 32 tokens, of which a chunk has all.
    assert_eq!(linear[0]["flops"], 2 * 32 * (4 * 16 * 16 + 32 * (16 + 16)));
    assert_eq!(linear[2]["pass"], "double_backward");
    assert_eq!(linear[2]["flops"], 2 * 32 * (36 * 16 * 16 + 32 * (8 * 16 + 7 * 16)));
    assert!(linear.iter().any(|figure| figure["gigabytes"]["memory"].as_f64() > Some(0.0)));
    assert!(file["peak_gflops"].as_f64().unwrap() > 0.0);
    let full = &figures[0];
    assert_eq!((&full["algorithm"], &full["mask"]), (&"attention".into(), &"full".into()));
    assert_eq!(full["flops"], 2 * 2 * 2 * 32 * 32 * 16); // 2 heads, q·k and p·v
    let quartiles = ["min_ns", "lower_quartile_ns", "median_ns", "upper_quartile_ns", "max_ns"];
    let times = quartiles.map(|key| full[key].as_u64().unwrap());
    assert!(times[0] > 0 && times.is_sorted() && full["runs"].as_u64() >= Some(3), "{full}");
    let chosen = ["--pass", "jvp", "--mask", "window=8", "--blocking", "16x16"];
    let output = etalon(&[&["bench", "--threads", "1"][..], &size, &chosen].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows: Vec<&str> = text.lines().filter(|line| line.contains("window=8")).collect();
    assert!(rows.len() == 2 && rows.iter().all(|row| row.contains("jvp")), "{text}");
    assert!(rows.iter().all(|row| row.matches(" %").count() == 2), "spread and share: {text}");
    let table = text.lines().skip(1).take_while(|line| !line.contains(" batch element"));
    assert!(table.into_iter().all(|line| line.chars().count() <= 100), "{text}");
    let modes = ["--pass", "backward", "--mode", "separate,fused,gradient", "--mask", "full"];
    let options = ["--softcap", "5", "--bias", "--tune"];
    let output = etalon(&[&["bench", "--threads", "1"][..], &size, &modes, &options].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let tuned = text.lines().filter(|line| line.contains("Options"));
    let modes =
        "two modes of attention, three of attention_lse and of lazy_attention, linear_attention";
    assert_eq!(tuned.count(), 9, "{modes}: {text}");
    let line = refusal(&etalon(&["bench", "--dtype", "f64"]));
    assert!(line.starts_with("invalid value 'f64' for '--dtype <DTYPE>'"), "{line}");
    let line = refusal(&etalon(&["bench", "--json", folder.path().to_str().unwrap()]));
    assert!(line.ends_with("cannot be written: it is not a regular file"), "{line}");
}

/// The published schema is the one of the types; `cargo run -- list --schema` prints it.
#[test]
fn the_published_schema_is_current() {
    let output = etalon(&["list", "--schema"]);
    let printed = String::from_utf8(output.stdout).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema/problem.schema.json");
    let published = fs::read_to_string(path).unwrap();
    assert_eq!(printed, published, "run `etalon list --schema > docs/schema/problem.schema.json`");
}

#[test]
fn help_and_version_are_no_errors() {
    let help = etalon(&["--help"]).stdout;
    for arguments in [&["--help"][..], &["--version"], &["eval", "--help"], &["list"], &[]] {
        let output = etalon(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(output.stderr.is_empty() && !output.stdout.is_empty(), "{arguments:?}");
        assert!(!arguments.is_empty() || output.stdout == help, "alone it prints its help");
    }
    let line = refusal(&etalon(&["verfiy"]));
    assert!(line.contains("; a similar subcommand exists: 'verify'"), "{line}");
    refusal(&etalon(&["conjure"]));
}

#[test]
fn lists_fit_the_page_and_break_no_name() {
    let text = String::from_utf8(etalon(&["list"]).stdout).unwrap();
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let words: Vec<&str> = text.split_whitespace().collect();
    for word in
        ["linear_cross_entropy", "double_backward", "[cot_final_state]", "[V,", "double-double"]
    {
        assert!(words.iter().any(|found| found.ends_with(word)), "{word} is not in\n{text}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn what_cannot_be_printed_is_an_error() {
    for arguments in [&["list"][..], &["--help"], &[]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_etalon"));
        let output = command.args(arguments).stdout(full).output().unwrap();
        let line = refusal(&output);
        assert!(line.starts_with("standard output cannot be written: "), "{arguments:?}: {line}");
    }
}

/// The cheapest mutants of the zoo, and names that it does not have.
#[test]
fn the_zoo_shows_what_was_named() {
    let mutant = "class-tail-dropped";
    let chosen =
        ["zoo", mutant, "--algorithm", "linear_cross_entropy", "--verbose", "--progress", "0"];
    let output = etalon(&chosen);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.lines().all(|line| line.starts_with("  ") || line.chars().count() <= 100),
        "{text}"
    );
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("PASSED: 1 of 1 mutants fall "), "{last}");
    assert!(last.contains("0 of 0 controls"), "{last}");
    let progress = String::from_utf8(output.stderr).unwrap();
    assert!(progress.contains(" s: linear_cross_entropy/"), "{progress}");
    let line = refusal(&etalon(&["zoo", "class-tail-droped"]));
    assert_eq!(
        line,
        format!("`class-tail-droped` is no mutant and no control; did you mean {mutant:?}?")
    );
    let line = refusal(&etalon(&["zoo", mutant, "--algorithm", "attention"]));
    assert!(line.starts_with("no mutant is left"), "{line}");
}
