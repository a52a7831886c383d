//! Linear attention on CPUs: [`forward`], [`backward`], [`double_backward`] and [`step`], for f32,
//! bf16 and f16; states and decays are f32.
//!
//! Views of the operands may have any strides. Each function with the suffix `_into` writes into
//! arrays of the caller, and [`plan`] reports what a pass allocates beside them.
//!
//! ```
//! use etalon_problem::{LinearAttention, LinearExtents};
//! use etalon_simd::{Options, linear_attention};
//! use ndarray::{Array4, array};
//!
//! let extents = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: 2, dim: 1 };
//! let problem = LinearAttention::new(extents).final_state();
//! let q: Array4<f32> = array![[[[1.0], [1.0]]]]; // [batch, head, row, element]
//! let k = array![[[[1.0], [2.0]]]];
//! let v = array![[[[4.0], [8.0]]]];
//! let inputs = linear_attention::Inputs::new(q.view(), k.view(), v.view());
//! let options = Options::default();
//!
//! let out = linear_attention::forward(&problem, &inputs, &options)?;
//! assert_eq!(out.o, array![[[[4.0], [20.0]]]]); // the second query reads both keys
//! assert_eq!(out.final_state, Some(array![[[[20.0]]]]));
//!
//! let dout = array![[[[1.0], [1.0]]]];
//! let cotangents = linear_attention::Cotangents::new(dout.view());
//! let gradients = linear_attention::backward(&problem, &inputs, &cotangents, &options)?;
//! assert_eq!(gradients.dv, array![[[[2.0], [2.0]]]]);
//! # Ok::<(), etalon_problem::Error>(())
//! ```
#![doc = include_str!("../../../docs/assets/links.md")]
#![doc = include_str!("../../../docs/linear_attention.md")]
#![doc = include_str!("../../../docs/assets/katex.html")]

mod cut;
mod decays;
mod flow;
mod forward;
mod gradient;
mod named;
mod operands;
mod passes;
mod plan;
mod rows;
mod schedule;
mod scratch;
mod state;
mod step;
mod two_sided;

pub(crate) use named::run;
pub use passes::{
    backward, backward_in, backward_into, double_backward, double_backward_in,
    double_backward_into, forward, forward_in, forward_into, step, step_in, step_into,
};
pub use plan::{SharedMemory, plan, shared_memory};

use crate::Element;
use crate::element::Tensor;
use decays::{Logs, view};
use etalon_problem::Error;
use ndarray::{
    Array1, Array3, Array4, ArrayView1, ArrayView2, ArrayView3, ArrayView4, ArrayViewMut1,
    ArrayViewMut3, ArrayViewMut4, Axis, Ix4,
};
use operands::{Known, Operands, Results};

/// The inputs of linear attention, of any strides.
#[derive(Debug, Clone)]
pub struct Inputs<'a, T> {
    /// `[B, Hq, N, D]`.
    pub q: ArrayView4<'a, T>,
    /// `[B, Hk, N, D]`.
    pub k: ArrayView4<'a, T>,
    /// `[B, Hk, N, E]`.
    pub v: ArrayView4<'a, T>,
    /// A log-decay per key head `[Hk]`, where the problem decays so.
    pub g_gamma: Option<ArrayView1<'a, f32>>,
    /// A log-decay per token `[B, Hk, N]`, where the problem decays so.
    pub g: Option<ArrayView3<'a, f32>>,
    /// H_0, `[S, Hk, D, E]`, where the problem has it.
    pub initial_state: Option<ArrayView4<'a, f32>>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// Inputs without decay and initial state.
    pub fn new(q: ArrayView4<'a, T>, k: ArrayView4<'a, T>, v: ArrayView4<'a, T>) -> Self {
        Inputs { q, k, v, g_gamma: None, g: None, initial_state: None }
    }

    /// Adds a log-decay per key head.
    pub fn g_gamma(mut self, g_gamma: ArrayView1<'a, f32>) -> Self {
        self.g_gamma = Some(g_gamma);
        self
    }

    /// Adds a log-decay per token.
    pub fn g(mut self, g: ArrayView3<'a, f32>) -> Self {
        self.g = Some(g);
        self
    }

    /// Adds the states before the first tokens.
    pub fn initial_state(mut self, initial_state: ArrayView4<'a, f32>) -> Self {
        self.initial_state = Some(initial_state);
        self
    }

    /// The inputs, if they fit the problem and no log-decay is positive or NaN.
    fn operands<'s>(&'s self, known: &Known) -> Result<Operands<'s>, Error> {
        known.check(&[
            ("q", Some(self.q.shape())),
            ("k", Some(self.k.shape())),
            ("v", Some(self.v.shape())),
            ("g_gamma", self.g_gamma.as_ref().map(|x| x.shape())),
            ("g", self.g.as_ref().map(|x| x.shape())),
            ("initial_state", self.initial_state.as_ref().map(|x| x.shape())),
        ])?;
        let log_decays = Logs::new(&self.g_gamma, &self.g);
        log_decays.check(&known.sequences)?;
        Ok(Operands {
            q: [Some(self.q.view().into()), None],
            k: [Some(self.k.view().into()), None],
            v: [Some(self.v.view().into()), None],
            log_decays,
            initial: [view(&self.initial_state), None],
            ..Operands::default()
        })
    }
}

