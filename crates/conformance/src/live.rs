//! A program that somebody brings: it answers requests in frames on its standard streams, as `docs/protocol.md` says.
//!
//! It is trusted with nothing. It gets inputs and never a result; what it returns is judged from the bytes that arrive
//! here. Whatever it does instead of answering is the fault of the request, and the next one gets a new process.

mod null;
mod process;
mod question;
mod shared;

pub use crate::wire::{File, Frame, MAGIC, Most, Placed, VERSION, Wanted};
pub use null::null;
pub use process::Said;
pub use question::UNASKED;

use crate::tensor::Tensors;
use crate::tier::{Refusal, Request};
use etalon_problem::shortened;
use process::{Held, Process, lock, words};
use question::Question;
use std::ffi::OsString;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The first frame of both sides: the name of the one that speaks, and the program's capabilities.
pub const HELLO: u32 = 1;
/// A problem with its tensors.
pub const REQUEST: u32 = 2;
/// The results of a request.
pub const OUTPUTS: u32 = 3;
/// A request that the program does not take, and why.
pub const UNSUPPORTED: u32 = 4;
/// A request in which the program failed, and how.
pub const ERROR: u32 = 5;

/// Limits of a program.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The time for an answer.
    pub call: Duration,
    /// The time from the start of a process to its hello.
    pub start: Duration,
    /// New starts in a run; as many more are for finding the simplest case of a failure.
    pub restarts: usize,
}

/// The first words of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Its name in reports.
    pub name: String,
    /// Its capabilities, as a file has them, if it declares them itself.
    pub capabilities: Option<String>,
    /// True if it reads and writes tensors in files that it shares with etalon, where these are offered.
    pub shared: bool,
}

/// The line of a hello that offers shared files, and of one that takes them.
pub const SHARED: &str = "shared";

/// A program that answers requests.
pub struct Program {
    command: Vec<OsString>,
    limits: Limits,
    /// True if it is offered shared files.
    shared: bool,
    said: Arc<Said>,
    /// Held by the request that is being answered.
    turn: Mutex<Turn>,
    held: Arc<Mutex<Held>>,
    /// Processes that ended, or were ended.
    ends: AtomicUsize,
}

#[derive(Default)]
struct Turn {
    process: Option<Process>,
    hello: Option<Hello>,
    asked: u64,
}

/// The most tensors, bytes of text and bytes of capabilities of an answer.
const TENSORS: u64 = 64;
const TEXT: u64 = 64 << 10;
const CAPABILITIES: u64 = 1 << 20;

/// The beginning of the reason why a program refuses what its capabilities take.
pub const REFUSES: &str = "the program refuses what its capabilities take: ";

impl Program {
    /// A program by the words of its command line, which is not yet started. What it writes to stderr goes to `said`.
    pub fn new(command: Vec<OsString>, limits: Limits, said: Box<Said>) -> Self {
        let (turn, held, ends) = Default::default();
        Program { command, limits, shared: true, said: said.into(), turn, held, ends }
    }

    /// The same program, which is offered shared files or not.
    pub fn offered(mut self, shared: bool) -> Self {
        self.shared = shared;
        self
    }

    /// Starts the program, and hears its hello. Fails with a sentence about the program.
    pub fn start(&self) -> Result<Hello, String> {
        self.hello(&mut lock(&self.turn))
    }

    /// True if the process that answers at present shares files.
    pub fn shares(&self) -> bool {
        lock(&self.turn).process.as_ref().is_some_and(|process| process.shared().is_some())
    }

    /// The answer to a request: whatever it does instead is a fault.
    pub fn answer(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        self.timed(request).map(|(outputs, _)| outputs)
    }

    /// The same with the time, by the clock of this process, from before the first byte of an element is sent until
    /// the last one of the results is here.
    pub fn timed(&self, request: &Request<'_>) -> Result<(Tensors, Duration), Refusal> {
        let mut turn = lock(&self.turn);
        let ends = self.ends.load(Ordering::Relaxed);
        if ends > 2 * self.limits.restarts {
            // No failure: a simpler case that was not asked shows nothing.
            return Err(Refusal::Unsupported(format!("was not asked: {}", too_often(ends))));
        }
        if turn.process.is_none() {
            self.hello(&mut turn).map_err(Refusal::Fault)?;
        }
        turn.asked += 1;
        let answer = match &turn.process {
            Some(process) => {
                let question = Question::new(turn.asked, request, process.shared());
                let question =
                    question.map_err(|why| Refusal::Fault(format!("cannot be asked: {why}")))?;
                question.ask(process, self.limits.call)
            }
            None => Err("has no process".to_string()),
        };
        answer.unwrap_or_else(|fault| {
            let end = self.end(&mut turn);
            Err(Refusal::Fault(format!("{fault}{end}")))
        })
    }

