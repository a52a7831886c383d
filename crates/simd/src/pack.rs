//! Packed panels: what the inner loop reads lies side by side, in f32, padded with zeros.
//!
//! A matrix of `len` rows is packed *across* (groups of rows, transposed: `[len/width][dim][width]`)
//! where its rows are summed against, and *along* (groups of columns: `[dim/width][len][width]`)
//! where its rows are what is summed. Rows that hold a NaN or an infinity are noted: only tiles
//! that touch such rows need more care than to multiply by zero.

use crate::Element;
use crate::aligned::Aligned;
use etalon_problem::Error;
use ndarray::{ArrayView1, ArrayView2};
use std::ops::Range;
use wide::f32x4;

/// A packed matrix.
#[derive(Debug, Default)]
pub struct Packed {
    /// The panels.
    pub panels: Aligned,
    /// Elements of one panel.
    pub panel: usize,
}

impl Packed {
    /// Memory for `len` rows of `dim` elements, across in panels of `width` rows.
    pub fn room_across(len: usize, dim: usize, width: usize) -> Result<Self, Error> {
        let panels = Aligned::reserve(len.next_multiple_of(width).saturating_mul(dim), "packing")?;
        Ok(Packed { panels, panel: dim * width })
    }

    /// Memory for `len` rows of `dim` elements, along in panels of `width` columns.
    pub fn room_along(len: usize, dim: usize, width: usize) -> Result<Self, Error> {
        let panels = Aligned::reserve(len.saturating_mul(dim.next_multiple_of(width)), "packing")?;
        Ok(Packed { panels, panel: len * width })
    }

    /// The panels from number `first` on.
    #[inline(always)]
    pub fn from(&self, first: usize) -> &[f32] {
        &self.panels[first * self.panel..]
    }
}

/// Which rows hold a NaN or an infinity; `None` if no row does.
pub type NonFinite = Option<Vec<bool>>;

/// A row-wise source for packing: rows marked `dead` read as zeros.
pub struct Source<'a, T> {
    /// The rows.
    pub rows: ArrayView2<'a, T>,
    /// Rows to be read as zeros, if any.
    pub dead: Option<&'a [bool]>,
}

impl<T: Element> Source<'_, T> {
    /// Row `i` in f32.
    fn read(&self, i: usize, row: &mut [f32]) {
        if self.dead.is_some_and(|dead| dead[i]) {
            row.fill(0.0);
        } else {
            read_row(self.rows.row(i), row);
        }
    }

    /// Groups of `width` rows, transposed.
    pub fn across(&self, width: usize) -> Result<Packed, Error> {
        let (len, dim) = self.rows.dim();
        let mut packed = Packed::room_across(len, dim, width)?;
        self.across_into(width, &mut packed.panels);
        Ok(packed)
    }

    /// As [`Source::across`], into memory that is used again.
    pub fn across_into(&self, width: usize, panels: &mut Aligned) {
        let (len, dim) = self.rows.dim();
        panels.resize(len.next_multiple_of(width) * dim);
        let mut rows = vec![0.0; width * dim];
        for (group, panel) in panels.chunks_exact_mut((width * dim).max(1)).enumerate() {
            let start = group * width;
            let (here, padding) = rows.split_at_mut(width.min(len - start) * dim);
            for (r, row) in here.chunks_exact_mut(dim).enumerate() {
                self.read(start + r, row);
            }
            padding.fill(0.0);
            transpose(&rows, dim, panel, width);
        }
    }

    /// Groups of `width` columns, row by row.
    pub fn along(&self, width: usize) -> Result<Packed, Error> {
        let (len, dim) = self.rows.dim();
        let mut packed = Packed::room_along(len, dim, width)?;
        self.along_into(width, &mut packed);
        Ok(packed)
    }

    /// As [`Source::along`], into memory that is used again.
    pub fn along_into(&self, width: usize, packed: &mut Packed) {
        let (len, dim) = self.rows.dim();
        packed.panel = len * width;
        packed.panels.resize(packed.panel * dim.div_ceil(width));
        let mut row = vec![0.0; dim.next_multiple_of(width)];
        for i in 0..len {
            self.read(i, &mut row[..dim]);
            for (group, columns) in row.chunks_exact(width).enumerate() {
                packed.panels[(group * len + i) * width..][..width].copy_from_slice(columns);
            }
        }
    }

    /// Which rows hold a NaN or an infinity.
    pub fn non_finite(&self) -> NonFinite {
        let (len, dim) = self.rows.dim();
        let mut row = vec![0.0f32; dim];
        let mut flags: NonFinite = None;
        for i in 0..len {
            self.read(i, &mut row);
            // As integers, and without an early exit: the whole row in one sweep of the vector unit.
            let largest =
                row.iter().fold(0, |largest, x| largest.max(x.to_bits() as i32 & i32::MAX));
            if largest >= f32::INFINITY.to_bits() as i32 {
                flags.get_or_insert_with(|| vec![false; len])[i] = true;
            }
        }
        flags
    }
}

