//! A file that appears when it is complete, and not before.

use super::Error;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::{Builder, NamedTempFile};

/// A file in the making. It is created at once, beside its final place and under another name, so
/// that a place that cannot be written to shows before the work and not after it. Dropped without
/// [`Draft::finish`], it leaves nothing behind and what stood in its place is untouched.
#[derive(Debug)]
pub struct Draft {
    path: PathBuf,
    target: PathBuf,
    file: NamedTempFile,
}

impl Draft {
    /// A draft of the file `path`.
    pub fn new(path: &Path) -> Result<Self, Error> {
        let failed = |error: io::Error| Error::write(path, error);
        // A link is followed: the file that it leads to is replaced, not the link.
        let target = match fs::metadata(path) {
            Ok(found) if !found.is_file() => {
                return Err(Error::write(path, "it is not a regular file"));
            }
            Ok(_) => fs::canonicalize(path).map_err(failed)?,
            Err(_) => path.to_path_buf(),
        };
        let folder = match target.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        if target.file_name().is_none() {
            return Err(Error::write(path, "it is not the name of a file"));
        }
        let mut builder = Builder::new();
        builder.prefix(".etalon-");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // As any new file: what the user's mask leaves of this.
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        let file = builder.tempfile_in(folder).map_err(|error| {
            // tempfile's own text names the temporary file, which means nothing to the user.
            Error::write(path, error.kind())
        })?;
        Ok(Draft { path: path.to_path_buf(), target, file })
    }

    /// Writes the whole content and puts the file in its place.
    pub fn finish(mut self, content: &[u8]) -> Result<(), Error> {
        let path = self.path;
        self.file.write_all(content).map_err(|error| Error::write(&path, error))?;
        let placed = self.file.persist(&self.target);
        placed.map(drop).map_err(|error| Error::write(&path, error.error))
    }
}
