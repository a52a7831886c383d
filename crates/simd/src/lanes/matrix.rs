//! Products of matrices of bf16 in tiles, and the instruction sets that multiply them.
//!
//! A *tile* is 16 × 16 words of two bf16 ([`super::pairs`]), a KiB without gaps. Of the left factor its rows are
//! those of the factor, and its words pairs of neighbours in a row; of the right factor its columns are those of
//! the factor, and its words pairs of neighbours in a column. So both are read as a matrix unit reads them, and a
//! product of two tiles sums over 32 elements. Sums are f32, in blocks of 32 × 32.

use super::pairs::{Pairs, word};
use super::{Isa, Lanes};
use std::hint::black_box;

/// Rows of a tile, and words of such a row.
pub const SIDE: usize = 16;

/// Words of a tile.
pub const WORDS: usize = SIDE * SIDE;

/// Rows and columns of a block of sums, and elements over which a product of two tiles sums.
pub const BLOCK: usize = 2 * SIDE;

/// An instruction set that multiplies tiles, proven present, beside its registers of f32.
pub trait Matrix: Copy {
    /// The instruction set of its registers.
    type Isa: Isa;

    /// The token of the registers.
    fn isa(self) -> Self::Isa;

    /// The words of the elements of `low` and then of `high`, rounded to the nearest even, two neighbours in each.
    /// Subnormal numbers become zeros.
    fn neighbours(self, low: F32<Self>, high: F32<Self>) -> F32<Self>;

    /// The words of each element of `even` and that of `odd` in the same place, rounded likewise.
    fn stacked(self, even: F32<Self>, odd: F32<Self>) -> F32<Self>;

    /// Two numbers whose sum is x, the first of as many digits as bf16 has: x cut off, and what is left of it, of an x
    /// that is not finite 0.
    fn split(self, x: F32<Self>) -> [F32<Self>; 2];

    /// Of registers of words, of one row and of the next, the words of an element of either in the same place: those
    /// of the first half of the elements, and of the rest.
    fn zipped(self, even: F32<Self>, odd: F32<Self>) -> [F32<Self>; 2];

    /// The even elements of words and the odd ones, in f32.
    fn halves(self, words: F32<Self>) -> [F32<Self>; 2];

    /// Transposes a tile, word by word.
    fn turn(self, from: &[f32], to: &mut [f32]);

    /// C ← A · B, or C + A · B.
    fn multiply(self, product: Product<'_>);

    /// As many products as hide their latency, on registers or tiles alone, so many times. Returns the
    /// operations, two for each element of a word.
    fn spin(self, rounds: usize) -> usize;
}

/// A register of f32 beside a matrix unit.
pub type F32<M> = <<M as Matrix>::Isa as Isa>::F32;

/// A computation with a matrix unit that returns a `T`. `run` is `#[inline(always)]`, always.
pub trait MatrixKernel<T = ()> {
    /// Runs inside the gate of `by`.
    fn run<M: Matrix>(self, by: M) -> T;
}

/// Tiles of a factor, from the first that is read.
#[derive(Clone, Copy)]
pub struct Tiles<'a> {
    pub words: &'a [f32],
    /// Tiles from one to the next along the rows of C (or its columns), and along the sum.
    pub steps: [usize; 2],
}

/// Tiles of weights, each weight one number of bf16 or the sum of two: those of every piece, of one after the other.
#[derive(Clone, Copy)]
pub struct Pieces<'a> {
    /// From the first that is read.
    pub words: &'a [f32],
    /// Words from a piece to the next.
    pub apart: usize,
    pub count: usize,
}

impl<'a> Pieces<'a> {
    /// Memory that holds as many words of each piece.
    pub fn new(words: &'a [f32], count: usize) -> Self {
        Pieces { words, apart: words.len() / count, count }
    }

    /// The same without the first words of each piece.
    #[inline(always)]
    pub fn from(self, first: usize) -> Self {
        Pieces { words: &self.words[first..], ..self }
    }

    /// The words of a piece, and those behind it.
    #[inline(always)]
    pub fn each(self) -> impl Iterator<Item = &'a [f32]> {
        (0..self.count).map(
            #[inline(always)]
            move |piece| &self.words[piece * self.apart..],
        )
    }

    /// A weight, of a word the even element or the odd one.
    #[inline(always)]
    pub fn weight(self, word: usize, odd: usize) -> f32 {
        let rest = if self.count == 1 { 0.0 } else { element(self.words[self.apart + word], odd) };
        element(self.words[word], odd) + rest
    }
}

/// Ways to make words of two registers of weights.
#[derive(Clone, Copy)]
pub enum Pairing {
    /// [`Matrix::neighbours`].
    Neighbours,
    /// [`Matrix::stacked`].
    Stacked,
}

impl Pairing {
    /// The words of two registers of weights, and with two pieces those of what is left of them.
    #[inline(always)]
    pub fn of<M: Matrix>(
        self,
        by: M,
        [x, y]: [F32<M>; 2],
        pieces: usize,
    ) -> (F32<M>, Option<F32<M>>) {
        if pieces == 1 {
            return (self.joined(by, x, y), None);
        }
        let ([x, of_x], [y, of_y]) = (by.split(x), by.split(y));
        (self.joined(by, x, y), Some(self.joined(by, of_x, of_y)))
    }

