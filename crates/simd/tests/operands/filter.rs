//! The filter of linear cross-entropy: it leaves out the tiles that the formulas name, its certificate holds,
//! and no bit depends on threads, the budget, strides or the gradients asked for.

use crate::shards::tensors::{Operands, assert_same, everything};
use etalon_problem::{LinearCrossEntropy, Reduction};
use etalon_simd::linear_cross_entropy::filter::{
    Certificate, CertificateMut, Filter, backward, backward_into,
};
use etalon_simd::linear_cross_entropy::shard::TILE;
use etalon_simd::linear_cross_entropy::{self, Cotangents, Gradients, GradientsMut};
use etalon_simd::{Element, Level, Options, Workspace};
use half::{bf16, f16};
use ndarray::{Array1, Array2, ArrayView1, arr0, s};
use rayon::ThreadPoolBuilder;
use std::ops::Range;

/// Tokens that share a choice.
const BAND: usize = 96;

/// More than what sums of a tile are enlarged by and what is rounded up: 2⁻¹⁵, and a few units of f32.
const LOOSE: f64 = 1.0 / 16_384.0;

/// All options but smoothing, which leaves no da small.
fn problem(tokens: usize, dim: usize, vocab: usize) -> LinearCrossEntropy {
    let problem = everything(tokens, dim, vocab).label_smoothing(0.0);
    problem.reduction(Reduction::Sum).wide_gradients()
}

fn filtered<T: Element>(
    x: &Operands<T>,
    filter: Filter,
    options: &Options,
) -> (Gradients<f32>, Certificate) {
    let mut gradients = zeros(&x.problem);
    let mut certificate = Certificate {
        dh: Array1::from_elem(x.problem.tokens, f32::NAN),
        dw: Array1::from_elem(x.problem.vocab, f32::NAN),
        tiles: (7, 7),
    };
    x.with_cotangents(|cotangents| {
        let (inputs, places) = (x.inputs(0..x.problem.vocab), places(&mut gradients));
        let (workspace, problem) = (Workspace::new(), &x.problem);
        let bounds = certificate.view_mut();
        backward_into(&workspace, problem, &inputs, cotangents, filter, places, bounds, options)
    })
    .unwrap();
    (gradients, certificate)
}

fn plain<T: Element>(x: &Operands<T>, options: &Options) -> Gradients<f32> {
    let mut gradients = zeros(&x.problem);
    x.with_cotangents(|cotangents| {
        let (inputs, places) = (x.inputs(0..x.problem.vocab), places(&mut gradients));
        let (workspace, problem) = (Workspace::new(), &x.problem);
        linear_cross_entropy::backward_into(
            &workspace, problem, &inputs, cotangents, places, options,
        )
    })
    .unwrap();
    gradients
}

fn zeros(problem: &LinearCrossEntropy) -> Gradients<f32> {
    Gradients {
        dh: Some(Array2::zeros(problem.h_shape())),
        dw: Some(Array2::zeros(problem.w_shape())),
        dbias: problem.bias.then(|| Array1::zeros(problem.vocab)),
    }
}

fn places(gradients: &mut Gradients<f32>) -> GradientsMut<'_, f32> {
    GradientsMut {
        dh: gradients.dh.as_mut().map(|x| x.view_mut()),
        dw: gradients.dw.as_mut().map(|x| x.view_mut()),
        dbias: gradients.dbias.as_mut().map(|x| x.view_mut()),
    }
}

