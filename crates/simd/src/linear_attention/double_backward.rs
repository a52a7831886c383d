//! The double backward pass: how the backward pass moves when its inputs move along the cotangents of
//! their gradients, and dout and dfinal_state along those of the outputs.
//!
//! ```text
//! Ṡ′ = α_L (a_L S + Ṡ) + Σ_j ω_j (b_j k_jᵀ v_j + k̇_jᵀ v_j + k_jᵀ v̇_j)               (R30)
//! Ḋ′ = α_L (a_L D + Ḋ) + Σ_i α_i (a_i Q_iᵀ dout_i + Q̇_iᵀ dout_i + Q_iᵀ cot_o_i)     (R31)
//! ```
//!
//! Every sum of ddg is one between two places: a and b from the chunk's begin and to its end. Sums over
//! the sequence would cancel. `both_ways` says in which order, `tangent` what a chunk gives.

use super::backward::write_gates;
use super::both_ways::{At, BothWays, Ways, cut_up, one, sums, total, write};
use super::moving::{Moves, PackKeys, PackQueries, Scratch};
use super::operand::Rows;
use super::spans::{Place, Work, add_to};
use super::state::{Advance, Shape};
use super::tangent::{Behind, Chunk, Wanted};
use super::{Cotangents, Inputs, SecondCotangents, SecondGradients, SecondGradientsMut, sequences};
use crate::attention::forward::zeros;
use crate::pack::{Packed, read_row};
use crate::plan::Buffer;
use crate::products::dot;
use crate::{Element, Options};
use etalon_problem::{Decay, Error, LinearAttention, Sequence};
use ndarray::{ArrayView1, ArrayView4, ArrayViewMut1, ArrayViewMut2, s};
use std::ops::Range;

/// The gradients of ⟨ddq, dq⟩ + … + ⟨cot_o, o⟩ + ⟨cot_final_state, H_n⟩ by everything that the
/// backward pass reads.
pub fn double_backward<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
    options: &Options,
) -> Result<SecondGradients<T>, Error> {
    inputs.check(problem)?;
    let mut gq = zeros(problem.q_shape(), "gq")?;
    let mut gk = zeros(problem.k_shape(), "gk")?;
    let mut gv = zeros(problem.v_shape(), "gv")?;
    let per_head = problem.decay == Decay::PerHead;
    let mut gg_gamma =
        per_head.then(|| zeros(problem.extents.key_heads, "gg_gamma")).transpose()?;
    let per_token = problem.decay == Decay::PerToken;
    let mut gg = per_token.then(|| zeros(problem.g_shape(), "gg")).transpose()?;
    let state = |name| zeros(problem.state_shape(), name);
    let mut ginitial_state = problem.initial_state.then(|| state("ginitial_state")).transpose()?;
    let mut gscale = 0.0;
    let mut gdout = zeros(problem.o_shape(), "gdout")?;
    let mut gdfinal_state = problem.final_state.then(|| state("gdfinal_state")).transpose()?;
    let place = SecondGradientsMut {
        gq: Some(gq.view_mut()),
        gk: Some(gk.view_mut()),
        gv: Some(gv.view_mut()),
        gg_gamma: gg_gamma.as_mut().map(|x| x.view_mut()),
        gg: gg.as_mut().map(|x| x.view_mut()),
        ginitial_state: ginitial_state.as_mut().map(|x| x.view_mut()),
        gscale: Some(&mut gscale),
        gdout: Some(gdout.view_mut()),
        gdfinal_state: gdfinal_state.as_mut().map(|x| x.view_mut()),
    };
    double_backward_into(problem, inputs, cotangents, second, place, options)?;
    Ok(SecondGradients { gq, gk, gv, gg_gamma, gg, ginitial_state, gscale, gdout, gdfinal_state })
}

/// As [`double_backward`], into arrays of the caller, and only what is asked for. On an error nothing
/// has been written.
pub fn double_backward_into<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    second: &SecondCotangents<'_, T>,
    gradients: SecondGradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    inputs.check_tokens(problem)?;
    cotangents.check(problem)?;
    second.check(problem)?;
    gradients.check(problem)?;
    let sequences = sequences(problem);
    let work = work(problem, &sequences, options)?;
    let transposed = work.shape.transposed(&work.cut);
    let scales = [problem.scale as f32, second.ddscale.unwrap_or(0.0)];
    let wanted = Wanted {
        gq: gradients.gq.is_some(),
        dq: gradients.gscale.is_some() || gradients.gq.is_some() && scales[1] != 0.0,
        gk: gradients.gk.is_some(),
        gv: gradients.gv.is_some(),
        gg: gradients.gg.is_some() || gradients.gg_gamma.is_some(),
        gdout: gradients.gdout.is_some(),
    };
    let gscale = gradients.gscale.is_some();
    let pass =
        DoubleBackward { work, transposed, inputs, cotangents, second, wanted, scales, gscale };
    pass.run(gradients)
}

