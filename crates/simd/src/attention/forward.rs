//! The forward pass: a streaming softmax over tiles of keys.
//!
//! For a tile of queries, with m = −∞, l = 0, o = 0:
//!
//! ```text
//! for each tile of keys that holds a visible pair
//!     for each register block of queries
//!         S  = σ·Q Kᵀ, softcap, bias, mask                      (F1) (F2)
//!         m′ = max(m, rowmax S)
//!         l, o ← l·e^(m−m′), o·e^(m−m′)        only in rows where m grew by more than 5, see `RESCALE`
//!         P  = e^(S−m′)
//!         l  ← l + rowsum P,   o ← o + P V
//! lse = m + ln l,   o ← o / l                                    (F3) (F5)
//! ```
//!
//! The sums of l stay spread over the lanes of a register until the end. A sink joins l last.

use super::{Inputs, Output, OutputMut};
use crate::aligned::Aligned;
use crate::element::write_row;
use crate::exp::exp_difference;
use crate::heads::{
    Cut, Place, Rule, all_queries, clear, places, query_rows, query_tiles, rows_of,
};
use crate::lanes::{Isa, Kernel, Lanes};
use crate::level::compiled_here;
use crate::mask::Sight;
use crate::pack::{ONE_JOB, Packed, Source, touches};
use crate::packs::{Keys, Operand, Packing};
use crate::parallel::for_each;
use crate::plan::Plan;
use crate::products::{Along, Sum};
use crate::scores::{Block, Factors, MAX_ROWS, Strip, score_block, slope};
use crate::tile::{MAX_KEYS, STRIDE, Tile};
use crate::waves::Waves;
use crate::{Element, Options};
use etalon_problem::{Attention, Cover, Error, Scores, Sequence};
use ndarray::{ArrayView1, ArrayView4, ArrayViewMut1, ArrayViewMut2, ArrayViewMut3, ArrayViewMut4};
use std::ops::Range;
use std::sync::Mutex;

pub(crate) use crate::memory::zeros;

/// The accumulators are rescaled when a maximum grows by more than this: e⁵ < 2⁸, so that no
/// weight exceeds 2⁸ and nothing can overflow, while on most tiles nothing has to be rescaled.
const RESCALE: f32 = 5.0;

/// o and lse of a problem (F1)–(F5).
pub fn forward<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    options: &Options,
) -> Result<Output<T>, Error> {
    inputs.check(problem)?;
    let mut o = zeros(problem.o_shape(), "o")?;
    let mut lse = zeros(problem.scores.row_shape(), "lse")?;
    let out = OutputMut { o: o.view_mut(), lse: lse.view_mut() };
    forward_into(problem, inputs, out, options)?;
    Ok(Output { o, lse })
}

/// As [`forward`], into arrays of the caller. On an error nothing has been written.
pub fn forward_into<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: OutputMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    Error::expect_shape("o", &problem.o_shape(), out.o.shape())?;
    Error::expect_shape("lse", &problem.scores.row_shape(), out.lse.shape())?;
    Forward {
        scores: &problem.scores,
        q: &inputs.q,
        k: &inputs.k,
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
        values: Values::V(&inputs.v),
    }
    .run(Some(out.o), out.lse, options)
}

/// What the weights multiply.
pub(crate) enum Values<'a, T> {
    /// Nothing: only lse is wanted.
    None,
    /// v, as attention does.
    V(&'a ArrayView4<'a, T>),
    /// k, with the weights P ⊙ S′: the result is ∂lse/∂q, up to σ.
    K,
}

/// A forward pass of attention or of attention_lse, its operands checked.
pub(crate) struct Forward<'a, T> {
    pub scores: &'a Scores,
    pub q: &'a ArrayView4<'a, T>,
    pub k: &'a ArrayView4<'a, T>,
    pub sinks: Option<&'a ArrayView1<'a, f32>>,
    pub bias: Option<&'a ArrayView4<'a, T>>,
    pub values: Values<'a, T>,
}

