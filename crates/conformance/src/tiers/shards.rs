//! Linear_cross_entropy with its classes in shards, in the tiers that have them.

use super::typed::{StoredNumber, numbers, of_types, operands, stored};
use crate::tensor::{Tensors, Values};
use crate::tier::{Cuts, Request};
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Pass, Problem, Scalar};
use etalon_reference::linear_cross_entropy::shard as plain;
use etalon_reference::linear_cross_entropy::shard::TILE;
use etalon_reference::linear_cross_entropy::{Cotangents, Gradients, Inputs, Wanted};
use etalon_reference::scalar::{Quad, Real};
use etalon_reference::{Arithmetic, Named, convert};
use etalon_simd::linear_cross_entropy::OutputMut;
use etalon_simd::linear_cross_entropy::shard::{self, Combine};
use etalon_simd::{Element, Options, Workspace};
use ndarray::{
    Array, Array1, Array2, Array3, ArrayView1, ArrayView2, Axis, Dimension, ShapeBuilder,
    concatenate, s,
};
use std::fmt::Debug;
use std::ops::Range;

/// The classes of each shard that a request wants, of a pass that has shards.
pub(super) fn of<'r>(request: &Request<'r>) -> Option<(&'r LinearCrossEntropy, Vec<Range<usize>>)> {
    let cuts = request.hints.shards?;
    let Problem::LinearCrossEntropy(problem) = request.problem else { return None };
    matches!(request.pass, Pass::Forward | Pass::Backward)
        .then(|| (problem, cuts.ranges(problem.vocab)))
}

impl Cuts {
    /// All classes in shards.
    pub(crate) fn ranges(self, vocab: usize) -> Vec<Range<usize>> {
        let tiles = vocab.div_ceil(TILE);
        let at = |tiles: Vec<usize>| tiles.into_iter().map(|tile| tile * TILE).collect();
        let mut borders: Vec<usize> = match self {
            // 1, 1, 2, 4, 8 … tiles.
            Cuts::Nodes => at((0..tiles).filter(|&x| x == 0 || x.is_power_of_two()).collect()),
            // Behind an odd number of tiles no node ends that is larger than a tile.
            Cuts::Several => match tiles {
                0..4 => at(vec![1, 1]),
                4..9 => at(vec![1, 1, tiles - 1]),
                _ => at(vec![1, (tiles / 2) | 1, (tiles / 2) | 1, tiles - 1]),
            },
            // Of the tree that has all classes.
            Cuts::Quarters => {
                let quarter = (tiles.next_power_of_two() / 4).max(1) * TILE;
                (0..vocab).step_by(quarter).collect()
            }
            // Three that have classes: the bounds allow any two rescales.
            Cuts::Anywhere => {
                let third = (vocab + 1) / 3;
                vec![third, third, 2 * third]
            }
        };
        borders.extend([0, 0, vocab, vocab]);
        borders.sort_unstable();
        borders.windows(2).map(|b| b[0].min(vocab)..b[1].min(vocab)).collect()
    }
}

/// The inputs of a shard.
pub(super) fn part<'a, T: Scalar>(
    inputs: &'a Inputs<'_, T>,
    classes: &Range<usize>,
) -> Inputs<'a, T> {
    Inputs {
        h: inputs.h.view(),
        w: inputs.w.slice(s![classes.clone(), ..]),
        bias: inputs.bias.as_ref().map(|bias| bias.slice(s![classes.clone()])),
        targets: inputs.targets.view(),
        class_weights: inputs.class_weights.as_ref().map(|x| x.view()),
        token_weights: inputs.token_weights.as_ref().map(|x| x.view()),
    }
}

/// The parts of dh that a shard of a request returns: of each of its nodes, or their sum.
pub(super) fn by_nodes(request: &Request<'_>) -> bool {
    request.hints.shards == Some(Cuts::Several)
}

