//! The tiles of tokens and classes that a filter leaves out of (C17) and (C18), and bounds of the error that
//! the sums then have. A tile is a band of tokens that count by a tile of classes.
//!
//! ```text
//! (C37) B_i = Σ over tiles J left out of row i of (Σ_{v in J} |da_iv|) max_{v in J} ‖w_v‖
//! (C38) C_v = Σ over tokens i left out of |da_iv| ‖h_i‖
//! ```
//!
//! These bounds hold of the da that the backward pass would multiply. They are f32 and never too small:
//! norms, products and sums are rounded up, and sums over a tile, which registers round to nearest, are
//! enlarged by [`MARGIN`].

use super::cut::{Cut, MEASURE, TILE};
use super::logits::SLICE;
use super::measure::Measure;
use super::operands::Operands;
use super::tokens::Token;
use crate::element::Tensor;
use crate::parallel::share;
use crate::tile::BAND;
use crate::tiles::tiles;
use crate::workspace::Lists;
use etalon_problem::{Error, LinearCrossEntropy};
use ndarray::{ArrayViewMut1, Ix2};
use std::iter;
use std::ops::Range;

/// A sum of n terms of one sign, each rounded once, is at least (1 − u)^n of its value, u = 2⁻²⁴; of 257
/// roundings at most that is 1 − 1.004 · 2⁻¹⁶, and this times it more than 1, by far more than the two
/// roundings of f64 that follow take away.
const MARGIN: f64 = 1.0 + 1.0 / 32_768.0;

/// 2⁻¹⁴²: what [`BAND`] products of f32 may lose where they lie below the smallest normal number, 2⁻¹⁵⁰ each.
const UNDERFLOW: f64 = f32::MIN_POSITIVE as f64 / 65_536.0;

/// Limits within which a tile is left out.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Only where every |da_iv| is below.
    pub eps: f32,
    /// Only as far as no B_i and no C_v exceeds these; so no bound is infinite or NaN.
    pub dh: f64,
    pub dw: f64,
}

/// Places of a [`Certificate`](super::filter::Certificate); of any strides.
#[derive(Debug)]
pub struct CertificateMut<'a> {
    /// `[T]`.
    pub dh: ArrayViewMut1<'a, f32>,
    /// `[V]`.
    pub dw: ArrayViewMut1<'a, f32>,
    /// Tiles that were kept, and all of them.
    pub tiles: &'a mut (usize, usize),
}

/// A filter at work.
pub struct Choice<'l, 'c> {
    limits: Limits,
    /// ‖h_i‖ of the tokens that count.
    norms: &'l mut [f32],
    /// The largest ‖w_v‖ of every tile.
    widest: &'l mut [f32],
    certificate: CertificateMut<'c>,
}

/// Bytes of what is kept of every token, and of every tile of classes.
pub fn lists_bytes(problem: &LinearCrossEntropy) -> usize {
    let tiles = problem.vocab.div_ceil(TILE);
    problem.tokens.saturating_add(tiles).saturating_mul(size_of::<f32>())
}

