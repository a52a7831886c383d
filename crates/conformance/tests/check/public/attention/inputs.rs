//! Key heads, batch elements and inputs that are taken for others, or lie otherwise in memory.

use super::super::{Bug, kernel::of_other};
use super::{bf16, forward, with_key_head};
use crate::bench::{SHORT, short_attention};
use etalon_problem::{Attention, AttentionLse, Extents, Mask};
use ndarray::{ArrayD, Axis as Along};

/// 8 query heads on 2 key heads: four share one.
fn grouped() -> Attention {
    Attention::new(Extents { query_heads: 8, ..SHORT }).mask(Mask::causal())
}

pub const BUGS: &[Bug] = &[
    Bug {
        story: "query head h uses key head h mod Hk",
        ids: &["heads-interleaved", "head-modulo"],
        make: || with_key_head(bf16(grouped()), |h| h % 2),
    },
    Bug {
        story: "query head h uses key head h/Hk, which is right for square ratios",
        ids: &["heads-by-key-heads"],
        make: || with_key_head(bf16(grouped()), |h| (h / 2).min(1)),
    },
    Bug {
        story: "every query head uses the first key head",
        ids: &["keys-and-values-of-first-key-head"],
        make: || with_key_head(bf16(grouped()), |_| 0),
    },
    Bug {
        story: "keys and values of the first batch element for all",
        ids: &["keys-and-values-of-first-batch-element"],
        make: || {
            of_other(forward(short_attention()), |_, x| {
                for name in ["k", "v"] {
                    let x = x.get_mut(name).unwrap();
                    let first = x.index_axis(Along(0), 0).to_owned();
                    x.index_axis_mut(Along(0), 1).assign(&first);
                }
            })
        },
    },
    Bug {
        story: "k and v are exchanged",
        ids: &["k-and-v-exchanged"],
        make: || {
            of_other(forward(short_attention()), |_, x| {
                let (k, v) = (x["k"].clone(), x["v"].clone());
                x.extend([("k".to_string(), v), ("v".to_string(), k)]);
            })
        },
    },
    Bug {
        story: "the head dimension is fixed to 64",
        ids: &["dim-first-64", "first-64-of-head"],
        make: || {
            let extents = Extents { dim: 80, query_heads: 2, ..SHORT };
            of_other(bf16(Attention::new(extents).mask(Mask::causal())), |_, x| {
                x.get_mut("q").unwrap().slice_axis_mut(Along(3), (64..).into()).fill(0.0);
            })
        },
    },
    Bug {
        story: "the layout of v was lost on the way",
        ids: &["v-as-bmhke"],
        make: || {
            of_other(forward(short_attention()), |_, x| {
                let v = x.get_mut("v").unwrap();
                let flat: Vec<f64> = v.iter().copied().collect();
                let lies = ArrayD::from_shape_vec(vec![2, 25, 2, 16], flat).unwrap();
                *v = lies.permuted_axes(vec![0, 2, 1, 3]).as_standard_layout().into_owned();
            })
        },
    },
    Bug {
        story: "every input lies as [N, B, H, D]",
        ids: &["inputs-as-nbhqd"],
        make: || {
            of_other(forward(short_attention()), |_, x| {
                for name in ["q", "k", "v"] {
                    let x = x.get_mut(name).unwrap();
                    let (shape, flat) = (x.shape().to_vec(), x.iter().copied().collect());
                    let lies = vec![shape[2], shape[0], shape[1], shape[3]];
                    let lies = ArrayD::from_shape_vec(lies, flat).unwrap();
                    *x = lies.permuted_axes(vec![1, 2, 0, 3]).as_standard_layout().into_owned();
                }
            })
        },
    },
    Bug {
        story: "attention_lse counts future keys",
        ids: &["mask-absent"],
        make: || {
            of_other(forward(AttentionLse::new(SHORT).mask(Mask::causal())), |problem, _| {
                problem.scores_mut().unwrap().mask = Mask::Full;
            })
        },
    },
];
