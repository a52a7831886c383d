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
//! the sequence would cancel. What a chunk gives is a [`Body`].

use super::operands::{Operands, Results};
use super::rows::{Panels, Rows};
use super::schedule::{Place, Schedule, States, portions};
use super::scratch::{PackKeys, PackQueries, Scratch, Tangents, Wanted};
use super::state::{Advance, Shape, add_to, combine, pass_on};
use crate::element::{Tensor, TensorMut};
use crate::parallel::share;
use crate::plan::Buffer;
use crate::workspace::{Parts, Workspace};
use etalon_problem::Error;
use ndarray::{Ix3, Ix4, s};
use std::ops::Range;

/// What a chunk gives.
pub trait Body: Sync {
    /// What the state behind a chunk of `len` tokens contributes.
    fn behind(&self, sweep: &TwoSidedSweep<'_>, len: usize, scratch: &mut Scratch<'_>);

    /// What one query head contributes, and its own results.
    fn head(
        &self,
        sweep: &TwoSidedSweep<'_>,
        at: &mut At<'_, '_>,
        member: usize,
        scratch: &mut Scratch<'_>,
    );
}

/// A backward or double backward pass, its operands checked.
#[derive(Clone, Copy)]
pub struct TwoSidedSweep<'a> {
    pub schedule: Schedule<'a>,
    pub operands: Operands<'a>,
    pub wanted: Wanted,
    pub body: &'a dyn Body,
}

/// A chunk, and where its results are written.
pub struct At<'t, 'o> {
    pub place: &'t Place<'t>,
    /// Its tokens, counted from the begin of its sequence.
    pub chunk: Range<usize>,
    /// Whether S is 0.
    pub blank: bool,
    pub to: &'t mut Targets<'o>,
    /// What its span adds to the gradient by g_gamma and to that by σ.
    pub sums: &'t mut [f64; 2],
}

/// Where the results of a span, or of all spans of a slot, are written: by q, k, v, dout and g.
pub struct Targets<'o> {
    /// The first of their tokens.
    start: usize,
    pub q: Option<TensorMut<'o, Ix3>>,
    k: Option<TensorMut<'o, Ix3>>,
    v: Option<TensorMut<'o, Ix3>>,
    pub dout: Option<TensorMut<'o, Ix3>>,
    g: Option<TensorMut<'o, Ix3>>,
}

/// Writes factor · rows that lie `stride` apart as some rows of one head of a target.
pub fn write(
    to: &mut Option<TensorMut<'_, Ix3>>,
    head: usize,
    rows: Range<usize>,
    from: &[f32],
    stride: usize,
    factor: f32,
) {
    if let Some(to) = to {
        to.view_mut().slice(s![head, rows, ..]).write_rows(from, stride, factor);
    }
}

/// The memory of one thread.
struct Memory<'m> {
    scratch: Scratch<'m>,
    /// Sᵀ after each chunk of a span, from the span alone.
    sums: &'m mut [f32],
    /// D before the first chunk of a span, from the span alone.
    back: &'m mut [f32],
    /// Sᵀ before each span of a slot that is left to one thread.
    fronts: &'m mut [f32],
}

impl<'m> Memory<'m> {
    fn new(parts: &mut Parts<'m>, schedule: &Schedule<'_>, tangents: Tangents) -> Self {
        let states = |shape: Shape, count: usize| {
            shape.len().saturating_mul(schedule.order).saturating_mul(count)
        };
        let kept = if schedule.whole() { schedule.longest() } else { 0 };
        let scratch = Scratch::new(parts, schedule, tangents);
        let back = parts.room(states(schedule.shape, 1));
        parts.group("states that are kept");
        let sums = parts.room(states(schedule.transposed, schedule.interval()));
        Memory { scratch, sums, back, fronts: parts.room(states(schedule.transposed, kept)) }
    }
}

/// What a pass allocates beside operands and results, if every operand has a tangent that may have one.
pub fn buffers(schedule: &Schedule<'_>) -> Vec<Buffer> {
    let all = schedule.order == 2;
    let tangents = Tangents { q: all, k: all, v: all, dout: all };
    let memory = Parts::list(|parts| Memory::new(parts, schedule, tangents));
    schedule.buffers(&memory, &[schedule.transposed, schedule.shape], true)
}

