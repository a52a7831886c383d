//! A program of somebody, timed in turns with one that computes nothing and with a tier of etalon.
//!
//! The clock is that of this process: from before the first element is sent until the last result is here. Inputs are
//! new in every call, and results of timed calls are judged: of a figure with a wrong one no time is said.

use super::arguments::Arguments;
use super::passes::{Bench, is_given};
use super::problems;
use super::rival::{Figure, Figures, Round};
use crate::check;
use crate::live;
use crate::machine::{COMMIT, cpu};
use crate::memory;
use crate::needs;
use crate::noise::are_enough;
use crate::outcome::{Failure, Outcome, say};
use crate::output;
use crate::serve;
use etalon_conformance::capabilities::Capabilities;
use etalon_conformance::live::{Limits, Program};
use etalon_conformance::report::Status;
use etalon_conformance::tensor::{Stored, Tensor, Tensors, views, views_mut};
use etalon_conformance::tier::{Hints, Refusal, Request};
use etalon_conformance::tiers::{check_outputs, saved};
use etalon_conformance::vectors::Draft;
use etalon_problem::{Error, Mode, Operand, Pass, Problem, Role};
use etalon_simd::Workspace;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Times the passes that the program takes.
pub fn run(arguments: &Arguments) -> Outcome {
    let pool = arguments.threads.pool()?;
    let draft = arguments.json.as_deref().map(Draft::new).transpose()?;
    let given = arguments.brought.files();
    draft.iter().try_for_each(|draft| output::apart("--json", draft, &given))?;
    let bench = Bench::new(arguments)?;
    let limits = arguments.brought.limits(None);
    arguments.brought.profile()?;
    let (program, hello) = live::start(&arguments.brought, limits)?;
    let (_, capabilities) = live::capabilities(&arguments.brought, &hello)?;
    let null = null(limits, program.shares())?;
    let contest = Contest { arguments, bench, program, null, capabilities };
    let (mut figures, mut not_asked) = (Vec::new(), Vec::new());
    pool.install(|| {
        problems(arguments, |problem, mask| contest.afford(problem, mask, &mut not_asked))?;
        problems(arguments, |problem, mask| {
            for pass in contest.passes(problem) {
                figures.push(contest.figure(problem, mask, pass)?);
            }
            Ok(())
        })
    })?;
    if figures.is_empty() {
        let first = not_asked.first().map_or("no pass was chosen", String::as_str);
        return Err(Failure(format!("the candidate takes none of these problems: {first}")));
    }
    let figures = Figures {
        etalon: env!("CARGO_PKG_VERSION"),
        commit: COMMIT,
        cpu: cpu(),
        candidate: arguments.brought.command().to_string(),
        name: hello.name,
        profile: arguments.brought.claim().to_string(),
        transport: if contest.null.shares() { "shared files" } else { "frames" },
        tier: contest.bench.tier()?,
        dtype: arguments.dtype.name(),
        threads: pool.current_num_threads(),
        figures,
        not_asked,
    };
    for line in figures.lines() {
        say(&line)?;
    }
    if let Some(draft) = draft {
        output::finish(draft, serde_json::to_string_pretty(&figures)?.as_bytes())?;
    }
    Ok(figures.status())
}

/// The program that computes nothing; it shares files if the other does.
fn null(limits: Limits, shared: bool) -> Result<Arc<Program>, Failure> {
    let command = serve::command(&[serve::NULL])?;
    let program = Arc::new(Program::new(command, limits, Box::new(|_| {})).offered(shared));
    output::end_with(&program)?;
    program.start().map_err(|fault| Failure(format!("{NULL}: it {fault}")))?;
    Ok(program)
}

const NULL: &str = "etalon's program that computes nothing";

/// Programs and the tier that compute in turns.
struct Contest<'a> {
    arguments: &'a Arguments,
    bench: Bench<'a>,
    program: Arc<Program>,
    null: Arc<Program>,
    capabilities: Capabilities,
}

/// A timed call that may be judged: the seed of its inputs, and its results.
struct Call {
    seed: u64,
    outputs: Tensors,
    /// Its distance from the results of etalon's tier.
    distance: f64,
}

/// Timed calls that are judged: the one whose results are furthest from those of etalon's tier, and others at random.
struct Kept {
    most: usize,
    furthest: Option<Call>,
    drawn: Vec<Call>,
    offered: u64,
}

impl Kept {
    fn offer(&mut self, call: Call) {
        let further = |other: &Call| call.distance.total_cmp(&other.distance).is_gt();
        let other = match self.furthest.take() {
            None => return self.furthest = Some(call),
            Some(other) if further(&other) => {
                self.furthest = Some(call);
                other
            }
            Some(other) => {
                self.furthest = Some(other);
                call
            }
        };
        // Each call but the furthest has the same chance.
        self.offered += 1;
        if self.drawn.len() + 1 < self.most {
            self.drawn.push(other);
        } else if let Some(place) = self.drawn.get_mut((unforeseen() % self.offered) as usize) {
            *place = other;
        }
    }
}

