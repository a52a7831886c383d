//! The operands of a pass, packed slot by slot in memory that is used again.
//!
//! A *slot* is a sequence and a key head, with the query heads that share it. Slots are numbered
//! s·Hk + h: sequence s, key head h.

use super::cut::Cut;
use crate::element::{Tensor, View};
use crate::pack::{Form, JOB, NonFinite, Packed, Source};
use crate::tiles::{key_rows, query_rows};
use crate::workspace::{Lists, Parts};
use bumpalo::boxed::Box;
use etalon_problem::{Error, Scores, Sequence};
use ndarray::{Ix3, Ix4, s};
use rayon::prelude::*;
use std::ops::Range;

/// A matrix, packed for either side of a product. Empty where a pass has no such operand, or does
/// not multiply it so.
#[derive(Debug, Default)]
pub struct Both<'m> {
    /// The packing for products that sum along its rows.
    pub across: Packed<'m>,
    /// The packing for products that sum its rows, each times a weight.
    pub along: Packed<'m>,
}

/// The queries of one sequence and head. A row that sees no key reads as zeros, with lse = +∞: its
/// weights are then 0.
#[derive(Debug)]
pub struct Queries<'m> {
    pub q: Both<'m>,
    pub dout: Both<'m>,
    pub ddq: Both<'m>,
    pub cot_o: Both<'m>,
    /// Queries that are not finite in any of these.
    pub non_finite: NonFinite<'m>,
    /// lse, padded to register blocks with +∞.
    pub lse: &'m mut [f32],
}

/// The keys and values of one sequence and key head.
#[derive(Debug)]
pub struct Keys<'m> {
    pub k: Both<'m>,
    pub v: Both<'m>,
    pub ddk: Both<'m>,
    pub ddv: Both<'m>,
    /// Keys that are not finite in any of these.
    pub non_finite: NonFinite<'m>,
}

/// Layout of packed operands.
#[derive(Clone, Copy)]
pub enum Layout {
    /// Panels of f32: so many rows of one across, and columns of one along.
    Panels([usize; 2]),
    /// Tiles of bf16: the form across, and that along.
    Tiles([Form; 2]),
}

impl Layout {
    /// Elements across, and along, of `len` rows of as many elements as `dims` says.
    fn lens(self, len: usize, dims: [usize; 2]) -> [usize; 2] {
        match self {
            Layout::Panels([rows, cols]) => [
                len.next_multiple_of(rows).saturating_mul(dims[0]),
                len.saturating_mul(dims[1].next_multiple_of(cols)),
            ],
            Layout::Tiles(_) => dims.map(|dim| Form::len(len, dim)),
        }
    }

    /// Packs across, and says whether an element is not finite.
    pub fn across(self, source: &Source<'_>, packed: &mut Packed<'_>) -> bool {
        match self {
            Layout::Panels([rows, _]) => source.across_into(rows, packed),
            Layout::Tiles([form, _]) => source.tiles_into(form, packed),
        }
    }

    /// Packs along, likewise.
    fn along(self, source: &Source<'_>, packed: &mut Packed<'_>) -> bool {
        match self {
            Layout::Panels([_, cols]) => source.along_into(cols, packed),
            Layout::Tiles([_, form]) => source.tiles_into(form, packed),
        }
    }
}

/// The packed operands of some slots, one after the other.
#[derive(Debug)]
pub struct Slots<'m> {
    pub keys: Box<'m, [Keys<'m>]>,
    /// Of each slot one for each query head that shares the key head, if the pass packs queries.
    pub queries: Box<'m, [Queries<'m>]>,
}

/// An operand of a pass, and which packings of it the pass reads.
#[derive(Clone, Copy)]
pub struct Operand<'a> {
    tensor: Option<Tensor<'a, Ix4>>,
    across: bool,
    along: bool,
}

impl<'a> Operand<'a> {
    /// An operand that the pass does not have.
    pub const NONE: Self = Operand { tensor: None, across: false, along: false };

    /// Packed for both sides.
    pub fn both(tensor: Option<Tensor<'a, Ix4>>) -> Self {
        Operand { tensor, across: true, along: true }
    }

    /// Packed across alone.
    pub fn across(tensor: Option<Tensor<'a, Ix4>>) -> Self {
        Operand { along: false, ..Operand::both(tensor) }
    }

