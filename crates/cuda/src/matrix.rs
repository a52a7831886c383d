//! All variants.

use crate::family::Family::{self, CrossEntropyPortable, CrossEntropyShards, CrossEntropySm90a};
use crate::family::Unit;
use crate::softmax::{AttentionShape, Hopper, Lengths, Results, Visible};
use crate::target::CONSUMER;
use crate::variant::{Variant, WIDTHS};
use etalon_problem::Dtype::{self, Bf16, F16, F32};

const FLAGS: [bool; 2] = [false, true];
const ALL: [Dtype; 3] = [F32, Bf16, F16];

/// Every value of a list with every one of another.
fn each<A: Copy, B: Copy, const N: usize, const M: usize>(a: [A; N], b: [B; M]) -> impl Iterator<Item = (A, B)> {
    a.into_iter().flat_map(move |x| b.map(|y| (x, y)))
}

/// Every variant that a pass may ask for.
pub fn every_variant() -> Vec<Variant> {
    let mut all = vec![Variant::moves(2), Variant::moves(4), Variant::tables()];
    all.push(Variant::peak(Unit::Ffma, F32));
    all.extend(each([Unit::Mma, Unit::Wgmma], [Bf16, F16]).map(|(unit, storage)| Variant::peak(unit, storage)));
    all.extend(each(ALL, FLAGS).map(|(storage, second)| Variant::cross_entropy(CrossEntropyPortable, storage, second)));
    all.extend(ALL.map(|storage| Variant::cross_entropy(CrossEntropyShards, storage, false)));
    all.extend([Bf16, F16].map(|storage| Variant::cross_entropy(CrossEntropySm90a, storage, false)));
    for (storage, options) in each(ALL, FLAGS) {
        add_attention(&mut all, storage, options);
    }
    add_linear(&mut all);
    for (storage, width) in each([Bf16, F16], [64, 128]) {
        add_hopper(&mut all, storage, width);
    }
    for columns in [[192, 128], [256, 256]] {
        add_wide_hopper(&mut all, columns);
    }
    all.sort();
    // Wide values of sm80 take several launches of the same kernels, and some of sm90a are within others.
    all.dedup();
    all
}

/// attention, attention_lse and lazy_attention on the levels portable and sm80.
fn add_attention(all: &mut Vec<Variant>, storage: Dtype, options: bool) {
    let values = [None, Some(WIDTHS[0]), Some(WIDTHS[1]), Some(WIDTHS[2])];
    for (dim, value_dim) in each(WIDTHS, values) {
        let shapes = FLAGS.map(|whole| AttentionShape { storage, dim, value_dim, options, whole });
        let is_narrow = dim.max(value_dim.unwrap_or(1)) <= 128;
        all.push(shapes[0].portable(Family::AttentionPortable));
        all.extend([shapes[0].portable(Family::AttentionPortableSecondOrder), shapes[0].light_second()]);
        let has_forward = value_dim.is_some() && (dim <= 128 || storage != F32) || storage == F32 && is_narrow;
        let fallbacks = [(false, has_forward), (true, is_narrow || storage != F32)].into_iter().filter(|x| x.1);
        all.extend(fallbacks.map(|(backward, _)| shapes[0].fallback(backward)));
        let lazy = shapes[0].lazy_portable();
        all.extend([lazy.again(), lazy].into_iter().filter(|_| value_dim.is_some()));
        match (storage, is_narrow) {
            (F32, true) => all.extend(each(shapes, FLAGS).map(|(shape, bf16x3)| shape.sm80_f32(bf16x3))),
            (F32, false) => {}
            (_, true) => all.extend(shapes.map(|shape| shape.narrow(Family::AttentionSm80Fused))),
            (_, false) => all.extend(shapes.iter().flat_map(|shape| wide(*shape))),
        }
        if storage != F32 {
            let tiles = if dim <= 128 { 0..3 } else { 0..1 };
            let of = |n| shapes.map(|shape| shape.sm80().with("TILES", n));
            all.extend(tiles.flat_map(of));
            let is_lazy = dim <= 128 && value_dim.is_some();
            all.extend(shapes.into_iter().filter(|_| is_lazy).map(AttentionShape::lazy_sm80));
        }
        if storage == Bf16 && is_narrow {
            all.extend(shapes.map(|shape| shape.narrow(Family::AttentionSm80SecondOrder)));
            let is_plain = (dim, value_dim, options) == (WIDTHS[0], Some(WIDTHS[0]), false);
            all.extend(is_plain.then(|| shapes[1].narrow(Family::AttentionSm90aSecondOrder)));
        }
    }
}

/// linear_attention on the levels portable and sm80.
fn add_linear(all: &mut Vec<Variant>) {
    for (storage, width) in each(ALL, WIDTHS) {
        all.extend(FLAGS.map(|second| Variant::linear(storage, width, second)));
        for other in [64, 128] {
            let tensor = |whole| Variant::linear_tensor(storage, [width, other], whole);
            all.extend(FLAGS.map(tensor).into_iter().filter(|_| storage != F32 && width <= 128));
        }
    }
}

/// The level sm90a of all but linear_cross_entropy.
fn add_hopper(all: &mut Vec<Variant>, storage: Dtype, width: usize) {
    all.extend(FLAGS.map(|by_token| Variant::hopper_linear(storage, width, by_token)));
    for of in every_hopper(storage, [width; 2]) {
        let boxed = Hopper { boxes: true, ..of };
        all.extend(of.has_boxes().then(|| Variant::hopper_forward(boxed, true)));
        all.extend(of.fuses_boxes().then(|| Variant::hopper_backward(boxed, Results::All)));
        all.extend(FLAGS.map(|backward| Variant::hopper_lazy(of, backward)));
        all.extend(FLAGS.map(|values| Variant::hopper_forward(of, values)));
        let two = |values| Variant::hopper_forward(of, values).with("GROUPS", 2);
        all.extend(FLAGS.map(two));
        let results = [Results::Lse, Results::All, Results::Alone];
        all.extend(results.map(|results| Variant::hopper_backward(of, results)));
    }
}

/// attention with D or E above 128 on the level sm90a.
fn add_wide_hopper(all: &mut Vec<Variant>, columns: [usize; 2]) {
    for of in every_hopper(Bf16, columns).filter(|of| !of.options) {
        all.extend([Variant::hopper_forward(of, true), Variant::hopper_backward(of, Results::All)]);
    }
}

/// Masks, lengths and options of kernels of attention for sm90a with so many columns of q and v.
fn every_hopper(storage: Dtype, [width, values]: [usize; 2]) -> impl Iterator<Item = Hopper> {
    let lengths = [Lengths::Equal, Lengths::Own, Lengths::Listed];
    let masks = each([Visible::All, Visible::Window, Visible::Spans], lengths);
    masks.flat_map(move |(visible, lengths)| {
        FLAGS.map(|options| Hopper { storage, width, values, visible, lengths, options, boxes: false }.within())
    })
}

/// The backward pass of wide operands on tensor cores, with two stages and, where not every device has the
/// shared memory for these, with one.
fn wide(shape: AttentionShape) -> impl Iterator<Item = Variant> {
    let two = shape.sm80_wide(2);
    let one = (two.shared() > CONSUMER).then(|| shape.sm80_wide(1));
    std::iter::once(two).chain(one)
}
