//! Resets forget, padding does not exist, nothing looks ahead.

use super::cases::{Case, Gates, cases, packed, problem, with_all};
use super::tensors::{PASSES, Random, Tensors, assert_all_same, assert_same, run, run_chunked};
use etalon_problem::{Decay, Pass, TokenSequences};
use ndarray::{ArrayD, Axis, IxDyn, arr0};

fn tensor(shape: &[usize], values: &[f64]) -> ArrayD<f64> {
    ArrayD::from_shape_vec(IxDyn(shape), values.to_vec()).expect("values for the shape")
}

fn named(list: &[(&str, ArrayD<f64>)]) -> Tensors<f64> {
    list.iter().map(|(name, x)| (name.to_string(), x.clone())).collect()
}

/// D = E = 1: H_1 = ½·3 + 2·1 = 3.5, H_2 = ½·3.5 + 1·4 = 5.75; o = 2 q H.
/// D_2 = 7 + 2·3·1 = 13, D_1 = ½·13 + 2·1·1 = 8.5, dH_0 = ½·8.5.
#[test]
fn two_tokens_by_hand() {
    let problem = with_all(problem([1, 1, 1, 2, 1, 1]), Decay::PerToken).scale(2.0);
    let half = -std::f64::consts::LN_2;
    let x = named(&[
        ("q", tensor(&[1, 1, 2, 1], &[1.0, 3.0])),
        ("k", tensor(&[1, 1, 2, 1], &[2.0, 1.0])),
        ("v", tensor(&[1, 1, 2, 1], &[1.0, 4.0])),
        ("g", tensor(&[1, 1, 2], &[half, half])),
        ("initial_state", tensor(&[1, 1, 1, 1], &[3.0])),
        ("dout", tensor(&[1, 1, 2, 1], &[1.0, 1.0])),
        ("dfinal_state", tensor(&[1, 1, 1, 1], &[7.0])),
    ]);
    let y = named(&[
        ("o", tensor(&[1, 1, 2, 1], &[7.0, 34.5])),
        ("final_state", tensor(&[1, 1, 1, 1], &[5.75])),
    ]);
    assert_all_same(&run(&problem, Pass::Forward, &x).expect("a result"), &y, "forward");
    let d = named(&[
        ("dq", tensor(&[1, 1, 2, 1], &[7.0, 11.5])),
        ("dk", tensor(&[1, 1, 2, 1], &[8.5, 52.0])),
        ("dv", tensor(&[1, 1, 2, 1], &[17.0, 13.0])),
        ("dg", tensor(&[1, 1, 2], &[12.75, 22.75])),
        ("dinitial_state", tensor(&[1, 1, 1, 1], &[4.25])),
        ("dscale", arr0(20.75).into_dyn()),
    ]);
    assert_all_same(&run(&problem, Pass::Backward, &x).expect("a result"), &d, "backward");
}

/// The tokens of each batch element that lie in a sequence.
fn covered(case: &Case) -> ArrayD<bool> {
    let e = case.problem.extents;
    let mut covered = ArrayD::from_elem(vec![e.batch, e.tokens], false);
    for s in case.problem.list_sequences() {
        (s.start..s.start + s.tokens).for_each(|t| covered[[s.batch, t]] = true);
    }
    covered
}

/// True if an operand or result has an axis of tokens, the third.
fn by_token(name: &str) -> bool {
    !name.ends_with("state") && !name.ends_with("g_gamma") && !name.ends_with("scale")
}

fn fill(x: &mut ArrayD<f64>, batch: usize, tokens: std::ops::Range<usize>, value: f64) {
    let mut element = x.index_axis_mut(Axis(0), batch);
    element.slice_axis_mut(Axis(1), tokens.into()).fill(value);
}

