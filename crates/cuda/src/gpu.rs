//! A device: its context, what was compiled for it, the fault that ended it.

use crate::absent::{Absent, text};
use crate::compiler::cores;
use crate::device;
use crate::device_id::DeviceId;
use crate::images::Images;
use crate::lock::lock;
use crate::options::Settings;
use crate::shared::shared_bytes;
use crate::target::Target;
use crate::variant::{KernelOf, Variant};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUdevice_attribute::*;
use cudarc::driver::sys::{CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUresult};
use cudarc::driver::{CudaContext, CudaFunction};
use cudarc::nvrtc::Ptx;
use etalon_problem::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

#[derive(Debug)]
pub(crate) struct Device {
    pub context: Arc<CudaContext>,
    pub target: Target,
    pub ordinal: usize,
    pub uuid: [u8; 16],
    images: Images,
    kernels: Mutex<BTreeMap<(Variant, &'static str), Arc<Slot>>>,
    /// The fault that ended the context.
    lost: OnceLock<String>,
}

/// A kernel of a variant, once it has been compiled or loaded.
type Slot = Mutex<Option<CudaFunction>>;

/// Bytes of shared memory that kernels take without asking.
const UNASKED: u32 = 48 << 10;

/// The first compute capability with kernels.
const OLDEST: (i32, i32) = (8, 0);

impl Device {
    pub fn open(ordinal: usize, settings: &Settings) -> Result<Device> {
        let driver = device::driver().map_err(absent)?;
        if ordinal >= driver.devices {
            let expected = format!("below the number of devices ({})", driver.devices);
            return Err(Error::value("device", expected, ordinal));
        }
        let what = || format!("device {ordinal}");
        let failed = |error| failure(ordinal, &what(), error);
        let context = CudaContext::new(ordinal).map_err(failed)?;
        // Calls have streams and memory of their own, with nothing to order between them.
        // SAFETY: no slice of this context is ever used on another stream than its own.
        unsafe { context.disable_event_tracking() };
        let capability = context.compute_capability().map_err(failed)?;
        if capability < OLDEST {
            let (oldest, found) = (text(OLDEST), text(capability));
            let reason = format!("kernels need compute capability {oldest}, and it has {found}");
            return Err(Error::unsupported(what(), reason));
        }
        let images = Images::new(settings, driver.version, &architecture(capability))?;
        let uuid = device::uuid(ordinal).map_err(failed)?;
        let count = context.attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map_err(failed)?;
        let shared = context.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN).map_err(failed)?;
        let (multiprocessors, shared_memory) = (count.max(1) as usize, shared.max(0) as u32);
        let target = Target { capability, multiprocessors, shared_memory };
        Ok(Device { context, target, ordinal, uuid, images, kernels: Mutex::default(), lost: OnceLock::new() })
    }

    pub fn bind(&self) -> Result<()> {
        self.check("the context", self.context.bind_to_thread())
    }

    /// A kernel, kept or loaded now.
    pub fn function(&self, variant: &Variant, name: &'static str) -> Result<CudaFunction> {
        let slot = lock(&self.kernels).entry((variant.clone(), name)).or_default().clone();
        // A thread that needs the same kernel waits for it; others are compiled beside it.
        let mut slot = lock(&slot);
        if let Some(function) = &*slot {
            return Ok(function.clone());
        }
        let architecture = self.architecture_of(variant);
        let function = self.images.load((variant, name), &architecture, |image| self.load(variant, name, image))?;
        Ok(slot.insert(function).clone())
    }

    /// Compiles side by side what `function` would compile one by one.
    pub fn compile_ahead(&self, kernels: &BTreeSet<KernelOf<'_>>) {
        // From when its load begins.
        let is_loaded = |&(variant, name): &KernelOf<'_>| lock(&self.kernels).contains_key(&(variant.clone(), name));
        let absent: Vec<_> = kernels.iter().filter(|kernel| !is_loaded(kernel)).collect();
        let threads = cores().min(absent.len());
        if threads < 2 {
            return;
        }
        let next = AtomicUsize::new(0);
        let compile = || {
            while let Some(kernel) = absent.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.images.compile_ahead(**kernel, &self.architecture_of(kernel.0), || is_loaded(kernel));
            }
        };
        thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(compile))));
    }

    fn architecture_of(&self, variant: &Variant) -> String {
        let own = variant.family.architecture_on(self.target.capability);
        own.unwrap_or_else(|| architecture(self.target.capability))
    }

    fn load(&self, variant: &Variant, name: &str, image: &[u8]) -> Result<CudaFunction> {
        let load = || -> Result<_, DriverError> {
            let module = self.context.load_module(Ptx::from_binary(image.to_vec()))?;
            let function = module.load_function(name)?;
            let bytes = shared_bytes(variant, name);
            if bytes > UNASKED {
                self.context.bind_to_thread()?;
                function.set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as i32)?;
            }
            Ok(function)
        };
        self.check(&format!("loading kernel {name}"), load())
    }

    pub fn check<T>(&self, what: &str, result: Result<T, DriverError>) -> Result<T> {
        result.map_err(|error| self.failed(what, error))
    }

    /// The error of a call of the driver. A fault that ends the context is remembered.
    pub fn failed(&self, what: &str, error: DriverError) -> Error {
        if ends_the_context(error.0) {
            let _ = self.lost.set(format!("{what}: {:?}", error.0));
        }
        failure(self.ordinal, what, error)
    }

    /// Fails where a fault has ended the context, or was noticed only when memory or kernels were given back.
    pub fn check_alive(&self) -> Result<()> {
        if let Some(fault) = self.lost.get() {
            return Err(Error::ContextLost { device: self.ordinal, fault: fault.clone() });
        }
        self.check("giving memory back", self.context.check_err())
    }
}

fn architecture((major, minor): (i32, i32)) -> String {
    format!("sm_{major}{minor}")
}

/// Faults after which every call of the context fails, until the process ends.
pub(crate) fn ends_the_context(code: CUresult) -> bool {
    use CUresult::*;
    matches!(
        code,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTAINED
            | CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUDA_ERROR_EXTERNAL_DEVICE
            | CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
    )
}

pub(crate) fn ordinal_of(uuid: [u8; 16]) -> Result<usize> {
    let driver = device::driver().map_err(absent)?;
    let mut known = Vec::new();
    for ordinal in 0..driver.devices {
        let failed = |error| failure(ordinal, &format!("device {ordinal}"), error);
        let own = device::uuid(ordinal).map_err(failed)?;
        if own == uuid {
            return Ok(ordinal);
        }
        known.push(DeviceId::Uuid(own).to_string());
    }
    let expected = format!("one of {}", known.join(", "));
    Err(Error::value("device", expected, DeviceId::Uuid(uuid)))
}

fn failure(ordinal: usize, what: &str, error: DriverError) -> Error {
    if ends_the_context(error.0) {
        return Error::ContextLost { device: ordinal, fault: format!("{what}: {:?}", error.0) };
    }
    Error::Device { what: what.to_string(), reason: format!("{:?}", error.0) }
}

fn absent(absent: Absent) -> Error {
    Error::unsupported("the tier cuda", absent.to_string())
}
