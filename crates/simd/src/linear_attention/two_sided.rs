//! The sweep of the passes that read the states before and behind a chunk.
//!
//! The states before the chunks of a span are summed again, forwards, from the state before the span,
//! which a first sweep kept. Then the chunks are worked on from the last to the first, with D the
//! gradient of the loss by the state after the chunk:
//!
//! ```text
//! S′ = α_L S + Σ_j ω_j k_jᵀ v_j            (R22), transposed
//! D′ = α_L D + σ Σ_i α_i q_iᵀ dout_i       (R28), after its last use
//! ```
//!
//! In the second order a state has a tangent behind it:
//!
//! ```text
//! Ṡ′ = α_L (a_L S + Ṡ) + Σ_j ω_j (b_j k_jᵀ v_j + k̇_jᵀ v_j + k_jᵀ v̇_j)               (R30)
//! Ḋ′ = α_L (a_L D + Ḋ) + Σ_i α_i (a_i Q_iᵀ dout_i + Q̇_iᵀ dout_i + Q_iᵀ cot_o_i)     (R31)
//! ```
//!
//! Every sum of ddg is one between two places: a and b from the chunk's begin and to its end. Sums over
//! the sequence would cancel. The results of the double backward pass are the tangents of those of the
//! backward pass, along the cotangents of the gradients and of the outputs.

use super::bf16_gradient;
use super::gradient::{Behind, Chunk};
use super::operands::{Operands, Results};
use super::schedule::{Place, Schedule, States, Uses, portions};
use super::scratch::{PackKeys, PackQueries, Scratch, Wanted};
use super::state::{Advance, Carry, add_to, combine, combined, pass_on};
use crate::Level;
use crate::element::{Tensor, TensorMut};
use crate::lanes::prefetch::Queue;
use crate::parallel::{Threaded, Threads};
use crate::plan::Buffer;
use crate::products::dot;
use crate::workspace::{Parts, Workspace};
use etalon_problem::Error;
use ndarray::{Ix2, Ix3, s};
use std::ops::Range;

/// A backward or double backward pass.
pub struct TwoSidedSweep<'a> {
    schedule: Schedule<'a>,
    operands: Operands<'a>,
    wanted: Wanted,
}

/// A chunk, and where its results are written.
struct At<'t, 'o> {
    level: Level,
    chunk: Place<'t>,
    to: &'t mut Targets<'o>,
    /// The contributions of its span to the gradient by g_gamma and to that by σ.
    sums: &'t mut [f64; 2],
}

/// Places of the results of a span, or of all spans of a slot: by q, k, v, dout and g.
struct Targets<'o> {
    /// The first of their tokens.
    start: usize,
    q: Option<TensorMut<'o, Ix3>>,
    k: Option<TensorMut<'o, Ix3>>,
    v: Option<TensorMut<'o, Ix3>>,
    dout: Option<TensorMut<'o, Ix3>>,
    g: Option<TensorMut<'o, Ix3>>,
}

/// Some rows of one head of a target.
fn part<'t>(
    to: &'t mut Option<TensorMut<'_, Ix3>>,
    head: usize,
    rows: Range<usize>,
) -> Option<TensorMut<'t, Ix2>> {
    to.as_mut().map(|to| to.view_mut().slice(s![head, rows, ..]))
}

/// Writes factor · rows that lie `stride` apart as some rows of one head of a target.
fn write(
    level: Level,
    to: &mut Option<TensorMut<'_, Ix3>>,
    head: usize,
    rows: Range<usize>,
    from: &[f32],
    stride: usize,
    factor: f32,
) {
    if let Some(mut to) = part(to, head, rows) {
        to.write_rows_by(level, from, stride, factor);
    }
}

/// Buffers that a pass allocates beside operands and results, if every operand has a tangent that may have
/// one.
pub fn buffers(schedule: &Schedule<'_>) -> Vec<Buffer> {
    let tangents = [schedule.order == 2; 4];
    let memory = Parts::list(|parts| Scratch::new(parts, schedule, tangents));
    schedule.buffers(&memory, &[schedule.transposed, schedule.shape], true)
}

