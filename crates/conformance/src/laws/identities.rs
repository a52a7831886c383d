//! Identities among the outputs that follow from the formulas and need no oracle but the bounds'
//! widths.

use super::flaw::{Flaw, Judgement};
use super::law::{ATTENTION, FIRST_ORDER, Kind, Law, SCORES};
use super::trial::Trial;
use super::values::larger;
use super::visible::Visible;
use crate::bounds::Bounds;
use crate::cases::Case;
use crate::tensor::Tensors;
use crate::tier::Hints;
use etalon_problem::Pass;
use ndarray::{ArrayD, Axis, IxDyn, Slice};

pub(super) const LAWS: &[Law] = &[
    Law {
        name: "sum_dv",
        statement: "Without sinks Σ_j dv_j = Σ_i dout_i over the rows that are not masked.",
        kind: Kind::Meaning,
        of: ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, pass: Pass| {
            let sinks = case.problem.scores().is_some_and(|scores| scores.sinks);
            pass == Pass::Backward && has_v(case) && !sinks
        },
        check: sum_dv,
    },
    Law {
        name: "sum_dk",
        statement: "Without softcap and sinks Σ_j dk_j = σ Σ_i dlse_i q_i.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, pass: Pass| {
            pass == Pass::Backward
                && case.problem.scores().is_some_and(|s| !s.sinks && s.softcap.is_none())
        },
        check: sum_dk,
    },
    Law {
        name: "euler_qk",
        statement: "⟨dq, q⟩ = ⟨dk, k⟩ for every key head.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |_, pass| pass == Pass::Backward,
        check: euler_qk,
    },
    Law {
        name: "euler_vo",
        statement: "⟨dv, v⟩ = ⟨dout, o⟩ for every key head.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, pass: Pass| pass == Pass::Backward && has_v(case),
        check: euler_vo,
    },
    Law {
        name: "sum_dbias",
        statement: "Without sinks the row sums of dbias are dlse.",
        kind: Kind::Meaning,
        of: ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, pass: Pass| {
            pass == Pass::Backward
                && case.problem.scores().is_some_and(|scores| {
                    let full = [scores.extents.batch, scores.extents.query_heads];
                    !scores.sinks && scores.bias.is_some_and(|x| [x.batch, x.heads] == full)
                })
        },
        check: sum_dbias,
    },
];

fn has_v(case: &Case) -> bool {
    case.inputs.contains_key("v")
}

/// A sum with the rounding that the outputs in it may carry.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sum {
    value: f64,
    slack: f64,
}

impl Sum {
    /// Adds `x · factor`, where x errs by `bound`. The f64 additions here cost 2⁻⁵³ of each term
    /// and each partial sum: 2⁻⁴⁰ covers 4096 of them.
    pub(super) fn add(&mut self, x: f64, factor: f64, bound: f64) {
        self.value += x * factor;
        self.slack += bound * factor.abs() + (x * factor).abs() * 0.5f64.powi(40);
    }
}

pub(super) fn equal(what: &str, left: Sum, right: Sum) -> Judgement {
    let slack = left.slack + right.slack;
    let distance = (left.value - right.value).abs();
    if distance == 0.0 || slack == f64::INFINITY {
        return Ok(None);
    }
    match distance / slack {
        margin if margin <= 1.0 => Ok(Some(margin)),
        _ => Err(Flaw::Fail(format!(
            "{what}: {:e} and {:e} differ by more than {slack:e}",
            left.value, right.value
        ))),
    }
}

/// What an identity is made of.
pub(super) struct Arrays<'a> {
    pub(super) inputs: &'a Tensors,
    outputs: &'a Tensors,
    bounds: &'a Bounds,
}

impl<'a> Arrays<'a> {
    pub(super) fn of(trial: &'a Trial<'_>) -> Result<Self, Flaw> {
        Ok(Arrays { inputs: &trial.case.inputs, outputs: trial.clean()?, bounds: trial.bounds()? })
    }

    pub(super) fn input(&self, name: &str) -> Result<ArrayD<f64>, Flaw> {
        Ok(self.inputs[name].to_f64(name)?)
    }

    pub(super) fn output(&self, name: &str) -> Result<(ArrayD<f64>, &'a ArrayD<f64>), Flaw> {
        Ok((self.outputs[name].to_f64(name)?, &self.bounds.outputs[name].bound))
    }
}

/// The part of an array that belongs to a batch element and some heads.
fn heads(x: &ArrayD<f64>, b: usize, heads: std::ops::Range<usize>) -> ArrayD<f64> {
    let element = x.index_axis(Axis(0), b);
    element.slice_axis(Axis(0), Slice::from(heads)).to_owned()
}

/// Every batch element and key head, with the range of its query heads.
pub(super) fn groups(case: &Case) -> Result<Vec<(usize, usize, std::ops::Range<usize>)>, Flaw> {
    let scores = case.scores()?;
    let (e, group) = (scores.extents, scores.group());
    let element = |b| (0..e.key_heads).map(move |h| (b, h, h * group..(h + 1) * group));
    Ok((0..e.batch).flat_map(element).collect())
}

/// ⟨x, y⟩ with the slack of x.
fn inner(x: &ArrayD<f64>, y: &ArrayD<f64>, bound: &ArrayD<f64>) -> Sum {
    let mut sum = Sum::default();
    for ((x, y), bound) in x.iter().zip(y).zip(bound) {
        sum.add(*x, *y, *bound);
    }
    sum
}

