//! Masks as windows of keys that move with the query.

use etalon_problem::{Align, Mask};

/// Query i sees the keys `i + offset − left ..= i + offset + right`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub left: i32,
    pub right: i32,
    pub offset: i32,
    /// True if the last query is aligned with the last key: sequences have offsets of their own.
    pub bottom: bool,
}

impl Window {
    pub const ALL: Window = Window { left: OPEN, right: OPEN, offset: 0, bottom: false };

    /// The pairs that it shows of so many queries and keys.
    pub fn pairs(self, queries: usize, keys: usize) -> u128 {
        let [n, m] = [queries, keys].map(|n| n as i128);
        // Keys up to i, all at the end, of i = 1, 2, …
        let sum = |i: i128| if i <= m { i.max(0) * (i.max(0) + 1) / 2 } else { m * (m + 1) / 2 + (i - m) * m };
        let up_to = |reach: i128| sum(n + reach) - sum(reach);
        let [left, right, offset] = [self.left, self.right, self.offset].map(i128::from);
        (up_to(offset + right) - up_to(offset - left - 1)) as u128
    }
}

/// A reach beyond every key; sums with extents below it fit 32 bits.
pub(crate) const OPEN: i32 = 1 << 30;

/// The longest sequences: their reaches and offsets fit 32 bits.
pub(crate) const LONGEST: usize = 1 << 28;

/// The window of a mask over sequences of at most these lengths. Ends that reach every key are open: equal masks have
/// equal windows.
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
    let own = Window { left, right, offset: offset as i32, bottom };
    Some(if left == OPEN && right == OPEN { Window::ALL } else { own })
}
