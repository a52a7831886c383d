//! How far off correct kernels typically are: the errors of a few simulated ones.
//!
//! A bound is a worst case; the errors of a real kernel add up like random numbers. A simulated kernel
//! evaluates the reference on operands that are off by as much as its roundings are, each element by a
//! random amount of its own, and rounds the results to their storage type (N86). Its errors have the
//! size, from row to row, and the directions that those of a real kernel have: where δ of a row errs,
//! all its dS err together.

use crate::bounds::{Bound, Bounds};
use crate::generate::Stream;
use crate::profile::Profile;
use crate::tensor::{Stored, Tensors, Values, values};
use etalon_problem::{Axis, Dtype, Error, Operand, Pass, Precision, Problem, Role};
use etalon_reference::{Arithmetic, evaluate_in};
use ndarray::ArrayD;
use std::collections::BTreeMap;

/// How many kernels are simulated: their errors tell a standard deviation to a fifth, where every
/// element has one of its own, and much better where those of a row share it.
pub const KERNELS: u64 = 8;

/// Simulated kernels of a profile on a pass.
#[derive(Debug)]
pub struct Kernels<'a> {
    problem: &'a Problem,
    pass: Pass,
    dtype: Dtype,
    operands: Vec<Operand>,
    inputs: Values,
    size: Size,
    exact: &'a Bounds,
}

impl<'a> Kernels<'a> {
    /// Of a pass whose exact results are known.
    pub fn new(
        problem: &'a Problem,
        pass: Pass,
        dtype: Dtype,
        profile: &Profile,
        inputs: &Tensors,
        exact: &'a Bounds,
    ) -> Result<Self, Error> {
        let operands = problem.operands(pass);
        let inputs = values(problem, pass, inputs)?;
        let size = Size::new(profile, &operands, dtype);
        Ok(Kernels { problem, pass, dtype, operands, inputs, size, exact })
    }

    /// got − exact of the kernel of that number, by output. An output of integers has none.
    pub fn errors(&self, kernel: u64) -> Result<Values, Error> {
        let inputs = perturbed(&self.operands, &self.inputs, self.pass, self.size, kernel);
        let outputs = evaluate_in(Arithmetic::F64, self.problem, self.pass, &inputs)?;
        let mut errors = Values::new();
        for operand in &self.operands {
            let name = operand.name;
            let (Some(bound), Some(got)) = (self.exact.outputs.get(name), outputs.get(name)) else {
                continue;
            };
            let Stored::Float(stored) = Stored::of(operand.precision, self.dtype) else { continue };
            let stream = Stream::new(kernel, &format!("{name} of a simulated kernel"));
            errors.insert(name.to_string(), stored_error(bound, got, self.size, stored, stream));
        }
        Ok(errors)
    }
}

/// The errors of several simulated kernels.
#[derive(Debug, Clone)]
pub struct Typical {
    /// By output, of each kernel.
    pub errors: BTreeMap<String, Vec<ArrayD<f64>>>,
}

impl Typical {
    /// Those of the first [`KERNELS`].
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
    /// What a sum in the accumulator's type costs.
    sums: f64,
    /// The same with the roundings of a stored P, dS, or gradient of a head.
    stored: f64,
    /// What a pass reads again was stored, and rounded: o enters δ. Where a row cancels, as that of a
    /// single key, its error is as large as if it did not.
    saved: f64,
}

impl Size {
    /// (N86)
    fn new(profile: &Profile, operands: &[Operand], storage: Dtype) -> Self {
        let axes = operands.iter().flat_map(|x| x.shape.iter().rev().take(2));
        let longest = axes.copied().max().unwrap_or(1);
        // A rounding errs by up to u, and by u/√3 in the mean; n of them by √n as much.
        let sums =
            profile.accumulator.unit_roundoff() * (profile.chain(longest) as f64 / 3.0).sqrt();
        let sums = sums.hypot(profile.factor / 3f64.sqrt());
        let types = [profile.p_store, profile.ds_store, profile.group_store];
        let stored = types.map(Dtype::unit_roundoff).into_iter().fold(0.0, f64::max) / 3f64.sqrt();
        let rounded = |x: &&Operand| x.role == Role::Saved && x.precision == Precision::Storage;
        let saved = match operands.iter().find(rounded) {
            Some(_) => storage.unit_roundoff(),
            None => profile.accumulator.unit_roundoff(),
        };
        Size { sums, stored: sums.hypot(stored), saved: saved / 3f64.sqrt() }
    }
}

/// Operands of which every element errs by itself.
fn perturbed(operands: &[Operand], inputs: &Values, pass: Pass, size: Size, kernel: u64) -> Values {
    let perturbed = |(name, x): (&String, &ArrayD<f64>)| {
        let Some(operand) = operands.iter().find(|y| y.name == name) else {
            return (name.clone(), x.clone());
        };
        // Stored weights multiply values; in later passes dS multiplies everything else.
        let multiplied = pass != Pass::Forward || operand.axes.contains(&Axis::ValueDim);
        let size = match operand.precision {
            Precision::Integer => 0.0,
            Precision::Storage if multiplied => size.stored,
            _ => size.sums,
        };
        let stream = Stream::new(kernel, name);
        let mut x = x.clone();
        let elements = x.iter_mut().enumerate().filter(|(_, x)| x.is_finite());
        elements.for_each(|(at, x)| *x += *x * size * stream.normal(at));
        (name.clone(), x)
    };
    inputs.iter().map(perturbed).collect()
}

/// got − exact of every element, once its sum and its storage have rounded it. Where the exact result is
/// not finite it errs by nothing.
fn stored_error(
    bound: &Bound,
    got: &ArrayD<f64>,
    size: Size,
    stored: Dtype,
    stream: Stream,
) -> ArrayD<f64> {
    let whole = bound.value.iter().filter(|x| x.is_finite()).map(|x| x * x);
    let whole = (whole.sum::<f64>() / bound.value.len().max(1) as f64).sqrt();
    let mut at = 0;
    ndarray::Zip::from(&bound.value).and(&bound.bound).and(got).map_collect(
        |&exact, &bound, &got| {
            at += 1;
            if bound == 0.0 {
                return 0.0; // masked
            }
            let summed = got + (exact * size.sums).hypot(whole * size.saved) * stream.normal(at);
            let error = stored.round(summed) - exact;
            // Farther off than its bound no correct kernel is.
            let error = if error.abs() <= bound { error } else { stored.round(exact) - exact };
            if error.is_finite() { error } else { 0.0 }
        },
    )
}
