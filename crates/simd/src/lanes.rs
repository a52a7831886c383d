//! Registers of f32, one file per instruction set.
//!
//! A token ([`Isa`]) proves that its instruction set is present, because only [`crate::Level`]
//! hands it out; a register ([`Lanes`]) is made from a token and carries the proof on. So every
//! operation on them is safe, and the `unsafe` of this crate stays in this folder.
//!
//! Every method is `#[inline(always)]`: an operation that is not inlined into the gate of its
//! instruction set would be a call per register. `tests/codegen.rs` watches over that.

#[cfg(target_arch = "x86_64")]
pub mod amx;
#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "x86_64")]
pub mod avx512bf16;
pub mod matrix;
#[cfg(target_arch = "x86_64")]
pub mod multiplier;
pub mod pairs;
pub mod portable;
pub mod prefetch;
pub mod product;
#[cfg(target_arch = "x86_64")]
mod x86;

use prefetch::Ask;
use std::ops::{Add, Div, Mul, Sub};

/// An instruction set, proven present.
pub trait Isa: Copy + Send + Sync + 'static {
    /// One register of f32.
    type F32: Lanes<Isa = Self>;
    /// The block of registers in which a tile of a product is summed.
    type Tile: Tile<Self>;
    /// One of fewer rows, for results that have few: its last block of rows is less often filled up.
    type Short: Tile<Self>;
}

/// One register of f32.
pub trait Lanes:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// The instruction set that it belongs to.
    type Isa: Isa<F32 = Self>;
    /// Its number of elements.
    const N: usize;

    /// Every element is `x`.
    fn splat(isa: Self::Isa, x: f32) -> Self;

    /// The first [`Lanes::N`] elements of `x`, which must have as many.
    fn load(isa: Self::Isa, x: &[f32]) -> Self;

    /// Writes the first [`Lanes::N`] elements of `x`, which must have as many.
    fn store(self, x: &mut [f32]);

    /// Loads without a check.
    ///
    /// # Safety
    /// [`Lanes::N`] elements must be readable at `x`.
    unsafe fn load_at(isa: Self::Isa, x: *const f32) -> Self;

    /// self · b + c, rounded once where the instruction set can.
    fn mul_add(self, b: Self, c: Self) -> Self;

    /// True if [`Lanes::mul_add`] and [`Lanes::mul_sub`] round once.
    const FUSES: bool;

    /// The larger of each pair; `b` where either is NaN.
    fn max(self, b: Self) -> Self;

    /// self · b − c, rounded once where the instruction set can.
    fn mul_sub(self, b: Self, c: Self) -> Self;

    /// True if [`Lanes::mul_pow2`] takes any n ≤ 127, and gives 0 for n ≤ −127 whatever self is, be it NaN.
    const FLUSHES: bool;

    /// self · 2ⁿ for integral n in [−127, 127], and 0 for n = −127; NaN for an n that is NaN.
    fn mul_pow2(self, n: Self) -> Self;

    /// `yes` where self < limit, else `no` (also where either is NaN).
    fn select_less(self, limit: Self, yes: Self, no: Self) -> Self;

    /// The largest element, if none is NaN.
    fn reduce_max(self) -> f32;

    /// The sum of the elements, halves first.
    fn reduce_add(self) -> f32;
}

/// A block of registers: [`Tile::ROWS`] rows of [`Tile::COLS`] f32, with the products that sum
/// into it. A constant layout of every operand keeps the addresses of the inner loop immediate.
pub trait Tile<I: Isa>: Copy {
    /// Its rows.
    const ROWS: usize;
    /// Its columns.
    const COLS: usize;

    /// All zero.
    fn zero(isa: I) -> Self;

    /// Reads rows that lie `stride` apart.
    fn load(isa: I, c: &[f32], stride: usize) -> Self;

    /// Writes rows that lie `stride` apart.
    fn store(self, c: &mut [f32], stride: usize);

    /// += A · B with A a packed panel `[depth][ROWS]` and B a packed panel `[depth][COLS]`.
    fn add_panel(&mut self, isa: I, a: &[f32], b: &[f32], depth: usize);

    /// += A · B with A the first ROWS rows of a matrix with row stride [`crate::tile::STRIDE`].
    #[inline(always)]
    fn add_rows(&mut self, isa: I, a: &[f32], b: &[f32], depth: usize) {
        self.add_rows_then(isa, a, b, depth, &mut ());
    }

    /// The same; meanwhile it asks for what will be read then.
    fn add_rows_then(&mut self, isa: I, a: &[f32], b: &[f32], depth: usize, then: &mut impl Ask);

    /// += Aᵀ · B with A the first `depth` rows and ROWS columns of a matrix with row stride
    /// [`crate::tile::STRIDE`].
    #[inline(always)]
    fn add_columns(&mut self, isa: I, a: &[f32], b: &[f32], depth: usize) {
        self.add_columns_then(isa, a, b, depth, &mut ());
    }

    /// The same; meanwhile it asks for what will be read then.
    #[inline(always)]
    fn add_columns_then(
        &mut self,
        isa: I,
        a: &[f32],
        b: &[f32],
        depth: usize,
        then: &mut impl Ask,
    ) {
        self.add_columns_apart(isa, a, (b, Self::COLS), depth, then);
    }

    /// As [`Tile::add_rows_then`], with row stride [`crate::tile::BAND`].
    fn add_band_rows(&mut self, isa: I, a: &[f32], b: &[f32], depth: usize, then: &mut impl Ask);

    /// As [`Tile::add_columns_then`], with B `depth` rows that lie so far apart.
    fn add_columns_apart(
        &mut self,
        isa: I,
        a: &[f32],
        b: (&[f32], usize),
        depth: usize,
        then: &mut impl Ask,
    );

    /// Replaces every register by a function of it.
    fn map(self, f: impl FnMut(I::F32) -> I::F32) -> Self;

    /// Row r times `factors[r]`; a row whose factor is 0 becomes 0, whatever it holds.
    fn scale_rows(self, isa: I, factors: &[f32]) -> Self;

    /// Row r plus the first COLS elements of what `rows` has for it.
    fn raise<'a>(self, isa: I, rows: impl Fn(usize) -> &'a [f32]) -> Self;

    /// The larger of `m[r]` and the registers of row r, for every row.
    fn row_max(&self, m: &mut [I::F32]);
}

/// A computation that returns a `T`, written once for every instruction set. `run` is
/// `#[inline(always)]`, always.
pub trait Kernel<T = ()> {
    /// Runs inside the gate of `isa`.
    fn run<I: Isa>(self, isa: I) -> T;
}

/// Halves an array of lanes until one is left, with `f`: the order of every horizontal reduction.
#[inline(always)]
pub(crate) fn halve<const N: usize>(mut x: [f32; N], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = N / 2;
    while width > 0 {
        for lane in 0..width {
            x[lane] = f(x[lane], x[lane + width]);
        }
        width /= 2;
    }
    x[0]
}

#[cfg(any(test, feature = "emulation"))]
pub mod emulation;
#[cfg(test)]
mod tests;
