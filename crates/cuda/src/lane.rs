//! A stream with the device memory of one call.

use crate::gpu::Device;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg,
};
use etalon_problem::Error;
use std::ptr;
use std::sync::Arc;

/// Where something lies in the memory of a call.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Room {
    at: usize,
    pub bytes: usize,
}

/// Rooms of a call, before there is memory for them.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    bytes: usize,
}

/// Every room begins at a multiple of as many bytes: enough for any vector and for the copy engine.
const ALIGNMENT: usize = 256;

impl Layout {
    pub fn room(&mut self, bytes: usize) -> Result<Room, Error> {
        let at = self.bytes;
        let end = bytes.checked_next_multiple_of(ALIGNMENT).and_then(|all| at.checked_add(all));
        self.bytes = end.ok_or_else(|| memory(usize::MAX))?;
        Ok(Room { at, bytes })
    }
}

fn memory(bytes: usize) -> Error {
    Error::Memory { what: "device memory of a pass".to_string(), bytes }
}

/// A stream with memory.
#[derive(Debug)]
pub(crate) struct Lane {
    stream: Arc<CudaStream>,
    memory: Option<CudaSlice<u8>>,
}

impl Lane {
    pub fn new(stream: Arc<CudaStream>) -> Self {
        Lane { stream, memory: None }
    }

    /// Takes memory for a layout, if there is not enough from calls before.
    pub fn reserve(&mut self, device: &Device, layout: &Layout) -> Result<(), Error> {
        let bytes = layout.bytes.max(ALIGNMENT);
        if self.memory.as_ref().is_some_and(|memory| memory.len() >= bytes) {
            return Ok(());
        }
        self.memory = None; // what is too small makes room first
        // SAFETY: nothing reads a byte of it that was not written: inputs are uploaded whole, results are
        // filled before kernels run, and kernels write what they read.
        let memory = unsafe { self.stream.alloc::<u8>(bytes) };
        self.memory = Some(memory.map_err(|error| match error {
            DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => self::memory(bytes),
            error => device.failed("device memory", error),
        })?);
        Ok(())
    }

    /// The device address of a room.
    pub fn address(&self, room: Room) -> u64 {
        let Some(memory) = &self.memory else { return 0 };
        let (base, _guard) = memory.device_ptr(&self.stream);
        base + room.at as u64
    }

    /// Copies bytes from the host to a room of at least as many.
    pub fn upload(&mut self, device: &Device, room: Room, bytes: &[u8]) -> Result<(), Error> {
        let Some(memory) = self.memory.as_mut().filter(|_| !bytes.is_empty()) else {
            return Ok(());
        };
        let end = room.at + bytes.len().min(room.bytes);
        let mut to = memory.slice_mut(room.at..end);
        let copied = self.stream.memcpy_htod(&bytes[..end - room.at], &mut to);
        copied.map_err(|error| device.failed("copying to the device", error))
    }

    /// Fills a room with a 32-bit word.
    pub fn fill(&self, device: &Device, room: Room, word: u32) -> Result<(), Error> {
        if room.bytes == 0 {
            return Ok(());
        }
        let bound = self.stream.context().bind_to_thread();
        let words = room.bytes.div_ceil(4);
        // SAFETY: the room lies in the memory of this lane, whose rooms are whole multiples of 256 bytes.
        let filled = bound.and_then(|()| unsafe {
            sys::cuMemsetD32Async(self.address(room), word, words, self.stream.cu_stream()).result()
        });
        filled.map_err(|error| device.failed("filling device memory", error))
    }

    /// Copies rows of `width` bytes from one room to another, each with its own distance between rows.
    pub fn copy_rows(
        &self,
        device: &Device,
        (from, from_pitch): (Room, usize),
        (to, to_pitch): (Room, usize),
        width: usize,
        rows: usize,
    ) -> Result<(), Error> {
        if width == 0 || rows == 0 {
            return Ok(());
        }
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: ptr::null(),
            srcDevice: self.address(from),
            srcArray: ptr::null_mut(),
            srcPitch: from_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: ptr::null_mut(),
            dstDevice: self.address(to),
            dstArray: ptr::null_mut(),
            dstPitch: to_pitch,
            WidthInBytes: width,
            Height: rows,
        };
        let bound = self.stream.context().bind_to_thread();
        // SAFETY: both rooms lie in the memory of this lane and hold so many rows.
        let copied = bound.and_then(|()| unsafe {
            sys::cuMemcpy2DAsync_v2(&copy, self.stream.cu_stream()).result()
        });
        copied.map_err(|error| device.failed("copying on the device", error))
    }

    /// Copies the bytes of a room to the host.
    pub fn download(&self, device: &Device, room: Room, bytes: &mut [u8]) -> Result<(), Error> {
        let Some(memory) = self.memory.as_ref().filter(|_| !bytes.is_empty()) else {
            return Ok(());
        };
        let from = memory.slice(room.at..room.at + room.bytes.min(bytes.len()));
        let copied = self.stream.memcpy_dtoh(&from, bytes);
        copied.map_err(|error| device.failed("copying from the device", error))
    }

    /// Runs a kernel over `blocks` blocks; none at all where there is no block.
    ///
    /// The argument must be what the kernel takes, and every address in it that of a room in which the
    /// kernel stays.
    pub fn launch<A: DeviceRepr>(
        &self,
        device: &Device,
        kernel: &CudaFunction,
        blocks: u64,
        (threads, shared): (u32, u32),
        argument: &A,
    ) -> Result<(), Error> {
        if blocks == 0 {
            return Ok(());
        }
        let blocks = u32::try_from(blocks).ok().filter(|&n| n <= i32::MAX as u32);
        let blocks = blocks.ok_or_else(|| Error::Unsupported {
            what: "a problem of this size".to_string(),
            reason: "a launch has at most 2³¹ − 1 blocks".to_string(),
        })?;
        let grid = LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (threads, 1, 1),
            shared_mem_bytes: shared,
        };
        // SAFETY: by the condition above; the callers are the passes of this crate, whose argument is the
        // structure that the source of the kernel declares.
        let launched = unsafe { self.stream.launch_builder(kernel).arg(argument).launch(grid) };
        launched.map(|_| ()).map_err(|error| device.failed("launching a kernel", error))
    }

    /// Waits until everything is done.
    pub fn finish(&self, device: &Device) -> Result<(), Error> {
        self.stream.synchronize().map_err(|error| device.failed("a kernel", error))
    }
}
