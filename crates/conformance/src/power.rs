//! Power of the gates: of each output of each pass, the smallest error of three kinds that they notice in the results
//! of a correct kernel, which is simulated.

use crate::bounds::{Bounds, bounds};
use crate::cases::{Case, Depth, Spec, specs, storage};
use crate::gates::{g1, g2};
use crate::profile::Profile;
use crate::report::Verdict;
use crate::tensor::{Stored, Tensor, Tensors, Values, values};
use crate::typical::{KERNELS, Kernels, Typical};
use etalon_problem::{Algorithm, Dtype, Error, Mask, NamedArray, Operand, Pass, Problem, Role};
use etalon_reference::{Arithmetic, evaluate_in};
use ndarray::{ArrayD, Dimension, IxDyn};
use rayon::prelude::*;

/// The smallest errors that the gates notice in one output.
#[derive(Debug, Clone, PartialEq)]
pub struct Power {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The pass.
    pub pass: Pass,
    /// The output.
    pub output: &'static str,
    /// The arithmetic of the kernel.
    pub profile: Profile,
    /// The least share of itself by which every element is too large.
    pub uniform: Option<f64>,
    /// The same of one row, in the median of some rows.
    pub row: Option<f64>,
    /// The least weight of a key that one row forgets, such that nine in ten of its like are noticed.
    pub key: Option<f64>,
}

/// Seeds, of which two must show an error.
const SEEDS: u64 = 3;

/// Errors are planted from this on, each 2^¼ times the one before.
const LEAST: f64 = 9.313_225_746_154_785e-10; // 2⁻³⁰

/// Seeds in whose cases one is searched that has many results.
const ROUNDS: u64 = 8;

/// Cases of which the best counts: what is planted uniformly is in all of them.
const CASES: usize = 4;

/// Rows of which one at a time is wrong.
const ROWS: usize = 9;

/// The storage type that goes with a profile.
fn storage_of(profile: &Profile) -> Dtype {
    let narrow = profile.stores().into_iter().find(|dtype| *dtype != profile.accumulator);
    narrow.unwrap_or(profile.accumulator)
}

/// Power of the gates for every output of floating-point numbers of a pass, for kernels of a profile, in the best of
/// some cases. Nothing of a pass for which the profile has no bounds, and of storage that no case has.
pub fn power(
    algorithm: Algorithm,
    pass: Pass,
    profile: Profile,
    seed: u64,
) -> Result<Vec<Power>, Error> {
    let dtype = storage_of(&profile);
    if !algorithm.passes().contains(&pass) || !storage(algorithm).contains(&dtype) {
        return Ok(Vec::new());
    }
    let mut best: Vec<Power> = Vec::new();
    for case in richest(algorithm, pass, dtype, seed) {
        for power in of_case(&case, pass, profile)? {
            match best.iter_mut().find(|known| known.output == power.output) {
                Some(known) => known.take_smaller(&power),
                None => best.push(power),
            }
        }
    }
    Ok(best)
}

impl Power {
    /// Keeps the smaller errors of two.
    fn take_smaller(&mut self, other: &Power) {
        for (own, other) in [
            (&mut self.uniform, other.uniform),
            (&mut self.row, other.row),
            (&mut self.key, other.key),
        ] {
            *own = [*own, other].into_iter().flatten().reduce(f64::min);
        }
    }
}

/// Power of the gates in one case.
fn of_case(case: &Case, pass: Pass, profile: Profile) -> Result<Vec<Power>, Error> {
    let trials: Result<Vec<Trial>, Error> =
        (0..SEEDS).into_par_iter().map(|later| Trial::new(case, pass, profile, later)).collect();
    let trials = match trials {
        Err(Error::Unsupported { .. }) => return Ok(Vec::new()),
        trials => trials?,
    };
    let operands = case.problem.operands(pass);
    let outputs = operands.iter().filter(|x| trials[0].got.contains_key(x.name));
    let outputs: Vec<&Operand> = outputs.collect();
    let keys = trials[0].keys(&case.problem)?;
    let of_output = |operand: &&Operand| {
        let name = operand.name;
        Power {
            algorithm: case.spec.algorithm,
            pass,
            output: name,
            profile,
            uniform: least(|x| {
                let seen =
                    trials.iter().filter(|trial| trial.notices(name, |_, value| value * (1.0 + x)));
                2 * seen.count() as u64 > SEEDS
            }),
            row: trials[0].row(name),
            key: keys.as_ref().and_then(|keys| trials[0].key(name, keys)),
        }
    };
    Ok(outputs.par_iter().map(of_output).collect())
}

/// Of the cases with generic elements, and sums of many, those with most results.
fn richest(algorithm: Algorithm, pass: Pass, dtype: Dtype, seed: u64) -> Vec<Case> {
    let all = (0..ROUNDS).flat_map(|round| specs(algorithm, Depth::Core, seed.wrapping_add(round)));
    let results = |spec: &Spec| {
        let operands = spec.problem().operands(pass).into_iter();
        operands.filter(|x| x.role == Role::Output).map(|x| x.len()).sum::<usize>()
    };
    let mut all: Vec<(usize, Spec)> =
        all.map(|spec| Spec { dtype, ..spec }).map(|spec| (results(&spec), spec)).collect();
    all.sort_by_key(|(results, _)| std::cmp::Reverse(*results));
    all.into_iter().map(|(_, spec)| spec.build()).filter(Case::is_rich).take(CASES).collect()
}

/// A simulated kernel on one set of elements.
struct Trial {
    pass: Pass,
    profile: Profile,
    dtype: Dtype,
    operands: Vec<Operand>,
    inputs: Tensors,
    exact: Bounds,
    typical: Typical,
    /// Results of the kernel, before they are stored.
    got: Values,
}

