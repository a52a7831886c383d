//! What is not visible does not exist.

use super::flaw::{Flaw, Judgement, refute};
use super::law::{FIRST_ORDER, Kind, Law, SCORES};
use super::tensors::{Equality, difference, map};
use super::trial::Trial;
use super::values::close;
use super::visible::Visible;
use crate::cases::Case;
use crate::generate::Stream;
use crate::tensor::{Tensor, Tensors};
use crate::tier::Hints;
use etalon_problem::{Error, Pass};
use ndarray::{ArrayD, IxDyn};

pub(super) const LAWS: &[Law] = &[
    Law {
        name: "unseen_poison",
        statement: "NaN in keys, values and rows without a visible pair changes nothing.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            let hides = |allowed: Visible| allowed.pairs.iter().any(|seen| !seen);
            allowed(case).is_ok_and(hides) && lonely(case)
        },
        check: |trial| unseen_poison(trial, Strict::Bound),
    },
    Law {
        name: "seen_poison",
        statement: "NaN in one key makes the rows that see it NaN and changes no other row.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            allowed(case).is_ok_and(|allowed| split_key(&allowed).is_some())
        },
        check: |trial| seen_poison(trial, Strict::Bound),
    },
    Law {
        name: "poisoned_row",
        statement: "NaN in one query reaches the gradients of the keys that it sees and no other.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, pass: Pass| {
            pass == Pass::Backward
                && allowed(case).is_ok_and(|allowed| split_row(&allowed).is_some())
        },
        check: |trial| poisoned_row(trial, Strict::Bound),
    },
    Law {
        name: "poison_bits",
        statement: "A NaN that no row sees changes no bit.",
        kind: Kind::Contract,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            allowed(case).is_ok_and(|allowed| split_key(&allowed).is_some())
        },
        check: poison_bits,
    },
    Law {
        name: "unseen_change",
        statement: "Other keys and values that a row does not see change no bit of it.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            allowed(case).is_ok_and(|allowed| {
                allowed.pairs.dim().3 > 1 && allowed.pairs.iter().any(|seen| !seen)
            })
        },
        check: unseen_change,
    },
    Law {
        name: "empty_rows",
        statement: "A masked row has o = 0 and lse = −∞ (its sink), and gradient 0.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            case.problem.scores().is_some_and(|scores| {
                let counts = Visible::new(scores, &case.inputs).counts();
                counts.iter().any(|count| *count == 0)
            })
        },
        check: empty_rows,
    },
];

/// How equal a result must be to the one without poison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strict {
    /// A kernel may take another way where there is NaN, and round differently.
    Bound,
    /// Bit by bit.
    Bits,
}

impl Strict {
    fn same(
        self,
        trial: &Trial<'_>,
        name: &str,
        got: &Tensor,
        clean: &Tensor,
        where_: impl Fn(&[usize]) -> bool,
    ) -> Result<(), Flaw> {
        if self == Strict::Bits {
            return refute(difference(name, got, clean, Equality::Bits, where_));
        }
        // Two results within a bound of the same number are within two of each other.
        let mut limit = &trial.bounds()?.outputs[name].bound * 2.0;
        for (index, limit) in limit.indexed_iter_mut() {
            if !where_(ndarray::Dimension::slice(&index)) {
                *limit = f64::INFINITY;
            }
        }
        close(name, got, clean, &limit).map(|_| ())
    }
}

fn poison_bits(trial: &Trial<'_>) -> Judgement {
    if lonely(trial.case) {
        unseen_poison(trial, Strict::Bits)?;
    }
    seen_poison(trial, Strict::Bits)?;
    if trial.pass == Pass::Backward && split_row(&allowed(trial.case)?).is_some() {
        poisoned_row(trial, Strict::Bits)?;
    }
    Ok(None)
}

/// Visibility by mask and sequences alone. A bias of −∞ hides only finite scores: NaN − ∞ is NaN.
fn allowed(case: &Case) -> Result<Visible, Error> {
    Ok(Visible::new(case.scores()?, &Tensors::new()))
}

/// Whether some key is seen by nobody, or some row sees nothing.
fn lonely(case: &Case) -> bool {
    let (Some(scores), Ok(allowed)) = (case.problem.scores(), allowed(case)) else { return false };
    let e = scores.extents;
    let keys = (0..e.batch)
        .flat_map(|b| (0..e.key_heads).flat_map(move |h| (0..e.keys).map(move |j| (b, h, j))));
    allowed.counts().iter().any(|count| *count == 0)
        || keys.into_iter().any(|(b, h, j)| !allowed.seen(b, h, j))
}

/// Writes NaN where `hit(name, index)` says so.
fn poison(inputs: &Tensors, hit: impl Fn(&str, &[usize]) -> bool) -> Result<Tensors, Error> {
    let poisoned = |(name, tensor): (&String, &_)| {
        let x = map(tensor, |index, x| if hit(name, index) { f64::NAN } else { x })?;
        Ok((name.clone(), x))
    };
    inputs.iter().map(poisoned).collect()
}

