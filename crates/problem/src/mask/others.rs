//! Misreadings of a mask by a kernel: each part of it alone, each end of a window moved or dropped, the
//! other alignment.

use super::{Align, Mask, NamedArray};
use crate::alternatives::{Other, aligned, other, turned};
use crate::{Scores, Sequence};

/// The most flags of an array that is made for a reading of a mask: of pairs that no other mask tells.
const FLAGS: usize = 1 << 22;

/// Misreadings of the mask of scores.
pub(crate) fn others(scores: &Scores) -> Vec<Other<Mask>> {
    let mut list = of(&scores.mask, scores);
    if !matches!(scores.mask, Mask::Full) {
        list.push(other("absent", "is not applied", Mask::Full));
    }
    list.extend(by_flags(scores));
    list
}

/// Of one node of the tree.
fn of(mask: &Mask, scores: &Scores) -> Vec<Other<Mask>> {
    let by_align = |align: Align| {
        let mut other_end = mask.clone();
        other_end.align_mut().into_iter().for_each(|own| *own = turned(align));
        other("other-end", format!("is counted {}", aligned(turned(align))), other_end)
    };
    match mask {
        Mask::Full => [Align::TopLeft, Align::BottomRight]
            .map(|align| {
                let change = if align == Align::TopLeft { "causal-top-left" } else { "causal" };
                let text = format!("is causal, counted {}", aligned(align));
                other(change, text, Mask::Causal { align })
            })
            .into(),
        Mask::Causal { align } => {
            let window = |left, right| Mask::Window { left, right, align: *align };
            vec![
                by_align(*align),
                other("transposed", "hides what comes before, not after", window(Some(0), None)),
                other("one-more", "shows the key after the query's own", window(None, Some(1))),
                other("diagonal", "shows the query's own key alone", window(Some(0), Some(0))),
            ]
        }
        Mask::Window { left, right, align } => {
            let mut list = windows(*left, *right, *align);
            list.push(by_align(*align));
            list
        }
        Mask::ChunkedCausal { chunk, align } => {
            let of = |chunk| Mask::ChunkedCausal { chunk, align: *align };
            let mut list = vec![
                by_align(*align),
                other("chunk-dropped", "is causal without chunks", Mask::Causal { align: *align }),
                other("chunk-doubled", "has chunks twice as long", of(2 * chunk)),
                other("chunk-one-more", "has chunks that are one longer", of(chunk + 1)),
            ];
            if *chunk > 1 {
                list.push(other(
                    "chunk-one-less",
                    "has chunks that are one shorter",
                    of(chunk - 1),
                ));
                list.push(other("chunk-halved", "has chunks half as long", of(chunk / 2)));
            }
            let window = Mask::Window { left: Some(chunk - 1), right: Some(0), align: *align };
            list.push(other("chunk-as-window", "is a window of the chunk's length", window));
            list
        }
        Mask::Segments { query, key } => segments(query, key),
        Mask::Array(array) => arrays(array),
        Mask::And(parts) => of_parts(parts, Mask::And, scores),
        Mask::Or(parts) => of_parts(parts, Mask::Or, scores),
    }
}

/// Each end moved, dropped, or taken for the other.
fn windows(left: Option<usize>, right: Option<usize>, align: Align) -> Vec<Other<Mask>> {
    let mut list = Vec::new();
    let mut add = |change: &str, text: &str, left: Option<usize>, right: Option<usize>| {
        list.push(other(change, text, Mask::Window { left, right, align }));
    };
    if let Some(n) = left {
        add("left-one-more", "reaches one key further to the left", Some(n + 1), right);
        add("left-dropped", "has no left end", None, right);
        if n > 0 {
            add("left-one-less", "reaches one key less to the left", Some(n - 1), right);
            add("left-halved", "reaches half as far to the left", Some(n / 2), right);
        }
        add("left-doubled", "reaches twice as far to the left", Some(2 * n), right);
        add("right-as-left", "reaches as far to the right as to the left", left, left);
    }
    if let Some(n) = right {
        add("right-one-more", "reaches one key further to the right", left, Some(n + 1));
        add("right-dropped", "has no right end", left, None);
        if n > 0 {
            add("right-one-less", "reaches one key less to the right", left, Some(n - 1));
            add("right-closed", "ends with the query's own key", left, Some(0));
        }
    } else {
        add("right-closed", "ends with the query's own key", left, Some(0));
    }
    if left != right {
        add("ends-exchanged", "has its ends exchanged", right, left);
    }
    if let (Some(l), Some(r)) = (left, right) {
        add("one-more", "reaches one key further on both sides", Some(l + 1), Some(r + 1));
        if l > 0 && r > 0 {
            add("one-less", "reaches one key less on both sides", Some(l - 1), Some(r - 1));
            add("halved", "reaches half as far on both sides", Some(l / 2), Some(r / 2));
        }
        let one = |left, right, align| Mask::Window { left, right, align };
        let other_end = turned(align);
        for (change, text, own) in [
            ("left-other-end", "has its left end", [other_end, align]),
            ("right-other-end", "has its right end", [align, other_end]),
        ] {
            let ends = vec![one(left, None, own[0]), one(None, right, own[1])];
            let text = format!("{text} counted {}", aligned(other_end));
            list.push(other(change, text, Mask::And(ends)));
        }
    }
    list
}