fn both_forms(case: &Case, pass: Pass, x: &Tensors<f64>) -> Vec<Tensors<f64>> {
    let mut results = vec![run(&case.problem, pass, x).expect(&case.name)];
    if pass != Pass::DoubleBackward {
        results.push(run_chunked(&case.problem, pass, x, 2).expect(&case.name));
    }
    results
}

const ARRAY_PASSES: [Pass; 3] = [Pass::Forward, Pass::Backward, Pass::DoubleBackward];

/// Padding may hold anything, log-decays that are none included; results there are 0.
#[test]
fn padding_does_not_exist() {
    for case in cases() {
        let covered = covered(&case);
        for pass in ARRAY_PASSES {
            let clean = case.operands(pass, 51);
            let expected = both_forms(&case, pass, &clean);
            for poison in [f64::NAN, f64::INFINITY] {
                let mut x = clean.clone();
                for (place, _) in covered.indexed_iter().filter(|(_, covered)| !**covered) {
                    for (_, x) in x.iter_mut().filter(|(name, _)| by_token(name)) {
                        fill(x, place[0], place[1]..place[1] + 1, poison);
                    }
                }
                for (found, expected) in both_forms(&case, pass, &x).iter().zip(&expected) {
                    assert_all_same(found, expected, &case.name);
                    for (result, found) in found.iter().filter(|(name, _)| by_token(name)) {
                        for (place, &covered) in covered.indexed_iter() {
                            let token = found.index_axis(Axis(0), place[0]);
                            let token = token.index_axis(Axis(1), place[1]);
                            assert!(covered || token.iter().all(|&x| x == 0.0), "{result}");
                        }
                    }
                }
            }
        }
    }
}

/// A sequence without tokens hands its state on, and the gradient by it back.
#[test]
fn an_empty_sequence_keeps_its_state() {
    for case in cases() {
        let x = case.operands(Pass::Backward, 52);
        let y = run(&case.problem, Pass::Forward, &x).expect(&case.name);
        let d = run(&case.problem, Pass::Backward, &x).expect(&case.name);
        for s in case.problem.list_sequences().iter().filter(|s| s.tokens == 0) {
            let pairs = [
                (y.get("final_state"), x.get("initial_state")),
                (d.get("dinitial_state"), x.get("dfinal_state")),
            ];
            for (after, before) in pairs {
                if let (Some(after), Some(before)) = (after, before) {
                    let state = |x: &ArrayD<f64>| x.index_axis(Axis(0), s.index).to_owned();
                    assert_same(&state(after), &state(before), &case.name);
                }
            }
        }
    }
}

/// A reset at token r: what comes before may be NaN or ∞ and nothing after it notices, nor do the
/// gradients before notice what comes after. The reset's own gradient is 0, and so is its second.
#[test]
fn a_reset_forgets_everything() {
    for reset in 0..5 {
        let problem = with_all(problem([2, 4, 2, 5, 3, 2]), Decay::PerToken);
        let case = Case { name: format!("reset at {reset}"), problem, gates: Gates::Usual };
        for pass in ARRAY_PASSES {
            let mut clean = case.operands(pass, 53);
            fill(clean.get_mut("g").expect("g"), 0, reset..reset + 1, f64::NEG_INFINITY);
            let mut poisoned = clean.clone();
            for (name, x) in &mut poisoned {
                let finite = ["g"].contains(&name.as_str());
                match name.as_str() {
                    _ if finite => {}
                    "initial_state" | "ddinitial_state" => {
                        x.index_axis_mut(Axis(0), 0).fill(f64::NAN);
                    }
                    name if by_token(name) => fill(x, 0, 0..reset, f64::INFINITY),
                    _ => {}
                }
            }
            // The cotangent ddg of the reset itself is not read.
            poisoned
                .get_mut("ddg")
                .into_iter()
                .for_each(|x| fill(x, 0, reset..reset + 1, f64::NAN));
            let (expected, found) =
                (both_forms(&case, pass, &clean), both_forms(&case, pass, &poisoned));
            for (expected, found) in expected.iter().zip(&found) {
                for (result, expected) in expected {
                    let found = &found[result];
                    let what = format!("{}: {result}", case.name);
                    if by_token(result) {
                        let after =
                            |x: &ArrayD<f64>| x.slice_axis(Axis(2), (reset..).into()).to_owned();
                        assert_same(&after(found), &after(expected), &what);
                    } else if ["final_state", "gdfinal_state"].contains(&result.as_str()) {
                        assert_same(found, expected, &what);
                    }
                    if ["dg", "gg"].contains(&result.as_str()) {
                        let here = found.index_axis(Axis(2), reset);
                        assert!(here.index_axis(Axis(0), 0).iter().all(|&x| x == 0.0), "{what}");
                    }
                }
            }
            nothing_after_a_reset_reaches_back(&case, pass, &clean, reset);
        }
    }
}

