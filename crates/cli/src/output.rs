//! The files that a command writes: whole or not at all, also where a signal ends the command.

use crate::outcome::Failure;
use etalon_conformance::vectors::Draft;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The file that is being written, under its temporary name.
static UNFINISHED: Mutex<Option<PathBuf>> = Mutex::new(None);

fn unfinished() -> MutexGuard<'static, Option<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
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
    use std::{fs, thread};

    static WATCHED: OnceLock<()> = OnceLock::new();
    if WATCHED.set(()).is_err() {
        return Ok(());
    }
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM])?;
    let wait = move || {
        for signal in &mut signals {
            // Held to the end, so that no other file is begun.
            let mut unfinished = unfinished();
            if let Some(path) = unfinished.take() {
                // If it cannot be removed, there is nobody left to tell.
                let _ = fs::remove_file(path);
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
