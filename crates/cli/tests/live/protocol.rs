//! Each failure of the protocol: what is said of it, that nothing hangs, and that no process is left.

use crate::Test;
use crate::tiny::problem;
use etalon_conformance::live::{Limits, Program};
use etalon_conformance::tensor::Tensors;
use etalon_conformance::tier::{Hints, Refusal, Request};
use etalon_problem::{Dtype, Pass};
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::tempdir;

pub const TESTS: &[Test] = &[
    ("every_fault_is_named", every_fault_is_named),
    ("a_program_that_does_not_begin_is_named", a_program_that_does_not_begin_is_named),
    ("a_new_process_answers_after_a_fault", a_new_process_answers_after_a_fault),
    ("another_hello_is_a_fault", another_hello_is_a_fault),
    ("starts_are_counted", starts_are_counted),
    ("a_stopped_program_ends_what_waits", a_stopped_program_ends_what_waits),
    ("no_process_is_left", no_process_is_left),
    ("what_it_says_is_handed_on", what_it_says_is_handed_on),
];

pub fn new(mode: &str, path: &str) -> Program {
    limited(mode, path, Duration::from_secs(2))
}

fn limited(mode: &str, path: &str, call: Duration) -> Program {
    let own = std::env::current_exe().expect("this program").into_os_string();
    let words = ["child", mode, path].map(OsString::from);
    let limits = Limits { call, start: Duration::from_secs(20), restarts: 3 };
    Program::new([vec![own], words.to_vec()].concat(), limits, Box::new(|_| {}))
}

pub fn started(mode: &str, path: &str) -> Program {
    let program = new(mode, path);
    let hello = program.start().expect("a hello");
    assert!(hello.name.starts_with("child") && hello.capabilities.is_some(), "{hello:?}");
    program
}

pub fn ask(program: &Program) -> Result<Tensors, Refusal> {
    let (problem, inputs) = problem();
    let (problem, inputs, hints) = (&problem, &inputs, Hints::default());
    program.answer(&Request { problem, pass: Pass::Forward, dtype: Dtype::F32, inputs, hints })
}

pub fn fault(program: &Program) -> String {
    match ask(program) {
        Err(Refusal::Fault(text)) => text,
        other => panic!("no fault: {other:?}"),
    }
}

