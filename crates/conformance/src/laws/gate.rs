//! Gate G1 as a law.

use super::flaw::{Flaw, Judgement, worst};
use super::law::{DEAR, laws, many_ways};
use super::trial::Trial;
use crate::gates;
use crate::profile::Profile;
use crate::report::Verdict;
use crate::tensor::Tensors;
use crate::tier::Hints;
use etalon_problem::{Blocking, Dtype, Mode, Pass, Role};

laws! {
    EVERY;
    /// Every element lies within its proven bound of the exact value, and errs as correct kernels do where
    /// that bound is wide.
    Gate bound on Any;
    /// Any tile sizes give results within the bound.
    Gate blocking on Any asks Blocking, favour many_ways, core DEAR;
    /// Every mode of the backward pass gives results within the bound.
    Gate modes of SCORES on Backward asks Modes, favour many_ways;
    /// Every result that is asked for alone lies within its bound.
    Gate alone_results on Any asks Places, favour many_ways, core DEAR;
    /// However few states a backward pass keeps, its results lie within the bound.
    Gate kept_states of LINEAR_ATTENTION on Any asks States
        if |_, pass| matches!(pass, Pass::Backward | Pass::DoubleBackward),
        favour |case, _| case.spec.shape() == "long_sequence", looks 12;
    /// A pass that computes the forward pass again gives results within the bound.
    Gate recomputed of SCORES on Any asks Modes
        if |case, pass| case.problem.operands(pass).iter().any(|x| x.role == Role::Saved);
}

/// The worst margin of outputs that all lie within the bounds of the case.
pub(super) fn within(trial: &Trial<'_>, outputs: &Tensors) -> Judgement {
    judged(gates::g1(trial.bounds()?, outputs))
}

/// The judgement of gate G1 as that of a law.
pub(crate) fn judged(found: gates::Judgement) -> Judgement {
    match found.verdict {
        Verdict::Pass => Ok(Some(found.margin)),
        Verdict::Fail(text) | Verdict::Convention(text) => Err(Flaw::Fail(text)),
        Verdict::Undecided(text) => Err(Flaw::Undecided(text)),
        Verdict::NotAsked(text) => Err(Flaw::NotAsked(text)),
        Verdict::Unsupported(text) => Err(Flaw::Unsupported(text)),
        Verdict::Vacuous(text) => Err(Flaw::Vacuous(text)),
    }
}

/// Generic inputs with terms enough must be able to tell right from wrong; others may be uninformative:
/// where rows see a key or two, whole gradients cancel, and where thin large cases of 16-bit elements read an
/// o of hundreds of rounded columns. A case is at fault only if the strict profile cannot tell: a weaker one
/// may be too wide for it.
fn bound(trial: &Trial<'_>) -> Judgement {
    let clean = trial.clean()?; // first: a tier that does not offer the case is no fault of the suite
    let (large, dtype) = (trial.case.spec.is_large(), trial.case.dtype);
    if trial.case.is_rich() && !(large && dtype.bytes() == 2) {
        let strict = trial.profile().is_within(&Profile::strict(trial.case.dtype));
        gates::informative(trial.bounds()?).map_err(|text| match strict {
            true => Flaw::Vacuous(text),
            false => Flaw::Unsupported(format!("{} is too wide here", trial.profile())),
        })?;
        if strict && trial.case.dtype == Dtype::F32 {
            gates::powerful(trial.bounds()?).map_err(Flaw::Vacuous)?;
        }
    }
    let margin = within(trial, clean)?;
    let doubts = trial.doubts(clean)?;
    match doubts.iter().find(|doubt| doubt.undecided > 0) {
        Some(doubt) if trial.case.is_generic() => Err(Flaw::Fail(doubt.to_string())),
        Some(doubt) => Err(Flaw::Undecided(doubt.to_string())),
        None => Ok(margin),
    }
}

fn blocking(trial: &Trial<'_>) -> Judgement {
    // One row and one key; tiles narrower and wider than a register; a tail in both directions; six
    // micro-chunks in a chunk; larger than any length.
    let sizes = [(1, 1), (8, 16), (16, 7), (33, 65), (96, 16), (1 << 20, 1 << 20)];
    // The smallest tiles of a large case are as many as take a minute.
    let first = usize::from(trial.case.spec.is_large());
    worst(sizes.into_iter().skip(first).map(|(queries, keys)| {
        let blocking = Some(Blocking::new(queries, keys));
        let outputs = trial.ask_hinted(Hints { blocking, ..Hints::default() })?;
        within(trial, &outputs).map_err(|flaw| flaw.of(&format!("{queries}×{keys}")))
    }))
}

fn modes(trial: &Trial<'_>) -> Judgement {
    let mut modes = vec![Mode::Separate, Mode::FusedPartials];
    // The others save nothing that they could do without.
    if trial.case.problem.operands(trial.pass).iter().any(|x| x.role == Role::OptionalSaved) {
        modes.push(Mode::ForwardGradient);
    }
    worst(modes.into_iter().filter_map(|mode| {
        let outputs = match trial.ask_hinted(Hints { mode, ..Hints::default() }) {
            // A tier may lack the second; the others are judged nevertheless.
            Err(Flaw::Unsupported(_)) if mode == Mode::FusedPartials => return None,
            outputs => outputs,
        };
        let judged = outputs.and_then(|outputs| within(trial, &outputs));
        Some(judged.map_err(|flaw| flaw.of(&format!("{mode:?}"))))
    }))
}

fn alone_results(trial: &Trial<'_>) -> Judgement {
    within(trial, &trial.ask_hinted(Hints { alone: true, ..Hints::default() })?)
}

/// With none that it could do without, spans have as many chunks as there are spans: with default chunks, and
/// with the longest.
fn kept_states(trial: &Trial<'_>) -> Judgement {
    worst([None, Some(Blocking::new(256, 64))].map(|blocking| {
        let hints = Hints { blocking, kept_states: Some(0), ..Hints::default() };
        within(trial, &trial.ask_hinted(hints)?)
    }))
}

fn recomputed(trial: &Trial<'_>) -> Judgement {
    within(trial, &trial.ask_hinted(Hints { recompute: true, ..Hints::default() })?)
}
