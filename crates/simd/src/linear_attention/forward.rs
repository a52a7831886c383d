//! The forward pass, chunk by chunk:
//!
//! ```text
//! o_i = σ (Σ_{j ≤ i} P_ij (q_i·k_j) v_j + α_i q_i S)      (R21)
//! S′  = α_L S + Σ_j ω_j k_jᵀ v_j                          (R22), after its last use
//! ```
//!
//! The scores of a register block of queries are computed, weighed, multiplied with v, and
//! forgotten.

use super::bf16_forward::{self, TileScratch};
use super::bf16_state::grow;
use super::decays::Decays;
use super::operands::Operands;
use super::rows::Factor;
use super::schedule::{Place, Schedule, States, Uses};
use super::state::{Advance, Shape, combine, combined, pass_on};
use crate::element::TensorMut;
use crate::lanes::prefetch::Queue;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::parallel::{Threaded, Threads};
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

impl Threaded for Forward<'_> {
    type Scratch<'m> = Scratch<'m>;

    fn scratch<'m>(&self, parts: &mut Parts<'m>) -> Scratch<'m> {
        Scratch::new(parts, &self.schedule)
    }
}

impl Forward<'_> {
    /// Writes o and the states after the last tokens, where they are asked for.
    pub fn run(
        &self,
        workspace: &Workspace,
        o: Option<TensorMut<'_, Ix4>>,
        final_state: Option<ArrayViewMut4<'_, f32>>,
    ) -> Result<(), Error> {
        let Forward { schedule, operands } = self;
        let mut threads = Threads::new(workspace, self, schedule.workers())?;
        let mut states = States::new(workspace, schedule, schedule.shape, true)?;
        // Nothing has been written yet.
        states.begin(&operands.initial);
        let (whole, group) = (schedule.whole(), schedule.problem.group());
        let tasks = schedule.places(!whole).zip(schedule.pieces(o, group, !whole));
        if whole {
            threads.share(tasks.zip(states.slots()), |((place, o), state), scratch| {
                self.slot(&place, o, state, scratch);
            });
        } else {
            let sums = schedule.places(true).zip(states.behind());
            threads.share(sums, |(place, sum), scratch| {
                self.sum(&place, scratch);
                sum.copy_from_slice(scratch.sum);
            });
            states.scan(|span| operands.carry(span));
            threads.share(tasks.zip(states.before()), |((place, o), state), scratch| {
                self.span(&place, o, state, false, scratch);
            });
        }
        states.finish(final_state, 0);
        Ok(())
    }

    /// o of a slot, from its first span to its last; the state before it becomes the one after it.
    fn slot(
        &self,
        place: &Place<'_>,
        mut o: Option<TensorMut<'_, Ix3>>,
        state: &mut [f32],
        scratch: &mut Scratch<'_>,
    ) {
        for span in place.spans(&self.schedule.cut) {
            let rows = s![.., span.tokens.clone(), ..];
            let rows = o.as_mut().map(|o| o.view_mut().slice(rows));
            self.span(&span, rows, state, true, scratch);
            pass_on(self.schedule.options.level, self.operands.carry(&span), state, scratch.sum);
        }
    }

    /// Reads the keys and values of a chunk.
    fn read(&self, chunk: &Place<'_>, uses: Uses, scratch: &mut Scratch<'_>) {
        let (Operands { k, v, .. }, level) = (&self.operands, self.schedule.options.level);
        let [gates, _] = self.operands.gates(chunk);
        scratch.decays.prepare(level, &gates, chunk.tokens.clone());
        let (bf16, len) = (self.schedule.cut.bf16, chunk.tokens.len());
        let [of_k, of_v] = [k, v].map(|x| chunk.rows(x, chunk.head));
        if bf16 {
            scratch.tiles.read_keys(level, &scratch.decays, [of_k[0], of_v[0]], len, uses);
        } else {
            scratch.k.read(of_k);
            scratch.v.read(of_v);
        }
        for x in [k, v] {
            chunk.ask_next(x, chunk.head, false, &mut scratch.then);
        }
        if bf16 {
            scratch.then.ask_all();
        } else {
            level.run(Pack { len, uses, scratch });
        }
    }

    /// The state after a span from the span alone.
    fn sum(&self, place: &Place<'_>, scratch: &mut Scratch<'_>) {
        for (n, chunk) in place.chunks(&self.schedule.cut).enumerate() {
            self.read(&chunk, Uses::STATE, scratch);
            self.advance(n, chunk.tokens.len(), scratch);
            scratch.then.ask_all();
        }
    }

    /// (R22) for L of chunk `n` of a span.
    fn advance(&self, n: usize, len: usize, scratch: &mut Scratch<'_>) {
        let Scratch { decays, k, v, sum, tiles, then, .. } = scratch;
        let Schedule { shape, cut, options, .. } = self.schedule;
        let decay = if n == 0 { 0.0 } else { decays.whole };
        if cut.bf16 {
            let (right, tokens) = ((&tiles.v, decays.none), decays.first..len);
            return grow(options.level, shape, (sum, decay), &tiles.k, right, tokens);
        }
        let right = if decays.none { &v.along[0] } else { &v.weighted[0] };
        let tokens = decays.first..len;
        let left = &k.rows[0];
        options.level.run(Advance { shape, state: sum, decay, left, right, tokens, then });
    }

    /// o of a span; with `keep`, `scratch.sum` becomes the state after it from the span alone.
    fn span(
        &self,
        place: &Place<'_>,
        mut o: Option<TensorMut<'_, Ix3>>,
        state: &[f32],
        keep: bool,
        scratch: &mut Scratch<'_>,
    ) {
        let Schedule { problem, cut, options, .. } = self.schedule;
        let Range { start, end } = place.tokens;
        for (n, chunk) in place.chunks(&cut).enumerate() {
            let tokens = chunk.tokens.clone();
            let uses = Uses { results: o.is_some(), state: keep || tokens.end < end };
            self.read(&chunk, uses, scratch);
            if let Some(o) = &mut o {
                let carry = self.operands.carry(&place.part(start..tokens.start));
                let begun = (n > 0).then_some(&*scratch.sum);
                if cut.bf16 {
                    let state = combined(options.level, carry, state, begun, scratch.state);
                    scratch.tiles.round(options.level, self.schedule.shape, state);
                } else {
                    combine(options.level, carry, state, begun, scratch.state);
                }
                for member in 0..problem.group() {
                    let rows = s![member, tokens.start - start..tokens.end - start, ..];
                    self.head(&chunk, member, o.view_mut().slice(rows), scratch);
                }
            }
            if uses.state {
                self.advance(n, tokens.len(), scratch);
            }
            scratch.then.ask_all();
        }
    }

    /// o of one query head in a chunk.
    fn head(
        &self,
        chunk: &Place<'_>,
        member: usize,
        mut to: TensorMut<'_, Ix2>,
        scratch: &mut Scratch<'_>,
    ) {
        let Schedule { problem, shape, cut, options, .. } = self.schedule;
        let (head, scale) = (chunk.head * problem.group() + member, problem.scale as f32);
        let (q, len) = (chunk.rows(&self.operands.q, head), chunk.tokens.len());
        // Before the first token of a sequence that begins with 0 there is nothing to read.
        let blank = chunk.tokens.start == 0 && self.operands.initial[0].is_none();
        if cut.bf16 {
            let Scratch { decays, o, stride, tiles: scratch, then, .. } = &mut *scratch;
            scratch.read_queries(options.level, q[0]);
            chunk.ask_next(&self.operands.q, head, false, then);
            then.push(to.all_lines());
            then.ask_all();
            let stride = *stride;
            let outputs =
                bf16_forward::Outputs { len, blank, decays, o, stride, scratch, to, scale };
            options.level.run_tiles(outputs).unwrap_or_default();
        } else {
            scratch.q.read(q);
            chunk.ask_next(&self.operands.q, head, false, &mut scratch.then);
            scratch.then.push(to.all_lines());
            options.level.run(Outputs { len, blank, shape, scratch });
            to.write_rows_by(options.level, scratch.o, scratch.stride, scale);
        }
    }
}

