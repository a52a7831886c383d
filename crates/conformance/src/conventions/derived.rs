//! Readings that follow from the table of options of a problem and from the tensors of a pass: what is
//! absent, doubled, inverted, or applied at another place of the chain.

use super::{Edit, Original, Reading};
use crate::tensor::Values;
use etalon_problem::{
    Alternative, LinearCrossEntropy, LseSquareWeight, Operand, Precision, Problem, Reduction, Role,
    Scores,
};
use std::f64::consts::{LN_2, LOG2_E};

pub(super) fn all(own: &Original<'_>) -> Vec<Reading> {
    let mut list: Vec<Reading> =
        own.problem.settings().into_iter().flat_map(|x| x.others).map(option).collect();
    for operand in own.operands.iter().filter(|operand| operand.role.is_given()) {
        let given = own.inputs.contains_key(operand.name);
        match operand.role {
            Role::Input if given => {
                list.extend(numbers(own, operand));
            }
            Role::Input => {}
            _ if given => {
                list.extend(cotangents(own, operand));
            }
            Role::OptionalCotangent => list.push(ones(own, operand)),
            _ => {}
        }
    }
    if let Problem::LinearCrossEntropy(loss) = own.problem {
        list.extend(normalisers(own, loss));
        list.extend(ignored(own, loss));
    }
    list
}

/// The name of an option as a part of the name of a reading.
pub(super) fn hyphens(name: &str) -> String {
    name.replace(['_', '.'], "-")
}

/// An option that is read as something else.
fn option(alternative: Alternative) -> Reading {
    let Alternative { option, change, text, problem } = alternative;
    Reading::plain(format!("{}-{change}", hyphens(option)), format!("`{option}` {text}"), &problem)
        .of(option)
}

/// A reading of a tensor. Its name begins with the option that the tensor belongs to.
pub(super) fn of_tensor(
    own: &Original<'_>,
    operand: &Operand,
    change: &str,
    text: &str,
    edit: Edit,
) -> Reading {
    let name = operand.option.filter(|_| operand.role == Role::Input).unwrap_or(operand.name);
    let id = format!("{}-{change}", hyphens(name));
    Reading::plain(id, format!("`{}` {text}", operand.name), own.problem)
        .edit(operand.name, edit)
        .of(name)
}

/// Numbers that stand for nothing.
fn neutral(operand: &Operand) -> f64 {
    match operand.name {
        "sinks" => f64::NEG_INFINITY,
        "class_weights" | "token_weights" => 1.0,
        _ => 0.0,
    }
}

/// True if a tensor holds logarithms or scores, which other libraries have to base 2.
fn is_logarithm(operand: &Operand) -> bool {
    ["sinks", "bias", "g", "g_gamma"].contains(&operand.name)
}

/// A change of a number.
type Map = Box<dyn Fn(f64) -> f64 + Send + Sync>;

/// Other meanings of the numbers of a tensor of an option.
fn numbers(own: &Original<'_>, operand: &Operand) -> Vec<Reading> {
    if (operand.option.is_none() && operand.name != "tau")
        || operand.precision == Precision::Integer
    {
        return Vec::new();
    }
    let none = neutral(operand);
    let mut maps: Vec<(&str, String, Map)> = vec![
        ("absent", "is not read".into(), Box::new(move |_| none)),
        ("doubled", "counts twice".into(), Box::new(|x| 2.0 * x)),
        ("halved", "counts half".into(), Box::new(|x| 0.5 * x)),
        ("negated", "has the other sign".into(), Box::new(|x| -x)),
        ("squared", "is applied twice".into(), Box::new(|x| x * x)),
    ];
    if none == 1.0 {
        maps.push(("inverted", "divides in place of multiplying".into(), Box::new(|x| 1.0 / x)));
    }
    if is_logarithm(operand) {
        maps.push(("base-2", "is taken to base 2".into(), Box::new(|x| LN_2 * x)));
        maps.push((
            "in-base-2",
            "is multiplied by log₂e, as if that were to come".into(),
            Box::new(|x| LOG2_E * x),
        ));
        maps.push((
            "linear",
            "is taken for a factor, not for its logarithm".into(),
            Box::new(f64::ln),
        ));
    }
    for (change, text, number) in scales(own.problem, operand) {
        maps.push((change, text.to_string(), Box::new(move |x| number * x)));
    }
    maps.extend(of_sinks(own, operand));
    if ["g", "g_gamma"].contains(&operand.name)
        && own.inputs[operand.name].iter().any(|x| *x == f64::NEG_INFINITY)
    {
        let text = "has no resets: a log-decay of −∞ counts as 0".into();
        maps.push(("without-resets", text, Box::new(|x| if x.is_finite() { x } else { 0.0 })));
    }
    let reading = |(change, text, map): (&str, String, Box<dyn Fn(f64) -> f64 + Send + Sync>)| {
        of_tensor(own, operand, change, &text, Edit::map(map))
    };
    maps.into_iter().map(reading).collect()
}

