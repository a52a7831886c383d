//! The one inner loop: a block of registers += A · B.

use super::prefetch::{Ask, prefetch_line};
use super::{Isa, Lanes};

/// c[r] += Σ_k a(r, k) · b[k], for MR rows of NV registers and `depth` steps k.
///
/// `a(r, k)` is `a[r·ROW + k·STEP]`: with ROW = 1 and STEP = MR it is a packed panel, with STEP = 1 the rows of a
/// matrix, with ROW = 1 its columns. `b` holds `depth` rows of NV registers, `apart` elements from one to the next.
/// `then` is what will be read afterwards.
#[inline(always)]
pub fn product<I: Isa, const MR: usize, const NV: usize, const ROW: usize, const STEP: usize>(
    isa: I,
    c: &mut [[I::F32; NV]; MR],
    a: &[f32],
    (b, apart): (&[f32], usize),
    depth: usize,
    then: &mut impl Ask,
) {
    if depth == 0 {
        return;
    }
    let width = NV * I::F32::N;
    let last = (MR - 1) * ROW;
    assert!(a.len() > last + (depth - 1) * STEP, "a panel of `a` shorter than its depth");
    let end = (depth - 1).checked_mul(apart).and_then(|last| last.checked_add(width));
    assert!(end.is_some_and(|end| end <= b.len()), "a panel of `b` shorter than its depth");
    let (a, b) = (a.as_ptr(), b.as_ptr());
    let whole = depth / UNROLLED * UNROLLED;
    for k in (0..whole).step_by(UNROLLED) {
        then.ask();
        for k in k..k + UNROLLED {
            for n in 0..NV {
                prefetch_line(b.wrapping_add((k + AHEAD) * apart + n * I::F32::N));
            }
            if STEP > MR {
                // A column: pieces of rows that lie apart, in one cache line or two.
                for r in [0, MR - 1] {
                    prefetch_line(a.wrapping_add((k + AHEAD) * STEP + r * ROW));
                }
            }
            // SAFETY: k < depth, so r·ROW + k·STEP ≤ last + (depth−1)·STEP < the length of `a`, and
            // k·apart + width ≤ (depth−1)·apart + width ≤ that of `b`, both asserted above.
            unsafe { add_step::<I, MR, NV, ROW, STEP>(isa, c, a, b.add(k * apart), k) };
        }
    }
    for k in whole..depth {
        // SAFETY: as above.
        unsafe { add_step::<I, MR, NV, ROW, STEP>(isa, c, a, b.add(k * apart), k) };
    }
}

/// Rows of `b`, and pieces of rows of `a` that is read by columns, are asked for so many steps before they are read.
const AHEAD: usize = 8;

/// Number of times that a product of this depth asks for lines that are read afterwards.
pub fn asks(depth: usize) -> usize {
    depth / UNROLLED
}

/// Steps of the loop between two counts of them, which take units that could multiply.
const UNROLLED: usize = 4;

/// c[r] += a(r, k) · b[k], of which `b` is row k.
///
/// # Safety
/// The NV registers at `b` must be readable, and r·ROW + k·STEP elements behind `a` for every r < MR.
#[inline(always)]
unsafe fn add_step<
    I: Isa,
    const MR: usize,
    const NV: usize,
    const ROW: usize,
    const STEP: usize,
>(
    isa: I,
    c: &mut [[I::F32; NV]; MR],
    a: *const f32,
    b: *const f32,
    k: usize,
) {
    let mut row = [I::F32::splat(isa, 0.0); NV];
    for (n, register) in row.iter_mut().enumerate() {
        // SAFETY: the caller vouches for NV registers.
        *register = unsafe { I::F32::load_at(isa, b.add(n * I::F32::N)) };
    }
    for (r, sums) in c.iter_mut().enumerate() {
        // SAFETY: the caller vouches for it.
        let factor = I::F32::splat(isa, unsafe { *a.add(r * ROW + k * STEP) });
        for (sum, &register) in sums.iter_mut().zip(&row) {
            *sum = factor.mul_add(register, *sum);
        }
    }
}
