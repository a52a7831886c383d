//! The operands of a pass, packed slot by slot in memory that is used again.
//!
//! A *slot* is a sequence and a key head, with the query heads that share it. Slots are numbered
//! s·Hk + h: sequence s, key head h.

use crate::Element;
use crate::heads::{Cut, key_rows, query_rows, rows_of};
use crate::mask::Sight;
use crate::pack::{JOB, NonFinite, Packed, Source};
use crate::parallel::reserve;
use crate::plan::Buffer;
use etalon_problem::{Error, Scores, Sequence};
use ndarray::{ArrayView3, ArrayView4};
use rayon::prelude::*;
use std::ops::Range;

/// A matrix, packed for either side of a product. Empty where a pass has no such operand, or does
/// not multiply it so.
#[derive(Debug, Default)]
pub struct Both {
    /// Where its rows are summed against.
    pub across: Packed,
    /// Where its rows are what is summed.
    pub along: Packed,
}

/// The queries of one sequence and head. A row that saw no key reads as zeros, with lse = +∞: its
/// weights are then 0.
#[derive(Debug, Default)]
pub struct Queries {
    pub q: Both,
    pub dout: Both,
    pub ddq: Both,
    pub cot_o: Both,
    /// Queries that are not finite in any of these.
    pub non_finite: NonFinite,
    /// lse, padded to register blocks with +∞.
    pub lse: Vec<f32>,
    /// δ, padded to register blocks with 0; of the first order alone.
    pub delta: Vec<f32>,
}

/// The keys and values of one sequence and key head.
#[derive(Debug, Default)]
pub struct Keys {
    pub k: Both,
    pub v: Both,
    pub ddk: Both,
    pub ddv: Both,
    /// Keys that are not finite in any of these.
    pub non_finite: NonFinite,
}

/// What is packed of a slot.
#[derive(Debug, Default)]
pub struct Slot {
    pub keys: Keys,
    /// One for each query head that shares the key head.
    pub queries: Vec<Queries>,
}

/// An operand of a pass, and which packings of it the pass reads.
#[derive(Clone, Copy)]
pub struct Operand<'a, T> {
    operand: Option<&'a ArrayView4<'a, T>>,
    across: bool,
    along: bool,
}

impl<'a, T> Operand<'a, T> {
    /// An operand that the pass does not have.
    pub const NONE: Self = Operand { operand: None, across: false, along: false };

    /// Packed for both sides.
    pub fn both(operand: impl Into<Option<&'a ArrayView4<'a, T>>>) -> Self {
        Operand { operand: operand.into(), across: true, along: true }
    }

    /// Packed across alone.
    pub fn across(operand: impl Into<Option<&'a ArrayView4<'a, T>>>) -> Self {
        Operand { along: false, ..Operand::both(operand) }
    }

    /// Packed along alone.
    pub fn along(operand: impl Into<Option<&'a ArrayView4<'a, T>>>) -> Self {
        Operand { across: false, ..Operand::both(operand) }
    }
}

/// The queries or the keys of a pass.
struct Side<'a, T> {
    operands: [Operand<'a, T>; 4],
    /// Rows of a panel across, and columns of one along.
    widths: [usize; 2],
}

