//! How sequences are cut into chunks, as kernels read it.

use super::{CHUNK, SIDE};
use crate::queue::Queue;
use crate::room::{Layout, Room};
use etalon_problem::{Error, LinearAttention};

/// The tables of a problem.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    /// Batch element, first token in the arrays, tokens, and whether it is the first (1) and the last (2)
    /// of its sequence.
    pub chunks: Vec<[i32; 4]>,
    /// Micro-chunks: the chunk, and the first row in it.
    pub strips: Vec<[i32; 2]>,
    /// Sequences: the first chunk, and how many.
    pub lines: Vec<[i32; 2]>,
    /// What blocks of sm90a walk: the first chunk, how many, and the sequence. Those of sequences of several segments come first.
    pub segments: Vec<[i32; 3]>,
    /// Such sequences: the first segment, how many, and the sequence.
    pub runs: Vec<[i32; 3]>,
    chunks_at: Room,
    strips_at: Room,
    lines_at: Room,
    segments_at: Room,
    runs_at: Room,
    /// The bytes of all of them.
    pub bytes: usize,
}

impl Tables {
    /// The tables of a problem that has passed its check, with segments of as many tokens as `cut` says of a sequence's.
    /// Fails where there are too many chunks.
    pub fn new(problem: &LinearAttention, cut: impl Fn(usize) -> usize) -> Result<Tables, Error> {
        let mut tables = Tables::default();
        let mut whole = Vec::new();
        for (number, s) in problem.list_sequences().into_iter().enumerate() {
            let first = tables.chunks.len();
            for begin in (0..s.tokens).step_by(CHUNK) {
                let len = CHUNK.min(s.tokens - begin);
                let ends = usize::from(begin == 0) + 2 * usize::from(begin + len == s.tokens);
                let chunk = tables.chunks.len();
                let rows = (0..len).step_by(SIDE);
                tables.strips.extend(rows.map(|row| [chunk, row].map(|x| x as i32)));
                tables.chunks.push([s.batch, s.start + begin, len, ends].map(|x| x as i32));
            }
            let chunks = tables.chunks.len() - first;
            tables.lines.push([first, chunks].map(|x| x as i32));
            let of_segment = cut(s.tokens).div_ceil(CHUNK).max(1);
            if chunks <= of_segment {
                whole.push([first, chunks, number].map(|x| x as i32));
                continue;
            }
            let begin = tables.segments.len();
            for at in (0..chunks).step_by(of_segment) {
                let own = [first + at, of_segment.min(chunks - at), number];
                tables.segments.push(own.map(|x| x as i32));
            }
            let run = [begin, tables.segments.len() - begin, number];
            tables.runs.push(run.map(|x| x as i32));
        }
        tables.segments.append(&mut whole);
        let mut layout = Layout::default();
        tables.chunks_at = layout.room(size_of_val(&tables.chunks[..]))?;
        tables.strips_at = layout.room(size_of_val(&tables.strips[..]))?;
        tables.lines_at = layout.room(size_of_val(&tables.lines[..]))?;
        tables.segments_at = layout.room(size_of_val(&tables.segments[..]))?;
        tables.runs_at = layout.room(size_of_val(&tables.runs[..]))?;
        tables.bytes = layout.bytes();
        Ok(tables)
    }

    /// Copies the tables to memory that begins there.
    pub fn upload(&self, queue: &Queue<'_>, base: u64) -> Result<(), Error> {
        let put = |room: Room, bytes: &[u8]| queue.upload(room.address(base), bytes);
        put(self.chunks_at, bytemuck::cast_slice(&self.chunks))?;
        put(self.strips_at, bytemuck::cast_slice(&self.strips))?;
        put(self.lines_at, bytemuck::cast_slice(&self.lines))?;
        put(self.segments_at, bytemuck::cast_slice(&self.segments))?;
        put(self.runs_at, bytemuck::cast_slice(&self.runs))
    }

    /// Where chunks, strips and lines lie in memory that begins there.
    pub fn addresses(&self, base: u64) -> [u64; 3] {
        [self.chunks_at, self.strips_at, self.lines_at].map(|room| room.address(base))
    }

    /// Where segments and runs lie in memory that begins there.
    pub fn cuts(&self, base: u64) -> [u64; 2] {
        [self.segments_at, self.runs_at].map(|room| room.address(base))
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
        let tables =
            Tables::new(&LinearAttention::new(extents).sequences(packed), |n| n.min(256)).unwrap();
        let chunks =
            [[0, 0, 3, 3], [0, 3, 128, 1], [0, 131, 128, 0], [0, 259, 1, 2], [0, 260, 128, 3]];
        assert_eq!(tables.chunks, chunks);
        assert_eq!(tables.lines, [[0, 1], [1, 0], [1, 3], [4, 1]]);
        assert_eq!(tables.segments, [[1, 2, 2], [3, 1, 2], [0, 1, 0], [1, 0, 1], [4, 1, 3]]);
        assert_eq!(tables.runs, [[0, 2, 2]]);
        let strips = [[0, 0], [1, 0], [1, 64], [2, 0], [2, 64], [3, 0], [4, 0], [4, 64]];
        assert_eq!(tables.strips, strips);
    }
}
