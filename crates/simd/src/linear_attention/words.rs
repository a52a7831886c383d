//! Operands of a chunk in tiles of bf16 ([`crate::lanes::matrix`]).
//!
//! Operands are bf16 and lie in tiles as they are. What is rounded, once: rows times their decay, which are summed
//! into a state.

use super::cut::Cut;
use crate::Level;
use crate::element::Tensor;
use crate::lanes::Lanes;
use crate::lanes::matrix::{
    BLOCK, F32, Matrix, MatrixKernel, Pairing, Pieces, Product, SIDE, Tiles, WORDS, element,
};
use crate::lanes::pairs::word;
use crate::pack::{BitRows, Form};
use crate::tile::STRIDE;
use crate::workspace::Parts;
use half::slice::HalfFloatSliceExt;
use ndarray::Ix2;
use std::ops::Range;

/// The rows of an operand in a chunk, in the forms of [`Form`] that products read. Behind rows and columns are zeros,
/// up to whole blocks.
#[derive(Default)]
pub struct Words<'m> {
    /// As the left factor, and as the right one whose rows are the columns of the product.
    pub rows: &'m mut [f32],
    pub across: &'m mut [f32],
    /// As the right factor whose rows are summed over; the same of rows times their weights, in pieces.
    pub along: &'m mut [f32],
    pub weighted: &'m mut [f32],
    /// As the left factor whose rows are summed over.
    pub columns: &'m mut [f32],
    pub dim: usize,
    pub pieces: usize,
    /// True if no element is a NaN or an infinity.
    pub finite: bool,
}

impl<'m> Words<'m> {
    /// For rows of `dim` elements: as they are, across, along, weighted and in columns where that is asked for. The
    /// last two are made of what lies along.
    pub fn new(parts: &mut Parts<'m>, cut: &Cut, dim: usize, forms: [bool; 5]) -> Self {
        let (len, pieces) = (if cut.bf16 { Form::len(cut.chunk, dim) } else { 0 }, cut.pieces);
        let lens = [len, len, len, len.saturating_mul(pieces), len];
        let mut room = |form: usize| parts.room(if forms[form] { lens[form] } else { 0 });
        let (rows, across, along, weighted, columns) =
            (room(0), room(1), room(2), room(3), room(4));
        Words { rows, across, along, weighted, columns, dim, pieces, finite: true }
    }
}

