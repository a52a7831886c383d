//! Numbers of tiles that a problem has, and that it may have.

use super::window::window;
use etalon_problem::{BiasExtents, Error, Mask, Result, Scores, Sequence, Sequences};

/// The rows and columns of a tile of the portable kernels.
pub(crate) const SIDE: usize = 64;

/// Numbers of tiles of 64 rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Of all sequences; of pairs, for the gradient of a bias.
    pub by_queries: usize,
    pub by_keys: usize,
    pub by_pairs: usize,
    /// Of the keys of the longest sequence.
    pub longest: usize,
    pub sequences: usize,
    /// Tiles of queries that kernels may look up: those of `by_queries`, and one more where the device makes the list.
    pub tiles: usize,
    /// The heads, or 1, of the flags of pairs, where spans do not tell all.
    pub flags: Option<usize>,
    /// True if spans tell all and are no window: kernels of sm90a read them.
    pub by_spans: bool,
}

fn tiles(rows: usize) -> usize {
    rows.div_ceil(SIDE)
}

impl Counts {
    pub fn of_scores(scores: &Scores) -> Counts {
        let list = scores.sequences();
        let some = list.iter().any(|s| s.queries > 0);
        let has_spans = || list.iter().all(|sequence| scores.mask.row_spans(sequence).is_some());
        let flags = flags(scores).filter(|_| some && !has_spans());
        let by_queries = list.iter().map(|s| tiles(s.queries)).sum();
        let most = |f: fn(&Sequence) -> usize| list.iter().map(f).max().map_or(0, tiles);
        let by_pairs = match scores.bias {
            None => 0,
            Some(bias) if is_shared(scores, bias) => most(|s| s.queries) * most(|s| s.keys),
            Some(_) => list.iter().map(|s| tiles(s.queries) * tiles(s.keys)).sum(),
        };
        Counts {
            by_queries,
            by_keys: list.iter().map(|s| tiles(s.keys)).sum(),
            by_pairs,
            longest: most(|s| s.keys),
            sequences: list.len(),
            tiles: by_queries,
            flags,
            by_spans: some && flags.is_none() && !is_window(scores),
        }
    }

    /// The most that there may be, whatever the lengths, offsets and arrays of the mask are. One more sequence is
    /// empty. Fails where they do not fit 32 bits.
    pub fn most(scores: &Scores) -> Result<Counts> {
        let e = &scores.extents;
        let count = scores.sequences().len();
        // Of n rows in s sequences ⌈nᵢ / 64⌉ are at most (n + 63 s) / 64, and of n and m rows Σ ⌈nᵢ / 64⌉ ⌈mᵢ / 64⌉
        // at most n m / 64² + n / 64 + m / 64 + s.
        let packed = matches!(scores.sequences, Sequences::Packed { .. });
        let own = |rows: usize| match packed {
            true if rows > 0 => (rows + (SIDE - 1) * count) / SIDE,
            true => 0,
            false => count.saturating_mul(tiles(rows)),
        };
        let all = tiles(e.queries).saturating_mul(tiles(e.keys));
        let by_pairs = match scores.bias {
            None => 0,
            Some(bias) if is_shared(scores, bias) => all,
            Some(_) if packed => all + tiles(e.queries) + tiles(e.keys) + count,
            Some(_) => count.saturating_mul(all),
        };
        let (by_queries, by_keys) = (own(e.queries), own(e.keys));
        if by_queries.max(by_keys).max(by_pairs) >= i32::MAX as usize {
            let reason = "the lists of its tiles have at most 2³¹ − 2";
            return Err(Error::unsupported("a problem of this size", reason));
        }
        let flags = flags(scores);
        Ok(Counts {
            by_queries,
            by_keys,
            by_pairs,
            longest: tiles(e.keys),
            sequences: count + 1,
            tiles: by_queries + 1,
            flags,
            by_spans: flags.is_none() && !is_window(scores),
        })
    }
}

/// True if batch elements share a bias: one block walks them all.
pub(crate) fn is_shared(scores: &Scores, bias: BiasExtents) -> bool {
    bias.batch == 1 && scores.extents.batch > 1
}

fn is_window(scores: &Scores) -> bool {
    window(&scores.mask, scores.extents.queries, scores.extents.keys).is_some()
}

/// The heads of the flags of pairs, where rows of the mask are no spans, or are only with some data.
fn flags(scores: &Scores) -> Option<usize> {
    let one = Sequence { batch: 0, query_start: 0, queries: 1, key_start: 0, keys: 1 };
    // Without data, of no mask some rows are spans and others not.
    let spans = scores.mask.row_span(&one, 0).is_some();
    let heads = scores.extents.query_heads;
    (!spans).then_some(if by_head(&scores.mask) { heads } else { heads.min(1) })
}

fn by_head(mask: &Mask) -> bool {
    match mask {
        Mask::Array(array) => array.shape.get(1).is_some_and(|&heads| heads > 1),
        Mask::And(masks) | Mask::Or(masks) => masks.iter().any(by_head),
        _ => false,
    }
}
