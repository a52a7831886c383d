//! Whole runs: verdict, replay, known failures, runs that go on, signals, errors.

use crate::{SAME, Test, program};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::tempdir;

pub const TESTS: &[Test] = &[
    ("a_right_program_passes", a_right_program_passes),
    ("a_wrong_program_fails_with_a_replay", a_wrong_program_fails_with_a_replay),
    ("a_crash_is_the_failure_of_its_case", a_crash_is_the_failure_of_its_case),
    ("a_program_that_hangs_ends_the_run", a_program_that_hangs_ends_the_run),
    ("what_is_refused_is_undecided", what_is_refused_is_undecided),
    ("other_results_are_named", other_results_are_named),
    ("bits_are_compared_where_they_are_claimed", bits_are_compared_where_they_are_claimed),
    ("known_failures_are_expected", known_failures_are_expected),
    ("a_run_goes_on_where_it_stopped", a_run_goes_on_where_it_stopped),
    ("a_signal_ends_the_program", a_signal_ends_the_program),
    ("few_words_of_the_program_are_shown", few_words_of_the_program_are_shown),
    ("what_cannot_be_judged_is_said", what_cannot_be_judged_is_said),
];

fn etalon(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_etalon")).args(arguments).output().expect("etalon starts")
}

/// A run with a seed that nobody knows.
fn verify_any(mode: &str, more: &[&str]) -> Output {
    let program = program(mode, "");
    let own = ["verify", "--depth", "smoke", "--candidate", &program];
    etalon(&[&own[..], more].concat())
}

