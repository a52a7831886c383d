//! Timing a pass, and what comes of it.

use super::arguments::Arguments;
use super::tune::{self, Best, Run};
use crate::noise::Times;
use crate::options::mode_name;
use crate::outcome::Failure;
use etalon_problem::{Algorithm, Error, Pass};
use etalon_simd::{Mode, Options};
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

/// The figures of a run in the making.
pub struct Bench<'a> {
    pub arguments: &'a Arguments,
    pub options: Options,
    pub figures: Vec<Figure>,
}

impl Bench<'_> {
    /// Whether a pass was asked for.
    pub fn wants(&self, pass: Pass) -> bool {
        self.arguments.pass.is_empty() || self.arguments.pass.contains(&pass)
    }

    /// Times a pass of so many flops, if it is wanted; a backward pass in every mode that the
    /// algorithm has.
    pub fn add(
        &mut self,
        subject: &Subject,
        (pass, flops): (Pass, u64),
        run: &mut Run<'_>,
    ) -> Result<(), Failure> {
        if !self.wants(pass) {
            return Ok(());
        }
        let is = |algorithm: Algorithm| subject.algorithm == algorithm.name();
        let moded = pass == Pass::Backward && !is(Algorithm::LinearAttention);
        let modes = if moded { &self.arguments.mode[..] } else { &[Mode::Auto] };
        for &mode in modes {
            if mode == Mode::ForwardGradient && !is(Algorithm::AttentionLse) {
                continue;
            }
            let options = Options { mode, ..self.options };
            let times = self.time(&mut || run(&options))?;
            let candidates = match self.arguments.tune {
                true => tune::candidates(is(Algorithm::LinearAttention), pass),
                false => Vec::new(),
            };
            let best = match candidates.is_empty() {
                true => None,
                false => Some(tune::best(&candidates, &options, self.arguments.seconds, run)?),
            };
            self.figures.push(Figure {
                subject: subject.clone(),
                pass: pass.name(),
                mode: mode_name(mode),
                flops,
                times,
                gflops: flops as f64 / times.median_ns.max(1) as f64,
                share: 0.0, // when the peak is known
                gigabytes: None,
                best,
            });
        }
        Ok(())
    }

    /// The times of a pass. The first run, which warms the caches, does not count.
    fn time(&self, run: &mut dyn FnMut() -> Result<(), Error>) -> Result<Times, Error> {
        run()?;
        let begin = Instant::now();
        let mut times = Vec::new();
        while times.len() < 3 || begin.elapsed().as_secs_f64() < self.arguments.seconds {
            let start = Instant::now();
            run()?;
            times.push(start.elapsed().as_nanos() as u64);
        }
        Ok(Times::new(times))
    }
}
