//! Queries whose scores are all −∞.

use crate::common::Operands;
use etalon_problem::{Attention, Extents, Mask};
use etalon_simd::{Level, Mode, Options, attention};
use ndarray::{Axis, s};

/// The first key is −∞ and every query positive: nobody sees that key, and the first query, which
/// with a causal mask has no other, sees nothing.
#[test]
fn a_key_of_minus_infinity_adds_nothing_to_anything() {
    let extents = Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 40, keys: 40, dim: 8 };
    let mut operands = Operands::new(Attention::new(extents).mask(Mask::causal()));
    operands.q.mapv_inplace(f32::abs);
    operands.k.index_axis_mut(Axis(2), 0).fill(f32::NEG_INFINITY);
    let Operands { problem, q, k, v, dout, .. } = &operands;
    let inputs = attention::Inputs::new(q.view(), k.view(), v.view());
    let cotangents = attention::Cotangents::new(dout.view());
    let second = attention::SecondCotangents {
        ddq: Some(dout.view()),
        ddv: Some(v.view()),
        cot_o: Some(q.view()),
        ..Default::default()
    };
    for &level in Level::available() {
        for mode in [Mode::Separate, Mode::FusedPartials] {
            let options = Options { level, mode, ..Options::default() };
            let out = attention::forward(problem, &inputs, &options).unwrap();
            assert!(out.lse.slice(s![.., .., 0]).iter().all(|&lse| lse == f32::NEG_INFINITY));
            let first = attention::backward(problem, &inputs, &out, &cotangents, &options).unwrap();
            let again =
                attention::double_backward(problem, &inputs, &out, &cotangents, &second, &options)
                    .unwrap();
            for (name, rows) in [
                ("dq", &first.dq),
                ("dk", &first.dk),
                ("dv", &first.dv),
                ("gq", &again.gq),
                ("gk", &again.gk),
                ("gv", &again.gv),
                ("gdout", &again.gdout),
            ] {
                assert!(rows.iter().all(|x| x.is_finite()), "{name} at {level}, {mode:?}");
                let row = rows.index_axis(Axis(2), 0);
                assert!(row.iter().all(|&x| x == 0.0), "{name} at {level}, {mode:?}: {row}");
            }
        }
    }
}
