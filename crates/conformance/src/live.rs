//! A program that somebody brings: it answers requests in frames on its standard streams, as `docs/protocol.md` says.
//!
//! It is trusted with nothing. It gets inputs and never a result; what it returns is judged from the bytes that arrive
//! here. Whatever it does instead of answering is the fault of the request, and the next one gets a new process.

mod process;

pub use crate::wire::{Frame, MAGIC, Most, VERSION, Wanted};
pub use process::Said;

use crate::tensor::{Stored, Tensors};
use crate::tier::{Refusal, Request};
use crate::wire::{detach, in_lines, width};
use etalon_problem::{Role, shortened};
use process::{Held, Process, lock, words};
use serde_json::json;
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
}

/// A program that answers requests.
pub struct Program {
    command: Vec<OsString>,
    limits: Limits,
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

/// Bytes that an answer may have beyond twice what was asked for: so that a wrong shape is named as such.
const SLACK: usize = 1 << 20;

/// The beginning of the reason why a program refuses what its capabilities take.
pub const REFUSES: &str = "the program refuses what its capabilities take: ";

impl Program {
    /// A program by the words of its command line, which is not yet started. What it writes to stderr goes to `said`.
    pub fn new(command: Vec<OsString>, limits: Limits, said: Box<Said>) -> Self {
        let (turn, held, ends) = Default::default();
        Program { command, limits, said: said.into(), turn, held, ends }
    }

    /// Starts the program, and hears its hello. Fails with a sentence about the program.
    pub fn start(&self) -> Result<Hello, String> {
        self.hello(&mut lock(&self.turn))
    }

    /// The answer to a request: whatever it does instead is a fault.
    pub fn answer(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
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
        let id = turn.asked;
        let (frame, most) = framed(id, request);
        let bytes = frame.to_bytes();
        let bytes = bytes.map_err(|why| Refusal::Fault(format!("cannot be asked: {why}")))?;
        let answer = match turn.process.as_mut() {
            Some(process) => process.ask(bytes, most, self.limits.call),
            None => Err("has no process".to_string()),
        };
        answer.and_then(|answer| understood(id, answer)).unwrap_or_else(|fault| {
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
        let started = Process::start(&self.command, self.held.clone(), self.said.clone());
        turn.process = Some(started.map_err(|why| {
            self.ends.fetch_add(1, Ordering::Relaxed);
            format!("cannot be started: {why}")
        })?);
        let text = format!("etalon {}", env!("CARGO_PKG_VERSION")).into_bytes();
        let frame = Frame { kind: HELLO, text, ..Frame::default() };
        let most = Most { tensors: 0, text: CAPABILITIES, data: 0 };
        let heard = match (frame.to_bytes(), turn.process.as_mut()) {
            (Ok(bytes), Some(process)) => process.ask(bytes, most, self.limits.start),
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

/// A request as a frame, and the most that its answer may be.
fn framed(id: u64, request: &Request<'_>) -> (Frame, Most) {
    let &Request { problem, pass, dtype, inputs, .. } = request;
    let operands = problem.operands(pass).into_iter().filter(|x| x.role == Role::Output);
    let wanted: Vec<Wanted> = operands
        .map(|x| Wanted {
            name: x.name.to_string(),
            dtype: match Stored::of(x.precision, dtype) {
                Stored::Float(dtype) => dtype.name(),
                Stored::Integer => "i64",
            },
            shape: x.shape,
        })
        .collect();
    let bytes = |x: &Wanted| x.shape.iter().product::<usize>() * width(x.dtype).unwrap_or(0);
    let data = 2 * wanted.iter().map(bytes).sum::<usize>() + SLACK;
    let (mut problem, mut tensors) = (problem.clone(), inputs.clone());
    detach(&mut problem, &mut tensors);
    let said = json!({ "pass": pass.name(), "dtype": dtype.name(), "problem": problem });
    let (json, text) = (said.to_string().into_bytes(), in_lines(&said).into_bytes());
    let frame = Frame { kind: REQUEST, id, json, text, tensors, wanted };
    (frame, Most { tensors: TENSORS, text: TEXT, data: data as u64 })
}

/// Reads an answer; a fault where it is none to the request of that number.
fn understood(id: u64, answer: Frame) -> Result<Result<Tensors, Refusal>, String> {
    let Frame { kind, id: found, tensors, wanted, text, .. } = answer;
    if found != id {
        return Err(format!("answered request {found}, was asked request {id}"));
    }
    match kind {
        OUTPUTS if wanted.is_empty() => Ok(Ok(tensors)),
        OUTPUTS => {
            let name = &wanted[0].name;
            Err(format!("returned `{name}` without elements: role 1, expected 0"))
        }
        UNSUPPORTED => Ok(Err(Refusal::Unsupported(format!("{REFUSES}{}", words(&text))))),
        ERROR => Ok(Err(Refusal::Fault(format!("reported an error: {}", words(&text))))),
        kind => Err(format!(
            "answered with a frame of kind {kind}, expected {OUTPUTS} (outputs), {UNSUPPORTED} \
             (unsupported) or {ERROR} (error)"
        )),
    }
}

fn read_hello(frame: Frame) -> Result<Hello, String> {
    if frame.kind != HELLO {
        return Err(format!("began with a frame of kind {}, expected {HELLO} (hello)", frame.kind));
    }
    let name = words(&frame.text);
    if name.is_empty() {
        return Err("has no name in the text of its hello".to_string());
    }
    let capabilities = match frame.json.is_empty() {
        true => None,
        false => Some(String::from_utf8(frame.json).map_err(|_| {
            "declares capabilities that are not UTF-8, expected a JSON text".to_string()
        })?),
    };
    Ok(Hello { name: shortened(&name, NAME), capabilities })
}

/// The most characters of the name of a program.
const NAME: usize = 60;
