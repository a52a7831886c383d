//! Invisible elements have no effect.

use super::compare::Strict;
use super::flaw::{Flaw, Judgement};
use super::law::{laws, scores_are};
use super::sums::input;
use super::tensors::{change, each_element, everywhere, exceeds, poison};
use super::trial::Trial;
use super::visible::Visible;
use crate::cases::Case;
use crate::generate::Stream;
use crate::tensor::Tensors;
use etalon_problem::{Algorithm, Error, Pass};
use ndarray::{ArrayD, Dimension, IxDyn, s};
use std::collections::BTreeSet;

laws! {
    SCORES;
    /// NaN in keys, values and rows without a visible pair changes nothing.
    Meaning unseen_poison(Strict::Bound)
        if |case, _| allowed(case).is_ok_and(|allowed| hides(&allowed)) && lonely(case);
    /// NaN in one key makes the rows that see it NaN, and the gradients of all keys that these see, and
    /// changes no other.
    Meaning seen_poison(Strict::Bound) if |case, _| allowed(case).is_ok_and(|allowed| split_key(&allowed, 0).is_ok());
    /// NaN in one query, without and with its cotangent, makes the gradients of the keys that it sees NaN
    /// and changes no other.
    Meaning poisoned_row(Strict::Bound) on Backward
        if |case, _| allowed(case).is_ok_and(|allowed| split_row(&allowed, 0).is_ok());
    /// A NaN that no row sees changes no bit, and neither do other keys and values; where kernels compute groups
    /// again, results in the group of the NaN, the key head of its sequence, and sums over groups stay within both
    /// bounds.
    Contract unseen_bits
        if |case, _| allowed(case).is_ok_and(|allowed| split_key(&allowed, 0).is_ok()),
        favour |case, _| scores_are(case, |s| s.extents.queries.max(s.extents.keys) > LONG);
    /// Other keys and values that a row does not see do not change it.
    Meaning unseen_change(Strict::Bound) if |case, _| allowed(case).is_ok_and(|allowed| has_unseen(&allowed));
    /// A masked row has o = 0 and lse = −∞ (its sink), and gradient 0.
    Meaning empty_rows if |case, _| {
        scores_are(case, |scores| {
            let counts = Visible::new(scores, &case.inputs).counts();
            counts.iter().any(|count| *count == 0)
        })
    };
}

/// Rows, or keys, of several tiles of any kernel.
const LONG: usize = 256;

/// Visibility by mask and sequences alone. A bias of −∞ hides only finite scores: NaN − ∞ is NaN.
fn allowed(case: &Case) -> Result<Visible, Error> {
    Ok(Visible::new(case.scores()?, &Tensors::new()))
}

/// True if some pair is not visible.
fn hides(allowed: &Visible) -> bool {
    allowed.pairs.iter().any(|seen| !seen)
}

/// True if some rows do not see some keys.
fn has_unseen(allowed: &Visible) -> bool {
    allowed.pairs.dim().3 > 1 && hides(allowed)
}

/// True if some key is seen by nobody, or some row sees nothing.
fn lonely(case: &Case) -> bool {
    let Ok(allowed) = allowed(case) else { return false };
    allowed.counts().iter().any(|count| *count == 0) || allowed.seen_keys().iter().any(|seen| !seen)
}

/// Asks with NaN in the inputs where `hit(name, index)` holds, and fails unless the outputs stay as they
/// are where `untouched(name, index)` holds. Returns the outputs.
fn poisoned(
    trial: &Trial<'_>,
    strict: Strict,
    hit: impl Fn(&str, &[usize]) -> bool,
    untouched: impl Fn(&str, &[usize]) -> bool,
) -> Result<Tensors, Flaw> {
    let outputs = trial.ask_with(&poison(&trial.case.inputs, &hit)?)?;
    if strict != Strict::Bits || !has_fallback(trial) {
        strict.unchanged(trial, &outputs, untouched)?;
        return Ok(outputs);
    }
    let groups = Groups::hit(trial.case, hit)?;
    let of = |own: bool| {
        let (untouched, groups) = (&untouched, &groups);
        move |name: &str, at: &[usize]| untouched(name, at) && groups.have(name, at) == own
    };
    Strict::Bits.unchanged(trial, &outputs, of(false))?;
    Strict::Bound.unchanged(trial, &outputs, of(true))?;
    Ok(outputs)
}

