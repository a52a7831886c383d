//! Contributions that a filter leaves out of the gradients, and their certificate: (C36)–(C38).

use super::problem;
use crate::bounds::{Bound, logit_gradients};
use crate::gates::margins;
use crate::laws::flaw::{Flaw, Judgement, worst};
use crate::laws::tensors::{Equality, everywhere, same};
use crate::laws::trial::Trial;
use crate::tensor::Tensor;
use crate::tier::{Filtered, Hints};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Dtype, Error};
use ndarray::{Array2, ArrayD, ArrayView1, Axis, Ix2};

/// A threshold of 0: nothing is below.
const NOTHING: Filter = Filter::Below { eps: 0.0 };

/// As large as numbers may be that no f32 norm or sum overflows at.
const MODERATE: f64 = 1_125_899_906_842_624.0; // 2⁵⁰

/// Everything left out, about half of the classes, and within budgets: what is left out is small, and the
/// certificate is what (C37) and (C38) make it, and holds.
pub(super) fn filter(trial: &Trial<'_>) -> Judgement {
    let exact = Exact::new(trial)?;
    let everything = exact.above();
    let all = trial.ask_filtered(Filter::Below { eps: everything }, Hints::default())?;
    let judge = |filter, found: &Filtered| {
        let of = |flaw: Flaw| flaw.of(&format!("{filter:?}"));
        exact.judge(trial, filter, found).map_err(of)
    };
    let mut judgements = vec![judge(Filter::Below { eps: everything }, &all), exact.whole(&all)];
    let most = |bounds: &[f64]| f64::from(bounds.iter().copied().fold(0.0, f64::max) as f32);
    let (dh, dw) = (most(&all.dh), most(&all.dw));
    let mut filters = vec![Filter::Below { eps: exact.middle(all.classes) }];
    if dh.is_finite() && dw.is_finite() {
        filters.extend([Filter::Within { dh: 0.5 * dh, dw }, Filter::Within { dh, dw: 0.5 * dw }]);
    }
    // The least memory, so that dh and dw have sweeps of their own: in each the same choices.
    let least = Hints { memory_budget: Some(0), ..Hints::default() };
    for (number, filter) in filters.into_iter().enumerate() {
        let hints = if number < 2 { least } else { Hints::default() };
        judgements.push(judge(filter, &trial.ask_filtered(filter, hints)?));
    }
    // A certificate is nearly used up where much is left out: that is no margin of a bound.
    worst(judgements).map(|_| None)
}

/// A threshold of 0 changes no bit.
pub(super) fn filter_of_nothing(trial: &Trial<'_>) -> Judgement {
    let found = trial.ask_filtered(NOTHING, Hints::default())?;
    let (kept, all) = found.tiles;
    if kept != all {
        return Err(Flaw::Fail(format!("{kept} of {all} tiles are kept")));
    }
    if let Some(bound) = found.dh.iter().chain(&found.dw).find(|bound| **bound != 0.0) {
        return Err(Flaw::Fail(format!("a bound is {bound:e}, though nothing is left out")));
    }
    same(&found.outputs, trial.clean()?, Equality::Bits, everywhere)
}

/// The gradients of the logits of a case, and the rows that they are multiplied with.
struct Exact {
    /// |da|, and how far it may be off.
    sizes: Array2<f64>,
    errors: Array2<f64>,
    /// ‖h_i‖ and ‖w_v‖.
    of_h: Vec<f64>,
    of_w: Vec<f64>,
    /// By how much of itself the sum of a bound may be rounded, and by how much beside.
    relative: f64,
    absolute: f64,
}

/// Norms of some elements of da, by token and by class.
struct Sums {
    /// Σ_v |da_iv|, times the largest ‖w_v‖ of the tile of classes.
    by_token: Vec<f64>,
    /// Σ_i |da_iv| ‖h_i‖
    by_class: Vec<f64>,
}

impl Exact {
    fn new(trial: &Trial<'_>) -> Result<Self, Error> {
        let (problem, inputs, profile) = (problem(trial.case)?, trial.inputs(), trial.profile());
        let [sizes, errors] = logit_gradients(problem, trial.case.dtype, profile, inputs)?;
        let norms = |name: &str| -> Result<Vec<f64>, Error> {
            Ok(inputs[name].to_f64(name)?.outer_iter().map(|row| norm(row.iter())).collect())
        };
        let (of_h, of_w) = (norms("h")?, norms("w")?);
        let terms = (problem.vocab + problem.tokens + problem.dim + 8) as f64;
        let u = terms * profile.accumulator.unit_roundoff();
        let largest = of_h.iter().chain(&of_w).copied().fold(1.0, f64::max);
        Ok(Exact {
            sizes,
            errors,
            of_h,
            of_w,
            relative: u / (1.0 - u) + ENLARGED,
            absolute: terms * profile.accumulator.min_positive() * largest,
        })
    }