    /// Packed along alone.
    pub fn along(tensor: Option<Tensor<'a, Ix4>>) -> Self {
        Operand { across: false, ..Operand::both(tensor) }
    }

    /// Memory for `len` rows.
    fn room<'m>(&self, parts: &mut Parts<'m>, len: usize, layout: Layout) -> Both<'m> {
        let width = self.tensor.map_or(0, |tensor| tensor.shape()[3]);
        let dims = [self.across, self.along].map(|packed| if packed { width } else { 0 });
        let [across, along] = layout.lens(len, dims);
        Both { across: Packed::new(parts, across), along: Packed::new(parts, along) }
    }

    /// Packs rows of one batch element and head, those whose lse is −∞ in `masked` as zeros, and notes
    /// which are not finite.
    fn pack(
        &self,
        both: &mut Both<'_>,
        non_finite: &mut NonFinite<'_>,
        layout: Layout,
        (batch, head, range): (usize, usize, Range<usize>),
        masked: Option<View<'_, f32, Ix3>>,
    ) {
        let Some(tensor) = self.tensor else { return };
        let masked = masked.map(|lse| lse.slice_move(s![batch, head, range.clone()]));
        let source = Source { rows: tensor.rows(batch, head, range), masked, job: JOB };
        let across = self.across && layout.across(&source, &mut both.across);
        let along = self.along && layout.along(&source, &mut both.along);
        if across || along {
            non_finite.note(&source);
        }
    }
}

