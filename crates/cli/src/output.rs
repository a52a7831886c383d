//! The files that a command writes: whole or not at all, also where a signal ends the command.

use crate::options::profile_file;
use crate::outcome::Failure;
use etalon_conformance::live::Program;
use etalon_conformance::vectors::Draft;
use etalon_problem::shortened;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::{fs, io};
use tempfile::{Builder, TempDir};

/// The most characters of a path in an error.
const SHOWN: usize = 300;

/// The file or folder that is being written, under its temporary name.
static UNFINISHED: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Programs that answer, which a signal ends, too.
static PROGRAMS: Mutex<Vec<Weak<Program>>> = Mutex::new(Vec::new());

fn programs() -> MutexGuard<'static, Vec<Weak<Program>>> {
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets the signals that end this command end a program with all that it started.
pub fn end_with(program: &Arc<Program>) -> Result<(), Failure> {
    programs().push(Arc::downgrade(program));
    watch().map_err(|error| Failure(format!("signals cannot be waited for: {error}")))
}

fn unfinished() -> MutexGuard<'static, Option<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file or folder that a command reads, and the option that names it.
pub type Given<'a> = (&'static str, &'a Path);

/// A file that a profile is read from, if it is the name of one.
pub fn of_profile(profile: &str) -> Option<Given<'_>> {
    profile_file(profile).map(|file| ("--profile", file))
}

/// Fails where the file of an option would take the place of one that the command reads, or lie in such a folder.
pub fn apart(option: &str, draft: &Draft, given: &[Given<'_>]) -> Result<(), Failure> {
    for (other, path) in given {
        let would = match () {
            () if draft.is_at(path) => "overwrite the file",
            () if draft.is_within(path) => "lie in the folder",
            () => continue,
        };
        let path = shortened(&path.display().to_string(), SHOWN);
        return Err(Failure(format!("{option} would {would} of {other}, {path}: name another")));
    }
    Ok(())
}

/// Writes a file. If a signal ends the command meanwhile, what was written goes first.
pub fn finish(draft: Draft, content: &[u8]) -> Result<(), Failure> {
    watch().map_err(|error| Failure(format!("signals cannot be waited for: {error}")))?;
    let file = {
        let mut unfinished = unfinished();
        let file = draft.begin()?;
        *unfinished = Some(file.path().to_path_buf());
        file
    };
    let finished = file.finish(content);
    *unfinished() = None;
    Ok(finished?)
}

/// Makes writing beyond the limit of file sizes (`ulimit -f`) an error instead of a signal that ends the
/// command.
pub fn fail_at_the_size_limit() -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::sync::atomic::AtomicBool;
        // Nobody asks: that the signal is taken is enough for writing to fail.
        static REACHED: AtomicBool = AtomicBool::new(false);
        signal_hook::flag::register(signal_hook::consts::SIGXFSZ, &REACHED)?;
    }
    Ok(())
}

/// Waits for the signals that end a command, on a thread of its own.
#[cfg(unix)]
fn watch() -> io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    use signal_hook::iterator::Signals;
    use signal_hook::low_level::emulate_default_handler;
    use std::sync::OnceLock;
    use std::thread;

    static WATCHED: OnceLock<()> = OnceLock::new();
    if WATCHED.set(()).is_err() {
        return Ok(());
    }
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM])?;
    let wait = move || {
        for signal in &mut signals {
            programs().iter().filter_map(Weak::upgrade).for_each(|program| program.stop());
            // Held to the end, so that no other file is begun.
            let mut unfinished = unfinished();
            if let Some(path) = unfinished.take() {
                // If it cannot be removed, there is nobody left to tell.
                let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
            }
            let _ = emulate_default_handler(signal);
        }
    };
    thread::Builder::new().name("signals".to_string()).spawn(wait).map(drop)
}

/// Ctrl-C ends a command at once; there are no other signals.
#[cfg(not(unix))]
fn watch() -> io::Result<()> {
    Ok(())
}

/// A folder that appears when it is complete, and not before.
pub struct Folder {
    path: PathBuf,
    made: TempDir,
}

impl Folder {
    /// Begins a folder, which must not be there, or be empty.
    pub fn new(path: &Path) -> Result<Self, Failure> {
        let shown = shortened(&path.display().to_string(), SHOWN);
        let wrong = |reason: &dyn Display| Failure(format!("{shown}: cannot be written: {reason}"));
        match fs::read_dir(path).map(Iterator::count) {
            Ok(1..) => return Err(wrong(&"it is a folder that is not empty")),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(wrong(&error)),
            _ => {}
        }
        let parent = path.parent().filter(|parent| *parent != Path::new(""));
        let parent = parent.unwrap_or(Path::new("."));
        if !parent.exists() {
            let folder = shortened(&parent.display().to_string(), SHOWN);
            return Err(wrong(&format!("there is no folder {folder}: make it first")));
        }
        if path.file_name().is_none() {
            return Err(wrong(&"it is not the name of a folder"));
        }
        watch().map_err(|error| Failure(format!("signals cannot be waited for: {error}")))?;
        let mut unfinished = unfinished();
        let mut builder = Builder::new();
        builder.prefix(".etalon-");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(fs::Permissions::from_mode(0o777));
        }
        let made = builder.tempdir_in(parent).map_err(|error| wrong(&error.kind()))?;
        *unfinished = Some(made.path().to_path_buf());
        Ok(Folder { path: path.to_path_buf(), made })
    }

    /// Writes a file in it, and the folders that lead there.
    pub fn write(&self, name: &str, content: &[u8]) -> Result<(), Failure> {
        let path = self.made.path().join(name);
        let wrong = |error: io::Error| {
            let shown = shortened(&self.path.join(name).display().to_string(), SHOWN);
            Failure(format!("{shown}: cannot be written: {error}"))
        };
        path.parent().map_or(Ok(()), fs::create_dir_all).map_err(wrong)?;
        fs::write(&path, content).map_err(wrong)
    }

    /// Puts it in its place.
    pub fn finish(self) -> Result<(), Failure> {
        let mut unfinished = unfinished();
        let moved = fs::rename(self.made.path(), &self.path);
        *unfinished = None;
        moved.map_err(|error| {
            let shown = shortened(&self.path.display().to_string(), SHOWN);
            Failure(format!("{shown}: cannot be written: {error}"))
        })?;
        // Nothing is left to be removed under its first name.
        let _ = self.made.keep();
        Ok(())
    }
}