/// Numbers that show where they are not written.
pub(super) fn unwritten<T: Element, D: Dimension>(
    shape: impl ShapeBuilder<Dim = D>,
) -> Array<T, D> {
    Array::from_elem(shape, T::from_f32(f32::NAN))
}

/// Fails unless what no classes add to dh is 0.
pub(super) fn check_empty(classes: &Range<usize>, dh: &Array3<f32>) -> Result<(), Error> {
    match dh.iter().find(|x| classes.is_empty() && **x != 0.0) {
        Some(x) => Err(Error::value("dh of a shard without classes", "0", x)),
        None => Ok(()),
    }
}

/// Fails unless no class adds anything to ignored tokens.
pub(super) fn check_ignored<P: PartialEq + Debug>(
    problem: &LinearCrossEntropy,
    targets: &ArrayView1<'_, i64>,
    totals: ArrayView1<'_, P>,
    nothing: P,
) -> Result<(), Error> {
    let tokens = targets.iter().zip(totals).enumerate();
    let mut ignored = tokens.filter(|(_, (target, _))| **target == problem.ignore_index);
    match ignored.find(|(_, (_, total))| **total != nothing) {
        Some((i, (_, total))) => {
            let name = format!("total of token {i}, which is ignored");
            Err(Error::value(name, "that of no classes", format!("{total:?}")))
        }
        None => Ok(()),
    }
}

