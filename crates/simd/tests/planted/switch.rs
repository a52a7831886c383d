//! The switch of the planted bug. This file is part of copies of the crate alone.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of the bug; 0 for none.
static PLANTED: AtomicUsize = AtomicUsize::new(0);

/// Plants a bug in place of the one before.
pub fn plant(number: usize) {
    PLANTED.store(number, Ordering::SeqCst);
}

/// True if this bug is planted.
#[inline(always)]
pub(crate) fn is(number: usize) -> bool {
    PLANTED.load(Ordering::Relaxed) == number
}
