//! Other ways to the same numbers: without states, in chunks, token by token, in two halves,
//! packed and apart.

use super::cases::{Case, Gates, cases, problem, with_all};
use super::naive;
use super::tensors::{
    PASSES, Tensors, assert_all_same, assert_close, assert_same, run, run_chunked,
};
use etalon_problem::{Decay, LinearAttention, Pass, TokenSequences};
use ndarray::{ArrayD, Axis, Slice};

/// Sums of a few dozen terms in another order.
const TOLERANCE: f64 = 1e-13;

#[test]
fn the_recurrence_is_the_definition() {
    for case in cases() {
        let x = case.operands(Pass::Forward, 41);
        let found = run(&case.problem, Pass::Forward, &x).expect(&case.name);
        let expected = naive::forward(&case.problem, &x);
        assert_eq!(found.len(), expected.len(), "{}", case.name);
        for (result, found) in &found {
            let what = format!("{}: {result}", case.name);
            assert_close(found, &expected[result], TOLERANCE, &what);
        }
    }
}

/// Chunks of one token, of numbers that do and do not divide the lengths, of all tokens, and more.
#[test]
fn chunks_of_any_size_agree() {
    for case in cases() {
        for pass in [Pass::Forward, Pass::Backward] {
            let x = case.operands(pass, 42);
            let expected = run(&case.problem, pass, &x).expect(&case.name);
            for chunk in [1, 2, 3, 5, 8, 23, 64, usize::MAX] {
                let found = run_chunked(&case.problem, pass, &x, chunk).expect(&case.name);
                assert_eq!(found.len(), expected.len(), "{}", case.name);
                for (result, expected) in &expected {
                    let what = format!("{}: {result} in chunks of {chunk}", case.name);
                    if ["dscale", "dg_gamma"].contains(&result.as_str()) {
                        // Sums over everything, which may cancel; no term exceeds 10³.
                        let error = 1e3 * TOLERANCE;
                        super::tensors::assert_absolutely_close(
                            &found[result],
                            expected,
                            error,
                            &what,
                        );
                    } else {
                        assert_close(&found[result], expected, TOLERANCE, &what);
                    }
                }
            }
        }
    }
}

fn token_axis(name: &str) -> Option<Axis> {
    match name {
        _ if name.ends_with("state") || name.ends_with("g_gamma") || name.ends_with("scale") => {
            None
        }
        _ => Some(Axis(2)),
    }
}

/// The tokens `from..to` of every tensor that has them.
fn cut(x: &Tensors<f64>, from: usize, to: usize) -> Tensors<f64> {
    let cut = |(name, x): (&String, &ArrayD<f64>)| {
        let part = match token_axis(name) {
            Some(axis) => x.slice_axis(axis, Slice::from(from..to)).to_owned(),
            None => x.clone(),
        };
        (name.clone(), part)
    };
    x.iter().map(cut).collect()
}

fn with_tokens(problem: &LinearAttention, tokens: usize) -> LinearAttention {
    let mut problem = problem.clone();
    problem.extents.tokens = tokens;
    problem
}

/// Dense problems with all options.
fn whole(tokens: usize) -> Vec<Case> {
    let decays = [Decay::None, Decay::PerHead, Decay::PerToken];
    let case = |gates| {
        decays.map(|decay| Case {
            name: format!("{tokens} tokens, {decay:?}, {gates:?}"),
            problem: with_all(problem([2, 4, 2, tokens, 3, 5]), decay),
            gates,
        })
    };
    [Gates::Usual, Gates::Resets, Gates::Extreme].into_iter().flat_map(case).collect()
}

/// Token by token with `step`: the same bits as all at once.
#[test]
fn steps_make_the_whole() {
    for case in whole(7) {
        let x = case.operands(Pass::Forward, 43);
        let expected = run(&case.problem, Pass::Forward, &x).expect(&case.name);
        let mut state = x["initial_state"].clone();
        for t in 0..7 {
            let mut one: Tensors<f64> = cut(&x, t, t + 1)
                .into_iter()
                .map(|(name, x)| match token_axis(&name) {
                    Some(axis) => (name, x.index_axis_move(axis, 0)),
                    None => (name, x),
                })
                .collect();
            one.insert("initial_state".to_string(), state);
            let found = run(&case.problem, Pass::Step, &one).expect(&case.name);
            assert_same(&found["o"], &expected["o"].index_axis(Axis(2), t).to_owned(), &case.name);
            state = found["final_state"].clone();
        }
        assert_same(&state, &expected["final_state"], &case.name);
    }
}

/// A step asks neither how many tokens nor which sequences the problem has, nor for its states.
#[test]
fn a_step_needs_only_its_token() {
    for case in whole(3) {
        let x = case.operands(Pass::Step, 44);
        let expected = run(&case.problem, Pass::Step, &x).expect(&case.name);
        let mut other = with_tokens(&case.problem, 0);
        (other.initial_state, other.final_state) = (false, false);
        other.sequences = TokenSequences::Lengths { tokens: vec![0, 0] };
        let found = run(&other, Pass::Step, &x).expect(&case.name);
        assert_all_same(&found, &expected, &case.name);
    }
}

