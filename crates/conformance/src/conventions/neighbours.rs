//! Readings in which tensors hold what belongs to another head, batch element, sequence or row, or to another
//! tensor.

use super::derived::{hyphens, of_tensor};
use super::{Edit, Original, Reading};
use etalon_problem::{Axis, Operand, Precision, Problem, Role, Sequences, TokenSequences};
use ndarray::{ArrayD, IxDyn};

pub(super) fn all(own: &Original<'_>) -> Vec<Reading> {
    let given: Vec<&Operand> = own
        .operands
        .iter()
        .filter(|x| x.role.is_given() && own.inputs.contains_key(x.name))
        .collect();
    let mut list: Vec<Reading> =
        given.iter().flat_map(|operand| neighbours(own, operand)).collect();
    list.extend(given.iter().flat_map(|operand| by_key_head(own, operand)));
    list.extend(keys_and_values(own, &given));
    list.extend(other_key_heads(own));
    list.extend(exchanged(own, &given));
    list.extend(without_offsets(own, &given));
    list
}

/// Values of a tensor for another head, batch element, sequence or row.
fn neighbours(own: &Original<'_>, operand: &Operand) -> Vec<Reading> {
    let mut list = Vec::new();
    for (axis, (&name, &extent)) in operand.axes.iter().zip(&operand.shape).enumerate() {
        let what = match name {
            Axis::QueryHeads | Axis::QueryHeadsOr1 | Axis::KeyHeads => "head",
            Axis::Batch | Axis::BatchOr1 => "batch element",
            Axis::Sequences => "sequence",
            Axis::Queries | Axis::Keys | Axis::Tokens | Axis::Targets => "row",
            Axis::Distances => "distance",
            Axis::Classes => "class",
            Axis::Dim | Axis::ValueDim | Axis::Tiles => continue,
        };
        if extent < 2 {
            continue;
        }
        if operand.role == Role::Cotangent && matches!(what, "head" | "batch element") {
            list.push(first_alone(own, operand, axis, what, slug_of(what)));
        }
        let slug = slug_of(what);
        let first = Edit::Take { axis, order: vec![0; extent].into(), beyond: f64::NAN };
        let text = |which: &str| format!("is that of the {which} {what}");
        let mut add = |which: &str, edit: Edit| {
            list.push(
                of_tensor(own, operand, &format!("of-{which}-{slug}"), &text(which), edit).late(),
            );
        };
        add("next", Edit::roll(axis, extent, 1));
        add("previous", Edit::roll(axis, extent, -1));
        // Rows of numbers are a tensor that somebody may take for a number.
        if !matches!(what, "row" | "class" | "distance") || operand.axes.len() == 1 {
            add("first", first);
        }
    }
    list
}

fn slug_of(what: &str) -> String {
    hyphens(what).replace(' ', "-")
}

/// A cotangent that is 0 but for the first head or batch element, as where it is read with other strides.
fn first_alone(
    own: &Original<'_>,
    operand: &Operand,
    axis: usize,
    what: &str,
    slug: String,
) -> Reading {
    let weight = |entry: IxDyn| f64::from(u8::from(entry[axis] == 0));
    let rows = ArrayD::from_shape_fn(IxDyn(&operand.shape[..=axis]), weight);
    let text = format!("is read of the first {what} alone, and 0 beyond");
    let edit = Edit::Rows(rows.into());
    of_tensor(own, operand, &format!("of-first-{slug}-alone"), &text, edit)
}

/// A tensor of query heads that is read by the number of the key head.
fn by_key_head(own: &Original<'_>, operand: &Operand) -> Vec<Reading> {
    let [query, key] = [Axis::QueryHeads, Axis::KeyHeads].map(|axis| own.problem.extent(axis));
    let is_of_heads = |axis: &Axis| matches!(axis, Axis::QueryHeads | Axis::QueryHeadsOr1);
    let axis = operand.axes.iter().position(is_of_heads).filter(|&at| operand.shape[at] == query);
    let Some(axis) = axis.filter(|_| key > 1 && query > key) else { return Vec::new() };
    let group = query / key;
    let list: [(&str, &str, Vec<usize>); 2] = [
        (
            "of-key-head",
            "is read by the number of the key head",
            (0..query).map(|h| h / group).collect(),
        ),
        ("of-head-modulo", "is read by h mod Hk", (0..query).map(|h| h % key).collect()),
    ];
    let reading = |(change, text, order): (&str, &str, Vec<usize>)| {
        let edit = Edit::Take { axis, order: order.into(), beyond: f64::NAN };
        of_tensor(own, operand, change, text, edit).late()
    };
    list.into_iter().map(reading).collect()
}

