//! Packed panels: what the inner loop reads lies side by side, in f32, padded with zeros.
//!
//! A matrix of `len` rows is packed *across* (groups of rows, transposed: `[len/width][dim][width]`)
//! where its rows are summed against, and *along* (groups of columns: `[dim/width][len][width]`)
//! where its rows are what is summed. Rows that hold a NaN or an infinity are noted: only tiles
//! that touch such rows need more care than to multiply by zero.

use crate::aligned::Aligned;
use crate::element::Tensor;
use etalon_problem::Error;
use ndarray::Ix2;
use rayon::prelude::*;
use std::ops::{Deref, Range};
use wide::f32x4;

/// Elements that one job packs, at least: enough that handing it out costs nothing beside.
pub const JOB: usize = 1 << 15;

/// All by the thread that asks: a task that waited for jobs might be made to begin another.
pub const ONE_JOB: usize = usize::MAX;

/// A packed matrix, in memory `M`.
#[derive(Debug, Default)]
pub struct Packed<M = Aligned> {
    /// The panels.
    pub panels: M,
    /// Elements of one panel.
    pub panel: usize,
}

impl Packed {
    /// Memory for `len` elements.
    pub fn with_capacity(len: usize) -> Result<Self, Error> {
        Ok(Packed { panels: Aligned::zeros(len, "packed operands")?, panel: 0 })
    }
}

impl<M: Deref<Target = [f32]>> Packed<M> {
    /// The panels from number `first` on.
    #[inline(always)]
    pub fn from(&self, first: usize) -> &[f32] {
        &self.panels[first * self.panel..]
    }
}

/// Which rows hold a NaN or an infinity; `None` if no row does.
pub type NonFinite = Option<Vec<bool>>;

/// Rows that are looked through at a time: the element type is then asked for seldom.
pub const BLOCK: usize = 8;

/// A row-wise source for packing.
pub struct Source<'a> {
    /// The rows.
    pub rows: Tensor<'a, Ix2>,
    /// Rows to be read as zeros, if any: those that see no key.
    pub masked: Option<&'a [bool]>,
    /// Elements that a job packs, at least: [`JOB`], or [`ONE_JOB`] within a task.
    pub job: usize,
}

impl Source<'_> {
    /// Some columns of some rows in f32, into rows that begin `stride` apart.
    fn read(&self, rows: Range<usize>, cols: Range<usize>, into: &mut [f32], stride: usize) {
        self.rows.read_rows(rows.clone(), cols.clone(), into, stride);
        let Some(masked) = self.masked else { return };
        for (row, &masked) in into.chunks_mut(stride.max(1)).zip(&masked[rows]) {
            if masked {
                row[..cols.len()].fill(0.0);
            }
        }
    }

    fn dim(&self) -> (usize, usize) {
        (self.rows.shape()[0], self.rows.shape()[1])
    }

    /// Groups of `width` rows, transposed.
    pub fn across_into(&self, width: usize, packed: &mut Packed) {
        let (len, dim) = self.dim();
        let panel = width * dim;
        packed.panel = panel;
        packed.panels.resize(len.div_ceil(width) * panel);
        if panel == 0 {
            return;
        }
        let pack = |rows: &mut Vec<f32>, (group, panel): (usize, &mut [f32])| {
            let here = group * width..len.min((group + 1) * width);
            rows[here.len() * dim..].fill(0.0);
            self.read(here, 0..dim, rows, dim);
            transpose(rows, dim, dim, panel, width);
        };
        let panels = packed.panels.par_chunks_exact_mut(panel).enumerate();
        panels.with_min_len(self.job.div_ceil(panel)).for_each_init(|| vec![0.0; panel], pack);
    }

    /// Groups of `width` columns, row by row.
    pub fn along_into(&self, width: usize, packed: &mut Packed) {
        let (len, dim) = self.dim();
        packed.panel = len * width;
        packed.panels.resize(packed.panel * dim.div_ceil(width));
        if packed.panel == 0 {
            return;
        }
        let rows = self.job.div_ceil(width).min(len);
        let panels = packed.panels.par_chunks_exact_mut(packed.panel).enumerate();
        let least = self.job.div_ceil(packed.panel);
        panels.with_min_len(least).for_each(|(group, panel)| {
            let cols = group * width..dim.min((group + 1) * width);
            panel.par_chunks_mut(rows * width).enumerate().for_each(|(job, panel)| {
                let here = job * rows..job * rows + panel.len() / width;
                self.read(here, cols.clone(), panel, width);
                if cols.len() < width {
                    panel.chunks_exact_mut(width).for_each(|row| row[cols.len()..].fill(0.0));
                }
            });
        });
    }

    /// Which rows hold a NaN or an infinity.
    pub fn non_finite(&self) -> NonFinite {
        let (len, dim) = self.dim();
        let bad = |row: &[f32]| {
            // As integers, and without an early exit: the whole row in one sweep of the vector unit.
            let largest =
                row.iter().fold(0, |largest, x| largest.max(x.to_bits() as i32 & i32::MAX));
            largest >= f32::INFINITY.to_bits() as i32
        };
        let block = |rows: &mut Vec<f32>, block: usize| {
            let here = block * BLOCK..len.min((block + 1) * BLOCK);
            let rows = &mut rows[..here.len() * dim];
            self.read(here, 0..dim, rows, dim);
            bad(rows)
        };
        let blocks = (0..len.div_ceil(BLOCK)).into_par_iter();
        let blocks = blocks.with_min_len(self.job.div_ceil((BLOCK * dim).max(1)));
        if !blocks.map_init(|| vec![0.0; BLOCK * dim], block).any(|bad| bad) {
            return None;
        }
        let mut row = vec![0.0; dim];
        let bad = |i| {
            self.read(i..i + 1, 0..dim, &mut row, dim);
            bad(&row)
        };
        Some((0..len).map(bad).collect())
    }
}

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

