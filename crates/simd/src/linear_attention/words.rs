//! Operands and states of a chunk in tiles of bf16 ([`crate::lanes::matrix`]).
//!
//! Operands are bf16 and lie in tiles as they are. What is rounded, each once: rows times their decay, which are
//! summed into a state, and the state where rows read it. States and their sums are f32.

use super::cut::Cut;
use super::decays::Decays;
use super::state::Shape;
use crate::Level;
use crate::element::Tensor;
use crate::lanes::matrix::{
    BLOCK, F32, Matrix, MatrixKernel, Pairing, Pieces, Product, SIDE, Tiles, WORDS, element,
};
use crate::lanes::pairs::word;
use crate::lanes::{Isa, Lanes};
use crate::pack::{BitRows, Form};
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
    /// For rows of `dim` elements; across, along, weighted and in columns where that is asked for. The last two are
    /// made of what lies along.
    pub fn new(parts: &mut Parts<'m>, cut: &Cut, dim: usize, forms: [bool; 4]) -> Self {
        let (len, pieces) = (if cut.bf16 { Form::len(cut.chunk, dim) } else { 0 }, cut.pieces);
        let rows = parts.room(len);
        let lens = [len, len, len.saturating_mul(pieces), len];
        let mut room = |form: usize| parts.room(if forms[form] { lens[form] } else { 0 });
        let (across, along, weighted, columns) = (room(0), room(1), room(2), room(3));
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
    /// Weights of the rows, and a factor of all.
    pub weights: Option<(&'a [f32], f32)>,
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
                to.weigh(by, first, at, &tokens, weights);
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

    /// Rows of a tile along times their weights, rounded.
    #[inline(always)]
    fn weigh<M: Matrix>(
        &mut self,
        by: M,
        first: usize,
        at: usize,
        tokens: &Range<usize>,
        (weights, factor): (&[f32], f32),
    ) {
        let (isa, lanes, zero) = (by.isa(), F32::<M>::N, F32::<M>::splat(by.isa(), 0.0));
        for pair in 0..SIDE {
            let row = first + 2 * pair;
            let weights = [row, row + 1].map(
                #[inline(always)]
                |row| if tokens.contains(&row) { Some(factor * weights[row]) } else { None },
            );
            for part in (0..SIDE).step_by(lanes) {
                let line = at + pair * SIDE + part;
                let mut halves = by.halves(F32::<M>::load(isa, &self.along[line..]));
                for n in 0..2 {
                    halves[n] = match weights[n] {
                        Some(weight) => halves[n] * F32::<M>::splat(isa, weight),
                        None => zero,
                    };
                }
                Pairing::Stacked.store(by, halves, (self.weighted, line), self.pieces);
            }
        }
    }
}

/// Rounds a state, `[D][E]`, into pieces, for products with rows of D elements (`along`) and of E (`across`).
pub struct Round<'a> {
    pub shape: Shape,
    pub state: &'a [f32],
    pub along: Option<&'a mut [f32]>,
    pub across: Option<&'a mut [f32]>,
    pub pieces: usize,
}

impl MatrixKernel for Round<'_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Round { shape, state, along, across, pieces } = self;
        let [tall, wide] = [shape.dim, shape.width].map(|len| 2 * len.div_ceil(BLOCK));
        let lanes = F32::<M>::N;
        if let Some(along) = along {
            for (line, panel) in
                (0..tall * SIDE / 2).flat_map(|d| (0..wide / 2).map(move |p| (d, p)))
            {
                let at = (line / SIDE * wide + 2 * panel) * WORDS + line % SIDE * SIDE;
                for c in (0..BLOCK).step_by(lanes) {
                    let even = part(by, shape, state, 2 * line, panel, c);
                    let odd = part(by, shape, state, 2 * line + 1, panel, c);
                    let to = at + c / SIDE * WORDS + c % SIDE;
                    Pairing::Stacked.store(by, [even, odd], (along, to), pieces);
                }
            }
        }
        if let Some(across) = across {
            for (tile, panel) in (0..tall).flat_map(|d| (0..wide / 2).map(move |p| (d, p))) {
                let mut rows = [0.0; 2 * WORDS];
                for r in 0..SIDE {
                    for c in (0..SIDE).step_by(lanes) {
                        let d = tile * SIDE + r;
                        let low = part(by, shape, state, d, panel, 2 * c);
                        let high = part(by, shape, state, d, panel, 2 * c + lanes);
                        let to = (&mut rows[..pieces * WORDS], r * SIDE + c);
                        Pairing::Neighbours.store(by, [low, high], to, pieces);
                    }
                }
                let apart = across.len() / pieces;
                let places = across.chunks_exact_mut(apart);
                for (rows, across) in rows.chunks_exact(WORDS).zip(places) {
                    by.turn(rows, &mut across[(panel * tall + tile) * WORDS..][..WORDS]);
                }
            }
        }
    }
}

