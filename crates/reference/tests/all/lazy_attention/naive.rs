//! Lazy attention a second time: every pair in one list, gradients by (E15)–(E17), the second order
//! by its closed formulas (E19)–(E30).

use super::tensors::Tensors;
use etalon_problem::{Align, LazyAttention, Sequence};
use ndarray::{ArrayD, IxDyn};

/// A visible pair: its places in the arrays, and what is known of it.
#[derive(Debug, Clone, Copy)]
pub struct Pair {
    pub b: usize,
    pub h: usize,
    /// The key head.
    pub kh: usize,
    pub i: usize,
    pub j: usize,
    /// Its place in the bias.
    pub distance: Option<usize>,
    /// True if its key is the first of the sequence.
    pub first_key: bool,
    pub p: f64,
    /// τ/n
    pub offset: f64,
    pub n: f64,
}

impl Pair {
    pub fn is_active(&self) -> bool {
        self.p + self.offset > 0.0
    }

    pub fn row(&self) -> [usize; 3] {
        [self.b, self.h, self.i]
    }
}

fn distance(problem: &LazyAttention, s: &Sequence, i: usize, j: usize) -> Option<usize> {
    let bias = problem.bias?;
    let shift = if bias.align == Align::TopLeft { 0 } else { s.keys as i64 - s.queries as i64 };
    let d = i as i64 + shift - j as i64;
    (0..bias.width as i64).contains(&d).then_some(d as usize)
}

fn inner(x: &ArrayD<f64>, at: [usize; 3], y: &ArrayD<f64>, to: [usize; 3]) -> f64 {
    (0..x.shape()[3]).map(|c| x[[at[0], at[1], at[2], c]] * y[[to[0], to[1], to[2], c]]).sum()
}

/// The rows of visible pairs, and their lse.
pub fn rows(problem: &LazyAttention, x: &Tensors<f64>) -> Vec<(f64, Vec<Pair>)> {
    let scores = &problem.scores;
    let mut rows = Vec::new();
    for s in scores.sequences() {
        for h in 0..scores.extents.query_heads {
            for i in 0..s.queries {
                let mut row = Vec::new();
                for j in (0..s.keys).filter(|&j| scores.mask.allows(&s, h, i, j)) {
                    let (b, kh) = (s.batch, h / scores.group());
                    let distance = distance(problem, &s, i, j);
                    let at = Pair {
                        b,
                        h,
                        kh,
                        i: s.query_start + i,
                        j: s.key_start + j,
                        distance,
                        first_key: j == 0,
                        p: 0.0,
                        offset: 0.0,
                        n: 0.0,
                    };
                    let product = inner(&x["q"], [b, h, at.i], &x["k"], [b, kh, at.j]);
                    let score =
                        scores.scale() * product + distance.map_or(0.0, |d| x["bias"][[h, d]]);
                    row.push(Pair { p: score, ..at });
                }
                // With the maximum taken out a single key has a weight of exactly 1.
                let max = row.iter().fold(f64::NEG_INFINITY, |max, pair| pair.p.max(max));
                let sum = row.iter().map(|pair| (pair.p - max).exp()).sum::<f64>();
                let n = row.len() as f64;
                for pair in &mut row {
                    let p = (pair.p - max).exp() / sum;
                    *pair = Pair { p, offset: x["tau"][[h]] / n, n, ..*pair };
                }
                rows.push((max + sum.ln(), row));
            }
        }
    }
    rows.retain(|(_, row)| !row.is_empty());
    rows
}

fn zeros(shape: &[usize]) -> ArrayD<f64> {
    ArrayD::zeros(IxDyn(shape))
}

/// to[at] += a · x[from]
fn add(to: &mut ArrayD<f64>, at: [usize; 3], a: f64, x: &ArrayD<f64>, from: [usize; 3]) {
    for c in 0..x.shape()[3] {
        to[[at[0], at[1], at[2], c]] += a * x[[from[0], from[1], from[2], c]];
    }
}

pub fn forward(problem: &LazyAttention, x: &Tensors<f64>) -> Tensors<f64> {
    let mut o = zeros(&problem.o_shape());
    let mut lse = zeros(&problem.scores.row_shape());
    lse.fill(f64::NEG_INFINITY);
    for (row_lse, row) in rows(problem, x) {
        lse[row[0].row()] = row_lse;
        for pair in row.iter().filter(|pair| pair.is_active()) {
            add(&mut o, pair.row(), pair.p + pair.offset, &x["v"], [pair.b, pair.kh, pair.j]);
        }
    }
    Tensors::from([("o".to_string(), o), ("lse".to_string(), lse)])
}

/// Empty results with prefix `d` or `g`.
fn like_inputs(problem: &LazyAttention, x: &Tensors<f64>, prefix: &str) -> Tensors<f64> {
    let inputs = problem.operands(etalon_problem::Pass::Forward);
    let inputs = inputs.iter().filter(|operand| x.contains_key(operand.name));
    inputs.map(|input| (format!("{prefix}{}", input.name), zeros(&input.shape))).collect()
}

