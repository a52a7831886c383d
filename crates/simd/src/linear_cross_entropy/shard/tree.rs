//! The tree over tiles of classes: its nodes in a range of classes, and sums along it.

use super::super::cut::TILE;
use std::ops::Range;

/// The largest nodes within `classes` of `vocab`, from the first class on; a part of a tile at either end
/// stands by itself. At most two of each level.
pub fn nodes(vocab: usize, classes: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let Range { mut start, end } = classes;
    std::iter::from_fn(move || {
        (start < end).then(|| {
            let node = start..node_end(vocab, start, end);
            start = node.end;
            node
        })
    })
}

/// Where the largest node ends that begins at `start` and does not go beyond `end`.
fn node_end(vocab: usize, start: usize, end: usize) -> usize {
    let (tile, within) = (start / TILE, start % TILE);
    // Behind the last class nodes are cut off.
    let whole = match end == vocab {
        true => (end - start).div_ceil(TILE).next_power_of_two(),
        false => (end - start) / TILE,
    };
    if within > 0 || whole == 0 {
        return end.min(start - within + TILE);
    }
    let level = tile.trailing_zeros().min(whole.ilog2());
    end.min(start + (TILE << level))
}

/// What `combine` makes of the values of `parts` along the tree: these are disjoint, ascending and not
/// empty, `leaf` gets their numbers, and a child without parts is left out. Parts that meet within a tile,
/// or cover a part of a node, are put together by halves. None without parts.
pub fn fold<X>(
    parts: &[Range<usize>],
    leaf: &impl Fn(usize) -> X,
    combine: &impl Fn(X, X) -> X,
) -> Option<X> {
    let tiles = parts.last()?.end.div_ceil(TILE).next_power_of_two();
    Some(below(0..tiles * TILE, parts, 0, leaf, combine))
}

/// The value of a node; `parts`, some, lie in it, and the first of them has the number `first`.
fn below<X>(
    Range { start, end }: Range<usize>,
    parts: &[Range<usize>],
    first: usize,
    leaf: &impl Fn(usize) -> X,
    combine: &impl Fn(X, X) -> X,
) -> X {
    if parts.len() == 1 {
        return leaf(first);
    }
    let middle = start + (end - start) / 2;
    let lower = parts.partition_point(|part| part.end <= middle);
    let aligned = parts.get(lower).is_none_or(|part| part.start >= middle);
    let (lower, left, right) = match aligned {
        true => (lower, start..middle, middle..end),
        false => (parts.len() / 2, start..end, start..end),
    };
    let (here, there) = parts.split_at(lower);
    let next = first + lower;
    match (here.is_empty(), there.is_empty()) {
        (true, _) => below(right, there, next, leaf, combine),
        (_, true) => below(left, here, first, leaf, combine),
        _ => combine(
            below(left, here, first, leaf, combine),
            below(right, there, next, leaf, combine),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::tree::fold as unsharded;
    use super::*;

    fn tiles_of(vocab: usize, tiles: Range<usize>) -> Vec<Range<usize>> {
        let classes = tiles.start * TILE..vocab.min(tiles.end * TILE);
        let in_tiles = |node: Range<usize>| node.start / TILE..node.end.div_ceil(TILE);
        nodes(vocab, classes).map(in_tiles).collect()
    }

    fn only(one: Range<usize>) -> Vec<Range<usize>> {
        [one].into()
    }

    #[test]
    fn a_shard_holds_the_largest_nodes_within_it() {
        assert_eq!(tiles_of(7 * TILE, 0..7), only(0..7));
        assert_eq!(tiles_of(100 * TILE, 3..15), [3..4, 4..8, 8..12, 12..14, 14..15]);
        assert_eq!(tiles_of(7 * TILE - 9, 4..7), only(4..7), "a node without its last tile");
        assert_eq!(tiles_of(7 * TILE, 3..6), [3..4, 4..6]);
        assert_eq!(tiles_of(7 * TILE, 5..5), []);
        let all: Vec<_> = nodes(1000, 100..999).collect();
        assert_eq!(all, [100..256, 256..512, 512..768, 768..999], "parts of tiles at both ends");
        assert_eq!(nodes(1000, 300..301).collect::<Vec<_>>(), only(300..301));
    }

    /// A sum whose value tells in which order it was made.
    fn text(tile: usize) -> String {
        tile.to_string()
    }

    fn join(x: String, y: String) -> String {
        format!("({x} {y})")
    }

    #[test]
    fn nodes_of_shards_are_put_together_as_tiles_are() {
        for tiles in 1..20 {
            let vocab = tiles * TILE - 3;
            let expected = unsharded(0..tiles, &text, &join);
            for borders in
                [vec![0, tiles], vec![0, tiles / 3, tiles / 2, tiles], (0..=tiles).collect()]
            {
                let shards = borders.windows(2);
                let parts: Vec<_> = shards
                    .flat_map(|b| nodes(vocab, b[0] * TILE..vocab.min(b[1] * TILE)))
                    .collect();
                let node = |number: usize| {
                    let Range { start, end } = parts[number].clone();
                    unsharded(start / TILE..end.div_ceil(TILE), &text, &join)
                };
                assert_eq!(fold(&parts, &node, &join), Some(expected.clone()), "{parts:?}");
            }
        }
        assert_eq!(fold(&[], &text, &join), None);
        let parts = [0..3, 3..5, 5..200, 255..300, 300..900];
        assert_eq!(fold(&parts, &text, &join).as_deref(), Some("((0 1) (2 (3 4)))"));
    }
}
