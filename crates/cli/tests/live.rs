//! The live judge, asked about programs: ones that do what the protocol says, and one for everything else that a
//! program can do. This test is all of them: `live child MODE` answers requests, or does not.

#[path = "live/bench.rs"]
mod bench;
#[path = "live/cheats.rs"]
mod cheats;
#[path = "live/child.rs"]
mod child;
#[path = "live/examples.rs"]
mod examples;
#[path = "live/protocol.rs"]
mod protocol;
#[path = "live/run.rs"]
mod run;
#[path = "live/shared.rs"]
mod shared;
#[path = "cli/tiny.rs"]
mod tiny;

use libtest_mimic::{Arguments, Trial};
use std::env;

/// A test by its name.
type Test = (&'static str, fn());

fn main() {
    let arguments: Vec<String> = env::args().collect();
    if let [_, child, mode, more @ ..] = &arguments[..]
        && child == "child"
    {
        return child::run(mode, more.first().map(String::as_str));
    }
    let all =
        [protocol::TESTS, shared::TESTS, run::TESTS, examples::TESTS, cheats::TESTS, bench::TESTS]
            .concat();
    let trial = |(name, test): Test| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let trials = all.into_iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Options of runs that are the same each time: cases, and their order.
const SAME: [&str; 4] = ["--seed", "0", "--threads", "1"];

/// The command line of a program of this test.
fn program(mode: &str, more: &str) -> String {
    let own = env::current_exe().expect("this program");
    format!("'{}' child {mode} '{more}'", own.display())
}
