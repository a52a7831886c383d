//! Cases of large extents: several default tiles and waves, packs of several pieces, wide rows, spans of
//! several chunks.
//!
//! They do not take part in the grid, where each would be paired with every value of every axis. Instead
//! each large shape meets every value of every axis once in as many rounds as the longest axis has
//! values, in an order that the seed draws, and a budget of cost says how many of these are cases of a
//! run: so it takes as long, however many shapes there are. First come the values that a large shape
//! must have together: what only they show is tried at every depth.

use super::axes::{SHAPE, STORAGE};
use super::{Choices, Depth, Point, Spec};
use crate::generate::Stream;
use etalon_problem::{Algorithm, Dtype, Problem, Scores};

/// Budget of a run for the large cases of an algorithm, for each of its seeds, in the units of [`cost`]; and for one
/// of them.
fn budget(algorithm: Algorithm, depth: Depth) -> (f64, f64) {
    match depth {
        // Cases of `kept_tiles` take much of it, and chunks over several tiles.
        Depth::Smoke | Depth::Core if algorithm == Algorithm::Attention => (5.6e7, 2e7),
        Depth::Smoke | Depth::Core if algorithm == Algorithm::LazyAttention => (5e7, 2e7),
        Depth::Smoke | Depth::Core if algorithm == Algorithm::LinearAttention => (3.47e7, 2e7),
        Depth::Smoke | Depth::Core if algorithm == Algorithm::LinearCrossEntropy => (4.05e7, 2e7),
        Depth::Smoke | Depth::Core => (4.2e7, 2e7),
        Depth::Full | Depth::Soak => (1.5e9, 1.5e8),
    }
}

/// Cost of judging a problem: the products and sums of a pass as its definition has them, which is the reference's
/// work, and every element.
pub(crate) fn cost(problem: &Problem) -> f64 {
    let product = |extents: &[usize]| extents.iter().map(|&n| n as f64).product::<f64>();
    match problem {
        Problem::Attention(x) => of_scores(&x.scores, x.value_dim),
        Problem::AttentionLse(x) => of_scores(&x.scores, 0),
        // Every decision on its own, and in every pass the products of the one before.
        Problem::LazyAttention(x) => 5.0 * of_scores(&x.scores, x.value_dim),
        Problem::LinearAttention(x) => {
            let e = &x.extents;
            let states = (e.query_heads + 2 * e.key_heads) as f64;
            let elements = states * product(&[e.batch, e.tokens, e.dim + x.value_dim]);
            states * product(&[e.batch, e.tokens, e.dim, x.value_dim]) + ELEMENT * elements
        }
        // Bounds of the second order carry an error with each logit.
        Problem::LinearCrossEntropy(x) => 5.0 * product(&[x.tokens, x.dim, x.vocab]),
    }
}

/// Every pair is looked at; those that count are multiplied, and weighed.
fn of_scores(scores: &Scores, value_dim: usize) -> f64 {
    let e = &scores.extents;
    let heads = (e.batch * e.query_heads) as f64;
    let pairs = heads * (e.queries * e.keys) as f64;
    let rows = heads * (e.queries + e.keys) as f64;
    let width = (e.dim + value_dim) as f64;
    let visible = scores.visible_pairs().map_or(pairs, |visible| visible as f64);
    pairs + visible * (width + WEIGHT) + ELEMENT * rows * width
}

/// Cost of an element, in products: laws copy it, compare it, and change it.
const ELEMENT: f64 = 10.0;

/// Cost of the exponential of a weight and of its error, in products.
const WEIGHT: f64 = 30.0;

/// The stream of points whose values must occur together.
const TOGETHER: &str = "large together";

/// The large cases of a run.
pub(super) fn points(choices: &Choices<'_>, depth: Depth, seed: u64) -> Vec<Spec> {
    let algorithm = choices.algorithm;
    let (mut left, most) = budget(algorithm, depth);
    let once = if depth <= Depth::Core { Point::once(algorithm) } else { &[] };
    let mut points: Vec<Spec> = Vec::new();
    for (is_together, spec) in candidates(choices, seed) {
        let cost = cost(&choices.problem(&spec));
        let again = once.contains(&spec.shape())
            && !is_together
            && points.iter().any(|point| point.shape() == spec.shape());
        if cost <= most.min(left) && !again {
            left -= cost;
            points.push(spec);
        }
    }
    points
}

