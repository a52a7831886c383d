//! A call of a prepared pass: its operands, its memory, its stream.

use crate::moves::{Place, When};
use crate::parts::{Part, Parts};
use crate::queue::Queue;
use crate::room::Room;
use etalon_problem::Error;

/// A call of a pass that was prepared as P.
pub(crate) struct Job<'a, P> {
    pub prepared: &'a P,
    pub queue: Queue<'a>,
    /// Where the caller holds each part of the pass; 0 where it does not.
    pub addresses: &'a [u64],
    /// Where the tables and the scratch memory begin.
    pub tables: u64,
    pub scratch: u64,
}

impl<'a, P> Job<'a, P> {
    /// The same call, of what an algorithm prepared besides.
    pub fn of<Q>(&self, prepared: &'a Q) -> Job<'a, Q> {
        let Job { queue, addresses, tables, scratch, .. } = *self;
        Job { prepared, queue, addresses, tables, scratch }
    }

    /// The address of a room in scratch memory.
    pub fn at(&self, room: Room) -> u64 {
        room.address(self.scratch)
    }

    /// The address of a table.
    pub fn table(&self, room: Room) -> u64 {
        room.address(self.tables)
    }
}

impl<P: AsRef<Parts>> Job<'_, P> {
    fn parts(&self) -> &Parts {
        self.prepared.as_ref()
    }

    fn caller(&self, part: &Part) -> Place {
        let own = |other: &Part| std::ptr::eq(other, part);
        let at = self.parts().list.iter().position(own);
        part.caller(at.map_or(0, |at| self.addresses[at]))
    }

    /// Where kernels find a part.
    pub fn place_of(&self, part: &Part) -> Place {
        part.room.map_or_else(|| self.caller(part), |room| part.place(self.at(room)))
    }

    /// Where kernels find an operand; nowhere, without elements, if it is not there.
    pub fn place(&self, name: &str) -> Place {
        self.parts().part(name).map_or(Place::NOWHERE, |part| self.place_of(part))
    }

    /// The address of an operand; 0 if it is not there.
    pub fn address(&self, name: &str) -> u64 {
        self.place(name).address
    }

    /// Copies what the caller holds elsewhere than kernels find it.
    pub fn gather(&self) -> Result<(), Error> {
        let apart = self.parts().list.iter().filter(|part| part.given && !part.is_direct());
        apart
            .into_iter()
            .try_for_each(|part| self.copy(part, self.caller(part), self.place_of(part)))
    }

    /// Copies what kernels wrote elsewhere than the caller wants it.
    pub fn scatter(&self) -> Result<(), Error> {
        let apart = self.parts().list.iter().filter(|part| part.wanted && !part.is_direct());
        apart
            .into_iter()
            .try_for_each(|part| self.copy(part, self.place_of(part), self.caller(part)))
    }

    fn copy(&self, part: &Part, from: Place, to: Place) -> Result<(), Error> {
        self.parts().moves()?.copy(&self.queue, part.bytes, from, to, When::Always)
    }
}