/// What linear attention returns.
#[derive(Debug, Clone, PartialEq)]
pub struct Output<T> {
    /// o of (R2), `[B, Hq, N, E]`.
    pub o: Array4<T>,
    /// H_n of (R1), `[S, Hk, D, E]`, where the problem asks for it.
    pub final_state: Option<Array4<f32>>,
}

/// Where the outputs of linear attention are written; of any strides.
#[derive(Debug)]
pub struct OutputMut<'a, T> {
    /// `[B, Hq, N, E]`.
    pub o: ArrayViewMut4<'a, T>,
    /// `[S, Hk, D, E]`, where the problem asks for it.
    pub final_state: Option<ArrayViewMut4<'a, f32>>,
}

/// Gradients of a loss by the outputs, of any strides.
#[derive(Debug, Clone)]
pub struct Cotangents<'a, T> {
    /// `[B, Hq, N, E]`.
    pub dout: ArrayView4<'a, T>,
    /// `[S, Hk, D, E]`; absent: zero.
    pub dfinal_state: Option<ArrayView4<'a, f32>>,
}

impl<'a, T> Cotangents<'a, T> {
    /// The cotangent of o alone.
    pub fn new(dout: ArrayView4<'a, T>) -> Self {
        Cotangents { dout, dfinal_state: None }
    }

    /// Adds that of the final state.
    pub fn dfinal_state(mut self, dfinal_state: ArrayView4<'a, f32>) -> Self {
        self.dfinal_state = Some(dfinal_state);
        self
    }

    /// Adds the cotangents to the operands of a pass.
    fn add_to<'s>(&'s self, known: &Known, operands: &mut Operands<'s>) -> Result<(), Error>
    where
        T: Element,
    {
        known.check(&[
            ("dout", Some(self.dout.shape())),
            ("dfinal_state", self.dfinal_state.as_ref().map(|x| x.shape())),
        ])?;
        operands.dout[0] = Some(self.dout.view().into());
        operands.last[0] = view(&self.dfinal_state);
        Ok(())
    }
}

/// Gradients of a loss by the inputs.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<T> {
    /// (R4), `[B, Hq, N, D]`.
    pub dq: Array4<T>,
    /// (R5), `[B, Hk, N, D]`.
    pub dk: Array4<T>,
    /// (R6), `[B, Hk, N, E]`.
    pub dv: Array4<T>,
    /// (R7) summed over tokens and sequences, `[Hk]`, where the problem decays per head.
    pub dg_gamma: Option<Array1<f32>>,
    /// (R7), `[B, Hk, N]`, where the problem decays per token.
    pub dg: Option<Array3<f32>>,
    /// (R8), `[S, Hk, D, E]`, where the problem has an initial state.
    pub dinitial_state: Option<Array4<f32>>,
    /// (R9).
    pub dscale: f32,
}

/// Where gradients are written; of any strides. A gradient that is not asked for is not paid for.
#[derive(Debug, Default)]
pub struct GradientsMut<'a, T> {
    /// `[B, Hq, N, D]`.
    pub dq: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, N, D]`.
    pub dk: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, N, E]`.
    pub dv: Option<ArrayViewMut4<'a, T>>,
    /// `[Hk]`.
    pub dg_gamma: Option<ArrayViewMut1<'a, f32>>,
    /// `[B, Hk, N]`.
    pub dg: Option<ArrayViewMut3<'a, f32>>,
    /// `[S, Hk, D, E]`.
    pub dinitial_state: Option<ArrayViewMut4<'a, f32>>,
    /// The gradient by the scale.
    pub dscale: Option<&'a mut f32>,
}

