//! Log-decays in the memory of the host: at most 0.

use etalon_problem::{Error, LinearAttention, Pass, View, Views};
use ndarray::{ArrayViewD, Dimension};

/// Fails if a log-decay of a head, or of a token that belongs to a sequence, is positive or NaN.
pub(crate) fn check_log_decays(problem: &LinearAttention, pass: Pass, inputs: &Views<'_>) -> Result<(), Error> {
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

fn check(name: &str, list: &ArrayViewD<'_, f32>, counts: impl Fn(&[usize]) -> bool) -> Result<(), Error> {
    // Of most lists nothing is above 0; only then is asked where.
    let bad = |g: f32| g > 0.0 || g.is_nan();
    let mut found = list.indexed_iter().filter(|(_, g)| bad(**g));
    match found.find(|(at, _)| counts(at.slice())) {
        Some((at, g)) => Err(Error::value(format!("{name}{:?}", at.slice()), "at most 0", g)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etalon_problem::{Decay, LinearExtents, TokenSequences};
    use ndarray::Array3;

    #[test]
    fn a_positive_log_decay_is_named_unless_it_is_padding() {
        let extents = LinearExtents { batch: 2, query_heads: 1, key_heads: 1, tokens: 4, dim: 8 };
        let lengths = TokenSequences::Lengths { tokens: vec![2, 4] };
        let problem = LinearAttention::new(extents).decay(Decay::PerToken).sequences(lengths);
        let mut g = Array3::<f32>::zeros((2, 1, 4));
        g[[0, 0, 3]] = f32::NAN;
        let checked = |g: &Array3<f32>| check_log_decays(&problem, Pass::Forward, &Views::new().with("g", g));
        checked(&g).unwrap();
        g[[1, 0, 3]] = 0.5;
        let message = checked(&g).unwrap_err().to_string();
        assert!(message.contains("g[1, 0, 3]") && message.contains("0.5"), "{message}");
    }
}
