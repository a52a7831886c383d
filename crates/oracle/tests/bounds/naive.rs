//! Attention written down as (F1) to (B9) in any floating-point type: an honest kernel for the
//! bounds to judge. It may round where a profile says that a kernel may.

use etalon_oracle::bounds::Values;
use etalon_problem::{Dtype, Pass, Precision, Problem, Scores, Sequence};
use ndarray::{ArrayD, IxDyn};
use std::collections::BTreeMap;
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

/// Choices of a kernel.
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
    /// δ as Σ P dP, and dk and dv of each query head stored before those of a group are added up.
    pub by_head: bool,
    /// Parts of their factors that products read.
    pub factors: Factors,
}

/// Parts of its factors that a product reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Factors {
    Whole,
    /// Ten bits of each significand.
    TenBits,
    /// Each is the sum of two numbers in bf16, and the product of the smaller ones is left out.
    TwoParts,
}

impl Style {
    /// A kernel without any of the liberties.
    pub fn plain(storage: Dtype) -> Self {
        let stored = if storage == Dtype::F64 { Dtype::F64 } else { Dtype::F32 };
        let (forward_gradient, by_head) = (false, false);
        Style { storage, stored, tile: 8, forward_gradient, by_head, factors: Factors::Whole }
    }

    /// A product of what is read of two factors.
    fn product<T: Float>(self, x: T, y: T) -> T {
        let cut = |x: T| T::of(f64::from(f32::from_bits((x.wide() as f32).to_bits() & !0x1fff)));
        let high = |x: T| round(x, Dtype::Bf16);
        let low = |x: T| high(x - high(x));
        match self.factors {
            Factors::Whole => x * y,
            Factors::TenBits => cut(x) * cut(y),
            Factors::TwoParts => low(x) * high(y) + high(x) * low(y) + high(x) * high(y),
        }
    }
}

fn round<T: Float>(x: T, dtype: Dtype) -> T {
    T::of(dtype.round(x.wide()))
}

struct Arrays<'a, T> {
    scores: &'a Scores,
    style: Style,
    get: BTreeMap<&'a str, Vec<T>>,
    value_dim: usize,
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
            let mut score = T::of(self.scores.scale()) * self.style.dot(q, k);
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
            // A NaN is taken for a new maximum, so that it reaches the sum.
            let new = pairs.iter().fold(max, |m, pair| if pair.1 <= m { m } else { pair.1 });
            if new != max {
                let scale = exp(max - new);
                sum = sum * scale;
                acc.iter_mut().for_each(|acc| *acc = *acc * scale);
                max = new;
            }
            for (&(_, score, _), x) in pairs.iter().zip(x) {
                let p = exp(score - max);
                sum = sum + p;
                let p = round(p, self.style.stored);
                self.style.add(&mut acc, p, x);
            }
        }
        if pairs.is_empty() && sink.is_none() {
            return (acc, max);
        }
        acc.iter_mut().for_each(|acc| *acc = *acc / sum);
        (acc, max + sum.ln())
    }
}

fn exp<T: Float>(x: T) -> T {
    (x * T::of(std::f64::consts::LOG2_E)).exp2()
}

impl Style {
    fn dot<T: Float>(self, x: &[T], y: &[T]) -> T {
        let product = |(&x, &y): (&T, &T)| self.product(x, y);
        x.iter().zip(y).map(product).fold(T::of(0.0), |sum, product| sum + product)
    }

    fn add<T: Float>(self, sum: &mut [T], weight: T, x: &[T]) {
        sum.iter_mut().zip(x).for_each(|(sum, &x)| *sum = *sum + self.product(weight, x));
    }
}

/// The results of both passes, row-major.
struct Results<T> {
    o: Vec<T>,
    lse: Vec<T>,
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
    dsinks: Vec<T>,
    dbias: Vec<T>,
}

/// One row: its sequence, query head, query, and its place in the arrays.
#[derive(Clone, Copy)]
struct Place<'a> {
    s: &'a Sequence,
    head: usize,
    i: usize,
    row: usize,
}