impl<'o, T: Element> GradientsMut<'o, T> {
    /// Where the results of a pass are written, if they fit the problem.
    fn results(self, known: &Known) -> Result<Results<'o>, Error> {
        known.check(&[
            ("dq", self.dq.as_ref().map(|x| x.shape())),
            ("dk", self.dk.as_ref().map(|x| x.shape())),
            ("dv", self.dv.as_ref().map(|x| x.shape())),
            ("dg_gamma", self.dg_gamma.as_ref().map(|x| x.shape())),
            ("dg", self.dg.as_ref().map(|x| x.shape())),
            ("dinitial_state", self.dinitial_state.as_ref().map(|x| x.shape())),
        ])?;
        Ok(Results {
            q: self.dq.map(Into::into),
            k: self.dk.map(Into::into),
            v: self.dv.map(Into::into),
            dout: None,
            g: self.dg.map(|dg| dg.insert_axis(Axis(3)).into()),
            g_gamma: self.dg_gamma,
            initial: self.dinitial_state,
            last: None,
            scale: self.dscale,
        })
    }
}

/// The cotangents of the gradients and of the outputs, of any strides. What is absent is zero.
#[derive(Debug, Clone, Default)]
pub struct SecondCotangents<'a, T> {
    /// By dq: `[B, Hq, N, D]`.
    pub ddq: Option<ArrayView4<'a, T>>,
    /// By dk: `[B, Hk, N, D]`.
    pub ddk: Option<ArrayView4<'a, T>>,
    /// By dv: `[B, Hk, N, E]`.
    pub ddv: Option<ArrayView4<'a, T>>,
    /// By dg_gamma: `[Hk]`.
    pub ddg_gamma: Option<ArrayView1<'a, f32>>,
    /// By dg: `[B, Hk, N]`. At a reset it is not read.
    pub ddg: Option<ArrayView3<'a, f32>>,
    /// By dinitial_state: `[S, Hk, D, E]`.
    pub ddinitial_state: Option<ArrayView4<'a, f32>>,
    /// By dscale.
    pub ddscale: Option<f32>,
    /// By o: `[B, Hq, N, E]`.
    pub cot_o: Option<ArrayView4<'a, T>>,
    /// By the final state: `[S, Hk, D, E]`.
    pub cot_final_state: Option<ArrayView4<'a, f32>>,
}

impl<T: Element> SecondCotangents<'_, T> {
    /// Adds the cotangents to the operands of a pass, as tangents.
    fn add_to<'s>(&'s self, known: &Known, operands: &mut Operands<'s>) -> Result<(), Error> {
        known.check(&[
            ("ddq", self.ddq.as_ref().map(|x| x.shape())),
            ("ddk", self.ddk.as_ref().map(|x| x.shape())),
            ("ddv", self.ddv.as_ref().map(|x| x.shape())),
            ("ddg_gamma", self.ddg_gamma.as_ref().map(|x| x.shape())),
            ("ddg", self.ddg.as_ref().map(|x| x.shape())),
            ("ddinitial_state", self.ddinitial_state.as_ref().map(|x| x.shape())),
            ("cot_o", self.cot_o.as_ref().map(|x| x.shape())),
            ("cot_final_state", self.cot_final_state.as_ref().map(|x| x.shape())),
        ])?;
        operands.q[1] = view(&self.ddq).map(Into::into);
        operands.k[1] = view(&self.ddk).map(Into::into);
        operands.v[1] = view(&self.ddv).map(Into::into);
        operands.dout[1] = view(&self.cot_o).map(Into::into);
        operands.log_tangents = Logs::new(&self.ddg_gamma, &self.ddg);
        operands.initial[1] = view(&self.ddinitial_state);
        operands.last[1] = view(&self.cot_final_state);
        operands.ddscale = self.ddscale.unwrap_or(0.0);
        Ok(())
    }
}

/// The gradients by everything that the backward pass reads.
#[derive(Debug, Clone, PartialEq)]
pub struct SecondGradients<T> {
    /// By q, (R14): `[B, Hq, N, D]`.
    pub gq: Array4<T>,
    /// By k, (R15): `[B, Hk, N, D]`.
    pub gk: Array4<T>,
    /// By v, (R16): `[B, Hk, N, E]`.
    pub gv: Array4<T>,
    /// By g_gamma, (R17) summed: `[Hk]`, where the problem decays per head.
    pub gg_gamma: Option<Array1<f32>>,
    /// By g, (R17): `[B, Hk, N]`, where the problem decays per token.
    pub gg: Option<Array3<f32>>,
    /// By the initial state, (R18): `[S, Hk, D, E]`, where the problem has one.
    pub ginitial_state: Option<Array4<f32>>,
    /// By the scale, (R19).
    pub gscale: f32,
    /// By dout, (R12): `[B, Hq, N, E]`.
    pub gdout: Array4<T>,
    /// By dfinal_state, (R11): `[S, Hk, D, E]`, where the problem returns the final state.
    pub gdfinal_state: Option<Array4<f32>>,
}

