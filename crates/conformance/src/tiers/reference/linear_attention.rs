//! linear_attention by name.

use super::{Arrays, named, needed, no_pass, some, view};
use etalon_problem::{Algorithm, Error, LinearAttention, Pass};
use etalon_reference::linear_attention;
use etalon_reference::scalar::Real;
use ndarray::{ArrayD, arr0};

/// The outputs of a pass.
pub(super) fn pass<T: Real>(
    problem: &LinearAttention,
    pass: Pass,
    x: &Arrays<T>,
) -> Result<Arrays<T>, Error> {
    if pass == Pass::Step {
        return step(problem, x);
    }
    let inputs = linear_attention::Inputs {
        q: needed(x, "q")?,
        k: needed(x, "k")?,
        v: needed(x, "v")?,
        g_gamma: view(x, "g_gamma")?,
        g: view(x, "g")?,
        initial_state: view(x, "initial_state")?,
    };
    let cotangents = || {
        let dfinal_state = view(x, "dfinal_state")?;
        Ok(linear_attention::Cotangents { dout: needed(x, "dout")?, dfinal_state })
    };
    Ok(match pass {
        Pass::Forward => {
            let out = linear_attention::forward(problem, &inputs)?;
            named([("o", some(out.o)), ("final_state", out.final_state.and_then(some))])
        }
        Pass::Backward => {
            let out = linear_attention::backward(problem, &inputs, &cotangents()?)?;
            named([
                ("dq", some(out.dq)),
                ("dk", some(out.dk)),
                ("dv", some(out.dv)),
                ("dg_gamma", out.dg_gamma.and_then(some)),
                ("dg", out.dg.and_then(some)),
                ("dinitial_state", out.dinitial_state.and_then(some)),
                ("dscale", number(out.dscale)),
            ])
        }
        Pass::DoubleBackward => {
            let second = linear_attention::SecondCotangents {
                ddq: view(x, "ddq")?,
                ddk: view(x, "ddk")?,
                ddv: view(x, "ddv")?,
                ddg_gamma: view(x, "ddg_gamma")?,
                ddg: view(x, "ddg")?,
                ddinitial_state: view(x, "ddinitial_state")?,
                ddscale: x.get("ddscale").and_then(|x| x.first().copied()),
                cot_o: view(x, "cot_o")?,
                cot_final_state: view(x, "cot_final_state")?,
            };
            let out = linear_attention::double_backward(problem, &inputs, &cotangents()?, &second)?;
            named([
                ("gq", some(out.gq)),
                ("gk", some(out.gk)),
                ("gv", some(out.gv)),
                ("gg_gamma", out.gg_gamma.and_then(some)),
                ("gg", out.gg.and_then(some)),
                ("ginitial_state", out.ginitial_state.and_then(some)),
                ("gscale", number(out.gscale)),
                ("gdout", some(out.gdout)),
                ("gdfinal_state", out.gdfinal_state.and_then(some)),
            ])
        }
        Pass::Jvp | Pass::Step => return Err(no_pass(Algorithm::LinearAttention, pass)),
    })
}

fn step<T: Real>(problem: &LinearAttention, x: &Arrays<T>) -> Result<Arrays<T>, Error> {
    let inputs = linear_attention::StepInputs {
        q: needed(x, "q")?,
        k: needed(x, "k")?,
        v: needed(x, "v")?,
        g_gamma: view(x, "g_gamma")?,
        g: view(x, "g")?,
        initial_state: needed(x, "initial_state")?,
    };
    let out = linear_attention::step(problem, &inputs)?;
    Ok(named([("o", some(out.o)), ("final_state", some(out.final_state))]))
}

fn number<T>(x: T) -> Option<ArrayD<T>> {
    Some(arr0(x).into_dyn())
}
