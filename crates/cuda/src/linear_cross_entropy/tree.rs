//! The tree over tiles of classes: its nodes in a range of classes, and the order in which parts are put together.

use crate::linear_cross_entropy::plan::TILE;
use std::ops::Range;

/// The largest nodes within `classes` of `vocab`, from the first class on; a part of a tile at either end stands
/// by itself. At most two of each level.
pub(crate) fn nodes(
    vocab: usize,
    classes: Range<usize>,
) -> impl Iterator<Item = Range<usize>> + Clone {
    let Range { start, end } = classes;
    let step = move |start: usize| (start < end).then(|| start..node_end(vocab, start, end));
    std::iter::successors(step(start), move |node| step(node.end))
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

/// How parts, which are disjoint, ascending and not empty, are put together along the tree: behind each the number
/// of times that what lies on a stack is put together with the one before it. Parts that meet within a tile, or
/// cover a part of a node, are put together by halves.
pub(crate) fn merges(parts: &[Range<usize>]) -> Vec<u32> {
    let mut merges = Vec::with_capacity(parts.len());
    if let Some(last) = parts.last() {
        let tiles = last.end.div_ceil(TILE).next_power_of_two();
        below(0..tiles * TILE, parts, &mut merges);
    }
    merges
}

/// Those of a node in which some parts lie.
fn below(Range { start, end }: Range<usize>, parts: &[Range<usize>], merges: &mut Vec<u32>) {
    if parts.len() <= 1 {
        merges.extend(parts.iter().map(|_| 0));
        return;
    }
    let middle = start + (end - start) / 2;
    let lower = parts.partition_point(|part| part.end <= middle);
    let aligned = parts.get(lower).is_none_or(|part| part.start >= middle);
    let (lower, left, right) = match aligned {
        true => (lower, start..middle, middle..end),
        false => (parts.len() / 2, start..end, start..end),
    };
    let (here, there) = parts.split_at(lower);
    below(left, here, merges);
    below(right, there, merges);
    if !here.is_empty() && !there.is_empty() {
        merges.last_mut().into_iter().for_each(|count| *count += 1);
    }
}

/// The most that lies on the stack.
pub(crate) fn depth(merges: &[u32]) -> usize {
    let (mut top, mut most) = (0, 0);
    for &count in merges {
        top += 1;
        most = most.max(top);
        top -= count as usize;
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_tiles(vocab: usize, tiles: Range<usize>) -> Vec<Range<usize>> {
        let classes = tiles.start * TILE..vocab.min(tiles.end * TILE);
        nodes(vocab, classes).map(|node| node.start / TILE..node.end.div_ceil(TILE)).collect()
    }

    fn only(one: Range<usize>) -> Vec<Range<usize>> {
        [one].into()
    }

    #[test]
    fn a_shard_holds_the_largest_nodes_within_it() {
        assert_eq!(in_tiles(7 * TILE, 0..7), only(0..7));
        assert_eq!(in_tiles(100 * TILE, 3..15), [3..4, 4..8, 8..12, 12..14, 14..15]);
        assert_eq!(in_tiles(7 * TILE - 9, 4..7), only(4..7), "a node without its last tile");
        assert_eq!(in_tiles(7 * TILE, 3..6), [3..4, 4..6]);
        assert_eq!(in_tiles(7 * TILE, 5..5), []);
        let all: Vec<_> = nodes(1000, 100..999).collect();
        assert_eq!(all, [100..256, 256..512, 512..768, 768..999], "parts of tiles at both ends");
        assert_eq!(nodes(1000, 300..301).collect::<Vec<_>>(), only(300..301));
    }

    /// The order of a sum of parts, as a text.
    fn text(parts: &[String], merges: &[u32]) -> String {
        let mut stack: Vec<String> = Vec::new();
        for (part, &count) in parts.iter().zip(merges) {
            stack.push(part.clone());
            for _ in 0..count {
                let (y, x) = (stack.pop().unwrap(), stack.pop().unwrap());
                stack.push(format!("({x} {y})"));
            }
        }
        assert_eq!(stack.len(), 1);
        stack.remove(0)
    }

    /// The order in which a device puts tiles together that it pushes one after the other.
    fn pushed(tiles: Range<usize>) -> String {
        let mut stack: Vec<(usize, String)> = Vec::new();
        for tile in tiles {
            let mut next = (1, tile.to_string());
            while stack.last().is_some_and(|(size, _)| *size == next.0) {
                let (size, x) = stack.pop().unwrap();
                next = (2 * size, format!("({x} {})", next.1));
            }
            stack.push(next);
        }
        let joined = stack.into_iter().rev().reduce(|y, x| (0, format!("({} {})", x.1, y.1)));
        joined.unwrap().1
    }

    #[test]
    fn nodes_of_shards_are_put_together_as_tiles_are() {
        for tiles in 1..20 {
            let vocab = tiles * TILE - 3;
            for borders in
                [vec![0, tiles], vec![0, tiles / 3, tiles / 2, tiles], (0..=tiles).collect()]
            {
                let shards = borders.windows(2);
                let parts: Vec<_> = shards
                    .flat_map(|b| nodes(vocab, b[0] * TILE..vocab.min(b[1] * TILE)))
                    .collect();
                let own = |node: &Range<usize>| pushed(node.start / TILE..node.end.div_ceil(TILE));
                let texts: Vec<String> = parts.iter().map(own).collect();
                assert_eq!(text(&texts, &merges(&parts)), pushed(0..tiles), "{parts:?}");
            }
        }
        assert!(merges(&[]).is_empty());
        let parts = [0..3, 3..5, 5..200, 255..300, 300..900];
        let numbers: Vec<String> = (0..5).map(|x| x.to_string()).collect();
        assert_eq!(text(&numbers, &merges(&parts)), "((0 1) (2 (3 4)))");
    }

    #[test]
    fn few_parts_wait() {
        let classes: Vec<_> = (0..5000).map(|x| x..x + 1).collect();
        assert!(depth(&merges(&classes)) <= 13);
        // The deepest tree that a problem may have, cut at every class of a tile.
        let mut parts: Vec<_> = nodes(1 << 31, 0..(1 << 31) - TILE).collect();
        parts.extend(((1 << 31) - TILE..1 << 31).map(|x| x..x + 1));
        assert!(depth(&merges(&parts)) <= 32, "{}", depth(&merges(&parts)));
    }
}
