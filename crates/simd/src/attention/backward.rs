//! The backward pass: who writes which tile, and in which order sums are taken.
//!
//! * [`Mode::Separate`]: one task per tile of queries writes dq, one per tile of keys writes dk and
//!   dv. P is computed twice: 7 products per tile.
//! * [`Mode::FusedPartials`]: one task per group of key tiles writes dk, dv and a partial dq, so
//!   that P is computed once: 5 products per tile. The partials are f32 and are summed in the order
//!   of the groups. How many groups there are follows from the lengths and from the budget per
//!   head, never from the number of heads or threads.
//!
//! Every element has one writer and one order of summation: results are bitwise reproducible.

use super::forward::filled;
use super::gradient::Scratch;
use super::second::check_moving;
use super::sweeps::{Sweep, Tiles};
use super::{Cotangents, Gradients, GradientsMut, Inputs, Output};
use crate::aligned::Aligned;
use crate::heads::Cut;
use crate::pack::read_row;
use crate::packs::{Operand, Packing, Slot};
use crate::products::dot;
use crate::waves::Waves;
use crate::{Element, Mode, Options};
use etalon_problem::{Attention, Error, Scores, Sequence};
use ndarray::{ArrayView1, ArrayView3, ArrayView4, s};
use rayon::prelude::*;
use std::sync::Mutex;

/// Key tiles in a group of [`Mode::FusedPartials`]: enough that writing a partial dq is little
/// beside computing it, few enough that a long sequence has work for every thread.
const GROUP: usize = 8;

/// Rows that one job takes the products dout·o of, at least.
const ROWS: usize = 256;

/// dq, dk, dv and, where the problem has them, dsinks and dbias (B1)–(B9), from the outputs of the
/// forward pass.
pub fn backward<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: &Output<T>,
    cotangents: &Cotangents<'_, T>,
    options: &Options,
) -> Result<Gradients<T>, Error> {
    inputs.check(problem)?;
    let scores = &problem.scores;
    let mut dq = filled(scores.q_shape(), T::ZERO, "dq")?;
    let mut dk = filled(scores.k_shape(), T::ZERO, "dk")?;
    let mut dv = filled(problem.v_shape(), T::ZERO, "dv")?;
    let heads = scores.extents.query_heads;
    let mut dsinks = scores.sinks.then(|| filled(heads, 0.0f32, "dsinks")).transpose()?;
    let mut dbias = scores.bias_shape().map(|shape| filled(shape, T::ZERO, "dbias")).transpose()?;
    let gradients = GradientsMut {
        dq: Some(dq.view_mut()),
        dk: Some(dk.view_mut()),
        dv: Some(dv.view_mut()),
        dsinks: dsinks.as_mut().map(|dsinks| dsinks.view_mut()),
        dbias: dbias.as_mut().map(|dbias| dbias.view_mut()),
    };
    backward_into(problem, inputs, out, cotangents, gradients, options)?;
    Ok(Gradients { dq, dk, dv, dsinks, dbias })
}

/// As [`backward`], into arrays of the caller, and only the gradients that are asked for: dv alone
/// needs no dP. On an error nothing has been written.
pub fn backward_into<T: Element>(
    problem: &Attention,
    inputs: &Inputs<'_, T>,
    out: &Output<T>,
    cotangents: &Cotangents<'_, T>,
    gradients: GradientsMut<'_, T>,
    options: &Options,
) -> Result<(), Error> {
    inputs.check(problem)?;
    let scores = &problem.scores;
    out.check(problem)?;
    cotangents.check(problem)?;
    if let Some(dv) = &gradients.dv {
        Error::expect_shape("dv", &problem.v_shape(), dv.shape())?;
    }
    check_gradients(scores, &gradients)?;
    Backward {
        scores,
        q: &inputs.q,
        k: &inputs.k,
        values: Some(Values { v: &inputs.v, o: out.o.view(), dout: &cotangents.dout }),
        lse: out.lse.view(),
        dlse: cotangents.dlse.as_ref(),
        sinks: inputs.sinks.as_ref(),
        bias: inputs.bias.as_ref(),
    }
    .run(gradients, options)
}

/// Fails unless the gradients of the scores' operands have their shapes.
pub(crate) fn check_gradients<T>(
    scores: &Scores,
    gradients: &GradientsMut<'_, T>,
) -> Result<(), Error> {
    let shapes = [
        gradients.dq.as_ref().map(|x| x.shape()),
        gradients.dk.as_ref().map(|x| x.shape()),
        gradients.dsinks.as_ref().map(|x| x.shape()),
        gradients.dbias.as_ref().map(|x| x.shape()),
    ];
    check_moving(scores, ["dq", "dk", "dsinks", "dbias"], shapes)
}