/// Everything that a pass packs.
pub struct Packing<'a> {
    pub scores: &'a Scores,
    pub sequences: &'a [Sequence],
    pub cut: Cut,
    /// k, v, and their directions.
    pub keys: [Operand<'a>; 4],
    /// q, dout, the direction of q, and cot_o.
    pub queries: [Operand<'a>; 4],
    /// lse of the queries, if the pass packs all those of a slot.
    pub lse: Option<View<'a, f32, Ix3>>,
}

impl<'a> Packing<'a> {
    /// All sequences as if they were one, where they all begin at row 0.
    pub fn whole(&self) -> [Sequence; 1] {
        let (queries, keys) = self.longest();
        [Sequence { batch: 0, query_start: 0, queries, key_start: 0, keys }]
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.sequences.len() * self.scores.extents.key_heads
    }

    /// The most queries and keys of a sequence.
    pub fn longest(&self) -> (usize, usize) {
        let longest = |of: fn(&Sequence) -> usize| self.sequences.iter().map(of).max().unwrap_or(0);
        (longest(|sequence| sequence.queries), longest(|sequence| sequence.keys))
    }

    /// Tiles of queries of the longest sequence.
    pub fn longest_tiles(&self) -> usize {
        self.longest().0.div_ceil(self.cut.queries)
    }

    /// Tiles of queries, and of keys, over all heads and sequences.
    pub fn tiles(&self) -> (usize, usize) {
        let e = &self.scores.extents;
        let sum = |of: &dyn Fn(&Sequence) -> usize| self.sequences.iter().map(of).sum::<usize>();
        let queries = sum(&|sequence| sequence.queries.div_ceil(self.cut.queries));
        let keys = sum(&|sequence| sequence.keys.div_ceil(self.cut.keys));
        (e.query_heads.saturating_mul(queries), e.key_heads.saturating_mul(keys))
    }

    /// Sums of dq of `slots` slots: one for each tile of queries that a head may have.
    pub fn sums(&self, slots: usize) -> usize {
        slots.saturating_mul(self.scores.group()).saturating_mul(self.longest_tiles())
    }

    /// Threads that have a task.
    pub fn workers(&self) -> usize {
        let (queries, keys) = self.tiles();
        rayon::current_num_threads().min(queries.max(keys)).max(1)
    }

    /// The layouts of the keys, and of the queries.
    pub fn layouts(&self) -> [Layout; 2] {
        let Cut { rows, cols, bf16, .. } = self.cut;
        match bf16 {
            true => [[Form::Across, Form::Along], [Form::Rows, Form::Columns]].map(Layout::Tiles),
            false => [cols, rows].map(|rows| Layout::Panels([rows, cols])),
        }
    }

    /// Query heads that are packed of a slot.
    fn group(&self) -> usize {
        self.lse.map_or(0, |_| self.scores.group())
    }

    /// Elements of one slot, packed.
    pub fn slot(&self) -> usize {
        let head = Parts::count(|parts| self.room_of_queries(parts));
        let keys = Parts::count(|parts| self.room_of_keys(parts));
        keys.saturating_add(head.saturating_mul(self.group()))
    }

    /// Bytes of the list of a slot.
    pub fn list(&self) -> usize {
        size_of::<Keys<'_>>() + self.group() * size_of::<Queries<'_>>()
    }

    /// Memory for any `count` slots.
    pub fn room<'m>(
        &self,
        parts: &mut Parts<'m>,
        lists: &'m Lists,
        count: usize,
    ) -> Result<Slots<'m>, Error> {
        let (what, heads) = ("the slots of a wave", count * self.group());
        Ok(Slots {
            keys: lists.collect(count, (0..count).map(|_| self.room_of_keys(parts)), what)?,
            queries: lists.collect(heads, (0..heads).map(|_| self.room_of_queries(parts)), what)?,
        })
    }

    fn room_of_keys<'m>(&self, parts: &mut Parts<'m>) -> Keys<'m> {
        let (len, [layout, _]) = (self.longest().1, self.layouts());
        let [k, v, ddk, ddv] = self.keys.map(|operand| operand.room(parts, len, layout));
        Keys { k, v, ddk, ddv, non_finite: NonFinite::new(parts, len) }
    }

    fn room_of_queries<'m>(&self, parts: &mut Parts<'m>) -> Queries<'m> {
        let (len, [_, layout]) = (self.longest().0, self.layouts());
        let [q, dout, ddq, cot_o] = self.queries.map(|operand| operand.room(parts, len, layout));
        let lse = parts.room(len.next_multiple_of(self.cut.rows));
        Queries { q, dout, ddq, cot_o, non_finite: NonFinite::new(parts, len), lse }
    }

    /// Packs a wave of slots.
    pub fn pack(&self, Slots { keys, queries }: &mut Slots<'_>, wave: &Range<usize>) {
        let (key_heads, group) = (self.scores.extents.key_heads, self.scores.group());
        let place = |slot: usize| (&self.sequences[slot / key_heads], slot % key_heads);
        let pack_keys = |(keys, slot): (&mut Keys<'_>, usize)| {
            let (sequence, head) = place(slot);
            let Keys { k, v, ddk, ddv, non_finite } = keys;
            non_finite.clear();
            for (operand, both) in self.keys.iter().zip([k, v, ddk, ddv]) {
                let rows = (sequence.batch, head, key_rows(sequence));
                operand.pack(both, non_finite, self.layouts()[0], rows, None);
            }
        };
        let pack_queries = |(queries, head): (&mut Queries<'_>, usize)| {
            let (sequence, key_head) = place(head / group);
            self.pack_queries(queries, sequence, key_head * group + head % group);
        };
        let heads = wave.start * group..wave.end * group;
        rayon::join(
            || keys.par_iter_mut().zip(wave.clone()).for_each(pack_keys),
            || queries.par_iter_mut().zip(heads).for_each(pack_queries),
        );
    }

    fn pack_queries(&self, queries: &mut Queries<'_>, sequence: &Sequence, head: usize) {
        let Some(all) = self.lse else { return };
        let rows = query_rows(sequence);
        let Queries { q, dout, ddq, cot_o, non_finite, lse } = queries;
        lse[sequence.queries..].fill(f32::INFINITY);
        non_finite.clear();
        let mut masked = None;
        for (i, (to, row)) in lse.iter_mut().zip(rows.clone()).enumerate() {
            *to = all[[sequence.batch, head, row]];
            if *to == f32::NEG_INFINITY {
                *to = f32::INFINITY;
                masked = Some(all);
            } else if to.is_nan() {
                // Of a sink of +∞, or a bias: e^(−∞ − lse) is NaN where a bias hides a pair.
                non_finite.note_row(i);
            }
        }
        for (operand, both) in self.queries.iter().zip([q, dout, ddq, cot_o]) {
            let rows = (sequence.batch, head, rows.clone());
            operand.pack(both, non_finite, self.layouts()[1], rows, masked);
        }
    }
}
