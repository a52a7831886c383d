//! Cuts of sequences into chunks, as kernels read them.

use super::{CHUNK, SIDE};
use crate::args::{Arguments, Field, kernel_args};
use crate::memory::{Layout, MemoryRange};
use crate::pass::TableImage;
use etalon_problem::{LinearAttention, Result};

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

    /// A micro-chunk: the chunk, and the first row in it.
    pub(super) struct Strip as "Strip" {
        pub chunk, row: i32,
    }

    /// A sequence: the first chunk, and how many.
    pub(super) struct Line as "Line" {
        pub first, chunks: i32,
    }

    /// Chunks that a block of sm90a walks: the first, how many, and their sequence.
    pub(super) struct Segment as "Segment" {
        pub first, chunks, sequence: i32,
    }

    /// A sequence of several segments: the first, how many, and the sequence.
    pub(super) struct Run as "Run" {
        pub first, segments, sequence: i32,
    }
}

pub(super) struct Rows<T> {
    pub rows: Vec<T>,
    pub range: MemoryRange,
}

impl<T: Field> Rows<T> {
    fn new(rows: Vec<T>, layout: &mut Layout, image: &mut TableImage) -> Result<Rows<T>> {
        let range = layout.range(rows.len() * T::SIZE)?;
        image.put(range, Arguments::of(&rows).bytes);
        image.bytes = layout.bytes();
        Ok(Rows { rows, range })
    }
}

pub(super) struct Tables {
    pub chunks: Rows<Chunk>,
    pub strips: Rows<Strip>,
    pub lines: Rows<Line>,
    /// Sequences of several segments come first.
    pub segments: Rows<Segment>,
    pub runs: Rows<Run>,
    pub image: TableImage,
}

impl Tables {
    /// Segments have as many tokens as `cut` says of a sequence's. Fails where there are too many chunks.
    pub fn new(problem: &LinearAttention, cut: impl Fn(usize) -> usize) -> Result<Tables> {
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
        let (mut layout, mut image) = (Layout::default(), TableImage::default());
        Ok(Tables {
            chunks: Rows::new(chunks, &mut layout, &mut image)?,
            strips: Rows::new(strips, &mut layout, &mut image)?,
            lines: Rows::new(lines, &mut layout, &mut image)?,
            segments: Rows::new(segments, &mut layout, &mut image)?,
            runs: Rows::new(runs, &mut layout, &mut image)?,
            image,
        })
    }
}

#[cfg(test)]
#[path = "../../tests/units/linear_attention/tables.rs"]
mod tests;