impl Threaded for TwoSidedSweep<'_> {
    type Scratch<'m> = Scratch<'m>;

    fn scratch<'m>(&self, parts: &mut Parts<'m>) -> Scratch<'m> {
        Scratch::new(parts, &self.schedule, self.operands.tangents(self.schedule.cut.bf16))
    }
}

impl<'a> TwoSidedSweep<'a> {
    /// Runs a pass that writes the results that have a place.
    pub fn run(
        workspace: &Workspace,
        schedule: Schedule<'a>,
        operands: Operands<'a>,
        results: Results<'_>,
    ) -> Result<(), Error> {
        let wanted = Wanted::of(&results, &operands, schedule.order);
        TwoSidedSweep { schedule, operands, wanted }.write(workspace, results)
    }

    /// Writes the results.
    fn write(&self, workspace: &Workspace, mut results: Results<'_>) -> Result<(), Error> {
        let TwoSidedSweep { schedule, operands, .. } = self;
        let mut threads = Threads::new(workspace, self, schedule.workers())?;
        let mut fronts = States::new(workspace, schedule, schedule.transposed, true)?;
        let mut backs = States::new(workspace, schedule, schedule.shape, false)?;
        let sums = schedule.spans().saturating_mul(size_of::<[f64; 2]>() / size_of::<f32>());
        let mut sums = workspace.room(sums, "sums of spans")?;
        let sums: &mut [[f64; 2]] = bytemuck::cast_slice_mut(&mut sums);
        sums.fill([0.0; 2]);
        // Nothing has been written yet.
        fronts.begin(&operands.initial);
        backs.begin(&operands.last);
        let targets = self.targets(&mut results, !schedule.whole());
        if schedule.whole() {
            let spans = schedule.places(false).map(|place| schedule.cut.spans(place.tokens.len()));
            let tasks = schedule.places(false).zip(targets).zip(portions(&mut *sums, spans));
            let tasks = tasks.zip(fronts.slots().zip(backs.slots()));
            threads.share(tasks, |(((place, to), sums), ends), scratch| {
                self.slot(&place, to, sums, ends.into(), scratch);
            });
        } else {
            let tasks = schedule.places(true).zip(fronts.behind().zip(backs.behind()));
            threads.share(tasks, |(place, (front, back)), scratch| {
                front.copy_from_slice(self.sum_front(&place, scratch));
                self.sum_back(&place, scratch);
                back.copy_from_slice(scratch.back_sum);
            });
            fronts.scan(|span| operands.carry(span));
            backs.scan(|span| operands.carry(span));
            let tasks = schedule.places(true).zip(targets).zip(&mut *sums);
            let tasks = tasks.zip(fronts.before().zip(backs.before()));
            threads.share(tasks, |(((place, mut to), sums), (front, back)), scratch| {
                self.span(&place, &mut to, sums, [front, back], false, scratch);
            });
        }
        backs.finish(results.initial, schedule.order - 1);
        fronts.finish(results.last, 1);
        let total = |which: usize, head: Option<usize>| {
            let places = schedule.places(true).zip(&*sums);
            let here = places.filter(|(place, _)| head.is_none_or(|head| place.head == head));
            here.map(|(_, sums)| sums[which]).sum::<f64>() as f32
        };
        results.scale.into_iter().for_each(|scale| *scale = total(1, None));
        for (head, g) in results.g_gamma.into_iter().flatten().enumerate() {
            *g = total(0, Some(head));
        }
        Ok(())
    }

