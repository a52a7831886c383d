//! One process of a program: it is asked for one frame at a time, within a limit, and killed with all that it started.

use super::shared::Shared;
use crate::wire::{Arrived, Frame, Most};
use etalon_problem::shortened;
use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Takes what a program writes to stderr.
pub type Said = dyn Fn(&[u8]) + Send + Sync;

/// The child that runs at present, where another thread can end it.
#[derive(Default)]
pub struct Held {
    child: Option<Child>,
    /// The files that it shares, which go with it.
    folder: Option<TempDir>,
    stopped: bool,
}

impl Held {
    /// Kills the child and all that it started, and lets nobody start another.
    pub fn stop(&mut self) {
        self.stopped = true;
        self.end();
    }

    /// Kills the child and all that it started, and waits for its end: its status, if it ended by itself.
    fn end(&mut self) -> Option<ExitStatus> {
        let mut child = self.child.take()?;
        let mut own = None;
        // Streams are closed a little before a process has ended.
        for _ in 0..GRACE {
            own = child.try_wait().ok().flatten();
            if own.is_some() {
                break;
            }
            thread::sleep(Duration::from_millis(2));
        }
        kill(&mut child);
        let _ = child.wait();
        self.folder = None;
        own
    }
}

/// Times, 2 ms apart, that the status of a process is asked for before it is killed.
const GRACE: usize = 25;

/// Kills a child with its group: what it started outside of it is out of reach.
fn kill(child: &mut Child) {
    #[cfg(unix)]
    {
        use rustix::process::{Pid, Signal, kill_process_group};
        // It is its own group, which may be gone.
        let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    }
    let _ = child.kill();
}

/// A process that is asked.
pub struct Process {
    held: Arc<Mutex<Held>>,
    /// Frames that it is to read, and the most that is read of an answer.
    frames: Sender<Vec<u8>>,
    asked: Sender<Most>,
    answers: Receiver<Heard>,
    shared: Option<Shared>,
    /// The last that it wrote to stderr; sent when it closes that.
    last: Receiver<Vec<u8>>,
    tail: Arc<Mutex<Vec<u8>>>,
}

/// A frame, and when its last byte had arrived.
type Heard = (Instant, io::Result<Option<Frame>>);

/// Bytes of stderr that a fault repeats at most, and the time in which they must come after the end.
const TAIL: usize = 2048;
const PATIENCE: Duration = Duration::from_millis(300);

impl Process {
    /// Starts a process, if so wanted with files to share, where these can be had. What it writes to stderr goes to
    /// `said`.
    pub fn start(
        command: &[OsString],
        held: Arc<Mutex<Held>>,
        said: Arc<Said>,
        shared: bool,
    ) -> io::Result<Process> {
        let (program, arguments) = command.split_first().ok_or(ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        command.args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let (shared, folder) = shared.then(Shared::new).and_then(Result::ok).unzip();
        let (input, output, errors) = {
            let mut held = lock(&held);
            if held.stopped {
                return Err(io::Error::other("the run was stopped"));
            }
            let mut child = command.spawn()?;
            let streams = (child.stdin.take(), child.stdout.take(), child.stderr.take());
            (held.child, held.folder) = (Some(child), folder);
            let (Some(input), Some(output), Some(errors)) = streams else {
                return Err(ErrorKind::BrokenPipe.into());
            };
            (input, output, errors)
        };
        let (frames, to_write) = channel();
        thread::spawn(move || write(input, &to_write));
        let (asked, to_read) = channel();
        let (found, answers) = channel();
        thread::spawn(move || read(output, &to_read, &found));
        let tail = Arc::new(Mutex::new(Vec::new()));
        let (closed, last) = channel();
        let theirs = tail.clone();
        thread::spawn(move || listen(errors, &*said, &theirs, &closed));
        Ok(Process { held, frames, asked, answers, shared, last, tail })
    }

    /// The files that it shares.
    pub fn shared(&self) -> Option<&Shared> {
        self.shared.as_ref()
    }

    /// Removes the files that it does not want.
    pub fn share_nothing(&mut self) {
        self.shared = None;
        lock(&self.held).folder = None;
    }

    /// The next frame after one that it gets, and when its last byte had arrived. Fails with what it did instead; then
    /// the process must be ended.
    pub fn ask(
        &self,
        frame: Vec<u8>,
        most: Most,
        limit: Duration,
    ) -> Result<(Frame, Instant), String> {
        // A thread that has ended says why in the answers.
        let _ = self.frames.send(frame);
        let _ = self.asked.send(most);
        match self.answers.recv_timeout(limit) {
            Ok((arrived, Ok(Some(frame)))) => Ok((frame, arrived)),
            Ok((_, Ok(None))) => Err("ended without an answer".to_string()),
            Ok((_, Err(error))) => match error.kind() {
                ErrorKind::InvalidData | ErrorKind::UnexpectedEof => {
                    Err(format!("wrote to stdout what {error}"))
                }
                _ => Err(format!("cannot be read: {error}")),
            },
            Err(RecvTimeoutError::Timeout) => {
                Err(format!("did not answer within {} s", limit.as_secs_f64()))
            }
            Err(RecvTimeoutError::Disconnected) => Err("cannot be read any more".to_string()),
        }
    }

    /// Ends it: its status if it had one, and what it said last.
    pub fn end(self) -> String {
        let status = lock(&self.held).end();
        let said = self.last.recv_timeout(PATIENCE).unwrap_or_else(|_| lock(&self.tail).clone());
        let status = status.map(|status| format!(" ({status})"));
        let text = String::from_utf8_lossy(&said);
        let line = text.lines().rev().find(|line| !line.trim().is_empty());
        let line = line.map(|line| format!("; its last words: {}", words(line.as_bytes())));
        status.unwrap_or_default() + &line.unwrap_or_default()
    }
}

fn write(mut input: ChildStdin, frames: &Receiver<Vec<u8>>) {
    for frame in frames {
        // A process that does not read shows in its answers.
        if input.write_all(&frame).and_then(|()| input.flush()).is_err() {
            return;
        }
    }
}

fn read(mut output: ChildStdout, asked: &Receiver<Most>, found: &Sender<Heard>) {
    for most in asked {
        let received = Arrived::receive(&mut output, most);
        let now = Instant::now();
        let frame = received.and_then(|frame| frame.map(Arrived::read).transpose());
        if found.send((now, frame)).is_err() {
            return;
        }
    }
}

/// Hands on what it writes to stderr, and keeps the end.
fn listen(mut errors: impl Read, said: &Said, tail: &Mutex<Vec<u8>>, closed: &Sender<Vec<u8>>) {
    let mut bytes = [0; 4096];
    while let Ok(read @ 1..) = errors.read(&mut bytes) {
        said(&bytes[..read]);
        let mut tail = lock(tail);
        tail.extend(&bytes[..read]);
        let more = tail.len().saturating_sub(TAIL);
        tail.drain(..more);
    }
    let _ = closed.send(lock(tail).clone());
}

/// The most characters that a report repeats of what a program says.
const LINE: usize = 600;

/// Words of a program, on one line.
pub fn words(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    shortened(&words, LINE)
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
