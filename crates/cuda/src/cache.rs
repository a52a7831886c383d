//! Compiled kernels on disk. An entry is never trusted: its checksum must fit, or it is made again.

use sha2::{Digest, Sha256};
use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tempfile::NamedTempFile;

/// A folder of compiled kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    folder: PathBuf,
    limit: u64,
    /// Whether others may read it.
    shared: bool,
}

/// An entry: this line, the checksum of the rest, the rest.
const MAGIC: &[u8; 16] = b"etalon kernel 1\n";
const SUM: usize = 32;

impl Cache {
    /// The folder, which is made when first needed, readable by nobody else; and the most bytes that it
    /// may hold: the entries that were written first make room.
    pub fn new(folder: impl Into<PathBuf>, limit: u64) -> Self {
        Cache { folder: folder.into(), limit, shared: false }
    }

    /// A folder without a limit that others may read, as far as the caller's mask of modes permits.
    pub(crate) fn shared(folder: &Path) -> Self {
        Cache { folder: folder.to_path_buf(), limit: u64::MAX, shared: true }
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

    /// The entry of a key, if it is there and whole.
    pub fn read(&self, key: &str) -> Option<Vec<u8>> {
        let bytes = fs::read(self.path(key)).ok()?;
        let rest = bytes.strip_prefix(MAGIC)?;
        let (sum, image) = rest.split_at_checked(SUM)?;
        (sum == Sha256::digest(image).as_slice()).then(|| image.to_vec())
    }

    /// Writes an entry under a name of its own and then renames it: nobody ever reads half of one.
    pub fn write(&self, key: &str, image: &[u8]) -> io::Result<()> {
        make_folder(&self.folder, self.shared)?;
        let mut file = self.draft()?;
        file.write_all(MAGIC)?;
        file.write_all(&Sha256::digest(image))?;
        file.write_all(image)?;
        file.persist(self.path(key))?;
        self.make_room()
    }

    /// A file of the folder, under a name of its own.
    pub(crate) fn draft(&self) -> io::Result<NamedTempFile> {
        let mut builder = tempfile::Builder::new();
        #[cfg(unix)]
        if self.shared {
            let all = std::os::unix::fs::PermissionsExt::from_mode(0o644);
            builder.permissions(all);
        }
        builder.tempfile_in(&self.folder)
    }

    /// Removes the oldest entries until the rest fit the limit.
    fn make_room(&self) -> io::Result<()> {
        let mut entries: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.folder)?.flatten() {
            let (path, Ok(data)) = (entry.path(), entry.metadata()) else { continue };
            if path.extension().is_some_and(|extension| extension == "kernel") {
                entries.push((data.modified()?, data.len(), path));
            }
        }
        entries.sort();
        let mut bytes: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
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

/// Makes a folder, which its owner alone may read unless it is shared.
fn make_folder(folder: &Path, shared: bool) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    if !shared {
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    }
    builder.create(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(limit: u64) -> (tempfile::TempDir, Cache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path().join("kernels"), limit);
        (folder, cache)
    }

    #[test]
    fn an_entry_is_read_back_and_a_damaged_one_is_not() {
        let (_folder, cache) = cache(1 << 20);
        let key = Cache::key(&["source", "sm_80"]);
        assert_eq!(cache.read(&key), None);
        cache.write(&key, b"machine code").unwrap();
        assert_eq!(cache.read(&key).as_deref(), Some(&b"machine code"[..]));
        let whole = fs::read(cache.path(&key)).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(cache.path(&key), damaged).unwrap();
            assert_eq!(cache.read(&key), None, "byte {at}");
            fs::write(cache.path(&key), &whole[..at]).unwrap();
            assert_eq!(cache.read(&key), None, "{at} bytes");
        }
        cache.write(&key, b"machine code").unwrap();
        assert!(cache.read(&key).is_some(), "a damaged entry can be written anew");
    }

    #[test]
    fn keys_tell_apart_where_one_part_ends() {
        assert_ne!(Cache::key(&["ab", "c"]), Cache::key(&["a", "bc"]));
        assert_ne!(Cache::key(&["a"]), Cache::key(&["a", ""]));
    }

    #[test]
    fn the_oldest_entries_make_room() {
        let (_folder, cache) = cache(2 * (100 + MAGIC.len() + SUM) as u64);
        for (age, key) in [(3, "a"), (2, "b"), (1, "c")] {
            cache.write(key, &[0; 100]).unwrap();
            let then = SystemTime::now() - std::time::Duration::from_secs(1000 * age);
            if let Ok(file) = fs::File::open(cache.path(key)) {
                file.set_modified(then).unwrap();
            }
        }
        assert_eq!(cache.read("a"), None);
        assert!(cache.read("b").is_some() && cache.read("c").is_some());
    }

    #[cfg(unix)]
    #[test]
    fn the_folder_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let (_folder, cache) = cache(1 << 20);
        cache.write("key", b"code").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&cache.folder), 0o700);
        assert_eq!(mode(&cache.path("key")), 0o600);
        Cache::shared(&cache.folder).write("key", b"code").unwrap();
        assert_ne!(mode(&cache.path("key")) & 0o040, 0, "unless it is shared");
    }
}
