//! The second order of attention: its operands checked, its results allocated.

use super::forward::filled;
use super::second::{Direction, Second, SecondMut, Values, check_moving, check_shape};
use super::{
    Cotangents, Inputs, Output, OutputTangents, SecondCotangents, SecondGradients,
    SecondGradientsMut, Tangents,
};
use crate::{Element, Options};
use etalon_problem::{Attention, Error};

/// The gradients of ⟨ddq, dq⟩ + … + ⟨cot_o, o⟩ + ⟨cot_lse, lse⟩ by everything that the backward
/// pass reads (D1)–(D15), from the outputs of the forward pass. [`crate::Mode`] changes nothing.
pub fn double_backward<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: &Output<T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
    options: &Options,
) -> Result<SecondGradients<T>, Error> {
    inputs.check(problem)?;
    let scores = &problem.scores;
    let mut gq = filled(scores.q_shape(), T::ZERO, "gq")?;
    let mut gk = filled(scores.k_shape(), T::ZERO, "gk")?;
    let mut gv = filled(problem.v_shape(), T::ZERO, "gv")?;
    let mut gdout = filled(problem.o_shape(), T::ZERO, "gdout")?;
    let mut gdlse = filled(scores.row_shape(), 0.0f32, "gdlse")?;
    let heads = scores.extents.query_heads;
    let mut gsinks = scores.sinks.then(|| filled(heads, 0.0f32, "gsinks")).transpose()?;
    let mut gbias = scores.bias_shape().map(|shape| filled(shape, T::ZERO, "gbias")).transpose()?;
    let place = SecondGradientsMut {
        gq: Some(gq.view_mut()),
        gk: Some(gk.view_mut()),
        gv: Some(gv.view_mut()),
        gdout: Some(gdout.view_mut()),
        gdlse: Some(gdlse.view_mut()),
        gsinks: gsinks.as_mut().map(|gsinks| gsinks.view_mut()),
        gbias: gbias.as_mut().map(|gbias| gbias.view_mut()),
    };
    double_backward_into(problem, inputs, out, cotangents, second, place, options)?;
    Ok(SecondGradients { gq, gk, gv, gdout, gdlse, gsinks, gbias })
}

/// As [`double_backward`], into arrays of the caller, and only what is asked for. On an error
/// nothing has been written.
pub fn double_backward_into<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: &Output<T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
    gradients: SecondGradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    out.check(problem)?;
    cotangents.check(problem)?;
    second.check(problem)?;
    gradients.check(problem)?;
    let SecondGradientsMut { gq, gk, gv, gdout, gdlse, gsinks, gbias } = gradients;
    Second {
        scores: &problem.scores,
        q: &inputs.q,
        k: &inputs.k,
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
        lse: out.lse.view(),
        direction: Direction {
            q: second.ddq.as_ref(),
            k: second.ddk.as_ref(),
            sinks: second.ddsinks.as_ref(),
            bias: second.ddbias.as_ref(),
        },
        values: Some(Values {
            v: &inputs.v,
            o: out.o.view(),
            ddv: second.ddv.as_ref(),
            dout: Some(&cotangents.dout),
            cot_o: second.cot_o.as_ref(),
        }),
        dlse: cotangents.dlse.as_ref(),
        cot_lse: second.cot_lse.as_ref(),
    }
    .run(SecondMut { gq, gk, gv, gdout, gdlse, gsinks, gbias }, options)
}

/// How o and lse move when the inputs move along the tangents (J1), (J2), from the outputs of the
/// forward pass.
pub fn jvp<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: &Output<T>,
    tangents: &Tangents<'_, T>,
    options: &Options,
) -> Result<OutputTangents<T>, Error> {
    inputs.check(problem)?;
    out.check(problem)?;
    tangents.check(problem)?;
    let mut to = filled(problem.o_shape(), T::ZERO, "to")?;
    let mut tlse = filled(problem.scores.row_shape(), 0.0f32, "tlse")?;
    let place = SecondMut {
        gdout: Some(to.view_mut()),
        gdlse: Some(tlse.view_mut()),
        ..SecondMut::default()
    };
    Second {
        scores: &problem.scores,
        q: &inputs.q,
        k: &inputs.k,
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
        lse: out.lse.view(),
        direction: Direction {
            q: tangents.tq.as_ref(),
            k: tangents.tk.as_ref(),
            sinks: tangents.tsinks.as_ref(),
            bias: tangents.tbias.as_ref(),
        },
        values: Some(Values {
            v: &inputs.v,
            o: out.o.view(),
            ddv: tangents.tv.as_ref(),
            dout: None,
            cot_o: None,
        }),
        dlse: None,
        cot_lse: None,
    }
    .run(place, options)?;
    Ok(OutputTangents { to, tlse })
}

impl<T> SecondCotangents<'_, T> {
    fn check(&self, problem: &Attention) -> Result<(), Error> {
        let SecondCotangents { ddq, ddk, ddv, ddsinks, ddbias, cot_o, cot_lse } = self;
        let moving = [
            ddq.as_ref().map(|x| x.shape()),
            ddk.as_ref().map(|x| x.shape()),
            ddsinks.as_ref().map(|x| x.shape()),
            ddbias.as_ref().map(|x| x.shape()),
        ];
        check_moving(&problem.scores, ["ddq", "ddk", "ddsinks", "ddbias"], moving)?;
        check_shape("ddv", &problem.v_shape(), ddv.as_ref().map(|x| x.shape()))?;
        check_shape("cot_o", &problem.o_shape(), cot_o.as_ref().map(|x| x.shape()))?;
        let rows = problem.scores.row_shape();
        check_shape("cot_lse", &rows, cot_lse.as_ref().map(|x| x.shape()))
    }
}

impl<T> SecondGradientsMut<'_, T> {
    fn check(&self, problem: &Attention) -> Result<(), Error> {
        let SecondGradientsMut { gq, gk, gv, gdout, gdlse, gsinks, gbias } = self;
        let moving = [
            gq.as_ref().map(|x| x.shape()),
            gk.as_ref().map(|x| x.shape()),
            gsinks.as_ref().map(|x| x.shape()),
            gbias.as_ref().map(|x| x.shape()),
        ];
        check_moving(&problem.scores, ["gq", "gk", "gsinks", "gbias"], moving)?;
        check_shape("gv", &problem.v_shape(), gv.as_ref().map(|x| x.shape()))?;
        check_shape("gdout", &problem.o_shape(), gdout.as_ref().map(|x| x.shape()))?;
        let rows = problem.scores.row_shape();
        check_shape("gdlse", &rows, gdlse.as_ref().map(|x| x.shape()))
    }
}

impl<T> Tangents<'_, T> {
    fn check(&self, problem: &Attention) -> Result<(), Error> {
        let Tangents { tq, tk, tv, tsinks, tbias } = self;
        let moving = [
            tq.as_ref().map(|x| x.shape()),
            tk.as_ref().map(|x| x.shape()),
            tsinks.as_ref().map(|x| x.shape()),
            tbias.as_ref().map(|x| x.shape()),
        ];
        check_moving(&problem.scores, ["tq", "tk", "tsinks", "tbias"], moving)?;
        check_shape("tv", &problem.v_shape(), tv.as_ref().map(|x| x.shape()))
    }
}
