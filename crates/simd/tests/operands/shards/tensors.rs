//! Operands of problems of any type, and both passes over shards of them.

use crate::common::wave;
use etalon_problem::linear_cross_entropy::{Cotangents, Inputs, Output};
use etalon_problem::{Error, LinearCrossEntropy, Reduction, TokenOutputs};
use etalon_simd::linear_cross_entropy::shard::{
    Dh, Partial, Shard, backward_shard, combine, combine_dh, forward_shard, output,
};
use etalon_simd::{Element, Options, linear_cross_entropy};
use ndarray::{Array1, Array2, Axis, arr0, concatenate, s};
use std::ops::Range;

/// All outputs and every option, but a cap: it would make −∞ finite.
pub fn everything(tokens: usize, dim: usize, vocab: usize) -> LinearCrossEntropy {
    let outputs = TokenOutputs { lse: true, logprob: true, entropy: true, argmax: true };
    LinearCrossEntropy::new(tokens, dim, vocab)
        .bias()
        .class_weights()
        .token_weights()
        .temperature(0.7)
        .logit_scale(1.3)
        .label_smoothing(0.1)
        .lse_square_scale(0.01)
        .outputs(outputs)
}

/// Its operands.
#[derive(Clone)]
pub struct Operands<T> {
    pub problem: LinearCrossEntropy,
    pub h: Array2<T>,
    pub w: Array2<T>,
    pub bias: Array1<T>,
    pub targets: Array1<i64>,
    pub class_weights: Array1<f32>,
    pub token_weights: Array1<f32>,
}

impl<T: Element> Operands<T> {
    pub fn new(problem: LinearCrossEntropy) -> Self {
        let LinearCrossEntropy { tokens, dim, vocab, ignore_index, .. } = problem;
        let matrix = |rows: usize, cols: usize, speed: f32| {
            let all = wave([1, 1, rows, cols], speed);
            all.index_axis_move(Axis(0), 0).index_axis_move(Axis(0), 0)
        };
        let row = |len: usize, speed: f32| matrix(1, len, speed).index_axis_move(Axis(0), 0);
        let target = |i: usize| if i % 7 == 3 { ignore_index } else { (i * 389 % vocab) as i64 };
        Operands {
            h: matrix(tokens, dim, 0.7).mapv(T::from_f32),
            w: matrix(vocab, dim, 1.1).mapv(|x| T::from_f32(0.4 * x)),
            bias: row(vocab, 1.3).mapv(T::from_f32),
            targets: (0..tokens).map(target).collect(),
            class_weights: row(vocab, 1.7).mapv(f32::abs),
            token_weights: row(tokens, 1.9).mapv(f32::abs),
            problem,
        }
    }

    /// The inputs of a shard.
    pub fn inputs(&self, classes: Range<usize>) -> Inputs<'_, T> {
        let LinearCrossEntropy { bias, class_weights, token_weights, .. } = self.problem;
        Inputs {
            h: self.h.view(),
            w: self.w.slice(s![classes.clone(), ..]),
            bias: bias.then(|| self.bias.slice(s![classes])),
            targets: self.targets.view(),
            class_weights: class_weights.then(|| self.class_weights.view()),
            token_weights: token_weights.then(|| self.token_weights.view()),
        }
    }

    /// Runs `f` with the cotangents.
    pub fn with_cotangents<X>(&self, f: impl FnOnce(&Cotangents<'_, T>) -> X) -> X {
        let each = self.problem.reduction == Reduction::None;
        let dloss =
            if each { self.token_weights.clone().into_dyn() } else { arr0(0.7f32).into_dyn() };
        let outputs = self.problem.outputs;
        let by_token = |wanted: bool| wanted.then(|| self.token_weights.view());
        f(&Cotangents {
            dloss: Some(dloss.view()),
            dlse: by_token(outputs.lse),
            dlogprob: by_token(outputs.logprob),
            dentropy: by_token(outputs.entropy),
        })
    }
}

/// Results of all shards together.
pub type Both<T> = (Output<T>, linear_cross_entropy::Gradients<T>);

pub fn unsharded<T: Element>(x: &Operands<T>, options: &Options) -> Both<T> {
    let inputs = x.inputs(0..x.problem.vocab);
    x.with_cotangents(|cotangents| {
        linear_cross_entropy::forward_backward(&x.problem, &inputs, cotangents, options).unwrap()
    })
}

