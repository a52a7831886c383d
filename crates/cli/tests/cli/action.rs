//! The step of `action.yml`, with what a runner sets, and stand-ins for the network and for cargo.

use super::Bench;
use super::check::change;
use etalon_conformance::tensor::Tensor;
use etalon_conformance::vectors::write_tensors;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The network: a folder of files.
const CURL: &str = r#"#!/bin/sh
for word; do case $before in --output) to=$word ;; esac; before=$word; done
echo "$word" >>"$STAND_IN/asked"
cp "$STAND_IN/release/${word##*/}" "$to"
"#;

/// A build of the sources: the command is there already.
const CARGO: &str = r#"#!/bin/sh
echo "$@" >>"$STAND_IN/built"
for word; do case $before in --root) to=$word ;; esac; before=$word; done
mkdir "$to/bin" && cp "$STAND_IN/etalon" "$to/bin/etalon"
"#;

/// A machine of a runner, with results of a kernel on it.
struct Runner {
    bench: Bench,
}

impl Runner {
    fn new() -> Self {
        let bench = Bench::new("causal", "attention");
        let outputs = bench.outputs("forward", &["--tier", "simd"]);
        write_tensors(&bench.path("got.safetensors"), &outputs).unwrap();
        for folder in ["bin", "temp", "release"] {
            fs::create_dir(bench.path(folder)).unwrap();
        }
        let own = concat!("#!/bin/sh\nexec '", env!("CARGO_BIN_EXE_etalon"), "' \"$@\"\n");
        for (name, text) in [("bin/curl", CURL), ("bin/cargo", CARGO), ("etalon", own)] {
            fs::write(bench.path(name), text).unwrap();
            fs::set_permissions(bench.path(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        Runner { bench }
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.bench.path(name)).unwrap_or_default()
    }

    /// Makes the files of a release.
    fn release(&self) {
        let archive = self.bench.path("release/etalon-x86_64-unknown-linux-musl.tar.gz");
        let packed =
            Command::new(script("package")).arg(self.bench.folder.path()).arg(archive).status();
        assert!(packed.expect("a script").success());
    }

    fn run(&self, arguments: &str, release: &str) -> Output {
        let path = format!("{}:/usr/bin:/bin", self.bench.path("bin").display());
        let file = |name: &'static str| (name, self.bench.path(name).into_os_string());
        let mut command = Command::new(script("action"));
        command.current_dir(self.bench.folder.path()).env_clear().env("PATH", path);
        command.envs([
            ("RUNNER_OS", "Linux"),
            ("RUNNER_ARCH", "X64"),
            ("GITHUB_SERVER_URL", "https://host"),
        ]);
        command.envs([
            ("ETALON_REPOSITORY", "own/er"),
            ("ETALON_RELEASE", release),
            ("ETALON_ARGUMENTS", arguments),
        ]);
        command.envs([file("GITHUB_OUTPUT"), file("GITHUB_STEP_SUMMARY")]);
        command
            .env("RUNNER_TEMP", self.bench.path("temp"))
            .env("STAND_IN", self.bench.folder.path());
        command.output().expect("a script")
    }
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.ci").join(name)
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

const CHECK: &str =
    "check attention forward --problem p.json --in in.safetensors --got got.safetensors";

#[test]
fn the_binary_of_a_release_judges_and_tells_the_job() {
    let runner = Runner::new();
    runner.release();
    let output = runner.run(CHECK, "v7");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(said(&output).contains("\n::notice title=etalon check::PASSED"), "{output:?}");
    assert!(runner.read("GITHUB_STEP_SUMMARY").starts_with("# etalon check: PASSED"));
    let lines = runner.read("GITHUB_OUTPUT");
    let reports = lines.strip_prefix("status=0\nreports=").expect("both outputs").trim_end();
    for (name, part) in [
        ("report.html", "<html"),
        ("junit.xml", "<testsuite "),
        ("badge.json", "\"message\": \"f32-strict, worst margin "),
    ] {
        let text = fs::read_to_string(Path::new(reports).join(name)).unwrap();
        assert!(text.contains(part), "{text}");
    }
    let from = "https://host/own/er/releases/download/v7/etalon-x86_64-unknown-linux-musl.tar.gz";
    assert_eq!(runner.read("asked"), format!("{from}.sha256\n{from}\n"));
    assert_eq!(runner.read("built"), "");
}

#[test]
fn a_binary_with_another_checksum_does_not_run() {
    let runner = Runner::new();
    runner.release();
    let archive = runner.bench.path("release/etalon-x86_64-unknown-linux-musl.tar.gz");
    let mut bytes = fs::read(&archive).unwrap();
    bytes.push(0);
    fs::write(&archive, bytes).unwrap();
    let output = runner.run(CHECK, "v7");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        said(&output).starts_with(
            "::error title=etalon::etalon-x86_64-unknown-linux-musl.tar.gz has another"
        )
    );
    assert_eq!(runner.read("built") + &runner.read("GITHUB_OUTPUT"), "");
}

#[test]
fn without_a_release_it_is_built_and_a_failure_is_that_of_the_step() {
    let runner = Runner::new();
    change(&runner.bench, |got| {
        let (mut values, stored) = (got["o"].to_f64("o").unwrap(), got["o"].stored().unwrap());
        values.fill(0.5);
        got.insert("o".to_string(), Tensor::store(&values, stored));
    });
    fs::rename(runner.bench.path("got.safetensors"), runner.bench.path("got it.safetensors"))
        .unwrap();
    let arguments = CHECK.replace("got.safetensors", "'got it.safetensors'");
    let output = runner.run(&arguments, "main");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(said(&output).contains("\n::error title=etalon check%3A attention forward%2C o%3A "));
    assert!(runner.read("GITHUB_STEP_SUMMARY").contains("## Failures in detail"));
    assert!(runner.read("GITHUB_OUTPUT").starts_with("status=1\n"));
    assert!(runner.read("built").contains("crates/cli --locked --no-default-features --root "));
}

/// Arguments are words: no part of them is a command of the shell.
#[test]
fn unusable_arguments_end_the_step() {
    let runner = Runner::new();
    for (arguments, line) in [
        ("", "there are no arguments"),
        (" \n ", "there are no arguments"),
        ("check 'one", "a quotation mark that is open"),
    ] {
        let output = runner.run(arguments, "");
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(said(&output).contains(line), "{output:?}");
    }
    assert_eq!(runner.read("built"), "", "nothing is built for nothing");
    let output = runner.run("check $(touch made) `touch made`; touch made", "");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(!runner.bench.path("made").exists());
    assert_eq!(runner.read("GITHUB_STEP_SUMMARY"), "");
    assert!(runner.read("GITHUB_OUTPUT").starts_with("status=2\n"));
}
