//! The sweeps of the backward pass: which task writes which tile.

use super::backward::{Backward, Course};
use super::gradient::{BiasTile, KeyTile, Pair, QueryTile, Scratch, ShareTile};
use super::turns::{Guard, Seen, Turns};
use crate::aligned::Aligned;
use crate::heads::{
    Cut, Place, Rule, all_queries, clear, cut_rows, key_tiles, outer, places, query_rows,
    query_tiles,
};
use crate::mask::Sight;
use crate::packs::{Packing, Slot};
use crate::parallel::for_each;
use crate::tile::{MAX_KEYS, STRIDE};
use crate::{Element, Options};
use etalon_problem::{Error, Scores, Sequence, Sequences};
use ndarray::{ArrayViewMut2, ArrayViewMut4, Axis, s};
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Mutex;
use std::vec;

pub(crate) use crate::element::write_row;

/// Where the gradients are written, wave by wave.
pub(super) struct Tiles<'o, T> {
    /// Whether dk or dv is wanted.
    keys: bool,
    /// The tiles of dq of each wave to come, the last tiles first.
    dq: Option<vec::IntoIter<QueryTiles<'o, T>>>,
    /// The tiles of dk of each slot to come.
    dk: vec::IntoIter<KeyTiles<'o, T>>,
    /// The tiles of dv of each slot to come.
    dv: vec::IntoIter<KeyTiles<'o, T>>,
    /// The tiles of dbias of each slot to come, where the sweep of the keys writes them.
    dbias: Option<vec::IntoIter<PairTiles<'o, T>>>,
}

/// Tiles of queries, and where dq of each is written.
type QueryTiles<'o, T> = Vec<(Place, ArrayViewMut2<'o, T>)>;

/// The tiles of a gradient of one slot, or as many places.
type KeyTiles<'o, T> = Vec<Option<ArrayViewMut2<'o, T>>>;

/// The tiles of keys of dbias of one slot: of each query head all rows.
type PairTiles<'o, T> = Vec<Vec<ArrayViewMut2<'o, T>>>;

impl<'o, T: Element> Tiles<'o, T> {
    /// Cuts the gradients into tiles; rows of no sequence are cleared.
    pub fn new(
        scores: &Scores,
        sequences: &[Sequence],
        course: &Course,
        [dq, dk, dv]: [Option<ArrayViewMut4<'o, T>>; 3],
        dbias: Option<ArrayViewMut4<'o, T>>,
    ) -> Self {
        let cut = course.cut;
        let keys = dk.is_some() || dv.is_some();
        let dq = dq.map(|mut dq| {
            clear(&mut dq, all_queries(sequences), T::ZERO);
            let places = places(sequences, scores.extents.query_heads, |_| cut.queries);
            let tiles = query_tiles(dq, sequences, |_| cut.queries);
            let mut tiles: Vec<_> = places.into_iter().zip(tiles).collect();
            tiles.sort_by_key(|(place, _)| Reverse(place.rows.start));
            course.waves.sort(tiles, |(place, _)| place.slot(scores)).into_iter()
        });
        let [dk, dv] = [dk, dv].map(|result| {
            key_tiles(result, sequences, scores.extents.key_heads, cut.keys).into_iter()
        });
        let dbias = dbias.map(|mut dbias| {
            if scores.sequences != Sequences::Dense {
                dbias.fill(T::ZERO); // what belongs to no sequence
            }
            pair_tiles(dbias, scores, sequences, cut.keys).into_iter()
        });
        Tiles { keys, dq, dk, dv, dbias }
    }
}

/// The sweeps of one wave of a backward pass.
pub(super) struct Sweep<'a, 'b, 'p, T> {
    pub pass: &'a Backward<'b, T>,
    pub packing: &'a Packing<'p, T>,
    pub sight: &'a Sight<'p>,
    pub course: Course,
    pub options: &'a Options,
    /// The slots of the wave, packed.
    pub slots: &'a [Slot],
    /// The number of its first slot.
    pub first: usize,
    /// Scratches that no thread uses.
    pub idle: &'a Mutex<Vec<Scratch>>,
}

