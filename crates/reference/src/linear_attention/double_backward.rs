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
use crate::tensor::reserve;
use etalon_problem::{Error, LinearAttention, Pass};
use ndarray::{Array, ArrayView, Dimension};

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
    let q = moving("q", &inputs.q, &second.ddq)?;
    let k = moving("k", &inputs.k, &second.ddk)?;
    let v = moving("v", &inputs.v, &second.ddv)?;
    let g_gamma = moving_option("g_gamma", &inputs.g_gamma, &second.ddg_gamma)?;
    let g = moving_option("g", &inputs.g, &second.ddg)?;
    let initial_state =
        moving_option("initial_state", &inputs.initial_state, &second.ddinitial_state)?;
    let inputs = Inputs {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        g_gamma: g_gamma.as_ref().map(|x| x.view()),
        g: g.as_ref().map(|x| x.view()),
        initial_state: initial_state.as_ref().map(|x| x.view()),
    };
    let outputs = forward_scaled(problem, scale, &inputs)?;

    let dout = moving("dout", &cotangents.dout, &second.cot_o)?;
    let dfinal_state =
        moving_cotangent("dfinal_state", &cotangents.dfinal_state, &second.cot_final_state)?;
    let cotangents =
        Cotangents { dout: dout.view(), dfinal_state: dfinal_state.as_ref().map(|x| x.view()) };
    let gradients = backward_scaled(problem, scale, &inputs, &cotangents)?;
    let some = |x: Option<_>, name| x.map(|x| tangent(name, x)).transpose();
    Ok(SecondGradients {
        gq: tangent("gq", gradients.dq)?,
        gk: tangent("gk", gradients.dk)?,
        gv: tangent("gv", gradients.dv)?,
        gg_gamma: gradients.dg_gamma.map(|x| tangent("gg_gamma", x)).transpose()?,
        gg: gradients.dg.map(|x| tangent("gg", x)).transpose()?,
        ginitial_state: some(gradients.dinitial_state, "ginitial_state")?,
        gscale: gradients.dscale.tangent,
        gdout: tangent("gdout", outputs.o)?,
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

/// x + ε ẋ, where what is absent stands still.
fn moving<T: Real, D: Dimension>(
    name: &str,
    x: &ArrayView<'_, T, D>,
    motion: &Option<ArrayView<'_, T, D>>,
) -> Result<Array<Dual<T>, D>, Error> {
    match motion {
        Some(motion) => {
            let pairs = x.iter().zip(motion);
            collect(name, x.raw_dim(), pairs.map(|(&x, &motion)| Dual::new(x, motion)))
        }
        None => collect(name, x.raw_dim(), x.iter().map(|&x| Dual::constant(x))),
    }
}

/// As [`moving`], for an operand that the problem may lack; its motion is then absent too.
fn moving_option<T: Real, D: Dimension>(
    name: &str,
    x: &Option<ArrayView<'_, T, D>>,
    motion: &Option<ArrayView<'_, T, D>>,
) -> Result<Option<Array<Dual<T>, D>>, Error> {
    x.as_ref().map(|x| moving(name, x, motion)).transpose()
}

/// As [`moving`], for a cotangent: where it is absent it is 0, and may move all the same.
fn moving_cotangent<T: Real, D: Dimension>(
    name: &str,
    x: &Option<ArrayView<'_, T, D>>,
    motion: &Option<ArrayView<'_, T, D>>,
) -> Result<Option<Array<Dual<T>, D>>, Error> {
    let from_zero = |motion: &ArrayView<'_, T, D>| {
        collect(name, motion.raw_dim(), motion.iter().map(|&motion| Dual::new(T::ZERO, motion)))
    };
    match x {
        Some(x) => moving(name, x, motion).map(Some),
        None => motion.as_ref().map(from_zero).transpose(),
    }
}

/// ẋ
fn tangent<T: Real, D: Dimension>(name: &str, x: Array<Dual<T>, D>) -> Result<Array<T, D>, Error> {
    collect(name, x.raw_dim(), x.iter().map(|x| x.tangent))
}

/// An array of the elements in row-major order.
fn collect<T, D: Dimension>(
    name: &str,
    shape: D,
    elements: impl ExactSizeIterator<Item = T>,
) -> Result<Array<T, D>, Error> {
    let (expected, found) = (shape.slice().to_vec(), vec![elements.len()]);
    let mut data = reserve(&format!("`{name}` with its derivative"), elements.len())?;
    data.extend(elements);
    Array::from_shape_vec(shape, data).map_err(|_| Error::Shape {
        operand: name.to_string(),
        expected,
        found,
    })
}