/// The other direction: poison at and after the reset leaves all results before it alone.
fn nothing_after_a_reset_reaches_back(case: &Case, pass: Pass, clean: &Tensors<f64>, reset: usize) {
    let mut poisoned = clean.clone();
    for (name, x) in &mut poisoned {
        match name.as_str() {
            "g" => {}
            "dfinal_state" | "cot_final_state" => x.index_axis_mut(Axis(0), 0).fill(f64::NAN),
            name if by_token(name) => fill(x, 0, reset..5, f64::NAN),
            _ => {}
        }
    }
    let (expected, found) = (both_forms(case, pass, clean), both_forms(case, pass, &poisoned));
    for (expected, found) in expected.iter().zip(&found) {
        for (result, expected) in expected {
            let what = format!("{}: {result}", case.name);
            if by_token(result) {
                let before = |x: &ArrayD<f64>| x.slice_axis(Axis(2), (..reset).into()).to_owned();
                assert_same(&before(&found[result]), &before(expected), &what);
            } else if ["dinitial_state", "ginitial_state"].contains(&result.as_str()) {
                assert_same(&found[result], expected, &what);
            }
        }
    }
}

/// e^{−∞} per head: no token sees another, o = σ (q·k) v, and the states keep the last one alone.
#[test]
fn a_head_that_forgets_everything_sees_only_the_token_itself() {
    let problem = with_all(problem([1, 1, 1, 4, 2, 2]), Decay::PerHead).scale(0.5);
    let case = Case { name: "forgets".to_string(), problem, gates: Gates::Usual };
    let mut x = case.operands(Pass::Backward, 54);
    x.get_mut("g_gamma").expect("g_gamma").fill(f64::NEG_INFINITY);
    x.get_mut("initial_state").expect("a state").fill(f64::NAN);
    for y in both_forms(&case, Pass::Forward, &x) {
        for t in 0..4 {
            let score: f64 = (0..2).map(|d| x["q"][[0, 0, t, d]] * x["k"][[0, 0, t, d]]).sum();
            for e in 0..2 {
                let expected = 0.5 * score * x["v"][[0, 0, t, e]];
                let error = (y["o"][[0, 0, t, e]] - expected).abs();
                assert!(error <= 4.0 * f64::EPSILON, "off by {error:e}"); // a few roundings below 4
            }
        }
        let last = x["k"][[0, 0, 3, 1]] * x["v"][[0, 0, 3, 0]];
        assert_eq!(y["final_state"][[0, 0, 1, 0]], last);
    }
    for d in both_forms(&case, Pass::Backward, &x) {
        assert_eq!(d["dg_gamma"][[0]], 0.0);
        assert!(d["dinitial_state"].iter().all(|&x| x == 0.0));
        assert!(d["dk"].iter().all(|x| x.is_finite()));
    }
}

