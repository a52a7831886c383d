//! Two files that a program maps: elements that it is given, and places for its results.
//!
//! This process reads and writes them, and maps nothing: a file that a program cuts short is an error here, no signal.

use crate::wire::File as Part;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::Path;
use tempfile::{Builder, TempDir};

/// The folder whose files lie in memory, on Linux.
const MEMORY: &str = "/dev/shm";

/// The least bytes of a file: an empty one cannot be mapped.
const LEAST: u64 = 64;

/// Bytes that are written or compared at once.
const CHUNK: usize = 1 << 20;

/// The bytes of places that nobody has written: NaN in every type of floating-point numbers, and no flag.
const POISON: u8 = 0xff;

/// The files, opened.
pub struct Shared {
    inputs: File,
    outputs: File,
    paths: [String; 2],
}

impl Shared {
    /// New files in a folder of their own, which goes with them when it is dropped.
    pub fn new() -> io::Result<(Shared, TempDir)> {
        let mut builder = Builder::new();
        builder.prefix("etalon-");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(std::fs::Permissions::from_mode(0o700));
        }
        let memory = Path::new(MEMORY).is_dir().then(|| builder.tempdir_in(MEMORY));
        let folder = memory.and_then(Result::ok).map_or_else(|| builder.tempdir(), Ok)?;
        let path = |name: &str| {
            let path = folder.path().join(name).into_os_string().into_string();
            let path = path.ok().filter(|path| !path.contains(['\n', '\r']));
            path.ok_or_else(|| io::Error::from(ErrorKind::InvalidFilename))
        };
        let paths = [path("inputs")?, path("outputs")?];
        let open = |path: &String| {
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
            file.set_len(LEAST)?;
            Ok::<File, io::Error>(file)
        };
        let (inputs, outputs) = (open(&paths[0])?, open(&paths[1])?);
        let mut permissions = inputs.metadata()?.permissions();
        permissions.set_readonly(true);
        inputs.set_permissions(permissions)?;
        Ok((Shared { inputs, outputs, paths }, folder))
    }

    /// The path of a file.
    pub fn path(&self, part: Part) -> &str {
        match part {
            Part::Inputs => &self.paths[0],
            Part::Outputs => &self.paths[1],
        }
    }

    /// Makes so many bytes of places such as nobody has written.
    pub fn poison(&self, bytes: usize) -> io::Result<()> {
        let mut file = begun(&self.outputs, bytes)?;
        let poison = vec![POISON; bytes.min(CHUNK)];
        let mut left = bytes;
        while left > 0 {
            let now = left.min(CHUNK);
            file.write_all(&poison[..now])?;
            left -= now;
        }
        Ok(())
    }

    /// Writes the elements of the tensors that are given.
    pub fn give(&self, elements: &[u8]) -> io::Result<()> {
        begun(&self.inputs, elements.len())?.write_all(elements)
    }

    /// The bytes of the places.
    pub fn take(&self, bytes: usize) -> io::Result<Vec<u8>> {
        let mut file = &self.outputs;
        file.rewind()?;
        let mut found = Vec::with_capacity(bytes);
        file.take(bytes as u64).read_to_end(&mut found)?;
        match found.len() {
            length if length == bytes => Ok(found),
            _ => Err(ErrorKind::UnexpectedEof.into()),
        }
    }

    /// The first byte that is no longer that of the elements that were given.
    pub fn damage(&self, elements: &[u8]) -> io::Result<Option<usize>> {
        let mut file = &self.inputs;
        file.rewind()?;
        let mut found = vec![0; elements.len().min(CHUNK)];
        for (chunk, given) in elements.chunks(CHUNK).enumerate() {
            let found = &mut found[..given.len()];
            match file.read_exact(found) {
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    return Ok(Some(chunk * CHUNK));
                }
                read => read?,
            }
            if let Some(at) = found.iter().zip(given).position(|(found, given)| found != given) {
                return Ok(Some(chunk * CHUNK + at));
            }
        }
        Ok(None)
    }
}

/// A file at its beginning, of at least so many bytes. It never shrinks: a program may have mapped it.
fn begun(mut file: &File, bytes: usize) -> io::Result<&File> {
    let (found, needed) = (file.metadata()?.len(), LEAST.max(bytes as u64));
    if found < needed {
        file.set_len(needed)?;
    }
    file.rewind()?;
    Ok(file)
}
