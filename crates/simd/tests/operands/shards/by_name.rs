//! The passes of shards by name: the bits of the unsharded passes, of partials in tensors of one size.

use super::tensors::{Both, Operands, assert_same_all, everything, unsharded};
use etalon_problem::linear_cross_entropy::{Gradients, Inputs, Output};
use etalon_problem::tensors::{Borrowed, Operands as Tensors};
use etalon_problem::{Error, LinearCrossEntropy, Views, ViewsMut};
use etalon_simd::linear_cross_entropy::shard::{Partial, Shard, TILE, by_name};
use etalon_simd::{Element, Options, Workspace};
use half::{bf16, f16};
use ndarray::{Array1, Array2, Array3, Array4, Axis, arr0, concatenate, s};
use std::ops::Range;

/// The tensors of a struct, by name.
fn add<'s, 'a: 's, T: Element>(views: &mut Views<'s>, tensors: &'s impl Tensors<'a, T>) {
    tensors.each(&mut |name, x| {
        if let Some(view) = x.and_then(Borrowed::into_view) {
            views.push(name, view);
        }
    });
}

/// The inputs of a shard by name.
fn views<'s, T: Element>(inputs: &'s Inputs<'_, T>) -> Views<'s> {
    let mut all = Views::new();
    add(&mut all, inputs);
    all
}

/// The partials of all shards, `[shards][parts][T][10]`, one part more than the most nodes of a shard.
fn partials<T: Element>(x: &Operands<T>, shards: &[Range<usize>]) -> Result<Array4<f32>, Error> {
    let of = |classes: &Range<usize>| Shard::new(&x.problem, classes.clone());
    let counts = shards.iter().map(|classes| of(classes).map(|shard| shard.nodes().count()));
    let parts = counts.collect::<Result<Vec<_>, _>>()?.into_iter().max().unwrap_or(0) + 1;
    let mut all = Array4::from_elem((shards.len(), parts, x.problem.tokens, 10), f32::NAN);
    for (classes, place) in shards.iter().zip(all.outer_iter_mut()) {
        let mut places = ViewsMut::new().with("partials", place);
        let (inputs, options) = (x.inputs(classes.clone()), Options::default());
        by_name::forward(&Workspace::new(), &of(classes)?, &views(&inputs), &mut places, &options)?;
    }
    Ok(all)
}

fn totals(
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    partials: &Array4<f32>,
) -> Result<Array2<f32>, Error> {
    let mut totals = Array2::from_elem((problem.tokens, 10), 7.0);
    let inputs = Views::new().with("partials", partials);
    let mut places = ViewsMut::new().with("totals", &mut totals);
    by_name::combine(problem, shards, &inputs, &mut places)?;
    drop(places);
    Ok(totals)
}

/// The outputs, as the first shard has them.
fn output<T: Element>(x: &Operands<T>, shards: &[Range<usize>], totals: &Array2<f32>) -> Output<T> {
    let tokens = x.problem.tokens;
    let mut loss = arr0(0f32).into_dyn();
    let [mut lse, mut logprob, mut entropy] = [(); 3].map(|()| Array1::<f32>::zeros(tokens));
    let mut argmax = Array1::<i64>::zeros(tokens);
    let (mut n_valid, mut normaliser) = (arr0(0i64), arr0(0f32));
    let mut places = ViewsMut::new().with("loss", &mut loss).with("lse", &mut lse);
    places.push("logprob", (&mut logprob).into());
    places.push("entropy", (&mut entropy).into());
    places.push("argmax", (&mut argmax).into());
    places.push("n_valid", (&mut n_valid).into());
    places.push("normaliser", (&mut normaliser).into());
    let shard = Shard::new(&x.problem, shards[0].clone()).unwrap();
    let own = x.inputs(shards[0].clone());
    let inputs = views(&own).with("totals", totals);
    by_name::output(&Workspace::new(), &shard, &inputs, &mut places).unwrap();
    drop(places);
    let with = |x: Array1<f32>| Some(x);
    Output {
        loss,
        lse: with(lse),
        logprob: with(logprob),
        entropy: with(entropy),
        argmax: Some(argmax),
        n_valid: n_valid.into_scalar(),
        normaliser: normaliser.into_scalar(),
    }
}

