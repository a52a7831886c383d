//! The zoo: every mutant dies by the law that its entry names, and no control raises an alarm.
//! One test each, so that a run shows them by name. Every law has to look at the controls: they are tried
//! at smoke depth here, and at core depth by `etalon zoo`.

use etalon_conformance::cases::Depth;
use etalon_conformance::laws;
use etalon_conformance::zoo::{
    CONTROLS, Fate, Ground, alarms, kill_matrix, killed, mutant, mutants,
};
use etalon_problem::Algorithm;
use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Any seed will do; a fixed one lets a failure be repeated.
const SEED: u64 = 0;

fn main() {
    let arguments = Arguments::from_args();
    let [ground, looked_at] = [Depth::Core, Depth::Smoke]
        .map(|depth| Arc::new(Ground::new(SEED, depth, &Algorithm::ALL)));
    let mut trials = Vec::new();
    for mutant in mutants() {
        let ground = ground.clone();
        let name = format!("{}::dies_by::{}", mutant.name, mutant.killer);
        trials.push(Trial::test(name, move || match killed(mutant, &ground) {
            Fate::Killed { .. } => Ok(()),
            Fate::Alive(trials) => Err(Failed::from(format!(
                "{} survives {trials} trials: {}",
                mutant.name, mutant.story
            ))),
        }));
    }
    for style in CONTROLS {
        let looked_at = looked_at.clone();
        trials.push(Trial::test(format!("control::{}", style.name), move || {
            for (law, fate) in alarms(style, &looked_at) {
                match fate {
                    Fate::Killed { case, text } => {
                        return Err(Failed::from(format!("{law} on {case}: {text}")));
                    }
                    Fate::Alive(0) => return Err(Failed::from(format!("{law} had no case"))),
                    Fate::Alive(_) => {}
                }
            }
            Ok(())
        }));
    }
    trials.push(Trial::test("one_mutant_by_name", || {
        let called = AtomicUsize::new(0);
        let progress = |_: usize, all: usize, _: &str| {
            called.fetch_add(1, Ordering::Relaxed);
            assert!(called.load(Ordering::Relaxed) <= all);
        };
        let matrix = kill_matrix(SEED, &[], &[mutant("padded-classes").unwrap()], &[], &progress);
        let names: Vec<&str> = matrix.rows.iter().map(|row| row.name.as_str()).collect();
        match names == ["zoo/padded-classes"] && matrix.sound() && called.into_inner() > 0 {
            true => Ok(()),
            false => Err(Failed::from(format!("{:?}", matrix.rows))),
        }
    }));
    trials.push(Trial::test("every_killer_is_a_law", || {
        match mutants().iter().find(|mutant| laws::find(mutant.killer).is_none()) {
            Some(mutant) => Err(Failed::from(format!("{} names {}", mutant.name, mutant.killer))),
            None => Ok(()),
        }
    }));
    libtest_mimic::run(&arguments, trials).exit();
}
