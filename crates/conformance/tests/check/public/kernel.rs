//! Kernels as loops in f64, written apart from the reference, with a place for each mistake.

use crate::bench::Bench;
use etalon_conformance::tensor::{Tensors, Values};
use etalon_problem::{Pass, Scores};
use ndarray::{Array2, ArrayD, Axis as Along, IxDyn};

/// Batch element, query head, row of q, row of k.
pub type Pair = [usize; 4];

/// A kernel of attention and what it was given.
pub struct Attention<'a> {
    pub scores: &'a Scores,
    pub x: Values,
    pub shape: [usize; 4],
    /// The key head of a query head.
    pub key_head: Box<dyn Fn(usize) -> usize + 'a>,
    /// S of a pair that has this product q·k; −∞ where it is hidden.
    pub score: Box<dyn Fn(Pair, f64) -> f64 + 'a>,
    /// Sinks of the heads.
    pub sinks: Vec<f64>,
}

/// S, P and lse of every row.
pub struct Weights {
    pub s: ArrayD<f64>,
    pub p: ArrayD<f64>,
    pub lse: ArrayD<f64>,
}

/// True if a problem shows a pair.
pub fn visible(scores: &Scores, [b, h, row, key]: Pair) -> bool {
    let inside = |start: usize, n: usize, at: usize| (start..start + n).contains(&at);
    scores.sequences().iter().any(|s| {
        s.batch == b
            && inside(s.query_start, s.queries, row)
            && inside(s.key_start, s.keys, key)
            && scores.mask.allows(s, h, row - s.query_start, key - s.key_start)
    })
}

/// The bias of a pair, or 0.
pub fn bias(x: &Values, [b, h, i, j]: Pair) -> f64 {
    x.get("bias").map_or(0.0, |x| x[[b % x.shape()[0], h % x.shape()[1], i, j]])
}

impl<'a> Attention<'a> {
    /// A right kernel.
    pub fn new(bench: &'a Bench) -> Self {
        let scores = bench.problem.scores().expect("scores");
        let (x, e) = (bench.values(), &scores.extents);
        let group = scores.group();
        let own = x.clone();
        let score = move |pair: Pair, dot: f64| {
            let s = scores.scale() * dot;
            let s = scores.softcap.map_or(s, |c| c * (s / c).tanh());
            if visible(scores, pair) { s + bias(&own, pair) } else { f64::NEG_INFINITY }
        };
        let sinks = match x.get("sinks") {
            Some(sinks) => sinks.iter().copied().collect(),
            None => vec![f64::NEG_INFINITY; e.query_heads],
        };
        Attention {
            scores,
            x,
            shape: [e.batch, e.query_heads, e.queries, e.keys],
            key_head: Box::new(move |h| h / group),
            score: Box::new(score),
            sinks,
        }
    }

    pub fn dot(&self, [b, h, i, j]: Pair) -> f64 {
        let (q, k) = (&self.x["q"], &self.x["k"]);
        let k_head = (self.key_head)(h);
        (0..q.shape()[3]).map(|c| q[[b, h, i, c]] * k[[b, k_head, j, c]]).sum()
    }

    pub fn weights(&self) -> Weights {
        let [batch, heads, queries, keys] = self.shape;
        let s = ArrayD::from_shape_fn(IxDyn(&self.shape), |at| {
            let pair = [at[0], at[1], at[2], at[3]];
            (self.score)(pair, self.dot(pair))
        });
        let lse = ArrayD::from_shape_fn(IxDyn(&[batch, heads, queries]), |at| {
            let row = (0..keys).map(|j| s[[at[0], at[1], at[2], j]]);
            let all = row.chain([self.sinks[at[1]]]);
            let max = all.clone().fold(f64::NEG_INFINITY, f64::max);
            if max == f64::NEG_INFINITY {
                max
            } else {
                max + all.map(|x| (x - max).exp()).sum::<f64>().ln()
            }
        });
        let p = normalised(&s, &lse);
        Weights { s, p, lse }
    }

