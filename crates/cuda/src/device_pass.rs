//! The door for operands that lie on a device already.

use crate::call::{Operands, PassCall};
use crate::device_tensor::{self, DeviceTensor, DeviceTensors, GivenArray};
use crate::gpu::Device;
use crate::levels;
use crate::lock::lock;
use crate::options::Options;
use crate::pass::{PassPlan, PreparedPass};
use crate::plan::draft;
use crate::queue::{Queue, device_memory};
use crate::softmax::given;
use crate::workspace::{DeviceState, Workspace};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUpointer_attribute, CUresult, CUstream};
use cudarc::driver::{CudaSlice, DevicePtr};
use etalon_problem::{Dtype, Error, Pass, Problem, Result, Table};
use std::collections::HashSet;
use std::sync::{Arc, Mutex};

/// A pass of a problem, prepared once for operands on a device, and enqueued as often as wanted.
///
/// Preparation takes the time: kernels are compiled and loaded, the tables of masks and sequences are made and copied
/// to the device. What is enqueued neither waits nor takes memory, and may be captured in a graph.
///
/// Of attention, attention_lse and lazy_attention the lengths or offsets of the sequences and the arrays of the mask
/// may lie on the device, too. They are given among the inputs, dense, under these names:
///
/// | array | name | elements |
/// |---|---|---|
/// | lengths | `sequences.query`, `sequences.key` | i32 or i64 |
/// | offsets of packed sequences | `sequences.cu_query`, `sequences.cu_key` | i32 or i64 |
/// | an array of the mask | its own | flags of one byte; ids i32 or i64 |
///
/// Of the problem's own values only the number of sequences is read then. The device reads the arrays anew in every
/// call and makes the tables, in room for the most tiles that there may be. Lengths and offsets beyond the arrays are
/// cut to these, and an offset below one before it is taken as equal to that. Arrays that are not given are those of
/// the problem, once and for all, as of the other algorithms.
///
/// One prepared pass serves calls on any streams at the same time, each with scratch memory of its own.
#[derive(Debug)]
pub struct DevicePass {
    pub(crate) pass: PreparedPass,
    state: Arc<DeviceState>,
    tables: CudaSlice<u8>,
    tables_at: u64,
    inputs: DeviceTensors<'static>,
    outputs: DeviceTensors<'static>,
    /// Arrays of the problem that calls give.
    arrays: Vec<GivenArray>,
    /// Addresses found on the device.
    known: Mutex<HashSet<u64>>,
}

/// The most addresses that are remembered: those of some passes over buffers that take turns.
const KNOWN: usize = 256;

impl DevicePass {
    /// Prepares a pass for tensors of these shapes, types and strides, which may have other addresses later. An output
    /// without a place is not computed. Waits until the tables are on the device.
    pub fn new(
        workspace: &Workspace,
        problem: &Problem,
        pass: Pass,
        inputs: &DeviceTensors<'_>,
        outputs: &DeviceTensors<'_>,
        options: &Options,
    ) -> Result<DevicePass> {
        let table = levels::table_of(problem, pass)?;
        let (inputs, arrays) = given::split(problem, &table, inputs)?;
        let storage = device_tensor::check(&table, &inputs, outputs, options.recompute)?;
        levels::check(options, problem.algorithm(), pass, storage)?;
        let call = (pass, storage, &table);
        let draft = |call: &PassCall<'_, '_>| draft(problem, &PassCall { arrays: &arrays, ..*call });
        let pass = DevicePass::of(workspace, call, (&inputs, outputs), options, draft)?;
        Ok(DevicePass { arrays, ..pass })
    }

