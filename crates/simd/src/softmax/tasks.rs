//! Tasks, and the tiles of results that they write.

use super::packs::Packing;
use crate::element::TensorMut;
use crate::tiles::{Place, Side};
use crate::waves::Waves;
use crate::workspace::Lists;
use bumpalo::boxed::Box;
use etalon_problem::{Error, Sequence, Sequences};
use ndarray::{ArrayViewMut3, Axis, Ix2, Ix3, Ix4, s};
use std::cmp::Reverse;
use std::ops::Range;

/// A tile of queries of a head, or of keys of a key head, and where its results go.
pub struct Task<'o> {
    pub place: Place,
    /// The number of the sequence and key head together.
    pub slot: usize,
    /// Of queries, which of the query heads that share the key head.
    pub member: usize,
    /// o, dq, dk and dv, gq and gdout, or gk and gv.
    pub results: [Option<TensorMut<'o, Ix2>>; 2],
    /// Of queries lse or gdlse, `[1, rows, 1]`; of keys dbias of each query head that shares the key
    /// head, `[heads, queries, rows]`.
    pub beside: Option<TensorMut<'o, Ix3>>,
}

impl Task<'_> {
    /// Writes rows of a result that lie `stride` apart.
    pub fn write(&mut self, result: usize, rows: &[f32], stride: usize, factor: f32) {
        if let Some(to) = &mut self.results[result] {
            to.write_rows(rows, stride, factor);
        }
    }

    /// Writes a number for each query.
    pub fn write_numbers(&mut self, numbers: &[f32]) {
        if let Some(to) = &mut self.beside {
            to.view_mut().slice(s![0, .., 0]).write(numbers, 1.0);
        }
    }
}

/// The tasks of all waves, one wave after the other.
pub struct Tasks<'l, 'o> {
    list: Box<'l, [Task<'o>]>,
    /// Number of the tasks that [`Tasks::wave`] has handed out.
    begun: usize,
}

