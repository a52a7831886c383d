//! The edge probe. Key j has score ±18 j exactly, so that each key outweighs its neighbour by e¹⁸,
//! which is 4 u⁻¹ in f32: the weights are one-hot at the last (+) or first (−) visible key.
//!
//! Key j carries (256 ⌊j/256⌋, j mod 256) and the query ±(144, 144): exact in bf16, f16 and f32,
//! and 144 j / 8 = 18 j. Values are integers that tell position, head, batch and column apart.
//! Forward: o is the value at the edge, lse its score. Backward: dv is a sum of integers; with no
//! dlse dq and dk are 0, with it they are dlse/8 times the key and the query. A kernel that rounds
//! the score and lse before it takes their difference has a weight of 1 up to 8 u |S| (N82).

use super::arrays::{Arrays, STEP, compare};
use super::inputs::{fill, place, skeleton};
use crate::generate::Stream;
use crate::laws::flaw::{Judgement, worst};
use crate::laws::tensors::everywhere;
use crate::laws::trial::Trial;
use crate::laws::visible::Visible;
use etalon_problem::Pass;

pub(super) fn edge_probe(trial: &Trial<'_>) -> Judgement {
    worst([0, 1].map(|parity| one_way(trial, parity)))
}

/// Rows of alternating sign, so that both edges are read in both runs.
fn sign(parity: usize, i: usize) -> f64 {
    if (i + parity).is_multiple_of(2) { 1.0 } else { -1.0 }
}

/// An integer from 1 to 256: neighbours in every direction differ.
fn address(at: &[usize]) -> f64 {
    (1 + (7 * at[2] + 31 * at[1] + 57 * at[0] + 13 * at[3]) % 256) as f64
}

fn coordinate(j: usize, c: usize, dim: usize) -> f64 {
    match c {
        0 if dim == 1 => j as f64,
        0 => (j / 256 * 256) as f64,
        1 => (j % 256) as f64,
        _ => 0.0,
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

fn one_way(trial: &Trial<'_>, parity: usize) -> Judgement {
    let case = trial.case;
    let (problem, scores) = skeleton(case)?;
    let stream = Stream::new(case.spec.seed, "edge_probe");
    let dim = scores.extents.dim;
    let inputs = fill(case, &problem, trial.pass, |x, at| match x.name {
        "q" if at[3] < 2 => 8.0 * STEP * sign(parity, at[2]),
        "q" => 0.0,
        "k" => coordinate(at[2], at[3], dim),
        "v" => address(at),
        "dout" => dout(&stream, at),
        _ => dlse(&stream, at),
    });
    let visible = Visible::new(&scores, &inputs);
    let x = Arrays::of(&inputs)?;
    let x_sizes = x.sizes();
    let mut y = Arrays::results(&problem, trial.pass);
    let mut sizes = y.zeros();
    for ((b, h, i), _) in visible.counts().indexed_iter() {
        let row = [b, h, i];
        let mut seen = visible.keys(row);
        let edge = if sign(parity, i) > 0.0 { seen.next_back() } else { seen.next() };
        let Some(j) = edge else { continue };
        let key = [b, h / visible.group(), j];
        let score = STEP * j as f64 * sign(parity, i);
        y.set("lse", &row, score);
        y.add_value(&x, row, key, 1.0);
        // P = 1, dP = dout·v = dout·o: dS = dlse.
        y.add_score(&x, row, key, x.at("dlse", &row) / 8.0);
        // In 64 roundings: 8 |S| of a weight that is made again, and those of dP and δ.
        let weight = if trial.pass == Pass::Forward { 1.0 } else { 1.0 + score.abs() / 8.0 };
        sizes.set("lse", &row, score.abs());
        sizes.add_sizes(&x_sizes, row, key, weight);
        let next = if sign(parity, i) > 0.0 { seen.next_back() } else { seen.next() };
        if let Some(next) = next {
            let dp = x_sizes.product(("dout", row), ("v", key));
            sizes.add_neighbour(&x_sizes, row, [b, h / visible.group(), next], dp);
        }
    }
    compare((&trial.ask(&problem, &inputs)?, trial.profile()), &y, &sizes, everywhere)
}
