//! The door for operands that lie on a device already.

use crate::gpu::{Device, lock};
use crate::lane::device_memory;
use crate::options::Options;
use crate::parts::Laid;
use crate::queue::{Enqueued, Queue};
use crate::ready::{Ready, ready};
use crate::run::{has_kernels, offers};
use crate::workspace::{Held, Workspace};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUdeviceptr, CUpointer_attribute, CUresult, CUstream};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use etalon_problem::{Error, Pass, Problem, Stored, Table};
use smallvec::SmallVec;
use std::collections::HashSet;
use std::sync::Mutex;

/// A tensor in the memory of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceTensor {
    address: CUdeviceptr,
    shape: SmallVec<[usize; 4]>,
    /// In elements.
    strides: SmallVec<[i64; 4]>,
    stored: Stored,
}

impl DeviceTensor {
    /// The tensor of a shape that begins at an address; strides count elements and may be 0 or negative; of
    /// floating-point numbers (a [`Dtype`](etalon_problem::Dtype)) or of integers ([`Stored::Integer`]).
    /// Fails where there are not as many strides as axes.
    pub fn new(
        address: u64,
        shape: &[usize],
        strides: &[i64],
        stored: impl Into<Stored>,
    ) -> Result<DeviceTensor, Error> {
        if shape.len() != strides.len() {
            return Err(Error::value("number of strides", shape.len().to_string(), strides.len()));
        }
        let (shape, strides, stored) = (shape.into(), strides.into(), stored.into());
        Ok(DeviceTensor { address, shape, strides, stored })
    }

