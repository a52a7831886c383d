//! Requests of a caller, in JSON, and the pass that is prepared for one.

use etalon_cuda::{DevicePass, DeviceTensor, DeviceTensors, Options, Settings, Workspace};
use etalon_problem::{Dtype, Error, Operand, Pass, Problem, Stored, find};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::LazyLock;

/// Why a call failed, in words.
#[derive(Debug)]
pub struct Failure(pub String);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure(error.to_string())
    }
}

/// A pass of a problem with its tensors.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// As in a problem file. Masks that name arrays are not taken.
    problem: Problem,
    /// Its name.
    pass: String,
    #[serde(default)]
    options: Chosen,
    /// Tensors that it reads, by name.
    inputs: BTreeMap<String, Tensor>,
    /// Tensors that it writes, by name; other outputs are not computed.
    outputs: BTreeMap<String, Tensor>,
}

/// Settings that differ from the defaults of [`Options`].
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Chosen {
    device: Option<String>,
    level: Option<String>,
    precision: Option<String>,
    assume_finite: bool,
    memory_budget: Option<usize>,
}

/// A tensor on the device.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tensor {
    address: u64,
    shape: Vec<usize>,
    /// In elements.
    strides: Vec<i64>,
    /// f32, bf16, f16; i64 for integers.
    dtype: String,
}

impl Tensor {
    fn on_device(&self) -> Result<DeviceTensor, Error> {
        let stored = match self.dtype.as_str() {
            "i64" => Stored::Integer,
            float => Stored::Float(float.parse::<Dtype>()?),
        };
        DeviceTensor::new(self.address, &self.shape, &self.strides, stored)
    }
}

/// A prepared pass with the tensors of its request.
#[derive(Debug)]
pub struct Prepared {
    pass: DevicePass,
    inputs: DeviceTensors<'static>,
    outputs: DeviceTensors<'static>,
}

/// Compiled kernels, and the devices.
static WORKSPACE: LazyLock<Workspace> = LazyLock::new(|| Workspace::with(Settings::user()));

impl Request {
    /// A request of JSON.
    pub fn read(text: &[u8]) -> Result<Request, Failure> {
        serde_json::from_slice(text).map_err(|error| Failure(format!("the request: {error}")))
    }

    /// Prepares the pass on the device.
    pub fn prepare(self) -> Result<Prepared, Failure> {
        let (pass, algorithm) = (self.pass.parse::<Pass>()?, self.problem.algorithm());
        if !algorithm.passes().contains(&pass) {
            return Err(algorithm.no_pass(pass).into());
        }
        let options = self.options.options()?;
        let operands = self.problem.operands(pass);
        let (inputs, outputs) = (named(&self.inputs, &operands)?, named(&self.outputs, &operands)?);
        let pass = DevicePass::new(&WORKSPACE, &self.problem, pass, &inputs, &outputs, &options)?;
        Ok(Prepared { pass, inputs, outputs })
    }
}

/// Tensors under the names of the table, which live as long as the program.
fn named(
    tensors: &BTreeMap<String, Tensor>,
    operands: &[Operand],
) -> Result<DeviceTensors<'static>, Error> {
    tensors.iter().try_fold(DeviceTensors::new(), |all, (name, x)| {
        let operand = find(operands, name).ok_or_else(|| Error::unexpected(name, None))?;
        Ok(all.with(operand.name, x.on_device()?))
    })
}

impl Chosen {
    fn options(&self) -> Result<Options, Error> {
        let usual = Options::default();
        Ok(Options {
            device: self.device.as_deref().map_or(Ok(usual.device), str::parse)?,
            level: self.level.as_deref().map_or(Ok(usual.level), str::parse)?,
            precision: self.precision.as_deref().map_or(Ok(usual.precision), str::parse)?,
            assume_finite: self.assume_finite,
            memory_budget: self.memory_budget.unwrap_or(usual.memory_budget),
            recompute: false,
            ..usual
        })
    }
}

impl Prepared {
    pub fn scratch_bytes(&self) -> usize {
        self.pass.scratch_bytes()
    }

    /// Enqueues the pass for the tensors of its request.
    ///
    /// # Safety
    /// As [`DevicePass::enqueue`].
    pub unsafe fn enqueue(&self, stream: *mut c_void, scratch: u64) -> Result<(), Error> {
        // SAFETY: the caller's promise, and the pass lives as long as this.
        unsafe { self.pass.enqueue(stream.cast(), &self.inputs, &self.outputs, scratch) }
    }
}
