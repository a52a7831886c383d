//! Times of a pass, and whether the machine did something else beside.

use crate::units::digits;
use serde::Serialize;
use std::time::Instant;

/// The times of the runs of a pass, in ns.
#[derive(Debug, Clone, Copy, Serialize)]
#[allow(missing_docs)] // the names say it
pub struct Times {
    pub runs: usize,
    pub min_ns: u64,
    pub lower_quartile_ns: u64,
    pub median_ns: u64,
    pub upper_quartile_ns: u64,
    pub max_ns: u64,
}

/// The runs of a pass beside those of the peak.
pub struct Runs {
    /// The first run, which fetches its memory from the system.
    pub first_ns: u64,
    /// The others.
    pub times: Times,
    /// The median of `peak · time` over them, `peak` measured before and after each: a clock that rises and falls
    /// changes both.
    pub possible: f64,
}

/// The most runs whose times are kept: more tell nothing new.
const MOST: usize = 1 << 20;

/// A larger spread says that times are not to be relied on.
pub const SPREAD: f64 = 0.2;

/// True if so many runs since an instant are enough for a time: three, for at least so many seconds, or a million.
pub fn are_enough(runs: usize, begin: Instant, seconds: f64) -> bool {
    runs >= 3 && (runs >= MOST || begin.elapsed().as_secs_f64() >= seconds)
}

impl Runs {
    /// A first run, and others for at least so many seconds, or a million.
    pub fn beside<E>(
        seconds: f64,
        mut run: impl FnMut() -> Result<(), E>,
        mut peak: impl FnMut() -> f64,
    ) -> Result<Self, E> {
        let mut timed = || {
            let start = Instant::now();
            run().map(|()| start.elapsed().as_nanos() as u64)
        };
        let first_ns = timed()?;
        let begin = Instant::now();
        let (mut times, mut products, mut before) = (Vec::new(), Vec::new(), peak());
        while !are_enough(times.len(), begin, seconds) {
            let ns = timed()?;
            let after = peak();
            times.push(ns);
            products.push(ns.max(1) as f64 * (before + after) / 2.0);
            before = after;
        }
        products.sort_by(f64::total_cmp);
        Ok(Runs { first_ns, times: Times::new(times), possible: products[products.len() / 2] })
    }
}

impl Times {
    /// The order statistics of some times; of none, zeros.
    pub fn new(mut times: Vec<u64>) -> Self {
        times.sort_unstable();
        let at = |place: usize| times.get(place).copied().unwrap_or(0);
        let (runs, last) = (times.len(), times.len().saturating_sub(1));
        Times {
            runs,
            min_ns: at(0),
            lower_quartile_ns: at(last / 4),
            median_ns: at(runs / 2),
            upper_quartile_ns: at(last - last / 4),
            max_ns: at(last),
        }
    }

    /// Reach of the middle half of the runs to either side, divided by the median.
    pub fn spread(&self) -> f64 {
        let half = self.upper_quartile_ns.saturating_sub(self.lower_quartile_ns) as f64 / 2.0;
        half / self.median_ns.max(1) as f64
    }
}

/// Spread, as a share, above which the machine was busy with something else.
const BUSY: f64 = 0.05;

/// Signs that the machine was busy: its peak in GFLOP/s was another one after the runs than before
/// them, or their times spread.
pub fn busy([before, after]: [f64; 2], times: &[Times]) -> Vec<String> {
    let mut signs = Vec::new();
    let limit = 100.0 * BUSY;
    if (before - after).abs() > BUSY * before.max(after) {
        signs.push(format!(
            "the machine is busy: its peak was {} GFLOP/s before the runs and {} after them, more \
             than {limit} % apart",
            digits(before),
            digits(after)
        ));
    }
    let wide = times.iter().filter(|times| times.spread() > BUSY).count();
    if wide > 0 {
        signs.push(format!(
            "{wide} of {} times spread by more than ± {limit} %: the machine is busy, or --seconds \
             is too short",
            times.len()
        ));
    }
    signs
}
