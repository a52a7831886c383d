//! Packed panels: what the inner loop reads lies side by side, in f32, padded with zeros.
//!
//! A matrix of `len` rows is packed *across* (groups of rows, transposed: `[len/width][dim][width]`)
//! where its rows are summed against, and *along* (groups of columns: `[dim/width][len][width]`)
//! where its rows are what is summed. Rows that hold a NaN or an infinity are noted: only tiles
//! that touch such rows need more care than to multiply by zero.
//!
//! A matrix of bf16 may be packed in tiles instead ([`Form`]), which are multiplied as they are.

use crate::element::Tensor;
use crate::lanes::matrix::{BLOCK, SIDE, WORDS};
use crate::lanes::pairs::word;
use crate::lanes::prefetch::prefetch;
use crate::tiles::tiles;
use crate::workspace::Parts;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use ndarray::{ArrayView1, ArrayView2, Ix2, s};
use rayon::prelude::*;
use std::ops::Range;
use wide::f32x4;

/// Elements that one job packs, at least: enough that handing it out costs nothing beside.
pub const JOB: usize = 1 << 15;

/// All by the thread that asks: a task that waited for jobs might be made to begin another.
pub const ONE_JOB: usize = usize::MAX;

/// Elements that a job reads before it writes them elsewhere, on its stack.
const READ: usize = 1 << 11;

/// A packed matrix.
#[derive(Debug, Default)]
pub struct Packed<'m> {
    /// The panels, in memory that may be longer.
    pub panels: &'m mut [f32],
    /// Elements of one panel.
    pub panel: usize,
}

impl<'m> Packed<'m> {
    /// Memory for `len` elements.
    pub fn new(parts: &mut Parts<'m>, len: usize) -> Self {
        Packed { panels: parts.room(len), panel: 0 }
    }

    /// The panels from number `first` on.
    #[inline(always)]
    pub fn from(&self, first: usize) -> &[f32] {
        &self.panels[first * self.panel..]
    }
}

/// Rows that hold a NaN or an infinity, or have weights that are NaN.
#[derive(Debug, Default)]
pub struct NonFinite<'m> {
    /// 1 for those that do; where none does, anything.
    rows: &'m mut [u8],
    any: bool,
}

impl<'m> NonFinite<'m> {
    /// Memory for `len` rows.
    pub fn new(parts: &mut Parts<'m>, len: usize) -> Self {
        NonFinite { rows: parts.bytes(len), any: false }
    }

    /// No row does.
    pub fn clear(&mut self) {
        self.any = false;
    }

    /// Notes the rows of one more operand, of which some may be so.
    pub fn note(&mut self, source: &Source<'_>) {
        self.begin();
        let mut read = [0.0; READ];
        for (i, noted) in self.rows.iter_mut().enumerate().take(source.dim().0) {
            *noted |= u8::from(source.is_non_finite(i, &mut read));
        }
    }

    /// Notes a row whose operands may be finite.
    pub fn note_row(&mut self, i: usize) {
        self.begin();
        self.rows[i] = 1;
    }

    /// Makes the rows mean something.
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.any, true) {
            self.rows.fill(0);
        }
    }

    /// True if any row of the range is noted.
    pub fn touches(&self, mut rows: Range<usize>) -> bool {
        self.any && rows.any(|i| self.rows[i] != 0)
    }
}

/// Tiles of bf16 ([`crate::lanes::matrix`]) that a matrix X is packed in. Behind its rows and columns are zeros, up to
/// whole blocks; the tiles of 32 rows lie together, and are a panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Of X · …, `[len/16][dim/32]`.
    Rows,
    /// Of … · Xᵀ, `[len/16][dim/32]`.
    Across,
    /// Of … · X, `[len/32][dim/16]`.
    Along,
    /// Of Xᵀ · …, `[len/32][dim/16]`.
    Columns,
}

impl Form {
    /// Elements of f32 in which `len` rows of `dim` elements are packed.
    pub fn len(len: usize, dim: usize) -> usize {
        len.next_multiple_of(BLOCK).saturating_mul(dim.next_multiple_of(BLOCK)) / 2
    }