/// The memory of one thread.
pub struct Scratch<'m> {
    decays: Decays<'m>,
    q: Factor<'m>,
    k: Factor<'m>,
    v: Factor<'m>,
    /// Scores of a register block, then weights.
    strip: &'m mut [f32],
    /// P of a register block.
    p: &'m mut [f32],
    /// o / σ of a chunk, rows `stride` apart; in bf16 of 32 queries.
    o: &'m mut [f32],
    stride: usize,
    /// S of a chunk.
    state: &'m mut [f32],
    /// L of a span.
    sum: &'m mut [f32],
    /// Operands and scores in bf16.
    tiles: TileScratch<'m>,
    /// Lines that are read or written next, prefetched meanwhile.
    then: Queue,
}

impl<'m> Scratch<'m> {
    fn new(parts: &mut Parts<'m>, schedule: &Schedule<'_>) -> Self {
        let Schedule { cut, shape, .. } = *schedule;
        let in_f32 = |len: usize| if cut.bf16 { 0 } else { len };
        let (dim, width, none) = ([in_f32(shape.dim), 0], [in_f32(shape.width), 0], [0; 2]);
        let rows = if cut.bf16 { cut.rows } else { cut.chunk.next_multiple_of(cut.rows) };
        let stride = shape.width.next_multiple_of(cut.cols);
        // In the order of the fields: what follows a group is in it.
        Scratch {
            q: Factor::new(parts.group("operands of a chunk"), &cut, dim, [none; 3]),
            k: Factor::new(parts, &cut, dim, [dim, none, none]),
            v: Factor::new(parts, &cut, width, [none, width, width]),
            decays: Decays::new(parts.group("scores and decays of a register block"), &cut),
            strip: parts.room(in_f32(cut.rows * STRIDE)),
            p: parts.room(in_f32(cut.rows * STRIDE)),
            o: parts.group("results of a chunk").room(rows.saturating_mul(stride)),
            stride,
            state: parts.group("states of a chunk").room(shape.len()),
            sum: parts.room(shape.len()),
            tiles: TileScratch::new(parts.group("tiles of a chunk"), &cut, shape),
            then: Queue::new(),
        }
    }
}

