//! How the passes will work.

use super::backward::Backward;
use super::double_backward::{Direction, DoubleBackward};
use super::forward::Forward;
use super::inputs::Inputs;
use crate::element::Tensor;
use crate::plan::Plan;
use crate::tiles::check_counts;
use crate::{Mode, Options};
use etalon_problem::{Algorithm, Error, Pass, Scores};
use ndarray::{Ix0, arr0};

/// How a pass of `algorithm` will work in rayon's current pool, every gradient being asked for and
/// every cotangent given, with tensors of the type of `zero` and, in attention, values of E =
/// `value_dim`.
pub fn plan(
    algorithm: Algorithm,
    scores: &Scores,
    value_dim: Option<usize>,
    zero: &Tensor<'_, Ix0>,
    pass: Pass,
    options: &Options,
) -> Result<Plan, Error> {
    let e = &scores.extents;
    check_counts(e.batch, e.query_heads)?;
    let (number, rows) = (arr0(0.0f32), scores.row_shape());
    let values = |name, heads, rows| {
        let tensor = value_dim.map(|dim| zero.unwritten([e.batch, heads, rows, dim], name));
        tensor.transpose()
    };
    let q = zero.unwritten(scores.q_shape(), "q")?;
    let k = zero.unwritten(scores.k_shape(), "k")?;
    let v = values("v", e.key_heads, e.keys)?;
    let o = values("o", e.query_heads, e.queries)?;
    let lse = number.broadcast(rows);
    let lse =
        lse.ok_or_else(|| Error::value("lse", "an addressable array", format!("{rows:?}")))?;
    let bias = scores.bias_shape().map(|shape| zero.unwritten(shape, "bias")).transpose()?;
    let inputs = Inputs { scores, q, k, v, sinks: None, bias };
    // Under this mode the forward pass of attention_lse has all that dq needs.
    let gradient = value_dim.is_none() && options.mode == Mode::ForwardGradient;
    let direction = Direction { q: Some(q), k: Some(k), v, sinks: None, bias };
    let tangents = DoubleBackward::tangents(inputs, direction, o, lse);
    match pass {
        Pass::Forward => Forward { inputs, gradient }.plan(options),
        Pass::Backward => {
            let pass = Backward { inputs, o, gradient: None, lse, dout: o, dlse: None };
            let mut plan = pass.plan(!gradient, options)?;
            if gradient {
                plan.mode = Some(Mode::ForwardGradient);
            }
            Ok(plan)
        }
        Pass::DoubleBackward => {
            DoubleBackward { dout: o, cot_o: o, ..tangents }.plan(false, options)
        }
        Pass::Jvp => tangents.plan(true, options),
        Pass::Step | Pass::ForwardBackward => {
            Err(Error::value("pass", format!("one of {algorithm}"), pass))
        }
    }
}
