//! Lazy attention.

use super::Bug;
use super::kernel::{ask, of, visible, with};
use crate::bench::{Bench, SHORT};
use etalon_conformance::tensor::{Stored, Tensor, Tensors, Values};
use etalon_problem::{Dtype, LazyAttention, Mask, Pass, Problem};
use ndarray::{ArrayD, Axis as Along, IxDyn};

fn lazy() -> LazyAttention {
    LazyAttention::new(SHORT).bias(8).mask(Mask::causal())
}

/// With a τ of each head that leaves some pairs active.
fn bench(pass: Pass) -> Bench {
    let mut bench = ask(lazy(), pass, Dtype::F32);
    let tau = ArrayD::from_shape_vec(vec![4], vec![-0.9, -0.7, -1.2, -0.5]).unwrap();
    bench.inputs.insert("tau".into(), Tensor::store(&tau, Stored::Float(Dtype::F32)));
    bench
}

/// A kernel's outputs, by the bias of a head and distance, by what it adds to a weight of a row that sees so many
/// keys, and by the key that a pair may see.
fn made(
    bias: impl Fn(&Values, usize, i64) -> f64,
    offset: impl Fn(f64, usize, usize) -> f64,
    sees: impl Fn(usize, usize) -> bool,
) -> (Bench, Tensors) {
    let bench = bench(Pass::Forward);
    let (x, scores) = (bench.values(), bench.problem.scores().unwrap());
    let (q, k, v, tau) = (&x["q"], &x["k"], &x["v"], &x["tau"]);
    let (mut o, mut lse) =
        (ArrayD::<f64>::zeros(q.raw_dim()), ArrayD::<f64>::zeros(IxDyn(&q.shape()[..3])));
    for (at, lse) in lse.indexed_iter_mut() {
        let [b, h, i] = [at[0], at[1], at[2]];
        let keys: Vec<usize> =
            (0..SHORT.keys).filter(|&j| visible(scores, [b, h, i, j]) && sees(i, j)).collect();
        let s: Vec<f64> = keys
            .iter()
            .map(|&j| {
                let dot: f64 = (0..16).map(|c| q[[b, h, i, c]] * k[[b, h / 2, j, c]]).sum();
                0.25 * dot + bias(&x, h, i as i64 + 4 - j as i64)
            })
            .collect();
        *lse = s.iter().map(|s| s.exp()).sum::<f64>().ln();
        for (&j, s) in keys.iter().zip(&s) {
            let e = ((s - *lse).exp() + offset(tau[[h]], i, keys.len())).max(0.0);
            (0..16).for_each(|c| o[[b, h, i, c]] += e * v[[b, h / 2, j, c]]);
        }
    }
    let got = with(&bench, [("o".to_string(), o), ("lse".to_string(), lse)].into());
    (bench, got)
}

/// The bias of a distance below so many.
fn within(x: &Values, h: usize, d: i64, reach: i64) -> f64 {
    if (0..reach).contains(&d) { x["bias"][[h, d as usize]] } else { 0.0 }
}

fn right_offset(tau: f64, _: usize, n: usize) -> f64 {
    tau / n as f64
}

/// The gradients of other inputs, of some outputs.
fn other(names: &[&str], change: impl FnOnce(&mut Problem, &mut Values)) -> (Bench, Tensors) {
    let bench = bench(Pass::Backward);
    let all = of(&bench, change);
    let mut got = bench.right();
    got.extend(
        all.into_iter().filter(|(name, _)| names.is_empty() || names.contains(&name.as_str())),
    );
    (bench, got)
}

