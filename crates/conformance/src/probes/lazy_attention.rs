//! The probes of lazy_attention: rows of one key, whose weight is exactly 1, and rows in which the
//! bias gives one key all the weight. With τ and 1/n binary fractions, e is one, too.

use super::inputs::{fill, place, skeleton};
use crate::generate::Stream;
use crate::laws::flaw::{Flaw, Judgement};
use crate::laws::select::with_scores;
use crate::laws::tensors::exceeds;
use crate::laws::trial::Trial;
use crate::laws::visible::Visible;
use crate::tensor::Tensors;
use crate::tier::Hints;
use etalon_problem::{DistanceBias, Dtype, Error, Mask, Pass, Problem, Scores};
use ndarray::{ArrayD, IxDyn};
use std::collections::BTreeMap;

/// A sum, and the sum of its terms' sizes where it need not come out to the last bit.
type Expected = BTreeMap<&'static str, (ArrayD<f64>, Option<ArrayD<f64>>)>;

/// Fails unless every result is the expected one, rounded once to its storage type; sums that a
/// kernel may round on the way have 64 roundings of room.
fn compare(outputs: &Tensors, expected: Expected, skip: impl Fn(&[usize]) -> bool) -> Judgement {
    for (name, (expected, sizes)) in expected {
        let tensor = &outputs[name];
        let (got, dtype) = (tensor.to_f64(name)?, tensor.dtype().unwrap_or(Dtype::F64));
        for (index, &exact) in expected.indexed_iter() {
            let at = ndarray::Dimension::slice(&index);
            if matches!(name, "o" | "lse" | "dq") && skip(at) {
                continue;
            }
            let rounded = dtype.round(exact);
            let room = sizes
                .as_ref()
                .map_or(0.0, |sizes| 64.0 * Dtype::F32.unit_roundoff() * sizes[IxDyn(at)]);
            let room = if exact == 0.0 { room + super::edge::NOTHING } else { room };
            if got[IxDyn(at)] != rounded && exceeds((got[IxDyn(at)] - rounded).abs(), room) {
                let text = format!("{name}{at:?} = {:e}, expected {rounded:e}", got[IxDyn(at)]);
                return Err(Flaw::Fail(text));
            }
        }
    }
    Ok(None)
}

/// The case's structure without its bias, unless the probe has one of its own.
fn structure(
    trial: &Trial<'_>,
    reach: impl Fn(Option<DistanceBias>, usize) -> Option<DistanceBias>,
) -> Result<(Problem, Scores, Option<DistanceBias>), Error> {
    let (mut problem, scores) = skeleton(trial.case)?;
    let mut found = None;
    if let Problem::LazyAttention(lazy) = &mut problem {
        lazy.bias = reach(lazy.bias, scores.extents.keys);
        found = lazy.bias;
    }
    Ok((problem, scores, found))
}

/// τ of the heads in turn: below, on and above the kink of a row of one key.
const AROUND_THE_KINK: [f64; 5] = [-1.0, -0.5, 0.0, 1.0, -2.0];

