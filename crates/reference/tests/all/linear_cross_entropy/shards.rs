//! Shards of the classes: the unsharded results, to the last bit where the tree allows it.

use super::cases::{cases, everything};
use super::tensors::{Operands, Tensors, assert_close, operands, run};
use etalon_problem::{Error, LinearCrossEntropy, Pass};
use etalon_reference::linear_cross_entropy::shard::{Partial, Shard, TILE, combine, combine_dh};
use etalon_reference::linear_cross_entropy::{Gradients, Inputs, Output, Wanted};
use ndarray::{Axis, Slice, concatenate};
use std::ops::Range;

/// The inputs of one shard.
fn part<'a>(x: &'a Operands<f64>, classes: &Range<usize>) -> Inputs<'a, f64> {
    let mut inputs = x.inputs();
    let slice = Slice::from(classes.clone());
    inputs.w.slice_axis_inplace(Axis(0), slice);
    if let Some(bias) = &mut inputs.bias {
        bias.slice_axis_inplace(Axis(0), slice);
    }
    inputs
}

/// Both passes over the shards `borders[0]..borders[1]`, `borders[1]..borders[2]`, …
fn sharded(
    problem: &LinearCrossEntropy,
    x: &Operands<f64>,
    borders: &[usize],
) -> Result<(Output<f64>, Gradients<f64>), Error> {
    let ranges: Vec<_> = borders.windows(2).map(|b| b[0]..b[1]).collect();
    let inputs: Vec<_> = ranges.iter().map(|classes| part(x, classes)).collect();
    let shards = ranges.iter().zip(&inputs);
    let shards: Vec<Shard<'_, f64>> = shards
        .map(|(classes, x)| Shard::new(problem, classes.clone(), x))
        .collect::<Result<_, _>>()?;
    let parts = ranges.iter().cloned().zip(&shards);
    let parts = parts.map(|(classes, shard)| Ok((classes, shard.partials()?)));
    let totals = combine(parts.collect::<Result<_, Error>>()?)?;
    let gradients =
        shards.iter().map(|shard| shard.backward(&totals, &x.cotangents(), Wanted::ALL));
    let gradients = gradients.collect::<Result<Vec<_>, Error>>()?;
    let dh = gradients.iter().map(|y| y.dh.clone().expect("dh"));
    let dw: Vec<_> = gradients.iter().map(|y| y.dw.as_ref().expect("dw").view()).collect();
    let dbias: Vec<_> = gradients.iter().filter_map(|y| Some(y.dbias.as_ref()?.view())).collect();
    let all = Gradients {
        dh: Some(combine_dh(ranges.iter().cloned().zip(dh).collect())?),
        dw: Some(concatenate(Axis(0), &dw).expect("rows")),
        dbias: problem.bias.then(|| concatenate(Axis(0), &dbias).expect("elements")),
    };
    Ok((shards[0].output(&totals)?, all))
}

fn named((output, gradients): (Output<f64>, Gradients<f64>)) -> Tensors<f64> {
    let Output { loss, lse, logprob, entropy, .. } = output;
    let one = |x: Option<ndarray::Array1<f64>>| x.map(|x| x.into_dyn());
    let all = [
        ("loss", Some(loss)),
        ("lse", one(lse)),
        ("logprob", one(logprob)),
        ("entropy", one(entropy)),
        ("dh", gradients.dh.map(|x| x.into_dyn())),
        ("dw", gradients.dw.map(|x| x.into_dyn())),
        ("dbias", one(gradients.dbias)),
    ];
    all.into_iter().filter_map(|(name, x)| Some((name.to_string(), x?))).collect()
}

fn unsharded(problem: &LinearCrossEntropy, x: &Operands<f64>) -> Tensors<f64> {
    let mut y = run(problem, Pass::Forward, x).expect("forward");
    y.retain(|name, _| !["argmax", "n_valid", "normaliser"].contains(&name.as_str()));
    y.extend(run(problem, Pass::Backward, x).expect("backward"));
    y
}

/// More tokens than a block, 4.3 tiles of classes.
fn problem() -> LinearCrossEntropy {
    LinearCrossEntropy { tokens: 70, dim: 5, vocab: 4 * TILE + 77, ..everything() }
}

#[test]
fn shards_that_are_nodes_have_the_same_bits() {
    let problem = problem();
    let (x, v) = (operands(&problem, Pass::Backward, 31), problem.vocab);
    let expected = unsharded(&problem, &x);
    let borders: [&[usize]; 4] = [
        &[0, v],
        &[0, TILE, 2 * TILE, 3 * TILE, 4 * TILE, v],
        &[0, 2 * TILE, 4 * TILE, v],
        // Nodes of unlike size, and shards without classes.
        &[0, 0, 2 * TILE, 3 * TILE, 3 * TILE, 4 * TILE, v, v],
    ];
    for borders in borders {
        let found = named(sharded(&problem, &x, borders).expect("shards"));
        assert_close(&found, &expected, 0.0, &format!("{borders:?}"));
    }
}

