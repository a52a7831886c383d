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
    /// Its owner alone: only this crate writes to it, and if it was made with another mode, that is changed.
    User,
    /// All, as far as the caller's mask of modes permits.
    All,
}

/// An entry: this line, the checksum of the rest, the rest.
const MAGIC: &[u8; 16] = b"etalon kernel 1\n";
const SUM: usize = 32;

/// The prefix of the names of drafts.
const DRAFT: &str = ".tmp";

/// A draft that nobody has written for so long is that of a writer which was killed: an entry takes no second.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);

impl Cache {
    /// The folder, which is made when first needed, readable by nobody else; and the most bytes that it
    /// may hold: the entries that were written first make room. A folder that is there keeps its mode.
    pub fn new(folder: impl Into<PathBuf>, limit: u64) -> Self {
        Cache { folder: folder.into(), limit, whose: Whose::Owners }
    }

    /// The same of the user's own folder, which nobody else may read even if it was there before.
    pub(crate) fn of_user(folder: impl Into<PathBuf>, limit: u64) -> Self {
        Cache { whose: Whose::User, ..Cache::new(folder, limit) }
    }

    /// A folder without a limit that others may read, as far as the caller's mask of modes permits.
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

    /// The entry of a key, if it is there and whole.
    pub fn read(&self, key: &str) -> Option<Vec<u8>> {
        let bytes = fs::read(self.path(key)).ok()?;
        let rest = bytes.strip_prefix(MAGIC)?;
        let (sum, image) = rest.split_at_checked(SUM)?;
        (sum == Sha256::digest(image).as_slice()).then(|| image.to_vec())
    }

    /// Writes an entry under a name of its own and then renames it: nobody ever reads half of one.
    pub fn write(&self, key: &str, image: &[u8]) -> io::Result<()> {
        make_folder(&self.folder, self.whose)?;
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
        builder.prefix(DRAFT);
        #[cfg(unix)]
        if self.whose == Whose::All {
            let all = std::os::unix::fs::PermissionsExt::from_mode(0o644);
            builder.permissions(all);
        }
        builder.tempfile_in(&self.folder)
    }

    /// Removes drafts whose writers have ended, and the oldest entries until the rest fit the limit.
    fn make_room(&self) -> io::Result<()> {
        let mut entries: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
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

/// Makes a folder.
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
            let then = SystemTime::now() - Duration::from_secs(1000 * age);
            if let Ok(file) = fs::File::open(cache.path(key)) {
                file.set_modified(then).unwrap();
            }
        }
        assert_eq!(cache.read("a"), None);
        assert!(cache.read("b").is_some() && cache.read("c").is_some());
    }

    #[test]
    fn drafts_of_writers_that_were_killed_are_removed() {
        let entry = (100 + MAGIC.len() + SUM) as u64;
        let (_folder, cache) = cache(2 * entry);
        cache.write("a", &[0; 100]).unwrap();
        let draft = |name: &str, age: Duration| {
            let path = cache.folder.join(format!("{DRAFT}{name}"));
            fs::write(&path, vec![0; entry as usize]).unwrap();
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
            path
        };
        let old = draft("old", ABANDONED + Duration::from_secs(60));
        cache.write("b", &[0; 100]).unwrap();
        assert!(!old.exists());
        assert!(cache.read("a").is_some() && cache.read("b").is_some());
        // One that may still be written stays, and takes the room of an entry.
        let young = draft("young", Duration::ZERO);
        cache.write("c", &[0; 100]).unwrap();
        assert!(young.exists());
        assert_eq!(["a", "b", "c"].into_iter().filter(|key| cache.read(key).is_some()).count(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn the_users_own_folder_is_closed_and_another_keeps_its_mode() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let mode = || fs::metadata(folder.path()).unwrap().permissions().mode() & 0o777;
        let open = || fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        open();
        Cache::new(folder.path(), 1 << 20).write("key", b"code").unwrap();
        assert_eq!(mode(), 0o755, "somebody else may have made it so for a reason");
        Cache::of_user(folder.path(), 1 << 20).write("key", b"code").unwrap();
        assert_eq!(mode(), 0o700);
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
