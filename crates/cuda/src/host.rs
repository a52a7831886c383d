//! Operands of the host, copied to the device: for the doors that compute a pass or time it.

use crate::call::{Operands, PassCall, Places};
use crate::memory::{Layout, MemoryRange};
use crate::options::Options;
use crate::parts::Part;
use crate::pass::{PassPlan, PreparedPass};
use crate::queue::{Queue, StreamSlot, device_memory};
use crate::tensors::{with_bytes, write_bytes};
use crate::workspace::{DeviceState, Workspace};
use cudarc::driver::CudaSlice;
use etalon_problem::{Dtype, Pass, Result, Table, View, ViewMut, Views, ViewsMut};
use std::sync::Arc;

/// Computes a pass whose call has passed [`Table::check_call`], and copies the results to their places.
pub(crate) fn compute<'a>(
    workspace: &Workspace,
    call: (Pass, Dtype, &Table),
    (inputs, outputs): (&Views<'_>, &mut ViewsMut<'_>),
    options: &Options,
    draft: impl FnOnce(&PassCall<'_, '_>) -> Result<PassPlan<'a>>,
) -> Result<()> {
    let (placed, ()) = Placed::new(workspace, call, (inputs, Some(outputs)), options, |call| Ok((draft(call)?, ())))?;
    placed.run()?;
    placed.read(outputs)?;
    placed.finish();
    Ok(())
}

/// A pass whose inputs lie in the memory of a slot.
pub(crate) struct Placed {
    pub pass: PreparedPass,
    state: Arc<DeviceState>,
    slot: StreamSlot,
    /// The caller's operands, one for each part.
    addresses: Vec<u64>,
    tables: u64,
    pub scratch: u64,
}

impl Placed {
    /// Drafts a pass for operands of the host, and copies its inputs and tables to the device. Without places all
    /// results are computed. Returns what is drafted beside.
    pub fn new<'a, T>(
        workspace: &Workspace,
        (pass, storage, table): (Pass, Dtype, &Table),
        (inputs, places): (&Views<'_>, Option<&ViewsMut<'_>>),
        options: &Options,
        draft: impl FnOnce(&PassCall<'_, '_>) -> Result<(PassPlan<'a>, T)>,
    ) -> Result<(Placed, T)> {
        let state = workspace.device(options.device)?;
        let operands = Operands::Host(inputs, places.map(|places| places as &dyn Places));
        let call = PassCall::new(state.device.target, (pass, storage), table, operands, options);
        let (plan, beside) = draft(&call)?;
        let pass = plan.load(&state.device)?;
        let parts = &pass.parts.list;
        let mut layout = Layout::default();
        let tables = layout.range(pass.table_bytes())?;
        let scratch = layout.range(pass.scratch_bytes)?;
        let own = |part: &Part| if part.is_direct() { part.bytes * part.operand.len() } else { 0 };
        let ranges: Vec<_> = parts.iter().map(|part| layout.range(own(part))).collect::<Result<_, _>>()?;
        let mut slot = state.slot()?;
        let base = slot.reserve(&state.device, layout.bytes())?;
        let queue = slot.queue(&state.device)?;
        for (part, range) in parts.iter().zip(&ranges).filter(|(part, _)| part.given) {
            let (name, to) = (part.operand.name, range.address(base));
            // The place of a result holds what the pass begins with.
            let place = || places.and_then(|places| places.get(name));
            match inputs.get(name).map(View::view).or_else(|| place().map(ViewMut::view)) {
                Some(view) => with_bytes(name, &view, |bytes| queue.upload(to, bytes))?,
                None => queue.fill(to, range.bytes, 0)?,
            }
        }
        pass.upload(&queue, tables.address(base))?;
        let [tables, scratch] = [tables, scratch].map(|range| range.address(base));
        let addresses = ranges.iter().map(|range| range.address(base)).collect();
        Ok((Placed { pass, state, slot, addresses, tables, scratch }, beside))
    }

    pub fn queue(&self) -> Result<Queue<'_>> {
        self.slot.queue(&self.state.device)
    }

    /// Memory beside that of the slot.
    pub fn memory(&self, bytes: usize) -> Result<CudaSlice<u8>> {
        device_memory(&self.state.device, &self.slot.stream, bytes)
    }

    pub fn parts(&self) -> impl Iterator<Item = (&Part, u64)> {
        self.pass.parts.list.iter().zip(self.addresses.iter().copied())
    }

    pub fn enqueue(&self) -> Result<()> {
        self.pass.enqueue(self.queue()?, &self.addresses, (self.tables, self.scratch))
    }

    pub fn run(&self) -> Result<()> {
        self.enqueue()?;
        self.queue()?.finish()
    }

    /// Copies the results to their places, once they have been computed.
    pub fn read(&self, outputs: &mut ViewsMut<'_>) -> Result<()> {
        for (part, address) in self.parts().filter(|(part, _)| part.wanted) {
            if let Some(place) = outputs.take(part.operand.name) {
                write_bytes(part.operand.name, place, |bytes| self.queue()?.download(address, bytes))?;
            }
        }
        Ok(())
    }

    /// Copies a range of the scratch memory, once it has been computed.
    pub fn download(&self, range: MemoryRange, bytes: &mut [u8]) -> Result<()> {
        self.queue()?.download(range.address(self.scratch), bytes)
    }

    /// Gives the slot back, after success alone.
    pub fn finish(self) {
        self.state.give_back(self.slot);
    }
}
