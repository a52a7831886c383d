//! Gate G1 as a law.

use super::flaw::{Flaw, Judgement};
use super::law::{ANY_PASS, ATTENTION, EVERY, FIRST_ORDER, Kind, Law, SCORES};
use super::trial::Trial;
use super::values::larger;
use crate::bounds::Bounds;
use crate::cases::Case;
use crate::gates;
use crate::report::Verdict;
use crate::tensor::Tensors;
use crate::tier::Hints;
use etalon_problem::{Algorithm, Blocking, Mode, Pass, Role};

pub(super) const LAWS: &[Law] = &[
    Law {
        name: "bound",
        statement: "Every element lies within its proven bound of the exact value.",
        kind: Kind::Gate,
        of: EVERY,
        passes: ANY_PASS,
        applies: |_, _| true,
        check: bound,
    },
    Law {
        name: "blocking",
        statement: "Any tile sizes give results within the bound.",
        kind: Kind::Gate,
        of: EVERY,
        passes: ANY_PASS,
        applies: |_, _| true,
        check: blocking,
    },
    Law {
        name: "modes",
        statement: "Every mode of the backward pass gives results within the bound.",
        kind: Kind::Gate,
        of: ATTENTION,
        passes: FIRST_ORDER,
        applies: |_: &Case, pass| pass == Pass::Backward,
        check: modes,
    },
    Law {
        name: "recomputed",
        statement: "A pass that computes the forward pass again gives results within the bound.",
        kind: Kind::Gate,
        of: SCORES,
        passes: ANY_PASS,
        applies: |case, pass| case.problem.operands(pass).iter().any(|x| x.role == Role::Saved),
        check: recomputed,
    },
];

/// The worst margin of outputs that all lie within their bounds.
pub(super) fn within(bounds: &Bounds, outputs: &Tensors) -> Judgement {
    let found = gates::g1(bounds, outputs);
    match found.verdict {
        Verdict::Pass => Ok(Some(found.margin)),
        Verdict::Fail(text) | Verdict::Convention(text) => Err(Flaw::Fail(text)),
        Verdict::Unsupported(text) => Err(Flaw::Unsupported(text)),
        Verdict::Vacuous(text) => Err(Flaw::Vacuous(text)),
    }
}

fn worst_of(margins: impl Iterator<Item = Judgement>) -> Judgement {
    let mut worst = None;
    for margin in margins {
        worst = larger(worst, margin?);
    }
    Ok(worst)
}

/// Generic inputs with terms enough must be able to tell right from wrong; others may be blunt:
/// where rows see a key or two, whole gradients cancel.
fn bound(trial: &Trial<'_>) -> Judgement {
    let bounds = trial.bounds()?;
    if trial.case.is_rich() {
        gates::informative(bounds).map_err(Flaw::Vacuous)?;
    }
    within(bounds, trial.clean()?)
}

fn blocking(trial: &Trial<'_>) -> Judgement {
    // One row and one key; tiles narrower and wider than a register; a tail in both directions;
    // larger than any length.
    let sizes = [(1, 1), (8, 16), (16, 7), (33, 65), (1 << 20, 1 << 20)];
    worst_of(sizes.into_iter().map(|(queries, keys)| {
        let hints = Hints { blocking: Some(Blocking::new(queries, keys)), ..Hints::default() };
        let outputs = trial.ask(&trial.case.problem, trial.inputs(), hints)?;
        within(trial.bounds()?, &outputs).map_err(|flaw| named(flaw, &format!("{queries}×{keys}")))
    }))
}

fn modes(trial: &Trial<'_>) -> Judgement {
    let mut modes = vec![Mode::Separate, Mode::FusedPartials];
    if trial.case.problem.algorithm() == Algorithm::AttentionLse {
        modes.push(Mode::ForwardGradient);
    }
    worst_of(modes.into_iter().map(|mode| {
        let hints = Hints { mode, ..Hints::default() };
        let outputs = trial.ask(&trial.case.problem, trial.inputs(), hints)?;
        within(trial.bounds()?, &outputs).map_err(|flaw| named(flaw, &format!("{mode:?}")))
    }))
}

fn recomputed(trial: &Trial<'_>) -> Judgement {
    let hints = Hints { recompute: true, ..Hints::default() };
    within(trial.bounds()?, &trial.ask(&trial.case.problem, trial.inputs(), hints)?)
}

fn named(flaw: Flaw, what: &str) -> Flaw {
    match flaw {
        Flaw::Fail(text) => Flaw::Fail(format!("{what}: {text}")),
        other => other,
    }
}
