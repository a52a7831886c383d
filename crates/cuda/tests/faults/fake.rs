//! A fake driver and a fake compiler, built from the sources beside this file, for tests that each run in
//! a process of their own: a process has one driver and one compiler, and what it asked them first holds.

use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_long};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const DRIVER: &str = include_str!("driver.c");
const NVRTC: &str = include_str!("nvrtc.c");

/// The folder with the libraries, in a child.
const FOLDER: &str = "ETALON_FAKES";
/// The case of the test that a child runs.
const CASE: &str = "ETALON_FAKES_CASE";

/// Which of the two libraries.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    Driver,
    Nvrtc,
}

impl Part {
    /// The functions that the library exports beside those that control it.
    pub fn functions(self) -> Vec<&'static str> {
        let source = if matches!(self, Part::Driver) { DRIVER } else { NVRTC };
        let lines = source.lines().filter_map(|line| line.strip_prefix("EXPORT Result "));
        lines.filter_map(|line| Some(line.split_once('(')?.0)).collect()
    }

    fn control(self, name: &str) -> String {
        let part = if matches!(self, Part::Driver) { "fake" } else { "fake_nvrtc" };
        format!("{part}_{name}")
    }
}

/// The libraries that this process has loaded.
pub struct Fake {
    driver: Library,
    nvrtc: Option<Library>,
    /// Where they lie.
    pub folder: PathBuf,
}

impl Fake {
    fn open(folder: PathBuf) -> Fake {
        // SAFETY: libraries of this test; their initialisers do nothing. The loader keeps one of each name,
        // so that these are what the crate calls.
        let open = |name: &str| unsafe { Library::new(folder.join(name)) };
        Fake { driver: open("libcuda.so.1").unwrap(), nvrtc: open("libnvrtc.so.13").ok(), folder }
    }

    fn library(&self, part: Part) -> &Library {
        match part {
            Part::Driver => &self.driver,
            Part::Nvrtc => self.nvrtc.as_ref().expect("a test with a compiler"),
        }
    }

    /// Sets a property of the machine: `devices`, `version`, `capability`, `pools`, `lost` of the driver;
    /// `major`, `size` of the compiler.
    pub fn set(&self, part: Part, name: &str, value: i64) {
        let control = part.control("set");
        let name = CString::new(name).unwrap();
        // SAFETY: the function has this type in `driver.c` and `nvrtc.c`.
        unsafe {
            let set: libloading::Symbol<unsafe extern "C" fn(*const c_char, c_long)> =
                self.library(part).get(control.as_bytes()).unwrap();
            set(name.as_ptr(), value as c_long);
        }
    }

    /// Lets the `nth` call from now on of a function fail, of any function if the name is empty.
    pub fn fail(&self, part: Part, function: &str, nth: usize, code: i32) {
        let control = part.control("fail");
        let function = CString::new(function).unwrap();
        // SAFETY: as above.
        unsafe {
            let fail: libloading::Symbol<unsafe extern "C" fn(*const c_char, c_long, c_int)> =
                self.library(part).get(control.as_bytes()).unwrap();
            fail(function.as_ptr(), nth as c_long, code);
        }
    }

    /// The calls since [`Fake::fail`].
    pub fn calls(&self, part: Part) -> usize {
        // SAFETY: as above.
        unsafe {
            let calls: libloading::Symbol<unsafe extern "C" fn() -> c_long> =
                self.library(part).get(part.control("calls").as_bytes()).unwrap();
            calls() as usize
        }
    }

    /// The function that failed since [`Fake::fail`].
    pub fn failed(&self, part: Part) -> String {
        // SAFETY: as above; the text ends with a NUL and stays.
        unsafe {
            let failed: libloading::Symbol<unsafe extern "C" fn() -> *const c_char> =
                self.library(part).get(part.control("failed").as_bytes()).unwrap();
            CStr::from_ptr(failed()).to_str().unwrap().to_string()
        }
    }

    /// Contexts, streams, modules and allocations that were not given back.
    pub fn held(&self) -> i64 {
        // SAFETY: as above.
        unsafe {
            let held: libloading::Symbol<unsafe extern "C" fn() -> c_long> =
                self.driver.get(b"fake_held").unwrap();
            held()
        }
    }

    /// Memory of a device that stays.
    pub fn memory(&self, device: i32, bytes: usize) -> u64 {
        // SAFETY: as above.
        unsafe {
            let memory: libloading::Symbol<unsafe extern "C" fn(c_int, usize) -> u64> =
                self.driver.get(b"fake_memory").unwrap();
            memory(device, bytes)
        }
    }
}

/// Builds a library. `lacks`: the function that it does not have.
fn build(folder: &Path, part: Part, lacks: &str) {
    let (source, name, library) = match part {
        Part::Driver => (DRIVER, "driver.c", "libcuda.so.1"),
        Part::Nvrtc => (NVRTC, "nvrtc.c", "libnvrtc.so.13"),
    };
    fs::write(folder.join("control.h"), include_str!("control.h")).unwrap();
    fs::write(folder.join(name), source).unwrap();
    let mut command = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
    command.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]);
    command.arg(format!("-Wl,-soname,{library}"));
    if !lacks.is_empty() {
        command.arg(format!("-D{lacks}=lacks_{lacks}"));
    }
    let built = command.arg("-o").arg(folder.join(library)).arg(folder.join(name)).output();
    let built = built.expect("a C compiler, which Rust's own linker needs, too");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

/// What a test's processes find.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub nvrtc: bool,
}

/// Runs a test in a process of its own, in which the loader finds the fakes first.
pub fn alone(test: &str, body: impl FnOnce(&Fake)) {
    each(test, Machine { nvrtc: true }, &[("", None)], |fake, _| body(fake));
}

/// The same on a machine with a driver alone.
pub fn without_nvrtc(test: &str, body: impl FnOnce(&Fake)) {
    each(test, Machine { nvrtc: false }, &[("", None)], |fake, _| body(fake));
}

/// The same for each case; `lacks` names a library and the function that it lacks.
pub fn each(
    test: &str,
    machine: Machine,
    cases: &[(&str, Option<Part>)],
    body: impl FnOnce(&Fake, &str),
) {
    if let Some(folder) = env::var_os(FOLDER) {
        return body(&Fake::open(folder.into()), &env::var(CASE).unwrap());
    }
    for &(case, lacks) in cases {
        let folder = tempfile::tempdir().unwrap();
        let lacks = |part: Part| match (part, lacks) {
            (Part::Driver, Some(Part::Driver)) | (Part::Nvrtc, Some(Part::Nvrtc)) => case,
            _ => "",
        };
        build(folder.path(), Part::Driver, lacks(Part::Driver));
        if machine.nvrtc {
            build(folder.path(), Part::Nvrtc, lacks(Part::Nvrtc));
        }
        let child = Command::new(env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env("LD_LIBRARY_PATH", folder.path())
            .env(FOLDER, folder.path())
            .env(CASE, case)
            .output()
            .unwrap();
        let text = [child.stdout, child.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(child.status.success(), "{test} {case}:\n{text}");
        assert!(text.contains("1 passed"), "there is no test {test}:\n{text}");
    }
}
