//! Places of elements that are off, in a sentence or two: their rows, heads and columns, and the tile size that their
//! numbers follow, if one does.

mod unseen;

use super::answer::Judged;
use super::candidate::joined;
use etalon_problem::{Axis, Problem};

/// Sizes of the tiles in which kernels process rows and keys.
pub(super) const TILES: [usize; 4] = [16, 32, 64, 128];

/// Of a class of entries that is affected as a whole, this share may seem right by chance.
const BY_CHANCE: f64 = 0.1;

/// As many entries are listed one by one.
const LISTED: usize = 6;

/// As many groups of batch elements or heads are described one by one.
const GROUPS: usize = 4;

/// Sentences about an output: none where nothing is off.
pub(super) fn sentences(problem: &Problem, output: &Judged<'_>) -> Vec<String> {
    let off = output.off();
    if off == 0 {
        return Vec::new();
    }
    if off == output.got.len() {
        return vec!["Every element is off.".to_string()];
    }
    let mut sentences = of(output, &|at| output.margins[at] > 1.0);
    sentences.extend(unseen::sentences(problem, output));
    let rows = output.own_rows();
    let count = rows.iter().filter(|row| **row).count();
    if output.width() > 1 && off < count * output.width() {
        let width = output.width();
        let mean = off as f64 / count as f64;
        sentences.push(format!(
            "{count} of {} rows have elements that are off, {mean:.1} of {width} in the mean.",
            rows.len()
        ));
    }
    sentences
}

/// Places of some elements of an output. Places that differ between batch elements or heads are given for each, as
/// long as there are few.
pub(super) fn of(output: &Judged<'_>, has: &dyn Fn(usize) -> bool) -> Vec<String> {
    let shape = &output.operand.shape;
    let hits: Vec<usize> = (0..output.got.len()).filter(|&at| has(at)).collect();
    let all: Vec<usize> = (0..shape.len()).collect();
    for (at, &axis) in output.operand.axes.iter().enumerate() {
        let splits =
            matches!(axis, Axis::Batch | Axis::QueryHeads | Axis::KeyHeads | Axis::Sequences);
        if !splits || shape[at] < 2 || is_product(output, &hits) {
            continue;
        }
        let inner: Vec<usize> = all.iter().copied().filter(|&other| other != at).collect();
        let stride: usize = shape[at + 1..].iter().product();
        let mut groups: Vec<(String, Vec<bool>)> = Vec::new();
        let mut by_entry = vec![Vec::new(); shape[at]];
        hits.iter().for_each(|&hit| by_entry[hit / stride % shape[at]].push(hit));
        for (entry, hits) in by_entry.iter().enumerate().filter(|(_, hits)| !hits.is_empty()) {
            let text = sentence(output, &inner, hits);
            match groups.iter_mut().find(|(other, _)| *other == text) {
                Some((_, entries)) => entries[entry] = true,
                None => {
                    let mut own = vec![false; shape[at]];
                    own[entry] = true;
                    groups.push((text, own));
                }
            }
        }
        if (2..=GROUPS).contains(&groups.len()) {
            let words =
                groups.iter().map(|(text, own)| format!("In {}: {text}", entries(axis, own)));
            return words.collect();
        }
    }
    let mut text = sentence(output, &all, &hits);
    if !is_product(output, &hits) && text.contains("only in") {
        text = text.trim_end_matches('.').to_string() + ", not in each of them the same.";
    }
    if let Some(first) = text.get(..1) {
        text = first.to_uppercase() + &text[1..];
    }
    vec![text]
}

/// True if rows that are hit are those that every list of entries of the axes before the columns has in
/// common: none is missing but by chance.
fn is_product(output: &Judged<'_>, hits: &[usize]) -> bool {
    let (shape, width) = (&output.operand.shape, output.width());
    let axes = if width > 1 { shape.len() - 1 } else { shape.len() };
    let mut entries: Vec<Vec<bool>> =
        shape[..axes].iter().map(|&extent| vec![false; extent]).collect();
    let mut rows = vec![false; output.got.len() / width];
    for hit in hits {
        rows[hit / width] = true;
        let mut left = hit / width;
        for (entries, &extent) in entries.iter_mut().zip(&shape[..axes]).rev() {
            entries[left % extent] = true;
            left /= extent;
        }
    }
    let all: usize = entries.iter().map(|own| own.iter().filter(|hit| **hit).count()).product();
    rows.iter().filter(|hit| **hit).count() as f64 >= (1.0 - BY_CHANCE) * all as f64
}

/// Places of elements along some axes, as a sentence that begins with a small letter.
fn sentence(output: &Judged<'_>, along: &[usize], hits: &[usize]) -> String {
    let (axes, shape) = (&output.operand.axes, &output.operand.shape);
    let mut parts = Vec::new();
    let mut whole = Vec::new();
    for &at in along {
        let stride: usize = shape[at + 1..].iter().product();
        let mut hit = vec![false; shape[at]];
        hits.iter().for_each(|place| hit[place / stride % shape[at]] = true);
        if hit.iter().all(|hit| *hit) {
            whole.push(format!("all {}", plural(axes[at])));
        } else {
            parts.push(format!("only in {}", entries(axes[at], &hit)));
        }
    }
    match (parts.is_empty(), whole.is_empty()) {
        (true, _) => format!("spread over {}.", joined(&whole)),
        (false, true) => format!("{}.", joined(&parts)),
        (false, false) => format!("{}, over {}.", joined(&parts), joined(&whole)),
    }
}

