//! One more token, for decoding: (R1) and (R2). Every element of the states is read and written once.

use super::{StepInputs, StepOutput, gates};
use crate::attention::forward::zeros;
use crate::attention::sweeps::write_row;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::level::compiled_here;
use crate::pack::read_row;
use crate::parallel::{for_each, reserve};
use crate::plan::Buffer;
use crate::{Element, Options};
use etalon_problem::{Decay, Error, LinearAttention, Pass, check_operands};
use ndarray::{ArrayView4, ArrayViewMut2, ArrayViewMut3, ArrayViewMut4, Axis, s};
use std::ops::Range;
use std::sync::Mutex;

/// States that are worth a thread of their own, in elements.
const TASK: usize = 1 << 16;

/// o of the next token and the states after it, from `initial_state` `[B, Hk, D, E]`, those before it.
pub fn step<T: Element>(
    problem: &LinearAttention,
    inputs: &StepInputs<'_, T>,
    initial_state: ArrayView4<'_, f32>,
    options: &Options,
) -> Result<StepOutput<T>, Error> {
    inputs.check(problem, initial_state.shape())?;
    let e = &problem.extents;
    let mut o = zeros([e.batch, e.query_heads, problem.value_dim], "o")?;
    let mut state = zeros(initial_state.raw_dim(), "final_state")?;
    state.assign(&initial_state);
    step_into(problem, inputs, state.view_mut(), o.view_mut(), options)?;
    Ok(StepOutput { o, final_state: state })
}

/// As [`step`], with the states where they are: `state` `[B, Hk, D, E]` becomes those after the token,
/// and `o` `[B, Hq, E]` is written. On an error nothing has been.
pub fn step_into<T: Element>(
    problem: &LinearAttention,
    inputs: &StepInputs<'_, T>,
    state: ArrayViewMut4<'_, f32>,
    o: ArrayViewMut3<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem, state.shape())?;
    let e = &problem.extents;
    Error::expect_shape("o", &[e.batch, e.query_heads, problem.value_dim], o.shape())?;
    let copied = if state.is_standard_layout() { 0 } else { e.dim * problem.value_dim };
    let scratch = || Scratch::new(problem, copied);
    // Trial allocation: on an error nothing has been written yet.
    let mut first = scratch()?;
    let mut tasks = reserve(e.batch.saturating_mul(e.key_heads), "a list of states")?;
    let mut rest = o;
    for (batch, state) in crate::heads::outer(state).into_iter().enumerate() {
        let (here, tail) = rest.split_at(Axis(0), 1);
        rest = tail;
        let mut here = here.index_axis_move(Axis(0), 0);
        for (head, state) in crate::heads::outer(state).into_iter().enumerate() {
            let (o, tail) = here.split_at(Axis(0), problem.group());
            here = tail;
            tasks.push(Task { batch, head, state, o });
        }
    }
    let run =
        |task: Task<'_, T>, scratch: &mut Scratch| task.run(problem, inputs, scratch, options);
    let elements = tasks.len().saturating_mul(e.dim).saturating_mul(problem.value_dim);
    if elements < TASK {
        tasks.into_iter().for_each(|task| run(task, &mut first));
        return Ok(());
    }
    for_each(&Mutex::new(vec![first]), tasks, scratch, run)
}

impl<T: Element> StepInputs<'_, T> {
    fn check(&self, problem: &LinearAttention, state: &[usize]) -> Result<(), Error> {
        problem.check()?;
        crate::heads::check_counts(problem.extents.batch, problem.extents.query_heads)?;
        let given = [
            ("q", Some(self.q.shape())),
            ("k", Some(self.k.shape())),
            ("v", Some(self.v.shape())),
            ("g_gamma", self.g_gamma.as_ref().map(|x| x.shape())),
            ("g", self.g.as_ref().map(|x| x.shape())),
            ("initial_state", Some(state)),
        ];
        check_operands(&problem.table(Pass::Step), &given)?;
        gates::check_constant(&self.g_gamma)?;
        for ((b, h), &g) in self.g.iter().flat_map(|g| g.indexed_iter()) {
            gates::check_log_decay("g", &[b, h], g)?;
        }
        Ok(())
    }
}

/// The memory of one thread, in f32.
struct Scratch {
    /// The queries of a group.
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    /// A state whose rows do not lie one behind the other.
    state: Vec<f32>,
}

