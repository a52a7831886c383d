//! One more token, for decoding: (R1) and (R2). Every element of the states is read and written once.

use super::operands::Operands;
use super::schedule::Place;
use crate::Options;
use crate::element::{Tensor, TensorMut};
use crate::lanes::{Isa, Kernel, Lanes};
use crate::parallel::share;
use crate::plan::Buffer;
use crate::tiles::cut_along;
use crate::workspace::{Parts, Workspace};
use etalon_problem::{Error, LinearAttention, TokenSequence};
use ndarray::{ArrayViewMut2, ArrayViewMut4, Axis, Ix3, Ix4};

/// States that are worth a thread of their own, in elements.
const TASK: usize = 1 << 16;

/// A step, its operands checked: of those, the axis of the tokens has one.
pub struct Step<'a> {
    pub problem: &'a LinearAttention,
    pub options: &'a Options,
    pub operands: Operands<'a>,
}

impl Step<'_> {
    /// `state` `[B, Hk, D, E]` becomes the states after the token, and `o` `[B, Hq, E]` is written if it
    /// is there.
    pub fn run(
        &self,
        workspace: &Workspace,
        mut state: ArrayViewMut4<'_, f32>,
        o: Option<TensorMut<'_, Ix3>>,
    ) -> Result<(), Error> {
        let (problem, group) = (self.problem, self.problem.group());
        let (heads, dims) = (problem.extents.key_heads, [problem.extents.dim, problem.value_dim]);
        let copied = if state.is_standard_layout() { 0 } else { dims[0] * dims[1] };
        let each = Parts::count(|parts| Scratch::new(parts, problem, copied));
        let memory = each.saturating_mul(threads(problem));
        let mut memory = workspace.room(memory, "the scratch of threads")?;
        // Nothing has been written yet.
        if let Some(initial) = &self.operands.initial[0] {
            state.assign(initial);
        }
        let mut pieces = o.map(|o| {
            let batches = (0..o.shape()[0]).map(|batch| batch..batch + 1);
            cut_along(o, 0, batches).flat_map(|o| {
                let groups = (0..heads).map(|head| head * group..(head + 1) * group);
                cut_along(o.outer(0), 0, groups)
            })
        });
        let states = split(state, Axis(0)).flat_map(|batch| split(batch, Axis(1)));
        let tasks = states.enumerate().map(|(slot, state)| {
            let state = state.index_axis_move(Axis(0), 0).index_axis_move(Axis(0), 0);
            let piece = pieces.as_mut().and_then(Iterator::next);
            (slot / heads, slot % heads, state, piece)
        });
        let threads = memory.chunks_exact_mut(each);
        let enter = |part| Scratch::new(&mut Parts::of(part), problem, copied);
        share(threads, enter, tasks, |(batch, head, state, o), scratch| {
            let sequence = TokenSequence { index: batch, batch, start: 0, tokens: 1 };
            let place = Place { sequence: &sequence, head, number: 0, tokens: 0..1 };
            self.head(&place, state, scratch);
            if let Some(mut o) = o {
                o.write_rows(scratch.o, dims[1], problem.scale as f32);
            }
        });
        Ok(())
    }

    /// The state of one key head, and o / σ of its query heads.
    fn head(
        &self,
        place: &Place<'_>,
        mut state: ArrayViewMut2<'_, f32>,
        scratch: &mut Scratch<'_>,
    ) {
        let Scratch { q, k, v, o, copy } = scratch;
        let Operands { q: queries, k: keys, v: values, .. } = &self.operands;
        let (dim, width) = (k.len(), v.len());
        let batch = place.sequence.batch;
        let read = |[operand, _]: &[Option<Tensor<'_, Ix4>>; 2], head: usize, row: &mut [f32]| {
            operand.iter().for_each(|x| x.read_row([batch, head, 0], row));
        };
        read(keys, place.head, k);
        read(values, place.head, v);
        let first = place.head * self.problem.group();
        for (member, q) in q.chunks_mut(dim).enumerate() {
            read(queries, first + member, q);
        }
        let decay = self.operands.carry(place).decay;
        let mut advance = |state: &mut [f32]| {
            self.options.level.run(Token { q, k, v, decay, width, state, o });
        };
        match state.as_slice_mut() {
            Some(state) => advance(state),
            None => {
                copy.iter_mut().zip(&state).for_each(|(copy, x)| *copy = *x);
                advance(copy);
                state.iter_mut().zip(&**copy).for_each(|(x, copy)| *x = *copy);
            }
        }
    }
}

/// The memory of one thread.
struct Scratch<'m> {
    /// The queries of a group.
    q: &'m mut [f32],
    k: &'m mut [f32],
    v: &'m mut [f32],
    o: &'m mut [f32],
    /// A state whose rows do not lie one behind the other.
    copy: &'m mut [f32],
}

