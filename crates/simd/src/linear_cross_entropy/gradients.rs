//! Contributions of the kept gradients of logits to dh, dw and dbias: (C16)–(C19); in the second order, with
//! their motions, to gh, gw and gbias: (C27)–(C30).

use super::choice::runs;
use super::cut::{GradientScratch, TILE};
use super::kept::Kept;
use super::logits::SLICE;
use super::matrix;
use super::operands::Gradients;
use super::pack;
use super::products::{Bands, BiasRows, HeadRows, HiddenLeaf};
use super::sums::Sums;
use super::tokens::Token;
use super::totals::Sweep;
use crate::element::TensorMut;
use crate::lanes::matrix::{BLOCK, SIDE};
use crate::lanes::prefetch::{Lines, prefetch};
use crate::pack::{BitRows, Form};
use crate::parallel::share;
use crate::tile::{BAND, STRIDE};
use crate::tiles::{cut_along, tiles};
use crate::workspace::Parts;
use ndarray::{Ix2, s};
use std::iter::repeat_with;
use std::ops::Range;

/// The place in which some rows of dw are summed.
pub enum Head<'d> {
    /// Sums in f32, that grow from chunk to chunk, and elements from a row to the next.
    Sums(&'d mut [f32], usize),
    /// The result itself, whose sums are complete at once.
    Result(TensorMut<'d, Ix2>),
}

impl Head<'_> {
    /// The first rows, and the others.
    fn split_at(self, rows: usize) -> (Self, Self) {
        match self {
            Head::Sums(sums, stride) => {
                let (first, others) = sums.split_at_mut(rows * stride);
                (Head::Sums(first, stride), Head::Sums(others, stride))
            }
            Head::Result(dw) => {
                let (first, others) = dw.split_at(0, rows);
                (Head::Result(first), Head::Result(others))
            }
        }
    }

    /// Lines of some elements of the first rows, that are read or written next.
    fn lines(&self, rows: usize, elements: Range<usize>) -> Lines {
        match self {
            Head::Sums(sums, stride) => {
                let at = sums.as_ptr().wrapping_add(elements.start);
                Lines::new(at, (rows, elements.len()), *stride)
            }
            Head::Result(_) => Lines::NONE,
        }
    }

    /// Reads some elements of the first rows into sums [`STRIDE`] apart.
    fn read(&self, rows: usize, elements: &Range<usize>, sums: &mut [f32]) {
        let Head::Sums(dw, stride) = self else { return };
        for (row, sums) in sums.chunks_mut(STRIDE).take(rows).enumerate() {
            ask_for(dw, *stride, row + AHEAD, elements);
            sums[..elements.len()].copy_from_slice(&dw[row * stride..][elements.clone()]);
        }
    }

    /// Writes them.
    fn write(&mut self, rows: usize, elements: &Range<usize>, sums: &[f32]) {
        match self {
            Head::Sums(dw, stride) => {
                for (row, sums) in sums.chunks(STRIDE).take(rows).enumerate() {
                    ask_for(dw, *stride, row + AHEAD, elements);
                    let row = &mut dw[row * *stride..][elements.clone()];
                    row.copy_from_slice(&sums[..elements.len()]);
                }
            }
            Head::Result(dw) => {
                let mut dw = dw.view_mut().slice(s![.., elements.clone()]);
                dw.write_rows(sums, STRIDE, 1.0);
            }
        }
    }
}

/// The factors of h and w: da, or in the second order x; and those of ddh and ddw then: da. In bf16 `store` has both.
#[derive(Clone, Copy)]
pub struct Factors<'k> {
    pub store: &'k [f32],
    pub motion: &'k [f32],
}