    /// P v.
    pub fn output(&self, p: &ArrayD<f64>) -> ArrayD<f64> {
        let v = &self.x["v"];
        let [batch, heads, queries, keys] = self.shape;
        ArrayD::from_shape_fn(IxDyn(&[batch, heads, queries, v.shape()[3]]), |at| {
            let k_head = (self.key_head)(at[1]);
            (0..keys).map(|j| p[[at[0], at[1], at[2], j]] * v[[at[0], k_head, j, at[3]]]).sum()
        })
    }

    pub fn forward(&self) -> Values {
        let w = self.weights();
        let o = self.output(&w.p);
        [("o".to_string(), o), ("lse".to_string(), w.lse)].into_iter().collect()
    }

    /// dout·o − dlse.
    pub fn delta(&self, o: &ArrayD<f64>) -> ArrayD<f64> {
        let delta = (o * &self.x["dout"]).sum_axis(Along(3));
        match self.x.get("dlse") {
            Some(dlse) => delta - dlse,
            None => delta,
        }
    }

    /// The gradients of weights P and of δ; `slope` is ds/dS times the scale.
    pub fn gradients(
        &self,
        p: &ArrayD<f64>,
        delta: &ArrayD<f64>,
        slope: &dyn Fn(Pair) -> f64,
    ) -> Values {
        let (q, k, v, dout) = (&self.x["q"], &self.x["k"], &self.x["v"], &self.x["dout"]);
        let mut dq = ArrayD::<f64>::zeros(q.shape());
        let mut dk = ArrayD::<f64>::zeros(k.shape());
        let mut dv = ArrayD::<f64>::zeros(v.shape());
        let mut dbias = self.x.get("bias").map(|x| ArrayD::<f64>::zeros(x.shape()));
        for (at, &p) in p.indexed_iter().filter(|(_, p)| **p != 0.0) {
            let pair @ [b, h, i, j] = [at[0], at[1], at[2], at[3]];
            let kh = (self.key_head)(h);
            let dp: f64 = (0..v.shape()[3]).map(|c| dout[[b, h, i, c]] * v[[b, kh, j, c]]).sum();
            let ds = p * (dp - delta[[b, h, i]]);
            let dbias = dbias.as_mut();
            dbias.into_iter().for_each(|x| {
                let (b, h) = (b % x.shape()[0], h % x.shape()[1]);
                x[[b, h, i, j]] += ds;
            });
            let ds = ds * slope(pair);
            (0..v.shape()[3]).for_each(|c| dv[[b, kh, j, c]] += p * dout[[b, h, i, c]]);
            (0..q.shape()[3]).for_each(|c| {
                dq[[b, h, i, c]] += ds * k[[b, kh, j, c]];
                dk[[b, kh, j, c]] += ds * q[[b, h, i, c]];
            });
        }
        let mut all: Values =
            [("dq", dq), ("dk", dk), ("dv", dv)].map(|(n, x)| (n.to_string(), x)).into();
        all.extend(dbias.map(|x| ("dbias".to_string(), x)));
        all
    }

    /// ds/dS times the scale of a right kernel.
    pub fn slope(&self, pair: Pair) -> f64 {
        let scale = self.scores.scale();
        let bent = |c: f64| 1.0 - (scale * self.dot(pair) / c).tanh().powi(2);
        scale * self.scores.softcap.map_or(1.0, bent)
    }

    pub fn dsinks(&self, lse: &ArrayD<f64>, delta: &ArrayD<f64>) -> ArrayD<f64> {
        ArrayD::from_shape_fn(IxDyn(&[self.shape[1]]), |h| {
            let rows = lse.index_axis(Along(1), h[0]);
            let of = rows
                .iter()
                .zip(delta.index_axis(Along(1), h[0]).iter().copied().collect::<Vec<_>>());
            of.map(|(lse, delta)| -(self.sinks[h[0]] - lse).exp() * delta).sum()
        })
    }