impl<'m> Scratch<'m> {
    /// With room for a copy of so many elements of a state.
    fn new(parts: &mut Parts<'m>, problem: &LinearAttention, copied: usize) -> Self {
        let (dim, width, group) = (problem.extents.dim, problem.value_dim, problem.group());
        parts.group("operands and results of a token");
        let lens = [dim.saturating_mul(group), dim, width, width.saturating_mul(group), copied];
        let [q, k, v, o, copy] = lens.map(|len| parts.room(len));
        Scratch { q, k, v, o, copy }
    }
}

/// Threads that work on the states.
fn threads(problem: &LinearAttention) -> usize {
    let e = &problem.extents;
    let states = e.batch.saturating_mul(e.key_heads);
    let elements = states.saturating_mul(e.dim).saturating_mul(problem.value_dim);
    if elements < TASK { 1 } else { rayon::current_num_threads().min(states).max(1) }
}

/// Buffers that a step allocates beside operands and results, with states of rows that lie one behind the
/// other.
pub fn buffers(problem: &LinearAttention) -> Vec<Buffer> {
    let scratch = Parts::list(|parts| Scratch::new(parts, problem, 0));
    let workers = threads(problem);
    scratch.into_iter().map(|(name, bytes)| Buffer::parts(name, workers, bytes)).collect()
}

/// state ← decay · state + kᵀ v, and q · state for every q; where the decay is 0 the state is absent.
struct Token<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    decay: f32,
    width: usize,
    state: &'a mut [f32],
    o: &'a mut [f32],
}

/// Registers of a block of columns.
const BLOCK: usize = 8;

impl Kernel for Token<'_> {
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let n = I::F32::N;
        let mut column = 0;
        while column + BLOCK * n <= self.width {
            self.columns::<I, BLOCK>(isa, column);
            column += BLOCK * n;
        }
        while column + 4 * n <= self.width {
            self.columns::<I, 4>(isa, column);
            column += 4 * n;
        }
        while column + n <= self.width {
            self.columns::<I, 1>(isa, column);
            column += n;
        }
        for column in column..self.width {
            self.column(column);
        }
    }
}

impl Token<'_> {
    /// Some registers of columns; o of the first query comes with them, further queries read them again.
    #[inline(always)]
    fn columns<I: Isa, const R: usize>(&mut self, isa: I, column: usize) {
        let Token { q, k, v, decay, width, state, o } = self;
        let (n, width, dim) = (I::F32::N, *width, k.len());
        let factor = I::F32::splat(isa, *decay);
        let mut value = [factor; R];
        for (r, value) in value.iter_mut().enumerate() {
            *value = I::F32::load(isa, &v[column + r * n..]);
        }
        let mut sums = [I::F32::splat(isa, 0.0); R];
        for (d, row) in state.chunks_exact_mut(width).enumerate() {
            let key = I::F32::splat(isa, k[d]);
            // Without a query it is not read.
            let query = I::F32::splat(isa, q.get(d).copied().unwrap_or(0.0));
            let row = row[column..column + R * n].chunks_exact_mut(n);
            for ((sum, value), x) in sums.iter_mut().zip(&value).zip(row) {
                let grown = match *decay {
                    0.0 => key * *value,
                    1.0 => key.mul_add(*value, I::F32::load(isa, x)),
                    _ => key.mul_add(*value, factor * I::F32::load(isa, x)),
                };
                grown.store(x);
                *sum = query.mul_add(grown, *sum);
            }
        }
        for (member, (q, o)) in q.chunks_exact(dim).zip(o.chunks_exact_mut(width)).enumerate() {
            if member > 0 {
                sums = [I::F32::splat(isa, 0.0); R];
                for (row, &q) in state.chunks_exact(width).zip(q) {
                    let q = I::F32::splat(isa, q);
                    for (sum, x) in sums.iter_mut().zip(row[column..].chunks_exact(n)) {
                        *sum = q.mul_add(I::F32::load(isa, x), *sum);
                    }
                }
            }
            for (sum, o) in sums.into_iter().zip(o[column..].chunks_exact_mut(n)) {
                sum.store(o);
            }
        }
    }

    /// One column.
    #[inline(always)]
    fn column(&mut self, column: usize) {
        let Token { q, k, v, decay, width, state, o } = self;
        let (width, dim) = (*width, k.len());
        for (row, &k) in state.chunks_exact_mut(width).zip(*k) {
            let kept = if *decay == 0.0 { 0.0 } else { *decay * row[column] };
            row[column] = kept + k * v[column];
        }
        for (q, o) in q.chunks_exact(dim).zip(o.chunks_exact_mut(width)) {
            o[column] = state.chunks_exact(width).zip(q).map(|(row, q)| q * row[column]).sum();
        }
    }
}

/// The entries of an axis, one by one. (`exact_chunks_mut` does not take an axis that runs backwards.)
fn split<'a>(
    states: ArrayViewMut4<'a, f32>,
    axis: Axis,
) -> impl Iterator<Item = ArrayViewMut4<'a, f32>> {
    let entries = states.len_of(axis);
    let mut left = Some(states);
    (0..entries).filter_map(move |_| {
        let (first, others) = left.take()?.split_at(axis, 1);
        left = Some(others);
        Some(first)
    })
}
