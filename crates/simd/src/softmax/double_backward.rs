//! The double backward pass and the tangents: who writes which tile.
//!
//! A tangent is one sweep over the scores, a double backward pass three (the numbers of products are
//! those of one pair of tiles, every cotangent but `cot_o` and `cot_lse` given):
//!
//! * rows: u and gdout (D4), (D5), which are the tangents of lse and o (J1), (J2): 5 products;
//! * rows again, from memory still warm: gq (D10): 7 products;
//! * columns: gk and gv (D11), (D12): 8 products.
//!
//! Between them pass four numbers per row, lse, δ, u and z, so that memory is O(N). Where o is
//! stored in less than f32, its rounding would be multiplied by u and dout: it is computed anew, for
//! one product more.
//!
//! Every element has one writer and one order of summation: results are bitwise reproducible.

use super::block::Pair;
use super::cut::Cut;
use super::inputs::Inputs;
use super::kernels::{KeyTile, QueryTile};
use super::packs::{Known, Operand, Packing};
use super::schedule::{SECOND_ORDER, Schedule};
use super::scratch::Scratch;
use super::second::{Second, Tangent};
use super::stats::{RowStats, Stats};
use super::tasks::Task;
use super::wave::{Memory, Places, Wave, Work, each};
use crate::element::{Tensor, TensorMut, View};
use crate::plan::Plan;
use crate::products::dot;
use crate::tiles::{Place, query_rows, tiles};
use crate::{Options, Workspace};
use etalon_problem::{Dtype, Error, Sequence};
use ndarray::{ArrayView3, ArrayViewMut1, ArrayViewMut3, Ix1, Ix3, Ix4, s};

/// A double backward pass or tangents; the operands have been checked.
pub struct DoubleBackward<'a> {
    pub inputs: Inputs<'a>,
    /// The direction in which the inputs move, or the cotangents of their gradients.
    pub direction: Direction<'a>,
    /// o of the forward pass, where there are values.
    pub o: Option<Tensor<'a, Ix4>>,
    /// lse of the forward pass.
    pub lse: View<'a, f32, Ix3>,
    pub dout: Option<Tensor<'a, Ix4>>,
    pub dlse: Option<View<'a, f32, Ix3>>,
    pub cot_o: Option<Tensor<'a, Ix4>>,
    pub cot_lse: Option<View<'a, f32, Ix3>>,
}

/// A direction of the inputs, each in its shape; an absent one is zero.
#[derive(Clone, Copy)]
pub struct Direction<'a> {
    pub q: Option<Tensor<'a, Ix4>>,
    pub k: Option<Tensor<'a, Ix4>>,
    pub v: Option<Tensor<'a, Ix4>>,
    pub sinks: Option<View<'a, f32, Ix1>>,
    pub bias: Option<Tensor<'a, Ix4>>,
}

/// The gradients that are asked for, by the operands of the backward pass. With a direction of
/// tangents, `gdout` and `gdlse` are the tangents of o and lse.
#[derive(Default)]
pub struct SecondGradients<'o> {
    pub gq: Option<TensorMut<'o, Ix4>>,
    pub gk: Option<TensorMut<'o, Ix4>>,
    pub gv: Option<TensorMut<'o, Ix4>>,
    pub gdout: Option<TensorMut<'o, Ix4>>,
    pub gdlse: Option<ArrayViewMut3<'o, f32>>,
    pub gsinks: Option<ArrayViewMut1<'o, f32>>,
    pub gbias: Option<TensorMut<'o, Ix4>>,
}

impl<'a> DoubleBackward<'a> {
    /// The pass that gives the tangents of o and lse.
    pub fn tangents(
        inputs: Inputs<'a>,
        direction: Direction<'a>,
        o: Option<Tensor<'a, Ix4>>,
        lse: View<'a, f32, Ix3>,
    ) -> Self {
        let (dout, dlse, cot_o, cot_lse) = (None, None, None, None);
        DoubleBackward { inputs, direction, o, lse, dout, dlse, cot_o, cot_lse }
    }