    /// As [`DeviceTensor::new`], of elements that lie one after the other.
    pub fn dense(address: u64, shape: &[usize], stored: impl Into<Stored>) -> DeviceTensor {
        let mut strides: SmallVec<[i64; 4]> = SmallVec::from_elem(1, shape.len());
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis].saturating_mul(shape[axis] as i64);
        }
        DeviceTensor { address, shape: shape.into(), strides, stored: stored.into() }
    }

    /// The dense tensor in a slice of cudarc. Fails where the slice holds fewer elements.
    pub fn of<T>(
        slice: &CudaSlice<T>,
        stream: &CudaStream,
        shape: &[usize],
        stored: impl Into<Stored>,
    ) -> Result<DeviceTensor, Error> {
        let stored = stored.into();
        let wanted = shape.iter().try_fold(stored.bytes(), |n, &extent| n.checked_mul(extent));
        let found = slice.len() * size_of::<T>();
        if wanted.is_none_or(|wanted| wanted > found) {
            let expected = format!("at least those of {shape:?} in {stored}");
            return Err(Error::value("bytes of a slice", expected, found));
        }
        Ok(DeviceTensor::dense(slice.device_ptr(stream).0, shape, stored))
    }

    /// The same elsewhere.
    pub fn at(self, address: u64) -> DeviceTensor {
        DeviceTensor { address, ..self }
    }

    pub(crate) fn laid(&self) -> Laid {
        Laid { strides: Some(self.strides.to_vec()), aligned: self.is_aligned() }
    }

    /// Whether the copy engine may begin there.
    fn is_aligned(&self) -> bool {
        self.address.is_multiple_of(16)
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Tensors of a device by name: what a pass reads, or where it writes.
#[derive(Debug, Clone, Default)]
pub struct DeviceTensors<'a> {
    list: Vec<(&'a str, DeviceTensor)>,
}

impl<'a> DeviceTensors<'a> {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one.
    pub fn with(mut self, name: &'a str, tensor: DeviceTensor) -> Self {
        self.list.push((name, tensor));
        self
    }

    pub(crate) fn get(&self, name: &str) -> Option<&DeviceTensor> {
        self.list.iter().find(|(other, _)| *other == name).map(|(_, tensor)| tensor)
    }

    pub(crate) fn each(&self) -> impl Iterator<Item = (&'a str, &[usize], Stored)> + Clone {
        self.list.iter().map(|(name, x)| (*name, &x.shape[..], x.stored))
    }
}

/// A pass of a problem, prepared once for operands on a device, and enqueued as often as wanted.
///
/// All that takes time beside the kernels is done here: kernels are compiled and loaded, the tables of
/// masks and sequences are made and copied to the device. What is enqueued neither waits nor takes
/// memory, and may be captured in a graph. The mask, its arrays and the lengths of sequences are those
/// of the problem; for others another pass is prepared.
///
/// One prepared pass serves calls on any streams at the same time, each with scratch memory of its own.
#[derive(Debug)]
pub struct DevicePass {
    ready: Box<dyn Ready>,
    tables: CudaSlice<u8>,
    tables_at: u64,
    inputs: DeviceTensors<'static>,
    outputs: DeviceTensors<'static>,
    /// Addresses that the driver has found on the device.
    known: Mutex<HashSet<u64>>,
}

/// As many addresses are remembered, those of some passes over buffers that take turns.
const KNOWN: usize = 256;

impl DevicePass {
    /// Prepares a pass for tensors of these shapes, types and strides, which may have other addresses when
    /// it is enqueued. An output without a place is not computed. Waits until the tables are on the device.
    pub fn new<'t>(
        workspace: &Workspace,
        problem: &Problem,
        pass: Pass,
        inputs: &'t DeviceTensors<'t>,
        outputs: &'t DeviceTensors<'t>,
        options: &Options,
    ) -> Result<DevicePass, Error> {
        has_kernels(problem.algorithm(), pass)?;
        let table = problem.checked_table(pass)?;
        let storage = table.check_tensors(inputs.each(), outputs.each(), options.recompute)?;
        storage.refuse_f64()?;
        offers(options, problem.algorithm(), pass, storage)?;
        let held = workspace.device(options.device)?;
        let holds = |name: &str, result: bool| {
            (if result { outputs } else { inputs }).get(name).map(DeviceTensor::laid)
        };
        let ready = ready(&held, problem, (pass, storage), &table, &holds, None, options)?;
        DevicePass::of(&held, ready, &table, inputs, outputs)
    }

    /// Of a pass that was prepared for these tensors, which have passed [`Table::check_tensors`].
    pub(crate) fn of<'t>(
        held: &Held,
        ready: Box<dyn Ready + '_>,
        table: &Table,
        inputs: &'t DeviceTensors<'t>,
        outputs: &'t DeviceTensors<'t>,
    ) -> Result<DevicePass, Error> {
        let lane = held.lane()?;
        let queue = lane.queue(&held.device)?;
        let tables = device_memory(&held.device, &lane.stream, ready.table_bytes())?;
        let tables_at = tables.device_ptr(&lane.stream).0;
        ready.upload(&queue, tables_at)?;
        queue.finish()?;
        held.give_back(lane);
        // Names of the table live as long as the program.
        let own = |tensors: &DeviceTensors<'_>| DeviceTensors {
            list: table
                .operands
                .iter()
                .filter_map(|x| Some((x.name, tensors.get(x.name)?.clone())))
                .collect(),
        };
        let (inputs, outputs) = (own(inputs), own(outputs));
        let (ready, known) = (ready.into_owned(), Mutex::default());
        Ok(DevicePass { ready, tables, tables_at, inputs, outputs, known })
    }

    pub(crate) fn device(&self) -> &Device {
        self.ready.parts().device()
    }

    /// The scratch memory that a call needs, in bytes. It must begin at a multiple of 256.
    pub fn scratch_bytes(&self) -> usize {
        self.ready.scratch_bytes()
    }

    /// The memory that the pass holds on the device for its tables, in bytes.
    pub fn table_bytes(&self) -> usize {
        self.tables.len()
    }

    /// Enqueues the pass on a stream of the device's primary context: nothing has been computed when this
    /// returns. `inputs` and `outputs` have the names, shapes, types and strides that the pass was prepared
    /// for, and `scratch` is the address of [`DevicePass::scratch_bytes`] bytes.
    ///
    /// Fails where a tensor is another, is not in memory of the device, or is less aligned than the one that
    /// the pass was prepared for; nothing is enqueued then. Where an earlier call found an address on the
    /// device, the driver is not asked again.
    ///
    /// # Safety
    /// The stream must be one of the primary context of the device. Until what is enqueued has run, and as
    /// long as a graph that has captured it may run, this pass, all elements of the tensors and the scratch
    /// memory must stay; nothing else may write what the pass reads or read what it writes; and the elements
    /// of a result must not overlap one another, those of another tensor, or the scratch memory.
    pub unsafe fn enqueue<'t>(
        &self,
        stream: CUstream,
        inputs: &'t DeviceTensors<'t>,
        outputs: &'t DeviceTensors<'t>,
        scratch: u64,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.enqueue_counted(stream, inputs, outputs, scratch) }.map(|_| ())
    }

    /// The same, and what was enqueued.
    ///
    /// # Safety
    /// That of [`DevicePass::enqueue`].
    pub(crate) unsafe fn enqueue_counted<'t>(
        &self,
        stream: CUstream,
        inputs: &'t DeviceTensors<'t>,
        outputs: &'t DeviceTensors<'t>,
        scratch: u64,
    ) -> Result<Enqueued, Error> {
        let (device, enqueued) = (self.device(), Enqueued::default());
        device.check_alive()?;
        // SAFETY: the caller's promise.
        let stream = unsafe { device.context.wrap_borrowed_stream(stream) };
        // The driver looks addresses up in the context of the thread, which may have none so far.
        let queue = Queue::new(device, &stream, &enqueued)?;
        let addresses = self.addresses(device, inputs, outputs)?;
        if self.ready.scratch_bytes() > 0 {
            self.check_address(device, "scratch", scratch)?;
            if !scratch.is_multiple_of(256) {
                return Err(Error::value("scratch", "a multiple of 256", scratch));
            }
        }
        self.ready.enqueue(queue, &addresses, (self.tables_at, scratch))?;
        Ok(enqueued)
    }

    /// Fails unless an address is in the memory of the device.
    fn check_address(&self, device: &Device, name: &str, address: u64) -> Result<(), Error> {
        if lock(&self.known).contains(&address) {
            return Ok(());
        }
        check_pointer(device, name, address)?;
        let mut known = lock(&self.known);
        if known.len() == KNOWN {
            known.clear();
        }
        known.insert(address);
        Ok(())
    }

    /// Where each part of the pass is held.
    fn addresses<'t>(
        &self,
        device: &Device,
        inputs: &'t DeviceTensors<'t>,
        outputs: &'t DeviceTensors<'t>,
    ) -> Result<Vec<u64>, Error> {
        for (own, others) in [(&self.inputs, inputs), (&self.outputs, outputs)] {
            if let Some((name, _)) = others.list.iter().find(|(name, _)| own.get(name).is_none()) {
                return Err(Error::unexpected(name, None));
            }
        }
        let of = |name: &str| {
            let given = self.inputs.get(name).map(|own| (own, inputs.get(name)));
            given.or_else(|| self.outputs.get(name).map(|own| (own, outputs.get(name))))
        };
        let address = |name: &'static str| {
            let Some((own, found)) = of(name) else { return Ok(0) };
            let found = found.ok_or_else(|| Error::missing(name, None))?;
            if (&own.shape, &own.strides, own.stored)
                != (&found.shape, &found.strides, found.stored)
            {
                let text = |x: &DeviceTensor| {
                    format!("{:?} in {} with the strides {:?}", x.shape, x.stored, x.strides)
                };
                return Err(Error::value(name, text(own), text(found)));
            }
            if own.is_aligned() && !found.is_aligned() {
                let expected = "an address that is a multiple of 16, as when it was prepared";
                return Err(Error::value(name, expected, found.address));
            }
            if found.elements() > 0 {
                self.check_address(device, name, found.address)?;
            }
            Ok(found.address)
        };
        self.ready.parts().list.iter().map(|part| address(part.operand.name)).collect()
    }
}

/// Fails unless an address is in the memory of a device.
fn check_pointer(device: &Device, name: &str, address: u64) -> Result<(), Error> {
    let mut ordinal = -1i32;
    // SAFETY: the attribute is one number, and the driver looks the address up without reading there.
    let known = unsafe {
        sys::cuPointerGetAttribute(
            (&raw mut ordinal).cast(),
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            address,
        )
    };
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