/// What attention has beyond attention_lse.
pub(crate) struct Values<'a, T> {
    pub v: &'a ArrayView4<'a, T>,
    pub o: ArrayView4<'a, T>,
    pub dout: &'a ArrayView4<'a, T>,
}

/// A backward pass of attention or of attention_lse, its operands checked.
pub(crate) struct Backward<'a, T> {
    pub scores: &'a Scores,
    pub q: &'a ArrayView4<'a, T>,
    pub k: &'a ArrayView4<'a, T>,
    pub values: Option<Values<'a, T>>,
    pub lse: ArrayView3<'a, f32>,
    pub dlse: Option<&'a ArrayView3<'a, f32>>,
    pub sinks: Option<&'a ArrayView1<'a, f32>>,
    pub bias: Option<&'a ArrayView4<'a, T>>,
}

/// How a pass is cut, and what it works on together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Course {
    pub cut: Cut,
    /// Key tiles in a group that has a partial dq of its own; `None`: dq has a sweep of its own.
    pub group: Option<usize>,
    /// Whether dbias is wanted.
    pub dbias: bool,
    pub waves: Waves,
}

/// The partials of dq of a slot: one for each group of its key tiles, `[heads][queries, padded to
/// register blocks][stride]`.
pub(super) type Partials = Vec<Aligned>;