/// [0, t) and then [t, n) with the state between, and with the gradient by it on the way back.
#[test]
fn two_halves_make_the_whole() {
    for case in whole(6) {
        let (name, whole) = (&case.name, &case.problem);
        let x = case.operands(Pass::Backward, 45);
        let y = run(whole, Pass::Forward, &x).expect(name);
        let d = run(whole, Pass::Backward, &x).expect(name);
        for t in 0..=6 {
            let (mut early, mut late) = (cut(&x, 0, t), cut(&x, t, 6));
            let (first, last) = (with_tokens(whole, t), with_tokens(whole, 6 - t));
            let y_early = run(&first, Pass::Forward, &early).expect(name);
            late.insert("initial_state".to_string(), y_early["final_state"].clone());
            let y_late = run(&last, Pass::Forward, &late).expect(name);
            let d_late = run(&last, Pass::Backward, &late).expect(name);
            early.insert("dfinal_state".to_string(), d_late["dinitial_state"].clone());
            let d_early = run(&first, Pass::Backward, &early).expect(name);
            assert_same(&y_late["final_state"], &y["final_state"], name);
            assert_same(&d_early["dinitial_state"], &d["dinitial_state"], name);
            for (result, expected) in y.iter().chain(&d) {
                let parts = [&y_early, &d_early, &y_late, &d_late];
                let [early, late] = [&parts[..2], &parts[2..]]
                    .map(|parts| parts.iter().find_map(|part| part.get(result)).expect(result));
                let what = format!("{name}: {result} cut at {t}");
                if let Some(axis) = token_axis(result) {
                    let both = ndarray::concatenate(axis, &[early.view(), late.view()]);
                    assert_same(&both.expect("two parts"), expected, &what);
                } else if !result.ends_with("state") {
                    assert_close(&(early + late), expected, 10.0 * TOLERANCE, &what);
                }
            }
        }
    }
}

/// Sequences in one batch element, or as batch elements of their own: the same bits.
#[test]
fn packed_sequences_are_those_apart() {
    for case in cases() {
        let TokenSequences::Packed { cu_tokens } = case.problem.sequences.clone() else { continue };
        for pass in [Pass::Forward, Pass::Backward, Pass::DoubleBackward] {
            let x = case.operands(pass, 46);
            let packed = run(&case.problem, pass, &x).expect(&case.name);
            let mut sums = Tensors::new();
            for (s, cu) in cu_tokens.windows(2).enumerate() {
                let mut own = cut(&x, cu[0], cu[1]);
                let states = own.iter_mut().filter(|(name, _)| name.ends_with("state"));
                states.for_each(|(_, x)| *x = x.select(Axis(0), &[s]));
                let mut alone = with_tokens(&case.problem, cu[1] - cu[0]);
                alone.sequences = TokenSequences::Dense;
                for (result, found) in run(&alone, pass, &own).expect(&case.name) {
                    let what = format!("{}: {result} of sequence {s}", case.name);
                    let expected = &packed[&result];
                    match token_axis(&result) {
                        Some(axis) => {
                            let part = expected.slice_axis(axis, Slice::from(cu[0]..cu[1]));
                            assert_same(&found, &part.to_owned(), &what);
                        }
                        None if result.ends_with("state") => {
                            assert_same(&found, &expected.select(Axis(0), &[s]), &what);
                        }
                        None => {
                            let sum = sums.entry(result).or_insert_with(|| found.clone() * 0.0);
                            *sum += &found;
                        }
                    }
                }
            }
            for (result, sum) in &sums {
                // Sums over everything, which may cancel; no term exceeds 10³.
                super::tensors::assert_absolutely_close(
                    sum,
                    &packed[result],
                    1e3 * TOLERANCE,
                    result,
                );
            }
        }
    }
}

/// A batch element, a head: what lies beside makes no difference.
#[test]
fn batch_elements_are_computed_alone() {
    for case in whole(5) {
        for pass in PASSES {
            let x = case.operands(pass, 47);
            let both = run(&case.problem, pass, &x).expect(&case.name);
            let mut alone = case.problem.clone();
            alone.extents.batch = 1;
            for b in 0..2 {
                let by_batch = |name: &str| !name.ends_with("g_gamma") && !name.ends_with("scale");
                let mut own = x.clone();
                let shared = own.iter_mut().filter(|(name, _)| by_batch(name));
                shared.for_each(|(_, x)| *x = x.select(Axis(0), &[b]));
                for (result, found) in run(&alone, pass, &own).expect(&case.name) {
                    if by_batch(&result) {
                        let expected = both[&result].select(Axis(0), &[b]);
                        assert_same(&found, &expected, &format!("{}: {result}", case.name));
                    }
                }
            }
        }
    }
}