impl<'a> TwoSidedSweep<'a> {
    /// Writes the results that are asked for.
    pub fn run(&self, workspace: &Workspace, mut results: Results<'_>) -> Result<(), Error> {
        let TwoSidedSweep { schedule, operands, .. } = self;
        let tangents = Tangents::of(operands);
        let each = Parts::count(|parts| Memory::new(parts, schedule, tangents));
        let memory = each.saturating_mul(schedule.workers());
        let mut memory = workspace.room(memory, "the scratch of threads")?;
        let mut fronts = States::new(workspace, schedule, schedule.transposed, true)?;
        let mut backs = States::new(workspace, schedule, schedule.shape, false)?;
        let sums = schedule.spans().saturating_mul(size_of::<[f64; 2]>() / size_of::<f32>());
        let mut sums = workspace.zeros(sums, "sums of spans")?;
        let sums: &mut [[f64; 2]] = bytemuck::cast_slice_mut(&mut sums);
        // Nothing has been written yet.
        fronts.begin(&operands.initial, true);
        backs.begin(&operands.last, false);
        let threads = memory.chunks_exact_mut(each);
        let targets = self.targets(&mut results, !schedule.whole());
        if schedule.whole() {
            let spans = schedule.places(false).map(|place| schedule.cut.spans(place.tokens.len()));
            let tasks = schedule.places(false).zip(targets).zip(portions(&mut *sums, spans));
            let states = fronts.slots().zip(backs.slots());
            share(
                threads,
                |part| self.enter(part),
                tasks.zip(states),
                |(((place, to), sums), ends), memory| {
                    self.slot(&place, to, sums, ends.into(), memory);
                },
            );
        } else {
            let tasks = schedule.places(true).zip(fronts.behind().zip(backs.behind()));
            share(
                threads,
                |part| self.enter(part),
                tasks,
                |(place, (front, back)), memory| {
                    front.copy_from_slice(self.sum_front(&place, memory));
                    self.sum_back(&place, memory);
                    back.copy_from_slice(memory.back);
                },
            );
            fronts.scan(|span| operands.carry(span, span.tokens.clone()));
            backs.scan(|span| operands.carry(span, span.tokens.clone()));
            let states = fronts.before().zip(backs.before());
            let tasks = schedule.places(true).zip(targets).zip(&mut *sums).zip(states);
            let threads = memory.chunks_exact_mut(each);
            share(
                threads,
                |part| self.enter(part),
                tasks,
                |(((place, mut to), sums), ends), memory| {
                    self.span(&place, &mut to, sums, ends.into(), false, memory);
                },
            );
        }
        backs.finish(results.initial, schedule.order - 1, false);
        fronts.finish(results.last, 1, true);
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

    /// The memory of a thread, in its part of all memory.
    fn enter<'m>(&self, part: &'m mut [f32]) -> Memory<'m> {
        Memory::new(&mut Parts::of(part), &self.schedule, Tangents::of(&self.operands))
    }

    /// Where the results of every slot, or of every span, are written.
    fn targets<'o>(
        &self,
        results: &mut Results<'o>,
        by_span: bool,
    ) -> impl Iterator<Item = Targets<'o>> + Send + use<'o, 'a> {
        let (schedule, group) = (&self.schedule, self.schedule.problem.group());
        let Results { q, k, v, dout, g, .. } = results;
        let mut q = schedule.pieces(q.take(), group, by_span);
        let mut k = schedule.pieces(k.take(), 1, by_span);
        let mut v = schedule.pieces(v.take(), 1, by_span);
        let mut dout = schedule.pieces(dout.take(), group, by_span);
        let mut g = schedule.pieces(g.take(), 1, by_span);
        schedule.places(by_span).map(move |place| Targets {
            start: place.tokens.start,
            q: q.next().flatten(),
            k: k.next().flatten(),
            v: v.next().flatten(),
            dout: dout.next().flatten(),
            g: g.next().flatten(),
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
        memory: &mut Memory<'_>,
    ) {
        let Schedule { problem, cut, order, options, .. } = self.schedule;
        // The tangent of the state after the last span is a result; the state itself is one of the
        // forward pass.
        let last = order == 2 && problem.final_state;
        let fronts = std::mem::take(&mut memory.fronts);
        for (span, kept) in place.spans(&cut).zip(fronts.chunks_exact_mut(front.len())) {
            kept.copy_from_slice(front);
            if last || span.tokens.end < place.tokens.end {
                let sum = self.sum_front(&span, memory);
                let carry = self.operands.carry(&span, span.tokens.clone());
                pass_on(options.level, carry, front, sum);
            }
        }
        for span in place.spans(&cut).rev() {
            let before = &fronts[span.number * front.len()..][..front.len()];
            self.span(&span, &mut to, &mut sums[span.number], [before, back], true, memory);
            let carry = self.operands.carry(&span, span.tokens.clone());
            pass_on(options.level, carry, back, memory.back);
        }
        memory.fronts = fronts;
    }

    /// Reads the decays of a chunk.
    fn read_decays(&self, place: &Place<'_>, chunk: &Range<usize>, to: &mut Scratch<'_>) {
        let (gates, tangents) = self.operands.gates(place);
        to.decays.prepare(self.schedule.options.level, &gates, chunk.clone());
        if let Some(tangents) = tangents {
            to.log_tangents.prepare(&tangents, chunk.clone());
        }
    }

    /// Reads the keys and values of a chunk, for its state alone or for gradients.
    fn read_keys(
        &self,
        place: &Place<'_>,
        chunk: &Range<usize>,
        gradients: bool,
        to: &mut Scratch<'_>,
    ) {
        self.read_decays(place, chunk, to);
        read(&mut to.k, &self.operands.k, place, place.head, chunk);
        read(&mut to.v, &self.operands.v, place, place.head, chunk);
        let len = chunk.len();
        PackKeys { len, gradients, scratch: to }.run_at(self.schedule.options.level);
    }

    /// Reads the queries and cotangents of a query head in a chunk, for the states alone or for
    /// gradients.
    fn read_queries(
        &self,
        place: &Place<'_>,
        chunk: &Range<usize>,
        member: usize,
        gradients: bool,
        to: &mut Scratch<'_>,
    ) {
        let Schedule { problem, options, order, .. } = self.schedule;
        let (head, len) = (place.head * problem.group() + member, chunk.len());
        read(&mut to.q, &self.operands.q, place, head, chunk);
        read(&mut to.dout, &self.operands.dout, place, head, chunk);
        if order == 2 {
            // Q̇ = σ ddq + ddσ q
            let ([q, tangent], [scale, ddscale]) = (&mut to.q, self.operands.scale);
            match self.operands.q[1] {
                Some(_) => tangent.scale(len, scale),
                None => tangent.clear(len),
            }
            if ddscale != 0.0 {
                tangent.add(len, ddscale, q);
            }
            q.scale(len, scale);
        }
        PackQueries { len, gradients, scratch: to }.run_at(options.level);
    }

    /// Sᵀ after each chunk of a span, from the span alone. Returns the last.
    fn sum_front<'t>(&self, place: &Place<'_>, memory: &'t mut Memory<'_>) -> &'t [f32] {
        for (n, chunk) in self.schedule.cut.chunks(&place.tokens).enumerate() {
            self.read_keys(place, &chunk, false, &mut memory.scratch);
            self.advance_front(n, chunk.len(), memory);
        }
        let len = self.schedule.transposed.len() * self.schedule.order;
        let chunks = self.schedule.cut.chunks(&place.tokens).len();
        &memory.sums[(chunks - 1) * len..][..len]
    }

    /// Sᵀ after chunk `n` of a span from the one after the chunk before: (R22) and (R30).
    fn advance_front(&self, n: usize, len: usize, memory: &mut Memory<'_>) {
        let Schedule { transposed: shape, order, options, .. } = self.schedule;
        let Scratch { decays, log_tangents, v, keys_weighted, .. } = &memory.scratch;
        let state = shape.len() * order;
        let (before, after) = memory.sums.split_at_mut(n * state);
        if n > 0 {
            after[..state].copy_from_slice(&before[(n - 1) * state..]);
        }
        let (value, tangent) = after[..state].split_at_mut(shape.len());
        let decay = if n == 0 { 0.0 } else { decays.whole };
        let advance = |state: &mut [f32], decay: f32, left: &Rows<'_>, right: &Panels<'_>| {
            let tokens = decays.first..len;
            Advance { shape, state, decay, left, right, tokens }.run_at(options.level);
        };
        if order == 2 {
            if decay != 0.0 && !log_tangents.zero {
                add_to(options.level, log_tangents.whole, value, tangent);
            }
            advance(tangent, decay, &v[0], &keys_weighted[1]);
            if !v[1].is_empty() {
                advance(tangent, 1.0, &v[1], &keys_weighted[0]);
            }
        }
        advance(value, decay, &v[0], &keys_weighted[0]);
    }

    /// D before the first chunk of a span, from the span alone: `memory.back`.
    fn sum_back(&self, place: &Place<'_>, memory: &mut Memory<'_>) {
        let Memory { scratch, back, .. } = memory;
        back.fill(0.0);
        for (n, chunk) in self.schedule.cut.chunks(&place.tokens).rev().enumerate() {
            self.read_decays(place, &chunk, scratch);
            if n > 0 {
                self.decay_back(back, scratch);
            }
            for member in 0..self.schedule.problem.group() {
                self.read_queries(place, &chunk, member, false, scratch);
                self.advance_back(chunk.len(), back, scratch);
            }
        }
    }

    /// D ← α_L D, and the same of its tangent.
    fn decay_back(&self, back: &mut [f32], scratch: &Scratch<'_>) {
        let Scratch { decays, log_tangents, .. } = scratch;
        if decays.whole == 0.0 {
            return back.fill(0.0);
        }
        let (value, tangent) = back.split_at_mut(self.schedule.shape.len());
        if !log_tangents.zero {
            add_to(self.schedule.options.level, log_tangents.whole, value, tangent);
        }
        if decays.whole != 1.0 {
            back.iter_mut().for_each(|x| *x *= decays.whole);
        }
    }

    /// (R28), and (R31), for one query head, D having decayed.
    fn advance_back(&self, len: usize, back: &mut [f32], scratch: &Scratch<'_>) {
        let Schedule { shape, order, options, .. } = self.schedule;
        let Scratch { decays, q, douts, douts_weighted, .. } = scratch;
        let (value, tangent) = back.split_at_mut(shape.len());
        let advance = |state: &mut [f32], left: &Rows<'_>, right: &Panels<'_>| {
            // Tokens from a reset on do not see what is before the chunk.
            let (decay, tokens) = (1.0, 0..decays.reset.min(len));
            Advance { shape, state, decay, left, right, tokens }.run_at(options.level);
        };
        let plain = order == 1 && decays.none;
        advance(value, &q[0], if plain { &douts[0] } else { &douts_weighted[0] });
        if order == 2 {
            advance(tangent, &q[0], &douts_weighted[1]);
            if !q[1].is_empty() {
                advance(tangent, &q[1], &douts_weighted[0]);
            }
        }
    }

    /// The results of a span; with `keep` D before its first chunk, from the span alone, is left in
    /// `memory.back`.
    fn span(
        &self,
        place: &Place<'_>,
        to: &mut Targets<'_>,
        sums: &mut [f64; 2],
        [front, back]: [&[f32]; 2],
        keep: bool,
        memory: &mut Memory<'_>,
    ) {
        let Schedule { problem, cut, options, .. } = self.schedule;
        let Range { start, end } = place.tokens;
        let chunks = || cut.chunks(&place.tokens).enumerate();
        for (n, chunk) in chunks().take(chunks().len() - 1) {
            self.read_keys(place, &chunk, false, &mut memory.scratch);
            self.advance_front(n, chunk.len(), memory);
        }
        for (n, chunk) in chunks().rev() {
            let (len, last) = (chunk.len(), chunk.end == end);
            let Memory { scratch, sums: before, back: local, .. } = &mut *memory;
            self.read_keys(place, &chunk, true, scratch);
            let sum = (n > 0).then(|| &before[(n - 1) * front.len()..][..front.len()]);
            let carry = self.operands.carry(place, start..chunk.start);
            combine(options.level, carry, front, sum, scratch.state_transposed);
            let sum = (!last).then_some(&**local);
            let carry = self.operands.carry(place, chunk.end..end);
            combine(options.level, carry, back, sum, scratch.back);
            self.body.behind(self, len, scratch);
            let more = keep || n > 0;
            if last {
                local.fill(0.0);
            } else if more {
                self.decay_back(local, scratch);
            }
            let blank = chunk.start == 0 && !problem.initial_state;
            let mut at = At { place, chunk, blank, to, sums };
            for member in 0..problem.group() {
                self.read_queries(place, &at.chunk, member, true, scratch);
                if more {
                    self.advance_back(len, local, scratch);
                }
                self.body.head(self, &mut at, member, scratch);
            }
            at.finish(self.wanted, scratch);
        }
    }
}

