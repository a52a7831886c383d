//! Readings of keys, classes, tokens and elements at the end of a tile: those after the last whole tile are
//! forgotten, or the tile is filled up with zeros that count; and keys and classes of some parts alone, as
//! where parts are not joined.

use super::{Edit, Original, Reading};
use etalon_problem::{
    Axis, LinearAttention, LinearCrossEntropy, Mask, NamedArray, Problem, Role, Scores,
    TokenSequences,
};
use ndarray::ArrayD;

/// Sizes of the tiles in which kernels process rows and keys.
pub(super) const TILES: [usize; 4] = [16, 32, 64, 128];

/// The most flags of a mask that is made for it.
const FLAGS: usize = 1 << 22;

pub(super) fn all(own: &Original<'_>) -> Vec<Reading> {
    let mut list = of_elements(own);
    match own.problem {
        Problem::LinearCrossEntropy(loss) => {
            list.extend(padded_classes(own));
            list.extend(dropped_classes(own, loss));
        }
        Problem::LinearAttention(x) => list.extend(dropped_tokens(x)),
        _ => list.extend(own.problem.scores().into_iter().flat_map(|x| dropped_keys(own, x))),
    }
    list
}

/// Entries that count where the others are forgotten: a name, words, and the first and the last one.
fn kept(extent: usize, of: &str) -> Vec<(String, String, std::ops::Range<usize>)> {
    let mut list = Vec::new();
    let mut add = |id: String, text: String, range: std::ops::Range<usize>| {
        if range != (0..extent) && !range.is_empty() {
            list.push((id, text, range));
        }
    };
    for tile in TILES.into_iter().filter(|&tile| extent > tile) {
        let text = format!("{of} after the last whole tile of {tile} are forgotten");
        add(format!("whole-tiles-of-{tile}"), text, 0..extent - extent % tile);
    }
    for (word, parts) in [("half", 2), ("quarter", 4), ("eighth", 8)] {
        let part = extent / parts;
        let text = |which: &str, verb: &str| {
            format!("the {which} {word} of the {of} {verb}, as if parts were not joined")
        };
        if parts == 2 {
            add("first-half".into(), text("first", "alone counts"), 0..part);
            add("second-half".into(), text("second", "alone counts"), part..extent);
        } else {
            add(format!("without-first-{word}"), text("first", "is missing"), part..extent);
            add(format!("without-last-{word}"), text("last", "is missing"), 0..extent - part);
            add(format!("first-{word}"), text("first", "alone counts"), 0..part);
            add(format!("last-{word}"), text("last", "alone counts"), extent - part..extent);
        }
    }
    if extent >= 2 {
        let text = |which: &str| format!("the {which} of the {of} is forgotten");
        add("without-last".into(), text("last"), 0..extent - 1);
        add("without-first".into(), text("first"), 1..extent);
    }
    list
}

/// Keys that are forgotten, and tiles that are filled up.
fn dropped_keys(own: &Original<'_>, scores: &Scores) -> Vec<Reading> {
    let keys = scores.extents.keys;
    let reading = |(id, text, range): (String, String, std::ops::Range<usize>)| {
        of_keys(own, scores, &format!("keys-{id}"), &text, &|j| range.contains(&j))
    };
    let list = kept(keys, "keys").into_iter().filter_map(reading);
    list.chain(padded_keys(own, scores)).collect()
}

/// Tokens that are forgotten at the end.
fn dropped_tokens(problem: &LinearAttention) -> Vec<Reading> {
    let lengths: Option<Vec<usize>> = match &problem.sequences {
        TokenSequences::Dense => Some(vec![problem.extents.tokens; problem.extents.batch]),
        TokenSequences::Lengths { tokens } => Some(tokens.clone()),
        TokenSequences::Packed { .. } => None,
    };
    let Some(lengths) = lengths else { return Vec::new() };
    let of = |id: String, text: String, length: &dyn Fn(usize) -> usize| {
        let tokens: Vec<usize> = lengths.iter().map(|&n| length(n)).collect();
        if tokens == lengths {
            return None;
        }
        let sequences = TokenSequences::Lengths { tokens };
        let problem = LinearAttention { sequences, ..problem.clone() };
        problem.check().ok()?;
        Some(Reading::plain(id, text, &problem.into()).of("tokens"))
    };
    let tiles = TILES.into_iter().filter_map(|tile| {
        let text = format!("tokens after the last whole chunk of {tile} are forgotten");
        of(format!("tokens-whole-chunks-of-{tile}"), text, &|n| n - n % tile)
    });
    let last = of("tokens-without-last".into(), "the last token is forgotten".into(), &|n| {
        n.saturating_sub(1)
    });
    tiles.chain(last).collect()
}

/// Elements of q and k, or of h and w, that are forgotten: those after the last whole tile, or after the
/// first ones.
fn of_elements(own: &Original<'_>) -> Vec<Reading> {
    let extent = own.problem.extent(Axis::Dim);
    let mut list = Vec::new();
    let mut add = |id: String, text: String, last: usize| {
        let order: Vec<usize> =
            (0..extent).map(|at| if at < last { at } else { usize::MAX }).collect();
        let mut reading = Reading::plain(id, text, own.problem).of("dim");
        for operand in own.operands.iter().filter(|x| x.role == Role::Input) {
            let factor = ["q", "k", "h", "w"].contains(&operand.name);
            if let Some(axis) = operand.position(Axis::Dim).filter(|_| factor) {
                let order = order.clone().into();
                reading = reading.edit(operand.name, Edit::Take { axis, order, beyond: 0.0 });
            }
        }
        list.push(reading);
    };
    for tile in TILES.into_iter().filter(|&tile| extent > tile) {
        if !extent.is_multiple_of(tile) {
            let text = format!("elements after the last whole tile of {tile} are not multiplied");
            add(format!("dim-whole-tiles-of-{tile}"), text, extent - extent % tile);
        }
        add(
            format!("dim-first-{tile}"),
            format!("the first {tile} elements alone are multiplied"),
            tile,
        );
    }
    list
}

