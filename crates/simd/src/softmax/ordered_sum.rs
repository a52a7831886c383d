//! dq, to which tiles of keys add one after the other.
//!
//! Every tile of queries has one sum in memory. The tiles of keys that it sees take it in ascending
//! order, each when the one before has passed it on, and the last writes dq. So the order of the sum
//! is that of one sweep over the keys, whichever threads work on them, and no sum is kept twice.
//!
//! A task waits only for a smaller tile of keys. If tasks begin in ascending order, the smallest tile
//! that is being worked on waits for no other, and all come to an end.

use super::block::Pair;
use super::packs::Packing;
use crate::element::TensorMut;
use crate::tiles::tiles;
use crate::workspace::Parts;
use etalon_problem::Cover;
use ndarray::Ix2;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The sum of one tile of queries, of one wave after the other.
pub struct OrderedSum<'t, 'o> {
    state: Mutex<State<'t, 'o>>,
    passed: Condvar,
}

struct State<'t, 'o> {
    /// The first key of the tile whose turn it is; `None` after the last.
    next: Option<usize>,
    /// Whether nothing has been added yet: what the sum holds does not matter.
    fresh: bool,
    sum: &'t mut [f32],
    /// Where the sum goes, while there is one.
    dq: Option<TensorMut<'o, Ix2>>,
}

/// Which tiles of keys a tile of queries sees.
#[derive(Clone)]
pub struct Seen<'p> {
    pub pair: Pair<'p>,
    pub rows: Range<usize>,
    /// Keys of a tile.
    pub keys: usize,
}

impl Seen<'_> {
    /// Whether some query sees a key of `cols`, for all that the mask says of a tile.
    pub fn sees(&self, cols: &Range<usize>) -> bool {
        self.pair.rule.cover(self.rows.clone(), cols.clone()) != Cover::None
    }

    /// The first key of the first tile from key `from` on that is seen.
    fn next(&self, from: usize) -> Option<usize> {
        let keys = self.pair.rule.sequence.keys;
        let mut tiles = tiles(from.min(keys)..keys, self.keys);
        tiles.find(|cols| self.sees(cols)).map(|cols| cols.start)
    }
}

impl<'t, 'o> OrderedSum<'t, 'o> {
    /// A sum in memory whose contents do not matter.
    pub fn new(sum: &'t mut [f32]) -> Self {
        let state = State { next: None, fresh: true, sum, dq: None };
        OrderedSum { state: Mutex::new(state), passed: Condvar::new() }
    }

    /// Elements of one sum.
    pub fn len(packing: &Packing<'_>) -> usize {
        let dim = packing.scores.extents.dim;
        packing.cut.stride(dim).saturating_mul(packing.cut.queries)
    }

    /// Elements of the sums of a slot.
    pub fn slot(packing: &Packing<'_>) -> usize {
        let sum = Parts::count(|parts| parts.room(OrderedSum::len(packing)));
        sum.saturating_mul(packing.sums(1))
    }

    /// Begins the sum of a tile whose dq goes there. What sees no key gets its zeros at once.
    pub fn begin(&mut self, seen: &Seen<'_>, mut dq: TensorMut<'o, Ix2>) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        (state.next, state.fresh) = (seen.next(0), true);
        if state.next.is_none() {
            dq.fill(0.0 * seen.pair.rule.scale); // as if it had been summed
        }
        state.dq = Some(dq);
    }

    /// The sum, if it is the turn of the tile of keys `cols`, which must be one that is seen; with
    /// `wait`, when it is.
    pub fn take<'g, 'p>(
        &'g self,
        seen: &'g Seen<'p>,
        cols: &Range<usize>,
        stride: usize,
        wait: bool,
    ) -> Option<Turn<'g, 't, 'o, 'p>> {
        let early = |state: &mut State<'t, 'o>| state.next.is_some_and(|next| next < cols.start);
        let mut state = if wait {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            self.passed.wait_while(state, early).unwrap_or_else(PoisonError::into_inner)
        } else {
            // Who holds it is adding to it.
            let mut state = self.state.try_lock().ok()?;
            if early(&mut state) {
                return None;
            }
            state
        };
        if std::mem::take(&mut state.fresh) {
            state.sum.fill(0.0);
        }
        Some(Turn { state, passed: &self.passed, seen, end: cols.end, stride })
    }

    /// Lets everybody pass who waits for a tile that will not come.
    pub fn abandon(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).next = None;
        self.passed.notify_all();
    }
}

/// If a task panics, abandons the sums that others wait for: the panic is to reach the caller.
pub struct Guard<'g, 't, 'o>(pub &'g [OrderedSum<'t, 'o>]);

impl Drop for Guard<'_, '_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.iter().for_each(OrderedSum::abandon);
        }
    }
}

/// The sum in the hands of one tile of keys; dropped, it is passed on.
pub struct Turn<'g, 't, 'o, 'p> {
    state: MutexGuard<'g, State<'t, 'o>>,
    passed: &'g Condvar,
    seen: &'g Seen<'p>,
    end: usize,
    stride: usize,
}

impl Deref for Turn<'_, '_, '_, '_> {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        self.state.sum
    }
}

impl DerefMut for Turn<'_, '_, '_, '_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        self.state.sum
    }
}

impl Drop for Turn<'_, '_, '_, '_> {
    fn drop(&mut self) {
        let next = self.seen.next(self.end);
        let State { sum, dq, .. } = &mut *self.state;
        if let (None, Some(dq)) = (next, dq) {
            dq.write_rows(sum, self.stride, self.seen.pair.rule.scale);
        }
        self.state.next = next;
        self.passed.notify_all();
    }
}