/// Modes that do not answer, the words for each, and whether its process is ended.
const FAULTS: [(&str, &str, bool); 16] = [
    ("hangs", "did not answer within 2 s", true),
    ("half-and-hangs", "did not answer within 2 s", true),
    ("aborts", "ended without an answer (signal: 6", true),
    ("exits", "ended without an answer (exit status: 0)", true),
    ("orphan", "did not answer within 2 s", true),
    ("half", "wrote to stdout what ends in its ", true),
    ("garbage", r"is no frame: it must begin with", true),
    ("wordy", r#"found "step 1 of 3\n"#, true),
    ("version", "has version 2, expected 1", true),
    ("huge", "announces 1099511627776 bytes of elements, expected at most 10", true),
    ("many", "announces 18446744073709551615 tensors, expected at most 64", true),
    ("number", "answered request 2, was asked request 1", true),
    ("kind", "a frame of kind 9, expected 3 (outputs), 4 (unsupported) or 5 (error)", true),
    ("wants", "returned `o` without elements: role 1, expected 0", true),
    ("error", "reported an error: no memory", false),
    ("refuses", "", false),
];

fn every_fault_is_named() {
    let tests = FAULTS.map(|(mode, part, ends)| {
        thread::spawn(move || {
            let (program, begun) = (started(mode, ""), Instant::now());
            let said = match (mode, ask(&program)) {
                ("refuses", Err(Refusal::Unsupported(text))) => {
                    assert!(text.ends_with("capabilities take: not today"), "{text}");
                    String::new()
                }
                (_, Err(Refusal::Fault(text))) => text,
                (_, other) => panic!("{mode}: {other:?}"),
            };
            assert!(said.contains(part), "{mode}: {said}");
            assert!(!said.contains('\x1b') && !said.contains('\n'), "{mode}: {said:?}");
            assert_eq!(program.ends(), usize::from(ends), "{mode}");
            // The next request has an answer of the same kind, from a new process where the first ended.
            assert!(ask(&program).is_err(), "{mode}");
            assert!(begun.elapsed() < Duration::from_secs(30), "{mode}");
        })
    });
    tests.into_iter().for_each(|test| test.join().expect("a fault that is named"));
}

fn a_program_that_does_not_begin_is_named() {
    let refused = |program: Program| program.start().expect_err("no hello");
    for (mode, part) in [
        (
            "no-library",
            "ended without an answer, where its hello was expected (exit status: 3); \
            its last words: libkernel.so: no such file",
        ),
        ("prints", r#"found "Loading the kernel, please wait "#),
        ("nameless", "has no name in the text of its hello"),
        ("not-hello", "began with a frame of kind 3, expected 1 (hello)"),
    ] {
        let said = refused(new(mode, ""));
        assert!(said.contains(part), "{mode}: {said}");
    }
    let second = Duration::from_secs(1);
    let limits = Limits { call: second, start: second, restarts: 0 };
    let own = std::env::current_exe().expect("this program").into_os_string();
    let mute = vec![own, "child".into(), "mute".into()];
    let said = refused(Program::new(mute, limits, Box::new(|_| {})));
    assert_eq!(said, "did not answer within 1 s, where its hello was expected");
    let said = refused(Program::new(vec!["no-such-program".into()], limits, Box::new(|_| {})));
    assert!(said.starts_with("cannot be started: "), "{said}");
    let said = refused(Program::new(Vec::new(), limits, Box::new(|_| {})));
    assert!(said.starts_with("cannot be started: "), "{said}");
}

fn a_new_process_answers_after_a_fault() {
    let folder = tempdir().expect("a folder");
    let program = started("once", folder.path().join("been").to_str().expect("a name"));
    assert!(fault(&program).starts_with("ended without an answer (signal: 6"));
    let outputs = ask(&program).expect("results");
    assert_eq!(outputs.keys().collect::<Vec<_>>(), ["lse", "o"]);
    assert_eq!(program.ends(), 1);
}

fn another_hello_is_a_fault() {
    let program = started("fickle", "");
    assert!(fault(&program).starts_with("ended without an answer (exit status: 1)"));
    let said = fault(&program);
    assert!(said.starts_with("says another hello than at first: child "), "{said}");
}

/// Three starts more for a run, three more to find the simplest case, and then none.
fn starts_are_counted() {
    let program = started("exits", "");
    for ends in 1..=7 {
        assert_eq!(program.lost().is_some(), ends > 4, "{ends}");
        assert!(fault(&program).starts_with("ended without an answer"), "{ends}");
        assert_eq!(program.ends(), ends);
    }
    let Err(Refusal::Unsupported(reason)) = ask(&program) else { panic!("it was asked") };
    assert_eq!(reason, "was not asked: its process ended, or was ended, 7 times");
    assert_eq!(program.ends(), 7);
}

fn a_stopped_program_ends_what_waits() {
    // Nobody waits for that limit.
    let program = Arc::new(limited("hangs", "", Duration::from_secs(3600)));
    program.start().expect("a hello");
    let asking = program.clone();
    let waits = thread::spawn(move || fault(&asking));
    thread::sleep(Duration::from_millis(100));
    program.stop();
    let said = waits.join().expect("an end");
    assert!(said.starts_with("ended without an answer"), "{said}");
    assert!(fault(&program).contains("the run was stopped"));
}

/// True if a process is there, or has left a zombie.
fn is_there(path: &Path) -> bool {
    let id = fs::read_to_string(path).expect("its number");
    Path::new("/proc").join(id).exists()
}

fn no_process_is_left() {
    if !Path::new("/proc/self").exists() {
        return;
    }
    let folder = tempdir().expect("a folder");
    for mode in ["right", "hangs", "aborts", "half-and-hangs", "orphan"] {
        let path = folder.path().join(mode);
        let program = started(mode, path.to_str().expect("a name"));
        assert!(is_there(&path), "{mode}");
        if mode != "right" {
            fault(&program);
            assert!(!is_there(&path), "{mode} is left after its fault");
        }
        drop(program);
        assert!(!is_there(&path), "{mode} is left");
    }
}

fn what_it_says_is_handed_on() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let ear = heard.clone();
    let own = std::env::current_exe().expect("this program").into_os_string();
    let words = vec![own, "child".into(), "no-library".into()];
    let second = Duration::from_secs(20);
    let limits = Limits { call: second, start: second, restarts: 0 };
    let listen = move |bytes: &[u8]| ear.lock().expect("no panic").extend(bytes);
    let program = Program::new(words, limits, Box::new(listen));
    assert!(program.start().is_err());
    let heard = heard.lock().expect("no panic").clone();
    assert_eq!(String::from_utf8_lossy(&heard), "loading\nlibkernel.so: no such file\n\n");
}
