//! Passes on tensors of a GPU, which Python describes by address, shape, strides and type: those of PyTorch.

use crate::error::exception;
use crate::problem::Problem;
use crate::shard::Step;
use etalon_cuda::linear_cross_entropy::shard::{
    prepare_backward, prepare_combine, prepare_combine_dh, prepare_forward, prepare_output,
};
use etalon_cuda::{DeviceId, DeviceTensor, DeviceTensors, Element, Options, Settings, Workspace};
use etalon_problem::linear_cross_entropy::shard::{Dh, Shard};
use etalon_problem::{Dtype, Error, LinearCrossEntropy, Operand, Pass, Stored};
use pyo3::prelude::*;
use std::ops::Range;
use std::sync::LazyLock;

/// A tensor on a device: its name, address, shape, strides in elements, and type.
type Described = (String, u64, Vec<usize>, Vec<i64>, String);

/// Devices and compiled kernels, for all passes: the one state of the module beside its engine.
static WORKSPACE: LazyLock<Workspace> = LazyLock::new(|| Workspace::with(Settings::user()));

/// A pass that is prepared for tensors of a device, to be enqueued for any of their shapes, strides and types.
#[pyclass(frozen, module = "etalon._etalon")]
pub struct DevicePass {
    pass: etalon_cuda::DevicePass,
    inputs: DeviceTensors<'static>,
    outputs: DeviceTensors<'static>,
}

#[pymethods]
impl DevicePass {
    /// Compiles and loads the kernels, and copies tables to the device, which takes seconds for kernels that no cache
    /// has. Must not be called while a stream is captured.
    #[new]
    #[pyo3(signature = (problem, pass_, inputs, outputs, *, device))]
    fn new(
        py: Python<'_>,
        problem: &Problem,
        pass_: &str,
        inputs: Vec<Described>,
        outputs: Vec<Described>,
        device: usize,
    ) -> PyResult<Self> {
        let pass: Pass = pass_.parse().map_err(exception)?;
        let operands = problem.inner.checked_table(pass).map_err(exception)?.operands;
        let arrays = problem.inner.arrays();
        let arrays: Vec<&str> = arrays.iter().map(|(name, _)| name.as_str()).collect();
        let mut names = names_of(&operands);
        let outputs = named(&outputs, &names).map_err(exception)?;
        // The mask of PyTorch's operators has one name.
        names.extend((arrays == ["mask"]).then_some("mask"));
        let inputs = named(&inputs, &names).map_err(exception)?;
        let device = DeviceId::Ordinal(device);
        let options = Options { device, ..Options::default() };
        let problem = &problem.inner;
        let prepared = py.detach(|| {
            etalon_cuda::DevicePass::new(&WORKSPACE, problem, pass, &inputs, &outputs, &options)
        });
        Ok(DevicePass { pass: prepared.map_err(exception)?, inputs, outputs })
    }

    /// The same of a step of a loss in shards: `classes` are those of the own shard, or of all in their order, as of
    /// `run_shard`. Partials, and parts of dh, of all shards lie one behind the other, without further ones.
    #[staticmethod]
    #[pyo3(signature = (problem, step, classes, inputs, outputs, *, device))]
    fn of_shards(
        py: Python<'_>,
        problem: &Problem,
        step: &str,
        classes: Vec<(usize, usize)>,
        inputs: Vec<Described>,
        outputs: Vec<Described>,
        device: usize,
    ) -> PyResult<Self> {
        let of: &LinearCrossEntropy = (&problem.inner).try_into().map_err(exception)?;
        let step = Step::of(step).map_err(exception)?;
        let shards: Vec<_> = classes.into_iter().map(|(start, end)| start..end).collect();
        let (names, matrices) = (names_of_shards(of), matrices(step, &inputs, &outputs));
        let inputs = named(&inputs, &names).map_err(exception)?;
        let outputs = named(&outputs, &names).map_err(exception)?;
        let options = Options { device: DeviceId::Ordinal(device), ..Options::default() };
        let tensors = (&inputs, &outputs);
        let prepared = py.detach(|| prepare(of, (step, &shards, matrices), tensors, &options));
        Ok(DevicePass { pass: prepared.map_err(exception)?, inputs, outputs })
    }