/// The gradients of all shards together: dh along the tree, or as sums over shards.
fn gradients<T: Element>(
    x: &Operands<T>,
    shards: &[Range<usize>],
    totals: &Array2<f32>,
    nodes: bool,
) -> Gradients<T> {
    let LinearCrossEntropy { tokens, dim, .. } = x.problem;
    let of = |classes: &Range<usize>| Shard::new(&x.problem, classes.clone()).unwrap();
    let most = shards.iter().map(|classes| of(classes).nodes().count()).max().unwrap() + 1;
    let most = if nodes { most } else { 1 };
    let mut parts = Array4::from_elem((shards.len(), most, tokens, dim), f32::NAN);
    let (mut all_dw, mut all_dbias) = (Vec::new(), Vec::new());
    for (classes, mut parts) in shards.iter().zip(parts.outer_iter_mut()) {
        let count = if nodes { of(classes).nodes().count() } else { 1 };
        let dh = parts.slice_mut(s![..count, .., ..]);
        let mut dw = Array2::from_elem((classes.len(), dim), T::ZERO);
        let mut dbias = Array1::from_elem(classes.len(), T::ZERO);
        let mut places = ViewsMut::new().with("dh", dh);
        places.push("dw", T::view_mut(dw.view_mut().into_dyn()).unwrap());
        places.push("dbias", T::view_mut(dbias.view_mut().into_dyn()).unwrap());
        let own = x.inputs(classes.clone());
        x.with_cotangents(|cotangents| {
            let mut inputs = views(&own).with("totals", totals);
            add(&mut inputs, cotangents);
            let options = Options::default();
            by_name::backward(&Workspace::new(), &of(classes), &inputs, &mut places, &options)
        })
        .unwrap();
        drop(places);
        all_dw.push(dw);
        all_dbias.push(dbias);
    }
    let dw: Vec<_> = all_dw.iter().map(|dw| dw.view()).collect();
    let dbias: Vec<_> = all_dbias.iter().map(|dbias| dbias.view()).collect();
    // Tokens in two halves, as ranks share them.
    let mut dh = Array2::from_elem((tokens, dim), T::ZERO);
    for half in [0..tokens / 2, tokens / 2..tokens] {
        let own = parts.slice(s![.., .., half.clone(), ..]);
        let inputs = Views::new().with("parts", own);
        let place = dh.slice_mut(s![half, ..]);
        let mut places = ViewsMut::new().with("dh", T::view_mut(place.into_dyn()).unwrap());
        by_name::combine_dh(&x.problem, shards, &inputs, &mut places).unwrap();
    }
    Gradients {
        dh: Some(dh),
        dw: Some(concatenate(Axis(0), &dw).unwrap()),
        dbias: Some(concatenate(Axis(0), &dbias).unwrap()),
    }
}

fn both<T: Element>(x: &Operands<T>, shards: &[Range<usize>], nodes: bool) -> Both<T> {
    let totals = totals(&x.problem, shards, &partials(x, shards).unwrap()).unwrap();
    (output(x, shards, &totals), gradients(x, shards, &totals, nodes))
}

fn bits_of_the_whole<T: Element>() {
    let x = Operands::<T>::new(everything(11, 5, 4 * TILE + 77));
    let (wanted, v) = (unsharded(&x, &Options::default()), x.problem.vocab);
    for borders in [&[0, 768, v][..], &[0, 0, 256, v], &[0, 512, 512, 1024, v]] {
        let shards: Vec<_> = borders.windows(2).map(|b| b[0]..b[1]).collect();
        let what = format!("{} {shards:?}", T::DTYPE);
        assert_same_all(&both(&x, &shards, true), &wanted, true, &what);
        // Shards of the last borders are nodes: their sums are those of the tree.
        let are_nodes = borders.len() == 5;
        assert_same_all(&both(&x, &shards, false), &wanted, are_nodes, &what);
    }
}

