//! Shards of the classes of linear cross-entropy: for cuts at multiples of a tile the bits of the unsharded
//! passes, whatever the type, the budget and the threads.

mod by_name;
mod errors;
mod partials;
pub mod tensors;

use etalon_problem::{LinearCrossEntropy, LseSquareWeight, Reduction};
use etalon_simd::linear_cross_entropy::shard::{
    Dh, Gradients, GradientsMut, Shard, TILE, backward_shard, backward_shard_into, forward_shard,
};
use etalon_simd::{Element, Level, Options, Workspace};
use half::{bf16, f16};
use ndarray::{Array1, Array2, Array3, s};
use proptest::prelude::*;
use rayon::ThreadPoolBuilder;
use std::ops::Range;
use tensors::{Operands, assert_same, assert_same_all, everything, sharded, totals, unsharded};

/// 8.3 tiles; a dim that is no multiple of anything.
fn example<T: Element>() -> Operands<T> {
    Operands::new(everything(101, 37, 8 * TILE + 77))
}

fn cuts_at_tiles<T: Element>(level: Level) {
    let x = example::<T>();
    let (options, v) = (Options { level, ..Options::default() }, x.problem.vocab);
    let wanted = unsharded(&x, &options);
    let tiles: [&[usize]; 4] = [&[3], &[1, 5, 5, 7], &[0, 0, 3, 6, 6], &[1, 2, 3, 4, 5, 6, 7, 8]];
    for tiles in tiles {
        let inner = tiles.iter().map(|tile| tile * TILE);
        let borders: Vec<_> = [0].into_iter().chain(inner).chain([v]).collect();
        let what = format!("{} {level} {borders:?}", T::DTYPE);
        let found = sharded(&x, &borders, Dh::Nodes, &options).unwrap();
        assert_same_all(&found, &wanted, true, &what);
        let found = sharded(&x, &borders, Dh::Sum, &options).unwrap();
        assert_same_all(&found, &wanted, false, &what);
    }
    // Shards that are nodes, of unlike size; and one of all classes, and others of none.
    for borders in [&[0, 4, 6, 7, 8][..], &[0, 8], &[0, 0, 9, 9]] {
        let borders: Vec<_> = borders.iter().map(|tile| v.min(tile * TILE)).chain([v]).collect();
        let what = format!("{} {level} {borders:?}", T::DTYPE);
        let found = sharded(&x, &borders, Dh::Sum, &options).unwrap();
        assert_same_all(&found, &wanted, true, &what);
    }
}

#[test]
fn cuts_at_tiles_have_the_bits_of_the_unsharded_passes() {
    for &level in Level::available() {
        cuts_at_tiles::<f32>(level);
        cuts_at_tiles::<bf16>(level);
        cuts_at_tiles::<f16>(level);
    }
}

#[test]
fn no_bit_of_a_shard_depends_on_budget_threads_or_strides() {
    let mut x = example::<f32>();
    let borders = [0, 300, 5 * TILE, x.problem.vocab];
    let wanted = sharded(&x, &borders, Dh::Nodes, &Options::default()).unwrap();
    // Columns, not rows, lie end to end.
    x.h = x.h.t().as_standard_layout().reversed_axes().into_owned();
    x.w = x.w.t().as_standard_layout().reversed_axes().into_owned();
    for threads in [1, 2, 5] {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for memory_budget in [64 << 20, 2 << 20, 0] {
            let options = Options { memory_budget, ..Options::default() };
            let found = pool.install(|| sharded(&x, &borders, Dh::Nodes, &options).unwrap());
            let what = format!("{threads} threads, {memory_budget} bytes");
            assert_same_all(&found, &wanted, true, &what);
        }
    }
}

/// Each gradient alone, in places between elements that belong to somebody else, has the bits of all.
#[test]
fn each_gradient_of_a_shard_has_the_bits_of_all_wherever_it_is_written() {
    let x = example::<bf16>();
    let (problem, options) = (&x.problem, Options::default());
    let (classes, workspace) = (200..6 * TILE, Workspace::new());
    let totals = totals(&x, &[0, 200, 6 * TILE, problem.vocab], &options).unwrap();
    let shard = Shard::new(problem, classes.clone()).unwrap();
    let inputs = x.inputs(classes.clone());
    let all = |dh| {
        x.with_cotangents(|cotangents| {
            backward_shard(&shard, &inputs, totals.view(), cotangents, dh, &options).unwrap()
        })
    };
    let (wanted, sum) = (all(Dh::Nodes), all(Dh::Sum).dh);
    let nodes = shard.nodes().count();
    assert!(nodes > 2);
    // From the first node to the last.
    let parts = wanted.dh.outer_iter();
    let added = parts.map(|part| part.to_owned()).reduce(|sum, part| sum + part);
    assert_same(added.iter().flatten(), &sum, "the sum of nodes");
    for which in 0..4 {
        let parts = if which == 3 { 1 } else { nodes };
        let mut dh = Array3::from_elem((parts, problem.tokens, 2 * problem.dim), 7.0);
        let mut dw = Array2::from_elem((classes.len(), 2 * problem.dim), bf16::ONE);
        let mut dbias = Array1::from_elem(2 * classes.len(), bf16::ONE);
        let places = GradientsMut {
            dh: [0, 3].contains(&which).then(|| dh.slice_mut(s![.., .., ..;2])),
            dw: (which == 1).then(|| dw.slice_mut(s![.., ..;2])),
            dbias: (which == 2).then(|| dbias.slice_mut(s![..;2])),
        };
        x.with_cotangents(|cotangents| {
            let totals = totals.view();
            backward_shard_into(&workspace, &shard, &inputs, totals, cotangents, places, &options)
        })
        .unwrap();
        match which {
            0 => assert_same(dh.slice(s![.., .., ..;2]).iter(), &wanted.dh, "dh of nodes"),
            1 => assert_same(dw.slice(s![.., ..;2]).iter(), &wanted.dw, "dw"),
            2 => assert_same(dbias.slice(s![..;2]).iter(), wanted.dbias.iter().flatten(), "dbias"),
            _ => assert_same(dh.slice(s![.., .., ..;2]).iter(), &sum, "dh"),
        }
        assert!(dh.slice(s![.., .., 1..;2]).iter().all(|&x| x == 7.0), "between two elements");
        assert!(dw.slice(s![.., 1..;2]).iter().all(|&x| x == bf16::ONE), "between two elements");
    }
}

