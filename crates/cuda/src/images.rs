//! Sources of the machine code of kernels: an archive, then the cache, then the compiler.

use crate::absent::{Absent, text};
use crate::archive::Archive;
use crate::cache::Cache;
use crate::compiler::Compiler;
use crate::lock::lock;
use crate::options::Settings;
use crate::variant::{KernelOf, Variant};
use etalon_problem::{Error, Result};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, OnceLock};

/// Kernels that are compiled ahead, or will be soon.
type Ahead = BTreeMap<(Variant, &'static str), Arc<OnceLock<Result<Vec<u8>, String>>>>;

#[derive(Debug)]
pub(crate) struct Images {
    /// The caller's archive, or why its code cannot be used.
    archive: Option<Result<Archive, String>>,
    cache: Option<Cache>,
    compiler: Result<Compiler, Absent>,
    /// Options of the compiler beside those of variants.
    defines: Vec<String>,
    ahead: Mutex<Ahead>,
}

impl Images {
    /// Fails where the caller's archive is none, and where neither it nor a compiler can be used with this driver.
    pub fn new(settings: &Settings, driver: (i32, i32), architecture: &str) -> Result<Images> {
        let is_plain = settings.defines.is_empty();
        let archive = settings.archive.as_ref().filter(|_| is_plain);
        let archive = archive.map(Archive::open).transpose()?.map(|archive| usable(archive, driver));
        let compiler = Compiler::find(settings.nvrtc.as_deref())
            .and_then(|compiler| compiler.check_driver(driver).map(|()| compiler));
        let cache = settings.cache.clone().filter(|_| is_plain);
        let defines = settings.defines.iter().map(|define| format!("-D{define}")).collect();
        let images = Images { archive, cache, compiler, defines, ahead: Mutex::default() };
        match (&images.archive, &images.compiler) {
            (Some(Ok(_)), _) | (_, Ok(_)) => Ok(images),
            (_, Err(absent)) => Err(images.none(format!("the tier cuda on {architecture}"), absent, None)),
        }
    }

    /// A kernel of a variant, loaded from the first place that has code which can be loaded.
    pub fn load<T>(
        &self,
        (variant, kernel): KernelOf<'_>,
        architecture: &str,
        load: impl Fn(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let archive = self.archive.as_ref().and_then(|archive| archive.as_ref().ok());
        let refused = match archive.map(|archive| archive.find((variant, kernel), architecture)) {
            None => None,
            Some(Err(reason)) => Some(reason),
            Some(Ok(image)) => match load(&image) {
                Err(Error::Device { reason, .. }) if self.compiler.is_ok() => Some(reason),
                done => return done,
            },
        };
        let what = || format!("kernel {kernel} for {architecture} ({})", variant.describe());
        let compiler = match &self.compiler {
            Ok(compiler) => compiler,
            Err(absent) => return Err(self.none(what(), absent, refused)),
        };
        let key = |cache| (cache, variant.key(kernel, architecture, &compiler.version()));
        let cache = self.cache.as_ref().map(key);
        if let Some(image) = cache.as_ref().and_then(|(cache, key)| cache.read(key)) {
            match load(&image) {
                Err(Error::Device { .. }) => {}
                done => return done,
            }
        }
        // Another thread may be compiling it: then this one waits.
        let named = (variant.clone(), kernel);
        let image = lock(&self.ahead).entry(named.clone()).or_default().clone();
        let image = image.get_or_init(|| self.compile(compiler, (variant, kernel), architecture));
        lock(&self.ahead).remove(&named);
        let image = image.as_ref().map_err(|reason| Error::Device { what: what(), reason: reason.clone() })?;
        let loaded = load(image)?;
        if let Some((cache, key)) = cache {
            // A full disk costs the next process its time, not this one its result.
            let _ = cache.write(&key, image);
        }
        Ok(loaded)
    }

    /// Compiles a kernel, from any thread, unless it is archived, cached, loaded or compiled by another: `load` will
    /// find it, or why that failed. Entries are read by `load` alone, which compiles what is damaged.
    pub fn compile_ahead(&self, (variant, kernel): KernelOf<'_>, architecture: &str, is_loaded: impl Fn() -> bool) {
        let (archive, Ok(compiler)) = (&self.archive, &self.compiler) else { return };
        let is_archived = |archive: &Archive| archive.entry((variant, kernel), architecture).is_some();
        let is_cached = |cache: &Cache| cache.has(&variant.key(kernel, architecture, &compiler.version()));
        if archive.iter().flatten().any(is_archived) || self.cache.iter().any(is_cached) {
            return;
        }
        let own = match lock(&self.ahead).entry((variant.clone(), kernel)) {
            Entry::Vacant(entry) if !is_loaded() => entry.insert(Arc::default()).clone(),
            _ => return,
        };
        own.get_or_init(|| self.compile(compiler, (variant, kernel), architecture));
    }

    fn compile(&self, by: &Compiler, (variant, kernel): KernelOf<'_>, architecture: &str) -> Result<Vec<u8>, String> {
        let options = [variant.options(architecture), self.defines.clone()].concat();
        by.compile(&variant.source(&[kernel]), &options).map(|compiled| compiled.image)
    }

    /// The error without a compiler, where no archive has what is wanted.
    fn none(&self, what: String, absent: &Absent, lacks: Option<String>) -> Error {
        let archive = match (&self.archive, lacks) {
            (None, _) => None,
            (Some(Err(reason)), _) => Some(reason.clone()),
            (Some(Ok(archive)), lacks) => {
                let lacks = lacks.map_or_else(String::new, |lacks| format!(" ({lacks})"));
                Some(format!("an archive {}{lacks}", archive.describe()))
            }
        };
        let archive = archive.map_or_else(String::new, |archive| format!("; {archive}"));
        Error::Unsupported { what, reason: format!("{absent}{archive}") }
    }
}

/// An archive, unless a driver for this version of CUDA cannot load its code.
fn usable(archive: Archive, driver: (i32, i32)) -> Result<Archive, String> {
    if archive.nvrtc().0 <= driver.0 {
        return Ok(archive);
    }
    let (archive, nvrtc, driver) = (archive.describe(), text(archive.nvrtc()), text(driver));
    Err(format!("an archive {archive}, of NVRTC {nvrtc}, which a driver for CUDA {driver} cannot load"))
}
