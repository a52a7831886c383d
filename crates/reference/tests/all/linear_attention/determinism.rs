//! The same bits for any number of threads and any strides.

use super::cases::{Case, Gates, cases, problem, with_all};
use super::tensors::{PASSES, Tensors, assert_all_same, cotangents, inputs, run, run_chunked};
use etalon_problem::{Decay, Pass};
use etalon_reference::linear_attention::{Inputs, backward, forward};
use ndarray::{Array4, ArrayView4, Axis};

#[test]
fn results_have_the_same_bits_for_any_number_of_threads() {
    let pool = |threads| {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads")
    };
    // More threads than cores, and a number that divides nothing.
    let pools = [pool(1), pool(2), pool(7)];
    for case in cases() {
        for pass in PASSES {
            let x = case.operands(pass, 61);
            let all = || -> Vec<Tensors<f64>> {
                let mut all = vec![run(&case.problem, pass, &x).expect(&case.name)];
                if [Pass::Forward, Pass::Backward].contains(&pass) {
                    all.push(run_chunked(&case.problem, pass, &x, 3).expect(&case.name));
                }
                all
            };
            let [one, others @ ..] = pools.each_ref().map(|pool| pool.install(all));
            for other in others {
                for (one, other) in one.iter().zip(&other) {
                    for (result, found) in other {
                        let (found, expected) = (found.iter(), one[result].iter());
                        let same = found.zip(expected).all(|(x, y)| x.to_bits() == y.to_bits());
                        assert!(same, "{}: {result}", case.name);
                    }
                }
            }
        }
    }
}

/// `[batch, tokens, heads, width]` in memory, with the tokens backwards.
fn turned(x: &Array4<f64>) -> Array4<f64> {
    let mut turned = x.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned();
    turned.invert_axis(Axis(1));
    turned.as_standard_layout().into_owned()
}

fn back(turned: &Array4<f64>) -> ArrayView4<'_, f64> {
    let mut view = turned.view();
    view.invert_axis(Axis(1));
    view.permuted_axes([0, 2, 1, 3])
}

/// Permuted and reversed axes and broadcasts are read where they lie or copied, without a trace in
/// the result.
#[test]
fn strides_do_not_matter() {
    for case in cases() {
        let mut x = case.operands(Pass::Backward, 62);
        // Every query head is given the first one's rows: legal as a broadcast too.
        let heads = case.problem.extents.query_heads;
        for name in ["q", "dout"] {
            let first = x[name].clone();
            for mut head in x.get_mut(name).expect(name).axis_iter_mut(Axis(1)) {
                head.assign(&first.index_axis(Axis(1), 0));
            }
        }
        let (plain, plain_cotangents) = (inputs(&x), cotangents(&x));
        let copies = [plain.k, plain.v].map(|x| turned(&x.to_owned()));
        let [k, v] = copies.each_ref().map(back);
        let one =
            |x: ArrayView4<'_, f64>| x.slice_axis(Axis(1), (0..heads.min(1)).into()).to_owned();
        let (q_one, dout_one) = (one(plain.q), one(plain_cotangents.dout));
        let (q, dout) =
            (q_one.broadcast(plain.q.dim()), dout_one.broadcast(plain_cotangents.dout.dim()));
        let mut spread = plain_cotangents;
        spread.dout = dout.expect("one head stands for all");
        // Gates as every second element of a longer array.
        let longer = plain.g.map(|g| ndarray::stack(Axis(3), &[g, g]).expect("two of one shape"));
        let g = longer.as_ref().map(|g| g.index_axis(Axis(3), 1));
        let strided = Inputs { q: q.expect("as dout"), k, v, g, ..plain };
        let (a, b) = (forward(&case.problem, &plain), forward(&case.problem, &strided));
        assert_eq!(a, b, "{}", case.name);
        assert!(a.is_ok());
        let a = backward(&case.problem, &plain, &plain_cotangents);
        assert_eq!(a, backward(&case.problem, &strided, &spread), "{}", case.name);
        assert!(a.is_ok());
    }
}

/// States that are kept and states that are computed again are the same: where the stretches of
/// the backward pass begin, which depends on the number of tokens, does not show. A token of zeros
/// in front shifts them, and where nothing decays it changes nothing else.
#[test]
fn stretches_leave_no_trace() {
    let case = |tokens: usize| Case {
        name: format!("{tokens} tokens"),
        problem: with_all(problem([1, 1, 1, tokens, 3, 2]), Decay::None),
        gates: Gates::Usual,
    };
    for tokens in 1..=30 {
        let (short, long) = (case(tokens), case(tokens + 1));
        let mut x = short.operands(Pass::Backward, 63);
        let expected = run(&short.problem, Pass::Backward, &x).expect(&short.name);
        for name in ["q", "k", "v", "dout"] {
            let zero = x[name].slice_axis(Axis(2), (0..1).into()).to_owned() * 0.0;
            let longer = ndarray::concatenate(Axis(2), &[zero.view(), x[name].view()]);
            x.insert(name.to_string(), longer.expect("one token more"));
        }
        let mut found = run(&long.problem, Pass::Backward, &x).expect(&long.name);
        for name in ["dq", "dk", "dv"] {
            let rest = found[name].slice_axis(Axis(2), (1..).into()).to_owned();
            found.insert(name.to_string(), rest);
        }
        assert_all_same(&found, &expected, &short.name);
    }
}
