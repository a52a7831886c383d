//! What the passes of attention_lse will do.

use crate::attention::Backward;
use crate::attention::forward::{Forward, Values};
use crate::attention::second::{Direction, Second};
use crate::heads::check_lists;
use crate::plan::{Plan, unwritten};
use crate::{Element, Mode, Options};
use etalon_problem::{AttentionLse, Error, Pass};
use ndarray::arr0;

/// What a pass will do in rayon's current pool, every gradient being asked for and every cotangent
/// given; and what it allocates for it, [`Plan::workspace_bytes`].
pub fn plan<T: Element>(
    problem: &AttentionLse,
    pass: Pass,
    options: &Options,
) -> Result<Plan, Error> {
    problem.check()?;
    let scores = &problem.scores;
    check_lists(scores)?;
    let (zero, number) = (arr0(T::ZERO), arr0(0.0f32));
    let q = &unwritten(&zero, scores.q_shape(), "q")?;
    let k = &unwritten(&zero, scores.k_shape(), "k")?;
    let lse = unwritten(&number, scores.row_shape(), "lse")?;
    let bias = scores.bias_shape().map(|shape| unwritten(&zero, shape, "bias")).transpose()?;
    let (bias, sinks, dlse, cot_lse) = (bias.as_ref(), None, None, None);
    // Under this mode the forward pass has all that dq needs.
    let gradient = options.mode == Mode::ForwardGradient;
    let second = || {
        let direction = Direction { q: Some(q), k: Some(k), sinks, bias };
        let (lse, values) = (lse.view(), None);
        Second { scores, q, k, sinks, bias, lse, direction, values, dlse, cot_lse }
    };
    match pass {
        Pass::Forward => {
            let values = if gradient { Values::K } else { Values::None };
            Forward { scores, q, k, sinks, bias, values }.plan(options)
        }
        Pass::Backward => {
            let (lse, values) = (lse.view(), None);
            let pass = Backward { scores, q, k, values, lse, dlse, sinks, bias };
            let mut plan = pass.plan(!gradient, options)?;
            if gradient {
                plan.mode = Some(Mode::ForwardGradient);
            }
            Ok(plan)
        }
        Pass::DoubleBackward => second().plan(false, options),
        Pass::Jvp => second().plan(true, options),
        Pass::Step => Err(Error::value("pass", "one of attention_lse", pass)),
    }
}