#[test]
fn passes_by_name_have_the_bits_of_the_unsharded_passes() {
    bits_of_the_whole::<f32>();
    bits_of_the_whole::<bf16>();
    bits_of_the_whole::<f16>();
}

#[test]
fn further_parts_are_the_identity() {
    let x = Operands::<f32>::new(everything(5, 3, 600));
    let all = partials(&x, &[0..600, 600..600]).unwrap();
    let identity = Partial::identity().words();
    for row in
        all.slice(s![0, 1.., .., ..]).rows().into_iter().chain(all.slice(s![1, .., .., ..]).rows())
    {
        assert!(row.iter().map(|x| x.to_bits()).eq(identity));
    }
}

fn complaint<X: std::fmt::Debug>(result: Result<X, Error>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn wrong_tensors_are_named_and_nothing_is_written() {
    let x = Operands::<f32>::new(everything(5, 3, 600));
    let shards = [0..256, 256..600];
    let sound = partials(&x, &shards).unwrap();
    let combined = |shards: &[Range<usize>], partials: &Array4<f32>| {
        complaint(totals(&x.problem, shards, partials))
    };
    let wanted = "`shards` must be all 600 classes together, found 0..256";
    assert_eq!(combined(&shards[..1], &sound), wanted);
    let wanted = "`partials` must have shape [3, 3, 5, 10], found [2, 3, 5, 10]";
    assert_eq!(combined(&[0..256, 256..512, 512..600], &sound), wanted);
    let few = sound.slice(s![.., ..1, .., ..]).to_owned();
    let wanted = "`partials` must have shape [2, 2, 5, 10], found [2, 1, 5, 10]";
    assert_eq!(combined(&shards, &few), wanted);
    let mut two = sound.clone();
    two.slice_mut(s![0, 0, 1, 7]).fill(f32::from_bits(1));
    let wanted =
        "`owner of targets[1]` must be one shard, found one with 0..256 and one with 256..512";
    assert_eq!(combined(&shards, &two), wanted);
    two.slice_mut(s![0, 0, 1, 7]).fill(f32::from_bits(2));
    assert!(combined(&shards, &two).contains("eighth word"));

    let shard = Shard::new(&x.problem, 0..256).unwrap();
    let mut place = Array3::from_elem((1, 5, 9), 7f32);
    let mut places = ViewsMut::new().with("partials", &mut place);
    let (own, workspace, options) = (x.inputs(0..256), Workspace::new(), Options::default());
    let error = by_name::forward(&workspace, &shard, &views(&own), &mut places, &options);
    drop(places);
    assert_eq!(complaint(error), "`partials` must have shape [1, 5, 10], found [1, 5, 9]");
    assert!(place.iter().all(|&x| x == 7.0), "nothing is half-written");
    let error = by_name::output(&workspace, &shard, &views(&own), &mut ViewsMut::new());
    assert!(complaint(error).starts_with("`totals` is missing"));

    let parts = Array4::<f32>::zeros((2, 1, 5, 3));
    let inputs = Views::new().with("parts", &parts);
    let mut dh = Array2::<f32>::zeros((5, 4));
    let mut places = ViewsMut::new().with("dh", &mut dh);
    let error = by_name::combine_dh(&x.problem, &shards, &inputs, &mut places);
    assert_eq!(complaint(error), "`dh` must have shape [5, 3], found [5, 4]");
    let mut other = Array2::<f32>::zeros((5, 3));
    let mut places = ViewsMut::new().with("dw", &mut other);
    let error = by_name::combine_dh(&x.problem, &shards, &inputs, &mut places);
    assert_eq!(complaint(error), "`dw` was given, but the pass has no such tensor");
}
