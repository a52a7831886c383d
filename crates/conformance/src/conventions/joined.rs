//! Readings that are made from the results of several problems: parts of a row that are joined by another rule,
//! lse with another part of itself, a mask that acts at another place of the chain.

use super::reading::alone;
use super::tails::of_keys;
use super::{Edit, Original, Reading};
use crate::tensor::Values;
use etalon_problem::{BiasExtents, Mask, Pass, Problem, Scores, Sequence};
use ndarray::{ArrayD, Axis as Along, IxDyn};
use std::f64::consts::{LN_2, LOG2_E};

pub(super) fn all(own: &Original<'_>) -> Vec<Reading> {
    let has_softmax = matches!(own.problem, Problem::Attention(_) | Problem::AttentionLse(_));
    let Some(scores) = own.problem.scores().filter(|_| own.pass == Pass::Forward) else {
        return Vec::new();
    };
    let mut list = of_maximum(own);
    if has_softmax {
        list.extend(halves(own, scores));
        list.extend(after_softmax(own, scores));
        list.extend(hidden_scores(own, scores));
    }
    list
}

/// By so much scores are multiplied, that nothing but the largest of a row counts.
const SHARP: f64 = 1_099_511_627_776.0; // 2⁴⁰

/// lse = max + ln Σ e^{S − max} with another factor of each of the two.
fn of_maximum(own: &Original<'_>) -> Vec<Reading> {
    let mut sharp = Reading::plain("", "", own.problem);
    let Some(scores) = sharp.problem.scores_mut() else { return Vec::new() };
    let scale = scores.scale();
    scores.softmax_scale = Some(SHARP * scale);
    scores.softcap = scores.softcap.map(|cap| SHARP * cap);
    for name in ["bias", "sinks"].into_iter().filter(|name| own.inputs.contains_key(*name)) {
        sharp = sharp.edit(name, Edit::map(|x| SHARP * x));
    }
    let numbers = [
        (0.0, "0"),
        (1.0, "1"),
        (-1.0, "−1"),
        (LN_2, "ln 2"),
        (LOG2_E, "log₂e"),
        (scale, "the scale"),
        (1.0 / scale, "1/the scale"),
    ];
    let mut list = Vec::new();
    for (x, of_max) in numbers {
        for (y, of_sum) in numbers.into_iter().take(5) {
            // One of the two is right, and the other is not.
            if x == y || (x != 1.0 && y != 1.0) {
                continue;
            }
            let id = format!("lse-of-{x:.3}-max-and-{y:.3}-sum");
            let text = format!(
                "`lse` is {of_max} times the maximum of a row plus {of_sum} times ln Σ e^(S − maximum)"
            );
            let exact = Reading::plain("", "", own.problem);
            let join = move |terms: &[Values]| {
                let of = |at: usize| terms.get(at).and_then(|x| x.get("lse"));
                let (Some(lse), Some(sharp)) = (of(0), of(1)) else { return Values::new() };
                let join = |lse: f64, max: f64| match lse.is_finite() {
                    true => x * max + y * (lse - max),
                    false => lse,
                };
                let mut x = lse.clone();
                x.zip_mut_with(sharp, |lse, sharp| *lse = join(*lse, sharp / SHARP));
                alone("lse", x)
            };
            let reading = Reading::plain(id, text, own.problem).of("lse").only(["lse"]);
            list.push(reading.joined([exact, sharp.clone()], join));
        }
    }
    list
}

/// Two halves of the keys that are averaged or added up, whatever their weights.
fn halves(own: &Original<'_>, scores: &Scores) -> Vec<Reading> {
    let half = scores.extents.keys / 2;
    let of = |counts: &dyn Fn(usize) -> bool| of_keys(own, scores, "", "", counts);
    let (Some(first), Some(second)) = (of(&|j| j < half), of(&|j| j >= half)) else {
        return Vec::new();
    };
    let list = [
        ("averaged", "are averaged, whatever their weights", 0.5),
        ("added", "are added up, as if they were not normalised", 1.0),
    ];
    let added = list.map(|(id, text, factor)| {
        let text = format!("`o` of two halves of the keys {text}");
        let reading = Reading::plain(format!("halves-{id}"), text, own.problem).of("keys");
        reading.only(["o"]).sum([(factor, first.clone()), (factor, second.clone())])
    });
    let bases = [
        ("in-base-2", "taken for ones to base 2", LN_2),
        ("base-2", "to base 2 taken for natural ones", LOG2_E),
    ];
    let joined = bases.map(|(id, text, base)| {
        let text = format!("two halves of the keys are joined by `lse`, {text}");
        let reading = Reading::plain(format!("halves-joined-{id}"), text, own.problem).of("keys");
        reading
            .only(["o"])
            .joined([first.clone(), second.clone()], move |terms| by_lse(terms, base))
    });
    added.into_iter().chain(joined).collect()
}