    /// Why nothing more of a run is asked of it, if so.
    pub fn lost(&self) -> Option<String> {
        let ends = self.ends.load(Ordering::Relaxed);
        (ends > self.limits.restarts).then(|| too_often(ends))
    }

    /// The number of its processes that ended, or were ended.
    pub fn ends(&self) -> usize {
        self.ends.load(Ordering::Relaxed)
    }

    /// Ends its process, whoever waits for an answer, and starts no other.
    pub fn stop(&self) {
        lock(&self.held).stop();
    }

    /// A process that has said hello, the same as those before it.
    fn hello(&self, turn: &mut Turn) -> Result<Hello, String> {
        let (command, held) = (&self.command, self.held.clone());
        let started = Process::start(command, held, self.said.clone(), self.shared);
        turn.process = Some(started.map_err(|why| {
            self.ends.fetch_add(1, Ordering::Relaxed);
            format!("cannot be started: {why}")
        })?);
        let offers = turn.process.as_ref().is_some_and(|process| process.shared().is_some());
        let offer = if offers { format!("\n{SHARED}") } else { String::new() };
        let text = format!("etalon {}{offer}", env!("CARGO_PKG_VERSION")).into_bytes();
        let frame = Frame { kind: HELLO, text, ..Frame::default() };
        let most = Most { tensors: 0, text: CAPABILITIES, data: 0 };
        let heard = match (frame.to_bytes(), turn.process.as_mut()) {
            (Ok(bytes), Some(process)) => {
                process.ask(bytes, most, self.limits.start).map(|(frame, _)| frame)
            }
            _ => Err("has no process".to_string()),
        };
        let hello = heard.and_then(read_hello).and_then(|hello| match &turn.hello {
            Some(first) if *first != hello => {
                let (first, now) = (&first.name, &hello.name);
                Err(format!("says another hello than at first: {now}, expected {first}"))
            }
            _ => Ok(hello),
        });
        let hello = hello.map_err(|fault| {
            let end = self.end(turn);
            format!("{fault}, where its hello was expected{end}")
        })?;
        if let Some(process) = turn.process.as_mut().filter(|_| !hello.shared) {
            process.share_nothing();
        }
        turn.hello = Some(hello.clone());
        Ok(hello)
    }

    /// Ends the process of a turn; what it said last, after a comma.
    fn end(&self, turn: &mut Turn) -> String {
        self.ends.fetch_add(1, Ordering::Relaxed);
        turn.process.take().map_or(String::new(), Process::end)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.stop();
    }
}

fn too_often(ends: usize) -> String {
    format!("its process ended, or was ended, {ends} times")
}

fn read_hello(frame: Frame) -> Result<Hello, String> {
    if frame.kind != HELLO {
        return Err(format!("began with a frame of kind {}, expected {HELLO} (hello)", frame.kind));
    }
    let text = String::from_utf8_lossy(&frame.text);
    let takes = |line: &str| line.trim() == SHARED;
    let shared = text.lines().skip(1).any(takes);
    let name = text.lines().enumerate().filter(|(at, line)| *at == 0 || !takes(line));
    let name = words(name.map(|(_, line)| line).collect::<Vec<_>>().join(" ").as_bytes());
    if name.is_empty() {
        return Err("has no name in the text of its hello".to_string());
    }
    let capabilities = match frame.json.is_empty() {
        true => None,
        false => Some(String::from_utf8(frame.json).map_err(|_| {
            "declares capabilities that are not UTF-8, expected a JSON text".to_string()
        })?),
    };
    Ok(Hello { name: shortened(&name, NAME), capabilities, shared })
}

/// The most characters of the name of a program.
const NAME: usize = 60;
