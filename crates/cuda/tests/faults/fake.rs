//! A fake driver and a fake compiler, built from the sources beside this file, for tests that each run in
//! a process of their own: a process has one driver and one compiler, and what it asked them first holds.

use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_long};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::{env, fs};

const DRIVER: &str = include_str!("driver.c");
const NVRTC: &str = include_str!("nvrtc.c");

/// The folder with the libraries, in a child.
const FOLDER: &str = "ETALON_FAKES";
/// A folder that the cases of a test share.
const SHARED: &str = "ETALON_FAKES_SHARED";
/// The case of the test that a child runs.
const CASE: &str = "ETALON_FAKES_CASE";

/// One of the two libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Driver,
    Nvrtc,
}

impl Part {
    const ALL: [Part; 2] = [Part::Driver, Part::Nvrtc];

    fn source(self) -> &'static str {
        if self == Part::Driver { DRIVER } else { NVRTC }
    }

    /// The first name under which cudarc looks for it.
    fn library(self) -> &'static str {
        if self == Part::Driver { "libcuda.so" } else { "libnvrtc.so" }
    }

    /// The functions that the library exports beside those that control it.
    pub fn functions(self) -> Vec<&'static str> {
        let lines = self.source().lines().filter_map(|line| line.strip_prefix("EXPORT Result "));
        lines.filter_map(|line| Some(line.split_once('(')?.0)).collect()
    }

    fn control(self, name: &str) -> String {
        let part = if self == Part::Driver { "fake" } else { "fake_nvrtc" };
        format!("{part}_{name}")
    }
}

/// The libraries that this process has loaded.
pub struct Fake {
    driver: Library,
    nvrtc: Option<Library>,
    /// The folder of both.
    pub folder: PathBuf,
    /// A folder that the cases of a test share.
    pub shared: PathBuf,
}

impl Fake {
    fn open(folder: PathBuf, shared: PathBuf) -> Fake {
        // SAFETY: libraries of this test; their initialisers do nothing. The loader keeps one of each name,
        // so that these are what the crate calls.
        let open = |name: &str| unsafe { Library::new(folder.join(name)) };
        let [driver, nvrtc] = Part::ALL.map(|part| open(part.library()));
        let (driver, nvrtc) = (driver.unwrap(), nvrtc.ok());
        Fake { driver, nvrtc, folder, shared }
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
            let held: libloading::Symbol<unsafe extern "C" fn() -> c_long> = self.driver.get(b"fake_held").unwrap();
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

/// The bytes of a library, which is built once for all tests of this program.
fn built(part: Part) -> &'static [u8] {
    static LIBRARIES: [OnceLock<Vec<u8>>; 2] = [const { OnceLock::new() }; 2];
    LIBRARIES[part as usize].get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let [source, library] = ["fake.c", "fake.so"].map(|name| folder.path().join(name));
        fs::write(folder.path().join("control.h"), include_str!("control.h")).unwrap();
        fs::write(&source, part.source()).unwrap();
        let mut command = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
        command.args(["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]);
        command.arg(format!("-Wl,-soname,{}", part.library()));
        let done = command.arg("-o").arg(&library).arg(&source).output();
        let done = done.expect("a C compiler, which Rust's own linker needs, too");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        fs::read(library).unwrap()
    })
}

/// The library without a function: the loader finds another name in its table.
fn without(library: &[u8], function: &str) -> Vec<u8> {
    let (mut bytes, name) = (library.to_vec(), format!("\0{function}\0"));
    let places = bytes.windows(name.len()).enumerate().filter(|(_, x)| *x == name.as_bytes());
    let places: Vec<_> = places.map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "there is no {function}");
    places.into_iter().for_each(|at| bytes[at + 1] = b'_');
    bytes
}

/// One of the processes of a test, with the machine that it finds.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub name: &'static str,
    /// True if there is a compiler.
    pub nvrtc: bool,
    /// The library that lacks the function `name`.
    pub lacks: Option<Part>,
}

impl Case {
    /// On a machine that has everything.
    pub fn new(name: &'static str) -> Case {
        Case { name, nvrtc: true, lacks: None }
    }

    /// On a machine with a driver alone.
    pub fn without_nvrtc(name: &'static str) -> Case {
        Case { nvrtc: false, ..Case::new(name) }
    }
}

/// Runs a test in a process of its own, in which the loader finds the fakes first.
pub fn alone(test: &str, body: impl FnOnce(&Fake)) {
    each(test, &[Case::new("alone")], |fake, _| body(fake));
}

/// The same for each case, one after the other.
pub fn each(test: &str, cases: &[Case], body: impl FnOnce(&Fake, &str)) {
    if let Some(folder) = env::var_os(FOLDER) {
        let shared = env::var_os(SHARED).unwrap().into();
        return body(&Fake::open(folder.into(), shared), &env::var(CASE).unwrap());
    }
    let shared = tempfile::tempdir().unwrap();
    for case in cases {
        let folder = tempfile::tempdir().unwrap();
        let parts = Part::ALL.iter().filter(|&&part| case.nvrtc || part == Part::Driver);
        for &part in parts {
            let library = match case.lacks == Some(part) {
                true => without(built(part), case.name),
                false => built(part).to_vec(),
            };
            fs::write(folder.path().join(part.library()), library).unwrap();
        }
        let child = Command::new(env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--include-ignored"])
            .env("LD_LIBRARY_PATH", folder.path())
            .env(FOLDER, folder.path())
            .env(SHARED, shared.path())
            .env(CASE, case.name)
            .output()
            .unwrap();
        let text = [child.stdout, child.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(child.status.success(), "{test} {}:\n{text}", case.name);
        assert!(text.contains("1 passed"), "there is no test {test}:\n{text}");
        print!("{text}"); // which only `--nocapture` shows
    }
}
