//! Threads and memory of passes.
//!
//! Rayon's own pool is never used: threads do not survive a fork, and nobody could replace it in the child. The module
//! keeps one [`Engine`] instead, which a forked child leaves behind for a new one ([`after_fork`]). A small pass runs
//! on the thread that calls, as its only worker: to wake a thread takes longer.

use crate::error::exception;
use crate::openmp;
use arc_swap::ArcSwapOption;
use etalon_simd::{Level, Options, Precision, Workspace};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};
use std::fmt;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

/// The threads of all passes, and the memory that they keep between calls.
pub struct Engine {
    pool: ThreadPool,
    pub workspace: Workspace,
}

static ENGINE: ArcSwapOption<Engine> = ArcSwapOption::const_empty();

/// A pass of so few multiplications takes a thread about as long as waking another one does, some ten microseconds.
const SMALL: f64 = (1 << 18) as f64;

/// Threads of OpenMP end before a pass of more multiplications on each thread, a fifth of a millisecond: to start one
/// takes some ten microseconds.
const LONG: f64 = (1 << 22) as f64;

const VARIABLE: &str = "ETALON_NUM_THREADS";

thread_local! {
    /// A pool whose only worker is this thread. None on a thread that is a worker of another pool.
    static OWN: Option<ThreadPool> = ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().ok();
}

impl Engine {
    fn new(threads: usize) -> Result<Arc<Self>, ThreadPoolBuildError> {
        let named =
            ThreadPoolBuilder::new().num_threads(threads).thread_name(|at| format!("etalon-{at}"));
        Ok(Arc::new(Engine { pool: named.build()?, workspace: Workspace::new() }))
    }

    /// The engine of this process. Nothing here touches the interpreter: XLA calls from threads of its own.
    pub fn get() -> Result<Arc<Self>, NoEngine> {
        if let Some(engine) = &*ENGINE.load() {
            return Ok(engine.clone());
        }
        let engine = Engine::new(usual_threads()?).map_err(NoEngine::Threads)?;
        ENGINE.store(Some(engine.clone()));
        Ok(engine)
    }

    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs `work` of about so many multiplications without the interpreter's lock.
    pub fn run<T: Send>(
        &self,
        py: Python<'_>,
        multiplications: f64,
        work: impl Send + FnOnce() -> T,
    ) -> T {
        py.detach(|| self.compute(multiplications, work))
    }

    /// Runs `work` of about so many multiplications on a thread that does not hold the interpreter's lock.
    pub fn compute<T: Send>(&self, multiplications: f64, work: impl Send + FnOnce() -> T) -> T {
        if multiplications > LONG * self.threads() as f64 {
            openmp::pause();
        }
        if !is_small(multiplications) {
            return self.pool.install(work);
        }
        OWN.with(|own| own.as_ref().unwrap_or(&self.pool).install(work))
    }
}

/// True of a pass that is done on the thread that calls.
pub fn is_small(multiplications: f64) -> bool {
    multiplications <= SMALL
}

/// The reason why there is no engine.
pub enum NoEngine {
    /// The value of ETALON_NUM_THREADS.
    Number(String),
    Threads(ThreadPoolBuildError),
}

impl fmt::Display for NoEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoEngine::Number(text) => {
                write!(f, "{VARIABLE} must be a number from 1 on, found {text:?}")
            }
            NoEngine::Threads(error) => write!(f, "threads cannot be started: {error}"),
        }
    }
}

impl From<NoEngine> for PyErr {
    fn from(error: NoEngine) -> Self {
        match error {
            NoEngine::Number(_) => PyValueError::new_err(error.to_string()),
            NoEngine::Threads(_) => PyRuntimeError::new_err(error.to_string()),
        }
    }
}

/// ETALON_NUM_THREADS, or the cores that this process may use: its affinity and the quota of its cgroup count.
fn usual_threads() -> Result<usize, NoEngine> {
    match std::env::var(VARIABLE) {
        Ok(text) => text.parse().map(NonZero::get).map_err(|_| NoEngine::Number(text)),
        Err(_) => Ok(available_parallelism().map_or(1, NonZero::get)),
    }
}

/// Place in [`Precision::ALL`] of the precision of passes that name no tier.
static PRECISION: AtomicUsize = AtomicUsize::new(0);

/// The precision of a pass that names no tier.
pub fn precision() -> Precision {
    Precision::ALL.get(PRECISION.load(Ordering::Relaxed)).copied().unwrap_or_default()
}

/// The best instruction set for a precision.
pub fn level(precision: Precision) -> Level {
    let best = Level::best();
    if precision == Precision::Strict { best.in_f32() } else { best }
}

/// Sets how much all later calls may round, from any thread: "strict", "split2" or "flash".
#[pyfunction]
pub fn set_precision(precision: &str) -> PyResult<()> {
    let wanted: Precision = precision.parse().map_err(exception)?;
    let place = Precision::ALL.iter().position(|precision| *precision == wanted);
    PRECISION.store(place.unwrap_or_default(), Ordering::Relaxed);
    Ok(())
}

/// The precision that is set.
#[pyfunction]
pub fn get_precision() -> &'static str {
    precision().name()
}

/// The name of the tier of a pass on the CPU that names none.
#[pyfunction]
pub fn cpu_tier() -> String {
    let precision = precision();
    let options = Options { level: level(precision), precision, ..Options::default() };
    format!("simd/{}", options.name())
}

/// Sets the number of threads of all later calls, from any thread. Results do not depend on it.
#[pyfunction]
pub fn set_num_threads(threads: usize) -> PyResult<()> {
    if threads == 0 {
        return Err(PyValueError::new_err("`threads` must be at least 1, found 0"));
    }
    ENGINE.store(Some(Engine::new(threads).map_err(NoEngine::Threads)?));
    Ok(())
}

/// The number of threads of a pass that is not small.
#[pyfunction]
pub fn get_num_threads() -> PyResult<usize> {
    Ok(Engine::get()?.threads())
}

/// Gives the memory back that is kept for later calls; returns its bytes.
#[pyfunction]
pub fn release_memory() -> usize {
    let Some(engine) = ENGINE.load_full() else { return 0 };
    let bytes = engine.workspace.bytes();
    engine.workspace.release();
    bytes
}

/// Looks for the OpenMP runtime whose threads shall end before a long pass; true if there is one.
#[pyfunction]
pub fn find_openmp() -> bool {
    openmp::find()
}

/// Leaves the engine behind in a child process that was forked: its threads exist in the parent alone, and one of them
/// may have held a lock. The next call makes a new one, with the usual number of threads.
#[pyfunction]
pub fn after_fork() {
    openmp::forget();
    std::mem::forget(ENGINE.swap(None));
}
