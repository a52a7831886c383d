//! A C door to [`DevicePass`]: a program in another language prepares a pass of a problem for tensors that it holds
//! on a device, and enqueues it on a stream of its own. `benches/peers/compare_gpu.py` runs the kernels beside
//! PyTorch's with it, in one process.
//!
//! ```c
//! uint64_t etalon_prepare(const char *request, size_t bytes);      // a pass; 0: it failed
//! uint64_t etalon_scratch_bytes(uint64_t pass);                    // UINT64_MAX: it failed
//! int32_t etalon_enqueue(uint64_t pass, void *stream, uint64_t scratch);
//! int32_t etalon_forget(uint64_t pass);                            // 0: done; -1: it failed
//! size_t etalon_error(char *to, size_t bytes);                     // why this thread's last call failed
//! ```
//!
//! A request is JSON ([`Request`]). Whatever is wrong with it, or with a number, is an error in words; so is a bug
//! that panics.

mod passes;
mod request;

pub use request::Request;

use passes::PASSES;
use request::Failure;
use std::cell::RefCell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{ptr, slice};

#[cfg(doc)]
use etalon_cuda::DevicePass;

thread_local! {
    /// Why the last call of this thread failed; empty if it did not.
    static ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The most bytes of a request: arrays of lengths are all that can be long.
const LONGEST: usize = 64 << 20;

/// The result of a call: `failed` where it fails or panics, and then the reason is kept for `etalon_error`.
fn door<R>(failed: R, call: impl FnOnce() -> Result<R, Failure>) -> R {
    // A panic may leave half done a lock, which the next call takes all the same, or a pass that nobody has.
    let result = catch_unwind(AssertUnwindSafe(call));
    let result = result.unwrap_or_else(|panic| Err(Failure(format!("a bug: {}", said(&*panic)))));
    let (returned, reason) = match result {
        Ok(returned) => (returned, String::new()),
        Err(Failure(reason)) => (failed, reason),
    };
    // A thread that is ending keeps no error.
    let _ = ERROR.try_with(|error| error.replace(reason));
    returned
}

/// The words of a panic.
fn said(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words")
}

/// Prepares the pass that a [`Request`] asks for, in JSON of so many bytes: its kernels are compiled and loaded, its
/// tables copied to the device. Returns a number for the other calls, or 0.
///
/// # Safety
/// `request` is null, or the address of `bytes` bytes that nobody writes during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etalon_prepare(request: *const u8, bytes: usize) -> u64 {
    door(0, || {
        if request.is_null() {
            return Err(Failure("the request is a null pointer".to_string()));
        }
        if bytes > LONGEST {
            return Err(Failure(format!("the request has {bytes} bytes, more than {LONGEST}")));
        }
        // SAFETY: the caller's promise; the pointer is not null, and bytes have no alignment.
        let text = unsafe { slice::from_raw_parts(request, bytes) };
        Ok(PASSES.add(Request::read(text)?.prepare()?))
    })
}

/// The scratch memory that an enqueued pass needs, in bytes; the largest number for a pass that there is not.
#[unsafe(no_mangle)]
pub extern "C" fn etalon_scratch_bytes(pass: u64) -> u64 {
    door(u64::MAX, || Ok(PASSES.get(pass)?.scratch_bytes() as u64))
}

/// Enqueues a prepared pass for the tensors of its request. `scratch`: the address of so many bytes of the device, a
/// multiple of 256. Returns 0, or −1 where nothing was enqueued.
///
/// # Safety
/// As [`DevicePass::enqueue`](etalon_cuda::DevicePass::enqueue) asks of the stream, the tensors and the scratch
/// memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etalon_enqueue(pass: u64, stream: *mut c_void, scratch: u64) -> i32 {
    door(-1, || {
        let pass = PASSES.get(pass)?;
        // SAFETY: the caller's promise. The pass stays: whoever forgets it promises that what it enqueued has run.
        unsafe { pass.enqueue(stream, scratch)? };
        Ok(0)
    })
}