/// Classes that are forgotten: their logits are −∞. Where one of them is a target, its loss is no other
/// problem's.
fn dropped_classes(own: &Original<'_>, loss: &LinearCrossEntropy) -> Vec<Reading> {
    if loss.label_smoothing != 0.0 {
        return Vec::new();
    }
    let ignored = loss.ignore_index as f64;
    let targets = || own.inputs.get("targets").into_iter().flatten().filter(|x| **x != ignored);
    let reading = |(id, text, range): (String, String, std::ops::Range<usize>)| {
        let problem = LinearCrossEntropy { bias: true, ..loss.clone() };
        let shape = vec![loss.vocab];
        let bias = match own.inputs.get("bias").filter(|_| loss.bias) {
            Some(bias) => bias.clone(),
            None => ArrayD::zeros(shape.clone()),
        };
        let bias = ArrayD::from_shape_fn(shape, |at| {
            if range.contains(&at[0]) { bias[[at[0]]] } else { f64::NEG_INFINITY }
        });
        let edit = Edit::Replace(bias.into());
        let reading = Reading::plain(format!("classes-{id}"), text, &problem.into())
            .edit("bias", edit)
            .of("vocab");
        match targets().all(|&target| range.contains(&(target as usize))) {
            true => reading,
            false => reading.only(["lse", "entropy", "argmax"]),
        }
    };
    kept(loss.vocab, "classes").into_iter().map(reading).collect()
}

/// A problem in which only some keys count.
pub(super) fn of_keys(
    own: &Original<'_>,
    scores: &Scores,
    id: &str,
    text: &str,
    counts: &dyn Fn(usize) -> bool,
) -> Option<Reading> {
    let e = &scores.extents;
    let all = e.queries.checked_mul(e.keys).filter(|&all| all <= FLAGS && all > 0)?;
    let flags: Vec<bool> = (0..all).map(|at| counts(at % e.keys)).collect();
    let flags = Mask::Array(NamedArray::new("made", &[1, 1, e.queries, e.keys], flags));
    let mut reading = Reading::plain(id, text, own.problem).of("keys");
    let scores = reading.problem.scores_mut()?;
    scores.mask = Mask::And(vec![scores.mask.clone(), flags]);
    reading.problem.check().ok()?;
    Some(reading)
}

/// Keys of zeros, or copies of the last one, at the end of the last tile, which count. Only where they do not
/// move the diagonal.
fn padded_keys(own: &Original<'_>, scores: &Scores) -> Vec<Reading> {
    let dense = scores.sequences == etalon_problem::Sequences::Dense;
    if !dense || scores.mask != Mask::Full || scores.bias.is_some() || scores.extents.keys == 0 {
        return Vec::new();
    }
    let keys = scores.extents.keys;
    let tiles = TILES.into_iter().filter(|&tile| !keys.is_multiple_of(tile));
    let reading = |(tile, copies): (usize, bool)| {
        let (id, of) = match copies {
            false => (format!("keys-filled-up-to-{tile}"), "keys of zeros"),
            true => (format!("keys-repeated-up-to-{tile}"), "copies of the last key"),
        };
        let text = format!("the last tile of {tile} is filled up with {of}, which count");
        let mut reading = Reading::plain(id, text, own.problem).of("keys");
        let more = keys.next_multiple_of(tile);
        reading.problem.scores_mut()?.extents.keys = more;
        filled_up(own, reading, Axis::Keys, (keys, more), copies)
    };
    tiles.flat_map(|tile| [(tile, false), (tile, true)]).filter_map(reading).collect()
}

/// Classes of zeros at the end of the last tile, which count.
fn padded_classes(own: &Original<'_>) -> Vec<Reading> {
    let Problem::LinearCrossEntropy(loss) = own.problem else { return Vec::new() };
    let tiles = TILES.into_iter().filter(|&tile| !loss.vocab.is_multiple_of(tile));
    let reading = |tile: usize| {
        let text =
            format!("the last tile of {tile} is filled up with classes of zeros, which count");
        let more = loss.vocab.next_multiple_of(tile);
        let problem = LinearCrossEntropy { vocab: more, ..loss.clone() };
        let reading = Reading::plain(format!("classes-filled-up-to-{tile}"), text, &problem.into())
            .of("vocab");
        filled_up(own, reading, Axis::Classes, (loss.vocab, more), false)
    };
    tiles.filter_map(reading).collect()
}

/// With zeros, or copies of the last entry, in every input beyond the extent of an axis, and outputs cut to
/// it.
fn filled_up(
    own: &Original<'_>,
    mut reading: Reading,
    axis: Axis,
    (extent, more): (usize, usize),
    copies: bool,
) -> Option<Reading> {
    for operand in own.operands.iter() {
        let Some(at) = operand.position(axis) else { continue };
        let to = if operand.role == Role::Output { extent } else { more };
        let last = if copies { extent - 1 } else { usize::MAX };
        let order = (0..to).map(|entry| entry.min(last)).collect();
        let edit = Edit::Take { axis: at, order, beyond: 0.0 };
        match operand.role {
            Role::Output => reading.finish.push((operand.name.to_string(), edit)),
            _ => reading.edits.push((operand.name.to_string(), edit)),
        }
    }
    reading.problem.check().ok()?;
    Some(reading)
}
