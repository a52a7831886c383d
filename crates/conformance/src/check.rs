//! A verdict on results that somebody brings: which elements are off, where they lie, and what they look
//! like.
//!
//! [`check`] judges the outputs of one pass on given inputs. Where one is wrong it says which rows, heads
//! and columns are affected, and looks for an explanation: a change of the exact results (a factor, a
//! shift, another layout), another reading of the problem ([`crate::conventions`]), a known bug
//! ([`crate::zoo`]). An [`Explanation`] must leave nothing beyond the bounds, or says which part it explains.

mod answer;
mod budget;
mod candidate;
mod explain;
mod judge;
mod others;
mod patterns;
mod picture;
mod places;
mod sample;
mod status;
mod trace;

pub use budget::explains;
pub use picture::{CELLS, Cell, Picture, Side, Spread};
pub use status::strictest;
pub use trace::{First, Part, Steps, check_trace};

use crate::bounds::{Bounds, bounds};
use crate::gates::{Measure, Statistic, Status, Uninformative, g2, generic};
use crate::profile::Profile;
use crate::report::in_words;
use crate::tensor::Tensors;
use crate::tier::Request;
use crate::tiers::check_results;
use crate::types::Types;
use crate::typical::{Kernels, Typical};
use answer::{Answer, Judged};
use budget::Found;
use etalon_problem::{Algorithm, Dtype, Error, Operand, Pass, Problem, Setting, SettingKind};
use serde::{Serialize, Serializer};
use status::doubts;
use std::collections::BTreeMap;

/// The version of the form of a [`Check`]: it grows when a key changes its meaning or goes.
const SCHEMA: u32 = 1;

/// Findings about the outputs of a pass.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// The version of this form.
    pub schema: u32,
    /// The version of etalon.
    pub etalon: &'static str,
    /// The algorithm.
    #[serde(serialize_with = "in_words")]
    pub algorithm: Algorithm,
    /// The pass.
    #[serde(serialize_with = "in_words")]
    pub pass: Pass,
    /// The storage type.
    #[serde(serialize_with = "in_words")]
    pub dtype: Dtype,
    /// The profile whose bounds these are.
    #[serde(serialize_with = "in_words")]
    pub profile: Profile,
    /// Failed where an element is off; on generic inputs also where errors are conspicuous or not those of
    /// correct kernels, which on others leaves it undecided.
    #[serde(serialize_with = "status::name")]
    pub status: Status,
    /// True if it passed.
    pub passed: bool,
    /// True if errors are conspicuous, though perhaps within the bounds.
    pub conspicuous: bool,
    /// True if the inputs count as generic.
    pub generic: bool,
    /// The reason why the inputs are not generic, if they are not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub structured: Option<String>,
    /// True for a profile that is no claim, and whose bounds are too wide to be called the strictest that hold.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub too_wide: bool,
    /// Every output.
    pub outputs: Vec<Output>,
    /// Explanations of the difference, the best first; empty where nothing is wrong.
    pub explanations: Vec<Explanation>,
    /// The parts of the problem on which explanations were tried, where that was not all of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<String>,
    /// Explanations that were not tried, and why, if some were not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_tried: Option<String>,
    /// The next step where nothing explains the difference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// Products that the check took, about.
    pub products: Products,
    /// Of the intermediate results of a kernel: its walk, and the first step that is off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<Steps>,
}

/// Products that something took, about.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Products {
    /// To judge the outputs.
    pub judged: f64,
    /// To explain them.
    pub explained: f64,
}

/// The progress of a check: called with the number of steps that are done, that of all, and the name of the next.
pub type Progress<'a> = &'a (dyn Fn(usize, usize, &str) + Sync);

