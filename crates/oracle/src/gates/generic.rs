//! Test of generic inputs: the errors of a correct kernel on them are random, so that gate G2 may decide.
//!
//! Elements must look as if each were drawn by itself from one distribution around 0 that is no wilder than
//! Laplace's, and no row of scores may be decided by a few pairs. The test reads the inputs alone.

use crate::tensor::{Tensors, Values, values};
use etalon_problem::{Error, Operand, Pass, Precision, Problem, Role};
use ndarray::{ArrayD, Axis};

/// Fewest elements that a test looks at.
const FEWEST: usize = 64;

/// A mean, a mean square or a correlation may lie so many standard deviations from what is expected: by chance
/// it does in 10⁻¹¹ of all cases, of which a large tensor has 10⁵.
const DEVIATIONS: f64 = 7.0;

/// E x⁴ / (E x²)²: of a uniform distribution 1.8, of a normal one 3, of Laplace's 6, and of a few hundred draws
/// of that up to five times as much.
const WILDEST: f64 = 40.0;
const LAPLACE: f64 = 6.0;

/// The most common value may be that of one element in so many: 16-bit types have few values.
const SAME: usize = 16;

/// Elements that are looked at for common values.
const LOOKED_AT: usize = 1 << 16;

/// Rows of so many elements are judged by their own mean square.
const WIDE: usize = 16;

/// A row must have as many pairs that count, in the mean: where one or two are left, gradients are
/// differences of what nearly cancels.
const PAIRS: f64 = 4.0;

/// Fails with the reason where inputs are not generic.
pub fn generic(problem: &Problem, pass: Pass, inputs: &Tensors) -> Result<(), String> {
    let operands = problem.operands(pass);
    let numbers = values(problem, pass, inputs).map_err(|error| error.to_string())?;
    for operand in operands.iter().filter(|operand| is_drawn(operand)) {
        let Some(x) = numbers.get(operand.name) else { continue };
        independent(x).map_err(|reason| format!("{}: {reason}", operand.name))?;
    }
    let pairs = pairs_that_count(problem, pass, &numbers).map_err(|error| error.to_string())?;
    if pairs < PAIRS {
        return Err(format!("{pairs:.1} pairs of a row of scores count, {PAIRS} are needed"));
    }
    Ok(())
}

/// Decays and weights of tokens and classes have one sign; what the forward pass saved is no draw.
fn is_drawn(operand: &Operand) -> bool {
    let signed = !matches!(operand.primal, "g" | "g_gamma" | "class_weights" | "token_weights");
    let given =
        operand.role.is_given() && !matches!(operand.role, Role::Saved | Role::OptionalSaved);
    given && signed && operand.precision != Precision::Integer
}

/// Fails unless the elements look like independent draws.
fn independent(x: &ArrayD<f64>) -> Result<(), String> {
    let n = x.len();
    if let Some(odd) = x.iter().find(|x| !x.is_finite()) {
        return Err(format!("an element is {odd}"));
    }
    if n < FEWEST {
        return Ok(());
    }
    if most_common(x) * SAME > n.min(LOOKED_AT) {
        return Err(format!("more than one element in {SAME} has the same value"));
    }
    let moments = Moments::of(x.iter());
    let Moments { mean, square, wild, .. } = moments;
    if wild > WILDEST {
        return Err(format!("E x⁴ is {wild:.0} times (E x²)², of a normal distribution it is 3"));
    }
    if mean.abs() > DEVIATIONS * (square / n as f64).sqrt() {
        return Err(format!("the mean is {mean:.2e} at a deviation of {:.2e}", square.sqrt()));
    }
    for axis in (0..x.ndim()).filter(|&axis| x.shape()[axis] > 1) {
        for (at, slice) in x.axis_iter(Axis(axis)).enumerate() {
            let place = || format!("elements with index {at} of axis {axis}");
            moments
                .has_part(&Moments::of(slice.iter()))
                .map_err(|reason| format!("{} {reason}", place()))?;
        }
        let correlation = neighbours(x, axis) / square;
        let pairs = n - n / x.shape()[axis];
        if correlation.abs() * (pairs as f64).sqrt() > DEVIATIONS {
            return Err(format!("neighbours along axis {axis} go together: {correlation:.2}"));
        }
    }
    let width = x.shape().last().copied().unwrap_or(1);
    if let Some(list) = x.as_slice().filter(|_| width >= WIDE) {
        for (row, part) in list.chunks(width).enumerate() {
            moments
                .has_part(&Moments::of(part.iter()))
                .map_err(|reason| format!("row {row} {reason}"))?;
        }
    }
    Ok(())
}

