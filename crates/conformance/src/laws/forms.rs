//! One problem, said in several ways.

use super::compare::{TWICE, close, sum_groups};
use super::flaw::{Judgement, worst};
use super::law::{laws, scores_are};
use super::part::{Part, with_scores};
use super::tensors::{Equality, everywhere, map, same, take};
use super::trial::Trial;
use super::visible::Visible;
use crate::cases::Case;
use crate::cases::attention::MaskKind;
use crate::tensor::{Tensor, Tensors};
use etalon_problem::{Align, Axis, BiasExtents, Mask, NamedArray, Problem, Scores, Sequences};
use ndarray::ArrayD;

laws! {
    SCORES;
    /// A mask, its array, its compositions and its synonyms give the same numbers.
    Contract mask_forms;
    /// A bias of −∞ where the mask forbids gives the same numbers as the mask.
    Contract bias_is_mask of ATTENTION if |case, _| {
        case.attention().is_some_and(|point| point.mask != MaskKind::Full)
            && scores_are(case, |s| s.sequences == Sequences::Dense && s.softcap.is_none())
    };
    /// Segments give the results of one call for each segment.
    Meaning segments_are_calls if |case, _| {
        let long = |scores: &Scores| scores.extents.queries > 2 && scores.extents.keys > 2;
        scores_are(case, |s| s.sequences == Sequences::Dense && long(s))
            && small(case)
            && !has_distance_bias(case)
    };
    /// A shared key head gives the results of one copy for each query head.
    Meaning groups_are_copies if |case, _| scores_are(case, |s| s.group() > 1);
}

/// True if the problem has a bias by distance: each call counts from where it begins.
pub(super) fn has_distance_bias(case: &Case) -> bool {
    matches!(&case.problem, Problem::LazyAttention(problem) if problem.bias.is_some())
}

/// Laws that evaluate the reference once more do so on small cases.
pub(super) fn small(case: &Case) -> bool {
    case.problem.scores().is_none_or(|scores| {
        let e = &scores.extents;
        e.batch * e.query_heads * e.queries * e.keys * e.dim <= 1 << 19
    })
}

/// Other ways to say a mask.
fn synonyms(mask: &Mask, scores: &Scores) -> Vec<(&'static str, Mask)> {
    let mut list = vec![
        ("and(mask, full)", Mask::And(vec![mask.clone(), Mask::Full])),
        ("or(mask, nothing)", Mask::Or(vec![mask.clone(), Mask::Or(Vec::new())])),
        ("and(mask, mask)", Mask::And(vec![mask.clone(), mask.clone()])),
    ];
    let far = scores.extents.queries.max(scores.extents.keys);
    match mask {
        Mask::Full => list.push(("a wide window", Mask::window(far, far))),
        Mask::Causal { align } => {
            let window = |left| Mask::Window { left, right: Some(0), align: *align };
            list.push(("a window open to the left", window(None)));
            list.push(("a window of all keys", window(Some(far))));
            list.push(("one chunk", Mask::ChunkedCausal { chunk: 1 << 40, align: Align::TopLeft }));
            // A chunk holds all keys only where no aligned query lies before the first of them.
            if scores.sequences().iter().any(|s| *align != Align::TopLeft || s.queries > s.keys) {
                list.pop();
            }
        }
        Mask::Window { left, right, align } => {
            let side = |left, right| Mask::Window { left, right, align: *align };
            let both = vec![side(*left, None), side(None, *right)];
            list.push(("its two sides", Mask::And(both)));
        }
        _ => {}
    }
    if scores.sequences().iter().all(|s| s.queries == s.keys) {
        let mut other = mask.clone();
        other.visit_mut(&mut |node| {
            if let Some(align) = node.align_mut() {
                *align = match align {
                    Align::TopLeft => Align::BottomRight,
                    Align::BottomRight => Align::TopLeft,
                };
            }
        });
        list.push(("the other alignment", other));
    }
    list
}

fn mask_forms(trial: &Trial<'_>) -> Judgement {
    let (problem, scores) = (&trial.case.problem, trial.case.scores()?);
    let mut forms = synonyms(&scores.mask, scores);
    forms.push(("its array", Visible::new(scores, &Tensors::new()).mask()));
    for (what, mask) in forms {
        let other = with_scores(problem, Scores { mask, ..scores.clone() });
        let outputs = trial.ask(&other, &trial.case.inputs)?;
        same(&outputs, trial.clean()?, Equality::Numbers, everywhere)
            .map_err(|flaw| flaw.of(what))?;
    }
    Ok(None)
}

