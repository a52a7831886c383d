//! Gradients of kept logits, in their place: (C16); in the second order with their motions, (C27).

use super::cut::LogitScratch;
use super::gradient::{LogitGradients, Pulls};
use super::kept::Kept;
use super::matrix;
use super::second::gradient::{LogitGradientMotions, SECOND_PULLS, SecondPulls};
use super::totals::{Classes, Sweep, in_turn};
use crate::parallel::share;
use crate::tile::BAND;
use crate::tiles::tiles;
use crate::workspace::Parts;
use std::ops::Range;

impl Sweep<'_, '_> {
    /// (C16), in place of the logits; in the second order (C27) there, and (C16) in place of their motions.
    pub fn logit_gradients(
        &self,
        kept: &Kept<'_>,
        (store, motion): (&mut [f32], &mut [f32]),
        scratch: &mut [f32],
    ) {
        let (cut, len) = (self.cut, self.cut.padded * BAND);
        let tasks = tiles(0..kept.tokens.len(), cut.range)
            .flat_map(|range| kept.span.clone().map(move |tile| (range.clone(), tile)));
        let motions = in_turn(Some(motion.chunks_mut(cut.tile_len())));
        let tasks = tasks.zip(store.chunks_mut(cut.tile_len())).zip(motions);
        let rooms = scratch.chunks_exact_mut(cut.scratch()).take(cut.threads);
        let enter = |room| LogitScratch::cut(&mut Parts::of(room), cut);
        share(rooms, enter, tasks, |(((tokens, tile), store), motions), scratch| {
            let range = cut.classes(tile);
            let weights = self.class_weights(&range, scratch.weights);
            let first = cut.first_class(tile);
            let classes = Classes { range, first, bias: &[], ddbias: &[], weights };
            let bands = tiles(tokens, BAND).enumerate();
            if cut.spec.bf16 {
                for (band, tokens) in bands {
                    let to = cut.places(store, band);
                    let (z, motion) = to[0].split_at(len);
                    scratch.z.copy_from_slice(z);
                    scratch.motion.copy_from_slice(motion);
                    let of = [&mut *scratch.z, &mut *scratch.motion];
                    self.rounded_gradients(kept, &classes, tokens, of, to);
                }
                return;
            }
            let mut motions = in_turn(motions.map(|motions| motions.chunks_mut(len)));
            for ((_, tokens), z) in bands.zip(store.chunks_mut(len)) {
                let motion = motions.next().flatten().unwrap_or_default();
                self.band_gradients(kept, &classes, tokens, [z, motion]);
            }
        });
    }

    /// (C16) of the tokens of a band, in place of their logits; in the second order (C27) there, and (C16) in place of
    /// their motions.
    pub fn band_gradients(
        &self,
        kept: &Kept<'_>,
        classes: &Classes<'_>,
        tokens: Range<usize>,
        [z, motion]: [&mut [f32]; 2],
    ) {
        let (pulls, totals) = (&kept.pulls[tokens.clone()], &kept.totals[tokens.clone()]);
        let (first, weights) = (classes.first, classes.weights);
        if !self.cut.spec.second {
            let mut side = [0.0; 6 * BAND];
            let mut side = Pulls::cut(&mut Parts::of(&mut side), BAND);
            side.fill(pulls, totals);
            return self.cut.level.run(LogitGradients {
                link: self.link,
                first,
                weights,
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
        let pulls = [pulls, &kept.pull_motions[tokens.clone()]];
        let motions = &kept.motions[tokens.clone()];
        let mut side = [0.0; SECOND_PULLS];
        let mut side = SecondPulls::cut(&mut Parts::of(&mut side));
        side.fill(pulls, (totals, motions));
        self.cut.level.run(LogitGradientMotions {
            link: self.link,
            first,
            weights,
            classes: classes.range.len(),
            z,
            motion,
            tokens: &kept.tokens[tokens],
            pulls,
            totals,
            motions,
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
        [z, motion]: [&mut [f32]; 2],
        [to, of_rest]: [&mut [f32]; 2],
    ) {
        let (cut, count) = (self.cut, tokens.len());
        self.band_gradients(kept, classes, tokens, [&mut *z, &mut *motion]);
        for (order, da) in [z, motion].into_iter().enumerate().take(cut.orders()) {
            let round = matrix::Round {
                da,
                classes: classes.range.len(),
                tokens: count,
                to: [&mut *to, &mut *of_rest],
                pieces: cut.pieces(),
                order,
                orders: cut.orders(),
            };
            cut.level.run_tiles(round).unwrap_or_default();
        }
    }
}
