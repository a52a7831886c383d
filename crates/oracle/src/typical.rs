//! Typical errors of correct kernels: those of a few simulated ones.
//!
//! A bound is a worst case; the errors of a real kernel add up like random numbers. A simulated kernel
//! evaluates the reference on operands that are off by as much as its roundings are, each element by a
//! random amount of its own, and rounds the results to their storage type (N86). Its errors have the
//! size, from row to row, and the directions that those of a real kernel have: where δ of a row errs,
//! all its dS err together.

use crate::bounds::{Bound, Bounds};
use crate::chunks::{chunks, over_chunks};
use crate::generate::Stream;
use crate::profile::Profile;
use crate::stochastic::underflow;
use crate::tensor::{Stored, Tensors, Values, values};
use crate::types::Types;
use etalon_problem::{Algorithm, Axis, Dtype, Error, Operand, Pass, Precision, Problem, Role};
use etalon_reference::{Arithmetic, evaluate_in};
use ndarray::ArrayD;
use scores::StoredScores;
use std::borrow::Cow;
use std::collections::BTreeMap;

mod scores;

/// Of so many stored scores each has an error of its own; of more, errors of operands stand for them.
pub const STORED_SCORES: usize = 1 << 22;

/// Number of simulated kernels: their errors tell a standard deviation to a fifth, where every
/// element has one of its own, and much better where those of a row share it.
pub const KERNELS: u64 = 8;

/// The slope of a capped logit, 1 − t², errs by the roundings of t, also where t is near 1 and it is small.
/// No error of an operand makes it err so: with a cap, a gradient of linear cross-entropy errs by so much of
/// its bound besides. Where that error decides, the bound holds eight roundoffs of tanh, and as many of
/// other functions; a kernel makes one or two.
const OF_A_SLOPE: f64 = 1.0 / 16.0;

/// Simulated kernels of a profile on a pass.
#[derive(Debug)]
pub struct Kernels<'a> {
    problem: Cow<'a, Problem>,
    pass: Pass,
    types: Types,
    operands: Vec<Operand>,
    inputs: Values,
    size: Size,
    /// Errors from the storage of o and lse.
    saved: Saved,
    /// Errors from the storage of scores, and the form in which they enter.
    scores: StoredScores,
    /// Errors of each output from stored weights that underflow; `None` where none does.
    underflow: Option<Values>,
    exact: &'a Bounds,
}

impl<'a> Kernels<'a> {
    /// Of a pass whose exact results are known.
    pub fn new(
        problem: &'a Problem,
        pass: Pass,
        types: impl Into<Types>,
        profile: &Profile,
        inputs: &Tensors,
        exact: &'a Bounds,
    ) -> Result<Self, Error> {
        let (operands, types) = (problem.operands(pass), types.into());
        let inputs = values(problem, pass, inputs)?;
        let size = Size::new(profile, &operands);
        let saved = Saved::new(problem, pass, &inputs, size.sums, &types)?;
        let scores = StoredScores::new(problem, profile, &inputs);
        let underflow = underflow(problem, pass, profile, &inputs, exact)?;
        let problem = scores.problem(problem);
        Ok(Kernels {
            problem,
            pass,
            types,
            operands,
            inputs,
            size,
            saved,
            scores,
            underflow,
            exact,
        })
    }

    /// Results of the kernel of that number in each output of floating-point numbers before it stores them;
    /// the exact value where one would end farther off than the bound.
    pub fn results(&self, kernel: u64) -> Result<Values, Error> {
        let mut results = self.sums(kernel)?;
        self.each_stored(&mut results, |stored, bound, results| {
            let elements = ndarray::Zip::from(results).and(&bound.value).and(&bound.bound);
            elements.for_each(|result, &exact, &bound| {
                let error = (stored.round(*result) - exact).abs();
                *result = if error <= bound { *result } else { exact };
            });
        });
        Ok(results)
    }