/// A problem, borders at multiples of a tile, and what makes its logits unusual.
#[derive(Debug, Clone)]
struct Drawn {
    problem: LinearCrossEntropy,
    borders: Vec<usize>,
    /// Classes that are impossible.
    hidden: Range<usize>,
    /// A factor of h: with 200, logits of a row lie more than 104 apart.
    spread: f32,
    /// The token whose h is NaN.
    poison: Option<usize>,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let extents = (0..40usize, 1..20usize, 1..2000usize);
    let options = (any::<[bool; 6]>(), 0..4usize, prop_oneof![Just(1.0f32), Just(200.0)]);
    let cuts = proptest::collection::vec(0..9usize, 0..5);
    let rest = (cuts, any::<[proptest::sample::Index; 3]>(), any::<bool>());
    (extents, options, rest).prop_map(|((tokens, dim, vocab), (on, reduction, spread), rest)| {
        let (mut cuts, [from, to, poison], poisoned) = rest;
        cuts.sort_unstable();
        let tiles = cuts.into_iter().map(|tile| vocab.min(tile * TILE));
        let reductions = [Reduction::Mean, Reduction::Sum, Reduction::None];
        let by = Reduction::By { normaliser: 3.0 };
        let mut problem = everything(tokens, dim, vocab)
            .reduction(reductions.get(reduction).copied().unwrap_or(by));
        problem.class_weights = on[0];
        problem.token_weights = on[1];
        problem.softcap = on[2].then_some(4.0);
        problem.label_smoothing = if on[3] { 0.2 } else { 0.0 };
        problem.lse_square_weight =
            if on[4] { LseSquareWeight::ClassWeight } else { LseSquareWeight::Unweighted };
        problem.outputs.entropy = on[5];
        problem.outputs.argmax = on[5];
        let (from, to) = (from.index(vocab), to.index(vocab));
        Drawn {
            problem,
            borders: [0].into_iter().chain(tiles).chain([vocab]).collect(),
            hidden: from.min(to)..from.max(to),
            spread,
            poison: (poisoned && tokens > 0).then(|| poison.index(tokens)),
        }
    })
}

fn agrees<T: Element>(drawn: &Drawn) {
    let Drawn { problem, borders, hidden, spread, poison } = drawn;
    let mut x = Operands::<T>::new(problem.clone());
    x.h.mapv_inplace(|h| T::from_f32(spread * h.to_f32()));
    x.bias.slice_mut(s![hidden.clone()]).fill(T::from_f32(f32::NEG_INFINITY));
    if let Some(token) = *poison {
        x.h[[token, 0]] = T::from_f32(f32::NAN);
    }
    let options = Options::default();
    let wanted = unsharded(&x, &options);
    let found = sharded(&x, borders, Dh::Nodes, &options).unwrap();
    assert_same_all(&found, &wanted, true, &format!("{} {drawn:?}", T::DTYPE));
}

proptest! {
    #[test]
    fn random_cuts_at_tiles_have_the_bits_of_the_unsharded_passes(drawn in drawn()) {
        agrees::<f32>(&drawn);
        agrees::<bf16>(&drawn);
        agrees::<f16>(&drawn);
    }
}

/// A rank without classes takes part as any other.
#[test]
fn a_shard_without_classes_returns_nothing() {
    let x = Operands::<f16>::new(everything(5, 3, 600));
    let (options, empty) = (Options::default(), Shard::new(&x.problem, 256..256).unwrap());
    let inputs = x.inputs(256..256);
    let partials = forward_shard(&empty, &inputs, &options).unwrap();
    assert_eq!(partials.dim(), (0, 5));
    let totals = totals(&x, &[0, 256, 256, 600], &options).unwrap();
    for (dh, parts) in [(Dh::Sum, 1), (Dh::Nodes, 0)] {
        let gradients = x.with_cotangents(|cotangents| {
            backward_shard(&empty, &inputs, totals.view(), cotangents, dh, &options)
        });
        let Gradients { dh, dw, dbias } = gradients.unwrap();
        assert_eq!((dh, dw.dim()), (Array3::zeros((parts, 5, 3)), (0, 3)));
        assert_eq!(dbias.unwrap().len(), 0);
    }
    // Numbers that its place held do not stay.
    let mut dh = Array3::from_elem((1, 5, 3), 7.0);
    let places = GradientsMut::<f32> { dh: Some(dh.view_mut()), ..GradientsMut::default() };
    let workspace = Workspace::new();
    x.with_cotangents(|y| {
        backward_shard_into(&workspace, &empty, &inputs, totals.view(), y, places, &options)
    })
    .unwrap();
    assert_eq!(dh, Array3::<f32>::zeros((1, 5, 3)));
}
