//! Masks as windows of keys that move with the query.

use etalon_problem::{Align, Mask};

/// Query i sees the keys `i + offset − left ..= i + offset + right`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub left: i32,
    pub right: i32,
    pub offset: i32,
    /// True if the last query is aligned with the last key: then sequences have offsets of their own.
    pub bottom: bool,
}

impl Window {
    /// Every key.
    pub const ALL: Window = Window { left: OPEN, right: OPEN, offset: 0, bottom: false };
}

/// A reach beyond every key. Sums with extents below it stay within 32 bits.
pub(crate) const OPEN: i32 = 1 << 30;

/// The longest sequences: reaches and offsets of them stay within 32 bits.
pub(crate) const LONGEST: usize = 1 << 28;

/// The window of a mask over sequences of at most these lengths, if it is one. Ends that reach every key are
/// open: equal masks have equal windows.
pub(crate) fn window(mask: &Mask, queries: usize, keys: usize) -> Option<Window> {
    let offset = |align: &Align| match align {
        Align::TopLeft => 0,
        Align::BottomRight => keys as i64 - queries as i64,
    };
    let (left, right, align) = match mask {
        Mask::Full => (None, None, &Align::TopLeft),
        Mask::Causal { align } => (None, Some(0), align),
        Mask::Window { left, right, align } => (*left, *right, align),
        _ => return None,
    };
    let (offset, bottom) = (offset(align), *align == Align::BottomRight);
    let within = |reach: Option<usize>, enough: i64| match reach {
        Some(reach) if (reach as u128) < enough.max(0) as u128 => reach as i32,
        _ => OPEN,
    };
    let left = within(left, queries as i64 - 1 + offset);
    let right = within(right, keys as i64 - 1 - offset);
    if left == OPEN && right == OPEN {
        return Some(Window::ALL);
    }
    Some(Window { left, right, offset: offset as i32, bottom })
}

#[cfg(test)]
mod tests {
    use super::*;
    use etalon_problem::Sequence;

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
                for (i, j) in (0..queries).flat_map(|i| (0..keys).map(move |j| (i, j))) {
                    let distance = j as i32 - i as i32 - w.offset;
                    let seen = -w.left <= distance && distance <= w.right;
                    assert_eq!(seen, mask.allows(&sequence, 0, i, j), "{mask:?} {i} {j}");
                }
            }
        }
    }
}
