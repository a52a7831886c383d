//! The scores of a block of queries against a tile of keys: (F1), (F2) and what is visible.

use super::distances::Near;
use super::rule::{Raise, ScoreRule};
use crate::exp::tanh as tanh_of;
use crate::lanes::{Isa, Lanes, Tile};
use crate::tile::{MAX_KEYS, MAX_ROWS, STRIDE};
use etalon_problem::Cover;
use std::ops::Range;

/// The mark of a visible pair in `visible`.
pub const VISIBLE: u8 = 1;

/// The mark that an active pair of lazy attention has beside it, where operands are not finite.
pub const ACTIVE: u8 = 2;

/// The columns of a block that were computed, and those of them that need no mask.
#[derive(Debug, Clone)]
pub struct Strip {
    /// The columns, from the tile's first; register blocks wide. Nothing beside them is visible.
    pub cols: Range<usize>,
    /// The columns of them in which the mask allows every pair.
    open: Range<usize>,
}

impl Strip {
    /// The columns in which the mask may forbid a pair: only there `visible` was written. Beside them
    /// a bias may still make a score −∞, whose weight is 0 as its operands are finite.
    pub fn edges(&self) -> [Range<usize>; 2] {
        [self.cols.start..self.open.start, self.open.end..self.cols.end]
    }

    /// True if the mask allows every pair of the panel that begins at a column.
    #[inline(always)]
    pub fn is_open(&self, column: usize) -> bool {
        self.open.contains(&column)
    }

    /// The part of it within some columns of it.
    pub fn within(&self, cols: &Range<usize>) -> Self {
        let clamp = |column: usize| column.clamp(cols.start, cols.end);
        Strip { cols: cols.clone(), open: clamp(self.open.start)..clamp(self.open.end) }
    }

    /// As numbers, to be kept in the memory of a thread.
    pub fn to_numbers(&self) -> [u32; 4] {
        let Strip { cols, open } = self;
        [cols.start, cols.end, open.start, open.end].map(|column| column as u32)
    }

    /// As [`Strip::to_numbers`] gave it.
    pub fn of_numbers(numbers: [u32; 4]) -> Self {
        let [start, end, first, last] = numbers.map(|column| column as usize);
        Strip { cols: start..end, open: first..last }
    }

    /// Adds to `counts` how many pairs of each row are visible, by `visible` in the edges.
    pub fn count(&self, visible: &[u8], counts: &mut [f32]) {
        for (count, visible) in counts.iter_mut().zip(visible.chunks(MAX_KEYS)) {
            let of_edge =
                |edge: Range<usize>| visible[edge].iter().map(|&x| u32::from(x)).sum::<u32>();
            let edges: u32 = self.edges().map(of_edge).iter().sum();
            *count += (self.open.len() as u32 + edges) as f32;
        }
    }
}

/// The memory of a block of scores: rows lie [`STRIDE`] apart.
pub struct Block<'a> {
    /// S, and −∞ where the pair is invisible.
    pub s: &'a mut [f32],
    /// tanh(s/c), with a softcap.
    pub tanh: &'a mut [f32],
    /// 1 for each pair that is visible, and otherwise 0, rows [`MAX_KEYS`] apart; written in the edges of the strip.
    pub visible: &'a mut [u8],
}

/// A block of scores to be computed, and its two factors.
pub struct Factors<'a, 'p> {
    /// The visible pairs, and the scale, softcap and bias of their scores.
    pub rule: &'a ScoreRule<'p>,
    /// The queries, within the sequence.
    pub rows: Range<usize>,
    /// The keys, within the sequence.
    pub cols: Range<usize>,
    /// The panel of these queries, packed across.
    pub q: &'a [f32],
    /// The panels of keys, packed across, from the tile's first.
    pub k: &'a [f32],
    /// D.
    pub dim: usize,
    /// True if the visible pairs are noted even where the mask allows every pair: operands that are not
    /// finite need it, and a bias that hides pairs.
    pub note_visible: bool,
}

