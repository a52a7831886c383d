//! Work side by side in rayon's current pool.
//!
//! rayon's own adaptors would be compiled anew for every closure over every scalar; here the loop over
//! threads exists once.

use rayon::prelude::*;
use std::sync::{Mutex, PoisonError};

/// The results of `work` for every item, in the order of the items.
pub(crate) fn map<A: Send, R: Send>(items: Vec<A>, work: impl Fn(A) -> R + Sync) -> Vec<R> {
    type Slot<A, R> = Mutex<(Option<A>, Option<R>)>;
    let slots: Vec<Slot<A, R>> =
        items.into_iter().map(|item| Mutex::new((Some(item), None))).collect();
    each(slots.len(), &|i| {
        let mut slot = slots[i].lock().unwrap_or_else(PoisonError::into_inner);
        slot.1 = slot.0.take().map(&work);
    });
    let done =
        slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner));
    done.filter_map(|(_, result)| result).collect()
}

/// As [`map`], until one fails.
pub(crate) fn try_map<A: Send, R: Send, E: Send>(
    items: Vec<A>,
    work: impl Fn(A) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    map(items, work).into_iter().collect()
}

fn each(n: usize, work: &(dyn Fn(usize) + Sync)) {
    (0..n).into_par_iter().for_each(work);
}
