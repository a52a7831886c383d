//! The suite on a kernel in Python.
//!
//! The suite runs on threads of its own, since a kernel may call passes of this module. It asks on the thread that
//! called, one question at a time: frameworks expect that, and a signal is seen there.

use crate::engine::Engine;
use crate::error::exception;
use crate::judge::{Told, refusal, told};
use crate::problem::{Problem, copied};
use etalon_cli::Wanted;
use etalon_conformance::tensor::Tensors;
use etalon_conformance::tier::{Refusal, Request};
use etalon_problem::Pass;
use pyo3::exceptions::{PyException, PyNotImplementedError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rayon::ThreadPoolBuilder;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// A question to the kernel, and where its answer goes.
struct Asked {
    problem: etalon_problem::Problem,
    pass: Pass,
    inputs: Tensors,
    answer: Sender<Result<Tensors, Refusal>>,
}

/// The names of the cases of the suite that are within capabilities.
#[pyfunction]
pub fn cases(
    algorithm: &str,
    capabilities: String,
    depth: &str,
    seed: u64,
) -> PyResult<Vec<String>> {
    let algorithm = algorithm.parse().map_err(exception)?;
    let depth = depth.parse().map_err(exception)?;
    let (profile, cases, laws) = ("usual".to_string(), Vec::new(), Vec::new());
    let wanted = Wanted { algorithm, capabilities, depth, seed, profile, cases, laws };
    etalon_cli::cases(&wanted).map_err(refusal)
}

/// Runs the suite on `call`, which gets a problem, the name of a pass and its inputs by name and returns results by
/// name. It declines by NotImplementedError; another exception is a failure of the kernel. Returns as `check` does.
#[pyfunction]
#[pyo3(signature = (call, algorithm, capabilities, *, depth, seed, profile, cases, laws))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub fn conform(
    py: Python<'_>,
    call: &Bound<'_, PyAny>,
    algorithm: &str,
    capabilities: String,
    depth: &str,
    seed: u64,
    profile: String,
    cases: Vec<String>,
    laws: Vec<String>,
) -> PyResult<Told> {
    let algorithm = algorithm.parse().map_err(exception)?;
    let depth = depth.parse().map_err(exception)?;
    let wanted = Wanted { algorithm, capabilities, depth, seed, profile, cases, laws };
    let pool = ThreadPoolBuilder::new().num_threads(Engine::get()?.threads()).build();
    let pool = pool.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    let call = call.clone().unbind();
    let (judged, raised) = py.detach(|| {
        std::thread::scope(|scope| {
            let (ask, asked) = channel();
            let suite = scope.spawn(move || {
                let answer = |request: &Request<'_>| answer(&ask, request);
                pool.install(|| etalon_cli::conform(&wanted, &answer))
            });
            let raised = serve(&call, &asked).err();
            // Whoever still asks gets no answer.
            drop(asked);
            (suite.join(), raised)
        })
    });
    if let Some(raised) = raised {
        return Err(raised);
    }
    let judged = judged.map_err(|_| PyRuntimeError::new_err("the suite panicked"))?;
    judged.map(told).map_err(refusal)
}

/// The answer of the thread that called.
fn answer(ask: &Sender<Asked>, request: &Request<'_>) -> Result<Tensors, Refusal> {
    let (answer, answered) = channel();
    let (problem, inputs) = (request.problem.clone(), request.inputs.clone());
    let question = Asked { problem, pass: request.pass, inputs, answer };
    let gone = || Refusal::Unsupported("the run was ended".to_string());
    ask.send(question).map_err(|_| gone())?;
    answered.recv().map_err(|_| gone())?
}

/// Intervals at which signals are looked for while no question comes.
const SIGNALS: Duration = Duration::from_millis(100);

/// Answers questions until nobody asks any more. Fails with an exception that is no matter of the kernel's, such as
/// KeyboardInterrupt.
fn serve(call: &Py<PyAny>, asked: &Receiver<Asked>) -> PyResult<()> {
    loop {
        match asked.recv_timeout(SIGNALS) {
            Ok(Asked { problem, pass, inputs, answer }) => {
                let result = Python::attach(|py| called(py, call, problem, pass, &inputs))?;
                // The suite waits for the answer; had it panicked, its own error says so.
                let _ = answer.send(result);
            }
            Err(RecvTimeoutError::Timeout) => Python::attach(|py| py.check_signals())?,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

fn called(
    py: Python<'_>,
    call: &Py<PyAny>,
    problem: etalon_problem::Problem,
    pass: Pass,
    inputs: &Tensors,
) -> PyResult<Result<Tensors, Refusal>> {
    let results = arguments(py, problem, inputs)
        .and_then(|(problem, inputs)| call.call1(py, (problem, pass.name(), inputs)))
        .and_then(|results| copied(results.bind(py).cast::<PyDict>()?));
    match results {
        Ok(results) => Ok(Ok(results)),
        Err(error) if error.is_instance_of::<PyNotImplementedError>(py) => {
            Ok(Err(Refusal::Unsupported(error.value(py).to_string())))
        }
        Err(error) if error.is_instance_of::<PyException>(py) => {
            Ok(Err(Refusal::Fault(format!("raised {error}"))))
        }
        Err(error) => Err(error),
    }
}

fn arguments<'py>(
    py: Python<'py>,
    problem: etalon_problem::Problem,
    inputs: &Tensors,
) -> PyResult<(Bound<'py, Problem>, Bound<'py, PyDict>)> {
    let problem = Bound::new(py, Problem::of(problem)?)?;
    let arrays = PyDict::new(py);
    for (name, tensor) in inputs {
        arrays.set_item(name, crate::tensor::array(py, tensor)?)?;
    }
    Ok((problem, arrays))
}
