//! The second order of attention: its operands checked, its results allocated.

use super::forward::zeros;
use super::second::{Direction, Second, Values, check_moving, check_shape};
use super::{
    Cotangents, Inputs, Output, OutputTangents, OutputTangentsMut, SecondCotangents,
    SecondGradients, SecondGradientsMut, Tangents,
};
use crate::{Element, Options};
use etalon_problem::{Attention, Error, Scores};

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
    let mut gq = zeros(scores.q_shape(), "gq")?;
    let mut gk = zeros(scores.k_shape(), "gk")?;
    let mut gv = zeros(problem.v_shape(), "gv")?;
    let mut gdout = zeros(problem.o_shape(), "gdout")?;
    let mut gdlse = zeros(scores.row_shape(), "gdlse")?;
    let heads = scores.extents.query_heads;
    let mut gsinks = scores.sinks.then(|| zeros(heads, "gsinks")).transpose()?;
    let mut gbias = scores.bias_shape().map(|shape| zeros(shape, "gbias")).transpose()?;
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
    Second {
        scores: &problem.scores,
        q: &inputs.q,
        k: &inputs.k,
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
        lse: out.lse.view(),
        direction: second.direction(),
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
    .run(gradients, options)
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
    let mut to = zeros(problem.o_shape(), "to")?;
    let mut tlse = zeros(problem.scores.row_shape(), "tlse")?;
    let place = OutputTangentsMut { to: Some(to.view_mut()), tlse: Some(tlse.view_mut()) };
    jvp_into(problem, inputs, out, tangents, place, options)?;
    Ok(OutputTangents { to, tlse })
}

/// As [`jvp`], into arrays of the caller. On an error nothing has been written.
pub fn jvp_into<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: &Output<T>,
    tangents: &Tangents<'_, T>,
    moved: OutputTangentsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    out.check(problem)?;
    tangents.check(problem)?;
    let OutputTangentsMut { to, tlse } = moved;
    check_shape("to", &problem.o_shape(), to.as_ref().map(|x| x.shape()))?;
    check_shape("tlse", &problem.scores.row_shape(), tlse.as_ref().map(|x| x.shape()))?;
    Second {
        scores: &problem.scores,
        q: &inputs.q,
        k: &inputs.k,
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
        lse: out.lse.view(),
        direction: tangents.direction(),
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
    .run(SecondGradientsMut { gdout: to, gdlse: tlse, ..Default::default() }, options)
}

impl<T> SecondCotangents<'_, T> {
    fn direction(&self) -> Direction<'_, T> {
        Direction {
            q: self.ddq.as_ref(),
            k: self.ddk.as_ref(),
            sinks: self.ddsinks.as_ref(),
            bias: self.ddbias.as_ref(),
        }
    }

    fn check(&self, problem: &Attention) -> Result<(), Error> {
        let rows = problem.scores.row_shape();
        self.direction().check(&problem.scores, ["ddq", "ddk", "ddsinks", "ddbias"])?;
        check_shape("ddv", &problem.v_shape(), self.ddv.as_ref().map(|x| x.shape()))?;
        check_shape("cot_o", &problem.o_shape(), self.cot_o.as_ref().map(|x| x.shape()))?;
        check_shape("cot_lse", &rows, self.cot_lse.as_ref().map(|x| x.shape()))
    }
}

impl<T> SecondGradientsMut<'_, T> {
    fn check(&self, problem: &Attention) -> Result<(), Error> {
        self.check_scores(&problem.scores)?;
        check_shape("gv", &problem.v_shape(), self.gv.as_ref().map(|x| x.shape()))?;
        check_shape("gdout", &problem.o_shape(), self.gdout.as_ref().map(|x| x.shape()))
    }

    /// Fails unless the gradients of the scores' operands and of dlse have their shapes.
    pub(crate) fn check_scores(&self, scores: &Scores) -> Result<(), Error> {
        let shapes = [
            self.gq.as_ref().map(|x| x.shape()),
            self.gk.as_ref().map(|x| x.shape()),
            self.gsinks.as_ref().map(|x| x.shape()),
            self.gbias.as_ref().map(|x| x.shape()),
        ];
        check_moving(scores, ["gq", "gk", "gsinks", "gbias"], shapes)?;
        check_shape("gdlse", &scores.row_shape(), self.gdlse.as_ref().map(|x| x.shape()))
    }
}

impl<T> Tangents<'_, T> {
    fn direction(&self) -> Direction<'_, T> {
        Direction {
            q: self.tq.as_ref(),
            k: self.tk.as_ref(),
            sinks: self.tsinks.as_ref(),
            bias: self.tbias.as_ref(),
        }
    }

    fn check(&self, problem: &Attention) -> Result<(), Error> {
        self.direction().check(&problem.scores, ["tq", "tk", "tsinks", "tbias"])?;
        check_shape("tv", &problem.v_shape(), self.tv.as_ref().map(|x| x.shape()))
    }
}
