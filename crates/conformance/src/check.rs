//! A verdict on results that somebody brings: which elements are off, where they lie, and what they look
//! like.
//!
//! [`check`] judges the outputs of one pass on given inputs. Where one is wrong it says which rows, heads
//! and columns are affected, and looks for an explanation: a change of the exact results (a factor, a
//! shift, another layout), another reading of the problem ([`crate::conventions`]), a known bug
//! ([`crate::zoo`]). An [`Explanation`] is measured by what it leaves unexplained.

mod answer;
mod patterns;
mod places;
mod suspects;

pub use suspects::explains;

use crate::bounds::{Bounds, bounds};
use crate::gates::{Blunt, Measure, Statistic, Status, Verdict, blunt, g1, g2, generic, has_blunt};
use crate::profile::Profile;
use crate::report::in_words;
use crate::stochastic;
use crate::tensor::Tensors;
use crate::tier::Request;
use crate::tiers::check_results;
use crate::types::Types;
use crate::typical::{Kernels, Typical};
use answer::{Answer, Judged};
use etalon_problem::{Algorithm, Dtype, Error, Operand, Pass};
use serde::{Serialize, Serializer};
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// The version of the form of a [`Check`]: it grows when a key changes its meaning or goes.
const SCHEMA: u32 = 1;

/// What was found about the outputs of a pass.
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
    #[serde(serialize_with = "status_name")]
    pub status: Status,
    /// Whether it passed.
    pub passed: bool,
    /// Whether errors are conspicuous, though perhaps within the bounds.
    pub conspicuous: bool,
    /// Whether the inputs count as generic.
    pub generic: bool,
    /// What is not generic about the inputs, where something is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub structured: Option<String>,
    /// Every output.
    pub outputs: Vec<Output>,
    /// What explains the difference, the best first; empty where nothing is wrong.
    pub explanations: Vec<Explanation>,
    /// Why some explanations were not tried, if they were not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_tried: Option<String>,
}

/// What was found about one output.
#[derive(Debug, Clone, Serialize)]
pub struct Output {
    /// Its name.
    pub name: &'static str,
    /// The symbols of its axes.
    pub axes: Vec<&'static str>,
    /// Its shape.
    pub shape: Vec<usize>,
    /// How many elements are off.
    pub off: usize,
    /// How many elements it has.
    pub elements: usize,
    /// How many elements are blunt: their bounds exceed half of the scale of their row, or are missing.
    pub blunt: usize,
    /// How many of these do not err as correct kernels do: they could be wrong.
    pub undecided: usize,
    /// How many have no bound, by the reason.
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
    /// By which share of themselves results are too large (gate G2), where that can be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slope: Option<Share>,
    /// What is conspicuous about the errors (gate G2): of each a sentence.
    pub conspicuous: Vec<String>,
    /// Where the elements that are off lie: sentences.
    pub places: Vec<String>,
}

/// An element of an output.
#[derive(Debug, Clone, Serialize)]
pub struct Element {
    /// Its index.
    pub index: Vec<usize>,
    /// What was brought.
    #[serde(serialize_with = "number")]
    pub got: f64,
    /// The exact result.
    #[serde(serialize_with = "number")]
    pub exact: f64,
    /// How far off it may be.
    #[serde(serialize_with = "number")]
    pub bound: f64,
}

/// A slope, and how large it may be.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Share {
    /// The share by which results are too large.
    pub value: f64,
    /// What chance allows.
    pub limit: f64,
}

/// What explains the difference from the exact results.
#[derive(Debug, Clone, Serialize)]
pub struct Explanation {
    /// What kind of explanation it is.
    pub kind: Kind,
    /// Its stable name: of a pattern, a convention or a mutant.
    pub id: &'static str,
    /// The output that it is about; absent where it is about all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<&'static str>,
    /// A sentence or two.
    pub text: String,
    /// The share of the difference that it leaves: rms(got − explained) / rms(got − exact). Absent of what
    /// only describes the results.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left: Option<f64>,
}

/// Kinds of explanation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The exact results with a change.
    Pattern,
    /// The exact results of another reading of the problem.
    Convention,
    /// The results of a kernel with a known bug.
    Mutant,
}

/// What an explanation may leave of the difference.
const LEFT: f64 = 0.1;

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
    let &Request { problem, pass, dtype, inputs, .. } = request;
    check_results(problem, pass, outputs, only)?;
    let mut exact = bounds(problem, pass, &types(request, outputs), profile, inputs)?;
    exact.outputs.retain(|name, _| only.is_empty() || only.contains(name));
    let operands = problem.operands(pass);
    let answer = Answer::new(&operands, &exact, outputs)?;
    let statistics = statistics(request, profile, &operands, &exact, outputs)?;
    let doubts = doubts(request, profile, &operands, &exact, outputs)?;
    let outputs: Vec<Output> =
        answer.outputs.iter().map(|output| describe(output, &statistics, &doubts)).collect();
    let conspicuous = outputs.iter().any(|output| !output.conspicuous.is_empty());
    let (mut explanations, mut not_tried) = (Vec::new(), None);
    if outputs.iter().any(|output| output.off > 0) {
        explanations = answer.outputs.iter().flat_map(|x| patterns::all(problem, x)).collect();
        let (suspects, missing) = suspects::all(request, &answer);
        explanations.extend(suspects);
        not_tried = missing;
    }
    explanations.retain(|x| x.left.is_none_or(|left| left <= LEFT));
    // A pattern is the plainest explanation, a mutant the most special one.
    explanations.sort_by(|x, y| (x.kind as u8).cmp(&(y.kind as u8)).then(by_rest(x, y)));
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
        outputs,
        explanations,
        not_tried,
    };
    let generic = check.generic;
    Ok(check.on_inputs(generic))
}

