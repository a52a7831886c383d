//! The kernels of whole tiles, one for each sweep.

use super::kernels::{Known, Pair, Place, Scratch};
use crate::attention::gradient::{Columns, Rows, joined};
use crate::heads::Cut;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::level::compiled_here;
use crate::pack::Packed;
use crate::packs::Queries;
use crate::products::Sum;
use crate::scores::Strip;
use crate::tile::{MAX_KEYS, STRIDE, Tile};
use std::ops::Range;

/// Grows the rows of a block from `first` of a sum by the weights times the rows of `keys`, if the
/// pass has them.
#[inline(always)]
fn grow<I: Isa>(
    isa: I,
    (sum, first, stride): (&mut [f32], usize, usize),
    (weights, visible): (&[f32], &[bool]),
    place: &Place,
    strip: &Strip,
    keys: &Packed,
) {
    if keys.panels.is_empty() {
        return;
    }
    let rows = Rows {
        weights: &weights[place.first * STRIDE..],
        visible: &visible[place.first * MAX_KEYS..],
        careful: place.careful,
    };
    let sum = Sum { acc: &mut sum[first * stride..], stride };
    rows.grow(isa, sum, keys, &place.cols, strip);
}

/// Of one tile of queries Σ P U, Σ P (U v + ddv) and, if asked for, o: left in the scratch.
pub struct RowTile<'a, 'p> {
    /// The head.
    pub pair: Pair<'p>,
    /// The tile, within the sequence.
    pub rows: Range<usize>,
    /// Whether o is computed anew.
    pub o_anew: bool,
    /// The thread's memory.
    pub scratch: &'a mut Scratch,
}

compiled_here!(RowTile<'_, '_>);

impl Kernel for RowTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let RowTile { pair, rows, o_anew, scratch } = self;
        let stride = pair.value_dim.next_multiple_of(I::Tile::COLS);
        scratch.u.fill(0.0);
        scratch.values.fill(0.0);
        scratch.o.fill(0.0);
        for cols in Cut::tiles(0..pair.rule.sequence.keys, scratch.cut.keys) {
            for place in pair.blocks::<I>(&rows, &cols, false) {
                let Some(strip) = pair.means(isa, &place, scratch) else { continue };
                let first = place.rows.start - rows.start;
                let Scratch { p, p_dot, u, visible, values, o, .. } = &mut *scratch;
                for (r, u) in u[first..].iter_mut().take(I::Tile::ROWS).enumerate() {
                    let mut sum = I::F32::splat(isa, 0.0);
                    for pu in p_dot[r * STRIDE..][strip.cols.clone()].chunks_exact(I::F32::N) {
                        sum = sum + I::F32::load(isa, pu);
                    }
                    *u += sum.reduce_add(); // (D4)
                }
                let (v, ddv) = (&pair.keys.v.along, &pair.keys.ddv.along);
                grow(isa, (values, first, stride), (p_dot, visible), &place, &strip, v); // (D5)
                grow(isa, (values, first, stride), (p, visible), &place, &strip, ddv);
                if o_anew {
                    grow(isa, (o, first, stride), (p, visible), &place, &strip, v); // (F5)
                }
            }
        }
    }
}

/// gq / σ of one tile of queries, left in [`Scratch::wide`].
pub struct GradientTile<'a, 'p> {
    /// The head.
    pub pair: Pair<'p>,
    /// What its rows learned.
    pub known: Known<'a>,
    /// The tile, within the sequence.
    pub rows: Range<usize>,
    /// The thread's memory.
    pub scratch: &'a mut Scratch,
}

compiled_here!(GradientTile<'_, '_>);

impl Kernel for GradientTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let GradientTile { pair, known, rows, scratch } = self;
        let stride = pair.dim.next_multiple_of(I::Tile::COLS);
        scratch.wide.fill(0.0);
        for cols in Cut::tiles(0..pair.rule.sequence.keys, scratch.cut.keys) {
            for place in pair.blocks::<I>(&rows, &cols, false) {
                let strip = pair.weights(isa, &place, known, false, scratch);
                let Some(strip) = strip else { continue };
                let first = place.rows.start - rows.start;
                let Scratch { ds, x, visible, wide, .. } = &mut *scratch;
                let (k, ddk) = (&pair.keys.k.along, &pair.keys.ddk.along);
                grow(isa, (wide, first, stride), (x, visible), &place, &strip, k); // (D10)
                grow(isa, (wide, first, stride), (ds, visible), &place, &strip, ddk);
            }
        }
    }
}

