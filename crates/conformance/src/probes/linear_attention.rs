//! The integer probe: elements of −1, 0 and 1 in the first and last column, σ = 1/2 (that of a problem which somebody
//! brings), and decays of 1 and 0. Every term is a whole number of halves and every sum, whatever its order, stays
//! below 2²⁴ of them (dg_gamma, the largest, adds 257³/6 · 4 at most), so that f32 holds all of it exactly.

use super::arrays::Arrays;
use super::inputs::{fill, is_dyadic, place};
use crate::generate::Stream;
use crate::laws::compare::close;
use crate::laws::flaw::{Flaw, Judgement, worst};
use crate::laws::tensors::{Equality, everywhere, same};
use crate::laws::trial::Trial;
use crate::tensor::{Tensor, Tensors};
use etalon_problem::{Axis, Decay, Dtype, LinearAttention, Operand, Pass, Problem, TokenSequence};
use std::iter::once;
use std::ops::Range;

pub(crate) fn integer_probe(trial: &Trial<'_>) -> Judgement {
    let Problem::LinearAttention(problem) = &trial.case.problem else { return Ok(None) };
    let linear = match trial.case.is_given() {
        true => problem.clone(),
        false => problem.clone().scale(0.5),
    };
    fits(&linear, trial)?;
    let problem = Problem::from(linear.clone());
    let seed = trial.case.spec.seed;
    let inputs = fill(trial.case, &problem, Pass::Backward, |x, at| element(seed, x, at));
    let outputs = trial.ask(&problem, &inputs)?;
    let x = Arrays::of(&inputs)?;
    let y = results(&linear, trial.pass, &x);
    if !is_dyadic(linear.scale) {
        let sigma = linear.scale;
        let positive = linear.clone().scale(sigma.abs());
        return near(trial, &outputs, &y, &results(&positive, trial.pass, &x.magnitudes()));
    }
    let stored = |name: &str| outputs.get(name).and_then(Tensor::stored);
    let exact = |(name, y)| Some((String::from(name), Tensor::store(y, stored(name)?)));
    let expected: Tensors = y.iter().filter_map(exact).collect();
    same(&outputs, &expected, Equality::Numbers, everywhere)?;
    Ok(Some(0.0))
}

/// Most tokens of a sequence whose sums stay below 2²⁴ halves: of the gradient of a decay per head, which adds up
/// n³/6 · 4 of them, and of the others, n² · 4.
const TOKENS: [usize; 2] = [257, 1448];

/// Most steps over a decay per token, which is looked at between every two tokens.
const STEPS: u128 = 1 << 32;

/// Fails where the sums of whole numbers do not stay exact, or would take too long to make.
fn fits(problem: &LinearAttention, trial: &Trial<'_>) -> Result<(), Flaw> {
    let sequences = problem.list_sequences();
    let longest = sequences.iter().map(|s| s.tokens).max().unwrap_or(0);
    let cubic = problem.decay == Decay::PerHead && trial.pass == Pass::Backward;
    let most = TOKENS[usize::from(!cubic)];
    if longest > most {
        let text = format!("sums of whole numbers stay exact over {most} tokens, not {longest}");
        return Err(Flaw::NotAsked(text));
    }
    let heads = problem.extents.query_heads as u128;
    let steps = |tokens: usize| match problem.decay {
        Decay::PerToken => (tokens as u128).pow(3),
        _ => (tokens as u128).pow(2),
    };
    if heads * sequences.iter().map(|s| steps(s.tokens)).sum::<u128>() > STEPS {
        let text = format!("its exact results take more than {STEPS} steps: fewer tokens will do");
        return Err(Flaw::NotAsked(text));
    }
    Ok(())
}

/// The results of a pass, head by head.
fn results(linear: &LinearAttention, pass: Pass, x: &Arrays) -> Arrays {
    let mut y = Arrays::results(&linear.clone().into(), pass);
    for s in linear.list_sequences() {
        for h in 0..linear.extents.key_heads {
            Head { problem: linear, x, s, h }.add(&mut y);
        }
    }
    y
}

/// Fails unless results are the expected ones up to the roundings of products with a σ that is no power of
/// two, and of what a profile stores of them; `sizes` are the sums of all terms without their signs.
fn near(trial: &Trial<'_>, outputs: &Tensors, y: &Arrays, sizes: &Arrays) -> Judgement {
    let profile = trial.profile();
    let stored = profile.weight_roundoff().max(2.0 * profile.factor);
    let terms = 64.0 * profile.accumulator.unit_roundoff() + stored;
    let there = y.iter().zip(sizes.iter()).filter(|((name, _), _)| outputs.contains_key(*name));
    worst(there.map(|((name, exact), (_, sizes))| {
        let u = outputs[name].dtype().unwrap_or(Dtype::F32).unit_roundoff();
        let limit = sizes * terms + exact.mapv(|x| u * x.abs());
        close(name, &outputs[name].to_f64(name)?, exact, &limit)
    }))
}

