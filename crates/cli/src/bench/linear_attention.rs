//! The passes of linear_attention.

use super::timing::{Bandwidth, Bench, Subject, made};
use crate::outcome::Failure;
use etalon_conformance::generate::Stream;
use etalon_problem::{Algorithm, Decay, LinearAttention, LinearExtents, Pass};
use etalon_simd::{Element, linear_attention, probe};
use ndarray::{Array, Dimension, ShapeBuilder};

impl Bench<'_> {
    /// Times the passes of linear_attention, and with the first length its step.
    pub fn linear_attention<T: Element>(
        &mut self,
        problem: &LinearAttention,
    ) -> Result<(), Failure> {
        problem.check()?;
        let (decay, options) = (problem.decay, self.options);
        let LinearExtents { batch, query_heads: heads, key_heads, tokens: length, dim } =
            problem.extents;
        let mask = match decay {
            Decay::None => "no decay",
            Decay::PerHead => "decay per head",
            Decay::PerToken => "decay per token",
        };
        let (algorithm, mask) = (Algorithm::LinearAttention.name(), mask.to_string());
        let subject = Subject { algorithm, mask, batch, length, dim, heads, key_heads };
        let [q, dout] = ["q", "dout"].map(|name| made::<T, _>(name, problem.q_shape()));
        let [k, v] = ["k", "v"].map(|name| made::<T, _>(name, problem.k_shape()));
        let g_gamma = (decay == Decay::PerHead).then(|| gates("g_gamma", key_heads));
        let g = (decay == Decay::PerToken).then(|| gates("g", problem.g_shape()));
        let mut inputs = linear_attention::Inputs::new(q.view(), k.view(), v.view());
        inputs.g_gamma = g_gamma.as_ref().map(|g| g.view());
        inputs.g = g.as_ref().map(|g| g.view());
        let cotangents = linear_attention::Cotangents::new(dout.view());
        let plan = linear_attention::plan::<T>(problem, Pass::Forward, &options)?;
        let chunk = plan.blocking.queries.min(length) as u64;
        let (d, e) = (dim as u64, dim as u64);
        let tokens = (batch * heads * length) as u64;
        let forward = tokens * (4 * d * e + chunk * (d + e));
        // Results go where they went before: of a long sequence, new memory would cost as much as the
        // pass.
        let mut o = linear_attention::forward(problem, &inputs, &options)?.o;
        self.add(&subject, (Pass::Forward, forward), &mut |options| {
            let out = linear_attention::OutputMut { o: o.view_mut(), final_state: None };
            linear_attention::forward_into(problem, &inputs, out, options)
        })?;
        let mut grads = linear_attention::backward(problem, &inputs, &cotangents, &options)?;
        self.add(&subject, (Pass::Backward, forward * 5 / 2), &mut |options| {
            let place = linear_attention::GradientsMut {
                dq: Some(grads.dq.view_mut()),
                dk: Some(grads.dk.view_mut()),
                dv: Some(grads.dv.view_mut()),
                dg_gamma: grads.dg_gamma.as_mut().map(|dg| dg.view_mut()),
                dg: grads.dg.as_mut().map(|dg| dg.view_mut()),
                dinitial_state: None,
                dscale: Some(&mut grads.dscale),
            };
            linear_attention::backward_into(problem, &inputs, &cotangents, place, options)
        })?;
        self.double_backward(problem, &subject, (&inputs, &cotangents), chunk)?;
        if self.arguments.length.first() == Some(&length) {
            self.step::<T>(problem, &subject)?;
        }
        Ok(())
    }

    fn double_backward<T: Element>(
        &mut self,
        problem: &LinearAttention,
        subject: &Subject,
        (inputs, cotangents): (
            &linear_attention::Inputs<'_, T>,
            &linear_attention::Cotangents<'_, T>,
        ),
        chunk: u64,
    ) -> Result<(), Failure> {
        if !self.wants(Pass::DoubleBackward) {
            return Ok(());
        }
        let [ddq, cot_o] = ["ddq", "cot_o"].map(|name| made::<T, _>(name, problem.q_shape()));
        let [ddk, ddv] = ["ddk", "ddv"].map(|name| made::<T, _>(name, problem.k_shape()));
        let heads = problem.extents.key_heads;
        let ddg_gamma = (problem.decay == Decay::PerHead).then(|| gates("ddg_gamma", heads));
        let ddg = (problem.decay == Decay::PerToken).then(|| gates("ddg", problem.g_shape()));
        let second = linear_attention::SecondCotangents {
            ddq: Some(ddq.view()),
            ddk: Some(ddk.view()),
            ddv: Some(ddv.view()),
            ddg_gamma: ddg_gamma.as_ref().map(|ddg| ddg.view()),
            ddg: ddg.as_ref().map(|ddg| ddg.view()),
            cot_o: Some(cot_o.view()),
            ..Default::default()
        };
        let (d, e) = (problem.extents.dim as u64, problem.value_dim as u64);
        let tokens = (subject.batch * subject.heads * subject.length) as u64;
        // Fifteen products within a chunk, eighteen with states; of the former eight with D.
        let flops = tokens * (36 * d * e + chunk * (8 * d + 7 * e));
        let mut grads =
            linear_attention::double_backward(problem, inputs, cotangents, &second, &self.options)?;
        self.add(subject, (Pass::DoubleBackward, flops), &mut |options| {
            let place = linear_attention::SecondGradientsMut {
                gq: Some(grads.gq.view_mut()),
                gk: Some(grads.gk.view_mut()),
                gv: Some(grads.gv.view_mut()),
                gg_gamma: grads.gg_gamma.as_mut().map(|gg| gg.view_mut()),
                gg: grads.gg.as_mut().map(|gg| gg.view_mut()),
                gscale: Some(&mut grads.gscale),
                gdout: Some(grads.gdout.view_mut()),
                ..Default::default()
            };
            linear_attention::double_backward_into(
                problem, inputs, cotangents, &second, place, options,
            )
        })
    }

    fn step<T: Element>(
        &mut self,
        problem: &LinearAttention,
        subject: &Subject,
    ) -> Result<(), Failure> {
        let e = &problem.extents;
        let [q, k] = [("q", e.query_heads), ("k", e.key_heads)]
            .map(|(name, heads)| made::<T, _>(name, [e.batch, heads, e.dim]));
        let v = made::<T, _>("v", [e.batch, e.key_heads, problem.value_dim]);
        let state = [e.batch, e.key_heads, e.dim, problem.value_dim];
        let mut state = made::<f32, _>("initial_state", state);
        let mut o = made::<T, _>("o", [e.batch, e.query_heads, problem.value_dim]);
        // Below 1, or the state would grow from step to step.
        let g_gamma = (problem.decay == Decay::PerHead).then(|| gates("g_gamma", e.key_heads));
        let g = (problem.decay == Decay::PerToken).then(|| gates("g", [e.batch, e.key_heads]));
        let inputs = linear_attention::StepInputs {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            g_gamma: g_gamma.as_ref().map(|g| g.view()),
            g: g.as_ref().map(|g| g.view()),
        };
        let before = self.figures.len();
        // q·H for every query head, and the two operations of kᵀ v for every key head.
        let flops =
            2 * (e.query_heads + e.key_heads) as u64 * (e.batch * e.dim * problem.value_dim) as u64;
        self.add(subject, (Pass::Step, flops), &mut |options| {
            let (state, o) = (state.view_mut(), o.view_mut());
            linear_attention::step_into(problem, &inputs, state, o, options)
        })?;
        let bytes = state.len() * size_of::<f32>();
        for figure in &mut self.figures[before..] {
            let states = 2.0 * bytes as f64 / figure.times.median_ns.max(1) as f64;
            let memory = probe::update_gbps(self.options.level, bytes);
            figure.gigabytes = Some(Bandwidth { states, memory });
        }
        Ok(())
    }
}

/// Log-decays between 0 and −0.1.
fn gates<S: ShapeBuilder>(name: &str, shape: S) -> Array<f32, S::Dim>
where
    S::Dim: Dimension,
{
    let stream = Stream::new(0, name);
    let mut next = 0;
    Array::from_shape_simple_fn(shape, || {
        next += 1;
        -0.1 * stream.uniform(next) as f32
    })
}