impl Scratch {
    /// With room for a copy of so many elements of a state.
    fn new(problem: &LinearAttention, copied: usize) -> Result<Self, Error> {
        let zeros = |len| crate::parallel::zeroed(len, "the scratch of a thread");
        let (dim, width, group) = (problem.extents.dim, problem.value_dim, problem.group());
        Ok(Scratch {
            q: zeros(dim.saturating_mul(group))?,
            k: zeros(dim)?,
            v: zeros(width)?,
            o: zeros(width.saturating_mul(group))?,
            state: zeros(copied)?,
        })
    }
}

/// What a step allocates beside operands and results, with states of rows that lie one behind the
/// other.
pub(super) fn buffers(problem: &LinearAttention) -> Result<Vec<Buffer>, Error> {
    let e = &problem.extents;
    let states = e.batch.saturating_mul(e.key_heads);
    let elements = states.saturating_mul(e.dim).saturating_mul(problem.value_dim);
    let threads = if elements < TASK { 1 } else { rayon::current_num_threads().min(states).max(1) };
    let Scratch { q, k, v, o, state } = Scratch::new(problem, 0)?;
    let bytes = [q, k, v, o, state].map(|list| list.len() * size_of::<f32>()).iter().sum::<usize>();
    let list = states.saturating_mul(size_of::<Task<'_, f32>>());
    // The views are gone when the list is copied for several threads.
    let views = e.batch.saturating_add(e.key_heads).saturating_mul(VIEW);
    let copy = if elements < TASK { 0 } else { list };
    Ok(vec![
        Buffer::parts("operands and results of a token", threads, bytes),
        Buffer::parts("lists of states", 1, list.saturating_add(views.max(copy))),
    ])
}

/// Bytes of the views that a state is cut from.
const VIEW: usize = size_of::<Range<usize>>()
    + size_of::<ArrayViewMut4<'_, f32>>()
    + size_of::<ArrayViewMut2<'_, f32>>();

/// A state, and o of the query heads that read it.
struct Task<'a, T> {
    batch: usize,
    head: usize,
    state: ArrayViewMut2<'a, f32>,
    o: ArrayViewMut2<'a, T>,
}

impl<T: Element> Task<'_, T> {
    fn run(
        mut self,
        problem: &LinearAttention,
        inputs: &StepInputs<'_, T>,
        scratch: &mut Scratch,
        options: &Options,
    ) {
        let Task { batch, head, .. } = self;
        let Scratch { q, k, v, o, state: copy } = scratch;
        let (dim, width, group) = (problem.extents.dim, problem.value_dim, problem.group());
        read_row(inputs.k.slice(s![batch, head, ..]), k);
        read_row(inputs.v.slice(s![batch, head, ..]), v);
        for (member, q) in q.chunks_mut(dim).enumerate() {
            read_row(inputs.q.slice(s![batch, head * group + member, ..]), q);
        }
        let gate = match (problem.decay, &inputs.g_gamma, &inputs.g) {
            (Decay::PerHead, Some(g_gamma), _) => g_gamma[head],
            (Decay::PerToken, _, Some(g)) => g[[batch, head]],
            _ => 0.0,
        };
        let decay = f64::from(gate).exp() as f32;
        let level = options.level;
        match self.state.as_slice_mut() {
            Some(state) => Step { q, k, v, decay, width, state, o }.run_at(level),
            None => {
                copy.iter_mut().zip(&self.state).for_each(|(copy, x)| *copy = *x);
                Step { q, k, v, decay, width, state: copy, o }.run_at(level);
                self.state.iter_mut().zip(&*copy).for_each(|(x, copy)| *x = *copy);
            }
        }
        let rows = self.o.outer_iter_mut().zip(o.chunks(width));
        rows.for_each(|(o, row)| write_row(o, row, problem.scale as f32));
    }
}

/// state ← decay · state + kᵀ v, and q · state for every q; where the decay is 0 the state is absent.
struct Step<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    decay: f32,
    width: usize,
    state: &'a mut [f32],
    o: &'a mut [f32],
}

compiled_here!(Step<'_>);

/// Registers of a block of columns.
const BLOCK: usize = 8;

impl Kernel for Step<'_> {
    type Output = ();

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

impl Step<'_> {
    /// Some registers of columns; o of the first query comes with them, further queries read them again.
    #[inline(always)]
    fn columns<I: Isa, const R: usize>(&mut self, isa: I, column: usize) {
        let Step { q, k, v, decay, width, state, o } = self;
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
        let Step { q, k, v, decay, width, state, o } = self;
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