fn unseen_poison(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let (case, clean) = (trial.case, trial.clean()?);
    let allowed = allowed(case)?;
    let counts = allowed.counts();
    let sinks = case.scores()?.sinks;
    // A bias by distance has no element of its own for each pair.
    let bias = case.inputs.get("bias").filter(|bias| bias.shape.len() == 4);
    let read = bias.map(|bias| read_bias(&allowed, &bias.shape));
    let poisoned = poison(&case.inputs, |name, at| match name {
        "k" | "v" => !allowed.seen(at[0], at[1], at[2]),
        "q" | "dout" => counts[[at[0], at[1], at[2]]] == 0,
        // With a sink, dlse of an empty row is the gradient of that sink: it is read.
        "dlse" => {
            counts[[at[0], at[1], at[2]]] == 0 && (!sinks || !allowed.rows[0][[at[0], at[2]]])
        }
        "bias" => read.as_ref().is_some_and(|read| !read[IxDyn(at)]),
        _ => false,
    })?;
    let outputs = trial.ask(&case.problem, &poisoned, Hints::default())?;
    for (name, tensor) in clean {
        strict.same(trial, name, &outputs[name], tensor, |_| true)?;
    }
    Ok(None)
}

/// The elements of a bias that belong to an allowed pair; axes of extent 1 are shared.
fn read_bias(allowed: &Visible, shape: &[usize]) -> ArrayD<bool> {
    let mut read = ArrayD::from_elem(IxDyn(shape), false);
    for ((b, h, i, j), seen) in allowed.pairs.indexed_iter() {
        let (b, h) = (b.min(shape[0] - 1), h.min(shape[1] - 1));
        read[[b, h, i, j]] |= *seen;
    }
    read
}

/// A key (batch, key head, position) that some rows of its group see and others do not.
fn split_key(allowed: &Visible) -> Option<[usize; 3]> {
    let (batch, heads, queries, keys) = allowed.pairs.dim();
    let group = allowed.group();
    (0..batch * heads * keys)
        .map(|at| [at / keys / heads, at / keys % heads, keys - 1 - at % keys])
        .find(|&[b, h, j]| {
            let seen = (0..queries).filter(|&i| allowed.pairs[[b, h, i, j]]).count();
            0 < seen && seen < queries
        })
        .map(|[b, h, j]| [b, h / group, j])
}

fn seen_poison(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let (case, clean) = (trial.case, trial.clean()?);
    let allowed = allowed(case)?;
    let group = allowed.group();
    let [b, h, j] = split_key(&allowed).ok_or_else(|| Flaw::Vacuous("no such key".to_string()))?;
    let poisoned =
        poison(&case.inputs, |name, at| matches!(name, "k" | "v") && at[..3] == [b, h, j])?;
    let outputs = trial.ask(&case.problem, &poisoned, Hints::default())?;
    let sees =
        |row: &[usize]| row[0] == b && row[1] / group == h && allowed.pairs[[b, row[1], row[2], j]];
    // A key is touched where a row sees both it and the poisoned one.
    let touched = |key: &[usize]| {
        key[0] == b && key[1] == h && {
            let heads = h * group..(h + 1) * group;
            heads.flat_map(|head| (0..allowed.pairs.dim().2).map(move |i| [b, head, i])).any(
                |[b, head, i]| {
                    allowed.pairs[[b, head, i, j]] && allowed.pairs[[b, head, i, key[2]]]
                },
            )
        }
    };
    for (name, tensor) in clean {
        let untouched = |at: &[usize]| match name.as_str() {
            "o" | "lse" | "dq" => !sees(at),
            "dk" | "dv" => !touched(at),
            _ => false, // sums over rows of both kinds
        };
        strict.same(trial, name, &outputs[name], tensor, untouched)?;
        if matches!(name.as_str(), "o" | "lse" | "dq") {
            refute(not_nan(name, &outputs, sees)?)?;
        }
    }
    Ok(None)
}

/// The first element that should be NaN and is not.
fn not_nan(
    name: &str,
    outputs: &Tensors,
    expected: impl Fn(&[usize]) -> bool,
) -> Result<Option<String>, Error> {
    let values = outputs[name].to_f64(name)?;
    let found = values
        .indexed_iter()
        .find(|(index, x)| !x.is_nan() && expected(ndarray::Dimension::slice(index)));
    Ok(found.map(|(index, x)| {
        format!("{name}{:?} = {x:e}, though its row sees NaN", ndarray::Dimension::slice(&index))
    }))
}