/// True if values that must occur together are those of a large shape.
pub(super) fn is_large(algorithm: Algorithm, values: &[(&str, &str)]) -> bool {
    values.iter().any(|(_, value)| Point::large(algorithm).contains(value))
}

/// Points that have the values that a large shape must have together, then round by round a point of
/// each large shape. On every other axis, the storage type among them, the value moves on by one with
/// each round. True of the first kind.
fn candidates(choices: &Choices<'_>, seed: u64) -> impl Iterator<Item = (bool, Spec)> {
    let (algorithm, axes) = (choices.algorithm, choices.axes.clone());
    // No tile of any size is of f64: that is what the reference itself is tested with.
    let storage = choices.storage.iter().copied().filter(|&dtype| dtype != Dtype::F64);
    let storage: Vec<Dtype> = storage.collect();
    let has = |(axis, value): &(&str, &str)| {
        let dtype = || storage.iter().any(|dtype| dtype.name() == *value);
        if *axis == STORAGE { dtype() } else { choices.values(axis).contains(value) }
    };
    let shapes: Vec<&str> = match storage.is_empty() {
        true => Vec::new(),
        false => {
            Point::large(algorithm).iter().copied().filter(|shape| has(&(SHAPE, shape))).collect()
        }
    };
    let rounds = axes.iter().filter(|(axis, _)| *axis != SHAPE).map(|(_, names)| names.len()).max();
    let together = Point::together(algorithm).iter();
    let together = together.filter(|x| is_large(algorithm, x) && x.iter().all(has));
    let together = together.enumerate().map(|(at, values)| (TOGETHER, at, 0, values.to_vec()));
    let together: Vec<_> = together.collect();
    // First those that a run can afford.
    let mut shapes: Vec<(usize, &str)> = shapes.into_iter().enumerate().collect();
    shapes.sort_by_key(|(_, shape)| !Point::thin(algorithm).contains(shape));
    let turns = (0..rounds.unwrap_or(0)).flat_map(move |round| {
        let of_shape = move |(at, shape)| ("large", at, round, vec![(SHAPE, shape)]);
        shapes.clone().into_iter().map(of_shape)
    });
    together.into_iter().chain(turns).filter_map(move |(name, at, round, given)| {
        let stream = Stream::new(seed, name);
        let value = |axis: usize, len: usize| {
            let first = stream.below(64 * at + axis, len);
            // Axes of one length do not move in step for ever.
            (first + round * (1 + round / len * axis)) % len
        };
        let value_of = |(axis, (name, names)): (usize, &(&str, Vec<&'static str>))| {
            let given = given.iter().find(|(axis, _)| axis == name);
            given.map_or_else(|| names[value(axis, names.len())], |(_, value)| *value)
        };
        let names: Vec<&str> = axes.iter().enumerate().map(value_of).collect();
        let point = Point::parse(algorithm, &names).ok()?;
        let own = given.iter().find(|(axis, _)| *axis == STORAGE);
        let own = own.and_then(|(_, name)| storage.iter().find(|dtype| dtype.name() == *name));
        let dtype = own.copied().unwrap_or(storage[value(63, storage.len())]);
        Some((name == TOGETHER, Spec { algorithm, dtype, point, seed }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_large_shape_is_at_every_depth() {
        for algorithm in Algorithm::ALL {
            let specs = |depth| points(&Choices::all(algorithm), depth, 5);
            let (core, full) = (specs(Depth::Core), specs(Depth::Full));
            for shape in Point::large(algorithm) {
                let has = |specs: &[Spec]| {
                    let name = format!("/{shape}/");
                    specs.iter().any(|spec| spec.to_string().contains(&name))
                };
                assert!(has(&full), "{algorithm} {shape}");
                // One that alone costs more than core depth allows is left to full depth.
                let left_out = ["long_spans", "big"].contains(shape);
                assert!(has(&core) || left_out || algorithm == Algorithm::LazyAttention, "{shape}");
            }
            assert!(core.len() < full.len());
        }
    }

    #[test]
    fn a_shape_meets_every_mask() {
        let specs = points(&Choices::all(Algorithm::Attention), Depth::Full, 1);
        let masks: BTreeSet<&str> = specs
            .iter()
            .filter_map(|spec| match &spec.point {
                Point::Attention(point) => Some((point.shape.name(), point.mask.name())),
                _ => None,
            })
            .filter_map(|(shape, mask)| (shape == "key_pack").then_some(mask))
            .collect();
        assert_eq!(masks.len(), Point::axes(Algorithm::Attention)[0].1.len());
    }
}
