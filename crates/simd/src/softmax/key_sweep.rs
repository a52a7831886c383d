//! The sweep of the keys of a backward pass, which may also add up dq.

use super::block::Pair;
use super::gradient::Gradient;
use super::kernels::{KeyTile, ShareTile};
use super::ordered_sum::{Guard, OrderedSum, Seen};
use super::scratch::Scratch;
use super::stats::{RowStats, Stats};
use super::tasks::{KeyTask, RowTask};
use super::wave::Wave;
use crate::aligned::Aligned;
use crate::tile::STRIDE;
use crate::tiles::tiles;
use etalon_problem::Error;
use ndarray::s;
use std::collections::VecDeque;
use std::ops::Range;

/// The sums of dq of the tiles of queries of each slot, in the order of heads and rows.
type Sums<'t, 'o> = Vec<Vec<OrderedSum<'t, 'o>>>;

/// The sweep of the keys: dk, dv, perhaps dbias, and with `sums` dq.
pub struct KeySweep<'a, 't, 'o> {
    pub wave: Wave<'a>,
    pub body: Gradient,
    pub sums: Option<Sums<'t, 'o>>,
}

/// The sums of dq of a wave, in `memory` of each slot.
pub fn ordered_sums<'t, 'o>(
    wave: Wave<'_>,
    mut dq: Vec<RowTask<'o>>,
    memory: &'t mut [Aligned],
) -> Sums<'t, 'o> {
    dq.sort_by_key(|task| (task.place.head, task.place.rows.start));
    let (cut, scores) = (wave.work.schedule.cut, wave.work.inputs.scores);
    let size = cut.queries * cut.stride(scores.extents.dim);
    let mut memory: Vec<_> =
        memory.iter_mut().map(|sum| sum.chunks_exact_mut(size.max(1))).collect();
    let mut sums: Vec<_> = wave.slots.iter().map(|_| Vec::new()).collect();
    for RowTask { place, results: [dq, _], .. } in dq {
        let slot = place.slot(scores) - wave.first;
        let pair = wave.pair_at(&place, Stats::NONE);
        let seen = Seen { pair, rows: place.rows, keys: cut.keys };
        let memory = memory[slot].next().unwrap_or_default();
        sums[slot].extend(dq.map(|dq| OrderedSum::new(&seen, memory, dq)));
    }
    sums
}

/// A share of dq that waits for its turn: whose sum, of which tile, and where it is.
type Waiting<'g, 't, 'o, 'p> = (&'g OrderedSum<'t, 'o>, Seen<'p>, usize);

impl KeySweep<'_, '_, '_> {
    /// One task per tile of keys.
    pub fn run(&self, tasks: Vec<KeyTask<'_>>, stats: &[Vec<RowStats>]) -> Result<(), Error> {
        self.wave.key_sweep(tasks, stats, |task, pairs, scratch| {
            let sums = self.sums.as_ref().map(|sums| &sums[task.slot - self.wave.first][..]);
            let _guard = Guard(sums);
            self.tile(task, pairs, sums, scratch);
        })
    }

    /// One tile of keys against all query heads that share the key head. The last queries come
    /// first: so tiles of a band of keys begin with queries that no tile before them sees, and need
    /// not wait for each other.
    fn tile(
        &self,
        KeyTask { cols, bias, .. }: &mut KeyTask<'_>,
        pairs: &[Pair<'_>],
        sums: Option<&[OrderedSum<'_, '_>]>,
        scratch: &mut Scratch,
    ) {
        let schedule = self.wave.work.schedule;
        let (cut, shares) = (schedule.cut, schedule.shares());
        let mut ahead: VecDeque<Waiting<'_, '_, '_, '_>> = VecDeque::with_capacity(shares);
        for (head, &pair) in pairs.iter().enumerate() {
            let mut dbias = bias.get_mut(head);
            let queries = pair.rule.sequence.queries;
            let count = queries.div_ceil(cut.queries);
            for (number, rows) in tiles(0..queries, cut.queries).enumerate().rev() {
                let dbias = dbias.as_mut().map(|to| to.view_mut().slice(s![rows.clone(), ..]));
                let seen = Seen { pair, rows, keys: cut.keys };
                if !seen.sees(cols) {
                    dbias.into_iter().for_each(|mut dbias| dbias.fill(0.0));
                    continue;
                }
                // The first that is free: mostly the one that is still in the cache.
                let free = |share: &usize| ahead.iter().all(|(_, _, taken)| taken != share);
                let share = (0..shares).find(free).unwrap_or(0);
                let (body, rows, cols) = (self.body, seen.rows.clone(), cols.clone());
                let tile = KeyTile { body, pair, rows, cols: cols.clone(), share, scratch };
                self.wave.work.level.run(tile);
                if let Some(mut dbias) = dbias {
                    // (B9) The sum of one term, 0 + ds, in which zeros have no sign.
                    dbias.write_each(&scratch.tiles.shares[share].ds, STRIDE, |ds| 0.0 + ds);
                }
                let Some(sums) = sums else { continue };
                ahead.push_back((&sums[head * count + number], seen, share));
                // One has to be free for what is computed next.
                self.pass_on(&mut ahead, shares - 1, &cols, scratch);
            }
        }
        self.pass_on(&mut ahead, 0, cols, scratch);
    }

    /// Adds shares of dq whose turn it is, the oldest first, and waits until at most `kept` are left.
    fn pass_on(
        &self,
        ahead: &mut VecDeque<Waiting<'_, '_, '_, '_>>,
        kept: usize,
        cols: &Range<usize>,
        scratch: &Scratch,
    ) {
        while let Some((sum, seen, share)) = ahead.front() {
            let stride = scratch.cut.stride(seen.pair.dim);
            let Some(mut turn) = sum.take(seen, cols, stride, ahead.len() > kept) else { return };
            let (pair, rows, cols, dq) = (seen.pair, seen.rows.clone(), cols.clone(), &mut *turn);
            let share = &scratch.tiles.shares[*share];
            self.wave.work.level.run(ShareTile { pair, rows, cols, dq, share });
            drop(turn);
            ahead.pop_front();
        }
    }
}