fn norm<'x>(row: impl IntoIterator<Item = &'x f32>) -> f64 {
    row.into_iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// Numbers of tokens that count, band by band.
fn bands<T>(x: &Operands<T>) -> Vec<Vec<usize>> {
    let counts = |&i: &usize| x.targets[i] != x.problem.ignore_index;
    let counted: Vec<_> = (0..x.problem.tokens).filter(counts).collect();
    counted.chunks(BAND).map(<[usize]>::to_vec).collect()
}

fn tiles(vocab: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (0..vocab.div_ceil(TILE)).map(move |tile| tile * TILE..vocab.min((tile + 1) * TILE))
}

/// Gives tokens other targets, but not ignored ones.
fn aim<T>(x: &mut Operands<T>, target: impl Fn(usize, i64) -> i64) {
    let counted = x.targets.indexed_iter_mut().filter(|(_, y)| **y >= 0);
    counted.for_each(|(i, y)| *y = target(i, *y));
}

/// With the identity as h, dw is da: so all choices and bounds follow from it.
fn formulas<T: Element>(level: Level) {
    let options = Options { level, ..Options::default() };
    let mut x = Operands::<T>::new(problem(250, 250, 5 * TILE + 3));
    x.h = Array2::from_shape_fn((250, 250), |(i, c)| T::from_f32(f32::from(u8::from(i == c))));
    // Some classes are unlikely for every token; the logits of the others spread over 20.
    x.w.mapv_inplace(|w| T::from_f32(25.0 * w.to_f32()));
    x.bias.slice_mut(s![TILE..2 * TILE]).fill(T::from_f32(-30.0));
    // Few tiles hold a target of the first two bands.
    aim(&mut x, |i, y| if i < 220 { y % 256 } else { y });
    let exact = plain(&x, &options);
    let (w, da) = (x.w.mapv(|w| w.to_f32()), exact.dw.as_ref().unwrap().t());
    let mut counts = Vec::new();
    for eps in [0.0, 1e-7, 1e-3, 0.1, 0.6, 1e9] {
        let (found, certificate) = filtered(&x, Filter::Below { eps }, &options);
        let what = format!("{} {level} {eps}", T::DTYPE);
        let (mut dw, mut kept, mut all) = (da.to_owned(), 0, 0);
        let (mut by_token, mut by_class) = (vec![0.0; 250], vec![0.0; x.problem.vocab]);
        for band in bands(&x) {
            for tile in tiles(x.problem.vocab) {
                let pairs = || band.iter().flat_map(|&i| tile.clone().map(move |v| (i, v)));
                let size = |pair: (usize, usize)| f64::from(da[pair].abs());
                all += 1;
                if !pairs().all(|pair| size(pair) < eps) {
                    kept += 1;
                    continue;
                }
                let widest = tile.clone().map(|v| norm(w.row(v))).fold(0.0, f64::max);
                pairs().for_each(|(i, v)| {
                    by_token[i] += size((i, v)) * widest;
                    by_class[v] += size((i, v));
                    dw[(i, v)] = 0.0;
                });
            }
        }
        assert_eq!(certificate.tiles, (kept, all), "{what}");
        counts.push(kept);
        assert_same(found.dw.as_ref().unwrap().iter(), dw.t(), &format!("dw {what}"));
        let found_bias = found.dbias.as_ref().unwrap();
        assert_same(found_bias, exact.dbias.as_ref().unwrap(), &format!("dbias {what}"));
        let pairs = [(&certificate.dh, by_token), (&certificate.dw, by_class)];
        for (found, wanted) in pairs {
            for (&found, wanted) in found.iter().zip(wanted) {
                let found = f64::from(found);
                // A class adds 2⁻¹⁴² for each band.
                let most = wanted * (1.0 + LOOSE) + 3.0 * 2f64.powi(-142);
                assert!(found >= wanted && found <= most, "{what}: {found} of {wanted}");
            }
        }
    }
    // Three bands, six tiles: from all to none.
    assert_eq!((counts[0], counts[5]), (18, 0), "{} {level}", T::DTYPE);
    assert!(
        counts.windows(2).all(|x| x[0] >= x[1]) && counts[1] < 18 && counts[3] > 0,
        "{counts:?}"
    );
}

#[test]
fn choices_and_bounds_are_those_of_the_formulas() {
    for &level in Level::available() {
        formulas::<f32>(level);
        formulas::<bf16>(level);
        formulas::<f16>(level);
    }
}

/// The norms of the differences of rows lie within the bounds; where nothing was left out there are none.
fn holds(x: &Operands<impl Element>, filter: Filter, options: &Options) -> (usize, usize) {
    let exact = plain(x, options);
    let (found, certificate) = filtered(x, filter, options);
    let everything = Filter::Below { eps: f64::from(f32::MAX) };
    let (_, all) = filtered(x, everything, options);
    assert_eq!(all.tiles.0, 0);
    // γ_n of the sums on either side: 256 classes and the tree above, all tokens one after the other. The
    // bounds of leaving out everything bound the sums of absolute terms.
    let gamma = |n: usize| 2.0 * n as f64 * f64::from(f32::EPSILON);
    let sides = [
        ("dh", &found.dh, &exact.dh, &certificate.dh, &all.dh, gamma(TILE + 16)),
        ("dw", &found.dw, &exact.dw, &certificate.dw, &all.dw, gamma(x.problem.tokens)),
    ];
    for (name, found, exact, bounds, terms, gamma) in sides {
        let rows = found.as_ref().unwrap().rows().into_iter().zip(exact.as_ref().unwrap().rows());
        for (row, (found, exact)) in rows.enumerate() {
            let what = format!("{filter:?}: {name} of {row} at {}", options.level);
            if bounds[row] == 0.0 {
                assert_same(found.iter(), exact.iter(), &what);
                continue;
            }
            let each = found.iter().zip(exact).map(|(&x, &y)| f64::from(x) - f64::from(y));
            let error = each.map(|x| x * x).sum::<f64>().sqrt();
            let most = f64::from(bounds[row]) + gamma * f64::from(terms[row]);
            assert!(error <= most, "{what}: {error} of {most}");
            if let Filter::Within { dh, dw } = filter {
                let budget = if name == "dh" { dh } else { dw };
                assert!(f64::from(bounds[row]) <= budget, "{what}: {} of {budget}", bounds[row]);
            }
        }
    }
    assert_same(found.dbias.iter().flatten(), exact.dbias.iter().flatten(), "dbias");
    certificate.tiles
}

/// All passes over problems that are peaked, uniform or neither.
fn certificates<T: Element>(level: Level) {
    let options = Options { level, ..Options::default() };
    for (spread, cap) in [(1.0, None), (6.0, Some(50.0)), (1e-3, None)] {
        let mut x = Operands::<T>::new(problem(230, 24, 5 * TILE + 3));
        x.problem.softcap = cap;
        x.w.mapv_inplace(|w| T::from_f32(spread * w.to_f32()));
        x.bias.mapv_inplace(|b| T::from_f32(spread * b.to_f32()));
        let mut kept = Vec::new();
        for eps in [0.0, 1e-5, 1e-3, 0.1, 1e9] {
            kept.push(holds(&x, Filter::Below { eps }, &options).0);
        }
        // Three bands of 197 tokens that count, six tiles.
        assert_eq!((kept[0], kept[4]), (18, 0));
        assert!(kept.is_sorted_by(|a, b| a >= b), "{kept:?}");
        let within = |dh, dw| holds(&x, Filter::Within { dh, dw }, &options).0;
        let (_, all) = filtered(&x, Filter::Below { eps: 1e9 }, &options);
        let most = |x: &Array1<f32>| f64::from(x.iter().copied().fold(0.0, f32::max));
        let (dh, dw) = (most(&all.dh), most(&all.dw));
        assert_eq!((within(0.0, dw), within(dh, 0.0), within(dh, dw)), (18, 18, 0));
        // Of a budget that all tiles together just exceed, they have used up most before the last.
        for (dh, dw) in [(0.5 * dh, dw), (dh, 0.5 * dw), (0.999 * dh, dw), (dh, 0.999 * dw)] {
            let kept = within(dh, dw);
            assert!(kept > 0 && kept < 18, "{kept}");
        }
    }
}

#[test]
fn certificates_hold() {
    for &level in Level::available() {
        certificates::<f32>(level);
        certificates::<bf16>(level);
        certificates::<f16>(level);
    }
}

/// Early in a training every probability is 1/V, below any threshold in use: what holds no target is left
/// out, all of it, and the bound is the whole softmax term.
#[test]
fn uniform_probabilities_make_the_certificate_vacuous() {
    let vocab = 20 * TILE;
    let mut x = Operands::<f32>::new(LinearCrossEntropy::new(8, 4, vocab).wide_gradients());
    x.problem.reduction = Reduction::Sum;
    x.h.mapv_inplace(|h| 1e-6 * h);
    x.targets.fill(1); // all in the first tile
    let dloss = arr0(1.0).into_dyn();
    let cotangents = Cotangents::default().dloss(dloss.view());
    // 2⁻¹², which is usual for bfloat16, is above 1/V.
    let (filter, options) = (Filter::Below { eps: 2f64.powi(-12) }, Options::default());
    let (found, certificate) =
        backward(&x.problem, &x.inputs(0..vocab), &cotangents, filter, &options).unwrap();
    assert_eq!(certificate.tiles, (1, 20));
    let tile = |tile: Range<usize>| tile.map(|v| norm(x.w.row(v))).fold(0.0, f64::max) / 20.0;
    let wanted: f64 = tiles(vocab).skip(1).map(tile).sum();
    for &bound in &certificate.dh {
        // Probabilities are 1/V up to e^{1e-5}.
        let ratio = f64::from(bound) / wanted;
        assert!((ratio - 1.0).abs() < 1e-4, "{bound} of {wanted}");
    }
    let (dw, rest) = (found.dw.unwrap(), s![TILE.., ..]);
    assert!(dw.slice(rest).iter().all(|&dw| dw == 0.0));
    assert!(certificate.dw.iter().skip(TILE).all(|&bound| bound > 0.0));
    assert!(certificate.dw.iter().take(TILE).all(|&bound| bound == 0.0));
}

/// Budgets for one pass, for two sweeps, and for the least that there is.
const BUDGETS: [usize; 4] = [64 << 20, 6 << 20, 3 << 20, 0];

/// Of a threshold and of budgets that leave out some tiles, and of a threshold of 0.
fn some_filters<T: Element>(x: &Operands<T>) -> [Filter; 3] {
    let (options, everything) = (Options::default(), Filter::Below { eps: 1e9 });
    let (_, all) = filtered(x, everything, &options);
    let most = |x: &Array1<f32>| f64::from(x.iter().copied().fold(0.0, f32::max));
    let within = Filter::Within { dh: 0.5 * most(&all.dh), dw: 0.9 * most(&all.dw) };
    let filters = [Filter::Below { eps: 1e-3 }, within];
    for filter in filters {
        let (kept, all) = filtered(x, filter, &options).1.tiles;
        assert!(kept > 0 && kept < all, "{filter:?}: {kept} of {all}");
    }
    [filters[0], filters[1], Filter::Below { eps: 0.0 }]
}

/// Five bands of tokens that count, by seven tiles of classes. Three of these are unlikely; targets are in the
/// first and, of later tokens, in the third.
fn peaked<T: Element>() -> Operands<T> {
    let mut x = Operands::<T>::new(problem(530, 261, 6 * TILE + 11));
    x.w.mapv_inplace(|w| T::from_f32(6.0 * w.to_f32()));
    for tile in [1, 3, 4] {
        x.bias.slice_mut(s![tile * TILE..(tile + 1) * TILE]).fill(T::from_f32(-400.0));
    }
    aim(&mut x, |i, y| y % 256 + if i < 300 { 0 } else { 512 });
    x
}

fn assert_same_gradients(found: &Gradients<f32>, wanted: &Gradients<f32>, what: &str) {
    assert_same(found.dh.iter().flatten(), wanted.dh.iter().flatten(), &format!("dh {what}"));
    assert_same(found.dw.iter().flatten(), wanted.dw.iter().flatten(), &format!("dw {what}"));
    let [found, wanted] = [found, wanted].map(|x| x.dbias.iter().flatten());
    assert_same(found, wanted, &format!("dbias {what}"));
}

#[test]
fn no_bit_depends_on_the_budget_or_on_threads() {
    let x = peaked::<bf16>();
    for filter in some_filters(&x) {
        let wanted = filtered(&x, filter, &Options::default());
        for threads in [1, 2, 5] {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for memory_budget in BUDGETS {
                let options = Options { memory_budget, ..Options::default() };
                let (found, certificate) = pool.install(|| filtered(&x, filter, &options));
                let what = format!("{filter:?}, {threads} threads, {memory_budget} bytes");
                assert_same_gradients(&found, &wanted.0, &what);
                assert_eq!(certificate, wanted.1, "{what}");
            }
        }
    }
}

#[test]
fn a_threshold_of_0_has_the_bits_of_no_filter() {
    fn same<T: Element>() {
        let mut x = peaked::<T>();
        for spread in [1.0, 1e4] {
            // With a spread of 10⁴ most of da is 0: below no threshold of 0.
            x.bias.mapv_inplace(|b| T::from_f32(spread * b.to_f32()));
            for &level in Level::available() {
                let options = Options { level, ..Options::default() };
                let (found, certificate) = filtered(&x, Filter::Below { eps: 0.0 }, &options);
                assert_same_gradients(&found, &plain(&x, &options), &format!("{level}"));
                assert_eq!(certificate.tiles, (35, 35));
                assert!(certificate.dh.iter().chain(&certificate.dw).all(|&bound| bound == 0.0));
            }
        }
    }
    same::<f32>();
    same::<bf16>();
    same::<f16>();
}

/// Each gradient alone, or none, in places between elements that belong to somebody else, with the same
/// certificate; whatever the budget.
#[test]
fn each_gradient_alone_has_the_bits_of_all() {
    let x = peaked::<f32>();
    let LinearCrossEntropy { tokens, dim, vocab, .. } = x.problem;
    for filter in some_filters(&x) {
        let wanted = filtered(&x, filter, &Options::default());
        for (which, memory_budget) in (0..4).flat_map(|which| BUDGETS.map(|bytes| (which, bytes))) {
            let options = Options { memory_budget, ..Options::default() };
            let mut dh = Array2::from_elem((tokens, 2 * dim), 7.0f32);
            let mut dw = Array2::from_elem((vocab, 2 * dim), 7.0f32);
            let mut dbias = Array1::from_elem(2 * vocab, 7.0f32);
            let places = GradientsMut {
                dh: (which == 0).then(|| dh.slice_mut(s![.., ..;2])),
                dw: (which == 1).then(|| dw.slice_mut(s![.., ..;2])),
                dbias: (which == 2).then(|| dbias.slice_mut(s![..;2])),
            };
            let (mut by_token, mut by_class) = (vec![7.0; 2 * tokens], vec![7.0; 3 * vocab]);
            let mut count = (0, 0);
            let strided = |x| ndarray::ArrayViewMut1::from(x);
            let bounds = CertificateMut {
                dh: strided(&mut by_token[..]).slice_move(s![..;-2]),
                dw: strided(&mut by_class[..]).slice_move(s![..;3]),
                tiles: &mut count,
            };
            x.with_cotangents(|y| {
                let (workspace, inputs) = (Workspace::new(), x.inputs(0..vocab));
                backward_into(&workspace, &x.problem, &inputs, y, filter, places, bounds, &options)
            })
            .unwrap();
            let what = format!("{which} {filter:?} {memory_budget} bytes");
            let [dh_bits, dw_bits] =
                [dh.slice(s![.., ..;2]), dw.slice(s![.., ..;2])].map(|x| x.to_owned());
            let gradients = &wanted.0;
            match which {
                0 => assert_same(&dh_bits, gradients.dh.iter().flatten(), &what),
                1 => assert_same(&dw_bits, gradients.dw.iter().flatten(), &what),
                2 => {
                    let found = dbias.slice(s![..;2]);
                    assert_same(found.iter(), gradients.dbias.iter().flatten(), &what);
                }
                _ => assert!(dh.iter().chain(&dw).chain(&dbias).all(|&x| x == 7.0)),
            }
            let by_token = ArrayView1::from(&by_token);
            assert_eq!(by_token.slice(s![..;-2]), wanted.1.dh, "{what}");
            assert_eq!(ArrayView1::from(&by_class).slice(s![..;3]), wanted.1.dw, "{what}");
            assert_eq!(count, wanted.1.tiles, "{what}");
        }
    }
}

#[test]
fn gradients_of_the_storage_type_are_wide_ones_rounded() {
    let mut x = peaked::<f16>();
    let filter = some_filters(&x)[0];
    let (wide, bounds) = filtered(&x, filter, &Options::default());
    x.problem.wide_gradients = false;
    for memory_budget in BUDGETS {
        let options = Options { memory_budget, ..Options::default() };
        let inputs = x.inputs(0..x.problem.vocab);
        let result =
            x.with_cotangents(|y| backward(&x.problem, &inputs, y, filter, &options).unwrap());
        let (narrow, certificate) = result;
        assert_eq!(certificate, bounds);
        let rounded = |x: &Option<Array2<f32>>| x.as_ref().map(|x| x.mapv(f16::from_f32));
        assert_eq!((narrow.dh, narrow.dw), (rounded(&wide.dh), rounded(&wide.dw)));
        assert_eq!(narrow.dbias, wide.dbias.as_ref().map(|x| x.mapv(f16::from_f32)));
    }
}

/// NaN is not small; and what a product would make NaN is not left out, though da is 0.
#[test]
fn what_is_not_finite_is_never_left_out() {
    for filter in [Filter::Below { eps: 1e30 }, Filter::Within { dh: 1e30, dw: 1e30 }] {
        for &level in Level::available() {
            let options = Options { level, ..Options::default() };
            // The band of tokens that has it is kept: 197 tokens of 230 count, and token 120 is one of the second.
            let mut x = Operands::<f32>::new(problem(230, 24, 5 * TILE + 3));
            x.h[[120, 3]] = f32::NAN;
            let (found, certificate) = filtered(&x, filter, &options);
            assert_eq!(certificate.tiles, (6, 18));
            assert!(found.dw.unwrap().iter().all(|x| x.is_nan()));
            // And where h and w are finite.
            let mut x = Operands::<f32>::new(problem(230, 24, 5 * TILE + 3));
            x.token_weights[120] = f32::NAN;
            assert_eq!(filtered(&x, filter, &options).1.tiles, (6, 18));
            x.bias[TILE] = f32::NAN;
            assert_eq!(filtered(&x, filter, &options).1.tiles, (18, 18));
            // At the end of a cap a logit stands still: da = 0, and 0 · ∞ is NaN.
            let mut x = Operands::<f32>::new(problem(230, 24, 5 * TILE + 3));
            x.problem.softcap = Some(5.0);
            x.h[[120, 3]] = f32::INFINITY;
            let (found, certificate) = filtered(&x, filter, &options);
            assert_eq!(certificate.tiles, (6, 18));
            assert!(found.dw.unwrap().column(3).iter().all(|x| x.is_nan()));
            // The tile of classes that has it is kept.
            let mut x = Operands::<f32>::new(problem(230, 24, 5 * TILE + 3));
            x.problem.softcap = Some(5.0);
            x.w[[2 * TILE + 1, 3]] = f32::NEG_INFINITY;
            let (found, certificate) = filtered(&x, filter, &options);
            assert_eq!(certificate.tiles, (3, 18));
            assert!(found.dh.unwrap().column(3).iter().any(|x| x.is_nan()));
        }
    }
}

#[test]
fn ignored_tokens_are_absent() {
    let mut x = peaked::<f32>();
    let filters = some_filters(&x);
    let wanted = filters.map(|filter| filtered(&x, filter, &Options::default()));
    for i in (0..x.problem.tokens).filter(|i| i % 7 == 3) {
        x.h.row_mut(i).fill(f32::NAN);
        x.token_weights[i] = f32::NAN;
    }
    for (filter, wanted) in filters.into_iter().zip(wanted) {
        let (found, certificate) = filtered(&x, filter, &Options::default());
        assert_same_gradients(&found, &wanted.0, "with NaN in ignored tokens");
        assert_eq!(certificate, wanted.1);
        assert!(certificate.dh.iter().skip(3).step_by(7).all(|&bound| bound == 0.0));
    }
    x.targets.fill(x.problem.ignore_index);
    let (found, certificate) = filtered(&x, filters[0], &Options::default());
    assert!(found.dw.unwrap().iter().all(|&x| x == 0.0));
    assert_eq!(certificate.tiles, (0, 0));
    assert!(certificate.dh.iter().chain(&certificate.dw).all(|&bound| bound == 0.0));
}

#[test]
fn errors_name_what_is_wrong_and_nothing_is_written() {
    let mut x = Operands::<f32>::new(problem(5, 3, 7));
    let call = |x: &Operands<f32>, filter, tokens: usize, vocab: usize| {
        let mut dw = Array2::from_elem((7, 3), 7.0f32);
        let (mut by_token, mut by_class) = (Array1::zeros(tokens), Array1::zeros(vocab));
        let mut count = (7, 7);
        by_token.fill(7.0);
        let bounds =
            CertificateMut { dh: by_token.view_mut(), dw: by_class.view_mut(), tiles: &mut count };
        let places = GradientsMut { dw: Some(dw.view_mut()), ..GradientsMut::default() };
        let (inputs, options) = (x.inputs(0..7), Options::default());
        let error = x.with_cotangents(|y| {
            let workspace = Workspace::new();
            backward_into(&workspace, &x.problem, &inputs, y, filter, places, bounds, &options)
        });
        assert!(dw.iter().chain(&by_token).all(|&x| x == 7.0) && count == (7, 7));
        error.unwrap_err().to_string()
    };
    for (filter, found) in [
        (Filter::Below { eps: f64::NAN }, "`filter.eps` must be finite, at least 0, found NaN"),
        (
            Filter::Below { eps: f64::INFINITY },
            "`filter.eps` must be finite, at least 0, found inf",
        ),
        (Filter::Below { eps: -1.0 }, "`filter.eps` must be finite, at least 0, found -1"),
        (
            Filter::Within { dh: f64::INFINITY, dw: 0.0 },
            "`filter.dh` must be finite, at least 0, found inf",
        ),
        (
            Filter::Within { dh: 0.0, dw: -0.5 },
            "`filter.dw` must be finite, at least 0, found -0.5",
        ),
    ] {
        assert_eq!(call(&x, filter, 5, 7), found);
        let owned = x.with_cotangents(|y| {
            backward(&x.problem, &x.inputs(0..7), y, filter, &Options::default())
        });
        assert_eq!(owned.unwrap_err().to_string(), found);
    }
    let filter = Filter::Below { eps: 0.5 };
    assert!(call(&x, filter, 4, 7).contains("`certificate.dh`"));
    assert!(call(&x, filter, 5, 8).contains("`certificate.dw`"));
    x.targets[1] = 7;
    assert!(call(&x, filter, 5, 7).contains("`targets[1]`"));
}
