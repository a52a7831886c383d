//! Conventions in which libraries differ, each with a stable name: what a kernel computes that was written
//! for another one than the problem's.
//!
//! `docs/conventions.md` says of each who uses it and what it costs to mix it up; a test holds the page
//! against this list. A [`Reading`] is the problem as such a kernel reads it.

mod slopes;

pub(crate) use slopes::broken;

use crate::laws::tensors::take;
use crate::tensor::{Tensor, Tensors, Values, values};
use etalon_problem::{
    Align, Axis, Error, LinearCrossEntropy, Mask, Operand, Pass, Problem, Reduction, Role, Scores,
};
use etalon_reference::{Arithmetic, evaluate_in};
use ndarray::Axis as Along;
use std::f64::consts::{LN_2, LOG2_E};

/// A convention that is not the problem's.
#[derive(Debug, Clone, Copy)]
pub struct Convention {
    /// Its name, which does not change.
    pub id: &'static str,
    /// What a kernel of it does, in a sentence.
    pub statement: &'static str,
    /// The known bug of the zoo by which it is told, where it is no other reading of a problem.
    pub mutant: Option<&'static str>,
    read: Read,
}

/// How another reading of a problem comes about.
#[derive(Debug, Clone, Copy)]
enum Read {
    /// The kernel answers another problem.
    Problem(fn(&mut Problem)),
    /// It takes an input for another number.
    Inputs(fn(&Problem, &mut Tensors)),
    /// It returns lse as another number.
    Lse(fn(f64) -> f64),
    /// Its query heads share key heads in another order.
    Heads,
    /// It decays by other slopes (`slopes`).
    Slopes,
    /// No other problem has its results: a mutant of the zoo computes them.
    Mutant,
}

/// A problem as a kernel of a convention reads it.
#[derive(Debug, Clone)]
pub struct Reading {
    /// The name of the convention.
    pub id: &'static str,
    /// It in words.
    pub text: String,
    /// The problem.
    pub problem: Problem,
    /// Its inputs.
    pub inputs: Tensors,
    read: Read,
}

