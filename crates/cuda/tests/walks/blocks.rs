//! The blocks that kernels of sm90a walk where a mask shows each query a range of keys: `pairs/spans.cuh`, compiled
//! for the host, on the tables of random problems, beside what their masks allow.

use crate::family::Family;
use crate::matrix::every_variant;
use crate::softmax::counts::Counts;
use crate::softmax::rows::{Rows, bytes};
use crate::variant::Variant;
use etalon_problem::{Align, Extents, Mask, NamedArray, Scores, Sequences};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "../sources/mod.rs"]
mod sources;

/// A repeatable choice: the upper bits of a linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n.max(1)
    }

    fn any<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    /// A length or a reach: few, about the sides of blocks, or any below a bound.
    fn length(&mut self, most: usize) -> usize {
        let near = self.any(&[0, 1, 63, 64, 65, 127, 128, 129, 192, 256]);
        let any = self.below(most + 1);
        self.any(&[near, any, any]).min(most)
    }

    /// Rows of sequences, or ids: so many runs of any lengths that have so many rows together.
    fn offsets(&mut self, runs: usize, rows: usize) -> Vec<usize> {
        let mut offsets: Vec<usize> = (0..runs + 1).map(|_| self.length(rows)).collect();
        let last = self.any(&[rows, rows, offsets[runs]]);
        (offsets[0], offsets[runs]) = (self.any(&[0, 0, offsets[0]]), last);
        offsets.sort();
        offsets
    }

    /// Ids of keys that lie side by side, some negative, and of queries in the same order or in any.
    fn segments(&mut self, e: &Extents) -> Mask {
        let mut ids = [Vec::new(), Vec::new()];
        for _ in 0..e.batch {
            let mut order: Vec<i64> = (-1..5).collect();
            for i in (1..order.len()).rev() {
                let other = self.below(i + 1);
                order.swap(i, other);
            }
            for (list, rows) in ids.iter_mut().zip([e.queries, e.keys]) {
                let offsets = self.offsets(5, rows);
                list.extend((0..rows).map(|i| order[offsets.iter().filter(|&&x| x <= i).count() % 6]));
            }
            if self.below(3) == 0 {
                let first = ids[0].len() - e.queries;
                ids[0][first..].iter_mut().for_each(|id| *id = self.below(7) as i64 - 1);
            }
        }
        let [query, key] = ids;
        Mask::Segments {
            query: NamedArray::new("query", &[e.batch, e.queries], query),
            key: NamedArray::new("key", &[e.batch, e.keys], key),
        }
    }

    fn mask(&mut self, e: &Extents, depth: usize) -> Mask {
        let align = self.any(&[Align::TopLeft, Align::BottomRight]);
        let mut reach = || Some(self.length(e.keys)).filter(|_| self.below(4) > 0);
        match (reach(), reach(), self.below(if depth < 2 { 5 } else { 3 })) {
            (left, right, 0) => Mask::Window { left, right, align },
            (left, _, 1) => Mask::ChunkedCausal { chunk: left.unwrap_or(7).max(1), align },
            (_, _, 2) => self.segments(e),
            _ => Mask::And((0..self.below(4)).map(|_| self.mask(e, depth + 1)).collect()),
        }
    }

    /// A problem whose mask is no window and shows each query one range of keys.
    fn problem(&mut self) -> Scores {
        loop {
            let (batch, queries, keys) = (1 + self.below(2), 1 + self.length(280), 1 + self.length(400));
            let packed = self.below(3);
            let batch = if packed == 0 { 1 } else { batch };
            let e = Extents { batch, query_heads: 1, key_heads: 1, queries, keys, dim: 8 };
            let mut lengths = |rows: usize| (0..batch).map(|_| self.length(rows)).collect();
            let sequences = match packed {
                1 => Sequences::Lengths { query: lengths(queries), key: lengths(keys) },
                0 => {
                    let count = 1 + self.below(4);
                    let (cu_query, cu_key) = (self.offsets(count, queries), self.offsets(count, keys));
                    Sequences::Packed { cu_query, cu_key }
                }
                _ => Sequences::Dense,
            };
            let mut scores = Scores::new(e);
            (scores.mask, scores.sequences) = (self.mask(&e, 0), sequences);
            if Counts::of_scores(&scores).by_spans {
                return scores;
            }
        }
    }
}

