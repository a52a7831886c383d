//! `etalon serve`: the process in which `etalon verify` computes the cuda tier.

use crate::outcome::{Failure, Outcome};
use etalon_conformance::report::Status;
use etalon_conformance::tiers;
use std::io::{stdin, stdout};

pub fn run() -> Outcome {
    let (tiers, _) = tiers::present();
    // The lock of stdin may not leave its thread, and nobody else reads.
    tiers::serve(&tiers, stdin(), stdout()).map_err(|error| Failure(error.to_string()))?;
    Ok(Status::Passed)
}