/// Buffers that the forward pass allocates beside operands and results.
pub fn buffers(schedule: &Schedule<'_>) -> Vec<Buffer> {
    let scratch = Parts::list(|parts| Scratch::new(parts, schedule));
    schedule.buffers(&scratch, &[schedule.shape], false)
}

/// Packs keys and values.
struct Pack<'a, 'm> {
    len: usize,
    uses: Uses,
    scratch: &'a mut Scratch<'m>,
}

impl Kernel for Pack<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let (Uses { results, state }, Scratch { decays, k, v, .. }) = (self.uses, self.scratch);
        if results {
            k.pack_across(isa, self.len);
            v.look(self.len);
        }
        if results || state && decays.none {
            v.pack_along(isa, self.len);
        }
        if state && !decays.none {
            v.rows[0].along(isa, self.len, Some(&*decays.omega), &mut v.weighted[0]);
        }
    }
}

/// (R21) without σ, for one query head.
struct Outputs<'a, 'm> {
    len: usize,
    /// True if S is 0.
    blank: bool,
    shape: Shape,
    scratch: &'a mut Scratch<'m>,
}

impl Kernel for Outputs<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Outputs { len, blank, shape, scratch } = self;
        let Scratch { decays, q, k, v, strip, p, o, stride, state, then, .. } = scratch;
        let (q, keys, values, finite) = (&q.rows[0], &k.across[0], &v.along[0], v.finite);
        let (height, width) = (I::Short::ROWS, I::Short::COLS);
        for first in (0..len).step_by(height) {
            let depth = len.min(first + height);
            for column in (0..depth).step_by(width) {
                let mut tile = I::Short::zero(isa);
                q.add_rows(isa, &mut tile, first, keys.from(column / width), then);
                tile.store(&mut strip[column..], STRIDE);
            }
            if !decays.none {
                decays.rows(isa, first, 0..depth, p);
            }
            apply_decays(isa, decays.none, first, depth, strip, p);
            for number in 0..*stride / width {
                let mut tile = I::Short::zero(isa);
                if !blank {
                    q.add_rows(isa, &mut tile, first, &state[number * shape.panel()..], then);
                    if !decays.none {
                        tile = tile.scale_rows(isa, &decays.alpha[first..]);
                    }
                }
                if finite {
                    tile.add_rows_then(isa, strip, values.from(number), depth, then);
                }
                tile.store(&mut o[first * *stride + number * width..], *stride);
            }
            if !finite {
                let sum = Sum { acc: &mut o[first * *stride..], stride: *stride };
                let values = Along { packed: values, start: 0, depth };
                sum.add_visible::<I, I::Short>(
                    isa,
                    height,
                    values,
                    #[inline(always)]
                    |r, j| {
                        let seen = j <= first + r && (decays.none || p[r * STRIDE + j] > 0.0);
                        // No `then`: its closure is not inlined everywhere (tests/codegen.rs).
                        if seen { Some(strip[r * STRIDE + j]) } else { None }
                    },
                );
            }
        }
    }
}

/// Scores become weights: times P, and 0 where P is, or without decays where j > i.
#[inline(always)]
fn apply_decays<I: Isa>(
    isa: I,
    none: bool,
    first: usize,
    depth: usize,
    strip: &mut [f32],
    p: &[f32],
) {
    for r in 0..I::Short::ROWS {
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
