//! Compiled kernels on disk. An entry is never trusted: its checksum must fit, or it is made again.

use sha2::{Digest, Sha256};
use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tempfile::NamedTempFile;

/// A folder of compiled kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    folder: PathBuf,
    limit: u64,
    whose: Whose,
}

/// Readers of the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// Its owner, if it is made here; else as its maker wants it.
    Owners,
    /// Its owner alone: another mode that it was made with is changed.
    User,
    /// All, as far as the caller's mask of modes permits.
    All,
}

/// An entry: this line, the checksum of the rest, the rest.
const MAGIC: &[u8; 16] = b"etalon kernel 1\n";
const SUM: usize = 32;

const DRAFT: &str = ".tmp";

/// The age of a draft whose writer was killed: an entry takes no second.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);

impl Cache {
    /// A folder, made when first needed, readable by nobody else; and the most bytes that it may hold: the oldest
    /// entries make room. A folder that is there keeps its mode.
    pub fn new(folder: impl Into<PathBuf>, limit: u64) -> Self {
        Cache { folder: folder.into(), limit, whose: Whose::Owners }
    }

    /// The same; nobody else may read the folder even if it was there before.
    pub(crate) fn of_user(folder: impl Into<PathBuf>, limit: u64) -> Self {
        Cache { whose: Whose::User, ..Cache::new(folder, limit) }
    }

    /// A folder without a limit that others may read.
    pub(crate) fn shared(folder: &Path) -> Self {
        Cache { folder: folder.to_path_buf(), limit: u64::MAX, whose: Whose::All }
    }

    /// The name of an entry: a hash of everything that it depends on.
    pub fn key(parts: &[&str]) -> String {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.kernel"))
    }

    /// True if there is an entry, whole or damaged.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.path(key).is_file()
    }

    /// The entry of a key, if it is there and whole.
    pub fn read(&self, key: &str) -> Option<Vec<u8>> {
        let bytes = fs::read(self.path(key)).ok()?;
        let (sum, image) = bytes.strip_prefix(MAGIC)?.split_at_checked(SUM)?;
        (sum == Sha256::digest(image).as_slice()).then(|| image.to_vec())
    }

    /// Writes an entry under another name and renames it: nobody ever reads half of one.
    pub fn write(&self, key: &str, image: &[u8]) -> io::Result<()> {
        make_folder(&self.folder, self.whose)?;
        let mut file = self.draft()?;
        file.write_all(MAGIC)?;
        file.write_all(&Sha256::digest(image))?;
        file.write_all(image)?;
        file.persist(self.path(key))?;
        // An archive has no limit: its writer looks through the folder once, when it finishes.
        if self.limit < u64::MAX { self.make_room() } else { Ok(()) }
    }

    pub(crate) fn draft(&self) -> io::Result<NamedTempFile> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(DRAFT);
        #[cfg(unix)]
        if self.whose == Whose::All {
            builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644));
        }
        builder.tempfile_in(&self.folder)
    }

    /// Removes drafts whose writers have ended, and the oldest entries until the rest fit the limit.
    pub(crate) fn make_room(&self) -> io::Result<()> {
        let mut entries = Vec::<(SystemTime, u64, PathBuf)>::new();
        let mut drafts = 0;
        for entry in fs::read_dir(&self.folder)?.flatten() {
            let (path, Ok(data)) = (entry.path(), entry.metadata()) else { continue };
            if path.extension().is_some_and(|extension| extension == "kernel") {
                entries.push((data.modified()?, data.len(), path));
            } else if entry.file_name().to_string_lossy().starts_with(DRAFT) {
                let age = data.modified()?.elapsed().unwrap_or_default();
                if age < ABANDONED || fs::remove_file(path).is_err() {
                    drafts += data.len();
                }
            }
        }
        entries.sort();
        let mut bytes: u64 = drafts + entries.iter().map(|(_, bytes, _)| bytes).sum::<u64>();
        for (_, size, path) in entries {
            if bytes <= self.limit {
                break;
            }
            // Another process may have removed it.
            let _ = fs::remove_file(path);
            bytes -= size;
        }
        Ok(())
    }
}

fn make_folder(folder: &Path, whose: Whose) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    if whose != Whose::All {
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    }
    builder.create(folder)?;
    #[cfg(unix)]
    if whose == Whose::User {
        use std::os::unix::fs::PermissionsExt;
        let mut mode = fs::metadata(folder)?.permissions();
        if mode.mode() & 0o077 != 0 {
            mode.set_mode(0o700);
            fs::set_permissions(folder, mode)?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "../tests/units/cache.rs"]
mod tests;
