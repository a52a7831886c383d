//! What the passes of attention will do.

use super::backward::{self, Backward};
use super::forward::{Forward, Values};
use super::second::{self, Direction, Second};
use crate::heads::check_lists;
use crate::plan::{Plan, unwritten};
use crate::{Element, Options};
use etalon_problem::{Attention, Error, Pass};
use ndarray::arr0;

/// What a pass will do in rayon's current pool, every gradient being asked for and every cotangent
/// given; and what it allocates for it, [`Plan::workspace_bytes`].
pub fn plan<T: Element>(problem: &Attention, pass: Pass, options: &Options) -> Result<Plan, Error> {
    problem.check()?;
    let scores = &problem.scores;
    check_lists(scores)?;
    let (zero, number) = (arr0(T::ZERO), arr0(0.0f32));
    let q = &unwritten(&zero, scores.q_shape(), "q")?;
    let k = &unwritten(&zero, scores.k_shape(), "k")?;
    let v = &unwritten(&zero, problem.v_shape(), "v")?;
    let o = &unwritten(&zero, problem.o_shape(), "o")?;
    let lse = unwritten(&number, scores.row_shape(), "lse")?;
    let bias = scores.bias_shape().map(|shape| unwritten(&zero, shape, "bias")).transpose()?;
    let (bias, sinks) = (bias.as_ref(), None);
    let second = |second: bool| {
        let direction = Direction { q: Some(q), k: Some(k), sinks, bias };
        let cotangent = second.then_some(o);
        let values =
            second::Values { v, o: o.view(), ddv: Some(v), dout: cotangent, cot_o: cotangent };
        let (values, lse, dlse, cot_lse) = (Some(values), lse.view(), None, None);
        Second { scores, q, k, sinks, bias, lse, direction, values, dlse, cot_lse }
    };
    match pass {
        Pass::Forward => Forward { scores, q, k, sinks, bias, values: Values::V(v) }.plan(options),
        Pass::Backward => {
            let values = Some(backward::Values { v, o: o.view(), dout: o });
            let (lse, dlse) = (lse.view(), None);
            Backward { scores, q, k, values, lse, dlse, sinks, bias }.plan(true, options)
        }
        Pass::DoubleBackward => second(true).plan(false, options),
        Pass::Jvp => second(false).plan(true, options),
        Pass::Step => Err(Error::value("pass", "one of attention", pass)),
    }
}