impl<T: Float> Arrays<'_, T> {
    /// (F1) to (F5).
    fn forward(&self, at: Place<'_>, pairs: &[Pair<T>], out: &mut Results<T>) {
        let width = self.value_dim;
        let value = |pair: &Pair<T>| match width {
            0 => Vec::new(),
            _ => self.slice("v", self.key_row(at.s, at.head, pair.0), width).to_vec(),
        };
        let values: Vec<Vec<T>> = pairs.iter().map(value).collect();
        let (o, lse) = self.stream(pairs, self.sink(at.head), &values, width);
        out.lse[at.row] = round(lse, self.style.wide());
        let row = &mut out.o[at.row * width..(at.row + 1) * width];
        row.iter_mut().zip(o).for_each(|(to, o)| *to = round(o, self.style.storage));
    }

    fn sink(&self, head: usize) -> Option<T> {
        self.scores.sinks.then(|| self.get["sinks"][head])
    }

    /// (B1) to (B9), with the stored o and lse.
    fn backward(&self, at: Place<'_>, pairs: &[Pair<T>], out: &mut Results<T>) {
        let (d, e) = (self.scores.extents.dim, self.value_dim);
        let dout = self.get.contains_key("dout").then(|| self.slice("dout", at.row, e));
        let dlse = self.get.get("dlse").map_or(T::of(0.0), |dlse| dlse[at.row]);
        let o = &out.o[at.row * e..(at.row + 1) * e];
        let lse = out.lse[at.row];
        let delta = dout.map_or(T::of(0.0), |dout| match self.style.by_head {
            true => pairs.iter().fold(T::of(0.0), |sum, &(key, score, _)| {
                let v = self.slice("v", self.key_row(at.s, at.head, key), e);
                sum + exp(score - lse) * self.style.dot(dout, v)
            }),
            false => self.style.dot(dout, o),
        });
        let delta = delta - dlse;
        if let Some(sink) = self.sink(at.head) {
            out.dsinks[at.head] = out.dsinks[at.head] - exp(sink - lse) * delta;
        }
        let sigma = T::of(self.scores.scale());
        let mut dq = vec![T::of(0.0); d];
        for &(key, score, slope) in pairs {
            let key_row = self.key_row(at.s, at.head, key);
            let p = exp(score - lse);
            let dp =
                dout.map_or(T::of(0.0), |dout| self.style.dot(dout, self.slice("v", key_row, e)));
            let ds = p * (dp - delta);
            if let Some(place) = self.bias_at(at.s, at.head, at.i, key) {
                out.dbias[place] = out.dbias[place] + ds;
            }
            let ds = round(slope * ds, self.style.stored);
            self.style.add(&mut dq, ds, self.slice("k", key_row, d));
            let dk = &mut out.dk[key_row * d..(key_row + 1) * d];
            self.style.add(dk, sigma * ds, self.slice("q", at.row, d));
            if let Some(dout) = dout {
                let dv = &mut out.dv[key_row * e..(key_row + 1) * e];
                self.style.add(dv, round(p, self.style.stored), dout);
            }
        }
        if self.style.forward_gradient {
            dq = self.forward_gradient(at, pairs);
            dq.iter_mut().for_each(|x| *x = *x * dlse);
        }
        let to = &mut out.dq[at.row * d..(at.row + 1) * d];
        to.iter_mut().zip(dq).for_each(|(to, dq)| *to = sigma * dq);
    }

    /// Σ_j P S′ k_j, streamed as o is.
    fn forward_gradient(&self, at: Place<'_>, pairs: &[Pair<T>]) -> Vec<T> {
        let d = self.scores.extents.dim;
        let key = |&(key, _, slope): &Pair<T>| {
            let k = self.slice("k", self.key_row(at.s, at.head, key), d);
            k.iter().map(|&k| slope * k).collect()
        };
        let keys: Vec<Vec<T>> = pairs.iter().map(key).collect();
        self.stream(pairs, self.sink(at.head), &keys, d).0
    }
}

impl Style {
    fn wide(self) -> Dtype {
        if self.storage == Dtype::F64 { Dtype::F64 } else { Dtype::F32 }
    }
}

/// The outputs of forward and backward.
pub fn evaluate<T: Float>(problem: &Problem, inputs: &Values, style: Style) -> Values {
    let scores = problem.scores().expect("a problem with scores");
    let e = scores.extents;
    let value_dim = match problem {
        Problem::Attention(attention) => attention.value_dim,
        _ => 0,
    };
    let of = |x: &ArrayD<f64>| x.iter().map(|&x| T::of(x)).collect();
    let get = inputs.iter().map(|(name, x)| (name.as_str(), of(x))).collect();
    let arrays = Arrays { scores, style, get, value_dim };
    let zeros = |len: usize| vec![T::of(0.0); len];
    let (rows, keys) = (e.batch * e.query_heads * e.queries, e.batch * e.key_heads * e.keys);
    let mut out = Results {
        o: zeros(rows * value_dim),
        lse: vec![T::of(f64::NEG_INFINITY); rows],
        dq: zeros(rows * e.dim),
        dk: zeros(keys * e.dim),
        dv: zeros(keys * value_dim),
        dsinks: zeros(e.query_heads),
        dbias: zeros(scores.bias_shape().map_or(0, |shape| shape.iter().product())),
    };
    for s in &scores.sequences() {
        for head in 0..e.query_heads {
            let others = style.by_head.then(|| {
                let empty = (zeros(out.dk.len()), zeros(out.dv.len()));
                (std::mem::replace(&mut out.dk, empty.0), std::mem::replace(&mut out.dv, empty.1))
            });
            for i in 0..s.queries {
                let row = (s.batch * e.query_heads + head) * e.queries + s.query_start + i;
                let pairs = arrays.pairs(s, head, i, row);
                let at = Place { s, head, i, row };
                arrays.forward(at, &pairs, &mut out);
                arrays.backward(at, &pairs, &mut out);
            }
            if let Some((dk, dv)) = others {
                let join = |own: &mut [T], others: &[T]| {
                    let all = own.iter_mut().zip(others);
                    all.for_each(|(own, &others)| *own = round(*own, style.stored) + others);
                };
                join(&mut out.dk, &dk);
                join(&mut out.dv, &dv);
            }
        }
    }
    stored(problem, style, &out)
}

/// The results as a kernel stores them.
fn stored<T: Float>(problem: &Problem, style: Style, out: &Results<T>) -> Values {
    let mut values = Values::new();
    let passes = [Pass::Forward, Pass::Backward];
    for operand in passes.into_iter().flat_map(|pass| problem.operands(pass)) {
        let list = match operand.name {
            "o" => &out.o,
            "lse" => &out.lse,
            "dq" => &out.dq,
            "dk" => &out.dk,
            "dv" => &out.dv,
            "dsinks" => &out.dsinks,
            "dbias" => &out.dbias,
            _ => continue, // an input
        };
        let dtype = match operand.precision {
            Precision::Storage => style.storage,
            Precision::Wide => style.wide(),
            Precision::Integer => continue, // attention has none
        };
        let list = list.iter().map(|x| dtype.round(x.wide())).collect();
        let array = ArrayD::from_shape_vec(IxDyn(&operand.shape), list).expect("its shape");
        values.insert(operand.name.to_string(), array);
    }
    values
}
