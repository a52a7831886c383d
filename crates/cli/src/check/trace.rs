//! `etalon check … --trace FILE`: a verdict on what a kernel held after each tile.

use super::{Arguments, INTERVAL, Judgement, command, judgement};
use crate::eval::{self, LoadedProblem};
use crate::found::Found;
use crate::machine::about;
use crate::options;
use crate::outcome::{Failure, Outcome, Refused, say};
use crate::page::terminal;
use crate::progress::Progress;
use crate::{memory, needs};
use etalon_conformance::check::check_trace;
use etalon_conformance::profile::Profile;
use etalon_conformance::report::About;
use etalon_conformance::tensor::Tensors;
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::vectors as files;
use etalon_problem::{Pass, Problem, Walk};
use std::path::Path;
use std::time::Instant;

pub fn run(arguments: &Arguments, path: &Path) -> Outcome {
    let (start, about, question) = (Instant::now(), about(), &arguments.question);
    let LoadedProblem { problem, inputs, dtype, notes } = question.read()?;
    let (dump, walk) = files::read_trace(path, memory::available())?;
    let request = Request {
        problem: &problem,
        pass: question.pass,
        dtype,
        inputs: &inputs,
        hints: Hints::default(),
    };
    let profile = claimed(&request, &dump, &arguments.profile)?;
    let drafts = arguments.reports.begin(&arguments.files())?;
    let pool = arguments.threads.pool()?;
    let check = pool.install(|| {
        let progress = Progress::on_terminal(INTERVAL);
        progress.report(0, 1, "exact steps and bounds");
        let check = check_trace(&request, &profile, &walk, &dump);
        progress.finish();
        check
    });
    let check = check.map_err(|error| Failure::from(files::Error::content(path, error)))?;
    let command = Some(command(arguments, ("trace", path), &profile));
    let found =
        Found { check, allow_undecided: arguments.allow_undecided, auto: false, notes, command };
    let case = question.problem.display().to_string();
    let about = About { threads: pool.current_num_threads(), ..about };
    let report = found.report("etalon check --trace", (about, "trace", &case), start.elapsed());
    let written = drafts.finish(&report, &|| serde_json::to_string_pretty(&found));
    say(&format!("{}\n{}", terminal(&found.blocks()), found.verdict()))?;
    written.map(|()| found.status())
}

/// Judges what the kernel of a program held after each tile, as `etalon check --trace` does, on the threads of the
/// current pool: `profile` is what `--profile` takes, but for `auto`.
pub fn judge_trace(
    problem: &Problem,
    pass: Pass,
    inputs: Tensors,
    (walk, dump): (&Walk, &Tensors),
    profile: &str,
) -> Result<Judgement, Refused> {
    let (inputs, dtype) = eval::inputs(problem, pass, inputs)?;
    let request = Request { problem, pass, dtype, inputs: &inputs, hints: Hints::default() };
    let profile = claimed(&request, dump, profile)?;
    let check = check_trace(&request, &profile, walk, dump)?;
    judgement(Found { check, allow_undecided: 0.0, auto: false, notes: Vec::new(), command: None })
}

/// The profile that is claimed. Fails where there is no memory for the check.
fn claimed(request: &Request<'_>, dump: &Tensors, profile: &str) -> Result<Profile, Failure> {
    let &Request { problem, pass, dtype, .. } = request;
    let profile = options::claim(profile)?.of(dtype).ok_or_else(|| {
        Failure("profile auto judges results, no trace: name a profile, or say usual".to_string())
    })?;
    let numbers: u128 = dump.values().map(|x| x.len() as u128).sum();
    let own = needs::evaluation(problem, pass, dtype, "reference", true);
    memory::afford("a check of the trace", own + 100 * numbers)?;
    Ok(profile)
}