pub const BUGS: &[Bug] = &[
    Bug {
        story: "the last column of the bias is ignored",
        ids: &["bias-reach-one-less", "last-column-ignored"],
        make: || made(|x, h, d| within(x, h, d, 7), right_offset, |_, _| true),
    },
    Bug {
        story: "keys beyond the reach of the bias are not attended to",
        ids: &["bias-reach-as-mask", "reach-is-a-mask"],
        make: || made(|x, h, d| within(x, h, d, 8), right_offset, |i, j| i + 4 < j + 8),
    },
    Bug {
        story: "beyond its reach the bias stays at its last value",
        ids: &["bias-clamped"],
        make: || {
            made(
                |x, h, d| if d < 0 { 0.0 } else { x["bias"][[h, d.min(7) as usize]] },
                right_offset,
                |_, _| true,
            )
        },
    },
    Bug {
        story: "distances begin with 1",
        ids: &["bias-one-later"],
        make: || made(|x, h, d| within(x, h, d - 1, 8), right_offset, |_, _| true),
    },
    Bug {
        story: "distances are counted from the first query and key",
        ids: &["bias-other-end", "distance-from-top-left"],
        make: || made(|x, h, d| within(x, h, d - 4, 8), right_offset, |_, _| true),
    },
    Bug {
        story: "n is the number of the row",
        ids: &["row-number-as-count"],
        make: || made(|x, h, d| within(x, h, d, 8), |tau, i, _| tau / (i + 1) as f64, |_, _| true),
    },
    Bug {
        story: "n is the length of the sequence",
        ids: &["length-as-count"],
        make: || made(|x, h, d| within(x, h, d, 8), |tau, _, _| tau / 25.0, |_, _| true),
    },
    Bug {
        story: "τ is not divided by n",
        ids: &["zero"],
        make: || made(|x, h, d| within(x, h, d, 8), |tau, _, _| tau, |_, _| true),
    },
    Bug {
        story: "τ has the other sign",
        ids: &["tau-negated"],
        make: || made(|x, h, d| within(x, h, d, 8), |tau, _, n| -tau / n as f64, |_, _| true),
    },
    Bug {
        story: "τ of the first head for all",
        ids: &["tau-of-first-head"],
        make: || {
            let first = -0.9f32 as f64;
            made(|x, h, d| within(x, h, d, 8), move |_, _, n| first / n as f64, |_, _| true)
        },
    },
    Bug {
        story: "τ is ignored: softmax attention",
        ids: &["tau-absent"],
        make: || made(|x, h, d| within(x, h, d, 8), |_, _, _| 0.0, |_, _| true),
    },
    Bug {
        story: "dout is read with the stride of q: only the first head is trained",
        ids: &["dout-of-first-head-alone", "zero"],
        make: || {
            other(&[], |_, x| {
                x.get_mut("dout").unwrap().slice_axis_mut(Along(1), (1..).into()).fill(0.0);
            })
        },
    },
    Bug {
        story: "dbias is multiplied by the scale",
        ids: &["factor", "dbias-scaled"],
        make: || {
            let bench = bench(Pass::Backward);
            let x = bench.right()["dbias"].numbers("dbias").unwrap().mapv(|x| 0.25 * x);
            let got = with(&bench, [("dbias".to_string(), x)].into());
            (bench, got)
        },
    },
    Bug {
        story: "dtau is that of the last batch element",
        ids: &["sum-of-last-batch-element-alone"],
        make: || {
            other(&["dtau"], |_, x| {
                x.get_mut("dout").unwrap().index_axis_mut(Along(0), 0).fill(0.0);
                x.get_mut("dlse").unwrap().index_axis_mut(Along(0), 0).fill(0.0);
            })
        },
    },
    Bug {
        story: "rows beyond the length are not written",
        ids: &["nan"],
        make: || {
            let lengths =
                etalon_problem::Sequences::Lengths { query: vec![21, 14], key: vec![25, 25] };
            let bench = ask(lazy().sequences(lengths), Pass::Forward, Dtype::F32);
            let mut o = bench.right()["o"].numbers("o").unwrap();
            o.index_axis_mut(Along(0), 1).slice_axis_mut(Along(1), (14..).into()).fill(f64::NAN);
            let got = with(&bench, [("o".to_string(), o)].into());
            (bench, got)
        },
    },
];
