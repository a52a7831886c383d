//! Packed panels: what the inner loop reads lies side by side, in f32, padded with zeros.
//!
//! A matrix of `len` rows is packed *across* (groups of rows, transposed: `[len/width][dim][width]`)
//! where its rows are summed against, and *along* (groups of columns: `[dim/width][len][width]`)
//! where its rows are what is summed. Rows that hold a NaN or an infinity are noted: only tiles
//! that touch such rows need more care than to multiply by zero.

use crate::Element;
use crate::parallel::reserve;
use etalon_problem::Error;
use ndarray::ArrayView2;

/// A packed matrix.
#[derive(Debug, Default)]
pub struct Packed {
    /// The panels.
    pub panels: Vec<f32>,
    /// Elements of one panel.
    pub panel: usize,
}

impl Packed {
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
            return;
        }
        let source = self.rows.row(i);
        match source.as_slice() {
            Some(source) => row.iter_mut().zip(source).for_each(|(x, &s)| *x = s.to_f32()),
            None => row.iter_mut().zip(source).for_each(|(x, &s)| *x = s.to_f32()),
        }
    }

    /// Groups of `width` rows, transposed.
    pub fn across(&self, width: usize) -> Result<Packed, Error> {
        let (len, dim) = self.rows.dim();
        let mut panels = reserve(len.div_ceil(width) * dim * width, "packing")?;
        self.across_into(width, &mut panels);
        Ok(Packed { panels, panel: dim * width })
    }

    /// As [`Source::across`], into memory that is used again.
    pub fn across_into(&self, width: usize, panels: &mut Vec<f32>) {
        let (len, dim) = self.rows.dim();
        let groups = len.div_ceil(width);
        panels.clear();
        let mut row = vec![0.0; dim];
        let mut panel = vec![0.0; dim * width];
        for group in 0..groups {
            let start = group * width;
            let count = width.min(len - start);
            if count < width {
                panel.fill(0.0);
            }
            for r in 0..count {
                self.read(start + r, &mut row);
                for (column, &x) in panel.chunks_exact_mut(width).zip(&row) {
                    column[r] = x;
                }
            }
            panels.extend_from_slice(&panel);
        }
    }

    /// Groups of `width` columns, row by row.
    pub fn along(&self, width: usize) -> Result<Packed, Error> {
        let (len, dim) = self.rows.dim();
        let groups = dim.div_ceil(width);
        let mut panels = crate::parallel::zeros(groups * len * width, "packing")?;
        let mut row = vec![0.0; dim];
        for i in 0..len {
            self.read(i, &mut row);
            for (group, columns) in row.chunks(width).enumerate() {
                panels[(group * len + i) * width..][..columns.len()].copy_from_slice(columns);
            }
        }
        Ok(Packed { panels, panel: len * width })
    }

    /// Which rows hold a NaN or an infinity.
    pub fn non_finite(&self) -> NonFinite {
        let (len, dim) = self.rows.dim();
        let mut row = vec![0.0; dim];
        let mut flags: NonFinite = None;
        for i in 0..len {
            self.read(i, &mut row);
            // No early exit: the whole row in one sweep of the vector unit.
            let found = row.iter().fold(false, |found, x| found | !x.is_finite());
            if found {
                flags.get_or_insert_with(|| vec![false; len])[i] = true;
            }
        }
        flags
    }
}

/// Whether any row of the range is noted.
pub fn touches(flags: &NonFinite, mut rows: std::ops::Range<usize>) -> bool {
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
        let pack = |rows| Source { rows, dead: None }.across(4).unwrap().panels;
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
