//! A kernel of attention as somebody might write it: f32 sums, P and dS rounded to the storage type, sound or with a
//! bug.

use etalon_conformance::questions::Question;
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_problem::{Dtype, Operand, Pass, Problem, Role, Scores};
use ndarray::{ArrayD, IxDyn};

/// A bug that it may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    None,
    /// The last row of each tile of 32 sees a key ahead.
    KeyAhead,
    /// From row 32 on the oldest key of a row is missed.
    OldestKey,
    /// Query head h uses key head h mod Hk.
    Interleaved,
    /// Keys behind the last whole tile of 32 are left out.
    Tail,
    /// lse is a logarithm to base 2.
    BaseTwo,
    /// σ is 1/√(D + 1).
    Scale,
    /// dk and dv of a group are those of its first head.
    FirstHead,
}

pub const WRONG: [Bug; 7] = [
    Bug::KeyAhead,
    Bug::OldestKey,
    Bug::Interleaved,
    Bug::Tail,
    Bug::BaseTwo,
    Bug::Scale,
    Bug::FirstHead,
];

/// A tensor as f32, by rows.
struct Rows {
    shape: Vec<usize>,
    data: Vec<f32>,
}

impl Rows {
    fn of(tensors: &Tensors, name: &str) -> Option<Rows> {
        let tensor = tensors.get(name)?;
        let data = tensor.to_f64(name).unwrap().iter().map(|&x| x as f32).collect();
        Some(Rows { shape: tensor.shape.clone(), data })
    }

    fn zeros(shape: &[usize]) -> Rows {
        Rows { shape: shape.to_vec(), data: vec![0.0; shape.iter().product()] }
    }

    fn start(&self, [b, h, i]: [usize; 3]) -> (usize, usize) {
        let width = self.shape.get(3).copied().unwrap_or(1);
        (((b * self.shape[1] + h) * self.shape[2] + i) * width, width)
    }

    fn row(&self, at: [usize; 3]) -> &[f32] {
        let (start, width) = self.start(at);
        &self.data[start..start + width]
    }

    fn row_mut(&mut self, at: [usize; 3]) -> &mut [f32] {
        let (start, width) = self.start(at);
        &mut self.data[start..start + width]
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f32], x: &[f32], factor: f32) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}

/// The kernel, on one question.
struct Kernel<'a> {
    scores: &'a Scores,
    dtype: Dtype,
    bug: Bug,
    q: Rows,
    k: Rows,
    v: Rows,
}

pub fn answer(question: &Question, bug: Bug) -> Tensors {
    let Question { problem, pass, dtype, inputs } = question;
    let Problem::Attention(attention) = problem else { panic!("a kernel of attention") };
    let [q, k, v] = ["q", "k", "v"].map(|name| Rows::of(inputs, name).unwrap());
    let kernel = Kernel { scores: &attention.scores, dtype: *dtype, bug, q, k, v };
    let (o, lse) = kernel.forward();
    let results = match pass {
        Pass::Forward => vec![("o", o), ("lse", lse)],
        _ => kernel.backward(&o, &lse, inputs),
    };
    let outputs = problem.operands(*pass).into_iter().filter(|x| x.role == Role::Output);
    let store = |operand: Operand| {
        let (_, rows) = results.iter().find(|(name, _)| *name == operand.name).unwrap();
        let data = rows.data.iter().map(|&x| f64::from(x)).collect();
        let values = ArrayD::from_shape_vec(IxDyn(&operand.shape), data).unwrap();
        (operand.name.to_string(), Tensor::store(&values, Stored::of(operand.precision, *dtype)))
    };
    outputs.map(store).collect()
}

