//! Work on a stream: copies, fills, kernels; and streams with the memory of a call of the host.

use crate::gpu::Device;
use crate::memory::{ALIGNMENT, memory};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, DevicePtr};
use etalon_problem::Result;
use std::marker::PhantomData;
use std::sync::Arc;

/// A stream of a device whose context is made current once: a queue stays on its thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Queue<'a> {
    pub device: &'a Device,
    pub stream: &'a Arc<CudaStream>,
    stays: PhantomData<*const ()>,
}

impl<'a> Queue<'a> {
    pub fn new(device: &'a Device, stream: &'a Arc<CudaStream>) -> Result<Self> {
        device.bind()?;
        Ok(Queue { device, stream, stays: PhantomData })
    }

    pub fn upload(&self, to: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the callers name memory of this call that has room for so many bytes. Pageable memory is
        // read before the driver returns; where a caller has pinned its own, the pass waits for the stream.
        let copied = unsafe { result::memcpy_htod_async(to, bytes, self.stream.cu_stream()) };
        self.device.check("copying to the device", copied)
    }

    /// Copies bytes to the host, and waits for them.
    pub fn download(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the callers name memory of this call that holds so many bytes; the wait is below.
        let copied = unsafe { result::memcpy_dtoh_async(bytes, from, self.stream.cu_stream()) };
        self.device.check("copying from the device", copied)?;
        self.finish()
    }

    pub fn fill(&self, to: u64, bytes: usize, word: u32) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the callers name a range of this call: ranges are whole multiples of 256 bytes.
        let filled = unsafe { sys::cuMemsetD32Async(to, word, bytes.div_ceil(4), self.stream.cu_stream()) };
        self.device.check("filling device memory", filled.result())
    }

    /// Runs a kernel over at least one block, with the bytes of its argument.
    pub fn launch(
        &self,
        kernel: &CudaFunction,
        blocks: u32,
        (threads, shared): (u32, u32),
        argument: &[u8],
    ) -> Result<()> {
        let mut arguments = [argument.as_ptr().cast_mut().cast()];
        // SAFETY: the callers are the passes of this crate: the bytes are those that `kernel_args!` declares to the
        // kernel, which checks their number, and each address in them is that of memory in which the kernel stays. The
        // driver copies the argument, without writing, before it returns, and the list of arguments, which has one as
        // the kernel does, lives until then.
        let launched = unsafe {
            let (grid, block, stream) = ((blocks, 1, 1), (threads, 1, 1), self.stream.cu_stream());
            result::launch_kernel(kernel.cu_function(), grid, block, shared, stream, &mut arguments)
        };
        self.device.check("launching a kernel", launched)
    }

    pub fn finish(&self) -> Result<()> {
        self.device.check("a kernel", self.stream.synchronize())
    }
}

#[derive(Debug)]
pub(crate) struct StreamSlot {
    pub stream: Arc<CudaStream>,
    memory: Option<CudaSlice<u8>>,
}

impl StreamSlot {
    pub fn new(stream: Arc<CudaStream>) -> Self {
        StreamSlot { stream, memory: None }
    }

    /// The address of so many bytes: memory of calls before, if it is enough.
    pub fn reserve(&mut self, device: &Device, bytes: usize) -> Result<u64> {
        if self.memory.as_ref().is_none_or(|memory| memory.len() < bytes) {
            self.memory = None; // what is too small makes room first
            self.memory = Some(device_memory(device, &self.stream, bytes)?);
        }
        Ok(self.memory.as_ref().map_or(0, |memory| memory.device_ptr(&self.stream).0))
    }

    /// Fills its memory with a number, before what is enqueued later.
    pub fn fill(&self, device: &Device, value: f32) -> Result<()> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let (address, bytes) = (memory.device_ptr(&self.stream).0, memory.len() / 4 * 4);
        self.queue(device)?.fill(address, bytes, value.to_bits())
    }

    pub fn queue<'a>(&'a self, device: &'a Device) -> Result<Queue<'a>> {
        Queue::new(device, &self.stream)
    }
}

/// Memory of a device in which nothing is written.
pub(crate) fn device_memory(device: &Device, stream: &Arc<CudaStream>, bytes: usize) -> Result<CudaSlice<u8>> {
    // SAFETY: nothing reads a byte of it that was not written: inputs are uploaded whole, results are
    // filled before kernels run, or written whole by these, and kernels write what they read.
    unsafe { stream.alloc::<u8>(bytes.max(ALIGNMENT)) }.map_err(|error| match error {
        DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => memory(bytes),
        error => device.failed("device memory", error),
    })
}