/// Gives back what a pass holds. Returns 0, or −1 where there is no such pass.
///
/// # Safety
/// What the pass has enqueued has run, and no graph that captured it will run again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etalon_forget(pass: u64) -> i32 {
    door(-1, || PASSES.remove(pass).map(|()| 0))
}

/// Writes at most so many bytes of the reason why the last call of this thread failed, in UTF-8 without a NUL; none
/// if it did not fail. Returns how many bytes the whole reason has. It is kept: the call may be repeated.
///
/// # Safety
/// `to` is null, or the address of `bytes` bytes that nobody else reads or writes during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn etalon_error(to: *mut u8, bytes: usize) -> usize {
    let write = |error: &RefCell<String>| {
        // Only this thread borrows it, and none of its borrows is open here.
        let Ok(reason) = error.try_borrow() else { return 0 };
        if !to.is_null() {
            let count = reason.len().min(bytes);
            // SAFETY: both have at least `count` bytes, one by the caller's promise, and do not overlap: the reason is
            // this library's own.
            unsafe { ptr::copy_nonoverlapping(reason.as_ptr(), to, count) };
        }
        reason.len()
    };
    ERROR.try_with(write).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason() -> String {
        let mut bytes = vec![0; 10_000];
        // SAFETY: the buffer has as many bytes.
        let length = unsafe { etalon_error(bytes.as_mut_ptr(), bytes.len()) };
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    }

    fn refused(request: &str) -> String {
        // SAFETY: the bytes of a string.
        assert_eq!(unsafe { etalon_prepare(request.as_ptr(), request.len()) }, 0, "{request}");
        reason()
    }

    #[test]
    fn bad_input_is_an_error_in_words() {
        // SAFETY: a null pointer is permitted.
        assert_eq!(unsafe { etalon_prepare(ptr::null(), 3) }, 0);
        assert_eq!(reason(), "the request is a null pointer");
        assert!(refused("\u{0}").contains("line 1"), "{}", reason());
        assert!(refused("{}").contains("problem"), "{}", reason());
        let problem = r#"{"algorithm": "attention", "batch": 1, "query_heads": 1, "key_heads": 1,
            "queries": 4, "keys": 4, "dim": 8}"#;
        let of = |pass: &str, name: &str, tensor: &str| {
            format!(
                r#"{{"problem": {problem}, "pass": "{pass}", "inputs": {{"{name}": {tensor}}}, "outputs": {{}}}}"#
            )
        };
        let tensor = r#"{"address": 4096, "shape": [1, 1, 4, 8], "strides": [32, 32, 8, 1], "dtype": "bf16"}"#;
        assert!(refused(&of("step", "q", tensor)).contains("`pass` must be one of"));
        assert!(refused(&of("forward", "dout", tensor)).contains("`dout` was given"));
        let short = tensor.replace("[32, 32, 8, 1]", "[32]");
        assert!(refused(&of("forward", "q", &short)).contains("number of strides"));
        let other = tensor.replace("bf16", "int3");
        assert!(refused(&of("forward", "q", &other)).contains("`dtype` must be"), "{}", reason());
        // Well-formed, and k is missing.
        assert!(refused(&of("forward", "q", tensor)).contains("`k` is missing"), "{}", reason());
    }

    #[test]
    fn a_pass_that_there_is_not_is_an_error() {
        assert_eq!(etalon_scratch_bytes(7), u64::MAX);
        assert_eq!(reason(), "there is no pass 7");
        // SAFETY: nothing is enqueued, and nothing is given back.
        unsafe {
            assert_eq!(etalon_enqueue(0, ptr::null_mut(), 0), -1);
            assert_eq!(etalon_forget(9), -1);
            assert_eq!(etalon_error(ptr::null_mut(), 100), "there is no pass 9".len());
        }
    }

    #[test]
    fn a_panic_is_an_error_and_a_success_clears_it() {
        assert_eq!(door(5, || panic!("planted")), 5);
        assert_eq!(reason(), "a bug: planted");
        assert_eq!(door(5, || Ok(6)), 6);
        assert_eq!(reason(), "");
    }
}