/// Other meanings of sinks: capped as scores are, counted by every part of a row.
fn of_sinks(own: &Original<'_>, operand: &Operand) -> Vec<(&'static str, String, Map)> {
    let mut maps: Vec<(&str, String, Map)> = Vec::new();
    let Some(scores) = own.problem.scores().filter(|_| operand.name == "sinks") else {
        return maps;
    };
    if let Some(cap) = scores.softcap {
        maps.push(("capped", "is capped, too".into(), Box::new(move |x| cap * (x / cap).tanh())));
    }
    let twice = "is added to the sum twice".to_string();
    maps.push(("added-twice", twice, Box::new(|x| x + LN_2)));
    for (change, tile) in [
        ("by-tiles-of-16", 16),
        ("by-tiles-of-32", 32),
        ("by-tiles-of-64", 64),
        ("by-tiles-of-128", 128),
    ] {
        let tiles = scores.extents.keys.div_ceil(tile);
        if tiles > 2 {
            let text = format!("is added to the sum by each of {tiles} tiles of {tile} keys");
            maps.push((change, text, Box::new(move |x| x + (tiles as f64).ln())));
        }
    }
    maps
}

/// Factors by which a tensor is multiplied where it acts at another place of the chain.
fn scales(problem: &Problem, operand: &Operand) -> Vec<(&'static str, &'static str, f64)> {
    match (problem, operand.name) {
        (Problem::LinearCrossEntropy(x), "bias") => {
            let mut list = vec![("after-scale", "is added after the scale", 1.0 / x.logit_scale)];
            if x.softcap.is_none() {
                let after = x.temperature / x.logit_scale;
                list.push(("after-temperature", "is added after the temperature", after));
            }
            list
        }
        (_, "bias" | "sinks") => problem.scores().map(Scores::scale).map_or(Vec::new(), |scale| {
            vec![
                ("scaled", "is scaled as scores are", scale),
                ("unscaled", "is divided by the scale", 1.0 / scale),
            ]
        }),
        (Problem::LinearAttention(x), "initial_state") => vec![
            ("scaled", "is scaled as keys are", x.scale),
            ("unscaled", "is not scaled as keys are", 1.0 / x.scale),
        ],
        _ => Vec::new(),
    }
}

/// A cotangent that is dropped, or taken for another number.
fn cotangents(own: &Original<'_>, operand: &Operand) -> Vec<Reading> {
    if !operand.role.is_cotangent() {
        return Vec::new();
    }
    let fill = Edit::Fill(operand.shape.clone().into(), 1.0);
    let mut list = vec![of_tensor(own, operand, "taken-for-one", "is taken for 1", fill)];
    if operand.role == Role::Cotangent {
        return list;
    }
    list.push(of_tensor(own, operand, "dropped", "is not read", Edit::Drop));
    let mut maps: Vec<(&str, &str, f64)> = vec![
        ("negated", "has the other sign", -1.0),
        ("doubled", "counts twice", 2.0),
        ("halved", "counts half", 0.5),
    ];
    if operand.primal == "lse" {
        maps.push(("base-2", "is that of a logarithm to base 2", LOG2_E));
        maps.push(("in-base-2", "is taken for that of a logarithm to base 2", LN_2));
    }
    for (change, text, factor) in maps {
        list.push(of_tensor(own, operand, change, text, Edit::map(move |x| factor * x)));
    }
    list
}

