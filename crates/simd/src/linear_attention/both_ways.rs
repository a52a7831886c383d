//! The schedule of the passes that read the states before and behind a chunk.
//!
//! The states before the chunks of a span are summed again, forwards, from the state before the span:
//! that is what is kept of a sweep from the front. Then the chunks are worked on from the last to the
//! first, with D the gradient of the loss by the state after the chunk.

use super::spans::{LINE, Place, Work, chunks, combine, numbered, pass_on, pieces};
use super::state::{Shape, State};
use crate::Element;
use crate::aligned::Aligned;
use crate::attention::sweeps::write_row;
use crate::heads::{Piece, all_queries, clear};
use crate::parallel::for_each_on;
use crate::plan::Buffer;
use etalon_problem::{Error, Sequence};
use ndarray::{ArrayViewMut, ArrayViewMut2, RemoveAxis};
use std::ops::Range;
use std::sync::Mutex;

/// A pass that needs states from both ends; `Span` is where its results of a span are written.
pub trait BothWays<Span>: Sync {
    /// What a thread holds of a chunk.
    type Scratch: Send;

    fn work(&self) -> &Work<'_>;

    /// A span of a slot.
    fn place(&self, slot: usize, number: usize) -> Place<'_>;

    fn scratch(&self) -> Result<Self::Scratch, Error>;

    /// Reads the keys and values of a chunk, for its state alone or for gradients.
    fn keys(
        &self,
        place: &Place<'_>,
        chunk: &Range<usize>,
        gradients: bool,
        to: &mut Self::Scratch,
    );

    /// (R22) for Sᵀ, and (R30), or without what was before.
    fn advance_front(&self, len: usize, fresh: bool, front: &mut [f32], scratch: &Self::Scratch);