    /// Sums of what `part` makes of |da| and of its error, in tiles of so many classes.
    fn sums(&self, tile: usize, part: impl Fn(f64, f64) -> f64) -> Sums {
        let (tokens, classes) = self.sizes.dim();
        let widest = |tile: &[f64]| tile.iter().copied().fold(0.0, f64::max);
        let widest: Vec<f64> = self.of_w.chunks(tile).map(widest).collect();
        let mut sums = Sums { by_token: vec![0.0; tokens], by_class: vec![0.0; classes] };
        for ((i, v), &size) in self.sizes.indexed_iter() {
            let part = part(size, self.errors[[i, v]]);
            if part != 0.0 {
                sums.by_token[i] += part * widest[v / tile];
                sums.by_class[v] += part * self.of_h[i];
            }
        }
        sums
    }

    /// The largest |da| that a kernel may have; ∞ where one is NaN.
    fn largest(&self) -> f64 {
        let largest = |most: f64, x: f64| if x > most || x.is_nan() { x.abs() } else { most };
        let all = self.sizes.iter().zip(&self.errors).map(|(size, error)| size + error);
        let most = all.fold(0.0, largest);
        if most.is_nan() { f64::INFINITY } else { most }
    }

    /// A threshold that every da of moderate size is below.
    fn above(&self) -> f64 {
        f64::from((2.0 * self.largest().min(MODERATE)) as f32).max(f64::from(f32::MIN_POSITIVE))
    }

    /// A threshold that about half of the tiles of so many classes are below.
    fn middle(&self, tile: usize) -> f64 {
        let tiles = self.sizes.axis_chunks_iter(Axis(1), tile);
        let mut largest: Vec<f64> =
            tiles.map(|tile| tile.iter().copied().fold(0.0, f64::max)).collect();
        largest.sort_by(f64::total_cmp);
        let middle = largest.get(largest.len() / 2).copied().unwrap_or(0.0);
        f64::from(middle.min(MODERATE) as f32)
    }

    /// Fails unless the certificate is at most what may be left out, and holds.
    fn judge(&self, trial: &Trial<'_>, filter: Filter, found: &Filtered) -> Judgement {
        let eps = match filter {
            Filter::Below { eps } => eps,
            Filter::Within { dh, dw } => {
                not_above("certificate.dh", &found.dh, |_| dh)?;
                not_above("certificate.dw", &found.dw, |_| dw)?;
                f64::INFINITY
            }
        };
        // Elements that are NaN, or off by any amount, may be left out or not.
        let most = self.sums(found.classes, |size, error| match size - error < eps {
            true => size + error,
            false if (size - error).is_nan() => f64::INFINITY,
            false => 0.0,
        });
        let rounded = |most: f64| most * (1.0 + self.relative) + self.absolute;
        not_above("certificate.dh", &found.dh, |i| rounded(most.by_token[i]))?;
        not_above("certificate.dw", &found.dw, |v| rounded(most.by_class[v]))?;
        let bounds = &trial.bounds()?.outputs;
        let outputs = &found.outputs;
        let dbias = bounds.get("dbias").map(|bound| within("dbias", bound, &outputs["dbias"]));
        worst(
            [
                self.holds("dh", &bounds["dh"], &outputs["dh"], &found.dh),
                self.holds("dw", &bounds["dw"], &outputs["dw"], &found.dw),
            ]
            .into_iter()
            .chain(dbias),
        )
    }

    /// Fails unless everything is left out, and the certificate is no less than that.
    fn whole(&self, found: &Filtered) -> Judgement {
        let norms = self.of_h.iter().chain(&self.of_w).copied();
        if norms.fold(self.largest(), f64::max) > MODERATE {
            return Ok(None); // not everything is below the threshold, or bounds may overflow
        }
        let (kept, all) = found.tiles;
        if kept != 0 {
            return Err(Flaw::Fail(format!(
                "{kept} of {all} tiles are kept, though all are small"
            )));
        }
        let least = self.sums(found.classes, |size, error| (size - error).max(0.0));
        let rounded = |least: f64| least * (1.0 - self.relative) - self.absolute;
        not_below("certificate.dh", &found.dh, |i| rounded(least.by_token[i]))?;
        not_below("certificate.dw", &found.dw, |v| rounded(least.by_class[v]))
    }