fn get<'a>(y: &'a mut Tensors<f64>, name: &str) -> &'a mut ArrayD<f64> {
    y.get_mut(name).expect("a result")
}

/// By (E15)–(E17).
pub fn backward(problem: &LazyAttention, x: &Tensors<f64>) -> Tensors<f64> {
    let outputs = forward(problem, x);
    let mut y = like_inputs(problem, x, "d");
    let scale = problem.scores.scale();
    for (_, row) in rows(problem, x) {
        let (at, h, n, tau) = (row[0].row(), row[0].h, row[0].n, x["tau"][[row[0].h]]);
        let g = |pair: &Pair| inner(&x["dout"], at, &x["v"], [pair.b, pair.kh, pair.j]);
        let active = || row.iter().filter(|pair| pair.is_active());
        let t = active().map(g).sum::<f64>() / n;
        get(&mut y, "dtau")[[h]] += t;
        let delta = inner(&x["dout"], at, &outputs["o"], at) - tau * t;
        let dense = x.get("dlse").map_or(0.0, |dlse| dlse[at]) - delta;
        for pair in &row {
            let key = [pair.b, pair.kh, pair.j];
            let sparse = if pair.is_active() { pair.p * g(pair) } else { 0.0 };
            let d_score = sparse + dense * pair.p;
            add(get(&mut y, "dq"), at, scale * d_score, &x["k"], key);
            add(get(&mut y, "dk"), key, scale * d_score, &x["q"], at);
            if let Some(d) = pair.distance {
                get(&mut y, "dbias")[[h, d]] += d_score;
            }
        }
        for pair in active() {
            let key = [pair.b, pair.kh, pair.j];
            add(get(&mut y, "dv"), key, pair.p + pair.offset, &x["dout"], at);
        }
    }
    y
}

/// By (E19)–(E30).
pub fn double_backward(problem: &LazyAttention, x: &Tensors<f64>) -> Tensors<f64> {
    let scale = problem.scores.scale();
    let mut y = like_inputs(problem, x, "g");
    y.insert("gdout".to_string(), zeros(&problem.o_shape()));
    y.insert("gdlse".to_string(), zeros(&problem.scores.row_shape()));
    for (_, row) in rows(problem, x) {
        let (at, h, n) = (row[0].row(), row[0].h, row[0].n);
        let ddtau = x["ddtau"][[h]];
        let key = |pair: &Pair| [pair.b, pair.kh, pair.j];
        let active: Vec<f64> = row.iter().map(|pair| f64::from(pair.is_active())).collect();
        let all = |f: &dyn Fn(usize, &Pair) -> f64| -> Vec<f64> {
            row.iter().enumerate().map(|(t, pair)| f(t, pair)).collect()
        };
        let sum = |x: &[f64]| x.iter().sum::<f64>();

        let g = all(&|t, pair| active[t] * inner(&x["dout"], at, &x["v"], key(pair)));
        let delta = sum(&all(&|t, pair| pair.p * g[t]));
        let d_score = all(&|t, pair| pair.p * (g[t] - delta + x["dlse"][at]));
        let big_u = all(&|_, pair| {
            let product =
                inner(&x["ddq"], at, &x["k"], key(pair)) + inner(&x["q"], at, &x["ddk"], key(pair));
            scale * product + pair.distance.map_or(0.0, |d| x["ddbias"][[h, d]])
        });
        let big_t = all(&|t, pair| {
            let product = inner(&x["dout"], at, &x["ddv"], key(pair))
                + inner(&x["cot_o"], at, &x["v"], key(pair));
            active[t] * product
        });
        let u = sum(&all(&|t, pair| pair.p * big_u[t]));
        let p_dot = all(&|t, pair| pair.p * (big_u[t] - u));
        let delta_dot = sum(&all(&|t, pair| p_dot[t] * g[t] + pair.p * big_t[t]));
        let big_x = all(&|t, pair| {
            p_dot[t] * (g[t] - delta + x["dlse"][at])
                + pair.p * (big_t[t] - delta_dot + x["cot_lse"][at])
        });

        get(&mut y, "gdlse")[at] = u;
        get(&mut y, "gtau")[[h]] += sum(&big_t) / n;
        for (t, pair) in row.iter().enumerate() {
            let key = key(pair);
            add(get(&mut y, "gq"), at, scale * big_x[t], &x["k"], key);
            add(get(&mut y, "gq"), at, scale * d_score[t], &x["ddk"], key);
            add(get(&mut y, "gk"), key, scale * big_x[t], &x["q"], at);
            add(get(&mut y, "gk"), key, scale * d_score[t], &x["ddq"], at);
            if let Some(d) = pair.distance {
                get(&mut y, "gbias")[[h, d]] += big_x[t];
            }
            if pair.is_active() {
                let (e, e_dot) = (pair.p + pair.offset, p_dot[t] + ddtau / n);
                add(get(&mut y, "gdout"), at, e_dot, &x["v"], key);
                add(get(&mut y, "gdout"), at, e, &x["ddv"], key);
                add(get(&mut y, "gv"), key, e_dot, &x["dout"], at);
                add(get(&mut y, "gv"), key, e, &x["cot_o"], at);
            }
        }
    }
    y
}