impl<T: Element> Side<'_, T> {
    /// Elements of each operand across and along, packed, for `len` rows.
    fn elements(&self, len: usize) -> [[usize; 2]; 4] {
        let [rows, cols] = self.widths;
        self.operands.map(|Operand { operand, across, along }| {
            let dim = operand.map_or(0, |operand| operand.dim().3);
            let across = len.next_multiple_of(rows).saturating_mul(if across { dim } else { 0 });
            let along = if along { dim.next_multiple_of(cols) } else { 0 };
            [across, len.saturating_mul(along)]
        })
    }

    /// Memory for `len` rows.
    fn room(&self, len: usize) -> Result<[Both; 4], Error> {
        let mut room: [Both; 4] = Default::default();
        for (both, [across, along]) in room.iter_mut().zip(self.elements(len)) {
            *both = Both { across: Packed::room(across)?, along: Packed::room(along)? };
        }
        Ok(room)
    }

    /// Packs rows of one batch element and head; those that are `dead` as zeros.
    fn pack(
        &self,
        packs: [&mut Both; 4],
        (batch, head, rows): (usize, usize, Range<usize>),
        dead: Option<&[bool]>,
    ) -> NonFinite {
        let mut non_finite = None;
        for (both, Operand { operand, across, along }) in packs.into_iter().zip(&self.operands) {
            let Some(operand) = operand else { continue };
            let rows = rows_of(operand, batch, head, rows.clone());
            let source = Source { rows, dead, job: JOB };
            if *across {
                source.across_into(self.widths[0], &mut both.across);
            }
            if *along {
                source.along_into(self.widths[1], &mut both.along);
            }
            non_finite = either(non_finite, source.non_finite());
        }
        non_finite
    }
}

/// Bytes of the lists that are kept for every tile: where its results go, and whose turn it is.
const TILE: usize = 768;

