//! The gradients of <ddq, dq> + <ddk, dk> + … + ddscale dσ + <cot_o, o> + <cot_final_state, H_n>.
//!
//! The second derivative is symmetric, so these are how the backward pass moves when its inputs
//! move along the cotangents of their gradients, and dout and dfinal_state along cot_o and
//! cot_final_state. By the cotangents themselves the gradients are how the outputs move. Dual
//! numbers carry both along; what comes out is
//!
//! ```text
//! (R11) Ḣ_t     = e^{g_t} (Ḣ_{t−1} + ddg_t H_{t−1}) + ddk_tᵀ v_t + k_tᵀ ddv_t
//! (R12) gdout_t = σ (ddq_t H_t + q_t Ḣ_t) + ddσ q_t H_t
//! (R13) Ḋ_t     = e^{g_{t+1}} (Ḋ_{t+1} + ddg_{t+1} D_{t+1})
//!                 + Σ_h (σ ddq_tᵀ dout_t + σ q_tᵀ cot_o_t + ddσ q_tᵀ dout_t)
//! (R14) gq_t    = σ (cot_o_t H_tᵀ + dout_t Ḣ_tᵀ) + ddσ dout_t H_tᵀ
//! (R15) gk_t    = ddv_t D_tᵀ + v_t Ḋ_tᵀ
//! (R16) gv_t    = ddk_t D_t + k_t Ḋ_t
//! (R17) gg_t    = e^{g_t} (ddg_t <D_t, H_{t−1}> + <Ḋ_t, H_{t−1}> + <D_t, Ḣ_{t−1}>)
//! (R18) gH_0    = e^{g_1} (Ḋ_1 + ddg_1 D_1)
//! (R19) gσ      = Σ_t (q_t H_t · cot_o_t + (ddq_t H_t + q_t Ḣ_t) · dout_t)
//! ```

use super::backward::backward_scaled;
use super::forward::forward_scaled;
use super::{Cotangents, Inputs, SecondCotangents, SecondGradients};
use crate::scalar::{Dual, Real};
use crate::tensor::{tangent_of, with_tangent, with_tangent_if_any};
use etalon_problem::{Error, LinearAttention, Pass};

/// The gradients of a loss of the gradients (and of the outputs) by everything they come from.
pub fn double_backward<T: Real>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    inputs.check(problem, Pass::DoubleBackward, &cotangents.shapes())?;
    inputs.check(problem, Pass::DoubleBackward, &second.shapes())?;
    let scale = T::from_f64(problem.scale);
    let scale = Dual::new(scale, second.ddscale.unwrap_or(T::ZERO));
    let q = with_tangent("q", &inputs.q, second.ddq.as_ref())?;
    let k = with_tangent("k", &inputs.k, second.ddk.as_ref())?;
    let v = with_tangent("v", &inputs.v, second.ddv.as_ref())?;
    let g_gamma =
        with_tangent_if_any("g_gamma", inputs.g_gamma.as_ref(), second.ddg_gamma.as_ref())?;
    let g = with_tangent_if_any("g", inputs.g.as_ref(), second.ddg.as_ref())?;
    let (value, motion) = (inputs.initial_state.as_ref(), second.ddinitial_state.as_ref());
    let initial_state = with_tangent_if_any("initial_state", value, motion)?;
    let inputs = Inputs {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        g_gamma: g_gamma.as_ref().map(|x| x.view()),
        g: g.as_ref().map(|x| x.view()),
        initial_state: initial_state.as_ref().map(|x| x.view()),
    };
    let outputs = forward_scaled(problem, scale, &inputs)?;

    let dout = with_tangent("dout", &cotangents.dout, second.cot_o.as_ref())?;
    let (value, motion) = (cotangents.dfinal_state.as_ref(), second.cot_final_state.as_ref());
    let dfinal_state = with_tangent_if_any("dfinal_state", value, motion)?;
    let cotangents =
        Cotangents { dout: dout.view(), dfinal_state: dfinal_state.as_ref().map(|x| x.view()) };
    let gradients = backward_scaled(problem, scale, &inputs, &cotangents)?;
    let some = |x: Option<_>, name| x.map(|x| tangent_of(name, x)).transpose();
    Ok(SecondGradients {
        gq: tangent_of("gq", gradients.dq)?,
        gk: tangent_of("gk", gradients.dk)?,
        gv: tangent_of("gv", gradients.dv)?,
        gg_gamma: gradients.dg_gamma.map(|x| tangent_of("gg_gamma", x)).transpose()?,
        gg: gradients.dg.map(|x| tangent_of("gg", x)).transpose()?,
        ginitial_state: some(gradients.dinitial_state, "ginitial_state")?,
        gscale: gradients.dscale.tangent,
        gdout: tangent_of("gdout", outputs.o)?,
        gdfinal_state: some(outputs.final_state, "gdfinal_state")?,
    })
}

impl<T> SecondCotangents<'_, T> {
    fn shapes(&self) -> [(&'static str, Option<&[usize]>); 8] {
        [
            ("ddq", self.ddq.as_ref().map(|x| x.shape())),
            ("ddk", self.ddk.as_ref().map(|x| x.shape())),
            ("ddv", self.ddv.as_ref().map(|x| x.shape())),
            ("ddg_gamma", self.ddg_gamma.as_ref().map(|x| x.shape())),
            ("ddg", self.ddg.as_ref().map(|x| x.shape())),
            ("ddinitial_state", self.ddinitial_state.as_ref().map(|x| x.shape())),
            ("cot_o", self.cot_o.as_ref().map(|x| x.shape())),
            ("cot_final_state", self.cot_final_state.as_ref().map(|x| x.shape())),
        ]
    }
}
