//! Which task writes which tile of a result.

use super::packs::Packing;
use crate::element::TensorMut;
use crate::tiles::{
    Place, all_queries, clear, cut_rows, key_rows, outer, places, query_rows, query_tiles, tiles,
};
use crate::waves::Waves;
use etalon_problem::{Sequence, Sequences};
use ndarray::{ArrayViewMut3, Ix1, Ix2, Ix4};
use std::cmp::Reverse;
use std::ops::Range;
use std::vec;

/// A tile of queries, and where its results go.
pub struct RowTask<'o> {
    pub place: Place,
    /// o, dq, or gq and gdout.
    pub results: [Option<TensorMut<'o, Ix2>>; 2],
    /// lse or gdlse.
    pub numbers: Option<TensorMut<'o, Ix1>>,
}

/// The tiles of queries of each wave. Rows of no sequence become zeros in the results and `nothing`
/// in the numbers.
pub fn row_tasks<'o>(
    packing: &Packing<'_>,
    waves: Waves,
    results: [Option<TensorMut<'o, Ix4>>; 2],
    numbers: Option<ArrayViewMut3<'o, f32>>,
    nothing: f32,
) -> vec::IntoIter<Vec<RowTask<'o>>> {
    let (sequences, scores) = (&packing.sequences, packing.scores);
    let (size, covered) = (packing.cut.queries, all_queries(sequences));
    let mut results = results.map(|result| {
        result.map(|mut result| {
            clear(&mut result, covered, 0.0);
            query_tiles(result, sequences, |_| size).into_iter()
        })
    });
    let mut numbers = numbers.map(|numbers| {
        let mut numbers = TensorMut::from(numbers);
        clear(&mut numbers, covered, nothing);
        query_tiles(numbers, sequences, |_| size).into_iter()
    });
    let task = |place| RowTask {
        place,
        results: results.each_mut().map(|tiles| tiles.as_mut().and_then(Iterator::next)),
        numbers: numbers.as_mut().and_then(Iterator::next),
    };
    let places = places(sequences, scores.extents.query_heads, |_| size);
    let mut tasks: Vec<RowTask<'o>> = places.into_iter().map(task).collect();
    // With a causal mask the last queries see most keys.
    tasks.sort_by_key(|task| Reverse(task.place.rows.start));
    waves.sort(tasks, |task| task.place.slot(scores)).into_iter()
}

/// A tile of keys of a slot, and where its results go.
pub struct KeyTask<'o> {
    pub slot: usize,
    /// The keys, within the sequence.
    pub cols: Range<usize>,
    /// dk and dv, or gk and gv.
    pub results: [Option<TensorMut<'o, Ix2>>; 2],
    /// dbias of each query head that shares the key head, all rows of the sequence; or none.
    pub bias: Vec<TensorMut<'o, Ix2>>,
}

/// The tiles of keys of each wave, if any result of theirs is wanted.
pub fn key_tasks<'o>(
    packing: &Packing<'_>,
    waves: Waves,
    results: [Option<TensorMut<'o, Ix4>>; 2],
    bias: Option<TensorMut<'o, Ix4>>,
) -> vec::IntoIter<Vec<KeyTask<'o>>> {
    if results.iter().all(Option::is_none) {
        return Vec::new().into_iter();
    }
    let [wide, values] = results.map(|result| key_tiles(result, packing));
    let mut bias = bias.map(|mut bias| {
        if packing.scores.sequences != Sequences::Dense {
            bias.fill(0.0); // what belongs to no sequence
        }
        pair_tiles(bias, packing).into_iter()
    });
    let mut tasks = Vec::new();
    for (slot, (wide, values)) in wide.into_iter().zip(values).enumerate() {
        let mut bias = bias.as_mut().and_then(Iterator::next).map(Vec::into_iter);
        let keys = packing.sequences[slot / packing.scores.extents.key_heads].keys;
        let tiles = tiles(0..keys, packing.cut.keys).zip(wide.into_iter().zip(values));
        tasks.extend(tiles.map(|(cols, (wide, values))| {
            let bias = bias.as_mut().and_then(Iterator::next).unwrap_or_default();
            KeyTask { slot, cols, results: [wide, values], bias }
        }));
    }
    // In the order in which shares of dq are added; with a causal mask the first keys are also those
    // that most queries see.
    tasks.sort_by_key(|task| task.cols.start);
    waves.sort(tasks, |task| task.slot).into_iter()
}

