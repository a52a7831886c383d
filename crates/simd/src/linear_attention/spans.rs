//! How a sequence is worked on by more than one thread.
//!
//! A sequence is cut into spans of a few chunks, and the state before chunk c of span s is always
//!
//! ```text
//! S_c = Λ_c H_s + L_c        L_c from the chunks of the span alone, beginning with 0
//! H_{s+1} = Λ H_s + L        with the last of them
//! ```
//!
//! One thread may go through a sequence from its begin to its end; or many may sum the L of all
//! spans first, then the H, and then work on all spans at once, for one more sweep over keys and
//! values. The sums are the same, and so are the bits.

use super::state::{Shape, State};
use super::{Cut, Gates, Logs};
use crate::aligned::Aligned;
use crate::heads::{Cut as Tiles, Piece, places, query_tiles, rows_of};
use crate::lanes::{Isa, Kernel, Lanes};
use crate::level::compiled_here;
use crate::plan::Buffer;
use crate::{Level, Options};
use etalon_problem::{Error, LinearAttention, Sequence};
use ndarray::{ArrayView2, ArrayView4, ArrayViewMut, ArrayViewMut4, RemoveAxis, s};
use rayon::prelude::*;
use std::ops::Range;

/// More work that a schedule may make if it occupies the threads: what another sweep over keys and
/// values costs.
const SWEEP: f64 = 1.3;

/// The chunks that a thread must have before it works: to get its memory, page by page, takes it as long
/// as one or two. Those of a forward pass are done three times as fast.
const LEAST: usize = 4;
pub const LEAST_FORWARD: usize = 8;

/// Bytes of what is listed for every span, and for every query head of it; what is listed once; and
/// what a state's memory is rounded up by.
const LIST: usize = 384;
const PIECE: usize = 160;
const FEW: usize = 4096;
pub const LINE: usize = 64;

/// The tokens of the spans of a sequence.
pub fn spans(
    sequence: &Sequence,
    cut: &Cut,
) -> impl ExactSizeIterator<Item = Range<usize>> + use<> {
    Tiles::tiles(0..sequence.keys, cut.span(sequence.keys))
}

/// The chunks of a span.
pub fn chunks(
    span: &Range<usize>,
    cut: &Cut,
) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator + use<> {
    Tiles::tiles(span.clone(), cut.chunk)
}

/// What becomes of a state over some tokens that add nothing to it: Λ H.
#[derive(Debug, Clone, Copy)]
pub struct Carry {
    /// Λ; where it is 0 the state is absent.
    pub decay: f32,
    /// Of the second order, how the logarithm of Λ moves: of a state in motion it becomes
    /// Λ (Ḣ + drift · H).
    pub drift: Option<f32>,
}

/// A result `[batch, heads, tokens, …]` of `group` heads to a key head, by sequence and key head,
/// then by span, then by head. Rows of no sequence are in none.
pub fn pieces<'o, A, D>(
    result: ArrayViewMut<'o, A, D>,
    sequences: &[Sequence],
    (key_heads, group): (usize, usize),
    cut: &Cut,
) -> Vec<Vec<Vec<Piece<'o, A, D>>>>
where
    D: RemoveAxis<Smaller: RemoveAxis>,
{
    let room = |sequence: &Sequence| {
        let spans = spans(sequence, cut).map(|_| Vec::with_capacity(group));
        spans.collect::<Vec<_>>()
    };
    let mut slots: Vec<Vec<Vec<Piece<'o, A, D>>>> =
        sequences.iter().flat_map(|sequence| (0..key_heads).map(move |_| room(sequence))).collect();
    let size = |sequence: &Sequence| cut.span(sequence.keys);
    let places = places(sequences, key_heads * group, size);
    for (place, piece) in places.into_iter().zip(query_tiles(result, sequences, size)) {
        let slot = place.number * key_heads + place.head / group;
        slots[slot][place.rows.start / size(&sequences[place.number])].push(piece);
    }
    slots
}