    /// Packs columns `cols` of 32 rows, of which `number` gives those that are not zeros. Returns whether one holds
    /// a NaN or an infinity there.
    pub fn pack(
        self,
        rows: &BitRows<'_>,
        number: impl Fn(usize) -> Option<usize>,
        cols: Range<usize>,
        panel: &mut [f32],
    ) -> bool {
        let (mut read, mut non_finite) = ([[0; WIDE]; BLOCK], false);
        // The second tile of a block is that of the next rows, or that of the next columns.
        let (each, apart) = match self {
            Form::Rows | Form::Across => (BLOCK, cols.len().div_ceil(BLOCK)),
            Form::Along | Form::Columns => (SIDE, 1),
        };
        for part in tiles(cols.clone(), WIDE) {
            let next = part.end..cols.end.min(part.end + WIDE);
            for (i, to) in read.iter_mut().enumerate() {
                match i + AHEAD < BLOCK {
                    true => rows.ask(number(i + AHEAD), &part),
                    false => rows.ask(number(i + AHEAD - BLOCK), &next),
                }
                non_finite |= rows.read(number(i), &part, to);
            }
            for col in (0..part.len()).step_by(BLOCK) {
                let block = read.each_ref().map(|row| &row[col..col + BLOCK]);
                let at = (part.start - cols.start + col) / each;
                let (first, second) = panel[at * WORDS..].split_at_mut(apart * WORDS);
                self.write(block, [&mut first[..WORDS], &mut second[..WORDS]]);
            }
        }
        non_finite
    }

    /// 32 columns of 32 rows, in two tiles: words of neighbours in a row, or in a column; each tile may be transposed.
    fn write(self, block: [&[u16]; BLOCK], tiles: [&mut [f32]; 2]) {
        let by_row = matches!(self, Form::Rows | Form::Across);
        let transposed = matches!(self, Form::Across | Form::Columns);
        for (half, tile) in tiles.into_iter().enumerate() {
            let (start, mut square) = (half * SIDE, [0.0; WORDS]);
            let to = if transposed { &mut square[..] } else { &mut *tile };
            for (r, to) in to.as_chunks_mut::<SIDE>().0.iter_mut().enumerate() {
                if by_row {
                    let row = block[start + r].as_chunks::<2>().0;
                    to.iter_mut().zip(row).for_each(|(to, [even, odd])| *to = pair(*even, *odd));
                } else {
                    let rows = block[2 * r][start..].iter().zip(&block[2 * r + 1][start..]);
                    to.iter_mut().zip(rows).for_each(|(to, (even, odd))| *to = pair(*even, *odd));
                }
            }
            if transposed {
                transpose(&square, SIDE, SIDE, tile, SIDE);
            }
        }
    }
}

/// A word.
#[inline(always)]
fn pair(even: u16, odd: u16) -> f32 {
    word(even.into(), odd.into())
}

/// Rows of bf16 are asked for so many before they are read.
const AHEAD: usize = 8;

/// Rows of bf16 of any strides.
pub struct BitRows<'a> {
    all: ArrayView2<'a, bf16>,
    /// The same where they lie end to end: to slice an array costs more than to read a short row.
    end_to_end: Option<&'a [bf16]>,
}

impl<'a> BitRows<'a> {
    /// Of a matrix.
    pub fn new(all: ArrayView2<'a, bf16>) -> Self {
        BitRows { all, end_to_end: all.to_slice() }
    }

    /// Bits of some columns of a row, of which there are at most as many as `to` has.
    #[inline(always)]
    pub fn read_bits(&self, i: usize, cols: Range<usize>, to: &mut [u16]) {
        let to = &mut to[..cols.len()];
        match self.row(i) {
            Some(row) => to.copy_from_slice(row[cols].reinterpret_cast()),
            None => {
                let row = self.all.slice_move(s![i, cols]);
                to.iter_mut().zip(row).for_each(|(to, x)| *to = x.to_bits());
            }
        }
    }

