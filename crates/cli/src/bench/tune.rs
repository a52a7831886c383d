//! The search for the best tiles, and of a device for the best mode.

use crate::table::Table;
use crate::units::{bytes, time};
use etalon_problem::{Blocking, Error, Pass};
use etalon_simd::Options;
use serde::Serialize;
use std::fmt;
use std::time::{Duration, Instant};

/// Tiles of queries and of keys.
const QUERIES: [usize; 7] = [48, 96, 144, 192, 288, 384, 768];
const KEYS: [usize; 6] = [32, 64, 96, 128, 192, 256];

/// Chunks and micro-chunks of linear attention.
const CHUNKS: [usize; 8] = [24, 32, 48, 64, 96, 128, 192, 256];
const MICRO: [usize; 4] = [12, 24, 48, 96];

/// A pass with other options.
pub type Run<'a> = dyn FnMut(&Options) -> Result<(), Error> + 'a;

/// Tile sizes that are searched, of linear attention or of another algorithm; nothing where a pass has no tiles.
fn candidates(linear: bool, pass: Pass) -> Vec<Blocking> {
    let (rows, cols): (&[usize], &[usize]) = match pass {
        Pass::Step => (&[], &[]),
        _ if linear => (&CHUNKS, &MICRO),
        _ => (&QUERIES, &KEYS),
    };
    let all = rows.iter().flat_map(|&q| cols.iter().map(move |&k| Blocking::new(q, k)));
    // No micro-chunk is larger than its chunk.
    all.filter(|x| !linear || x.keys <= x.queries).collect()
}

/// Candidates that are timed again, each beside the default.
const FINALISTS: usize = 3;

/// Speedup below which a difference counts as noise.
const NOISE: f64 = 1.02;

/// The best tiles of a search.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Best {
    /// `None`: no tiles beat the default.
    blocking: Option<Blocking>,
    /// The time of the default divided by theirs.
    gain: f64,
}

impl fmt::Display for Best {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(Blocking { queries, keys }) = self.blocking else {
            return write!(f, "no tiles beat the default, Options::default()");
        };
        write!(
            f,
            "{:.2} times as fast with Options {{ blocking: Some(Blocking {{ queries: {queries}, \
             keys: {keys} }}), ..Options::default() }}",
            self.gain
        )
    }
}

/// The best tiles for a pass, of linear attention or of another algorithm: all candidates once, then
/// the fastest in turns with the default, each for `seconds`. None for a pass without tiles.
pub fn best(
    linear: bool,
    pass: Pass,
    options: &Options,
    seconds: f64,
    run: &mut Run<'_>,
) -> Result<Option<Best>, Error> {
    let with = |blocking| Options { blocking, ..*options };
    let mut timed = Vec::new();
    for blocking in candidates(linear, pass) {
        timed.push((once(&with(Some(blocking)), run)?, blocking));
    }
    timed.sort_by_key(|&(time, _)| time);
    let mut best = Best { blocking: None, gain: NOISE };
    for &(_, blocking) in timed.iter().take(FINALISTS) {
        let begin = Instant::now();
        let mut gains = Vec::new();
        while gains.len() < 5 || begin.elapsed().as_secs_f64() < seconds {
            let default = once(&with(None), run)?.as_secs_f64();
            gains.push(default / once(&with(Some(blocking)), run)?.as_secs_f64().max(1e-9));
        }
        gains.sort_by(f64::total_cmp);
        let gain = gains[gains.len() / 2];
        if gain > best.gain {
            best = Best { blocking: Some(blocking), gain };
        }
    }
    Ok(Some(best).filter(|_| !timed.is_empty()))
}

fn once(options: &Options, run: &mut Run<'_>) -> Result<Duration, Error> {
    let start = Instant::now();
    run(options)?;
    Ok(start.elapsed())
}

/// A way of the cuda tier to compute a pass, timed beside the others.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Tried {
    pub mode: &'static str,
    pub level: Option<&'static str>,
    pub blocking: Option<Blocking>,
    /// True for the default of the tier.
    pub usual: bool,
    pub refusal: Option<String>,
    /// Of each turn the median.
    pub times_ns: Vec<u64>,
    pub scratch_bytes: usize,
}

impl Tried {
    pub fn median_ns(&self) -> u64 {
        let mut times = self.times_ns.clone();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or(0)
    }
}

/// Results of a search, the fastest first.
pub fn table(tried: &[Tried]) -> String {
    let mut table = Table::new(["mode", "level", "tiles", "time", "of the usual", "scratch", ""]);
    let usual = tried.iter().find(|x| x.usual).map(|x| x.median_ns() as f64);
    for x in tried.iter().filter(|x| x.refusal.is_none()) {
        let ns = x.median_ns() as f64;
        table.add_row([
            x.mode.to_string(),
            x.level.unwrap_or_default().to_string(),
            x.blocking.map_or(String::new(), |x| format!("{}x{}", x.queries, x.keys)),
            time(ns * 1e-9),
            usual.map_or(String::new(), |usual| format!("{:.2}", ns / usual.max(1.0))),
            bytes(x.scratch_bytes),
            if x.usual { "usual" } else { "" }.to_string(),
        ]);
    }
    let mut text = table.to_string();
    for x in tried {
        if let Some(reason) = &x.refusal {
            text += &format!("\nmode {}: {reason}", x.mode);
        }
    }
    text
}
