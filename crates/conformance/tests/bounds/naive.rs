//! Attention written down as (F1) to (B9) in any floating-point type: an honest kernel for the
//! bounds to judge. It may round where a profile says that a kernel may.

use etalon_conformance::bounds::Values;
use etalon_problem::{Dtype, Problem, Scores, Sequence};
use ndarray::{ArrayD, IxDyn};
use std::ops::{Add, Div, Mul, Neg, Sub};

pub trait Float:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    fn of(x: f64) -> Self;
    fn wide(self) -> f64;
    fn exp2(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
}

macro_rules! float {
    ($type:ident) => {
        impl Float for $type {
            fn of(x: f64) -> Self {
                x as $type
            }
            fn wide(self) -> f64 {
                f64::from(self)
            }
            fn exp2(self) -> Self {
                $type::exp2(self)
            }
            fn ln(self) -> Self {
                $type::ln(self)
            }
            fn tanh(self) -> Self {
                $type::tanh(self)
            }
        }
    };
}
float!(f32);
float!(f64);

/// What a kernel may choose.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// The type of operands and results.
    pub storage: Dtype,
    /// The type in which P and dS are kept before they enter products.
    pub stored: Dtype,
    /// Keys between two rescales of the streaming softmax.
    pub tile: usize,
    /// attention_lse: dq from the gradient that the forward pass left.
    pub forward_gradient: bool,
}

fn round<T: Float>(x: T, dtype: Dtype) -> T {
    T::of(dtype.round(x.wide()))
}

struct Arrays<'a, T> {
    scores: &'a Scores,
    style: Style,
    get: std::collections::BTreeMap<&'a str, Vec<T>>,
}

/// A visible pair: the key's place, S and S′.
type Pair<T> = (usize, T, T);

impl<T: Float> Arrays<'_, T> {
    fn slice(&self, name: &str, row: usize, width: usize) -> &[T] {
        &self.get[name][row * width..(row + 1) * width]
    }

    fn key_row(&self, s: &Sequence, head: usize, key: usize) -> usize {
        let e = &self.scores.extents;
        (s.batch * e.key_heads + head / self.scores.group()) * e.keys + key
    }

    fn bias_at(&self, s: &Sequence, head: usize, i: usize, key: usize) -> Option<usize> {
        let (e, bias) = (&self.scores.extents, self.scores.bias?);
        let batch = if bias.batch == 1 { 0 } else { s.batch };
        let head = if bias.heads == 1 { 0 } else { head };
        Some(((batch * bias.heads + head) * e.queries + s.query_start + i) * e.keys + key)
    }

    fn pairs(&self, s: &Sequence, head: usize, i: usize, row: usize) -> Vec<Pair<T>> {
        let width = self.scores.extents.dim;
        let mut pairs = Vec::new();
        for j in (0..s.keys).filter(|&j| self.scores.mask.allows(s, head, i, j)) {
            let key = s.key_start + j;
            let (q, k) =
                (self.slice("q", row, width), self.slice("k", self.key_row(s, head, key), width));
            let mut score = T::of(self.scores.scale()) * dot(q, k);
            let mut slope = T::of(1.0);
            if let Some(cap) = self.scores.softcap.map(T::of) {
                let tau = (score / cap).tanh();
                (score, slope) = (cap * tau, T::of(1.0) - tau * tau);
            }
            if let Some(at) = self.bias_at(s, head, i, key) {
                score = score + self.get["bias"][at];
            }
            if score.wide() != f64::NEG_INFINITY {
                pairs.push((key, score, slope));
            }
        }
        pairs
    }

    /// The streaming softmax: Σ_j P x_j for every list x, and lse.
    fn stream(
        &self,
        pairs: &[Pair<T>],
        sink: Option<T>,
        x: &[Vec<T>],
        width: usize,
    ) -> (Vec<T>, T) {
        let mut max = sink.unwrap_or(T::of(f64::NEG_INFINITY));
        let mut sum = T::of(if sink.is_some() { 1.0 } else { 0.0 });
        let mut acc = vec![T::of(0.0); width];
        for (pairs, x) in pairs.chunks(self.style.tile).zip(x.chunks(self.style.tile)) {
            let new = pairs.iter().fold(max, |m, pair| if pair.1 > m { pair.1 } else { m });
            if new > max {
                let scale = exp(max - new);
                sum = sum * scale;
                acc.iter_mut().for_each(|acc| *acc = *acc * scale);
                max = new;
            }
            for (&(_, score, _), x) in pairs.iter().zip(x) {
                let p = exp(score - max);
                sum = sum + p;
                let p = round(p, self.style.stored);
                acc.iter_mut().zip(x).for_each(|(acc, &x)| *acc = *acc + p * x);
            }
        }
        if max.wide() == f64::NEG_INFINITY {
            return (acc, max);
        }
        acc.iter_mut().for_each(|acc| *acc = *acc / sum);
        (acc, max + sum.ln())
    }
}

fn exp<T: Float>(x: T) -> T {
    (x * T::of(std::f64::consts::LOG2_E)).exp2()
}

fn dot<T: Float>(x: &[T], y: &[T]) -> T {
    x.iter().zip(y).fold(T::of(0.0), |sum, (&x, &y)| sum + x * y)
}

