//! attention and attention_lse for operands in the memory of the host.

use crate::job::Job;
use crate::options::Options;
use crate::prepared::{Laid, Part};
use crate::ready::Ready;
use crate::room::{Layout, Room};
use crate::tensors::{with_bytes, write_bytes};
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
    let laid = |name: &str, result: bool| {
        let there = if result { outputs.get(name).is_some() } else { inputs.get(name).is_some() };
        there.then_some(Laid { strides: None, aligned: true })
    };
    let ready = Ready::new(held.clone(), problem, call, table, laid, options)?;
    let prepared = &ready.prepared;
    let (mut layout, device) = (Layout::default(), &held.device);
    let tables = layout.room(prepared.tables.bytes)?;
    let scratch = layout.room(ready.scratch_bytes)?;
    let own = |part: &Part| part.bytes * part.operand.len();
    let rooms: Vec<Room> = prepared
        .parts
        .iter()
        .map(|part| layout.room(if part.is_direct() { own(part) } else { 0 }))
        .collect::<Result<_, _>>()?;
    let mut lane = held.lane()?;
    let base = lane.reserve(device, layout.bytes())?;
    let queue = lane.queue(device);
    for (part, room) in prepared.parts.iter().zip(&rooms).filter(|(part, _)| part.given) {
        let Some(view) = inputs.get(part.operand.name) else { continue };
        with_bytes(part.operand.name, view, |bytes| queue.upload(room.address(base), bytes))?;
    }
    prepared.upload(&queue, tables.address(base))?;
    let addresses = rooms.iter().map(|room| room.address(base)).collect();
    let (tables, scratch) = (tables.address(base), scratch.address(base));
    let job = Job { prepared, queue, addresses, tables, scratch };
    ready.enqueue(&job)?;
    queue.finish()?;
    for (part, room) in prepared.parts.iter().zip(&rooms).filter(|(part, _)| part.wanted) {
        if let Some(place) = outputs.take(part.operand.name) {
            let read = |bytes: &mut [u8]| queue.download(room.address(base), bytes);
            write_bytes(part.operand.name, place, read)?;
        }
    }
    held.give_back(lane);
    Ok(())
}
