//! The passes of a problem, timed through the door of the tier: into memory that is kept, with a
//! workspace that is kept.

use super::timing::{Bandwidth, Bench, Subject};
use crate::outcome::Failure;
use etalon_conformance::generate::Stream;
use etalon_conformance::tensor::{Stored, Tensor, Tensors, views_mut};
use etalon_problem::{Decay, Dtype, Error, LinearAttention, Operand, Pass, Problem, Role, Views};
use etalon_simd::{Mode, Options, Workspace, linear_attention, probe, run_in};
use ndarray::{ArrayD, IxDyn};

impl Bench<'_> {
    /// Times those passes of a problem that are wanted; with the first length also a step.
    pub fn problem(&mut self, problem: &Problem, mask: &str) -> Result<(), Failure> {
        problem.check()?;
        let subject = subject(problem, mask);
        let first = self.arguments.length.first() == Some(&subject.length);
        for &pass in problem.algorithm().passes() {
            if self.wants(pass) && (pass != Pass::Step || first) {
                self.pass(problem, pass, &subject)?;
            }
        }
        Ok(())
    }

    fn pass(&mut self, problem: &Problem, pass: Pass, subject: &Subject) -> Result<(), Failure> {
        let (dtype, operands) = (self.arguments.dtype, problem.operands(pass));
        let mut inputs = made(&operands, dtype, |x| is_given(problem, x));
        inputs.extend(self.saved(problem, &operands, &inputs)?);
        // A step works in place, so its states have values before the first.
        let mut outputs = made(&operands, dtype, |x| x.role == Role::Output);
        let only_gradient =
            |name: &str| operands.iter().any(|x| x.name == name && x.role == Role::OptionalSaved);
        let (workspace, before) = (Workspace::new(), self.figures.len());
        let flops = flops(problem, pass, &self.options)?;
        self.add(subject, (pass, flops), &mut |options| {
            let with_gradient = options.mode == Mode::ForwardGradient;
            let read = inputs.iter().filter(|(name, _)| with_gradient || !only_gradient(name));
            let views = read.map(|(name, x)| Ok((name, x.view(name)?)));
            let views = views.collect::<Result<Vec<_>, Error>>()?;
            let views = views.into_iter().fold(Views::new(), |all, (name, x)| all.with(name, x));
            run_in(&workspace, problem, pass, &views, &mut views_mut(&mut outputs)?, options)
        })?;
        if pass == Pass::Step {
            let bytes = outputs["final_state"].len() * size_of::<f32>();
            for figure in &mut self.figures[before..] {
                let states = 2.0 * bytes as f64 / figure.times.median_ns.max(1) as f64;
                let memory = probe::update_gbps(self.options.level, bytes);
                figure.gigabytes = Some(Bandwidth { states, memory });
            }
        }
        Ok(())
    }

    /// What the forward pass saves for a pass.
    fn saved(
        &self,
        problem: &Problem,
        operands: &[Operand],
        inputs: &Tensors,
    ) -> Result<Tensors, Error> {
        let is_saved = |x: &Operand| matches!(x.role, Role::Saved | Role::OptionalSaved);
        let mut saved = made(operands, self.arguments.dtype, is_saved);
        if !saved.is_empty() {
            let forward = problem.operands(Pass::Forward);
            let own = |name: &str| forward.iter().any(|x| x.name == name && x.role.is_given());
            let mut views = Views::new();
            for (name, x) in inputs.iter().filter(|(name, _)| own(name)) {
                views = views.with(name, x.view(name)?);
            }
            let (workspace, places) = (Workspace::new(), &mut views_mut(&mut saved)?);
            run_in(&workspace, problem, Pass::Forward, &views, places, &self.options)?;
        }
        Ok(saved)
    }
}

/// Tensors of a pass, of bell-shaped numbers; log-decays between 0 and −0.1.
fn made(operands: &[Operand], dtype: Dtype, which: impl Fn(&Operand) -> bool) -> Tensors {
    let tensor = |x: &Operand| {
        let (stream, mut next) = (Stream::new(0, x.name), 0);
        let decay = matches!(x.primal, "g" | "g_gamma");
        let values = ArrayD::from_shape_simple_fn(IxDyn(&x.shape), || {
            next += 1;
            if decay { -0.1 * stream.uniform(next) } else { stream.normal(next) }
        });
        (x.name.to_string(), Tensor::store(&values, Stored::of(x.precision, dtype)))
    };
    operands.iter().filter(|x| which(x)).map(tensor).collect()
}