/// Where second gradients are written; of any strides. Products that none of them needs are left out.
#[derive(Debug, Default)]
pub struct SecondGradientsMut<'a, T> {
    /// `[B, Hq, N, D]`.
    pub gq: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, N, D]`.
    pub gk: Option<ArrayViewMut4<'a, T>>,
    /// `[B, Hk, N, E]`.
    pub gv: Option<ArrayViewMut4<'a, T>>,
    /// `[Hk]`.
    pub gg_gamma: Option<ArrayViewMut1<'a, f32>>,
    /// `[B, Hk, N]`.
    pub gg: Option<ArrayViewMut3<'a, f32>>,
    /// `[S, Hk, D, E]`.
    pub ginitial_state: Option<ArrayViewMut4<'a, f32>>,
    /// The gradient by the scale.
    pub gscale: Option<&'a mut f32>,
    /// `[B, Hq, N, E]`.
    pub gdout: Option<ArrayViewMut4<'a, T>>,
    /// `[S, Hk, D, E]`.
    pub gdfinal_state: Option<ArrayViewMut4<'a, f32>>,
}

impl<'o, T: Element> SecondGradientsMut<'o, T> {
    /// Where the results of a pass are written, if they fit the problem.
    fn results(self, known: &Known) -> Result<Results<'o>, Error> {
        known.check(&[
            ("gq", self.gq.as_ref().map(|x| x.shape())),
            ("gk", self.gk.as_ref().map(|x| x.shape())),
            ("gv", self.gv.as_ref().map(|x| x.shape())),
            ("gg_gamma", self.gg_gamma.as_ref().map(|x| x.shape())),
            ("gg", self.gg.as_ref().map(|x| x.shape())),
            ("ginitial_state", self.ginitial_state.as_ref().map(|x| x.shape())),
            ("gdout", self.gdout.as_ref().map(|x| x.shape())),
            ("gdfinal_state", self.gdfinal_state.as_ref().map(|x| x.shape())),
        ])?;
        Ok(Results {
            q: self.gq.map(Into::into),
            k: self.gk.map(Into::into),
            v: self.gv.map(Into::into),
            dout: self.gdout.map(Into::into),
            g: self.gg.map(|gg| gg.insert_axis(Axis(3)).into()),
            g_gamma: self.gg_gamma,
            initial: self.ginitial_state,
            last: self.gdfinal_state,
            scale: self.gscale,
        })
    }
}

/// What the next token of every batch element is computed from; of any strides.
#[derive(Debug, Clone)]
pub struct StepInputs<'a, T> {
    /// `[B, Hq, D]`.
    pub q: ArrayView3<'a, T>,
    /// `[B, Hk, D]`.
    pub k: ArrayView3<'a, T>,
    /// `[B, Hk, E]`.
    pub v: ArrayView3<'a, T>,
    /// A log-decay per key head `[Hk]`, where the problem decays so.
    pub g_gamma: Option<ArrayView1<'a, f32>>,
    /// The token's log-decay `[B, Hk]`, where the problem decays per token.
    pub g: Option<ArrayView2<'a, f32>>,
}

impl<T: Element> StepInputs<'_, T> {
    /// The inputs, if they fit the problem and no log-decay is positive or NaN.
    fn operands<'s>(&'s self, known: &Known, state: &[usize]) -> Result<Operands<'s>, Error> {
        known.check(&[
            ("q", Some(self.q.shape())),
            ("k", Some(self.k.shape())),
            ("v", Some(self.v.shape())),
            ("g_gamma", self.g_gamma.as_ref().map(|x| x.shape())),
            ("g", self.g.as_ref().map(|x| x.shape())),
            ("initial_state", Some(state)),
        ])?;
        let g = self.g.as_ref().map(|g| g.view().insert_axis(Axis(2)));
        let log_decays = Logs { by_head: view(&self.g_gamma), by_token: g };
        log_decays.check_step()?;
        fn token<'s, T: Element>(operand: &'s ArrayView3<'_, T>) -> [Option<Tensor<'s, Ix4>>; 2] {
            [Some(operand.view().insert_axis(Axis(2)).into()), None]
        }
        let (q, k, v) = (token(&self.q), token(&self.k), token(&self.v));
        Ok(Operands { q, k, v, log_decays, ..Operands::default() })
    }
}

/// What the next token returns.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutput<T> {
    /// o of (R2), `[B, Hq, E]`.
    pub o: Array3<T>,
    /// H_t of (R1), `[B, Hk, D, E]`.
    pub final_state: Array4<f32>,
}
