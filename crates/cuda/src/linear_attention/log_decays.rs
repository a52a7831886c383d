//! Log-decays in the memory of the host: at most 0.

use etalon_problem::{Error, LinearAttention, Pass, Result, View, Views};
use ndarray::{ArrayViewD, Dimension};

/// Fails if a log-decay of a head, or of a token that belongs to a sequence, is positive or NaN.
pub(crate) fn check_log_decays(problem: &LinearAttention, pass: Pass, inputs: &Views<'_>) -> Result<()> {
    if let Some(View::F32(list)) = inputs.get("g_gamma") {
        check("g_gamma", list, |_| true)?;
    }
    let Some(View::F32(g)) = inputs.get("g") else { return Ok(()) };
    if pass == Pass::Step {
        return check("g", g, |_| true);
    }
    let sequences = problem.list_sequences();
    let belongs = |at: &[usize]| {
        let [batch, _, token] = *at else { return true };
        let mut own = sequences.iter().filter(|s| s.batch == batch);
        own.any(|s| (s.start..s.start + s.tokens).contains(&token))
    };
    check("g", g, belongs)
}

fn check(name: &str, list: &ArrayViewD<'_, f32>, counts: impl Fn(&[usize]) -> bool) -> Result<()> {
    // Of most lists nothing is above 0; only then is asked where.
    let bad = |g: f32| g > 0.0 || g.is_nan();
    let mut found = list.indexed_iter().filter(|(_, g)| bad(**g));
    match found.find(|(at, _)| counts(at.slice())) {
        Some((at, g)) => Err(Error::value(format!("{name}{:?}", at.slice()), "at most 0", g)),
        None => Ok(()),
    }
}
