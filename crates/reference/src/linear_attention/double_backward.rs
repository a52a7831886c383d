//! By dual numbers ([`crate::second_order`]); written out, this is
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
use super::{Cotangents, Inputs, SecondCotangents, SecondGradients, step};
use crate::named::{ByName, Named, Tensors, into_named};
use crate::scalar::Real;
use crate::second_order::FirstOrder;
use etalon_problem::{Algorithm, Error, LinearAttention, Pass};

/// The gradients of <ddq, dq> + <ddk, dk> + … + ddscale dσ + <cot_o, o> + <cot_final_state, H_n> by
/// everything they come from.
pub fn double_backward<T: Real>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
) -> Result<SecondGradients<T>, Error> {
    problem.double_backward([inputs.named(), cotangents.named(), second.named()])
}

impl FirstOrder for LinearAttention {
    fn first_order<T: Real>(&self, pass: Pass, x: &ByName<'_, T>) -> Result<Tensors<T>, Error> {
        let scale = x.tensors.get("scale").and_then(|x| x.first().copied());
        let scale = scale.unwrap_or_else(|| T::from_f64(self.scale));
        match pass {
            Pass::Forward => forward_scaled(self, scale, &x.get()?).map(into_named),
            Pass::Backward => backward_scaled(self, scale, &x.get()?, &x.get()?).map(into_named),
            Pass::Step => step(self, &x.get()?).map(into_named),
            _ => Err(Algorithm::LinearAttention.no_pass(pass)),
        }
    }
}
