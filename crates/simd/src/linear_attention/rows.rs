//! The operands of a chunk in f32, as either factor of a product.

use super::cut::Cut;
use crate::element::Tensor;
use crate::lanes::prefetch::Ask;
use crate::lanes::{Isa, Lanes};
use crate::pack::{Packed, transpose};
use crate::tile::{STRIDE, Tile};
use crate::workspace::Parts;
use ndarray::Ix2;
use std::ops::Range;

/// Columns of a slab: whole register blocks, as rows and as columns, of every instruction set; and
/// fewer than [`STRIDE`].
const SLAB: usize = 192;

/// A matrix row by row, [`STRIDE`] apart, in slabs of [`SLAB`] columns: the factor that a product
/// reads element by element, by rows or by columns.
#[derive(Debug)]
pub struct Rows<'m> {
    elements: &'m mut [f32],
    /// Rows of a slab.
    capacity: usize,
    dim: usize,
}

impl<'m> Rows<'m> {
    /// For the rows of a chunk of `dim` elements.
    pub fn new(parts: &mut Parts<'m>, cut: &Cut, dim: usize) -> Self {
        let (rows, cols) =
            (cut.chunk.next_multiple_of(cut.rows), cut.chunk.next_multiple_of(cut.cols));
        let capacity = rows.max(cols);
        let slab = capacity.saturating_mul(STRIDE);
        let elements = parts.room(slab.saturating_mul(dim.div_ceil(SLAB)));
        // Register blocks reach beyond the last column.
        let last = dim % SLAB;
        let padding = last..last.next_multiple_of(cut.rows).max(last.next_multiple_of(cut.cols));
        for row in elements.chunks_mut(STRIDE).skip(dim / SLAB * capacity) {
            row[padding.clone()].fill(0.0);
        }
        Rows { elements, capacity, dim }
    }
}

