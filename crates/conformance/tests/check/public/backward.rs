//! Attention, backward.

use super::Bug;
use super::kernel::{Attention as Kernel, ask, bias, made, normalised, of_other, visible};
use crate::bench::{Bench, SHORT, short_attention};
use etalon_conformance::tensor::{Stored, Tensor, Values};
use etalon_problem::{Attention, AttentionLse, Dtype, Extents, Mask, Pass, Problem};
use ndarray::{ArrayD, Axis as Along};
use std::f64::consts::LN_2;

fn backward(problem: impl Into<Problem>) -> Bench {
    ask(problem, Pass::Backward, Dtype::F32)
}

/// δ of a right kernel, and its lse.
fn saved(kernel: &Kernel<'_>) -> (ArrayD<f64>, ArrayD<f64>) {
    let w = kernel.weights();
    (kernel.delta(&kernel.output(&w.p)), w.lse)
}

/// The gradients with scores of its own, and what a right forward pass saved.
fn with_scores(
    kernel: &mut Kernel<'_>,
    score: impl Fn([usize; 4], f64) -> f64 + 'static,
) -> Values {
    let (delta, lse) = saved(kernel);
    kernel.score = Box::new(score);
    let p = normalised(&kernel.weights().s, &lse);
    kernel.gradients(&p, &delta, &|pair| kernel.slope(pair))
}

/// The gradients of dout of other heads: those of its own are multiplied by 0 beyond the first.
fn dout_of(kernel: &mut Kernel<'_>, head: impl Fn(usize) -> Option<usize>) -> Values {
    let dout = kernel.x["dout"].clone();
    let other = ArrayD::from_shape_fn(dout.raw_dim(), |at| {
        head(at[1]).map_or(0.0, |h| dout[[at[0], h, at[2], at[3]]])
    });
    kernel.x.insert("dout".to_string(), other);
    kernel.backward()
}

/// One of the results.
fn alone(mut all: Values, name: &str) -> Values {
    all.retain(|own, _| own == name);
    all
}

const HIDDEN: f64 = f64::NEG_INFINITY;

