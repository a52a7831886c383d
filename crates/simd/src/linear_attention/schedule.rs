//! The shares of threads in the tokens of a problem.
//!
//! A sequence is cut into spans of a few chunks, and the state before chunk c of span s is always
//!
//! ```text
//! S_c = Λ_c H_s + L_c        L_c from the chunks of the span alone, beginning with 0
//! H_{s+1} = Λ H_s + L        with the last of them
//! ```
//!
//! Either one thread goes through a sequence from its first span to its last; or many threads first sum
//! the L of all spans, then the H, and then work on all spans at once, for one more sweep over keys and
//! values. The sums are the same, and so are the bits.

use super::cut::Cut;
use super::state::{Carry, Shape, add_carried};
use crate::element::TensorMut;
use crate::parallel::share;
use crate::plan::Buffer;
use crate::tiles::{pieces, tiles};
use crate::workspace::Region;
use crate::{Options, Workspace};
use etalon_problem::{Dtype, Error, LinearAttention, Pass, TokenSequence};
use ndarray::{ArrayView4, ArrayViewMut4, Ix3, Ix4, s};
use std::ops::Range;

/// More work that a schedule may make if it occupies the threads: what another sweep over keys and
/// values costs.
const SWEEP: f64 = 1.3;

/// The chunks that a thread must have before it works: to get its memory, page by page, takes it as long
/// as one or two. Those of a forward pass are done three times as fast.
const LEAST: usize = 6;
const LEAST_FORWARD: usize = 12;

/// The problem of a pass, cut for threads. A *slot* is a sequence and a key head: s·Hk + h.
#[derive(Debug, Clone, Copy)]
pub struct Schedule<'a> {
    pub problem: &'a LinearAttention,
    pub sequences: &'a [TokenSequence],
    pub options: &'a Options,
    pub cut: Cut,
    /// The shape of a state; and of S in passes of two sides, its transpose, but of bf16 the same.
    pub shape: Shape,
    pub transposed: Shape,
    /// Matrices that a state consists of: itself and, in the second order, its tangent.
    pub order: usize,
    /// The chunks that a thread must have before it works.
    least: usize,
}

/// Some tokens of a sequence and key head.
#[derive(Debug, Clone)]
pub struct Place<'a> {
    pub sequence: &'a TokenSequence,
    pub head: usize,
    /// The number of its span.
    pub number: usize,
    /// Counted from the begin of the sequence.
    pub tokens: Range<usize>,
}

/// Uses of the operands of a chunk that is read.
#[derive(Debug, Clone, Copy)]
pub struct Uses {
    /// The results of the chunk.
    pub results: bool,
    /// The state at its end, or where one goes back the gradient by the state at its begin.
    pub state: bool,
}

impl Uses {
    /// The state alone.
    pub const STATE: Self = Uses { results: false, state: true };
}

impl<'a> Place<'a> {
    /// A head of a sequence, by span or all of it at once.
    fn of(
        sequence: &'a TokenSequence,
        head: usize,
        cut: &Cut,
        by_span: bool,
    ) -> impl DoubleEndedIterator<Item = Place<'a>> + use<'a> {
        let parts = cut.parts(sequence.tokens, by_span).enumerate();
        parts.map(move |(number, tokens)| Place { sequence, head, number, tokens })
    }

    /// Its spans, for a place that is a whole sequence.
    pub fn spans(&self, cut: &Cut) -> impl DoubleEndedIterator<Item = Place<'a>> + use<'a> {
        Place::of(self.sequence, self.head, cut, true)
    }

    /// Its chunks, for a place that is a span.
    pub fn chunks(
        &self,
        cut: &Cut,
    ) -> impl DoubleEndedIterator<Item = Place<'a>> + ExactSizeIterator + use<'a> {
        let span = self.clone();
        tiles(self.tokens.clone(), cut.chunk).map(move |tokens| span.part(tokens))
    }

    /// Some of its tokens.
    pub fn part(&self, tokens: Range<usize>) -> Self {
        Place { tokens, ..*self }
    }
}

impl<'a> Schedule<'a> {
    /// Of operands of these types.
    pub fn new(
        problem: &'a LinearAttention,
        sequences: &'a [TokenSequence],
        pass: Pass,
        options: &'a Options,
        mut dtypes: impl Iterator<Item = Dtype>,
    ) -> Result<Self, Error> {
        let (dim, width) = (problem.extents.dim, problem.value_dim);
        let may = |dtype| options.multiplies_bf16(pass, dtype);
        let bf16 = dim > 0 && width > 0 && dtypes.all(may);
        let cut = Cut::new(problem, sequences, options, bf16)?;
        let shape = Shape::new(&cut, dim, width);
        let transposed = if cut.bf16 { shape } else { shape.transposed(&cut) };
        let order = if pass == Pass::DoubleBackward { 2 } else { 1 };
        let least = if pass == Pass::Forward { LEAST_FORWARD } else { LEAST };
        Ok(Schedule { problem, sequences, options, cut, shape, transposed, order, least })
    }