    /// Writes what is asked for.
    pub fn run(
        &self,
        workspace: &Workspace,
        out: SecondGradients<'_>,
        options: &Options,
    ) -> Result<(), Error> {
        let SecondGradients { gq, gk, gv, gdout, gdlse, gsinks, gbias } = out;
        let tangent = [&gq, &gk, &gv, &gbias].into_iter().all(Option::is_none);
        let (inputs, level) = (self.inputs, options.level);
        let known = Known::of(workspace, inputs.scores)?;
        let packing = self.packing(&known.list, tangent, options)?;
        let schedule = self.schedule(&packing, gbias.is_some());
        let (queries, keys, with_keys) = ([gq, gdout], [gk, gv], None);
        let places =
            Places { queries, numbers: gdlse, keys, with_keys, sinks: gsinks, bias: gbias };
        Work { inputs, packing, schedule, level, ddbias: self.direction.bias }.run(
            workspace,
            places,
            |wave, Memory { stats, scratch, .. }, queries, keys| {
                self.row_sweep(wave, scratch, queries, stats);
                key_sweep(wave, scratch, keys, stats);
            },
            |stats, head, i| {
                let change = f64::from(self.sink(head).1) - f64::from(stats.u[i]);
                change * f64::from(stats.delta[i]) + f64::from(stats.z[i]) // (D14)
            },
            Second { capped: false },
        )
    }

    /// Whether o is computed anew: its rounding would be multiplied by u and dout.
    fn o_anew(&self) -> bool {
        self.o.is_some_and(|o| o.dtype() != Dtype::F32)
    }

