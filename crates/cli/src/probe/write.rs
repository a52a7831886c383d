//! Questions: those of the suite's own cases, or those about problems that somebody brings.

use super::Arguments;
use super::folder::{Entry, INDEX, Index, NotAsked, SCHEMA, write_given, write_question};
use crate::outcome::{Failure, Outcome, say};
use crate::page::{Block, quoted, terminal};
use crate::table::page;
use crate::units::counted;
use crate::{advice, memory, output};
use etalon_conformance::capabilities::Capabilities;
use etalon_conformance::cases::storage;
use etalon_conformance::questions::{Asked, Given, about, probes};
use etalon_conformance::report::Status;
use etalon_conformance::tensor::Tensors;
use etalon_conformance::vectors;
use etalon_problem::{Algorithm, Error, Pass, Role};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub fn write(arguments: &Arguments, folder: &Path) -> Outcome {
    let capabilities = arguments.capabilities()?;
    let given = given(arguments)?;
    let draft = output::Folder::new(folder)?;
    let asked = match given.is_empty() {
        true => of_the_suite(arguments, capabilities.as_ref()),
        false => of_problems(arguments, &given, capabilities.as_ref())?,
    };
    let (mut entries, mut not_asked, mut number) = (Vec::new(), Vec::new(), 0);
    for Asked { probe, questions } in asked {
        let questions = match questions {
            Ok(questions) => questions,
            Err(reason) => {
                not_asked.push(NotAsked { probe, reason });
                continue;
            }
        };
        let mut folders = Vec::new();
        for question in questions {
            number += 1;
            let (algorithm, pass) = (question.problem.algorithm(), question.pass);
            let name = format!("{number:03}-{algorithm}-{}-{pass}", probe.law);
            write_question(&draft, &name, &question)?;
            folders.push(name);
        }
        entries.push(Entry { probe, folders });
    }
    if entries.is_empty() {
        return Err(nothing_left(arguments, &not_asked));
    }
    let problems = given.iter().map(|given| write_given(&draft, given));
    let problems = problems.collect::<Result<_, Failure>>()?;
    let (probes, schema) = (entries.len(), SCHEMA);
    let etalon = env!("CARGO_PKG_VERSION").to_string();
    let index = Index { schema, etalon, problems, capabilities, probes: entries, not_asked };
    draft.write(INDEX, serde_json::to_string_pretty(&index)?.as_bytes())?;
    draft.finish()?;
    let (probes, questions) = (counted(probes, "probe"), counted(number, "question"));
    let answers = "Answer each with outputs.safetensors in its folder, then:";
    say(&page(&format!("{probes}, {questions}. {answers}")))?;
    say(&format!("  etalon probe --check {}", quoted(folder)))?;
    match left_out(&index.not_asked) {
        blocks if blocks.is_empty() => {}
        blocks => say(&terminal(&blocks))?,
    }
    Ok(Status::Passed)
}

fn nothing_left(arguments: &Arguments, not_asked: &[NotAsked]) -> Failure {
    let reason = not_asked.first().map(|first| format!(" ({}: {})", first.probe.law, first.reason));
    let reason = reason.unwrap_or_default();
    let of = if arguments.problem.is_empty() { "these algorithms" } else { "this problem" };
    let advice = match (&arguments.capabilities, arguments.problem.is_empty()) {
        (Some(_), true) => "; --problem asks about a problem that your kernel takes",
        _ => "",
    };
    Failure(format!("no probe is left of {of} in {}{reason}{advice}", arguments.dtype))
}

/// Probes that are not asked: a line for each reason.
fn left_out(not_asked: &[NotAsked]) -> Vec<Block> {
    let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for NotAsked { probe, reason } in not_asked {
        let names = reasons.entry(reason).or_default();
        let name = format!("{} {}", probe.law, probe.pass);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if reasons.is_empty() {
        return Vec::new();
    }
    let line = |(reason, names): (&str, Vec<String>)| format!("{}: {reason}", names.join(", "));
    let lines = reasons.into_iter().map(line).collect();
    vec![Block::Text("Not asked:".to_string()), Block::Items(lines)]
}

fn of_the_suite(arguments: &Arguments, capabilities: Option<&Capabilities>) -> Vec<Asked> {
    let wanted = |of: &Algorithm| {
        let named = arguments.algorithm.is_empty() || arguments.algorithm.contains(of);
        let known = capabilities.is_none_or(|x| x.kernels.iter().any(|x| x.algorithm == *of));
        named && known && storage(*of).contains(&arguments.dtype)
    };
    let algorithms: Vec<Algorithm> = Algorithm::ALL.into_iter().filter(wanted).collect();
    probes(&algorithms, arguments.dtype, arguments.seed, capabilities)
}

fn of_problems(
    arguments: &Arguments,
    given: &[Given],
    capabilities: Option<&Capabilities>,
) -> Result<Vec<Asked>, Failure> {
    let mut asked = Vec::new();
    for (given, path) in given.iter().zip(&arguments.problem) {
        let probes = about(given, &arguments.pass, capabilities);
        asked.extend(probes.map_err(|error| vectors::Error::content(path, error))?);
    }
    Ok(asked)
}

/// The problems that were named, as `problem-1` and so on.
fn given(arguments: &Arguments) -> Result<Vec<Given>, Failure> {
    let tensors = match &arguments.input {
        Some(path) => vectors::read_tensors(path, memory::available())?,
        None => Tensors::new(),
    };
    // The problem's own file is to blame if its mask names arrays and no file has them.
    let input = |path: &Path| arguments.input.clone().unwrap_or_else(|| PathBuf::from(path));
    let mut given = Vec::new();
    for (number, path) in arguments.problem.iter().enumerate() {
        let problem = advice::read_problem(path, &input(path), &tensors)?;
        let (dtype, seed, cotangents) = (arguments.dtype, arguments.seed, arguments.with.clone());
        let name = format!("problem-{}", number + 1);
        given.push(Given { name, problem, dtype, seed, cotangents });
    }
    for name in &arguments.with {
        is_optional(name, &given)?;
    }
    Ok(given)
}

/// Fails unless some problem has an optional cotangent of this name.
fn is_optional(name: &str, given: &[Given]) -> Result<(), Failure> {
    let operands = given.iter().flat_map(|given| given.problem.operands(Pass::Backward));
    let optional = operands.filter(|operand| operand.role == Role::OptionalCotangent);
    let known: BTreeSet<&str> = optional.map(|operand| operand.name).collect();
    if known.contains(&name) {
        return Ok(());
    }
    let expected = match known.is_empty() {
        true => "absent: the problem has no optional cotangents".to_string(),
        false => format!("of {}", known.into_iter().collect::<Vec<_>>().join(", ")),
    };
    Err(Error::value("with", expected, name).into())
}
