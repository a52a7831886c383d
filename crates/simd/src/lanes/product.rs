//! The one inner loop: a block of registers += A · B.

use super::{Isa, Lanes};

/// c[r] += Σ_k a(r, k) · b[k], for MR rows of NV registers and `depth` steps k.
///
/// `a(r, k)` is `a[r·ROW + k·STEP]`: with ROW = 1 and STEP = MR a packed panel, with STEP = 1 the
/// rows of a matrix, with ROW = 1 its columns. `b` holds `depth` rows of NV registers, `apart` elements from
/// one to the next.
#[inline(always)]
pub fn product<I: Isa, const MR: usize, const NV: usize, const ROW: usize, const STEP: usize>(
    isa: I,
    c: &mut [[I::F32; NV]; MR],
    a: &[f32],
    b: &[f32],
    apart: usize,
    depth: usize,
) {
    if depth == 0 {
        return;
    }
    let width = NV * I::F32::N;
    assert!(a.len() > (MR - 1) * ROW + (depth - 1) * STEP, "a panel of `a` shorter than its depth");
    let end = (depth - 1).checked_mul(apart).and_then(|last| last.checked_add(width));
    assert!(end.is_some_and(|end| end <= b.len()), "a panel of `b` shorter than its depth");
    let (a, b) = (a.as_ptr(), b.as_ptr());
    for k in 0..depth {
        let mut row = [I::F32::splat(isa, 0.0); NV];
        for (n, register) in row.iter_mut().enumerate() {
            // SAFETY: k·apart + (n+1)·N ≤ (depth−1)·apart + width ≤ the length of `b`, asserted above.
            *register = unsafe { I::F32::load_at(isa, b.add(k * apart + n * I::F32::N)) };
        }
        for (r, sums) in c.iter_mut().enumerate() {
            // SAFETY: r·ROW + k·STEP ≤ (MR−1)·ROW + (depth−1)·STEP < the length of `a`.
            let factor = I::F32::splat(isa, unsafe { *a.add(r * ROW + k * STEP) });
            for (sum, &register) in sums.iter_mut().zip(&row) {
                *sum = factor.mul_add(register, *sum);
            }
        }
    }
}
