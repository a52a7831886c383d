//! The forward pass, chunk by chunk:
//!
//! ```text
//! o_i = σ (Σ_{j ≤ i} P_ij (q_i·k_j) v_j + α_i q_i S)      (R21)
//! S′  = α_L S + Σ_j ω_j k_jᵀ v_j                          (R22), after its last use
//! ```
//!
//! The scores of a register block of queries are computed, weighed, multiplied with v, and
//! forgotten.

use super::cut::Cut;
use super::decays::Decays;
use super::operands::Operands;
use super::rows::{Panels, Rows, across, along};
use super::schedule::{Place, Schedule, States};
use super::state::{Advance, Shape, combine, pass_on};
use crate::element::{Tensor, TensorMut};
use crate::lanes::{Isa, Kernel, Lanes};
use crate::level::compiled_here;
use crate::parallel::share;
use crate::plan::Buffer;
use crate::products::{Along, Sum};
use crate::tile::{STRIDE, Tile};
use crate::workspace::{Parts, Workspace};
use etalon_problem::Error;
use ndarray::{ArrayViewMut4, Ix2, Ix3, Ix4, s};
use std::ops::Range;

/// A forward pass, its operands checked.
pub struct Forward<'a> {
    pub schedule: Schedule<'a>,
    pub operands: Operands<'a>,
}

impl Forward<'_> {
    /// Writes o and, where it is asked for, the states after the last tokens.
    pub fn run(
        &self,
        workspace: &Workspace,
        o: TensorMut<'_, Ix4>,
        final_state: Option<ArrayViewMut4<'_, f32>>,
    ) -> Result<(), Error> {
        let Forward { schedule, operands } = self;
        let Schedule { cut, shape, .. } = *schedule;
        let each = Parts::count(|parts| Scratch::new(parts, &cut, shape));
        let memory = each.saturating_mul(schedule.workers());
        let mut memory = workspace.room(memory, "the scratch of threads")?;
        let mut states = States::new(workspace, schedule, shape, true)?;
        // Nothing has been written yet.
        states.begin(&operands.initial, false);
        let (whole, group) = (schedule.whole(), schedule.problem.group());
        let o = schedule.pieces(Some(o), group, !whole).flatten();
        let tasks = schedule.places(!whole).zip(o);
        if whole {
            let (threads, tasks) = (memory.chunks_exact_mut(each), tasks.zip(states.slots()));
            share(
                threads,
                |part| self.enter(part),
                tasks,
                |((place, o), state), scratch| {
                    self.slot(&place, o, state, scratch);
                },
            );
        } else {
            let threads = memory.chunks_exact_mut(each);
            let sums = schedule.places(true).zip(states.behind());
            share(
                threads,
                |part| self.enter(part),
                sums,
                |(place, sum), scratch| self.sum(&place, sum, scratch),
            );
            states.scan(|span| operands.carry(span, span.tokens.clone()));
            let (threads, tasks) = (memory.chunks_exact_mut(each), tasks.zip(states.before()));
            share(
                threads,
                |part| self.enter(part),
                tasks,
                |((place, o), state), scratch| {
                    let sum = std::mem::take(&mut scratch.sum);
                    self.span(&place, o, state, sum, false, scratch);
                    scratch.sum = sum;
                },
            );
        }
        states.finish(final_state, 0, false);
        Ok(())
    }

    /// The scratch of a thread, in its part of the memory.
    fn enter<'m>(&self, part: &'m mut [f32]) -> Scratch<'m> {
        Scratch::new(&mut Parts::of(part), &self.schedule.cut, self.schedule.shape)
    }

    /// o of a slot, from its first span to its last; the state before it becomes the one after it.
    fn slot(
        &self,
        place: &Place<'_>,
        mut o: TensorMut<'_, Ix3>,
        state: &mut [f32],
        scratch: &mut Scratch<'_>,
    ) {
        let level = self.schedule.options.level;
        let sum = std::mem::take(&mut scratch.sum);
        for span in place.spans(&self.schedule.cut) {
            let rows = o.view_mut().slice(s![.., span.tokens.clone(), ..]);
            self.span(&span, rows, state, sum, true, scratch);
            pass_on(level, self.operands.carry(&span, span.tokens.clone()), state, sum);
        }
        scratch.sum = sum;
    }

    /// Reads the keys and values of a chunk.
    fn read(
        &self,
        place: &Place<'_>,
        chunk: &Range<usize>,
        output: bool,
        scratch: &mut Scratch<'_>,
    ) {
        let (Operands { k, v, .. }, level) = (&self.operands, self.schedule.options.level);
        scratch.decays.prepare(level, &self.operands.gates(place).0, chunk.clone());
        k[0].iter().for_each(|k| scratch.k.read(place.rows(k, place.head, chunk)));
        v[0].iter().for_each(|v| scratch.v.read(place.rows(v, place.head, chunk)));
        Pack { len: chunk.len(), output, scratch }.run_at(level);
    }

    /// The state after a span from the span alone.
    fn sum(&self, place: &Place<'_>, sum: &mut [f32], scratch: &mut Scratch<'_>) {
        for (n, chunk) in self.schedule.cut.chunks(&place.tokens).enumerate() {
            self.read(place, &chunk, false, scratch);
            self.advance(n, chunk.len(), sum, scratch);
        }
    }

    /// (R22) for L of chunk `n` of a span.
    fn advance(&self, n: usize, len: usize, sum: &mut [f32], scratch: &Scratch<'_>) {
        let Scratch { decays, k, values, weighted, .. } = scratch;
        let Schedule { shape, options, .. } = self.schedule;
        let decay = if n == 0 { 0.0 } else { decays.whole };
        let right = if decays.none { values } else { weighted };
        let tokens = decays.first..len;
        Advance { shape, state: sum, decay, left: k, right, tokens }.run_at(options.level);
    }

    /// o of a span; with `keep`, `sum` becomes the state after it from the span alone.
    fn span(
        &self,
        place: &Place<'_>,
        mut o: TensorMut<'_, Ix3>,
        state: &[f32],
        sum: &mut [f32],
        keep: bool,
        scratch: &mut Scratch<'_>,
    ) {
        let Schedule { problem, cut, options, .. } = self.schedule;
        let start = place.tokens.start;
        for (n, chunk) in cut.chunks(&place.tokens).enumerate() {
            self.read(place, &chunk, true, scratch);
            let carry = self.operands.carry(place, start..chunk.start);
            let begun = (n > 0).then_some(&*sum);
            combine(options.level, carry, state, begun, scratch.state);
            // Before the first token of a sequence that begins with 0 there is nothing to read.
            let blank = chunk.start == 0 && self.operands.initial[0].is_none();
            for member in 0..problem.group() {
                let head = place.head * problem.group() + member;
                let rows = s![member, chunk.start - start..chunk.end - start, ..];
                let q = self.operands.q[0].map(|q| place.rows(&q, head, &chunk));
                self.chunk(q, o.view_mut().slice(rows), blank, scratch);
            }
            if keep || chunk.end < place.tokens.end {
                self.advance(n, chunk.len(), sum, scratch);
            }
        }
    }

    /// o of one query head in a chunk.
    fn chunk(
        &self,
        q: Option<Tensor<'_, Ix2>>,
        mut o: TensorMut<'_, Ix2>,
        blank: bool,
        scratch: &mut Scratch<'_>,
    ) {
        let Schedule { problem, shape, options, .. } = self.schedule;
        q.into_iter().for_each(|q| scratch.q.read(q));
        Outputs { len: o.shape()[0], blank, shape, scratch }.run_at(options.level);
        o.write_rows(scratch.o, scratch.stride, problem.scale as f32);
    }
}