/// True where the tier may compute all results of a group again in which one is not finite, and round differently.
fn has_fallback(trial: &Trial<'_>) -> bool {
    let has = match trial.case.problem.algorithm() {
        Algorithm::Attention | Algorithm::AttentionLse => {
            matches!(trial.pass, Pass::Forward | Pass::Backward)
        }
        algorithm => algorithm == Algorithm::LazyAttention,
    };
    has && !trial.tier.gives_the_bits_beside_nan()
}

/// Groups, the key heads of sequences, in which operands of products hold a NaN.
struct Groups {
    /// The number of the sequence of each row, by batch element; none of a row of no sequence.
    queries: Vec<Vec<Option<usize>>>,
    keys: Vec<Vec<Option<usize>>>,
    /// Query heads of a key head.
    size: usize,
    /// Sequences and key heads.
    hit: BTreeSet<[usize; 2]>,
}

impl Groups {
    /// The groups with an element that `hit` holds of.
    fn hit(case: &Case, hit: impl Fn(&str, &[usize]) -> bool) -> Result<Groups, Error> {
        let scores = case.scores()?;
        let e = &scores.extents;
        let none = |rows: usize| vec![vec![None; rows]; e.batch];
        let (queries, keys) = (none(e.queries), none(e.keys));
        let mut groups =
            Groups { queries, keys, size: scores.group().max(1), hit: BTreeSet::new() };
        for (number, s) in scores.sequences().iter().enumerate() {
            groups.queries[s.batch][s.query_start..][..s.queries].fill(Some(number));
            groups.keys[s.batch][s.key_start..][..s.keys].fill(Some(number));
        }
        for (name, tensor) in &case.inputs {
            for at in ndarray::indices(IxDyn(&tensor.shape)) {
                let group = groups.of(name, at.slice()).filter(|_| hit(name, at.slice()));
                groups.hit.extend(group);
            }
        }
        Ok(groups)
    }

    /// The sequence and the key head of an element; none of tensors that are no operands of products, nor their
    /// results or gradients.
    fn of(&self, name: &str, at: &[usize]) -> Option<[usize; 2]> {
        let (rows, size) = match name {
            "q" | "dout" | "o" | "lse" | "pv_sum" | "dq" => (&self.queries, self.size),
            "k" | "v" | "dk" | "dv" => (&self.keys, 1),
            _ => return None,
        };
        let number = *rows.get(at[0])?.get(at[2])?;
        number.map(|number| [number, at[1] / size])
    }

    /// True of an element of such a group, and of sums over groups where there is one: they add up what it has.
    fn have(&self, name: &str, at: &[usize]) -> bool {
        let sums = ["dbias", "dsinks", "dtau"];
        let of_group = self.of(name, at).is_some_and(|group| self.hit.contains(&group));
        of_group || (sums.contains(&name) && !self.hit.is_empty())
    }
}

fn unseen_bits(trial: &Trial<'_>) -> Judgement {
    if lonely(trial.case) {
        unseen_poison(trial, Strict::Bits)?;
    }
    seen_poison(trial, Strict::Bits)?;
    if trial.pass == Pass::Backward && split_row(&allowed(trial.case)?, 0).is_ok() {
        poisoned_row(trial, Strict::Bits)?;
    }
    if has_unseen(&allowed(trial.case)?) {
        unseen_change(trial, Strict::Bits)?;
    }
    Ok(None)
}

