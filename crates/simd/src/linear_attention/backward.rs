//! The backward pass, from the last chunk to the first, with D the gradient of the loss by the state
//! after the chunk:
//!
//! ```text
//! D′ = α_L D + σ Σ_i α_i q_iᵀ dout_i                      (R28), after its last use
//! ```
//!
//! The states before the chunks of a span are summed again, forwards, from the state before the span:
//! that is what is kept of the forward sweep. `gradient` has what a chunk gives.

use super::gradient::{Behind, Chunk, Wanted};
use super::scratch::{PackKeys, PackQueries, Scratch};
use super::spans::{Place, Work, chunks, combine, decay, numbered, pass_on, pieces, spans};
use super::state::{Advance, Shape, State};
use super::{Cotangents, Gradients, GradientsMut, Inputs, sequences};
use crate::aligned::Aligned;
use crate::attention::forward::zeros;
use crate::attention::sweeps::write_row;
use crate::heads::{all_queries, clear, key_rows};
use crate::parallel::for_each;
use crate::plan::Buffer;
use crate::{Element, Options};
use etalon_problem::{Decay, Error, LinearAttention};
use ndarray::{ArrayViewMut1, ArrayViewMut2, s};
use std::ops::Range;
use std::sync::Mutex;

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

/// The memory of one thread.
struct Room {
    scratch: Scratch,
    /// Sᵀ before each chunk of a span, from the span alone.
    locals: Vec<Aligned>,
    /// D after the chunk, from the span alone.
    back: Aligned,
    /// Sᵀ before each span of a slot.
    fronts: Vec<Aligned>,
}