/// Fails unless partials of neighbours are one in either order, of equal maxima with the first class.
fn check_orders(partials: &[(Range<usize>, ArrayView2<'_, shard::Partial>)]) -> Result<(), Error> {
    let nodes: Vec<_> = partials.iter().flat_map(|(_, rows)| rows.outer_iter()).collect();
    for (first, second) in nodes.windows(2).flat_map(|x| x[0].iter().zip(x[1].iter())) {
        // A target has one owner.
        let equal = shard::Partial { m: first.m, largest: first.largest, target: None, ..*second };
        let wanted = first.argmax.min(equal.argmax);
        for both in [first.combine(equal)?, equal.combine(*first)?] {
            if first.classes > 0 && equal.classes > 0 && both.argmax != wanted {
                let expected = format!("{wanted:?}, the first of equal maxima");
                return Err(Error::value("argmax", expected, format!("{:?}", both.argmax)));
            }
        }
    }
    Ok(())
}

/// Results of the simd tier.
pub(super) fn simd(
    request: &Request<'_>,
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    workspace: &Workspace,
    options: &Options,
) -> Result<Tensors, Error> {
    let call = (workspace, options);
    of_types!(request, problem => simd_of(request, problem, shards, call))
}

/// The same of operands of `T` and gradients of `G`. Every place holds NaN, or what else no result is.
fn simd_of<T: StoredNumber, G: Element>(
    request: &Request<'_>,
    problem: &LinearCrossEntropy,
    shards: &[Range<usize>],
    (workspace, options): (&Workspace, &Options),
) -> Result<Tensors, Error> {
    let inputs: Inputs<'_, T> = operands(request.inputs)?;
    let ranks = shards.iter().map(|classes| shard::Shard::new(problem, classes.clone()));
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let parts = shards.iter().map(|classes| part(&inputs, classes)).collect::<Vec<_>>();
    let no_partial = shard::Partial { m: f32::NAN, classes: 1, ..shard::Partial::identity() };
    let mut partials = Vec::new();
    for (rank, part) in ranks.iter().zip(&parts) {
        let mut own = Array2::from_elem((rank.nodes().count(), problem.tokens), no_partial);
        shard::forward_shard_into(workspace, rank, part, own.view_mut(), options)?;
        partials.push((rank.classes(), own));
    }
    let partials: Vec<_> = partials.iter().map(|(at, x)| (at.clone(), x.view())).collect();
    check_orders(&partials)?;
    let totals = shard::combine(problem, &partials)?;
    let totals = totals.view();
    check_ignored(problem, &inputs.targets, totals, shard::Partial::identity())?;
    if request.pass == Pass::Forward {
        let last = ranks.len() - 1;
        return simd_output(workspace, &ranks[last], &parts[last], totals);
    }
    let cotangents: Cotangents<'_, T> = operands(request.inputs)?;
    let mut dh: Array2<G> = unwritten(problem.h_shape());
    let mut dw: Array2<G> = unwritten(problem.w_shape());
    let mut dbias: Option<Array1<G>> = problem.bias.then(|| unwritten(problem.vocab));
    let mut sums = Vec::new();
    for (rank, part) in ranks.iter().zip(&parts) {
        let (classes, [tokens, dim]) = (rank.classes(), problem.h_shape());
        let parts = if by_nodes(request) { rank.nodes().count() } else { 1 };
        let mut own: Array3<f32> = unwritten((parts, tokens, dim));
        let places = shard::GradientsMut {
            dh: Some(own.view_mut()),
            dw: Some(dw.slice_mut(s![classes.clone(), ..])),
            dbias: dbias.as_mut().map(|dbias| dbias.slice_mut(s![classes.clone()])),
        };
        shard::backward_shard_into(workspace, rank, part, totals, &cotangents, places, options)?;
        check_empty(&classes, &own)?;
        sums.push((classes, own));
    }
    let sums: Vec<_> = sums.iter().map(|(classes, x)| (classes.clone(), x.view())).collect();
    shard::combine_dh_into(problem, &sums, dh.view_mut())?;
    Ok(stored(Gradients { dh: Some(dh), dw: Some(dw), dbias }))
}

/// The outputs, of totals.
fn simd_output<T: StoredNumber>(
    workspace: &Workspace,
    rank: &shard::Shard<'_>,
    part: &Inputs<'_, T>,
    totals: ArrayView1<'_, shard::Partial>,
) -> Result<Tensors, Error> {
    // An output has the same shape, whatever it holds.
    let mut out = shard::output(rank, part, totals)?;
    out.loss.fill(f32::NAN);
    let of_tokens = [&mut out.lse, &mut out.logprob, &mut out.entropy];
    of_tokens.into_iter().flatten().for_each(|x| x.fill(f32::NAN));
    out.argmax.iter_mut().for_each(|x| x.fill(i64::MIN));
    (out.n_valid, out.normaliser) = (i64::MIN, f32::NAN);
    let places = OutputMut {
        loss: Some(out.loss.view_mut()),
        lse: out.lse.as_mut().map(|x| x.view_mut()),
        logprob: out.logprob.as_mut().map(|x| x.view_mut()),
        entropy: out.entropy.as_mut().map(|x| x.view_mut()),
        argmax: out.argmax.as_mut().map(|x| x.view_mut()),
        n_valid: Some(&mut out.n_valid),
        normaliser: Some(&mut out.normaliser),
    };
    shard::output_into(workspace, rank, part, totals, places)?;
    Ok(stored::<T>(out))
}

/// Results of the reference in some arithmetic, by name.
pub(super) fn reference(
    arithmetic: Arithmetic,
    problem: &LinearCrossEntropy,
    request: &Request<'_>,
    x: &Values,
    shards: &[Range<usize>],
) -> Result<Values, Error> {
    // The reference sums dh of the classes that it gets: of nodes, where these are wanted.
    let nodes = |classes: &Range<usize>| match by_nodes(request) && !classes.is_empty() {
        true => Ok(shard::Shard::new(problem, classes.clone())?.nodes().collect()),
        false => Ok(vec![classes.clone()]),
    };
    let shards = shards.iter().map(nodes).collect::<Result<Vec<_>, Error>>()?.concat();
    match arithmetic {
        Arithmetic::F32 => reference_of::<f32>(problem, request.pass, x, &shards),
        Arithmetic::F64 => reference_of::<f64>(problem, request.pass, x, &shards),
        Arithmetic::DoubleDouble => reference_of::<Quad>(problem, request.pass, x, &shards),
    }
}

/// Results of all classes, from those of each shard, in their order.
fn together<T: Scalar>(
    dh: Array2<T>,
    dw: &[Array2<T>],
    dbias: &[Option<Array1<T>>],
) -> Result<Gradients<T>, Error> {
    let misshapen = |error| Error::value("shards", "rows of one length", error);
    let dw: Vec<_> = dw.iter().map(|x| x.view()).collect();
    let dbias: Option<Vec<_>> = dbias.iter().map(|x| Some(x.as_ref()?.view())).collect();
    let dbias = dbias.map(|dbias| concatenate(Axis(0), &dbias).map_err(misshapen));
    Ok(Gradients {
        dh: Some(dh),
        dw: Some(concatenate(Axis(0), &dw).map_err(misshapen)?),
        dbias: dbias.transpose()?,
    })
}

fn reference_of<T: Real>(
    problem: &LinearCrossEntropy,
    pass: Pass,
    x: &Values,
    shards: &[Range<usize>],
) -> Result<Values, Error> {
    let (x, whole) = (convert(x, T::from_f64), convert(x, |x| x as i64));
    let inputs = Inputs::from_named(&x, &whole)?;
    let parts = shards.iter().map(|classes| part(&inputs, classes)).collect::<Vec<_>>();
    let ranks = shards.iter().zip(&parts);
    let ranks = ranks.map(|(classes, part)| plain::Shard::new(problem, classes.clone(), part));
    let ranks = ranks.collect::<Result<Vec<_>, _>>()?;
    let partials = shards.iter().cloned().zip(&ranks);
    let partials = partials.map(|(classes, rank)| Ok((classes, rank.partials()?)));
    let totals = plain::combine(partials.collect::<Result<Vec<_>, Error>>()?)?;
    if pass == Pass::Forward {
        return Ok(numbers(ranks[ranks.len() - 1].output(&totals)?));
    }
    let cotangents = Cotangents::from_named(&x, &whole)?;
    let (mut dh, mut dw, mut dbias) = (Vec::new(), Vec::new(), Vec::new());
    for (classes, rank) in shards.iter().zip(&ranks) {
        let own = rank.backward(&totals, &cotangents, Wanted::ALL)?;
        dh.extend(own.dh.map(|dh| (classes.clone(), dh)));
        dw.extend(own.dw);
        dbias.push(own.dbias);
    }
    let dbias = if problem.bias { dbias } else { vec![None] };
    Ok(numbers(together(plain::combine_dh(dh)?, &dw, &dbias)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_all_classes() {
        for cuts in Cuts::ALL {
            for vocab in [1, 2, 5, 256, 257, 600, 1100, 20_000] {
                let ranges = cuts.ranges(vocab);
                assert_eq!((ranges[0].clone(), ranges[ranges.len() - 1].end), (0..0, vocab));
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
            }
        }
        let nodes = Cuts::Nodes.ranges(1000);
        assert_eq!(nodes, [0..0, 0..0, 0..256, 256..512, 512..1000, 1000..1000]);
        let quarters = Cuts::Quarters.ranges(1100);
        assert_eq!(quarters, [0..0, 0..0, 0..512, 512..1024, 1024..1100, 1100..1100]);
    }

    #[test]
    fn some_shards_have_several_nodes() {
        for tiles in [3, 4, 6, 9, 79, 80] {
            let problem = LinearCrossEntropy::new(1, 1, tiles * TILE - 7);
            let shards = Cuts::Several.ranges(problem.vocab);
            let nodes = |classes: &Range<usize>| {
                shard::Shard::new(&problem, classes.clone()).unwrap().nodes().count()
            };
            assert!(shards.iter().any(|classes| nodes(classes) > 1), "{tiles} tiles");
            let inner = &shards[1..shards.len() - 1];
            assert!(inner.iter().any(Range::is_empty), "{tiles} tiles");
        }
    }
}