/// A run that is the same each time.
fn verify(mode: &str, more: &[&str]) -> Output {
    verify_any(mode, &[&SAME[..], more].concat())
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn status(output: &Output) -> i32 {
    output.status.code().expect("a status")
}

fn last(text: &str) -> &str {
    text.lines().last().unwrap_or_default()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn a_right_program_passes() {
    let first = verify_any("right", &[]);
    let said = text(&first);
    assert_eq!(status(&first), 0, "{said}{}", String::from_utf8_lossy(&first.stderr));
    assert!(last(&said).starts_with("PASSED: "), "{said}");
    assert!(
        said.contains("forward") && said.contains("backward") && said.contains("child"),
        "{said}"
    );
    let second = json(&verify_any("right", &["--json"]));
    assert_eq!((&second["status"], &second["passed"]), (&"passed".into(), &true.into()));
    assert_eq!(second["failures"], Value::Array(Vec::new()));
    assert!(second["first"].is_null(), "{second}");
    let seed = second["seed"].as_u64().expect("a seed");
    assert!(!last(&said).contains(&format!("seed {seed},")), "seeds are random: {said}");
}

/// The command that a report prints, run by a shell.
fn again(line: &str) -> Output {
    let own = line.replacen("etalon", concat!("'", env!("CARGO_BIN_EXE_etalon"), "'"), 1);
    Command::new("sh").arg("-c").arg(&own).output().expect("a shell")
}

fn a_wrong_program_fails_with_a_replay() {
    let folder = tempdir().unwrap();
    let page = folder.path().join("report.html");
    let report = format!("html={}", page.display());
    let output = verify("scaled", &["--json", "--report", &report]);
    assert_eq!(status(&output), 1);
    let page = fs::read_to_string(page).unwrap();
    let detail = page.split("<h2>Failures by cause").next().unwrap();
    assert!(detail.contains("<svg") && detail.contains("error ÷ bound") && detail.contains("1.01"));
    // Every failing case has a replay; the first and the last of them run here.
    let plain = page.replace("&quot;", "\"").replace("&amp;", "&");
    let replays: Vec<&str> = plain
        .lines()
        .filter_map(|line| line.split("<pre>").last())
        .filter(|x| x.starts_with("etalon "))
        .collect();
    assert!(replays.len() > 4, "{replays:?}");
    for line in [replays[0], replays[replays.len() - 1]] {
        assert_eq!(status(&again(line.trim_end_matches("</pre>"))), 1, "{line}");
    }
    let found = json(&output);
    let first = &found["first"];
    assert_eq!((&found["status"], &first["law"]), (&"failed".into(), &"bound".into()));
    let worst = &first["worst"];
    let number = |key: &str| worst[key].as_f64().unwrap_or_else(|| panic!("{key} of {worst}"));
    assert!((number("got") - number("exact")).abs() > number("bound"), "{worst}");
    assert!(worst["index"].is_array() && first["problem"]["algorithm"] == "attention", "{first}");
    let suspects = first["suspects"].as_array().expect("a list");
    assert!(suspects[0].as_str().expect("words").contains("1.01"), "{suspects:?}");
    let replay = again(first["replay"].as_str().expect("a command"));
    let said = text(&replay);
    assert_eq!(status(&replay), 1, "{said}");
    let case = first["case"].as_str().expect("a case");
    assert!(said.contains(&format!("FAILED child bound {case}: ")), "{said}");
    assert!(last(&said).starts_with("FAILED: "), "{said}");
    let said = text(&verify("scaled", &[]));
    assert!(said.contains("\nto mend first: bound of ") && said.contains("\n  worst: "), "{said}");
    assert!(said.contains("\n  to see it again: etalon verify --candidate "), "{said}");
}

fn a_crash_is_the_failure_of_its_case() {
    let output = verify("aborts-when-long", &["--json"]);
    let found = json(&output);
    assert_eq!(status(&output), 1, "{found}");
    let symptom = found["first"]["symptom"].as_str().expect("words");
    assert!(symptom.contains("ended without an answer (signal: 6"), "{found}");
    // Its extents say what the crash needs.
    assert!(found["first"]["problem"]["queries"].as_u64() > Some(16), "{found}");
    assert!(found["checks"].as_u64() > found["negative"].as_u64(), "{found}");
}

fn a_program_that_hangs_ends_the_run() {
    let begun = Instant::now();
    let output = verify("hangs", &["--limit", "0.2", "--restarts", "2"]);
    let said = text(&output);
    assert_eq!(status(&output), 1, "{said}");
    assert!(said.contains("did not answer within 0.2 s"), "{said}");
    let lost =
        "not checked: forward, backward of attention (child): its process ended, or was ended, ";
    assert!(said.contains(lost), "{said}");
    // Whatever is called the simplest case was asked.
    assert!(!said.contains(": was not asked: "), "{said}");
    assert!(begun.elapsed() < Duration::from_secs(60), "{said}");
}

fn what_is_refused_is_undecided() {
    let output = verify("refuses-when-long", &[]);
    let said = text(&output);
    assert_eq!(status(&output), 3, "{said}");
    assert!(last(&said).starts_with("UNDECIDED: "), "{said}");
    assert!(said.contains("the program refuses what its capabilities take: not today"), "{said}");
}

fn other_results_are_named() {
    for (mode, part) in [
        ("shape", "must have shape ["),
        ("missing", "returned something else: `lse` is missing"),
        ("extra", "returned something else: `max` was given, but "),
        ("type", "must hold f32, found f64"),
    ] {
        let output = verify(mode, &["--json"]);
        let found = json(&output);
        let said = found["failures"].to_string();
        assert!(status(&output) == 1 && said.contains(part), "{mode}: {said}");
    }
}

fn bits_are_compared_where_they_are_claimed() {
    let [once, claimed] = [&[][..], &["--deterministic"]].map(|more| verify("jitters", more));
    assert!(!text(&once).contains(" determinism "), "{}", text(&once));
    let said = text(&claimed);
    assert!(status(&claimed) == 1 && said.contains("FAILED child determinism "), "{said}");
    assert!(said.contains(" --deterministic --case "), "{said}");
    let right = verify("right", &["--deterministic"]);
    assert_eq!(status(&right), 0, "{}", text(&right));
}

fn known_failures_are_expected() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("known.txt");
    let known = path.to_str().expect("a name");
    let run = |list: &str, mode: &str| {
        fs::write(&path, list).expect("a file");
        verify(mode, &["--known", known])
    };
    let output = run("# all of it\n* * attention/f32/*  # yes\n", "scaled");
    let said = text(&output);
    // All is known to fail: nothing is left that could pass.
    assert!(last(&said).contains(" known to fail") && status(&output) != 1, "{said}");
    let output = run("forward bound attention/f32/*\n", "right");
    let said = text(&output);
    assert_eq!(status(&output), 1, "{said}");
    assert!(said.contains("passes, though it is known to fail, in all "), "{said}");
    assert!(said.contains("take away line 1 of ") && said.contains("known.txt"), "{said}");
    let output = run("backward bound attention/f64/*\n", "right");
    assert_eq!(status(&output), 0);
    assert!(text(&output).contains("no check of this run is one"), "{}", text(&output));
    let output = run("forward bound\n", "right");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(status(&output) == 2 && said.contains("line 1 must be PASS LAW CASE"), "{said}");
}

fn a_run_goes_on_where_it_stopped() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("run.jsonl");
    let name = path.to_str().expect("a name");
    let first = json(&verify_any("right", &["--json", "--continue", name]));
    let whole = fs::read_to_string(&path).expect("a file");
    let lines: Vec<&str> = whole.lines().collect();
    assert!(lines.len() > 4, "{whole}");
    // As if it had been cut in the third case.
    let cut = [lines[..3].join("\n"), lines[3][..lines[3].len() / 2].to_string()].join("\n");
    fs::write(&path, cut).expect("a file");
    let second = json(&verify_any("right", &["--json", "--continue", name]));
    assert_eq!(second["notes"][0], "2 of the cases were judged by an earlier run");
    for key in ["seed", "status", "checks"] {
        assert_eq!(first[key], second[key], "{key}");
    }
    let again = fs::read_to_string(&path).expect("a file");
    assert_eq!(again.lines().count(), lines.len() + 1, "one line was cut");
    for (mode, more, part) in [
        ("scaled", &[][..], "it holds another run, whose candidate was "),
        ("right", &["--profile", "f32-strict"], "whose choices was "),
        ("right", &["--seed", "7"], "whose seed was "),
    ] {
        let output = verify_any(mode, &[more, &["--continue", name]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(status(&output) == 2 && said.contains(part), "{said}");
    }
    fs::write(&path, "no run\n").expect("a file");
    let output = verify_any("right", &["--continue", name]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(status(&output) == 2 && said.contains("line 1 must be that of a run"), "{said}");
}

fn a_signal_ends_the_program() {
    if !Path::new("/proc/self").exists() {
        return;
    }
    let folder = tempdir().expect("a folder");
    let by = [
        ("hangs", "INT"),
        ("mute", "INT"),
        ("right", "TERM"),
        ("orphan", "HUP"),
        ("shared", "TERM"),
    ];
    for (mode, signal) in by {
        let path = folder.path().join(mode);
        let line = program(mode, path.to_str().expect("a name"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_etalon"));
        command.args(["verify", "--candidate", &line, "--limit", "90"]);
        let mut etalon = command.stdout(Stdio::null()).spawn().expect("etalon starts");
        let begun = Instant::now();
        // The number of the process, or the path of a file that it shares.
        let told = loop {
            match fs::read_to_string(&path) {
                Ok(told) if !told.is_empty() => break told,
                _ => assert!(begun.elapsed() < Duration::from_secs(60), "{mode} does not start"),
            }
            sleep(Duration::from_millis(20));
        };
        sleep(Duration::from_millis(200));
        let kill = format!("kill -{signal} {}", etalon.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().expect("a shell").success());
        assert!(!etalon.wait().expect("an end").success(), "{mode}");
        let own = match mode {
            "shared" => Path::new(&told).parent().expect("a folder").to_path_buf(),
            _ => Path::new("/proc").join(&told),
        };
        let begun = Instant::now();
        while own.exists() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{mode} is left");
            sleep(Duration::from_millis(20));
        }
    }
}

fn few_words_of_the_program_are_shown() {
    let output = verify("floods", &[]);
    assert_eq!(status(&output), 0, "{}", text(&output));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("too many words") && said.contains("no more of the candidate's"));
    assert!(said.len() < 100_000, "{} bytes", said.len());
}

fn what_cannot_be_judged_is_said() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("takes.json");
    fs::write(&path, r#"{"kernels": []}"#).expect("a file");
    let path = path.to_str().expect("a name");
    let report = format!("json={path}");
    let [right, undeclared, misdeclared, broken] =
        ["right", "undeclared", "misdeclared", "no-library"].map(|mode| program(mode, ""));
    for (arguments, part) in [
        (&["--candidate", ""][..], "--candidate: it must be a command line, found nothing"),
        (&["--candidate", "python 'x.py"], "--candidate: ' is open, expected a second one"),
        (&["--candidate", "no-such-program"], "it cannot be started: "),
        (&["--candidate", &broken], "its last words: libkernel.so: no such file"),
        (&["--candidate", &undeclared], "declares no capabilities in its hello: name a file by"),
        (&["--candidate", &misdeclared], "the candidate's hello: "),
        (&["--candidate", &right, "--capabilities", path], "takes.json: "),
        (&["--candidate", &right, "--profile", "auto"], "`profile` must be a claim"),
        (&["--candidate", &right, "--limit", "0"], "seconds above 0"),
        (&["--candidate", &right, "--limit", "1e9"], "seconds above 0"),
        (&["--candidate", &right, "--tier", "simd"], "cannot be used with"),
        (&["--candidate", &right, "--known", "absent.txt"], "absent.txt: cannot be read"),
        (&["--candidate", &right, "--continue", "absent/x"], "absent/x: cannot be written"),
        (
            &["--candidate", &right, "--continue", path, "--report", &report],
            "--report would overwrite the file of --continue, ",
        ),
        (&["--json"], "--candidate"),
        (&["--limit", "3"], "--candidate"),
    ] {
        let output = etalon(&[&["verify"], arguments].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(status(&output) == 2 && said.contains(part), "{arguments:?}: {said}");
        let line = said.lines().last().unwrap_or_default();
        assert!(line.starts_with("error: "), "{arguments:?}: {said}");
    }
}
