//! Findings about outputs in prose, tables and pictures; and outputs of a case that failed, looked at again.

use crate::needs;
use crate::page::Block;
use crate::report::{Study, chosen};
use crate::units::{digits, margin};
use etalon_conformance::cases::{Case, Spec};
use etalon_conformance::check::{Check, Explanation, Kind, Output, Spread, check};
use etalon_conformance::profile::Profile;
use etalon_conformance::report::{Record, Report, Status};
use etalon_conformance::tensor::Tensors;
use etalon_conformance::tier::{Hints, Request, Tier};
use etalon_conformance::tiers::ask;
use etalon_problem::{Pass, Problem};

/// The table of the outputs, its header first.
pub fn table(check: &Check) -> Block {
    let header = ["output", "off", "of", "worst margin", "rms error", "slope"].map(String::from);
    let row = |output: &Output| {
        let slope = output.slope.map_or("–".to_string(), |slope| format!("{:+.1e}", slope.value));
        let (margin, error) = (margin(output.margin), digits(output.error));
        let name = output.name.to_string();
        vec![name, output.off.to_string(), output.elements.to_string(), margin, error, slope]
    };
    Block::Rows([header.to_vec()].into_iter().chain(check.outputs.iter().map(row)).collect())
}

/// The outputs that are off: the worst element of each, and where the others lie.
pub fn places(check: &Check) -> Vec<Block> {
    let off = check.outputs.iter().filter(|output| output.off > 0);
    let blocks = off.flat_map(|output| {
        [
            Block::Title(format!("{}: {}", output.name, worst(output))),
            Block::Items(output.places.clone()),
            Block::Pictures(output.name, output.pictures.clone()),
        ]
    });
    blocks.collect()
}

/// The worst element of an output.
pub fn worst(output: &Output) -> String {
    let Output { axes, shape, .. } = output;
    let Some(worst) = &output.worst else { return format!("has no elements, {shape:?}") };
    format!(
        "worst at {:?} of [{}]: got {:.6e}, exact {:.6e} ± {:.1e}",
        worst.index,
        axes.join(", "),
        worst.got,
        worst.exact,
        worst.bound
    )
}

/// Explanations of the difference, or the next step.
pub fn explained(check: &Check) -> Vec<Block> {
    let mut blocks = Vec::new();
    if !check.explanations.is_empty() {
        blocks.push(Block::Title("What explains it:".to_string()));
        blocks.push(Block::Items(check.explanations.iter().map(explanation).collect()));
    }
    blocks.extend(check.next.clone().map(Block::Text));
    if !check.parts.is_empty() {
        let parts = check.parts.join("; ");
        let text =
            format!("The problem is large: explanations were tried on parts of it, {parts}.");
        blocks.push(Block::Text(text));
    }
    blocks.extend(check.not_tried.clone().map(Block::Text));
    blocks
}

/// An explanation in a sentence.
pub fn explanation(explanation: &Explanation) -> String {
    let Explanation { kind, id, text, left, part, .. } = explanation;
    let name = match kind {
        Kind::Pattern | Kind::Convention | Kind::Reading => String::new(),
        Kind::Mutant => format!("{id}, "),
    };
    let left = left.map(|left| format!(" (leaves {} % of the difference)", digits(100.0 * left)));
    let part = part.as_ref().map_or(String::new(), |part| format!("; {part}"));
    format!("{name}{text}{}{part}", left.unwrap_or_default())
}

/// The margins of each output, counted, and the largest.
pub fn spreads(check: &Check) -> Vec<(&'static str, Spread, f64)> {
    check.outputs.iter().map(|x| (x.name, x.spread.clone(), x.margin)).collect()
}

/// The check of the outputs of a case, if the tier answers and something is off.
pub fn looked_at(tier: &dyn Tier, case: &Case, pass: Pass, profile: &Profile) -> Option<Check> {
    let (problem, dtype) = (&case.problem, case.dtype);
    needs::afford_check(problem, pass, dtype).ok()?;
    let given = problem.operands(pass).into_iter().filter(|x| x.role.is_given());
    let all = case.inputs_of(pass);
    let inputs = given.filter_map(|x| Some((x.name.to_string(), all.get(x.name)?.clone())));
    let inputs: Tensors = inputs.collect();
    let request = Request { problem, pass, dtype, inputs: &inputs, hints: Hints::default() };
    let outputs = ask(tier, &request).ok()?;
    let only: Vec<String> = outputs.keys().cloned().collect();
    let found = check(&request, profile, &outputs, &only).ok()?;
    (!found.passed).then_some(found)
}

/// A failure in detail.
pub struct Failed<'a> {
    /// The record.
    pub of: &'a Record,
    /// The simplest case that shows it, and the symptom there.
    pub case: &'a str,
    pub symptom: &'a str,
    /// The problem of that case, if it is known.
    pub problem: Option<&'a Problem>,
    /// The check of its outputs, where something is off.
    pub check: Option<&'a Check>,
    /// The command that shows it again.
    pub replay: String,
}

impl Failed<'_> {
    /// The failure as a part of a report.
    pub fn study(&self) -> Study {
        let Failed { of, case, symptom, problem, check, replay } = self;
        let Record { tier, algorithm, pass, dtype, check: law, .. } = of;
        let mut blocks = vec![Block::Text((*symptom).to_string())];
        if let Some(check) = check {
            blocks.push(table(check));
            blocks.extend(places(check));
            blocks.extend(explained(check));
        }
        if !case.is_empty() {
            let simplest = if *case == of.case { "Case" } else { "Simplest case that shows it" };
            blocks.push(Block::Text(format!("{simplest}: {case}")));
        }
        if let Some(json) = problem.and_then(|x| serde_json::to_string_pretty(x).ok()) {
            blocks.push(Block::Code(json.lines().map(String::from).collect()));
        }
        blocks.push(Block::Text("To see it again:".to_string()));
        blocks.push(Block::Command(replay.clone()));
        Study {
            title: format!("{algorithm} {pass} in {dtype} on {tier}: {law}"),
            status: Status::Failed,
            blocks,
            spreads: check.map_or(Vec::new(), spreads),
        }
    }
}

/// Failures of a run in detail: tiers are asked once more. `build` makes a case, `profile` is what a tier claims.
pub fn studies(
    run: &Report,
    tiers: &[&dyn Tier],
    build: &dyn Fn(&Spec) -> Case,
    replay: &dyn Fn(&Record) -> String,
) -> Vec<Study> {
    let study = |(of, case, symptom): (&Record, &str, &str)| {
        let spec = case.parse::<Spec>().ok();
        let built = spec.filter(|spec| !spec.is_large()).map(|spec| build(&spec));
        let offers = |tier: &&&dyn Tier| {
            tier.name() == of.tier && tier.offers(of.algorithm, of.pass, of.dtype).is_ok()
        };
        let tier = tiers.iter().find(offers);
        let found = tier
            .zip(built.as_ref())
            .and_then(|(tier, case)| looked_at(*tier, case, of.pass, &tier.profile(case.dtype)));
        let (problem, check) = (built.as_ref().map(|case| &case.problem), found.as_ref());
        let replay = replay(&Record { case: case.to_string(), ..of.clone() });
        Failed { of, case, symptom, problem, check, replay }.study()
    };
    chosen(run).into_iter().map(study).collect()
}
