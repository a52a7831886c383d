//! Operands and results of the passes, without the element types.

use crate::Options;
use crate::element::{Tensor, TensorMut};
use crate::named::{Inputs, float_place, integer_place, place};
use etalon_problem::{Error, Pass, ViewsMut};
use ndarray::{ArrayView1, ArrayViewD, ArrayViewMut1, ArrayViewMutD, Ix0, Ix1, Ix2, s};
use std::ops::Range;

/// The inputs of a pass; each with its tangent, of which the first order has none.
#[derive(Clone, Copy)]
pub struct Operands<'a> {
    pub h: Tensor<'a, Ix2>,
    pub w: Tensor<'a, Ix2>,
    pub bias: Option<Tensor<'a, Ix1>>,
    pub targets: ArrayView1<'a, i64>,
    pub class_weights: Option<ArrayView1<'a, f32>>,
    pub token_weights: Option<ArrayView1<'a, f32>>,
    pub ddh: Option<Tensor<'a, Ix2>>,
    pub ddw: Option<Tensor<'a, Ix2>>,
    pub ddbias: Option<Tensor<'a, Ix1>>,
}

impl<'a> Operands<'a> {
    /// The operands of some classes: rows `rows` of w and bias, which are `classes` of all.
    pub fn of(&self, rows: Range<usize>, classes: Range<usize>) -> Self {
        Operands {
            w: self.w.slice(s![rows.clone(), ..]),
            bias: self.bias.map(|bias| bias.slice(s![rows])),
            class_weights: self.class_weights.map(|all| all.slice_move(s![classes])),
            ..*self
        }
    }

    /// True if h and w, and their tangents, may be multiplied in tiles of bf16.
    pub fn bf16(&self, options: &Options) -> bool {
        let all = [Some(self.h), Some(self.w), self.ddh, self.ddw];
        all.into_iter().flatten().all(|x| options.pairs(x.dtype()))
    }

    pub fn new(x: Inputs<'a, '_>) -> Result<Self, Error> {
        Ok(Operands {
            h: x.needed("h")?,
            w: x.needed("w")?,
            bias: x.tensor("bias")?,
            targets: x.integer("targets")?,
            class_weights: x.float("class_weights")?,
            token_weights: x.float("token_weights")?,
            ddh: x.tensor("ddh")?,
            ddw: x.tensor("ddw")?,
            ddbias: x.tensor("ddbias")?,
        })
    }
}

/// The cotangents of the outputs; what is absent is 0.
#[derive(Clone, Default)]
pub struct Cotangents<'a> {
    pub dloss: Option<ArrayViewD<'a, f32>>,
    pub dlse: Option<ArrayView1<'a, f32>>,
    pub dlogprob: Option<ArrayView1<'a, f32>>,
    pub dentropy: Option<ArrayView1<'a, f32>>,
}

impl<'a> Cotangents<'a> {
    pub fn new(x: Inputs<'a, '_>) -> Result<Self, Error> {
        Ok(Cotangents {
            dloss: x.float("dloss")?,
            dlse: x.float("dlse")?,
            dlogprob: x.float("dlogprob")?,
            dentropy: x.float("dentropy")?,
        })
    }

    /// The cotangents of the second order.
    pub fn second(x: Inputs<'a, '_>) -> Result<Self, Error> {
        Ok(Cotangents {
            dloss: x.float("cot_loss")?,
            dlse: x.float("cot_lse")?,
            dlogprob: x.float("cot_logprob")?,
            dentropy: x.float("cot_entropy")?,
        })
    }
}

/// Places of the outputs of the forward pass; an output without a place is not computed.
#[derive(Default)]
pub struct Outputs<'o> {
    pub loss: Option<ArrayViewMutD<'o, f32>>,
    pub lse: Option<ArrayViewMut1<'o, f32>>,
    pub logprob: Option<ArrayViewMut1<'o, f32>>,
    pub entropy: Option<ArrayViewMut1<'o, f32>>,
    pub argmax: Option<ArrayViewMut1<'o, i64>>,
    pub n_valid: Option<&'o mut i64>,
    pub normaliser: Option<&'o mut f32>,
}

impl<'o> Outputs<'o> {
    pub fn new(out: &mut ViewsMut<'o>) -> Result<Self, Error> {
        let n_valid = integer_place::<Ix0>(out, "n_valid")?;
        let normaliser = float_place::<Ix0>(out, "normaliser")?;
        Ok(Outputs {
            loss: float_place(out, "loss")?,
            lse: float_place(out, "lse")?,
            logprob: float_place(out, "logprob")?,
            entropy: float_place(out, "entropy")?,
            argmax: integer_place(out, "argmax")?,
            n_valid: n_valid.map(|x| x.into_scalar()),
            normaliser: normaliser.map(|x| x.into_scalar()),
        })
    }
}

/// Places of the gradients by the cotangents of the outputs.
#[derive(Default)]
pub struct SecondOutputs<'o> {
    pub gdloss: Option<ArrayViewMutD<'o, f32>>,
    pub gdlse: Option<ArrayViewMut1<'o, f32>>,
    pub gdlogprob: Option<ArrayViewMut1<'o, f32>>,
    pub gdentropy: Option<ArrayViewMut1<'o, f32>>,
}

impl<'o> SecondOutputs<'o> {
    pub fn new(out: &mut ViewsMut<'o>) -> Result<Self, Error> {
        Ok(SecondOutputs {
            gdloss: float_place(out, "gdloss")?,
            gdlse: float_place(out, "gdlse")?,
            gdlogprob: float_place(out, "gdlogprob")?,
            gdentropy: float_place(out, "gdentropy")?,
        })
    }
}

/// Places of the gradients of a backward pass, or of those of the second order.
#[derive(Default)]
pub struct Gradients<'o> {
    pub dh: Option<TensorMut<'o, Ix2>>,
    pub dw: Option<TensorMut<'o, Ix2>>,
    pub dbias: Option<TensorMut<'o, Ix1>>,
    /// True if dh is added to what its place holds.
    pub dh_adds: bool,
}

impl<'o> Gradients<'o> {
    pub fn new(out: &mut ViewsMut<'o>, pass: Pass) -> Result<Self, Error> {
        let [dh, dw, dbias] = match pass {
            Pass::Forward => return Ok(Gradients::default()),
            Pass::DoubleBackward => ["gh", "gw", "gbias"],
            _ => ["dh", "dw", "dbias"],
        };
        let (dh, dw, dbias) = (place(out, dh)?, place(out, dw)?, place(out, dbias)?);
        Ok(Gradients { dh, dw, dbias, dh_adds: false })
    }
}
