//! Readings of linear attention that no other problem has: a token's decay comes before or after its key, its
//! own key counts twice or not at all, and chunks that do not know of each other.

use super::tails::TILES;
use super::{Edit, Original, Reading};
use etalon_problem::{Axis, Decay, LinearAttention, Pass, Problem};
use ndarray::{ArrayD, IxDyn};
use std::sync::Arc;

pub(super) fn all(own: &Original<'_>) -> Vec<Reading> {
    let Problem::LinearAttention(problem) = own.problem else { return Vec::new() };
    let Some(g) = log_decays(own, problem) else { return Vec::new() };
    let mut list = orders(own, problem, &g);
    list.extend(initial_states(own, problem, &g));
    list.extend(chunks(own, problem, &g));
    list
}

/// The log-decay of every token, [B, Hk, N].
fn log_decays(own: &Original<'_>, problem: &LinearAttention) -> Option<ArrayD<f64>> {
    let e = &problem.extents;
    let shape = IxDyn(&[e.batch, e.key_heads, e.tokens]);
    let by_head = own.inputs.get("g_gamma");
    let by_token = own.inputs.get("g");
    Some(match problem.decay {
        Decay::None => ArrayD::zeros(shape),
        Decay::PerHead => {
            let by_head = by_head?;
            ArrayD::from_shape_fn(shape, |at| by_head[[at[1]]])
        }
        Decay::PerToken => by_token?.clone(),
    })
}

/// The problem with a log-decay for every token.
fn with_decays(own: &Original<'_>, problem: &LinearAttention, g: ArrayD<f64>) -> Reading {
    let problem = LinearAttention { decay: Decay::PerToken, ..problem.clone() };
    Reading::plain("", "", &problem.into()).edit("g", Edit::Replace(g.into())).only(compared(own))
}

