//! The door for operands in the memory of the host.

use crate::options::Options;
use crate::parts::{Laid, Part};
use crate::ready::ready;
use crate::room::{Layout, Room};
use crate::tensors::{with_bytes, with_bytes_of_place, write_bytes};
use crate::workspace::Held;
use etalon_problem::{Dtype, Error, Pass, Problem, Table, Views, ViewsMut};
use std::sync::Arc;

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
    // On the device they are dense, and begin where rooms begin.
    let holds = |name: &str, result: bool| {
        let there = if result { outputs.get(name).is_some() } else { inputs.get(name).is_some() };
        there.then_some(Laid { strides: None, aligned: true })
    };
    let ready = ready(held, problem, call, table, &holds, options)?;
    let parts = &ready.parts().list;
    let (mut layout, device) = (Layout::default(), &held.device);
    let tables = layout.room(ready.table_bytes())?;
    let scratch = layout.room(ready.scratch_bytes())?;
    let own = |part: &Part| part.bytes * part.operand.len();
    let rooms: Vec<Room> = parts
        .iter()
        .map(|part| layout.room(if part.is_direct() { own(part) } else { 0 }))
        .collect::<Result<_, _>>()?;
    let mut lane = held.lane()?;
    let base = lane.reserve(device, layout.bytes())?;
    let queue = lane.queue(device);
    for (part, room) in parts.iter().zip(&rooms).filter(|(part, _)| part.given) {
        let (name, to) = (part.operand.name, room.address(base));
        match inputs.get(name) {
            Some(view) => with_bytes(name, view, |bytes| queue.upload(to, bytes))?,
            // The place of a result that holds what the pass begins with.
            None => with_bytes_of_place(name, outputs.get(name), |bytes| queue.upload(to, bytes))?,
        }
    }
    ready.upload(&queue, tables.address(base))?;
    let addresses: Vec<u64> = rooms.iter().map(|room| room.address(base)).collect();
    ready.enqueue(queue, &addresses, (tables.address(base), scratch.address(base)))?;
    queue.finish()?;
    for (part, room) in parts.iter().zip(&rooms).filter(|(part, _)| part.wanted) {
        if let Some(place) = outputs.take(part.operand.name) {
            let read = |bytes: &mut [u8]| queue.download(room.address(base), bytes);
            write_bytes(part.operand.name, place, read)?;
        }
    }
    held.give_back(lane);
    Ok(())
}