fn bias_is_mask(trial: &Trial<'_>) -> Judgement {
    let (case, scores) = (trial.case, trial.case.scores()?);
    let e = scores.extents;
    let allowed = Visible::new(scores, &Tensors::new());
    let bias = match (case.inputs.get("bias"), scores.bias) {
        (Some(bias), Some(extents)) => {
            let copies =
                |extent, full| if extent == 1 { vec![0; full] } else { (0..full).collect() };
            let bias = take(bias, 0, &copies(extents.batch, e.batch));
            take(&bias, 1, &copies(extents.heads, e.query_heads))
        }
        _ => Tensor::round(&ArrayD::zeros(allowed.pairs.shape()), case.dtype),
    };
    let bias = map(&bias, |at, x| {
        if allowed.pairs[[at[0], at[1], at[2], at[3]]] { x } else { f64::NEG_INFINITY }
    })?;
    let mut inputs = case.inputs.clone();
    inputs.insert("bias".to_string(), bias);
    let full = Some(BiasExtents { batch: e.batch, heads: e.query_heads });
    let other = Scores { mask: Mask::Full, bias: full, ..scores.clone() };
    let mut outputs = trial.ask(&with_scores(&case.problem, other), &inputs)?;
    // A shared bias has another shape of gradient than its copies.
    outputs.remove("dbias");
    same(&outputs, trial.clean()?, Equality::Numbers, everywhere).map_err(|flaw| flaw.of("bias"))
}

/// Bounds of three segments of `n` rows: about a quarter, a half and a quarter of them, in every other batch element a
/// third each.
fn three(n: usize, batch: usize) -> [usize; 4] {
    let first = n.div_ceil(if batch.is_multiple_of(2) { 4 } else { 3 });
    [0, first, n - first, n]
}

/// Segments that differ in batch elements; the first of these and the last are looked at.
fn segments_are_calls(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let scores = trial.case.scores()?;
    let e = scores.extents;
    let ids = |name: &str, n: usize| {
        let id = |b, i| three(n, b)[1..3].iter().filter(|cut| **cut <= i).count() as i64;
        let data = (0..e.batch).flat_map(|b| (0..n).map(move |i| id(b, i)));
        NamedArray::new(name, &[e.batch, n], data.collect::<Vec<i64>>())
    };
    let (query, key) = (ids("query_ids", e.queries), ids("key_ids", e.keys));
    let masked = |mask| with_scores(problem, Scores { mask, ..scores.clone() });
    let (whole, plain) = (masked(Mask::Segments { query, key }), masked(Mask::Full));
    let (outputs, bounds) = (trial.ask(&whole, inputs)?, trial.bounds_of(&whole, inputs)?);
    let ends = [0, e.batch.saturating_sub(1)];
    let elements = &ends[..e.batch.min(2)];
    let parts = elements.iter().flat_map(|&b| (0..3).map(move |s| (b, s)));
    worst(parts.map(|(b, s)| {
        let [queries, keys] = [e.queries, e.keys].map(|n| three(n, b)[s]..three(n, b)[s + 1]);
        let part = Part::of(Axis::Batch, [b]).and(Axis::Queries, queries).and(Axis::Keys, keys);
        let (part_problem, part_inputs) = (part.problem(&plain), part.tensors(problem, inputs));
        let alone = trial.ask(&part_problem, &part_inputs)?;
        let own_bounds = trial.bounds_of(&part_problem, &part_inputs)?;
        // Results of the heads are sums over all rows.
        let by_row = |name: &str| part.cuts_along(problem, name, &[Axis::Queries, Axis::Keys]);
        // So are those of a bias that batch elements share.
        let own = |name: &str| part.cuts_along(problem, name, &[Axis::Batch]) || e.batch == 1;
        worst(alone.iter().filter(|(name, _)| by_row(name) && own(name)).map(|(name, alone)| {
            let place = |x: &ArrayD<f64>| part.array(problem, name, x);
            let limit = place(&bounds.outputs[name].bound) + &own_bounds.outputs[name].bound;
            close(name, &place(&outputs[name].numbers(name)?), &alone.numbers(name)?, &limit)
        }))
    }))
}

fn groups_are_copies(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let group = trial.case.scores()?.group();
    let copies = copies_of_key_heads(problem, group);
    let outputs = trial.ask(&copies.problem(problem), &copies.tensors(problem, inputs))?;
    let bounds = trial.bounds()?;
    worst(trial.clean()?.iter().map(|(name, clean)| {
        let mut values = outputs[name].numbers(name)?;
        let mut limit = &bounds.outputs[name].bound * TWICE;
        if copies.cuts_along(problem, name, &[Axis::KeyHeads]) {
            // Each copy's gradient is rounded to its storage type before the sum over the group.
            let dtype = outputs[name].dtype().unwrap_or(trial.case.dtype);
            let stored = |x: f64| x.abs() * dtype.unit_roundoff() + dtype.underflow();
            limit = limit + sum_groups(&values.mapv(stored), 1, group);
            values = sum_groups(&values, 1, group);
        }
        close(name, &values, &clean.numbers(name)?, &limit)
    }))
}

/// Every key head as many times as it has query heads.
pub(super) fn copies_of_key_heads(problem: &Problem, group: usize) -> Part {
    Part::of(Axis::KeyHeads, (0..problem.extent(Axis::QueryHeads)).map(|h| h / group))
}
