//! Linear cross-entropy.

use super::Bug;
use super::kernel::{Logits, ask, of, of_other, with};
use crate::bench::Bench;
use etalon_conformance::tensor::{Stored, Tensor, Tensors, Values};
use etalon_problem::{Dtype, LinearCrossEntropy, Pass, Problem, Reduction, TokenOutputs};
use ndarray::{Array2, ArrayD, Axis as Along, arr0};

const TOKENS: usize = 40;
const VOCAB: usize = 45;

fn loss() -> LinearCrossEntropy {
    LinearCrossEntropy {
        logit_scale: 0.25,
        ignore_index: 3,
        ..LinearCrossEntropy::new(TOKENS, 16, VOCAB)
    }
}

fn none() -> LinearCrossEntropy {
    LinearCrossEntropy {
        reduction: Reduction::None,
        outputs: TokenOutputs { lse: true, ..Default::default() },
        ..loss()
    }
}

fn weighted() -> LinearCrossEntropy {
    LinearCrossEntropy { class_weights: true, ..loss() }
}

/// With weights that are not all alike, and a cotangent.
fn bench(problem: LinearCrossEntropy, pass: Pass) -> Bench {
    let mut bench = ask(problem, pass, Dtype::F32);
    let f32 = |x: &ArrayD<f64>| Tensor::store(x, Stored::Float(Dtype::F32));
    if bench.inputs.contains_key("class_weights") {
        let weights = ArrayD::from_shape_fn(vec![VOCAB], |at| 0.5 + (at[0] % 5) as f64 / 4.0);
        bench.inputs.insert("class_weights".into(), f32(&weights));
    }
    if bench.inputs.get("dloss").is_some_and(|x| x.shape.is_empty()) {
        bench.inputs.insert("dloss".into(), f32(&arr0(1.0).into_dyn()));
    }
    bench
}

fn other(
    bench: Bench,
    change: impl FnOnce(&mut LinearCrossEntropy, &mut Values),
) -> (Bench, Tensors) {
    of_other(bench, |problem, x| match problem {
        Problem::LinearCrossEntropy(own) => change(own, x),
        _ => panic!("no cross-entropy"),
    })
}

fn both(problem: LinearCrossEntropy) -> Bench {
    bench(problem, Pass::ForwardBackward)
}

/// The gradients of logits of a mean over tokens that count.
fn gradient(x: &Logits) -> Array2<f64> {
    let z = x.raw.mapv(|x| 0.25 * x);
    let lse = x.lse(&z);
    let counted = x.targets.iter().filter(|y| **y != 3).count() as f64;
    Array2::from_shape_fn(z.dim(), |(i, v)| {
        let own = f64::from(u8::from(x.targets[i] == v));
        if x.targets[i] == 3 { 0.0 } else { ((z[[i, v]] - lse[i]).exp() - own) * 0.25 / counted }
    })
}

fn dw_of(range: std::ops::Range<usize>) -> (Bench, Tensors) {
    let bench = both(loss());
    let x = Logits::new(&bench);
    let mut da = gradient(&x);
    da.rows_mut().into_iter().enumerate().for_each(|(i, mut row)| {
        if !range.contains(&i) {
            row.fill(0.0);
        }
    });
    let got = with(&bench, [("dw".to_string(), x.dw(&da))].into());
    (bench, got)
}