    /// Prepares a pass for tensors that have passed [`Table::check_tensors`].
    pub(crate) fn of<'a>(
        workspace: &Workspace,
        (pass, storage, table): (Pass, Dtype, &Table),
        (inputs, outputs): (&DeviceTensors<'_>, &DeviceTensors<'_>),
        options: &Options,
        draft: impl FnOnce(&PassCall<'_, '_>) -> Result<PassPlan<'a>>,
    ) -> Result<DevicePass> {
        let state = workspace.device(options.device)?;
        let operands = Operands::Device(inputs, outputs);
        let target = state.device.target;
        let call = PassCall { target, pass, storage, table, operands, arrays: &[], options: *options };
        let pass = draft(&call)?.load(&state.device)?;
        let slot = state.slot()?;
        let queue = slot.queue(&state.device)?;
        let tables = device_memory(&state.device, &slot.stream, pass.table_bytes())?;
        let tables_at = tables.device_ptr(&slot.stream).0;
        pass.upload(&queue, tables_at)?;
        queue.finish()?;
        state.give_back(slot);
        // Names of the table live as long as the program.
        let own = |tensors: &DeviceTensors<'_>| DeviceTensors {
            list: table.operands.iter().filter_map(|x| Some((x.name, tensors.get(x.name)?.clone()))).collect(),
        };
        let (inputs, outputs) = (own(inputs), own(outputs));
        Ok(DevicePass { pass, state, tables, tables_at, inputs, outputs, arrays: Vec::new(), known: Mutex::default() })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.state.device
    }

    /// The scratch memory that a call needs, in bytes. It must begin at a multiple of 256.
    pub fn scratch_bytes(&self) -> usize {
        self.pass.scratch_bytes
    }

    /// The device memory that the pass holds for its tables, or for what calls make them of, in bytes.
    pub fn table_bytes(&self) -> usize {
        self.tables.len()
    }

    /// Enqueues the pass on a stream of the device's primary context: nothing has been computed when this returns.
    /// `inputs` and `outputs` have the names, shapes, types and strides of [`DevicePass::new`], and `scratch` is the
    /// address of [`DevicePass::scratch_bytes`] bytes.
    ///
    /// Fails, and enqueues nothing, where a tensor is another, is not in memory of the device, or is less aligned than
    /// that of [`DevicePass::new`]. The driver is not asked again about an address that an earlier call found there.
    ///
    /// # Safety
    /// The stream must be one of the primary context of the device. Until what is enqueued has run, and as long as a
    /// graph that has captured it may run, this pass, all elements of the tensors and the scratch memory must stay;
    /// nothing else may write what the pass reads or read what it writes; and the elements of a result must not
    /// overlap one another, those of another tensor, or the scratch memory.
    pub unsafe fn enqueue(
        &self,
        stream: CUstream,
        inputs: &DeviceTensors<'_>,
        outputs: &DeviceTensors<'_>,
        scratch: u64,
    ) -> Result<()> {
        let device = self.device();
        device.check_alive()?;
        // SAFETY: the caller's promise.
        let stream = unsafe { device.context.wrap_borrowed_stream(stream) };
        // The driver looks addresses up in the context of the thread, which may have none so far.
        let queue = Queue::new(device, &stream)?;
        let addresses = self.addresses(inputs, outputs)?;
        if self.pass.scratch_bytes > 0 {
            self.check_address("scratch", scratch)?;
            if !scratch.is_multiple_of(256) {
                return Err(Error::value("scratch", "a multiple of 256", scratch));
            }
        }
        self.pass.enqueue(queue, &addresses, (self.tables_at, scratch))
    }

    /// Fails unless an address is in the memory of the device.
    fn check_address(&self, name: &str, address: u64) -> Result<()> {
        if lock(&self.known).contains(&address) {
            return Ok(());
        }
        check_pointer(self.device(), name, address)?;
        let mut known = lock(&self.known);
        if known.len() == KNOWN {
            known.clear();
        }
        known.insert(address);
        Ok(())
    }

    /// The address of each part of the pass, and then of each array.
    fn addresses(&self, inputs: &DeviceTensors<'_>, outputs: &DeviceTensors<'_>) -> Result<Vec<u64>> {
        let is_array = |name: &str| self.arrays.iter().any(|array| array.name == name);
        let known = |name: &str| self.inputs.get(name).is_some() || is_array(name);
        let other_input = inputs.list.iter().find(|(name, _)| !known(name));
        let other_output = || outputs.list.iter().find(|(name, _)| self.outputs.get(name).is_none());
        if let Some((name, _)) = other_input.or_else(other_output) {
            return Err(Error::unexpected(name, None));
        }
        let of_part = |name: &str| {
            let given = self.inputs.get(name).map(|own| (own, inputs.get(name)));
            let place = || self.outputs.get(name).map(|own| (own, outputs.get(name)));
            let Some((own, found)) = given.or_else(place) else { return Ok(0) };
            self.address(name, own, found)
        };
        let parts = self.pass.parts.list.iter().map(|part| of_part(part.operand.name));
        let array = |x: &GivenArray| self.address(&x.name, &x.tensor, inputs.get(&x.name));
        parts.chain(self.arrays.iter().map(array)).collect()
    }

    /// The address of a tensor. Fails unless it is like that of [`DevicePass::new`].
    fn address(&self, name: &str, own: &DeviceTensor, found: Option<&DeviceTensor>) -> Result<u64> {
        let found = found.ok_or_else(|| Error::missing(name, None))?;
        if !own.is_like(found) {
            let text = |x: &DeviceTensor| format!("{:?} in {} with the strides {:?}", x.shape, x.element, x.strides);
            return Err(Error::value(name, text(own), text(found)));
        }
        if own.is_aligned() && !found.is_aligned() {
            let expected = "an address that is a multiple of 16, as when it was prepared";
            return Err(Error::value(name, expected, found.address));
        }
        found.check_whole(name)?;
        if found.elements() > 0 {
            self.check_address(name, found.address)?;
        }
        Ok(found.address)
    }
}

fn check_pointer(device: &Device, name: &str, address: u64) -> Result<()> {
    let (mut ordinal, attribute) = (-1i32, CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
    // SAFETY: the attribute is one number, and the driver looks the address up without reading there.
    let known = unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, address) };
    let expected = || format!("an address of device {}", device.ordinal);
    match known.result() {
        Ok(()) if ordinal as usize == device.ordinal => Ok(()),
        Ok(()) => Err(Error::value(name, expected(), format!("one of device {ordinal}"))),
        Err(DriverError(CUresult::CUDA_ERROR_INVALID_VALUE)) => {
            Err(Error::value(name, expected(), format!("{address:#x}")))
        }
        Err(error) => Err(device.failed(&format!("looking up the address of `{name}`"), error)),
    }
}