/// Every row sees its aligned key alone: P = 1, so that o = (1 + τ) v or 0, dS = dlse, and dtau the
/// sum of dout·v over the heads above the kink. All operands are small integers.
pub(super) fn kink(trial: &Trial<'_>) -> Judgement {
    let case = trial.case;
    let (problem, scores, _) = structure(trial, |_, _| None)?;
    let scores = Scores { mask: Mask::window(0, 0), ..scores };
    let problem = with_scores(&problem, scores.clone());
    let stream = Stream::new(case.spec.seed, "kink_probe");
    let small = |salt, at: &[usize]| stream.integer(place(salt, at), -2, 2) as f64;
    let inputs = fill(case, &problem, trial.pass, |name, at| match name {
        "tau" => AROUND_THE_KINK[at[0] % AROUND_THE_KINK.len()],
        "q" => small(1, at),
        "k" => small(2, at),
        "v" => small(3, at),
        "dout" => small(4, at),
        _ => 8.0 * small(5, at),
    });
    let array = |name: &str| inputs[name].to_f64(name);
    let visible = Visible::new(&scores, &inputs);
    let (tau, q, k, v) = (array("tau")?, array("q")?, array("k")?, array("v")?);
    let e = scores.extents;
    let width = v.shape()[3];
    let zeros = |shape: &[usize]| ArrayD::<f64>::zeros(IxDyn(shape));
    let mut o = zeros(&[e.batch, e.query_heads, e.queries, width]);
    let mut lse = zeros(&scores.row_shape());
    lse.fill(f64::NEG_INFINITY);
    let mut dq = zeros(&scores.q_shape());
    let mut dk = zeros(&scores.k_shape());
    let mut dv = zeros(&[e.batch, e.key_heads, e.keys, width]);
    let mut dtau = zeros(&[e.query_heads]);
    let backward = trial.pass == Pass::Backward;
    let dout = if backward { Some(array("dout")?) } else { None };
    let dlse = if inputs.contains_key("dlse") { Some(array("dlse")?) } else { None };
    for ((b, h, i, j), _) in visible.pairs.indexed_iter().filter(|(_, seen)| **seen) {
        let (kh, weight) = (h / visible.group(), (1.0 + tau[[h]]).max(0.0));
        let score: f64 = (0..e.dim).map(|c| q[[b, h, i, c]] * k[[b, kh, j, c]]).sum();
        lse[[b, h, i]] = 0.125 * score;
        for c in 0..width {
            o[[b, h, i, c]] = weight * v[[b, kh, j, c]];
            if let Some(dout) = &dout {
                dv[[b, kh, j, c]] += weight * dout[[b, h, i, c]];
                if weight > 0.0 {
                    dtau[[h]] += dout[[b, h, i, c]] * v[[b, kh, j, c]];
                }
            }
        }
        let ds = dlse.as_ref().map_or(0.0, |dlse| 0.125 * dlse[[b, h, i]]);
        for c in 0..e.dim {
            dq[[b, h, i, c]] = ds * k[[b, kh, j, c]];
            dk[[b, kh, j, c]] += ds * q[[b, h, i, c]];
        }
    }
    let outputs = trial.ask(&problem, &inputs, Hints::default())?;
    let exact = |list: Vec<(&'static str, ArrayD<f64>)>| -> Expected {
        list.into_iter().map(|(name, x)| (name, (x, None))).collect()
    };
    let expected = match backward {
        false => exact(vec![("o", o), ("lse", lse)]),
        true => exact(vec![("dq", dq), ("dk", dk), ("dv", dv), ("dtau", dtau)]),
    };
    compare(&outputs, expected, |_| false)
}

/// q is 0 and the bias climbs by 110 with each distance: each row's weight lies on the farthest
/// visible key that it reaches. Where n is a power of two, o = (1 + τ/n) v there (and for τ > 0 τ/n
/// times the other values), lse is that bias, dS is dlse there and 0 elsewhere.
pub(super) fn reach(trial: &Trial<'_>) -> Judgement {
    for (tau, addresses) in [(-0.5, 256), (0.5, 8)] {
        one_way(trial, tau, addresses)?;
    }
    Ok(None)
}

fn one_way(trial: &Trial<'_>, tau: f64, addresses: usize) -> Judgement {
    let case = trial.case;
    let stream = Stream::new(case.spec.seed, "reach_probe");
    let own = |bias: Option<DistanceBias>, keys: usize| {
        bias.or(Some(DistanceBias { width: keys.max(1), align: Default::default() }))
    };
    let (problem, scores, reach) = structure(trial, own)?;
    let Some(reach) = reach else { return Ok(None) };
    let visible = Visible::new(&scores, &Tensors::new());
    let counts = visible.counts();
    let edges = edges(&scores, &visible, reach);
    let counted = |row: &[usize]| {
        edges.contains_key(&[row[0], row[1], row[2]])
            && counts[[row[0], row[1], row[2]]].is_power_of_two()
    };
    let small = |salt, at: &[usize]| stream.integer(place(salt, at), -2, 2) as f64;
    let inputs = fill(case, &problem, trial.pass, |name, at| match name {
        "tau" => tau,
        "bias" => 110.0 * (at[1] + 1) as f64,
        "k" => small(2, at),
        // Neighbours in every direction differ.
        "v" => (1 + (7 * at[2] + 31 * at[1] + 57 * at[0] + 13 * at[3]) % addresses) as f64,
        // Of two columns, so that the sums stay exact whatever E.
        "dout" if at[3] < 2 && counted(at) => small(4, at),
        "dlse" if counted(at) => 8.0 * small(5, at),
        _ => 0.0,
    });
    let outputs = trial.ask(&problem, &inputs, Hints::default())?;
    let expected = match trial.pass {
        Pass::Forward => forward(&inputs, &visible, &edges, tau)?,
        _ => backward(&scores, &inputs, &visible, &edges, tau, reach.width)?,
    };
    compare(&outputs, expected, |at| trial.pass == Pass::Forward && !counted(at))
}