/// What every pass works on. A *slot* is a sequence and a key head: s·Hk + h.
pub struct Work<'a> {
    pub problem: &'a LinearAttention,
    pub sequences: &'a [Sequence],
    pub cut: Cut,
    /// That of a state.
    pub shape: Shape,
    pub options: &'a Options,
    /// Matrices that a state consists of: itself and, in the second order, how it moves.
    pub order: usize,
    /// The chunks that a thread must have before it works.
    pub least: usize,
}

/// Some tokens of a sequence and key head.
pub struct Place<'a> {
    pub sequence: &'a Sequence,
    pub head: usize,
    pub tokens: Range<usize>,
    pub gates: Gates<'a>,
    /// How the gates move, in the second order.
    pub drifts: Option<Gates<'a>>,
}

impl Place<'_> {
    /// Some of its rows of an operand with the heads of the keys.
    pub fn of_keys<'a, T>(
        &self,
        operand: &ArrayView4<'a, T>,
        tokens: &Range<usize>,
    ) -> ArrayView2<'a, T> {
        let start = self.sequence.key_start;
        let rows = start + tokens.start..start + tokens.end;
        rows_of(operand, self.sequence.batch, self.head, rows)
    }

    /// The same of a query head.
    pub fn of_queries<'a, T>(
        &self,
        operand: &ArrayView4<'a, T>,
        head: usize,
        tokens: &Range<usize>,
    ) -> ArrayView2<'a, T> {
        let start = self.sequence.query_start;
        let rows = start + tokens.start..start + tokens.end;
        rows_of(operand, self.sequence.batch, head, rows)
    }

    /// What becomes of a state over some of the tokens.
    pub fn carry(&self, tokens: Range<usize>) -> Carry {
        let decay = self.gates.sum(tokens.clone()).exp() as f32;
        let drift = self.drifts.as_ref().map(|drifts| drifts.sum(tokens) as f32);
        Carry { decay, drift }
    }
}

impl<'a> Work<'a> {
    pub fn new(
        problem: &'a LinearAttention,
        sequences: &'a [Sequence],
        options: &'a Options,
    ) -> Result<Self, Error> {
        let cut = Cut::new(problem, options)?;
        let shape = Shape::new(&cut, problem.extents.dim, problem.value_dim);
        Ok(Work { problem, sequences, cut, shape, options, order: 1, least: LEAST })
    }

    /// Threads that work: of those there are, as many as have the least number of chunks each.
    pub fn threads(&self) -> usize {
        let chunks = |s: &Sequence| s.keys.div_ceil(self.cut.chunk);
        let all = self.sequences.iter().map(chunks).fold(0, usize::saturating_add);
        let all = all.saturating_mul(self.problem.extents.key_heads);
        rayon::current_num_threads().min(all / self.least).max(1)
    }

    /// Whether every sequence and key head is best left to one thread.
    pub fn whole(&self) -> bool {
        let (threads, key_heads) = (self.threads(), self.problem.extents.key_heads);
        let tokens = self.sequences.iter().map(|sequence| sequence.keys);
        let (longest, all) = (tokens.clone().max().unwrap_or(0), tokens.sum::<usize>());
        let even = (all * key_heads) as f64 / threads as f64;
        let slots = self.sequences.len() * key_heads;
        let alike = all == longest * self.sequences.len();
        let rounds = if alike { slots.div_ceil(threads) } else { usize::MAX };
        let apart = longest as f64 * rounds as f64;
        // At the end all wait for one that was begun last.
        let last = even + longest as f64 * (1.0 - 1.0 / threads as f64);
        let span = self.cut.span(longest).min(longest) as f64;
        let by_spans = even + span * (1.0 - 1.0 / threads as f64);
        apart.min(last) <= SWEEP * by_spans
    }

    /// Spans of all slots.
    pub fn spans(&self) -> usize {
        let spans: usize = self.sequences.iter().map(|s| spans(s, &self.cut).len()).sum();
        spans * self.problem.extents.key_heads
    }