    /// The decays of a chunk alone.
    fn decays(&self, place: &Place<'_>, chunk: &Range<usize>, to: &mut Self::Scratch);

    /// Reads the queries and cotangents of a query head in a chunk, for the states alone or for
    /// gradients.
    fn queries(
        &self,
        place: &Place<'_>,
        chunk: &Range<usize>,
        member: usize,
        gradients: bool,
        to: &mut Self::Scratch,
    );

    /// D ← α_L D, and what (R31) makes of how it moves.
    fn decay_back(&self, back: &mut [f32], scratch: &Self::Scratch);

    /// (R28), and (R31), for one query head, D having decayed.
    fn advance_back(&self, len: usize, back: &mut [f32], scratch: &Self::Scratch);

    /// Where Sᵀ before a chunk and D behind it are to be written.
    fn states<'r>(&self, scratch: &'r mut Self::Scratch) -> [&'r mut [f32]; 2];

    /// What D contributes to a chunk.
    fn behind(&self, len: usize, scratch: &mut Self::Scratch);

    /// What one query head contributes to a chunk, and its own results.
    fn head(&self, at: &At<'_>, member: usize, span: &mut Span, scratch: &mut Self::Scratch);

    /// Writes the results of the keys of a chunk.
    fn finish(&self, at: &At<'_>, span: &mut Span, scratch: &mut Self::Scratch);
}

/// A chunk.
pub struct At<'a> {
    pub place: &'a Place<'a>,
    /// Its tokens, counted from the begin of its sequence.
    pub chunk: &'a Range<usize>,
    /// Its tokens, counted from the begin of its span.
    pub within: Range<usize>,
    /// Whether S is 0.
    pub blank: bool,
}

/// What a pass holds: allocated before anything is written.
pub struct Ways<S> {
    idle: Mutex<Vec<Room<S>>>,
    /// The state before every slot, transposed; then the one after it.
    pub fronts: Vec<State>,
    /// The gradient by the state after every slot; then by the one before it.
    pub backs: Vec<State>,
    locals: [Vec<Vec<State>>; 2],
}

/// The memory of one thread.
struct Room<S> {
    scratch: S,
    /// Sᵀ before each chunk of a span but the first, from the span alone.
    locals: Vec<Aligned>,
    /// D after the chunk, from the span alone.
    back: Aligned,
    /// Sᵀ before each span of a slot.
    fronts: Vec<Aligned>,
}

impl<S: Send> Ways<S> {
    pub fn new<Span>(pass: &impl BothWays<Span, Scratch = S>) -> Result<Self, Error> {
        let work = pass.work();
        let (front, parallel) = (work.shape.transposed(&work.cut), !work.whole());
        let mut locals = [Vec::new(), Vec::new()];
        if parallel {
            locals = [work.rooms(front)?, work.rooms(work.shape)?];
        }
        Ok(Ways {
            idle: Mutex::new(vec![room(pass)?]),
            fronts: work.states(front)?,
            backs: work.states(work.shape)?,
            locals,
        })
    }

    /// Works on all spans of all slots, from states that have been read.
    pub fn run<Span: Send>(
        &mut self,
        pass: &impl BothWays<Span, Scratch = S>,
        slots: Vec<Vec<Span>>,
    ) -> Result<(), Error> {
        if !pass.work().whole() {
            return self.apart(pass, slots);
        }
        let states = self.fronts.iter_mut().zip(&mut self.backs);
        let tasks = slots.into_iter().zip(states).enumerate().collect();
        for_each_on(
            pass.work().threads(),
            &self.idle,
            tasks,
            || room(pass),
            |(slot, (spans, (front, back))), room| {
                whole(pass, slot, spans, [&mut front.elements, &mut back.elements], room);
            },
        )
    }

    /// First the local states of all spans in both directions, then the states before them and
    /// behind them, then the spans.
    fn apart<Span: Send>(
        &mut self,
        pass: &impl BothWays<Span, Scratch = S>,
        slots: Vec<Vec<Span>>,
    ) -> Result<(), Error> {
        let Ways { idle, fronts, backs, locals: [locals, local_backs] } = self;
        let (work, room) = (pass.work(), || room(pass));
        let both = numbered(locals).into_iter().zip(numbered(local_backs)).collect();
        for_each_on(
            work.threads(),
            idle,
            both,
            room,
            |((slot, number, front), (_, _, back)), room| {
                let place = pass.place(slot, number);
                let local = sum_front(pass, &place, room);
                front.elements.copy_from_slice(&room.locals[local]);
                sum_back(pass, &place, room);
                back.elements.copy_from_slice(&room.back);
            },
        )?;
        work.scan(locals, fronts, |slot, number| pass.place(slot, number));
        local_backs.iter_mut().for_each(|spans| spans.reverse());
        let counts: Vec<usize> = local_backs.iter().map(Vec::len).collect();
        work.scan(local_backs, backs, |slot, number| pass.place(slot, counts[slot] - 1 - number));
        let mut tasks = Vec::new();
        for (slot, spans) in slots.into_iter().enumerate() {
            tasks.extend(spans.into_iter().enumerate().map(|(number, span)| (slot, number, span)));
        }
        for_each_on(work.threads(), idle, tasks, room, |(slot, number, mut to), room| {
            let front = &locals[slot][number].elements[..];
            let back = &local_backs[slot][counts[slot] - 1 - number].elements[..];
            span(pass, [slot, number], &mut to, [front, back], false, room);
        })
    }
}

/// The memory of a thread of a pass.
fn room<Span, P: BothWays<Span>>(pass: &P) -> Result<Room<P::Scratch>, Error> {
    let work = pass.work();
    let kept = if work.whole() { work.longest() } else { 0 };
    let front = work.shape.transposed(&work.cut);
    let state = |shape: Shape| Aligned::zeros(shape.len().saturating_mul(work.order), "states");
    let states = |count: usize| (0..count).map(|_| state(front)).collect::<Result<Vec<_>, Error>>();
    Ok(Room {
        scratch: pass.scratch()?,
        locals: states(work.interval())?,
        back: state(work.shape)?,
        fronts: states(kept)?,
    })
}

/// A slot from its begin to its end and back.
fn whole<Span, P: BothWays<Span>>(
    pass: &P,
    slot: usize,
    spans: Vec<Span>,
    [front, back]: [&mut Aligned; 2],
    room: &mut Room<P::Scratch>,
) {
    let work = pass.work();
    let level = work.options.level;
    // How the state after the last span moves is a result; the state itself is one of the forward pass.
    let last = work.order == 2 && work.problem.final_state;
    let needed = if last { spans.len() } else { spans.len().saturating_sub(1) };
    for number in 0..spans.len() {
        room.fronts[number].copy_from_slice(front);
        if number < needed {
            let place = pass.place(slot, number);
            let local = sum_front(pass, &place, room);
            pass_on(level, &place, &mut room.locals[local], front);
        }
    }
    for (number, mut to) in spans.into_iter().enumerate().rev() {
        let front = std::mem::take(&mut room.fronts[number]);
        span(pass, [slot, number], &mut to, [&front, back], true, room);
        room.fronts[number] = front;
        pass_on(level, &pass.place(slot, number), &mut room.back, back);
    }
}

/// Sᵀ after each chunk of a span, from the span alone: `room.locals`. Returns where the last is.
fn sum_front<Span, P: BothWays<Span>>(
    pass: &P,
    place: &Place<'_>,
    room: &mut Room<P::Scratch>,
) -> usize {
    let mut last = 0;
    for (n, chunk) in chunks(&place.tokens, &pass.work().cut).enumerate() {
        pass.keys(place, &chunk, false, &mut room.scratch);
        advance_front(pass, n, chunk.len(), room);
        last = n;
    }
    last
}

/// Sᵀ after chunk `n` of a span, from the one after the chunk before.
fn advance_front<Span, P: BothWays<Span>>(
    pass: &P,
    n: usize,
    len: usize,
    room: &mut Room<P::Scratch>,
) {
    if n > 0 {
        let (before, after) = room.locals.split_at_mut(n);
        after[0].copy_from_slice(&before[n - 1]);
    }
    pass.advance_front(len, n == 0, &mut room.locals[n], &room.scratch);
}

/// D before the first chunk of a span, from the span alone: `room.back`.
fn sum_back<Span, P: BothWays<Span>>(pass: &P, place: &Place<'_>, room: &mut Room<P::Scratch>) {
    let work = pass.work();
    room.back.fill(0.0);
    for (n, chunk) in chunks(&place.tokens, &work.cut).rev().enumerate() {
        pass.decays(place, &chunk, &mut room.scratch);
        if n > 0 {
            pass.decay_back(&mut room.back, &room.scratch);
        }
        for member in 0..work.problem.group() {
            pass.queries(place, &chunk, member, false, &mut room.scratch);
            pass.advance_back(chunk.len(), &mut room.back, &room.scratch);
        }
    }
}

/// The results of span `number` of a slot; with `keep` D before its first chunk, from the span alone,
/// is left in `room.back`.
fn span<Span, P: BothWays<Span>>(
    pass: &P,
    [slot, number]: [usize; 2],
    to: &mut Span,
    [front, back]: [&[f32]; 2],
    keep: bool,
    room: &mut Room<P::Scratch>,
) {
    let work = pass.work();
    let (place, level) = (pass.place(slot, number), work.options.level);
    let all: Vec<Range<usize>> = chunks(&place.tokens, &work.cut).collect();
    for (n, chunk) in all.iter().enumerate().take(all.len() - 1) {
        pass.keys(&place, chunk, false, &mut room.scratch);
        advance_front(pass, n, chunk.len(), room);
    }
    for (n, chunk) in all.iter().enumerate().rev() {
        let (len, last) = (chunk.len(), n + 1 == all.len());
        pass.keys(&place, chunk, true, &mut room.scratch);
        let Room { scratch, locals, back: local_back, .. } = &mut *room;
        let [before, behind] = pass.states(scratch);
        let local = n.checked_sub(1).map(|before| &locals[before][..]);
        combine(level, place.carry(place.tokens.start..chunk.start), front, local, before);
        let local = (!last).then_some(&local_back[..]);
        combine(level, place.carry(chunk.end..place.tokens.end), back, local, behind);
        pass.behind(len, scratch);
        let more = keep || n > 0;
        if last {
            local_back.fill(0.0);
        } else if more {
            pass.decay_back(local_back, scratch);
        }
        let at = At {
            place: &place,
            chunk,
            within: chunk.start - place.tokens.start..chunk.end - place.tokens.start,
            blank: number == 0 && n == 0 && !work.problem.initial_state,
        };
        for member in 0..work.problem.group() {
            pass.queries(&place, chunk, member, true, scratch);
            if more {
                pass.advance_back(len, local_back, scratch);
            }
            pass.head(&at, member, to, scratch);
        }
        pass.finish(&at, to, scratch);
    }
}

/// What a pass allocates beside operands and results, its scratch holding `scratch`.
pub fn buffers(work: &Work<'_>, scratch: &[(&'static str, usize)]) -> Vec<Buffer> {
    let front = work.shape.transposed(&work.cut);
    let apart = if work.whole() { 0 } else { work.spans() };
    let fronts = work.interval() + if apart == 0 { work.longest() } else { 0 };
    let bytes = |shape: Shape| shape.len().saturating_mul(work.order * size_of::<f32>());
    let each = bytes(front).saturating_add(size_of::<Aligned>() + LINE);
    let kept = fronts.saturating_mul(each).saturating_add(bytes(work.shape));
    let mut list = scratch.to_vec();
    list.push(("states that are kept", kept));
    let mut buffers = work.per_thread(&list);
    buffers.extend(work.shared(&[front, work.shape], apart));
    buffers
}

