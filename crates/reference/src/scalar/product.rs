//! Matrix products: the formula, and ndarray's kernels for f64.

use super::Real;
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};

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

/// The same on one thread, in an order that depends on k (and on the machine) alone: how an element
/// is summed depends neither on how many rows and columns there are nor on where it lies.
pub(super) fn blocked(
    mut c: ArrayViewMut2<'_, f64>,
    a: ArrayView2<'_, f64>,
    b: ArrayView2<'_, f64>,
) {
    let fit = a.nrows() == c.nrows() && b.ncols() == c.ncols() && a.ncols() == b.nrows();
    if fit {
        general_mat_mul(1.0, &a, &b, 1.0, &mut c);
    } else {
        plain(c, a, b);
    }
}