    pub fn backward(&self) -> Values {
        let w = self.weights();
        let delta = self.delta(&self.output(&w.p));
        let mut all = self.gradients(&w.p, &delta, &|pair| self.slope(pair));
        if self.x.contains_key("sinks") {
            all.insert("dsinks".to_string(), self.dsinks(&w.lse, &delta));
        }
        all
    }
}

/// P = e^{S − lse}.
pub fn normalised(s: &ArrayD<f64>, lse: &ArrayD<f64>) -> ArrayD<f64> {
    ArrayD::from_shape_fn(s.raw_dim(), |at| {
        let s = s[&at];
        if s == f64::NEG_INFINITY { 0.0 } else { (s - lse[[at[0], at[1], at[2]]]).exp() }
    })
}

/// A state of linear attention.
pub type State = Array2<f64>;

pub fn decay(s: &mut State, g: f64) {
    s.mapv_inplace(|x| if g == f64::NEG_INFINITY { 0.0 } else { x * g.exp() });
}

pub fn add(s: &mut State, k: &[f64], v: &[f64]) {
    for ((c, e), s) in s.indexed_iter_mut() {
        *s += k[c] * v[e];
    }
}

pub fn read(s: &State, q: &[f64]) -> Vec<f64> {
    (0..s.ncols()).map(|e| (0..s.nrows()).map(|c| q[c] * s[[c, e]]).sum()).collect()
}

/// A token of a key head: its number, its log-decay, its key and value, and how its queries read.
pub struct Token<'a> {
    pub t: usize,
    pub g: f64,
    pub k: &'a [f64],
    pub v: &'a [f64],
    pub q: &'a [Vec<f64>],
}

