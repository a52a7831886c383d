//! The backward pass, from the last chunk to the first, with D the gradient of the loss by the state
//! after the chunk:
//!
//! ```text
//! D′ = α_L D + σ Σ_i α_i q_iᵀ dout_i                      (R28), after its last use
//! ```
//!
//! `both_ways` says in which order, `gradient` what a chunk gives.

use super::both_ways::{At, BothWays, Ways, cut_up, one, sums, total, write};
use super::gradient::{Behind, Chunk, Wanted};
use super::scratch::{PackKeys, PackQueries, Scratch};
use super::spans::{Place, Work};
use super::state::{Advance, Shape};
use super::{Cotangents, Gradients, GradientsMut, Inputs, sequences};
use crate::attention::forward::zeros;
use crate::plan::Buffer;
use crate::{Element, Options};
use etalon_problem::{Decay, Error, LinearAttention};
use ndarray::{ArrayViewMut1, ArrayViewMut2, ArrayViewMut3, ArrayViewMut4, s};
use std::ops::Range;

/// The gradients of the inputs.
pub fn backward<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    options: &Options,
) -> Result<Gradients<T>, Error> {
    inputs.check(problem)?;
    let mut dq = zeros(problem.q_shape(), "dq")?;
    let mut dk = zeros(problem.k_shape(), "dk")?;
    let mut dv = zeros(problem.v_shape(), "dv")?;
    let per_head = problem.decay == Decay::PerHead;
    let mut dg_gamma =
        per_head.then(|| zeros(problem.extents.key_heads, "dg_gamma")).transpose()?;
    let per_token = problem.decay == Decay::PerToken;
    let mut dg = per_token.then(|| zeros(problem.g_shape(), "dg")).transpose()?;
    let state = || zeros(problem.state_shape(), "dinitial_state");
    let mut dinitial_state = problem.initial_state.then(state).transpose()?;
    let mut dscale = 0.0;
    let place = GradientsMut {
        dq: Some(dq.view_mut()),
        dk: Some(dk.view_mut()),
        dv: Some(dv.view_mut()),
        dg_gamma: dg_gamma.as_mut().map(|x| x.view_mut()),
        dg: dg.as_mut().map(|x| x.view_mut()),
        dinitial_state: dinitial_state.as_mut().map(|x| x.view_mut()),
        dscale: Some(&mut dscale),
    };
    backward_into(problem, inputs, cotangents, place, options)?;
    Ok(Gradients { dq, dk, dv, dg_gamma, dg, dinitial_state, dscale })
}

/// As [`backward`], into arrays of the caller, and only what is asked for. On an error nothing has
/// been written.
pub fn backward_into<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    gradients: GradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    inputs.check_tokens(problem)?;
    cotangents.check(problem)?;
    gradients.check(problem)?;
    let sequences = sequences(problem);
    let work = Work::new(problem, &sequences, options)?;
    let transposed = work.shape.transposed(&work.cut);
    let wanted = Wanted {
        dq: gradients.dq.is_some() || gradients.dscale.is_some(),
        dk: gradients.dk.is_some(),
        dv: gradients.dv.is_some(),
        dg: gradients.dg.is_some() || gradients.dg_gamma.is_some(),
    };
    Backward { work, transposed, inputs, cotangents, wanted }.run(gradients)
}

/// A backward pass, its operands checked.
struct Backward<'a, 'i, 'c, T> {
    work: Work<'a>,
    /// The shape of transposed states.
    transposed: Shape,
    inputs: &'a Inputs<'i, T>,
    cotangents: &'a Cotangents<'c, T>,
    wanted: Wanted,
}

/// Where the gradients of a span are written.
struct Span<'o, T> {
    dq: Vec<ArrayViewMut2<'o, T>>,
    dk: Option<ArrayViewMut2<'o, T>>,
    dv: Option<ArrayViewMut2<'o, T>>,
    dg: Option<ArrayViewMut1<'o, f32>>,
    /// What the span adds to dg_gamma and to dσ.
    sums: &'o mut [f64; 2],
}

impl<T: Element> Backward<'_, '_, '_, T> {
    fn run(&self, out: GradientsMut<'_, T>) -> Result<(), Error> {
        let mut ways = Ways::new::<Span<'_, T>>(self)?;
        let mut sums = sums(&self.work);
        // Nothing has been written yet.
        self.work.begin(&self.inputs.initial_state, &mut ways.fronts, 0, true);
        self.work.begin(&self.cotangents.dfinal_state, &mut ways.backs, 0, false);
        let GradientsMut { dq, dk, dv, dg_gamma, dg, dinitial_state, dscale } = out;
        ways.run(self, self.spans([dq, dk, dv], dg, &mut sums))?;
        self.work.end(&ways.backs, dinitial_state, 0, false);
        if let Some(dscale) = dscale {
            *dscale = total(&self.work, &sums, 1, None);
        }
        for (head, dg) in dg_gamma.into_iter().flatten().enumerate() {
            *dg = total(&self.work, &sums, 0, Some(head));
        }
        Ok(())
    }

    /// The places of every slot and span.
    fn spans<'o>(
        &self,
        [dq, dk, dv]: [Option<ArrayViewMut4<'o, T>>; 3],
        dg: Option<ArrayViewMut3<'o, f32>>,
        sums: &'o mut [Vec<[f64; 2]>],
    ) -> Vec<Vec<Span<'o, T>>> {
        let (work, group) = (&self.work, self.work.problem.group());
        let mut dq = cut_up(work, dq, group, T::ZERO);
        let [mut dk, mut dv] = [dk, dv].map(|result| cut_up(work, result, 1, T::ZERO));
        let mut dg = cut_up(work, dg, 1, 0.0);
        let slots = sums.iter_mut().map(|spans| {
            let span = |sums| Span {
                dq: dq.next().unwrap_or_default(),
                dk: dk.next().and_then(one),
                dv: dv.next().and_then(one),
                dg: dg.next().and_then(one),
                sums,
            };
            spans.iter_mut().map(span).collect()
        });
        slots.collect()
    }
}

