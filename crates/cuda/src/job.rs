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
    /// Where the caller holds each part of the pass, 0 where it does not; then the arrays that it gives besides.
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
}

impl<P: AsRef<Parts>> Job<'_, P> {
    fn parts(&self) -> &Parts {
        self.prepared.as_ref()
    }

    /// Where kernels find the part that the caller holds at an address.
    fn placed(&self, part: &Part, address: u64) -> Place {
        part.room.map_or_else(|| part.caller(address), |room| part.place(self.at(room)))
    }

    /// Where kernels find an operand; nowhere, without elements, if it is not there.
    pub fn place(&self, name: &str) -> Place {
        let mut parts = self.parts().list.iter().zip(self.addresses);
        let found = parts.find(|(part, _)| part.operand.name == name);
        found.map_or(Place::NOWHERE, |(part, &address)| self.placed(part, address))
    }

    /// The address of an operand; 0 if it is not there.
    pub fn address(&self, name: &str) -> u64 {
        self.place(name).address
    }

    /// Copies what the caller holds elsewhere than kernels find it.
    pub fn gather(&self) -> Result<(), Error> {
        self.apart(|part| part.given).try_for_each(|(part, address)| {
            self.copy(part, part.caller(address), self.placed(part, address))
        })
    }

    /// Copies what kernels wrote elsewhere than the caller wants it.
    pub fn scatter(&self) -> Result<(), Error> {
        self.apart(|part| part.wanted).try_for_each(|(part, address)| {
            self.copy(part, self.placed(part, address), part.caller(address))
        })
    }

    /// The parts that the caller holds elsewhere than kernels find them, and where.
    fn apart(&self, which: impl Fn(&Part) -> bool) -> impl Iterator<Item = (&Part, u64)> {
        let parts = self.parts().list.iter().zip(self.addresses.iter().copied());
        parts.filter(move |(part, _)| which(part) && !part.is_direct())
    }

    fn copy(&self, part: &Part, from: Place, to: Place) -> Result<(), Error> {
        self.parts().moves()?.copy(&self.queue, part.bytes, from, to, When::Always)
    }
}
