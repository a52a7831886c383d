//! Cuts of sequences into chunks, as kernels read them.

use super::{CHUNK, SIDE};
use crate::args::{Field, bytes_of, kernel_args};
use crate::memory::{Layout, MemoryRange};
use crate::pass::TableImage;
use etalon_problem::{Error, LinearAttention};

kernel_args! {
    /// At most 128 tokens of a sequence.
    pub(super) struct Chunk as "Chunk" {
        pub batch: i32,
        /// The first token in the arrays.
        pub start: i32,
        pub len: i32,
        /// Bits: the first (1) and the last (2) of its sequence.
        pub ends: i32,
    }
}

kernel_args! {
    /// A micro-chunk: the chunk, and the first row in it.
    pub(super) struct Strip as "Strip" {
        pub chunk: i32,
        pub row: i32,
    }
}

kernel_args! {
    /// A sequence: the first chunk, and how many.
    pub(super) struct Line as "Line" {
        pub first: i32,
        pub chunks: i32,
    }
}

kernel_args! {
    /// Chunks that a block of sm90a walks: the first, how many, and their sequence.
    pub(super) struct Segment as "Segment" {
        pub first: i32,
        pub chunks: i32,
        pub sequence: i32,
    }
}

kernel_args! {
    /// A sequence of several segments: the first, how many, and the sequence.
    pub(super) struct Run as "Run" {
        pub first: i32,
        pub segments: i32,
        pub sequence: i32,
    }
}

/// A table, and its range.
#[derive(Debug, Default)]
pub(super) struct Rows<T> {
    pub rows: Vec<T>,
    pub range: MemoryRange,
}

impl<T: Field> Rows<T> {
    fn new(rows: Vec<T>, layout: &mut Layout) -> Result<Rows<T>, Error> {
        let range = layout.range(rows.len() * T::SIZE)?;
        Ok(Rows { rows, range })
    }

    fn put(&self, image: &mut TableImage) {
        image.put(self.range, bytes_of(&self.rows));
    }
}

/// The tables of a problem.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub chunks: Rows<Chunk>,
    pub strips: Rows<Strip>,
    pub lines: Rows<Line>,
    /// Sequences of several segments come first.
    pub segments: Rows<Segment>,
    pub runs: Rows<Run>,
    /// The bytes of all of them.
    bytes: usize,
}

impl Tables {
    /// The tables of a problem that has passed its check, with segments of as many tokens as `cut` says of a
    /// sequence's.
    /// Fails where there are too many chunks.
    pub fn new(problem: &LinearAttention, cut: impl Fn(usize) -> usize) -> Result<Tables, Error> {
        let (mut chunks, mut strips, mut lines) = (Vec::new(), Vec::new(), Vec::new());
        let (mut segments, mut runs, mut whole) = (Vec::new(), Vec::new(), Vec::new());
        for (number, s) in problem.list_sequences().into_iter().enumerate() {
            let first = chunks.len();
            for begin in (0..s.tokens).step_by(CHUNK) {
                let len = CHUNK.min(s.tokens - begin);
                let ends = i32::from(begin == 0) + 2 * i32::from(begin + len == s.tokens);
                let chunk = chunks.len() as i32;
                strips.extend((0..len).step_by(SIDE).map(|row| Strip { chunk, row: row as i32 }));
                let [batch, start, len] = [s.batch, s.start + begin, len].map(|x| x as i32);
                chunks.push(Chunk { batch, start, len, ends });
            }
            let many = chunks.len() - first;
            lines.push(Line { first: first as i32, chunks: many as i32 });
            let sequence = number as i32;
            let segment = |at: usize, many: usize| {
                let [first, chunks] = [first + at, many].map(|x| x as i32);
                Segment { first, chunks, sequence }
            };
            let most = cut(s.tokens).div_ceil(CHUNK).max(1);
            if many <= most {
                whole.push(segment(0, many));
                continue;
            }
            let begin = segments.len();
            segments.extend((0..many).step_by(most).map(|at| segment(at, most.min(many - at))));
            let [first, segments] = [begin, segments.len() - begin].map(|x| x as i32);
            runs.push(Run { first, segments, sequence });
        }
        segments.append(&mut whole);
        let mut layout = Layout::default();
        Ok(Tables {
            chunks: Rows::new(chunks, &mut layout)?,
            strips: Rows::new(strips, &mut layout)?,
            lines: Rows::new(lines, &mut layout)?,
            segments: Rows::new(segments, &mut layout)?,
            runs: Rows::new(runs, &mut layout)?,
            bytes: layout.bytes(),
        })
    }

    /// The bytes of the tables, where kernels find them.
    pub fn image(&self) -> TableImage {
        let mut image = TableImage::new(self.bytes);
        self.chunks.put(&mut image);
        self.strips.put(&mut image);
        self.lines.put(&mut image);
        self.segments.put(&mut image);
        self.runs.put(&mut image);
        image
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etalon_problem::{LinearExtents, TokenSequences};

    #[test]
    fn chunks_begin_where_their_sequence_begins() {
        let extents = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: 400, dim: 8 };
        let cu_tokens = vec![0, 3, 3, 260, 388];
        let packed = TokenSequences::Packed { cu_tokens };
        let tables = Tables::new(&LinearAttention::new(extents).sequences(packed), |n| n.min(256)).unwrap();
        let chunks = tables.chunks.rows.iter().map(|x| [x.batch, x.start, x.len, x.ends]);
        let expected = [[0, 0, 3, 3], [0, 3, 128, 1], [0, 131, 128, 0], [0, 259, 1, 2], [0, 260, 128, 3]];
        assert_eq!(chunks.collect::<Vec<_>>(), expected);
        let lines = tables.lines.rows.iter().map(|x| [x.first, x.chunks]);
        assert_eq!(lines.collect::<Vec<_>>(), [[0, 1], [1, 0], [1, 3], [4, 1]]);
        let segments = tables.segments.rows.iter().map(|x| [x.first, x.chunks, x.sequence]);
        let expected = [[1, 2, 2], [3, 1, 2], [0, 1, 0], [1, 0, 1], [4, 1, 3]];
        assert_eq!(segments.collect::<Vec<_>>(), expected);
        let runs = tables.runs.rows.iter().map(|x| [x.first, x.segments, x.sequence]);
        assert_eq!(runs.collect::<Vec<_>>(), [[0, 2, 2]]);
        let strips = tables.strips.rows.iter().map(|x| [x.chunk, x.row]);
        let expected = [[0, 0], [1, 0], [1, 64], [2, 0], [2, 64], [3, 0], [4, 0], [4, 64]];
        assert_eq!(strips.collect::<Vec<_>>(), expected);
    }
}
