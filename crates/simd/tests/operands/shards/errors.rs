//! Errors in shards, partials and parts are named, and nothing is written.

use super::partials::partial;
use super::tensors::{Operands, everything, totals};
use etalon_problem::linear_cross_entropy::{Inputs, OutputMut};
use etalon_problem::{Error, LinearCrossEntropy};
use etalon_simd::linear_cross_entropy::shard::{
    Combine, GradientsMut, Partial, Shard, backward_shard_into, combine, combine_dh,
    combine_dh_into, forward_shard, forward_shard_into, output_into,
};
use etalon_simd::{Options, Workspace};
use half::bf16;
use ndarray::{Array1, Array2, Array3, arr0, s};
use std::ops::Range;

fn complaint<X: std::fmt::Debug>(result: Result<X, Error>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn owners_and_classes_are_counted() {
    let a = partial(0..2, &[0.5, -1.0], 1);
    assert_eq!(
        complaint(a.combine(a)),
        "`shards` must be owners of each target once, found two owners"
    );
    let many = Partial { classes: u32::MAX, target: None, ..a };
    assert_eq!(
        complaint(a.combine(many)),
        "`classes` must be at most 4294967295, found 4294967297"
    );
    let x = Operands::<f32>::new(everything(5, 3, 600));
    let options = Options::default();
    let part = |classes: Range<usize>| {
        let shard = Shard::new(&x.problem, classes.clone()).unwrap();
        forward_shard(&shard, &x.inputs(classes), &options).unwrap()
    };
    let (mut first, second) = (part(0..256), part(256..600));
    let both = |first: &Array2<Partial>, ranges: [Range<usize>; 2]| {
        let [a, b] = ranges;
        combine(&x.problem, &[(a, first.view()), (b, second.view())])
    };
    let sound = both(&first, [0..256, 256..600]).unwrap();
    assert!(sound.iter().enumerate().all(|(i, total)| (i == 3) == (total.classes == 0)), "ignored");
    let wanted = "`shards[1]` must be classes from 256 on, of 600, found 200..600";
    assert_eq!(complaint(both(&first, [0..256, 200..600])), wanted);
    assert_eq!(complaint(both(&first, [0..256, 300..600])), wanted.replace("200..", "300.."));
    let wanted = "`shards` must be all 600 classes together, found 0..512";
    assert_eq!(complaint(both(&first, [0..256, 256..512])), wanted);
    let wanted = "`shards` must be all 600 classes together, found 0..0";
    assert_eq!(complaint(combine(&x.problem, &[])), wanted);
    let wanted = "`shards[0]` must have shape [2, 5], found [1, 5]";
    assert_eq!(complaint(both(&first, [0..300, 300..600])), wanted);
    // Two owners, another's classes, and no owner.
    first[[0, 1]].target = Some(0.0);
    let wanted =
        "`owner of targets[1]` must be one shard, found one with 0..256 and one with 256..512";
    assert_eq!(complaint(both(&first, [0..256, 256..600])), wanted);
    first[[0, 1]].target = None;
    first[[0, 1]].classes = 7;
    let wanted = "`partial of token 1 and classes 0..256` must be of 256 classes, found 7";
    assert_eq!(complaint(both(&first, [0..256, 256..600])), wanted);
    let shard = Shard::new(&x.problem, 0..256).unwrap();
    let mut totals = sound.clone();
    let write = |totals: &Array1<Partial>| {
        let mut loss = arr0(7.0f32).into_dyn();
        let out = OutputMut { loss: Some(loss.view_mut()), ..OutputMut::default() };
        let inputs = x.inputs(0..256);
        let error = output_into(&Workspace::new(), &shard, &inputs, totals.view(), out);
        assert_eq!(loss[[]], 7.0, "nothing is half-written");
        complaint(error)
    };
    totals[1].classes = 256;
    assert_eq!(write(&totals), "`totals[1]` must be of all 600 classes, found 256");
    totals[1] = Partial { argmax: Some(600), ..sound[1] };
    let wanted = "`totals[1].argmax` must be a class below 600, found Some(600)";
    assert_eq!(write(&totals), wanted);
    totals[1] = Partial { target: None, ..sound[1] };
    assert_eq!(write(&totals), "`targets[1]` must be a class of one of the shards, found 389");
    let short = sound.slice(s![1..]).to_owned();
    assert_eq!(write(&short), "`totals` must have shape [5], found [4]");
}

#[test]
fn wrong_operands_of_shards_are_named_and_nothing_is_written() {
    let mut x = Operands::<f32>::new(everything(5, 3, 600));
    let options = Options::default();
    let reversed = Range { start: 3, end: 2 };
    for (classes, found) in [(0..601, "0..601"), (601..601, "601..601"), (reversed, "3..2")] {
        let wanted = format!("`classes` must be a range within 0..600, found {found}");
        assert_eq!(complaint(Shard::new(&x.problem, classes)), wanted);
    }
    let wide = LinearCrossEntropy::new(1, 1, 1 << 33);
    let wanted = "`vocab` must be at most 4294967295 in shards, found 8589934592";
    assert_eq!(complaint(Shard::new(&wide, 0..0)), wanted);
    let totals = totals(&x, &[0, 600], &options).unwrap();
    let problem = x.problem.clone();
    let shard = Shard::new(&problem, 100..300).unwrap();
    assert_eq!(shard.nodes().collect::<Vec<_>>(), [100..256, 256..300]);
    // More memory than there is: a view of one row is as many as it says.
    let many = LinearCrossEntropy::new(1 << 50, 1, 1 << 20);
    let (one, zero) = (Array2::<f32>::ones((1, 1)), Array1::<i64>::zeros(1));
    let of_many = Inputs::new(
        one.broadcast((1 << 50, 1)).unwrap(),
        one.broadcast(((1 << 20) - 300, 1)).unwrap(),
        zero.broadcast(1 << 50).unwrap(),
    );
    let huge = Shard::new(&many, 300..1 << 20).unwrap();
    let error = forward_shard(&huge, &of_many, &options);
    assert!(matches!(error, Err(Error::Memory { .. })), "{error:?}");
    let wanted = "`w` must have shape [200, 3], found [600, 3]";
    let all = x.inputs(0..600);
    assert_eq!(complaint(forward_shard(&shard, &all, &options)), wanted);
    let gradients = |x: &Operands<f32>, classes: Range<usize>, dh: [usize; 3], dw: [usize; 2]| {
        let mut dh = Array3::from_elem(dh, 7.0);
        let mut dw = Array2::from_elem(dw, 7.0);
        let places = GradientsMut {
            dh: Some(dh.view_mut()),
            dw: Some(dw.view_mut()),
            ..GradientsMut::default()
        };
        let (workspace, inputs) = (Workspace::new(), x.inputs(classes));
        let error = x.with_cotangents(|y| {
            backward_shard_into(&workspace, &shard, &inputs, totals.view(), y, places, &options)
        });
        assert!(dh.iter().chain(&dw).all(|&x| x == 7.0), "nothing is half-written");
        complaint(error)
    };
    let wanted = "`bias` must have shape [200], found [199]";
    let mut short = x.clone();
    short.bias = Array1::zeros(299);
    let inputs = Inputs { bias: Some(short.bias.slice(s![100..])), ..x.inputs(100..300) };
    assert_eq!(complaint(forward_shard(&shard, &inputs, &options)), wanted);
    let wanted = "`dw` must have shape [200, 3], found [600, 3]";
    assert_eq!(gradients(&x, 100..300, [1, 5, 3], [600, 3]), wanted);
    let wanted = "`dh` must have shape [2, 5, 3], found [3, 5, 3]";
    assert_eq!(gradients(&x, 100..300, [3, 5, 3], [200, 3]), wanted);
    let wanted = "`dh` must have shape [1, 5, 3], found [1, 4, 3]";
    assert_eq!(gradients(&x, 100..300, [1, 4, 3], [200, 3]), wanted);
    x.targets[4] = 600;
    let wanted = "`targets[4]` must be a class below 600 or the ignored -100, found 600";
    assert_eq!(gradients(&x, 100..300, [1, 5, 3], [200, 3]), wanted);
    let mut partials = Array2::from_elem((2, 5), Partial { m: 7.0, ..Partial::identity() });
    let (workspace, inputs) = (Workspace::new(), x.inputs(100..300));
    let error = forward_shard_into(&workspace, &shard, &inputs, partials.view_mut(), &options);
    assert_eq!(complaint(error), wanted);
    assert!(partials.iter().all(|x| x.m == 7.0), "nothing is half-written");
    let error =
        forward_shard_into(&workspace, &shard, &inputs, partials.slice_mut(s![1.., ..]), &options);
    assert_eq!(complaint(error), "`partials` must have shape [2, 5], found [1, 5]");
}

#[test]
fn wrong_parts_of_dh_are_named_and_nothing_is_written() {
    let problem = LinearCrossEntropy::new(2, 3, 600);
    let mut dh = Array2::from_elem((2, 3), bf16::ONE);
    let mut add = |ranges: [Range<usize>; 2], shapes: [[usize; 3]; 2], rows: usize| {
        let [a, b] = shapes.map(Array3::<f32>::zeros);
        let [first, second] = ranges;
        let shards = [(first, a.view()), (second, b.view())];
        let error = combine_dh_into(&problem, &shards, dh.slice_mut(s![..rows, ..]));
        let kept = dh.iter().all(|&x| x == bf16::ONE);
        (error.map_err(|error| error.to_string()), kept)
    };
    let error = |text: &str| (Err(text.to_string()), true);
    let (one, three) = ([1, 2, 3], [3, 2, 3]);
    let ranges = [0..300, 300..600];
    let wanted = "`shards[1]` must have shape [2, 2, 3], found [3, 2, 3]";
    assert_eq!(add(ranges.clone(), [one, three], 2), error(wanted));
    let wanted = "`shards[0]` must have shape [1, 2, 3], found [1, 3, 3]";
    assert_eq!(add(ranges.clone(), [[1, 3, 3], one], 2), error(wanted));
    let wanted = "`dh` must have shape [2, 3], found [1, 3]";
    assert_eq!(add(ranges.clone(), [one, one], 1), error(wanted));
    let wanted = "`shards[1]` must be classes from 300 on, of 600, found 301..600";
    assert_eq!(add([0..300, 301..600], [one, one], 2), error(wanted));
    assert_eq!(add(ranges, [one, [2, 2, 3]], 2), (Ok(()), false));
    let empty: [(Range<usize>, ndarray::ArrayView3<'_, f32>); 0] = [];
    assert!(combine_dh::<f32>(&problem, &empty).is_err());
}
