//! Log-decays per head (`g_gamma`) of known families of models.
//!
//! Libraries use one name for different numbers, for example "the slopes of lightning attention".
//! A problem therefore takes the numbers themselves, and these functions compute them. Each returns
//! one number γ_h ≤ 0 for each head; every token multiplies the state of head h by e^γ_h.
//!
//! ```
//! assert_eq!(etalon_problem::slopes::alibi(4)?, [-0.25, -0.0625, -0.015625, -0.00390625]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```

use crate::Error;

/// ALiBi's slopes, negated: −2^{−8(h+1)/H} where H is a power of two. Otherwise, with P the next
/// lower power of two, the first P heads have the slopes of P heads, and the others the slopes of
/// heads 0, 2, 4, … of 2P heads.
///
/// Source: Press, Smith and Lewis, *Train Short, Test Long* (2022), and its repository.
pub fn alibi(heads: usize) -> Result<Vec<f64>, Error> {
    Error::expect_extents(&[("heads", heads)])?;
    let power = 1 << heads.ilog2();
    list(heads, |h| {
        let exponent = match h.checked_sub(power) {
            None => (h + 1) as f64 / power as f64,
            Some(other) => (2 * other + 1) as f64 / (2 * power) as f64,
        };
        -(-8.0 * exponent).exp2()
    })
}

/// [`alibi`] times 1 − layer/(layers − 1) + 10⁻⁵: the first layer forgets fastest, the last one
/// hardly at all. With one layer the factor is 1 + 10⁻⁵.
///
/// Source: the repository of Lightning Attention (OpenNLPLab), where the kernels take the
/// slopes and the example applies the factor. TransNormerLLM and MiniMax-01 follow it; MiniMax-01 in
/// `transformers` uses slightly different factors.
pub fn geometric(heads: usize, layer: usize, layers: usize) -> Result<Vec<f64>, Error> {
    check_layer(layer, layers)?;
    let depth = if layer == 0 { 0.0 } else { layer as f64 / (layers - 1) as f64 };
    let mut slopes = alibi(heads)?;
    slopes.iter_mut().for_each(|slope| *slope *= 1.0 - depth + 1e-5);
    Ok(slopes)
}

/// −(8/H)(1 − layer/layers) h: linear in the head. Head 0 forgets nothing.
///
/// Source: flash-linear-attention, `lightning_attn`; the rule of Qin et al., *Scaling
/// TransNormer to 175 Billion Parameters* (2023).
pub fn linear(heads: usize, layer: usize, layers: usize) -> Result<Vec<f64>, Error> {
    Error::expect_extents(&[("heads", heads)])?;
    check_layer(layer, layers)?;
    let step = 8.0 / heads as f64 * (1.0 - layer as f64 / layers as f64);
    list(heads, |h| 0.0 - step * h as f64)
}

/// ln(1 − 2^{−5−h}).
///
/// Source: Sun et al., *Retentive Network* (2023); flash-linear-attention, `retention`.
pub fn retention(heads: usize) -> Result<Vec<f64>, Error> {
    Error::expect_extents(&[("heads", heads)])?;
    list(heads, |h| (-(-5.0 - h as f64).exp2()).ln_1p())
}

fn check_layer(layer: usize, layers: usize) -> Result<(), Error> {
    if layer < layers {
        return Ok(());
    }
    Err(Error::value("layer", format!("below layers ({layers})"), layer))
}

fn list(heads: usize, slope: impl Fn(usize) -> f64) -> Result<Vec<f64>, Error> {
    let mut slopes = Vec::new();
    slopes.try_reserve_exact(heads).map_err(|_| Error::Memory {
        what: "a log-decay per head".to_string(),
        bytes: heads.saturating_mul(size_of::<f64>()),
    })?;
    slopes.extend((0..heads).map(slope));
    Ok(slopes)
}