    /// Writes the words of two registers of weights into memory that holds as many of each piece.
    #[inline(always)]
    pub fn store<M: Matrix>(
        self,
        by: M,
        pair: [F32<M>; 2],
        (words, to): (&mut [f32], usize),
        pieces: usize,
    ) {
        let (first, second) = self.of(by, pair, pieces);
        first.store(&mut words[to..]);
        if let Some(second) = second {
            let apart = words.len() / 2;
            second.store(&mut words[apart + to..]);
        }
    }

    #[inline(always)]
    fn joined<M: Matrix>(self, by: M, x: F32<M>, y: F32<M>) -> F32<M> {
        match self {
            Pairing::Neighbours => by.neighbours(x, y),
            Pairing::Stacked => by.stacked(x, y),
        }
    }
}

/// A product of tiles.
pub struct Product<'a> {
    /// C, rows `stride` elements apart.
    pub c: &'a mut [f32],
    pub stride: usize,
    /// True if C begins as 0.
    pub fresh: bool,
    pub a: Tiles<'a>,
    pub b: Tiles<'a>,
    /// Tiles of A along the rows of C and of B along its columns, both even; then tiles to sum over.
    pub rows: usize,
    pub cols: usize,
    pub depth: usize,
}

impl Product<'_> {
    /// Panics unless C and both factors are as long as the product reads and writes.
    #[inline(always)]
    pub fn check(&self) {
        let Product { c, stride, a, b, rows, cols, depth, .. } = self;
        assert!(rows % 2 == 0 && cols % 2 == 0, "blocks of two tiles by two");
        if *rows == 0 || *cols == 0 {
            return;
        }
        let end = (rows * SIDE - 1).checked_mul(*stride).and_then(|x| x.checked_add(cols * SIDE));
        assert!(end.is_some_and(|end| end <= c.len()), "sums shorter than the product");
        for (tiles, count) in [(a, rows), (b, cols)] {
            let last = (count - 1) * tiles.steps[0] + depth.saturating_sub(1) * tiles.steps[1];
            assert!(
                (last + 1) * WORDS <= tiles.words.len() || *depth == 0,
                "a factor shorter than the product"
            );
        }
    }
}

/// [`Matrix::multiply`] by an instruction that multiplies registers of pairs: 8 rows and a register of each of two
/// tiles at a time, sums that fit beside the factors.
#[inline(always)]
pub fn multiply_pairs<P: Pairs>(by: P, product: Product<'_>) {
    product.check();
    let Product { c, stride, fresh, a, b, rows, cols, depth } = product;
    let (isa, lanes) = (by.isa(), <P::Isa as Isa>::F32::N);
    let zero = <P::Isa as Isa>::F32::splat(isa, 0.0);
    // Blocks by columns, then by rows; each by the registers of a line.
    let (tall, parts) = (rows * SIDE / TALL, SIDE / lanes);
    for number in 0..cols / 2 * tall {
        let (col, row) = (number / tall * 2, number % tall * TALL);
        for part in 0..parts {
            let part = part * lanes;
            let at = row * stride + col * SIDE + part;
            let mut sums = [[zero; 2]; TALL];
            if !fresh {
                for (r, sums) in sums.iter_mut().enumerate() {
                    for (n, sum) in sums.iter_mut().enumerate() {
                        *sum = <P::Isa as Isa>::F32::load(isa, &c[at + r * stride + n * SIDE..]);
                    }
                }
            }
            for k in 0..depth {
                let left = (row / SIDE * a.steps[0] + k * a.steps[1]) * WORDS + row % SIDE * SIDE;
                let left = &a.words[left..][..TALL * SIDE];
                let right = (col * b.steps[0] + k * b.steps[1]) * WORDS;
                let next = right + b.steps[0] * WORDS;
                let (right, next) = (&b.words[right..][..WORDS], &b.words[next..][..WORDS]);
                for pair in 0..SIDE {
                    let line = pair * SIDE + part;
                    let first = <P::Isa as Isa>::F32::load(isa, &right[line..]);
                    let second = <P::Isa as Isa>::F32::load(isa, &next[line..]);
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let left = <P::Isa as Isa>::F32::splat(isa, left[r * SIDE + pair]);
                        sums[0] = by.add(left, first, sums[0]);
                        sums[1] = by.add(left, second, sums[1]);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (n, sum) in sums.iter().enumerate() {
                    sum.store(&mut c[at + r * stride + n * SIDE..]);
                }
            }
        }
    }
}

/// [`Matrix::spin`] by an instruction that multiplies registers of pairs.
#[inline(always)]
pub fn spin_pairs<P: Pairs>(by: P, rounds: usize) -> usize {
    let isa = by.isa();
    let factor = <P::Isa as Isa>::F32::splat(isa, black_box(word(0x3f00, 0x3f00)));
    let mut sums = [<P::Isa as Isa>::F32::splat(isa, black_box(0.0)); SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = by.add(factor, factor, *sum);
        }
    }
    sums.into_iter().for_each(|sum| _ = black_box(sum.reduce_add()));
    4 * rounds * SUMS * <P::Isa as Isa>::F32::N
}

/// Sums of [`spin_pairs`], which hide the latency: as many as [`multiply_pairs`] has.
const SUMS: usize = 2 * TALL;

/// Rows that [`multiply_pairs`] sums at a time.
const TALL: usize = 8;

/// The bits of an f32 that bf16 has.
pub const CUT: u32 = 0xffff_0000;

/// An element of a word: the odd one, or with `odd` = 0 the even one.
#[inline(always)]
pub fn element(word: f32, odd: usize) -> f32 {
    let bits = word.to_bits();
    f32::from_bits(if odd == 0 { bits << 16 } else { bits & CUT })
}