/// Whether a pass is timed with an operand: with every input and needed cotangent, and of the optional
/// cotangents with those that belong to inputs; with linear attention's also that of o.
fn is_given(problem: &Problem, operand: &Operand) -> bool {
    let linear = matches!(problem, Problem::LinearAttention(_));
    let families = problem.families();
    let family = families.iter().find(|family| family.name == operand.primal);
    let of_input = family.is_some_and(|family| family.input && family.value.is_none());
    match operand.role {
        Role::Input => operand.becomes.is_none(),
        Role::Cotangent => true,
        Role::OptionalCotangent => of_input || linear && operand.name == "cot_o",
        _ => false,
    }
}

fn subject(problem: &Problem, mask: &str) -> Subject {
    let algorithm = problem.algorithm().name();
    let (extents, mask) = match problem {
        Problem::LinearAttention(problem) => {
            let e = &problem.extents;
            let mask = match problem.decay {
                Decay::None => "no decay",
                Decay::PerHead => "decay per head",
                Decay::PerToken => "decay per token",
            };
            ([e.batch, e.query_heads, e.key_heads, e.tokens, e.dim], mask)
        }
        other => {
            let extents = other.scores().map(|scores| scores.extents);
            let extents = extents.map(|e| [e.batch, e.query_heads, e.key_heads, e.queries, e.dim]);
            (extents.unwrap_or_default(), mask)
        }
    };
    let [batch, heads, key_heads, length, dim] = extents;
    Subject { algorithm, mask: mask.to_string(), batch, heads, key_heads, length, dim }
}

/// The flops of the products of a pass: what a kernel that wastes nothing computes.
fn flops(problem: &Problem, pass: Pass, options: &Options) -> Result<u64, Error> {
    let scores = match problem {
        Problem::LinearAttention(problem) => return linear_flops(problem, pass, options),
        other => other.scores(),
    };
    let product = scores.map_or(0, |x| 2 * x.visible_pairs() * x.extents.dim as u64);
    let with_values = matches!(problem, Problem::Attention(_));
    let products = match (pass, with_values) {
        (Pass::Forward, true) => 2,          // q·k and p·v
        (Pass::Backward, true) => 5,         // q·k, dout·v, and those for dq, dk and dv
        (Pass::DoubleBackward, true) => 19, // the least known in O(N) memory: 11 by rows, 8 by columns
        (_, true) => 5,                     // q·k, ddq·k, q·ddk, and those of v and ddv
        (Pass::Forward, false) => 1,        // q·k
        (Pass::Backward, false) => 3,       // q·k and those for dq and dk
        (Pass::DoubleBackward, false) => 13, // 3 for the tangents of lse, 5 by rows, 5 by columns
        (_, false) => 3,                    // q·k, ddq·k and q·ddk
    };
    Ok(products * product)
}

fn linear_flops(problem: &LinearAttention, pass: Pass, options: &Options) -> Result<u64, Error> {
    let x = &problem.extents;
    let [batch, heads, d, e] = [x.batch, x.query_heads, x.dim, problem.value_dim].map(|n| n as u64);
    if pass == Pass::Step {
        // q·H for every query head, and the two operations of kᵀ v for every key head.
        return Ok(2 * (heads + x.key_heads as u64) * batch * d * e);
    }
    let plan = linear_attention::plan::<f32>(problem, Pass::Forward, options)?;
    let chunk = plan.blocking.queries.min(x.tokens) as u64;
    let tokens = batch * heads * x.tokens as u64;
    let forward = tokens * (4 * d * e + chunk * (d + e));
    Ok(match pass {
        Pass::Forward => forward,
        Pass::Backward => forward * 5 / 2,
        // Fifteen products within a chunk, eighteen with states; of the former eight with D.
        _ => tokens * (36 * d * e + chunk * (8 * d + 7 * e)),
    })
}