fn segments(query: &NamedArray<i64>, key: &NamedArray<i64>) -> Vec<Other<Mask>> {
    let mut list = Vec::new();
    let of = |query: NamedArray<i64>, key: NamedArray<i64>| Mask::Segments { query, key };
    let with =
        |array: &NamedArray<i64>, data: Vec<i64>| NamedArray { data: data.into(), ..array.clone() };
    let most = query.data.iter().chain(key.data.iter()).copied().max().unwrap_or(0).max(0);
    if let Some(padding) = most.checked_add(1) {
        let own = |array: &NamedArray<i64>| {
            with(array, array.data.iter().map(|&id| if id < 0 { padding } else { id }).collect())
        };
        list.push(other("padding-counts", "counts padding as a segment", of(own(query), own(key))));
    }
    if query.shape == key.shape {
        list.push(other(
            "of-queries",
            "has the ids of the queries for keys",
            of(query.clone(), query.clone()),
        ));
        list.push(other(
            "of-keys",
            "has the ids of the keys for queries",
            of(key.clone(), key.clone()),
        ));
    }
    let next = |array: &NamedArray<i64>| {
        let width = array.shape.get(1).copied().unwrap_or(0);
        let mut data = array.data.to_vec();
        let by = width.min(data.len());
        data.rotate_left(by);
        with(array, data)
    };
    if query.shape.first().is_some_and(|&batch| batch > 1) {
        list.push(other(
            "of-next",
            "has the ids of the next batch element",
            of(next(query), next(key)),
        ));
    }
    list
}

fn arrays(array: &NamedArray<bool>) -> Vec<Other<Mask>> {
    let with = |data: Vec<bool>| Mask::Array(NamedArray { data: data.into(), ..array.clone() });
    let inverted = array.data.iter().map(|flag| !flag).collect();
    let mut list = vec![other("inverted", "hides what it should show", with(inverted))];
    let [batch, heads, queries, keys] =
        [0, 1, 2, 3].map(|at| array.shape.get(at).copied().unwrap_or(1));
    let flag = |b: usize, h: usize, i: usize, j: usize| {
        array.data[((b * heads + h) * queries + i) * keys + j]
    };
    let made = |f: &dyn Fn(usize, usize, usize, usize) -> bool| {
        let all = (0..batch * heads * queries * keys).map(|at| {
            let (row, j) = (at / keys, at % keys);
            f(row / queries / heads, row / queries % heads, row % queries, j)
        });
        with(all.collect())
    };
    if array.data.len() != batch * heads * queries * keys || keys == 0 {
        return list;
    }
    if queries == keys {
        list.push(other("transposed", "is transposed", made(&|b, h, i, j| flag(b, h, j, i))));
    }
    if heads > 1 {
        let next = made(&|b, h, i, j| flag(b, (h + 1) % heads, i, j));
        list.push(other("of-next-head", "is that of the next head", next));
        list.push(other(
            "of-first-head",
            "is that of the first head",
            made(&|b, _, i, j| flag(b, 0, i, j)),
        ));
    }
    if batch > 1 {
        let next = made(&|b, h, i, j| flag((b + 1) % batch, h, i, j));
        list.push(other("of-next", "is that of the next batch element", next));
        list.push(other(
            "of-first",
            "is that of the first batch element",
            made(&|_, h, i, j| flag(0, h, i, j)),
        ));
    }
    list
}

