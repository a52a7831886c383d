//! In which order tiles of classes are put together.

use etalon_problem::Error;
use std::ops::Range;

/// Classes in a tile. Tiles begin at multiples of it, in a shard as in the whole.
pub const TILE: usize = 256;

/// The tiles of a range of classes: cut at the multiples of [`TILE`].
pub(super) fn tiles(classes: &Range<usize>) -> Vec<Range<usize>> {
    let Range { start, end } = *classes;
    let first = start / TILE;
    let tiles = (first..end.div_ceil(TILE)).map(|t| start.max(t * TILE)..end.min((t + 1) * TILE));
    tiles.filter(|tile| !tile.is_empty()).collect()
}

/// Puts the values of `parts`, disjoint, ascending and not empty, together along the binary tree
/// over tiles: a node holds twice as many classes as its children, and begins at a multiple of
/// that; a child without parts is left out. Parts that meet within a tile or a node are put
/// together by their number alone.
pub(super) fn fold<X>(
    parts: &[Range<usize>],
    value: &mut impl FnMut(&Range<usize>) -> Result<X, Error>,
    combine: &impl Fn(X, X) -> Result<X, Error>,
) -> Result<Option<X>, Error> {
    let end = parts.last().map_or(0, |part| part.end);
    let root = 0..end.div_ceil(TILE).next_power_of_two() * TILE;
    node(&root, parts, value, combine)
}

fn node<X>(
    classes: &Range<usize>,
    parts: &[Range<usize>],
    value: &mut impl FnMut(&Range<usize>) -> Result<X, Error>,
    combine: &impl Fn(X, X) -> Result<X, Error>,
) -> Result<Option<X>, Error> {
    match parts {
        [] => return Ok(None),
        [part] => return value(part).map(Some),
        _ => {}
    }
    let middle = classes.start + classes.len() / 2;
    let lower = parts.partition_point(|part| part.end <= middle);
    let aligned = parts.get(lower).is_none_or(|part| part.start >= middle);
    let ((left, right), halves) = if aligned {
        (parts.split_at(lower), [classes.start..middle, middle..classes.end])
    } else {
        (parts.split_at(parts.len() / 2), [classes.clone(), classes.clone()])
    };
    let left = node(&halves[0], left, value, combine)?;
    let right = node(&halves[1], right, value, combine)?;
    match (left, right) {
        (Some(left), Some(right)) => combine(left, right).map(Some),
        (left, right) => Ok(left.or(right)),
    }
}
