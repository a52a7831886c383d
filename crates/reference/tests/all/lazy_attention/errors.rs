//! Every error in a request is reported; nothing panics.

use super::cases::{cases, extents};
use super::tensors::{PASSES, cotangents, inputs, operands, run};
use etalon_problem::{Blocking, Error, Extents, LazyAttention, Mask, Pass, Role, Sequences};
use etalon_reference::lazy_attention::{
    Cotangents, Inputs, SecondCotangents, active_pairs, activity, ambiguous, backward,
    backward_under, double_backward, forward, stats,
};
use ndarray::{Array1, Array4, ArrayD, Axis, IxDyn};

#[test]
fn a_wrong_shape_is_named() {
    for (name, problem) in cases() {
        for pass in PASSES {
            let x = operands(&problem, pass, 61);
            for (operand, tensor) in &x {
                for axis in 0..tensor.ndim() {
                    let mut shape = tensor.shape().to_vec();
                    shape[axis] += 1;
                    let mut changed = x.clone();
                    changed.insert(operand.clone(), ArrayD::zeros(IxDyn(&shape)));
                    let expected = Error::Shape {
                        operand: operand.clone(),
                        expected: tensor.shape().to_vec(),
                        found: shape,
                    };
                    assert_eq!(run(&problem, pass, &changed), Err(expected), "{name}");
                }
            }
        }
    }
}

#[test]
fn the_bias_comes_where_the_problem_has_one() {
    let with = LazyAttention::new(extents([1, 2, 1, 3, 4, 2])).bias(3);
    let mut without = with.clone();
    without.bias = None;
    for pass in PASSES {
        let x = operands(&with, pass, 62);
        let mut missing = x.clone();
        missing.remove("bias");
        let found = run(&with, pass, &missing);
        assert!(matches!(&found, Err(Error::Missing { operand, .. }) if operand == "bias"));
        let biases = x.keys().filter(|name| name.ends_with("bias")).cloned();
        for extra in biases.collect::<Vec<_>>() {
            let mut one = x.clone();
            one.retain(|name, _| !name.ends_with("bias") || *name == extra);
            let found = run(&without, pass, &one);
            assert!(matches!(&found, Err(Error::Unexpected { operand, .. }) if *operand == extra));
        }
        // The optional ones may stay away.
        let optional =
            with.operands(pass).into_iter().filter(|o| o.role == Role::OptionalCotangent);
        let mut few = x.clone();
        optional.for_each(|operand| drop(few.remove(operand.name)));
        assert!(run(&with, pass, &few).is_ok());
    }
}

/// Every public function refuses a problem outside its domain.
#[test]
fn a_problem_outside_its_domain_is_refused() {
    let good = LazyAttention::new(extents([2, 2, 1, 3, 4, 2])).bias(2);
    let x = operands(&good, Pass::DoubleBackward, 63);
    let mut uneven = good.clone();
    uneven.scores.extents.key_heads = 3;
    let mut headless = good.clone();
    headless.scores.extents.key_heads = 0;
    let mut capped = good.clone();
    capped.scores.softcap = Some(1.0);
    let mut sunk = good.clone();
    sunk.scores.sinks = true;
    let mut biased = good.clone();
    biased.scores.bias = Some(etalon_problem::BiasExtents { batch: 1, heads: 1 });
    let bad = [
        uneven,
        headless,
        capped,
        sunk,
        biased,
        good.clone().bias(0),
        good.clone().value_dim(0),
        good.clone().softmax_scale(f64::NAN),
        good.clone().mask(Mask::ChunkedCausal { chunk: 0, align: Default::default() }),
        good.clone().sequences(Sequences::Lengths { query: vec![4, 0], key: vec![0, 0] }),
        good.clone().sequences(Sequences::Packed { cu_query: vec![0, 3], cu_key: vec![0, 4] }),
    ];
    let (tile, pairs) = (Blocking::new(2, 2), Array4::from_elem((2, 2, 3, 4), true));
    for problem in bad {
        let x = inputs(&x);
        assert!(
            PASSES.iter().all(|&pass| run(&problem, pass, &operands(&good, pass, 63)).is_err())
        );
        assert!(active_pairs(&problem, &x).is_err(), "{problem:?}");
        assert!(activity(&problem, &x, tile).is_err());
        assert!(stats(&problem, &x, tile).is_err());
        assert!(ambiguous(&problem, &x, |_| 0.0).is_err());
        let dout = Array4::zeros(good.o_shape());
        let dout = Cotangents { dout: dout.view(), dlse: None };
        assert!(backward_under(&problem, &x, &dout, &pairs.view()).is_err());
    }
}

