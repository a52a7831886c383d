//! The real binary on real files.

use etalon_conformance::tensor::Tensors;
use etalon_conformance::vectors::{read_tensors, write_tensors};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::{TempDir, tempdir};

// Its scripts are for a shell, and its stand-ins for Linux on x86-64.
#[cfg(target_os = "linux")]
#[path = "cli/action.rs"]
mod action;
#[path = "cli/bench.rs"]
mod bench;
#[path = "cli/check.rs"]
mod check;
#[path = "cli/columns.rs"]
mod columns;
#[path = "cli/conform.rs"]
mod conform;
#[path = "cli/cuda.rs"]
mod cuda;
#[path = "cli/eval.rs"]
mod eval;
#[path = "cli/explain.rs"]
mod explain;
#[path = "cli/hostile.rs"]
mod hostile;
#[path = "cli/probe.rs"]
mod probe;
#[path = "cli/reports.rs"]
mod reports;
#[path = "cli/serve.rs"]
mod serve;
#[cfg(unix)]
#[path = "cli/tiny.rs"]
mod tiny;
#[path = "cli/trace.rs"]
mod trace;
#[path = "cli/types.rs"]
mod types;
#[path = "cli/vectors.rs"]
mod vectors;
#[path = "cli/verify.rs"]
mod verify;
#[path = "cli/words.rs"]
mod words;

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

#[test]
fn verify_refuses_before_it_runs() {
    let folder = tempdir().unwrap();
    let absent = folder.path().join("absent/report.xml");
    let report = format!("junit={}", absent.display());
    for (arguments, part) in [
        (["--report", report.as_str()], "absent/report.xml: cannot be written: "),
        (
            ["--report", "xml=report.xml"],
            "`report` must be html=PATH, md=PATH, junit=PATH, json=PATH, annotations=PATH or badge=PATH",
        ),
        (
            ["--depth", "deep"],
            "'deep' for '--depth <DEPTH>' [possible values: smoke, core, full, soak]",
        ),
        (["--tier", "abacus"], "`tier` must be one of reference, simd/"),
        (["--level", "avx9"], "`tier` must be one of reference, simd/"),
        (["--algorithm", "attentoin"], "[possible values: attention, attention_lse"),
        (["--seed", "dice"], "`seed` must be a number below 2⁶⁴"),
        (["--seed", "ff"], "`seed` must be a number below 2⁶⁴"),
        (["--case", "attention/f32/causal"], "`case` must be algorithm/dtype/"),
        (["--law", "bound"], "the following required arguments were not provided: --case"),
    ] {
        let start = std::time::Instant::now();
        let line = refusal(&etalon(&["verify", arguments[0], arguments[1]]));
        assert!(line.contains(part), "{line}");
        // A core run takes many times as long.
        assert!(start.elapsed().as_secs() < 5, "{arguments:?}: refused only after the run");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn verify_judges_named_cases_by_named_laws() {
    let cases = "attention_lse/f32/causal/plain/square/dense/generic/dlse/0,\
                 linear_cross_entropy/f32/small/plain/plain/mean/none/loss/generic/3";
    let verify = ["verify", "--tier", "simd", "--level", "portable", "--progress", "0"];
    let named = ["--case", cases, "--law", "bound"];
    let output = etalon(&[&verify[..], &named].concat());
    let table = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{table}");
    // Each case once for each of the four passes of its algorithm.
    assert!(
        table.lines().any(|line| line.starts_with("PASSED: 8 checks, 0 negative, ")),
        "{table}"
    );
    assert!(!table.contains("── attention ─"), "{table}");
    let law = refusal(&etalon(&[&verify[..], &["--case", cases, "--law", "bond"]].concat()));
    assert!(law.contains("'bond'") && law.contains("bound"), "{law}");
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
    assert!(fs::read_to_string(path("md")).unwrap().starts_with("# etalon verify: PASSED: "));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "three reports and nothing else");
}

/// The published schemas are those of the types; `cargo run -- list --schema FILE` prints them.
#[test]
fn the_published_schemas_are_current() {
    for (file, arguments) in [
        ("problem", &["list", "--schema"][..]),
        ("capabilities", &["list", "--schema", "capabilities"]),
        ("vectors", &["list", "--schema", "vectors"]),
    ] {
        let printed = String::from_utf8(etalon(arguments).stdout).unwrap();
        let path = format!("../../docs/schema/{file}.schema.json");
        let published = Path::new(env!("CARGO_MANIFEST_DIR")).join(&path);
        let published = fs::read_to_string(published).unwrap();
        assert_eq!(printed, published, "run `etalon {} > {path}`", arguments.join(" "));
    }
}

#[test]
fn the_page_of_the_gpu_has_the_table_of_levels() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/gpu.md");
    let page = fs::read_to_string(path).unwrap();
    let (_, rest) = page.split_once("<!-- etalon list --levels -->\n").expect("its begin");
    let (found, _) = rest.split_once("<!-- end of the list -->").expect("its end");
    let printed = String::from_utf8(etalon(&["list", "--levels"]).stdout).unwrap();
    assert_eq!(found, printed, "`etalon list --levels` prints what docs/gpu.md should have");
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