/// A problem, as the model reads it: numbers of 32 bits, and lists behind their lengths.
fn describe(scores: &Scores, to: &mut Vec<u8>) {
    let (rows, e) = (Rows::new(scores).unwrap(), &scores.extents);
    assert!(rows.allowed.is_none());
    to.extend(bytes(&[e.queries as i32, e.keys as i32]));
    let mut list = |count: usize, own: &[u8]| {
        to.extend(bytes(&[count as i32]));
        to.extend(own);
    };
    list(rows.sequences.len(), bytes(&rows.sequences));
    list(rows.spans.len(), bytes(&rows.spans));
    list(rows.tiles.len(), bytes(&rows.tiles));
    list(rows.common.len(), bytes(&rows.common));
    list(rows.seen_by.len(), bytes(&rows.seen_by));
    list(rows.by_keys.len(), bytes(&rows.by_keys));
    let mut allowed = Vec::new();
    for s in scores.sequences() {
        let pairs = (0..s.queries).flat_map(|i| (0..s.keys).map(move |j| (i, j)));
        allowed.extend(pairs.map(|(i, j)| u8::from(scores.mask.allows(&s, 0, i, j))));
    }
    list(allowed.len(), &allowed);
}

/// A text without the statements in the device's own instructions, which decide nothing here.
fn without_assembler(text: &str) -> String {
    let (mut rest, mut kept) = (text, String::new());
    while let Some((before, after)) = rest.split_once("asm") {
        let statement = after.starts_with('(') || after.starts_with(" volatile(");
        let end = after.find(");").filter(|_| statement);
        kept += before;
        kept += if statement { "" } else { "asm" };
        rest = end.map_or(after, |end| &after[end + 1..]);
    }
    kept + rest
}

/// The files of the kernels that decide what is walked, with the kernel arguments that they name.
fn kernels() -> String {
    const FILES: [&str; 7] = [
        "tile/types.cuh",
        "tile/accumulator.cuh",
        "pairs/tiles.cuh",
        "pairs/work.cuh",
        "pairs/spans.cuh",
        "pairs/sm90a.cuh",
        "attention/sm90a_backward.cuh",
    ];
    let is_backward = |x: &Variant| x.family == Family::AttentionSm90aBackward;
    let variant = every_variant().into_iter().find(is_backward).unwrap();
    without_assembler(&sources::files(&variant.source(&variant.kernels()), &FILES))
}

/// Compiles the model; `None` where there is no C++ compiler.
fn compile(folder: &Path) -> Option<PathBuf> {
    let texts = [
        ("kernels.inc", &kernels()[..]),
        ("host.h", include_str!("../host.h")),
        ("cuda.h", include_str!("cuda.h")),
        ("model.cpp", include_str!("model.cpp")),
    ];
    let values = ["-DSTORAGE=1", "-DD=64", "-DWINDOW=2", "-DLENGTHS=2", "-DOPTIONS=0", "-DRESULTS=1"];
    sources::compile(folder, &texts, &[&["-O2"], &values[..]].concat())
}

#[test]
#[cfg(target_os = "linux")]
fn walks_by_spans_count_the_pairs_that_masks_allow() {
    // As many as take seconds; a tenth of them finds each of the decisions turned.
    const PROBLEMS: usize = 2000;
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile(folder.path()) else { return };
    let (mut random, mut text) = (Random(1), bytes(&[PROBLEMS as i32]).to_vec());
    (0..PROBLEMS).for_each(|_| describe(&random.problem(), &mut text));
    fs::write(folder.path().join("problems"), text).unwrap();
    let done = Command::new(program).arg(folder.path().join("problems")).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
}
