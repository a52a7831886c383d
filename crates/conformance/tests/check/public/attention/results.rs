//! lse of another form, and o of weights that do not add up to 1.

use super::super::Bug;
use super::super::kernel::{Attention as Kernel, normalised};
use super::{HIDDEN, forward, with_output};
use crate::bench::{Bench, SHORT, short_attention};
use etalon_conformance::tensor::Tensors;
use etalon_problem::{Attention, Extents};
use ndarray::{ArrayD, Axis as Along};
use std::f64::consts::{LN_2, LOG2_E};

/// lse as a function of the right one and of the maximum of S.
fn lse(of: fn(&ArrayD<f64>, ArrayD<f64>) -> ArrayD<f64>) -> (Bench, Tensors) {
    with_output(forward(short_attention()), "lse", |kernel| {
        let w = kernel.weights();
        of(&w.lse, maximum(&w.s))
    })
}

/// The maximum of each row.
fn maximum(s: &ArrayD<f64>) -> ArrayD<f64> {
    s.fold_axis(Along(3), HIDDEN, |x, y| x.max(*y))
}

/// o and lse of some keys.
type Half = (ArrayD<f64>, ArrayD<f64>);

/// o as a function of o and lse of the first and the last 20 keys, without a mask.
fn halves(join: fn([Half; 2]) -> ArrayD<f64>) -> (Bench, Tensors) {
    let half = |kernel: &mut Kernel<'_>, first: bool| {
        let scale = kernel.scores.scale();
        kernel.score =
            Box::new(move |at, dot| if (at[3] < 20) == first { scale * dot } else { HIDDEN });
        let w = kernel.weights();
        (kernel.output(&w.p), w.lse)
    };
    let bench = forward(Attention::new(Extents { keys: 40, ..SHORT }));
    with_output(bench, "o", |kernel| join([half(kernel, true), half(kernel, false)]))
}

pub const BUGS: &[Bug] = &[
    Bug {
        story: "lse is a logarithm to base 2",
        ids: &["lse-base-2", "lse-in-base-2", "factor"],
        make: || lse(|lse, _| lse * LOG2_E),
    },
    Bug {
        story: "lse is multiplied by ln 2 once too often",
        ids: &["factor"],
        make: || lse(|lse, _| lse * LN_2),
    },
    Bug { story: "lse has the other sign", ids: &["factor"], make: || lse(|lse, _| -lse) },
    Bug {
        story: "lse is the maximum, without the logarithm of the sum",
        ids: &["lse-of-1.000-max-and-0.000-sum"],
        make: || lse(|_, max| max),
    },
    Bug {
        story: "lse is the logarithm of the sum, without the maximum",
        ids: &["lse-of-0.000-max-and-1.000-sum"],
        make: || lse(|lse, max| lse - max),
    },
    Bug {
        story: "lse adds a maximum in base 2 to a natural logarithm",
        ids: &["lse-of-1.443-max-and-1.000-sum"],
        make: || lse(|lse, max| lse + (LOG2_E - 1.0) * max),
    },
    Bug {
        story: "rows are not normalised",
        ids: &["factor-of-each-row"],
        make: || {
            with_output(forward(short_attention()), "o", |kernel| {
                let s = kernel.weights().s;
                kernel.output(&normalised(&s, &maximum(&s)))
            })
        },
    },
    Bug {
        story: "parts of a split are averaged, whatever their weights",
        ids: &["halves-averaged"],
        make: || halves(|[(x, _), (y, _)]| 0.5 * (x + y)),
    },
    Bug {
        story: "parts of a split are merged by lse of the wrong base",
        ids: &["halves-joined-in-base-2"],
        make: || {
            halves(|[(x, a), (y, b)]| {
                let weight = (LN_2 * (b - a)).mapv(|d| 1.0 / (1.0 + d.exp())).insert_axis(Along(3));
                &x * &weight + &y * &weight.mapv(|x| 1.0 - x)
            })
        },
    },
    Bug {
        story: "weights are dropped at random",
        ids: &[],
        make: || {
            with_output(forward(short_attention()), "o", |kernel| {
                let mut p = kernel.weights().p;
                let mut at = 7_u64;
                p.mapv_inplace(|p| {
                    at = at
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    if at >> 61 == 0 { 0.0 } else { p / 0.875 }
                });
                kernel.output(&p)
            })
        },
    },
];