/// The tiles of a result with the shape of the keys, of each slot. Rows of no sequence become zeros.
/// Where there is no result, there are as many places for tiles.
fn key_tiles<'o>(
    result: Option<TensorMut<'o, Ix4>>,
    packing: &Packing<'_>,
) -> Vec<Vec<Option<TensorMut<'o, Ix2>>>> {
    let (sequences, size) = (&packing.sequences, packing.cut.keys);
    let key_heads = packing.scores.extents.key_heads;
    let count = |sequence: &Sequence| sequence.keys.div_ceil(size);
    let places = |sequence| (0..count(sequence)).map(|_| None).collect();
    let mut cut: Vec<Vec<_>> = sequences
        .iter()
        .flat_map(|sequence| (0..key_heads).map(move |_| places(sequence)))
        .collect();
    let Some(mut result) = result else { return cut };
    clear(&mut result, sequences.iter().map(|sequence| sequence.keys).sum(), 0.0);
    for (batch, result) in outer(result).into_iter().enumerate() {
        let here = sequences.iter().enumerate().filter(|(_, sequence)| sequence.batch == batch);
        let spans = here.clone().flat_map(|(_, sequence)| tiles(key_rows(sequence), size));
        let spans: Vec<Range<usize>> = spans.collect();
        for (head, result) in outer(result).into_iter().enumerate() {
            let mut pieces = cut_rows(result, &spans).into_iter();
            for (number, sequence) in here.clone() {
                let tiles = pieces.by_ref().take(count(sequence));
                cut[number * key_heads + head] = tiles.map(Some).collect();
            }
        }
    }
    cut
}

/// The tiles of keys of a result with a row of keys for each query, `[batch, query heads, queries,
/// keys]`: of each slot, tile and query head.
fn pair_tiles<'o>(
    result: TensorMut<'o, Ix4>,
    packing: &Packing<'_>,
) -> Vec<Vec<Vec<TensorMut<'o, Ix2>>>> {
    let (sequences, size) = (&packing.sequences, packing.cut.keys);
    let (key_heads, group) = (packing.scores.extents.key_heads, packing.scores.group());
    let places = |sequence: &Sequence| {
        let tiles = sequence.keys.div_ceil(size);
        (0..tiles).map(|_| Vec::with_capacity(group)).collect::<Vec<_>>()
    };
    let mut cut: Vec<Vec<Vec<_>>> = sequences
        .iter()
        .flat_map(|sequence| (0..key_heads).map(move |_| places(sequence)))
        .collect();
    for (batch, result) in outer(result).into_iter().enumerate() {
        let here = sequences.iter().enumerate().filter(|(_, sequence)| sequence.batch == batch);
        let spans: Vec<_> = here.clone().map(|(_, sequence)| query_rows(sequence)).collect();
        for (head, result) in outer(result).into_iter().enumerate() {
            for ((number, sequence), piece) in here.clone().zip(cut_rows(result, &spans)) {
                let (_, mut rest) = piece.split_at(1, sequence.key_start);
                let tiles = tiles(0..sequence.keys, size);
                for (cols, tile) in tiles.zip(&mut cut[number * key_heads + head / group]) {
                    let (piece, tail) = rest.split_at(1, cols.len());
                    tile.push(piece);
                    rest = tail;
                }
            }
        }
    }
    cut
}

/// Rows of a result in the shape of the bias, and the heads and sequences that are summed into them.
pub struct BiasTask<'o> {
    /// The sequences, by their numbers.
    pub numbers: Vec<usize>,
    /// The query heads.
    pub heads: Range<usize>,
    /// The rows, within the sequences.
    pub rows: Range<usize>,
    /// Where the sum goes: these rows, from the first key of the sequences on.
    pub result: TensorMut<'o, Ix2>,
}

/// A result in the shape of the bias in tiles of rows. Elements of no sequence become zeros.
pub fn bias_tasks<'o>(mut result: TensorMut<'o, Ix4>, packing: &Packing<'_>) -> Vec<BiasTask<'o>> {
    if packing.scores.sequences != Sequences::Dense {
        result.fill(0.0); // what belongs to no sequence
    }
    let (sequences, e) = (&packing.sequences, &packing.scores.extents);
    let one_for_all = result.shape()[0] == 1 && e.batch > 1;
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
                let tiles = tiles(0..rows.unwrap_or(0), packing.cut.queries);
                tiles.map(move |rows| (numbers.clone(), rows))
            })
            .collect();
        let spans: Vec<Range<usize>> = tiles
            .iter()
            .map(|(numbers, rows)| {
                let start = sequences[numbers[0]].query_start;
                start + rows.start..start + rows.end
            })
            .collect();
        let heads = result.shape()[0];
        for (head, result) in outer(result).into_iter().enumerate() {
            let heads = if heads == 1 { 0..e.query_heads } else { head..head + 1 };
            for ((numbers, rows), piece) in tiles.iter().zip(cut_rows(result, &spans)) {
                let (_, result) = piece.split_at(1, sequences[numbers[0]].key_start);
                let (numbers, heads, rows) = (numbers.clone(), heads.clone(), rows.clone());
                tasks.push(BiasTask { numbers, heads, rows, result });
            }
        }
    }
    tasks
}
