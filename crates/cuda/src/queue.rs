//! Work that is enqueued on a stream: copies, fills, kernels.

use crate::gpu::Device;
use cudarc::driver::result;
use cudarc::driver::sys;
use cudarc::driver::{CudaFunction, CudaStream};
use etalon_problem::Error;
use std::cell::Cell;
use std::sync::Arc;

/// Counts of what was enqueued.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Enqueued {
    pub launches: Cell<usize>,
    pub fills: Cell<usize>,
}

/// A stream of a device whose context is that of the thread: it is made current once, and a queue stays on its
/// thread, since [`Enqueued`] does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Queue<'a> {
    pub device: &'a Device,
    stream: &'a Arc<CudaStream>,
    enqueued: &'a Enqueued,
}

impl<'a> Queue<'a> {
    pub fn new(device: &'a Device, stream: &'a Arc<CudaStream>, enqueued: &'a Enqueued) -> Result<Self, Error> {
        device.bind()?;
        Ok(Queue { device, stream, enqueued })
    }

    pub fn stream(&self) -> &'a Arc<CudaStream> {
        self.stream
    }

    /// Copies bytes from the host to an address that has room for them.
    pub fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the callers name memory of this call that has room for so many bytes. Pageable memory is
        // read before the driver returns; where a caller has pinned its own, the pass waits for the stream.
        let copied = unsafe { result::memcpy_htod_async(to, bytes, self.stream.cu_stream()) };
        copied.map_err(|error| self.device.failed("copying to the device", error))
    }

    /// Copies bytes from an address to the host, and waits for them.
    pub fn download(&self, from: u64, bytes: &mut [u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the callers name memory of this call that holds so many bytes; the wait is below.
        let copied = unsafe { result::memcpy_dtoh_async(bytes, from, self.stream.cu_stream()) };
        copied.map_err(|error| self.device.failed("copying from the device", error))?;
        self.finish()
    }

    /// Fills memory with a 32-bit word, up to the next whole word.
    pub fn fill(&self, to: u64, bytes: usize, word: u32) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        let words = bytes.div_ceil(4);
        // SAFETY: the callers name a range of this call: ranges are whole multiples of 256 bytes.
        let filled = unsafe { sys::cuMemsetD32Async(to, word, words, self.stream.cu_stream()) };
        self.enqueued.fills.set(self.enqueued.fills.get() + 1);
        filled.result().map_err(|error| self.device.failed("filling device memory", error))
    }

    /// Runs a kernel over at least one block, with the bytes of its argument.
    pub fn launch(
        &self,
        kernel: &CudaFunction,
        blocks: u32,
        (threads, shared): (u32, u32),
        argument: &[u8],
    ) -> Result<(), Error> {
        let mut arguments = [argument.as_ptr().cast_mut().cast()];
        // SAFETY: the callers are the passes of this crate: the bytes are those that `kernel_args!` declares to the
        // kernel, which checks their number, and each address in them is that of memory in which the kernel stays. The
        // driver copies the argument, without writing, before it returns, and the list of arguments, which has one as
        // the kernel does, lives until then.
        let launched = unsafe {
            sys::cuLaunchKernel(
                kernel.cu_function(),
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared,
                self.stream.cu_stream(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.enqueued.launches.set(self.enqueued.launches.get() + 1);
        launched.result().map_err(|error| self.device.failed("launching a kernel", error))
    }

    /// Waits until everything is done.
    pub fn finish(&self) -> Result<(), Error> {
        self.stream.synchronize().map_err(|error| self.device.failed("a kernel", error))
    }
}
