//! Timing a pass, and what comes of it.

use super::tune::Best;
use crate::noise::Times;
use etalon_problem::Error;
use serde::Serialize;
use std::time::Instant;

/// What is timed.
#[derive(Debug, Clone, Serialize)]
pub struct Subject {
    pub algorithm: &'static str,
    /// The mask, or the decay.
    pub mask: String,
    pub batch: usize,
    pub length: usize,
    pub dim: usize,
    pub heads: usize,
    pub key_heads: usize,
}

/// One pass of one problem, timed.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    #[serde(flatten)]
    pub subject: Subject,
    pub pass: &'static str,
    pub mode: &'static str,
    /// Of the pass: two for each multiplication and addition of the products of visible pairs.
    pub flops: u64,
    #[serde(flatten)]
    pub times: Times,
    pub gflops: f64,
    /// Of the peak.
    pub share: f64,
    /// GB/s of the states, of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gigabytes: Option<Bandwidth>,
    /// The best of the tile sizes that were searched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
}

/// How fast a step moves the states, and how fast this machine can.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Bandwidth {
    /// GB/s of the states, read and written.
    pub states: f64,
    /// GB/s of memory of their size that is read and written and nothing else, in the same run.
    pub memory: f64,
}

/// The times of a pass, for at least so many seconds. The first run, which warms the caches, does not
/// count.
pub fn time(seconds: f64, run: &mut dyn FnMut() -> Result<(), Error>) -> Result<Times, Error> {
    run()?;
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.len() < 3 || begin.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        run()?;
        times.push(start.elapsed().as_nanos() as u64);
    }
    Ok(Times::new(times))
}