/// Some entries of an axis: one, a range, a class of a tile, or their number.
fn entries(axis: Axis, hit: &[bool]) -> String {
    let (name, n) = (plural(axis), hit.len());
    let list: Vec<usize> = (0..n).filter(|&i| hit[i]).collect();
    let (Some(&first), Some(&last)) = (list.first(), list.last()) else {
        return format!("no {name}");
    };
    if list.len() == 1 {
        let end = if last + 1 == n && n > 2 { ", the last" } else { "" };
        return format!("{} {first} of {n}{end}", singular(axis));
    }
    if last + 1 - first == list.len() {
        return range(name, first, last, n);
    }
    if is_cut_into_tiles(axis)
        && let Some(class) = class(hit)
    {
        return format!("{name} {class}");
    }
    if list.len() <= LISTED {
        let list: Vec<String> = list.iter().map(usize::to_string).collect();
        return format!("{name} {} of {n}", joined(&list));
    }
    format!("{} of {n} {name}, {first} to {last}", list.len())
}

fn range(name: &str, first: usize, last: usize, n: usize) -> String {
    let count = last + 1 - first;
    match (first, last + 1 == n) {
        (0, _) => format!("the first {count} of {n} {name}"),
        (_, true) => {
            let tile =
                TILES.into_iter().find(|&tile| !n.is_multiple_of(tile) && first == n - n % tile);
            let whole = TILES.into_iter().rev().find(|&tile| first.is_multiple_of(tile));
            let tail = match (tile, whole) {
                (Some(tile), _) => format!(": those after the last whole tile of {tile}"),
                (None, Some(tile)) => format!(": from a multiple of {tile} on"),
                _ => String::new(),
            };
            format!("the last {count} of {n} {name}, from {first} on{tail}")
        }
        _ => {
            let tile = TILES
                .into_iter()
                .rev()
                .find(|&tile| first.is_multiple_of(tile) && (last + 1).is_multiple_of(tile));
            let tiles = tile.map_or(String::new(), |tile| match count / tile {
                1 => format!(", a tile of {tile}"),
                tiles => format!(", {tiles} tiles of {tile}"),
            });
            format!("{name} {first} to {last} of {n}{tiles}")
        }
    }
}

/// The entries as those with some remainders by the size of a tile, if they are that: at least two tiles,
/// and few remainders.
fn class(hit: &[bool]) -> Option<String> {
    let n = hit.len();
    TILES.into_iter().filter(|&tile| n >= 2 * tile).find_map(|tile| {
        let mut remainders = vec![false; tile];
        (0..n).filter(|&i| hit[i]).for_each(|i| remainders[i % tile] = true);
        let chosen: Vec<usize> = (0..tile).filter(|&r| remainders[r]).collect();
        let all = (0..n).filter(|i| remainders[i % tile]).count();
        let affected = hit.iter().filter(|hit| **hit).count();
        let complete = affected as f64 >= (1.0 - BY_CHANCE) * all as f64;
        if !complete || 4 * chosen.len() > tile {
            return None;
        }
        let list: Vec<String> = chosen.iter().map(usize::to_string).collect();
        Some(format!("whose number mod {tile} is {}", list.join(", ").replace(", ", " or ")))
    })
}

/// True if kernels cut an axis into tiles.
pub(super) fn is_cut_into_tiles(axis: Axis) -> bool {
    use Axis::{Classes, Dim, Keys, Queries, Targets, Tokens, ValueDim};
    matches!(axis, Queries | Keys | Tokens | Targets | Classes | Dim | ValueDim)
}

/// The entries of an axis in words.
fn plural(axis: Axis) -> &'static str {
    match axis {
        Axis::Batch | Axis::BatchOr1 => "batch elements",
        Axis::QueryHeads | Axis::QueryHeadsOr1 => "query heads",
        Axis::KeyHeads => "key heads",
        Axis::Queries => "rows",
        Axis::Keys => "keys",
        Axis::Tokens | Axis::Targets => "tokens",
        Axis::Dim | Axis::ValueDim => "columns",
        Axis::Distances => "distances",
        Axis::Sequences => "sequences",
        Axis::Classes => "classes",
        Axis::Tiles => "tiles",
    }
}

/// One entry of an axis in words.
fn singular(axis: Axis) -> &'static str {
    match axis {
        Axis::Classes => "class",
        other => {
            let name = plural(other);
            name.strip_suffix('s').unwrap_or(name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(n: usize, hit: impl Fn(usize) -> bool) -> String {
        entries(Axis::Queries, &(0..n).map(hit).collect::<Vec<_>>())
    }

    #[test]
    fn entries_are_named_as_a_kernel_cuts_them() {
        assert_eq!(words(100, |i| i == 7), "row 7 of 100");
        assert_eq!(words(100, |i| i < 3), "the first 3 of 100 rows");
        let tail = "the last 5 of 101 rows, from 96 on: those after the last whole tile of 16";
        assert_eq!(words(101, |i| i >= 96), tail);
        let from = "the last 64 of 128 rows, from 64 on: from a multiple of 64 on";
        assert_eq!(words(128, |i| i >= 64), from);
        assert_eq!(words(128, |i| (32..64).contains(&i)), "rows 32 to 63 of 128, a tile of 32");
        assert_eq!(words(128, |i| i % 16 == 15), "rows whose number mod 16 is 15");
        assert_eq!(words(128, |i| i % 64 == 3), "rows whose number mod 64 is 3");
        assert_eq!(words(128, |i| [3, 50, 77].contains(&i)), "rows 3, 50 and 77 of 128");
        let primes = |i: usize| i > 1 && (2..i).all(|d| !i.is_multiple_of(d));
        assert_eq!(words(40, primes), "12 of 40 rows, 2 to 37");
    }
}
