//! Gradients of kept logits, in their place: (C16); in the second order with their motions, (C27).

use super::cut::{LogitScratch, TILE};
use super::gradient::{LogitGradients, Pulls};
use super::kept::Kept;
use super::matrix;
use super::second::gradient::{LogitGradientMotions, SECOND_PULLS, SecondPulls};
use super::totals::{Classes, Sweep};
use crate::parallel::share;
use crate::tile::BAND;
use crate::tiles::tiles;
use crate::workspace::Parts;
use std::ops::Range;

impl Sweep<'_, '_> {
    /// (C27) in place of the logits, and (C16) in place of their motions.
    pub fn logit_gradient_motions(
        &self,
        kept: &Kept<'_>,
        (store, motion): (&mut [f32], &mut [f32]),
    ) {
        let cut = self.cut;
        let (len, tile_len) = (kept.span.len() * cut.tile_len(), cut.tile_len());
        let ranges = tiles(0..kept.tokens.len(), cut.range);
        let stores = store.chunks_mut(len).zip(motion.chunks_mut(len));
        let tasks = ranges.zip(stores).flat_map(|(range, (store, motion))| {
            let planes = store.chunks_mut(tile_len).zip(motion.chunks_mut(tile_len));
            kept.span.clone().zip(planes).map(move |place| (range.clone(), place))
        });
        let enter = |_| ([0.0; TILE], [0.0; SECOND_PULLS]);
        share(0..cut.threads, enter, tasks, |(range, (tile, (z, motion))), (weights, side)| {
            let classes = cut.classes(tile);
            let weights = self.class_weights(&classes, weights);
            let bands = z.chunks_mut(cut.padded * BAND).zip(motion.chunks_mut(cut.padded * BAND));
            for (band, (z, motion)) in tiles(range, BAND).zip(bands) {
                let pulls = [kept.pulls, kept.pull_motions].map(|pulls| &pulls[band.clone()]);
                let (totals, motions) = (&kept.totals[band.clone()], &kept.motions[band.clone()]);
                let mut side = SecondPulls::cut(&mut Parts::of(side));
                side.fill(pulls, (totals, motions));
                cut.level.run(LogitGradientMotions {
                    link: self.link,
                    first: cut.first_class(tile),
                    weights,
                    classes: classes.len(),
                    z,
                    motion,
                    tokens: &kept.tokens[band],
                    pulls,
                    totals,
                    motions,
                    side: &side,
                    entropy: kept.entropy,
                    smoothing: self.wanted.s,
                });
            }
        });
    }

    /// (C16), in place of the logits.
    pub fn logit_gradients(&self, kept: &Kept<'_>, store: &mut [f32], scratch: &mut [f32]) {
        let cut = self.cut;
        let ranges = tiles(0..kept.tokens.len(), cut.range);
        let stores = store.chunks_mut(kept.span.len() * cut.tile_len());
        let tasks = ranges.zip(stores).flat_map(|(range, store)| {
            let places = kept.span.clone().zip(store.chunks_mut(cut.tile_len()));
            places.map(move |place| (range.clone(), place))
        });
        let rooms = scratch.chunks_exact_mut(cut.scratch()).take(cut.threads);
        let enter = |room| LogitScratch::cut(&mut Parts::of(room), cut);
        share(rooms, enter, tasks, |(tokens, (tile, store)), scratch| {
            let range = cut.classes(tile);
            let weights = self.class_weights(&range, scratch.weights);
            let classes = Classes { range, first: cut.first_class(tile), bias: &[], weights };
            let (first, rest) = store.split_at_mut(cut.plane_len());
            let bands = first.chunks_mut(cut.padded * BAND);
            let mut rest = rest.chunks_mut(cut.padded * BAND);
            for (tokens, store) in tiles(tokens, BAND).zip(bands) {
                if !cut.spec.bf16 {
                    self.band_gradients(kept, &classes, tokens, store);
                    continue;
                }
                let z = &mut *scratch.z;
                z.copy_from_slice(store);
                let to = [store, rest.next().unwrap_or_default()];
                self.rounded_gradients(kept, &classes, tokens, z, to);
            }
        });
    }

    /// (C16) of the tokens of a band, in place of their logits.
    pub fn band_gradients(
        &self,
        kept: &Kept<'_>,
        classes: &Classes<'_>,
        tokens: Range<usize>,
        z: &mut [f32],
    ) {
        let (pulls, totals) = (&kept.pulls[tokens.clone()], &kept.totals[tokens.clone()]);
        let mut side = [0.0; 6 * BAND];
        let mut side = Pulls::cut(&mut Parts::of(&mut side), BAND);
        side.fill(pulls, totals);
        self.cut.level.run(LogitGradients {
            link: self.link,
            first: classes.first,
            weights: classes.weights,
            classes: classes.range.len(),
            z,
            tokens: &kept.tokens[tokens],
            pulls,
            totals,
            side: &side,
            entropy: kept.entropy,
            smoothing: self.wanted.s,
        });
    }

    /// The same in bf16, from logits elsewhere: those of the first piece, and of the second where there are two.
    pub fn rounded_gradients(
        &self,
        kept: &Kept<'_>,
        classes: &Classes<'_>,
        tokens: Range<usize>,
        z: &mut [f32],
        to: [&mut [f32]; 2],
    ) {
        let count = tokens.len();
        self.band_gradients(kept, classes, tokens, z);
        let round = matrix::Round {
            da: z,
            classes: classes.range.len(),
            tokens: count,
            to,
            pieces: self.cut.pieces(),
        };
        self.cut.level.run_tiles(round).unwrap_or_default();
    }
}
