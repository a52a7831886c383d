//! Attention, forward.

use super::Bug;
use super::kernel::{Attention as Kernel, ask, bias, normalised, of, visible, with};
use crate::bench::{Bench, EXTENTS, attention};
use etalon_problem::{
    Attention, AttentionLse, Dtype, Extents, Mask, NamedArray, Pass, Problem, Sequences,
};
use ndarray::{ArrayD, Axis as Along};
use std::f64::consts::{LN_2, LOG2_E};

fn forward(problem: impl Into<Problem>) -> Bench {
    ask(problem, Pass::Forward, Dtype::F32)
}

fn bf16(problem: impl Into<Problem>) -> Bench {
    ask(problem, Pass::Forward, Dtype::Bf16)
}

/// 8 query heads on 2 key heads: four share one.
fn grouped() -> Attention {
    Attention::new(Extents { query_heads: 8, ..EXTENTS }).mask(Mask::causal())
}

/// A right kernel but for its scores.
macro_rules! scored {
    ($bench:expr, |$kernel:ident, $pair:ident, $dot:ident| $score:expr) => {{
        let bench = $bench;
        let got = {
            let mut kernel = Kernel::new(&bench);
            let x = kernel.x.clone();
            let $kernel = (kernel.scores, x);
            kernel.score = Box::new(move |$pair: [usize; 4], $dot: f64| $score);
            let got = kernel.forward();
            with(&bench, got)
        };
        (bench, got)
    }};
}

/// A right kernel but for its results.
macro_rules! changed {
    ($bench:expr, |$kernel:ident| $results:expr) => {{
        let bench = $bench;
        let got = {
            #[allow(unused_mut)]
            let mut $kernel = Kernel::new(&bench);
            let results = $results;
            with(
                &bench,
                results.into_iter().map(|(n, x): (&str, ArrayD<f64>)| (n.to_string(), x)).collect(),
            )
        };
        (bench, got)
    }};
}

const HIDDEN: f64 = f64::NEG_INFINITY;

