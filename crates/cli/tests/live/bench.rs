//! Programs that are timed: the figures of right ones, and what becomes of cheats. The second table of
//! `docs/protocol.md` is the list.

use crate::{Test, program};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::tempdir;

pub const TESTS: &[Test] = &[
    ("a_right_program_has_figures", a_right_program_has_figures),
    ("no_time_of_a_wrong_program_is_said", no_time_of_a_wrong_program_is_said),
    ("the_page_lists_the_cheats_of_timing", the_page),
    ("what_cannot_be_timed_is_said", what_cannot_be_timed_is_said),
];

/// Modes of the program, what it does, whether it passes, and what finds it.
const CHEATS: [(&str, &str, bool, &str); 8] = [
    (
        "by-shape",
        "returns what it returned for these extents before",
        false,
        "timed calls are judged, on new inputs",
    ),
    ("former", "returns the results of the call before", false, "the same"),
    ("zeros", "answers at once with zeros, and computes afterwards", false, "the same"),
    (
        "bf16",
        "computes in bf16 what it claims in f32",
        false,
        "the same, by the bounds of `--profile`",
    ),
    (
        "shared-writes-nothing",
        "leaves its shared results as they were",
        false,
        "etalon makes them NaN before each call",
    ),
    (
        "shared-late",
        "answers before its shared results are written, which are there by the next call",
        false,
        "results are read once, when the answer is here",
    ),
    ("shared-damages", "changes its shared inputs", false, "these are compared after each call"),
    (
        "remembers",
        "returns what it returned for the same bits before",
        true,
        "nothing: no inputs are repeated, so it gains nothing",
    ),
];

/// A bench of one small pass, and its file.
fn bench(mode: &str, more: &[&str]) -> (Output, Option<Value>) {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("figures.json");
    let line = program(mode, "");
    let size = ["--length", "16", "--dim", "8", "--heads", "2", "--mask", "full"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_etalon"));
    command.args(["bench", "--threads", "1", "--seconds", "0", "--candidate", &line]);
    command.args(size).arg("--json").arg(&path).args(more);
    let output = command.output().expect("etalon starts");
    let file = fs::read(&path).ok();
    (output, file.map(|file| serde_json::from_slice(&file).expect("JSON")))
}

const FORWARD: [&str; 4] = ["--algorithm", "attention", "--pass", "forward"];

fn a_right_program_has_figures() {
    for (mode, more, transport) in [
        ("right", &[][..], "frames"),
        ("shared", &[][..], "shared files"),
        ("shared", &["--frames", "--pass", "forward"][..], "frames"),
    ] {
        let (output, file) = bench(mode, more);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(0), "{said}{output:?}");
        let file = file.expect("a file");
        assert_eq!(file["transport"], transport, "{file}");
        let figures = file["figures"].as_array().expect("figures");
        let passes: Vec<_> = figures.iter().map(|x| x["pass"].as_str()).collect();
        let expected = [Some("forward"), Some("backward")];
        assert_eq!(passes, expected[..if more.is_empty() { 2 } else { 1 }], "{file}");
        for figure in figures {
            assert_eq!(figure["status"], "passed", "{figure}");
            assert!(figure["rounds"].as_u64() >= Some(3), "{figure}");
            assert_eq!(figure["judged"], 2, "the furthest, and one that is drawn: {figure}");
            for of in ["candidate", "null", "own"] {
                assert!(figure[of]["median_ns"].as_u64() > Some(0), "{of}: {figure}");
                assert_eq!(figure[of]["runs"], figure["rounds"], "{of}: {figure}");
            }
            assert!(figure["ratio"].as_f64() > Some(0.0), "{figure}");
        }
        // Other passes and algorithms are not taken.
        let not_asked = file["not_asked"].as_array().expect("a list");
        let has =
            |part: &str| not_asked.iter().any(|x| x.as_str().is_some_and(|x| x.contains(part)));
        assert!(more.len() > 2 || has("attention double_backward"), "{file}");
        assert!(!has("lazy_attention"), "{file}");
        let last = said.lines().last().unwrap_or_default();
        assert!(last.starts_with("PASSED: ") && last.ends_with("timed calls judged"), "{said}");
        assert!(said.lines().all(|line| line.chars().count() <= 120), "{said}");
    }
}

fn no_time_of_a_wrong_program_is_said() {
    for (mode, _, passes, _) in CHEATS {
        let (output, file) = bench(mode, &FORWARD);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let figure = &file.unwrap_or_else(|| panic!("{mode}: {output:?}"))["figures"][0];
        let expected = if passes { (0, "passed") } else { (1, "failed") };
        assert_eq!(output.status.code(), Some(expected.0), "{mode}: {said}");
        assert_eq!(figure["status"], expected.1, "{mode}: {figure}");
        let keys = ["candidate", "null", "own", "ratio"];
        assert!(keys.iter().all(|key| figure[*key].is_null() != passes), "{mode}: {figure}");
        assert_eq!(figure["reason"].is_null(), passes, "{mode}: {figure}");
        assert!(passes || said.contains("FAILED attention forward, full, 16 × 8: "), "{said}");
    }
    // A refusal within the capabilities, and an end without an answer.
    for (mode, code, part) in [
        ("refuses", 3, "the program refuses what its capabilities take"),
        ("aborts", 1, "ended without an answer"),
        ("type", 1, "returned something else: "),
    ] {
        let (output, file) = bench(mode, &FORWARD);
        let figure = &file.expect("a file")["figures"][0];
        let reason = figure["reason"].as_str().expect("a reason");
        assert!(output.status.code() == Some(code) && reason.contains(part), "{mode}: {figure}");
        assert!(figure["candidate"].is_null(), "{mode}: {figure}");
    }
}

fn the_page() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/protocol.md");
    let page = fs::read_to_string(path).expect("docs/protocol.md");
    for (_, does, passes, found) in CHEATS {
        let end = if passes { "passes" } else { "fails" };
        let row = format!("| {does} | {end} | {found} |");
        assert!(page.contains(&row), "docs/protocol.md lacks the row\n{row}");
    }
}

fn what_cannot_be_timed_is_said() {
    let folder = tempdir().expect("a folder");
    let profile = folder.path().join("p.json");
    let json = profile.to_str().expect("a name");
    for (more, part) in [
        (
            &["--algorithm", "lazy_attention"][..],
            "error: the candidate takes none of these problems: ",
        ),
        (&["--tune"][..], "cannot be used with"),
        (&["--mode", "fused"][..], "cannot be used with"),
        (&["--level", "avx9"][..], "`level` must be one of portable"),
    ] {
        let (output, file) = bench("right", more);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(part), "{more:?}: {said}");
        assert!(file.is_none(), "{more:?}");
    }
    let line = program("right", "");
    let mut command = Command::new(env!("CARGO_BIN_EXE_etalon"));
    command.args(["bench", "--candidate", &line, "--capabilities", json, "--json", json]);
    let said = command.output().expect("etalon starts").stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("--json would overwrite the file of --capabilities"), "{said}");
}