    /// Fails where a row is off by more than its certificate and its bound together (N87). A row without a
    /// certificate is exempt.
    fn holds(&self, name: &str, bound: &Bound, got: &Tensor, certificate: &[f64]) -> Judgement {
        let stored = got.dtype().unwrap_or(Dtype::F64).unit_roundoff();
        let got = rows(got.to_f64(name)?)?;
        let (value, bounds) = (rows(bound.value.clone())?, rows(bound.bound.clone())?);
        let mut margin = 0f64;
        for (row, &certain) in certificate.iter().enumerate() {
            let left_out = certain * (1.0 + self.relative) * (1.0 + 2.0 * stored) + self.absolute;
            let (value, bounds, got) = (value.row(row), bounds.row(row), got.row(row));
            let reach = |(x, b): (&f64, &f64)| x.abs() + b + left_out;
            // Sums that overflow where they are stored are off by any amount.
            if !left_out.is_finite() || value.iter().zip(bounds).any(|x| reach(x) > bound.largest) {
                continue;
            }
            let (error, limit) = (distance(value, got), norm(bounds.iter()) + left_out);
            let share = if error == 0.0 { 0.0 } else { error / limit };
            if share > 1.0 || share.is_nan() {
                let text = format!(
                    "‖error of {name}[{row}]‖ = {error:e}, where the certificate has {certain:e} and \
                     rounding {:e}",
                    limit - left_out
                );
                return Err(Flaw::Fail(text));
            }
            margin = margin.max(share);
        }
        Ok(Some(margin))
    }
}

/// Factor by which a tier may enlarge a bound, so that it holds however it is rounded.
const ENLARGED: f64 = 1.0 / 16_384.0;

/// Relative to the largest element: squares of what is tiny underflow in f64, too.
fn norm<'a>(row: impl Iterator<Item = &'a f64> + Clone) -> f64 {
    let largest = row.clone().fold(0.0, |most: f64, x| most.max(x.abs()));
    if largest == 0.0 || largest == f64::INFINITY {
        return row.map(|x| x.abs()).sum();
    }
    largest * row.map(|x| (x / largest) * (x / largest)).sum::<f64>().sqrt()
}

/// ‖x − y‖, where numbers of one class that are not finite are equal.
fn distance(x: ArrayView1<'_, f64>, y: ArrayView1<'_, f64>) -> f64 {
    let difference = |(x, y): (&f64, &f64)| {
        let same = x == y || (x.is_nan() && y.is_nan());
        if same { 0.0 } else { x - y }
    };
    let differences: Vec<f64> = x.iter().zip(y).map(difference).collect();
    norm(differences.iter())
}

fn rows(x: ArrayD<f64>) -> Result<Array2<f64>, Error> {
    x.into_dimensionality::<Ix2>().map_err(|error| Error::value("a gradient", "of rows", error))
}

fn not_above(name: &str, bounds: &[f64], most: impl Fn(usize) -> f64) -> Judgement {
    let mut all = bounds.iter().enumerate().map(|(at, &bound)| (at, bound, most(at)));
    let wrong = all.find(|(_, bound, most)| bound > most || (bound.is_nan() && most.is_finite()));
    wrong.map_or(Ok(None), |(at, bound, most)| {
        Err(Flaw::Fail(format!("{name}[{at}] = {bound:e}, where at most {most:e} is left out")))
    })
}

fn not_below(name: &str, bounds: &[f64], least: impl Fn(usize) -> f64) -> Judgement {
    let mut all = bounds.iter().enumerate().map(|(at, &bound)| (at, bound, least(at)));
    let wrong = all.find(|(_, bound, least)| bound < least);
    wrong.map_or(Ok(None), |(at, bound, least)| {
        Err(Flaw::Fail(format!("{name}[{at}] = {bound:e}, where {least:e} is left out")))
    })
}

/// Fails unless every element lies within its bound: what is never filtered.
fn within(name: &str, bound: &Bound, got: &Tensor) -> Judgement {
    let margins = margins(bound, &got.to_f64(name)?);
    match margins.iter().position(|margin| *margin > 1.0) {
        Some(at) => Err(Flaw::Fail(format!("{name}[{at}] is off, though it is never filtered"))),
        None => Ok(Some(margins.into_iter().fold(0.0, f64::max))),
    }
}
