//! Scores and logits that a simulated kernel stores in a narrow type: each errs by a rounding of its own.

use super::STORED_SCORES;
use crate::generate::Stream;
use crate::profile::Profile;
use crate::tensor::Values;
use etalon_problem::{
    BiasExtents, Dtype, Error, LinearCrossEntropy, Operand, Problem, Role, Scores,
};
use ndarray::{Array4, ArrayD, Axis, Ix2, Ix4, IxDyn, concatenate};
use std::borrow::Cow;

/// Form in which the roundings of scores enter an evaluation.
#[derive(Debug)]
pub(super) enum StoredScores {
    /// Not at all.
    None,
    /// As errors of the factors of their products, of this standard deviation.
    Factors(f64),
    /// As a bias for each pair, `[B, Hq, N, M]`: its standard deviations; and the type, to which sinks are
    /// rounded, too.
    Bias { sizes: Array4<f64>, stored: Dtype },
    /// As elements of h beyond its own, one for each token, and of w, one for each token and class: their
    /// standard deviations `[V, T]`.
    Columns { sizes: ArrayD<f64>, dim: usize },
}

impl StoredScores {
    /// Of a profile.
    pub fn new(problem: &Problem, profile: &Profile, inputs: &Values) -> Self {
        let u = profile.score_store.unit_roundoff();
        if u <= profile.accumulator.unit_roundoff() {
            return StoredScores::None;
        }
        let rounding = u / 3f64.sqrt();
        match problem {
            Problem::Attention(_) | Problem::AttentionLse(_) => {
                if let Some(scores) = problem.scores().filter(|x| pairs(x) <= STORED_SCORES) {
                    return StoredScores::of_pairs(scores, profile.score_store, inputs);
                }
            }
            Problem::LinearCrossEntropy(loss) if loss.tokens * loss.vocab <= STORED_SCORES => {
                return StoredScores::of_logits(loss, rounding, inputs);
            }
            _ => {}
        }
        // A product of two factors that err by as much each errs by √2 times that.
        let steps = match problem {
            Problem::LinearCrossEntropy(loss) => steps_of_logits(loss),
            _ => problem.scores().map_or(1.0, steps),
        };
        StoredScores::Factors(rounding * (steps / 2.0).sqrt())
    }

    fn of_pairs(scores: &Scores, stored: Dtype, inputs: &Values) -> Self {
        let (e, rounding) = (&scores.extents, stored.unit_roundoff() / 3f64.sqrt());
        let shape = [e.batch, e.query_heads, e.queries, e.keys];
        let mut sizes = Array4::zeros(shape);
        let four = |name: &str| inputs.get(name)?.view().into_dimensionality::<Ix4>().ok();
        if let (Some(q), Some(k)) = (four("q"), four("k")) {
            let (sigma, group) = (scores.scale(), scores.group().max(1));
            let bias = four("bias");
            for b in 0..e.batch {
                for h in 0..e.query_heads {
                    let q = q.index_axis(Axis(0), b).index_axis_move(Axis(0), h);
                    let k = k.index_axis(Axis(0), b).index_axis_move(Axis(0), h / group);
                    for ((i, j), &product) in q.dot(&k.t()).indexed_iter() {
                        let bias = bias.as_ref().map_or(0.0, |bias| {
                            let [batches, heads, ..] = [bias.shape()[0], bias.shape()[1]];
                            bias[[b % batches.max(1), h % heads.max(1), i, j]]
                        });
                        sizes[[b, h, i, j]] = rounding * size_of(scores, sigma * product, bias);
                    }
                }
            }
        }
        StoredScores::Bias { sizes, stored }
    }

    fn of_logits(loss: &LinearCrossEntropy, rounding: f64, inputs: &Values) -> Self {
        let two = |name: &str| inputs.get(name)?.view().into_dimensionality::<Ix2>().ok();
        let (Some(h), Some(w)) = (two("h"), two("w")) else { return StoredScores::None };
        let size = rounding * steps_of_logits(loss).sqrt();
        // The error of h·w counts, which all later steps pass on.
        let sizes = w.dot(&h.t()).mapv(|a| if a.is_finite() { size * a.abs() } else { 0.0 });
        StoredScores::Columns { sizes: sizes.into_dyn(), dim: loss.dim }
    }