/// The exact results without one key in each row, and the weights of these keys.
struct Forgotten {
    results: Values,
    weights: ArrayD<f64>,
}

impl Trial {
    fn new(case: &Case, pass: Pass, profile: Profile, later: u64) -> Result<Self, Error> {
        let (problem, dtype) = (&case.problem, case.dtype);
        let inputs = case.afresh(pass, later);
        let exact = bounds(problem, pass, dtype, &profile, &inputs)?;
        let kernels = Kernels::new(problem, pass, dtype, &profile, &inputs, &exact)?;
        let typical = Typical::new(&kernels)?;
        // A kernel whose errors are none of those that the gate compares it with.
        let (got, operands) = (kernels.results(KERNELS + later)?, problem.operands(pass));
        Ok(Trial { pass, profile, dtype, operands, inputs, exact, typical, got })
    }

    /// True if a gate notices one output, after a change of its elements.
    fn notices(&self, name: &str, change: impl Fn(&[usize], f64) -> f64) -> bool {
        let mut got = self.got[name].clone();
        got.indexed_iter_mut().for_each(|(at, x)| *x = change(at.slice(), *x));
        let precision = self.operands.iter().find(|x| x.name == name).map(|x| x.precision);
        let Some(precision) = precision else { return false };
        let tensor = Tensor::store(&got, Stored::of(precision, self.dtype));
        let outputs = Tensors::from([(name.to_string(), tensor)]);
        let bound = self.exact.outputs[name].clone();
        let one = Bounds { outputs: [(name.to_string(), bound)].into(), power: None };
        g1(&one, &outputs).verdict != Verdict::Pass
            || g2(&self.operands, &self.profile, &one, &self.typical, &outputs)
                .iter()
                .any(|statistic| statistic.margin() > 1.0)
    }

    /// Rows of an output, evenly spread: all axes but the last.
    fn rows(&self, name: &str) -> Vec<Vec<usize>> {
        let shape = self.got[name].shape();
        let axes = &shape[..shape.len().saturating_sub(1)];
        let all: usize = axes.iter().product();
        let index = |at: usize| {
            let mut at = at * all / ROWS + all / (2 * ROWS);
            let mut index = vec![0; axes.len()];
            for (place, extent) in index.iter_mut().zip(axes).rev() {
                *place = at % extent;
                at /= extent;
            }
            index
        };
        if all < ROWS { Vec::new() } else { (0..ROWS).map(index).collect() }
    }

    fn row(&self, name: &str) -> Option<f64> {
        let of_row = |row: Vec<usize>| {
            least(|x| {
                let wrong = |at: &[usize]| at[..row.len()] == row[..];
                self.notices(name, |at, value| if wrong(at) { value * (1.0 + x) } else { value })
            })
        };
        let mut found: Vec<f64> =
            self.rows(name).into_iter().map(|row| of_row(row).unwrap_or(f64::INFINITY)).collect();
        found.sort_by(f64::total_cmp);
        found.get(found.len() / 2).copied().filter(|x| x.is_finite())
    }

    /// The exact results where every row forgets one of the keys that it sees; of attention's forward
    /// pass, in which rows do not meet.
    fn keys(&self, problem: &Problem) -> Result<Option<Forgotten>, Error> {
        let Problem::Attention(attention) = problem else { return Ok(None) };
        if self.pass != Pass::Forward {
            return Ok(None);
        }
        let e = attention.scores.extents;
        let shape = [e.batch, e.query_heads, e.queries, e.keys];
        let forgotten = |at: usize| (at / e.keys * 7 + 3) % e.keys.max(1) == at % e.keys.max(1);
        let pairs: usize = shape.iter().product();
        let flags: Vec<bool> = (0..pairs).map(|at| !forgotten(at)).collect();
        let fewer = Mask::Array(NamedArray::new("fewer", &shape, flags));
        let mut attention = attention.clone();
        attention.scores.mask = Mask::And(vec![attention.scores.mask, fewer]);
        let operands = values(problem, self.pass, &self.inputs)?;
        let results = evaluate_in(Arithmetic::F64, &attention.into(), self.pass, &operands)?;
        // lse′ = lse + ln(1 − P)
        let weights = 1.0 - (&results["lse"] - &self.exact.outputs["lse"].value).mapv(f64::exp);
        Ok(Some(Forgotten { results, weights }))
    }

    fn key(&self, name: &str, keys: &Forgotten) -> Option<f64> {
        let moved = &keys.results[name] - &self.exact.outputs[name].value;
        let rows = keys.weights.indexed_iter().filter(|(_, weight)| **weight > 0.0);
        let noticed = |(row, &weight): (IxDyn, &f64)| {
            let row = row.slice();
            let wrong = |at: &[usize]| at[..row.len()] == *row;
            let change = |at: &[usize], x| if wrong(at) { x + moved[IxDyn(at)] } else { x };
            (weight, self.notices(name, change))
        };
        // Every third row is enough.
        let mut found: Vec<(f64, bool)> = rows.step_by(3).map(noticed).collect();
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        let (mut seen, mut least) = (0, None);
        for (all, (weight, noticed)) in (1..).zip(found) {
            seen += usize::from(noticed);
            if 10 * seen >= 9 * all {
                least = Some(weight);
            }
        }
        least
    }
}

/// The smallest error that is noticed, and from which on every error is; nothing where even none is: of a
/// kernel that rounding lets decide otherwise than the others, no error is distinguishable from that.
fn least(notices: impl Fn(f64) -> bool) -> Option<f64> {
    if notices(0.0) {
        return None;
    }
    let sizes = (0..=120).map(|step| LEAST * 2f64.powf(f64::from(step) / 4.0));
    sizes.rev().take_while(|&x| notices(x)).last()
}
