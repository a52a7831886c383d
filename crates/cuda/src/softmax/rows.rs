//! Rows that belong together and pairs that count, as tables for kernels.

use super::counts::{Counts, SIDE, is_shared};
use crate::memory::{Layout, MemoryRange, filled};
use crate::pass::TableImage;
use bytemuck::NoUninit;
use etalon_problem::{Extents, Result, Scores, Sequence, Sequences};

/// The tables of a problem. Positions are those of a sequence, unless a comment says otherwise.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// Batch element, first query and number of queries in the arrays, first key and number of keys, first tile.
    pub sequences: Vec<[i32; 6]>,
    /// For each row of the arrays the range of keys that it may see, in any head; −1: a row of no sequence.
    pub spans: Vec<[i32; 2]>,
    /// For each tile of queries of each sequence the range of keys that its rows may see.
    pub tiles: Vec<[i32; 2]>,
    /// With [`Counts::by_spans`], for each of these tiles the range of keys that all of its rows see,
    pub common: Vec<[i32; 2]>,
    /// and for each tile of keys the range of tiles of queries that may see some of it; [0, 0]: none.
    pub seen_by: Vec<[i32; 2]>,
    /// Work: the first sequence, how many, the tile of queries, the tile of keys.
    pub by_queries: Vec<[i32; 4]>,
    pub by_keys: Vec<[i32; 4]>,
    pub by_pairs: Vec<[i32; 4]>,
    /// A flag for each pair of the arrays, where spans do not tell all: `[batch, heads or 1, queries, keys]`.
    pub allowed: Option<Vec<u8>>,
}

const MASK: &str = "the mask of a pass";

impl Rows {
    /// Of a problem that has passed its check, with extents that fit 32 bits.
    pub fn new(scores: &Scores) -> Result<Rows> {
        let (e, list, counts) = (&scores.extents, scores.sequences(), Counts::of_scores(scores));
        let mut rows = Rows { spans: filled([-1; 2], &[e.batch, e.queries], MASK)?, ..Rows::default() };
        rows.add_spans(scores, &list, counts.flags)?;
        for (n, s) in list.iter().enumerate() {
            let first = rows.tiles.len();
            let numbers = [s.batch, s.query_start, s.queries, s.key_start, s.keys, first];
            rows.sequences.push(numbers.map(|x| x as i32));
            for tile in 0..s.queries.div_ceil(SIDE) {
                rows.tiles.push(rows.tile(scores, s, tile));
                rows.by_queries.push([n, 1, tile, 0].map(|x| x as i32));
            }
            let tiles = 0..s.keys.div_ceil(SIDE);
            rows.by_keys.extend(tiles.map(|tile| [n, 1, 0, tile].map(|x| x as i32)));
        }
        rows.add_pairs(scores, &list);
        if counts.by_spans {
            list.iter().enumerate().for_each(|(n, s)| rows.add_intervals(e, n, s));
        }
        Ok(rows)
    }

    fn add_spans(&mut self, scores: &Scores, list: &[Sequence], flags: Option<usize>) -> Result<()> {
        let e = &scores.extents;
        let row = |s: &Sequence, i: usize| s.batch * e.queries + s.query_start + i;
        let Some(heads) = flags else {
            for s in list {
                let spans = scores.mask.row_spans(s).unwrap_or_default();
                for (i, span) in spans.into_iter().enumerate() {
                    self.spans[row(s, i)] = [span.start as i32, span.end as i32];
                }
            }
            return Ok(());
        };
        let mut flags = filled(0u8, &[e.batch, heads, e.queries, e.keys], MASK)?;
        for s in list {
            for i in 0..s.queries {
                let (mut first, mut end) = (s.keys, 0);
                for head in 0..heads {
                    let at = (s.batch * heads + head) * e.queries + s.query_start + i;
                    let flags = &mut flags[at * e.keys + s.key_start..][..s.keys];
                    for (j, flag) in flags.iter_mut().enumerate() {
                        if scores.mask.allows(s, head, i, j) {
                            *flag = 1;
                            (first, end) = (first.min(j), end.max(j + 1));
                        }
                    }
                }
                self.spans[row(s, i)] = [first.min(end) as i32, end as i32];
            }
        }
        self.allowed = Some(flags);
        Ok(())
    }

