//! The memory of one thread for the forward pass of lazy attention.

use super::MAX_LANES;
use crate::pack::{Form, Packed};
use crate::softmax::cut::Cut;
use crate::softmax::scratch::Words;
use crate::tile::{MAX_KEYS, STRIDE};
use crate::workspace::Parts;

/// Bytes of weights that a thread keeps, at most: beyond, to read them back from a far cache costs as
/// much as to compute them anew.
const KEPT: usize = 4 << 20;

/// The memory of one thread. Tiles of keys are numbered from the first of the sequence.
pub struct LazyScratch<'m> {
    pub cut: Cut,
    /// Queries, packed across.
    pub q: Packed<'m>,
    pub lse: &'m mut [f32],
    /// o of every row, rows `stride` apart.
    pub o: &'m mut [f32],
    pub stride: usize,
    /// Σ a P v of every row, as o; empty where it is not wanted.
    pub pv: &'m mut [f32],
    pub numbers: Numbers<'m>,
    /// Tiles of weights that stay; the tile behind them holds one of the others.
    pub kept: usize,
    /// p, then e, of a tile after the other, rows [`STRIDE`] apart.
    pub weights: &'m mut [f32],
    /// 1 for visible pairs, rows [`MAX_KEYS`] apart; later, in tiles that are not finite, with [`ACTIVE`] for
    /// active ones.
    pub visible: &'m mut [u8],
    /// P of the active pairs of a block, or 1, where pv is wanted; otherwise empty.
    pub active: &'m mut [f32],
    /// Of bf16 the weights of a block in tiles.
    pub words: Words<'m>,
    /// The strip of each block of each tile.
    pub strips: &'m mut [[u32; 4]],
}

/// Numbers of rows, of each as many as tiles have, up to a whole register.
pub struct Numbers<'m> {
    pub m: &'m mut [f32],
    /// l, spread over lanes.
    pub l: &'m mut [f32],
    pub n: &'m mut [f32],
    /// 1/l.
    pub inverse: &'m mut [f32],
    /// c.
    pub offset: &'m mut [f32],
    /// f of the tile of keys at hand.
    pub factor: &'m mut [f32],
    /// Of rows that see something lse, of the others +∞.
    pub base: &'m mut [f32],
    /// m_J and top_J of each tile of keys.
    pub m_of: &'m mut [f32],
    pub top_of: &'m mut [f32],
}

impl<'m> LazyScratch<'m> {
    /// For operands of D and E elements, sequences of at most so many keys, and pv or not.
    pub fn new(
        parts: &mut Parts<'m>,
        cut: &Cut,
        (dim, width): (usize, usize),
        keys: usize,
        pv: bool,
    ) -> Self {
        let (rows, tile) = (cut.queries.next_multiple_of(MAX_LANES), cut.queries * STRIDE);
        let all = keys.div_ceil(cut.keys);
        let kept = all.min((KEPT / (tile * size_of::<f32>())).max(1));
        let held = all.min(kept + 1);
        let stride = cut.stride(width);
        let numbers = Numbers {
            m: parts.room(rows),
            l: parts.room(rows * MAX_LANES),
            n: parts.room(rows),
            inverse: parts.room(rows),
            offset: parts.room(rows),
            factor: parts.room(rows),
            base: parts.room(rows),
            m_of: parts.room(rows.saturating_mul(all)),
            top_of: parts.room(rows.saturating_mul(all)),
        };
        let words = if cut.bf16 { cut.pieces * Form::len(cut.rows, MAX_KEYS) } else { 0 };
        let strips = parts.room((4 * (cut.queries / cut.rows)).saturating_mul(all));
        LazyScratch {
            cut: *cut,
            q: Packed::new(parts, dim.next_multiple_of(cut.depth()).saturating_mul(cut.queries)),
            lse: parts.room(cut.queries),
            o: parts.room(stride.saturating_mul(cut.queries)),
            stride,
            pv: parts.room(if pv { stride.saturating_mul(cut.queries) } else { 0 }),
            numbers,
            kept,
            weights: parts.room(tile * held),
            visible: parts.bytes(cut.queries * MAX_KEYS * held),
            active: parts.room(if pv { cut.rows * STRIDE } else { 0 }),
            words: Words { memory: parts.room(words), pieces: cut.pieces },
            strips: bytemuck::cast_slice_mut(strips),
        }
    }
}

impl LazyScratch<'_> {
    /// True if operands are multiplied in bf16.
    pub fn is_bf16(&self) -> bool {
        self.cut.bf16
    }
}