/// The work of a double backward pass.
pub(super) fn work<'a>(
    problem: &'a LinearAttention,
    sequences: &'a [Sequence],
    options: &'a Options,
) -> Result<Work<'a>, Error> {
    Ok(Work { order: 2, ..Work::new(problem, sequences, options)? })
}

/// A double backward pass, its operands checked.
struct DoubleBackward<'a, 'i, 'c, 's, T> {
    work: Work<'a>,
    /// The shape of transposed states.
    transposed: Shape,
    inputs: &'a Inputs<'i, T>,
    cotangents: &'a Cotangents<'c, T>,
    second: &'a SecondCotangents<'s, T>,
    wanted: Wanted,
    /// σ and ddσ.
    scales: [f32; 2],
    /// Whether gσ is computed.
    gscale: bool,
}

/// Where the second gradients of a span are written.
struct Span<'o, 's, T> {
    gq: Vec<ArrayViewMut2<'o, T>>,
    gdout: Vec<ArrayViewMut2<'o, T>>,
    gk: Option<ArrayViewMut2<'o, T>>,
    gv: Option<ArrayViewMut2<'o, T>>,
    gg: Option<ArrayViewMut1<'o, f32>>,
    /// What the span adds to gg_gamma and to gσ.
    sums: &'s mut [f64; 2],
}

impl<T: Element> DoubleBackward<'_, '_, '_, '_, T> {
    fn run(&self, out: SecondGradientsMut<'_, T>) -> Result<(), Error> {
        let mut ways = Ways::new::<Span<'_, '_, T>>(self)?;
        let mut sums = sums(&self.work);
        let (work, second) = (&self.work, self.second);
        // Nothing has been written yet.
        work.begin(&self.inputs.initial_state, &mut ways.fronts, 0, true);
        work.begin(&second.ddinitial_state, &mut ways.fronts, 1, true);
        work.begin(&self.cotangents.dfinal_state, &mut ways.backs, 0, false);
        work.begin(&second.cot_final_state, &mut ways.backs, 1, false);
        let (spans, rest) = self.spans(out, &mut sums);
        ways.run(self, spans)?;
        work.end(&ways.backs, rest.ginitial_state, 1, false);
        work.end(&ways.fronts, rest.gdfinal_state, 1, true);
        if let Some(gscale) = rest.gscale {
            *gscale = total(work, &sums, 1, None);
        }
        for (head, gg) in rest.gg_gamma.into_iter().flatten().enumerate() {
            *gg = total(work, &sums, 0, Some(head));
        }
        Ok(())
    }

    /// The places of every slot and span, and what else there is to be written.
    fn spans<'o, 's>(
        &self,
        mut out: SecondGradientsMut<'o, T>,
        sums: &'s mut [Vec<[f64; 2]>],
    ) -> (Vec<Vec<Span<'o, 's, T>>>, SecondGradientsMut<'o, T>) {
        let (work, group) = (&self.work, self.work.problem.group());
        let mut gq = cut_up(work, out.gq.take(), group, T::ZERO);
        let mut gdout = cut_up(work, out.gdout.take(), group, T::ZERO);
        let mut gk = cut_up(work, out.gk.take(), 1, T::ZERO);
        let mut gv = cut_up(work, out.gv.take(), 1, T::ZERO);
        let mut gg = cut_up(work, out.gg.take(), 1, 0.0);
        let slots = sums.iter_mut().map(|spans| {
            let span = |sums| Span {
                gq: gq.next().unwrap_or_default(),
                gdout: gdout.next().unwrap_or_default(),
                gk: gk.next().and_then(one),
                gv: gv.next().and_then(one),
                gg: gg.next().and_then(one),
                sums,
            };
            spans.iter_mut().map(span).collect()
        });
        (slots.collect(), out)
    }