    /// The places of the results of every slot, or of every span.
    fn targets<'o>(
        &self,
        results: &mut Results<'o>,
        by_span: bool,
    ) -> impl Iterator<Item = Targets<'o>> + Send + use<'o, 'a> {
        let (schedule, group) = (&self.schedule, self.schedule.problem.group());
        let Results { q, k, v, dout, g, .. } = results;
        let mut pieces = [(q, group), (k, 1), (v, 1), (dout, group), (g, 1)]
            .map(|(result, group)| schedule.pieces(result.take(), group, by_span));
        schedule.places(by_span).map(move |place| {
            let [q, k, v, dout, g] = pieces.each_mut().map(|pieces| pieces.next().flatten());
            Targets { start: place.tokens.start, q, k, v, dout, g }
        })
    }

    /// A slot from its begin to its end and back. `front` and `back` hold the states that it begins with
    /// at either end, and then those that it ends with.
    fn slot(
        &self,
        place: &Place<'_>,
        mut to: Targets<'_>,
        sums: &mut [[f64; 2]],
        [front, back]: [&mut [f32]; 2],
        scratch: &mut Scratch<'_>,
    ) {
        let Schedule { problem, cut, order, options, .. } = self.schedule;
        // The tangent of the state after the last span is a result; the state itself is one of the
        // forward pass.
        let last = order == 2 && problem.final_state;
        let fronts = std::mem::take(&mut scratch.fronts);
        for (span, kept) in place.spans(&cut).zip(fronts.chunks_exact_mut(front.len())) {
            kept.copy_from_slice(front);
            if last || span.tokens.end < place.tokens.end {
                let sum = self.sum_front(&span, scratch);
                pass_on(options.level, self.operands.carry(&span), front, sum);
            }
        }
        for span in place.spans(&cut).rev() {
            let before = &fronts[span.number * front.len()..][..front.len()];
            self.span(&span, &mut to, &mut sums[span.number], [before, back], true, scratch);
            pass_on(options.level, self.operands.carry(&span), back, scratch.back_sum);
        }
        scratch.fronts = fronts;
    }

    /// Reads the decays of a chunk.
    fn read_decays(&self, chunk: &Place<'_>, to: &mut Scratch<'_>) {
        let [gates, tangents] = self.operands.gates(chunk);
        to.decays.prepare(self.schedule.options.level, &gates, chunk.tokens.clone());
        if to.second {
            to.log_tangents.prepare(&tangents, chunk.tokens.clone());
        }
        if self.schedule.cut.bf16 {
            let scales = [to.scale, self.operands.ddscale];
            to.tiles.prepare(&to.decays, &to.log_tangents, scales, chunk.tokens.len());
        }
    }

    /// Reads the keys and values of a chunk, for its state alone or for gradients.
    fn read_keys(&self, chunk: &Place<'_>, gradients: bool, to: &mut Scratch<'_>) {
        self.read_decays(chunk, to);
        let Operands { k, v, .. } = &self.operands;
        let (level, bf16) = (self.schedule.options.level, self.schedule.cut.bf16);
        let ([of_k, of_v], len) = ([k, v].map(|x| chunk.rows(x, chunk.head)), chunk.tokens.len());
        if bf16 {
            to.tiles.read_keys(level, &to.decays, [of_k, of_v], len, gradients);
        } else {
            to.k.read(of_k);
            to.v.read(of_v);
        }
        for x in [k, v] {
            chunk.ask_next(x, chunk.head, gradients, &mut to.then);
        }
        if bf16 {
            to.then.ask_all();
        } else {
            level.run(PackKeys { len, gradients, scratch: to });
        }
    }

    /// Reads the queries and cotangents of a query head in a chunk.
    fn read_head(&self, chunk: &Place<'_>, member: usize, uses: Uses, to: &mut Scratch<'_>) {
        let Schedule { problem, options, order, .. } = self.schedule;
        let (head, len) = (chunk.head * problem.group() + member, chunk.tokens.len());
        let Operands { q, dout, .. } = &self.operands;
        let [of_q, of_dout] = [q, dout].map(|x| chunk.rows(x, head));
        if self.schedule.cut.bf16 {
            to.tiles.read_head(options.level, &to.decays, [of_q, of_dout], len, uses.state);
        } else {
            to.q.read(of_q);
            to.dout.read(of_dout);
        }
        for x in [q, dout] {
            chunk.ask_next(x, head, true, &mut to.then);
        }
        if self.schedule.cut.bf16 {
            return to.then.ask_all();
        }
        if order == 2 {
            // Q̇ = σ ddq + ddσ q
            let ([q, tangent], ddscale) = (&mut to.q.rows, self.operands.ddscale);
            match self.operands.q[1] {
                Some(_) => tangent.scale(len, to.scale),
                None => tangent.clear(len),
            }
            if ddscale != 0.0 {
                tangent.add(len, ddscale, q);
            }
            q.scale(len, to.scale);
        }
        options.level.run(PackQueries { len, uses, scratch: to });
    }

    /// Sᵀ after each chunk of a span, from the span alone. Returns the last.
    fn sum_front<'t>(&self, place: &Place<'_>, scratch: &'t mut Scratch<'_>) -> &'t [f32] {
        let chunks = place.chunks(&self.schedule.cut);
        let last = chunks.len() - 1;
        for (n, chunk) in chunks.enumerate() {
            self.read_keys(&chunk, false, scratch);
            self.advance_front(n, chunk.tokens.len(), scratch);
            scratch.then.ask_all();
        }
        let len = self.schedule.transposed.len() * self.schedule.order;
        &scratch.sums[last * len..][..len]
    }

    /// Sᵀ after chunk `n` of a span from the one after the chunk before: (R22) and (R30).
    fn advance_front(&self, n: usize, len: usize, scratch: &mut Scratch<'_>) {
        let Schedule { transposed: shape, order, options, .. } = self.schedule;
        let Scratch { decays, log_tangents, k, v, sums, tiles, then, .. } = scratch;
        let state = shape.len() * order;
        let (before, after) = sums.split_at_mut(n * state);
        if n > 0 {
            after[..state].copy_from_slice(&before[(n - 1) * state..]);
        }
        let (value, tangent) = after[..state].split_at_mut(shape.len());
        let decay = if n == 0 { 0.0 } else { decays.whole };
        // Rows or their tangents, on the left and on the right.
        let mut advance = |state: &mut [f32], decay: f32, [left, right]: [usize; 2]| {
            if self.schedule.cut.bf16 {
                let state = (state, decay);
                return tiles.advance_front(&self.schedule, state, decays, [left, right], len);
            }
            let (left, right, tokens) = (&v.rows[left], &k.weighted[right], decays.first..len);
            let then = &mut *then;
            options.level.run(Advance { shape, state, decay, left, right, tokens, then });
        };
        if order == 2 {
            if decay != 0.0 && !log_tangents.zero {
                add_to(options.level, log_tangents.whole, value, tangent);
            }
            advance(tangent, decay, [0, 1]);
            if !v.rows[1].is_empty() || !tiles.k[1].is_absent() {
                advance(tangent, 1.0, [1, 0]);
            }
        }
        advance(value, decay, [0, 0]);
    }

    /// D before the first chunk of a span, from the span alone: `scratch.back_sum`.
    fn sum_back(&self, place: &Place<'_>, scratch: &mut Scratch<'_>) {
        for (n, chunk) in place.chunks(&self.schedule.cut).rev().enumerate() {
            self.read_decays(&chunk, scratch);
            self.decay_back(n == 0, scratch);
            for member in 0..self.schedule.problem.group() {
                self.read_head(&chunk, member, Uses::STATE, scratch);
                self.advance_back(chunk.tokens.len(), scratch);
                scratch.then.ask_all();
            }
        }
    }

    /// D ← α_L D, and the same of its tangent; 0 behind the last chunk of the span.
    fn decay_back(&self, last: bool, scratch: &mut Scratch<'_>) {
        let Scratch { decays, log_tangents, back_sum, .. } = scratch;
        if last || decays.whole == 0.0 {
            return back_sum.fill(0.0);
        }
        let (value, tangent) = back_sum.split_at_mut(self.schedule.shape.len());
        if !log_tangents.zero {
            add_to(self.schedule.options.level, log_tangents.whole, value, tangent);
        }
        if decays.whole != 1.0 {
            back_sum.iter_mut().for_each(|x| *x *= decays.whole);
        }
    }

    /// (R28), and (R31), for one query head, D having decayed.
    fn advance_back(&self, len: usize, scratch: &mut Scratch<'_>) {
        let Schedule { shape, order, options, .. } = self.schedule;
        let Scratch { decays, q, dout, back_sum, tiles, then, .. } = scratch;
        let (value, tangent) = back_sum.split_at_mut(shape.len());
        let mut advance = |state: &mut [f32], [left, right]: [usize; 2]| {
            if self.schedule.cut.bf16 {
                return tiles.advance_back(&self.schedule, state, decays, [left, right], len);
            }
            // Tokens from a reset on do not see what is before the chunk.
            let (decay, tokens) = (1.0, 0..decays.reset.min(len));
            let plain = order == 1 && decays.none;
            let right = if plain { &dout.along[0] } else { &dout.weighted[right] };
            let (left, then) = (&q.rows[left], &mut *then);
            options.level.run(Advance { shape, state, decay, left, right, tokens, then });
        };
        advance(value, [0, 0]);
        if order == 2 {
            advance(tangent, [0, 1]);
            if !q.rows[1].is_empty() || !tiles.q[1].is_absent() {
                advance(tangent, [1, 0]);
            }
        }
    }

    /// The results of a span; with `keep` D before its first chunk, from the span alone, is left in
    /// `scratch.back_sum`.
    fn span(
        &self,
        place: &Place<'_>,
        to: &mut Targets<'_>,
        sums: &mut [f64; 2],
        [front, back]: [&[f32]; 2],
        keep: bool,
        scratch: &mut Scratch<'_>,
    ) {
        let Schedule { problem, cut, options, .. } = self.schedule;
        let (wanted, &Range { start, end }) = (self.wanted, &place.tokens);
        let chunks = || place.chunks(&cut).enumerate();
        for (n, chunk) in chunks().take(chunks().len() - 1) {
            self.read_keys(&chunk, false, scratch);
            self.advance_front(n, chunk.tokens.len(), scratch);
            scratch.then.ask_all();
        }
        for (n, chunk) in chunks().rev() {
            let (tokens, more) = (chunk.tokens.clone(), keep || n > 0);
            let (len, last) = (tokens.len(), tokens.end == end);
            self.read_keys(&chunk, true, scratch);
            let carries = [start..tokens.start, tokens.end..end]
                .map(|tokens| self.operands.carry(&place.part(tokens)));
            self.behind((n, last), len, carries, [front, back], scratch);
            if more {
                self.decay_back(last, scratch);
            }
            let blank = tokens.start == 0 && !problem.initial_state;
            let mut at = At { level: options.level, chunk, to, sums };
            for member in 0..problem.group() {
                let uses = Uses { results: true, state: more };
                self.read_head(&at.chunk, member, uses, scratch);
                if more {
                    self.advance_back(len, scratch);
                }
                if cut.bf16 {
                    at.bf16_chunk(self, blank, member, scratch);
                } else {
                    at.ask_for_results(member, &mut scratch.then);
                    let dscale = &mut at.sums[1];
                    options.level.run(Chunk { len, wanted, blank, scratch, dscale });
                    at.finish_queries(self, member, scratch);
                }
            }
            at.finish_keys(wanted, scratch);
            scratch.then.ask_all();
        }
    }

    /// The part of the gradients by keys that comes from the states at both ends of chunk `n` of a span, maybe its
    /// last: those at the ends of the span, and from there on sums of the span.
    fn behind(
        &self,
        (n, last): (usize, bool),
        len: usize,
        carries: [Carry; 2],
        [front, back]: [&[f32]; 2],
        scratch: &mut Scratch<'_>,
    ) {
        let (wanted, level) = (self.wanted, self.schedule.options.level);
        let Scratch { decays, log_tangents, flow, tiles, strides, dk, dv, .. } = scratch;
        let Scratch { sums, back_sum, back: to_back, state_transposed, .. } = scratch;
        let sum = (n > 0).then(|| &sums[(n - 1) * front.len()..][..front.len()]);
        let back_sum = (!last).then_some(&**back_sum);
        if !self.schedule.cut.bf16 {
            combine(level, carries[0], front, sum, state_transposed);
            combine(level, carries[1], back, back_sum, to_back);
            return level.run(Behind { len, wanted, scratch });
        }
        let front = combined(level, carries[0], front, sum, state_transposed);
        let back = combined(level, carries[1], back, back_sum, to_back);
        tiles.round(&self.schedule, [front, back]);
        let (states, shape, strides) = ([front, back], self.schedule.shape, *strides);
        level
            .run_tiles(bf16_gradient::Behind {
                len,
                wanted,
                states,
                shape,
                decays,
                log_tangents,
                flow,
                strides,
                tiles,
                sums: [dk, dv],
            })
            .unwrap_or_default();
    }
}

