//! One problem, said in several ways.

use super::flaw::{Judgement, refute};
use super::law::{ATTENTION, FIRST_ORDER, Kind, Law, SCORES};
use super::select::{Selection, has_axis, with_scores};
use super::tensors::{Equality, difference, map, take};
use super::trial::Trial;
use super::values;
use super::visible::Visible;
use crate::cases::Case;
use crate::cases::attention::MaskKind;
use crate::tensor::{Data, Tensor, Tensors};
use crate::tier::Hints;
use etalon_problem::{
    Align, Axis, BiasExtents, Mask, NamedArray, Pass, Problem, Scores, Sequences,
};
use half::{bf16, f16};

pub(super) const LAWS: &[Law] = &[
    Law {
        name: "mask_forms",
        statement: "A mask, its array, its compositions and its synonyms give the same numbers.",
        kind: Kind::Contract,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |_, _| true,
        check: mask_forms,
    },
    Law {
        name: "bias_is_mask",
        statement: "A bias of −∞ where the mask forbids gives the same numbers as the mask.",
        kind: Kind::Contract,
        of: ATTENTION,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            let masked = case.attention().is_some_and(|point| point.mask != MaskKind::Full);
            masked
                && case.problem.scores().is_some_and(|scores| {
                    scores.sequences == Sequences::Dense && scores.softcap.is_none()
                })
        },
        check: bias_is_mask,
    },
    Law {
        name: "segments_are_calls",
        statement: "Segments give the results of one call for each segment.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| {
            case.problem.scores().is_some_and(|scores| {
                scores.sequences == Sequences::Dense
                    && scores.extents.queries > 2
                    && scores.extents.keys > 2
            }) && small(case)
                && !counts_distances(case)
        },
        check: segments_are_calls,
    },
    Law {
        name: "groups_are_copies",
        statement: "A shared key head gives the results of one copy for each query head.",
        kind: Kind::Meaning,
        of: SCORES,
        passes: FIRST_ORDER,
        applies: |case: &Case, _: Pass| case.problem.scores().is_some_and(|s| s.group() > 1),
        check: groups_are_copies,
    },
];

/// Whether the problem has a bias by distance: each call counts from where it begins.
fn counts_distances(case: &Case) -> bool {
    matches!(&case.problem, Problem::LazyAttention(problem) if problem.bias.is_some())
}

/// Laws that evaluate the reference once more do so on small cases.
pub(super) fn small(case: &Case) -> bool {
    case.problem.scores().is_none_or(|scores| {
        let e = &scores.extents;
        e.batch * e.query_heads * e.queries * e.keys * e.dim <= 1 << 19
    })
}

fn same_numbers(
    trial: &Trial<'_>,
    problem: &Problem,
    inputs: &Tensors,
    skip: &[&str],
    what: &str,
) -> Judgement {
    let outputs = trial.ask(problem, inputs, Hints::default())?;
    for (name, tensor) in trial.clean()?.iter().filter(|(name, _)| !skip.contains(&name.as_str())) {
        let found = difference(name, &outputs[name], tensor, Equality::Numbers, |_| true);
        refute(found.map(|found| format!("{what}: {found}")))?;
    }
    Ok(None)
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
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let scores = trial.case.scores()?;
    let array = Visible::new(scores, &Tensors::new()).mask();
    let mut forms = synonyms(&scores.mask, scores);
    forms.push(("its array", array));
    for (what, mask) in forms {
        let other = with_scores(problem, Scores { mask, ..scores.clone() });
        same_numbers(trial, &other, inputs, &[], what)?;
    }
    Ok(None)
}

fn bias_is_mask(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let scores = trial.case.scores()?;
    let e = scores.extents;
    let allowed = Visible::new(scores, &Tensors::new());
    let full = BiasExtents { batch: e.batch, heads: e.query_heads };
    let bias = match (inputs.get("bias"), scores.bias) {
        (Some(bias), Some(extents)) => {
            let copies =
                |extent, full| if extent == 1 { vec![0; full] } else { (0..full).collect() };
            let bias = take(bias, 0, &copies(extents.batch, e.batch));
            take(&bias, 1, &copies(extents.heads, e.query_heads))
        }
        _ => zeros(&[e.batch, e.query_heads, e.queries, e.keys], &inputs["q"]),
    };
    let bias = map(&bias, |at, x| {
        if allowed.pairs[[at[0], at[1], at[2], at[3]]] { x } else { f64::NEG_INFINITY }
    })?;
    let mut inputs = inputs.clone();
    inputs.insert("bias".to_string(), bias);
    let other =
        with_scores(problem, Scores { mask: Mask::Full, bias: Some(full), ..scores.clone() });
    // A shared bias has another shape of gradient than its copies.
    same_numbers(trial, &other, &inputs, &["dbias"], "bias")
}