    /// `tangent`: the first sweep alone, which sums q, k and their directions only across, and v along.
    fn packing<'s>(
        &'s self,
        sequences: &'s [Sequence],
        tangent: bool,
        options: &Options,
    ) -> Result<Packing<'s>, Error> {
        let (Inputs { scores, q, k, v, .. }, of) = (self.inputs, &self.direction);
        let keys = [Some(k), v, of.k, of.v];
        let queries = [Some(q), self.dout, of.q, self.cot_o];
        let (keys, queries) = if tangent {
            let [k, v, ddk, ddv] = keys;
            let keys =
                [Operand::across(k), Operand::along(v), Operand::across(ddk), Operand::along(ddv)];
            let [q, _, ddq, _] = queries.map(Operand::across);
            (keys, [q, Operand::NONE, ddq, Operand::NONE])
        } else {
            (keys.map(Operand::both), queries.map(Operand::both))
        };
        let cut = Cut::new(scores, options, SECOND_ORDER)?;
        Ok(Packing { scores, sequences, cut, keys, queries: Some((queries, self.lse)) })
    }

    fn schedule(&self, packing: &Packing<'_>, bias: bool) -> Schedule {
        let waves = Schedule::waves(packing, (true, bias), 0, usize::MAX);
        let (cut, o_anew) = (packing.cut, self.o_anew());
        Schedule { cut, second: true, o_anew, fused: false, bias, waves }
    }

    /// How [`DoubleBackward::run`] will work, all results being wanted, or those of a tangent alone.
    pub fn plan(&self, tangent: bool, options: &Options) -> Result<Plan, Error> {
        let sequences = self.inputs.scores.sequences();
        let packing = self.packing(&sequences, tangent, options)?;
        let schedule = self.schedule(&packing, self.inputs.bias.is_some() && !tangent);
        let plan = schedule.needs(&packing, &self.inputs).plan(&packing);
        Ok(Plan { products: self.products(tangent, schedule.bias), ..plan })
    }

    /// The products of a pair of tiles, over all sweeps.
    fn products(&self, tangent: bool, gbias: bool) -> usize {
        let one = |operand: Option<Tensor<'_, Ix4>>| usize::from(operand.is_some());
        let (ddq, ddk, ddv) = (one(self.direction.q), one(self.direction.k), one(self.direction.v));
        let (v, dout, cot_o) = (one(self.inputs.v), one(self.dout), one(self.cot_o));
        // S and U; then u and gdout, o perhaps anew; then dP and T, which the other sweeps need.
        let scores = 1 + ddq + ddk;
        let first = scores + v + ddv + if self.o_anew() { v } else { 0 };
        let weights = scores + dout * (v + ddv) + cot_o * v;
        let rows = weights + 1 + ddk;
        let columns = weights + 1 + ddq + dout + cot_o;
        match tangent {
            true => first,
            false => first + rows + columns + if gbias { weights } else { 0 },
        }
    }

    /// u, gdout and gq, one task per tile of queries; δ, u and z stay in `stats`.
    fn row_sweep(
        &self,
        wave: Wave<'_>,
        scratch: &mut [Scratch<'_>],
        tasks: &mut [Task<'_>],
        stats: &mut RowStats<'_>,
    ) {
        let (cut, level) = (wave.work.schedule.cut, wave.work.level);
        each(scratch, stats.with_tasks(tasks, wave.first), |(task, part), scratch| {
            let rows = task.place.rows.clone();
            let pair = wave.pair(task.slot, task.member, Stats::NONE);
            level.run(QueryTile { body: Tangent, pair, rows: rows.clone(), scratch });
            part.fill(0.0);
            for r in 0..rows.len() {
                let numbers = self.row_stats(wave, &task.place, r, scratch);
                part[r..].iter_mut().step_by(cut.queries).zip(numbers).for_each(|(to, x)| *to = x);
            }
            let stats = Stats::of(part, rows.start, cut.queries);
            task.write_numbers(stats.u); // (D13)
            task.write(1, scratch.sums.values, cut.stride(pair.value_dim), 1.0);
            if task.results[0].is_some() {
                let (body, pair) = (Second { capped: true }, Pair { stats, ..pair });
                level.run(QueryTile { body, pair, rows, scratch });
                task.write(0, scratch.sums.wide, cut.stride(pair.dim), pair.rule.scale);
            }
        });
    }

    /// δ, u and z of row `r` of a tile, from the sums in the scratch; gdout stays there. A row that sees
    /// no key keeps zeros.
    fn row_stats(
        &self,
        wave: Wave<'_>,
        place: &Place,
        r: usize,
        scratch: &mut Scratch<'_>,
    ) -> [f32; 3] {
        let sequence = &wave.work.packing.sequences[place.number];
        let at = [sequence.batch, place.head, query_rows(sequence).start + place.rows.start + r];
        let lse = self.lse[at];
        if lse == f32::NEG_INFINITY {
            return [0.0; 3]; // the row sees nothing, whatever its cotangents
        }
        let (sink, ddsink) = self.sink(place.head);
        let pi = (f64::from(sink) - f64::from(lse)).exp() as f32;
        let u = scratch.sums.u[r] + if pi == 0.0 { 0.0 } else { pi * ddsink }; // (D4)
        let number = |x: Option<ArrayView3<'_, f32>>| x.map_or(0.0, |x| x[at]);
        let (mut delta, mut z) = (-number(self.dlse), -number(self.cot_lse));
        if let Some(o) = self.o {
            let value_dim = self.inputs.value_dim();
            let stride = wave.work.schedule.cut.stride(value_dim);
            let here = r * stride..r * stride + value_dim;
            let read = |operand: Tensor<'_, Ix4>, row: &mut [f32]| {
                let [batch, head, i] = at;
                operand.slice(s![batch, head, i, ..]).read(row);
            };
            let [stored, row] = &mut scratch.rows;
            if !self.o_anew() {
                read(o, stored);
            }
            let o = if self.o_anew() { &scratch.sums.o[here.clone()] } else { stored };
            let gdout = &mut scratch.sums.values[here];
            gdout.iter_mut().zip(o).for_each(|(gdout, o)| *gdout -= u * o); // (D5)
            // Where only the sink counts, both are constants, whatever dout and cot_o hold.
            let constant = lse == sink && o.iter().chain(&*gdout).all(|&x| x == 0.0);
            if !constant {
                if let Some(dout) = self.dout {
                    read(dout, row);
                    delta += dot(row, o); // (B1)
                    z += dot(row, gdout); // (D6)
                }
                if let Some(cot_o) = self.cot_o {
                    read(cot_o, row);
                    z += dot(row, o);
                }
            }
        }
        [delta, u, z]
    }

    /// The sink of a head, and its direction.
    fn sink(&self, head: usize) -> (f32, f32) {
        let sink = self.inputs.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
        (sink, self.direction.sinks.map_or(0.0, |ddsinks| ddsinks[head]))
    }
}

/// gk and gv, one task per tile of keys.
fn key_sweep(
    wave: Wave<'_>,
    scratch: &mut [Scratch<'_>],
    tasks: &mut [Task<'_>],
    stats: &RowStats<'_>,
) {
    let Work { inputs, level, .. } = *wave.work;
    let body = Second { capped: true };
    wave.key_sweep(scratch, tasks, |task, scratch| {
        for member in 0..inputs.scores.group() {
            let pair = wave.pair(task.slot, member, Stats::NONE);
            for rows in tiles(0..pair.rule.sequence.queries, scratch.cut.queries) {
                let stats = stats.tile(wave.head(task.slot, member), rows.start);
                let (pair, cols) = (Pair { stats, ..pair }, task.place.rows.clone());
                level.run(KeyTile { body, pair, rows, cols, share: 0, scratch });
            }
        }
    });
}
