//! Work within a parallel region of OpenMP, with a runtime of the test's own.

#[allow(dead_code)]
#[path = "../src/openmp.rs"]
mod openmp;

use openmp::{Runtime, parked_by};
use std::ffi::{c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::scope;

/// Threads of the team that have left the region.
static LEFT: AtomicUsize = AtomicUsize::new(0);

struct Data(*mut c_void);

// SAFETY: it is handed on as OpenMP hands it on.
unsafe impl Send for Data {}

/// A region of four threads, of which the caller comes last.
unsafe extern "C" fn four(
    body: extern "C" fn(*mut c_void),
    data: *mut c_void,
    _: c_uint,
    _: c_uint,
) {
    scope(|threads| {
        for _ in 1..4 {
            let data = Data(data);
            threads.spawn(move || {
                let Data(data) = { data };
                body(data);
                LEFT.fetch_add(1, SeqCst);
            });
        }
        body(data);
    });
}

/// A region within another one: the caller alone.
unsafe extern "C" fn one(
    body: extern "C" fn(*mut c_void),
    data: *mut c_void,
    _: c_uint,
    _: c_uint,
) {
    body(data);
}

const FOUR: Runtime = Runtime { parallel: four, size: four_threads };
const ONE: Runtime = Runtime { parallel: one, size: one_thread };

unsafe extern "C" fn four_threads() -> c_int {
    4
}

unsafe extern "C" fn one_thread() -> c_int {
    1
}

#[test]
fn the_others_leave_once_the_work_has_ended() {
    let caller = std::thread::current().id();
    let left = parked_by(FOUR, || {
        assert_eq!(std::thread::current().id(), caller);
        LEFT.load(SeqCst)
    });
    assert_eq!((left, LEFT.load(SeqCst)), (0, 3));
    let found = catch_unwind(AssertUnwindSafe(|| parked_by(FOUR, || panic!("a reason"))));
    assert_eq!(found.unwrap_err().downcast_ref::<&str>(), Some(&"a reason"));
    assert_eq!(LEFT.load(SeqCst), 6, "a panic lets them go, too");
    assert_eq!(parked_by(ONE, || 7), 7);
}