pub const BUGS: &[Bug] = &[
    Bug {
        story: "query head h uses key head h mod Hk",
        ids: &["heads-interleaved", "head-modulo"],
        make: || {
            let bench = bf16(grouped());
            let got = {
                let mut kernel = Kernel::new(&bench);
                kernel.key_head = Box::new(|h| h % 2);
                with(&bench, kernel.forward())
            };
            (bench, got)
        },
    },
    Bug {
        story: "query head h uses key head h/Hk, which is right for square ratios",
        ids: &["heads-by-key-heads"],
        make: || {
            let bench = bf16(grouped());
            let got = {
                let mut kernel = Kernel::new(&bench);
                kernel.key_head = Box::new(|h| (h / 2).min(1));
                with(&bench, kernel.forward())
            };
            (bench, got)
        },
    },
    Bug {
        story: "every query head uses the first key head",
        ids: &["keys-and-values-of-first-key-head"],
        make: || {
            let bench = bf16(grouped());
            let got = {
                let mut kernel = Kernel::new(&bench);
                kernel.key_head = Box::new(|_| 0);
                with(&bench, kernel.forward())
            };
            (bench, got)
        },
    },
    Bug {
        story: "keys and values of the first batch element for all",
        ids: &["keys-and-values-of-first-batch-element"],
        make: || {
            let bench = forward(attention());
            let got = of(&bench, |_, x| {
                for name in ["k", "v"] {
                    let x = x.get_mut(name).unwrap();
                    let first = x.index_axis(Along(0), 0).to_owned();
                    x.index_axis_mut(Along(0), 1).assign(&first);
                }
            });
            (bench, got)
        },
    },
    Bug {
        story: "k and v are exchanged",
        ids: &["k-and-v-exchanged"],
        make: || {
            let bench = forward(attention());
            let got = of(&bench, |_, x| {
                let (k, v) = (x["k"].clone(), x["v"].clone());
                x.extend([("k".to_string(), v), ("v".to_string(), k)]);
            });
            (bench, got)
        },
    },
    Bug {
        story: "causal at the top left with fewer queries than keys",
        ids: &["mask-top-left", "top-left"],
        make: || {
            scored!(bf16(attention()), |own, at, dot| if at[3] <= at[2] {
                own.0.scale() * dot
            } else {
                HIDDEN
            })
        },
    },
    Bug {
        story: "a causal mask shows one key too many",
        ids: &["mask-one-more"],
        make: || {
            scored!(bf16(attention()), |own, at, dot| if at[3] <= at[2] + 5 {
                own.0.scale() * dot
            } else {
                HIDDEN
            })
        },
    },
    Bug {
        story: "a causal mask hides the query's own key",
        ids: &["mask-strict"],
        make: || {
            scored!(bf16(attention()), |own, at, dot| if at[3] < at[2] + 4 {
                own.0.scale() * dot
            } else {
                HIDDEN
            })
        },
    },
    Bug {
        story: "the tile on the diagonal is not masked",
        ids: &["mask-any-of-tile-of-16"],
        make: || {
            scored!(bf16(attention()), |own, at, dot| {
                // The last query of the tile sees up to 4 keys beyond its number.
                let last = (at[2] / 16 * 16 + 15).min(36) + 4;
                if at[3] / 16 * 16 <= last { own.0.scale() * dot } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "a window counts the query's own key",
        ids: &["window-with-own-key", "window-left-minus-one"],
        make: || {
            let bench = bf16(Attention::new(EXTENTS).mask(Mask::window(9, 0)));
            scored!(bench, |own, at, dot| {
                let d = at[2] as i64 + 4 - at[3] as i64;
                if (0..9).contains(&d) { own.0.scale() * dot } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "a window lets one future key in",
        ids: &["mask-right-one-more", "window-right-plus-one"],
        make: || {
            let bench = bf16(Attention::new(EXTENTS).mask(Mask::window(9, 2)));
            scored!(bench, |own, at, dot| {
                let d = at[2] as i64 + 4 - at[3] as i64;
                if (-3..10).contains(&d) { own.0.scale() * dot } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "both ends of a window are exclusive",
        ids: &["mask-one-less"],
        make: || {
            let bench = bf16(Attention::new(EXTENTS).mask(Mask::window(9, 2)));
            scored!(bench, |own, at, dot| {
                let d = at[2] as i64 + 4 - at[3] as i64;
                if (-1..9).contains(&d) { own.0.scale() * dot } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "the left end of a window is counted from the first query",
        ids: &["mask-left-other-end"],
        make: || {
            let bench = bf16(Attention::new(EXTENTS).mask(Mask::window(9, 0)));
            scored!(bench, |own, at, dot| {
                let (i, j) = (at[2] as i64, at[3] as i64);
                if j >= i - 9 && j <= i + 4 { own.0.scale() * dot } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "a window is not applied: causal",
        ids: &["mask-left-dropped", "backward-without-window"],
        make: || {
            let bench = bf16(Attention::new(EXTENTS).mask(Mask::window(9, 0)));
            scored!(bench, |own, at, dot| if at[3] <= at[2] + 4 {
                own.0.scale() * dot
            } else {
                HIDDEN
            })
        },
    },
    Bug {
        story: "weights are masked after the softmax",
        ids: &["mask-after-softmax", "mask-after-softmax-of-o"],
        make: || {
            changed!(forward(attention()), |kernel| {
                let scores = kernel.scores;
                kernel.score = Box::new(move |_, dot| scores.scale() * dot);
                let mut w = kernel.weights();
                w.p.indexed_iter_mut().for_each(|(at, p)| {
                    *p *= f64::from(u8::from(visible(scores, [at[0], at[1], at[2], at[3]])));
                });
                [("o", kernel.output(&w.p)), ("lse", w.lse)]
            })
        },
    },
    Bug {
        story: "the mask multiplies the scores",
        ids: &["mask-as-zero"],
        make: || {
            scored!(forward(attention()), |own, at, dot| if visible(own.0, at) {
                own.0.scale() * dot
            } else {
                0.0
            })
        },
    },
    Bug {
        story: "the softcap comes after the mask",
        ids: &["mask-before-softcap"],
        make: || {
            scored!(forward(attention().softcap(2.0)), |own, at, dot| {
                if visible(own.0, at) { 2.0 * (own.0.scale() * dot / 2.0).tanh() } else { -2.0 }
            })
        },
    },
    Bug {
        story: "the softcap is ignored",
        ids: &["softcap-absent", "softcap-ignored"],
        make: || {
            scored!(bf16(attention().softcap(1.0)), |own, at, dot| {
                if visible(own.0, at) { own.0.scale() * dot } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "the softcap is applied before the scale",
        ids: &["softcap-before-scale"],
        make: || {
            scored!(bf16(attention().softcap(3.0)), |own, at, dot| {
                if visible(own.0, at) { own.0.scale() * 3.0 * (dot / 3.0).tanh() } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "the softcap also bends the bias",
        ids: &["softcap-after-bias"],
        make: || {
            scored!(forward(attention().softcap(1.0).bias(1, 4)), |own, at, dot| {
                let s = own.0.scale() * dot + bias(&own.1, at);
                if visible(own.0, at) { s.tanh() } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "the given scale is ignored for 1/√D",
        ids: &["softmax-scale-usual"],
        make: || {
            scored!(bf16(attention().softmax_scale(0.13)), |own, at, dot| {
                if visible(own.0, at) { 0.25 * dot } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "the scale is applied twice",
        ids: &["scale-twice", "scale-by-width"],
        make: || {
            scored!(bf16(attention()), |own, at, dot| {
                if visible(own.0, at) { 0.0625 * dot } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "exponentials to base 2 without log₂e in the scale",
        ids: &["softmax-scale-base-2"],
        make: || {
            scored!(bf16(attention()), |own, at, dot| {
                if visible(own.0, at) { LN_2 * own.0.scale() * dot } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "a bias is added after log₂e multiplied the scores",
        ids: &["bias-base-2"],
        make: || {
            scored!(bf16(attention().bias(1, 4)), |own, at, dot| {
                if visible(own.0, at) {
                    own.0.scale() * dot + LN_2 * bias(&own.1, at)
                } else {
                    HIDDEN
                }
            })
        },
    },
    Bug {
        story: "ALiBi slopes of the next head",
        ids: &["bias-of-next-head"],
        make: || {
            scored!(bf16(attention().bias(1, 4)), |own, at, dot| {
                let own_bias = bias(&own.1, [at[0], (at[1] + 1) % 4, at[2], at[3]]);
                if visible(own.0, at) { own.0.scale() * dot + own_bias } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "the bias of the first batch element for all",
        ids: &["bias-of-first-batch"],
        make: || {
            scored!(bf16(attention().bias(2, 4)), |own, at, dot| {
                let own_bias = bias(&own.1, [0, at[1], at[2], at[3]]);
                if visible(own.0, at) { own.0.scale() * dot + own_bias } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "lengths of keys are ignored",
        ids: &["sequences-keys-ignored"],
        make: || {
            let lengths = Sequences::Lengths { query: vec![37, 37], key: vec![41, 33] };
            let bench = bf16(Attention::new(EXTENTS).sequences(lengths));
            scored!(bench, |own, _at, dot| own.0.scale() * dot)
        },
    },
    Bug {
        story: "cu_seqlens are ignored: packed sequences see each other",
        ids: &["sequences-ignored", "sequences-padding-counts", "packed-leak"],
        make: || {
            let extents = Extents { batch: 1, queries: 40, keys: 40, ..EXTENTS };
            let offsets = vec![0, 13, 40];
            let packed = Sequences::Packed { cu_query: offsets.clone(), cu_key: offsets };
            let bench = bf16(Attention::new(extents).sequences(packed));
            scored!(bench, |own, _at, dot| own.0.scale() * dot)
        },
    },
    Bug {
        story: "cu_seqlens are off by one",
        ids: &["sequences-all-one-less"],
        make: || {
            let extents = Extents { batch: 1, queries: 40, keys: 40, ..EXTENTS };
            let offsets = vec![0, 13, 40];
            let packed = Sequences::Packed { cu_query: offsets.clone(), cu_key: offsets };
            let bench = bf16(Attention::new(extents).sequences(packed));
            scored!(bench, |own, at, dot| {
                if (at[2] < 12) == (at[3] < 12) { own.0.scale() * dot } else { HIDDEN }
            })
        },
    },
    Bug {
        story: "segment ids are ignored",
        ids: &["mask-part-2-alone", "mask-without-part-1", "mask-part-1-*"],
        make: || {
            let ids = |n: usize| (0..2 * n).map(|at| (at % n / 12) as i64).collect::<Vec<i64>>();
            let segments = Mask::Segments {
                query: NamedArray::new("query", &[2, 37], ids(37)),
                key: NamedArray::new("key", &[2, 41], ids(41)),
            };
            let bench =
                bf16(Attention::new(EXTENTS).mask(Mask::And(vec![segments, Mask::causal()])));
            scored!(bench, |own, at, dot| if at[3] <= at[2] + 4 {
                own.0.scale() * dot
            } else {
                HIDDEN
            })
        },
    },
    Bug {
        story: "sinks are ignored",
        ids: &["sinks-absent"],
        make: || {
            changed!(forward(attention().sinks()), |kernel| {
                kernel.sinks = vec![HIDDEN; 4];
                let mut x = kernel.forward();
                [("o", x.remove("o").unwrap()), ("lse", x.remove("lse").unwrap())]
            })
        },
    },
    Bug {
        story: "sinks count twice: both halves of a split add them",
        ids: &["sinks-added-twice"],
        make: || {
            changed!(forward(attention().sinks()), |kernel| {
                kernel.sinks.iter_mut().for_each(|x| *x += LN_2);
                let mut x = kernel.forward();
                [("o", x.remove("o").unwrap()), ("lse", x.remove("lse").unwrap())]
            })
        },
    },
    Bug {
        story: "sinks are read by the number of the key head",
        ids: &["sinks-of-key-head"],
        make: || {
            changed!(forward(attention().sinks()), |kernel| {
                let own = kernel.sinks.clone();
                kernel.sinks = (0..4).map(|h| own[h / 2]).collect();
                let mut x = kernel.forward();
                [("o", x.remove("o").unwrap()), ("lse", x.remove("lse").unwrap())]
            })
        },
    },
    Bug {
        story: "lse does not count the sink",
        ids: &["sink-not-in-lse", "sinks-absent"],
        make: || {
            changed!(forward(attention().sinks()), |kernel| {
                kernel.sinks = vec![HIDDEN; 4];
                [("lse", kernel.weights().lse)]
            })
        },
    },
    Bug {
        story: "lse is a logarithm to base 2",
        ids: &["lse-base-2", "lse-in-base-2", "factor"],
        make: || {
            changed!(forward(attention()), |kernel| [(
                "lse",
                kernel.weights().lse.mapv(|x| LOG2_E * x)
            )])
        },
    },
    Bug {
        story: "lse is multiplied by ln 2 once too often",
        ids: &["factor"],
        make: || {
            changed!(forward(attention()), |kernel| [(
                "lse",
                kernel.weights().lse.mapv(|x| LN_2 * x)
            )])
        },
    },
    Bug {
        story: "lse has the other sign",
        ids: &["factor"],
        make: || {
            changed!(forward(attention()), |kernel| [("lse", kernel.weights().lse.mapv(|x| -x))])
        },
    },
    Bug {
        story: "lse is the maximum, without the logarithm of the sum",
        ids: &["lse-of-1.000-max-and-0.000-sum"],
        make: || {
            changed!(forward(attention()), |kernel| {
                let s = kernel.weights().s;
                [("lse", s.fold_axis(Along(3), HIDDEN, |x, y| x.max(*y)))]
            })
        },
    },
    Bug {
        story: "lse is the logarithm of the sum, without the maximum",
        ids: &["lse-of-0.000-max-and-1.000-sum"],
        make: || {
            changed!(forward(attention()), |kernel| {
                let w = kernel.weights();
                let max = w.s.fold_axis(Along(3), HIDDEN, |x, y| x.max(*y));
                [("lse", w.lse - max)]
            })
        },
    },
    Bug {
        story: "lse adds a maximum in base 2 to a natural logarithm",
        ids: &["lse-of-1.443-max-and-1.000-sum"],
        make: || {
            changed!(forward(attention()), |kernel| {
                let w = kernel.weights();
                let max = w.s.fold_axis(Along(3), HIDDEN, |x, y| x.max(*y));
                [("lse", w.lse + max.mapv(|x| (LOG2_E - 1.0) * x))]
            })
        },
    },
    Bug {
        story: "rows are not normalised",
        ids: &["factor-of-each-row"],
        make: || {
            changed!(forward(attention()), |kernel| {
                let w = kernel.weights();
                let max = w.s.fold_axis(Along(3), HIDDEN, |x, y| x.max(*y));
                [("o", kernel.output(&normalised(&w.s, &max)))]
            })
        },
    },
    Bug {
        story: "parts of a split are averaged, whatever their weights",
        ids: &["halves-averaged"],
        make: || {
            let bench = forward(Attention::new(Extents { keys: 40, ..EXTENTS }));
            changed!(bench, |kernel| {
                let half = |kernel: &mut Kernel<'_>, first: bool| {
                    let scale = kernel.scores.scale();
                    kernel.score =
                        Box::new(
                            move |at, dot| if (at[3] < 20) == first { scale * dot } else { HIDDEN },
                        );
                    kernel.output(&kernel.weights().p)
                };
                let (x, y) = (half(&mut kernel, true), half(&mut kernel, false));
                [("o", 0.5 * (x + y))]
            })
        },
    },
    Bug {
        story: "parts of a split are merged by lse of the wrong base",
        ids: &["halves-joined-in-base-2"],
        make: || {
            let bench = forward(Attention::new(Extents { keys: 40, ..EXTENTS }));
            changed!(bench, |kernel| {
                let half = |kernel: &mut Kernel<'_>, first: bool| {
                    let scale = kernel.scores.scale();
                    kernel.score =
                        Box::new(
                            move |at, dot| if (at[3] < 20) == first { scale * dot } else { HIDDEN },
                        );
                    let w = kernel.weights();
                    (kernel.output(&w.p), w.lse)
                };
                let ((x, a), (y, b)) = (half(&mut kernel, true), half(&mut kernel, false));
                let weight = (LN_2 * (b - a)).mapv(|d| 1.0 / (1.0 + d.exp())).insert_axis(Along(3));
                [("o", &x * &weight + &y * &weight.mapv(|x| 1.0 - x))]
            })
        },
    },
    Bug {
        story: "a shard of the keys is missing",
        ids: &["keys-without-last-quarter"],
        make: || {
            let bench = bf16(Attention::new(Extents { keys: 40, ..EXTENTS }));
            scored!(bench, |own, at, dot| if at[3] < 30 { own.0.scale() * dot } else { HIDDEN })
        },
    },
    Bug {
        story: "the key after the last whole tile is dropped",
        ids: &[
            "keys-whole-tiles-of-16",
            "keys-without-last",
            "keys-whole-tiles-of-*",
            "key-tail-dropped",
        ],
        make: || {
            let bench = bf16(Attention::new(Extents { keys: 33, ..EXTENTS }));
            scored!(bench, |own, at, dot| if at[3] < 32 { own.0.scale() * dot } else { HIDDEN })
        },
    },
    Bug {
        story: "loads beyond the end repeat the last key",
        ids: &["keys-repeated-up-to-16"],
        make: || {
            let bench = bf16(Attention::new(Extents { keys: 41, ..EXTENTS }));
            scored!(bench, |own, at, dot| {
                own.0.scale() * dot + if at[3] == 40 { 8f64.ln() } else { 0.0 }
            })
        },
    },
    Bug {
        story: "the head dimension is fixed to 64",
        ids: &["dim-first-64", "first-64-of-head"],
        make: || {
            let extents = Extents { dim: 80, query_heads: 2, ..EXTENTS };
            let bench = bf16(Attention::new(extents).mask(Mask::causal()));
            let got = of(&bench, |_, x| {
                x.get_mut("q").unwrap().slice_axis_mut(Along(3), (64..).into()).fill(0.0);
            });
            (bench, got)
        },
    },
    Bug {
        story: "the layout of v was lost on the way",
        ids: &["v-as-bmhke"],
        make: || {
            let bench = forward(attention());
            let got = of(&bench, |_, x| {
                let v = x.get_mut("v").unwrap();
                let flat: Vec<f64> = v.iter().copied().collect();
                let lies = ArrayD::from_shape_vec(vec![2, 41, 2, 16], flat).unwrap();
                *v = lies.permuted_axes(vec![0, 2, 1, 3]).as_standard_layout().into_owned();
            });
            (bench, got)
        },
    },
    Bug {
        story: "every input lies as [N, B, H, D]",
        ids: &["inputs-as-nbhqd"],
        make: || {
            let bench = forward(attention());
            let got = of(&bench, |_, x| {
                for name in ["q", "k", "v"] {
                    let x = x.get_mut(name).unwrap();
                    let (shape, flat) = (x.shape().to_vec(), x.iter().copied().collect());
                    let lies = vec![shape[2], shape[0], shape[1], shape[3]];
                    let lies = ArrayD::from_shape_vec(lies, flat).unwrap();
                    *x = lies.permuted_axes(vec![1, 2, 0, 3]).as_standard_layout().into_owned();
                }
            });
            (bench, got)
        },
    },
    Bug {
        story: "attention_lse counts future keys",
        ids: &["mask-absent"],
        make: || {
            let bench = forward(AttentionLse::new(EXTENTS).mask(Mask::causal()));
            let got = of(&bench, |problem, _| problem.scores_mut().unwrap().mask = Mask::Full);
            (bench, got)
        },
    },
    Bug {
        story: "weights are dropped at random",
        ids: &[],
        make: || {
            changed!(forward(attention()), |kernel| {
                let mut w = kernel.weights();
                let mut at = 7_u64;
                w.p.mapv_inplace(|p| {
                    at = at
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    if at >> 61 == 0 { 0.0 } else { p / 0.875 }
                });
                [("o", kernel.output(&w.p))]
            })
        },
    },
];