/// NaN in one token of q, k or v reaches exactly the outputs that see it.
#[test]
fn nothing_looks_ahead() {
    for case in cases().into_iter().filter(|case| case.gates == Gates::Usual) {
        let covered = covered(&case);
        let places: Vec<_> =
            covered.indexed_iter().filter(|(_, seen)| **seen).map(|p| p.0).collect();
        if places.is_empty() || case.problem.extents.query_heads == 0 {
            continue;
        }
        let (group, mut random) = (case.problem.group(), Random(55));
        let clean = case.operands(Pass::Forward, 55);
        let expected = both_forms(&case, Pass::Forward, &clean);
        for operand in ["q", "k", "v"] {
            let place = &places[random.below(places.len())];
            let (b, t) = (place[0], place[1]);
            let struck_head = random.below(clean[operand].shape()[1]);
            let mut x = clean.clone();
            let token = x.get_mut(operand).expect(operand);
            token
                .index_axis_mut(Axis(0), b)
                .index_axis_mut(Axis(0), struck_head)
                .index_axis_mut(Axis(0), t)
                .fill(f64::NAN);
            let sequences = case.problem.list_sequences();
            let sequence = sequences
                .iter()
                .find(|s| s.batch == b && (s.start..s.start + s.tokens).contains(&t));
            let end = sequence.map_or(0, |s| s.start + s.tokens);
            for (found, expected) in both_forms(&case, Pass::Forward, &x).iter().zip(&expected) {
                for (at, found) in found["o"].indexed_iter() {
                    let sees = at[0] == b
                        && match operand {
                            "q" => at[1] == struck_head && at[2] == t,
                            _ => at[1] / group == struck_head && (t..end).contains(&at[2]),
                        };
                    let same = *found == expected["o"][&at];
                    assert!(
                        if sees { found.is_nan() } else { same },
                        "{}: {operand} at {at:?}",
                        case.name
                    );
                }
            }
        }
    }
}

/// Infinity is data: it does not turn into a finite number, and goes where NaN would go.
#[test]
fn infinity_is_never_lost() {
    let case = Case {
        name: "infinite".to_string(),
        problem: with_all(problem([1, 1, 1, 3, 2, 2]), Decay::None),
        gates: Gates::Usual,
    };
    let mut x = case.operands(Pass::Forward, 56);
    x.get_mut("k").expect("k")[[0, 0, 1, 0]] = f64::INFINITY;
    for y in both_forms(&case, Pass::Forward, &x) {
        let finite = |t: usize| y["o"].index_axis(Axis(2), t).iter().all(|x| x.is_finite());
        let lost = |t: usize| y["o"].index_axis(Axis(2), t).iter().any(|x| x.is_finite());
        assert!(finite(0) && !lost(1) && !lost(2));
    }
}

/// No heads, no tokens, no batch: nothing to do, and no failure.
#[test]
fn nothing_is_a_legal_size() {
    for extents in [[0, 2, 1, 3, 2, 2], [2, 0, 1, 3, 2, 2], [2, 2, 1, 0, 2, 2]] {
        for decay in [Decay::None, Decay::PerHead, Decay::PerToken] {
            let problem = with_all(problem(extents), decay);
            let case = Case { name: format!("{extents:?}"), problem, gates: Gates::Usual };
            for pass in PASSES {
                let x = case.operands(pass, 57);
                let y = run(&case.problem, pass, &x).expect(&case.name);
                for operand in case.problem.operands(pass) {
                    if operand.role == etalon_problem::Role::Output {
                        assert_eq!(y[operand.name].shape(), operand.shape, "{}", operand.name);
                    }
                }
            }
        }
    }
    let none = problem([1, 1, 1, 3, 2, 2]).sequences(packed(&[0]));
    assert_eq!(none.sequences, TokenSequences::Packed { cu_tokens: vec![0] });
    let case =
        Case { name: "no sequences".to_string(), problem: none.final_state(), gates: Gates::Usual };
    let y = run(&case.problem, Pass::Forward, &case.operands(Pass::Forward, 58)).expect("a result");
    assert_eq!((y["o"].sum(), y["final_state"].len()), (0.0, 0));
}