    /// A row, if its elements lie side by side.
    pub fn row(&self, i: usize) -> Option<&'a [bf16]> {
        let dim = self.all.ncols();
        match self.end_to_end {
            Some(all) => Some(&all[i * dim..][..dim]),
            None => self.all.slice_move(s![i, ..]).to_slice(),
        }
    }

    /// Asks for some columns of a row, if there is one.
    fn ask(&self, row: Option<usize>, cols: &Range<usize>) {
        if let Some(row) = row.and_then(|i| self.row(i)) {
            prefetch(&row[cols.clone()]);
        }
    }

    /// Some columns of a row, and zeros behind them, up to whole blocks; all zeros of a row that is not there. Returns
    /// whether one is a NaN or an infinity.
    fn read(&self, row: Option<usize>, cols: &Range<usize>, to: &mut [u16; WIDE]) -> bool {
        let (to, rest) = to.split_at_mut(cols.len());
        rest.iter_mut().take(cols.len().next_multiple_of(BLOCK) - cols.len()).for_each(|x| *x = 0);
        let Some(i) = row else {
            to.fill(0);
            return false;
        };
        self.read_bits(i, cols.clone(), to);
        holds_non_finite_bits(to)
    }
}

/// A row-wise source for packing.
pub struct Source<'a> {
    /// The rows.
    pub rows: Tensor<'a, Ix2>,
    /// lse of the rows, if some are to be read as zeros: those that see no key, where it is −∞.
    pub masked: Option<ArrayView1<'a, f32>>,
    /// Elements that a job packs, at least: [`JOB`], or [`ONE_JOB`] within a task.
    pub job: usize,
}

impl Source<'_> {
    /// Some columns of some rows in f32, into rows that begin `stride` apart.
    fn read(&self, rows: Range<usize>, cols: Range<usize>, into: &mut [f32], stride: usize) {
        self.rows.read_rows(rows.clone(), cols.clone(), into, stride);
        let Some(lse) = self.masked else { return };
        for (row, i) in into.chunks_mut(stride.max(1)).zip(rows) {
            if lse[i] == f32::NEG_INFINITY {
                row[..cols.len()].fill(0.0);
            }
        }
    }

    fn dim(&self) -> (usize, usize) {
        (self.rows.shape()[0], self.rows.shape()[1])
    }

    /// Groups of `width` rows, transposed. Returns whether one holds a NaN or an infinity.
    pub fn across_into(&self, width: usize, packed: &mut Packed<'_>) -> bool {
        let (len, dim) = self.dim();
        let panel = width * dim;
        packed.panel = panel;
        if panel == 0 {
            return false;
        }
        let pack = |read: &mut [f32; READ], (group, panel): (usize, &mut [f32])| {
            let here = group * width..len.min((group + 1) * width);
            for cols in tiles(0..dim, READ / width / 4 * 4) {
                let dim = cols.len();
                read[here.len() * dim..width * dim].fill(0.0);
                self.read(here.clone(), cols.clone(), read, dim);
                transpose(read, dim, dim, &mut panel[cols.start * width..], width);
            }
            holds_non_finite(panel)
        };
        let panels = packed.panels[..len.div_ceil(width) * panel].par_chunks_exact_mut(panel);
        let panels = panels.enumerate().with_min_len(self.job.div_ceil(panel));
        panels.map_init(|| [0.0; READ], pack).reduce(|| false, |x, y| x | y)
    }

    /// Groups of `width` columns, row by row. Returns whether one holds a NaN or an infinity.
    pub fn along_into(&self, width: usize, packed: &mut Packed<'_>) -> bool {
        let (len, dim) = self.dim();
        let panel = len * width;
        packed.panel = panel;
        if panel == 0 {
            return false;
        }
        let rows = self.job.div_ceil(width).min(len);
        let panels = packed.panels[..panel * dim.div_ceil(width)].par_chunks_exact_mut(panel);
        let panels = panels.enumerate().with_min_len(self.job.div_ceil(panel));
        let pack = |(group, panel): (usize, &mut [f32])| {
            let cols = group * width..dim.min((group + 1) * width);
            let jobs = panel.par_chunks_mut(rows * width).enumerate().map(|(job, panel)| {
                let here = job * rows..job * rows + panel.len() / width;
                self.read(here, cols.clone(), panel, width);
                if cols.len() < width {
                    panel.chunks_exact_mut(width).for_each(|row| row[cols.len()..].fill(0.0));
                }
                holds_non_finite(panel)
            });
            jobs.reduce(|| false, |x, y| x | y)
        };
        panels.map(pack).reduce(|| false, |x, y| x | y)
    }

    /// Tiles of a matrix of bf16. Returns whether one holds a NaN or an infinity.
    pub fn tiles_into(&self, form: Form, packed: &mut Packed<'_>) -> bool {
        let (len, dim) = self.dim();
        packed.panel = Form::len(BLOCK, dim);
        let Some(rows) = self.rows.bf16().filter(|_| dim > 0) else { return false };
        let (rows, masked) = (BitRows::new(rows), &self.masked);
        let pack = |(group, panel): (usize, &mut [f32])| {
            let is_masked = |i: usize| masked.is_some_and(|lse| lse[i] == f32::NEG_INFINITY);
            let number = |i: usize| Some(group * BLOCK + i).filter(|&i| i < len && !is_masked(i));
            form.pack(&rows, number, 0..dim, panel)
        };
        let panels = packed.panels[..Form::len(len, dim)].par_chunks_exact_mut(packed.panel);
        let panels = panels.enumerate().with_min_len(self.job.div_ceil(packed.panel));
        panels.map(pack).reduce(|| false, |x, y| x | y)
    }

    /// True if a row holds a NaN or an infinity.
    fn is_non_finite(&self, row: usize, read: &mut [f32; READ]) -> bool {
        tiles(0..self.dim().1, READ).any(|cols| {
            let read = &mut read[..cols.len()];
            self.read(row..row + 1, cols.clone(), read, cols.len());
            holds_non_finite(read)
        })
    }
}

