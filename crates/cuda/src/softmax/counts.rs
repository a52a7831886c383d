//! How many tiles a problem has, and how many it may have.

use etalon_problem::{BiasExtents, Error, Mask, Scores, Sequence, Sequences};

/// The rows and columns of a tile of the portable kernels.
pub(crate) const SIDE: usize = 64;

/// How many tiles of 64 rows there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Of queries and of keys, of all sequences; and of pairs, for the gradient of a bias.
    pub by_queries: usize,
    pub by_keys: usize,
    pub by_pairs: usize,
    /// Of the keys of the longest sequence.
    pub longest: usize,
    pub sequences: usize,
    /// Tiles of queries that kernels may look up: those of `by_queries`, and one behind them where the device makes the list.
    pub tiles: usize,
    /// The heads, or 1, of the flags of pairs that count, where spans do not tell all.
    pub flags: Option<usize>,
}

fn tiles(rows: usize) -> usize {
    rows.div_ceil(SIDE)
}

impl Counts {
    /// Of the sequences and the mask of a problem.
    pub fn of_scores(scores: &Scores) -> Counts {
        let list = scores.sequences();
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
            flags: flags(scores).filter(|_| list.iter().any(|s| s.queries > 0)),
        }
    }

    /// The most that there may be, whatever the lengths and offsets are. One more sequence is empty. Fails where they
    /// do not fit 32 bits.
    pub fn most(scores: &Scores) -> Result<Counts, Error> {
        let e = &scores.extents;
        let count = scores.sequences().len();
        // Of n rows in s sequences ⌈nᵢ / 64⌉ are at most (n + 63 s) / 64, and of n and m rows Σ ⌈nᵢ / 64⌉ ⌈mᵢ / 64⌉ are at most
        // n m / 64² + n / 64 + m / 64 + s.
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
            return Err(Error::Unsupported {
                what: "a problem of this size".to_string(),
                reason: "the lists of its tiles have at most 2³¹ − 2".to_string(),
            });
        }
        Ok(Counts {
            by_queries,
            by_keys,
            by_pairs,
            longest: tiles(e.keys),
            sequences: count + 1,
            tiles: by_queries + 1,
            flags: flags(scores),
        })
    }
}

/// Whether batch elements share a bias: one block walks them all.
pub(crate) fn is_shared(scores: &Scores, bias: BiasExtents) -> bool {
    bias.batch == 1 && scores.extents.batch > 1
}

/// The heads of the flags of pairs, where rows of the mask are no spans.
fn flags(scores: &Scores) -> Option<usize> {
    let one = Sequence { batch: 0, query_start: 0, queries: 1, key_start: 0, keys: 1 };
    // Of no mask some rows are spans and others not.
    let spans = scores.mask.row_span(&one, 0).is_some();
    let heads = scores.extents.query_heads;
    (!spans).then_some(if by_head(&scores.mask) { heads } else { heads.min(1) })
}

/// Whether the heads of a mask differ.
fn by_head(mask: &Mask) -> bool {
    match mask {
        Mask::Array(array) => array.shape.get(1).is_some_and(|&heads| heads > 1),
        Mask::And(masks) | Mask::Or(masks) => masks.iter().any(by_head),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::softmax::rows::Rows;
    use etalon_problem::Extents;

    /// Those of the tables themselves.
    fn of_rows(rows: &Rows, e: &Extents) -> Counts {
        let pairs = e.batch * e.queries * e.keys;
        Counts {
            by_queries: rows.by_queries.len(),
            by_keys: rows.by_keys.len(),
            by_pairs: rows.by_pairs.len(),
            longest: rows.by_keys.iter().map(|task| task[3] as usize + 1).max().unwrap_or(0),
            sequences: rows.sequences.len(),
            tiles: rows.tiles.len(),
            flags: rows.allowed.as_ref().map(|flags| flags.len() / pairs),
        }
    }

    /// Problems of lengths, offsets and masks.
    fn cases() -> Vec<Scores> {
        let extents =
            Extents { batch: 2, query_heads: 2, key_heads: 1, queries: 150, keys: 200, dim: 8 };
        let one = Extents { batch: 1, ..extents };
        let lengths = |query: [usize; 2], key: [usize; 2]| Sequences::Lengths {
            query: query.into(),
            key: key.into(),
        };
        let packed =
            |cu_query: Vec<usize>, cu_key: Vec<usize>| Sequences::Packed { cu_query, cu_key };
        let sequences = [
            (extents, Sequences::Dense),
            (extents, lengths([130, 0], [65, 200])),
            (extents, lengths([0, 0], [0, 0])),
            (one, packed(vec![0, 1, 66, 131, 150], vec![0, 1, 66, 131, 200])),
            (one, packed(vec![0, 0, 150], vec![0, 200, 200])),
            (one, packed((0..=150).collect(), (0..=150).collect())),
        ];
        let either = Mask::Or(vec![Mask::window(2, 0), Mask::window(None, 0)]);
        let masks = [Mask::Full, Mask::causal(), either];
        let biases = [
            None,
            Some(BiasExtents { batch: 1, heads: 1 }),
            Some(BiasExtents { batch: 2, heads: 1 }),
        ];
        let mut all = Vec::new();
        for (extents, sequences) in sequences {
            for (mask, bias) in masks.iter().flat_map(|mask| biases.map(|bias| (mask, bias))) {
                let bias = bias.filter(|bias| bias.batch <= extents.batch);
                let plain = Scores { mask: mask.clone(), bias, ..Scores::new(extents) };
                all.push(Scores { sequences: sequences.clone(), ..plain });
            }
        }
        all
    }

    #[test]
    fn tiles_are_counted_without_their_tables() {
        for scores in cases() {
            let rows = Rows::new(&scores).unwrap();
            assert_eq!(Counts::of_scores(&scores), of_rows(&rows, &scores.extents), "{scores:?}");
        }
    }

    #[test]
    fn no_lengths_have_more_tiles_than_the_most() {
        for scores in cases() {
            let (own, most) = (Counts::of_scores(&scores), Counts::most(&scores).unwrap());
            let pairs = [
                (own.by_queries, most.by_queries),
                (own.by_keys, most.by_keys),
                (own.by_pairs, most.by_pairs),
                (own.longest, most.longest),
            ];
            assert!(pairs.iter().all(|(own, most)| own <= most), "{pairs:?} {scores:?}");
        }
        // Nor more than these by far.
        let longest = cases().iter().map(|x| Counts::most(x).unwrap().by_queries).max();
        assert_eq!(longest, Some((150 + 63 * 150) / 64));
    }
}