/// Computes the scores of a block and the maxima of their rows, or returns `None` if no pair of it is
/// visible.
#[inline(always)]
pub fn score_block<I: Isa>(
    isa: I,
    factors: &Factors<'_, '_>,
    block: &mut Block<'_>,
    max: &mut [I::F32; MAX_ROWS],
) -> Option<Strip> {
    let Factors { rule, rows, cols, q, k, dim, .. } = factors;
    let width = I::Tile::COLS;
    let strip = strip(factors, width)?;
    let scale = I::F32::splat(isa, rule.scale);
    let bias = rule.bias(rows, cols);
    // True if the scores are not final when they leave the registers.
    let later = rule.softcap.is_some() || matches!(bias, Some(Raise::Pairs(_)));
    for column in strip.cols.clone().step_by(width) {
        let mut tile = I::Tile::zero(isa);
        tile.add_panel(isa, q, &k[column * dim..], *dim);
        let tile = tile.map(
            #[inline(always)]
            |s| s * scale,
        );
        // (F1), and in columns that the mask leaves open (E2).
        if later || !strip.open.contains(&column) {
            tile.store(&mut block.s[column..], STRIDE);
            continue;
        }
        let keys = cols.start + column..cols.start + column + width;
        let near = match &bias {
            Some(bias) => bias.near(rows, I::Tile::ROWS, &keys),
            None => Near::Nothing,
        };
        match near {
            Near::Nothing => {
                tile.store(&mut block.s[column..], STRIDE);
                tile.row_max(max);
            }
            Near::Rows(numbers) => {
                let first = numbers.len() - width;
                let tile = tile.raise(
                    isa,
                    #[inline(always)]
                    |r| &numbers[first - r..],
                );
                tile.store(&mut block.s[column..], STRIDE);
                tile.row_max(max);
            }
            Near::Some => {
                tile.store(&mut block.s[column..], STRIDE);
                raise(&bias, rows, &keys, &mut block.s[column..]);
                memory_max(isa, &(column..column + width), block.s, max);
            }
        }
    }
    if let Some(cap) = rule.softcap {
        cap_scores(isa, cap, &strip.cols, block);
    }
    if later {
        let keys = cols.start + strip.open.start..cols.start + strip.open.end;
        raise(&bias, rows, &keys, &mut block.s[strip.open.start..]); // (F2)
        memory_max(isa, &strip.open, block.s, max);
    }
    for edge in strip.edges() {
        hide::<I>(factors, &bias, &edge, block);
        memory_max(isa, &edge, block.s, max);
    }
    Some(strip)
}

/// Adds a bias to the scores of `rows` with `keys`.
#[inline(always)]
fn raise(bias: &Option<Raise<'_>>, rows: &Range<usize>, keys: &Range<usize>, s: &mut [f32]) {
    let Some(bias) = bias else { return };
    for (i, row) in rows.clone().zip(s.chunks_mut(STRIDE)) {
        bias.add_row(i, keys.clone(), &mut row[..keys.len()]);
    }
}

/// The maxima of rows of scores in memory.
#[inline(always)]
fn memory_max<I: Isa>(isa: I, cols: &Range<usize>, s: &[f32], max: &mut [I::F32; MAX_ROWS]) {
    // No iterator over registers: it would be a function of its own.
    for row in (0..I::Tile::ROWS * STRIDE).step_by(STRIDE) {
        let max = &mut max[row / STRIDE];
        *max = lanes_max(isa, &s[row..][cols.clone()], *max);
    }
}

/// The columns from the first panel that holds a visible pair to the last, and those of the first run
/// of panels within that are visible as a whole.
pub fn strip(factors: &Factors<'_, '_>, width: usize) -> Option<Strip> {
    let Factors { rule, rows, cols, note_visible, .. } = factors;
    let (mut first, mut end) = (0, cols.len().div_ceil(width));
    // A panel that the keys do not fill is not visible as a whole.
    let mut open = 0..cols.len() / width;
    let cover = |panel: usize| {
        let start = cols.start + panel * width;
        rule.cover(rows.clone(), start..cols.end.min(start + width))
    };
    match rule.cover(rows.clone(), cols.clone()) {
        Cover::None => return None,
        Cover::All => {}
        Cover::Some => {
            first = (first..end).find(|&panel| cover(panel) != Cover::None)?;
            end = (first..end).rfind(|&panel| cover(panel) != Cover::None)? + 1;
            open.start = (first..open.end).find(|&p| cover(p) == Cover::All).unwrap_or(end);
            open.end = (open.start..open.end).find(|&p| cover(p) != Cover::All).unwrap_or(open.end);
        }
    }
    if *note_visible || open.is_empty() {
        open = first..first;
    }
    let columns = |panels: Range<usize>| panels.start * width..panels.end * width;
    Some(Strip { cols: columns(first..end), open: columns(open) })
}

/// (F2) S = c·tanh(s/c), and the tanh.
#[inline(always)]
fn cap_scores<I: Isa>(isa: I, cap: f32, cols: &Range<usize>, block: &mut Block<'_>) {
    let cap = I::F32::splat(isa, cap);
    let rows = I::Tile::ROWS * STRIDE;
    let tanhs = block.tanh[..rows].chunks_mut(STRIDE);
    for (row, tanhs) in block.s[..rows].chunks_mut(STRIDE).zip(tanhs) {
        let row = row[cols.clone()].chunks_exact_mut(I::F32::N);
        let tanhs = tanhs[cols.clone()].chunks_exact_mut(I::F32::N);
        for (s, stored) in row.zip(tanhs) {
            let t = tanh_of(isa, I::F32::load(isa, s) / cap);
            (cap * t).store(s);
            t.store(stored);
        }
    }
}