impl<T: Element> Backward<'_, T> {
    /// Writes the gradients that are asked for.
    pub fn run(&self, out: GradientsMut<'_, T>, options: &Options) -> Result<(), Error> {
        let sequences = self.scores.sequences();
        let cut = Cut::new(self.scores, options)?;
        let packing = self.packing(&sequences, cut, out.dq.is_some());
        let course = self.course(&packing, &out, options);
        let (mut slots, mut partials) = (Vec::new(), Vec::new());
        for _ in 0..course.waves.size {
            slots.push(packing.room()?);
            partials.push(self.partials(&packing, &course)?);
        }
        // Trial allocation: on an error nothing has been written yet.
        let idle = Mutex::new(vec![self.scratch(&course)?]);
        let GradientsMut { dq, dk, dv, dsinks, mut dbias } = out;
        let mut tiles = Tiles::new(self.scores, &sequences, &course, [dq, dk, dv]);
        let mut sinks = vec![0.0; self.scores.extents.query_heads];
        for wave in course.waves.iter() {
            let slots = &mut slots[..wave.len()];
            packing.pack(slots, wave.start);
            self.deltas(&packing, slots, wave.start);
            let (pass, packing, idle) = (self, &packing, &idle);
            let sweep = Sweep { pass, packing, course, options, slots, first: wave.start, idle };
            if dsinks.is_some() {
                sweep.dsinks(&mut sinks);
            }
            sweep.run(&mut tiles, &mut partials)?;
            if let Some(dbias) = dbias.take() {
                sweep.bias_sweep(dbias)?;
            }
        }
        // Where there are no slots at all.
        dbias.into_iter().for_each(|mut dbias| dbias.fill(T::ZERO));
        if let Some(mut dsinks) = dsinks {
            dsinks.iter_mut().zip(sinks).for_each(|(dsink, sum)| *dsink = sum as f32);
        }
        Ok(())
    }

    /// The memory of one thread.
    pub(super) fn scratch(&self, course: &Course) -> Result<Scratch, Error> {
        Scratch::new(&course.cut, self.scores.extents.dim, self.value_dim(), course.dbias)
    }

    /// E, or 0 without values.
    pub(super) fn value_dim(&self) -> usize {
        self.values.as_ref().map_or(0, |values| values.v.dim().3)
    }

    fn packing<'s>(&'s self, sequences: &'s [Sequence], cut: Cut, dq: bool) -> Packing<'s, T> {
        let k = if dq { Operand::both(self.k) } else { Operand::across(self.k) };
        let v = Operand::across(self.values.as_ref().map(|values| values.v));
        let dout = Operand::both(self.values.as_ref().map(|values| values.dout));
        let keys = [k, v, Operand::NONE, Operand::NONE];
        let queries = [Operand::both(self.q), dout, Operand::NONE, Operand::NONE];
        let queries = Some((queries, self.lse.view()));
        Packing { scores: self.scores, sequences, cut, keys, queries }
    }

    fn course(
        &self,
        packing: &Packing<'_, T>,
        out: &GradientsMut<'_, T>,
        options: &Options,
    ) -> Course {
        let cut = packing.cut;
        let group = self.group(&cut, options).filter(|_| out.dq.is_some());
        let tasks = packing.longest().1.div_ceil(cut.keys * group.unwrap_or(1));
        let bytes = packing.bytes().saturating_add(self.partial_bytes(packing, group));
        let waves = match &out.dbias {
            // Heads and sequences that share a bias are summed in one order.
            Some(_) => Waves::one(packing.slots()),
            None => Waves::new(packing.slots(), bytes, tasks, rayon::current_num_threads()),
        };
        Course { cut, group, dbias: out.dbias.is_some(), waves }
    }

    /// Key tiles in a group if P is computed once, `None` if twice. Decided by the lengths and by
    /// the budget per head alone, so that it is the same whatever stands beside.
    fn group(&self, cut: &Cut, options: &Options) -> Option<usize> {
        let e = &self.scores.extents;
        let tiles = e.keys.div_ceil(cut.keys).max(1);
        let partial = e.queries.max(1) * e.dim.next_multiple_of(cut.cols) * size_of::<f32>();
        let affordable = (options.partials_budget / partial).max(1);
        match options.mode {
            Mode::Separate | Mode::ForwardGradient => None,
            Mode::FusedPartials => Some(GROUP.max(tiles.div_ceil(affordable))),
            // Groups so large that one head could not occupy four threads do not pay.
            Mode::Auto if affordable >= tiles.div_ceil(GROUP).min(4) => {
                Some(GROUP.max(tiles.div_ceil(affordable)))
            }
            Mode::Auto => None,
        }
    }

    /// Elements of one partial dq of a slot.
    fn partial(&self, packing: &Packing<'_, T>) -> usize {
        let stride = self.scores.extents.dim.next_multiple_of(packing.cut.cols);
        let rows = packing.padded(packing.longest().0).saturating_mul(self.scores.group());
        rows.saturating_mul(stride)
    }

    fn groups(&self, packing: &Packing<'_, T>, group: Option<usize>) -> usize {
        group.map_or(0, |group| packing.longest().1.div_ceil(packing.cut.keys * group))
    }

    fn partial_bytes(&self, packing: &Packing<'_, T>, group: Option<usize>) -> usize {
        let elements = self.partial(packing).saturating_mul(self.groups(packing, group));
        elements.saturating_mul(size_of::<f32>())
    }

    /// Memory for the partials of any slot.
    fn partials(&self, packing: &Packing<'_, T>, course: &Course) -> Result<Partials, Error> {
        let len = self.partial(packing);
        let groups = 0..self.groups(packing, course.group);
        groups.map(|_| Aligned::zeros(len, "partials of dq")).collect()
    }

    /// (B1) δ of every row of the slots from number `first` on.
    fn deltas(&self, packing: &Packing<'_, T>, slots: &mut [Slot], first: usize) {
        let (key_heads, share) = (self.scores.extents.key_heads, self.scores.group());
        slots.par_iter_mut().enumerate().for_each(|(number, slot)| {
            let number = first + number;
            let (sequence, head) = (&packing.sequences[number / key_heads], number % key_heads);
            slot.queries.par_iter_mut().enumerate().for_each(|(query, queries)| {
                let head = head * share + query;
                queries.delta.clear();
                queries.delta.resize(packing.padded(sequence.queries), 0.0);
                let rows = queries.delta[..sequence.queries].par_iter_mut().enumerate();
                rows.with_min_len(ROWS).for_each_init(
                    || [(); 2].map(|()| vec![0.0; self.value_dim()]),
                    |rows, (i, delta)| {
                        let at = [sequence.batch, head, sequence.query_start + i];
                        *delta = self.delta(at, rows);
                    },
                );
            });
        });
    }

    /// δ of a row; 0 if it saw no key at all: it counts for nothing, whatever stands in its operands.
    fn delta(&self, at: [usize; 3], rows: &mut [Vec<f32>; 2]) -> f32 {
        let lse = self.lse[at];
        if lse == f32::NEG_INFINITY {
            return 0.0;
        }
        let sink = self.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[at[1]]);
        self.dot(at, lse == sink, rows) - self.dlse.map_or(0.0, |dlse| dlse[at])
    }

    /// dout·o of a row. Where only the sink counts, o = 0 is a constant, whatever dout holds.
    fn dot(&self, at: [usize; 3], only_sink: bool, [o, dout]: &mut [Vec<f32>; 2]) -> f32 {
        let Some(values) = &self.values else { return 0.0 };
        let [batch, head, row] = at;
        read_row(values.o.slice(s![batch, head, row, ..]), o);
        if only_sink && o.iter().all(|&o| o == 0.0) {
            return 0.0;
        }
        read_row(values.dout.slice(s![batch, head, row, ..]), dout);
        dot(o, dout)
    }
}
