//! Readings of keys at the end of a tile: those after the last whole tile are forgotten, or the tile is
//! filled up with keys of zeros that count; and keys of one half alone, as where parts are not joined.

use super::{Edit, Own, Reading, plain};
use etalon_problem::{Axis, Mask, NamedArray, Problem, Role, Scores};

/// What kernels process at once.
const TILES: [usize; 4] = [16, 32, 64, 128];

/// The most flags of a mask that is made for it.
const FLAGS: usize = 1 << 22;

pub(super) fn all(own: &Own<'_>) -> Vec<Reading> {
    let Some(scores) = own.problem.scores() else { return padded_classes(own) };
    let keys = scores.extents.keys;
    let mut list = Vec::new();
    for tile in TILES.into_iter().filter(|&tile| keys > tile && !keys.is_multiple_of(tile)) {
        let text = format!("keys after the last whole tile of {tile} are forgotten");
        let last = keys - keys % tile;
        list.extend(of_keys(own, scores, &format!("keys-whole-tiles-of-{tile}"), &text, &|j| {
            j < last
        }));
    }
    if keys >= 2 {
        let half = keys / 2;
        let text = "only the first half of the keys counts, as if parts were not joined";
        list.extend(of_keys(own, scores, "keys-first-half", text, &|j| j < half));
        let text = "only the second half of the keys counts, as if parts were not joined";
        list.extend(of_keys(own, scores, "keys-second-half", text, &|j| j >= half));
        let text = "the last key is forgotten";
        list.extend(of_keys(own, scores, "keys-without-last", text, &|j| j + 1 < keys));
        list.extend(of_keys(
            own,
            scores,
            "keys-without-first",
            "the first key is forgotten",
            &|j| j > 0,
        ));
    }
    list.into_iter().chain(padded_keys(own, scores)).collect()
}

/// A problem in which only some keys count.
fn of_keys(
    own: &Own<'_>,
    scores: &Scores,
    id: &str,
    text: &str,
    counts: &dyn Fn(usize) -> bool,
) -> Option<Reading> {
    let e = &scores.extents;
    let all = e.queries.checked_mul(e.keys).filter(|&all| all <= FLAGS && all > 0)?;
    let flags: Vec<bool> = (0..all).map(|at| counts(at % e.keys)).collect();
    let flags = Mask::Array(NamedArray::new("made", &[1, 1, e.queries, e.keys], flags));
    let mut reading = plain(id, text, own.problem).of("keys");
    let scores = reading.problem.scores_mut()?;
    scores.mask = Mask::And(vec![scores.mask.clone(), flags]);
    reading.problem.check().ok()?;
    Some(reading)
}

/// Keys of zeros at the end of the last tile, which count. Only where they do not move the diagonal.
fn padded_keys(own: &Own<'_>, scores: &Scores) -> Vec<Reading> {
    let dense = scores.sequences == etalon_problem::Sequences::Dense;
    if !dense || scores.mask != Mask::Full || scores.bias.is_some() {
        return Vec::new();
    }
    let keys = scores.extents.keys;
    let tiles = TILES.into_iter().filter(|&tile| !keys.is_multiple_of(tile));
    let reading = |tile: usize| {
        let text = format!("the last tile of {tile} is filled up with keys of zeros, which count");
        let mut reading = plain(format!("keys-filled-up-to-{tile}"), text, own.problem).of("keys");
        let more = keys.next_multiple_of(tile);
        reading.problem.scores_mut()?.extents.keys = more;
        filled_up(own, reading, Axis::Keys, keys, more)
    };
    tiles.filter_map(reading).collect()
}

/// Classes of zeros at the end of the last tile, which count.
fn padded_classes(own: &Own<'_>) -> Vec<Reading> {
    let Problem::LinearCrossEntropy(loss) = own.problem else { return Vec::new() };
    let tiles = TILES.into_iter().filter(|&tile| !loss.vocab.is_multiple_of(tile));
    let reading = |tile: usize| {
        let text =
            format!("the last tile of {tile} is filled up with classes of zeros, which count");
        let more = loss.vocab.next_multiple_of(tile);
        let problem = etalon_problem::LinearCrossEntropy { vocab: more, ..loss.clone() };
        let reading =
            plain(format!("classes-filled-up-to-{tile}"), text, &problem.into()).of("vocab");
        filled_up(own, reading, Axis::Classes, loss.vocab, more)
    };
    tiles.filter_map(reading).collect()
}

/// With zeros in every input beyond the extent of an axis, and outputs cut to it.
fn filled_up(
    own: &Own<'_>,
    mut reading: Reading,
    axis: Axis,
    extent: usize,
    more: usize,
) -> Option<Reading> {
    for operand in own.operands.iter() {
        let Some(at) = operand.position(axis) else { continue };
        let to = if operand.role == Role::Output { extent } else { more };
        let edit = Edit::Take { axis: at, order: (0..to).collect(), beyond: 0.0 };
        match operand.role {
            Role::Output => reading.finish.push((operand.name.to_string(), edit)),
            _ => reading.edits.push((operand.name.to_string(), edit)),
        }
    }
    reading.problem.check().ok()?;
    Some(reading)
}
