//! The forward pass, chunk by chunk:
//!
//! ```text
//! o_i = σ (Σ_{j ≤ i} P_ij (q_i·k_j) v_j + α_i q_i S)      (R21)
//! S′  = α_L S + Σ_j ω_j k_jᵀ v_j                          (R22), after its last use
//! ```
//!
//! The scores of a register block of queries are computed, weighed, multiplied with v, and
//! forgotten.

use super::gates::Decays;
use super::operand::{Rows, room_across, room_along};
use super::spans::{LEAST_FORWARD, Place, Work, chunks, combine, numbered, pass_on, pieces};
use super::state::{Advance, Shape, State};
use super::{Cut, Inputs, Output, OutputMut, sequences};
use crate::aligned::Aligned;
use crate::attention::forward::zeros;
use crate::attention::sweeps::write_row;
use crate::heads::{all_queries, clear};
use crate::lanes::{Isa, Kernel, Lanes};
use crate::level::compiled_here;
use crate::pack::Packed;
use crate::parallel::for_each_on;
use crate::plan::Buffer;
use crate::products::{Along, Sum};
use crate::tile::{STRIDE, Tile};
use crate::{Element, Options};
use etalon_problem::{Error, LinearAttention, Sequence};
use ndarray::{ArrayView2, ArrayViewMut2, s};
use std::ops::Range;
use std::sync::Mutex;

/// o and, where the problem asks for it, the final state.
pub fn forward<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    options: &Options,
) -> Result<Output<T>, Error> {
    inputs.check(problem)?;
    let mut o = zeros(problem.o_shape(), "o")?;
    let state = || zeros(problem.state_shape(), "final_state");
    let mut final_state = problem.final_state.then(state).transpose()?;
    let final_view = final_state.as_mut().map(|state| state.view_mut());
    let out = OutputMut { o: o.view_mut(), final_state: final_view };
    forward_into(problem, inputs, out, options)?;
    Ok(Output { o, final_state })
}

/// As [`forward`], into arrays of the caller. On an error nothing has been written.
pub fn forward_into<T: Element>(
    problem: &LinearAttention,
    inputs: &Inputs<'_, T>,
    out: OutputMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    inputs.check_tokens(problem)?;
    Error::expect_shape("o", &problem.o_shape(), out.o.shape())?;
    let wanted = problem.final_state;
    Error::expect_presence("final_state", "final_state", wanted, out.final_state.is_some())?;
    if let Some(state) = &out.final_state {
        Error::expect_shape("final_state", &problem.state_shape(), state.shape())?;
    }
    let sequences = sequences(problem);
    Forward { work: work(problem, &sequences, options)?, inputs }.run(out)
}

/// The work of a forward pass.
pub(super) fn work<'a>(
    problem: &'a LinearAttention,
    sequences: &'a [Sequence],
    options: &'a Options,
) -> Result<Work<'a>, Error> {
    Ok(Work { least: LEAST_FORWARD, ..Work::new(problem, sequences, options)? })
}

/// A forward pass, its operands checked.
struct Forward<'a, 'i, T> {
    work: Work<'a>,
    inputs: &'a Inputs<'i, T>,
}

/// A span of a sequence and key head, and the rows of o of its query heads.
struct Span<'o, T> {
    slot: usize,
    number: usize,
    o: Vec<ArrayViewMut2<'o, T>>,
}

