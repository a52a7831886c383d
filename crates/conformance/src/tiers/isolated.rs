//! Tiers that are asked in a process of their own: a fault that ends it, or the context of a device in it, is the
//! fault of one request, and the next ones get a new process.

mod answer;
mod message;
mod question;
mod serve;

pub use serve::serve;

use crate::profile::Profile;
use crate::tensor::Tensors;
use crate::tier::{Choice, Filtered, Refusal, Request, Tier};
use crate::wire::{Frame, Most};
use answer::{Answer, read_answer};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Algorithm, Dtype, Pass};
use question::{CallKind, question};
use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread;

/// A program that [`serve`]s tiers on its standard streams, started when it is first asked.
#[derive(Debug)]
pub struct Server {
    command: Vec<OsString>,
    running: Mutex<Option<Arc<Running>>>,
    /// Held with others by a request, and alone by one that is asked again after it was lost.
    turns: RwLock<()>,
}

/// A tier that a server answers for. What it offers is asked here.
pub struct Isolated {
    tier: Box<dyn Tier>,
    server: Arc<Server>,
}

impl Isolated {
    /// Asks `server` what `tier`, one of its tiers, would be asked.
    pub fn new(tier: Box<dyn Tier>, server: Arc<Server>) -> Self {
        Isolated { tier, server }
    }
}

impl Tier for Isolated {
    fn name(&self) -> String {
        self.tier.name()
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        self.tier.offers(algorithm, pass, dtype)
    }

    fn is_meant_for(&self, algorithm: Algorithm, pass: Pass) -> bool {
        self.tier.is_meant_for(algorithm, pass)
    }

    fn profile(&self, dtype: Dtype) -> Profile {
        self.tier.profile(dtype)
    }

    fn keeps_subnormals(&self) -> bool {
        self.tier.keeps_subnormals()
    }

    fn sums_dh_along_the_tree(&self) -> bool {
        self.tier.sums_dh_along_the_tree()
    }

    fn gives_the_bits_beside_nan(&self) -> bool {
        self.tier.gives_the_bits_beside_nan()
    }

    fn has(&self, choice: Choice) -> bool {
        self.tier.has(choice)
    }

    fn any_budget_gives_the_bits(&self) -> bool {
        self.tier.any_budget_gives_the_bits()
    }

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        match self.server.run(&self.tier.name(), &[*request], CallKind::Alone)? {
            Answer::Outputs(outputs) => Ok(outputs),
            _ => Err(other_answer()),
        }
    }

    fn in_turn(&self, requests: &[Request<'_>]) -> Result<Option<Vec<Tensors>>, Refusal> {
        match self.server.run(&self.tier.name(), requests, CallKind::InTurn)? {
            Answer::InTurn(outputs) => Ok(outputs),
            _ => Err(other_answer()),
        }
    }

    fn filtered(&self, request: &Request<'_>, filter: Filter) -> Result<Option<Filtered>, Refusal> {
        match self.server.run(&self.tier.name(), &[*request], CallKind::Filtered(filter))? {
            Answer::Filtered(found) => Ok(found),
            _ => Err(other_answer()),
        }
    }
}

impl Server {
    /// A program with its arguments.
    pub fn new(command: Vec<OsString>) -> Self {
        Server { command, running: Mutex::default(), turns: RwLock::default() }
    }

    /// The answer of a tier of the server. A request whose process ends is asked once more, alone, in a new one: so
    /// none is to blame for what another did.
    fn run(&self, tier: &str, requests: &[Request<'_>], kind: CallKind) -> Result<Answer, Refusal> {
        {
            let _with_others = self.turns.read().unwrap_or_else(PoisonError::into_inner);
            match self.ask(tier, requests, kind)? {
                Answer::Refused(refusal) => return Err(refusal),
                Answer::Lost(_) => {}
                answer => return Ok(answer),
            }
        }
        let _alone = self.turns.write().unwrap_or_else(PoisonError::into_inner);
        // A process that can answer nothing more may still be there.
        self.stop();
        match self.ask(tier, requests, kind)? {
            Answer::Refused(refusal) => Err(refusal),
            Answer::Lost(reason) => {
                self.stop();
                Err(Refusal::Fault(format!("ended its process: {reason}")))
            }
            answer => Ok(answer),
        }
    }

    fn stop(&self) {
        *lock(&self.running) = None;
    }

    /// An answer; that it is lost, if the process ended before it. Fails where no process can be asked.
    fn ask(&self, tier: &str, requests: &[Request<'_>], kind: CallKind) -> Result<Answer, Refusal> {
        let fault = |what: String| Refusal::Fault(format!("could not be asked: {what}"));
        let running = {
            let mut running = lock(&self.running);
            match &*running {
                Some(process) if !process.has_ended() => process.clone(),
                _ => {
                    let started = Running::start(&self.command);
                    let started = Arc::new(started.map_err(|error| fault(error.to_string()))?);
                    running.insert(started).clone()
                }
            }
        };
        let (sender, receiver) = channel();
        let id = running.expect(sender);
        let frame = question(id, tier, requests, kind).and_then(|frame| frame.to_bytes());
        // The process has ended where nobody reads, and the reader below says so.
        let _ = running.write(&frame.map_err(fault)?);
        Ok(receiver.recv().unwrap_or_else(|_| Answer::Lost(running.end())))
    }
}

/// The fault of a process that does not answer what it is asked.
fn other_answer() -> Refusal {
    Refusal::Fault("answered another question".to_string())
}

/// A process that answers.
#[derive(Debug)]
struct Running {
    child: Mutex<Child>,
    requests: Mutex<ChildStdin>,
    waiting: Arc<Mutex<Waiting>>,
}

/// Requests that wait for their answers; none any more, when the process has ended.
#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    senders: HashMap<u64, Sender<Answer>>,
    ended: bool,
}

impl Running {
    fn start(command: &[OsString]) -> io::Result<Running> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let (Some(requests), Some(mut answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let waiting = Arc::new(Mutex::new(Waiting::default()));
        let theirs = waiting.clone();
        thread::spawn(move || {
            while let Ok(Some(frame)) = Frame::read(&mut answers, Most::ANY) {
                let Ok((id, answer)) = read_answer(frame) else { break };
                let mut waiting = lock(&theirs);
                waiting.ended |= matches!(answer, Answer::Lost(_));
                if let Some(sender) = waiting.senders.remove(&id) {
                    let _ = sender.send(answer); // who asked may have gone
                }
            }
            let mut waiting = lock(&theirs);
            waiting.ended = true;
            waiting.senders.clear();
        });
        Ok(Running { child: Mutex::new(child), requests: Mutex::new(requests), waiting })
    }

    fn has_ended(&self) -> bool {
        lock(&self.waiting).ended
    }

    /// The number of a request whose answer is sent there: at once, that there is none, if the process has ended.
    fn expect(&self, sender: Sender<Answer>) -> u64 {
        let mut waiting = lock(&self.waiting);
        waiting.next += 1;
        let id = waiting.next;
        if !waiting.ended {
            waiting.senders.insert(id, sender);
        }
        id
    }

    fn write(&self, frame: &[u8]) -> io::Result<()> {
        let mut requests = lock(&self.requests);
        requests.write_all(frame)?;
        requests.flush()
    }

    /// The end of the process, which has closed its answers.
    fn end(&self) -> String {
        let status = lock(&self.child).wait();
        status.map_or_else(|error| error.to_string(), |status| status.to_string())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        // It may have ended long ago.
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