    /// Chunks of a span of the longest sequence. If it is one, no state is computed again.
    pub fn interval(&self) -> usize {
        let longest = self.sequences.iter().map(|s| s.keys).max().unwrap_or(0);
        self.cut.span(longest) / self.cut.chunk
    }

    /// Spans of the longest sequence.
    pub fn longest(&self) -> usize {
        self.sequences.iter().map(|s| spans(s, &self.cut).len()).max().unwrap_or(0)
    }

    /// Buffers of which every thread has one.
    pub fn per_thread(&self, buffers: &[(&'static str, usize)]) -> Vec<Buffer> {
        let slots = self.sequences.len() * self.problem.extents.key_heads;
        let tasks = if self.whole() { slots } else { self.spans() };
        // One is there before anybody knows who needs it.
        let threads = self.threads().min(tasks).max(1);
        let each = |&(name, bytes): &(_, usize)| Buffer::parts(name, threads, bytes);
        buffers.iter().map(each).collect()
    }

    /// Buffers of which there is one: states of every slot, those of `apart` spans, and lists.
    pub fn shared(&self, shapes: &[Shape], apart: usize) -> [Buffer; 2] {
        let slots = self.sequences.len() * self.problem.extents.key_heads;
        let states = slots.saturating_add(apart);
        let state = |shape: &Shape| {
            let elements = shape.len().saturating_mul(self.order);
            elements.saturating_mul(size_of::<f32>()) + size_of::<State>() + LINE
        };
        let bytes = shapes.iter().map(state).fold(0, usize::saturating_add);
        let piece = (PIECE * self.order).saturating_mul(self.problem.group());
        let pieces = self.spans().saturating_mul(piece.saturating_add(LIST));
        let lists = pieces.saturating_add(slots.saturating_mul(LIST)).saturating_add(FEW);
        [
            Buffer::parts("states of sequences and spans", states, bytes),
            Buffer::parts("lists of spans", 1, lists),
        ]
    }

    /// A span of a slot.
    pub fn place<'p>(
        &'p self,
        slot: usize,
        number: usize,
        gates: Logs<'p>,
        drifts: Option<Logs<'p>>,
    ) -> Place<'p> {
        let key_heads = self.problem.extents.key_heads;
        let (sequence, head) = (&self.sequences[slot / key_heads], slot % key_heads);
        let span = self.cut.span(sequence.keys);
        let start = number * span;
        let tokens = start..sequence.keys.min(start + span);
        let gates = gates.of(sequence, head);
        let drifts = drifts.map(|drifts| drifts.of(sequence, head));
        Place { sequence, head, tokens, gates, drifts }
    }

    /// A state for every slot.
    pub fn states(&self, shape: Shape) -> Result<Vec<State>, Error> {
        let slots = self.sequences.len() * self.problem.extents.key_heads;
        (0..slots).map(|_| State::zero(shape, self.order)).collect()
    }

    /// A state for every span of every slot.
    pub fn rooms(&self, shape: Shape) -> Result<Vec<Vec<State>>, Error> {
        let slots = self.sequences.iter().flat_map(|sequence| {
            (0..self.problem.extents.key_heads).map(|_| spans(sequence, &self.cut).len())
        });
        let states = |spans| (0..spans).map(|_| State::zero(shape, self.order)).collect();
        slots.map(states).collect()
    }

    /// Reads what every slot begins with: matrix `which` of its state.
    pub fn begin(
        &self,
        tensor: &Option<ArrayView4<'_, f32>>,
        states: &mut [State],
        which: usize,
        transposed: bool,
    ) {
        let Some(tensor) = tensor else { return };
        let key_heads = self.problem.extents.key_heads;
        for (slot, state) in states.iter_mut().enumerate() {
            let source = tensor.slice(s![slot / key_heads, slot % key_heads, .., ..]);
            state.read(which, if transposed { source.reversed_axes() } else { source });
        }
    }

