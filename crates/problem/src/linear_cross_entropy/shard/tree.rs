//! The tree over tiles of classes: its nodes in a range of classes, and the order in which their results are put
//! together.

use std::ops::Range;

/// Classes in a tile. Tiles begin at multiples of it; partials and dh are summed along the tree of tiles.
pub const TILE: usize = 256;

/// The largest nodes within `classes` of `vocab`, from the first class on; a part of a tile at either end stands by
/// itself. At most two of each level.
pub fn nodes(vocab: usize, classes: Range<usize>) -> impl Iterator<Item = Range<usize>> + Clone {
    let Range { start, end } = classes;
    let node = move |start: usize| (start < end).then(|| start..node_end(vocab, start, end));
    std::iter::successors(node(start), move |last| node(last.end))
}

/// The end of the largest node that begins at `start` and does not go beyond `end`.
fn node_end(vocab: usize, start: usize, end: usize) -> usize {
    let (tile, within) = (start / TILE, start % TILE);
    // Behind the last class nodes are cut off.
    let whole = match end == vocab {
        true => (end - start).div_ceil(TILE).next_power_of_two(),
        false => (end - start) / TILE,
    };
    if within > 0 || whole == 0 {
        return end.min((start - within).saturating_add(TILE));
    }
    let level = tile.trailing_zeros().min(whole.ilog2());
    end.min(start.saturating_add(TILE.saturating_mul(1 << level)))
}

/// The result of `combine` along the tree, of the values of `parts`: these are disjoint, ascending and not empty,
/// `leaf` gets their numbers, and a child without parts is left out. Parts that meet within a tile, or cover a part of
/// a node, are put together by halves. None without parts.
pub fn fold<X>(
    parts: &[Range<usize>],
    leaf: &impl Fn(usize) -> X,
    combine: &impl Fn(X, X) -> X,
) -> Option<X> {
    let tiles = parts.last()?.end.div_ceil(TILE).next_power_of_two();
    Some(fold_node(0..tiles.saturating_mul(TILE), parts, 0, leaf, combine))
}

/// The value of a node; `parts`, some, lie in it, and the first of them has the number `first`.
fn fold_node<X>(
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
    // One class is not halved: parts that overlap there have no order, but an end.
    let aligned = end - start > 1 && parts.get(lower).is_none_or(|part| part.start >= middle);
    let (lower, left, right) = match aligned {
        true => (lower, start..middle, middle..end),
        false => (parts.len() / 2, start..end, start..end),
    };
    let (here, there) = parts.split_at(lower);
    let next = first + lower;
    match (here.is_empty(), there.is_empty()) {
        (true, _) => fold_node(right, there, next, leaf, combine),
        (_, true) => fold_node(left, here, first, leaf, combine),
        _ => combine(
            fold_node(left, here, first, leaf, combine),
            fold_node(right, there, next, leaf, combine),
        ),
    }
}

/// The order of [`fold`] for a stack: behind each part the number of times that the last value on the stack is put
/// together with the one before it.
pub fn merges(parts: &[Range<usize>]) -> Vec<u32> {
    let combine = |mut left: Vec<u32>, right: Vec<u32>| {
        left.extend(right);
        left.last_mut().into_iter().for_each(|count| *count += 1);
        left
    };
    fold(parts, &|_| vec![0], &combine).unwrap_or_default()
}

/// The most values that lie on the stack of [`merges`].
pub fn depth(merges: &[u32]) -> usize {
    let (mut top, mut most) = (0usize, 0);
    for &count in merges {
        top += 1;
        most = most.max(top);
        top = top.saturating_sub(count as usize);
    }
    most
}