impl<T: Element> Forward<'_, '_, T> {
    fn run(&self, out: OutputMut<'_, T>) -> Result<(), Error> {
        let Work { problem, sequences, cut, shape, .. } = &self.work;
        let key_heads = problem.extents.key_heads;
        let OutputMut { mut o, final_state } = out;
        let idle = Mutex::new(vec![self.scratch()?]);
        let mut states = self.work.states(*shape)?;
        let parallel = !self.work.whole();
        let locals = if parallel { self.work.rooms(*shape)? } else { Vec::new() };
        // Nothing has been written yet.
        clear(&mut o, all_queries(sequences), T::ZERO);
        self.work.begin(&self.inputs.initial_state, &mut states, 0, false);
        let pieces = pieces(o, sequences, (key_heads, problem.group()), cut);
        if parallel {
            self.apart(&idle, pieces, locals, &mut states)?;
        } else {
            let tasks = pieces.into_iter().zip(&mut states).enumerate().collect::<Vec<_>>();
            for_each_on(
                self.work.threads(),
                &idle,
                tasks,
                || self.scratch(),
                |(slot, (spans, state)), scratch| {
                    for (number, o) in spans.into_iter().enumerate() {
                        self.span(Span { slot, number, o }, &state.elements, true, scratch);
                        let (place, level) = (self.place(slot, number), self.work.options.level);
                        pass_on(level, &place, &mut scratch.local, &mut state.elements);
                    }
                },
            )?;
        }
        self.work.end(&states, final_state, 0, false);
        Ok(())
    }

    /// First the local states of all spans, then the states before them, then the spans.
    fn apart(
        &self,
        idle: &Mutex<Vec<Scratch>>,
        pieces: Vec<Vec<Vec<ArrayViewMut2<'_, T>>>>,
        mut locals: Vec<Vec<State>>,
        states: &mut [State],
    ) -> Result<(), Error> {
        for_each_on(
            self.work.threads(),
            idle,
            numbered(&mut locals),
            || self.scratch(),
            |(slot, number, local), scratch| {
                self.local(slot, number, &mut local.elements, scratch);
            },
        )?;
        self.work.scan(&mut locals, states, |slot, number| self.place(slot, number));
        let mut tasks = Vec::new();
        for (slot, spans) in pieces.into_iter().enumerate() {
            tasks.extend(spans.into_iter().enumerate().map(|(number, o)| Span { slot, number, o }));
        }
        for_each_on(
            self.work.threads(),
            idle,
            tasks,
            || self.scratch(),
            |span, scratch| {
                let state = &locals[span.slot][span.number];
                self.span(span, &state.elements, false, scratch);
            },
        )
    }

    fn place(&self, slot: usize, number: usize) -> Place<'_> {
        self.work.place(slot, number, self.inputs.gates(), None)
    }

    fn scratch(&self) -> Result<Scratch, Error> {
        Scratch::new(&self.work.cut, self.work.shape)
    }

    /// Reads the keys and values of a chunk.
    fn read(&self, place: &Place<'_>, chunk: &Range<usize>, output: bool, scratch: &mut Scratch) {
        let level = self.work.options.level;
        scratch.decays.prepare(level, &place.gates, chunk.clone());
        scratch.k.read(place.of_keys(&self.inputs.k, chunk));
        scratch.v.read(place.of_keys(&self.inputs.v, chunk));
        Pack { len: chunk.len(), output, scratch }.run_at(level);
    }

    /// The local state of a span.
    fn local(&self, slot: usize, number: usize, local: &mut [f32], scratch: &mut Scratch) {
        let place = self.place(slot, number);
        for (n, chunk) in chunks(&place.tokens, &self.work.cut).enumerate() {
            self.read(&place, &chunk, false, scratch);
            self.advance(n, chunk.len(), local, scratch);
        }
    }

    /// (R22) for L of chunk `n` of a span.
    fn advance(&self, n: usize, len: usize, local: &mut [f32], scratch: &Scratch) {
        let Scratch { decays, k, values, weighted, .. } = scratch;
        let decay = if n == 0 { 0.0 } else { decays.whole };
        let right = if decays.none { values } else { weighted };
        let (shape, left, tokens) = (self.work.shape, k, decays.first..len);
        Advance { shape, state: local, decay, left, right, tokens }.run_at(self.work.options.level);
    }

    /// o of a span; with `keep` its local state is left in the scratch.
    fn span(&self, span: Span<'_, T>, state: &[f32], keep: bool, scratch: &mut Scratch) {
        let Span { slot, number, mut o } = span;
        let place = self.place(slot, number);
        let (group, level) = (self.work.problem.group(), self.work.options.level);
        // Before the first token of a sequence that begins with 0 there is nothing to read.
        let blank = number == 0 && self.inputs.initial_state.is_none();
        let chunks = chunks(&place.tokens, &self.work.cut);
        let count = chunks.len();
        let mut local = std::mem::take(&mut scratch.local);
        for (n, chunk) in chunks.enumerate() {
            self.read(&place, &chunk, true, scratch);
            let between = place.carry(place.tokens.start..chunk.start);
            let begun = (n > 0).then_some(&local[..]);
            combine(level, between, state, begun, &mut scratch.state);
            let within = chunk.start - place.tokens.start..chunk.end - place.tokens.start;
            for (head, o) in o.iter_mut().enumerate() {
                let head = place.head * group + head;
                let q = place.of_queries(&self.inputs.q, head, &chunk);
                self.chunk(q, o.slice_mut(s![within.clone(), ..]), blank && n == 0, scratch);
            }
            if keep || n + 1 < count {
                self.advance(n, chunk.len(), &mut local, scratch);
            }
        }
        scratch.local = local;
    }

    /// o of one query head in a chunk.
    fn chunk(
        &self,
        q: ArrayView2<'_, T>,
        mut o: ArrayViewMut2<'_, T>,
        blank: bool,
        scratch: &mut Scratch,
    ) {
        scratch.q.read(q);
        let Work { problem, shape, options, .. } = &self.work;
        Outputs { len: o.nrows(), blank, shape: *shape, scratch }.run_at(options.level);
        let stride = scratch.stride;
        let rows = o.outer_iter_mut().zip(scratch.o.chunks(stride));
        rows.for_each(|(o, row)| write_row(o, row, problem.scale as f32));
    }
}

