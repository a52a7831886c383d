//! The sweep of the keys of a backward pass, which may also add up dq.

use super::bf16_gradient::{Bf16KeyTile, Bf16ShareTile};
use super::block::Body;
use super::diagonals::DiagonalTile;
use super::engine::run;
use super::kernels::{KeyTile, ShareTile};
use super::ordered_sum::{Guard, OrderedSum, Seen};
use super::pair::Pair;
use super::schedule::AHEAD;
use super::scratch::Scratch;
use super::stats::{RowStats, Stats};
use super::tasks::Task;
use super::wave::Wave;
use crate::tile::STRIDE;
use crate::tiles::tiles;
use ndarray::s;
use std::ops::Range;

/// The sweep of the keys: dk, dv, perhaps dbias, and dq where there are sums of it.
pub struct KeySweep<'a, 't, 'o, B> {
    pub wave: Wave<'a>,
    pub body: B,
    pub stats: &'a RowStats<'a>,
    /// Of the tiles of queries, in the order of the heads of the wave and of rows.
    pub sums: &'a [OrderedSum<'t, 'o>],
}

/// Begins the sums of dq of a wave.
pub fn begin_sums<'o>(wave: Wave<'_>, dq: &mut [Task<'o>], sums: &mut [OrderedSum<'_, 'o>]) {
    let Wave { work, .. } = wave;
    let (cut, tiles) = (work.schedule.cut, work.packing.longest_tiles());
    for Task { place, slot, member, results: [dq, _], .. } in dq {
        let pair = wave.pair(*slot, *member, Stats::NONE);
        let first = wave.head(*slot, *member) * tiles;
        let sum = &mut sums[first + place.rows.start / cut.queries];
        let seen = Seen { pair, rows: place.rows.clone(), keys: cut.keys };
        dq.take().into_iter().for_each(|dq| sum.begin(&seen, dq));
    }
}

/// A share of dq that waits for its turn: whose sum, of which tile, and where it is.
type Waiting<'a, 't, 'o> = (&'a OrderedSum<'t, 'o>, Seen<'a>, usize);

/// The waiting shares of one task, the oldest first.
type Queue<'a, 't, 'o> = [Option<Waiting<'a, 't, 'o>>; AHEAD];

