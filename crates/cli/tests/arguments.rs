//! Hostile command lines: each is refused with one printable line, or answered.
//!
//! `PROPTEST_CASES` sets how many are tried: `PROPTEST_CASES=1000000 cargo test --release -p etalon-cli
//! --test arguments` tries a million.

use etalon_conformance::report::Status;
use etalon_conformance::vectors::read_tensors;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::FileFailurePersistence;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use tempfile::tempdir;

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    }
}

/// Words of all commands, their options and values that are easily wrong.
const WORDS: [&str; 79] = [
    "verify",
    "check",
    "probe",
    "eval",
    "trace",
    "--trace",
    "--tile",
    "--chunk",
    "zoo",
    "bench",
    "list",
    "cuda",
    "archive",
    "--arch",
    "sm_90a",
    "explain",
    "--tier",
    "--level",
    "--depth",
    "--seed",
    "--threads",
    "--progress",
    "--report",
    "--algorithm",
    "--problem",
    "--capabilities",
    "--with",
    "--in",
    "--out",
    "--profile",
    "--blocking",
    "--length",
    "--dim",
    "--pass",
    "--mask",
    "--batch",
    "--heads",
    "--key-heads",
    "--mode",
    "--decay",
    "--softcap",
    "--bias",
    "--tune",
    "--seconds",
    "--json",
    "--schema",
    "--verbose",
    "--got",
    "--only",
    "--generic",
    "--check",
    "html=",
    "--budget",
    "--dtype",
    "--help",
    "--version",
    "--",
    "-",
    "attention",
    "linear_attention",
    "forward",
    "double_backward",
    "simd",
    "reference",
    "f32",
    "0",
    "1",
    "18446744073709551615",
    "-1",
    "NaN",
    "inf",
    "1e309",
    "96x128",
    "0x0",
    "array=4",
    "window=",
    "json=",
    "",
    "=",
];

fn word() -> impl Strategy<Value = OsString> {
    let joined = (select(&WORDS[..]), select(&WORDS[..])).prop_map(|(x, y)| format!("{x}={y}"));
    let list = (select(&WORDS[..]), select(&WORDS[..])).prop_map(|(x, y)| format!("{x},{y}"));
    prop_oneof![
        12 => select(&WORDS[..]).prop_map(str::to_string),
        2 => joined,
        1 => list,
        2 => any::<String>(),
    ]
    .prop_map(OsString::from)
}

/// Checks that a message is one line that prints and is not very long.
fn is_line(line: &str) -> Result<(), TestCaseError> {
    prop_assert!(!line.is_empty() && line.chars().count() < 2100, "{line}");
    prop_assert!(!line.contains(char::is_control), "{line:?}");
    Ok(())
}

/// Options of `eval` with values, of which most are good.
const OPTIONS: [(&str, &[&str]); 4] = [
    ("--tier", &["reference", "simd", "simd/portable", "cuda", "abacus", ""]),
    ("--profile", &["f32-strict", "f64", "bf16-flash", "f8"]),
    ("--blocking", &["8x16", "1x1", "18446744073709551615x18446744073709551615", "0x1", "x"]),
    ("--threads", &["1", "2", "0", "-1", "99999999999"]),
];

proptest! {
    #![proptest_config(config())]

    #[test]
    fn command_lines_are_read_or_refused(words in prop::collection::vec(word(), 0..9)) {
        let line = [OsString::from("etalon")].into_iter().chain(words);
        if let Err(line) = etalon_cli::check(line) {
            is_line(&line)?;
        }
    }
}

proptest! {
    // Each starts threads and writes files: as many as the others would take hours.
    #![proptest_config(ProptestConfig { cases: config().cases.div_ceil(20), ..config() })]

    #[test]
    fn evaluations_are_refused_or_leave_their_file(
        pass in select(&["forward", "backward", "double_backward", "jvp", "step", "sideways"][..]),
        algorithm in select(&["attention", "attention", "attention", "linear_attention"][..]),
        options in prop::collection::vec((0..OPTIONS.len(), any::<usize>()), 0..4),
        out in select(&["out", "out", "out", "absent/out", "", "."][..]),
    ) {
        let fixture = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let folder = tempdir()?;
        let out = folder.path().join(out);
        let paths = [fixture("causal.json"), fixture("causal.in.safetensors"), out.clone()];
        let mut line: Vec<OsString> = ["etalon", "eval", algorithm, pass].map(OsString::from).into();
        for (option, path) in ["--problem", "--in", "--out"].into_iter().zip(paths) {
            line.extend([option.into(), path.into_os_string()]);
        }
        for (option, value) in options {
            let (option, values) = OPTIONS[option];
            line.push(format!("{option}={}", values[value % values.len()]).into());
        }
        let answer = etalon_cli::answer(line);
        let left = fs::read_dir(folder.path())?.count();
        match answer {
            Ok(status) => {
                prop_assert!(status == Status::Passed && left == 1);
                prop_assert!(!read_tensors(&out, u64::MAX)?.is_empty());
            }
            Err(line) => {
                prop_assert_eq!(left, 0, "{}", &line);
                is_line(&line)?;
            }
        }
    }
}