impl Rows<'_> {
    /// True if it has no columns: the tangent of a constant operand, which adds nothing to a product.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.dim == 0
    }

    /// The first `len` rows become 0, whatever they held.
    pub fn clear(&mut self, len: usize) {
        self.each_row(len, |row, _| row.fill(0.0));
    }

    /// The first `len` rows become factor · them.
    pub fn scale(&mut self, len: usize, factor: f32) {
        self.each_row(len, |row, _| row.iter_mut().for_each(|x| *x *= factor));
    }

    /// The first `len` rows grow by factor · those of `other`.
    pub fn add(&mut self, len: usize, factor: f32, other: &Rows<'_>) {
        self.each_row(len, |row, at| {
            let other = &other.elements[at..][..row.len()];
            row.iter_mut().zip(other).for_each(|(x, y)| *x += factor * y);
        });
    }

    /// Visits the parts of the first `len` rows, with where they lie.
    fn each_row(&mut self, len: usize, mut visit: impl FnMut(&mut [f32], usize)) {
        for (cols, start) in self.slabs() {
            for i in 0..len {
                let at = start + i * STRIDE;
                visit(&mut self.elements[at..][..cols.len()], at);
            }
        }
    }

    /// The columns of each slab, and where it lies.
    #[inline(always)]
    fn slabs(&self) -> impl Iterator<Item = (Range<usize>, usize)> + use<> {
        let (dim, slab) = (self.dim, self.capacity * STRIDE);
        (0..dim.div_ceil(SLAB)).map(move |s| (s * SLAB..dim.min((s + 1) * SLAB), s * slab))
    }

    /// Becomes `source`.
    pub fn read(&mut self, source: Tensor<'_, Ix2>) {
        for (cols, at) in self.slabs() {
            source.read_rows(0..source.shape()[0], cols, &mut self.elements[at..], STRIDE);
        }
    }

    /// True if the first `len` rows hold no NaN and no infinity.
    #[inline(always)]
    pub fn finite(&self, len: usize) -> bool {
        let mut largest = 0;
        for (cols, at) in self.slabs() {
            for row in self.elements[at..].chunks(STRIDE).take(len) {
                // As integers, and without an early exit: in sweeps of the vector unit.
                for x in &row[..cols.len()] {
                    largest = largest.max(x.to_bits() as i32 & i32::MAX);
                }
            }
        }
        largest < f32::INFINITY.to_bits() as i32
    }

    /// Some elements of row `i`, within one slab.
    #[inline(always)]
    fn part(&self, i: usize, cols: Range<usize>) -> &[f32] {
        let at = cols.start / SLAB * self.capacity * STRIDE + i * STRIDE + cols.start % SLAB;
        &self.elements[at..][..cols.len()]
    }

    /// x · row `i`, as far as x goes.
    #[inline(always)]
    pub fn dot<I: Isa>(&self, isa: I, i: usize, x: &[f32]) -> f32 {
        let mut sum = I::F32::splat(isa, 0.0);
        let mut rest = 0.0;
        for (cols, _) in self.slabs() {
            let (row, x) = (self.part(i, cols.clone()), &x[cols]);
            let whole = row.len() / I::F32::N * I::F32::N;
            for (a, b) in row.chunks_exact(I::F32::N).zip(x.chunks_exact(I::F32::N)) {
                sum = I::F32::load(isa, a).mul_add(I::F32::load(isa, b), sum);
            }
            for (a, b) in row[whole..].iter().zip(&x[whole..]) {
                rest += a * b;
            }
        }
        sum.reduce_add() + rest
    }

    /// The first `len` rows along: groups of a register block's columns, `[dim/cols][capacity][cols]`,
    /// each row times its weight.
    #[inline(always)]
    pub fn along<I: Isa>(&self, isa: I, len: usize, weights: Option<&[f32]>, to: &mut Packed<'_>) {
        let width = I::Short::COLS;
        for group in 0..self.dim.div_ceil(width) {
            let start = group * width;
            let panel = &mut to.panels[group * to.panel..];
            for (i, row) in panel.chunks_exact_mut(width).take(len).enumerate() {
                // Columns beyond the last are 0 in every row of a slab.
                let source = self.part(i, start..start + width).chunks_exact(I::F32::N);
                for (to, source) in row.chunks_exact_mut(I::F32::N).zip(source) {
                    let x = I::F32::load(isa, source);
                    let weighted = weights.map(
                        #[inline(always)]
                        |weights| x * I::F32::splat(isa, weights[i]),
                    );
                    weighted.unwrap_or(x).store(to);
                }
            }
        }
    }

    /// The tangent of weighted rows, along: weight · (self + log_tangent · value), with self the tangent
    /// of `value` and `log_tangent` that of the logarithm of the weight, which is not read where the
    /// weight is 0.
    #[inline(always)]
    pub fn tangent_along<I: Isa>(
        &self,
        isa: I,
        len: usize,
        value: &Rows<'_>,
        weights: &[f32],
        log_tangent: Option<&[f32]>,
        to: &mut Packed<'_>,
    ) {
        let (width, zero) = (I::Short::COLS, I::F32::splat(isa, 0.0));
        for group in 0..value.dim.div_ceil(width) {
            let cols = group * width..(group + 1) * width;
            let panel = &mut to.panels[group * to.panel..];
            for (i, row) in panel.chunks_exact_mut(width).take(len).enumerate() {
                let weight = I::F32::splat(isa, weights[i]);
                let log_tangent =
                    log_tangent.map_or(
                        0.0,
                        |log_tangent| if weights[i] == 0.0 { 0.0 } else { log_tangent[i] },
                    );
                let log_tangent = I::F32::splat(isa, log_tangent);
                let value = value.part(i, cols.clone());
                let tangent = if self.is_empty() { None } else { Some(self.part(i, cols.clone())) };
                for (n, to) in row.chunks_exact_mut(I::F32::N).enumerate() {
                    let at = n * I::F32::N;
                    let tangent = match tangent {
                        Some(tangent) => I::F32::load(isa, &tangent[at..]),
                        None => zero,
                    };
                    let value = I::F32::load(isa, &value[at..]);
                    (weight * log_tangent.mul_add(value, tangent)).store(to);
                }
            }
        }
    }

    /// The first `len` rows across: groups of as many rows, transposed, `[capacity/cols][dim][cols]`.
    #[inline(always)]
    pub fn across<I: Isa>(&self, _: I, len: usize, to: &mut Packed<'_>) {
        let width = I::Short::COLS;
        for group in 0..len.div_ceil(width) {
            let panel = &mut to.panels[group * to.panel..];
            for (cols, at) in self.slabs() {
                let rows = &self.elements[at + group * width * STRIDE..];
                transpose(rows, STRIDE, cols.len(), &mut panel[cols.start * width..], width);
            }
        }
    }

    /// tile += rows `first`… · B, with B a panel along of `dim` rows; meanwhile it asks for what will be read then.
    #[inline(always)]
    pub fn add_rows<I: Isa>(
        &self,
        isa: I,
        tile: &mut I::Short,
        first: usize,
        b: &[f32],
        then: &mut impl Ask,
    ) {
        for (cols, at) in self.slabs() {
            let a = &self.elements[at + first * STRIDE..];
            tile.add_rows_then(isa, a, &b[cols.start * I::Short::COLS..], cols.len(), then);
        }
    }

    /// tile += (columns `col`… of `rows`)ᵀ · B, with B the rows `rows` of a panel along; then as [`Rows::add_rows`].
    #[inline(always)]
    pub fn add_columns<I: Isa>(
        &self,
        isa: I,
        tile: &mut I::Short,
        col: usize,
        rows: Range<usize>,
        b: &[f32],
        then: &mut impl Ask,
    ) {
        let at = col / SLAB * self.capacity * STRIDE + rows.start * STRIDE + col % SLAB;
        let b = &b[rows.start * I::Short::COLS..];
        tile.add_columns_then(isa, &self.elements[at..], b, rows.len(), then);
    }
}