/// Findings about one output.
#[derive(Debug, Clone, Serialize)]
pub struct Output {
    /// Its name.
    pub name: &'static str,
    /// The symbols of its axes.
    pub axes: Vec<&'static str>,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Number of elements that are off.
    pub off: usize,
    /// Number of its elements.
    pub elements: usize,
    /// Number of uninformative elements: their bounds exceed half of the scale of their row, or are missing.
    #[serde(rename = "blunt")]
    pub uninformative: usize,
    /// Number of these that do not err as correct kernels do: they could be wrong.
    pub undecided: usize,
    /// Number of elements without a bound, by the reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub no_bound: BTreeMap<&'static str, usize>,
    /// The undecided elements in a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doubt: Option<String>,
    /// The largest error divided by its bound; null in JSON where it is infinite.
    pub margin: f64,
    /// The element of that margin, unless there are no elements.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst: Option<Element>,
    /// The rms of the errors divided by that of the exact results, over elements that are finite in both.
    pub error: f64,
    /// By which share of themselves results are too large (gate G2), where that can be estimated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slope: Option<Share>,
    /// Conspicuous properties of the errors (gate G2): of each a sentence.
    pub conspicuous: Vec<String>,
    /// Places of the elements that are off: sentences.
    pub places: Vec<String>,
    /// The margins of its elements, counted.
    #[serde(skip)]
    pub spread: Spread,
    /// Its margins as pictures: rows × columns, rows × heads.
    #[serde(skip)]
    pub pictures: Vec<Picture>,
}

/// An element of an output.
#[derive(Debug, Clone, Serialize)]
pub struct Element {
    /// Its index.
    pub index: Vec<usize>,
    /// The value to be judged.
    #[serde(serialize_with = "number")]
    pub got: f64,
    /// The exact result.
    #[serde(serialize_with = "number")]
    pub exact: f64,
    /// The bound of its error.
    #[serde(serialize_with = "number")]
    pub bound: f64,
}

/// A slope, and how large it may be.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Share {
    /// The share by which results are too large.
    pub value: f64,
    /// The limit that chance allows.
    pub limit: f64,
}

/// An explanation of the difference from the exact results.
#[derive(Debug, Clone, Serialize)]
pub struct Explanation {
    /// The kind of explanation.
    pub kind: Kind,
    /// Its stable name: of a pattern, a convention or a mutant; or an option or a tensor and what happened
    /// to it.
    pub id: String,
    /// The output that it is about; absent where it is about all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<&'static str>,
    /// A sentence or two.
    pub text: String,
    /// The share of the difference that it leaves: rms(got − explained) / rms(got − exact) over the elements
    /// that are off of the outputs that it explains.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left: Option<f64>,
    /// The part of the difference that it explains, where that is not all: a clause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
}

/// Kinds of explanation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The exact results with a change.
    Pattern,
    /// The exact results of another convention.
    Convention,
    /// The exact results where an option or a tensor is read otherwise.
    Reading,
    /// The results of a kernel with a known bug.
    Mutant,
}

/// JSON has no word for these numbers; null would not tell them apart.
fn number<S: Serializer>(x: &f64, to: S) -> Result<S::Ok, S::Error> {
    if x.is_finite() { to.serialize_f64(*x) } else { to.collect_str(x) }
}

/// Judges the outputs of a pass on the inputs of the request, as those of a kernel of a profile: all of
/// them, or the ones that `only` names. Each is judged as what it is stored in, which may be another type
/// than the request's; where the inputs hold the o, lse or entropy of the forward pass in a narrower type than
/// usual, the kernel reads them as such.
///
/// Fails where the outputs are not those of the pass, and where the pass has no bounds.
pub fn check(
    request: &Request<'_>,
    profile: &Profile,
    outputs: &Tensors,
    only: &[String],
) -> Result<Check, Error> {
    check_with_progress(request, profile, outputs, only, &|_, _, _| {})
}

/// As [`check`], and tells how far it is.
pub fn check_with_progress(
    request: &Request<'_>,
    profile: &Profile,
    outputs: &Tensors,
    only: &[String],
    progress: Progress<'_>,
) -> Result<Check, Error> {
    let &Request { problem, pass, dtype, inputs, .. } = request;
    check_results(problem, pass, outputs, only)?;
    progress(0, STEPS, "exact results and bounds");
    let mut exact = bounds(problem, pass, types(request, outputs), profile, inputs)?;
    exact.outputs.retain(|name, _| only.is_empty() || only.contains(name));
    let operands = problem.operands(pass);
    let answer = Answer::new(&operands, &exact, outputs)?;
    progress(1, STEPS, "typical errors");
    let statistics = statistics(request, profile, &operands, &exact, outputs)?;
    let doubts = doubts(request, profile, &operands, &exact, outputs)?;
    let outputs: Vec<Output> = answer
        .outputs
        .iter()
        .map(|output| describe(problem, output, &statistics, &doubts))
        .collect();
    let conspicuous = outputs.iter().any(|output| !output.conspicuous.is_empty());
    let mut found = Found::default();
    let mut next = None;
    if outputs.iter().any(|output| output.off > 0) {
        progress(2, STEPS, "explanations");
        found = explain::explain(request, &answer, progress)?;
        next = found.explanations.is_empty().then(|| next_step(request, found.tried));
    }
    let Found { explanations, parts, not_tried, products: explained, .. } = found;
    let judged = budget::products_of_a_check(problem, pass);
    let structured = generic(problem, pass, inputs).err();
    let check = Check {
        schema: SCHEMA,
        etalon: env!("CARGO_PKG_VERSION"),
        algorithm: problem.algorithm(),
        pass,
        dtype,
        profile: *profile,
        status: Status::Passed,
        passed: true,
        conspicuous,
        generic: structured.is_none(),
        structured,
        too_wide: false,
        outputs,
        explanations,
        parts,
        not_tried,
        next,
        products: Products { judged, explained },
        trace: None,
    };
    let generic = check.generic;
    Ok(check.on_inputs(generic))
}