#[test]
fn tiles_and_given_activity_are_checked() {
    let problem = LazyAttention::new(extents([2, 2, 1, 3, 4, 2]));
    let x = operands(&problem, Pass::Backward, 64);
    let zero = |name: &str| Err(Error::value(name, "at least 1", 0));
    for (tile, name) in
        [(Blocking::new(0, 1), "blocking.queries"), (Blocking::new(1, 0), "blocking.keys")]
    {
        assert_eq!(activity(&problem, &inputs(&x), tile).map(drop), zero(name));
        assert_eq!(stats(&problem, &inputs(&x), tile).map(drop), zero(name));
    }
    for wrong in [(1, 2, 3, 4), (2, 1, 3, 4), (2, 2, 4, 3), (2, 2, 3, 5)] {
        let pairs = Array4::from_elem(wrong, true);
        let found = backward_under(&problem, &inputs(&x), &cotangents(&x), &pairs.view());
        let expected = Error::Shape {
            operand: "activity".to_string(),
            expected: vec![2, 2, 3, 4],
            found: pairs.shape().to_vec(),
        };
        assert_eq!(found, Err(expected));
    }
    // Tiles larger than the arrays are one tile.
    let huge = Blocking::new(usize::MAX, usize::MAX);
    let found = activity(&problem, &inputs(&x), huge).expect("one tile for each head");
    assert_eq!(found.shape(), [2, 2, 1, 1]);
}

/// Inputs that take no memory, as broadcasts, for outputs that no machine has.
#[test]
fn outputs_that_cannot_be_had_are_an_error() {
    // 2⁴⁵ · 4 · 2 elements of 8 bytes: 2⁵¹, beyond any address space of today.
    let extents =
        Extents { batch: 1 << 45, query_heads: 1, key_heads: 1, queries: 4, keys: 4, dim: 2 };
    let problem = LazyAttention::new(extents);
    let (one, tau) = (Array4::<f64>::ones((1, 1, 1, 1)), Array1::zeros(1));
    let spread = one.broadcast(problem.scores.q_shape()).expect("a broadcast");
    let inputs = Inputs { q: spread, k: spread, v: spread, bias: None, tau: tau.view() };
    let dout = Cotangents { dout: spread, dlse: None };
    let found = forward(&problem, &inputs);
    assert!(matches!(&found, Err(Error::Memory { bytes, .. }) if *bytes == 1 << 51), "{found:?}");
    assert!(matches!(backward(&problem, &inputs, &dout), Err(Error::Memory { .. })));
    let second = SecondCotangents {
        ddq: None,
        ddk: None,
        ddv: None,
        ddbias: None,
        ddtau: None,
        cot_o: None,
        cot_lse: None,
    };
    let found = double_backward(&problem, &inputs, &dout, &second);
    assert!(matches!(found, Err(Error::Memory { .. })));
    assert!(matches!(active_pairs(&problem, &inputs), Err(Error::Memory { .. })));
    let tile = Blocking::new(1, 1);
    assert!(matches!(activity(&problem, &inputs, tile), Err(Error::Memory { .. })));
    assert!(matches!(stats(&problem, &inputs, tile), Err(Error::Memory { .. })));

    // Without queries there is nothing to allocate, however many batch elements there are.
    let none = LazyAttention::new(Extents { queries: 0, keys: 0, ..extents });
    let empty = one.slice_axis(Axis(2), (0..0).into());
    let empty = empty.broadcast(none.scores.q_shape()).expect("a broadcast");
    let inputs = Inputs { q: empty, k: empty, v: empty, ..inputs };
    assert_eq!(forward(&none, &inputs).map(|y| y.o.len()), Ok(0));
    let found = backward(&none, &inputs, &Cotangents { dout: empty, dlse: None });
    assert_eq!(found.map(|y| (y.dk.len(), y.dtau)), Ok((0, tau)));
}
