//! The integer probe: elements of −1, 0 and 1 in the first and last column, σ = 1/2, and decays of 1
//! and 0. Every term is a whole number of halves and every sum, whatever its order, stays below 2²⁴ of
//! them (dg_gamma, the largest, adds 257³/6 · 4 at most), so that f32 holds all of it exactly.

use super::parts::linear;
use crate::generate::Stream;
use crate::laws::flaw::{Flaw, Judgement, refute};
use crate::laws::tensors::{Equality, difference};
use crate::laws::trial::Trial;
use crate::tensor::{Stored, Tensor, Tensors};
use crate::tier::Hints;
use etalon_problem::{Axis, Decay, Error, LinearAttention, Pass, Problem, Role, TokenSequence};
use ndarray::{ArrayD, IxDyn};
use std::collections::BTreeMap;

type Arrays = BTreeMap<&'static str, ArrayD<f64>>;

pub(super) fn integers(trial: &Trial<'_>) -> Judgement {
    let problem = linear(trial.case)?.clone().scale(0.5);
    let arrays = elements(trial, &problem);
    let operands = problem.operands(Pass::Backward);
    let store = |(name, x): (&&'static str, &ArrayD<f64>)| {
        let operand = operands.iter().find(|operand| operand.name == *name)?;
        Some((name.to_string(), Tensor::store(x, Stored::of(operand.precision, trial.case.dtype))))
    };
    let inputs: Tensors = arrays.iter().filter_map(store).collect();
    let outputs = trial.ask(&Problem::from(problem.clone()), &inputs, Hints::default())?;
    let expected = expected(&problem, &arrays)?;
    for operand in problem.operands(trial.pass).iter().filter(|x| x.role == Role::Output) {
        let name = operand.name;
        let exact = expected.get(name).ok_or_else(|| Flaw::Vacuous(format!("no {name}")))?;
        let exact = Tensor::store(exact, Stored::of(operand.precision, trial.case.dtype));
        refute(difference(name, &outputs[name], &exact, Equality::Numbers, |_| true))?;
    }
    Ok(Some(0.0))
}

fn elements(trial: &Trial<'_>, problem: &LinearAttention) -> Arrays {
    let operands = problem.operands(Pass::Backward).into_iter();
    let array = |operand: etalon_problem::Operand| {
        let stream = Stream::new(trial.case.spec.seed, operand.name);
        let state = operand.has(Axis::Sequences);
        let width = operand.shape.last().copied().unwrap_or(1);
        let mut at = 0;
        let values = ArrayD::from_shape_fn(IxDyn(&operand.shape), |index| {
            at += 1;
            let index = ndarray::Dimension::slice(&index);
            let column = index.last().copied().unwrap_or(0);
            match operand.name {
                "g" if stream.below(at, 5) == 0 => f64::NEG_INFINITY,
                "g" | "g_gamma" => 0.0,
                // Of a state the four corners.
                _ if state && index[2] != 0 && index[2] + 1 != problem.extents.dim => 0.0,
                _ if column != 0 && column + 1 != width => 0.0,
                _ => stream.integer(at, -1, 1) as f64,
            }
        });
        (operand.name, values)
    };
    operands.filter(|operand| operand.role.is_given()).map(array).collect()
}

/// All results, pair of tokens by pair of tokens, for decays of 1 and 0.
fn expected(problem: &LinearAttention, x: &Arrays) -> Result<Arrays, Error> {
    let mut y = Arrays::new();
    for pass in [Pass::Forward, Pass::Backward] {
        for operand in problem.operands(pass).iter().filter(|x| x.role == Role::Output) {
            y.insert(operand.name, ArrayD::zeros(IxDyn(&operand.shape)));
        }
    }
    let mut dg = ArrayD::zeros(IxDyn(&problem.g_shape()));
    for s in problem.list_sequences() {
        for h in 0..problem.extents.key_heads {
            Head { problem, x, s, h }.add(&mut y, &mut dg);
        }
    }
    if let Some(dg_gamma) = y.get_mut("dg_gamma") {
        *dg_gamma = dg.sum_axis(ndarray::Axis(2)).sum_axis(ndarray::Axis(0));
    }
    if let Some(place) = y.get_mut("dg") {
        *place = dg;
    }
    Ok(y)
}

struct Head<'a> {
    problem: &'a LinearAttention,
    x: &'a Arrays,
    s: TokenSequence,
    h: usize,
}

/// Where something comes in: with the initial state, or with a token. Where it goes out: at a
/// token, by one query head, or with the final state.
#[derive(Clone, Copy, PartialEq)]
enum End {
    State,
    Token(usize),
}