impl<B: Body> KeySweep<'_, '_, '_, B> {
    /// One task per tile of keys, each with its partial sums of dbias and dτ, if there are such.
    pub fn run<'k, 'r: 'k>(
        &self,
        scratch: &mut [Scratch<'_>],
        tasks: impl Iterator<Item = (&'k mut Task<'r>, &'k mut [f32])> + Send,
    ) {
        self.wave.key_sweep(scratch, tasks, |task, partial, scratch| {
            let _guard = Guard(self.sums);
            self.tile(task, partial, scratch);
        });
    }

    /// One tile of keys against all query heads that share the key head. The last queries come
    /// first: so tiles of a band of keys begin with queries that no tile before them sees, and need
    /// not wait for each other.
    fn tile(&self, task: &mut Task<'_>, partial: &mut [f32], scratch: &mut Scratch<'_>) {
        let Wave { work, .. } = self.wave;
        partial.fill(0.0);
        let mut partials = partial.chunks_mut(work.schedule.diagonals.max(1));
        let (cut, shares) = (work.schedule.cut, work.schedule.shares());
        let (cols, longest) = (task.place.rows.clone(), work.packing.longest_tiles());
        let mut ahead: Queue<'_, '_, '_> = [const { None }; AHEAD];
        for member in 0..work.operands.scores.group() {
            let pair = self.wave.pair(task.slot, member, Stats::NONE);
            let head = self.wave.head(task.slot, member);
            let partial = partials.next().unwrap_or_default();
            scratch.tiles.tau = 0.0;
            let mut dbias =
                task.beside.as_mut().map(|bias| bias.view_mut().slice(s![member, .., ..]));
            let queries = tiles(0..pair.rule.of.sequence.queries, cut.queries);
            for (number, rows) in queries.enumerate().rev() {
                let dbias = dbias.as_mut().map(|to| to.view_mut().slice(s![rows.clone(), ..]));
                let pair = Pair { stats: self.stats.tile(head, rows.start), ..pair };
                let seen = Seen { pair, rows, keys: cut.keys };
                if !seen.sees(&cols) {
                    dbias.into_iter().for_each(|mut dbias| dbias.fill(0.0));
                    continue;
                }
                // The first that is free: mostly the one that is still in the cache.
                let free =
                    |share: &usize| ahead.iter().flatten().all(|(_, _, taken)| taken != share);
                let share = (0..shares).find(free).unwrap_or(0);
                let (body, rows, keys) = (self.body, seen.rows.clone(), cols.clone());
                let has_tiles = cut.bf16 && B::HAS_TILES;
                if has_tiles {
                    let (ds, dbias) = (body.has_ds(), dbias.is_some());
                    let tile = Bf16KeyTile { ds, dbias, pair, rows, cols: keys, share, scratch };
                    work.level.run_tiles(tile).unwrap_or_default();
                } else {
                    let tile = KeyTile { body, pair, rows, cols: keys, share, scratch };
                    run(work.level, cut.bf16, tile);
                }
                if let Some(mut dbias) = dbias {
                    // (B9) The sum of one term, 0 + ds, in which zeros have no sign.
                    let ds = match has_tiles {
                        true => &*scratch.sums.bias,
                        false => &*scratch.tiles.shares[share].ds,
                    };
                    dbias.write_each(ds, STRIDE, |ds| 0.0 + ds);
                }
                if let Some((_, sums)) = partial.split_last_mut() {
                    let (pair, rows, cols) = (seen.pair, seen.rows.clone(), cols.clone());
                    let weights = scratch.tiles.weights(B::BIAS, share);
                    let (strips, height) = (&*scratch.tiles.shares[share].strips, cut.rows);
                    let tile = DiagonalTile { pair, rows, cols, weights, strips, height, sums };
                    work.level.run(tile);
                }
                let Some(sum) = self.sums.get(head * longest + number) else { continue };
                if let Some(last) = ahead.iter_mut().find(|waiting| waiting.is_none()) {
                    *last = Some((sum, seen, share));
                }
                // One has to be free for what is computed next.
                self.pass_on(&mut ahead, shares - 1, &cols, scratch);
            }
            if let Some((tau, _)) = partial.split_last_mut() {
                *tau = scratch.tiles.tau as f32;
            }
        }
        self.pass_on(&mut ahead, 0, &cols, scratch);
    }

    /// Adds shares of dq whose turn it is, the oldest first, and waits until at most `kept` are left.
    fn pass_on(
        &self,
        ahead: &mut Queue<'_, '_, '_>,
        kept: usize,
        cols: &Range<usize>,
        scratch: &mut Scratch<'_>,
    ) {
        let mut left = ahead.iter().flatten().count();
        while let Some((sum, seen, share)) = &ahead[0] {
            let stride = scratch.cut.stride(seen.pair.dim);
            let added = sum.add(seen, cols, stride, left > kept, |dq| {
                let (pair, rows, cols) = (seen.pair, seen.rows.clone(), cols.clone());
                let (level, share) = (self.wave.work.level, &scratch.tiles.shares[*share]);
                if scratch.cut.bf16 && B::HAS_TILES {
                    let pieces = scratch.tiles.pieces;
                    let tile = Bf16ShareTile { pair, rows, cols, dq, share, pieces };
                    level.run_tiles(tile).unwrap_or_default();
                } else {
                    let words = &mut scratch.words;
                    let tile = ShareTile { pair, rows, cols, dq, share, words };
                    run(level, scratch.cut.bf16, tile);
                }
            });
            if !added {
                return;
            }
            ahead[0] = None;
            ahead.rotate_left(1);
            left -= 1;
        }
    }
}