impl Words<'_> {
    /// Packs the rows of an operand in a chunk; `tokens` are those that are not 0 in columns and weighted.
    pub fn pack(
        &mut self,
        level: Level,
        source: Option<Tensor<'_, Ix2>>,
        forms: Forms<'_>,
        tokens: Range<usize>,
    ) {
        level.run_tiles(Pack { source, forms, tokens, to: self }).unwrap_or_default();
    }

    /// Weighs the rows of a tangent: times their weights and, with those of tangents of weights, plus the rows of the
    /// operand itself. Where there are no weights, nothing is added.
    pub fn weigh_tangents(
        &mut self,
        level: Level,
        value: &Words<'_>,
        [weights, of_value]: [&[f32]; 2],
        tokens: Range<usize>,
    ) {
        let weights = if self.is_absent() { &[] } else { weights };
        let rows = WeighTangents { value, weights, of_value, tokens, to: self };
        level.run_tiles(rows).unwrap_or_default();
    }

    /// True if it has no rows: the tangent of a constant operand, which adds nothing to a product.
    #[inline(always)]
    pub fn is_absent(&self) -> bool {
        self.rows.is_empty()
    }

    /// Blocks of columns.
    #[inline(always)]
    pub fn depth(&self) -> usize {
        self.dim.div_ceil(BLOCK)
    }

    /// Tiles of columns.
    #[inline(always)]
    pub fn tiles(&self) -> usize {
        2 * self.depth()
    }

    /// The left factor: the rows of block `block`.
    #[inline(always)]
    pub fn left(&self, block: usize) -> Tiles<'_> {
        Tiles { words: &self.rows[block * self.tiles() * WORDS..], steps: [self.depth(), 1] }
    }

    /// The right factor of products with the rows.
    #[inline(always)]
    pub fn right(&self) -> Tiles<'_> {
        Tiles { words: self.across, steps: [self.depth(), 1] }
    }

    /// The right factor of sums over the rows from block `block` on.
    #[inline(always)]
    pub fn summed(&self, block: usize) -> Tiles<'_> {
        Tiles { words: &self.along[block * self.tiles() * WORDS..], steps: [1, self.tiles()] }
    }

    /// The rows along, or the same times their weights.
    #[inline(always)]
    pub fn summed_rows(&self, plain: bool) -> Pieces<'_> {
        match plain {
            true => Pieces::new(self.along, 1),
            false => Pieces::new(self.weighted, self.pieces),
        }
    }

    /// C (+)= the rows of block `block` times those of another operand, of the first `cols`; rows [`STRIDE`] apart.
    #[inline(always)]
    pub fn scores<M: Matrix>(
        &self,
        by: M,
        block: usize,
        other: &Words<'_>,
        (c, cols): (&mut [f32], usize),
        fresh: bool,
    ) {
        let (a, b, depth) = (self.left(block), other.right(), self.depth());
        let cols = cols / SIDE;
        by.multiply(Product { c, stride: STRIDE, fresh, a, b, rows: 2, cols, depth });
    }

    /// Element `c` of row `i`.
    #[inline(always)]
    pub fn element(&self, i: usize, c: usize) -> f32 {
        let tile = i / BLOCK * self.tiles() + c / SIDE;
        element(self.along[tile * WORDS + i % BLOCK / 2 * SIDE + c % SIDE], i % 2)
    }

    /// sum += factor · row `i`: of pairs that are seen, where an operand is not finite.
    #[inline(always)]
    pub fn add(&self, factor: f32, i: usize, sum: &mut [f32]) {
        for (c, sum) in sum.iter_mut().enumerate().take(self.dim) {
            *sum += factor * self.element(i, c);
        }
    }

    /// x · row `i` and y · the next one, of which `i` is even.
    #[inline(always)]
    pub fn dots<M: Matrix>(&self, by: M, i: usize, [x, y]: [&[f32]; 2]) -> [f32; 2] {
        let (isa, lanes, zero) = (by.isa(), F32::<M>::N, F32::<M>::splat(by.isa(), 0.0));
        let line = i / BLOCK * self.tiles() * WORDS + i % BLOCK / 2 * SIDE;
        let (mut sums, mut rest) = ([zero; 2], [0.0; 2]);
        let whole = self.dim / lanes * lanes;
        for c in (0..whole).step_by(lanes) {
            let words = F32::<M>::load(isa, &self.along[line + c / SIDE * WORDS + c % SIDE..]);
            let [even, odd] = by.halves(words);
            sums[0] = even.mul_add(F32::<M>::load(isa, &x[c..]), sums[0]);
            sums[1] = odd.mul_add(F32::<M>::load(isa, &y[c..]), sums[1]);
        }
        for c in whole..self.dim {
            rest[0] += self.element(i, c) * x[c];
            rest[1] += self.element(i + 1, c) * y[c];
        }
        [sums[0].reduce_add() + rest[0], sums[1].reduce_add() + rest[1]]
    }

    /// Becomes rows, and 0 behind them.
    #[inline(always)]
    fn read(&mut self, source: &BitRows<'_>, len: usize) {
        let (dim, depth, mut carried) = (self.dim, self.depth(), [0; BLOCK]);
        for i in 0..len.next_multiple_of(BLOCK) {
            let at = i / SIDE * depth * WORDS + i % SIDE * SIDE;
            let lines = self.rows[at..].chunks_mut(WORDS).take(depth);
            let mut lines = lines.map(
                #[inline(always)]
                |tile| &mut tile[..SIDE],
            );
            if i >= len {
                lines.for_each(|line| line.fill(0.0));
                continue;
            }
            let row = source.row(i).map(HalfFloatSliceExt::reinterpret_cast);
            let mut first = 0;
            if let Some(row) = row {
                for (bits, line) in row.as_chunks::<BLOCK>().0.iter().zip(&mut lines) {
                    write_line(bits, line, &mut carried);
                    first += BLOCK;
                }
            }
            for (line, first) in lines.zip((first..dim).step_by(BLOCK)) {
                let mut bits = [0; BLOCK];
                source.read_bits(i, first..dim.min(first + BLOCK), &mut bits);
                write_line(&bits, line, &mut carried);
            }
        }
        self.finite = carried.iter().all(|carried| carried & 0x8000 == 0);
    }
}

/// Words of neighbours. Of `carried`, which all lines have in common, a highest bit is set if an element is not
/// finite.
#[inline(always)]
fn write_line(bits: &[u16; BLOCK], line: &mut [f32], carried: &mut [u16; BLOCK]) {
    match cfg!(target_endian = "little") {
        true => bytemuck::cast_slice_mut(line).copy_from_slice(bits),
        false => {
            for (to, [even, odd]) in line.iter_mut().zip(bits.as_chunks::<2>().0) {
                *to = word((*even).into(), (*odd).into());
            }
        }
    }
    for (carried, x) in carried.iter_mut().zip(bits) {
        // An exponent of ones carries into the sign.
        *carried |= (x & 0x7fff) + 0x80;
    }
}

/// Forms in which an operand is packed beside its rows.
#[derive(Clone, Copy, Default)]
pub struct Forms<'a> {
    pub across: bool,
    pub along: bool,
    pub columns: bool,
    /// Weights of the rows.
    pub weights: Option<&'a [f32]>,
}

/// [`Words::pack`].
struct Pack<'a, 'm> {
    source: Option<Tensor<'a, Ix2>>,
    forms: Forms<'a>,
    tokens: Range<usize>,
    to: &'a mut Words<'m>,
}