/// The memory of one thread.
struct Scratch {
    decays: Decays,
    q: Rows,
    k: Rows,
    v: Rows,
    /// k, across.
    keys: Packed,
    /// v, along; and with each row times its ω.
    values: Packed,
    weighted: Packed,
    /// Whether v holds no NaN and no infinity.
    finite: bool,
    /// Scores of a register block, then weights.
    strip: Aligned,
    /// P of a register block.
    p: Aligned,
    /// o / σ of a chunk, rows `stride` apart.
    o: Aligned,
    stride: usize,
    /// S of a chunk.
    state: Aligned,
    /// L.
    local: Aligned,
}

impl Scratch {
    fn new(cut: &Cut, shape: Shape) -> Result<Self, Error> {
        let what = "the scratch of a thread";
        let stride = shape.width.next_multiple_of(cut.cols);
        let rows = cut.chunk.next_multiple_of(cut.rows);
        Ok(Scratch {
            decays: Decays::room(cut)?,
            q: Rows::room(cut, shape.dim)?,
            k: Rows::room(cut, shape.dim)?,
            v: Rows::room(cut, shape.width)?,
            keys: room_across(cut, shape.dim)?,
            values: room_along(cut, shape.width)?,
            weighted: room_along(cut, shape.width)?,
            finite: true,
            strip: Aligned::zeros(cut.rows * STRIDE, what)?,
            p: Aligned::zeros(cut.rows * STRIDE, what)?,
            o: Aligned::zeros(rows.saturating_mul(stride), what)?,
            stride,
            state: Aligned::zeros(shape.len(), what)?,
            local: Aligned::zeros(shape.len(), what)?,
        })
    }

