//! Matrix products: the formula, and faer's kernels for f64.

use super::Real;
use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use ndarray::{ArrayView2, ArrayViewMut2};

/// As many rows as faer's kernels take at once, several times over: with fewer, it chooses among
/// kernels by their number.
pub(super) const ROWS: usize = 64;

/// c_ij += Σ_k a_ik b_kj, one product after the other.
pub(super) fn plain<T: Real>(
    mut c: ArrayViewMut2<'_, T>,
    a: ArrayView2<'_, T>,
    b: ArrayView2<'_, T>,
) {
    for (mut c, a) in c.rows_mut().into_iter().zip(a.rows()) {
        for (c, b) in c.iter_mut().zip(b.columns()) {
            for (&a, &b) in a.iter().zip(b) {
                *c += a * b;
            }
        }
    }
}

/// The same in an order that depends on the three extents (and on the machine) alone: on one
/// thread.
pub(super) fn blocked(
    mut c: ArrayViewMut2<'_, f64>,
    a: ArrayView2<'_, f64>,
    b: ArrayView2<'_, f64>,
) {
    let (rows, columns) = c.dim();
    let fit = a.nrows() == rows && b.ncols() == columns && a.ncols() == b.nrows();
    match (c.as_slice_mut(), matrix(a), matrix(b)) {
        (Some(c), Some(a), Some(b)) if fit => {
            let c = MatMut::from_row_major_slice_mut(c, rows, columns);
            matmul(c, Accum::Add, a, b, 1.0, Par::Seq);
        }
        _ => plain(c, a, b),
    }
}

/// The matrix where it lies, by rows or by columns.
fn matrix(x: ArrayView2<'_, f64>) -> Option<MatRef<'_, f64>> {
    let (rows, columns) = x.dim();
    let by_rows = x.to_slice().map(|x| MatRef::from_row_major_slice(x, rows, columns));
    by_rows.or_else(|| {
        let turned = x.reversed_axes().to_slice()?;
        Some(MatRef::from_column_major_slice(turned, rows, columns))
    })
}