/// The totals of all shards, each between two borders.
pub fn totals<T: Element>(
    x: &Operands<T>,
    borders: &[usize],
    options: &Options,
) -> Result<Array1<Partial>, Error> {
    let ranges = borders.windows(2).map(|b| b[0]..b[1]);
    let parts = ranges.map(|classes| {
        let shard = Shard::new(&x.problem, classes.clone())?;
        Ok((classes.clone(), forward_shard(&shard, &x.inputs(classes), options)?))
    });
    let parts = parts.collect::<Result<Vec<_>, Error>>()?;
    let parts: Vec<_> =
        parts.iter().map(|(classes, rows)| (classes.clone(), rows.view())).collect();
    combine(&x.problem, &parts)
}

/// Both passes over shards between borders. All of them must agree on the output.
pub fn sharded<T: Element>(
    x: &Operands<T>,
    borders: &[usize],
    dh: Dh,
    options: &Options,
) -> Result<Both<T>, Error> {
    let totals = totals(x, borders, options)?;
    let (mut outputs, mut gradients) = (Vec::new(), Vec::new());
    for classes in borders.windows(2).map(|b| b[0]..b[1]) {
        let (shard, inputs) = (Shard::new(&x.problem, classes.clone())?, x.inputs(classes.clone()));
        outputs.push(output(&shard, &inputs, totals.view())?);
        let y = x.with_cotangents(|cotangents| {
            backward_shard(&shard, &inputs, totals.view(), cotangents, dh, options)
        })?;
        gradients.push((classes, y));
    }
    let first = outputs.remove(0);
    outputs.iter().for_each(|other| assert_same_output(other, &first, "of another rank"));
    let parts: Vec<_> =
        gradients.iter().map(|(classes, y)| (classes.clone(), y.dh.view())).collect();
    let dw: Vec<_> = gradients.iter().map(|(_, y)| y.dw.view()).collect();
    let dbias: Vec<_> =
        gradients.iter().filter_map(|(_, y)| Some(y.dbias.as_ref()?.view())).collect();
    let all = linear_cross_entropy::Gradients {
        dh: Some(combine_dh(&x.problem, &parts)?),
        dw: Some(concatenate(Axis(0), &dw).unwrap()),
        dbias: x.problem.bias.then(|| concatenate(Axis(0), &dbias).unwrap()),
    };
    Ok((first, all))
}

/// Bits, but every NaN alike.
pub fn bits(x: f32) -> u32 {
    if x.is_nan() { u32::MAX } else { x.to_bits() }
}

pub fn assert_same<'x, T: Element>(
    found: impl IntoIterator<Item = &'x T>,
    wanted: impl IntoIterator<Item = &'x T>,
    what: &str,
) {
    let all = |x: &T| bits(x.to_f32());
    let (found, wanted) = (found.into_iter().map(all), wanted.into_iter().map(all));
    assert!(found.eq(wanted), "{what}");
}

pub fn assert_same_output<T: Element>(found: &Output<T>, wanted: &Output<T>, what: &str) {
    assert_same(&found.loss, &wanted.loss, &format!("loss {what}"));
    assert_same(found.lse.iter().flatten(), wanted.lse.iter().flatten(), &format!("lse {what}"));
    let logprobs = [found, wanted].map(|x| x.logprob.iter().flatten());
    let [found_logprob, logprob] = logprobs;
    assert_same(found_logprob, logprob, &format!("logprob {what}"));
    let [found_entropy, entropy] = [found, wanted].map(|x| x.entropy.iter().flatten());
    assert_same(found_entropy, entropy, &format!("entropy {what}"));
    assert_eq!(found.argmax, wanted.argmax, "argmax {what}");
    assert_eq!(found.n_valid, wanted.n_valid, "n_valid {what}");
    assert_same([&found.normaliser], [&wanted.normaliser], &format!("normaliser {what}"));
}

/// Everything bit by bit; dh if `with_dh`.
pub fn assert_same_all<T: Element>(found: &Both<T>, wanted: &Both<T>, with_dh: bool, what: &str) {
    assert_same_output(&found.0, &wanted.0, what);
    let [(_, found), (_, wanted)] = [found, wanted];
    assert_same(found.dw.iter().flatten(), wanted.dw.iter().flatten(), &format!("dw {what}"));
    assert_same(
        found.dbias.iter().flatten(),
        wanted.dbias.iter().flatten(),
        &format!("dbias {what}"),
    );
    if with_dh {
        assert_same(found.dh.iter().flatten(), wanted.dh.iter().flatten(), &format!("dh {what}"));
    }
}