fn euler_qk(trial: &Trial<'_>) -> Judgement {
    let arrays = Arrays::of(trial)?;
    let (q, k) = (arrays.input("q")?, arrays.input("k")?);
    let ((dq, dq_bound), (dk, dk_bound)) = (arrays.output("dq")?, arrays.output("dk")?);
    let mut margin = None;
    for (b, h, group) in groups(trial.case)? {
        let rows = |x: &ArrayD<f64>| heads(x, b, group.clone());
        let keys = |x: &ArrayD<f64>| heads(x, b, h..h + 1);
        let left = inner(&rows(&dq), &rows(&q), &rows(dq_bound));
        let right = inner(&keys(&dk), &keys(&k), &keys(dk_bound));
        margin = larger(margin, equal(&format!("⟨dq, q⟩, ⟨dk, k⟩ of [{b}, {h}]"), left, right)?);
    }
    Ok(margin)
}

fn euler_vo(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let arrays = Arrays::of(trial)?;
    let (v, dout) = (arrays.input("v")?, arrays.input("dout")?);
    let (dv, dv_bound) = arrays.output("dv")?;
    // The tier's own o: the identity then also ties the two passes together.
    let forward = trial.ask_pass(&case.problem, Pass::Forward, &case.inputs, Hints::default())?;
    let o = forward["o"].to_f64("o")?;
    let o_bound = &trial.bounds_in(Pass::Forward)?.outputs["o"].bound;
    let mut margin = None;
    for (b, h, group) in groups(case)? {
        let rows = |x: &ArrayD<f64>| heads(x, b, group.clone());
        let keys = |x: &ArrayD<f64>| heads(x, b, h..h + 1);
        let left = inner(&keys(&dv), &keys(&v), &keys(dv_bound));
        let right = inner(&rows(&o), &rows(&dout), &rows(o_bound));
        margin = larger(margin, equal(&format!("⟨dv, v⟩, ⟨dout, o⟩ of [{b}, {h}]"), left, right)?);
    }
    Ok(margin)
}

/// Σ over the rows of axis 1 of `weight(row) · x`, column by column, against the sum of `y`.
fn columns(
    what: &str,
    sums: (&ArrayD<f64>, &ArrayD<f64>),
    rows: &ArrayD<f64>,
    weight: impl Fn(usize, usize) -> f64,
) -> Judgement {
    let mut margin = None;
    let width = rows.shape()[2];
    for c in 0..width {
        let mut left = Sum::default();
        let (x, bound) = sums;
        for (x, bound) in x.index_axis(Axis(2), c).iter().zip(bound.index_axis(Axis(2), c)) {
            left.add(*x, 1.0, *bound);
        }
        let mut right = Sum::default();
        for (index, x) in rows.index_axis(Axis(2), c).indexed_iter() {
            // Where a row does not count its element may be anything.
            let weight = weight(index[0], index[1]);
            if weight != 0.0 {
                right.add(*x, weight, 0.0);
            }
        }
        margin = larger(margin, equal(&format!("{what}, column {c}"), left, right)?);
    }
    Ok(margin)
}

fn sum_dv(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let arrays = Arrays::of(trial)?;
    let counts = Visible::new(case.scores()?, &case.inputs).counts();
    let dout = arrays.input("dout")?;
    let (dv, bound) = arrays.output("dv")?;
    let mut margin = None;
    for (b, h, group) in groups(case)? {
        let key = |x: &ArrayD<f64>| heads(x, b, h..h + 1);
        let first = group.start;
        let seeing = |head: usize, i: usize| f64::from(counts[[b, first + head, i]] > 0);
        let sums = (&key(&dv), &key(bound));
        let rows = heads(&dout, b, group);
        margin = larger(margin, columns(&format!("Σ dv of [{b}, {h}]"), sums, &rows, seeing)?);
    }
    Ok(margin)
}

fn sum_dk(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let arrays = Arrays::of(trial)?;
    let scale = case.scores()?.scale();
    let counts = Visible::new(case.scores()?, &case.inputs).counts();
    let q = arrays.input("q")?;
    let dlse = match arrays.inputs.contains_key("dlse") {
        true => arrays.input("dlse")?,
        false => ArrayD::zeros(IxDyn(counts.shape())),
    };
    let (dk, bound) = arrays.output("dk")?;
    let mut margin = None;
    for (b, h, group) in groups(case)? {
        let key = |x: &ArrayD<f64>| heads(x, b, h..h + 1);
        let first = group.start;
        let weight = |head: usize, i: usize| match counts[[b, first + head, i]] {
            0 => 0.0,
            _ => scale * dlse[[b, first + head, i]],
        };
        let rows = heads(&q, b, group);
        let sums = (&key(&dk), &key(bound));
        margin = larger(margin, columns(&format!("Σ dk of [{b}, {h}]"), sums, &rows, weight)?);
    }
    Ok(margin)
}

fn sum_dbias(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let arrays = Arrays::of(trial)?;
    let counts = Visible::new(case.scores()?, &case.inputs).counts();
    let (dbias, bound) = arrays.output("dbias")?;
    let dlse = match arrays.inputs.contains_key("dlse") {
        true => arrays.input("dlse")?,
        false => ArrayD::zeros(IxDyn(counts.shape())),
    };
    let mut margin = None;
    for ((b, h, i), count) in counts.indexed_iter() {
        let mut left = Sum::default();
        let at = ndarray::s![b, h, i, ..];
        for (x, bound) in dbias.slice(at).iter().zip(bound.slice(at)) {
            left.add(*x, 1.0, *bound);
        }
        let mut right = Sum::default();
        if *count > 0 {
            right.add(dlse[[b, h, i]], 1.0, 0.0);
        }
        margin = larger(margin, equal(&format!("Σ dbias of [{b}, {h}, {i}]"), left, right)?);
    }
    Ok(margin)
}