impl At<'_, '_> {
    /// The rows of the chunk among those of its target.
    fn rows(&self) -> Range<usize> {
        let Range { start, end } = self.chunk.tokens;
        start - self.to.start..end - self.to.start
    }

    /// The lines in which results of a query head, and with the first of them those of keys, are written.
    fn ask_for_results(&mut self, member: usize, then: &mut Queue) {
        let rows = self.rows();
        let Targets { q, k, v, dout, .. } = &mut *self.to;
        let results = [(dout, member), (q, member), (k, 0), (v, 0)];
        for (to, head) in results.into_iter().take(if member == 0 { 4 } else { 2 }) {
            if let Some(to) = part(to, head, rows.clone()) {
                then.push(to.all_lines());
            }
        }
    }

    /// The gradients of the chunk by what one query head has, and what it gives to those of keys, in bf16.
    fn bf16_chunk(
        &mut self,
        sweep: &TwoSidedSweep<'_>,
        blank: bool,
        member: usize,
        scratch: &mut Scratch<'_>,
    ) {
        let (rows, wanted, ddscale) = (self.rows(), sweep.wanted, sweep.operands.ddscale);
        let to = [&mut self.to.q, &mut self.to.dout].map(|to| part(to, member, rows.clone()));
        let (len, dscale) = (rows.len(), &mut self.sums[1]);
        let chunk = bf16_gradient::Chunk { len, wanted, blank, ddscale, scratch, dscale, to };
        self.level.run_tiles(chunk).unwrap_or_default();
    }

