//! Shared memory, against lists of bytes.

#[path = "../src/overlap.rs"]
mod overlap;

use overlap::Place;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// A start, the bytes of an element, and strides with extents.
type Layout = (usize, usize, Vec<(usize, usize)>);

fn layout() -> impl Strategy<Value = Layout> {
    let axes = prop::collection::vec((0usize..40, 0usize..4), 0..4);
    (0usize..60, prop::sample::select(vec![1usize, 2, 4]), axes)
}

/// The bytes of every element.
fn bytes((start, size, axes): &Layout) -> Vec<BTreeSet<usize>> {
    let mut starts = vec![*start];
    for &(stride, extent) in axes {
        starts = starts.iter().flat_map(|at| (0..extent).map(move |x| at + stride * x)).collect();
    }
    starts.iter().map(|&at| (at..at + size).collect()).collect()
}

fn place((start, size, axes): &Layout) -> Option<Place> {
    Place::new(*start, *size, axes.iter().copied())
}

proptest! {
    /// A few steps decide small layouts, so that the answer is exact.
    #[test]
    fn shared_bytes_are_found(a in layout(), b in layout()) {
        let all = |x: &Layout| bytes(x).into_iter().flatten().collect::<BTreeSet<_>>();
        let expected = !all(&a).is_disjoint(&all(&b));
        let found = match (place(&a), place(&b)) {
            (Some(a), Some(b)) => {
                prop_assert_eq!(a.shares(&b), b.shares(&a));
                a.shares(&b)
            }
            _ => false,
        };
        prop_assert_eq!(found, expected);
    }

    /// Elements that count as disjoint are.
    #[test]
    fn disjoint_elements_share_no_byte(a in layout()) {
        let elements = bytes(&a);
        let all: usize = elements.iter().map(BTreeSet::len).sum();
        let distinct = elements.into_iter().flatten().collect::<BTreeSet<_>>().len();
        if place(&a).is_some_and(|a| a.is_disjoint()) {
            prop_assert_eq!(all, distinct);
        }
    }
}

/// Layouts that occur: packed q, k and v, and rows in any order.
#[test]
fn usual_layouts_are_disjoint() {
    let (b, n, h, d) = (2, 7, 3, 5);
    let axes =
        |heads: usize| [(4 * n * heads * h * d, b), (4 * d, h), (4 * heads * h * d, n), (4, d)];
    let packed = [0, 1, 2].map(|at| Place::new(4 * at * h * d, 4, axes(3).into_iter()).unwrap());
    assert!(packed.iter().all(Place::is_disjoint));
    assert!(!packed[0].shares(&packed[1]) && !packed[1].shares(&packed[2]));
    assert!(packed[0].shares(&packed[0].clone()));
    let whole = Place::new(0, 4, axes(1).into_iter()).unwrap();
    assert!(whole.shares(&packed[2]));
}