impl Sweep<'_, '_> {
    /// (C18) and (C19), or (C29) and (C30): added to the rows of dw of the span, which begin with 0 where
    /// `fresh`, and to dbias.
    pub fn head_gradients(
        &self,
        kept: &Kept<'_>,
        (factors, [along, ddh_along]): (Factors<'_>, [&[f32]; 2]),
        dw: Option<Head<'_>>,
        dbias: Option<&mut [f32]>,
        fresh: bool,
        scratch: &mut [f32],
    ) {
        let cut = self.cut;
        let classes = kept.span.start * TILE..cut.vocab.min(kept.span.end * TILE);
        // With few tiles, some blocks of rows each.
        let parts = (4 * cut.threads).div_ceil(kept.span.len());
        let part = TILE.div_ceil(parts).next_multiple_of(cut.rows).min(TILE);
        let mut sums = dbias.map(|dbias| {
            let tiles = dbias[classes.clone()].chunks_mut(TILE);
            tiles.flat_map(move |tile| tile.chunks_mut(part))
        });
        let sums = repeat_with(move || sums.as_mut().and_then(Iterator::next));
        let mut rest = dw;
        let places = tiles(classes, TILE).enumerate().flat_map(|(tile, classes)| {
            tiles(0..classes.len(), part).map(move |rows| (tile, rows))
        });
        let places = places.map(move |(tile, rows)| {
            let (here, behind) = rest.take().map(|dw| dw.split_at(rows.len())).unzip();
            rest = behind;
            ((tile, rows), here)
        });
        let rooms = scratch.chunks_exact_mut(cut.scratch()).take(cut.threads);
        let enter = |room| GradientScratch::cut(&mut Parts::of(room), cut);
        share(rooms, enter, places.zip(sums), |((place, dw), dbias), scratch| {
            let (tile, rows) = place;
            let bands = |store| Bands {
                store,
                pieces: cut.pieces(),
                tiles: kept.span.len(),
                tile,
                per_range: cut.range / BAND,
                padded: cut.padded_rows(),
            };
            let motion = cut.spec.ddh.then(|| (bands(factors.motion), ddh_along));
            let bands = bands(factors.store);
            if let Some(sums) = dbias {
                self.head_bias(kept, bands, rows.start, sums, scratch.rows);
            }
            if let Some(dw) = dw {
                self.head_rows(kept, bands, rows, (along, motion), dw, fresh, scratch.rows);
            }
        });
    }

    /// (C19) or (C30) of some classes of a tile, from its row `first` on.
    fn head_bias(
        &self,
        kept: &Kept<'_>,
        bands: Bands<'_>,
        first: usize,
        sums: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (cut, count) = (self.cut, kept.tokens.len());
        if cut.spec.bf16 {
            for range in tiles(0..count, cut.range) {
                let (da, tokens) = (cut.gradients(bands.from(range.start / BAND, 0)), range.len());
                let rows = matrix::BiasRows { da, first, tokens, sums, scratch };
                cut.level.run_tiles(rows).unwrap_or_default();
            }
            return;
        }
        for (number, tokens) in tiles(0..count, BAND).enumerate() {
            let band = bands.from(number, first);
            cut.level.run(BiasRows { band, sums, tokens: tokens.len() });
        }
    }

    /// (C18) or (C29) of some rows of a tile, a slice of their elements at a time in memory of the thread.
    #[allow(clippy::too_many_arguments)]
    fn head_rows(
        &self,
        kept: &Kept<'_>,
        bands: Bands<'_>,
        rows: Range<usize>,
        h: (&[f32], Option<(Bands<'_>, &[f32])>),
        mut dw: Head<'_>,
        fresh: bool,
        sums: &mut [f32],
    ) {
        let (cut, all) = (self.cut, 0..kept.tokens.len().div_ceil(BAND));
        let some = || runs(kept.chosen, all.clone(), bands.tile).next().is_some();
        if !fresh && !some() {
            return;
        }
        for elements in tiles(0..cut.dim, SLICE) {
            if !fresh {
                dw.read(rows.len(), &elements, sums);
            }
            let next = elements.end..cut.dim.min(elements.end + SLICE);
            let then = dw.lines(rows.len(), next);
            match cut.spec.bf16 {
                true => self.bf16_head_rows(kept, bands, &rows, h.0, &elements, (sums, fresh)),
                false => self.f32_head_rows(kept, bands, &rows, h, &elements, (sums, fresh, then)),
            }
            dw.write(rows.len(), &elements, sums);
        }
    }

    /// The products of [`Sweep::head_rows`], of a slice of elements.
    fn f32_head_rows(
        &self,
        kept: &Kept<'_>,
        bands: Bands<'_>,
        rows: &Range<usize>,
        (along, motion): (&[f32], Option<(Bands<'_>, &[f32])>),
        elements: &Range<usize>,
        (sums, mut fresh, then): (&mut [f32], bool, Lines),
    ) {
        let (cut, count) = (self.cut, kept.tokens.len());
        for run in runs(kept.chosen, 0..count.div_ceil(BAND), bands.tile) {
            cut.level.run(HeadRows {
                bands,
                first: rows.start,
                classes: rows.len(),
                tokens: run.start * BAND..count.min(run.end * BAND),
                h: &along[elements.start * cut.chunk..],
                motion: motion.map(|(da, ddh)| (da, &ddh[elements.start * cut.chunk..])),
                panel: cut.chunk * cut.cols,
                elements: elements.len(),
                sums,
                fresh,
                then,
            });
            fresh = false;
        }
        if fresh {
            sums.fill(0.0);
        }
    }

    /// The same in bf16.
    fn bf16_head_rows(
        &self,
        kept: &Kept<'_>,
        bands: Bands<'_>,
        rows: &Range<usize>,
        along: &[f32],
        elements: &Range<usize>,
        (sums, fresh): (&mut [f32], bool),
    ) {
        let cut = self.cut;
        for range in tiles(0..kept.tokens.len(), cut.range) {
            let rows = matrix::HeadRows {
                da: cut.gradients(bands.from(range.start / BAND, 0)),
                first: rows.start,
                classes: rows.len(),
                tokens: range.len(),
                h: &along
                    [(range.start + elements.start / BLOCK * cut.chunk) * cut.along() * SIDE..],
                along: cut.along(),
                panel: cut.chunk,
                elements: elements.len(),
                sums,
                fresh: fresh && range.start == 0,
            };
            cut.level.run_tiles(rows).unwrap_or_default();
        }
    }

    /// (C17) or (C28): added to the sums of dh of these tokens.
    pub fn hidden_gradient(
        &self,
        kept: &Kept<'_>,
        factors: Factors<'_>,
        sums: &mut [f32],
        scratch: &mut [f32],
    ) {
        let cut = self.cut;
        let blocks =
            tiles(0..kept.tokens.len(), cut.range).flat_map(|range| tiles(range, cut.block));
        let places = blocks.flat_map(|block| {
            tiles(0..cut.dim, cut.slice).map(move |elements| (block.clone(), elements))
        });
        let rooms = scratch.chunks_exact_mut(cut.scratch()).take(cut.threads);
        let enter = |room| GradientScratch::cut(&mut Parts::of(room), cut);
        let tasks = places.zip(sums.chunks_mut(cut.slab()));
        share(rooms, enter, tasks, |((block, elements), slab), scratch| {
            let all = self.block(kept, factors, block, elements, scratch);
            let spans = cut.spans();
            if spans == 1 {
                return slab.copy_from_slice(all);
            }
            let span = kept.span.start / cut.span;
            let sums = Sums::cut(&mut Parts::of(slab), spans, cut.leaf_len());
            let mut sums = sums.after(span);
            sums.push(cut.level, |to| to.copy_from_slice(all));
            if span + 1 == spans {
                sums.finish(cut.level);
            }
        });
    }

    /// (C17) or (C28) of some tokens and elements over the tiles of the span.
    fn block<'s>(
        &self,
        kept: &Kept<'_>,
        factors: Factors<'_>,
        block: Range<usize>,
        elements: Range<usize>,
        scratch: &'s mut GradientScratch<'_>,
    ) -> &'s [f32] {
        let cut = self.cut;
        let (range, within) = (block.start / cut.range, block.start % cut.range);
        let bands = block.start / BAND..block.end.div_ceil(BAND);
        let GradientScratch { rows, sums } = scratch;
        sums.clear();
        for (number, tile) in kept.span.clone().enumerate() {
            let place = (range * kept.span.len() + number) * cut.tile_len();
            let place = place + within * cut.padded_rows();
            if cut.spec.bf16 {
                let da = cut.gradients(&factors.store[place..]);
                let classes = cut.classes(tile);
                sums.push(cut.level, |sums| {
                    self.bf16_leaf((da, block.len()), &classes, &elements, rows, sums);
                });
                continue;
            }
            let (classes, next) = (cut.classes(tile), cut.classes((tile + 1).min(kept.span.end)));
            let runs = || runs(kept.chosen, bands.clone(), number);
            let some = runs().next();
            let of_second = self.operands.ddw.map(|ddw| (factors.motion, ddw));
            let pairs = [Some((factors.store, self.operands.w)), of_second];
            sums.push(cut.level, |sums| {
                if some.as_ref() != Some(&bands) {
                    sums.fill(0.0);
                }
                if some.is_none() {
                    return;
                }
                for (number, (da, w)) in pairs.into_iter().flatten().enumerate() {
                    pack::slice(w, &classes, elements.clone(), cut.rows, rows);
                    let then = w.lines(next.clone(), elements.clone());
                    for run in runs() {
                        let first = run.start * BAND - block.start;
                        cut.level.run(HiddenLeaf {
                            da: &da[place + first * cut.padded..],
                            padded: cut.padded,
                            classes: classes.len(),
                            tokens: block.len().min(run.end * BAND - block.start) - first,
                            w: rows,
                            elements: elements.len(),
                            sums: &mut sums[first..],
                            stride: cut.block,
                            fresh: number == 0,
                            then,
                        });
                    }
                }
            });
        }
        sums.finish(cut.level)
    }

    /// (C17) or (C28) in bf16, of some tokens and elements over a tile of classes, with memory for a copy of w.
    fn bf16_leaf(
        &self,
        (da, tokens): (matrix::Rounded<'_>, usize),
        classes: &Range<usize>,
        elements: &Range<usize>,
        copy: &mut [f32],
        sums: &mut [f32],
    ) {
        let factors = [Some(self.operands.w), self.operands.ddw];
        for (order, w) in factors.into_iter().flatten().enumerate() {
            let Some(w) = w.bf16() else { return };
            pack::class_tiles(&BitRows::new(w), classes, elements, Form::Columns, copy);
            let leaf = matrix::HiddenLeaf {
                da,
                order,
                classes: classes.len(),
                tokens,
                w: copy,
                elements: elements.len(),
                sums: &mut *sums,
                stride: self.cut.block,
                fresh: order == 0,
            };
            self.cut.level.run_tiles(leaf).unwrap_or_default();
        }
    }

    /// Writes dh of these tokens from their sums, or adds it to what `dh` holds. The rows of the others must
    /// be 0 already.
    pub fn write_hidden(
        &self,
        tokens: &[Token],
        sums: &[f32],
        dh: &mut TensorMut<'_, Ix2>,
        adds: bool,
    ) {
        let cut = self.cut;
        let done = match cut.spans() {
            1 => 0,
            spans => (1 + spans.trailing_zeros() as usize) * cut.leaf_len(),
        };
        let blocks = || tokens.chunks(cut.range).flat_map(|range| range.chunks(cut.block));
        let spans = blocks().map(|tokens| tokens[0].index..tokens[tokens.len() - 1].index + 1);
        let rows = cut_along(dh.view_mut(), 0, spans);
        let tasks = blocks().zip(rows).zip(sums.chunks(cut.slices() * cut.slab()));
        share(
            0..cut.threads,
            |_| [0.0; SLICE],
            tasks,
            |((tokens, mut dh), sums), row| {
                for (elements, sums) in tiles(0..cut.dim, cut.slice).zip(sums.chunks(cut.slab())) {
                    for (i, token) in tokens.iter().enumerate() {
                        let column = sums[done + i..].iter().step_by(cut.block);
                        let row = &mut row[..elements.len()];
                        row.iter_mut().zip(column).for_each(|(x, &sum)| *x = sum);
                        let at = token.index - tokens[0].index;
                        let mut place = dh.view_mut().slice(s![at, elements.clone()]);
                        match adds {
                            true => place.add(row),
                            false => place.write(row, 1.0),
                        }
                    }
                }
            },
        );
    }

    /// Writes rows of dw from sums that were kept apart.
    pub fn write_head(&self, sums: &[f32], dw: TensorMut<'_, Ix2>) {
        let (classes, stride) = (dw.shape()[0], self.cut.dim.next_multiple_of(self.cut.cols));
        let rows = cut_along(dw, 0, tiles(0..classes, TILE));
        let tasks = rows.zip(sums.chunks(TILE * stride));
        share(
            0..self.cut.threads,
            |_| (),
            tasks,
            |(mut dw, sums), ()| {
                dw.write_rows(sums, stride, 1.0);
            },
        );
    }
}

/// Rows of dw are asked for so many rows before they are read or written.
const AHEAD: usize = 8;

/// Asks for some elements of a row, if there is such a row.
fn ask_for(x: &[f32], stride: usize, row: usize, elements: &Range<usize>) {
    let row = x.get(row * stride..).and_then(|row| row.get(elements.clone()));
    row.into_iter().for_each(prefetch);
}

/// The memory of dw, if it can be summed in place.
pub fn in_place<'d>(dw: &'d mut TensorMut<'_, Ix2>) -> Option<&'d mut [f32]> {
    match dw {
        TensorMut::F32(dw) => dw.as_slice_mut(),
        _ => None,
    }
}

/// True if the sums of dw must be kept beside it.
pub fn is_apart(gradients: &mut Gradients<'_>) -> bool {
    gradients.dw.as_mut().is_some_and(|dw| in_place(dw).is_none())
}

#[cfg(test)]
mod tests {
    use super::super::choice::Chosen;
    use super::super::choice::place;
    use super::super::cut::{Cut, MEASURE, SweepSpec};
    use super::super::logits::{Link, Wanted};
    use super::super::operands::Operands;
    use super::*;
    use crate::{Level, Tensor};
    use etalon_problem::LinearCrossEntropy;
    use ndarray::{Array1, Array2};

    /// (C17) and (C18) of bands of gradients that are given, in a span of all tiles.
    fn products(sweep: &Sweep<'_, '_>, kept: &Kept<'_>, store: &[f32]) -> [Array2<f32>; 2] {
        let (cut, operands) = (sweep.cut, sweep.operands);
        let factors = Factors { store, motion: &[] };
        let mut along = vec![0.0; cut.chunk * cut.dim.next_multiple_of(cut.cols)];
        pack::along(operands.h, kept.tokens, (cut.chunk, cut.cols), 1, &mut along);
        let mut scratch = vec![f32::NAN; cut.scratch()];
        // Sums already in place are kept where nothing is fresh.
        let mut dw = Array2::from_elem((cut.vocab, cut.dim), 1.0);
        for fresh in [true, false] {
            let dw = dw.as_slice_mut().map(|dw| Head::Sums(dw, cut.dim));
            let h = (factors, [&along[..], &[]]);
            sweep.head_gradients(kept, h, dw, None, fresh, &mut scratch);
        }
        let mut sums = vec![f32::NAN; 3 * cut.blocks() * cut.slices() * cut.slab()];
        sweep.hidden_gradient(kept, factors, &mut sums, &mut scratch);
        let mut dh = Array2::zeros((cut.tokens, cut.dim));
        sweep.write_hidden(kept.tokens, &sums, &mut TensorMut::from(dh.view_mut()), false);
        [dh, dw]
    }

    /// NaN in the gradients of a tile that is left out reaches nothing: neither product reads it.
    #[test]
    fn tiles_that_are_left_out_are_not_read() {
        let problem = LinearCrossEntropy::new(250, 300, 700);
        let wave = |(i, j): (usize, usize)| ((17 * i + 5 * j) as f32).sin();
        let (h, w) =
            (Array2::from_shape_fn((250, 300), wave), Array2::from_shape_fn((700, 300), wave));
        let targets = Array1::zeros(250);
        let operands = Operands {
            h: Tensor::from(h.view()),
            w: Tensor::from(w.view()),
            bias: None,
            targets: targets.view(),
            class_weights: None,
            token_weights: None,
            ddh: None,
            ddw: None,
            ddbias: None,
        };
        let tokens: Vec<_> = (0..250).map(|index| Token { index, ..Token::default() }).collect();
        // Bands and tiles: of the last tile, and of the second band, nothing is left.
        let left_out = [(0, 0), (1, 0), (1, 1), (0, 2), (1, 2), (2, 2)];
        for &level in Level::available() {
            let spec = SweepSpec { dh: true, dw: true, filter: true, ..SweepSpec::default() };
            let cut = &Cut::new(&problem, level, spec, (250, 3), 1);
            let per_range = cut.range / BAND;
            let (mut measures, band_len) = (vec![0.0; 9 * MEASURE], cut.padded * BAND);
            let (mut store, mut poisoned) = (vec![0.0; 9 * band_len], vec![0.0; 9 * band_len]);
            for (band, tile) in (0..3).flat_map(|band| (0..3).map(move |tile| (band, tile))) {
                let at = place(per_range, 3, band, tile);
                let here = at / MEASURE * band_len..(at / MEASURE + 1) * band_len;
                let is_left_out = left_out.contains(&(band, tile));
                measures[at] = f32::from(u8::from(is_left_out));
                if is_left_out {
                    poisoned[here].fill(f32::NAN);
                    continue;
                }
                for v in 0..cut.classes(tile).len() {
                    for i in 0..BAND.min(250 - band * BAND) {
                        let da = wave((band * BAND + i, 3 * (tile * TILE + v)));
                        store[here.start + v * BAND + i] = da;
                        poisoned[here.start + v * BAND + i] = da;
                    }
                }
            }
            let wanted = Wanted { u: false, s: false, argmax: false };
            let link = Link::new(&problem);
            let sweep = Sweep { cut, operands: &operands, link, wanted, weights: &[] };
            let kept = |chosen| Kept {
                tokens: &tokens,
                pulls: &[],
                totals: &[],
                pull_motions: &[],
                motions: &[],
                span: 0..3,
                entropy: false,
                chosen,
            };
            let chosen = Chosen { measures: &measures, tiles: 3, per_range };
            let found = products(&sweep, &kept(Some(chosen)), &poisoned);
            assert_eq!(found, products(&sweep, &kept(None), &store), "{level}");
        }
    }
}
