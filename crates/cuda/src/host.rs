//! Operands of the host, copied to the device: the door that computes a pass of them, and the one that times it.

use crate::lane::Lane;
use crate::options::Options;
use crate::parts::{Laid, Part};
use crate::queue::Queue;
use crate::ready::{Ready, ready};
use crate::room::{Layout, Room};
use crate::tensors::{with_bytes, write_bytes};
use crate::workspace::Held;
use etalon_problem::{Dtype, Error, Pass, Problem, Table, Views, ViewsMut};
use std::sync::Arc;

/// A pass whose inputs lie in the memory of a lane.
pub(crate) struct Placed<'a> {
    ready: Box<dyn Ready + 'a>,
    held: Arc<Held>,
    lane: Lane,
    /// Where the caller's operands would lie, one for each part.
    addresses: Vec<u64>,
    tables: u64,
    scratch: u64,
}

impl<'a> Placed<'a> {
    /// Copies the inputs and the tables of a pass to the device. The call has passed [`Table::check_call`], and the
    /// results of which `wants` knows the name are computed.
    pub fn new(
        held: &Arc<Held>,
        problem: &'a Problem,
        call: (Pass, Dtype),
        table: &Table,
        inputs: &Views<'_>,
        wants: impl Fn(&str) -> bool,
        options: &Options,
    ) -> Result<Placed<'a>, Error> {
        // On the device they are dense, and begin where rooms begin.
        let holds = |name: &str, result: bool| {
            let there = if result { wants(name) } else { inputs.get(name).is_some() };
            there.then_some(Laid { strides: None, aligned: true })
        };
        Placed::of(held, ready(held, problem, call, table, &holds, options)?, inputs)
    }

    /// The same, of a pass that was prepared for operands that are dense.
    pub fn of(
        held: &Arc<Held>,
        ready: Box<dyn Ready + 'a>,
        inputs: &Views<'_>,
    ) -> Result<Placed<'a>, Error> {
        let parts = &ready.parts().list;
        let mut layout = Layout::default();
        let tables = layout.room(ready.table_bytes())?;
        let scratch = layout.room(ready.scratch_bytes())?;
        let own = |part: &Part| part.bytes * part.operand.len();
        let rooms: Vec<Room> = parts
            .iter()
            .map(|part| layout.room(if part.is_direct() { own(part) } else { 0 }))
            .collect::<Result<_, _>>()?;
        let mut lane = held.lane()?;
        let base = lane.reserve(&held.device, layout.bytes())?;
        let queue = lane.queue(&held.device);
        for (part, room) in parts.iter().zip(&rooms).filter(|(part, _)| part.given) {
            let Some(view) = inputs.get(part.operand.name) else { continue };
            with_bytes(part.operand.name, view, |bytes| queue.upload(room.address(base), bytes))?;
        }
        ready.upload(&queue, tables.address(base))?;
        let addresses = rooms.iter().map(|room| room.address(base)).collect();
        let (tables, scratch) = (tables.address(base), scratch.address(base));
        Ok(Placed { ready, held: held.clone(), lane, addresses, tables, scratch })
    }

    pub fn queue(&self) -> Queue<'_> {
        self.lane.queue(&self.held.device)
    }

    pub fn scratch_bytes(&self) -> usize {
        self.ready.scratch_bytes()
    }

    pub fn enqueue(&self) -> Result<(), Error> {
        self.ready.enqueue(self.queue(), &self.addresses, (self.tables, self.scratch))
    }

    /// Copies the results to their places, once they have been computed.
    fn read(&self, outputs: &mut ViewsMut<'_>) -> Result<(), Error> {
        let parts = self.ready.parts().list.iter().zip(&self.addresses);
        for (part, &address) in parts.filter(|(part, _)| part.wanted) {
            if let Some(place) = outputs.take(part.operand.name) {
                let read = |bytes: &mut [u8]| self.queue().download(address, bytes);
                write_bytes(part.operand.name, place, read)?;
            }
        }
        Ok(())
    }

    /// Copies a room of the scratch memory to the host, once it has been computed.
    pub fn download(&self, room: Room, bytes: &mut [u8]) -> Result<(), Error> {
        self.queue().download(room.address(self.scratch), bytes)
    }

    /// Gives the memory back, after success alone: after a failure its work may still be under way.
    pub fn finish(self) {
        self.held.give_back(self.lane);
    }
}

/// Computes a pass. The call has passed [`Table::check_call`].
pub(crate) fn run(
    held: &Arc<Held>,
    problem: &Problem,
    call: (Pass, Dtype),
    table: &Table,
    inputs: &Views<'_>,
    outputs: &mut ViewsMut<'_>,
    options: &Options,
) -> Result<(), Error> {
    let wants = |name: &str| outputs.get(name).is_some();
    let placed = Placed::new(held, problem, call, table, inputs, wants, options)?;
    placed.enqueue()?;
    placed.queue().finish()?;
    placed.read(outputs)?;
    placed.finish();
    Ok(())
}