fn element(seed: u64, operand: &Operand, at: &[usize]) -> f64 {
    let stream = Stream::new(seed, operand.name);
    // Of a row both ends, of a state the four corners.
    let axes = if operand.has(Axis::Sequences) { 2.. } else { 3.. };
    let edge = |axis: usize| at[axis] == 0 || at[axis] + 1 == operand.shape[axis];
    match operand.name {
        "g" if stream.below(place(0, at), 5) == 0 => f64::NEG_INFINITY,
        "g" | "g_gamma" => 0.0,
        _ if axes.take_while(|axis| *axis < at.len()).all(edge) => {
            stream.integer(place(0, at), -1, 1) as f64
        }
        _ => 0.0,
    }
}

/// One key head of one sequence: all its results, pair of tokens by pair of tokens, for decays of 1
/// and 0.
struct Head<'a> {
    problem: &'a LinearAttention,
    x: &'a Arrays,
    s: TokenSequence,
    h: usize,
}

/// An end of a path through the state: in with the initial state or with a token; out at a token, by one query head,
/// or with the final state.
#[derive(Clone, Copy, PartialEq)]
enum End {
    State,
    Token(usize),
}

impl Head<'_> {
    /// The first and the last column.
    fn columns(width: usize) -> impl Iterator<Item = usize> + Clone {
        (0..width).filter(move |&c| c == 0 || c + 1 == width)
    }

    /// The tokens whose decay lies between two ends.
    fn between(&self, from: End, to: End) -> Range<usize> {
        let first = if let End::Token(j) = from { j + 1 } else { 0 };
        let last = if let End::Token(i) = to { i + 1 } else { self.s.tokens };
        first..last
    }

    /// True if anything is left on the way.
    fn left(&self, from: End, to: End) -> bool {
        let Head { problem, x, s, h } = self;
        problem.decay != Decay::PerToken
            || self.between(from, to).all(|t| x.at("g", &[s.batch, *h, s.start + t]) == 0.0)
    }

    fn add(&self, y: &mut Arrays) {
        let group = self.h * self.problem.group()..(self.h + 1) * self.problem.group();
        let ends = || once(End::State).chain((0..self.s.tokens).map(End::Token));
        for to in ends() {
            let heads = if to == End::State { 0..1 } else { group.clone() };
            for (head, from) in heads.flat_map(|head| ends().map(move |from| (head, from))) {
                let in_order = match (from, to) {
                    (End::Token(j), End::Token(i)) => j <= i,
                    _ => true,
                };
                if in_order && self.left(from, to) {
                    self.pair(from, to, head, y);
                }
            }
        }
    }

    /// Contribution of one path through the state to every result: the matrix that comes in, and the one that goes
    /// out, of which the loss is the inner product.
    fn pair(&self, from: End, to: End, head: usize, y: &mut Arrays) {
        let &Head { problem, x, s, h } = self;
        let (mut whole, sigma) = (0.0, problem.scale);
        let (dim, width) = (problem.extents.dim, problem.value_dim);
        for (d, e) in Self::columns(dim).flat_map(|d| Self::columns(width).map(move |e| (d, e))) {
            let key = |j, c| [s.batch, h, s.start + j, c];
            let row = |i, c| [s.batch, head, s.start + i, c];
            let state = [s.index, h, d, e];
            let inward = match from {
                End::State => x.at("initial_state", &state),
                End::Token(j) => x.at("k", &key(j, d)) * x.at("v", &key(j, e)),
            };
            let outward = match to {
                End::State => x.at("dfinal_state", &state),
                End::Token(i) => sigma * x.at("q", &row(i, d)) * x.at("dout", &row(i, e)),
            };
            whole += inward * outward;
            match from {
                End::State => y.add("dinitial_state", &state, outward),
                End::Token(j) => {
                    y.add("dk", &key(j, d), outward * x.at("v", &key(j, e)));
                    y.add("dv", &key(j, e), outward * x.at("k", &key(j, d)));
                }
            }
            match to {
                End::State => y.add("final_state", &state, inward),
                End::Token(i) => {
                    y.add("dq", &row(i, d), sigma * inward * x.at("dout", &row(i, e)));
                    y.add("o", &row(i, e), sigma * inward * x.at("q", &row(i, d)));
                    y.add("dscale", &[], inward * x.at("q", &row(i, d)) * x.at("dout", &row(i, e)));
                }
            }
        }
        for t in self.between(from, to) {
            y.add("dg", &[s.batch, h, s.start + t], whole);
            y.add("dg_gamma", &[h], whole);
        }
    }
}