    /// Adds what a chunk of a query head gives to gσ (R19), from dq / σ and how it moves.
    fn add_scale(
        &self,
        place: &Place<'_>,
        chunk: &Range<usize>,
        head: usize,
        scratch: &mut Scratch,
        sum: &mut f64,
    ) {
        let Scratch { dq: [value, motion], strides, row, .. } = scratch;
        let mut dot_with = |operand: ArrayView1<'_, T>, with: &[f32]| {
            read_row(operand, row);
            *sum += f64::from(dot(row, &with[..row.len()]));
        };
        let q = place.of_queries(&self.inputs.q, head, chunk);
        for (q, motion) in q.outer_iter().zip(motion.chunks(strides[0])) {
            dot_with(q, motion);
        }
        let Some(ddq) = &self.second.ddq else { return };
        let ddq = place.of_queries(ddq, head, chunk);
        for (ddq, value) in ddq.outer_iter().zip(value.chunks(strides[0])) {
            dot_with(ddq, value);
        }
    }
}

impl<'o, 's, T: Element> BothWays<Span<'o, 's, T>> for DoubleBackward<'_, '_, '_, '_, T> {
    type Scratch = Scratch;

    fn work(&self) -> &Work<'_> {
        &self.work
    }

    fn place(&self, slot: usize, number: usize) -> Place<'_> {
        self.work.place(slot, number, self.inputs.gates(), Some(self.second.drifts()))
    }

    fn scratch(&self) -> Result<Scratch, Error> {
        let SecondCotangents { ddq, ddk, ddv, cot_o, .. } = self.second;
        let moves = Moves {
            q: ddq.is_some() || self.scales[1] != 0.0,
            k: ddk.is_some(),
            v: ddv.is_some(),
            dout: cot_o.is_some(),
        };
        Scratch::new(&self.work.cut, self.work.shape, moves)
    }

    fn keys(&self, place: &Place<'_>, chunk: &Range<usize>, gradients: bool, to: &mut Scratch) {
        let SecondCotangents { ddk, ddv, .. } = self.second;
        self.decays(place, chunk, to);
        let read = |to: &mut Rows, operand: Option<&ArrayView4<'_, T>>| {
            if let Some(operand) = operand {
                to.read(place.of_keys(operand, chunk));
            }
        };
        let ([k, k_motion], [v, v_motion]) = (&mut to.k, &mut to.v);
        read(k, Some(&self.inputs.k));
        read(k_motion, ddk.as_ref());
        read(v, Some(&self.inputs.v));
        read(v_motion, ddv.as_ref());
        PackKeys { len: chunk.len(), gradients, scratch: to }.run_at(self.work.options.level);
    }

    fn advance_front(&self, len: usize, fresh: bool, front: &mut [f32], scratch: &Scratch) {
        let Scratch { decays, drifts, v, keys_weighted: [keys, moving], .. } = scratch;
        let decay = if fresh { 0.0 } else { decays.whole };
        let (value, motion) = front.split_at_mut(self.transposed.len());
        if decay != 0.0 && !drifts.still {
            add_to(self.work.options.level, drifts.whole, value, motion);
        }
        let advance = |state: &mut [f32], decay: f32, left: &Rows, right: &Packed| {
            let (shape, tokens) = (self.transposed, decays.first..len);
            Advance { shape, state, decay, left, right, tokens }.run_at(self.work.options.level);
        };
        advance(motion, decay, &v[0], moving);
        if !v[1].is_empty() {
            advance(motion, 1.0, &v[1], keys);
        }
        advance(value, decay, &v[0], keys);
    }

    fn decays(&self, place: &Place<'_>, chunk: &Range<usize>, to: &mut Scratch) {
        to.decays.prepare(self.work.options.level, &place.gates, chunk.clone());
        if let Some(drifts) = &place.drifts {
            to.drifts.prepare(drifts, chunk.clone());
        }
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
        let len = chunk.len();
        let [q, motion] = &mut to.q;
        q.read(place.of_queries(&self.inputs.q, head, chunk));
        // Q̇ = σ ddq + ddσ q
        if let Some(ddq) = &self.second.ddq {
            motion.read(place.of_queries(ddq, head, chunk));
            motion.scale(len, self.scales[0]);
        } else {
            motion.clear(len);
        }
        if self.scales[1] != 0.0 {
            motion.add(len, self.scales[1], q);
        }
        q.scale(len, self.scales[0]);
        to.dout[0].read(place.of_queries(&self.cotangents.dout, head, chunk));
        if let Some(cot_o) = &self.second.cot_o {
            to.dout[1].read(place.of_queries(cot_o, head, chunk));
        }
        PackQueries { len, gradients, scratch: to }.run_at(self.work.options.level);
    }

    fn decay_back(&self, back: &mut [f32], scratch: &Scratch) {
        let Scratch { decays, drifts, .. } = scratch;
        if decays.whole == 0.0 {
            return back.fill(0.0);
        }
        if !drifts.still {
            let (value, motion) = back.split_at_mut(self.work.shape.len());
            add_to(self.work.options.level, drifts.whole, value, motion);
        }
        if decays.whole != 1.0 {
            back.iter_mut().for_each(|x| *x *= decays.whole);
        }
    }

    fn advance_back(&self, len: usize, back: &mut [f32], scratch: &Scratch) {
        let Scratch { decays, q, douts_weighted: [douts, moving], .. } = scratch;
        let (value, motion) = back.split_at_mut(self.work.shape.len());
        let advance = |state: &mut [f32], left: &Rows, right: &Packed| {
            // Tokens from a reset on do not see what is before the chunk.
            let (shape, decay, tokens) = (self.work.shape, 1.0, 0..decays.reset.min(len));
            Advance { shape, state, decay, left, right, tokens }.run_at(self.work.options.level);
        };
        advance(value, &q[0], douts);
        advance(motion, &q[0], moving);
        if !q[1].is_empty() {
            advance(motion, &q[1], douts);
        }
    }

    fn states<'r>(&self, scratch: &'r mut Scratch) -> [&'r mut [f32]; 2] {
        [&mut scratch.state_transposed, &mut scratch.back]
    }

    fn behind(&self, len: usize, scratch: &mut Scratch) {
        let (shape, transposed, wanted) = (self.work.shape, self.transposed, self.wanted);
        Behind { len, shape, transposed, wanted, scratch }.run_at(self.work.options.level);
    }

    fn head(&self, at: &At<'_>, member: usize, span: &mut Span<'o, 's, T>, scratch: &mut Scratch) {
        let (shape, transposed, wanted) = (self.work.shape, self.transposed, self.wanted);
        let (len, blank, level) = (at.within.len(), at.blank, self.work.options.level);
        Chunk { len, shape, transposed, wanted, blank, scratch }.run_at(level);
        let [dim, width] = scratch.strides;
        if let Some(gdout) = span.gdout.get_mut(member) {
            write(gdout.slice_mut(s![at.within.clone(), ..]), &scratch.gdout, width, 1.0);
        }
        if self.gscale {
            let head = at.place.head * self.work.problem.group() + member;
            self.add_scale(at.place, at.chunk, head, scratch, &mut span.sums[1]);
        }
        if let Some(gq) = span.gq.get_mut(member) {
            // gq = σ · motion + ddσ · dq / σ
            let [value, motion] = &mut scratch.dq;
            if self.scales[1] != 0.0 {
                let sum = motion.iter_mut().zip(&**value);
                sum.for_each(|(x, y)| *x = self.scales[0] * *x + self.scales[1] * y);
                write(gq.slice_mut(s![at.within.clone(), ..]), motion, dim, 1.0);
            } else {
                write(gq.slice_mut(s![at.within.clone(), ..]), motion, dim, self.scales[0]);
            }
        }
    }

    fn finish(&self, at: &At<'_>, span: &mut Span<'o, 's, T>, scratch: &mut Scratch) {
        let [dim, width] = scratch.strides;
        if let Some(gk) = &mut span.gk {
            write(gk.slice_mut(s![at.within.clone(), ..]), &scratch.gk, dim, 1.0);
        }
        if let Some(gv) = &mut span.gv {
            write(gv.slice_mut(s![at.within.clone(), ..]), &scratch.gv, width, 1.0);
        }
        if self.wanted.gg {
            write_gates(&scratch.flow.dg, at, span.gg.as_mut(), &mut span.sums[0]);
        }
    }
}

/// What the double backward pass allocates beside operands and results, if everything moves.
pub(super) fn buffers(work: &Work<'_>) -> Result<Vec<Buffer>, Error> {
    let moves = Moves { q: true, k: true, v: true, dout: true };
    let scratch = Scratch::new(&work.cut, work.shape, moves)?;
    Ok(super::both_ways::buffers(work, &scratch.buffers()))
}
