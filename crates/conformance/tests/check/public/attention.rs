//! Attention, forward: right kernels with one mistake in their key heads, inputs, scores or results.

mod inputs;
mod masks;
mod results;
mod scores;

pub use inputs::BUGS as OF_INPUTS;
pub use masks::BUGS as OF_MASKS;
pub use results::BUGS as OF_RESULTS;
pub use scores::BUGS as OF_SCORES;

use super::kernel::{Attention as Kernel, ask, bias, made, visible};
use crate::bench::Bench;
use etalon_conformance::tensor::{Tensors, Values};
use etalon_problem::{Dtype, Pass, Problem, Scores};
use ndarray::ArrayD;

const HIDDEN: f64 = f64::NEG_INFINITY;

fn forward(problem: impl Into<Problem>) -> Bench {
    ask(problem, Pass::Forward, Dtype::F32)
}

fn bf16(problem: impl Into<Problem>) -> Bench {
    ask(problem, Pass::Forward, Dtype::Bf16)
}

/// A pair of a query and a key, and what scores are made of.
struct Pair<'a> {
    scores: &'a Scores,
    x: &'a Values,
    at: [usize; 4],
    /// q·k.
    dot: f64,
    /// σ q·k.
    s: f64,
    /// The numbers of the query and the key.
    i: usize,
    j: usize,
}

impl Pair<'_> {
    fn is_visible(&self) -> bool {
        visible(self.scores, self.at)
    }

    /// The bias of the pair.
    fn bias(&self) -> f64 {
        bias(self.x, self.at)
    }

    /// Query less key, aligned at the ends of 21 queries and 25 keys.
    fn distance(&self) -> i64 {
        self.i as i64 + 4 - self.j as i64
    }
}

/// A right kernel but for S of a pair.
fn scored(bench: Bench, score: impl Fn(&Pair<'_>) -> f64 + 'static) -> (Bench, Tensors) {
    made(bench, |kernel| {
        let (scores, x) = (kernel.scores, kernel.x.clone());
        kernel.score = Box::new(move |at, dot| {
            let [_, _, i, j] = at;
            score(&Pair { scores, x: &x, at, dot, s: scores.scale() * dot, i, j })
        });
        kernel.forward()
    })
}

/// A right kernel but for its mask.
fn masked(bench: Bench, allows: impl Fn(&Pair<'_>) -> bool + 'static) -> (Bench, Tensors) {
    scored(bench, move |pair| if allows(pair) { pair.s } else { HIDDEN })
}

/// A right kernel but for S of a visible pair.
fn rescored(bench: Bench, score: impl Fn(&Pair<'_>) -> f64 + 'static) -> (Bench, Tensors) {
    scored(bench, move |pair| if pair.is_visible() { score(pair) } else { HIDDEN })
}

/// A right kernel but for the key head of a query head.
fn with_key_head(bench: Bench, key_head: fn(usize) -> usize) -> (Bench, Tensors) {
    made(bench, |kernel| {
        kernel.key_head = Box::new(key_head);
        kernel.forward()
    })
}

/// A right kernel but for one output.
fn with_output(
    bench: Bench,
    name: &str,
    compute: impl FnOnce(&mut Kernel<'_>) -> ArrayD<f64>,
) -> (Bench, Tensors) {
    made(bench, |kernel| [(name.to_string(), compute(kernel))].into())
}
