//! Every error in a request is reported; nothing panics.

use super::cases::{Case, PASSES, cases, extents};
use super::tensors::{Tensors, operands, run};
use etalon_problem::{Attention, Error, Extents, Mask, Pass, Role, Sequences};
use etalon_reference::attention::{Cotangents, Inputs, backward, forward};
use ndarray::{Array4, ArrayD, Axis, IxDyn};

#[test]
fn a_wrong_shape_is_named() {
    for Case { name, problem } in cases() {
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
fn options_and_operands_must_agree() {
    for Case { name, problem } in cases() {
        for pass in PASSES {
            let x = operands(&problem, pass, 62);
            for (operand, option) in problem.operands(pass).iter().filter_map(|operand| {
                let option =
                    ["sinks", "bias"].into_iter().find(|option| operand.name.ends_with(option));
                (operand.role.is_given()).then_some((operand, option?))
            }) {
                // The option is set; without its input operand the pass cannot run.
                let mut without = x.clone();
                without.remove(operand.name);
                let found = run(&problem, pass, &without);
                match operand.role {
                    Role::Input => {
                        let reason = format!("the problem sets `{option}`");
                        let missing = Error::Missing { operand: option.to_string(), reason };
                        assert_eq!(found, Err(missing), "{name}");
                    }
                    _ => assert!(found.is_ok(), "{name}: {found:?}"),
                }
                // The option is not set; its operands have no place.
                let mut bare = problem.clone();
                let scores = bare.scores_mut().expect("scores");
                if option == "sinks" {
                    scores.sinks = false
                } else {
                    scores.bias = None
                }
                let mut with: Tensors<f64> = x.clone();
                with.retain(|name, _| !name.ends_with(option) || name == operand.name);
                let reason = format!("the problem does not set `{option}`");
                let unexpected = Error::Unexpected { operand: operand.name.to_string(), reason };
                assert_eq!(run(&bare, pass, &with), Err(unexpected), "{name}");
            }
        }
    }
}

#[test]
fn a_problem_outside_its_domain_is_refused() {
    let good = Attention::new(extents([2, 2, 1, 3, 4, 2]));
    let x = operands(&good.clone().into(), Pass::DoubleBackward, 63);
    let mut uneven = good.clone();
    uneven.scores.extents.key_heads = 3;
    let bad = [
        uneven,
        good.clone().softcap(0.0),
        good.clone().softmax_scale(f64::NAN),
        good.clone().mask(Mask::ChunkedCausal { chunk: 0, align: Default::default() }),
        good.clone().sequences(Sequences::Lengths { query: vec![4, 0], key: vec![0, 0] }),
        good.clone().sequences(Sequences::Packed { cu_query: vec![0, 3], cu_key: vec![0, 4] }),
        good.clone().mask(super::cases::array("allowed", [1, 1, 4, 3])),
        good.clone().value_dim(0),
    ];
    for problem in bad {
        for pass in [Pass::Forward, Pass::Backward, Pass::DoubleBackward] {
            let found = run(&problem.clone().into(), pass, &x);
            assert!(found.is_err(), "{problem:?}");
        }
    }
}

/// Inputs that take no memory, as broadcasts, for outputs that no machine has.
#[test]
fn outputs_that_cannot_be_had_are_an_error() {
    // 2⁴⁵ · 4 · 2 elements of 8 bytes: 2⁵¹, beyond any address space of today.
    let extents =
        Extents { batch: 1 << 45, query_heads: 1, key_heads: 1, queries: 4, keys: 4, dim: 2 };
    let problem = Attention::new(extents);
    let one = Array4::<f64>::ones((1, 1, 1, 1));
    let spread = one.broadcast(problem.scores.q_shape()).expect("a broadcast");
    let inputs = Inputs { q: spread, k: spread, v: spread, sinks: None, bias: None };
    let found = forward(&problem, &inputs);
    assert!(matches!(&found, Err(Error::Memory { bytes, .. }) if *bytes == 1 << 51), "{found:?}");
    let found = backward(&problem, &inputs, &Cotangents { dout: spread, dlse: None });
    assert!(matches!(found, Err(Error::Memory { .. })));

    // Without queries there is nothing to allocate, however many batch elements there are.
    let none = Attention::new(Extents { queries: 0, keys: 0, ..extents });
    let empty = one.slice_axis(Axis(2), (0..0).into());
    let empty = empty.broadcast(none.scores.q_shape()).expect("a broadcast");
    let inputs = Inputs { q: empty, k: empty, v: empty, sinks: None, bias: None };
    assert_eq!(forward(&none, &inputs).map(|y| y.o.len()), Ok(0));
    let found = backward(&none, &inputs, &Cotangents { dout: empty, dlse: None });
    assert_eq!(found.map(|y| y.dk.len()), Ok(0));

    // Nor is there anything to walk for a bias that all of them share.
    let none = Attention::new(Extents { query_heads: 0, keys: 0, ..extents }).bias(1, 1);
    let no_heads = one.slice_axis(Axis(1), (0..0).into());
    let no_keys = one.slice_axis(Axis(2), (0..0).into());
    let q = no_heads.broadcast(none.scores.q_shape()).expect("a broadcast");
    let k = no_keys.broadcast(none.scores.k_shape()).expect("a broadcast");
    let bias = Array4::zeros((1, 1, extents.queries, 0));
    let inputs = Inputs { q, k, v: k, sinks: None, bias: Some(bias.view()) };
    let found = backward(&none, &inputs, &Cotangents { dout: q, dlse: None });
    assert_eq!(found.map(|y| y.dbias.map(|dbias| dbias.len())), Ok(Some(0)));
}