impl<T: Element> Backward<'_, '_, '_, T> {
    fn run(&self, out: GradientsMut<'_, T>) -> Result<(), Error> {
        let Work { problem, sequences, cut, shape, .. } = &self.work;
        let key_heads = problem.extents.key_heads;
        let parallel = !self.work.whole();
        let room = || self.room(if parallel { 0 } else { self.work.longest() });
        let idle = Mutex::new(vec![room()?]);
        let mut fronts = self.work.states(self.transposed)?;
        let mut backs = self.work.states(*shape)?;
        let mut locals = [Vec::new(), Vec::new()];
        if parallel {
            locals = [self.work.rooms(self.transposed)?, self.work.rooms(*shape)?];
        }
        let mut sums: Vec<Vec<[f64; 2]>> = sequences
            .iter()
            .flat_map(|sequence| (0..key_heads).map(|_| vec![[0.0; 2]; spans(sequence, cut).len()]))
            .collect();
        // Nothing has been written yet.
        self.work.begin(&self.inputs.initial_state, &mut fronts, State::read_transposed);
        self.work.begin(&self.cotangents.dfinal_state, &mut backs, State::read);
        let GradientsMut { dq, dk, dv, dg_gamma, dg, dinitial_state, dscale } = out;
        let slots = self.spans([dq, dk, dv], dg, &mut sums);
        if parallel {
            self.apart(&idle, slots, locals, &mut fronts, &mut backs)?;
        } else {
            let tasks = slots.into_iter().zip(fronts.iter_mut().zip(&mut backs)).enumerate();
            for_each(&idle, tasks.collect(), room, |(slot, (spans, (front, back))), room| {
                self.whole(slot, spans, &mut front.elements, &mut back.elements, room);
            })?;
        }
        self.work.end(&backs, dinitial_state);
        let total = |which: usize, head: Option<usize>| {
            let slots = sums.iter().enumerate();
            let here = slots.filter(|(slot, _)| head.is_none_or(|head| slot % key_heads == head));
            here.flat_map(|(_, spans)| spans.iter().map(|sums| sums[which])).sum::<f64>()
        };
        if let Some(dscale) = dscale {
            *dscale = total(1, None) as f32;
        }
        if let Some(mut dg_gamma) = dg_gamma {
            dg_gamma
                .iter_mut()
                .enumerate()
                .for_each(|(head, dg)| *dg = total(0, Some(head)) as f32);
        }
        Ok(())
    }

    fn room(&self, spans: usize) -> Result<Room, Error> {
        let Work { problem, cut, shape, .. } = &self.work;
        let state = |shape: Shape| Aligned::zeros(shape.len(), "states");
        let states = |count: usize| {
            (0..count).map(|_| state(self.transposed)).collect::<Result<Vec<_>, Error>>()
        };
        Ok(Room {
            scratch: Scratch::new(cut, *shape, problem.scale as f32)?,
            locals: states(cut.span / cut.chunk)?,
            back: state(*shape)?,
            fronts: states(spans)?,
        })
    }

    /// The places of every slot and span.
    fn spans<'o>(
        &self,
        [dq, dk, dv]: [Option<ndarray::ArrayViewMut4<'o, T>>; 3],
        dg: Option<ndarray::ArrayViewMut3<'o, f32>>,
        sums: &'o mut [Vec<[f64; 2]>],
    ) -> Vec<Vec<Span<'o, T>>> {
        let Work { problem, sequences, cut, .. } = &self.work;
        let (key_heads, group) = (problem.extents.key_heads, problem.group());
        let covered = all_queries(sequences);
        let cut_up = |result: Option<ndarray::ArrayViewMut4<'o, T>>, group: usize| {
            result.map(|mut result| {
                clear(&mut result, covered, T::ZERO);
                pieces(result, sequences, (key_heads, group), cut).into_iter().flatten()
            })
        };
        let (mut dq, mut dk, mut dv) = (cut_up(dq, group), cut_up(dk, 1), cut_up(dv, 1));
        let mut dg = dg.map(|mut dg| {
            clear(&mut dg, covered, 0.0);
            pieces(dg, sequences, (key_heads, 1), cut).into_iter().flatten()
        });
        let slots = sums.iter_mut().map(|spans| {
            let span = |sums| Span {
                dq: dq.as_mut().and_then(Iterator::next).unwrap_or_default(),
                dk: dk.as_mut().and_then(Iterator::next).and_then(|mut one| one.pop()),
                dv: dv.as_mut().and_then(Iterator::next).and_then(|mut one| one.pop()),
                dg: dg.as_mut().and_then(Iterator::next).and_then(|mut one| one.pop()),
                sums,
            };
            spans.iter_mut().map(span).collect()
        });
        slots.collect()
    }

    fn place(&self, slot: usize, number: usize) -> Place<'_> {
        self.work.place(self.inputs, slot, number)
    }

    /// A slot from its begin to its end and back.
    fn whole(
        &self,
        slot: usize,
        spans: Vec<Span<'_, T>>,
        front: &mut Aligned,
        back: &mut Aligned,
        room: &mut Room,
    ) {
        let level = self.work.options.level;
        for number in 0..spans.len() {
            room.fronts[number].copy_from_slice(front);
            if number + 1 < spans.len() {
                let place = self.place(slot, number);
                let local = self.front(&place, room);
                pass_on(level, &place, &mut room.locals[local], front);
            }
        }
        for (number, span) in spans.into_iter().enumerate().rev() {
            let mut front = std::mem::take(&mut room.fronts[number]);
            self.span(slot, number, span, &front, back, true, room);
            std::mem::swap(&mut front, &mut room.fronts[number]);
            pass_on(level, &self.place(slot, number), &mut room.back, back);
        }
    }

    /// First the local states of all spans in both directions, then the states before them and
    /// behind them, then the spans.
    fn apart(
        &self,
        idle: &Mutex<Vec<Room>>,
        slots: Vec<Vec<Span<'_, T>>>,
        [mut locals, mut local_backs]: [Vec<Vec<State>>; 2],
        fronts: &mut [State],
        backs: &mut [State],
    ) -> Result<(), Error> {
        let room = || self.room(0);
        let both = numbered(&mut locals).into_iter().zip(numbered(&mut local_backs));
        for_each(idle, both.collect(), room, |((slot, number, front), (_, _, back)), room| {
            let place = self.place(slot, number);
            let local = self.front(&place, room);
            front.elements.copy_from_slice(&room.locals[local]);
            self.back(&place, room);
            back.elements.copy_from_slice(&room.back);
        })?;
        self.work.scan(&mut locals, fronts, |slot, number| self.place(slot, number));
        local_backs.iter_mut().for_each(|spans| spans.reverse());
        let counts: Vec<usize> = local_backs.iter().map(Vec::len).collect();
        self.work.scan(&mut local_backs, backs, |slot, number| {
            self.place(slot, counts[slot] - 1 - number)
        });
        let mut tasks = Vec::new();
        for (slot, spans) in slots.into_iter().enumerate() {
            tasks.extend(spans.into_iter().enumerate().map(|(number, span)| (slot, number, span)));
        }
        for_each(idle, tasks, room, |(slot, number, span), room| {
            let front = &locals[slot][number].elements;
            let back = &local_backs[slot][counts[slot] - 1 - number].elements;
            self.span(slot, number, span, front, back, false, room);
        })
    }

    /// Reads the keys and values of a chunk.
    fn keys(
        &self,
        place: &Place<'_>,
        chunk: &Range<usize>,
        gradients: bool,
        scratch: &mut Scratch,
    ) {
        let level = self.work.options.level;
        let rows = key_rows(place.sequence);
        let rows = rows.start + chunk.start..rows.start + chunk.end;
        let (batch, head) = (place.sequence.batch, place.head);
        scratch.decays.prepare(level, &place.gates, chunk.clone());
        scratch.k.read(self.inputs.k.slice(s![batch, head, rows.clone(), ..]));
        scratch.v.read(self.inputs.v.slice(s![batch, head, rows, ..]));
        PackKeys { len: chunk.len(), gradients, scratch }.run_at(level);
    }

    /// Reads the queries and cotangents of a query head in a chunk.
    fn queries(
        &self,
        place: &Place<'_>,
        chunk: &Range<usize>,
        member: usize,
        gradients: bool,
        scratch: &mut Scratch,
    ) {
        let head = place.head * self.work.problem.group() + member;
        let start = place.sequence.query_start;
        let rows = start + chunk.start..start + chunk.end;
        let batch = place.sequence.batch;
        scratch.q.read(self.inputs.q.slice(s![batch, head, rows.clone(), ..]));
        scratch.dout.read(self.cotangents.dout.slice(s![batch, head, rows, ..]));
        PackQueries { len: chunk.len(), gradients, scratch }.run_at(self.work.options.level);
    }

    /// Sᵀ after each chunk of a span, from the span alone: `room.locals`. Returns where the last is.
    fn front(&self, place: &Place<'_>, room: &mut Room) -> usize {
        let mut last = 0;
        for (n, chunk) in chunks(&place.tokens, &self.work.cut).enumerate() {
            self.keys(place, &chunk, false, &mut room.scratch);
            self.advance_front(n, chunk.len(), room);
            last = n;
        }
        last
    }

    /// Sᵀ after chunk `n` of a span, from the one after the chunk before.
    fn advance_front(&self, n: usize, len: usize, room: &mut Room) {
        if n > 0 {
            let (before, after) = room.locals.split_at_mut(n);
            after[0].copy_from_slice(&before[n - 1]);
        }
        let Scratch { decays, v, keys_weighted, .. } = &room.scratch;
        let decay = if n == 0 { 0.0 } else { decays.whole };
        let (shape, state) = (self.transposed, &mut room.locals[n][..]);
        let (left, right, tokens) = (v, keys_weighted, decays.first..len);
        Advance { shape, state, decay, left, right, tokens }.run_at(self.work.options.level);
    }

    /// D before the first chunk of a span, from the span alone: `room.back`.
    fn back(&self, place: &Place<'_>, room: &mut Room) {
        let mut fresh = true;
        for chunk in chunks(&place.tokens, &self.work.cut).rev() {
            let level = self.work.options.level;
            room.scratch.decays.prepare(level, &place.gates, chunk.clone());
            self.decay_back(fresh, room);
            for member in 0..self.work.problem.group() {
                self.queries(place, &chunk, member, false, &mut room.scratch);
                self.advance_back(chunk.len(), room);
            }
            fresh = false;
        }
    }

    /// D ← α_L D, or 0 at the end of a span.
    fn decay_back(&self, fresh: bool, room: &mut Room) {
        let decay = room.scratch.decays.whole;
        if fresh || decay == 0.0 {
            room.back.fill(0.0);
        } else if decay != 1.0 {
            room.back.iter_mut().for_each(|x| *x *= decay);
        }
    }

    /// (R28) for one query head, D having decayed.
    fn advance_back(&self, len: usize, room: &mut Room) {
        let Scratch { decays, q, douts, douts_weighted, .. } = &room.scratch;
        // Tokens from a reset on do not see what is before the chunk.
        let tokens = 0..decays.reset.min(len);
        let (shape, state) = (self.work.shape, &mut room.back[..]);
        let right = if decays.none { douts } else { douts_weighted };
        let (left, decay) = (q, 1.0);
        Advance { shape, state, decay, left, right, tokens }.run_at(self.work.options.level);
    }

    /// The gradients of a span; with `keep` D before its first chunk, from the span alone, is left in
    /// `room.back`.
    #[allow(clippy::too_many_arguments)]
    fn span(
        &self,
        slot: usize,
        number: usize,
        mut span: Span<'_, T>,
        front: &[f32],
        back: &[f32],
        keep: bool,
        room: &mut Room,
    ) {
        let place = self.place(slot, number);
        let Work { problem, options, shape, cut, .. } = &self.work;
        let (level, wanted, transposed) = (options.level, self.wanted, self.transposed);
        let all: Vec<Range<usize>> = chunks(&place.tokens, cut).collect();
        for (n, chunk) in all.iter().enumerate().take(all.len() - 1) {
            self.keys(&place, chunk, false, &mut room.scratch);
            self.advance_front(n, chunk.len(), room);
        }
        for (n, chunk) in all.iter().enumerate().rev() {
            let (len, last) = (chunk.len(), n + 1 == all.len());
            self.keys(&place, chunk, true, &mut room.scratch);
            let Room { scratch, locals, back: local_back, .. } = &mut *room;
            let local = n.checked_sub(1).map(|before| &locals[before][..]);
            let between = decay(&place.gates, place.tokens.start..chunk.start);
            combine(level, between, front, local, &mut scratch.state);
            let local = (!last).then_some(&local_back[..]);
            let between = decay(&place.gates, chunk.end..place.tokens.end);
            combine(level, between, back, local, &mut scratch.back);
            Behind { len, shape: *shape, transposed, wanted, scratch }.run_at(level);
            let more = keep || n > 0;
            if more {
                self.decay_back(last, room);
            }
            let within = chunk.start - place.tokens.start..chunk.end - place.tokens.start;
            let blank = number == 0 && n == 0 && !problem.initial_state;
            for member in 0..problem.group() {
                self.queries(&place, chunk, member, true, &mut room.scratch);
                if more {
                    self.advance_back(len, room);
                }
                let (scratch, dscale) = (&mut room.scratch, &mut span.sums[1]);
                Chunk { len, transposed, wanted, blank, scratch, dscale }.run_at(level);
                if let Some(dq) = span.dq.get_mut(member) {
                    let dq = dq.slice_mut(s![within.clone(), ..]);
                    write(dq, &scratch.dq, scratch.strides[0], problem.scale as f32);
                }
            }
            self.write_keys(&mut span, &within, &room.scratch);
        }
    }

    /// Writes dk, dv and dg of a chunk.
    fn write_keys(&self, span: &mut Span<'_, T>, within: &Range<usize>, scratch: &Scratch) {
        let [dim, width] = scratch.strides;
        if let Some(dk) = &mut span.dk {
            write(dk.slice_mut(s![within.clone(), ..]), &scratch.dk, dim, 1.0);
        }
        if let Some(dv) = &mut span.dv {
            write(dv.slice_mut(s![within.clone(), ..]), &scratch.dv, width, 1.0);
        }
        if self.wanted.dg {
            let dg = &scratch.dg[..within.len()];
            span.sums[0] += dg.iter().map(|&dg| f64::from(dg)).sum::<f64>();
            if let Some(target) = &mut span.dg {
                let target = target.slice_mut(s![within.clone()]);
                target.into_iter().zip(dg).for_each(|(target, &dg)| *target = dg);
            }
        }
    }
}

/// What the backward pass allocates beside operands and results.
pub(super) fn buffers(work: &Work<'_>) -> Result<Vec<Buffer>, Error> {
    let (cut, shape) = (&work.cut, work.shape);
    let transposed = shape.transposed(cut);
    let scratch = Scratch::new(cut, shape, 1.0)?;
    let mut kept =
        (cut.span / cut.chunk).saturating_mul(transposed.len()).saturating_add(shape.len());
    let apart = if work.whole() { 0 } else { work.spans() };
    if apart == 0 {
        kept = kept.saturating_add(work.longest().saturating_mul(transposed.len()));
    }
    let mut list = scratch.buffers().to_vec();
    list.push(("states that are kept", kept.saturating_mul(size_of::<f32>())));
    let mut buffers = work.per_thread(&list);
    buffers.extend(work.shared(&[transposed, shape], apart));
    Ok(buffers)
}

/// `to` = factor · rows that lie `stride` apart.
fn write<T: Element>(mut to: ArrayViewMut2<'_, T>, rows: &[f32], stride: usize, factor: f32) {
    to.outer_iter_mut().zip(rows.chunks(stride)).for_each(|(to, row)| write_row(to, row, factor));
}
