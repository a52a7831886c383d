//! Unit tests of `src/linear_attention/log_decays.rs`.

use crate::linear_attention::check_log_decays;
use etalon_problem::{Decay, LinearAttention, LinearExtents, Pass, TokenSequences, Views};
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