/// (B4) S′ = 1 − tanh²(s/c).
#[inline(always)]
pub fn slope<I: Isa>(isa: I, tanh: I::F32) -> I::F32 {
    I::F32::splat(isa, 1.0) - tanh * tanh
}

/// (F2) adds the bias, notes which pairs of some columns are visible, and sets S = −∞ where they are
/// not.
#[inline(always)]
fn hide<I: Isa>(
    factors: &Factors<'_, '_>,
    bias: &Option<Raise<'_>>,
    edge: &Range<usize>,
    block: &mut Block<'_>,
) {
    if edge.is_empty() {
        return;
    }
    for r in 0..I::Tile::ROWS {
        let s = &mut block.s[r * STRIDE..][edge.clone()];
        let visible = &mut block.visible[r * MAX_KEYS..][edge.clone()];
        hide_row(factors, bias, r, edge, s, visible);
    }
}

/// The same of row `r`: of the scores and marks of its columns `edge`.
#[inline(always)]
fn hide_row(
    factors: &Factors<'_, '_>,
    bias: &Option<Raise<'_>>,
    r: usize,
    edge: &Range<usize>,
    s: &mut [f32],
    visible: &mut [u8],
) {
    let Factors { rule, rows, cols, .. } = factors;
    let keys = cols.start + edge.start..cols.end.min(cols.start + edge.end);
    let i = rows.start + r;
    if i >= rows.end {
        visible.fill(0); // rows that only fill the register block
    } else {
        let (inside, padding) = visible.split_at_mut(keys.len());
        rule.visible_row(i, keys.clone(), inside);
        padding.fill(0);
        if let Some(bias) = bias {
            bias.add_row(i, keys, s);
        }
    }
    for (s, visible) in s.iter_mut().zip(visible) {
        *s = if *visible != 0 { *s } else { f32::NEG_INFINITY };
        *visible = u8::from(*s != f32::NEG_INFINITY);
    }
}

/// A row of a block of products Q Kᵀ in memory, which become its scores in a strip, as [`score_block`] makes them.
pub struct Row<'a> {
    /// Its number in the block.
    pub r: usize,
    /// The products, then S.
    pub s: &'a mut [f32],
    /// As in [`Block`].
    pub tanh: &'a mut [f32],
    pub visible: &'a mut [u8],
}

impl Row<'_> {
    /// Makes the scores, and returns the maxima of each lane.
    #[inline(always)]
    pub fn score<I: Isa>(
        &mut self,
        isa: I,
        factors: &Factors<'_, '_>,
        bias: &Option<Raise<'_>>,
        strip: &Strip,
    ) -> I::F32 {
        let Row { r, s, tanh, visible } = self;
        let mut max = I::F32::splat(isa, f32::NEG_INFINITY);
        let scale = I::F32::splat(isa, factors.rule.scale);
        for s in s[strip.open.clone()].chunks_exact_mut(I::F32::N) {
            let x = I::F32::load(isa, s) * scale;
            x.store(s);
            max = x.max(max);
        }
        for edge in strip.edges() {
            for s in s[edge].chunks_exact_mut(I::F32::N) {
                (I::F32::load(isa, s) * scale).store(s);
            }
        }
        if let Some(cap) = factors.rule.softcap {
            let cap = I::F32::splat(isa, cap);
            let tanhs = tanh[strip.cols.clone()].chunks_exact_mut(I::F32::N);
            for (s, stored) in s[strip.cols.clone()].chunks_exact_mut(I::F32::N).zip(tanhs) {
                let t = tanh_of(isa, I::F32::load(isa, s) / cap);
                (cap * t).store(s);
                t.store(stored);
            }
        }
        if let Some(bias) = bias.as_ref().filter(|_| factors.rows.start + *r < factors.rows.end) {
            let keys = factors.cols.start + strip.open.start..factors.cols.start + strip.open.end;
            bias.add_row(factors.rows.start + *r, keys, &mut s[strip.open.clone()]);
        }
        if factors.rule.softcap.is_some() || bias.is_some() {
            max = lanes_max(isa, &s[strip.open.clone()], I::F32::splat(isa, f32::NEG_INFINITY));
        }
        for edge in strip.edges().into_iter().filter(|edge| !edge.is_empty()) {
            hide_row(factors, bias, *r, &edge, &mut s[edge.clone()], &mut visible[edge.clone()]);
            max = lanes_max(isa, &s[edge], max);
        }
        max
    }
}

/// The larger of `max` and the scores, lane by lane.
#[inline(always)]
fn lanes_max<I: Isa>(isa: I, s: &[f32], mut max: I::F32) -> I::F32 {
    for s in s.chunks_exact(I::F32::N) {
        max = I::F32::load(isa, s).max(max);
    }
    max
}
