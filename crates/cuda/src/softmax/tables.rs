//! The tables of the rows on the device: which rows belong together, and which pairs count.

use crate::memory::{Layout, MemoryRange};
use crate::pass::TableImage;
use crate::softmax::counts::Counts;
use crate::softmax::rows::Rows;
use bytemuck::NoUninit;
use etalon_problem::{Error, Scores, Sequences};

/// Memory of the tables of the rows.
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
    /// Queries and keys of each batch element, where they have lengths of their own.
    pub lengths: MemoryRange,
    /// The bytes of all of them.
    pub bytes: usize,
}

impl Tables {
    /// Of so many tiles.
    pub fn new(counts: &Counts, scores: &Scores) -> Result<Tables, Error> {
        let mut layout = Layout::default();
        let e = &scores.extents;
        let mut list = |each: &[usize]| layout.array(1, each);
        let lengths = match scores.sequences {
            Sequences::Lengths { .. } => e.batch,
            _ => 0,
        };
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

    /// The tables of these rows.
    pub fn image(&self, rows: Rows, scores: &Scores) -> TableImage {
        let mut image = TableImage::new(self.bytes);
        image.put(self.sequences, bytes(&rows.sequences));
        image.put(self.spans, bytes(&rows.spans));
        image.put(self.tiles, bytes(&rows.tiles));
        image.put(self.common, bytes(&rows.common));
        image.put(self.seen_by, bytes(&rows.seen_by));
        image.put(self.by_queries, bytes(&rows.by_queries));
        image.put(self.by_keys, bytes(&rows.by_keys));
        image.put(self.by_pairs, bytes(&rows.by_pairs));
        image.put(self.allowed, rows.allowed.unwrap_or_default());
        if self.lengths.bytes > 0 {
            let lengths = scores.sequences().into_iter().map(|s| [s.queries as i32, s.keys as i32]);
            image.put(self.lengths, bytes(&lengths.collect::<Vec<_>>()));
        }
        image
    }
}

/// The bytes of a list.
pub(crate) fn bytes<T: NoUninit>(list: &[T]) -> &[u8] {
    bytemuck::cast_slice(list)
}