/// Keys and values that are both those of another batch element or key head.
fn keys_and_values(own: &Original<'_>, given: &[&Operand]) -> Vec<Reading> {
    let both: Vec<&&Operand> = given.iter().filter(|x| ["k", "v"].contains(&x.name)).collect();
    let Some(k) = both.first().filter(|_| both.len() == 2) else { return Vec::new() };
    let mut list = Vec::new();
    for (axis, name, slug) in [(0, "batch element", "batch-element"), (1, "key head", "key-head")] {
        let extent = k.shape[axis];
        let mut add = |which: &str, edit: Edit| {
            let id = format!("keys-and-values-of-{which}-{slug}");
            let text = format!("`k` and `v` are those of the {which} {name}");
            let reading = Reading::plain(id, text, own.problem).of("k").late();
            list.push(both.iter().fold(reading, |x, operand| x.edit(operand.name, edit.clone())));
        };
        if extent > 1 {
            add("first", Edit::Take { axis, order: vec![0; extent].into(), beyond: f64::NAN });
            add("next", Edit::roll(axis, extent, 1));
        }
        if extent > 2 {
            add("previous", Edit::roll(axis, extent, -1));
        }
    }
    list
}

/// Query heads that use the key head of another number than h/(Hq/Hk), where that is no permutation of heads.
fn other_key_heads(own: &Original<'_>) -> Vec<Reading> {
    let Some(scores) = own.problem.scores() else { return Vec::new() };
    let (query, key, group) =
        (scores.extents.query_heads, scores.extents.key_heads, scores.group());
    if key < 2 || group < 2 {
        return Vec::new();
    }
    type Map = Box<dyn Fn(usize) -> usize>;
    let list: [(&str, &str, Map); 4] = [
        ("by-key-heads", "h/Hk, at most the last one", Box::new(move |h| (h / key).min(key - 1))),
        ("by-key-heads-again", "(h/Hk) mod Hk", Box::new(move |h| h / key % key)),
        ("ungrouped", "h, at most the last one", Box::new(move |h| h.min(key - 1))),
        ("reversed", "Hk − 1 − h/(Hq/Hk)", Box::new(move |h| key - 1 - h / group)),
    ];
    let reading = |(id, text, map): (&str, &str, Map)| {
        let heads: Vec<usize> = (0..query).map(map).collect();
        let right = (0..query).map(|h| h / group);
        let differs = !right.eq(heads.iter().copied());
        let text = format!("query head h uses key head {text}, not h/(Hq/Hk)");
        let mut reading = Reading::plain(format!("heads-{id}"), text, own.problem).of("key_heads");
        reading.key_heads = Some(heads.into());
        differs.then_some(reading)
    };
    list.into_iter().filter_map(reading).collect()
}

/// Two inputs of one shape that are taken for each other, or one for both.
fn exchanged(own: &Original<'_>, given: &[&Operand]) -> Vec<Reading> {
    let main = |x: &&&Operand| x.role == Role::Input && x.precision == Precision::Storage;
    let main: Vec<&&Operand> = given.iter().filter(main).collect();
    let mut list = Vec::new();
    let as_other = |reading: Reading, x: &Operand, y: &Operand| {
        reading.edit(x.name, Edit::Replace(own.inputs[y.name].clone().into()))
    };
    for (at, x) in main.iter().enumerate() {
        for y in main[at + 1..].iter().filter(|y| y.shape == x.shape) {
            let text = format!("`{}` and `{}` are exchanged", x.name, y.name);
            let reading =
                Reading::plain(format!("{}-and-{}-exchanged", x.name, y.name), text, own.problem);
            list.push(as_other(as_other(reading.of(x.name).late(), x, y), y, x));
            for (x, y) in [(x, y), (y, x)] {
                let text = format!("`{}` is read in place of `{}`", y.name, x.name);
                let reading =
                    Reading::plain(format!("{}-as-{}", y.name, x.name), text, own.problem);
                list.push(as_other(reading.of(x.name).late(), x, y));
            }
        }
    }
    list
}

/// Tensors of packed sequences that are read from the beginning of the array for every sequence.
fn without_offsets(own: &Original<'_>, given: &[&Operand]) -> Vec<Reading> {
    let offsets = |axis: Axis| match (own.problem, axis) {
        (Problem::LinearAttention(x), Axis::Tokens) => match &x.sequences {
            TokenSequences::Packed { cu_tokens } => Some(cu_tokens.clone()),
            _ => None,
        },
        (_, Axis::Queries | Axis::Keys) => match &own.problem.scores()?.sequences {
            Sequences::Packed { cu_query, .. } if axis == Axis::Queries => Some(cu_query.clone()),
            Sequences::Packed { cu_key, .. } => Some(cu_key.clone()),
            _ => None,
        },
        _ => None,
    };
    let mut list = Vec::new();
    for operand in given {
        for (axis, (&name, &extent)) in operand.axes.iter().zip(&operand.shape).enumerate() {
            let Some(offsets) = offsets(name) else { continue };
            let start = |at: usize| offsets.iter().copied().filter(|x| *x <= at).max();
            let order = (0..extent).map(|at| at - start(at).unwrap_or(0)).collect();
            let text = "is read from the beginning of the array for every sequence";
            let edit = Edit::Take { axis, order, beyond: f64::NAN };
            list.push(of_tensor(own, operand, "without-offset", text, edit).late());
        }
    }
    list
}