/// A kernel of linear attention over dense sequences: what it does with each token.
pub fn recurrence(
    bench: &Bench,
    token: &dyn Fn(&mut State, &Token<'_>) -> Vec<Vec<f64>>,
) -> Values {
    let x = bench.values();
    let (q, k, v) = (&x["q"], &x["k"], &x["v"]);
    let [batch, heads, tokens, dim] = [0, 1, 2, 3].map(|at| q.shape()[at]);
    let (key_heads, values) = (k.shape()[1], v.shape()[3]);
    let group = heads / key_heads;
    let mut o = ArrayD::<f64>::zeros(IxDyn(&[batch, heads, tokens, values]));
    let mut last = ArrayD::<f64>::zeros(IxDyn(&[batch, key_heads, dim, values]));
    let row = |x: &ArrayD<f64>, b: usize, h: usize, t: usize| -> Vec<f64> {
        (0..x.shape()[3]).map(|c| x[[b, h, t, c]]).collect()
    };
    for (b, h) in (0..batch).flat_map(|b| (0..key_heads).map(move |h| (b, h))) {
        let mut s = State::from_shape_fn((dim, values), |(c, e)| {
            x.get("initial_state").map_or(0.0, |x| x[[b, h, c, e]])
        });
        for t in 0..tokens {
            let queries: Vec<Vec<f64>> =
                (h * group..(h + 1) * group).map(|h| row(q, b, h, t)).collect();
            let g = x.get("g").map_or(0.0, |g| g[[b, h, t]]);
            let g = x.get("g_gamma").map_or(g, |g| g[[h]]);
            let (k, v) = (row(k, b, h, t), row(v, b, h, t));
            let read = token(&mut s, &Token { t, g, k: &k, v: &v, q: &queries });
            for (m, read) in read.into_iter().enumerate() {
                read.into_iter().enumerate().for_each(|(e, x)| o[[b, h * group + m, t, e]] = x);
            }
        }
        s.indexed_iter().for_each(|((c, e), x)| last[[b, h, c, e]] = *x);
    }
    let etalon_problem::Problem::LinearAttention(problem) = &bench.problem else {
        panic!("no linear attention")
    };
    let o = o.mapv(|x| problem.scale * x);
    let mut all: Values = [("o".to_string(), o)].into();
    if problem.final_state {
        all.insert("final_state".to_string(), last);
    }
    all
}

/// The step of a right kernel over a token.
pub fn right(s: &mut State, x: &Token<'_>) -> Vec<Vec<f64>> {
    decay(s, x.g);
    add(s, x.k, x.v);
    x.q.iter().map(|q| read(s, q)).collect()
}

/// The logits of cross-entropy, and dh, dw of what is their gradient.
pub struct Logits {
    pub h: ArrayD<f64>,
    pub w: ArrayD<f64>,
    pub targets: Vec<usize>,
    pub raw: Array2<f64>,
}

impl Logits {
    pub fn new(bench: &Bench) -> Self {
        let mut x = bench.values();
        let (h, w) = (x.remove("h").expect("h"), x.remove("w").expect("w"));
        let raw = Array2::from_shape_fn((h.shape()[0], w.shape()[0]), |(i, v)| {
            (0..h.shape()[1]).map(|c| h[[i, c]] * w[[v, c]]).sum()
        });
        let targets = x["targets"].iter().map(|x| *x as usize).collect();
        Logits { h, w, targets, raw }
    }

    pub fn lse(&self, z: &Array2<f64>) -> Vec<f64> {
        z.rows().into_iter().map(|row| row.iter().map(|x| x.exp()).sum::<f64>().ln()).collect()
    }

    pub fn dh(&self, da: &Array2<f64>) -> ArrayD<f64> {
        ArrayD::from_shape_fn(self.h.raw_dim(), |at| {
            (0..self.w.shape()[0]).map(|v| da[[at[0], v]] * self.w[[v, at[1]]]).sum()
        })
    }

    pub fn dw(&self, da: &Array2<f64>) -> ArrayD<f64> {
        ArrayD::from_shape_fn(self.w.raw_dim(), |at| {
            (0..self.h.shape()[0]).map(|i| da[[i, at[0]]] * self.h[[i, at[1]]]).sum()
        })
    }
}

/// The right results of a bench with some in their place.
pub fn with(bench: &Bench, results: Values) -> Tensors {
    let mut got = bench.right();
    got.extend(bench.stored(&results));
    got
}

/// Results of another problem or of other inputs.
pub fn of(
    bench: &Bench,
    change: impl FnOnce(&mut etalon_problem::Problem, &mut Values),
) -> Tensors {
    let (mut problem, mut values) = (bench.problem.clone(), bench.values());
    change(&mut problem, &mut values);
    evaluated(bench, &problem, &values)
}

/// Outputs of the pass of a bench, of a problem and inputs that may be others.
fn evaluated(bench: &Bench, problem: &etalon_problem::Problem, values: &Values) -> Tensors {
    let mut results = bench.evaluate(problem, values);
    let wanted = bench.problem.operands(bench.pass);
    results.retain(|name, _| wanted.iter().any(|x| x.name == *name));
    bench.stored(&results)
}

/// A bench, and the results of a kernel with a mistake for it.
pub fn made(bench: Bench, make: impl FnOnce(&mut Attention<'_>) -> Values) -> (Bench, Tensors) {
    let got = {
        let mut kernel = Attention::new(&bench);
        let results = make(&mut kernel);
        with(&bench, results)
    };
    (bench, got)
}

/// A bench, and the right results of another problem or of other inputs.
pub fn of_other(
    bench: Bench,
    change: impl FnOnce(&mut etalon_problem::Problem, &mut Values),
) -> (Bench, Tensors) {
    let got = of(&bench, change);
    (bench, got)
}

/// A bench of a pass.
pub fn ask(
    problem: impl Into<etalon_problem::Problem>,
    pass: Pass,
    dtype: etalon_problem::Dtype,
) -> Bench {
    Bench::new(problem, pass, dtype)
}