/// Everything that a pass packs.
pub struct Packing<'a, T> {
    pub scores: &'a Scores,
    pub sequences: &'a [Sequence],
    pub cut: Cut,
    /// k, v, and how they move.
    pub keys: [Operand<'a, T>; 4],
    /// q, dout, how q moves, and cot_o; where the pass packs all queries of a slot, with their lse.
    pub queries: Option<([Operand<'a, T>; 4], ArrayView3<'a, f32>)>,
}

impl<'a, T: Element> Packing<'a, T> {
    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.sequences.len() * self.scores.extents.key_heads
    }

    /// The most queries and keys of a sequence.
    pub fn longest(&self) -> (usize, usize) {
        let longest = |of: fn(&Sequence) -> usize| self.sequences.iter().map(of).max().unwrap_or(0);
        (longest(|sequence| sequence.queries), longest(|sequence| sequence.keys))
    }

    fn key_side(&self) -> Side<'a, T> {
        Side { operands: self.keys, widths: [self.cut.cols, self.cut.cols] }
    }

    fn query_side(&self, operands: [Operand<'a, T>; 4]) -> Side<'a, T> {
        Side { operands, widths: [self.cut.rows, self.cut.cols] }
    }

    /// Tiles of queries, and of keys, over all heads and sequences.
    pub fn tiles(&self) -> (usize, usize) {
        let e = &self.scores.extents;
        let sum = |of: &dyn Fn(&Sequence) -> usize| self.sequences.iter().map(of).sum::<usize>();
        let queries = sum(&|sequence| sequence.queries.div_ceil(self.cut.queries));
        let keys = sum(&|sequence| sequence.keys.div_ceil(self.cut.keys));
        (e.query_heads.saturating_mul(queries), e.key_heads.saturating_mul(keys))
    }

    /// The buffers that every pass has, with `together` slots and so many bytes of scratch a thread.
    pub fn buffers(&self, together: usize, scratch: usize) -> Vec<Buffer> {
        let threads = rayon::current_num_threads();
        let (queries, keys) = self.tiles();
        let mut buffers = vec![
            Buffer::parts("packed operands", together, self.bytes()),
            Buffer::parts("scratch of the threads", threads, scratch),
            Buffer::parts("rows on the way", threads, self.row_bytes()),
            Buffer::parts("lists of tiles", queries.saturating_add(keys), TILE),
        ];
        let notes = Sight::bytes(&self.scores.mask);
        if notes > 0 {
            buffers.push(Buffer::parts("notes on the mask", 1, notes));
        }
        buffers
    }

    /// Bytes of the rows that one thread packs at a time: a panel across, and the row that it reads.
    fn row_bytes(&self) -> usize {
        let queries = self.queries.map_or([Operand::NONE; 4], |(operands, _)| operands);
        let dims = self.keys.iter().chain(&queries).filter_map(|operand| operand.operand);
        let widest = dims.map(|operand| operand.dim().3).max().unwrap_or(0);
        widest.saturating_mul((self.cut.cols.max(self.cut.rows) + 2) * size_of::<f32>())
    }

    /// Bytes of one slot, packed.
    pub fn bytes(&self) -> usize {
        let (queries, keys) = self.longest();
        let sum = |elements: [[usize; 2]; 4]| {
            elements.iter().flatten().fold(0usize, |sum, &part| sum.saturating_add(part))
        };
        let mut elements = sum(self.key_side().elements(keys));
        if let Some((operands, _)) = self.queries {
            let side = self.query_side(operands);
            let head = sum(side.elements(queries)).saturating_add(2 * self.padded(queries));
            elements = elements.saturating_add(head.saturating_mul(self.scores.group()));
        }
        elements.saturating_mul(size_of::<f32>())
    }

    /// Queries, filled up to register blocks.
    pub fn padded(&self, queries: usize) -> usize {
        queries.next_multiple_of(self.cut.rows)
    }

    /// Memory for any slot.
    pub fn room(&self) -> Result<Slot, Error> {
        let (queries, keys) = self.longest();
        let [k, v, ddk, ddv] = self.key_side().room(keys)?;
        let mut slot =
            Slot { keys: Keys { k, v, ddk, ddv, non_finite: None }, queries: Vec::new() };
        if let Some((operands, _)) = self.queries {
            let side = self.query_side(operands);
            for _ in 0..self.scores.group() {
                let [q, dout, ddq, cot_o] = side.room(queries)?;
                let [lse, delta] =
                    [(); 2].map(|()| reserve(self.padded(queries), "numbers of rows"));
                let (lse, delta, non_finite) = (lse?, delta?, None);
                slot.queries.push(Queries { q, dout, ddq, cot_o, non_finite, lse, delta });
            }
        }
        Ok(slot)
    }

    /// Packs the slots from number `first` on.
    pub fn pack(&self, slots: &mut [Slot], first: usize) {
        let key_heads = self.scores.extents.key_heads;
        slots.par_iter_mut().enumerate().for_each(|(number, slot)| {
            let number = first + number;
            let (sequence, head) = (&self.sequences[number / key_heads], number % key_heads);
            let Keys { k, v, ddk, ddv, non_finite } = &mut slot.keys;
            let rows = (sequence.batch, head, key_rows(sequence));
            *non_finite = self.key_side().pack([k, v, ddk, ddv], rows, None);
            let first = head * self.scores.group();
            slot.queries.par_iter_mut().enumerate().for_each(|(head, queries)| {
                self.pack_queries(queries, sequence, first + head);
            });
        });
    }

    fn pack_queries(&self, queries: &mut Queries, sequence: &Sequence, head: usize) {
        let Some((operands, all)) = self.queries else { return };
        let rows = query_rows(sequence);
        let Queries { q, dout, ddq, cot_o, non_finite, lse, .. } = queries;
        let mut dead = None;
        lse.clear();
        for (i, row) in rows.clone().enumerate() {
            let here = all[[sequence.batch, head, row]];
            if here == f32::NEG_INFINITY {
                dead.get_or_insert_with(|| vec![false; sequence.queries])[i] = true;
            }
            lse.push(if here == f32::NEG_INFINITY { f32::INFINITY } else { here });
        }
        lse.resize(self.padded(sequence.queries), f32::INFINITY);
        let side = self.query_side(operands);
        let rows = (sequence.batch, head, rows);
        *non_finite = side.pack([q, dout, ddq, cot_o], rows, dead.as_deref());
    }
}

/// Rows that either list notes.
fn either(a: NonFinite, b: NonFinite) -> NonFinite {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.iter().zip(&b).map(|(a, b)| a | b).collect()),
        (a, b) => a.or(b),
    }
}