impl<'l, 'c> Choice<'l, 'c> {
    /// For so many tokens that count, and tiles of classes.
    pub fn new(
        lists: &'l Lists,
        (tokens, tiles): (usize, usize),
        (limits, certificate): (Limits, CertificateMut<'c>),
    ) -> Result<Self, Error> {
        let norms = lists.repeat(tokens, 0.0, "norms of rows of h")?;
        let widest = lists.repeat(tiles, 0.0, "norms of rows of w")?;
        Ok(Choice { limits, norms, widest, certificate })
    }

    /// Measures h and w.
    pub fn read(&mut self, operands: &Operands<'_>, tokens: &[Token], threads: usize) {
        let Operands { h, w, .. } = *operands;
        let tasks = tokens.chunks(BAND).zip(self.norms.chunks_mut(BAND));
        let enter = |_| [0.0; SLICE];
        share(0..threads, enter, tasks, |(tokens, norms), row| {
            let each = tokens.iter().zip(norms);
            each.for_each(|(token, to)| *to = norm(h, token.index, row));
        });
        let classes = tiles(0..w.shape()[0], TILE).zip(&mut *self.widest);
        share(0..threads, enter, classes, |(classes, widest), row| {
            *widest = classes.map(|class| norm(w, class, row)).fold(0.0, larger);
        });
    }

    /// Nothing has been left out yet.
    pub fn clear(&mut self) {
        let CertificateMut { dh, dw, tiles } = &mut self.certificate;
        dh.fill(0.0);
        dw.fill(0.0);
        **tiles = (0, 0);
    }

    /// Leaves out tiles of the tokens of a chunk, which begin with number `first`, in a span of tiles of
    /// classes. For every token the tiles of classes before the span have had their turn, and for every
    /// class the tokens before the chunk: so no choice depends on how they are cut.
    pub fn choose<'m>(
        &mut self,
        cut: &Cut,
        (tokens, first): (&[Token], usize),
        span: Range<usize>,
        store: &[f32],
        measures: &'m mut [f32],
    ) -> Chosen<'m> {
        self.measure(cut, first..first + tokens.len(), span.clone(), store, measures);
        let place = |band, tile| place(cut.range / BAND, span.len(), band, tile);
        for (band, tokens) in tokens.chunks(BAND).enumerate() {
            for (number, tile) in span.clone().enumerate() {
                let measure = &mut measures[place(band, number)..][..MEASURE];
                let left_out = self.leave_out(tokens, cut.classes(tile), measure);
                measure[0] = f32::from(u8::from(left_out));
            }
        }
        Chosen { measures, tiles: span.len(), per_range: cut.range / BAND }
    }

    /// Of every tile whether it is small, and what its bounds are then.
    fn measure(
        &self,
        cut: &Cut,
        tokens: Range<usize>,
        span: Range<usize>,
        store: &[f32],
        measures: &mut [f32],
    ) {
        let ranges = self.norms[tokens].chunks(cut.range);
        let places = ranges.flat_map(|norms| span.clone().map(move |tile| (norms, tile)));
        let measures = measures.chunks_mut(cut.range / BAND * MEASURE);
        let tasks = places.zip(store.chunks(cut.tile_len())).zip(measures);
        share(
            0..cut.threads,
            |_| [0.0; BAND],
            tasks,
            |(((norms, tile), store), measures), side| {
                let (classes, widest) = (cut.classes(tile).len(), f64::from(self.widest[tile]));
                let bands = norms.chunks(BAND).zip(store.chunks(cut.padded * BAND));
                for ((norms, da), measure) in bands.zip(measures.chunks_mut(MEASURE)) {
                    side.fill(0.0);
                    side[..norms.len()].copy_from_slice(norms);
                    let (small, sums) = measure.split_at_mut(1);
                    let (by_token, by_class) = sums.split_at_mut(BAND);
                    let by_class = &mut by_class[..classes];
                    small[0] = f32::from(u8::from(cut.level.run(Measure {
                        da: &da[..classes * BAND],
                        tokens: norms.len(),
                        norms: side,
                        eps: self.limits.eps,
                        by_token,
                        by_class,
                    })));
                    if small[0] != 0.0 {
                        let enlarged = |sum: f32| MARGIN * f64::from(sum);
                        by_token.iter_mut().for_each(|x| *x = up(enlarged(*x) * widest));
                        by_class.iter_mut().for_each(|x| *x = up(enlarged(*x) + UNDERFLOW));
                    }
                }
            },
        );
    }

    /// True if a tile is left out; then its parts are added to the bounds.
    fn leave_out(&mut self, tokens: &[Token], classes: Range<usize>, measure: &[f32]) -> bool {
        let CertificateMut { dh, dw, tiles: (kept, all) } = &mut self.certificate;
        let by_token = || tokens.iter().map(|token| token.index).zip(&measure[1..]);
        let by_class = || classes.clone().zip(&measure[1 + BAND..]);
        let within = |bound: f32, most: f64| f64::from(bound) <= most;
        let left_out = measure[0] != 0.0
            && by_token().all(|(i, &x)| within(add_up(dh[i], x), self.limits.dh))
            && by_class().all(|(v, &x)| within(add_up(dw[v], x), self.limits.dw));
        *all += 1;
        if left_out {
            by_token().for_each(|(i, &x)| dh[i] = add_up(dh[i], x)); // (C37)
            by_class().for_each(|(v, &x)| dw[v] = add_up(dw[v], x)); // (C38)
        } else {
            *kept += 1;
        }
        left_out
    }
}

/// The tiles of a chunk and a span that are left out.
#[derive(Clone, Copy)]
pub struct Chosen<'m> {
    /// `[range][tile][band][MEASURE]`, each beginning with 1 where the tile is left out, else with 0.
    pub measures: &'m [f32],
    pub tiles: usize,
    pub per_range: usize,
}

