//! Identities among the outputs that follow from the formulas and need no oracle but the bounds'
//! widths.

use super::flaw::{Flaw, Judgement, worst};
use super::law::{laws, scores_are};
use super::part::Part;
use super::sums::{Known, Sum, input};
use super::trial::Trial;
use super::visible::{Visible, key_heads};
use crate::cases::Case;
use etalon_problem::Axis;
use ndarray::Array3;

laws! {
    SCORES;
    /// Without sinks Σ_j dv_j = Σ_i dout_i over the rows that are not masked.
    Meaning sum_dv = sums_over_keys(["dv", "dout"], |_| (1.0, 0.0)) of ATTENTION on Backward
        if |case, _| has_v(case) && scores_are(case, |scores| !scores.sinks);
    /// Without softcap and sinks Σ_j dk_j = σ Σ_i dlse_i q_i.
    Meaning sum_dk on Backward if |case, _| scores_are(case, |s| !s.sinks && s.softcap.is_none());
    /// ⟨dq, q⟩ = ⟨dk, k⟩ for every key head.
    Meaning euler_qk = euler([("dq", "q"), ("dk", "k")]) on Backward;
    /// ⟨dv, v⟩ = ⟨dout, o⟩ for every key head.
    Meaning euler_vo = euler([("dv", "v"), ("o", "dout")]) on Backward if |case, _| has_v(case);
    /// Without sinks the row sums of dbias are dlse.
    Meaning sum_dbias of ATTENTION on Backward if |case, _| {
        scores_are(case, |scores| {
            let full = [scores.extents.batch, scores.extents.query_heads];
            !scores.sinks && scores.bias.is_some_and(|x| [x.batch, x.heads] == full)
        })
    };
}

pub(super) fn has_v(case: &Case) -> bool {
    case.inputs.contains_key("v")
}

/// ⟨result, input⟩ of every batch element and key head.
fn products(trial: &Trial<'_>, (result, input): (&str, &str)) -> Result<Vec<Sum>, Flaw> {
    let (problem, scores) = (&trial.case.problem, trial.case.scores()?);
    let (known, x) = (Known::of(trial, result)?, trial.case.inputs[input].to_f64(input)?);
    let product = |[b, h]: [usize; 2]| {
        let part = Part::key_head(h, scores.group()).and(Axis::Batch, [b]);
        let [value, bound] = [&known.value, &known.bound].map(|y| part.array(problem, result, y));
        let mut sum = Sum::default();
        sum.add_product([value.view(), bound.view()], part.array(problem, input, &x).view(), 1.0);
        sum
    };
    Ok(key_heads(scores).map(product).collect())
}

/// Two such products that must be one number.
fn euler(trial: &Trial<'_>, pairs: [(&str, &str); 2]) -> Judgement {
    let [left, right] = pairs.map(|pair| products(trial, pair));
    let what = pairs.map(|(result, input)| format!("⟨{result}, {input}⟩")).join(", ");
    let heads = key_heads(trial.case.scores()?).zip(left?.into_iter().zip(right?));
    worst(heads.map(|([b, h], (left, right))| left.meets(right, &format!("{what} of [{b}, {h}]"))))
}

/// A gradient of the keys or values, summed over the keys of each key head, column by column,
/// against the rows of an input that see a key, each times its weight. The weight of an element and
/// how far it is off follow from its place.
pub(super) fn sums_over_keys(
    trial: &Trial<'_>,
    [gradient, rows]: [&str; 2],
    weight: impl Fn([usize; 4]) -> (f64, f64),
) -> Judgement {
    let scores = trial.case.scores()?;
    let visible = Visible::new(scores, &trial.case.inputs);
    let (dk, counts) = (Known::of(trial, gradient)?, visible.counts());
    let x = trial.case.inputs[rows].to_f64(rows)?;
    let columns = key_heads(scores).flat_map(|at| (0..dk.value.shape()[3]).map(move |c| (at, c)));
    worst(columns.map(|([b, h], c)| {
        let mut sums = [Sum::default(); 2];
        for j in 0..dk.value.shape()[2] {
            sums[0].add(dk.value[[b, h, j, c]], 1.0, dk.bound[[b, h, j, c]]);
        }
        for head in visible.heads(h) {
            // Elements of a row that does not count may be anything.
            for i in (0..x.shape()[2]).filter(|&i| counts[[b, head, i]] > 0) {
                let (weight, bound) = weight([b, head, i, c]);
                sums[1].add(weight, x[[b, head, i, c]], bound);
            }
        }
        sums[0].meets(sums[1], &format!("Σ {gradient} of [{b}, {h}], column {c}"))
    }))
}

/// dlse `[B, Hq, N]` of the rows that see a key; of the others 0.
pub(super) fn dlse_of_seeing_rows(trial: &Trial<'_>) -> Result<Array3<f64>, Flaw> {
    let counts = Visible::new(trial.case.scores()?, &trial.case.inputs).counts();
    let dlse = input(&trial.case.inputs, "dlse")?;
    Ok(Array3::from_shape_fn(counts.dim(), |(b, h, i)| match (&dlse, counts[[b, h, i]]) {
        (Some(dlse), 1..) => dlse[[b, h, i]],
        _ => 0.0,
    }))
}

fn sum_dk(trial: &Trial<'_>) -> Judgement {
    let (scale, dlse) = (trial.case.scores()?.scale(), dlse_of_seeing_rows(trial)?);
    sums_over_keys(trial, ["dk", "q"], |[b, h, i, _]| (scale * dlse[[b, h, i]], 0.0))
}

fn sum_dbias(trial: &Trial<'_>) -> Judgement {
    let dbias = Known::of(trial, "dbias")?;
    worst(dlse_of_seeing_rows(trial)?.indexed_iter().map(|((b, h, i), &dlse)| {
        let (mut left, mut right) = (Sum::default(), Sum::default());
        let row = ndarray::s![b, h, i, ..];
        for (x, bound) in dbias.value.slice(row).iter().zip(dbias.bound.slice(row)) {
            left.add(*x, 1.0, *bound);
        }
        right.add(dlse, 1.0, 0.0);
        left.meets(right, &format!("Σ dbias of [{b}, {h}, {i}]"))
    }))
}
