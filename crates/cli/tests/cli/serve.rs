//! Tiers in a process of their own.
#![cfg(unix)]

use crate::tiny::problem;
use etalon_conformance::tensor::Tensors;
use etalon_conformance::tier::{Hints, Refusal, Request, Tier};
use etalon_conformance::tiers::{Isolated, Server, Simd};
use etalon_problem::{Dtype, Pass};
use std::ffi::OsString;
use std::sync::Arc;
use std::thread;
use tempfile::tempdir;

fn isolated(script: &str) -> Isolated {
    let command = ["sh", "-c", script].map(OsString::from).to_vec();
    let (levels, _) = Simd::levels();
    Isolated::new(Box::new(levels[0]), Arc::new(Server::new(command)))
}

fn ask(tier: &dyn Tier) -> Result<Tensors, Refusal> {
    let (problem, inputs) = problem();
    let hints = Hints::default();
    let (problem, inputs) = (&problem, &inputs);
    tier.run(&Request { problem, pass: Pass::Forward, dtype: Dtype::F32, inputs, hints })
}

const SERVE: &str = concat!("exec ", env!("CARGO_BIN_EXE_etalon"), " serve");

#[test]
fn answers_of_another_process_have_the_same_bits() {
    let tier = isolated(SERVE);
    let (levels, _) = Simd::levels();
    assert_eq!(ask(&tier), ask(&levels[0]));
    assert!(ask(&tier).is_ok());
}

/// The first process ends with its first requests: each of them is answered by the next one.
#[test]
fn a_process_that_ends_is_followed_by_another() {
    let folder = tempdir().unwrap();
    let been = folder.path().join("been");
    let been = been.display();
    let tier = isolated(&format!("if [ ! -e {been} ]; then touch {been}; exit 3; fi; {SERVE}"));
    let answers = thread::scope(|scope| {
        let asking = [(); 8].map(|()| scope.spawn(|| ask(&tier)));
        asking.map(|thread| thread.join().unwrap())
    });
    let (levels, _) = Simd::levels();
    let expected = ask(&levels[0]);
    assert!(answers.iter().all(|answer| *answer == expected), "{answers:?}");
}

#[test]
fn a_process_that_always_ends_is_the_fault_of_the_request() {
    let refusal = ask(&isolated("exit 3")).unwrap_err();
    assert_eq!(refusal, Refusal::Fault("ended its process: exit status: 3".to_string()));
    let Refusal::Fault(reason) = ask(&isolated("kill -SEGV $$")).unwrap_err() else { panic!() };
    assert!(reason.contains("signal: 11"), "{reason}");
    let nothing = Server::new(vec!["no-such-program".into()]);
    let (levels, _) = Simd::levels();
    let tier = Isolated::new(Box::new(levels[0]), Arc::new(nothing));
    let Refusal::Fault(reason) = ask(&tier).unwrap_err() else { panic!() };
    assert!(reason.starts_with("could not be asked"), "{reason}");
}
