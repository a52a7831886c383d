//! Points of the grid such that every pair of values of two axes occurs.

use super::large::is_large;
use super::{Choices, Point, Spec};
use crate::cases::axes::{Names, SHAPE, STORAGE};
use crate::generate::Stream;
use etalon_problem::Dtype;
use std::collections::BTreeSet;

/// Two axes with one value of each.
type Pair = (usize, usize, usize, usize);

/// Greedy: each point takes an uncovered pair, then on every other axis the value that covers most
/// further pairs; the seed decides between equals. The storage type is the first axis. Shapes of large
/// extents are left to [`super::large`].
pub(super) fn points(choices: &Choices<'_>, seed: u64) -> Vec<Spec> {
    let Choices { algorithm, storage, axes, .. } = choices;
    let algorithm = *algorithm;
    let of_shapes = |(axis, names): &Names| {
        let small = |name: &&&str| *axis != SHAPE || !Point::large(algorithm).contains(*name);
        (*axis, names.iter().filter(small).copied().collect())
    };
    let axes: Vec<Names> = axes.iter().map(of_shapes).collect();
    let mut sizes = vec![storage.len()];
    sizes.extend(axes.iter().map(|(_, names)| names.len()));
    let mut points = cover(&sizes, seed);
    let stream = Stream::new(seed, "together");
    let together = Point::together(algorithm).iter().filter(|values| !is_large(algorithm, values));
    for (number, values) in together.enumerate() {
        let wanted = values.iter().map(|value| place(storage, &axes, *value));
        let Some(wanted) = wanted.collect::<Option<Vec<_>>>() else { continue };
        let has = |point: &Vec<usize>| wanted.iter().all(|&(axis, at)| point[axis] == at);
        if !points.iter().any(has) {
            let draw = |(axis, &size): (usize, &usize)| stream.below(64 * number + axis, size);
            let mut point: Vec<usize> = sizes.iter().enumerate().map(draw).collect();
            wanted.iter().for_each(|&(axis, at)| point[axis] = at);
            points.push(point);
        }
    }
    let spec = |indices: Vec<usize>| {
        let (dtype, point) = indices.split_first()?;
        let names: Vec<&str> = axes.iter().zip(point).map(|((_, names), &at)| names[at]).collect();
        let point = Point::parse(algorithm, &names).ok()?;
        Some(Spec { algorithm, dtype: storage[*dtype], point, seed })
    };
    points.into_iter().filter_map(spec).collect()
}

/// Position of a value of an axis: the number of the axis, of which the storage type is the first, and that of the
/// value.
fn place(storage: &[Dtype], axes: &[Names], (axis, value): (&str, &str)) -> Option<(usize, usize)> {
    if axis == STORAGE {
        return Some((0, storage.iter().position(|dtype| dtype.name() == value)?));
    }
    let (number, (_, names)) = axes.iter().enumerate().find(|(_, (name, _))| *name == axis)?;
    Some((number + 1, names.iter().position(|name| *name == value)?))
}

fn cover(sizes: &[usize], seed: u64) -> Vec<Vec<usize>> {
    let stream = Stream::new(seed, "covering");
    let mut uncovered = BTreeSet::new();
    for a in 0..sizes.len() {
        for b in a + 1..sizes.len() {
            uncovered.extend((0..sizes[a]).flat_map(|x| (0..sizes[b]).map(move |y| (a, x, b, y))));
        }
    }
    let mut points = Vec::new();
    let mut draws = 0;
    while let Some(&pair) = uncovered.iter().nth(stream.below(draws, uncovered.len().max(1))) {
        let mut point: Vec<Option<usize>> = vec![None; sizes.len()];
        (point[pair.0], point[pair.2]) = (Some(pair.1), Some(pair.3));
        for axis in 0..sizes.len() {
            if point[axis].is_none() {
                draws += 1;
                let start = stream.below(draws, sizes[axis]);
                let values = (0..sizes[axis]).map(|step| (start + step) % sizes[axis]);
                let gain = |value: &usize| gain(&uncovered, &point, axis, *value);
                // `max_by_key` keeps the last of equals: the rotation decides which that is.
                point[axis] = values.max_by_key(gain);
            }
        }
        let point: Vec<usize> = point.into_iter().flatten().collect();
        for a in 0..point.len() {
            for b in a + 1..point.len() {
                uncovered.remove(&(a, point[a], b, point[b]));
            }
        }
        points.push(point);
        draws += 1;
    }
    points
}

fn gain(uncovered: &BTreeSet<Pair>, point: &[Option<usize>], axis: usize, value: usize) -> usize {
    let pair = |(other, chosen): (usize, usize)| match other < axis {
        true => (other, chosen, axis, value),
        false => (axis, value, other, chosen),
    };
    let chosen = point.iter().enumerate().filter_map(|(other, x)| x.map(|x| (other, x)));
    chosen.filter(|&entry| uncovered.contains(&pair(entry))).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{Depth, specs};
    use etalon_problem::Algorithm;

    #[test]
    fn every_pair_occurs() {
        let sizes = [3, 4, 2];
        let points = cover(&sizes, 5);
        for a in 0..3 {
            for b in a + 1..3 {
                for (x, y) in (0..sizes[a]).flat_map(|x| (0..sizes[b]).map(move |y| (x, y))) {
                    assert!(points.iter().any(|point| point[a] == x && point[b] == y));
                }
            }
        }
        assert!(points.len() < 24, "fewer than the whole grid");
    }

    #[test]
    fn what_must_be_together_is() {
        for algorithm in Algorithm::ALL {
            for values in Point::together(algorithm) {
                let axes = Point::axes(algorithm);
                let place = |value| place(Point::storage(algorithm), &axes, value);
                assert!(values.iter().all(|value| place(*value).is_some()), "{values:?}");
                let has = |spec: &Spec| {
                    let name = spec.to_string();
                    let names: Vec<&str> = name.split('/').collect();
                    // The first is the algorithm, the second the storage type.
                    let at = |value| place(value).map(|(axis, _)| names[axis + 1]);
                    values.iter().all(|&(axis, value)| at((axis, value)) == Some(value))
                };
                let mut specs = specs(algorithm, Depth::Core, 3);
                assert!(specs.any(|spec| has(&spec)), "{algorithm} {values:?}");
            }
        }
    }

    #[test]
    fn a_core_run_is_small() {
        // The two widest axes alone need 12 · 13 points; twice that would miss the minute.
        let points = points(&Choices::all(Algorithm::Attention), 0);
        assert!((156..312).contains(&points.len()), "{}", points.len());
    }
}
