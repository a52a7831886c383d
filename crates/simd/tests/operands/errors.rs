//! Bad operands and options get an error that names them, and nothing is written.

use crate::common::{Operands, everything};
use etalon_problem::{Attention, AttentionLse, Blocking, Error, Extents, Pass};
use etalon_simd::{Options, Workspace, attention, attention_lse};
use ndarray::{Array3, Array4};

/// Message of the error of a forward pass, after `spoil` has done something to it.
fn complaint(
    spoil: impl FnOnce(&mut Attention, &mut Options, &mut attention::Inputs<'_, f32>),
) -> String {
    let Operands { mut problem, q, k, v, sinks, bias, .. } = Operands::new(everything());
    let mut inputs =
        attention::Inputs::new(q.view(), k.view(), v.view()).sinks(sinks.view()).bias(bias.view());
    let mut options = Options::default();
    let mut o = Array4::from_elem(problem.o_shape(), 7.0);
    let mut lse = Array3::from_elem(problem.scores.row_shape(), 7.0);
    spoil(&mut problem, &mut options, &mut inputs);
    let out = attention::OutputMut { o: Some(o.view_mut()), lse: Some(lse.view_mut()) };
    let error = attention::forward_into(&Workspace::new(), &problem, &inputs, out, &options);
    assert!(o.iter().chain(&lse).all(|&x| x == 7.0), "nothing is half-written");
    error.expect_err("the operands were spoiled").to_string()
}

#[test]
fn every_operand_is_named() {
    let cut = ndarray::s![.., .., 1.., ..];
    let spoiled = complaint(|_, _, inputs| inputs.q = inputs.q.slice_move(cut));
    assert_eq!(spoiled, "`q` must have shape [2, 4, 101, 40], found [2, 4, 100, 40]");
    let spoiled = complaint(|_, _, inputs| inputs.k = inputs.k.slice_move(cut));
    assert_eq!(spoiled, "`k` must have shape [2, 2, 113, 40], found [2, 2, 112, 40]");
    let spoiled = complaint(|_, _, inputs| inputs.v = inputs.v.slice_move(cut));
    assert_eq!(spoiled, "`v` must have shape [2, 2, 113, 24], found [2, 2, 112, 24]");
    let spoiled = complaint(|_, _, inputs| inputs.sinks = None);
    assert_eq!(spoiled, "`sinks` is missing: the problem sets `sinks`");
    let spoiled = complaint(|problem, _, _| problem.scores.bias = None);
    assert_eq!(spoiled, "`bias` was given, but the problem does not set `bias`");
}

#[test]
fn every_option_is_named() {
    let spoiled = complaint(|_, options, _| options.blocking = Some(Blocking::new(0, 64)));
    assert_eq!(spoiled, "`blocking.queries` must be at least 1, found 0");
    let spoiled = complaint(|problem, _, _| problem.scores.softcap = Some(-1.0));
    assert_eq!(spoiled, "`softcap` must be finite and above 0, found -1");
    let spoiled = complaint(|problem, _, _| problem.scores.extents.key_heads = 3);
    assert_eq!(spoiled, "`query_heads` must be a multiple of key_heads (3), found 4");
}

#[test]
fn a_result_too_large_for_memory_is_an_error() {
    // A broadcast view costs nothing; the 2⁵⁰ rows of its result would.
    let queries = 1 << 50;
    let extents = Extents { batch: 1, query_heads: 1, key_heads: 1, queries, keys: 1, dim: 1 };
    let one = Array4::<f32>::ones([1, 1, 1, 1]);
    let q = one.broadcast([1, 1, queries, 1]).unwrap();
    let problem = Attention::new(extents);
    let inputs = attention::Inputs::new(q, one.view(), one.view());
    let error = attention::forward(&problem, &inputs, &Options::default());
    assert!(matches!(error, Err(Error::Memory { .. })), "{error:?}");
}

#[test]
fn more_heads_than_lists_are_made_of_are_an_error() {
    // Tensors without rows take no memory, whatever their shape.
    for (name, batch, query_heads) in [("batch", 1 << 58, 1), ("query_heads", 1, 1 << 58)] {
        let extents = Extents { batch, query_heads, key_heads: 1, queries: 0, keys: 0, dim: 1 };
        let problem = Attention::new(extents);
        let empty = Array4::<f32>::zeros([1, 1, 0, 1]);
        let q = empty.broadcast(problem.scores.q_shape()).unwrap();
        let k = empty.broadcast(problem.scores.k_shape()).unwrap();
        let inputs = attention::Inputs::new(q, k, k);
        let wanted =
            format!("`{name}` must be at most 16777216 in the simd tier, found {}", 1u64 << 58);
        let error = attention::forward(&problem, &inputs, &Options::default()).unwrap_err();
        assert_eq!(error.to_string(), wanted);
        let error = attention::plan::<f32>(&problem, Pass::Backward, &Options::default());
        assert_eq!(error.unwrap_err().to_string(), wanted);
    }
}

#[test]
fn a_wrong_cotangent_is_named() {
    let operands = Operands::new(everything());
    let problem = AttentionLse { scores: operands.problem.scores.clone() };
    let inputs = attention_lse::Inputs::new(operands.q.view(), operands.k.view())
        .sinks(operands.sinks.view())
        .bias(operands.bias.view());
    let out = attention_lse::forward(&problem, &inputs, &Options::default()).unwrap();
    let short = operands.dlse.slice(ndarray::s![.., .., 1..]);
    let cotangents = attention_lse::Cotangents { dlse: short };
    let error =
        attention_lse::backward::<f32>(&problem, &inputs, &out, &cotangents, &Options::default());
    let error = error.expect_err("dlse is one row short").to_string();
    assert_eq!(error, "`dlse` must have shape [2, 4, 101], found [2, 4, 100]");
}

/// Message of the error of a double backward pass, after `spoil` has done something to its second cotangents.
fn second_complaint(
    problem: Attention,
    spoil: impl FnOnce(&mut attention::SecondCotangents<'_, f32>),
) -> String {
    let operands = Operands::new(problem);
    let Operands { problem, q, k, v, dout, dlse, sinks, bias } = &operands;
    let mut inputs = attention::Inputs::new(q.view(), k.view(), v.view());
    inputs.sinks = problem.scores.sinks.then(|| sinks.view());
    inputs.bias = problem.scores.bias.is_some().then(|| bias.view());
    let options = Options::default();
    let out = attention::forward(problem, &inputs, &options).unwrap();
    let cotangents = attention::Cotangents::new(dout.view()).dlse(dlse.view());
    let mut further = attention::SecondCotangents {
        ddq: Some(q.view()),
        ddk: Some(k.view()),
        ddv: Some(v.view()),
        ddsinks: Some(sinks.view()),
        ddbias: Some(bias.view()),
        cot_o: Some(dout.view()),
        cot_lse: Some(dlse.view()),
    };
    spoil(&mut further);
    let mut gq = Array4::from_elem(problem.scores.q_shape(), 7.0);
    let place = attention::SecondGradientsMut { gq: Some(gq.view_mut()), ..Default::default() };
    let error = attention::double_backward_into(
        &Workspace::new(),
        problem,
        &inputs,
        &out,
        &cotangents,
        &further,
        place,
        &options,
    );
    assert!(gq.iter().all(|&x| x == 7.0), "nothing is half-written");
    error.expect_err("the operands were spoiled").to_string()
}

#[test]
fn every_second_cotangent_is_named() {
    let complain = |spoil: fn(&mut Option<ndarray::ArrayView4<'_, f32>>), which: usize| {
        second_complaint(everything(), |x| {
            let tensors = [&mut x.ddq, &mut x.ddk, &mut x.ddv, &mut x.cot_o, &mut x.ddbias];
            spoil(tensors.into_iter().nth(which).unwrap())
        })
    };
    let shorten = |x: &mut Option<ndarray::ArrayView4<'_, f32>>| {
        *x = x.take().map(|x| x.slice_move(ndarray::s![.., .., 1.., ..]))
    };
    for (which, (name, shape)) in [
        ("ddq", [2, 4, 101, 40]),
        ("ddk", [2, 2, 113, 40]),
        ("ddv", [2, 2, 113, 24]),
        ("cot_o", [2, 4, 101, 24]),
        ("ddbias", [1, 4, 101, 113]),
    ]
    .into_iter()
    .enumerate()
    {
        let mut found = shape;
        found[2] -= 1;
        let expected = format!("`{name}` must have shape {shape:?}, found {found:?}");
        assert_eq!(complain(shorten, which), expected);
    }
    let rows = ndarray::s![.., .., 1..];
    let spoiled = second_complaint(everything(), |x| {
        x.cot_lse = x.cot_lse.take().map(|x| x.slice_move(rows));
    });
    assert_eq!(spoiled, "`cot_lse` must have shape [2, 4, 101], found [2, 4, 100]");
    let spoiled = second_complaint(everything(), |x| {
        x.ddsinks = x.ddsinks.take().map(|x| x.slice_move(ndarray::s![1..]));
    });
    assert_eq!(spoiled, "`ddsinks` must have shape [4], found [3]");
    let mut bare = everything();
    bare.scores.sinks = false;
    let spoiled = second_complaint(bare, |_| {});
    assert_eq!(spoiled, "`ddsinks` was given, but the problem does not set `sinks`");
    let mut bare = everything();
    bare.scores.bias = None;
    let spoiled = second_complaint(bare, |_| {});
    assert_eq!(spoiled, "`ddbias` was given, but the problem does not set `bias`");
}