fn add<T: Float>(sum: &mut [T], weight: T, x: &[T]) {
    sum.iter_mut().zip(x).for_each(|(sum, &x)| *sum = *sum + weight * x);
}

/// The outputs of forward and, where `inputs` holds a cotangent, of backward.
pub fn evaluate<T: Float>(problem: &Problem, inputs: &Values, style: Style) -> Values {
    let scores = problem.scores();
    let e = scores.extents;
    let value_dim = match problem {
        Problem::Attention(attention) => attention.value_dim,
        Problem::AttentionLse(_) => 0,
    };
    let get = inputs
        .iter()
        .map(|(name, x)| (name.as_str(), x.iter().map(|&x| T::of(x)).collect()))
        .collect();
    let arrays = Arrays { scores, style, get };
    let rows = e.batch * e.query_heads * e.queries;
    let zeros = |len: usize| vec![T::of(0.0); len];
    let (mut o, mut lse) = (zeros(rows * value_dim), vec![T::of(f64::NEG_INFINITY); rows]);
    let mut dq = zeros(rows * e.dim);
    let mut dk = zeros(e.batch * e.key_heads * e.keys * e.dim);
    let mut dv = zeros(e.batch * e.key_heads * e.keys * value_dim);
    let mut dsinks = zeros(e.query_heads);
    let mut dbias = zeros(scores.bias_shape().map_or(0, |shape| shape.iter().product()));
    let wide = if style.storage == Dtype::F64 { Dtype::F64 } else { Dtype::F32 };
    for s in scores.sequences() {
        for head in 0..e.query_heads {
            for i in 0..s.queries {
                let row = (s.batch * e.query_heads + head) * e.queries + s.query_start + i;
                let pairs = arrays.pairs(&s, head, i, row);
                let sink = scores.sinks.then(|| arrays.get["sinks"][head]);
                let values: Vec<Vec<T>> = pairs
                    .iter()
                    .map(|pair| match value_dim {
                        0 => Vec::new(),
                        _ => {
                            arrays.slice("v", arrays.key_row(&s, head, pair.0), value_dim).to_vec()
                        }
                    })
                    .collect();
                let (out, log) = arrays.stream(&pairs, sink, &values, value_dim);
                lse[row] = round(log, wide);
                let o = &mut o[row * value_dim..(row + 1) * value_dim];
                o.iter_mut().zip(out).for_each(|(o, out)| *o = round(out, style.storage));
                let dout =
                    arrays.get.contains_key("dout").then(|| arrays.slice("dout", row, value_dim));
                let dlse = arrays.get.get("dlse").map_or(T::of(0.0), |dlse| dlse[row]);
                let delta = dout.map_or(T::of(0.0), |dout| dot(dout, o)) - dlse;
                if let Some(sink) = sink {
                    dsinks[head] = dsinks[head] - exp(sink - lse[row]) * delta;
                }
                let q = arrays.slice("q", row, e.dim);
                let sigma = T::of(scores.scale());
                let mut row_dq = zeros(e.dim);
                for &(key, score, slope) in &pairs {
                    let key_row = arrays.key_row(&s, head, key);
                    let p = exp(score - lse[row]);
                    let dp = dout.map_or(T::of(0.0), |dout| {
                        dot(dout, arrays.slice("v", key_row, value_dim))
                    });
                    let ds = p * (dp - delta);
                    if let Some(at) = arrays.bias_at(&s, head, i, key) {
                        dbias[at] = dbias[at] + ds;
                    }
                    let ds = round(slope * ds, style.stored);
                    add(&mut row_dq, ds, arrays.slice("k", key_row, e.dim));
                    add(&mut dk[key_row * e.dim..(key_row + 1) * e.dim], sigma * ds, q);
                    if let Some(dout) = dout {
                        let dv = &mut dv[key_row * value_dim..(key_row + 1) * value_dim];
                        add(dv, round(p, style.stored), dout);
                    }
                }
                if style.forward_gradient {
                    let keys: Vec<Vec<T>> = pairs
                        .iter()
                        .map(|&(key, _, slope)| {
                            let k = arrays.slice("k", arrays.key_row(&s, head, key), e.dim);
                            k.iter().map(|&k| slope * k).collect()
                        })
                        .collect();
                    row_dq = arrays.stream(&pairs, sink, &keys, e.dim).0;
                    row_dq.iter_mut().for_each(|x| *x = *x * dlse);
                }
                add(&mut dq[row * e.dim..(row + 1) * e.dim], sigma, &row_dq);
            }
        }
    }
    let mut values = Values::new();
    for pass in [etalon_problem::Pass::Forward, etalon_problem::Pass::Backward] {
        for operand in problem.operands(pass) {
            let list = match operand.name {
                "o" => &o,
                "lse" => &lse,
                "dq" => &dq,
                "dk" => &dk,
                "dv" => &dv,
                "dsinks" => &dsinks,
                "dbias" => &dbias,
                _ => continue,
            };
            let dtype = match operand.precision {
                etalon_problem::Precision::Storage => style.storage,
                etalon_problem::Precision::Wide => wide,
            };
            let list = list.iter().map(|x| dtype.round(x.wide())).collect();
            let array = ArrayD::from_shape_vec(IxDyn(&operand.shape), list).expect("its shape");
            values.insert(operand.name.to_string(), array);
        }
    }
    values
}
