//! The edge probe. Key j has score ±σ c j, where c is the least number of eight bits with |σ| c ≥ 18: each key
//! outweighs its neighbour by e¹⁸ or more, which is 4 u⁻¹ in f32, and the weights are one-hot at the last (+) or first
//! (−) visible key.
//!
//! Key j carries (256 ⌊j/256⌋, j mod 256) and the query ±(c, c): exact in bf16, f16 and f32, as is c j. With σ = 1/8
//! c is 144 and scores are 18 j exactly. Where σ is no power of two, a score is the exact σ c j up to the roundings of
//! σ and of the product: lse, and a weight that is made again, have as much more room, which leaves the neighbours far
//! outside. Values are integers that tell position, head, batch and column apart. Forward: o is the value at the edge,
//! lse its score. Backward: dv is a sum of integers; with no dlse dq and dk are 0, with it they are dlse/8 times the
//! key and the query. A kernel that rounds the score and lse before it takes their difference has a weight of 1 up to
//! 8 u |S| (N82), or 12 u |S| where σ rounds.

use super::arrays::{Arrays, Room, STEP, compare};
use super::inputs::{fill, is_dyadic, place, skeleton};
use crate::generate::Stream;
use crate::laws::flaw::{Flaw, Judgement, worst};
use crate::laws::part::with_scores;
use crate::laws::tensors::everywhere;
use crate::laws::trial::Trial;
use crate::laws::visible::Visible;
use crate::profile::Profile;
use etalon_problem::{Dtype, Pass, Scores};

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

/// c: the least number of eight significant bits by which σ becomes 18 or more.
fn factor(scores: &Scores, dtype: Dtype) -> Result<f64, Flaw> {
    let sigma = scores.scale().abs();
    let wanted = STEP / sigma;
    let unit = 2f64.powi(wanted.log2().floor() as i32 - 7);
    let c = (wanted / unit).ceil() * unit;
    if c.is_normal() && dtype.round(c) == c && c >= dtype.min_positive() {
        return Ok(c);
    }
    let reason = format!("a scale of {sigma:e} sets no two keys of {dtype} apart");
    Err(Flaw::NotAsked(reason))
}

/// Fails for a profile that stores in 16 bits what has more digits here: scores of many keys, or dP.
fn keeps_scores(pass: Pass, profile: &Profile) -> Result<(), Flaw> {
    let narrow = |x: Dtype| x != profile.accumulator;
    let (what, stored) = match pass {
        _ if narrow(profile.score_store) => ("scores", profile.score_store),
        Pass::Backward if narrow(profile.dp_store) => ("dP", profile.dp_store),
        _ => return Ok(()),
    };
    Err(Flaw::NotAsked(format!("the profile stores {what} in {stored}, which has too few digits")))
}

/// The weight that a row has in 64 roundings: 8 or 12 |S| of one that is made again, and those of dP and δ. A factor
/// that is cut off after it was multiplied with σ errs by as much in S and in lse.
fn weight(pass: Pass, score: f64, sigma: f64, profile: &Profile) -> f64 {
    match pass {
        Pass::Forward => 1.0,
        _ if is_dyadic(sigma) => 1.0 + score.abs() / 8.0,
        _ if profile.factor == 0.0 => 1.0 + score.abs() * (12.0 / 64.0),
        _ => 1.0 + score.abs() * 2.0,
    }
}

fn one_way(trial: &Trial<'_>, parity: usize) -> Judgement {
    let case = trial.case;
    let (problem, scores) = skeleton(case)?;
    // No cap leaves keys so far apart.
    let scores = Scores { softcap: None, ..scores };
    let problem = with_scores(&problem, scores.clone());
    let stream = Stream::new(case.spec.seed, "edge_probe");
    let (dim, sigma) = (scores.extents.dim, scores.scale());
    if dim == 1 && scores.extents.keys > 256 {
        let text = format!("one column tells 256 keys apart, not {}", scores.extents.keys);
        return Err(Flaw::NotAsked(text));
    }
    let c = factor(&scores, case.dtype)?;
    keeps_scores(trial.pass, trial.profile())?;
    let inputs = fill(case, &problem, trial.pass, |x, at| match x.name {
        "q" if at[3] < 2 => c * sigma.signum() * sign(parity, at[2]),
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
    let (mut sizes, mut scaled) = (y.zeros(), y.zeros());
    for ((b, h, i), _) in visible.counts().indexed_iter() {
        let row = [b, h, i];
        let mut seen = visible.keys(row);
        let edge = if sign(parity, i) > 0.0 { seen.next_back() } else { seen.next() };
        let Some(j) = edge else { continue };
        let key = [b, h / visible.group(), j];
        let score = sigma.abs() * c * j as f64 * sign(parity, i);
        y.set("lse", &row, score);
        y.add_value(&x, row, key, 1.0);
        // P = 1, dP = dout·v = dout·o: dS = dlse.
        y.add_ds(&x, row, key, sigma, x.at("dlse", &row));
        scaled.add_ds(&x_sizes, row, key, sigma.abs(), x_sizes.at("dlse", &row));
        sizes.set("lse", &row, score.abs());
        let weight = weight(trial.pass, score, sigma, trial.profile());
        sizes.add_sizes(&x_sizes, row, key, (sigma.abs(), weight));
        let next = if sign(parity, i) > 0.0 { seen.next_back() } else { seen.next() };
        if let Some(next) = next {
            let dp = x_sizes.product(("dout", row), ("v", key));
            let next = [b, h / visible.group(), next];
            sizes.add_neighbour(&x_sizes, row, next, (sigma.abs(), dp));
        }
    }
    let room = Room { sizes: &sizes, scaled: (!is_dyadic(sigma)).then_some(&scaled) };
    compare((&trial.ask(&problem, &inputs)?, trial.profile()), &y, room, everywhere)
}