/// An absent cotangent that counts as 1, as where a framework differentiates a sum.
fn ones(own: &Original<'_>, operand: &Operand) -> Reading {
    let text = "is 1; it is absent from the inputs, which counts as 0";
    of_tensor(own, operand, "of-one", text, Edit::Fill(operand.shape.clone().into(), 1.0))
}

/// Other normalisers of a mean.
fn normalisers(own: &Original<'_>, loss: &LinearCrossEntropy) -> Vec<Reading> {
    if matches!(loss.reduction, Reduction::None) {
        return Vec::new();
    }
    let Counts { counted, tokens, classes } = Counts::new(loss, own.inputs);
    let list = [
        (
            "all-tokens",
            "is divided by the number of all tokens, ignored ones too",
            loss.tokens as f64,
        ),
        (
            "counted",
            "is divided by the number of tokens that count, whatever their weights",
            counted,
        ),
        ("token-weights", "is divided by the weights of the tokens alone", tokens),
        ("class-weights", "is divided by the weights of the classes alone", classes),
        ("vocab", "is divided by the number of classes, too", loss.vocab as f64 * tokens),
    ];
    let by = |normaliser: f64| LinearCrossEntropy {
        reduction: Reduction::By { normaliser },
        lse_square_weight: LseSquareWeight::Unweighted,
        ..loss.clone()
    };
    let reading = |(change, text, normaliser): (&str, &str, f64)| {
        let problem = Problem::from(by(normaliser));
        let sound = normaliser.is_finite() && normaliser != 0.0 && problem.check().is_ok();
        sound.then(|| {
            Reading::plain(format!("reduction-by-{change}"), format!("the loss {text}"), &problem)
                .of("reduction")
        })
    };
    list.into_iter().filter_map(reading).collect()
}

/// Sums of the tokens that count.
struct Counts {
    counted: f64,
    tokens: f64,
    classes: f64,
}

impl Counts {
    fn new(loss: &LinearCrossEntropy, inputs: &Values) -> Self {
        let of = |name: &str, at: usize| inputs.get(name).and_then(|x| x.iter().nth(at)).copied();
        let mut counts = Counts { counted: 0.0, tokens: 0.0, classes: 0.0 };
        let ignored = loss.ignore_index as f64;
        for (i, &target) in inputs.get("targets").into_iter().flatten().enumerate() {
            if target != ignored {
                counts.counted += 1.0;
                counts.tokens += of("token_weights", i).unwrap_or(1.0);
                counts.classes += of("class_weights", target as usize).unwrap_or(1.0);
            }
        }
        counts
    }
}

/// Ignored tokens that count: as tokens of the first class, or of their own, where their mark is a class.
fn ignored(own: &Original<'_>, loss: &LinearCrossEntropy) -> Vec<Reading> {
    let mark = loss.ignore_index as f64;
    if own.inputs.get("targets").is_none_or(|x| !x.iter().any(|x| *x == mark)) {
        return Vec::new();
    }
    let problem: Problem = LinearCrossEntropy { ignore_index: i64::MIN, ..loss.clone() }.into();
    let text = |class: &str| {
        format!("`ignore_index` is not read: ignored tokens count as tokens of {class}")
    };
    let first = Reading::plain("ignore-index-absent", text("the first class"), &problem);
    let first = first.edit("targets", Edit::map(move |x| if x == mark { 0.0 } else { x }));
    let mut list = vec![first.of("ignore_index")];
    if (0.0..loss.vocab as f64).contains(&mark) {
        let of_mark =
            Reading::plain("ignore-index-of-a-class", text("the class of that number"), &problem);
        list.push(of_mark.of("ignore_index"));
    }
    list
}
