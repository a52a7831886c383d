//! Unit tests of `src/softmax/window.rs`.

use crate::softmax::window::{OPEN, Window, window};
use etalon_problem::{Mask, Sequence};

#[test]
fn equal_masks_have_equal_windows() {
    let full = window(&Mask::Full, 5, 9);
    assert_eq!(full, Some(Window { left: OPEN, right: OPEN, offset: 0, bottom: false }));
    assert_eq!(window(&Mask::window(9, 9), 5, 9), full);
    assert_eq!(window(&Mask::window(usize::MAX, None), 5, 9), full);
    let causal = window(&Mask::causal(), 5, 9);
    assert_eq!(causal, Some(Window { left: OPEN, right: 0, offset: 4, bottom: true }));
    assert_eq!(window(&Mask::window(8, 0), 5, 9), causal);
    assert_ne!(window(&Mask::window(7, 0), 5, 9), causal);
    assert_eq!(window(&Mask::Or(vec![]), 5, 9), None);
}

/// The window must allow what the mask allows, for all small extents.
#[test]
fn a_window_is_its_mask() {
    for (queries, keys) in [(1, 1), (3, 5), (5, 3), (6, 6)] {
        let sequence = Sequence { batch: 0, query_start: 0, queries, key_start: 0, keys };
        for mask in Mask::intervals(0..8) {
            let Some(w) = window(&mask, queries, keys) else { continue };
            let mut pairs = 0;
            for (i, j) in (0..queries).flat_map(|i| (0..keys).map(move |j| (i, j))) {
                let distance = j as i32 - i as i32 - w.offset;
                let seen = -w.left <= distance && distance <= w.right;
                assert_eq!(seen, mask.allows(&sequence, 0, i, j), "{mask:?} {i} {j}");
                pairs += u128::from(seen);
            }
            assert_eq!(w.pairs(queries, keys), pairs, "{mask:?}");
        }
    }
}
