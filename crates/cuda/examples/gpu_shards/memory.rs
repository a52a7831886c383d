//! Memory of a device, as `cuMemAlloc` gives it: what is sent to other devices must not come from a pool.

use crate::exchange::Outcome;
use cudarc::driver::{CudaStream, result};
use etalon_cuda::DeviceTensor;
use etalon_problem::Stored;
use std::cell::RefCell;
use std::sync::Arc;

/// A stream of a device, and memory there that is given back with it.
pub struct Memory {
    pub stream: Arc<CudaStream>,
    held: RefCell<Vec<u64>>,
}

impl Memory {
    pub fn new(stream: Arc<CudaStream>) -> Self {
        Memory { stream, held: RefCell::default() }
    }

    /// So many bytes, at least 256.
    pub fn room(&self, bytes: usize) -> Outcome<u64> {
        self.stream.context().bind_to_thread()?;
        // SAFETY: nothing reads a byte of it before it has been written.
        let address = unsafe { result::malloc_sync(bytes.max(256)) }?;
        self.held.borrow_mut().push(address);
        Ok(address)
    }

    /// A dense tensor in memory of its own.
    pub fn tensor(&self, shape: &[usize], stored: impl Into<Stored>) -> Outcome<DeviceTensor> {
        let stored = stored.into();
        let bytes = shape.iter().product::<usize>() * stored.bytes();
        Ok(DeviceTensor::dense(self.room(bytes)?, shape, stored))
    }

    /// The same with these elements.
    pub fn copy<T>(&self, elements: &[T], shape: &[usize], stored: impl Into<Stored>) -> Outcome<DeviceTensor> {
        let stored = stored.into();
        let bytes = size_of_val(elements);
        assert_eq!(bytes, shape.iter().product::<usize>() * stored.bytes());
        let address = self.room(bytes)?;
        if bytes > 0 {
            // SAFETY: the memory holds as many bytes, and is read when the call returns.
            unsafe { result::memcpy_htod_sync(address, elements) }?;
        }
        Ok(DeviceTensor::dense(address, shape, stored))
    }

    /// The bytes that lie there, once the stream is done.
    pub fn read(&self, address: u64, bytes: usize) -> Outcome<Vec<u8>> {
        let mut list = vec![0; bytes];
        self.stream.synchronize()?;
        if bytes > 0 {
            // SAFETY: the caller names memory of this device that holds as many bytes.
            unsafe { result::memcpy_dtoh_sync(&mut list, address) }?;
        }
        Ok(list)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
        let _ = self.stream.context().bind_to_thread();
        for &address in self.held.borrow().iter() {
            // SAFETY: it was given by `cuMemAlloc`, and the stream has been waited for.
            let _ = unsafe { result::free_sync(address) };
        }
    }
}
