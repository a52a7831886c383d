//! The passes of attention and attention_lse.

use super::timing::{Bench, Subject, made};
use super::tune::Run;
use crate::outcome::Failure;
use etalon_problem::{Algorithm, Attention, AttentionLse, Pass, Scores};
use etalon_simd::{Element, Mode, Options, attention, attention_lse};
use ndarray::Array4;

fn subject(algorithm: Algorithm, scores: &Scores, mask: &str) -> Subject {
    let e = &scores.extents;
    Subject {
        algorithm: algorithm.name(),
        mask: mask.to_string(),
        batch: e.batch,
        heads: e.query_heads,
        key_heads: e.key_heads,
        length: e.queries,
        dim: e.dim,
    }
}

/// The flops of one product over all visible pairs.
fn product(scores: &Scores) -> u64 {
    2 * scores.visible_pairs() * scores.extents.dim as u64
}

impl Bench<'_> {
    /// Times the passes of attention.
    pub fn attention<T: Element>(
        &mut self,
        problem: &Attention,
        mask: &str,
    ) -> Result<(), Failure> {
        problem.check()?;
        let scores = &problem.scores;
        let [q, k, ddq, ddk] = operands::<T>(scores);
        let [v, ddv] = ["v", "ddv"].map(|name| made::<T, _>(name, problem.v_shape()));
        let [bias, ddbias] = biases::<T>(scores);
        let dout = made::<T, _>("dout", problem.o_shape());
        let inputs = attention::Inputs::new(q.view(), k.view(), v.view());
        let inputs = attention::Inputs { bias: bias.as_ref().map(|bias| bias.view()), ..inputs };
        let cotangents = attention::Cotangents::new(dout.view());
        let second = attention::SecondCotangents {
            ddq: Some(ddq.view()),
            ddk: Some(ddk.view()),
            ddv: Some(ddv.view()),
            ddbias: ddbias.as_ref().map(|bias| bias.view()),
            ..Default::default()
        };
        let tangents = attention::Tangents {
            tq: second.ddq,
            tk: second.ddk,
            tv: second.ddv,
            tbias: second.ddbias,
            ..Default::default()
        };
        let out = attention::forward(problem, &inputs, &self.options)?;
        let subject = subject(Algorithm::Attention, scores, mask);
        let product = product(scores);
        let mut add = |(pass, products), run: &mut Run<'_>| {
            self.add(&subject, (pass, products * product), run)
        };
        // q·k and p·v.
        add((Pass::Forward, 2), &mut |options| {
            attention::forward(problem, &inputs, options).map(drop)
        })?;
        // q·k, dout·v, and the three products for dq, dk and dv.
        add((Pass::Backward, 5), &mut |options| {
            attention::backward(problem, &inputs, &out, &cotangents, options).map(drop)
        })?;
        // The least that is known in O(N) memory: 11 by rows, 8 by columns.
        add((Pass::DoubleBackward, 19), &mut |options| {
            attention::double_backward(problem, &inputs, &out, &cotangents, &second, options)
                .map(drop)
        })?;
        // q·k, ddq·k, q·ddk, and the products of v and ddv.
        add((Pass::Jvp, 5), &mut |options| {
            attention::jvp(problem, &inputs, &out, &tangents, options).map(drop)
        })
    }

    /// Times the passes of attention_lse.
    pub fn attention_lse<T: Element>(
        &mut self,
        problem: &AttentionLse,
        mask: &str,
    ) -> Result<(), Failure> {
        problem.check()?;
        let scores = &problem.scores;
        let [q, k, ddq, ddk] = operands::<T>(scores);
        let [bias, ddbias] = biases::<T>(scores);
        let dlse = made::<f32, _>("dlse", scores.row_shape());
        let inputs = attention_lse::Inputs::new(q.view(), k.view());
        let inputs =
            attention_lse::Inputs { bias: bias.as_ref().map(|bias| bias.view()), ..inputs };
        let cotangents = attention_lse::Cotangents { dlse: dlse.view() };
        let second = attention_lse::SecondCotangents {
            ddq: Some(ddq.view()),
            ddk: Some(ddk.view()),
            ddbias: ddbias.as_ref().map(|bias| bias.view()),
            ..Default::default()
        };
        let tangents = attention_lse::Tangents {
            tq: second.ddq,
            tk: second.ddk,
            tbias: second.ddbias,
            ..Default::default()
        };
        // The mode of the forward pass decides what it leaves to the backward pass.
        let gradient = self.arguments.mode.contains(&Mode::ForwardGradient);
        let mode = if gradient { Mode::ForwardGradient } else { Mode::Auto };
        let ready = attention_lse::forward(problem, &inputs, &Options { mode, ..self.options })?;
        let out = attention_lse::Output { lse: ready.lse.clone(), gradient: None };
        let subject = subject(Algorithm::AttentionLse, scores, mask);
        let product = product(scores);
        let mut add = |(pass, products), run: &mut Run<'_>| {
            self.add(&subject, (pass, products * product), run)
        };
        // q·k.
        add((Pass::Forward, 1), &mut |options| {
            attention_lse::forward(problem, &inputs, options).map(drop)
        })?;
        // q·k and the products for dq and dk.
        add((Pass::Backward, 3), &mut |options| {
            let out = if options.mode == Mode::ForwardGradient { &ready } else { &out };
            attention_lse::backward(problem, &inputs, out, &cotangents, options).map(drop)
        })?;
        // 3 for the tangents of lse, 5 by rows, 5 by columns.
        add((Pass::DoubleBackward, 13), &mut |options| {
            attention_lse::double_backward(problem, &inputs, &out, &cotangents, &second, options)
                .map(drop)
        })?;
        // q·k, ddq·k and q·ddk.
        add((Pass::Jvp, 3), &mut |options| {
            attention_lse::jvp(problem, &inputs, &out, &tangents, options).map(drop)
        })
    }
}

/// q and k, and how they move.
fn operands<T: Element>(scores: &Scores) -> [Array4<T>; 4] {
    let (q, k) = (scores.q_shape(), scores.k_shape());
    [("q", q), ("k", k), ("ddq", q), ("ddk", k)].map(|(name, shape)| made(name, shape))
}

/// A bias and its tangent, where the problem has one.
fn biases<T: Element>(scores: &Scores) -> [Option<Array4<T>>; 2] {
    ["bias", "ddbias"].map(|name| scores.bias_shape().map(|shape| made(name, shape)))
}