/// Of every row that reaches a visible key: the farthest one with its distance.
type Edges = BTreeMap<[usize; 3], (usize, usize)>;

fn edges(scores: &Scores, visible: &Visible, reach: DistanceBias) -> Edges {
    let mut edges = Edges::new();
    for s in scores.sequences() {
        for h in 0..scores.extents.query_heads {
            for i in 0..s.queries {
                let row = [s.batch, h, s.query_start + i];
                let seen = |j: &usize| visible.pairs[[row[0], h, row[2], s.key_start + j]];
                let far = (0..s.keys)
                    .filter(seen)
                    .filter_map(|j| reach.distance(&s, i, j).map(|d| (d, s.key_start + j)));
                if let Some((d, key)) = far.max() {
                    edges.insert(row, (key, d));
                }
            }
        }
    }
    edges
}

fn forward(inputs: &Tensors, visible: &Visible, edges: &Edges, tau: f64) -> Result<Expected, Flaw> {
    let v = inputs["v"].to_f64("v")?;
    let (batch, heads, queries, keys) = visible.pairs.dim();
    let mut o = ArrayD::zeros(IxDyn(&[batch, heads, queries, v.shape()[3]]));
    let mut lse = ArrayD::from_elem(IxDyn(&[batch, heads, queries]), f64::NEG_INFINITY);
    let counts = visible.counts();
    for (&[b, h, i], &(edge, d)) in edges {
        lse[[b, h, i]] = 110.0 * (d + 1) as f64;
        let offset = tau / counts[[b, h, i]] as f64;
        for j in (0..keys).filter(|&j| visible.pairs[[b, h, i, j]]) {
            let weight = (f64::from(j == edge) + offset).max(0.0);
            for c in 0..v.shape()[3] {
                o[[b, h, i, c]] += weight * v[[b, h / visible.group(), j, c]];
            }
        }
    }
    Ok(BTreeMap::from([("o", (o, None)), ("lse", (lse, None))]))
}

fn backward(
    scores: &Scores,
    inputs: &Tensors,
    visible: &Visible,
    edges: &Edges,
    tau: f64,
    width: usize,
) -> Result<Expected, Flaw> {
    let array = |name: &str| inputs[name].to_f64(name);
    let (k, v, dout) = (array("k")?, array("v")?, array("dout")?);
    let dlse = if inputs.contains_key("dlse") { Some(array("dlse")?) } else { None };
    let e = scores.extents;
    let zeros = |shape: &[usize]| ArrayD::<f64>::zeros(IxDyn(shape));
    let (mut dq, dk) = (zeros(&scores.q_shape()), zeros(&scores.k_shape()));
    let mut dv = zeros(v.shape());
    let mut dbias = zeros(&[e.query_heads, width]);
    let (mut dtau, mut sizes) = (zeros(&[e.query_heads]), zeros(&[e.query_heads]));
    let counts = visible.counts();
    for (&[b, h, i], &(edge, d)) in edges {
        let (kh, n) = (h / visible.group(), counts[[b, h, i]] as f64);
        let direct = dlse.as_ref().map_or(0.0, |dlse| dlse[[b, h, i]]);
        dbias[[h, d]] += direct;
        for c in 0..e.dim {
            dq[[b, h, i, c]] = 0.125 * direct * k[[b, kh, edge, c]];
        }
        for j in (0..e.keys).filter(|&j| visible.pairs[[b, h, i, j]]) {
            let weight = (f64::from(j == edge) + tau / n).max(0.0);
            for c in (0..v.shape()[3]).filter(|_| weight > 0.0) {
                dv[[b, kh, j, c]] += weight * dout[[b, h, i, c]];
                let g = dout[[b, h, i, c]] * v[[b, kh, j, c]] / n;
                dtau[[h]] += g;
                sizes[[h]] += g.abs();
            }
        }
    }
    Ok(BTreeMap::from([
        ("dq", (dq, None)),
        ("dk", (dk, None)),
        ("dv", (dv, None)),
        ("dbias", (dbias, None)),
        ("dtau", (dtau, Some(sizes))),
    ]))
}
