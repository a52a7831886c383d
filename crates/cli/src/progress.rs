//! How far a run is: a bar on a terminal, else a line from time to time.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write, stderr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The option that the runs share which take more than seconds.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Interval {
    /// Seconds between lines of progress on stderr, where it is no terminal.
    #[arg(long, value_name = "S", default_value_t = 10)]
    progress: u64,
}

/// How far a run is, on stderr. It can be told from any thread.
pub struct Progress {
    bar: ProgressBar,
    lines: Option<Mutex<Lines<Box<dyn Write + Send>>>>,
}

impl Progress {
    /// Begins.
    pub fn new(interval: Interval) -> Self {
        if stderr().is_terminal() {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}");
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
            return Progress { bar: ProgressBar::new(0).with_style(style), lines: None };
        }
        let lines = Lines::new(Box::new(stderr()) as _, Duration::from_secs(interval.progress));
        Progress { bar: ProgressBar::hidden(), lines: Some(Mutex::new(lines)) }
    }

    /// Tells that `done` of `all` are done, of which `what` was the last.
    pub fn tell(&self, done: usize, all: usize, what: &str) {
        self.bar.set_length(all as u64);
        self.bar.set_position(done as u64);
        self.bar.set_message(what.to_string());
        // Another thread that is telling at this moment tells enough.
        if let Some(Ok(mut lines)) = self.lines.as_ref().map(Mutex::try_lock) {
            lines.tell(done, all, what);
        }
    }

    /// Ends: a bar goes, lines stay.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Lines that are at least an interval apart.
struct Lines<W> {
    out: W,
    interval: Duration,
    begun: Instant,
    last: Instant,
}

impl<W: Write> Lines<W> {
    fn new(out: W, interval: Duration) -> Self {
        let now = Instant::now();
        Lines { out, interval, begun: now, last: now }
    }

    fn tell(&mut self, done: usize, all: usize, what: &str) {
        if self.last.elapsed() < self.interval {
            return;
        }
        self.last = Instant::now();
        let seconds = self.begun.elapsed().as_secs();
        // Progress that nobody can read is no reason to stop.
        let _ = writeln!(self.out, "{done}/{all} after {seconds} s: {what}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(interval: Duration) -> String {
        let mut lines = Lines::new(Vec::new(), interval);
        lines.tell(1, 2, "first");
        lines.tell(2, 2, "second");
        String::from_utf8(lines.out).unwrap()
    }

    #[test]
    fn lines_are_an_interval_apart() {
        let all = told(Duration::ZERO);
        let lines: Vec<&str> = all.lines().collect();
        assert!(lines.len() == 2 && lines[0].starts_with("1/2 after "), "{all}");
        assert!(lines[1].ends_with(" s: second"), "{all}");
        assert_eq!(told(Duration::from_secs(3600)), "");
    }
}