/// A number that no program can foresee.
fn unforeseen() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Why a figure has no time.
type Lost = (Status, String);

impl Contest<'_> {
    /// Passes of a problem that are wanted and taken.
    fn passes(&self, problem: &Problem) -> Vec<Pass> {
        let takes = |pass: &Pass| self.takes(problem, *pass).is_ok();
        self.bench.passes(problem).into_iter().map(|(pass, _)| pass).filter(takes).collect()
    }

    /// Fails with what is not taken of a pass of a problem.
    fn takes(&self, problem: &Problem, pass: Pass) -> Result<(), String> {
        self.capabilities.takes(problem, pass, self.arguments.dtype)
    }

    /// Fails unless there is memory for every pass; notes what is not asked.
    fn afford(
        &self,
        problem: &Problem,
        mask: &str,
        not_asked: &mut Vec<String>,
    ) -> Result<(), Failure> {
        problem.check()?;
        for (pass, _) in self.bench.passes(problem) {
            match self.takes(problem, pass) {
                Ok(()) => {
                    needs::afford_check(problem, pass, self.arguments.dtype)?;
                    afford_kept(problem, pass, self.arguments.judged)?;
                }
                // Nobody looks for algorithms that it does not have at all.
                Err(why) if self.is_named(problem) => {
                    not_asked.push(format!("{} {pass}, {mask}: {why}", problem.algorithm()));
                }
                Err(_) => {}
            }
        }
        not_asked.dedup();
        self.bench.afford(problem)
    }

    /// True if the algorithm was asked for by name, or is one of the program's.
    fn is_named(&self, problem: &Problem) -> bool {
        let algorithm = problem.algorithm();
        let has = self.capabilities.kernels.iter().any(|kernel| kernel.algorithm == algorithm);
        has || self.arguments.algorithm.contains(&algorithm)
    }

    fn figure(&self, problem: &Problem, mask: &str, pass: Pass) -> Result<Figure, Failure> {
        let mut kept =
            Kept { most: self.arguments.judged, furthest: None, drawn: Vec::new(), offered: 0 };
        let blank = Figure::blank(problem, mask, pass);
        let rounds = match self.rounds(problem, pass, &mut kept)? {
            Ok(rounds) => rounds,
            Err((status, reason)) => return Ok(Figure { status, reason: Some(reason), ..blank }),
        };
        let calls: Vec<Call> = kept.furthest.into_iter().chain(kept.drawn).collect();
        let judged = calls.len();
        let lost = calls.into_iter().map(|call| self.judge(problem, pass, call));
        let lost: Vec<Lost> = lost.filter_map(Result::transpose).collect::<Result<_, _>>()?;
        let failed = lost.iter().find(|(status, _)| *status == Status::Failed);
        let (status, reason) = match failed.or(lost.first()) {
            Some((status, reason)) => (*status, Some(reason.clone())),
            None => (Status::Passed, None),
        };
        let timed = Figure { status, reason, judged, rounds: rounds.len(), ..blank };
        Ok(if status == Status::Failed { timed } else { timed.with(&rounds) })
    }

    /// Rounds of calls, each with inputs of its own. The first, which warms the caches, does not count.
    fn rounds(
        &self,
        problem: &Problem,
        pass: Pass,
        kept: &mut Kept,
    ) -> Result<Result<Vec<Round>, Lost>, Failure> {
        let workspace = Workspace::new();
        let (mut rounds, begin) = (Vec::new(), Instant::now());
        let mut is_first = true;
        while !are_enough(rounds.len(), begin, self.arguments.seconds) {
            let (round, call) = match self.round(problem, pass, &workspace)? {
                Ok(round) => round,
                Err(lost) => return Ok(Err(lost)),
            };
            if !is_first {
                rounds.push(round);
                kept.offer(call);
            }
            is_first = false;
        }
        Ok(Ok(rounds))
    }

    fn round(
        &self,
        problem: &Problem,
        pass: Pass,
        workspace: &Workspace,
    ) -> Result<Result<(Round, Call), Lost>, Failure> {
        let (dtype, seed, hints) = (self.arguments.dtype, unforeseen(), Hints::default());
        let mut inputs = self.inputs(problem, pass, seed)?;
        let request = Request { problem, pass, dtype, inputs: &inputs, hints };
        let saved = saved(&request, &|problem, pass, inputs, outputs| {
            self.bench.run(workspace, problem, (pass, Mode::Auto), inputs, outputs)
        })?;
        inputs.extend(saved);
        let request = Request { problem, pass, dtype, inputs: &inputs, hints };
        let (outputs, candidate) = match self.program.timed(&request) {
            Ok(answer) => answer,
            Err(Refusal::Fault(why)) => return Ok(Err((Status::Failed, why))),
            Err(Refusal::Unsupported(why)) => return Ok(Err((Status::Undecided, why))),
        };
        let outputs = match self.returned(&request, outputs) {
            Ok(outputs) => outputs,
            Err(error) => {
                return Ok(Err((Status::Failed, format!("returned something else: {error}"))));
            }
        };
        let (_, nothing) = self.null.timed(&request).map_err(|refusal| match refusal {
            Refusal::Fault(why) | Refusal::Unsupported(why) => Failure(format!("{NULL}: it {why}")),
        })?;
        let (ours, own) = self.own(&request, workspace)?;
        let distance = distance(&ours, &outputs)?;
        Ok(Ok(([candidate, nothing, own].map(ns), Call { seed, outputs, distance })))
    }

    /// Results of etalon's tier, and its time, without that of making places for them.
    fn own(
        &self,
        request: &Request<'_>,
        workspace: &Workspace,
    ) -> Result<(Tensors, Duration), Failure> {
        let &Request { problem, pass, dtype, inputs, .. } = request;
        let operands = problem.operands(pass).into_iter().filter(|x| x.role == Role::Output);
        let place = |x: Operand| {
            (x.name.to_string(), Tensor::unwritten(&x.shape, Stored::of(x.precision, dtype)))
        };
        let mut outputs: Tensors = operands.map(place).collect();
        let (given, mut places) = (views(inputs)?, views_mut(&mut outputs)?);
        let start = Instant::now();
        self.bench.run(workspace, problem, (pass, Mode::Auto), &given, &mut places)?;
        let time = start.elapsed();
        drop(places);
        Ok((outputs, time))
    }

    /// The results that it is to return of those that it did. Fails unless they are those of the pass.
    fn returned(&self, request: &Request<'_>, mut outputs: Tensors) -> Result<Tensors, Error> {
        let &Request { problem, pass, dtype, .. } = request;
        let kernel = self.capabilities.kernel(problem, pass, dtype).ok();
        let omits =
            |name: &str| kernel.is_some_and(|kernel| kernel.omits.iter().any(|x| x == name));
        let own = problem.operands(pass).into_iter();
        let own = own.filter(|x| x.role == Role::Output && !omits(x.name));
        let own: Vec<String> = own.map(|x| x.name.to_string()).collect();
        check_outputs(problem, pass, dtype, &outputs, &own)?;
        outputs.retain(|name, _| own.contains(name));
        Ok(outputs)
    }

    /// Inputs of a seed: all that the pass reads but what a pass before it has saved.
    fn inputs(&self, problem: &Problem, pass: Pass, seed: u64) -> Result<Tensors, Failure> {
        let given = |x: &Operand| x.role == Role::Input || is_given(problem, x);
        self.bench.inputs(problem, &problem.operands(pass), seed, &given)
    }

    /// Judges the results of a call as `etalon check` does: what is wrong or undecided.
    fn judge(&self, problem: &Problem, pass: Pass, call: Call) -> Result<Option<Lost>, Failure> {
        let inputs = self.inputs(problem, pass, call.seed)?;
        let only: Vec<String> = call.outputs.keys().cloned().collect();
        let claim = (self.arguments.brought.claim(), None);
        let found = check::judge(problem, pass, inputs, &call.outputs, &only, claim)?;
        let so = found.status != Status::Passed;
        let word = format!("{}: ", found.status.name().to_uppercase());
        let text = found.text.strip_prefix(&word).unwrap_or(&found.text).to_string();
        Ok(so.then_some((found.status, text)))
    }
}

