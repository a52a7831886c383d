//! Scales, softcaps, biases and sinks that are absent, doubled, or applied at another place of the chain.

use super::super::Bug;
use super::super::kernel::{bias, made};
use super::{HIDDEN, bf16, forward, rescored, scored, with_output};
use crate::bench::short_attention;
use std::f64::consts::LN_2;

pub const BUGS: &[Bug] = &[
    Bug {
        story: "the softcap comes after the mask",
        ids: &["mask-before-softcap"],
        make: || {
            scored(forward(short_attention().softcap(2.0)), |pair| match pair.is_visible() {
                true => 2.0 * (pair.s / 2.0).tanh(),
                false => -2.0,
            })
        },
    },
    Bug {
        story: "the softcap is ignored",
        ids: &["softcap-absent", "softcap-ignored"],
        make: || rescored(bf16(short_attention().softcap(1.0)), |pair| pair.s),
    },
    Bug {
        story: "the softcap is applied before the scale",
        ids: &["softcap-before-scale"],
        make: || {
            rescored(bf16(short_attention().softcap(3.0)), |pair| {
                pair.scores.scale() * 3.0 * (pair.dot / 3.0).tanh()
            })
        },
    },
    Bug {
        story: "the softcap also bends the bias",
        ids: &["softcap-after-bias"],
        make: || {
            let bench = forward(short_attention().softcap(1.0).bias(1, 4));
            rescored(bench, |pair| (pair.s + pair.bias()).tanh())
        },
    },
    Bug {
        story: "the given scale is ignored for 1/√D",
        ids: &["softmax-scale-usual"],
        make: || rescored(bf16(short_attention().softmax_scale(0.13)), |pair| 0.25 * pair.dot),
    },
    Bug {
        story: "the scale is applied twice",
        ids: &["scale-twice", "scale-by-width"],
        make: || rescored(bf16(short_attention()), |pair| 0.0625 * pair.dot),
    },
    Bug {
        story: "exponentials to base 2 without log₂e in the scale",
        ids: &["softmax-scale-base-2"],
        make: || rescored(bf16(short_attention()), |pair| LN_2 * pair.s),
    },
    Bug {
        story: "a bias is added after log₂e multiplied the scores",
        ids: &["bias-base-2"],
        make: || rescored(bf16(short_attention().bias(1, 4)), |pair| pair.s + LN_2 * pair.bias()),
    },
    Bug {
        story: "ALiBi slopes of the next head",
        ids: &["bias-of-next-head"],
        make: || {
            rescored(bf16(short_attention().bias(1, 4)), |pair| {
                let [b, h, i, j] = pair.at;
                pair.s + bias(pair.x, [b, (h + 1) % 4, i, j])
            })
        },
    },
    Bug {
        story: "the bias of the first batch element for all",
        ids: &["bias-of-first-batch"],
        make: || {
            rescored(bf16(short_attention().bias(2, 4)), |pair| {
                let [_, h, i, j] = pair.at;
                pair.s + bias(pair.x, [0, h, i, j])
            })
        },
    },
    Bug {
        story: "sinks are ignored",
        ids: &["sinks-absent"],
        make: || {
            made(forward(short_attention().sinks()), |kernel| {
                kernel.sinks = vec![HIDDEN; 4];
                kernel.forward()
            })
        },
    },
    Bug {
        story: "sinks count twice: both halves of a split add them",
        ids: &["sinks-added-twice"],
        make: || {
            made(forward(short_attention().sinks()), |kernel| {
                kernel.sinks.iter_mut().for_each(|x| *x += LN_2);
                kernel.forward()
            })
        },
    },
    Bug {
        story: "sinks are read by the number of the key head",
        ids: &["sinks-of-key-head"],
        make: || {
            made(forward(short_attention().sinks()), |kernel| {
                let own = kernel.sinks.clone();
                kernel.sinks = (0..4).map(|h| own[h / 2]).collect();
                kernel.forward()
            })
        },
    },
    Bug {
        story: "lse does not count the sink",
        ids: &["sink-not-in-lse", "sinks-absent"],
        make: || {
            with_output(forward(short_attention().sinks()), "lse", |kernel| {
                kernel.sinks = vec![HIDDEN; 4];
                kernel.weights().lse
            })
        },
    },
];
