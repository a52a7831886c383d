//! dq, to which tiles of keys add one after the other.
//!
//! Every tile of queries has one sum in memory. The tiles of keys that it sees take it in ascending
//! order, each when the one before has passed it on, and the last writes dq. So the order of the sum
//! is that of one sweep over the keys, whichever threads work on them, and no sum is kept twice.
//!
//! A task waits only for a smaller tile of keys. If tasks begin in ascending order, the smallest tile
//! that is being worked on waits for no other, and all come to an end.

use super::packs::Packing;
use super::pair::Pair;
use crate::element::TensorMut;
use crate::tiles::tiles;
use crate::workspace::Parts;
use etalon_problem::Cover;
use ndarray::Ix2;
use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};

/// The sum of one tile of queries, of one wave after the other.
pub struct OrderedSum<'t, 'o> {
    state: Mutex<State<'t, 'o>>,
    passed: Condvar,
}

struct State<'t, 'o> {
    /// The first key of the tile whose turn it is; `None` after the last.
    next: Option<usize>,
    /// True if nothing has been added yet: the contents of the sum do not matter.
    fresh: bool,
    sum: &'t mut [f32],
    /// The rows of dq that the complete sum is written to, from [`OrderedSum::begin`] on.
    dq: Option<TensorMut<'o, Ix2>>,
}

/// The tiles of keys that a tile of queries sees.
#[derive(Clone)]
pub struct Seen<'p> {
    pub pair: Pair<'p>,
    pub rows: Range<usize>,
    /// Keys of a tile.
    pub keys: usize,
}

impl Seen<'_> {
    /// True if some query may see a key of `cols`, by the mask's cover of the tile.
    pub fn sees(&self, cols: &Range<usize>) -> bool {
        self.pair.rule.cover(self.rows.clone(), cols.clone()) != Cover::None
    }

    /// The first key of the first tile from key `from` on that is seen.
    fn next(&self, from: usize) -> Option<usize> {
        let keys = self.pair.rule.of.sequence.keys;
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

    /// Begins the sum of a tile whose dq goes there. A tile that sees no key gets its zeros at once.
    pub fn begin(&mut self, seen: &Seen<'_>, mut dq: TensorMut<'o, Ix2>) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        (state.next, state.fresh) = (seen.next(0), true);
        if state.next.is_none() {
            dq.fill(0.0);
        }
        state.dq = Some(dq);
    }

    /// Adds what the tile of keys `cols` has, which must be one that is seen, if it is its turn; with
    /// `wait`, when it is. Returns whether it was. Rows of the sum lie `stride` apart.
    pub fn add(
        &self,
        seen: &Seen<'_>,
        cols: &Range<usize>,
        stride: usize,
        wait: bool,
        add: impl FnOnce(&mut [f32]),
    ) -> bool {
        let early = |state: &State<'t, 'o>| state.next.is_some_and(|next| next < cols.start);
        let mut state = if wait {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let waiting = self.passed.wait_while(state, |state| early(state));
            waiting.unwrap_or_else(PoisonError::into_inner)
        } else {
            match self.state.try_lock() {
                Ok(state) if !early(&state) => state,
                _ => return false, // who holds it is adding to it
            }
        };
        let State { next, fresh, sum, dq } = &mut *state;
        if std::mem::take(fresh) {
            sum.fill(0.0);
        }
        add(sum);
        *next = seen.next(cols.end);
        if let (None, Some(dq)) = (next, dq) {
            dq.write_rows(sum, stride, seen.pair.rule.scale);
        }
        drop(state);
        self.passed.notify_all();
        true
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
