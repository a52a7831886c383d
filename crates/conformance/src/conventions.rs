//! Conventions in which libraries differ, each with a stable name: what a kernel computes that was written
//! for another one than the problem's.
//!
//! `docs/conventions.md` says of each who uses it and what it costs to mix it up; a test holds the page
//! against this list. A [`Reading`] is the problem as such a kernel reads it. Further readings follow from
//! the options and the tensors of a problem ([`all_readings`]): what is absent, doubled, taken from its
//! neighbour.

mod decays;
mod derived;
mod distances;
mod edit;
mod forward;
mod garbled;
mod joined;
mod neighbours;
mod reading;
mod saved;
mod slopes;
mod sums;
mod tails;

pub use edit::Edit;
pub(crate) use edit::{Layout, gather, pick};
pub use reading::Reading;
pub(crate) use slopes::broken;

use crate::tensor::{Tensors, Values};
use etalon_problem::{
    Align, Axis, Dtype, LinearCrossEntropy, Mask, Operand, Pass, Problem, Reduction, Scores,
};
use std::f64::consts::{LN_2, LOG2_E};

/// A convention that is not the problem's.
#[derive(Debug, Clone, Copy)]
pub struct Convention {
    /// Its name, which does not change.
    pub id: &'static str,
    /// The statement of a kernel's behaviour, in a sentence.
    pub statement: &'static str,
    /// The known bug of the zoo that represents it, where it is no other reading of a problem.
    pub mutant: Option<&'static str>,
    read: Read,
}

/// Changes of tensors, by name.
type Edits = Vec<(String, Edit)>;

/// Derivation of another reading of a problem.
#[derive(Debug, Clone, Copy)]
enum Read {
    /// The kernel answers another problem.
    Problem(fn(&mut Problem)),
    /// It takes an input for another number.
    Inputs(fn(&Problem) -> Edits),
    /// It returns an output as another number.
    Outputs(fn(&Problem) -> Edits),
    /// Its query heads share key heads in another order.
    Heads,
    /// It decays by other slopes (`slopes`).
    Slopes,
    /// No other problem has its results: a mutant of the zoo computes them.
    Mutant,
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
    "bias-scaled" = Read::Inputs(|problem| {
        let scale = problem.scores().map_or(1.0, Scores::scale);
        each("bias", move |x| x * scale)
    });
    /// There is no bias.
    "bias-absent" = Read::Inputs(|_| each("bias", |_| 0.0));
    /// There are no sinks.
    "sinks-absent" = Read::Inputs(|_| each("sinks", |_| f64::NEG_INFINITY));
    /// lse does not count the sink.
    "lse-without-sink" = Read::Mutant, "sink-not-in-lse";
    /// lse is a logarithm to base 2.
    "lse-base-2" = Read::Outputs(|_| each("lse", |x| x * LOG2_E)), "lse-in-base-2";
    /// A row without a visible key is NaN.
    "masked-rows-nan" = Read::Mutant, "empty-row-is-nan";
    /// Query head h uses key head h mod Hk.
    "heads-interleaved" = Read::Heads, "head-modulo";
    /// Decays are taken to base 2: a state decays by 2^g.
    "decay-base-2" = Read::Inputs(|_| {
        ["g", "g_gamma"].into_iter().flat_map(|name| each(name, |g| g * LN_2)).collect()
    });
    /// There are no decays.
    "decay-absent" = Read::Inputs(|_| {
        ["g", "g_gamma"].into_iter().flat_map(|name| each(name, |_| 0.0)).collect()
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

/// The readings of a problem that are conventions with a name, as far as they differ from it on these
/// inputs.
pub fn readings(problem: &Problem, inputs: &Tensors) -> Vec<Reading> {
    let own = |convention: &Convention| {
        let Convention { id, statement, read, .. } = *convention;
        let mut reading = Reading::plain(id, format!("{id}. {statement}"), problem);
        match read {
            Read::Problem(change) => change(&mut reading.problem),
            Read::Inputs(edits) => reading.edits = edits(problem),
            Read::Outputs(edits) => reading.finish = edits(problem),
            Read::Heads => reading.is_interleaved = has_interleaved(problem),
            Read::Slopes | Read::Mutant => return None,
        }
        reading.edits.retain(|(name, _)| inputs.contains_key(name));
        reading.differs(problem).then_some(reading)
    };
    let mut readings: Vec<Reading> = ALL.iter().filter_map(own).collect();
    readings.extend(slopes::readings(problem, inputs));
    readings
}

/// Every reading of a pass: the conventions, then those that follow from the options and the tensors of the
/// problem. `values` are the inputs in f64.
pub fn all_readings(
    problem: &Problem,
    pass: Pass,
    dtype: Dtype,
    inputs: &Tensors,
    values: &Values,
) -> Vec<Reading> {
    let mut list = readings(problem, inputs);
    let own = Original { problem, pass, dtype, inputs: values, operands: problem.operands(pass) };
    let mut more = derived::all(&own);
    more.extend(distances::all(&own));
    more.extend(neighbours::all(&own));
    more.extend(joined::all(&own));
    more.extend(decays::all(&own));
    more.extend(sums::all(&own));
    more.extend(tails::all(&own));
    more.extend(garbled::all(&own));
    more.extend(saved::all(&own, list.iter().chain(&more)));
    for reading in more {
        let known = |x: &Reading| x.id == reading.id || x.is_same(&reading);
        if reading.differs(problem) && !list.iter().any(known) {
            list.push(reading);
        }
    }
    list
}

/// The problem and the pass of which readings are derived.
struct Original<'a> {
    problem: &'a Problem,
    pass: Pass,
    dtype: Dtype,
    inputs: &'a Values,
    operands: Vec<Operand>,
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

/// Replaces every number of a tensor.
fn each(name: &str, change: impl Fn(f64) -> f64 + Send + Sync + 'static) -> Edits {
    vec![(name.to_string(), Edit::map(change))]
}

fn shift_targets(problem: &Problem) -> Edits {
    let Problem::LinearCrossEntropy(loss) = problem else { return Vec::new() };
    let order = (1..=loss.tokens).collect();
    let beyond = loss.ignore_index as f64;
    vec![("targets".to_string(), Edit::Take { axis: 0, order, beyond })]
}

/// True if query heads could share key heads in another order: not where there is one order only, or where a
/// mask tells heads apart.
fn has_interleaved(problem: &Problem) -> bool {
    let [query, key] = [Axis::QueryHeads, Axis::KeyHeads].map(|axis| problem.extent(axis));
    let by_heads = problem.arrays().iter().any(|(_, shape)| shape.len() == 4 && shape[1] > 1);
    key >= 2 && query > key && !by_heads
}