    /// got − exact of the kernel of that number, by output. An output of integers has none. Farther off
    /// than its bound no correct kernel is: there the error is a random share of it. All of it would be the same
    /// direction in every kernel, beside which a row has no errors of its own. Where the exact result is not finite
    /// it errs by nothing.
    pub fn errors(&self, kernel: u64) -> Result<Values, Error> {
        let mut results = self.sums(kernel)?;
        let shares = Stream::new(kernel, "shares of a bound");
        self.each_stored(&mut results, |stored, bound, results| {
            let exact = bound.value.iter().zip(&bound.bound);
            for (at, (result, (exact, &bound))) in results.iter_mut().zip(exact).enumerate() {
                let error = stored.round(*result) - exact;
                let error = match error.abs() > bound {
                    true => error.signum() * bound * shares.uniform(at),
                    false => error,
                };
                *result = if bound > 0.0 && error.is_finite() { error } else { 0.0 };
            }
        });
        Ok(results)
    }

    /// The outputs of the kernel of that number, once their sums have rounded them.
    fn sums(&self, kernel: u64) -> Result<Values, Error> {
        let mut inputs = self.perturbed(kernel);
        if let Some(lse) = &self.saved.lse {
            // A weight of the row that is too large by a factor makes its dS so, as a dout would.
            let stream = Stream::new(kernel, "lse");
            for name in ["dout", "dlse"] {
                let Some(rows) = inputs.get_mut(name) else { continue };
                let width = rows.len() / lse.len().max(1);
                let all = rows.iter_mut().enumerate();
                all.for_each(|(at, x)| {
                    let row = at / width.max(1);
                    *x += *x * lse[row] * stream.normal(row);
                });
            }
        }
        if let Some(delta) = &self.saved.delta {
            // dlse is subtracted from δ, and read nowhere else.
            let stream = Stream::new(kernel, "delta");
            let mut dlse = inputs.remove("dlse").unwrap_or_else(|| ArrayD::zeros(delta.shape()));
            let rows = dlse.iter_mut().zip(delta).enumerate();
            rows.for_each(|(at, (dlse, size))| *dlse += size * stream.normal(at));
            inputs.insert("dlse".to_string(), dlse);
        }
        self.scores.enter(kernel, &mut inputs)?;
        let mut results = evaluate_in(Arithmetic::F64, &self.problem, self.pass, &inputs)?;
        self.scores.leave(&self.operands, &mut results)?;
        for (name, results) in &mut results {
            if let Some(bound) = self.exact.outputs.get(name) {
                let stream = Stream::new(kernel, &format!("{name} of a simulated kernel"));
                summed(bound, results, self.size, stream);
                if let Some(lost) = self.underflow.as_ref().and_then(|lost| lost.get(name)) {
                    let share = Stream::new(kernel, "underflow").uniform(0);
                    results.scaled_add(0.5 + 0.5 * share, lost);
                }
                if self.size.chunks > 0.0 && matches!(name.as_str(), "dw" | "dbias") {
                    let stream = Stream::new(kernel, &format!("{name}, by chunks"));
                    over_chunks(&bound.value, results, self.size.chunks, stream);
                }
                if self.bends(name) {
                    let stream = Stream::new(kernel, &format!("{name}, by slopes"));
                    let elements = results.iter_mut().zip(&bound.bound).enumerate();
                    let bounded = elements.filter(|(_, (_, bound))| bound.is_finite());
                    bounded.for_each(|(at, (x, bound))| {
                        *x += OF_A_SLOPE * bound * stream.normal(at);
                    });
                }
            }
        }
        Ok(results)
    }

    /// True where the slope of a capped logit enters an output ([`OF_A_SLOPE`]), or the rounding of an lse that no
    /// error of an operand stands for.
    fn bends(&self, name: &str) -> bool {
        let capped =
            matches!(&*self.problem, Problem::LinearCrossEntropy(x) if x.softcap.is_some());
        (capped || self.saved.lse_besides)
            && self.operands.iter().any(|x| x.name == name && x.primal != name)
    }