    fn add_intervals(&mut self, e: &Extents, number: usize, s: &Sequence) {
        let at = s.batch * e.queries + s.query_start;
        let spans = &self.spans[at..at + s.queries];
        let meet = |[a, b]: [i32; 2], [c, d]: [i32; 2]| [a.max(c), b.min(d)];
        let common = spans.chunks(SIDE).map(|rows| rows.iter().copied().fold([0, i32::MAX], meet));
        self.common.extend(common.map(|[begin, end]| if begin < end { [begin, end] } else { [0, 0] }));
        let first = self.sequences[number][5] as usize;
        let mut seen_by = vec![[0, 0]; s.keys.div_ceil(SIDE)];
        let tiles = &self.tiles[first..][..s.queries.div_ceil(SIDE)];
        for (tile, keys) in tiles.iter().enumerate() {
            let [begin, end] = keys.map(|key| key as usize);
            for [first, last] in &mut seen_by[begin / SIDE..end.div_ceil(SIDE)] {
                *first = if *last == 0 { tile as i32 } else { *first };
                *last = tile as i32 + 1;
            }
        }
        self.seen_by.extend(seen_by);
    }

    fn tile(&self, scores: &Scores, s: &Sequence, tile: usize) -> [i32; 2] {
        let at = s.batch * scores.extents.queries + s.query_start;
        let rows = tile * SIDE..s.queries.min((tile + 1) * SIDE);
        let spans = self.spans[at..][rows].iter().filter(|[begin, end]| begin < end);
        let join = |[a, b]: [i32; 2], [c, d]: [i32; 2]| [a.min(c), b.max(d)];
        spans.copied().reduce(join).unwrap_or([0, 0])
    }

    /// Tiles of pairs. Batch elements that share a bias are walked by one block: none is packed, and all begin where
    /// the arrays begin.
    fn add_pairs(&mut self, scores: &Scores, list: &[Sequence]) {
        let Some(bias) = scores.bias else { return };
        let tiles = |n: usize| 0..n.div_ceil(SIDE);
        let mut add = |first: usize, many: usize, queries: usize, keys: usize| {
            for row in tiles(queries) {
                self.by_pairs.extend(tiles(keys).map(|key| [first, many, row, key].map(|x| x as i32)));
            }
        };
        if is_shared(scores, bias) {
            let most = |f: fn(&Sequence) -> usize| list.iter().map(f).max().unwrap_or(0);
            add(0, list.len(), most(|s| s.queries), most(|s| s.keys));
        } else {
            list.iter().enumerate().for_each(|(n, s)| add(n, 1, s.queries, s.keys));
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub sequences: MemoryRange,
    pub spans: MemoryRange,
    pub tiles: MemoryRange,
    pub common: MemoryRange,
    pub seen_by: MemoryRange,
    pub by_queries: MemoryRange,
    pub by_keys: MemoryRange,
    pub by_pairs: MemoryRange,
    pub allowed: MemoryRange,
    /// Queries and keys of each batch element with lengths of its own.
    pub lengths: MemoryRange,
    pub bytes: usize,
}

impl Tables {
    pub fn new(counts: &Counts, scores: &Scores) -> Result<Tables> {
        let mut layout = Layout::default();
        let e = &scores.extents;
        let mut list = |each: &[usize]| layout.array(1, each);
        let lengths = if matches!(scores.sequences, Sequences::Lengths { .. }) { e.batch } else { 0 };
        // Of masks of which kernels of sm90a read spans.
        let spans = usize::from(counts.by_spans);
        let mut tables = Tables {
            sequences: list(&[24, counts.sequences])?,
            spans: list(&[8, e.batch, e.queries])?,
            tiles: list(&[8, counts.tiles])?,
            common: list(&[8 * spans, counts.tiles])?,
            seen_by: list(&[8 * spans, counts.by_keys])?,
            by_queries: list(&[16, counts.by_queries])?,
            by_keys: list(&[16, counts.by_keys])?,
            by_pairs: list(&[16, counts.by_pairs])?,
            allowed: list(&[e.batch, counts.flags.unwrap_or(0), e.queries, e.keys])?,
            lengths: list(&[8, lengths])?,
            bytes: 0,
        };
        tables.bytes = layout.bytes();
        Ok(tables)
    }

    pub fn image(&self, rows: Rows, scores: &Scores) -> TableImage {
        let mut image = TableImage::new(self.bytes);
        macro_rules! put {
            ($($table:ident)+) => { $(image.put(self.$table, bytes(&rows.$table));)+ };
        }
        put!(sequences spans tiles common seen_by by_queries by_keys by_pairs);
        image.put(self.allowed, rows.allowed.unwrap_or_default());
        if self.lengths.bytes > 0 {
            let lengths = scores.sequences().into_iter().map(|s| [s.queries as i32, s.keys as i32]);
            image.put(self.lengths, bytes(&lengths.collect::<Vec<_>>()));
        }
        image
    }
}

pub(crate) fn bytes<T: NoUninit>(list: &[T]) -> &[u8] {
    bytemuck::cast_slice(list)
}