#[test]
fn other_shards_agree_up_to_rounding() {
    let problem = problem();
    let (x, v) = (operands(&problem, Pass::Backward, 32), problem.vocab);
    let expected = unsharded(&problem, &x);
    let borders: [&[usize]; 4] =
        [&[0, 1, v], &[0, 7, 300, 301, 900, v], &[0, TILE, v], &[0, 3 * TILE, 3 * TILE + 1, v]];
    for borders in borders {
        let found = named(sharded(&problem, &x, borders).expect("shards"));
        // Some hundred additions in another order.
        assert_close(&found, &expected, 1e-12, &format!("{borders:?}"));
    }
    for (name, problem) in cases() {
        let x = operands(&problem, Pass::Backward, 33);
        let found = sharded(&problem, &x, &[0, problem.vocab / 2, problem.vocab]).expect(name);
        // With one class ce is 0 but for rounding, and so are the gradients through it.
        let tolerance = if problem.vocab == 1 { f64::INFINITY } else { 1e-12 };
        assert_close(&named(found), &unsharded(&problem, &x), tolerance, name);
    }
}

/// A shard without any possible class, before, between and after others.
#[test]
fn a_shard_of_nothing_but_minus_infinity_adds_nothing() {
    let mut problem = problem();
    problem.softcap = None; // it would make −∞ finite
    for hidden in [0..TILE, TILE..3 * TILE, 4 * TILE..problem.vocab] {
        let mut x = operands(&problem, Pass::Backward, 34);
        let mut bias = x.floats.get_mut("bias").expect("bias").view_mut();
        bias.slice_axis_mut(Axis(0), hidden.clone().into()).fill(f64::NEG_INFINITY);
        // Smoothing would ask for them.
        let mut weights = x.floats.get_mut("class_weights").expect("weights").view_mut();
        weights.slice_axis_mut(Axis(0), hidden.clone().into()).fill(0.0);
        let expected = unsharded(&problem, &x);
        assert!(
            expected.iter().all(|(name, y)| name == "logprob" || y.iter().all(|y| y.is_finite()))
        );
        for borders in [[0, hidden.start, hidden.end, problem.vocab], [0, 10, 20, problem.vocab]] {
            let found = named(sharded(&problem, &x, &borders).expect("shards"));
            assert_close(&found, &expected, 1e-12, &format!("{hidden:?} in {borders:?}"));
        }
        let y = &expected["dbias"];
        for (v, &y) in y.iter().enumerate().filter(|(v, _)| hidden.contains(v)) {
            let target = x.targets.iter().any(|&target| target == v as i64);
            assert!(y == 0.0 || target, "class {v}: {y}");
        }
    }
}

fn partial(classes: Range<usize>, z: &[f64], target: Option<usize>) -> Partial<f64> {
    let problem = LinearCrossEntropy::new(1, 1, 6).bias();
    let (h, w) = (ndarray::array![[0.0]], ndarray::Array2::zeros((classes.len(), 1)));
    let (bias, targets) = (ndarray::arr1(z), ndarray::array![target.unwrap_or(0) as i64]);
    let inputs = Inputs {
        h: h.view(),
        w: w.view(),
        bias: Some(bias.view()),
        targets: targets.view(),
        class_weights: None,
        token_weights: None,
    };
    Shard::new(&problem, classes, &inputs).expect("a shard").partials().expect("partials")[0]
}

#[test]
fn partials_are_a_monoid() {
    let infinity = f64::INFINITY;
    let parts = [
        partial(0..2, &[0.5, -1.0], Some(1)),
        partial(2..4, &[3.0, -infinity], Some(1)),
        partial(4..6, &[-infinity, -infinity], Some(1)),
    ];
    let identity = Partial::identity();
    for part in parts {
        assert_eq!(part.combine(identity), Ok(part));
        assert_eq!(identity.combine(part), Ok(part));
    }
    let [a, b, c] = parts;
    let left = a.combine(b).and_then(|ab| ab.combine(c)).expect("left");
    let right = b.combine(c).and_then(|bc| a.combine(bc)).expect("right");
    let near = |x: f64, y: f64| x == y || (x - y).abs() <= 4.0 * f64::EPSILON * y.abs();
    assert!(near(left.l, right.l) && near(left.u, right.u) && near(left.s, right.s));
    assert_eq!((left.m, left.weight, left.classes), (right.m, right.weight, right.classes));
    assert_eq!((left.target, left.argmax), (Some(-1.0), Some(2)));
    assert_eq!((left.m, left.weight, left.classes), (3.0, 6.0, 6));
    assert_eq!(left.s, -infinity, "the sum over all classes has those of probability 0 in it");
    // In any order.
    let turned = c.combine(b).and_then(|cb| cb.combine(a)).expect("turned");
    assert!(near(turned.l, left.l) && near(turned.u, left.u));
    assert_eq!((turned.m, turned.argmax), (left.m, left.argmax));
}