/// Fails where there is no memory for the results of calls that are kept, in f32 or less.
fn afford_kept(problem: &Problem, pass: Pass, calls: usize) -> Result<(), Failure> {
    let operands = problem.operands(pass).into_iter().filter(|x| x.role == Role::Output);
    let elements: u128 =
        operands.map(|x| x.shape.iter().map(|&n| n as u128).product::<u128>()).sum();
    let bytes = elements.saturating_mul(4 * calls as u128);
    memory::afford(&format!("the results of {calls} timed calls"), bytes)
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The largest difference between results of etalon's and others, of each tensor divided by the root mean square of
/// etalon's; infinite where there is a NaN.
fn distance(ours: &Tensors, theirs: &Tensors) -> Result<f64, Error> {
    let mut largest = 0.0_f64;
    for (name, theirs) in theirs {
        let Some(ours) = ours.get(name) else { continue };
        let (ours, theirs) = (ours.numbers(name)?, theirs.numbers(name)?);
        let squares: f64 = ours.iter().map(|x| x * x).sum();
        let scale = (squares / ours.len().max(1) as f64).sqrt().max(f64::MIN_POSITIVE);
        for (a, b) in ours.iter().zip(&theirs) {
            let far = if a == b { 0.0 } else { (a - b).abs() / scale };
            largest = if far.is_nan() { f64::INFINITY } else { largest.max(far) };
        }
    }
    Ok(largest)
}