    /// Its buffers by what they are for.
    fn buffers(&self) -> [(&'static str, usize); 4] {
        let Scratch { decays, q, k, v, keys, values, weighted, .. } = self;
        let packed = [keys, values, weighted].map(|packed| packed.panels.bytes());
        [
            (
                "operands of a chunk",
                q.bytes() + k.bytes() + v.bytes() + packed.iter().sum::<usize>(),
            ),
            (
                "scores and decays of a register block",
                decays.bytes() + self.strip.bytes() + self.p.bytes(),
            ),
            ("results of a chunk", self.o.bytes()),
            ("states of a chunk", self.state.bytes() + self.local.bytes()),
        ]
    }
}

/// What the forward pass allocates beside operands and results.
pub(super) fn buffers(work: &Work<'_>) -> Result<Vec<Buffer>, Error> {
    let scratch = Scratch::new(&work.cut, work.shape)?;
    let mut buffers = work.per_thread(&scratch.buffers());
    let spans = if work.whole() { 0 } else { work.spans() };
    buffers.extend(work.shared(&[work.shape], spans));
    Ok(buffers)
}

/// Packs keys and values; for the state alone unless the output is wanted.
struct Pack<'a> {
    len: usize,
    output: bool,
    scratch: &'a mut Scratch,
}

compiled_here!(Pack<'_>);

impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Scratch { decays, k, v, keys, values, weighted, finite, .. } = self.scratch;
        if self.output {
            k.across(isa, self.len, keys);
            *finite = v.finite(self.len);
        }
        if self.output || decays.none {
            v.along(isa, self.len, None, values);
        }
        if !decays.none {
            v.along(isa, self.len, Some(&decays.omega), weighted);
        }
    }
}

/// (R21) without σ, for one query head.
struct Outputs<'a> {
    len: usize,
    /// Whether S is 0.
    blank: bool,
    shape: Shape,
    scratch: &'a mut Scratch,
}

compiled_here!(Outputs<'_>);

impl Kernel for Outputs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Outputs { len, blank, shape, scratch } = self;
        let Scratch { decays, q, keys, values, finite, strip, p, o, stride, state, .. } = scratch;
        let (height, width) = (I::Tile::ROWS, I::Tile::COLS);
        for first in (0..len).step_by(height) {
            let depth = len.min(first + height);
            for column in (0..depth).step_by(width) {
                let mut tile = I::Tile::zero(isa);
                q.add_rows(isa, &mut tile, first, keys.from(column / width));
                tile.store(&mut strip[column..], STRIDE);
            }
            if !decays.none {
                decays.rows(isa, first, 0..depth, first == 0, p);
            }
            weigh(isa, decays.none, first, depth, strip, p);
            for number in 0..*stride / width {
                let mut tile = I::Tile::zero(isa);
                if !blank {
                    q.add_rows(isa, &mut tile, first, &state[number * shape.panel()..]);
                    if !decays.none {
                        tile = tile.scale_rows(isa, &decays.alpha[first..]);
                    }
                }
                if *finite {
                    tile.add_rows(isa, strip, values.from(number), depth);
                }
                tile.store(&mut o[first * *stride + number * width..], *stride);
            }
            if !*finite {
                let sum = Sum { acc: &mut o[first * *stride..], stride: *stride };
                let values = Along { packed: values, start: 0, depth };
                sum.add_visible(
                    isa,
                    height,
                    values,
                    #[inline(always)]
                    |r, j| {
                        let seen = j <= first + r && (decays.none || p[r * STRIDE + j] > 0.0);
                        seen.then(|| strip[r * STRIDE + j])
                    },
                );
            }
        }
    }
}

/// Scores become weights: times P, and 0 where P is, or without decays where j > i.
#[inline(always)]
fn weigh<I: Isa>(isa: I, none: bool, first: usize, depth: usize, strip: &mut [f32], p: &[f32]) {
    for r in 0..I::Tile::ROWS {
        let row = &mut strip[r * STRIDE..];
        if none {
            let after = (first + r + 1).min(depth);
            row[after..depth].fill(0.0);
            continue;
        }
        let width = depth.next_multiple_of(I::F32::N);
        let p = p[r * STRIDE..][..width].chunks_exact(I::F32::N);
        let zero = I::F32::splat(isa, 0.0);
        for (s, p) in row[..width].chunks_exact_mut(I::F32::N).zip(p) {
            let p = I::F32::load(isa, p);
            zero.select_less(p, I::F32::load(isa, s) * p, zero).store(s);
        }
    }
}
