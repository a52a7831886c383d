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
    chunks_at: Room,
    strips_at: Room,
    lines_at: Room,
    /// The bytes of all of them.
    pub bytes: usize,
}

impl Tables {
    /// The tables of a problem that has passed its check. Fails where there are too many chunks.
    pub fn new(problem: &LinearAttention) -> Result<Tables, Error> {
        let mut tables = Tables::default();
        for s in problem.list_sequences() {
            let first = tables.chunks.len();
            for begin in (0..s.tokens).step_by(CHUNK) {
                let len = CHUNK.min(s.tokens - begin);
                let ends = usize::from(begin == 0) + 2 * usize::from(begin + len == s.tokens);
                let chunk = tables.chunks.len();
                let rows = (0..len).step_by(SIDE);
                tables.strips.extend(rows.map(|row| [chunk, row].map(|x| x as i32)));
                tables.chunks.push([s.batch, s.start + begin, len, ends].map(|x| x as i32));
            }
            tables.lines.push([first, tables.chunks.len() - first].map(|x| x as i32));
        }
        let mut layout = Layout::default();
        tables.chunks_at = layout.room(size_of_val(&tables.chunks[..]))?;
        tables.strips_at = layout.room(size_of_val(&tables.strips[..]))?;
        tables.lines_at = layout.room(size_of_val(&tables.lines[..]))?;
        tables.bytes = layout.bytes();
        Ok(tables)
    }

    /// Copies the tables to memory that begins there.
    pub fn upload(&self, queue: &Queue<'_>, base: u64) -> Result<(), Error> {
        let put = |room: Room, bytes: &[u8]| queue.upload(room.address(base), bytes);
        put(self.chunks_at, bytemuck::cast_slice(&self.chunks))?;
        put(self.strips_at, bytemuck::cast_slice(&self.strips))?;
        put(self.lines_at, bytemuck::cast_slice(&self.lines))
    }

    /// Where chunks, strips and lines lie in memory that begins there.
    pub fn addresses(&self, base: u64) -> [u64; 3] {
        [self.chunks_at, self.strips_at, self.lines_at].map(|room| room.address(base))
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
        let tables = Tables::new(&LinearAttention::new(extents).sequences(packed)).unwrap();
        let chunks =
            [[0, 0, 3, 3], [0, 3, 128, 1], [0, 131, 128, 0], [0, 259, 1, 2], [0, 260, 128, 3]];
        assert_eq!(tables.chunks, chunks);
        assert_eq!(tables.lines, [[0, 1], [1, 0], [1, 3], [4, 1]]);
        let strips = [[0, 0], [1, 0], [1, 64], [2, 0], [2, 64], [3, 0], [4, 0], [4, 64]];
        assert_eq!(tables.strips, strips);
    }
}