/// An operand of a chunk and its tangent, `[x, ẋ]`, in the forms in which products read them. A tangent
/// that is not there has no columns, and what it would be multiplied with is left out.
pub struct Factor<'m> {
    pub rows: [Rows<'m>; 2],
    pub across: [Packed<'m>; 2],
    pub along: [Packed<'m>; 2],
    /// Along, each row times its decay to an end of the chunk.
    pub weighted: [Packed<'m>; 2],
    /// True if neither was found to hold a NaN or an infinity.
    pub finite: bool,
}

impl<'m> Factor<'m> {
    /// For rows of so many elements, and for panels of as many: of none in a form that nothing reads.
    pub fn new(
        parts: &mut Parts<'m>,
        cut: &Cut,
        rows: [usize; 2],
        [across, along, weighted]: [[usize; 2]; 3],
    ) -> Self {
        let rows = rows.map(|dim| Rows::new(parts, cut, dim));
        let mut panels = |panel: usize, count: usize| {
            let panels = parts.room(panel.saturating_mul(count));
            Packed { panels, panel }
        };
        let groups = cut.chunk.div_ceil(cut.cols);
        let across = across.map(|dim| panels(cut.cols.saturating_mul(dim), groups));
        let [along, weighted] = [along, weighted]
            .map(|dims| dims.map(|dim| panels(cut.chunk * cut.cols, dim.div_ceil(cut.cols))));
        Factor { rows, across, along, weighted, finite: true }
    }
}

impl Factor<'_> {
    /// Becomes the rows of an operand and of its tangent, where they are there.
    pub fn read(&mut self, sources: [Option<Tensor<'_, Ix2>>; 2]) {
        for (rows, source) in self.rows.iter_mut().zip(sources) {
            source.into_iter().for_each(|source| rows.read(source));
        }
    }

    /// Packs the first `len` rows across.
    #[inline(always)]
    pub fn pack_across<I: Isa>(&mut self, isa: I, len: usize) {
        for (rows, panels) in self.rows.iter().zip(&mut self.across) {
            rows.across(isa, len, panels);
        }
    }

    /// Packs the first `len` rows along.
    #[inline(always)]
    pub fn pack_along<I: Isa>(&mut self, isa: I, len: usize) {
        for (rows, panels) in self.rows.iter().zip(&mut self.along) {
            rows.along(isa, len, None, panels);
        }
    }

    /// Looks through the first `len` rows.
    #[inline(always)]
    pub fn look(&mut self, len: usize) {
        let [rows, tangent] = &self.rows;
        self.finite = rows.finite(len) && tangent.finite(len);
    }
}