    /// Writes what every slot ends with: matrix `which` of its state.
    pub fn end(
        &self,
        states: &[State],
        tensor: Option<ArrayViewMut4<'_, f32>>,
        which: usize,
        transposed: bool,
    ) {
        let Some(mut tensor) = tensor else { return };
        let key_heads = self.problem.extents.key_heads;
        for (slot, state) in states.iter().enumerate() {
            let target = tensor.slice_mut(s![slot / key_heads, slot % key_heads, .., ..]);
            state.write(which, if transposed { target.reversed_axes() } else { target });
        }
    }

    /// Turns the local states of spans into the states before them, and `states` into those after the
    /// last. The order of spans is that of `locals`; `place` says where they are.
    pub fn scan<'p>(
        &self,
        locals: &mut [Vec<State>],
        states: &mut [State],
        place: impl Fn(usize, usize) -> Place<'p> + Sync,
    ) {
        let level = self.options.level;
        locals.par_iter_mut().zip(states).enumerate().for_each(|(slot, (locals, state))| {
            for (number, local) in locals.iter_mut().enumerate() {
                pass_on(level, &place(slot, number), &mut local.elements, &mut state.elements);
            }
        });
    }
}

/// The spans of all slots, with their numbers.
pub fn numbered(states: &mut [Vec<State>]) -> Vec<(usize, usize, &mut State)> {
    let slots = states.iter_mut().enumerate();
    let spans = slots.flat_map(|(slot, states)| {
        states.iter_mut().enumerate().map(move |(number, state)| (slot, number, state))
    });
    spans.collect()
}

/// `state` becomes that after a span whose local state is `local`, and `local` what `state` was.
pub fn pass_on(level: Level, place: &Place<'_>, local: &mut Aligned, state: &mut Aligned) {
    let carry = place.carry(place.tokens.clone());
    PassOn { carry, state, local }.run_at(level);
    std::mem::swap(local, state);
}

/// S = Λ H + L; without L, S = H.
pub fn combine(level: Level, carry: Carry, state: &[f32], local: Option<&[f32]>, to: &mut [f32]) {
    to.copy_from_slice(local.unwrap_or(state));
    if local.is_some() {
        PassOn { carry, state, local: to }.run_at(level);
    }
}

/// L ← Λ H + L; where the decay is 0, H is absent.
struct PassOn<'a> {
    carry: Carry,
    state: &'a [f32],
    local: &'a mut [f32],
}

compiled_here!(PassOn<'_>);

impl Kernel for PassOn<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let PassOn { carry: Carry { decay, drift }, state, local } = self;
        if decay == 0.0 {
            return;
        }
        let factor = I::F32::splat(isa, decay);
        let Some(drift) = drift else { return add(isa, factor, state, local) };
        let (value, motion) = state.split_at(state.len() / 2);
        let (local, local_motion) = local.split_at_mut(value.len());
        add(isa, factor, value, local);
        add(isa, factor, motion, local_motion);
        if drift != 0.0 {
            add(isa, factor * I::F32::splat(isa, drift), value, local_motion);
        }
    }
}

/// to += factor · from.
pub fn add_to(level: Level, factor: f32, from: &[f32], to: &mut [f32]) {
    AddTo { factor, from, to }.run_at(level);
}

struct AddTo<'a> {
    factor: f32,
    from: &'a [f32],
    to: &'a mut [f32],
}

compiled_here!(AddTo<'_>);

impl Kernel for AddTo<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        add(isa, I::F32::splat(isa, self.factor), self.from, self.to);
    }
}

/// to += factor · from.
#[inline(always)]
fn add<I: Isa>(isa: I, factor: I::F32, from: &[f32], to: &mut [f32]) {
    for (to, from) in to.chunks_exact_mut(I::F32::N).zip(from.chunks_exact(I::F32::N)) {
        factor.mul_add(I::F32::load(isa, from), I::F32::load(isa, to)).store(to);
    }
}