/// Whether any row of the range is noted.
pub fn touches(flags: &NonFinite, mut rows: Range<usize>) -> bool {
    flags.as_ref().is_some_and(|flags| rows.any(|i| flags[i]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array2, ArrayView2};

    /// 5 rows of 3: neither a multiple of the width 2.
    fn matrix() -> Array2<f32> {
        Array2::from_shape_fn((5, 3), |(i, d)| (10 * i + d) as f32)
    }

    fn across(rows: ArrayView2<'_, f32>, width: usize) -> Packed {
        let mut packed = Packed::with_capacity(100).unwrap();
        Source { rows: rows.into(), masked: None, job: 1 }.across_into(width, &mut packed);
        packed
    }

    #[test]
    fn across_transposes_groups_of_rows_and_pads() {
        let matrix = matrix();
        let packed = across(matrix.view(), 2);
        assert_eq!(packed.from(0)[..6], [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
        assert_eq!(packed.from(2), [40.0, 0.0, 41.0, 0.0, 42.0, 0.0]);
    }

    #[test]
    fn along_groups_columns_and_pads() {
        let matrix = matrix();
        let mut packed = Packed::with_capacity(3 * 2 * 5).unwrap();
        Source { rows: matrix.view().into(), masked: None, job: 1 }.along_into(2, &mut packed);
        assert_eq!(packed.from(0)[..4], [0.0, 1.0, 10.0, 11.0]);
        assert_eq!(packed.from(1), [2.0, 0.0, 12.0, 0.0, 22.0, 0.0, 32.0, 0.0, 42.0, 0.0]);
    }

    #[test]
    fn any_strides_pack_alike() {
        let wide = Array2::from_shape_fn((3, 5), |(d, i)| (10 * i + d) as f32);
        let (plain, strided) = (matrix(), wide.t());
        assert_eq!(across(plain.view(), 4).panels.to_vec(), across(strided, 4).panels.to_vec());
    }

    #[test]
    fn non_finite_rows_are_noted_unless_masked() {
        let mut matrix = matrix();
        matrix[[1, 2]] = f32::NAN;
        matrix[[3, 0]] = f32::INFINITY;
        let rows = matrix.view();
        let flags = Source { rows: rows.into(), masked: None, job: 1 }.non_finite();
        assert_eq!(flags, Some(vec![false, true, false, true, false]));
        assert!(touches(&flags, 2..4) && !touches(&flags, 2..3));
        let masked = [false, true, false, true, false];
        assert_eq!(Source { rows: rows.into(), masked: Some(&masked), job: 1 }.non_finite(), None);
    }
}