    /// Writes the results of the keys of the chunk.
    fn finish_keys(&mut self, wanted: Wanted, scratch: &mut Scratch<'_>) {
        let (rows, [dim, width]) = (self.rows(), scratch.strides);
        write(self.level, &mut self.to.k, 0, rows.clone(), scratch.dk, dim, 1.0);
        write(self.level, &mut self.to.v, 0, rows.clone(), scratch.dv, width, 1.0);
        if wanted.g {
            let dg = &scratch.flow.dg[..rows.len()];
            write(self.level, &mut self.to.g, 0, rows, dg, 1, 1.0);
            self.sums[0] += dg.iter().map(|&dg| f64::from(dg)).sum::<f64>();
        }
    }

    /// Writes the results of the queries of one query head in the chunk.
    fn finish_queries(
        &mut self,
        sweep: &TwoSidedSweep<'_>,
        member: usize,
        scratch: &mut Scratch<'_>,
    ) {
        let (rows, [dim, width], operands) = (self.rows(), scratch.strides, &sweep.operands);
        if !scratch.second {
            write(self.level, &mut self.to.q, member, rows, scratch.dq[0], dim, scratch.scale);
            return;
        }
        write(self.level, &mut self.to.dout, member, rows.clone(), scratch.gdout, width, 1.0);
        if sweep.wanted.scale {
            let head = self.chunk.head * sweep.schedule.problem.group() + member;
            self.add_scale(self.chunk.rows(&operands.q, head), scratch);
        }
        // gq = σ · tangent + ddσ · dq / σ
        let ([value, tangent], mut scale, ddscale) =
            (&mut scratch.dq, scratch.scale, operands.ddscale);
        if self.to.q.is_some() && ddscale != 0.0 {
            let sum = tangent.iter_mut().zip(&**value);
            sum.for_each(|(x, y)| *x = scale * *x + ddscale * y);
            scale = 1.0;
        }
        write(self.level, &mut self.to.q, member, rows, tangent, dim, scale);
    }

    /// Adds what a query head gives to gσ (R19), from dq / σ and its tangent.
    fn add_scale(&mut self, q: [Option<Tensor<'_, Ix2>>; 2], scratch: &mut Scratch<'_>) {
        let Scratch { dq: [value, tangent], strides, row, .. } = scratch;
        for (q, with) in q.into_iter().zip([tangent, value]) {
            let Some(q) = q else { continue };
            for (i, with) in (0..self.chunk.tokens.len()).zip(with.chunks(strides[0])) {
                q.slice(s![i, ..]).read(row);
                self.sums[1] += f64::from(dot(row, &with[..row.len()]));
            }
        }
    }
}