    /// Threads that are worth their memory: of those there are, as many as have the least number of
    /// chunks each.
    pub fn threads(&self) -> usize {
        let chunks = |s: &TokenSequence| s.tokens.div_ceil(self.cut.chunk);
        let all = self.sequences.iter().map(chunks).fold(0, usize::saturating_add);
        let all = all.saturating_mul(self.problem.extents.key_heads);
        rayon::current_num_threads().min(all / self.least).max(1)
    }

    /// Threads that have a task.
    pub fn workers(&self) -> usize {
        let tasks = if self.whole() { self.slots() } else { self.spans() };
        self.threads().min(tasks).max(1)
    }

    /// True if every sequence and key head is best left to one thread.
    pub fn whole(&self) -> bool {
        let (threads, key_heads) = (self.threads(), self.problem.extents.key_heads);
        let tokens = self.sequences.iter().map(|sequence| sequence.tokens);
        let (longest, all) = (tokens.clone().max().unwrap_or(0), tokens.sum::<usize>());
        let even = (all * key_heads) as f64 / threads as f64;
        let alike = all == longest * self.sequences.len();
        let rounds = if alike { self.slots().div_ceil(threads) } else { usize::MAX };
        let apart = longest as f64 * rounds as f64;
        // At the end all wait for one that was begun last.
        let last = even + longest as f64 * (1.0 - 1.0 / threads as f64);
        let span = self.cut.span(longest).min(longest) as f64;
        let by_spans = even + span * (1.0 - 1.0 / threads as f64);
        apart.min(last) <= SWEEP * by_spans
    }

    /// Sequences and key heads.
    pub fn slots(&self) -> usize {
        self.sequences.len() * self.problem.extents.key_heads
    }

    /// Spans of all slots.
    pub fn spans(&self) -> usize {
        let spans: usize = self.sequences.iter().map(|s| self.cut.spans(s.tokens)).sum();
        spans * self.problem.extents.key_heads
    }

    /// States of all slots: one where a slot is left to one thread, else those between its spans.
    fn states(&self) -> usize {
        self.slots() + if self.whole() { 0 } else { self.spans() }
    }

    /// Chunks of a span of the longest sequence. If it is one, no state is computed again.
    pub fn interval(&self) -> usize {
        let longest = self.sequences.iter().map(|s| s.tokens).max().unwrap_or(0);
        self.cut.span(longest) / self.cut.chunk
    }

    /// Spans of the longest sequence.
    pub fn longest(&self) -> usize {
        self.sequences.iter().map(|s| self.cut.spans(s.tokens)).max().unwrap_or(0)
    }

    /// Every slot, or every span of every slot.
    pub fn places(&self, by_span: bool) -> impl Iterator<Item = Place<'a>> + Send + use<'a> {
        let Schedule { sequences, cut, .. } = *self;
        let key_heads = self.problem.extents.key_heads;
        sequences.iter().flat_map(move |sequence| {
            (0..key_heads).flat_map(move |head| Place::of(sequence, head, &cut, by_span))
        })
    }

    /// A result `[batch, heads, tokens, …]` of `group` heads to a key head, cut into the places: of each
    /// `[group, tokens, …]`. Rows of no sequence become 0. Where there is no result, there are no pieces.
    pub fn pieces<'o>(
        &self,
        result: Option<TensorMut<'o, Ix4>>,
        group: usize,
        by_span: bool,
    ) -> impl Iterator<Item = Option<TensorMut<'o, Ix3>>> + Send + use<'o, 'a> {
        let (cut, heads) = (self.cut, (self.problem.extents.key_heads, group));
        let rows = |s: &TokenSequence| (s.batch, s.start..s.start + s.tokens);
        let spans = move |s: &TokenSequence| cut.parts(s.tokens, by_span);
        pieces(result, self.sequences, rows, heads, (1, spans), 0.0)
    }

    /// Buffers that a pass allocates: of `scratch` every thread has its own, states of each of `shapes` lie
    /// at both ends of a slot or between its spans, and numbers may be summed over spans.
    pub fn buffers(
        &self,
        scratch: &[(&'static str, usize)],
        shapes: &[Shape],
        sums: bool,
    ) -> Vec<Buffer> {
        let workers = self.workers();
        let mut buffers: Vec<Buffer> = scratch
            .iter()
            .filter(|(_, bytes)| *bytes > 0) // of f32 or of bf16 alone
            .map(|&(name, bytes)| Buffer::parts(name, workers, bytes))
            .collect();
        let len = |shape: &Shape| shape.len().saturating_mul(self.order * size_of::<f32>());
        let each = shapes.iter().map(len).fold(0, usize::saturating_add);
        buffers.push(Buffer::parts("states of sequences and spans", self.states(), each));
        if sums {
            buffers.push(Buffer::parts("sums of spans", self.spans(), size_of::<[f64; 2]>()));
        }
        buffers
    }
}

/// Cuts memory into portions of the given lengths.
pub fn portions<T>(
    mut memory: &mut [T],
    lens: impl Iterator<Item = usize>,
) -> impl Iterator<Item = &mut [T]> {
    lens.map(move |len| {
        let (portion, rest) = std::mem::take(&mut memory).split_at_mut(len);
        memory = rest;
        portion
    })
}

/// The states of all slots: one where a slot is left to one thread, else those between its spans, one
/// more than there are spans.
pub struct States<'a> {
    schedule: Schedule<'a>,
    memory: Region,
    shape: Shape,
    /// From the first token on, or from the last one back.
    forwards: bool,
}