impl Chosen<'_> {
    /// True if a band of the chunk is kept in a tile of the span.
    fn keeps(&self, band: usize, tile: usize) -> bool {
        self.measures[place(self.per_range, self.tiles, band, tile)] == 0.0
    }
}

/// The bands that are kept in a tile, in runs as long as can be: without a filter all of them at once.
pub fn runs(
    chosen: Option<Chosen<'_>>,
    bands: Range<usize>,
    tile: usize,
) -> impl Iterator<Item = Range<usize>> {
    let kept = move |band: usize| chosen.is_none_or(|chosen| chosen.keeps(band, tile));
    let Range { start: mut next, end } = bands;
    iter::from_fn(move || {
        let first = (next..end).find(|&band| kept(band))?;
        next = (first..end).find(|&band| !kept(band)).unwrap_or(end);
        Some(first..next)
    })
}

/// The place at which the measures of a band in a tile begin.
pub fn place(per_range: usize, tiles: usize, band: usize, tile: usize) -> usize {
    ((band / per_range * tiles + tile) * per_range + band % per_range) * MEASURE
}

/// The larger of the two, NaN if either is.
fn larger(x: f32, y: f32) -> f32 {
    if y > x || y.is_nan() { y } else { x }
}

/// x to the nearest f32 that is not less.
pub fn up(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest) < x { nearest.next_up() } else { nearest }
}

/// x + y or more.
fn add_up(x: f32, y: f32) -> f32 {
    if y == 0.0 { x } else { (x + y).next_up() }
}

/// The norm of a row, or more; not finite where the row is not. In f64 squares are exact, and the sum of D
/// of them, its root and the last product together lose less than (D + 4) 2⁻⁵³ of it.
fn norm(x: Tensor<'_, Ix2>, row: usize, read: &mut [f32; SLICE]) -> f32 {
    let dim = x.shape()[1];
    let mut sums = [0.0f64; 8];
    for cols in tiles(0..dim, SLICE) {
        let read = &mut read[..cols.len()];
        x.read_rows(row..row + 1, cols, read, SLICE);
        for part in read.chunks(sums.len()) {
            sums.iter_mut().zip(part).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
        }
    }
    let square: f64 = sums.iter().sum();
    up(square.sqrt() * (1.0 + (dim as f64 + 4.0) * f64::EPSILON))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_round_up() {
        let third = 1.0 / 3.0;
        for x in [third, -third, 1e-300, 1e-42, 16_777_217.0, f64::from(f32::MAX) * (1.0 + 1e-12)] {
            assert!(f64::from(up(x)) >= x && f64::from(up(x).next_down()) < x, "{x}");
        }
        assert_eq!((up(0.0), up(1.5), up(f64::INFINITY)), (0.0, 1.5, f32::INFINITY));
        assert!(up(f64::NAN).is_nan());
        for (x, y) in [(1.0, 1e-20), (1.0, 5.96e-8), (0.0, 1e-45), (1e30, 1e30)] {
            // The sum of both as they are: what is left of y is exact.
            let rest = f64::from(add_up(x, y)) - f64::from(x);
            assert!(rest >= f64::from(y), "{x} + {y}");
        }
        assert_eq!(add_up(7.0, 0.0), 7.0);
        assert!(larger(larger(1.0, f32::NAN), 2.0).is_nan());
    }

    #[test]
    fn runs_are_the_bands_that_are_kept() {
        // Two ranges of three bands, two tiles.
        let left_out = [(0, 0), (1, 0), (2, 0), (1, 1), (4, 0), (5, 1)];
        let mut measures = vec![0.0; 12 * MEASURE];
        for (band, tile) in left_out {
            measures[place(3, 2, band, tile)] = 1.0;
        }
        let chosen = Some(Chosen { measures: &measures, tiles: 2, per_range: 3 });
        let list = |chosen, bands, tile| runs(chosen, bands, tile).collect::<Vec<_>>();
        assert_eq!(list(chosen, 0..6, 0), [3..4, 5..6]);
        assert_eq!(list(chosen, 0..6, 1), [0..1, 2..5]);
        assert_eq!(list(chosen, 1..2, 1), []);
        let mut all = runs(None, 0..6, 0);
        assert_eq!((all.next(), all.next()), (Some(0..6), None));
    }
}
