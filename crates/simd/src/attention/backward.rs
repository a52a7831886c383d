//! The backward pass: who writes which tile, and in which order sums are taken.
//!
//! * [`Mode::Separate`]: one task per tile of queries writes dq, one per tile of keys writes dk and
//!   dv. P is computed twice: 7 products per tile.
//! * [`Mode::FusedPartials`]: one task per tile of keys writes dk and dv and adds its part of dq to
//!   sums in memory, so that P is computed once: 5 products per tile. The tiles of keys take turns at
//!   each sum, in ascending order (`turns.rs`).
//!
//! Every element has one order of summation, the same in both modes and for any number of threads:
//! results are bitwise reproducible.

use super::forward::zeros;
use super::gradient::Scratch;
use super::second::check_moving;
use super::sweeps::{Sweep, Tiles};
use super::{Cotangents, Gradients, GradientsMut, Inputs, Output};
use crate::aligned::Aligned;
use crate::heads::Cut;
use crate::mask::Sight;
use crate::pack::read_row;
use crate::packs::{Operand, Packing, Slot};
use crate::plan::{Buffer, Plan};
use crate::products::dot;
use crate::waves::Waves;
use crate::{Element, Mode, Options};
use etalon_problem::{Attention, BiasExtents, Error, Scores, Sequence};
use ndarray::{ArrayView1, ArrayView3, ArrayView4, s};
use rayon::prelude::*;
use std::sync::Mutex;

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
    let mut dq = zeros(scores.q_shape(), "dq")?;
    let mut dk = zeros(scores.k_shape(), "dk")?;
    let mut dv = zeros(problem.v_shape(), "dv")?;
    let heads = scores.extents.query_heads;
    let mut dsinks = scores.sinks.then(|| zeros(heads, "dsinks")).transpose()?;
    let mut dbias = scores.bias_shape().map(|shape| zeros(shape, "dbias")).transpose()?;
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

/// Which gradients of tensors are wanted.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    dq: bool,
    dk: bool,
    dv: bool,
    dbias: bool,
}

/// How a pass is cut, and what it works on together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Course {
    pub cut: Cut,
    /// Whether dq is summed as dk and dv are; otherwise it has a sweep of its own.
    pub fused: bool,
    /// Whether dbias has a sweep of its own; otherwise the sweep of the keys writes it, if anything.
    pub dbias: bool,
    pub waves: Waves,
}

/// Shares of dq for which a thread may be ahead of their turns: as many as make it wait seldom for
/// threads that others delay.
const AHEAD: usize = 4;

impl Course {
    /// Shares of dq that a thread has room for.
    pub fn shares(&self) -> usize {
        if self.fused && rayon::current_num_threads() > 1 { AHEAD } else { 1 }
    }
}