/// Properties in which problems with other decays are alike.
fn compared(own: &Original<'_>) -> Vec<&'static str> {
    match own.pass {
        Pass::Backward => vec!["dq", "dk", "dv"],
        _ => vec!["o"],
    }
}

/// Every token by itself.
fn tokens_alone(own: &Original<'_>, problem: &LinearAttention) -> Reading {
    let e = &problem.extents;
    let shape = IxDyn(&[e.batch, e.key_heads, e.tokens]);
    let reading = with_decays(own, problem, ArrayD::from_elem(shape, f64::NEG_INFINITY));
    // The last token's contribution to the state is none of its output.
    reading.edit("dfinal_state", Edit::Drop)
}

/// The output, or its cotangent, times e^{±g} of its token.
fn with_factor(own: &Original<'_>, reading: Reading, g: &ArrayD<f64>, sign: f64) -> Reading {
    let group = own.problem.extent(Axis::QueryHeads) / own.problem.extent(Axis::KeyHeads).max(1);
    let mut shape = g.shape().to_vec();
    shape[1] *= group;
    let factor = ArrayD::from_shape_fn(shape, |at| (sign * g[[at[0], at[1] / group, at[2]]]).exp());
    let of = if own.pass == Pass::Backward { "dout" } else { "q" };
    reading.edit(of, Edit::Rows(factor.into()))
}

/// A token's output, its key and its decay in another order.
fn orders(own: &Original<'_>, problem: &LinearAttention, g: &ArrayD<f64>) -> Vec<Reading> {
    if !matches!(own.pass, Pass::Forward | Pass::Backward) {
        return Vec::new();
    }
    let exact = || {
        let exact = Reading::plain("", "", own.problem).only(compared(own));
        exact.edit("dfinal_state", Edit::Drop)
    };
    let alone = || tokens_alone(own, problem);
    let plain = |id: &str, text: &str| Reading::plain(id, text, own.problem).of("decay");
    let mut list = vec![
        plain("token-excluded", "a token reads the state before its own key is added")
            .sum([(1.0, exact()), (-1.0, alone())]),
        plain("token-counted-twice", "a token's own key counts twice")
            .sum([(1.0, exact()), (1.0, alone())]),
    ];
    if own.inputs.contains_key("dfinal_state") {
        // Its contribution to the gradients is not divided among tokens.
        list.clear();
    }
    let decays = g.iter().any(|g| *g != 0.0) && g.iter().all(|g| g.is_finite());
    if !decays {
        return list;
    }
    if !own.inputs.contains_key("dfinal_state") {
        for (id, text, sign) in [
            ("decay-one-less", "what came before a token is decayed once too little", -1.0),
            ("decay-one-more", "what came before a token is decayed once too often", 1.0),
        ] {
            let scaled = |x| with_factor(own, x, g, sign);
            let terms = [(1.0, scaled(exact())), (1.0, alone()), (-1.0, scaled(alone()))];
            list.push(plain(id, text).sum(terms));
        }
    }
    if own.pass == Pass::Forward {
        list.push(growing(own, problem, g));
        let factor: Arc<ArrayD<f64>> = Arc::new(g.mapv(f64::exp));
        let text = "a token's key is added before the state is decayed, and decays with it";
        list.push(plain("decay-after-key", text).edit("k", Edit::Rows(factor)));
        let factor: Arc<ArrayD<f64>> = Arc::new(g.mapv(|g| 1.0 - g.exp()));
        let text = "a token's key is multiplied by 1 minus its decay";
        list.push(plain("key-by-gate", text).edit("k", Edit::Rows(factor)));
    }
    list
}

/// States that grow by e^{−g}: without decays, a query times e^{−G} and a key times e^{G} of the sum G of
/// log-decays up to its token.
fn growing(own: &Original<'_>, problem: &LinearAttention, g: &ArrayD<f64>) -> Reading {
    let mut sums = g.clone();
    sums.accumulate_axis_inplace(ndarray::Axis(2), |last, sum| *sum += last);
    let text = "the exponent of the decay has the other sign: states grow";
    let problem = LinearAttention { decay: Decay::None, ..problem.clone() };
    let reading = Reading::plain("decay-inverted", text, &problem.into()).of("decay").only(["o"]);
    let keys = Edit::Rows(Arc::new(sums.mapv(f64::exp)));
    with_factor(own, reading.edit("k", keys), &sums, -1.0)
}

/// The initial state decays once more or less than it should.
fn initial_states(own: &Original<'_>, problem: &LinearAttention, g: &ArrayD<f64>) -> Vec<Reading> {
    let first: Option<Vec<ArrayD<f64>>> = problem
        .list_sequences()
        .iter()
        .filter(|s| s.tokens > 0)
        .map(|s| {
            let of = g.index_axis(ndarray::Axis(0), s.batch);
            Some(of.index_axis(ndarray::Axis(1), s.start).to_owned())
        })
        .collect();
    let Some(first) = first.filter(|x| {
        x.len() == problem.list_sequences().len() && own.inputs.contains_key("initial_state")
    }) else {
        return Vec::new();
    };
    if own.pass != Pass::Forward || !first.iter().flatten().all(|g| g.is_finite() && *g != 0.0) {
        return Vec::new();
    }
    let shape = [first.len(), problem.extents.key_heads];
    let of =
        |sign: f64| ArrayD::from_shape_fn(IxDyn(&shape), |at| (sign * first[at[0]][[at[1]]]).exp());
    [
        ("initial-state-undecayed", "the first token does not decay the initial state", -1.0),
        ("initial-state-decayed-twice", "the first token decays the initial state twice", 1.0),
    ]
    .into_iter()
    .map(|(id, text, sign)| {
        let reading = Reading::plain(id, text, own.problem).of("initial_state");
        reading.edit("initial_state", Edit::Rows(of(sign).into()))
    })
    .collect()
}

/// Chunks without what came before them, and without what is within them.
fn chunks(own: &Original<'_>, problem: &LinearAttention, g: &ArrayD<f64>) -> Vec<Reading> {
    let packed = matches!(problem.sequences, etalon_problem::TokenSequences::Packed { .. });
    if packed || own.inputs.contains_key("dfinal_state") {
        return Vec::new();
    }
    let tokens = problem.extents.tokens;
    let mut list = Vec::new();
    for chunk in TILES.into_iter().filter(|&chunk| tokens > chunk) {
        let alone = || {
            let g = ArrayD::from_shape_fn(g.raw_dim(), |at| {
                if at[2].is_multiple_of(chunk) { f64::NEG_INFINITY } else { g[at] }
            });
            with_decays(own, problem, g)
        };
        let mut reading = alone().of("tokens");
        reading.id = format!("chunks-of-{chunk}-alone");
        reading.text = format!("chunks of {chunk} do not read the state before them");
        list.push(reading);
        let exact = Reading::plain("", "", own.problem).only(compared(own));
        let text = format!("the tokens of a chunk of {chunk} read the state before it alone");
        let id = format!("chunks-of-{chunk}-without-own");
        let reading = Reading::plain(id, text, own.problem).of("tokens");
        list.push(reading.sum([(1.0, exact), (-1.0, alone())]));
    }
    list
}
