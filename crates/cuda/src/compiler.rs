//! Kernels from their source to machine code of one architecture: NVRTC, loaded at run time.

use crate::absent::{self, Absent, text};
use crate::lock::lock;
use cudarc::nvrtc::{result, sys};
use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread;

/// NVRTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compiler {
    version: (i32, i32),
}

/// A source, compiled.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// Machine code (a CUBIN).
    pub image: Vec<u8>,
    /// Messages of the compiler and the assembler: registers, shared memory, spills, warnings.
    pub log: String,
}

/// Folders of toolkits, searched if the loader does not find the library.
const USUAL: [&str; 2] = ["/usr/local/cuda/lib64", "/usr/local/cuda/lib"];

/// Places of the library within a caller's folder: the folder itself, a toolkit, or the site-packages of Python with
/// NVIDIA's wheel.
const WITHIN: [&str; 5] = ["", "lib", "lib64", "nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];

impl Compiler {
    /// NVRTC from this folder, or else from the loader's path. A process has one NVRTC: the first that was found.
    pub fn find(folder: Option<&Path>) -> Result<Compiler, Absent> {
        let folders: Vec<PathBuf> = match folder {
            Some(folder) => WITHIN.iter().map(|part| folder.join(part)).collect(),
            None => USUAL.iter().map(PathBuf::from).collect(),
        };
        let in_folders = || folders.iter().any(|folder| preload(folder));
        // The loader's library comes first, unless the caller knows better.
        let preloaded = if folder.is_some() { in_folders() } else { is_loadable() || in_folders() };
        if !preloaded || !is_loadable() {
            let by_name = folder.is_none().then(|| "the loader's path".to_string());
            let folders = folders.iter().map(|folder| folder.display().to_string());
            return Err(Absent::NoNvrtc { searched: Vec::from_iter(by_name.into_iter().chain(folders)).join(", ") });
        }
        let mut version = (0, 0);
        check_functions("nvrtcVersion")?;
        // SAFETY: the library and the function are there, and the call writes two numbers.
        let result = unsafe { sys::nvrtcVersion(&mut version.0, &mut version.1) }.result();
        result.map_err(|error| Absent::Nvrtc(format!("its version: {:?}", error.0)))?;
        if version.0 < 12 {
            return Err(Absent::OldNvrtc { found: text(version) });
        }
        check_functions(FUNCTIONS)?;
        Ok(Compiler { version })
    }

    /// Its version.
    pub fn version(&self) -> String {
        text(self.version)
    }

    pub(crate) fn number(&self) -> (i32, i32) {
        self.version
    }

    /// Fails if a driver for this version of CUDA cannot load the code: it runs on drivers for the compiler's major
    /// version and later ones.
    pub(crate) fn check_driver(&self, driver: (i32, i32)) -> Result<(), Absent> {
        if self.version.0 > driver.0 {
            return Err(Absent::NewNvrtc { nvrtc: self.version(), driver: text(driver) });
        }
        Ok(())
    }

    /// Compiles a source; on a failure the compiler's own words.
    pub fn compile(&self, source: &str, options: &[String]) -> Result<Compiled, String> {
        let _turn = Turn::take();
        let source = CString::new(source).map_err(|_| "a NUL in the source".to_string())?;
        if options.iter().any(|option| option.contains('\0')) {
            return Err("a NUL in an option".to_string());
        }
        let program = Program(result::create_program(&source, Some(c"etalon.cu")).map_err(said)?);
        // SAFETY: the program lives until the end of this function, and so do the options.
        let compiled = unsafe { result::compile_program(program.0, options) };
        // SAFETY: as above.
        let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
        let log: Vec<u8> = log.into_iter().map(|c| c as u8).collect();
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy().into_owned();
        compiled.map_err(|error| format!("{}\n{log}", said(error)))?;
        let mut bytes = 0;
        // SAFETY: the program was compiled; the call writes one number.
        unsafe { sys::nvrtcGetCUBINSize(program.0, &mut bytes) }.result().map_err(said)?;
        let mut image = vec![0u8; bytes];
        // SAFETY: the buffer has the size that the compiler has just named.
        unsafe { sys::nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast()) }.result().map_err(said)?;
        // The driver reads as much as the header of an image announces.
        if !image.starts_with(b"\x7fELF") {
            return Err(format!("the compiler returned {bytes} bytes that are no machine code"));
        }
        Ok(Compiled { image, log })
    }
}

/// A thread's turn to compile, of as many as cores: a compilation takes a core and 100 MB.
struct Turn;

/// The cores that this process may use, looked up once: that reads files.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

static TURNS_TAKEN: Mutex<usize> = Mutex::new(0);
static TURN_GIVEN_BACK: Condvar = Condvar::new();

impl Turn {
    fn take() -> Turn {
        let cores = cores();
        let taken = TURN_GIVEN_BACK.wait_while(lock(&TURNS_TAKEN), |taken| *taken >= cores);
        *taken.unwrap_or_else(PoisonError::into_inner) += 1;
        Turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *lock(&TURNS_TAKEN) -= 1;
        TURN_GIVEN_BACK.notify_one();
    }
}

fn said(error: result::NvrtcError) -> String {
    format!("{:?}", error.0)
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was created by NVRTC and is destroyed once.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// The functions of NVRTC that are called; those of CUDA 12.0 have them.
const FUNCTIONS: &str = "\
    nvrtcCompileProgram nvrtcCreateProgram nvrtcDestroyProgram nvrtcGetCUBIN nvrtcGetCUBINSize nvrtcGetProgramLog \
    nvrtcGetProgramLogSize";

fn check_functions(names: &str) -> Result<(), Absent> {
    // SAFETY: opens the library, which is there.
    absent::check_functions(unsafe { sys::culib() }, names).map_err(Absent::Nvrtc)
}

fn is_loadable() -> bool {
    // SAFETY: opens a library by name.
    unsafe { sys::is_culib_present() }
}

/// Opens the libraries of NVRTC in a folder, which the loader then finds by name. The built-in functions come first:
/// some wheels do not say where they lie.
#[cfg(unix)]
fn preload(folder: &Path) -> bool {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    let Ok(entries) = fs::read_dir(folder) else { return false };
    let is_nvrtc = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libnvrtc") && name.contains(".so.") && !name.contains(".alt.")
    };
    let is_builtin = |path: &Path| path.to_string_lossy().contains("builtins");
    let mut paths: Vec<_> = entries.flatten().map(|x| x.path()).filter(is_nvrtc).collect();
    paths.sort_by_key(|path| (!is_builtin(path), path.clone()));
    let mut found = false;
    for path in paths {
        // SAFETY: NVIDIA's own libraries, whose initialisers have no conditions. They stay loaded for
        // the life of the process: cudarc keeps their functions.
        if let Ok(library) = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
            found |= !is_builtin(&path);
            std::mem::forget(library);
        }
    }
    found
}

#[cfg(not(unix))]
fn preload(_: &Path) -> bool {
    false
}

#[cfg(test)]
#[path = "../tests/units/compiler.rs"]
mod tests;