impl<T: Element> Forward<'_, T> {
    /// Writes o (or, with [`Values::K`], ∂lse/∂q in the type R) and lse.
    pub fn run<R: Element>(
        &self,
        o: Option<ArrayViewMut4<'_, R>>,
        lse: ArrayViewMut3<'_, f32>,
        options: &Options,
    ) -> Result<(), Error> {
        let cut = Cut::new(self.scores, options)?;
        let sequences = self.scores.sequences();
        let width = self.width();
        let packing = self.packing(&sequences, cut);
        let sight = Sight::new(&self.scores.mask)?;
        let waves = self.waves(&packing);
        let mut slots = (0..waves.size).map(|_| packing.room()).collect::<Result<Vec<_>, _>>()?;
        let scratch = || Scratch::new(&cut, self.scores.extents.dim, width);
        // Trial allocation: on an error nothing has been written yet.
        let idle = Mutex::new(vec![scratch()?]);
        let tasks = self.tasks(&sequences, cut.queries, o, lse);
        let slot = |task: &Task<'_, R>| task.place.slot(self.scores);
        for (wave, tasks) in waves.iter().zip(waves.sort(tasks, slot)) {
            packing.pack(&mut slots[..wave.len()], wave.start);
            for_each(&idle, tasks, scratch, |task, scratch| {
                let keys = &slots[slot(&task) - wave.start].keys;
                self.tile(task, &sequences, &sight, keys, scratch, options);
            })?;
        }
        Ok(())
    }

    /// Columns of the result.
    fn width(&self) -> usize {
        match self.values {
            Values::None => 0,
            Values::V(v) => v.dim().3,
            Values::K => self.scores.extents.dim,
        }
    }

    fn packing<'s>(&'s self, sequences: &'s [Sequence], cut: Cut) -> Packing<'s, T> {
        let [k, v] = match self.values {
            Values::None => [Operand::across(self.k), Operand::NONE],
            Values::V(v) => [Operand::across(self.k), Operand::along(v)],
            Values::K => [Operand::both(self.k), Operand::NONE],
        };
        let keys = [k, v, Operand::NONE, Operand::NONE];
        Packing { scores: self.scores, sequences, cut, keys, queries: None }
    }

    /// What [`Forward::run`] will do.
    pub fn plan(&self, options: &Options) -> Result<Plan, Error> {
        let sequences = self.scores.sequences();
        let cut = Cut::new(self.scores, options)?;
        let packing = self.packing(&sequences, cut);
        let together = self.waves(&packing).size;
        let scratch = Scratch::new(&cut, self.scores.extents.dim, self.width())?.bytes();
        Ok(Plan {
            blocking: cut.blocking(),
            mode: None,
            products: if self.width() == 0 { 1 } else { 2 },
            interval: None,
            together,
            buffers: packing.buffers(together, scratch),
        })
    }

    fn waves(&self, packing: &Packing<'_, T>) -> Waves {
        Waves::new(
            packing.slots(),
            packing.bytes(),
            packing.tiles().0,
            rayon::current_num_threads(),
        )
    }

    /// One task per tile of queries, the last tiles first: with a causal mask they see most keys.
    fn tasks<'t, R: Element>(
        &self,
        sequences: &[Sequence],
        size: usize,
        o: Option<ArrayViewMut4<'t, R>>,
        mut lse: ArrayViewMut3<'t, f32>,
    ) -> Vec<Task<'t, R>> {
        clear(&mut lse, all_queries(sequences), f32::NEG_INFINITY);
        let mut o = o.map(|mut o| {
            clear(&mut o, all_queries(sequences), R::ZERO);
            query_tiles(o, sequences, |_| size).into_iter()
        });
        let places = places(sequences, self.scores.extents.query_heads, |_| size).into_iter();
        let lse = query_tiles(lse, sequences, |_| size);
        let task = |(place, lse)| Task { place, o: o.as_mut().and_then(Iterator::next), lse };
        let mut tasks: Vec<_> = places.zip(lse).map(task).collect();
        tasks.sort_by_key(|task| std::cmp::Reverse(task.place.rows.start));
        tasks
    }

    fn tile<R: Element>(
        &self,
        task: Task<'_, R>,
        sequences: &[Sequence],
        sight: &Sight<'_>,
        keys: &Keys,
        scratch: &mut Scratch,
        options: &Options,
    ) {
        let Task { place: Place { number, head, rows }, mut o, mut lse } = task;
        let sequence = &sequences[number];
        let (scores, width) = (self.scores, self.width());
        let query_start = query_rows(sequence).start;
        let source = Source {
            rows: rows_of(
                self.q,
                sequence.batch,
                head,
                query_start + rows.start..query_start + rows.end,
            ),
            dead: None,
            job: ONE_JOB,
        };
        let non_finite = source.non_finite().is_some();
        source.across_into(scratch.cut.rows, &mut scratch.q);
        let tile = ForwardTile {
            rule: Rule::new(scores, sight, self.bias, sequence, head),
            keys,
            derivative: matches!(self.values, Values::K),
            non_finite,
            rows: rows.clone(),
            dim: scores.extents.dim,
            width,
            sink: self.sinks.map(|sinks| sinks[head]),
            scratch,
        };
        tile.run_at(options.level);
        let stride = scratch.stride;
        for r in 0..rows.len() {
            lse[r] = scratch.m[r];
            if let Some(o) = &mut o {
                let result = &scratch.o[r * stride..][..width];
                write_row(o.row_mut(r), result, 1.0);
            }
        }
    }
}