/// The table of conventions.
macro_rules! conventions {
    ($($(#[doc = $statement:literal])+ $id:literal = $read:expr $(, $mutant:literal)?;)*) => {
        /// Every convention.
        pub const ALL: &[Convention] = &[$(Convention {
            id: $id,
            statement: concat!($($statement),+).trim_ascii(),
            mutant: [$(Some($mutant),)? None][0],
            read: $read,
        }),*];
    };
}
conventions! {
    /// Masks are aligned at the top left: the first query sees the first key.
    "mask-top-left" = Read::Problem(|x| align(x, Align::TopLeft)), "top-left";
    /// Masks are aligned at the bottom right: the last query sees the last key.
    "mask-bottom-right" = Read::Problem(|x| align(x, Align::BottomRight));
    /// There is no mask.
    "mask-absent" = Read::Problem(|x| scores(x, |x| x.mask = Mask::Full));
    /// The size of a window counts the query's own key: it reaches one key less to the left.
    "window-with-own-key" = Read::Problem(|x| windows(x, |left| left.saturating_sub(1))),
        "window-left-minus-one";
    /// A window reaches one key further to the left.
    "window-one-more" = Read::Problem(|x| windows(x, |left| left.saturating_add(1))),
        "window-left-plus-one";
    /// Scores have no scale: the caller scales the queries.
    "scale-absent" = Read::Problem(|x| scale(x, |_| 1.0));
    /// The scale is applied twice, by the caller and by the kernel.
    "scale-twice" = Read::Problem(|x| scale(x, |scale| scale * scale));
    /// The scale is 1/√D times the one of the problem.
    "scale-by-width" = Read::Problem(scale_by_width), "scale-by-width";
    /// The scale is 1/√E, by the width of the values.
    "scale-of-values" = Read::Problem(scale_of_values), "scale-of-values";
    /// There is no softcap.
    "softcap-absent" = Read::Problem(without_softcap), "softcap-ignored";
    /// The softcap also bends the bias: it comes after it.
    "softcap-after-bias" = Read::Mutant, "softcap-after-bias";
    /// The bias is scaled with the scores: it is added before the scale.
    "bias-scaled" = Read::Inputs(|problem, inputs| {
        let scale = problem.scores().map_or(1.0, Scores::scale);
        each(inputs, "bias", |x| x * scale);
    });
    /// There is no bias.
    "bias-absent" = Read::Inputs(|_, inputs| each(inputs, "bias", |_| 0.0));
    /// There are no sinks.
    "sinks-absent" = Read::Inputs(|_, inputs| each(inputs, "sinks", |_| f64::NEG_INFINITY));
    /// lse does not count the sink.
    "lse-without-sink" = Read::Mutant, "sink-not-in-lse";
    /// lse is a logarithm to base 2.
    "lse-base-2" = Read::Lse(|x| x * LOG2_E), "lse-in-base-2";
    /// A row without a visible key is NaN.
    "masked-rows-nan" = Read::Mutant, "empty-row-is-nan";
    /// Query head h uses key head h mod Hk.
    "heads-interleaved" = Read::Heads, "head-modulo";
    /// Decays are taken to base 2: a state decays by 2^g.
    "decay-base-2" = Read::Inputs(|_, inputs| {
        ["g", "g_gamma"].iter().for_each(|name| each(inputs, name, |g| g * LN_2));
    });
    /// There are no decays.
    "decay-absent" = Read::Inputs(|_, inputs| {
        ["g", "g_gamma"].iter().for_each(|name| each(inputs, name, |_| 0.0));
    }), "decay-ignored";
    /// The slopes of the original lightning attention, whatever `g_gamma` is.
    "slopes-geometric" = Read::Slopes;
    /// The slopes of flash-linear-attention's lightning_attn, whatever `g_gamma` is.
    "slopes-linear" = Read::Slopes;
    /// The slopes of retention, whatever `g_gamma` is.
    "slopes-retention" = Read::Slopes;
    /// The loss is the sum over tokens.
    "reduction-sum" = Read::Problem(|x| loss(x, |x| x.reduction = Reduction::Sum));
    /// The loss is the mean over tokens.
    "reduction-mean" = Read::Problem(|x| loss(x, |x| x.reduction = Reduction::Mean));
    /// Labels are not smoothed.
    "smoothing-absent" = Read::Problem(|x| loss(x, |x| x.label_smoothing = 0.0));
    /// The target of a token is that of the next one: the kernel shifts targets itself.
    "targets-shifted" = Read::Inputs(shift_targets);
}

/// The convention of that name.
pub fn find(id: &str) -> Option<&'static Convention> {
    ALL.iter().find(|convention| convention.id == id)
}

/// The other readings of a problem: those that differ from it.
pub fn readings(problem: &Problem, inputs: &Tensors) -> Vec<Reading> {
    let own = |convention: &Convention| {
        let Convention { id, statement, read, .. } = *convention;
        let mut reading = Reading {
            id,
            text: format!("{id}. {statement}"),
            problem: problem.clone(),
            inputs: inputs.clone(),
            read,
        };
        match read {
            Read::Problem(change) => change(&mut reading.problem),
            Read::Inputs(change) => change(problem, &mut reading.inputs),
            Read::Heads => take_heads(&mut reading)?,
            Read::Lse(_) => {}
            Read::Slopes | Read::Mutant => return None,
        }
        let same = reading.problem == *problem && reading.inputs == *inputs;
        (!same || matches!(read, Read::Lse(_))).then_some(reading)
    };
    let mut readings: Vec<Reading> = ALL.iter().filter_map(own).collect();
    readings.extend(slopes::readings(problem, inputs));
    readings
}

impl Reading {
    /// What a kernel of the convention returns for a pass of `problem`, the one that was asked.
    pub fn results(&self, problem: &Problem, pass: Pass) -> Result<Values, Error> {
        self.problem.check()?;
        let operands = values(&self.problem, pass, &self.inputs)?;
        let mut results = evaluate_in(Arithmetic::F64, &self.problem, pass, &operands)?;
        self.finish(problem, pass, &mut results);
        Ok(results)
    }

    /// Turns the results of the problem as it is read into those that the kernel returns, where
    /// `problem` is the one that was asked.
    fn finish(&self, problem: &Problem, pass: Pass, results: &mut Values) {
        match self.read {
            Read::Lse(change) => {
                results.get_mut("lse").into_iter().for_each(|lse| lse.mapv_inplace(change));
            }
            Read::Heads => {
                let order = interleaved(problem, true);
                for operand in problem.operands(pass).iter().filter(|x| x.role == Role::Output) {
                    let along = query_heads(operand);
                    if let Some((at, x)) = along.zip(results.get_mut(operand.name)) {
                        *x = x.select(Along(at), &order);
                    }
                }
            }
            _ => {}
        }
    }
}

fn scores(problem: &mut Problem, change: impl FnOnce(&mut Scores)) {
    if let Some(scores) = problem.scores_mut() {
        change(scores);
    }
}

fn loss(problem: &mut Problem, change: impl FnOnce(&mut LinearCrossEntropy)) {
    if let Problem::LinearCrossEntropy(loss) = problem {
        change(loss);
    }
}

fn align(problem: &mut Problem, to: Align) {
    scores(problem, |scores| {
        scores
            .mask
            .visit_mut(&mut |mask| mask.align_mut().into_iter().for_each(|align| *align = to));
    });
}

fn windows(problem: &mut Problem, change: fn(usize) -> usize) {
    scores(problem, |scores| {
        scores.mask.visit_mut(&mut |mask| {
            if let Mask::Window { left: Some(left), .. } = mask {
                *left = change(*left);
            }
        });
    });
}

fn scale(problem: &mut Problem, change: fn(f64) -> f64) {
    match problem {
        Problem::LinearAttention(x) => x.scale = change(x.scale),
        _ => scores(problem, |x| x.softmax_scale = Some(change(x.scale()))),
    }
}

fn scale_by_width(problem: &mut Problem) {
    match problem {
        Problem::LinearAttention(x) => x.scale /= (x.extents.dim as f64).sqrt(),
        _ => scores(problem, |x| {
            x.softmax_scale = Some(x.scale() / (x.extents.dim.max(1) as f64).sqrt());
        }),
    }
}

fn scale_of_values(problem: &mut Problem) {
    let width = problem.extent(Axis::ValueDim);
    scores(problem, |x| {
        if x.softmax_scale.is_none() && width > 0 && width != x.extents.dim {
            x.softmax_scale = Some(1.0 / (width as f64).sqrt());
        }
    });
}

fn without_softcap(problem: &mut Problem) {
    loss(problem, |x| x.softcap = None);
    scores(problem, |x| x.softcap = None);
}

/// Replaces every number of an input, if it is there.
fn each(inputs: &mut Tensors, name: &str, change: impl Fn(f64) -> f64) {
    if let Some(tensor) = inputs.get_mut(name)
        && let (Ok(values), Some(stored)) = (tensor.to_f64(name), tensor.stored())
    {
        *tensor = Tensor::store(&values.mapv(change), stored);
    }
}

fn shift_targets(problem: &Problem, inputs: &mut Tensors) {
    let Problem::LinearCrossEntropy(loss) = problem else { return };
    let Some(targets) = inputs.get_mut("targets") else { return };
    if let (Ok(values), Some(stored)) = (targets.numbers("targets"), targets.stored()) {
        let mut next: Vec<f64> = values.iter().skip(1).copied().collect();
        next.push(loss.ignore_index as f64);
        let next = ndarray::Array1::from(next).into_dyn();
        *targets = Tensor::store(&next, stored);
    }
}

/// Where the query heads of a tensor lie, if it has an axis of all of them.
fn query_heads(operand: &Operand) -> Option<usize> {
    let own = |axis: &Axis| matches!(axis, Axis::QueryHeads | Axis::QueryHeadsOr1);
    operand.axes.iter().position(own).filter(|&at| operand.shape[at] > 1)
}

/// The query heads in the order in which they would share key heads as neighbours, where head h uses key
/// head h mod Hk; or back.
fn interleaved(problem: &Problem, back: bool) -> Vec<usize> {
    let [query, key] = [Axis::QueryHeads, Axis::KeyHeads].map(|axis| problem.extent(axis));
    let group = query / key.max(1);
    let place = |h: usize| match back {
        true => h % key * group + h / key,
        false => h % group * key + h / group,
    };
    (0..query).map(place).collect()
}

/// Puts the query heads in the order of [`interleaved`]; none where there is one order only, or where a
/// mask tells heads apart.
fn take_heads(reading: &mut Reading) -> Option<()> {
    let [query, key] = [Axis::QueryHeads, Axis::KeyHeads].map(|axis| reading.problem.extent(axis));
    let by_heads =
        reading.problem.arrays().iter().any(|(_, shape)| shape.len() == 4 && shape[1] > 1);
    if key < 2 || query <= key || by_heads {
        return None;
    }
    let order = interleaved(&reading.problem, false);
    for (name, tensor) in &mut reading.inputs {
        let operand = reading.problem.operand(name);
        if let Some(at) = operand.as_ref().and_then(query_heads) {
            *tensor = take(tensor, at, &order);
        }
    }
    Some(())
}
