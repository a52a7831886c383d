//! One request to the host, and how the host goes about it.

use super::rows::{Rows, larger};
use etalon_problem::{Pass, Problem};
use std::collections::BTreeMap;
use std::ops::Range;

/// How the softmax runs over the key tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Softmax {
    /// A running maximum; sums are rescaled whenever it grows.
    Streaming,
    /// As streaming, but rescaled only when the maximum grows by more than 5.
    Lazy,
    /// The maximum first, in a sweep of its own.
    TwoPass,
}

/// Ways to compute the same: none of them may trip a law.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// Its name.
    pub name: &'static str,
    /// Keys, tokens or classes in a tile.
    pub tile: usize,
    /// How the softmax runs.
    pub softmax: Softmax,
    /// exp as a power of two.
    pub base2: bool,
    /// Rows are visited from the last to the first, which turns the sums of dk and dv around.
    pub backwards: bool,
}

/// The plain host.
pub const PLAIN: Style =
    Style { name: "plain", tile: 16, softmax: Softmax::Streaming, base2: false, backwards: false };

/// Correct but different: the controls.
pub const CONTROLS: [Style; 6] = [
    PLAIN,
    Style { name: "tile-of-1", tile: 1, ..PLAIN },
    Style { name: "tile-of-128", tile: 128, ..PLAIN },
    Style { name: "two-pass", softmax: Softmax::TwoPass, tile: 48, ..PLAIN },
    Style { name: "lazy-rescale", softmax: Softmax::Lazy, ..PLAIN },
    Style { name: "base-2-reversed", base2: true, backwards: true, ..PLAIN },
];

/// A bug that kernels ask for, by the name of its mutant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bug(pub &'static str);

/// One request.
#[derive(Clone)]
pub(crate) struct Job {
    pub style: Style,
    pub bug: Option<Bug>,
    /// Whether the rows after the last whole tile are dropped.
    pub drops_tail: bool,
    /// e⁰, which is 1 except in a bug.
    pub exp_of_zero: f32,
    /// How many requests came before it.
    pub run: usize,
    pub problem: Problem,
    pub pass: Pass,
    /// The inputs of the pass; a later pass also has what the forward pass returned.
    pub inputs: BTreeMap<String, Rows>,
}

impl Job {
    pub fn is(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// An input that may be absent.
    pub fn given(&self, name: &str) -> Option<&Rows> {
        self.inputs.get(name)
    }

    /// An input; one that is absent has empty rows.
    pub fn input(&self, name: &str) -> &Rows {
        static ABSENT: Rows = Rows { data: Vec::new(), shape: [0; 4] };
        self.given(name).unwrap_or(&ABSENT)
    }

    /// 0..n in tiles.
    pub fn tiles(&self, n: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + use<> {
        let tile = self.style.tile;
        let end = if self.drops_tail && n > tile { n - n % tile } else { n };
        (0..end.div_ceil(tile)).map(move |at| at * tile..(at * tile + tile).min(end))
    }

    /// Rows 0..n in the order in which this style visits them.
    pub fn order(&self, n: usize) -> impl Iterator<Item = usize> + use<> {
        let backwards = self.style.backwards;
        (0..n).map(move |i| if backwards { n - 1 - i } else { i })
    }

    pub fn exp(&self, x: f32) -> f32 {
        match self.style.base2 {
            _ if x == 0.0 => self.exp_of_zero,
            true => (x * std::f32::consts::LOG2_E).exp2(),
            false => x.exp(),
        }
    }

    /// The running maximum after a tile whose maximum is `found`, and the factor by which that
    /// scales the sums so far.
    pub fn raise(&self, m: f32, found: f32) -> (f32, f32) {
        let new = larger(m, found);
        let far = new > m + 5.0 || m == f32::NEG_INFINITY || new.is_nan();
        match new == m || self.style.softmax == Softmax::Lazy && !far {
            true => (m, 1.0),
            false if m == f32::NEG_INFINITY => (new, 0.0),
            false => (new, self.exp(m - new)),
        }
    }
}