/// A row in f32.
pub fn read_row<T: Element>(source: ArrayView1<'_, T>, row: &mut [f32]) {
    match source.as_slice() {
        Some(source) => T::read(source, row),
        None => row.iter_mut().zip(source).for_each(|(x, &s)| *x = s.to_f32()),
    }
}

/// `columns[d · width + r]` = `rows[r · dim + d]`, for `width` rows of `dim`: squares of four through
/// registers, what is left one by one.
fn transpose(rows: &[f32], dim: usize, columns: &mut [f32], width: usize) {
    let (whole_dim, whole_width) = (dim / 4 * 4, width / 4 * 4);
    for d in (0..whole_dim).step_by(4) {
        for r in (0..whole_width).step_by(4) {
            let row = |i: usize| {
                let x = &rows[(r + i) * dim + d..][..4];
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
            columns[d * width + r] = rows[r * dim + d];
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
    use ndarray::Array2;

    /// 5 rows of 3: neither a multiple of the width 2.
    fn matrix() -> Array2<f32> {
        Array2::from_shape_fn((5, 3), |(i, d)| (10 * i + d) as f32)
    }

    #[test]
    fn across_transposes_groups_of_rows_and_pads() {
        let matrix = matrix();
        let packed = Source { rows: matrix.view(), dead: None }.across(2).unwrap();
        assert_eq!(packed.from(0)[..6], [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
        assert_eq!(packed.from(2), [40.0, 0.0, 41.0, 0.0, 42.0, 0.0]);
    }

    #[test]
    fn along_groups_columns_and_pads() {
        let matrix = matrix();
        let packed = Source { rows: matrix.view(), dead: None }.along(2).unwrap();
        assert_eq!(packed.from(0)[..4], [0.0, 1.0, 10.0, 11.0]);
        assert_eq!(packed.from(1), [2.0, 0.0, 12.0, 0.0, 22.0, 0.0, 32.0, 0.0, 42.0, 0.0]);
    }

    #[test]
    fn any_strides_pack_alike() {
        let wide = Array2::from_shape_fn((3, 5), |(d, i)| (10 * i + d) as f32);
        let (plain, strided) = (matrix(), wide.t());
        let pack = |rows| Source { rows, dead: None }.across(4).unwrap().panels.to_vec();
        assert_eq!(pack(plain.view()), pack(strided));
    }

    #[test]
    fn non_finite_rows_are_noted_unless_dead() {
        let mut matrix = matrix();
        matrix[[1, 2]] = f32::NAN;
        matrix[[3, 0]] = f32::INFINITY;
        let rows = matrix.view();
        let flags = Source { rows, dead: None }.non_finite();
        assert_eq!(flags, Some(vec![false, true, false, true, false]));
        assert!(touches(&flags, 2..4) && !touches(&flags, 2..3));
        let dead = [false, true, false, true, false];
        assert_eq!(Source { rows, dead: Some(&dead) }.non_finite(), None);
    }
}
