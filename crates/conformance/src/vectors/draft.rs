//! A file that appears when it is complete, and not before.

use super::Error;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::{Builder, NamedTempFile};

/// The place of a file to come. That it can be written to shows at once, before the work and not after
/// it; what stands there is untouched until [`Unfinished::finish`].
///
/// To try, a file without a name is made in the folder: a run that is killed leaves none behind.
#[derive(Debug)]
pub struct Draft {
    path: PathBuf,
    target: PathBuf,
}

/// A file in the making, beside its final place and under another name. Dropped unfinished, it is
/// removed.
#[derive(Debug)]
pub struct Unfinished {
    draft: Draft,
    file: NamedTempFile,
}

/// As many links may lead to one another as Linux follows.
const LINKS: usize = 40;

impl Draft {
    /// A draft of the file `path`.
    pub fn new(path: &Path) -> Result<Self, Error> {
        let target = target(path)?;
        if target.file_name().is_none() {
            return Err(Error::write(path, "it is not the name of a file"));
        }
        let draft = Draft { path: path.to_path_buf(), target };
        let folder = draft.folder();
        if !folder.exists() {
            let reason = format!("there is no folder {}: make it first", folder.display());
            return Err(Error::write(path, reason));
        }
        let tried = tempfile::tempfile_in(draft.folder());
        tried.map_err(|error| Error::write(path, error.kind()))?;
        Ok(draft)
    }

    /// True if both would become one file, whatever their paths.
    pub fn is_same_file(&self, other: &Draft) -> bool {
        let place = |draft: &Draft| {
            Some((draft.folder().canonicalize().ok()?, draft.target.file_name()?.to_os_string()))
        };
        place(self).is_some_and(|own| place(other) == Some(own))
    }

    /// True if it would become the file of a path, which a link may lead to.
    pub fn is_at(&self, path: &Path) -> bool {
        let path = path.to_path_buf();
        target(&path).is_ok_and(|target| self.is_same_file(&Draft { path, target }))
    }

    /// True if it would lie in a folder, or in a folder of that.
    pub fn is_within(&self, folder: &Path) -> bool {
        let places = (self.folder().canonicalize(), folder.canonicalize());
        matches!(places, (Ok(own), Ok(folder)) if own.starts_with(&folder))
    }

    /// Begins the file.
    pub fn begin(self) -> Result<Unfinished, Error> {
        let file = self.temporary()?;
        Ok(Unfinished { draft: self, file })
    }

    /// Writes the whole content and puts the file in its place.
    pub fn finish(self, content: &[u8]) -> Result<(), Error> {
        self.begin()?.finish(content)
    }

    fn folder(&self) -> &Path {
        match self.target.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        }
    }

    /// A new file beside the place, which goes when it is dropped.
    fn temporary(&self) -> Result<NamedTempFile, Error> {
        let mut builder = Builder::new();
        builder.prefix(".etalon-");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // As any new file: what the user's mask leaves of this.
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        builder.tempfile_in(self.folder()).map_err(|error| {
            // tempfile's own text names the temporary file, which means nothing to the user.
            Error::write(&self.path, error.kind())
        })
    }
}

impl Unfinished {
    /// Its place while it is unfinished.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Writes the whole content and puts the file in its place.
    pub fn finish(mut self, content: &[u8]) -> Result<(), Error> {
        let Draft { path, target } = self.draft;
        self.file.write_all(content).map_err(|error| Error::write(&path, error))?;
        let placed = self.file.persist(&target);
        placed.map(drop).map_err(|error| Error::write(&path, error.error))
    }
}

/// The target of a file that is written: a link is followed, even to a file that is not there yet, so that its target
/// is written and the link remains.
fn target(path: &Path) -> Result<PathBuf, Error> {
    let failed = |error: io::Error| Error::write(path, error);
    let mut target = path.to_path_buf();
    for _ in 0..LINKS {
        match fs::symlink_metadata(&target) {
            Ok(found) if found.is_symlink() => {
                let link = fs::read_link(&target).map_err(failed)?;
                // A relative link counts from its own folder.
                target = target.parent().unwrap_or(Path::new("")).join(link);
            }
            Ok(found) if !found.is_file() => {
                return Err(Error::write(path, "it is not a regular file"));
            }
            _ => return Ok(target),
        }
    }
    Err(Error::write(path, "too many links lead to one another"))
}
