//! Unit tests of `src/linear_attention/tables.rs`.

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
