//! Readings in which a sum over heads, batch elements or rows holds a part of its terms: one is stored where it
//! should be added, or a chunk is lost.

use super::tails::TILES;
use super::{Edit, Original, Reading};
use etalon_problem::{Axis, LinearCrossEntropy, Operand, Pass, Problem, Reduction, Role};
use ndarray::{ArrayD, IxDyn};
use std::ops::Range;

pub(super) fn all(own: &Original<'_>) -> Vec<Reading> {
    if !matches!(own.pass, Pass::Backward | Pass::ForwardBackward) {
        return Vec::new();
    }
    if let Problem::LinearCrossEntropy(loss) = own.problem {
        return of_tokens(own, loss);
    }
    let mut list = groups(own);
    for (axis, name) in [(Axis::Batch, "batch element"), (Axis::QueryHeads, "query head")] {
        let extent = own.problem.extent(axis);
        if extent > 1 {
            let slug = name.replace(' ', "-");
            let alone = |which: &str, range: Range<usize>| {
                let text = format!("of the {which} {name} alone");
                part_of(own, axis, &format!("{which}-{slug}-alone"), &text, range)
            };
            list.extend(alone("first", 0..1));
            list.extend(alone("last", extent - 1..extent));
        }
    }
    let queries = own.problem.scores().map_or(0, |scores| scores.extents.queries);
    for tile in TILES.into_iter().filter(|&tile| queries > tile) {
        let last = (queries - 1) / tile * tile;
        for (which, range) in [
            ("first", 0..tile),
            ("last", last..queries),
            ("all-but-first", tile..queries),
            ("all-but-last", 0..last),
        ] {
            let text = format!("of {} tile of {tile} queries alone", which.replace('-', " "));
            list.extend(part_of(
                own,
                Axis::Queries,
                &format!("{which}-tile-of-{tile}"),
                &text,
                range,
            ));
        }
    }
    list
}

/// The gradients by tensors without an axis, of some of its entries alone; none where every gradient has it.
fn part_of(
    own: &Original<'_>,
    axis: Axis,
    id: &str,
    text: &str,
    range: Range<usize>,
) -> Option<Reading> {
    let sums = |x: &&Operand| match axis {
        Axis::Batch => {
            !x.has(Axis::Batch)
                && !x.has(Axis::Sequences)
                && !is_whole(own, x, Axis::BatchOr1, axis)
        }
        Axis::QueryHeads => {
            !x.has(Axis::QueryHeads) && !is_whole(own, x, Axis::QueryHeadsOr1, axis)
        }
        other => !x.has(other),
    };
    let outputs = own.operands.iter().filter(|x| x.role == Role::Output);
    let sums: Vec<&'static str> = outputs.filter(sums).map(|x| x.name).collect();
    if sums.is_empty() {
        return None;
    }
    let text = format!("a sum is {text}: {}", sums.join(", "));
    let reading = Reading::plain(format!("sum-of-{id}"), text, own.problem).of("dout").only(sums);
    Some(weighed(own, reading, axis, &|entry| range.contains(&entry)))
}

/// True if a tensor may lack an axis, and does not.
fn is_whole(own: &Original<'_>, operand: &Operand, or_1: Axis, axis: Axis) -> bool {
    operand.position(or_1).is_some_and(|at| operand.shape[at] == own.problem.extent(axis))
}

/// With cotangents of some entries of an axis alone.
fn weighed(
    own: &Original<'_>,
    mut reading: Reading,
    axis: Axis,
    counts: &dyn Fn(usize) -> bool,
) -> Reading {
    for operand in own.operands.iter().filter(|x| own.inputs.contains_key(x.name)) {
        let cotangent = operand.role.is_cotangent();
        if let (true, Some(at)) = (cotangent, operand.position(axis)) {
            let weight = |entry: IxDyn| f64::from(u8::from(counts(entry[at])));
            let rows = ArrayD::from_shape_fn(IxDyn(&operand.shape[..=at]), weight);
            reading = reading.edit(operand.name, Edit::Rows(rows.into()));
        }
    }
    reading
}

/// Gradients that query heads share, of one head of each group alone.
fn groups(own: &Original<'_>) -> Vec<Reading> {
    let [query, key] = [Axis::QueryHeads, Axis::KeyHeads].map(|axis| own.problem.extent(axis));
    let group = query / key.max(1);
    if group < 2 {
        return Vec::new();
    }
    let outputs = own.operands.iter().filter(|x| x.role == Role::Output && x.has(Axis::KeyHeads));
    let shared: Vec<&'static str> = outputs.map(|x| x.name).collect();
    let of = |member: usize, which: &str| {
        let text = format!(
            "gradients of key heads hold those of the {which} query head of each group alone"
        );
        let reading = Reading::plain(format!("group-{which}-alone"), text, own.problem);
        let reading = reading.of("query_heads").only(shared.clone());
        weighed(own, reading, Axis::QueryHeads, &|head| head % group == member)
    };
    vec![of(0, "first"), of(group - 1, "last")]
}

/// dw and dbias of one chunk of tokens, as where a chunk is stored in place of being added: the others are
/// ignored, and the normaliser stays.
fn of_tokens(own: &Original<'_>, loss: &LinearCrossEntropy) -> Vec<Reading> {
    let Some(targets) = own.inputs.get("targets") else { return Vec::new() };
    let weights = |name: &str| own.inputs.get(name);
    let (tokens, classes) = (weights("token_weights"), weights("class_weights"));
    let ignored = loss.ignore_index as f64;
    let counted: Vec<f64> = targets
        .iter()
        .enumerate()
        .filter(|(_, target)| **target != ignored)
        .map(|(i, &target)| {
            let class = classes.and_then(|x| x.get([target as usize])).copied().unwrap_or(1.0);
            class * tokens.map_or(1.0, |x| x[[i]])
        })
        .collect();
    let Ok((z, z_lse)) = loss.normalisers(counted.len(), counted.iter().copied()) else {
        return Vec::new();
    };
    // The z-loss has a normaliser of its own, which no other problem has.
    if z == 0.0 || (z != z_lse && loss.lse_square_scale != 0.0) {
        return Vec::new();
    }
    let reduction = match loss.reduction {
        Reduction::Mean => Reduction::By { normaliser: z },
        other => other,
    };
    let problem: Problem = LinearCrossEntropy { reduction, ..loss.clone() }.into();
    let n = loss.tokens;
    let tiles = TILES.into_iter().chain([256, 512, 1024, 2048, 4096, n / 2, n / 4, n / 8]);
    let mut list: Vec<Reading> = Vec::new();
    for tile in tiles.filter(|&tile| tile > 0 && n > tile) {
        let last = (n - 1) / tile * tile;
        for (which, range) in [
            ("first", 0..tile),
            ("last", last..n),
            ("all-but-first", tile..n),
            ("all-but-last", 0..last),
        ] {
            let id = format!("sum-of-{which}-chunk-of-{tile}");
            if list.iter().any(|x| x.id == id) {
                continue;
            }
            let of = which.replace('-', " ");
            let text = format!("`dw` and `dbias` are of {of} chunk of {tile} tokens alone");
            let counts: ArrayD<f64> = ArrayD::from_shape_fn(IxDyn(&[n]), |at| {
                if range.contains(&at[0]) { targets[at] } else { ignored }
            });
            let reading = Reading::plain(id, text, &problem).of("tokens").only(["dw", "dbias"]);
            list.push(reading.edit("targets", Edit::Replace(counts.into())));
        }
    }
    list
}
