//! The edge probe. Key j has score ±110 j exactly, so that each key outweighs its neighbour by
//! e¹¹⁰, beyond the range of f32: the weights are one-hot at the last (+) or first (−) visible key.
//!
//! Key j carries (256 ⌊j/256⌋, j mod 256) and the query ±(880, 880): exact in bf16, f16 and f32,
//! and 880 j / 8 = 110 j. Values are integers that tell position, head, batch and column apart.
//! Forward: o is the value at the edge, lse its score. Backward: dv is a sum of integers; with no
//! dlse dq and dk are 0, with it they are dlse/8 times the key and the query.

use super::inputs::{fill, place, skeleton};
use crate::generate::Stream;
use crate::laws::flaw::{Flaw, Judgement};
use crate::laws::trial::Trial;
use crate::laws::visible::Visible;
use crate::tensor::Tensors;
use crate::tier::Hints;
use etalon_problem::{Error, Pass, Problem, Scores};
use ndarray::{ArrayD, IxDyn};
use std::collections::BTreeMap;

/// An exponential that does not flush may leave weights of 2⁻¹²⁷; times the largest sums of this
/// probe they stay below this.
pub(super) const NOTHING: f64 = 8.271_806_125_530_277e-25; // 2⁻⁸⁰

pub(super) fn check(trial: &Trial<'_>) -> Judgement {
    for parity in [0, 1] {
        let probe = Probe::new(trial, parity)?;
        let outputs = trial.ask(&probe.problem, &probe.inputs, Hints::default())?;
        let expected = match trial.pass {
            Pass::Forward => probe.forward(),
            _ => probe.backward(),
        };
        for (name, expected) in expected {
            let tensor = &outputs[name];
            let (got, dtype) = (tensor.to_f64(name)?, tensor.dtype());
            for ((index, &exact), &got) in expected.indexed_iter().zip(&got) {
                let rounded = dtype.map_or(exact, |dtype| dtype.round(exact));
                let nothing = exact == 0.0 && got.abs() <= NOTHING;
                if got != rounded && !nothing {
                    let at = ndarray::Dimension::slice(&index);
                    let text = format!("{name}{at:?} = {got:e}, expected exactly {rounded:e}");
                    return Err(Flaw::Fail(text));
                }
            }
        }
    }
    Ok(None)
}

struct Probe {
    problem: Problem,
    scores: Scores,
    inputs: Tensors,
    visible: Visible,
    parity: usize,
    stream: Stream,
    with_dlse: bool,
    value_dim: usize,
}

/// Rows of alternating sign, so that both edges are read in both runs.
fn sign(parity: usize, i: usize) -> f64 {
    if (i + parity).is_multiple_of(2) { 1.0 } else { -1.0 }
}

/// An integer from 1 to 256: neighbours in every direction differ.
fn address(b: usize, h: usize, j: usize, c: usize) -> f64 {
    (1 + (7 * j + 31 * h + 57 * b + 13 * c) % 256) as f64
}

fn coordinate(j: usize, c: usize, dim: usize) -> f64 {
    match c {
        0 if dim == 1 => j as f64,
        0 => (j / 256 * 256) as f64,
        1 => (j % 256) as f64,
        _ => 0.0,
    }
}

impl Probe {
    fn new(trial: &Trial<'_>, parity: usize) -> Result<Self, Error> {
        let case = trial.case;
        let (problem, scores) = skeleton(case)?;
        let stream = Stream::new(case.spec.seed, "edge_probe");
        let dim = scores.extents.dim;
        let inputs = fill(case, &problem, trial.pass, |name, at| match name {
            "q" if at[3] < 2 => 880.0 * sign(parity, at[2]),
            "q" => 0.0,
            "k" => coordinate(at[2], at[3], dim),
            "v" => address(at[0], at[1], at[2], at[3]),
            "dout" => dout(&stream, at),
            _ => dlse(&stream, at),
        });
        let visible = Visible::new(&scores, &inputs);
        let value_dim = case.inputs.get("v").map_or(0, |v| v.shape[3]);
        let with_dlse = inputs.contains_key("dlse");
        Ok(Probe { problem, scores, inputs, visible, parity, stream, with_dlse, value_dim })
    }