impl<T: Element> Backward<'_, T> {
    /// Writes the gradients that are asked for.
    pub fn run(&self, out: GradientsMut<'_, T>, options: &Options) -> Result<(), Error> {
        let sequences = self.scores.sequences();
        let cut = Cut::new(self.scores, options)?;
        let wanted = Wanted {
            dq: out.dq.is_some(),
            dk: out.dk.is_some(),
            dv: out.dv.is_some(),
            dbias: out.dbias.is_some(),
        };
        let packing = self.packing(&sequences, cut, wanted);
        let course = self.course(&packing, wanted, options);
        let sight = Sight::new(&self.scores.mask)?;
        let (mut slots, mut sums) = (Vec::new(), Vec::new());
        for _ in 0..course.waves.size {
            slots.push(packing.room()?);
            sums.push(Aligned::zeros(self.sum(&packing, course.fused), "the sums of dq")?);
        }
        // Trial allocation: on an error nothing has been written yet.
        let idle = Mutex::new(vec![self.scratch(&course)?]);
        let GradientsMut { dq, dk, dv, dsinks, mut dbias } = out;
        let with_keys = if course.dbias { None } else { dbias.take() };
        let mut tiles = Tiles::new(self.scores, &sequences, &course, [dq, dk, dv], with_keys);
        let mut sinks = vec![0.0; self.scores.extents.query_heads];
        for wave in course.waves.iter() {
            let slots = &mut slots[..wave.len()];
            packing.pack(slots, wave.start);
            self.deltas(&packing, slots, wave.start);
            let (pass, packing, sight, idle) = (self, &packing, &sight, &idle);
            let first = wave.start;
            let sweep = Sweep { pass, packing, sight, course, options, slots, first, idle };
            if dsinks.is_some() {
                sweep.dsinks(&mut sinks);
            }
            sweep.run(&mut tiles, &mut sums)?;
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
        let dims = (self.scores.extents.dim, self.value_dim());
        Scratch::new(&course.cut, dims, course.shares(), course.dbias)
    }

    /// E, or 0 without values.
    pub(super) fn value_dim(&self) -> usize {
        self.values.as_ref().map_or(0, |values| values.v.dim().3)
    }

    fn packing<'s>(
        &'s self,
        sequences: &'s [Sequence],
        cut: Cut,
        Wanted { dq, dk, dv, .. }: Wanted,
    ) -> Packing<'s, T> {
        let if_both = |both| if both { Operand::both } else { Operand::across };
        let k = if_both(dq)(Some(self.k));
        let v = Operand::across(self.values.as_ref().map(|values| values.v));
        let dout = if_both(dv)(self.values.as_ref().map(|values| values.dout));
        let keys = [k, v, Operand::NONE, Operand::NONE];
        let queries = [if_both(dk)(Some(self.q)), dout, Operand::NONE, Operand::NONE];
        let queries = Some((queries, self.lse.view()));
        Packing { scores: self.scores, sequences, cut, keys, queries }
    }

    fn course(&self, packing: &Packing<'_, T>, wanted: Wanted, options: &Options) -> Course {
        let Wanted { dq, dk, dv, dbias } = wanted;
        let dbias = dbias && !(self.unshared_bias() && (dk || dv));
        let dq = dq && (dk || dv); // alone it is one sweep anyway
        let (cut, slots) = (packing.cut, packing.slots());
        let bytes = |fused| self.sum(packing, fused).saturating_mul(size_of::<f32>());
        // Heads and sequences that share a bias are summed in one order: then all are packed at once.
        let least = if dbias { slots } else { 1 };
        let affordable = options.partials_budget / bytes(true).max(1);
        let fused = match options.mode {
            Mode::Separate | Mode::ForwardGradient => false,
            Mode::FusedPartials => dq,
            Mode::Auto => dq && affordable >= least,
        };
        let waves = if dbias {
            Waves::one(slots)
        } else {
            let tasks = packing.tiles().1;
            let bytes = packing.bytes().saturating_add(bytes(fused));
            let waves = Waves::new(slots, bytes, tasks, rayon::current_num_threads());
            if fused { waves.at_most(affordable) } else { waves }
        };
        Course { cut, fused, dbias, waves }
    }

    /// Whether dbias is dS itself, as the sweeps have it: no heads or sequences share the bias, and no
    /// softcap makes ds something else.
    fn unshared_bias(&self) -> bool {
        let e = &self.scores.extents;
        let own = |bias: BiasExtents| bias.batch == e.batch && bias.heads == e.query_heads;
        self.scores.softcap.is_none() && self.scores.bias.is_some_and(own)
    }

    /// What [`Backward::run`] will do, dq being wanted or not, and dbias if there is a bias.
    pub fn plan(&self, dq: bool, options: &Options) -> Result<Plan, Error> {
        let sequences = self.scores.sequences();
        let cut = Cut::new(self.scores, options)?;
        let (dv, dbias) = (self.values.is_some(), self.bias.is_some());
        let wanted = Wanted { dq, dk: true, dv, dbias };
        let packing = self.packing(&sequences, cut, wanted);
        let course = self.course(&packing, wanted, options);
        let together = course.waves.size;
        let scratch = self.scratch(&course)?.bytes();
        let mut buffers = packing.buffers(together, scratch);
        if course.fused {
            let each = self.sum(&packing, true).saturating_mul(size_of::<f32>());
            buffers.push(Buffer::parts("sums of dq", together, each));
        }
        // S and, with values, dP; dk and, with values, dv.
        let each = if self.values.is_some() { 2 } else { 1 };
        let dq = match (dq, course.fused) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => each + 1,
        };
        let dbias = if course.dbias { each } else { 0 };
        let mode = if course.fused { Mode::FusedPartials } else { Mode::Separate };
        let products = 2 * each + dq + dbias;
        Ok(Plan {
            blocking: cut.blocking(),
            mode: Some(mode),
            products,
            interval: None,
            together,
            buffers,
        })
    }

    /// Elements of the sums of dq of a slot, in whole tiles of queries; none unless `fused`.
    fn sum(&self, packing: &Packing<'_, T>, fused: bool) -> usize {
        if !fused {
            return 0;
        }
        let stride = self.scores.extents.dim.next_multiple_of(packing.cut.cols);
        let rows = packing.longest().0.next_multiple_of(packing.cut.queries);
        rows.saturating_mul(self.scores.group()).saturating_mul(stride)
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