impl Kernel<'_> {
    fn narrow(&self, x: f32) -> f32 {
        self.dtype.round(f64::from(x)) as f32
    }

    fn sigma(&self) -> f32 {
        match self.bug {
            Bug::Scale => 1.0 / ((self.scores.extents.dim + 1) as f32).sqrt(),
            _ => self.scores.scale() as f32,
        }
    }

    fn key_head(&self, h: usize) -> usize {
        match self.bug {
            Bug::Interleaved => h % self.scores.extents.key_heads,
            _ => h / self.scores.group(),
        }
    }

    /// Every row with the keys that it sees.
    fn rows(&self) -> Vec<([usize; 3], Vec<usize>)> {
        let mut rows = Vec::new();
        for s in self.scores.sequences() {
            for h in 0..self.scores.extents.query_heads {
                for i in 0..s.queries {
                    let mut keys: Vec<usize> =
                        (0..s.keys).filter(|&j| self.scores.mask.allows(&s, h, i, j)).collect();
                    match self.bug {
                        Bug::KeyAhead if i % 32 == 31 => {
                            let ahead = keys.last().map(|j| j + 1);
                            keys.extend(ahead.filter(|&j| j < s.keys));
                        }
                        Bug::OldestKey if i >= 32 => drop(keys.remove(0)),
                        Bug::Tail => keys.retain(|&j| j < s.keys / 32 * 32),
                        _ => {}
                    }
                    rows.push(([s.batch, h, i], keys));
                }
            }
        }
        rows
    }

    fn score(&self, row: [usize; 3], key: [usize; 3]) -> f32 {
        dot(self.q.row(row), self.k.row(key)) * self.sigma()
    }

    fn forward(&self) -> (Rows, Rows) {
        let e = &self.scores.extents;
        let mut o = Rows::zeros(&[e.batch, e.query_heads, e.queries, self.v.shape[3]]);
        let mut lse = Rows::zeros(&[e.batch, e.query_heads, e.queries]);
        lse.data.fill(f32::NEG_INFINITY);
        for (row, keys) in self.rows() {
            let key = |j| [row[0], self.key_head(row[1]), j];
            let scores: Vec<f32> = keys.iter().map(|&j| self.score(row, key(j))).collect();
            let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f32> = scores.iter().map(|s| (s - most).exp()).collect();
            let sum: f32 = weights.iter().sum();
            for (&j, &p) in keys.iter().zip(&weights) {
                add(o.row_mut(row), self.v.row(key(j)), self.narrow(p));
            }
            if !keys.is_empty() {
                o.row_mut(row).iter_mut().for_each(|x| *x = self.narrow(*x / sum));
                lse.row_mut(row)[0] = most + sum.ln();
            }
        }
        if self.bug == Bug::BaseTwo {
            lse.data.iter_mut().for_each(|x| *x *= std::f32::consts::LOG2_E);
        }
        (o, lse)
    }

    fn backward(&self, o: &Rows, lse: &Rows, inputs: &Tensors) -> Vec<(&'static str, Rows)> {
        let dout = Rows::of(inputs, "dout").unwrap();
        let dlse = Rows::of(inputs, "dlse");
        let [mut dq, mut dk, mut dv] = [&self.q, &self.k, &self.v].map(|x| Rows::zeros(&x.shape));
        let (sigma, group) = (self.sigma(), self.scores.group());
        let base = if self.bug == Bug::BaseTwo { std::f32::consts::LN_2 } else { 1.0 };
        for (row, keys) in self.rows() {
            let delta = dot(dout.row(row), o.row(row));
            let delta = delta - dlse.as_ref().map_or(0.0, |dlse| dlse.row(row)[0]);
            for j in keys {
                let key = [row[0], self.key_head(row[1]), j];
                let p = (self.score(row, key) - base * lse.row(row)[0]).exp();
                let ds = self.narrow(p * (dot(dout.row(row), self.v.row(key)) - delta));
                add(dq.row_mut(row), self.k.row(key), sigma * ds);
                if self.bug == Bug::FirstHead && row[1] % group != 0 {
                    continue;
                }
                add(dk.row_mut(key), self.q.row(row), sigma * ds);
                add(dv.row_mut(key), dout.row(row), self.narrow(p));
            }
        }
        vec![("dq", dq), ("dk", dk), ("dv", dv)]
    }
}
