//! A call of a prepared pass: its operands, its memory, its stream.

use crate::moves::{Place, When};
use crate::prepared::{Part, Prepared};
use crate::queue::Queue;
use crate::room::Room;
use etalon_problem::{Error, Scores};

/// A call of a prepared pass.
pub(crate) struct Job<'a> {
    pub prepared: &'a Prepared<'a>,
    pub queue: Queue<'a>,
    /// Where the caller holds each part of the pass; 0 where it does not.
    pub addresses: Vec<u64>,
    /// Where the tables and the scratch memory begin.
    pub tables: u64,
    pub scratch: u64,
}

impl Job<'_> {
    pub fn scores(&self) -> &Scores {
        &self.prepared.scores
    }

    /// The address of a room in scratch memory.
    pub fn at(&self, room: Room) -> u64 {
        room.address(self.scratch)
    }

    /// The address of a table.
    pub fn table(&self, room: Room) -> u64 {
        room.address(self.tables)
    }

    fn caller(&self, part: &Part) -> Place {
        let own = |other: &Part| std::ptr::eq(other, part);
        let at = self.prepared.parts.iter().position(own);
        part.caller(at.map_or(0, |at| self.addresses[at]))
    }

    /// Where kernels find a part.
    pub fn place_of(&self, part: &Part) -> Place {
        part.room.map_or_else(|| self.caller(part), |room| part.place(self.at(room)))
    }

    /// Where kernels find an operand; nowhere, without elements, if it is not there.
    pub fn place(&self, name: &str) -> Place {
        let nothing = Place { address: 0, extents: [0; 4], strides: [0; 4] };
        self.prepared.part(name).map_or(nothing, |part| self.place_of(part))
    }

    /// The address of an operand; 0 if it is not there.
    pub fn address(&self, name: &str) -> u64 {
        self.place(name).address
    }

    /// Copies what the caller holds to where kernels find it.
    pub fn gather(&self, part: &Part) -> Result<(), Error> {
        self.copy(part, self.caller(part), self.place_of(part))
    }

    /// Copies what kernels wrote to where the caller wants it.
    pub fn scatter(&self, part: &Part) -> Result<(), Error> {
        self.copy(part, self.place_of(part), self.caller(part))
    }

    fn copy(&self, part: &Part, from: Place, to: Place) -> Result<(), Error> {
        self.prepared.moves()?.copy(&self.queue, part.bytes, from, to, When::Always)
    }
}
