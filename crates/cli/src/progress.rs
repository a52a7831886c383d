//! Progress of a run: a bar on a terminal, else a line from time to time.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write, stderr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Progress of a run, on stderr. Any thread may report it.
pub(crate) struct Progress {
    bar: ProgressBar,
    lines: Option<Mutex<Lines<Box<dyn Write + Send>>>>,
}

impl Progress {
    /// Begins, with lines that are so far apart where stderr is no terminal.
    pub fn new(interval: Duration) -> Self {
        if stderr().is_terminal() {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}");
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
            return Progress { bar: ProgressBar::new(0).with_style(style), lines: None };
        }
        let lines = Lines::new(Box::new(stderr()) as _, interval);
        Progress { bar: ProgressBar::hidden(), lines: Some(Mutex::new(lines)) }
    }

    /// Begins a bar where stderr is a terminal; elsewhere nothing is printed.
    pub fn on_terminal(interval: Duration) -> Self {
        match stderr().is_terminal() {
            true => Progress::new(interval),
            false => Progress { bar: ProgressBar::hidden(), lines: None },
        }
    }

    /// Tells that `done` of `all` are done, of which `what` was the last.
    pub fn report(&self, done: usize, all: usize, what: &str) {
        self.bar.set_length(all as u64);
        self.bar.set_position(done as u64);
        self.bar.set_message(what.to_string());
        // Another thread that is telling at this moment tells enough.
        if let Some(Ok(mut lines)) = self.lines.as_ref().map(Mutex::try_lock) {
            lines.report(done, all, what);
        }
    }

    /// Ends: a bar goes, lines stay.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Lines that are at least an interval apart.
#[derive(Debug)]
pub struct Lines<W> {
    out: W,
    interval: Duration,
    begun: Instant,
    last: Instant,
}

impl<W: Write> Lines<W> {
    /// Begins.
    pub fn new(out: W, interval: Duration) -> Self {
        let now = Instant::now();
        Lines { out, interval, begun: now, last: now }
    }

    /// Tells that `done` of `all` are done, if the last line is long enough ago.
    pub fn report(&mut self, done: usize, all: usize, what: &str) {
        if self.last.elapsed() < self.interval {
            return;
        }
        self.last = Instant::now();
        let seconds = self.begun.elapsed().as_secs();
        // Progress that nobody can read is no reason to stop.
        let _ = writeln!(self.out, "{done}/{all} after {seconds} s: {what}");
    }
}