impl<'o, T: Element> BothWays<Span<'o, T>> for Backward<'_, '_, '_, T> {
    type Scratch = Scratch;

    fn work(&self) -> &Work<'_> {
        &self.work
    }

    fn place(&self, slot: usize, number: usize) -> Place<'_> {
        self.work.place(slot, number, self.inputs.gates(), None)
    }

    fn scratch(&self) -> Result<Scratch, Error> {
        Scratch::new(&self.work.cut, self.work.shape, self.work.problem.scale as f32)
    }

    fn keys(&self, place: &Place<'_>, chunk: &Range<usize>, gradients: bool, to: &mut Scratch) {
        self.decays(place, chunk, to);
        to.k.read(place.of_keys(&self.inputs.k, chunk));
        to.v.read(place.of_keys(&self.inputs.v, chunk));
        PackKeys { len: chunk.len(), gradients, scratch: to }.run_at(self.work.options.level);
    }

    fn advance_front(&self, len: usize, fresh: bool, front: &mut [f32], scratch: &Scratch) {
        let Scratch { decays, v, keys_weighted, .. } = scratch;
        let decay = if fresh { 0.0 } else { decays.whole };
        let (shape, tokens) = (self.transposed, decays.first..len);
        let (state, left, right) = (front, v, keys_weighted);
        Advance { shape, state, decay, left, right, tokens }.run_at(self.work.options.level);
    }

    fn decays(&self, place: &Place<'_>, chunk: &Range<usize>, to: &mut Scratch) {
        to.decays.prepare(self.work.options.level, &place.gates, chunk.clone());
    }

    fn queries(
        &self,
        place: &Place<'_>,
        chunk: &Range<usize>,
        member: usize,
        gradients: bool,
        to: &mut Scratch,
    ) {
        let head = place.head * self.work.problem.group() + member;
        to.q.read(place.of_queries(&self.inputs.q, head, chunk));
        to.dout.read(place.of_queries(&self.cotangents.dout, head, chunk));
        PackQueries { len: chunk.len(), gradients, scratch: to }.run_at(self.work.options.level);
    }

    fn decay_back(&self, back: &mut [f32], scratch: &Scratch) {
        match scratch.decays.whole {
            0.0 => back.fill(0.0),
            1.0 => {}
            decay => back.iter_mut().for_each(|x| *x *= decay),
        }
    }

    fn advance_back(&self, len: usize, back: &mut [f32], scratch: &Scratch) {
        let Scratch { decays, q, douts, douts_weighted, .. } = scratch;
        // Tokens from a reset on do not see what is before the chunk.
        let tokens = 0..decays.reset.min(len);
        let right = if decays.none { douts } else { douts_weighted };
        let (shape, state, left, decay) = (self.work.shape, back, q, 1.0);
        Advance { shape, state, decay, left, right, tokens }.run_at(self.work.options.level);
    }

    fn states<'r>(&self, scratch: &'r mut Scratch) -> [&'r mut [f32]; 2] {
        [&mut scratch.state, &mut scratch.back]
    }

    fn behind(&self, len: usize, scratch: &mut Scratch) {
        let (shape, transposed, wanted) = (self.work.shape, self.transposed, self.wanted);
        Behind { len, shape, transposed, wanted, scratch }.run_at(self.work.options.level);
    }

    fn head(&self, at: &At<'_>, member: usize, span: &mut Span<'o, T>, scratch: &mut Scratch) {
        let (transposed, wanted, level) = (self.transposed, self.wanted, self.work.options.level);
        let (len, blank, dscale) = (at.within.len(), at.blank, &mut span.sums[1]);
        Chunk { len, transposed, wanted, blank, scratch, dscale }.run_at(level);
        if let Some(dq) = span.dq.get_mut(member) {
            let (dq, scale) = (dq.slice_mut(s![at.within.clone(), ..]), self.work.problem.scale);
            write(dq, &scratch.dq, scratch.strides[0], scale as f32);
        }
    }

    fn finish(&self, at: &At<'_>, span: &mut Span<'o, T>, scratch: &mut Scratch) {
        let [dim, width] = scratch.strides;
        if let Some(dk) = &mut span.dk {
            write(dk.slice_mut(s![at.within.clone(), ..]), &scratch.dk, dim, 1.0);
        }
        if let Some(dv) = &mut span.dv {
            write(dv.slice_mut(s![at.within.clone(), ..]), &scratch.dv, width, 1.0);
        }
        if self.wanted.dg {
            write_gates(&scratch.flow.dg, at, span.dg.as_mut(), &mut span.sums[0]);
        }
    }
}

/// Writes dg of a chunk, and adds it up for dg_gamma.
pub(super) fn write_gates(
    dg: &[f32],
    at: &At<'_>,
    to: Option<&mut ArrayViewMut1<'_, f32>>,
    sum: &mut f64,
) {
    let dg = &dg[..at.within.len()];
    *sum += dg.iter().map(|&dg| f64::from(dg)).sum::<f64>();
    if let Some(to) = to {
        let to = to.slice_mut(s![at.within.clone()]);
        to.into_iter().zip(dg).for_each(|(to, &dg)| *to = dg);
    }
}

/// What the backward pass allocates beside operands and results.
pub(super) fn buffers(work: &Work<'_>) -> Result<Vec<Buffer>, Error> {
    let scratch = Scratch::new(&work.cut, work.shape, 1.0)?;
    Ok(super::both_ways::buffers(work, &scratch.buffers()))
}
