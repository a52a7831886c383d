//! Kernels compiled beforehand, for machines without a compiler: a folder of entries like the cache's, and an index
//! that names the compiler.

use crate::absent::text;
use crate::cache::Cache;
use crate::compiler::Compiler;
use crate::lock::lock;
use crate::variant::Variant;
use etalon_problem::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const INDEX: &str = "archive.txt";
const TITLE: &str = "etalon archive 2";

#[derive(Debug)]
pub struct Archive {
    folder: PathBuf,
    index: Index,
}

/// `archive.txt`: the title, `nvrtc VERSION`, and a line for each kernel: key, architecture, family with values, name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Index {
    nvrtc: (i32, i32),
    entries: BTreeMap<String, String>,
}

impl Archive {
    /// The archive in a folder. Fails where [`ArchiveWriter`] has not written one there.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Archive> {
        let folder = folder.into();
        let index = Index::read(&folder)?.ok_or_else(|| {
            let reason = format!("{}, which has no {INDEX}", folder.display());
            Error::value("archive", "a folder with compiled kernels", reason)
        })?;
        Ok(Archive { folder, index })
    }

    pub(crate) fn is_in(folder: &Path) -> bool {
        folder.join(INDEX).is_file()
    }

    pub(crate) fn nvrtc(&self) -> (i32, i32) {
        self.index.nvrtc
    }

    /// The folder and the architectures of its kernels.
    pub fn describe(&self) -> String {
        let architectures: BTreeSet<_> =
            self.index.entries.values().filter_map(|line| line.split(' ').next()).collect();
        format!("{} with kernels for {}", self.folder.display(), Vec::from_iter(architectures).join(", "))
    }

    pub(crate) fn entry(&self, (variant, kernel): (&Variant, &str), architecture: &str) -> Option<String> {
        let key = |architecture: String| variant.key(kernel, &architecture, &text(self.index.nvrtc));
        compatible(architecture).into_iter().map(key).find(|key| self.index.entries.contains_key(key))
    }

    /// The machine code of a kernel for an architecture, or why it is not here.
    pub(crate) fn find(&self, kernel: (&Variant, &str), architecture: &str) -> Result<Vec<u8>, String> {
        let key = self.entry(kernel, architecture).ok_or("these are not among them")?;
        let entry = Cache::shared(&self.folder).read(&key);
        entry.ok_or_else(|| format!("entry {key} of {INDEX} is absent or damaged"))
    }
}

/// The architectures whose machine code runs on one: itself, and earlier ones of its major version; with a letter
/// (`sm_90a`) itself alone.
fn compatible(architecture: &str) -> Vec<String> {
    let number = architecture.strip_prefix("sm_").and_then(|number| number.parse::<u32>().ok());
    match number {
        Some(number) => (number / 10 * 10..=number).rev().map(|n| format!("sm_{n}")).collect(),
        None => vec![architecture.to_string()],
    }
}

impl Index {
    fn read(folder: &Path) -> Result<Option<Index>> {
        let path = folder.join(INDEX);
        match fs::read_to_string(&path) {
            Ok(content) => Index::parse(&content).map(Some).map_err(|line| {
                let found = format!("{} with another line {line}", path.display());
                Error::value("archive", format!("an index that begins with `{TITLE}`"), found)
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(&path, &error)),
        }
    }

    /// Fails with the number of the first line that is wrong.
    fn parse(content: &str) -> Result<Index, usize> {
        let mut lines = content.lines();
        lines.next().filter(|line| *line == TITLE).ok_or(1usize)?;
        let version = |line: &str| {
            let (major, minor) = line.strip_prefix("nvrtc ")?.split_once('.')?;
            Some((major.parse().ok()?, minor.parse().ok()?))
        };
        let nvrtc = lines.next().and_then(version).ok_or(2usize)?;
        let mut entries = BTreeMap::new();
        for (at, line) in lines.enumerate() {
            let (key, rest) = line.split_once(' ').ok_or(at + 3)?;
            // The key becomes a file name.
            if key.len() != 64 || !key.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(at + 3);
            }
            entries.insert(key.to_string(), rest.to_string());
        }
        Ok(Index { nvrtc, entries })
    }

    fn lines(&self) -> String {
        let mut lines = format!("{TITLE}\nnvrtc {}\n", text(self.nvrtc));
        for (key, rest) in &self.entries {
            // Writing to a string does not fail.
            let _ = writeln!(lines, "{key} {rest}");
        }
        lines
    }
}

/// Compiles kernels into an archive.
#[derive(Debug)]
pub struct ArchiveWriter {
    folder: PathBuf,
    compiler: Compiler,
    index: Mutex<Index>,
}

impl ArchiveWriter {
    /// Begins an archive in a folder, or goes on with the one there, whose kernels are not compiled again. Fails where
    /// another version of the compiler made that.
    pub fn new(folder: impl Into<PathBuf>, compiler: Compiler) -> Result<ArchiveWriter> {
        let (folder, nvrtc) = (folder.into(), compiler.number());
        let new = Index { nvrtc, entries: BTreeMap::new() };
        let index = Index::read(&folder)?.unwrap_or(new);
        if index.nvrtc != nvrtc {
            let expected = format!("one that NVRTC {} has compiled, or none", text(nvrtc));
            let found = format!("one of NVRTC {} in {}", text(index.nvrtc), folder.display());
            return Err(Error::value("archive", expected, found));
        }
        Ok(ArchiveWriter { folder, compiler, index: Mutex::new(index) })
    }

    /// Compiles the kernels of a variant for an architecture, from any thread. Returns how many had to be compiled: an
    /// entry that is there and whole stays.
    pub fn add(&self, variant: &Variant, architecture: &str) -> Result<usize> {
        let (cache, version) = (Cache::shared(&self.folder), self.compiler.version());
        let mut new = 0;
        for kernel in variant.kernels() {
            let key = variant.key(kernel, architecture, &version);
            if cache.read(&key).is_none() {
                let what = format!("compiling kernel {kernel} for {architecture} ({})", variant.describe());
                let compiled = self.compiler.compile(&variant.source(&[kernel]), &variant.options(architecture));
                let image = compiled.map_err(|reason| Error::Device { what, reason })?.image;
                cache.write(&key, &image).map_err(|error| failed(&self.folder, &error))?;
                new += 1;
            }
            let line = format!("{architecture} {} {kernel}", variant.describe());
            lock(&self.index).entries.insert(key, line);
        }
        Ok(new)
    }

    /// Writes the index, which makes the folder an archive. Returns the number of its entries.
    pub fn finish(self) -> Result<usize> {
        let index = self.index.into_inner().unwrap_or_else(PoisonError::into_inner);
        let path = self.folder.join(INDEX);
        let write = || {
            fs::create_dir_all(&self.folder)?;
            let cache = Cache::shared(&self.folder);
            cache.make_room()?;
            let mut file = cache.draft()?;
            file.write_all(index.lines().as_bytes())?;
            file.persist(&path)?;
            Ok(())
        };
        write().map_err(|error: io::Error| failed(&path, &error))?;
        Ok(index.entries.len())
    }
}

fn failed(path: &Path, error: &io::Error) -> Error {
    let found = format!("{}: {error}", path.display());
    Error::value("archive", "a folder that can be read and written", found)
}

#[cfg(test)]
#[path = "../tests/units/archive.rs"]
mod tests;