/// A tile of queries, and where its results go.
struct Task<'a, R> {
    place: Place,
    o: Option<ArrayViewMut2<'a, R>>,
    lse: ArrayViewMut1<'a, f32>,
}

/// The memory of one thread.
struct Scratch {
    cut: Cut,
    /// Queries, packed across.
    q: Packed,
    /// m of every row; at the end lse.
    m: Aligned,
    /// l of every row, spread over lanes.
    l: Aligned,
    /// o of every row, rows `stride` apart.
    o: Aligned,
    stride: usize,
    /// One block of scores, then of weights.
    s: Aligned,
    tanh: Aligned,
    visible: Vec<bool>,
}

/// The most lanes of a register, over all instruction sets.
const MAX_LANES: usize = 16;

impl Scratch {
    fn new(cut: &Cut, dim: usize, width: usize) -> Result<Self, Error> {
        let stride = width.next_multiple_of(cut.cols);
        let what = "the scratch of a thread";
        Ok(Scratch {
            cut: *cut,
            q: Packed::room(dim.saturating_mul(cut.queries))?,
            m: Aligned::zeros(cut.queries, what)?,
            l: Aligned::zeros(cut.queries * MAX_LANES, what)?,
            o: Aligned::zeros(stride.saturating_mul(cut.queries), what)?,
            stride,
            s: Aligned::zeros(cut.rows * STRIDE, what)?,
            tanh: Aligned::zeros(cut.rows * STRIDE, what)?,
            visible: vec![false; cut.rows * MAX_KEYS],
        })
    }

    fn bytes(&self) -> usize {
        let Scratch { q, m, l, o, s, tanh, visible, .. } = self;
        let sums = [&q.panels, m, l, o, s, tanh].map(Aligned::bytes);
        sums.iter().sum::<usize>() + visible.len()
    }
}

/// The kernel: one tile of queries against all its keys.
struct ForwardTile<'a> {
    rule: Rule<'a>,
    keys: &'a Keys,
    /// Whether the weights are multiplied by S′ (for ∂lse/∂q).
    derivative: bool,
    /// Whether a query of the tile is not finite.
    non_finite: bool,
    rows: Range<usize>,
    dim: usize,
    width: usize,
    sink: Option<f32>,
    scratch: &'a mut Scratch,
}

compiled_here!(ForwardTile<'_>);

impl Kernel for ForwardTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        self.scratch.m.fill(f32::NEG_INFINITY);
        self.scratch.l.fill(0.0);
        self.scratch.o.fill(0.0);
        let keys = self.rule.sequence.keys;
        for cols in Cut::tiles(0..keys, self.scratch.cut.keys) {
            if self.rule.cover(self.rows.clone(), cols.clone()) == Cover::None {
                continue;
            }
            let careful = self.non_finite || touches(&self.keys.non_finite, cols.clone());
            for first in (0..self.rows.len()).step_by(I::Tile::ROWS) {
                self.block(isa, first, cols.clone(), careful);
            }
        }
        for r in 0..self.rows.len() {
            self.finish(isa, r);
        }
    }
}

