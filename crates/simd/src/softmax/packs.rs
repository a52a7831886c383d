//! The operands of a pass, packed slot by slot in memory that is used again.
//!
//! A *slot* is a sequence and a key head, with the query heads that share it. Slots are numbered
//! s·Hk + h: sequence s, key head h.

use super::cut::Cut;
use crate::aligned::Aligned;
use crate::element::{Tensor, View};
use crate::mask::Sight as PreparedMask;
use crate::memory::reserve;
use crate::pack::{BLOCK, JOB, NonFinite, Packed, Source};
use crate::plan::Buffer;
use crate::tiles::{key_rows, query_rows};
use etalon_problem::{Error, Scores, Sequence};
use ndarray::{Ix3, Ix4};
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

/// The queries of one sequence and head. A row that sees no key reads as zeros, with lse = +∞: its
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

/// The packed operands of a slot.
#[derive(Debug, Default)]
pub struct Slot {
    pub keys: Keys,
    /// One for each query head that shares the key head.
    pub queries: Vec<Queries>,
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

    /// Elements of a row.
    fn dim(&self) -> usize {
        self.tensor.map_or(0, |tensor| tensor.shape()[3])
    }
}

/// The queries or the keys of a pass.
struct Side<'a> {
    operands: [Operand<'a>; 4],
    /// Rows of a panel across, and columns of one along.
    widths: [usize; 2],
}

impl Side<'_> {
    /// Elements of each operand across and along, packed, for `len` rows.
    fn elements(&self, len: usize) -> [[usize; 2]; 4] {
        let [rows, cols] = self.widths;
        self.operands.map(|operand| {
            let dim = |packed| if packed { operand.dim() } else { 0 };
            let across = len.next_multiple_of(rows).saturating_mul(dim(operand.across));
            [across, len.saturating_mul(dim(operand.along).next_multiple_of(cols))]
        })
    }

    /// Memory for `len` rows.
    fn with_capacity(&self, len: usize) -> Result<[Both; 4], Error> {
        let mut packs: [Both; 4] = Default::default();
        for (both, [across, along]) in packs.iter_mut().zip(self.elements(len)) {
            let [across, along] = [across, along].map(Packed::with_capacity);
            *both = Both { across: across?, along: along? };
        }
        Ok(packs)
    }

    /// Packs rows of one batch element and head; those that are `masked` as zeros.
    fn pack(
        &self,
        packs: [&mut Both; 4],
        (batch, head, rows): (usize, usize, Range<usize>),
        masked: Option<&[bool]>,
    ) -> NonFinite {
        let mut non_finite = None;
        for (both, operand) in packs.into_iter().zip(&self.operands) {
            let Some(tensor) = operand.tensor else { continue };
            let rows = tensor.rows(batch, head, rows.clone());
            let source = Source { rows, masked, job: JOB };
            if operand.across {
                source.across_into(self.widths[0], &mut both.across);
            }
            if operand.along {
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
pub struct Packing<'a> {
    pub scores: &'a Scores,
    pub sequences: Vec<Sequence>,
    pub cut: Cut,
    /// k, v, and their directions.
    pub keys: [Operand<'a>; 4],
    /// q, dout, the direction of q, and cot_o; where the pass packs all queries of a slot, with
    /// their lse.
    pub queries: Option<([Operand<'a>; 4], View<'a, f32, Ix3>)>,
}

impl<'a> Packing<'a> {
    /// How many slots there are.
    pub fn slots(&self) -> usize {
        self.sequences.len() * self.scores.extents.key_heads
    }

    /// The most queries and keys of a sequence.
    pub fn longest(&self) -> (usize, usize) {
        let longest = |of: fn(&Sequence) -> usize| self.sequences.iter().map(of).max().unwrap_or(0);
        (longest(|sequence| sequence.queries), longest(|sequence| sequence.keys))
    }

    fn key_side(&self) -> Side<'a> {
        Side { operands: self.keys, widths: [self.cut.cols, self.cut.cols] }
    }

    fn query_side(&self, operands: [Operand<'a>; 4]) -> Side<'a> {
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
            Buffer::parts("rows being packed", threads, self.row_bytes()),
            Buffer::parts("lists of tiles", queries.saturating_add(keys), TILE),
        ];
        let mask = PreparedMask::bytes(&self.scores.mask);
        if mask > 0 {
            buffers.push(Buffer::parts("mask index", 1, mask));
        }
        buffers
    }

    /// Bytes of the rows that one thread packs at a time: a panel across, and the rows that it reads.
    fn row_bytes(&self) -> usize {
        let queries = self.queries.map_or([Operand::NONE; 4], |(operands, _)| operands);
        let widest = self.keys.iter().chain(&queries).map(Operand::dim).max().unwrap_or(0);
        let rows = self.cut.cols.max(self.cut.rows).max(BLOCK) + 2;
        widest.saturating_mul(rows * size_of::<f32>())
    }

    /// Bytes of one slot, packed.
    pub fn bytes(&self) -> usize {
        let (queries, keys) = self.longest();
        let sum = |elements: [[usize; 2]; 4]| {
            let parts = elements.iter().flatten();
            parts.fold(0usize, |sum, &part| sum.saturating_add(Aligned::elements(part)))
        };
        let mut elements = sum(self.key_side().elements(keys));
        if let Some((operands, _)) = self.queries {
            let side = self.query_side(operands);
            let head = sum(side.elements(queries)).saturating_add(self.padded(queries));
            elements = elements.saturating_add(head.saturating_mul(self.scores.group()));
        }
        elements.saturating_mul(size_of::<f32>())
    }

    /// Queries, filled up to register blocks.
    fn padded(&self, queries: usize) -> usize {
        queries.next_multiple_of(self.cut.rows)
    }

    /// The queries of the longest sequence, filled up to whole tiles.
    pub fn longest_padded(&self) -> usize {
        self.longest().0.next_multiple_of(self.cut.queries)
    }

    /// Memory for any slot.
    pub fn slot(&self) -> Result<Slot, Error> {
        let (queries, keys) = self.longest();
        let [k, v, ddk, ddv] = self.key_side().with_capacity(keys)?;
        let mut slot =
            Slot { keys: Keys { k, v, ddk, ddv, non_finite: None }, queries: Vec::new() };
        if let Some((operands, _)) = self.queries {
            let side = self.query_side(operands);
            for _ in 0..self.scores.group() {
                let [q, dout, ddq, cot_o] = side.with_capacity(queries)?;
                let lse = reserve(self.padded(queries), "lse of a head")?;
                slot.queries.push(Queries { q, dout, ddq, cot_o, non_finite: None, lse });
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
        let Queries { q, dout, ddq, cot_o, non_finite, lse } = queries;
        let mut masked = None;
        lse.clear();
        for (i, row) in rows.clone().enumerate() {
            let here = all[[sequence.batch, head, row]];
            if here == f32::NEG_INFINITY {
                masked.get_or_insert_with(|| vec![false; sequence.queries])[i] = true;
            }
            lse.push(if here == f32::NEG_INFINITY { f32::INFINITY } else { here });
        }
        lse.resize(self.padded(sequence.queries), f32::INFINITY);
        let side = self.query_side(operands);
        let rows = (sequence.batch, head, rows);
        *non_finite = side.pack([q, dout, ddq, cot_o], rows, masked.as_deref());
    }
}

/// Rows that either list notes.
fn either(a: NonFinite, b: NonFinite) -> NonFinite {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.iter().zip(&b).map(|(a, b)| a | b).collect()),
        (a, b) => a.or(b),
    }
}