impl At<'_, '_> {
    /// The rows of the chunk among those of its target.
    pub fn rows(&self) -> Range<usize> {
        self.chunk.start - self.to.start..self.chunk.end - self.to.start
    }

    /// Writes the results of the keys of the chunk.
    fn finish(&mut self, wanted: Wanted, scratch: &Scratch<'_>) {
        let (rows, [dim, width]) = (self.rows(), scratch.strides);
        write(&mut self.to.k, 0, rows.clone(), scratch.dk, dim, 1.0);
        write(&mut self.to.v, 0, rows.clone(), scratch.dv, width, 1.0);
        if wanted.g {
            let dg = &scratch.flow.dg[..rows.len()];
            write(&mut self.to.g, 0, rows, dg, 1, 1.0);
            self.sums[0] += dg.iter().map(|&dg| f64::from(dg)).sum::<f64>();
        }
    }
}

/// Reads the rows of a chunk of an operand and of its tangent.
fn read(
    to: &mut [Rows<'_>; 2],
    operand: &[Option<Tensor<'_, Ix4>>; 2],
    place: &Place<'_>,
    head: usize,
    chunk: &Range<usize>,
) {
    for (to, operand) in to.iter_mut().zip(operand) {
        if let Some(operand) = operand {
            to.read(place.rows(operand, head, chunk));
        }
    }
}