/// A register of row `d` of a state, from element `c` of a panel on; 0 where there is none, whatever fills its blocks.
#[inline(always)]
fn part<M: Matrix>(by: M, shape: Shape, state: &[f32], d: usize, panel: usize, c: usize) -> F32<M> {
    let (isa, lanes) = (by.isa(), F32::<M>::N);
    let there = shape.width.saturating_sub(panel * BLOCK + c);
    if d >= shape.dim || there == 0 {
        return F32::<M>::splat(isa, 0.0);
    }
    let row = &state[panel * shape.panel() + d * BLOCK + c..][..lanes];
    if there >= lanes {
        return F32::<M>::load(isa, row);
    }
    let mut some = [0.0; SIDE];
    some[..there].copy_from_slice(&row[..there]);
    F32::<M>::load(isa, &some)
}

/// state ← decay · state + leftᵀ · right over some blocks of tokens, with `left` in columns and the pieces of `right`
/// along. Where the decay is 0 what the state held is absent.
pub struct Grow<'a> {
    pub shape: Shape,
    pub state: &'a mut [f32],
    pub decay: f32,
    pub left: &'a [f32],
    pub right: Pieces<'a>,
    pub blocks: Range<usize>,
}

impl MatrixKernel for Grow<'_> {
    #[inline(always)]
    fn run<M: Matrix>(self, by: M) {
        let Grow { shape, state, decay, left, right, blocks } = self;
        let [tall, wide] = [shape.dim, shape.width].map(|len| 2 * len.div_ceil(BLOCK));
        if decay != 0.0 && decay != 1.0 {
            let factor = F32::<M>::splat(by.isa(), decay);
            for x in state.chunks_exact_mut(F32::<M>::N) {
                (F32::<M>::load(by.isa(), x) * factor).store(x);
            }
        }
        let first = if blocks.is_empty() { 0 } else { blocks.start };
        for (number, panel) in state.chunks_exact_mut(shape.panel()).enumerate() {
            let right = right.from((first * wide + 2 * number) * WORDS);
            for (piece, words) in right.each().enumerate() {
                by.multiply(Product {
                    c: &mut *panel,
                    stride: BLOCK,
                    fresh: decay == 0.0 && piece == 0,
                    a: Tiles { words: &left[first * tall * WORDS..], steps: [1, tall] },
                    b: Tiles { words, steps: [1, wide] },
                    rows: tall,
                    cols: 2,
                    depth: blocks.len(),
                });
            }
        }
    }
}

/// (R22) state ← decay · state + Σ_j ω_j k_jᵀ v_j over the tokens of a chunk, with k and v packed.
pub fn advance(
    level: Level,
    shape: Shape,
    (state, decay): (&mut [f32], f32),
    decays: &Decays<'_>,
    [k, v]: [&Words<'_>; 2],
    len: usize,
) {
    let right = v.summed_rows(decays.none);
    let blocks = decays.first / BLOCK..len.div_ceil(BLOCK);
    let grow = Grow { shape, state, decay, left: k.columns, right, blocks };
    level.run_tiles(grow).unwrap_or_default();
}

/// Rows of 32 tokens times a rounded state: C of `wide` tiles, rows `stride` apart.
#[inline(always)]
pub fn multiply_state<M: Matrix>(
    by: M,
    rows: Tiles<'_>,
    depth: usize,
    state: Pieces<'_>,
    wide: usize,
    (c, stride): (&mut [f32], usize),
) {
    for (piece, words) in state.each().enumerate() {
        let (b, fresh) = (Tiles { words, steps: [1, wide] }, piece == 0);
        by.multiply(Product { c: &mut *c, stride, fresh, a: rows, b, rows: 2, cols: wide, depth });
    }
}

/// Rows `stride` apart times their weights; 0 where the weight is.
#[inline(always)]
pub fn scale_rows<I: Isa>(isa: I, rows: &mut [f32], stride: usize, weights: &[f32]) {
    for (row, &weight) in rows.chunks_exact_mut(stride).zip(weights) {
        let factor = I::F32::splat(isa, weight);
        if weight == 0.0 {
            row.fill(0.0);
            continue;
        }
        for x in row.chunks_exact_mut(I::F32::N) {
            (I::F32::load(isa, x) * factor).store(x);
        }
    }
}
