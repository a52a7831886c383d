//! Tensors that a right forward pass saves for a backward pass of another reading.

use super::edit::pick;
use crate::tensor::Values;
use etalon_problem::{Error, Pass, Problem};
use etalon_reference::{Arithmetic, evaluate_in};
use ndarray::{ArrayD, Axis as Along};

/// Tensors of a forward pass that the backward pass reads.
#[derive(Debug)]
pub(crate) struct Saved {
    pub lse: ArrayD<f64>,
    /// dout·o of every row; attention_lse has none.
    pub product: Option<ArrayD<f64>>,
}

impl Saved {
    /// Turns the cotangents of a problem, or of some entries of it, into those with which its exact gradients
    /// are those of a kernel that reads these tensors in place of its own.
    ///
    /// With lse′ and o′ of its own and f = e^{lse′ − lse}, dS = f P′ (dout·v − (dout·o − dlse)) is that of
    /// f·dout and f·(dlse + dout·o′ − dout·o).
    pub fn read(
        &self,
        problem: &Problem,
        picks: Option<&[Vec<usize>]>,
        own: &mut Values,
    ) -> Result<(), Error> {
        let exact = evaluate_forward(problem, own)?;
        let Some(lse) = exact.get("lse") else { return Ok(()) };
        let of = |x: &ArrayD<f64>| picks.map_or_else(|| x.clone(), |picks| pick(x, picks));
        let mut factor = lse - &of(&self.lse);
        factor.mapv_inplace(|x| if x.is_finite() { x.exp() } else { 1.0 });
        let mut dlse = own.remove("dlse").unwrap_or_else(|| ArrayD::zeros(lse.shape()));
        if let (Some(product), Some(dout), Some(o)) =
            (&self.product, own.get_mut("dout"), exact.get("o"))
        {
            dlse = dlse + (&*dout * o).sum_axis(Along(3)) - of(product);
            *dout *= &factor.clone().insert_axis(Along(3));
        }
        own.insert("dlse".to_string(), dlse * factor);
        Ok(())
    }
}

/// The exact results of the forward pass on the inputs among some tensors.
pub(super) fn evaluate_forward(problem: &Problem, tensors: &Values) -> Result<Values, Error> {
    let operands = problem.operands(Pass::Forward);
    let given = operands.iter().filter(|operand| operand.role.is_given());
    let inputs =
        given.filter_map(|x| Some((x.name.to_string(), tensors.get(x.name)?.clone()))).collect();
    evaluate_in(Arithmetic::F64, problem, Pass::Forward, &inputs)
}
