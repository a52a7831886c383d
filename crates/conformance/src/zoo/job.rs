//! One request to the host, and how the host goes about it.

use super::rows::{Rows, larger};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Pass, Problem};
use std::collections::BTreeMap;
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// The order of the softmax over the key tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Softmax {
    /// A running maximum; sums are rescaled whenever it grows.
    Streaming,
    /// As streaming, but rescaled only when the maximum grows by more than 5.
    Lazy,
    /// The maximum first, in a sweep of its own.
    TwoPass,
}

/// The computation of e^(x − m).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exp {
    /// The exponential of the difference.
    Natural,
    /// 2 to the difference times log₂ e.
    Base2,
    /// 2 to x log₂ e − m log₂ e in one fused operation, so that the product with m alone is rounded.
    Fused,
}

/// Ways to compute the same: none of them may trip a law.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// Its name.
    pub name: &'static str,
    /// Keys, tokens or classes in a tile.
    pub tile: usize,
    /// The order of the softmax.
    pub softmax: Softmax,
    /// The computation of weights.
    pub exp: Exp,
    /// lse as the logarithm to base 2 times ln 2.
    pub log2: bool,
    /// Numbers below the smallest normal one are taken and returned as 0.
    pub flushes: bool,
    /// Rows are visited from the last to the first, which turns the sums of dk and dv around.
    pub backwards: bool,
}

impl Style {
    /// A number as this style keeps it.
    pub(crate) fn kept(self, x: f32) -> f32 {
        if self.flushes && x.is_subnormal() { 0.0 } else { x }
    }
}

/// The plain host.
pub const PLAIN: Style = Style {
    name: "plain",
    tile: 16,
    softmax: Softmax::Streaming,
    exp: Exp::Natural,
    log2: false,
    flushes: false,
    backwards: false,
};

/// Correct but different, each in several ways: the controls.
pub const CONTROLS: [Style; 6] = [
    PLAIN,
    Style { name: "lazy-rescale", softmax: Softmax::Lazy, ..PLAIN },
    Style { name: "base-2-reversed", exp: Exp::Base2, backwards: true, tile: 48, ..PLAIN },
    Style { name: "base-2-lse", exp: Exp::Base2, log2: true, softmax: Softmax::TwoPass, ..PLAIN },
    Style { name: "fused-base-2", exp: Exp::Fused, tile: 128, ..PLAIN },
    Style { name: "flush-to-zero", flushes: true, tile: 1, ..PLAIN },
];

/// A bug that kernels ask for, by the name of its mutant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bug(pub &'static str);

/// One request.
#[derive(Clone)]
pub(crate) struct Job {
    pub style: Style,
    pub bug: Option<Bug>,
    /// True if the rows after the last whole tile are dropped.
    pub drops_tail: bool,
    /// The number of requests before it.
    pub run: usize,
    pub problem: Problem,
    pub pass: Pass,
    /// Of a filtered backward pass of linear_cross_entropy, by what it leaves out.
    pub filter: Option<Filter>,
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

    /// e^(x − m)
    pub fn exp(&self, x: f32, m: f32) -> f32 {
        let e = match self.style.exp {
            _ if x == f32::NEG_INFINITY => 0.0,
            Exp::Fused => x.mul_add(LOG2_E, -(m * LOG2_E)).exp2(),
            Exp::Natural => (x - m).exp(),
            Exp::Base2 => ((x - m) * LOG2_E).exp2(),
        };
        self.style.kept(e)
    }

    /// m + ln l
    pub fn lse(&self, m: f32, l: f32) -> f32 {
        if self.style.log2 { m.mul_add(LOG2_E, l.log2()) * LN_2 } else { m + l.ln() }
    }

    /// The running maximum after a tile whose maximum is `found`, and the factor by which that
    /// scales the sums so far.
    pub fn raise(&self, m: f32, found: f32) -> (f32, f32) {
        let new = larger(m, found);
        let far = new > m + 5.0 || m == f32::NEG_INFINITY || new.is_nan();
        match new == m || self.style.softmax == Softmax::Lazy && !far {
            true => (m, 1.0),
            false if m == f32::NEG_INFINITY => (new, 0.0),
            false => (new, self.exp(m, new)),
        }
    }
}