    /// The operands, of which every element errs by itself.
    fn perturbed(&self, kernel: u64) -> Values {
        let perturbed = |(name, x): (&String, &ArrayD<f64>)| {
            let Some(operand) = self.operands.iter().find(|y| y.name == name) else {
                return (name.clone(), x.clone());
            };
            let size = self.size_of(operand);
            let stream = Stream::new(kernel, name);
            let mut x = x.clone();
            let rows = Stream::new(kernel, &format!("{name}, by rows"));
            let (width, together) = (operand.shape.last().copied(), self.together(operand));
            let elements = x.iter_mut().enumerate().filter(|(_, x)| x.is_finite());
            elements.for_each(|(at, x)| {
                let row = at / width.unwrap_or(1).max(1);
                *x += *x * (size * stream.normal(at) + together * rows.normal(row));
            });
            (name.clone(), x)
        };
        self.inputs.iter().map(perturbed).collect()
    }

    /// The standard deviation of the relative errors that all elements of a row have in common. One pair may
    /// be most of a row of linear attention, and a rounding of its weight is then one of the whole row.
    fn together(&self, operand: &Operand) -> f64 {
        let linear = self.problem.algorithm() == Algorithm::LinearAttention;
        if linear && self.size_of(operand) > self.size.sums { self.size.weights } else { 0.0 }
    }

    /// The standard deviation of the relative errors of an operand.
    fn size_of(&self, operand: &Operand) -> f64 {
        // Stored weights multiply values; in later passes dS multiplies everything else.
        let multiplied = self.pass != Pass::Forward || operand.axes.contains(&Axis::ValueDim);
        // Scores that decide whether a pair counts are of the accumulator's type.
        let decides = self.problem.algorithm() == Algorithm::LazyAttention
            && !operand.axes.contains(&Axis::ValueDim);
        // The da of targets are nearly one number, and round alike, where most targets are improbable.
        let scales_all = operand.primal == "loss";
        match operand.precision {
            Precision::Integer => 0.0,
            _ if scales_all => self.size.sums.hypot(self.size.weights),
            Precision::Storage if multiplied && !decides => self.size.stored,
            _ => self.size.sums,
        }
    }

    /// Calls `f` with each output of floating-point numbers, its type and its bound; the others go.
    fn each_stored(&self, results: &mut Values, f: impl Fn(Dtype, &Bound, &mut ArrayD<f64>)) {
        results.retain(|name, results| {
            let operand = self.operands.iter().find(|operand| operand.name == name);
            let stored = operand.map(|operand| self.types.of(operand));
            let (Some(Stored::Float(stored)), Some(bound)) = (stored, self.exact.outputs.get(name))
            else {
                return false;
            };
            f(stored, bound, results);
            true
        });
    }
}

/// The errors of several simulated kernels.
#[derive(Debug, Clone)]
pub struct Typical {
    /// By output, of each kernel.
    pub errors: BTreeMap<String, Vec<ArrayD<f64>>>,
}

impl Typical {
    /// Errors of the first [`KERNELS`].
    pub fn new(kernels: &Kernels<'_>) -> Result<Self, Error> {
        let mut errors = BTreeMap::<String, Vec<ArrayD<f64>>>::new();
        for kernel in 0..KERNELS {
            for (name, error) in kernels.errors(kernel)? {
                errors.entry(name).or_default().push(error);
            }
        }
        Ok(Typical { errors })
    }
}

/// Standard deviations of the relative errors of simulated operands.
#[derive(Debug, Clone, Copy)]
struct Size {
    /// Error of a sum in the accumulator's type.
    sums: f64,
    /// The same with the roundings of a stored P, dS, or gradient of a head.
    stored: f64,
    /// A rounding of a weight that is stored in less than the accumulator's type.
    weights: f64,
    /// A rounding of a sum in the accumulator's type.
    rounding: f64,
    /// The roundings of dw over chunks, in shares of its rows.
    chunks: f64,
}

impl Size {
    /// (N86)
    fn new(profile: &Profile, operands: &[Operand]) -> Self {
        let axes = operands.iter().flat_map(|x| x.shape.iter().rev().take(2));
        let longest = axes.copied().max().unwrap_or(1);
        // A rounding errs by up to u, and by u/√3 in the mean; n of them by √n as much.
        let rounding = profile.accumulator.unit_roundoff() / 3f64.sqrt();
        let sums = rounding * (profile.chain(longest) as f64).sqrt();
        let sums = sums.hypot(profile.factor / 3f64.sqrt());
        let &Profile { group_store, dp_store, weight_store, residual_store, .. } = profile;
        let types = [group_store, dp_store, weight_store, residual_store];
        let narrow = profile.p_roundoff().max(profile.ds_roundoff());
        let stored =
            types.map(Dtype::unit_roundoff).into_iter().fold(narrow, f64::max) / 3f64.sqrt();
        let weights =
            if narrow > profile.accumulator.unit_roundoff() { narrow / 3f64.sqrt() } else { 0.0 };
        let chunks = chunks(profile, operands);
        Size { sums, stored: sums.hypot(stored), weights, rounding, chunks }
    }
}