impl Check {
    /// The same where the inputs count as generic, or do not, whatever they look like.
    pub fn on_inputs(mut self, generic: bool) -> Self {
        let off = self.outputs.iter().any(|output| output.off > 0);
        let doubtful = self.conspicuous || self.outputs.iter().any(|output| output.undecided > 0);
        self.generic = generic;
        self.status = match (off, doubtful) {
            (true, _) => Status::Failed,
            (false, true) if generic => Status::Failed,
            (false, true) => Status::Undecided,
            (false, false) => Status::Passed,
        };
        self.passed = self.status == Status::Passed;
        self
    }

    /// The share of the elements that are undecided. Of an output whose errors are conspicuous that is all.
    pub fn undecided(&self) -> f64 {
        let undecided = |output: &Output| match output.conspicuous.is_empty() {
            true => output.undecided,
            false => output.elements,
        };
        let elements: usize = self.outputs.iter().map(|output| output.elements).sum();
        let undecided: usize = self.outputs.iter().map(undecided).sum();
        undecided as f64 / elements.max(1) as f64
    }
}

fn status_name<S: Serializer>(status: &Status, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(status.name())
}

/// The strictest profile that holds: within whose bounds the outputs lie, and which judges them. Where there is
/// none, the strictest of those that leave them undecided. Of results that are stored in less than f64 no
/// profile of sums in f64 is tried: storing them hides what would tell.
pub fn strictest(
    request: &Request<'_>,
    outputs: &Tensors,
    only: &[String],
) -> Result<Option<Profile>, Error> {
    let &Request { problem, pass, dtype, inputs, .. } = request;
    check_results(problem, pass, outputs, only)?;
    let types = types(request, outputs);
    let tells = |profile: &Profile| profile.accumulator != Dtype::F64 || dtype == Dtype::F64;
    let (operands, mut undecided) = (problem.operands(pass), None);
    for profile in Profile::ALL.into_iter().filter(tells) {
        let mut exact = match bounds(problem, pass, &types, &profile, inputs) {
            Err(Error::Unsupported { .. }) => continue,
            exact => exact?,
        };
        exact.outputs.retain(|name, _| only.is_empty() || only.contains(name));
        if g1(&exact, outputs).verdict != Verdict::Pass {
            continue;
        }
        let statistics = statistics(request, &profile, &operands, &exact, outputs)?;
        let doubts = doubts(request, &profile, &operands, &exact, outputs)?;
        let conspicuous = statistics.iter().any(|statistic| statistic.margin() > 1.0);
        if !conspicuous && doubts.iter().all(|blunt| blunt.undecided == 0) {
            return Ok(Some(profile));
        }
        undecided = undecided.or(Some(profile));
    }
    Ok(undecided)
}

/// Of outputs with blunt elements, whether these err as correct kernels do.
fn doubts(
    request: &Request<'_>,
    profile: &Profile,
    operands: &[Operand],
    exact: &Bounds,
    outputs: &Tensors,
) -> Result<Vec<Blunt>, Error> {
    let &Request { problem, pass, dtype, inputs, .. } = request;
    if !has_blunt(exact) {
        return Ok(Vec::new());
    }
    let simulated = stochastic::errors(problem, pass, dtype, profile, inputs, exact)?;
    Ok(blunt(operands, exact, &simulated, outputs))
}

/// The types of results, and of what the kernel has stored before.
fn types(request: &Request<'_>, outputs: &Tensors) -> Types {
    Types::reading(request.problem, request.dtype, request.inputs).as_in(outputs)
}

/// What leaves less stands first.
fn by_rest(x: &Explanation, y: &Explanation) -> Ordering {
    let left = |x: &Explanation| x.left.unwrap_or(LEFT);
    left(x).total_cmp(&left(y))
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

fn describe(output: &Judged<'_>, statistics: &[Statistic], doubts: &[Blunt]) -> Output {
    let own = || statistics.iter().filter(|statistic| statistic.output == output.operand.name);
    let blunt = doubts.iter().find(|blunt| blunt.output == output.operand.name);
    let no_bound = blunt.into_iter().flat_map(|blunt| &blunt.no_bound);
    let whole = own().find(|x| x.measure == Measure::Slope && x.part == crate::gates::Part::All);
    Output {
        name: output.operand.name,
        axes: output.operand.axes.iter().map(|axis| axis.symbol()).collect(),
        shape: output.operand.shape.clone(),
        off: output.off(),
        elements: output.got.len(),
        blunt: blunt.map_or(0, |blunt| blunt.elements),
        undecided: blunt.map_or(0, |blunt| blunt.undecided),
        no_bound: no_bound.map(|(reason, n)| (reason.name(), *n)).collect(),
        doubt: blunt.filter(|blunt| blunt.undecided > 0).map(Blunt::to_string),
        margin: output.margins.iter().copied().fold(0.0, f64::max),
        worst: output.worst(),
        error: output.error(),
        slope: whole.map(|x| Share { value: x.value, limit: x.limit }),
        conspicuous: own().filter(|x| x.margin() > 1.0).map(Statistic::to_string).collect(),
        places: places::sentences(output),
    }
}