impl ForwardTile<'_> {
    /// One register block of queries, from row `first` of the tile, against a tile of keys.
    #[inline(always)]
    fn block<I: Isa>(&mut self, isa: I, first: usize, cols: Range<usize>, careful: bool) {
        let start = self.rows.start + first;
        let rows = start..self.rows.end.min(start + I::Tile::ROWS);
        let panel = I::Tile::COLS;
        let scratch = &mut *self.scratch;
        let factors = Factors {
            rule: &self.rule,
            q: &scratch.q.panels[first * self.dim..],
            k: self.keys.k.across.from(cols.start / panel),
            dim: self.dim,
        };
        let mut block =
            Block { s: &mut scratch.s, tanh: &mut scratch.tanh, visible: &mut scratch.visible };
        let mut max = [I::F32::splat(isa, f32::NEG_INFINITY); MAX_ROWS];
        let strip = score_block(isa, factors, rows, cols.clone(), careful, &mut block, &mut max);
        let Some(strip) = strip else { return };
        self.grow(isa, first, &max);
        self.weigh(isa, first, &strip);
        if self.width > 0 {
            self.accumulate(isa, first, cols, &strip, careful);
        }
    }

    /// m′ = max(m, rowmax S), and l and o rescaled, in rows where m grew by more than [`RESCALE`].
    /// Each row decides for itself: its bits depend on no other row of the block.
    #[inline(always)]
    fn grow<I: Isa>(&mut self, isa: I, first: usize, max: &[I::F32; MAX_ROWS]) {
        let Scratch { m, l, o, stride, .. } = &mut *self.scratch;
        for (r, max) in max[..I::Tile::ROWS].iter().enumerate() {
            let m = &mut m[first + r];
            let grown = max.reduce_max();
            // From m = −∞ every score is growth.
            if grown > *m + RESCALE {
                let factor = exp_difference(isa, I::F32::splat(isa, *m), I::F32::splat(isa, grown));
                let l = &mut l[(first + r) * MAX_LANES..][..I::F32::N];
                (I::F32::load(isa, l) * factor).store(l);
                for o in o[(first + r) * *stride..][..*stride].chunks_exact_mut(I::F32::N) {
                    (I::F32::load(isa, o) * factor).store(o);
                }
                *m = grown;
            }
        }
    }

    /// P = e^(S−m), and l grown by its row sums; then, if asked for, P ⊙ S′.
    #[inline(always)]
    fn weigh<I: Isa>(&mut self, isa: I, first: usize, strip: &Strip) {
        let Scratch { m, l, s, tanh, .. } = &mut *self.scratch;
        let derive = self.derivative && self.rule.softcap.is_some();
        for r in 0..I::Tile::ROWS {
            let m = m[first + r];
            // A row that has seen nothing: any finite m gives the weight e^−∞ = 0.
            let m = I::F32::splat(isa, if m == f32::NEG_INFINITY { 0.0 } else { m });
            let l = &mut l[(first + r) * MAX_LANES..][..I::F32::N];
            let mut sum = I::F32::load(isa, l);
            for s in s[r * STRIDE..][strip.cols.clone()].chunks_exact_mut(I::F32::N) {
                let p = exp_difference(isa, I::F32::load(isa, s), m);
                sum = sum + p;
                p.store(s);
            }
            sum.store(l);
            if derive {
                let p = s[r * STRIDE..][strip.cols.clone()].chunks_exact_mut(I::F32::N);
                let t = tanh[r * STRIDE..][strip.cols.clone()].chunks_exact(I::F32::N);
                p.zip(t).for_each(
                    #[inline(always)]
                    |(p, t)| (I::F32::load(isa, p) * slope(isa, I::F32::load(isa, t))).store(p),
                );
            }
        }
    }

    /// o ← o + P V.
    #[inline(always)]
    fn accumulate<I: Isa>(
        &mut self,
        isa: I,
        first: usize,
        cols: Range<usize>,
        strip: &Strip,
        careful: bool,
    ) {
        let Scratch { o, stride, s, visible, .. } = &mut *self.scratch;
        let sum = Sum { acc: &mut o[first * *stride..], stride: *stride };
        let values = if self.derivative { &self.keys.k.along } else { &self.keys.v.along };
        let start = strip.cols.start;
        let depth = strip.cols.end.min(cols.len()) - start;
        let values = Along { packed: values, start: cols.start + start, depth };
        if careful {
            sum.add_visible(
                isa,
                I::Tile::ROWS,
                values,
                #[inline(always)]
                |r, k| visible[r * MAX_KEYS + start + k].then(|| s[r * STRIDE + start + k]),
            );
        } else {
            sum.add_rows(isa, &s[start..], values);
        }
    }

    /// (F3) lse = m + ln l and (F5) o ← o / l of row `r`, with the sink as one more logit.
    #[inline(always)]
    fn finish<I: Isa>(&mut self, isa: I, r: usize) {
        let Scratch { m, l, o, stride, .. } = &mut *self.scratch;
        let o = &mut o[r * *stride..][..*stride];
        let l = I::F32::load(isa, &l[r * MAX_LANES..]).reduce_add();
        let sink = self.sink.unwrap_or(f32::NEG_INFINITY);
        if l == 0.0 {
            o.fill(0.0);
            m[r] = sink;
            return;
        }
        let (max, mut weight, mut sum) = (m[r], 1.0, f64::from(l));
        let mut top = f64::from(max);
        if sink != f32::NEG_INFINITY {
            top = f64::from(max.max(sink));
            weight = (f64::from(max) - top).exp();
            sum = sum * weight + (f64::from(sink) - top).exp();
        }
        m[r] = (top + sum.ln()) as f32;
        let sigma = if self.derivative { self.rule.scale } else { 1.0 };
        let factor = I::F32::splat(isa, sigma * weight as f32);
        let sum = I::F32::splat(isa, sum as f32);
        for o in o.chunks_exact_mut(I::F32::N) {
            (I::F32::load(isa, o) * factor / sum).store(o);
        }
    }
}