/// The memory of one thread.
struct Scratch<'m> {
    decays: Decays<'m>,
    q: Rows<'m>,
    k: Rows<'m>,
    v: Rows<'m>,
    /// k, across.
    keys: Panels<'m>,
    /// v, along; and with each row times its ω.
    values: Panels<'m>,
    weighted: Panels<'m>,
    /// Whether v holds no NaN and no infinity.
    finite: bool,
    /// Scores of a register block, then weights.
    strip: &'m mut [f32],
    /// P of a register block.
    p: &'m mut [f32],
    /// o / σ of a chunk, rows `stride` apart.
    o: &'m mut [f32],
    stride: usize,
    /// S of a chunk.
    state: &'m mut [f32],
    /// L of a span.
    sum: &'m mut [f32],
}

impl<'m> Scratch<'m> {
    fn new(parts: &mut Parts<'m>, cut: &Cut, shape: Shape) -> Self {
        let Shape { dim, width, .. } = shape;
        let stride = width.next_multiple_of(cut.cols);
        parts.group("operands of a chunk");
        let [q, k, v] = [dim, dim, width].map(|dim| Rows::new(parts, cut, dim));
        let keys = across(parts, cut, dim);
        let [values, weighted] = [width; 2].map(|dim| along(parts, cut, dim));
        parts.group("scores and decays of a register block");
        let decays = Decays::new(parts, cut);
        let [strip, p] = [cut.rows * STRIDE; 2].map(|len| parts.room(len));
        parts.group("results of a chunk");
        let o = parts.room(cut.chunk.next_multiple_of(cut.rows).saturating_mul(stride));
        parts.group("states of a chunk");
        let [state, sum] = [shape.len(); 2].map(|len| parts.room(len));
        let finite = true;
        Scratch { decays, q, k, v, keys, values, weighted, finite, strip, p, o, stride, state, sum }
    }
}

/// What the forward pass allocates beside operands and results.
pub fn buffers(schedule: &Schedule<'_>) -> Vec<Buffer> {
    let scratch = Parts::list(|parts| Scratch::new(parts, &schedule.cut, schedule.shape));
    schedule.buffers(&scratch, &[schedule.shape], false)
}

/// Packs keys and values; for the state alone unless the output is wanted.
struct Pack<'a, 'm> {
    len: usize,
    output: bool,
    scratch: &'a mut Scratch<'m>,
}

compiled_here!(Pack<'_, '_>);

impl Kernel for Pack<'_, '_> {
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
            v.along(isa, self.len, Some(&*decays.omega), weighted);
        }
    }
}

/// (R21) without σ, for one query head.
struct Outputs<'a, 'm> {
    len: usize,
    /// Whether S is 0.
    blank: bool,
    shape: Shape,
    scratch: &'a mut Scratch<'m>,
}

compiled_here!(Outputs<'_, '_>);

impl Kernel for Outputs<'_, '_> {
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