/// Errors of a gradient due to the o and lse that the forward pass stored.
#[derive(Debug, Default)]
struct Saved {
    /// The standard deviation of δ = Σ o dout of each row: o is rounded as it was stored, and the sum in the
    /// accumulator's type. `None` where the pass reads no stored o, or has no cotangents beside it.
    delta: Option<ArrayD<f64>>,
    /// The standard deviation of the relative error that the weights of each row have in common, where lse is
    /// stored in a narrower type than usual.
    lse: Option<Vec<f64>>,
    /// True where there is such an error, and no error of an operand is like it.
    lse_besides: bool,
}

impl Saved {
    fn new(
        problem: &Problem,
        pass: Pass,
        inputs: &Values,
        sums: f64,
        types: &Types,
    ) -> Result<Self, Error> {
        let operands = problem.operands(pass);
        let has =
            |name: &str, role: Role| operands.iter().any(|x| x.name == name && x.role == role);
        let reads_o = has("o", Role::Saved) && has("dlse", Role::OptionalCotangent);
        let backward = matches!(pass, Pass::Backward | Pass::ForwardBackward);
        let narrow = backward && types.narrows("lse", Precision::Wide);
        let scaled = matches!(problem, Problem::Attention(_) | Problem::AttentionLse(_));
        let mut saved = Saved { lse_besides: narrow && !scaled, ..Saved::default() };
        if !(reads_o || narrow && scaled) {
            return Ok(saved);
        }
        let forward = problem.operands(Pass::Forward);
        let own = |name: &str| forward.iter().any(|x| x.name == name && x.role.is_given());
        let given = inputs.iter().filter(|(name, _)| own(name));
        let given: Values = given.map(|(name, x)| (name.clone(), x.clone())).collect();
        let outputs = evaluate_in(Arithmetic::F64, problem, Pass::Forward, &given)?;
        let roundoff = |name, precision| {
            types.stored(name, precision).dtype().map_or(0.0, Dtype::unit_roundoff) / 3f64.sqrt()
        };
        if let (true, Some(o), Some(dout)) = (reads_o, outputs.get("o"), inputs.get("dout")) {
            let size = roundoff("o", Precision::Storage).hypot(sums);
            let products = (o * dout).mapv(|x| if x.is_finite() { x * x } else { 0.0 });
            let squares = products.sum_axis(ndarray::Axis(products.ndim() - 1));
            saved.delta = Some(squares.mapv(|sum| size * sum.sqrt()));
        }
        if let (true, Some(lse)) = (narrow && scaled, outputs.get("lse")) {
            let size = roundoff("lse", Precision::Wide);
            let finite = lse.iter().map(|x| if x.is_finite() { size * x.abs() } else { 0.0 });
            saved.lse = Some(finite.collect());
        }
        Ok(saved)
    }
}

/// Rounds every element as its sum does. Where a row cancels, its error is as large as if it did not.
fn summed(bound: &Bound, results: &mut ArrayD<f64>, size: Size, stream: Stream) {
    let whole = bound.value.iter().filter(|x| x.is_finite()).map(|x| x * x);
    let whole = (whole.sum::<f64>() / bound.value.len().max(1) as f64).sqrt();
    let mut at = 0;
    ndarray::Zip::from(results).and(&bound.value).and(&bound.bound).for_each(
        |result, &exact, &bound| {
            at += 1;
            let error = (exact * size.sums).hypot(whole * size.rounding) * stream.normal(at);
            // A bound of 0: a masked element.
            *result = if bound == 0.0 { exact } else { *result + error };
        },
    );
}