    /// Why this build has no CUDA tier: it has one.
    #[classattr]
    fn absent() -> Option<&'static str> {
        None
    }

    /// The scratch memory of a call, in bytes.
    #[getter]
    fn scratch_bytes(&self) -> usize {
        self.pass.scratch_bytes()
    }

    /// Enqueues the pass on a stream. The inputs and outputs have the shapes, strides and types of those that it was
    /// prepared for, and these addresses, in the same order; `scratch` is the address of `scratch_bytes` bytes.
    ///
    /// The caller (`python/etalon/_device.py`) holds the tensors and the pass until what is enqueued has run, or
    /// leaves their memory to an allocator that gives it to later work of the same stream alone.
    fn enqueue(
        &self,
        stream: usize,
        inputs: Vec<u64>,
        outputs: Vec<u64>,
        scratch: u64,
    ) -> PyResult<()> {
        let inputs = moved("inputs", &self.inputs, &inputs).map_err(exception)?;
        let outputs = moved("outputs", &self.outputs, &outputs).map_err(exception)?;
        // SAFETY: the stream is PyTorch's, of the device's primary context. The caller's promise above is that nothing
        // of the tensors, the pass and the scratch memory goes before the work has run; results are new tensors of
        // PyTorch, whose elements lie nowhere else.
        let enqueued = unsafe { self.pass.enqueue(stream as *mut _, &inputs, &outputs, scratch) };
        enqueued.map_err(exception)
    }
}

/// Prepares a step of a loss in shards.
fn prepare(
    problem: &LinearCrossEntropy,
    (step, shards, matrices): (Step, &[Range<usize>], usize),
    (inputs, outputs): (&DeviceTensors<'_>, &DeviceTensors<'_>),
    options: &Options,
) -> Result<etalon_cuda::DevicePass, Error> {
    let own = || match shards {
        [classes] => Shard::new(problem, classes.clone()),
        _ => Err(Error::value("classes", "one range, that of the own shard", shards.len())),
    };
    match step {
        Step::Forward => prepare_forward(&WORKSPACE, &own()?, inputs, outputs, options),
        Step::Combine => prepare_combine(&WORKSPACE, problem, shards, inputs, outputs, options),
        Step::Output => prepare_output(&WORKSPACE, &own()?, inputs, outputs, options),
        Step::Backward => {
            prepare_backward(&WORKSPACE, &own()?, inputs, outputs, Dh::of(matrices), options)
        }
        Step::CombineDh => {
            // Forms of as many parts have the same parts.
            let filled = shards.iter().filter(|classes| !classes.is_empty()).count();
            let form = if matrices == filled { Dh::Sum } else { Dh::Nodes };
            prepare_combine_dh(&WORKSPACE, problem, (shards, form), inputs, outputs, options)
        }
    }
}

/// The matrices of dh that a step writes or reads: one where there is no place.
fn matrices(step: Step, inputs: &[Described], outputs: &[Described]) -> usize {
    let (tensors, own) = match step {
        Step::CombineDh => (inputs, "parts"),
        _ => (outputs, "dh"),
    };
    let found = tensors.iter().find(|(name, ..)| name == own);
    found.and_then(|(_, _, shape, ..)| shape.first().copied()).unwrap_or(1)
}

fn names_of(operands: &[Operand]) -> Vec<&'static str> {
    operands.iter().map(|operand| operand.name).collect()
}

/// The names of the tensors of all steps of a loss in shards.
fn names_of_shards(problem: &LinearCrossEntropy) -> Vec<&'static str> {
    let tables = [Pass::Forward, Pass::Backward].map(|pass| problem.table(pass).operands);
    let names = tables.iter().flat_map(|operands| names_of(operands));
    names.chain(["partials", "totals", "parts"]).collect()
}

/// Tensors under names that live as long as the program.
fn named(tensors: &[Described], names: &[&'static str]) -> Result<DeviceTensors<'static>, Error> {
    tensors.iter().try_fold(DeviceTensors::new(), |all, (name, address, shape, strides, dtype)| {
        let own = *names
            .iter()
            .find(|known| *known == name)
            .ok_or_else(|| Error::unexpected(name, None))?;
        let element = match dtype.as_str() {
            "int64" => Element::Stored(Stored::Integer),
            "int32" => Element::I32,
            "bool" => Element::Bool,
            "float64" => Dtype::F64.into(),
            "float32" => Dtype::F32.into(),
            "bfloat16" => Dtype::Bf16.into(),
            "float16" => Dtype::F16.into(),
            other => {
                return Err(Error::Dtype {
                    operand: name.clone(),
                    expected: "float32, bfloat16, float16, int64 or bool".to_string(),
                    found: other.to_string(),
                });
            }
        };
        Ok(all.with(own, DeviceTensor::new(*address, shape, strides, element)?))
    })
}

/// The same tensors elsewhere.
fn moved(
    what: &str,
    tensors: &DeviceTensors<'static>,
    addresses: &[u64],
) -> Result<DeviceTensors<'static>, Error> {
    tensors.at(addresses).ok_or_else(|| {
        Error::value(what, "as many addresses as the pass has tensors", addresses.len())
    })
}