    /// Every row with its edge, if it sees anything: `([b, h, i], key head, j)`.
    fn edges(&self) -> Vec<([usize; 3], usize, Option<usize>)> {
        let pairs = &self.visible.pairs;
        let (batch, heads, queries, _) = pairs.dim();
        let rows = (0..batch * heads * queries)
            .map(|at| [at / queries / heads, at / queries % heads, at % queries]);
        rows.map(|[b, h, i]| {
            let row = pairs.slice(ndarray::s![b, h, i, ..]);
            let mut seen = row.iter().enumerate().filter(|(_, seen)| **seen).map(|(j, _)| j);
            let edge = if sign(self.parity, i) > 0.0 { seen.next_back() } else { seen.next() };
            ([b, h, i], h / self.visible.group(), edge)
        })
        .collect()
    }

    fn zeros(&self, shape: &[usize]) -> ArrayD<f64> {
        ArrayD::zeros(IxDyn(shape))
    }

    fn forward(&self) -> BTreeMap<&'static str, ArrayD<f64>> {
        let scores = &self.scores;
        let rows = scores.row_shape();
        let mut lse = ArrayD::from_elem(IxDyn(&rows), f64::NEG_INFINITY);
        let mut o = self.zeros(&[rows[0], rows[1], rows[2], self.value_dim]);
        for ([b, h, i], key_head, edge) in self.edges() {
            let Some(j) = edge else { continue };
            lse[[b, h, i]] = 110.0 * j as f64 * sign(self.parity, i);
            (0..self.value_dim).for_each(|c| o[[b, h, i, c]] = address(b, key_head, j, c));
        }
        match self.value_dim {
            0 => BTreeMap::from([("lse", lse)]),
            _ => BTreeMap::from([("lse", lse), ("o", o)]),
        }
    }

    fn backward(&self) -> BTreeMap<&'static str, ArrayD<f64>> {
        let scores = &self.scores;
        let e = scores.extents;
        let mut dq = self.zeros(&scores.q_shape());
        let mut dk = self.zeros(&scores.k_shape());
        let mut dv = self.zeros(&[e.batch, e.key_heads, e.keys, self.value_dim]);
        for ([b, h, i], key_head, edge) in self.edges() {
            let Some(j) = edge else { continue };
            for c in 0..self.value_dim {
                dv[[b, key_head, j, c]] += dout(&self.stream, &[b, h, i, c]);
            }
            // P = 1, dP = dout·v = dout·o: dS = dlse.
            let ds = if self.with_dlse { dlse(&self.stream, &[b, h, i]) / 8.0 } else { 0.0 };
            for c in 0..e.dim {
                dq[[b, h, i, c]] = ds * coordinate(j, c, e.dim);
                if c < 2 {
                    dk[[b, key_head, j, c]] += ds * 880.0 * sign(self.parity, i);
                }
            }
        }
        match self.value_dim {
            0 => BTreeMap::from([("dq", dq), ("dk", dk)]),
            _ => BTreeMap::from([("dq", dq), ("dk", dk), ("dv", dv)]),
        }
    }
}

/// An odd integer from −3 to 3: never zero, so that a lost row shows.
fn dout(stream: &Stream, at: &[usize]) -> f64 {
    (2 * stream.integer(place(0, at), -2, 1) + 1) as f64
}

/// A multiple of 8, so that dlse/8 is an integer.
fn dlse(stream: &Stream, at: &[usize]) -> f64 {
    (8 * (2 * stream.integer(place(usize::MAX / 2, at), -1, 0) + 1)) as f64
}
