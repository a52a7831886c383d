//! Threads of OpenMP, on which PyTorch's operators run. They spin for some milliseconds after an operator, so that the
//! next finds them awake, and keep their cores from a pass. Therefore they end before a long pass: the next operator
//! starts them again, some ten microseconds for each.

use arc_swap::ArcSwapOption;
use std::ffi::c_int;
use std::sync::Arc;

/// `omp_pause_resource_all(kind)` of OpenMP 5.0: ends the threads that wait for the calling thread's next region, if
/// there are any and it is in none.
type Pause = unsafe extern "C" fn(c_int) -> c_int;

/// The kind that keeps what threads have stored.
const SOFT: c_int = 1;

/// The function of the runtime of this process, if somebody has looked and there is one.
static PAUSE: ArcSwapOption<Pause> = ArcSwapOption::const_empty();

/// Looks for an OpenMP runtime among the libraries whose names are for all; true if there is one.
pub fn find() -> bool {
    let found = symbol();
    PAUSE.store(found.map(Arc::new));
    found.is_some()
}

/// Forgets the runtime, in a child that was forked: it would wait for threads that are in the parent alone.
pub fn forget() {
    PAUSE.store(None);
}

/// Ends the threads that wait for the calling thread.
pub fn pause() {
    if let Some(pause) = &*PAUSE.load() {
        // SAFETY: the function may be called anywhere; in a region it returns an error, and nothing has happened.
        unsafe { pause(SOFT) };
    }
}

#[cfg(target_os = "linux")]
fn symbol() -> Option<Pause> {
    let names = libloading::os::unix::Library::this();
    // SAFETY: OpenMP gives the symbol of this name this type. A runtime that somebody's module needs is not unloaded.
    unsafe { names.get::<Pause>("omp_pause_resource_all").ok().map(|found| *found) }
}

#[cfg(not(target_os = "linux"))]
fn symbol() -> Option<Pause> {
    None
}