impl MatrixKernel for Pack<'_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Pack { source, forms, tokens, to } = self;
        let Some(source) = source.as_ref().and_then(Tensor::bf16) else { return };
        let (len, depth, tiles) = (source.nrows(), to.depth(), to.tiles());
        to.read(&BitRows::new(source), len);
        let Words { rows, across, along, .. } = &mut *to;
        for block in 0..len.div_ceil(BLOCK) {
            for col in 0..depth {
                let at = [0, 1].map(|half| ((2 * block + half) * depth + col) * WORDS);
                if forms.across {
                    at.into_iter().for_each(
                        #[inline(always)]
                        |at| by.turn(&rows[at..][..WORDS], &mut across[at..][..WORDS]),
                    );
                }
                if forms.along {
                    zip_rows(by, rows, at, &mut along[(block * tiles + 2 * col) * WORDS..]);
                }
            }
        }
        for tile in 0..len.div_ceil(BLOCK) * tiles {
            let (first, at) = (tile / tiles * BLOCK, tile * WORDS);
            if forms.columns {
                to.turn_columns(by, first, at, &tokens);
            }
            if let Some(weights) = forms.weights {
                let Words { along, weighted, pieces, .. } = &mut *to;
                weigh(by, (first, at), &tokens, &[(&**along, weights)], (weighted, *pieces));
            }
        }
    }
}

/// Two tiles along, of 32 rows and columns, from tiles of their upper and lower rows.
#[inline(always)]
fn zip_rows<M: Matrix>(by: M, rows: &[f32], at: [usize; 2], along: &mut [f32]) {
    let (isa, lanes) = (by.isa(), F32::<M>::N);
    for pair in 0..SIDE {
        let line = &rows[at[2 * pair / SIDE] + 2 * pair % SIDE * SIDE..][..2 * SIDE];
        for part in (0..SIDE).step_by(lanes) {
            let even = F32::<M>::load(isa, &line[part..]);
            let odd = F32::<M>::load(isa, &line[SIDE + part..]);
            let zipped = by.zipped(even, odd);
            for n in 0..2 {
                let c = 2 * part + n * lanes;
                zipped[n].store(&mut along[c / SIDE * WORDS + pair * SIDE + c % SIDE..]);
            }
        }
    }
}

impl Words<'_> {
    /// The columns of a tile along whose first row is `first`.
    #[inline(always)]
    fn turn_columns<M: Matrix>(&mut self, by: M, first: usize, at: usize, tokens: &Range<usize>) {
        let (from, to) = (&self.along[at..][..WORDS], &mut self.columns[at..][..WORDS]);
        if tokens.start <= first && first + BLOCK <= tokens.end {
            return by.turn(from, to);
        }
        let mut seen = [0.0; WORDS];
        for (at, (seen, from)) in seen.iter_mut().zip(from).enumerate() {
            let row = first + at / SIDE * 2;
            let bits = [0, 1].map(|odd| match tokens.contains(&(row + odd)) {
                true => element(*from, odd).to_bits() >> 16,
                false => 0,
            });
            *seen = word(bits[0], bits[1]);
        }
        by.turn(&seen, to);
    }
}

/// [`Words::weigh_tangents`].
struct WeighTangents<'a, 'v, 'm> {
    value: &'a Words<'v>,
    weights: &'a [f32],
    of_value: &'a [f32],
    tokens: Range<usize>,
    to: &'a mut Words<'m>,
}

impl MatrixKernel for WeighTangents<'_, '_, '_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let WeighTangents { value, weights, of_value, tokens, to } = self;
        let tiles = to.tiles();
        let Words { along, weighted, pieces, .. } = to;
        let terms = [(&**along, weights), (&*value.along, of_value)];
        for tile in 0..tokens.end.div_ceil(BLOCK) * tiles {
            let at = (tile / tiles * BLOCK, tile * WORDS);
            weigh(by, at, &tokens, &terms, (&mut *weighted, *pieces));
        }
    }
}

/// Of a tile along whose first row is `first`, the sum of rows times their weights, rounded. A term without weights is
/// absent.
#[inline(always)]
fn weigh<M: Matrix>(
    by: M,
    (first, at): (usize, usize),
    tokens: &Range<usize>,
    terms: &[(&[f32], &[f32])],
    (to, pieces): (&mut [f32], usize),
) {
    let (isa, lanes, zero) = (by.isa(), F32::<M>::N, F32::<M>::splat(by.isa(), 0.0));
    for pair in 0..SIDE {
        let row = first + 2 * pair;
        for part in (0..SIDE).step_by(lanes) {
            let line = at + pair * SIDE + part;
            let mut sums = [zero; 2];
            for (along, weights) in terms.iter().filter(|(_, weights)| !weights.is_empty()) {
                let halves = by.halves(F32::<M>::load(isa, &along[line..]));
                for n in 0..2 {
                    if tokens.contains(&(row + n)) {
                        let weight = F32::<M>::splat(isa, weights[row + n]);
                        sums[n] = halves[n].mul_add(weight, sums[n]);
                    }
                }
            }
            Pairing::Stacked.store(by, sums, (to, line), pieces);
        }
    }
}