impl Head<'_> {
    /// The columns that are not 0.
    fn columns(width: usize) -> impl Iterator<Item = usize> + Clone {
        (0..width).filter(move |&c| c == 0 || c + 1 == width)
    }

    fn left(&self, from: End, to: End) -> bool {
        let Head { problem, x, s, h } = self;
        let first = if let End::Token(j) = from { j + 1 } else { 0 };
        let last = if let End::Token(i) = to { i + 1 } else { s.tokens };
        problem.decay != Decay::PerToken
            || (first..last).all(|t| x["g"][[s.batch, *h, s.start + t]] == 0.0)
    }

    /// The matrix that comes in, and the one that goes out, of which the loss is the inner product.
    fn into(&self, from: End, d: usize, e: usize) -> f64 {
        let Head { x, s, h, .. } = self;
        match from {
            End::State => x.get("initial_state").map_or(0.0, |x| x[[s.index, *h, d, e]]),
            End::Token(j) => {
                x["k"][[s.batch, *h, s.start + j, d]] * x["v"][[s.batch, *h, s.start + j, e]]
            }
        }
    }

    fn out(&self, to: End, head: usize, d: usize, e: usize) -> f64 {
        let Head { problem, x, s, h } = self;
        match to {
            End::State => x.get("dfinal_state").map_or(0.0, |x| x[[s.index, *h, d, e]]),
            End::Token(i) => {
                let row = [s.batch, head, s.start + i];
                let (q, dout) =
                    (x["q"][[row[0], row[1], row[2], d]], x["dout"][[row[0], row[1], row[2], e]]);
                problem.scale * q * dout
            }
        }
    }

    fn add(&self, y: &mut Arrays, dg: &mut ArrayD<f64>) {
        let Head { problem, s, h, .. } = self;
        let ends = || std::iter::once(End::State).chain((0..s.tokens).map(End::Token));
        let order = |from: End, to: End| match (from, to) {
            (End::Token(j), End::Token(i)) => j <= i,
            _ => true,
        };
        for to in ends() {
            let group = h * problem.group()..(h + 1) * problem.group();
            let heads = if to == End::State { 0..1 } else { group };
            for (head, from) in heads.flat_map(|head| ends().map(move |from| (head, from))) {
                if order(from, to) && self.left(from, to) {
                    self.pair(from, to, head, y, dg);
                }
            }
        }
    }

    /// What one way through the state adds to every result.
    fn pair(&self, from: End, to: End, head: usize, y: &mut Arrays, dg: &mut ArrayD<f64>) {
        let Head { problem, x, s, h } = self;
        let (mut whole, sigma) = (0.0, problem.scale);
        let row = |t: usize| s.start + t;
        let (dim, width) = (problem.extents.dim, problem.value_dim);
        for (d, e) in Self::columns(dim).flat_map(|d| Self::columns(width).map(move |e| (d, e))) {
            let (inward, outward) = (self.into(from, d, e), self.out(to, head, d, e));
            whole += inward * outward;
            match from {
                End::State => {
                    let place = y.get_mut("dinitial_state");
                    place.into_iter().for_each(|y| y[[s.index, *h, d, e]] += outward);
                }
                End::Token(j) => {
                    let (k, v) = ([s.batch, *h, row(j), d], [s.batch, *h, row(j), e]);
                    add(y, "dk", &k, outward * x["v"][v]);
                    add(y, "dv", &v, outward * x["k"][k]);
                }
            }
            match to {
                End::State => {
                    let place = y.get_mut("final_state");
                    place.into_iter().for_each(|y| y[[s.index, *h, d, e]] += inward);
                }
                End::Token(i) => {
                    let (q, o) = ([s.batch, head, row(i), d], [s.batch, head, row(i), e]);
                    add(y, "dq", &q, sigma * inward * x["dout"][o]);
                    add(y, "o", &o, sigma * inward * x["q"][q]);
                    add(y, "dscale", &[], inward * x["q"][q] * x["dout"][o]);
                }
            }
        }
        let first = if let End::Token(j) = from { j + 1 } else { 0 };
        let last = if let End::Token(i) = to { i + 1 } else { s.tokens };
        (first..last).for_each(|t| dg[[s.batch, *h, row(t)]] += whole);
    }
}

fn add(y: &mut Arrays, name: &str, place: &[usize], term: f64) {
    if let Some(y) = y.get_mut(name) {
        y[place] += term;
    }
}
