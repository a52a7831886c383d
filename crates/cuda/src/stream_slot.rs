//! A stream with the device memory of one call of the host's door.

use crate::gpu::Device;
use crate::memory::{ALIGNMENT, memory};
use crate::queue::{Enqueued, Queue};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use etalon_problem::Error;
use std::sync::Arc;

/// A stream with memory.
#[derive(Debug)]
pub(crate) struct StreamSlot {
    pub stream: Arc<CudaStream>,
    memory: Option<CudaSlice<u8>>,
    enqueued: Enqueued,
}

impl StreamSlot {
    pub fn new(stream: Arc<CudaStream>) -> Self {
        StreamSlot { stream, memory: None, enqueued: Enqueued::default() }
    }

    /// The address of memory of so many bytes: that of calls before, if it is enough.
    pub fn reserve(&mut self, device: &Device, bytes: usize) -> Result<u64, Error> {
        if self.memory.as_ref().is_none_or(|memory| memory.len() < bytes) {
            self.memory = None; // what is too small makes room first
            self.memory = Some(device_memory(device, &self.stream, bytes)?);
        }
        Ok(self.memory.as_ref().map_or(0, |memory| memory.device_ptr(&self.stream).0))
    }

    /// Fills its memory with a number, before what is enqueued on its stream from here on.
    pub fn fill(&self, device: &Device, value: f32) -> Result<(), Error> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let (address, bytes) = (memory.device_ptr(&self.stream).0, memory.len() / 4 * 4);
        self.queue(device)?.fill(address, bytes, value.to_bits())
    }

    pub fn queue<'a>(&'a self, device: &'a Device) -> Result<Queue<'a>, Error> {
        Queue::new(device, &self.stream, &self.enqueued)
    }
}

/// Memory of a device in which nothing is written.
pub(crate) fn device_memory(device: &Device, stream: &Arc<CudaStream>, bytes: usize) -> Result<CudaSlice<u8>, Error> {
    // SAFETY: nothing reads a byte of it that was not written: inputs are uploaded whole, results are
    // filled before kernels run, or written whole by these, and kernels write what they read.
    let memory = unsafe { stream.alloc::<u8>(bytes.max(ALIGNMENT)) };
    memory.map_err(|error| match error {
        DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => self::memory(bytes),
        error => device.failed("device memory", error),
    })
}