fn unseen_poison(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let case = trial.case;
    let allowed = allowed(case)?;
    let (counts, seen) = (allowed.counts(), allowed.seen_keys());
    let sinks = case.scores()?.sinks;
    // A bias by distance has no element of its own for each pair.
    let bias = case.inputs.get("bias").filter(|bias| bias.shape.len() == 4);
    let read = bias.map(|bias| read_bias(&allowed, &bias.shape));
    let hit = |name: &str, at: &[usize]| match name {
        "k" | "v" => !seen[[at[0], at[1], at[2]]],
        "q" | "dout" => counts[[at[0], at[1], at[2]]] == 0,
        // With a sink, dlse of an empty row is the gradient of that sink: it is read.
        "dlse" => counts[[at[0], at[1], at[2]]] == 0 && (!sinks || !allowed.rows[[at[0], at[2]]]),
        "bias" => read.as_ref().is_some_and(|read| !read[IxDyn(at)]),
        _ => false,
    };
    poisoned(trial, strict, hit, everywhere).map(|_| None)
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

/// A key (batch, key head, position) that some rows of its group see and others do not: the last of a head,
/// from head number `first` on.
fn split_key(allowed: &Visible, first: usize) -> Result<[usize; 3], Flaw> {
    let (batch, heads, queries, keys) = allowed.pairs.dim();
    let all = (batch * heads).max(1);
    let of_head = |n: usize| ((first + n) % all / heads.max(1), (first + n) % all % heads.max(1));
    let found = (0..batch * heads * keys)
        .map(|at| (of_head(at / keys), keys - 1 - at % keys))
        .map(|((b, h), j)| [b, h, j])
        .find(|&[b, h, j]| {
            let seen = (0..queries).filter(|&i| allowed.pairs[[b, h, i, j]]).count();
            0 < seen && seen < queries
        });
    let [b, h, j] = found.ok_or_else(|| Flaw::Vacuous("no such key".to_string()))?;
    Ok([b, h / allowed.group(), j])
}

/// The number of a batch element and head, another one in each case.
fn some_head(case: &Case) -> usize {
    Stream::new(case.spec.seed, &case.name).below(1, 64)
}

fn seen_poison(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let allowed = allowed(trial.case)?;
    let [b, h, j] = split_key(&allowed, some_head(trial.case))?;
    let sees = |row: &[usize]| {
        row[0] == b && row[1] / allowed.group() == h && allowed.pairs[[b, row[1], row[2], j]]
    };
    // A key is touched where a row sees both it and the poisoned one.
    let touched = |visible: &Visible| -> Vec<bool> {
        let mut touched = vec![false; visible.pairs.dim().3];
        let rows = visible.pairs.slice(s![b, visible.heads(h), .., ..]);
        for row in rows.rows().into_iter().filter(|row| row[j]) {
            touched.iter_mut().zip(row).for_each(|(touched, seen)| *touched |= seen);
        }
        touched
    };
    let own = |key: &[usize]| key[..2] == [b, h];
    let hit = |name: &str, at: &[usize]| matches!(name, "k" | "v") && at[..3] == [b, h, j];
    let may = touched(&allowed);
    let outputs = poisoned(trial, strict, hit, |name, at| match name {
        "o" | "lse" | "dq" => !sees(at),
        "dk" | "dv" => !(own(at) && may[at[2]]),
        _ => false, // sums over rows of both kinds
    })?;
    are_nan(&outputs, &["o", "lse", "dq"], sees)?;
    // Every weight of a row that sees a NaN is NaN. A bias of −∞ takes a pair away.
    let must = touched(&Visible::new(trial.case.scores()?, &trial.case.inputs));
    are_nan(&outputs, &["dk", "dv"], |key| own(key) && must[key[2]])
}

/// Fails unless those of these outputs that are there are NaN where `expected` holds: in rows, or in
/// keys, that a NaN reaches.
fn are_nan(outputs: &Tensors, names: &[&str], expected: impl Fn(&[usize]) -> bool) -> Judgement {
    for (name, tensor) in outputs.iter().filter(|(name, _)| names.contains(&name.as_str())) {
        each_element(name, &tensor.to_f64(name)?, |at, x| {
            (!x.is_nan() && expected(at)).then(|| ", though a NaN reaches it".to_string())
        })?;
    }
    Ok(None)
}

/// A row (batch, head, position) that sees some keys and not others: the last of a head, from head number
/// `first` back.
fn split_row(allowed: &Visible, first: usize) -> Result<[usize; 3], Flaw> {
    let (batch, heads, queries, keys) = allowed.pairs.dim();
    let (counts, all) = (allowed.counts(), (batch * heads).max(1));
    let of_head = |n: usize| (first + all - 1 - n) % all;
    let found = (0..batch * heads * queries)
        .map(|at| (of_head(at / queries), queries - 1 - at % queries))
        .map(|(head, i)| [head / heads, head % heads, i])
        .find(|row| (1..keys).contains(&counts[*row]));
    found.ok_or_else(|| Flaw::Vacuous("no such row".to_string()))
}

fn poisoned_row(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let allowed = allowed(trial.case)?;
    let [b, h, i] = split_row(&allowed, some_head(trial.case))?;
    let own = |at: &[usize]| at[..3] == [b, h, i];
    // A bias of −∞ takes a pair away; that of a score that is NaN may do so or not.
    let seen = Visible::new(trial.case.scores()?, &trial.case.inputs);
    let sees =
        |key: &[usize]| key[..2] == [b, h / allowed.group()] && seen.pairs[[b, h, i, key[2]]];
    // A query alone: only weights that are NaN then reach dv.
    for struck in [&["q"][..], &["q", "dout"]] {
        let hit = |name: &str, at: &[usize]| struck.contains(&name) && own(at);
        let outputs = poisoned(trial, strict, hit, |name, at| match name {
            "dq" => !own(at),
            "dk" | "dv" => at[..2] != [b, h / allowed.group()] || !allowed.pairs[[b, h, i, at[2]]],
            _ => false, // sums over rows of both kinds
        })?;
        are_nan(&outputs, &["dq"], own)?;
        are_nan(&outputs, &["dk", "dv"], sees)?;
    }
    Ok(None)
}

/// Redraws later keys and values, from another one on in each head: from the middle, a third or two thirds.
/// In the backward pass also earlier queries and their cotangents, in a second run: the gradients of keys that
/// none of those rows sees stay.
fn unseen_change(trial: &Trial<'_>, strict: Strict) -> Judgement {
    let case = trial.case;
    let allowed = allowed(case)?;
    let e = case.scores()?.extents;
    let part = |n: usize, head: usize| n * [3, 2, 4][head % 3] / 6;
    let group = allowed.group();
    let first = |b: usize, h: usize| part(e.keys, b + h / group);
    let end = |b: usize, h: usize| part(e.queries + 1, b + h);
    let stream = Stream::new(case.spec.seed, "unseen_change");
    let redrawn = |hit: &dyn Fn(&str, &[usize]) -> bool| {
        let mut at = 0;
        let inputs = change(&case.inputs, |name, index, x| {
            at += 1;
            if hit(name, index) { stream.normal(at) } else { x }
        });
        trial.ask_with(&inputs?)
    };
    let of_key_head = |at: &[usize]| first(at[0], at[1] * group);
    let outputs = redrawn(&|name, at| matches!(name, "k" | "v") && at[2] >= of_key_head(at))?;
    let sees = |row: &[usize]| {
        let later = s![row[0], row[1], row[2], first(row[0], row[1])..];
        allowed.pairs.slice(later).iter().any(|seen| *seen)
    };
    strict
        .unchanged(trial, &outputs, |name, at| matches!(name, "o" | "lse" | "dq") && !sees(at))?;
    if trial.pass != Pass::Backward {
        return Ok(None);
    }
    let early = |at: &[usize]| at[2] < end(at[0], at[1]);
    let outputs = redrawn(&|name, at| matches!(name, "q" | "dout" | "dlse") && early(at))?;
    let by_none = |key: &[usize]| {
        allowed.heads(key[1]).all(|head| {
            let rows = s![key[0], head, ..end(key[0], head), key[2]];
            !allowed.pairs.slice(rows).iter().any(|seen| *seen)
        })
    };
    strict.unchanged(trial, &outputs, |name, at| matches!(name, "dk" | "dv") && by_none(at))
}

fn empty_rows(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let visible = Visible::new(case.scores()?, &case.inputs);
    let (counts, seen) = (visible.counts(), visible.seen_keys());
    let sinks = input(&case.inputs, "sinks")?;
    let bounds = trial.bounds()?;
    for (name, tensor) in trial.clean()? {
        let bound = &bounds.outputs[name].bound;
        each_element(name, &tensor.to_f64(name)?, |at, x| {
            let empty = match name.as_str() {
                "o" | "lse" | "dq" => counts[[at[0], at[1], at[2]]] == 0,
                "dk" | "dv" => !seen[[at[0], at[1], at[2]]],
                _ => false,
            };
            // The sink alone is a logarithm of an exponential, which may round.
            let (expected, room) = match (name.as_str(), &sinks) {
                ("lse", Some(sinks)) if visible.rows[[at[0], at[2]]] => (sinks[[at[1]]], bound[at]),
                ("lse", _) => (f64::NEG_INFINITY, 0.0),
                _ => (0.0, 0.0),
            };
            let wrong = empty && x != expected && exceeds((x - expected).abs(), room);
            wrong.then(|| format!(", expected {expected:e}: it sees nothing"))
        })?;
    }
    Ok(None)
}
