//! The same bits for any number of threads, any strides and whatever lies beside.

use super::cases::{cases, everything};
use super::tensors::{PASSES, assert_close, operands, run};
use etalon_problem::{LinearCrossEntropy, Pass, Reduction};
use etalon_reference::linear_cross_entropy::{Inputs, Wanted, backward, forward};
use ndarray::{Array1, Array2, Axis};

/// Blocks of tokens and tiles of classes, several of each.
fn large() -> LinearCrossEntropy {
    LinearCrossEntropy { tokens: 150, dim: 20, vocab: 600, ..everything() }
}

#[test]
fn results_have_the_same_bits_for_any_number_of_threads() {
    let pool = |threads| {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool of threads")
    };
    // More threads than cores, and a number that divides nothing.
    let pools = [pool(1), pool(2), pool(7)];
    for (name, problem) in cases().into_iter().chain([("large", large())]) {
        for pass in PASSES {
            let x = operands(&problem, pass, 51);
            let [one, others @ ..] =
                pools.each_ref().map(|pool| pool.install(|| run(&problem, pass, &x)).expect(name));
            for other in others {
                assert_close(&other, &one, 0.0, name);
            }
        }
    }
}

/// Turned axes, gaps and broadcasts are read where they lie or copied, without a trace.
#[test]
fn strides_do_not_matter() {
    let problem = large();
    let mut x = operands(&problem, Pass::Backward, 52);
    for name in ["class_weights", "token_weights", "bias"] {
        x.floats.get_mut(name).expect(name).fill(0.75);
    }
    let straight = x.inputs();
    let turned = |x: &Array2<f64>| x.t().as_standard_layout().into_owned();
    let (h, w) = (turned(&straight.h.to_owned()), turned(&straight.w.to_owned()));
    let number = Array1::from_elem(1, 0.75);
    let classes = number.broadcast(problem.vocab).expect("one for all");
    let tokens = number.broadcast(problem.tokens).expect("one for all");
    let twice: Array1<i64> = x.targets.iter().flat_map(|&y| [y, 99]).collect();
    let strided = Inputs {
        h: h.t(),
        w: w.t(),
        bias: Some(classes),
        targets: twice.slice_axis(Axis(0), ndarray::Slice::new(0, None, 2)),
        class_weights: Some(classes),
        token_weights: Some(tokens),
    };
    assert_eq!(forward(&problem, &strided), forward(&problem, &straight));
    let pass = |inputs| backward(&problem, inputs, &x.cotangents(), Wanted::ALL);
    assert_eq!(pass(&strided), pass(&straight));
}

/// Results of a token do not depend on the tokens that lie beside it, nor on their number.
#[test]
fn tokens_do_not_notice_each_other() {
    let problem = large().reduction(Reduction::None);
    let x = operands(&problem, Pass::Backward, 53);
    let y = run(&problem, Pass::Forward, &x).expect("forward");
    let dh = run(&problem, Pass::Backward, &x).expect("backward")["dh"].clone();
    for tokens in [1, 2, 7, 65] {
        let fewer = LinearCrossEntropy { tokens, ..problem.clone() };
        let mut part = x.clone();
        let slice = ndarray::Slice::from(40..40 + tokens);
        for name in ["h", "token_weights", "dloss", "dlse", "dlogprob", "dentropy"] {
            part.floats.get_mut(name).expect(name).slice_axis_inplace(Axis(0), slice);
        }
        part.targets.slice_axis_inplace(Axis(0), slice);
        let found = run(&fewer, Pass::Forward, &part).expect("forward");
        for name in ["loss", "lse", "logprob", "entropy", "argmax"] {
            assert_eq!(found[name], y[name].slice_axis(Axis(0), slice), "{name} of {tokens}");
        }
        let found = run(&fewer, Pass::Backward, &part).expect("backward");
        assert_eq!(found["dh"], dh.slice_axis(Axis(0), slice), "dh of {tokens}");
    }
}

/// Gradients that nobody wants are not there, and change nothing in the others.
#[test]
fn wanted_gradients_are_those_of_all() {
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 54);
        let pass = |wanted| backward(&problem, &x.inputs(), &x.cotangents(), wanted).expect(name);
        let all = pass(Wanted::ALL);
        for n in 0..8 {
            let wanted = Wanted { dh: n & 1 > 0, dw: n & 2 > 0, dbias: n & 4 > 0 };
            let some = pass(wanted);
            assert_eq!(some.dh, all.dh.clone().filter(|_| wanted.dh), "{name}");
            assert_eq!(some.dw, all.dw.clone().filter(|_| wanted.dw), "{name}");
            assert_eq!(some.dbias, all.dbias.clone().filter(|_| wanted.dbias), "{name}");
        }
        assert_eq!(pass(Wanted::DH).dw, None);
    }
}