/// A row (batch, head, position) that sees some keys and not others.
fn split_row(allowed: &Visible) -> Option<[usize; 3]> {
    let (.., keys) = allowed.pairs.dim();
    let counts = allowed.counts();
    let found = counts.indexed_iter().find(|(_, count)| 0 < **count && **count < keys);
    found.map(|((b, h, i), _)| [b, h, i])
}

fn poisoned_row(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let (case, clean) = (trial.case, trial.clean()?);
    let allowed = allowed(case)?;
    let group = allowed.group();
    let [b, h, i] = split_row(&allowed).ok_or_else(|| Flaw::Vacuous("no such row".to_string()))?;
    let poisoned =
        poison(&case.inputs, |name, at| matches!(name, "q" | "dout") && at[..3] == [b, h, i])?;
    let outputs = trial.ask(&case.problem, &poisoned, Hints::default())?;
    for (name, tensor) in clean {
        let untouched = |at: &[usize]| match name.as_str() {
            "dq" => at[..3] != [b, h, i],
            "dk" | "dv" => at[..2] != [b, h / group] || !allowed.pairs[[b, h, i, at[2]]],
            _ => false, // sums over rows of both kinds
        };
        strict.same(trial, name, &outputs[name], tensor, untouched)?;
        if name == "dq" {
            refute(not_nan(name, &outputs, |at| at[..3] == [b, h, i])?)?;
        }
    }
    Ok(None)
}

/// Redraws the keys and values of the later half. In the backward pass also the queries and their
/// cotangents of the earlier half, in a second run: the gradients of keys that none of those rows
/// sees stay.
fn unseen_change(trial: &Trial<'_>) -> Judgement {
    let (case, clean) = (trial.case, trial.clean()?);
    let allowed = allowed(case)?;
    let e = case.scores()?.extents;
    let (half, early) = (e.keys / 2, e.queries.div_ceil(2));
    let stream = Stream::new(case.spec.seed, "unseen_change");
    let redraw = |hit: &dyn Fn(&str, &[usize]) -> bool| -> Result<Tensors, Error> {
        let mut at = 0;
        let tensors = case.inputs.iter().map(|(name, tensor)| {
            let other = map(tensor, |index, x| {
                at += 1;
                if hit(name, index) { stream.normal(at) } else { x }
            })?;
            Ok((name.clone(), other))
        });
        tensors.collect()
    };
    let keys = redraw(&|name, at| matches!(name, "k" | "v") && at[2] >= half)?;
    let outputs = trial.ask(&case.problem, &keys, Hints::default())?;
    let blind = |row: &[usize]| {
        let row = allowed.pairs.slice(ndarray::s![row[0], row[1], row[2], half..]);
        !row.iter().any(|seen| *seen)
    };
    for name in ["o", "lse", "dq"].iter().filter(|name| clean.contains_key(**name)) {
        refute(difference(name, &outputs[*name], &clean[*name], Equality::Bits, blind))?;
    }
    if trial.pass != Pass::Backward {
        return Ok(None);
    }
    let rows = redraw(&|name, at| matches!(name, "q" | "dout" | "dlse") && at[2] < early)?;
    let outputs = trial.ask(&case.problem, &rows, Hints::default())?;
    let group = allowed.group();
    let unseen = |key: &[usize]| {
        let heads = key[1] * group..(key[1] + 1) * group;
        let pairs = allowed.pairs.slice(ndarray::s![key[0], heads, ..early, key[2]]);
        !pairs.iter().any(|seen| *seen)
    };
    for name in ["dk", "dv"].iter().filter(|name| clean.contains_key(**name)) {
        refute(difference(name, &outputs[*name], &clean[*name], Equality::Bits, unseen))?;
    }
    Ok(None)
}

fn empty_rows(trial: &Trial<'_>) -> Judgement {
    let (case, clean) = (trial.case, trial.clean()?);
    let visible = Visible::new(case.scores()?, &case.inputs);
    let counts = visible.counts();
    let sinks = match case.inputs.get("sinks") {
        Some(sinks) => Some(sinks.to_f64("sinks")?),
        None => None,
    };
    for (name, tensor) in clean {
        for (index, &x) in tensor.to_f64(name)?.indexed_iter() {
            let at = ndarray::Dimension::slice(&index);
            let empty = match name.as_str() {
                "o" | "lse" | "dq" => counts[[at[0], at[1], at[2]]] == 0,
                "dk" | "dv" => !visible.seen(at[0], at[1], at[2]),
                _ => continue,
            };
            let inside = name == "lse" && visible.rows[0][[at[0], at[2]]];
            let expected = match (name.as_str(), &sinks) {
                ("lse", Some(sinks)) if inside => sinks[[at[1]]],
                ("lse", _) => f64::NEG_INFINITY,
                _ => 0.0,
            };
            if empty && x != expected {
                let text = format!("{name}{at:?} = {x:e}, expected {expected:e}: it sees nothing");
                return Err(Flaw::Fail(text));
            }
        }
    }
    Ok(None)
}