/// gk / σ and gv of one tile of keys, over all query heads that share the key head, left in
/// [`Scratch::wide`] and [`Scratch::values`].
pub struct ColumnTile<'a, 'p> {
    /// The query heads of the key head, and what their rows learned.
    pub pairs: &'a [(Pair<'p>, Known<'p>)],
    /// The tile, within the sequence.
    pub cols: Range<usize>,
    /// The thread's memory.
    pub scratch: &'a mut Scratch,
}

compiled_here!(ColumnTile<'_, '_>);

impl Kernel for ColumnTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        self.scratch.wide.fill(0.0);
        self.scratch.values.fill(0.0);
        for &(ref pair, known) in self.pairs {
            for rows in Cut::tiles(0..pair.rule.sequence.queries, self.scratch.cut.queries) {
                column_tile(isa, pair, known, rows, &self.cols, self.scratch);
            }
        }
    }
}

/// One tile of queries of one head against the tile of keys.
#[inline(always)]
fn column_tile<I: Isa>(
    isa: I,
    pair: &Pair<'_>,
    known: Known<'_>,
    rows: Range<usize>,
    cols: &Range<usize>,
    scratch: &mut Scratch,
) {
    let mut seen = None;
    for place in pair.blocks::<I>(&rows, cols, true) {
        let strip = pair.weights(isa, &place, known, false, scratch);
        let Some(strip) = strip else { continue };
        let here = place.rows.start - rows.start..place.rows.end - rows.start;
        seen = Some(joined(seen, here, &strip.cols));
    }
    let Some((seen_rows, seen_cols)) = seen else { return };
    let careful = pair.careful(&rows, cols);
    let Scratch { p, p_dot, ds, x, visible, wide, values, .. } = scratch;
    let sweep = Columns { rows: seen_rows, cols: seen_cols, tile: rows.start, careful, visible };
    let Queries { q, ddq, dout, cot_o, .. } = pair.queries;
    let stride = pair.dim.next_multiple_of(I::Tile::COLS);
    sweep.grow(isa, wide, stride, x, &q.along); // (D11)
    sweep.grow(isa, wide, stride, ds, &ddq.along);
    let stride = pair.value_dim.next_multiple_of(I::Tile::COLS);
    sweep.grow(isa, values, stride, p_dot, &dout.along); // (D12)
    sweep.grow(isa, values, stride, p, &cot_o.along);
}

/// gbias of one tile of queries and keys, the sum over every head and sequence that shares the bias,
/// left in [`Scratch::bias`].
pub struct BiasTile<'a, 'p> {
    /// The heads and sequences, in the order of the sum, and what their rows learned.
    pub pairs: &'a [(Pair<'p>, Known<'p>)],
    /// The queries, within the sequences.
    pub rows: Range<usize>,
    /// The keys, within the sequences.
    pub cols: Range<usize>,
    /// The thread's memory.
    pub scratch: &'a mut Scratch,
}

compiled_here!(BiasTile<'_, '_>);

impl Kernel for BiasTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let BiasTile { pairs, rows, cols, scratch } = self;
        scratch.bias.fill(0.0);
        for &(ref pair, known) in pairs {
            let sequence = pair.rule.sequence;
            let rows = rows.start..rows.end.min(sequence.queries);
            let cols = cols.start..cols.end.min(sequence.keys);
            for place in pair.blocks::<I>(&rows, &cols, false) {
                if pair.weights(isa, &place, known, true, scratch).is_none() {
                    continue;
                }
                for (r, i) in place.rows.clone().enumerate() {
                    let x = &scratch.x[r * STRIDE..][..cols.len()];
                    let sum = &mut scratch.bias[(i - rows.start) * STRIDE..][..cols.len()];
                    sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x); // (D15)
                }
            }
        }
    }
}
