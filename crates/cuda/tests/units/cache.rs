//! Unit tests of `src/cache.rs`.

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