impl<T: Element> Sweep<'_, '_, '_, T> {
    /// The distance between two rows of `dim` elements in a sum.
    fn stride(&self, dim: usize) -> usize {
        dim.next_multiple_of(self.course.cut.cols)
    }

    fn for_each<A: Send>(
        &self,
        tasks: Vec<A>,
        body: impl Fn(A, &mut Scratch) + Sync,
    ) -> Result<(), Error> {
        for_each(self.idle, tasks, || self.pass.scratch(&self.course), body)
    }

    /// A query head of a slot.
    fn pair(&self, slot: usize, head: usize) -> Pair<'_> {
        let scores = self.pass.scores;
        let e = &scores.extents;
        let (number, key_head) = (slot / e.key_heads, slot % e.key_heads);
        let sequence = &self.packing.sequences[number];
        let Slot { keys, queries } = &self.slots[slot - self.first];
        Pair {
            rule: Rule::new(
                scores,
                self.sight,
                self.pass.bias,
                sequence,
                key_head * scores.group() + head,
            ),
            queries: &queries[head],
            keys,
            dim: e.dim,
            value_dim: self.pass.value_dim(),
        }
    }

    /// The query heads of a slot.
    fn pairs(&self, slot: usize) -> Vec<Pair<'_>> {
        (0..self.pass.scores.group()).map(|head| self.pair(slot, head)).collect()
    }

    /// (B8) dsink = −Σ π δ, added to the sum of each head; a row that saw nothing but the sink has
    /// π = 1.
    pub fn dsinks(&self, sums: &mut [f64]) {
        let Some(sinks) = self.pass.sinks else { return };
        for slot in self.first..self.first + self.slots.len() {
            for Pair { rule, queries, .. } in self.pairs(slot) {
                let sink = f64::from(sinks[rule.head]);
                let rows = queries.lse.iter().zip(&queries.delta).take(rule.sequence.queries);
                let mut sum = 0.0f64;
                for (&lse, &delta) in rows {
                    sum -= (sink - f64::from(lse)).exp() * f64::from(delta);
                }
                sums[rule.head] += sum;
            }
        }
    }

    /// dq, dk and dv of the wave, as far as they are wanted; `sums` is memory for those of dq.
    pub fn run(&self, tiles: &mut Tiles<'_, T>, sums: &mut [Aligned]) -> Result<(), Error> {
        let len = self.slots.len();
        let dk: Vec<_> = tiles.dk.by_ref().take(len).collect();
        let dv: Vec<_> = tiles.dv.by_ref().take(len).collect();
        let dq = tiles.dq.as_mut().and_then(Iterator::next).unwrap_or_default();
        let dbias = tiles.dbias.as_mut().map(|dbias| dbias.by_ref().take(len).collect());
        if self.course.fused {
            return self.key_sweep((dk, dv, dbias), Some(self.turns(dq, sums)));
        }
        if tiles.keys {
            self.key_sweep((dk, dv, dbias), None)?;
        }
        self.query_sweep(dq)
    }

    /// A tile of queries.
    fn seen(&self, place: &Place) -> Seen<'_> {
        let scores = self.pass.scores;
        let pair = self.pair(place.slot(scores), place.head % scores.group());
        Seen { pair, rows: place.rows.clone(), keys: self.course.cut.keys }
    }

    /// The sums of the tiles of dq of each slot, in the order of heads and rows.
    fn turns<'t, 'o>(
        &self,
        mut dq: QueryTiles<'o, T>,
        sums: &'t mut [Aligned],
    ) -> Vec<Vec<Turns<'t, 'o, T>>> {
        dq.sort_by_key(|(place, _)| (place.head, place.rows.start));
        let size = self.course.cut.queries * self.stride(self.pass.scores.extents.dim);
        let mut memory: Vec<_> =
            sums.iter_mut().map(|sum| sum.chunks_exact_mut(size.max(1))).collect();
        let mut turns: Vec<_> = self.slots.iter().map(|_| Vec::new()).collect();
        for (place, dq) in dq {
            let slot = place.slot(self.pass.scores) - self.first;
            let sum = memory[slot].next().unwrap_or_default();
            turns[slot].push(Turns::new(&self.seen(&place), sum, dq));
        }
        turns
    }

    /// dk, dv and perhaps dbias, one task per tile of keys; with `turns` also its part of dq.
    fn key_sweep(
        &self,
        (dk, dv, dbias): KeyResults<'_, T>,
        turns: Option<Vec<Vec<Turns<'_, '_, T>>>>,
    ) -> Result<(), Error> {
        let e = &self.pass.scores.extents;
        let mut tasks = Vec::new();
        let mut dbias = dbias.map(Vec::into_iter);
        for (slot, (dk, dv)) in dk.into_iter().zip(dv).enumerate() {
            let mut dbias = dbias.as_mut().and_then(Iterator::next).map(Vec::into_iter);
            let slot = self.first + slot;
            let keys = self.packing.sequences[slot / e.key_heads].keys;
            let tiles = Cut::tiles(0..keys, self.course.cut.keys).zip(dk.into_iter().zip(dv));
            tasks.extend(tiles.map(|(cols, (dk, dv))| {
                let dbias = dbias.as_mut().and_then(Iterator::next).unwrap_or_default();
                KeyTask { slot, cols, dk, dv, dbias }
            }));
        }
        // In the order of the turns; and with a causal mask the first keys are seen by most queries.
        tasks.sort_by_key(|task| task.cols.start);
        self.for_each(tasks, |mut task, scratch| {
            scratch.wide.fill(0.0);
            scratch.values.fill(0.0);
            let turns = turns.as_ref().map(|turns| &turns[task.slot - self.first][..]);
            let _guard = Guard(turns);
            self.key_tile(&mut task, turns, scratch);
            let (dim, value_dim) = (self.stride(e.dim), self.stride(self.pass.value_dim()));
            let scale = self.pass.scores.scale() as f32;
            task.dk.into_iter().for_each(|dk| write(dk, &scratch.wide, dim, scale));
            task.dv.into_iter().for_each(|dv| write(dv, &scratch.values, value_dim, 1.0));
        })
    }

    /// dk / σ and dv of one tile of keys, over all query heads that share the key head, its shares
    /// of dq, and its columns of dbias. The last queries come first: so tiles of a band of keys begin
    /// with queries that no tile before them sees, and need not wait for each other.
    fn key_tile(
        &self,
        task: &mut KeyTask<'_, T>,
        turns: Option<&[Turns<'_, '_, T>]>,
        scratch: &mut Scratch,
    ) {
        let KeyTask { slot, cols, dk, dv, dbias } = task;
        let (cut, level) = (self.course.cut, self.options.level);
        let shares = self.course.shares();
        let mut ahead: VecDeque<(&Turns<'_, '_, T>, Seen<'_>, usize)> =
            VecDeque::with_capacity(shares);
        for (head, pair) in self.pairs(*slot).into_iter().enumerate() {
            let mut dbias = dbias.get_mut(head);
            let queries = pair.rule.sequence.queries;
            let tiles = queries.div_ceil(cut.queries);
            for (number, rows) in Cut::tiles(0..queries, cut.queries).enumerate().rev() {
                let dbias = dbias.as_mut().map(|dbias| dbias.slice_mut(s![rows.clone(), ..]));
                let seen = Seen { pair, rows, keys: cut.keys };
                if !seen.sees(cols) {
                    dbias.into_iter().for_each(|mut dbias| dbias.fill(T::ZERO));
                    continue;
                }
                // The first that is free: mostly the one that is still in the cache.
                let free = |share: &usize| ahead.iter().all(|(_, _, taken)| taken != share);
                let share = (0..shares).find(free).unwrap_or(0);
                let (rows, keys) = (seen.rows.clone(), cols.clone());
                let (dk, dv, ds) = (dk.is_some(), dv.is_some(), turns.is_some() || dbias.is_some());
                KeyTile { pair, rows, cols: keys, dk, dv, ds, share, scratch }.run_at(level);
                if let Some(dbias) = dbias {
                    write_alone(dbias, scratch.ds(share)); // (B9)
                }
                let Some(turns) = turns else { continue };
                ahead.push_back((&turns[head * tiles + number], seen, share));
                // One has to be free for what is computed next.
                self.pass_on(&mut ahead, shares - 1, cols, scratch);
            }
        }
        self.pass_on(&mut ahead, 0, cols, scratch);
    }

    /// Adds shares of dq whose turn it is, the oldest first, and waits until at most `kept` are left.
    fn pass_on(
        &self,
        ahead: &mut VecDeque<(&Turns<'_, '_, T>, Seen<'_>, usize)>,
        kept: usize,
        cols: &Range<usize>,
        scratch: &Scratch,
    ) {
        while let Some((turns, seen, share)) = ahead.front() {
            let stride = self.stride(seen.pair.dim);
            let Some(mut turn) = turns.take(seen, cols, stride, ahead.len() > kept) else { return };
            let (pair, rows, cols, dq) = (seen.pair, seen.rows.clone(), cols.clone(), &mut *turn);
            let share = *share;
            ShareTile { pair, rows, cols, dq, share, scratch }.run_at(self.options.level);
            drop(turn);
            ahead.pop_front();
        }
    }

    /// dq, one task per tile of queries.
    fn query_sweep(&self, dq: QueryTiles<'_, T>) -> Result<(), Error> {
        self.for_each(dq, |(place, dq), scratch| {
            let Seen { pair, rows, .. } = self.seen(&place);
            QueryTile { pair, rows, scratch }.run_at(self.options.level);
            write(dq, &scratch.wide, self.stride(pair.dim), pair.rule.scale);
        })
    }

    /// dbias, one task per tile of its rows. The wave holds every slot.
    pub fn bias_sweep(&self, mut dbias: ArrayViewMut4<'_, T>) -> Result<(), Error> {
        if self.pass.scores.sequences != Sequences::Dense {
            dbias.fill(T::ZERO); // what belongs to no sequence
        }
        let e = &self.pass.scores.extents;
        let (cut, sequences) = (self.course.cut, self.packing.sequences);
        let share = self.pass.scores.group();
        let tasks = bias_tiles(dbias, sequences, e.batch, e.query_heads, cut.queries);
        self.for_each(tasks, |BiasRows { numbers, heads, rows, mut result }, scratch| {
            let pair = |number, head| self.pair(number * e.key_heads + head / share, head % share);
            let pairs: Vec<Pair<'_>> = numbers
                .iter()
                .flat_map(|&number| heads.clone().map(move |head| pair(number, head)))
                .collect();
            let keys = numbers.iter().map(|&number| sequences[number].keys).max();
            for cols in Cut::tiles(0..keys.unwrap_or(0), cut.keys) {
                let tile =
                    BiasTile { pairs: &pairs, rows: rows.clone(), cols: cols.clone(), scratch };
                tile.run_at(self.options.level);
                write(result.slice_mut(s![.., cols]), &scratch.bias, STRIDE, 1.0);
            }
        })
    }
}

/// The tiles of dk, dv and dbias of the slots of a wave.
type KeyResults<'o, T> =
    (Vec<KeyTiles<'o, T>>, Vec<KeyTiles<'o, T>>, Option<Vec<PairTiles<'o, T>>>);

/// A tile of keys, and what it writes.
struct KeyTask<'o, T> {
    slot: usize,
    cols: Range<usize>,
    dk: Option<ArrayViewMut2<'o, T>>,
    dv: Option<ArrayViewMut2<'o, T>>,
    /// Of each query head that shares the key head; or none.
    dbias: Vec<ArrayViewMut2<'o, T>>,
}

/// A result with a row of keys for each query, `[batch, query heads, queries, keys]`, in tiles of
/// keys: those of sequence s and key head h are at s·Hk + h.
fn pair_tiles<'o, A>(
    result: ArrayViewMut4<'o, A>,
    scores: &Scores,
    sequences: &[Sequence],
    size: usize,
) -> Vec<PairTiles<'o, A>> {
    let (key_heads, group) = (scores.extents.key_heads, scores.group());
    let places = |sequence: &Sequence| {
        let tiles = sequence.keys.div_ceil(size);
        (0..tiles).map(|_| Vec::with_capacity(group)).collect::<Vec<_>>()
    };
    let mut cut: Vec<PairTiles<'o, A>> = sequences
        .iter()
        .flat_map(|sequence| (0..key_heads).map(move |_| places(sequence)))
        .collect();
    for (batch, result) in outer(result).into_iter().enumerate() {
        let here = sequences.iter().enumerate().filter(|(_, sequence)| sequence.batch == batch);
        let spans: Vec<_> = here.clone().map(|(_, sequence)| query_rows(sequence)).collect();
        for (head, result) in outer(result).into_iter().enumerate() {
            for ((number, sequence), piece) in here.clone().zip(cut_rows(result, &spans)) {
                let (_, mut rest) = piece.split_at(Axis(1), sequence.key_start);
                let tiles = Cut::tiles(0..sequence.keys, size);
                for (cols, tile) in tiles.zip(&mut cut[number * key_heads + head / group]) {
                    let (piece, tail) = rest.split_at(Axis(1), cols.len());
                    tile.push(piece);
                    rest = tail;
                }
            }
        }
    }
    cut
}