/// Zeros of a tensor's type.
fn zeros(shape: &[usize], like: &Tensor) -> Tensor {
    let n: usize = shape.iter().product();
    let data = match like.data {
        Data::Bf16(_) => Data::Bf16(vec![bf16::ZERO; n]),
        Data::F16(_) => Data::F16(vec![f16::ZERO; n]),
        Data::F32(_) => Data::F32(vec![0.0; n]),
        _ => Data::F64(vec![0.0; n]),
    };
    Tensor { shape: shape.to_vec(), data }
}

/// Three segments: about a quarter, a half and a quarter of the rows.
fn segments_are_calls(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let scores = trial.case.scores()?;
    let e = scores.extents;
    let cuts = |n: usize| [0, n.div_ceil(4), n - n.div_ceil(4), n];
    let (queries, keys) = (cuts(e.queries), cuts(e.keys));
    let ids = |name: &str, cuts: &[usize; 4]| {
        let row: Vec<i64> = (0..cuts[3])
            .map(|i| cuts[1..3].iter().filter(|cut| **cut <= i).count() as i64)
            .collect();
        let data: Vec<i64> = (0..e.batch).flat_map(|_| row.clone()).collect();
        NamedArray::new(name, &[e.batch, cuts[3]], data)
    };
    let mask = Mask::Segments { query: ids("query_ids", &queries), key: ids("key_ids", &keys) };
    let whole = with_scores(problem, Scores { mask, ..scores.clone() });
    let plain = Scores { mask: Mask::Full, ..scores.clone() };
    let outputs = trial.ask(&whole, inputs, Hints::default())?;
    let bounds = trial.bounds_of(&whole, inputs)?;
    let mut margin = None;
    for s in 0..3 {
        let rows = Some((queries[s]..queries[s + 1], keys[s]..keys[s + 1]));
        let part = Selection { rows, ..Selection::all(scores) };
        let part_inputs = part.tensors(problem, inputs);
        let part_problem = part.problem(problem, &plain);
        let alone = trial.ask(&part_problem, &part_inputs, Hints::default())?;
        let part_bounds = trial.bounds_of(&part_problem, &part_inputs)?;
        // Those of the heads are sums over all rows.
        let by_row = |name: &str| has_axis(problem, name, &[Axis::Queries, Axis::Keys]);
        for (name, tensor) in alone.iter().filter(|(name, _)| by_row(name)) {
            let place = part.tensor(problem, name, &outputs[name]);
            let limit = Tensor::round(&bounds.outputs[name].bound, etalon_problem::Dtype::F64);
            let limit = part.tensor(problem, name, &limit).to_f64(name)?;
            let limit = limit + &part_bounds.outputs[name].bound;
            let found = values::close(name, &place, tensor, &limit)?;
            margin = values::larger(margin, found);
        }
    }
    Ok(margin)
}

fn groups_are_copies(trial: &Trial<'_>) -> Judgement {
    let (problem, inputs) = (&trial.case.problem, &trial.case.inputs);
    let scores = trial.case.scores()?;
    let group = scores.group();
    let mut copies = inputs.clone();
    let heads: Vec<usize> = (0..scores.extents.query_heads).map(|h| h / group).collect();
    for (name, tensor) in inputs {
        let operand = problem.operand(name);
        if let Some(axis) = operand.and_then(|operand| operand.position(Axis::KeyHeads)) {
            copies.insert(name.clone(), take(tensor, axis, &heads));
        }
    }
    let mut extents = scores.extents;
    extents.key_heads = extents.query_heads;
    let other = with_scores(problem, Scores { extents, ..scores.clone() });
    let outputs = trial.ask(&other, &copies, Hints::default())?;
    let bounds = trial.bounds()?;
    let clean = trial.clean()?;
    let by_key_head = |name: &str| has_axis(problem, name, &[Axis::KeyHeads]);
    let wide = |name: &str| -> Result<_, super::Flaw> {
        let values = outputs[name].to_f64(name)?;
        Ok(if by_key_head(name) { values::sum_groups(&values, group) } else { values })
    };
    let mut margin = None;
    for (name, tensor) in clean {
        let mut limit = bounds.outputs[name].bound.clone() * 2.0;
        if by_key_head(name) {
            // Each copy's gradient is rounded to its storage type before the sum over the group.
            let u = trial.case.dtype.unit_roundoff();
            let rounding = values::sum_groups(&outputs[name].to_f64(name)?.mapv(f64::abs), group);
            limit = limit + rounding * u;
        }
        let sums = Tensor::round(&wide(name)?, etalon_problem::Dtype::F64);
        margin = values::larger(margin, values::close(name, &sums, tensor, &limit)?);
    }
    Ok(margin)
}
