//! Gate G2 as a law.

use super::flaw::{Flaw, Judgement};
use super::law::laws;
use super::trial::Trial;

laws! {
    EVERY;
    /// Errors are random: no output is larger or smaller by a factor, and no row errs more than its like.
    Gate statistics on Any if |case, _| case.is_generic();
}

/// Chance may be conspicuous once. It is no flaw unless other elements show it again.
fn statistics(trial: &Trial<'_>) -> Judgement {
    const SEEDS: u64 = 3;
    let found = trial.conspicuous(trial.clean()?, None)?;
    let Some(first) = found.first() else { return Ok(None) };
    let mut again = 0;
    for later in 1..=SEEDS {
        let inputs = trial.case.afresh(trial.pass, later);
        let (outputs, exact) = (trial.ask_with(&inputs)?, trial.bounds_for(trial.pass, &inputs)?);
        let found = trial.conspicuous(&outputs, Some((&inputs, &exact)))?;
        again += u64::from(!found.is_empty());
    }
    match 2 * again > SEEDS {
        true => Err(Flaw::Fail(format!("{first}; so it is with {again} of {SEEDS} other seeds"))),
        false => Ok(None),
    }
}
