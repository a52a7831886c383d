//! Operands of the host, copied to the device: for the doors that compute a pass or time it.

use crate::call::{Operands, PassCall};
use crate::memory::{Layout, MemoryRange, filled, reserved};
use crate::options::Options;
use crate::parts::Part;
use crate::pass::{PassPlan, PreparedPass};
use crate::queue::{Queue, StreamSlot, device_memory};
use crate::workspace::{DeviceState, Workspace};
use bytemuck::Pod;
use cudarc::driver::CudaSlice;
use etalon_problem::{Dtype, Error, Pass, Result, Table, View, ViewMut, Views, ViewsMut};
use ndarray::{ArrayViewD, ArrayViewMutD};
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
        let has_place = |name: &str| places.is_some_and(|places| places.get(name).is_some());
        let operands = Operands::Host(inputs, places.map(|_| &has_place as &dyn Fn(&str) -> bool));
        let target = state.device.target;
        let call = PassCall { target, pass, storage, table, operands, arrays: &[], options: *options };
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

/// Calls `f` with the bytes of a tensor in row-major order; with a copy where its strides are others.
pub(crate) fn with_bytes(name: &str, view: &View<'_>, f: impl FnOnce(&[u8]) -> Result<()>) -> Result<()> {
    match view {
        View::F32(x) => packed(name, x, f),
        View::Bf16(x) => packed(name, x, f),
        View::F16(x) => packed(name, x, f),
        View::I64(x) => packed(name, x, f),
        View::F64(_) => Err(stored(name, view.stored())),
    }
}

fn packed<T: Pod>(name: &str, view: &ArrayViewD<'_, T>, f: impl FnOnce(&[u8]) -> Result<()>) -> Result<()> {
    if let Some(slice) = view.as_slice() {
        return f(bytemuck::cast_slice(slice));
    }
    let mut list = reserved(view.len(), &copy_of(name))?;
    list.extend(view.iter().copied());
    f(bytemuck::cast_slice(&list))
}

/// Writes the bytes that `f` writes, in row-major order, to the place of a result.
pub(crate) fn write_bytes(name: &str, place: ViewMut<'_>, f: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
    match place {
        ViewMut::F32(x) => unpacked(name, x, f),
        ViewMut::Bf16(x) => unpacked(name, x, f),
        ViewMut::F16(x) => unpacked(name, x, f),
        ViewMut::I64(x) => unpacked(name, x, f),
        other => Err(stored(name, other.stored())),
    }
}

fn unpacked<T: Pod>(
    name: &str,
    mut place: ArrayViewMutD<'_, T>,
    f: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<()> {
    if let Some(slice) = place.as_slice_mut() {
        return f(bytemuck::cast_slice_mut(slice));
    }
    let mut list = filled(T::zeroed(), place.shape(), &copy_of(name))?;
    f(bytemuck::cast_slice_mut(&mut list))?;
    place.iter_mut().zip(list).for_each(|(to, from)| *to = from);
    Ok(())
}

fn copy_of(name: &str) -> String {
    format!("a copy of `{name}`")
}

fn stored(name: &str, found: impl ToString) -> Error {
    let expected = "f32, bf16 or f16, which are what cuda stores".to_string();
    Error::Dtype { operand: name.to_string(), expected, found: found.to_string() }
}