impl<'l, 'o> Tasks<'l, 'o> {
    /// The tiles of queries. Rows of no sequence become zeros in the results and `nothing` in the numbers.
    pub fn of_queries(
        lists: &'l Lists,
        packing: &Packing<'_>,
        waves: Waves,
        results: [Option<TensorMut<'o, Ix4>>; 2],
        numbers: Option<ArrayViewMut3<'o, f32>>,
        nothing: f32,
    ) -> Result<Self, Error> {
        let numbers = numbers.map(|numbers| numbers.insert_axis(Axis(3)).into());
        let (heads, size) = (packing.scores.extents.query_heads, packing.cut.queries);
        let side = Side::Queries;
        let numbers = side.pieces(numbers, packing.sequences, (heads, 1), size, nothing);
        let mut list = tiles(lists, packing, side, results, numbers)?;
        // With a causal mask the last queries see most keys. From the last to the first, as their
        // statistics are handed out.
        list.sort_unstable_by_key(|Task { place, slot, member, .. }| {
            (slot / waves.size, Reverse((place.rows.start, *slot, *member)))
        });
        Ok(Tasks { list, begun: 0 })
    }

    /// The tiles of keys, if any result of theirs is wanted, or if they have work `alone`.
    pub fn of_keys(
        lists: &'l Lists,
        packing: &Packing<'_>,
        waves: Waves,
        results: [Option<TensorMut<'o, Ix4>>; 2],
        mut bias: Option<TensorMut<'o, Ix4>>,
        alone: bool,
    ) -> Result<Self, Error> {
        if results.iter().all(Option::is_none) && !alone {
            return Ok(Tasks { list: lists.collect(0, [], "tiles of keys")?, begun: 0 });
        }
        bias.iter_mut().for_each(|bias| clear_pairs(bias, packing));
        let heads = (packing.scores.extents.key_heads, packing.scores.group());
        let bias = Side::Pairs.pieces(bias, packing.sequences, heads, packing.cut.keys, 0.0);
        let mut list = tiles(lists, packing, Side::Keys, results, bias)?;
        // In the order in which shares of dq are added; with a causal mask the first keys are also
        // those that most queries see.
        list.sort_unstable_by_key(|Task { place, slot, .. }| {
            (slot / waves.size, place.rows.start, *slot)
        });
        Ok(Tasks { list, begun: 0 })
    }

    /// The tasks of the next wave.
    pub fn wave(&mut self, slots: &Range<usize>) -> &mut [Task<'o>] {
        let rest = &mut self.list[self.begun..];
        let count = rest.partition_point(|task| task.slot < slots.end);
        self.begun += count;
        &mut rest[..count]
    }
}

/// The tiles of one side, in the order of slots and rows.
fn tiles<'l, 'o>(
    lists: &'l Lists,
    packing: &Packing<'_>,
    side: Side,
    results: [Option<TensorMut<'o, Ix4>>; 2],
    beside: impl Iterator<Item = Option<TensorMut<'o, Ix3>>>,
) -> Result<Box<'l, [Task<'o>]>, Error> {
    let (sequences, e, cut) = (packing.sequences, &packing.scores.extents, packing.cut);
    let (queries, keys) = packing.tiles();
    let (heads, size, count) = match side {
        Side::Queries => (e.query_heads, cut.queries, queries),
        Side::Keys | Side::Pairs => (e.key_heads, cut.keys, keys),
    };
    let mut results = results.map(|result| side.pieces(result, sequences, (heads, 1), size, 0.0));
    let task = |(place, beside): (Place, _)| {
        let results = results.each_mut().map(|result| Some(result.next()??.outer(0)));
        let group = heads / e.key_heads;
        let (slot, member) = (place.number * e.key_heads + place.head / group, place.head % group);
        Task { place, slot, member, results, beside }
    };
    lists.collect(
        count,
        side.places(sequences, heads, size).zip(beside).map(task),
        "lists of tiles",
    )
}

/// A result in the shape of the bias, of pairs that may belong to no sequence: those become zeros.
fn clear_pairs(result: &mut TensorMut<'_, Ix4>, packing: &Packing<'_>) {
    if packing.scores.sequences != Sequences::Dense {
        result.fill(0.0);
    }
}

/// Rows of a result in the shape of the bias, and the heads and sequences that are summed into them.
pub struct BiasTask<'o> {
    /// The sequences, by their numbers.
    pub numbers: Range<usize>,
    /// The query heads.
    pub heads: Range<usize>,
    /// The rows, within the sequences.
    pub rows: Range<usize>,
    /// The place of the sum: these rows of the arrays, `[1, rows, keys]`.
    pub result: TensorMut<'o, Ix3>,
}

/// A result in the shape of the bias in tiles of rows. Elements of no sequence become zeros.
pub fn bias_tasks<'s, 'o: 's>(
    mut result: TensorMut<'o, Ix4>,
    packing: &Packing<'s>,
    whole: &'s [Sequence; 1],
) -> impl Iterator<Item = BiasTask<'o>> + Send {
    clear_pairs(&mut result, packing);
    let e = &packing.scores.extents;
    let bias_heads = result.shape()[1];
    let one_for_all = result.shape()[0] == 1 && e.batch > 1;
    let (all, query_heads) = (packing.sequences.len(), e.query_heads);
    // One bias for a whole batch sums over its sequences, which all begin at row 0; otherwise every
    // sequence has rows of its own.
    let sequences = if one_for_all { &whole[..] } else { packing.sequences };
    let (side, size) = (Side::Queries, packing.cut.queries);
    let tiles = side.pieces(Some(result), sequences, (bias_heads, 1), size, 0.0);
    side.places(sequences, bias_heads, size).zip(tiles).filter_map(move |(place, result)| {
        let Place { number, head, rows } = place;
        let numbers = if one_for_all { 0..all } else { number..number + 1 };
        let heads = if bias_heads == 1 { 0..query_heads } else { head..head + 1 };
        Some(BiasTask { numbers, heads, rows, result: result? })
    })
}