    /// The problem that is evaluated.
    pub fn problem<'a>(&self, problem: &'a Problem) -> Cow<'a, Problem> {
        let mut changed = problem.clone();
        match (self, &mut changed) {
            (StoredScores::None | StoredScores::Factors(_), _) => return Cow::Borrowed(problem),
            (StoredScores::Bias { sizes, .. }, Problem::Attention(x)) => {
                x.scores.bias = full(sizes);
            }
            (StoredScores::Bias { sizes, .. }, Problem::AttentionLse(x)) => {
                x.scores.bias = full(sizes);
            }
            (StoredScores::Columns { dim, .. }, Problem::LinearCrossEntropy(x)) => {
                x.dim = dim + x.tokens;
            }
            _ => {}
        }
        Cow::Owned(changed)
    }

    /// Adds the roundings of the kernel of that number to the inputs.
    pub fn enter(&self, kernel: u64, inputs: &mut Values) -> Result<(), Error> {
        let stream = Stream::new(kernel, "scores");
        let drawn = |at: usize, size: &f64| size * stream.normal(at);
        match self {
            StoredScores::None => {}
            StoredScores::Factors(size) => {
                for name in ["q", "k", "h", "w"] {
                    let Some(x) = inputs.get_mut(name) else { continue };
                    let stream = Stream::new(kernel, &format!("scores of {name}"));
                    x.iter_mut()
                        .enumerate()
                        .for_each(|(at, x)| *x += *x * size * stream.normal(at));
                }
            }
            StoredScores::Bias { sizes, stored } => {
                if let Some(sinks) = inputs.get_mut("sinks") {
                    sinks.mapv_inplace(|x| stored.round(x));
                }
                let mut noise = sizes.clone().into_dyn();
                noise.iter_mut().enumerate().for_each(|(at, x)| *x = drawn(at, x));
                let own = inputs.get("bias").and_then(|own| own.broadcast(noise.shape()));
                if let Some(own) = own {
                    noise += &own;
                }
                inputs.insert("bias".to_string(), noise);
            }
            StoredScores::Columns { sizes, .. } => {
                let mut noise = sizes.clone();
                noise.iter_mut().enumerate().for_each(|(at, x)| *x = drawn(at, x));
                let tokens = sizes.shape()[1];
                let one = |at: IxDyn| if at[0] == at[1] { 1.0 } else { 0.0 };
                let own = ArrayD::from_shape_fn(vec![tokens, tokens], one);
                for (name, more) in [("h", own), ("w", noise)] {
                    let Some(x) = inputs.get(name) else { continue };
                    let wider = concatenate(Axis(1), &[x.view(), more.view()]);
                    let wider = wider.map_err(|error| Error::value(name, "two axes", error))?;
                    inputs.insert(name.to_string(), wider.as_standard_layout().to_owned());
                }
            }
        }
        Ok(())
    }

    /// Leaves of the results what the problem returns.
    pub fn leave(&self, operands: &[Operand], results: &mut Values) -> Result<(), Error> {
        results.retain(|name, _| operands.iter().any(|x| x.name == name));
        for operand in operands.iter().filter(|x| x.role == Role::Output) {
            let Some(result) = results.get_mut(operand.name) else { continue };
            match self {
                StoredScores::None | StoredScores::Factors(_) => {}
                StoredScores::Bias { .. } => {
                    // Of a bias that several heads share, the sum.
                    for (at, &extent) in operand.shape.iter().enumerate() {
                        if extent == 1 && result.shape()[at] > 1 {
                            *result = result.sum_axis(Axis(at)).insert_axis(Axis(at));
                        }
                    }
                }
                StoredScores::Columns { dim, .. } => {
                    if result.ndim() == 2 && result.shape()[1] != operand.shape[1] {
                        let own = result.slice_axis(Axis(1), (0..*dim).into());
                        *result = own.as_standard_layout().to_owned();
                    }
                }
            }
            Error::expect_shape(operand.name, &operand.shape, result.shape())?;
        }
        Ok(())
    }
}

/// A bias for each pair.
fn full(sizes: &Array4<f64>) -> Option<BiasExtents> {
    Some(BiasExtents { batch: sizes.shape()[0], heads: sizes.shape()[1] })
}

fn pairs(scores: &Scores) -> usize {
    let e = &scores.extents;
    [e.query_heads, e.queries, e.keys].into_iter().fold(e.batch, usize::saturating_mul)
}

/// Steps to a score: the product, the scaled one, those of a cap, and the sum with a bias.
fn steps(scores: &Scores) -> f64 {
    let cap = if scores.softcap.is_some() { 3.0 } else { 0.0 };
    2.0 + cap + if scores.bias.is_some() { 1.0 } else { 0.0 }
}

/// Steps to a logit: the product, and those of the options that there are.
fn steps_of_logits(loss: &LinearCrossEntropy) -> f64 {
    let further = [
        (loss.bias, 1.0),
        (loss.logit_scale != 1.0, 1.0),
        (loss.softcap.is_some(), 3.0),
        (loss.temperature != 1.0, 1.0),
    ];
    1.0 + further.into_iter().filter(|(is, _)| *is).map(|(_, steps)| steps).sum::<f64>()
}

/// The root of the sum of the squares of what is rounded on the way to a score.
fn size_of(scores: &Scores, scaled: f64, bias: f64) -> f64 {
    let size = match scores.softcap {
        None => 2.0 * scaled * scaled + if bias == 0.0 { 0.0 } else { (scaled + bias).powi(2) },
        Some(cap) => {
            let tau = (scaled / cap).tanh();
            let bent = 3.0 * (scaled * (1.0 - tau * tau)).powi(2) + 2.0 * (cap * tau).powi(2);
            bent + if bias == 0.0 { 0.0 } else { (cap * tau + bias).powi(2) }
        }
    };
    if size.is_finite() { size.sqrt() } else { 0.0 }
}