pub const BUGS: &[Bug] = &[
    Bug {
        story: "dq and dk lack the scale",
        ids: &["factor", "gradients-unscaled"],
        make: || {
            made(backward(short_attention()), |kernel| {
                let (delta, lse) = saved(kernel);
                let p = normalised(&kernel.weights().s, &lse);
                kernel.gradients(&p, &delta, &|_| 1.0)
            })
        },
    },
    Bug {
        story: "the gradient through lse is dropped",
        ids: &["dlse-dropped", "dlse-ignored"],
        make: || {
            made(backward(short_attention()), |kernel| {
                kernel.x.remove("dlse");
                kernel.backward()
            })
        },
    },
    Bug {
        story: "dlse has the other sign",
        ids: &["dlse-negated"],
        make: || {
            made(backward(short_attention()), |kernel| {
                kernel.x.get_mut("dlse").unwrap().mapv_inplace(|x| -x);
                kernel.backward()
            })
        },
    },
    Bug {
        story: "δ is not subtracted",
        ids: &["delta-omitted"],
        make: || {
            made(backward(short_attention()), |kernel| {
                let dlse = kernel.x["dlse"].clone();
                let p = kernel.weights().p;
                kernel.gradients(&p, &-dlse, &|pair| kernel.slope(pair))
            })
        },
    },
    Bug {
        story: "δ of the next head",
        ids: &["saved-delta-of-next-head"],
        make: || {
            made(backward(short_attention()), |kernel| {
                let (delta, lse) = saved(kernel);
                let p = normalised(&kernel.weights().s, &lse);
                let next = delta.select(Along(1), &[1, 2, 3, 0]);
                kernel.gradients(&p, &next, &|pair| kernel.slope(pair))
            })
        },
    },
    Bug {
        story: "lse of the next head",
        ids: &["saved-lse-of-next-head", "lse-of-next-head"],
        make: || {
            made(backward(short_attention()), |kernel| {
                let (delta, lse) = saved(kernel);
                let next = lse.select(Along(1), &[1, 2, 3, 0]);
                let p = normalised(&kernel.weights().s, &next);
                kernel.gradients(&p, &delta, &|pair| kernel.slope(pair))
            })
        },
    },
    Bug {
        story: "a natural lse is read as one to base 2",
        ids: &["saved-lse-in-base-2"],
        make: || {
            made(backward(short_attention()), |kernel| {
                let (delta, lse) = saved(kernel);
                let p = normalised(&kernel.weights().s, &lse.mapv(|x| LN_2 * x));
                kernel.gradients(&p, &delta, &|pair| kernel.slope(pair))
            })
        },
    },
    Bug {
        story: "the saved lse lacks the sink",
        ids: &["saved-lse-without-sink"],
        make: || {
            made(backward(short_attention().sinks()), |kernel| {
                let (delta, _) = saved(kernel);
                let own = std::mem::replace(&mut kernel.sinks, vec![HIDDEN; 4]);
                let w = kernel.weights();
                kernel.sinks = own;
                let mut all = kernel.gradients(&w.p, &delta, &|pair| kernel.slope(pair));
                all.insert("dsinks".to_string(), kernel.dsinks(&w.lse, &delta));
                all
            })
        },
    },
    Bug {
        story: "the backward pass is not causal",
        ids: &["mask-absent-in-backward"],
        make: || {
            made(backward(short_attention()), |kernel| {
                let scale = kernel.scores.scale();
                with_scores(kernel, move |_, dot| scale * dot)
            })
        },
    },
    Bug {
        story: "the backward pass has a window of one key more",
        ids: &["window-one-more-in-backward"],
        make: || {
            made(backward(Attention::new(SHORT).mask(Mask::window(9, 0))), |kernel| {
                let scale = kernel.scores.scale();
                with_scores(kernel, move |at, dot| {
                    let d = at[2] as i64 + 4 - at[3] as i64;
                    if (0..11).contains(&d) { scale * dot } else { HIDDEN }
                })
            })
        },
    },
    Bug {
        story: "the backward pass does not add the bias",
        ids: &["bias-absent-in-backward"],
        make: || {
            made(backward(short_attention().bias(1, 4)), |kernel| {
                let scale = kernel.scores.scale();
                let scores = kernel.scores.clone();
                with_scores(
                    kernel,
                    move |at, dot| if visible(&scores, at) { scale * dot } else { HIDDEN },
                )
            })
        },
    },
    Bug {
        story: "the backward pass adds the bias of the next head",
        ids: &["bias-of-next-head-in-backward"],
        make: || {
            made(backward(short_attention().bias(1, 4)), |kernel| {
                let (scores, x) = (kernel.scores.clone(), kernel.x.clone());
                with_scores(kernel, move |at, dot| {
                    let next = bias(&x, [at[0], (at[1] + 1) % 4, at[2], at[3]]);
                    if visible(&scores, at) { scores.scale() * dot + next } else { HIDDEN }
                })
            })
        },
    },
    Bug {
        story: "the backward pass has the default scale",
        ids: &["softmax-scale-usual-in-backward"],
        make: || {
            made(backward(short_attention().softmax_scale(0.13)), |kernel| {
                let (delta, lse) = saved(kernel);
                let scores = kernel.scores.clone();
                kernel.score =
                    Box::new(move |at, dot| if visible(&scores, at) { 0.25 * dot } else { HIDDEN });
                let p = normalised(&kernel.weights().s, &lse);
                kernel.gradients(&p, &delta, &|_| 0.25)
            })
        },
    },
    Bug {
        story: "the gradients lack the softcap's derivative",
        ids: &["no-softcap-derivative"],
        make: || {
            made(backward(short_attention().softcap(1.0)), |kernel| {
                let (delta, lse) = saved(kernel);
                let p = normalised(&kernel.weights().s, &lse);
                kernel.gradients(&p, &delta, &|_| 0.25)
            })
        },
    },
    Bug {
        story: "dout is read with the stride of another tensor: beyond the first head it is 0",
        ids: &["dout-of-first-head-alone"],
        make: || {
            made(backward(short_attention()), |kernel| dout_of(kernel, |h| (h == 0).then_some(0)))
        },
    },
    Bug {
        story: "dout of the next head",
        ids: &["dout-of-next-head"],
        make: || made(backward(short_attention()), |kernel| dout_of(kernel, |h| Some((h + 1) % 4))),
    },
    Bug {
        story: "dk and dv hold the last head of a group",
        ids: &["group-last-alone", "group-not-summed"],
        make: || {
            made(backward(short_attention()), |kernel| {
                let own = kernel.backward();
                let last = dout_of_last(kernel);
                [("dk", last["dk"].clone()), ("dv", last["dv"].clone()), ("dq", own["dq"].clone())]
                    .map(|(n, x)| (n.to_string(), x))
                    .into()
            })
        },
    },
    Bug {
        story: "dk and dv are means over a group",
        ids: &["factor"],
        make: || {
            made(backward(short_attention()), |kernel| {
                let mut own = kernel.backward();
                for name in ["dk", "dv"] {
                    own.get_mut(name).unwrap().mapv_inplace(|x| 0.5 * x);
                }
                own
            })
        },
    },
    Bug {
        story: "dq holds the last tile of keys alone",
        ids: &["dq-of-last-tile-of-16"],
        make: || {
            made(backward(Attention::new(Extents { keys: 48, ..SHORT })), |kernel| {
                let (delta, lse) = saved(kernel);
                let mut p = normalised(&kernel.weights().s, &lse);
                p.slice_axis_mut(Along(3), (..32).into()).fill(0.0);
                alone(kernel.gradients(&p, &delta, &|pair| kernel.slope(pair)), "dq")
            })
        },
    },
    Bug {
        story: "dk and dv hold the last tile of queries alone",
        ids: &["sum-of-last-tile-of-16"],
        make: || {
            made(backward(short_attention()), |kernel| {
                let (delta, lse) = saved(kernel);
                let mut p = normalised(&kernel.weights().s, &lse);
                p.slice_axis_mut(Along(2), (..16).into()).fill(0.0);
                let mut all = kernel.gradients(&p, &delta, &|pair| kernel.slope(pair));
                all.remove("dq");
                all
            })
        },
    },
    Bug {
        story: "dk and dv lack the last tile of queries",
        ids: &["sum-of-all-but-last-tile-of-16", "sum-of-all-but-last-tile-of-32"],
        make: || {
            made(backward(short_attention()), |kernel| {
                let (delta, lse) = saved(kernel);
                let mut p = normalised(&kernel.weights().s, &lse);
                p.slice_axis_mut(Along(2), (16..).into()).fill(0.0);
                let mut all = kernel.gradients(&p, &delta, &|pair| kernel.slope(pair));
                all.remove("dq");
                all
            })
        },
    },
    Bug {
        story: "dbias is that of the last batch element",
        ids: &["sum-of-last-batch-element-alone"],
        make: || {
            made(backward(short_attention().bias(1, 4)), |kernel| {
                let (delta, lse) = saved(kernel);
                let mut p = normalised(&kernel.weights().s, &lse);
                p.index_axis_mut(Along(0), 0).fill(0.0);
                alone(kernel.gradients(&p, &delta, &|pair| kernel.slope(pair)), "dbias")
            })
        },
    },
    Bug {
        story: "dbias is multiplied by the scale",
        ids: &["factor"],
        make: || {
            made(backward(short_attention().bias(2, 4)), |kernel| {
                let all = kernel.backward();
                [("dbias".to_string(), all["dbias"].mapv(|x| 0.25 * x))].into()
            })
        },
    },
    Bug {
        story: "sinks have no gradient",
        ids: &["zero", "no-gradient-of-sinks"],
        make: || {
            made(backward(short_attention().sinks()), |_| {
                [("dsinks".to_string(), ArrayD::zeros(vec![4]))].into()
            })
        },
    },
    Bug {
        story: "dsinks has the other sign",
        ids: &["factor"],
        make: || {
            made(backward(short_attention().sinks()), |kernel| {
                [("dsinks".to_string(), -&kernel.backward()["dsinks"])].into()
            })
        },
    },
    Bug {
        story: "dsinks is that of the first batch element",
        ids: &["sum-of-first-batch-element-alone"],
        make: || {
            made(backward(short_attention().sinks()), |kernel| {
                let (mut delta, lse) = saved(kernel);
                delta.index_axis_mut(Along(0), 1).fill(0.0);
                [("dsinks".to_string(), kernel.dsinks(&lse, &delta))].into()
            })
        },
    },
    Bug {
        story: "dk and dv are exchanged",
        ids: &["copy"],
        make: || {
            made(backward(short_attention()), |kernel| {
                let own = kernel.backward();
                [("dk".to_string(), own["dv"].clone()), ("dv".to_string(), own["dk"].clone())]
                    .into()
            })
        },
    },
    Bug {
        story: "out.sum().backward(): dout is taken for 1",
        ids: &["dout-taken-for-one"],
        make: || {
            made(backward(short_attention()), |kernel| {
                kernel.x.get_mut("dout").unwrap().fill(1.0);
                kernel.backward()
            })
        },
    },
    Bug {
        story: "attention_lse: dsinks has the other sign",
        ids: &["factor"],
        make: || {
            let bench = backward(AttentionLse::new(SHORT).mask(Mask::causal()).sinks());
            let mut got = bench.right();
            let x = -got["dsinks"].numbers("dsinks").unwrap();
            got.insert("dsinks".to_string(), Tensor::store(&x, Stored::Float(Dtype::F32)));
            (bench, got)
        },
    },
    Bug {
        story: "the second order drops the cotangent of dv",
        ids: &["ddv-dropped"],
        make: || {
            of_other(ask(short_attention(), Pass::DoubleBackward, Dtype::F32), |_, x| {
                x.remove("ddv");
            })
        },
    },
];

/// The gradients of the last head of each group alone.
fn dout_of_last(kernel: &mut Kernel<'_>) -> Values {
    let dlse = kernel.x.get_mut("dlse").unwrap();
    for h in [0, 2] {
        dlse.index_axis_mut(Along(1), h).fill(0.0);
    }
    dout_of(kernel, |h| (h % 2 == 1).then_some(h))
}