/// Steps of a check of right results.
const STEPS: usize = 2;

/// The next step where nothing explains the difference.
fn next_step(request: &Request<'_>, tried: usize) -> String {
    let &Request { problem, dtype, .. } = request;
    let algorithm = problem.algorithm();
    let set = |x: &Setting| !x.others.is_empty() && x.kind == SettingKind::Value;
    let options: Vec<&str> = problem.settings().iter().filter(|x| set(x)).map(|x| x.name).collect();
    let options = match options.as_slice() {
        [] => String::new(),
        list => format!(
            " Then the same problem without one of its options ({}): the first without which it passes \
             is the one.",
            list.join(", ")
        ),
    };
    format!(
        "Nothing that is known explains this: none of {tried} candidates leaves nothing beyond the bounds. \
         Next: `etalon probe --out probes --algorithm {algorithm} --dtype {dtype}` asks questions that show \
         one mistake each.{options}"
    )
}

/// The types of results, and of what the kernel has stored before.
fn types(request: &Request<'_>, outputs: &Tensors) -> Types {
    Types::reading(request.problem, request.dtype, request.inputs).as_in(outputs)
}

/// The statistics of gate G2: of outputs that the simulation of kernels does not reach there are none.
fn statistics(
    request: &Request<'_>,
    profile: &Profile,
    operands: &[Operand],
    exact: &Bounds,
    outputs: &Tensors,
) -> Result<Vec<Statistic>, Error> {
    let &Request { problem, pass, inputs, .. } = request;
    let types = types(request, outputs);
    let typical = Typical::new(&Kernels::new(problem, pass, &types, profile, inputs, exact)?)?;
    Ok(g2(operands, profile, exact, &typical, outputs))
}

fn describe(
    problem: &Problem,
    output: &Judged<'_>,
    statistics: &[Statistic],
    doubts: &[Uninformative],
) -> Output {
    let own = || statistics.iter().filter(|statistic| statistic.output == output.operand.name);
    let doubt = doubts.iter().find(|doubt| doubt.output == output.operand.name);
    let no_bound = doubt.into_iter().flat_map(|doubt| &doubt.no_bound);
    let whole = own().find(|x| x.measure == Measure::Slope && x.part == crate::gates::Part::All);
    Output {
        uninformative: doubt.map_or(0, |doubt| doubt.elements),
        undecided: doubt.map_or(0, |doubt| doubt.undecided),
        no_bound: no_bound.map(|(reason, n)| (reason.name(), *n)).collect(),
        doubt: doubt.filter(|doubt| doubt.undecided > 0).map(Uninformative::to_string),
        slope: whole.map(|x| Share { value: x.value, limit: x.limit }),
        conspicuous: own().filter(|x| x.margin() > 1.0).map(Statistic::to_string).collect(),
        places: places::sentences(problem, output),
        ..of_margins(output)
    }
}

/// All that follows from an output and its bounds alone.
fn of_margins(output: &Judged<'_>) -> Output {
    Output {
        name: output.operand.name,
        axes: output.operand.axes.iter().map(|axis| axis.symbol()).collect(),
        shape: output.operand.shape.clone(),
        off: output.off(),
        elements: output.got.len(),
        uninformative: 0,
        undecided: 0,
        no_bound: BTreeMap::new(),
        doubt: None,
        margin: output.margins.iter().copied().fold(0.0, f64::max),
        worst: output.worst(),
        error: output.error(),
        slope: None,
        conspicuous: Vec::new(),
        places: Vec::new(),
        spread: picture::spread(output),
        pictures: picture::pictures(output),
    }
}
