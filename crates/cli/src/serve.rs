//! `etalon serve`: the process in which `etalon verify` computes the cuda tier, and the one that computes nothing,
//! beside which `etalon bench` times a program.

use crate::PROGRAM;
use crate::outcome::{Failure, Outcome};
use etalon_conformance::report::Status;
use etalon_conformance::{live, tiers};
use std::ffi::OsString;
use std::io::{stdin, stdout};

/// The option that answers requests of the live judge, and computes nothing.
pub const NULL: &str = "--null";

pub fn run(null: bool) -> Outcome {
    if null {
        live::null(stdin().lock(), stdout().lock())?;
        return Ok(Status::Passed);
    }
    let (tiers, _) = tiers::present();
    // The lock of stdin may not leave its thread, and nobody else reads.
    tiers::serve(&tiers, stdin(), stdout()).map_err(|error| Failure(error.to_string()))?;
    Ok(Status::Passed)
}

/// The command line of such a process.
pub fn command(options: &[&str]) -> Result<Vec<OsString>, Failure> {
    let own = || match PROGRAM.get() {
        Some(program) => Ok(program.clone()),
        None => std::env::current_exe().map(|own| vec![own.into_os_string()]),
    };
    let mut command = own().map_err(|error| Failure(format!("this program: {error}")))?;
    command.push("serve".into());
    command.extend(options.iter().map(OsString::from));
    Ok(command)
}