impl<'a> States<'a> {
    /// States that hold anything.
    pub fn new(
        workspace: &Workspace,
        schedule: &Schedule<'a>,
        shape: Shape,
        forwards: bool,
    ) -> Result<Self, Error> {
        let len = shape.len().saturating_mul(schedule.order);
        let memory = workspace.room(len.saturating_mul(schedule.states()), "states")?;
        Ok(States { schedule: *schedule, memory, shape, forwards })
    }

    /// Elements of a state.
    fn len(&self) -> usize {
        self.shape.len() * self.schedule.order
    }

    /// The states of every slot.
    pub fn slots(&mut self) -> impl Iterator<Item = &mut [f32]> + Send {
        let (len, cut, whole) = (self.len(), self.schedule.cut, self.schedule.whole());
        let states = move |tokens| if whole { 1 } else { cut.spans(tokens) + 1 };
        let lens =
            self.schedule.places(false).map(move |place| states(place.sequence.tokens) * len);
        portions(&mut self.memory, lens)
    }

    /// The state at the end of every span at which the sum of the span ends.
    pub fn behind(&mut self) -> impl Iterator<Item = &mut [f32]> + Send {
        self.beside_spans(self.forwards)
    }

    /// The state at the end of every span at which the sum of the span begins.
    pub fn before(&mut self) -> impl Iterator<Item = &mut [f32]> + Send {
        self.beside_spans(!self.forwards)
    }

    /// The state at one end of every span: at that of its last token, or of its first.
    fn beside_spans(&mut self, last: bool) -> impl Iterator<Item = &mut [f32]> + Send {
        let len = self.len();
        self.slots().flat_map(move |slot| {
            let (start, spans) = (if last { len } else { 0 }, slot.len() - len);
            slot[start..][..spans].chunks_exact_mut(len)
        })
    }

    /// Every slot with its first state or, where `last`, its last one, in the direction of the sums.
    fn ends(&mut self, last: bool) -> impl Iterator<Item = (Place<'a>, &mut [f32])> {
        let (len, behind) = (self.len(), last == self.forwards);
        self.schedule.places(false).zip(self.slots()).map(move |(place, slot)| {
            let start = if behind { slot.len() - len } else { 0 };
            (place, &mut slot[start..][..len])
        })
    }

    /// Reads the states with which slots begin, and their tangents. An absent one is 0.
    pub fn begin(&mut self, tensors: &[Option<ArrayView4<'_, f32>>; 2]) {
        let shape = self.shape;
        for (place, state) in self.ends(false) {
            state.fill(0.0);
            for (tensor, state) in tensors.iter().zip(state.chunks_exact_mut(shape.len())) {
                let Some(tensor) = tensor else { continue };
                shape.read(state, tensor.slice(s![place.sequence.index, place.head, .., ..]));
            }
        }
    }

    /// Writes what every slot ends with: of a state, matrix `which`.
    pub fn finish(&mut self, tensor: Option<ArrayViewMut4<'_, f32>>, which: usize) {
        let (Some(mut tensor), shape) = (tensor, self.shape) else { return };
        for (place, state) in self.ends(true) {
            let target = tensor.slice_mut(s![place.sequence.index, place.head, .., ..]);
            shape.write(&state[which * shape.len()..], target);
        }
    }

    /// Turns the sums of spans into the states between them.
    pub fn scan(&mut self, carry: impl Fn(&Place<'_>) -> Carry + Sync) {
        let Schedule { cut, options, .. } = self.schedule;
        let (len, forwards) = (self.len(), self.forwards);
        let rooms = 0..self.schedule.threads();
        let tasks = self.schedule.places(false).zip(self.slots());
        let enter = |_| ();
        share(rooms, enter, tasks, |(place, states), ()| {
            let add = |span: Place<'_>| {
                let at = span.number * len;
                let (before, behind) = states[at..][..2 * len].split_at_mut(len);
                let (from, to) = if forwards { (before, behind) } else { (behind, before) };
                add_carried(options.level, carry(&span), from, to);
            };
            let spans = place.spans(&cut);
            if forwards { spans.for_each(add) } else { spans.rev().for_each(add) }
        });
    }
}