/// Of some numbers their count, mean, mean square, and E x⁴ / (E x²)².
struct Moments {
    n: f64,
    mean: f64,
    square: f64,
    wild: f64,
}

impl Moments {
    fn of<'a>(x: impl Iterator<Item = &'a f64>) -> Self {
        let (mut n, mut sums) = (0.0f64, [0.0f64; 3]);
        for &x in x {
            n += 1.0;
            let square = x * x;
            sums = [sums[0] + x, sums[1] + square, sums[2] + square * square];
        }
        let [mean, square, fourth] = sums.map(|sum| sum / n.max(1.0));
        Moments { n, mean, square, wild: fourth / (square * square) }
    }

    /// Fails unless a part of the numbers has the mean and the mean square of all, up to chance.
    fn has_part(&self, part: &Moments) -> Result<(), String> {
        if part.n < WIDE as f64 {
            return Ok(());
        }
        if part.mean.abs() > DEVIATIONS * (self.square / part.n).sqrt() {
            return Err(format!("have the mean {:.2e}", part.mean));
        }
        // Sums of few squares have a long tail: a squared deviation is exceeded as often as that of a χ².
        let deviation = ((self.wild.min(LAPLACE) - 1.0).max(1.0) / part.n).sqrt();
        let most = 1.0 + DEVIATIONS * deviation + DEVIATIONS * DEVIATIONS * deviation * deviation;
        match part.square / self.square {
            ratio if ratio > most => Err(format!("are {:.1} times as large as all", ratio.sqrt())),
            ratio if part.n >= FEWEST as f64 && ratio < 1.0 / most => {
                Err(format!("are {:.2} times as large as all", ratio.sqrt()))
            }
            _ => Ok(()),
        }
    }
}

/// Number of elements with the most common value, among the first [`LOOKED_AT`].
fn most_common(x: &ArrayD<f64>) -> usize {
    let mut bits: Vec<u64> = x.iter().take(LOOKED_AT).map(|x| x.to_bits()).collect();
    bits.sort_unstable();
    bits.chunk_by(|x, y| x == y).map(<[u64]>::len).max().unwrap_or(0)
}

/// The mean product of neighbours along an axis.
fn neighbours(x: &ArrayD<f64>, axis: usize) -> f64 {
    let axis = Axis(axis);
    let (first, second) = (x.slice_axis(axis, (..-1).into()), x.slice_axis(axis, (1..).into()));
    let products = first.iter().zip(second.iter()).map(|(x, y)| x * y);
    products.sum::<f64>() / first.len().max(1) as f64
}

/// Number of terms of a softmax that count, in the mean over its rows: of n terms whose logits deviate by σ as many as
/// n e^{−σ²} have (Σ P)² / Σ P². Without a softmax ∞. Gradients of keys are sums over queries: outside of the forward
/// pass the fewer of both directions count.
fn pairs_that_count(problem: &Problem, pass: Pass, x: &Values) -> Result<f64, Error> {
    let square = |name: &str| x.get(name).map_or(0.0, |x| Moments::of(x.iter()).square);
    if let Some(scores) = problem.scores() {
        let e = &scores.extents;
        let longest = if pass == Pass::Forward { e.queries } else { e.queries.max(e.keys) };
        let rows = e.batch * e.query_heads * longest;
        let pairs = scores.visible_pairs()? as f64 / rows.max(1) as f64;
        let variance = scores.scale() * scores.scale() * square("q") * square("k") * e.dim as f64;
        let capped = scores.softcap.map_or(variance, |cap| variance.min(cap * cap));
        return Ok(pairs * (-(capped + square("bias"))).exp());
    }
    if let Problem::LinearCrossEntropy(problem) = problem {
        let scale = problem.logit_scale / problem.temperature;
        let variance = scale * scale * square("h") * square("w") * problem.dim as f64;
        return Ok(problem.vocab as f64 * (-variance).exp());
    }
    Ok(f64::INFINITY)
}