/// Rows of a result in the shape of the bias, and what is summed into them.
pub(super) struct BiasRows<'o, A> {
    /// The sequences, by their numbers.
    pub numbers: Vec<usize>,
    /// The query heads.
    pub heads: Range<usize>,
    /// The rows, within the sequences.
    pub rows: Range<usize>,
    /// Where the sum goes: these rows, from the first key of the sequences on.
    pub result: ArrayViewMut2<'o, A>,
}

/// A result in the shape of the bias in tiles of rows.
pub(super) fn bias_tiles<'o, A>(
    result: ArrayViewMut4<'o, A>,
    sequences: &[Sequence],
    batch: usize,
    query_heads: usize,
    size: usize,
) -> Vec<BiasRows<'o, A>> {
    let one_for_all = result.len_of(Axis(0)) == 1 && batch > 1;
    let mut tasks = Vec::new();
    for (batch, result) in outer(result).into_iter().enumerate() {
        // One bias for a whole batch sums over its sequences, which all begin at row 0; otherwise
        // every sequence has rows of its own.
        let here = (0..sequences.len()).filter(|&number| sequences[number].batch == batch);
        let shared: Vec<Vec<usize>> = match one_for_all {
            true => vec![(0..sequences.len()).collect()],
            false => here.map(|number| vec![number]).collect(),
        };
        let tiles: Vec<(Vec<usize>, Range<usize>)> = shared
            .into_iter()
            .flat_map(|numbers| {
                let rows = numbers.iter().map(|&number| sequences[number].queries).max();
                Cut::tiles(0..rows.unwrap_or(0), size).map(move |rows| (numbers.clone(), rows))
            })
            .collect();
        let spans: Vec<Range<usize>> = tiles
            .iter()
            .map(|(numbers, rows)| {
                let start = sequences[numbers[0]].query_start;
                start + rows.start..start + rows.end
            })
            .collect();
        let heads = result.len_of(Axis(0));
        for (head, result) in outer(result).into_iter().enumerate() {
            let heads = if heads == 1 { 0..query_heads } else { head..head + 1 };
            for ((numbers, rows), piece) in tiles.iter().zip(cut_rows(result, &spans)) {
                let (_, result) = piece.split_at(Axis(1), sequences[numbers[0]].key_start);
                let (numbers, heads, rows) = (numbers.clone(), heads.clone(), rows.clone());
                tasks.push(BiasRows { numbers, heads, rows, result });
            }
        }
    }
    tasks
}

/// `out` = the sum of one term, ds: 0 + ds, in which zeros have no sign.
fn write_alone<T: Element>(mut out: ArrayViewMut2<'_, T>, ds: &[f32]) {
    let mut sum = [0.0; MAX_KEYS];
    for (out, ds) in out.outer_iter_mut().zip(ds.chunks(STRIDE)) {
        let sum = &mut sum[..out.len()];
        sum.iter_mut().zip(ds).for_each(|(sum, ds)| *sum = 0.0 + ds);
        write_row(out, sum, 1.0);
    }
}

/// `out` = factor · the rows of a sum, which lie `stride` apart.
pub(super) fn write<T: Element>(
    mut out: ArrayViewMut2<'_, T>,
    sum: &[f32],
    stride: usize,
    factor: f32,
) {
    for (out, sum) in out.outer_iter_mut().zip(sum.chunks(stride.max(1))) {
        write_row(out, sum, factor);
    }
}
