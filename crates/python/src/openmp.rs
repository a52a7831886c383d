//! Threads of OpenMP, on which PyTorch's operators run. They spin for some milliseconds after an operator, so that the
//! next finds them awake, and keep their cores from a pass. Therefore a pass computes within a parallel region whose
//! other threads sleep until it ends: they are awake for the next operator all the same.

use arc_swap::ArcSwapOption;
use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{ThreadId, current};
use std::time::{Duration, Instant};

type Body = extern "C" fn(*mut c_void);

/// `GOMP_parallel(fn, data, num_threads, flags)`: runs `fn(data)` on the calling thread and on the others of its team,
/// and returns once all have. 0 threads are as many as usual. Every OpenMP runtime of Linux has it.
pub type Parallel = unsafe extern "C" fn(Body, *mut c_void, c_uint, c_uint);

/// `omp_get_num_threads()`: the threads of the region of the calling thread.
pub type Size = unsafe extern "C" fn() -> c_int;

/// An OpenMP runtime.
#[derive(Clone, Copy)]
pub struct Runtime {
    pub parallel: Parallel,
    pub size: Size,
}

/// The runtime of this process, if somebody has looked and there is one.
static RUNTIME: ArcSwapOption<Runtime> = ArcSwapOption::const_empty();

/// Others that are not asleep after so long are not waited for.
const PATIENCE: Duration = Duration::from_micros(200);

/// Looks for an OpenMP runtime among the libraries whose names are for all; true if there is one.
pub fn find() -> bool {
    let found = runtime().map(Arc::new);
    let is_found = found.is_some();
    RUNTIME.store(found);
    is_found
}

/// Forgets the runtime, in a child that was forked: it would wait for threads that are in the parent alone.
pub fn forget() {
    RUNTIME.store(None);
}

#[cfg(target_os = "linux")]
fn runtime() -> Option<Runtime> {
    let names = libloading::os::unix::Library::this();
    // SAFETY: symbols of these names have these types in every OpenMP runtime: they are part of their interface. A
    // runtime that somebody's module needs is not unloaded.
    let found = unsafe {
        (names.get::<Parallel>("GOMP_parallel"), names.get::<Size>("omp_get_num_threads"))
    };
    Some(Runtime { parallel: *found.0.ok()?, size: *found.1.ok()? })
}

#[cfg(not(target_os = "linux"))]
fn runtime() -> Option<Runtime> {
    None
}

/// Runs `work` on the calling thread while the other threads of its team sleep.
pub fn parked<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    match &*RUNTIME.load() {
        Some(runtime) => parked_by(**runtime, work),
        None => work(),
    }
}

/// A result, or what a panic carries.
type Outcome<T> = Result<T, Box<dyn Any + Send>>;

struct Region<'a> {
    caller: ThreadId,
    size: Size,
    work: Mutex<Option<Box<dyn FnOnce() + Send + 'a>>>,
    state: Mutex<State>,
    wake: Condvar,
}

struct State {
    /// Threads that sleep.
    asleep: usize,
    ended: bool,
}

impl Region<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the others sleep: threads of the pass that are woken before share a core with each other.
    fn wait_for_others(&self) {
        // SAFETY: the function has no conditions.
        let others = usize::try_from(unsafe { (self.size)() }).unwrap_or(1).saturating_sub(1);
        let begun = Instant::now();
        while self.state().asleep < others && begun.elapsed() < PATIENCE {
            spin_loop();
        }
    }
}

/// As [`parked`], by the region of some runtime.
pub fn parked_by<T: Send>(
    Runtime { parallel, size }: Runtime,
    work: impl FnOnce() -> T + Send,
) -> T {
    let mut outcome: Option<Outcome<T>> = None;
    let to = &mut outcome;
    let work = Box::new(move || *to = Some(catch_unwind(AssertUnwindSafe(work))));
    let region = Region {
        caller: current().id(),
        size,
        work: Mutex::new(Some(work)),
        state: Mutex::new(State { asleep: 0, ended: false }),
        wake: Condvar::new(),
    };
    // SAFETY: `body` gets the address of a region, which lives until the call returns, and by then no thread of the team
    // is in `body`.
    unsafe { parallel(body, (&raw const region).cast_mut().cast(), 0, 0) };
    drop(region);
    match outcome {
        Some(outcome) => outcome.unwrap_or_else(|panic| resume_unwind(panic)),
        None => unreachable!("a parallel region runs on the thread that calls"),
    }
}

/// A thread of the team.
extern "C" fn body(data: *mut c_void) {
    // SAFETY: `parked_by` hands over a region and waits; threads share it, which `Sync` allows.
    let region = unsafe { &*data.cast::<Region<'_>>() };
    if current().id() != region.caller {
        let mut state = region.state();
        state.asleep += 1;
        while !state.ended {
            state = region.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        return;
    }
    region.wait_for_others();
    let work = region.work.lock().unwrap_or_else(PoisonError::into_inner).take();
    // Work catches its panics itself: none may leave a function that C has called.
    work.into_iter().for_each(|work| work());
    region.state().ended = true;
    region.wake.notify_all();
}