/// A result of `group` heads to a key head, by slot and then by span; nothing where there is none. Rows
/// of no sequence become `nothing`.
pub fn cut_up<'o, A: Clone, D>(
    work: &Work<'_>,
    result: Option<ArrayViewMut<'o, A, D>>,
    group: usize,
    nothing: A,
) -> impl Iterator<Item = Vec<Piece<'o, A, D>>> + use<'o, A, D>
where
    D: RemoveAxis<Smaller: RemoveAxis>,
{
    let Work { problem, sequences, cut, .. } = work;
    let slots = result.map(|mut result| {
        clear(&mut result, all_queries(sequences), nothing);
        pieces(result, sequences, (problem.extents.key_heads, group), cut)
    });
    slots.into_iter().flatten().flatten()
}

/// The piece of a span, of a result with the heads of the keys.
pub fn one<X>(mut pieces: Vec<X>) -> Option<X> {
    pieces.pop()
}

/// A list of numbers for every span of every slot.
pub fn sums<const N: usize>(work: &Work<'_>) -> Vec<Vec<[f64; N]>> {
    let spans = |s: &Sequence| super::spans::spans(s, &work.cut).len();
    let key_heads = work.problem.extents.key_heads;
    let slots = work.sequences.iter().flat_map(|s| (0..key_heads).map(move |_| s));
    slots.map(|s| vec![[0.0; N]; spans(s)]).collect()
}

/// The sum of the numbers `which` of all spans, of one key head or of all.
pub fn total<const N: usize>(
    work: &Work<'_>,
    sums: &[Vec<[f64; N]>],
    which: usize,
    head: Option<usize>,
) -> f32 {
    let key_heads = work.problem.extents.key_heads;
    let slots = sums.iter().enumerate();
    let here = slots.filter(|(slot, _)| head.is_none_or(|head| slot % key_heads == head));
    here.flat_map(|(_, spans)| spans.iter().map(|sums| sums[which])).sum::<f64>() as f32
}

/// `to` = factor · rows that lie `stride` apart.
pub fn write<T: Element>(mut to: ArrayViewMut2<'_, T>, rows: &[f32], stride: usize, factor: f32) {
    to.outer_iter_mut().zip(rows.chunks(stride)).for_each(|(to, row)| write_row(to, row, factor));
}