/// o of two parts, by what e^{base·lse} says of their weights.
fn by_lse(terms: &[Values], base: f64) -> Values {
    let of = |at: usize, name: &str| terms.get(at).and_then(|x| x.get(name));
    let (Some(x), Some(y)) = (of(0, "o"), of(1, "o")) else { return Values::new() };
    let (Some(of_x), Some(of_y)) = (of(0, "lse"), of(1, "lse")) else { return Values::new() };
    let mut weight = of_x.clone();
    weight.zip_mut_with(of_y, |x, y| {
        *x = match (x.is_finite(), y.is_finite()) {
            (true, true) => 1.0 / (1.0 + (base * (*y - *x)).exp()),
            (one, _) => f64::from(u8::from(one)),
        };
    });
    let weight = weight.insert_axis(Along(3));
    alone("o", x * &weight + y * &weight.mapv(|x| 1.0 - x))
}

/// Weights that are hidden after they were normalised over every key.
fn after_softmax(own: &Original<'_>, scores: &Scores) -> Vec<Reading> {
    if scores.mask == Mask::Full {
        return Vec::new();
    }
    let mut all = Reading::plain("", "", own.problem);
    all.problem.scores_mut().into_iter().for_each(|scores| scores.mask = Mask::Full);
    let join = |terms: &[Values]| {
        let of = |at: usize, name: &str| terms.get(at).and_then(|x| x.get(name));
        let (Some(lse), Some(all)) = (of(0, "lse"), of(1, "lse")) else { return Values::new() };
        let mut results = alone("lse", all.clone());
        if let Some(o) = of(0, "o") {
            let mut factor = lse - all;
            factor.mapv_inplace(|x| if x.is_nan() { 0.0 } else { x.exp() });
            results.insert("o".to_string(), o * &factor.insert_axis(Along(3)));
        }
        results
    };
    let text = "weights are masked after they were normalised over every key";
    let reading = Reading::plain("mask-after-softmax", text, own.problem).of("mask");
    let mut list = vec![reading.joined([Reading::plain("", "", own.problem), all.clone()], join)];
    // lse may be right.
    let mut of_o = list[0].clone().only(["o"]);
    of_o.id = "mask-after-softmax-of-o".to_string();
    list.push(of_o);
    list
}

/// The most pairs of a bias that is made for a reading.
const PAIRS: usize = 1 << 20;

/// Pairs that a mask hides with a score that is no −∞: 0, or what a cap makes of −∞.
fn hidden_scores(own: &Original<'_>, scores: &Scores) -> Vec<Reading> {
    let e = &scores.extents;
    let (Some(q), Some(k)) = (own.inputs.get("q"), own.inputs.get("k")) else { return Vec::new() };
    let pairs = [e.batch, e.query_heads, e.queries, e.keys];
    let few = pairs.iter().try_fold(1, |all: usize, x| all.checked_mul(*x));
    if scores.mask == Mask::Full || few.is_none_or(|all| all > PAIRS) {
        return Vec::new();
    }
    let mut list =
        vec![("mask-as-zero", "is multiplied with the scores: a hidden key has score 0", 0.0)];
    list.extend(scores.softcap.map(|cap| {
        ("mask-before-softcap", "comes before the softcap: a hidden key has score −c", -cap)
    }));
    let hidden = hidden(scores, q, k);
    let given = own.inputs.get("bias");
    let reading = |(id, text, number): (&str, &str, f64)| {
        let mut reading = Reading::plain(id, format!("`mask` {text}"), own.problem).of("mask");
        let scores = reading.problem.scores_mut()?;
        scores.mask = Mask::Full;
        scores.bias = Some(BiasExtents { batch: e.batch, heads: e.query_heads });
        let bias = ArrayD::from_shape_fn(IxDyn(&pairs), |at| {
            let own = given.map_or(0.0, |bias| {
                bias[[at[0] % bias.shape()[0], at[1] % bias.shape()[1], at[2], at[3]]]
            });
            if hidden[&at].is_nan() { own } else { own + number - hidden[&at] }
        });
        Some(reading.edit("bias", Edit::Replace(bias.into())))
    };
    list.into_iter().filter_map(reading).collect()
}

/// The capped score of every pair that the mask hides; NaN of the others.
fn hidden(scores: &Scores, q: &ArrayD<f64>, k: &ArrayD<f64>) -> ArrayD<f64> {
    let (e, scale) = (&scores.extents, scores.scale());
    let mut all = ArrayD::from_elem(IxDyn(&[e.batch, e.query_heads, e.queries, e.keys]), f64::NAN);
    let score = |b: usize, h: usize, i: usize, j: usize| {
        let products = (0..e.dim).map(|c| q[[b, h, i, c]] * k[[b, h / scores.group(), j, c]]);
        let s = scale * products.sum::<f64>();
        scores.softcap.map_or(s, |cap| cap * (s / cap).tanh())
    };
    for Sequence { batch, query_start, queries, key_start, keys } in scores.sequences() {
        let sequence = Sequence { batch, query_start, queries, key_start, keys };
        for (h, i) in (0..e.query_heads).flat_map(|h| (0..queries).map(move |i| (h, i))) {
            for j in (0..keys).filter(|&j| !scores.mask.allows(&sequence, h, i, j)) {
                let (row, key) = (query_start + i, key_start + j);
                all[[batch, h, row, key]] = score(batch, h, row, key);
            }
        }
    }
    all
}
