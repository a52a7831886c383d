//! The programs of `examples/candidates`: each is judged at smoke depth, where its language is at hand.

use crate::Test;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::tempdir;

pub const TESTS: &[Test] = &[
    ("a_program_in_c_passes", in_c),
    ("a_program_in_rust_passes", in_rust),
    ("a_program_in_python_passes", in_python),
    ("a_harness_has_at_most_forty_lines", forty_lines),
];

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/candidates").join(name)
}

/// True if a command is there and succeeds.
fn works(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

fn passes(candidate: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_etalon"));
    command.args(["verify", "--depth", "smoke", "--deterministic", "--candidate", candidate]);
    let output = command.output().expect("etalon starts");
    let [said, errors] = [&output.stdout, &output.stderr].map(|x| String::from_utf8_lossy(x));
    assert_eq!(output.status.code(), Some(0), "{said}{errors}");
}

/// Compiles a program, unless its compiler is absent, and judges it.
fn compiled(compiler: &str, name: &str, options: &[&str]) {
    if !works(Command::new(compiler).arg("--version")) {
        println!("skipped: no {compiler}");
        return;
    }
    let folder = tempdir().expect("a folder");
    let program = folder.path().join("program");
    let (source, program) = (source(name), program.to_str().expect("a name"));
    let mut command = Command::new(compiler);
    command.arg(source).args(["-o", program]).args(options);
    let output = command.output().expect("a compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    passes(&format!("'{program}'"));
}

fn in_c() {
    compiled("cc", "attention.c", &["-O2", "-lm"]);
}

fn in_rust() {
    compiled("rustc", "attention.rs", &["-O", "--edition", "2024"]);
}

fn in_python() {
    let python = ["python3", "python"].into_iter();
    let mut own = python.filter(|x| works(Command::new(x).args(["-c", "import numpy"])));
    match own.next() {
        Some(python) => passes(&format!("{python} '{}'", source("attention_numpy.py").display())),
        None => println!("skipped: no Python with NumPy"),
    }
}

fn forty_lines() {
    for entry in fs::read_dir(source("")).expect("a folder") {
        let path = entry.expect("a file").path();
        let text = fs::read_to_string(&path).expect("a text");
        let harness = text.lines().skip_while(|line| !line.contains("The harness.")).count();
        assert!((10..=40).contains(&harness), "{}: {harness} lines", path.display());
        assert!(text.lines().all(|line| line.chars().count() <= 119), "{}", path.display());
    }
}