/// Each part alone, all but each part, and the readings of each part.
fn of_parts(parts: &[Mask], join: fn(Vec<Mask>) -> Mask, scores: &Scores) -> Vec<Other<Mask>> {
    let mut list = Vec::new();
    for (at, part) in parts.iter().enumerate() {
        let number = at + 1;
        if parts.len() > 1 {
            let rest = parts.iter().enumerate().filter(|(own, _)| *own != at);
            let rest = join(rest.map(|(_, part)| part.clone()).collect());
            let text = format!("is its part {number} alone, {}", part.describe());
            list.push(other(format!("part-{number}-alone"), text, part.clone()));
            let text = format!("lacks its part {number}, {}", part.describe());
            list.push(other(format!("without-part-{number}"), text, rest));
        }
        for Other { change, text, value } in of(part, scores) {
            let mut parts = parts.to_vec();
            parts[at] = value;
            list.push(other(
                format!("part-{number}-{change}"),
                format!("{text} in its part {number}"),
                join(parts),
            ));
        }
    }
    if parts.len() > 1 {
        let exchanged = if matches!(join(Vec::new()), Mask::And(_)) { Mask::Or } else { Mask::And };
        list.push(other(
            "joined-otherwise",
            "joins its parts by and in place of or, or the other way round",
            exchanged(parts.to_vec()),
        ));
    }
    list
}

/// Readings that no other mask tells, as arrays of flags: without the query's own key, by tiles as a whole.
fn by_flags(scores: &Scores) -> Vec<Other<Mask>> {
    let (e, mask) = (&scores.extents, &scores.mask);
    let all = e.batch.checked_mul(e.queries).and_then(|n| n.checked_mul(e.keys));
    let few = all.is_some_and(|all| (1..=FLAGS).contains(&all));
    if *mask == Mask::Full || !few || is_by_head(mask) || scores.check().is_err() {
        return Vec::new();
    }
    let mut list = Vec::new();
    if let Mask::Causal { align } | Mask::Window { align, .. } | Mask::ChunkedCausal { align, .. } =
        *mask
    {
        let strict = flags(scores, &|s: &Sequence| {
            let s = *s;
            Box::new(move |i, j| {
                mask.allows(&s, 0, i, j) && super::aligned(&s, align, i) != j as i64
            })
        });
        list.push(other("strict", "hides the query's own key, too", strict));
    }
    let tiles = TILES.into_iter().filter(|&tile| tile < e.queries.max(e.keys));
    for tile in tiles.filter(|_| all.is_some_and(|all| all <= FLAGS / 4)) {
        let text = format!("is not applied within tiles of {tile} that it cuts");
        list.push(other(format!("any-of-tile-of-{tile}"), text, by_tiles(scores, tile, false)));
        let text = format!("hides all of a tile of {tile} that it cuts");
        list.push(other(format!("whole-tiles-of-{tile}"), text, by_tiles(scores, tile, true)));
    }
    list
}

/// Sizes of the tiles in which kernels process rows and keys.
const TILES: [usize; 4] = [16, 32, 64, 128];

/// True if heads see different keys.
fn is_by_head(mask: &Mask) -> bool {
    match mask {
        Mask::Array(array) => array.shape.get(1).is_some_and(|&heads| heads > 1),
        Mask::And(parts) | Mask::Or(parts) => parts.iter().any(is_by_head),
        _ => false,
    }
}

/// Visibility of a key of a sequence to a query.
type Sees<'a> = Box<dyn Fn(usize, usize) -> bool + 'a>;

/// A mask that is alike for all heads: of every pair of a sequence whether it counts.
fn flags<'a>(scores: &Scores, sees: &dyn Fn(&Sequence) -> Sees<'a>) -> Mask {
    let e = &scores.extents;
    let mut flags = vec![false; e.batch * e.queries * e.keys];
    for sequence in scores.sequences() {
        let sees = sees(&sequence);
        for i in 0..sequence.queries {
            let row = (sequence.batch * e.queries + sequence.query_start + i) * e.keys;
            for j in 0..sequence.keys {
                flags[row + sequence.key_start + j] = sees(i, j);
            }
        }
    }
    Mask::Array(NamedArray::new("made", &[e.batch, 1, e.queries, e.keys], flags))
}

/// A mask that shows or hides a tile as a whole: where it shows all of it, or any.
fn by_tiles(scores: &Scores, tile: usize, all: bool) -> Mask {
    flags(scores, &|s: &Sequence| {
        let (s, across) = (*s, s.keys.div_ceil(tile));
        let mut shown = vec![all; s.queries.div_ceil(tile) * across];
        for (i, j) in (0..s.queries).flat_map(|i| (0..s.keys).map(move |j| (i, j))) {
            let sees = scores.mask.allows(&s, 0, i, j);
            let tile = &mut shown[i / tile * across + j / tile];
            *tile = if all { *tile && sees } else { *tile || sees };
        }
        Box::new(move |i, j| shown[i / tile * across + j / tile])
    })
}