pub const BUGS: &[Bug] = &[
    Bug {
        story: "the sum is returned in place of the mean",
        ids: &["reduction-sum", "factor"],
        make: || other(both(loss()), |x, _| x.reduction = Reduction::Sum),
    },
    Bug {
        story: "the mean counts ignored tokens",
        ids: &["reduction-by-all-tokens", "mean-over-ignored"],
        make: || {
            other(both(loss()), |x, _| x.reduction = Reduction::By { normaliser: TOKENS as f64 })
        },
    },
    Bug {
        story: "the loss alone is a sum: a result of one number",
        ids: &["reduction-sum", "factor"],
        make: || {
            let bench = both(loss());
            let sum = of(&bench, |problem, _| {
                let Problem::LinearCrossEntropy(x) = problem else { panic!() };
                x.reduction = Reduction::Sum;
            });
            let mut got = bench.right();
            got.insert("loss".into(), sum["loss"].clone());
            (bench, got)
        },
    },
    Bug {
        story: "ignore_index is not applied",
        ids: &["ignore-index-of-a-class"],
        make: || other(both(loss()), |x, _| x.ignore_index = -100),
    },
    Bug {
        story: "targets are shifted by the kernel",
        ids: &["targets-shifted"],
        make: || {
            other(both(loss()), |_, x| {
                let targets = x.get_mut("targets").unwrap();
                let own = targets.clone();
                *targets = ArrayD::from_shape_fn(vec![TOKENS], |at| {
                    own.get([at[0] + 1]).copied().unwrap_or(3.0)
                });
            })
        },
    },
    Bug {
        story: "label smoothing over the other classes alone",
        ids: &["label-smoothing-over-others"],
        make: || {
            other(both(LinearCrossEntropy { label_smoothing: 0.1, ..loss() }), |x, _| {
                x.label_smoothing = 0.1 * VOCAB as f64 / (VOCAB - 1) as f64;
            })
        },
    },
    Bug {
        story: "labels are not smoothed",
        ids: &["smoothing-absent"],
        make: || {
            other(both(LinearCrossEntropy { label_smoothing: 0.1, ..loss() }), |x, _| {
                x.label_smoothing = 0.0
            })
        },
    },
    Bug {
        story: "the z-loss is missing",
        ids: &["lse-square-scale-absent"],
        make: || {
            other(both(LinearCrossEntropy { lse_square_scale: 0.01, ..loss() }), |x, _| {
                x.lse_square_scale = 0.0
            })
        },
    },
    Bug {
        story: "the z-loss counts twice",
        ids: &["lse-square-scale-doubled"],
        make: || {
            other(both(LinearCrossEntropy { lse_square_scale: 0.01, ..loss() }), |x, _| {
                x.lse_square_scale = 0.02
            })
        },
    },
    Bug {
        story: "the mean divides by the number of tokens, not by their class weights",
        ids: &["reduction-by-counted", "mean-without-weights"],
        make: || {
            let bench = both(weighted());
            let counted = bench.values()["targets"].iter().filter(|x| **x != 3.0).count() as f64;
            other(bench, |x, _| x.reduction = Reduction::By { normaliser: counted })
        },
    },
    Bug {
        story: "class weights are ignored",
        ids: &["class-weights-absent"],
        make: || other(both(weighted()), |_, x| x.get_mut("class_weights").unwrap().fill(1.0)),
    },
    Bug {
        story: "the softcap is ignored",
        ids: &["softcap-absent", "softcap-ignored"],
        make: || {
            other(both(LinearCrossEntropy { softcap: Some(2.0), ..loss() }), |x, _| {
                x.softcap = None
            })
        },
    },
    Bug {
        story: "the temperature divides before the softcap",
        ids: &["temperature-before-softcap"],
        make: || {
            let problem = LinearCrossEntropy { softcap: Some(2.0), temperature: 2.0, ..loss() };
            other(both(problem), |x, _| {
                x.logit_scale /= 2.0;
                x.temperature = 1.0;
            })
        },
    },
    Bug {
        story: "the temperature is ignored",
        ids: &["temperature-absent"],
        make: || {
            other(both(LinearCrossEntropy { temperature: 2.0, ..loss() }), |x, _| {
                x.temperature = 1.0
            })
        },
    },
    Bug {
        story: "the vocabulary is filled up with classes of logit 0",
        ids: &["classes-filled-up-to-16", "padded-classes"],
        make: || {
            let bench = bench(none(), Pass::Forward);
            let x = Logits::new(&bench);
            let z = x.raw.mapv(|x| 0.25 * x);
            let lse: Vec<f64> = x.lse(&z).into_iter().map(|lse| (lse.exp() + 3.0).ln()).collect();
            let (loss, lse) = rows(&x, &z, &lse);
            let got = with(&bench, [("loss".to_string(), loss), ("lse".to_string(), lse)].into());
            (bench, got)
        },
    },
    Bug {
        story: "a shard of the vocabulary is missing in lse",
        ids: &["classes-first-half"],
        make: || {
            let bench = bench(none(), Pass::Forward);
            let x = Logits::new(&bench);
            let z = x.raw.mapv(|x| 0.25 * x);
            let half = z.slice_axis(Along(1), (..VOCAB / 2).into()).to_owned();
            let (_, lse) = rows(&x, &z, &x.lse(&half));
            let got = with(&bench, [("lse".to_string(), lse)].into());
            (bench, got)
        },
    },
    Bug {
        story: "the classes after the last whole tile are dropped",
        ids: &["classes-whole-tiles-of-16", "classes-whole-tiles-of-*", "class-tail-dropped"],
        make: || {
            let bench = bench(none(), Pass::Forward);
            let x = Logits::new(&bench);
            let z = x.raw.mapv(|x| 0.25 * x);
            let whole = z.slice_axis(Along(1), (..32).into()).to_owned();
            let (loss, lse) = rows(&x, &z, &x.lse(&whole));
            let got = with(&bench, [("loss".to_string(), loss), ("lse".to_string(), lse)].into());
            (bench, got)
        },
    },
    Bug {
        story: "dloss of each token is ignored",
        ids: &["dloss-taken-for-one"],
        make: || other(bench(none(), Pass::Backward), |_, x| x.get_mut("dloss").unwrap().fill(1.0)),
    },
    Bug {
        story: "dloss of the first token counts for all",
        ids: &["upstream-of-first"],
        make: || {
            other(bench(none(), Pass::Backward), |_, x| {
                let first = x["dloss"][[0]];
                x.get_mut("dloss").unwrap().fill(first);
            })
        },
    },
    Bug {
        story: "dw is that of the last chunk of tokens",
        ids: &["sum-of-last-chunk-of-*"],
        make: || dw_of(32..TOKENS),
    },
    Bug {
        story: "dw lacks the last chunk of tokens",
        ids: &["sum-of-all-but-last-chunk-of-*"],
        make: || dw_of(0..32),
    },
    Bug {
        story: "Σ p is dropped in the gradient",
        ids: &["zero"],
        make: || {
            let bench = both(loss());
            let x = Logits::new(&bench);
            let counted = x.targets.iter().filter(|y| **y != 3).count() as f64;
            let da = gradient(&x);
            let da = Array2::from_shape_fn(da.dim(), |(i, v)| {
                let own = x.targets[i] == v && v != 3;
                if own { -0.25 / counted } else { 0.0 }
            });
            let got =
                with(&bench, [("dh".to_string(), x.dh(&da)), ("dw".to_string(), x.dw(&da))].into());
            (bench, got)
        },
    },
    Bug {
        story: "ignored tokens have a gradient",
        ids: &[],
        make: || {
            let bench = both(loss());
            let x = Logits::new(&bench);
            let z = x.raw.mapv(|x| 0.25 * x);
            let lse = x.lse(&z);
            let counted = x.targets.iter().filter(|y| **y != 3).count() as f64;
            let right = gradient(&x);
            let da = Array2::from_shape_fn(right.dim(), |(i, v)| match x.targets[i] {
                3 => (z[[i, v]] - lse[i]).exp() * 0.25 / counted,
                _ => right[[i, v]],
            });
            let got =
                with(&bench, [("dh".to_string(), x.dh(&da)), ("dw".to_string(), x.dw(&da))].into());
            (bench, got)
        },
    },
    Bug {
        story: "the gradient has the other sign",
        ids: &["factor", "dloss-negated"],
        make: || {
            other(both(loss()), |_, x| x.get_mut("dloss").into_iter().for_each(|x| x.fill(-1.0)))
        },
    },
    Bug {
        story: "the loss is in bits",
        ids: &["factor"],
        make: || {
            let bench = bench(none(), Pass::Forward);
            let loss = bench.right()["loss"].numbers("loss").unwrap();
            let bits = loss.mapv(|x| x * std::f64::consts::LOG2_E);
            let got = with(&bench, [("loss".to_string(), bits)].into());
            (bench, got)
        },
    },
];

/// The losses and lse of tokens; those that are ignored have a loss of 0.
fn rows(x: &Logits, z: &Array2<f64>, lse: &[f64]) -> (ArrayD<f64>, ArrayD<f64>) {
    let row = |at: usize, y: usize| if y == 3 { 0.0 } else { lse[at] - z[[at, y]] };
    let loss = ArrayD::from_shape_fn(vec![TOKENS], |at| row(at[0], x.targets[at[0]]));
    (loss, ArrayD::from_shape_fn(vec![TOKENS], |at| lse[at[0]]))
}