/// True if a NaN or an infinity is among them. As integers, and without an early exit: all in one sweep of
/// the vector unit, over what has just been written. An exponent of ones carries into the sign.
fn holds_non_finite(x: &[f32]) -> bool {
    const ONE: u32 = 1 << (f32::MANTISSA_DIGITS - 1);
    let carried = x.iter().fold(0, |carried, x| carried | ((x.to_bits() & !SIGN) + ONE));
    carried & SIGN != 0
}

/// The same of bits of bf16.
fn holds_non_finite_bits(x: &[u16]) -> bool {
    x.iter().fold(0, |carried, x| carried | ((x & 0x7fff) + 0x80)) & 0x8000 != 0
}

/// Columns of bf16 that a job reads before it writes them elsewhere, on its stack.
const WIDE: usize = 256;

/// The bit of the sign.
const SIGN: u32 = 1 << 31;

/// `columns[d · width + r]` = `rows[r · stride + d]`, for `width` rows of `dim`: squares of four
/// through registers, what is left one by one.
pub fn transpose(rows: &[f32], stride: usize, dim: usize, columns: &mut [f32], width: usize) {
    let (whole_dim, whole_width) = (dim / 4 * 4, width / 4 * 4);
    for d in (0..whole_dim).step_by(4) {
        for r in (0..whole_width).step_by(4) {
            let row = |i: usize| {
                let x = &rows[(r + i) * stride + d..][..4];
                f32x4::new([x[0], x[1], x[2], x[3]])
            };
            let square = f32x4::transpose([row(0), row(1), row(2), row(3)]);
            for (i, column) in square.into_iter().enumerate() {
                columns[(d + i) * width + r..][..4].copy_from_slice(&column.to_array());
            }
        }
    }
    for d in 0..dim {
        let first = if d < whole_dim { whole_width } else { 0 };
        for r in first..width {
            columns[d * width + r] = rows[r * stride + d];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array1, Array2, ArrayView2};

    /// 5 rows of 3: neither a multiple of the width 2.
    fn matrix() -> Array2<f32> {
        Array2::from_shape_fn((5, 3), |(i, d)| (10 * i + d) as f32)
    }

    fn source(rows: ArrayView2<'_, f32>) -> Source<'_> {
        Source { rows: rows.into(), masked: None, job: 1 }
    }

    /// Packs across or along into memory that held something else.
    fn packed<T>(pack: impl FnOnce(&mut Packed<'_>) -> T, len: usize) -> Vec<f32> {
        let mut panels = vec![9.0; len];
        pack(&mut Packed { panels: &mut panels, panel: 0 });
        panels
    }

    fn across(rows: ArrayView2<'_, f32>, width: usize, len: usize) -> Vec<f32> {
        packed(|packed| source(rows).across_into(width, packed), len)
    }

    #[test]
    fn across_transposes_groups_of_rows_and_pads() {
        let packed = across(matrix().view(), 2, 19);
        assert_eq!(packed[..6], [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
        assert_eq!(packed[12..], [40.0, 0.0, 41.0, 0.0, 42.0, 0.0, 9.0]);
    }

    #[test]
    fn along_groups_columns_and_pads() {
        let matrix = matrix();
        let packed = packed(|packed| source(matrix.view()).along_into(2, packed), 20);
        assert_eq!(packed[..4], [0.0, 1.0, 10.0, 11.0]);
        assert_eq!(packed[10..], [2.0, 0.0, 12.0, 0.0, 22.0, 0.0, 32.0, 0.0, 42.0, 0.0]);
    }

    #[test]
    fn any_strides_pack_alike() {
        let wide = Array2::from_shape_fn((3, 5), |(d, i)| (10 * i + d) as f32);
        assert_eq!(across(matrix().view(), 4, 24), across(wide.t(), 4, 24));
    }

    #[test]
    fn rows_too_long_to_be_read_at_once_pack_like_short_ones() {
        let dim = READ / 4 + 5;
        let long = Array2::from_shape_fn((5, dim), |(i, d)| (dim * i + d) as f32);
        let packed = across(long.view(), 4, 8 * dim);
        for (at, &x) in packed.iter().enumerate() {
            let (i, d) = (at / (4 * dim) * 4 + at % 4, at / 4 % dim);
            assert_eq!(x, if i < 5 { long[[i, d]] } else { 0.0 });
        }
    }

    #[test]
    fn what_is_not_finite_shows_in_either_packing() {
        let dim = READ + 5;
        let mut long = Array2::from_shape_fn((5, dim), |(i, d)| (dim * i + d) as f32);
        let found = |long: &Array2<f32>| {
            let (mut across, mut along) = (false, false);
            packed(|packed| across = source(long.view()).across_into(4, packed), 8 * dim);
            packed(|packed| along = source(long.view()).along_into(4, packed), 5 * (dim + 3));
            let rows = (0..5).map(|i| source(long.view()).is_non_finite(i, &mut [0.0; READ]));
            (across, along, rows.collect::<Vec<_>>())
        };
        assert_eq!(found(&long), (false, false, vec![false; 5]));
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            for col in [0, dim - 1] {
                let before = std::mem::replace(&mut long[[3, col]], bad);
                let rows = vec![false, false, false, true, false];
                assert_eq!(found(&long), (true, true, rows), "{bad} in column {col}");
                long[[3, col]] = before;
            }
        }
    }

    #[test]
    fn non_finite_rows_are_noted_unless_masked() {
        let mut matrix = matrix();
        matrix[[1, 2]] = f32::NAN;
        matrix[[3, 0]] = f32::INFINITY;
        let mut rows = [9; 6];
        let mut noted = NonFinite { rows: &mut rows, any: false };
        let lse = Array1::from_vec(vec![0.0, f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0]);
        noted.note(&Source { masked: Some(lse.view()), ..source(matrix.view()) });
        assert!(!noted.touches(0..5));
        noted.note(&source(matrix.view()));
        assert_eq!(noted.rows, [0, 1, 0, 1, 0, 0]);
        assert!(noted.touches(2..4) && !noted.touches(2..3));
        noted.clear();
        assert!(!noted.touches(0..5));
        noted.note_row(4);
        assert_eq!(noted.rows, [0, 0, 0, 0, 1, 0]);
    }
}