#[test]
fn the_first_of_equal_logits_is_the_argmax() {
    let (a, b) = (partial(0..2, &[1.0, 2.0], None), partial(2..4, &[2.0, 2.0], Some(5)));
    assert_eq!(a.combine(b).expect("both").argmax, Some(1));
    assert_eq!(b.combine(a).expect("both").argmax, Some(1));
    let nan = partial(4..6, &[f64::NAN, f64::INFINITY], Some(0));
    assert_eq!(a.combine(nan).expect("both").argmax, Some(4));
    assert_eq!(nan.combine(a).expect("both").argmax, Some(4));
    assert!(nan.combine(a).expect("both").lse().is_nan());
    let none = partial(4..6, &[f64::NEG_INFINITY; 2], Some(0));
    assert_eq!((none.argmax, none.lse()), (Some(4), f64::NEG_INFINITY));
    assert!(none.entropy().is_nan());
}

#[test]
fn owners_are_counted() {
    let problem = LinearCrossEntropy { vocab: 5, ..everything() };
    let x = operands(&problem, Pass::Backward, 35);
    let value = |result: Result<_, Error>| match result {
        Err(Error::Value { name, .. }) => name,
        other => panic!("{:?}", other.map(|_: (Output<f64>, Gradients<f64>)| ())),
    };
    // A gap, an overlap, the wrong order.
    let gap = || {
        let inputs = part(&x, &(0..3));
        let shard = Shard::new(&problem, 0..3, &inputs)?;
        let totals = shard.partials()?;
        shard.output(&totals).map(|y| (y, Gradients { dh: None, dw: None, dbias: None }))
    };
    assert_eq!(value(gap()), "totals[0]");
    let error = combine::<f64>(vec![(0..3, Vec::new()), (2..5, Vec::new())]);
    assert!(matches!(error, Err(Error::Value { name, .. }) if name == "shards"));
    let error = combine::<f64>(vec![(3..5, Vec::new()), (0..3, Vec::new())]);
    assert!(matches!(error, Err(Error::Value { name, .. }) if name == "shards"));
    // The same classes under two names: five classes, but two owners, or none.
    let same = |classes: Range<usize>, target: i64| {
        let mut x = x.clone();
        x.targets.fill(target);
        let inputs = part(&x, &classes);
        let shard = Shard::new(&problem, classes, &inputs)?;
        let partials = shard.partials()?;
        let totals = combine(vec![(0..2, partials.clone()), (2..4, partials)])?;
        shard.output(&totals).map(|y| (y, Gradients { dh: None, dw: None, dbias: None }))
    };
    assert_eq!(value(same(0..2, 1)), "shards");
    let problem = LinearCrossEntropy { vocab: 4, ..problem };
    let x = operands(&problem, Pass::Backward, 35);
    let mut none = x.clone();
    none.targets.fill(3);
    let inputs = part(&none, &(0..2));
    let shard = Shard::new(&problem, 0..2, &inputs).expect("a shard");
    let partials = shard.partials().expect("partials");
    let totals = combine(vec![(0..2, partials.clone()), (2..4, partials)]).expect("totals");
    let error = shard.output(&totals).expect_err("no owner");
    assert!(matches!(error, Error::Value { name, .. } if name == "targets[0]"));
}

#[test]
fn wrong_shards_are_errors() {
    let problem = everything();
    let x = operands(&problem, Pass::Backward, 36);
    let inputs = x.inputs();
    let reversed = Range { start: 3, end: 2 };
    for classes in [0..6, 5..7, reversed] {
        let error = Shard::new(&problem, classes, &inputs).err();
        assert!(matches!(error, Some(Error::Value { name, .. }) if name == "classes"));
    }
    let error = Shard::new(&problem, 0..4, &inputs).err();
    assert!(matches!(error, Some(Error::Shape { operand, .. }) if operand == "w"));
    let shard = Shard::new(&problem, 0..5, &inputs).expect("a shard");
    let error = shard.output(&[]).err();
    assert!(matches!(error, Some(Error::Shape { operand, .. }) if operand == "totals"));
    let partials = shard.partials().expect("partials");
    let error = combine(vec![(0..2, partials), (2..5, Vec::new())]).err();
    assert!(matches!(error, Some(Error::Shape { operand, .. }) if operand == "partials"));
    let dh = [ndarray::Array2::<f64>::zeros((2, 3)), ndarray::Array2::zeros((3, 2))];
    let [a, b] = dh;
    let error = combine_dh(vec![(0..2, a), (2..5, b)]).err();
    assert!(matches!(error, Some(Error::Shape { operand, .. }) if operand == "dh"));
}
