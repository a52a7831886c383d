//! `etalon eval`: one pass on the user's own tensors.

use crate::advice;
use crate::form::Reports;
use crate::found::Found;
use crate::machine::about;
use crate::options::{self, one_of};
use crate::outcome::{Failure, Outcome, Refused, say};
use crate::page::quoted;
use crate::table::page;
use crate::{memory, needs, output};
use etalon_conformance::bounds::{self, Bound};
use etalon_conformance::check::check;
use etalon_conformance::profile::Profile;
use etalon_conformance::report::{About, Status};
use etalon_conformance::tensor::{Stored, Tensor, Tensors, usual};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::{self, Refusal};
use etalon_conformance::types::Types;
use etalon_conformance::vectors::{self, Draft};
use etalon_problem::{
    Algorithm, Blocking, Dtype, Error, Operand, Pass, Precision, Problem, Reduction, Role, find,
};
use ndarray::ArrayD;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

const TENSORS: &str = "\
The tensors of IN and OUT carry the names of the formulas (q, k, v, dout, …): `etalon list` has them \
with their shapes. Each holds f64, f32, bf16 or f16, and counts as what it holds; that of q, or h, is the \
storage type of the kernel. targets and ids are i64 or i32.";

/// A pass of a problem, and the tensors that it reads.
#[derive(Debug, clap::Args)]
pub struct Question {
    /// The algorithm.
    #[arg(value_parser = one_of(Algorithm::ALL))]
    pub algorithm: Algorithm,
    /// The pass.
    #[arg(value_parser = one_of(Pass::ALL))]
    pub pass: Pass,
    /// The problem: its extents and options.
    #[arg(long, value_name = "P.json")]
    pub problem: PathBuf,
    /// The inputs and cotangents, and the arrays that the mask names.
    #[arg(long = "in", value_name = "IN.safetensors")]
    pub input: PathBuf,
    /// The storage type of the kernel, where the files hold its numbers in a wider one; that of q, or h, if
    /// absent.
    #[arg(long, value_name = "T", value_parser = one_of(Dtype::ALL))]
    pub dtype: Option<Dtype>,
}

impl Question {
    /// The files that it reads.
    pub fn files(&self) -> [output::Given<'_>; 2] {
        [("--problem", &self.problem), ("--in", &self.input)]
    }
}

#[derive(Debug, clap::Args)]
#[command(after_help = TENSORS)]
pub struct Arguments {
    #[command(flatten)]
    question: Question,
    /// The file for the outputs.
    #[arg(long, value_name = "OUT.safetensors")]
    out: PathBuf,
    /// The tier that evaluates: reference (outputs in f64), simd, simd/LEVEL, cuda, cuda/LEVEL.
    #[arg(long, default_value = "reference")]
    tier: String,
    /// Adds a tensor NAME.bound to each output NAME: the largest error of a kernel with this profile, of
    /// `etalon list` or declared in a file. Without one: f32-strict for f32, bf16-flash for bf16 and so on.
    #[arg(long, value_name = "NAME|FILE.json", num_args = 0..=1, default_missing_value = "usual")]
    profile: Option<String>,
    /// Tile sizes, as in 96x128: queries and keys.
    #[arg(long, value_name = "QxK", value_parser = options::blocking)]
    blocking: Option<Blocking>,
    /// Results that the kernel stores in another type than goes with q, as in dq=f32,dk=f32: the bound is that
    /// of this type.
    #[arg(long, value_name = "NAME=T,…", value_delimiter = ',', value_parser = own_type, requires = "profile")]
    stored: Vec<(String, Dtype)>,
    #[command(flatten)]
    reports: Reports,
    #[command(flatten)]
    threads: options::Threads,
}

/// Reads NAME=TYPE.
fn own_type(text: &str) -> Result<(String, Dtype), Error> {
    let wrong = || Error::value("stored", "NAME=TYPE, as in dq=f32", text);
    let (name, dtype) = text.split_once('=').ok_or_else(wrong)?;
    Ok((name.to_string(), dtype.parse()?))
}

pub fn run(arguments: &Arguments) -> Outcome {
    let (start, about) = (Instant::now(), about());
    let LoadedProblem { problem, inputs, dtype, notes } = arguments.question.read()?;
    let pass = arguments.question.pass;
    let types = types((pass, &arguments.stored), &problem, dtype, &inputs)?;
    let profile = profile(arguments, dtype)?;
    if profile.is_none() && arguments.reports.are_wanted() {
        return Err(Failure("--report judges by bounds: say --profile, too".to_string()));
    }
    let draft = Draft::new(&arguments.out)?;
    let mut given = arguments.question.files().to_vec();
    given.extend(arguments.profile.as_deref().and_then(output::of_profile));
    output::apart("--out", &draft, &given)?;
    let drafts = arguments.reports.begin_beside(&[&draft], &given)?;
    let hints = Hints { blocking: arguments.blocking, ..Hints::default() };
    let tier = &arguments.tier;
    needs::afford_evaluation(&problem, pass, dtype, tier, profile.is_some())?;
    let reported = profile.filter(|_| arguments.reports.are_wanted());
    if reported.is_some() {
        needs::afford_check(&problem, pass, dtype)?;
    }
    let request = Request { problem: &problem, pass, dtype, inputs: &inputs, hints };
    let pool = arguments.threads.pool()?;
    let outputs = pool.install(|| evaluate(&request, &types, tier, profile))?;
    output::finish(draft, &vectors::to_bytes(&arguments.out, &outputs)?)?;
    notes.iter().try_for_each(|note| say(&page(note)))?;
    let Some(profile) = reported else { return Ok(Status::Passed) };
    let outputs: Tensors = outputs.into_iter().filter(|(name, _)| !name.ends_with(BOUND)).collect();
    let only: Vec<String> = outputs.keys().cloned().collect();
    let check = pool.install(|| check(&request, &profile, &outputs, &only))?;
    let (auto, allow_undecided, command) = (false, 0.0, Some(command(arguments)));
    let found = Found { check, allow_undecided, auto, notes, command };
    let about = About { threads: pool.current_num_threads(), ..about };
    let case = arguments.question.problem.display().to_string();
    let report = found.report("etalon eval", (about, tier, &case), start.elapsed());
    let written = drafts.finish(&report, &|| serde_json::to_string_pretty(&found));
    say(&found.verdict())?;
    written.map(|()| found.status())
}

/// The end of the names of bounds.
const BOUND: &str = ".bound";

/// The command that evaluates the same again, for a shell.
fn command(arguments: &Arguments) -> String {
    let Arguments { question, out, tier, profile, blocking, stored, .. } = arguments;
    let Question { algorithm, pass, problem, input, dtype } = question;
    let [problem, input, out] = [problem, input, out].map(|path| quoted(path));
    let mut line = format!(
        "etalon eval {algorithm} {pass} --problem {problem} --in {input} --out {out} --tier {tier}"
    );
    if let Some(profile) = profile {
        line += &format!(" --profile {}", quoted(Path::new(profile)));
    }
    if let Some(dtype) = dtype {
        line += &format!(" --dtype {dtype}");
    }
    if let Some(blocking) = blocking {
        line += &format!(" --blocking {}x{}", blocking.queries, blocking.keys);
    }
    if !stored.is_empty() {
        let stored = stored.iter().map(|(name, dtype)| format!("{name}={dtype}"));
        line += &format!(" --stored {}", stored.collect::<Vec<_>>().join(","));
    }
    line
}

/// A problem, the operands of a pass of it, checked, and their storage type.
pub struct LoadedProblem {
    pub problem: Problem,
    pub inputs: Tensors,
    pub dtype: Dtype,
    /// Assumptions, to be printed.
    pub notes: Vec<String>,
}

impl Question {
    /// Reads the request of its two files.
    pub fn read(&self) -> Result<LoadedProblem, Failure> {
        let Question { algorithm, pass, problem: path, input, dtype } = self;
        let mut tensors = vectors::read_tensors(input, memory::available())?;
        let (problem, lists) = advice::read_with_lists(path, input, &tensors)?;
        tensors.retain(|name, _| !lists.contains(name));
        if problem.algorithm() != *algorithm {
            let (path, found) = (path.display(), problem.algorithm());
            return Err(Failure(format!("{path}: is a problem of {found}, not {algorithm}")));
        }
        let on_tensors = |error| {
            let axes = |name: &str| problem.operand(name).map(|operand| operand.axes);
            advice::on_tensors(&vectors::Error::content(input, error), axes)
        };
        let cotangents = cotangents(&problem, *pass);
        let none = !cotangents.iter().any(|name| tensors.contains_key(*name));
        let (mut inputs, held) = inputs(&problem, *pass, tensors).map_err(|error| {
            let forward = match &error {
                Error::Missing { operand, .. } if none && cotangents.contains(&&**operand) => {
                    "; IN has no cotangent at all, as for the forward pass"
                }
                _ => "",
            };
            let Failure(line) = on_tensors(error);
            Failure(line + forward)
        })?;
        let dtype = dtype.unwrap_or(held);
        if dtype != held {
            holds(&problem, *pass, dtype, &inputs).map_err(on_tensors)?;
        }
        let notes = unit_loss(&problem, *pass, &mut inputs).map_err(on_tensors)?;
        Ok(LoadedProblem { problem, inputs, dtype, notes: notes.into_iter().collect() })
    }
}

/// The names of the cotangents that a pass takes.
fn cotangents(problem: &Problem, pass: Pass) -> Vec<&'static str> {
    problem.operands(pass).iter().filter(|x| x.role.is_cotangent()).map(|x| x.name).collect()
}

/// Fails unless a kernel with main tensors of this type can hold what they hold.
fn holds(problem: &Problem, pass: Pass, dtype: Dtype, inputs: &Tensors) -> Result<(), Error> {
    for operand in problem.operands(pass).iter().filter(|x| x.precision == Precision::Storage) {
        let Some(tensor) = inputs.get(operand.name).filter(|_| operand.role.is_given()) else {
            continue;
        };
        if tensor.narrowed(operand.name, dtype)?.is_none() {
            let expected = format!("numbers that {dtype} has, with --dtype {dtype}");
            let found = format!("others in {}", tensor.type_name());
            return Err(Error::Dtype { operand: operand.name.to_string(), expected, found });
        }
    }
    Ok(())
}

/// Of a loss without a cotangent: adds 1, which `loss.backward()` takes, where the loss is a mean, and says so.
/// Fails where it is another sum, or one for each token.
pub fn unit_loss(
    problem: &Problem,
    pass: Pass,
    inputs: &mut Tensors,
) -> Result<Option<String>, Error> {
    let Problem::LinearCrossEntropy(loss) = problem else { return Ok(None) };
    let table = problem.table(pass);
    let has = table.operands.iter().any(|operand| operand.name == "dloss");
    if !has || inputs.contains_key("dloss") {
        return Ok(None);
    }
    if loss.reduction != Reduction::Mean {
        let reason = "the gradients are those of the loss times dloss: write it, ones as for `loss.sum()`, or \
            zeros";
        return Err(Error::Missing { operand: "dloss".to_string(), reason: reason.to_string() });
    }
    let one = Tensor::round(&ArrayD::from_elem(&[][..], 1.0), Dtype::F32);
    inputs.insert("dloss".to_string(), one);
    Ok(Some("dloss is absent and counts as 1, as for loss.backward().".to_string()))
}

/// The operands of a pass and what the forward pass has stored of them, checked, with the type of the first.
pub fn inputs(
    problem: &Problem,
    pass: Pass,
    mut tensors: Tensors,
) -> Result<(Tensors, Dtype), Error> {
    reject_unknown_tensors(problem, pass, &tensors)?;
    let (table, forward) = (problem.checked_table(pass)?, problem.operands(Pass::Forward));
    let given = |name: &str| find(&table.operands, name).filter(|x| x.role.is_given());
    // Saved tensors are computed again, but their types count.
    let saved = |name: &str| {
        let output = |x: &Operand| matches!(x.role, Role::Output | Role::OptionalOutput);
        pass != Pass::Forward && find(&forward, name).is_some_and(output)
    };
    tensors.retain(|name, _| given(name).is_some() || saved(name));
    let first = table.operands.first().map_or("", |operand| operand.name);
    let storage = tensors.get(first).and_then(Tensor::dtype).unwrap_or(Dtype::F32);
    let mut all = Vec::new();
    for (name, tensor) in &tensors {
        let Some(operand) = given(name) else { continue };
        let stored = match (operand.precision, tensor.view(name)?.stored()) {
            // Any type of floating-point numbers goes beside that of the first.
            (Precision::Storage | Precision::Wide, Stored::Float(_)) => {
                Stored::of(operand.precision, storage)
            }
            (_, stored) => stored,
        };
        all.push((name.as_str(), tensor.shape.as_slice(), stored));
    }
    let dtype = table.check_tensors(all.into_iter(), std::iter::empty(), true)?;
    Ok((tensors, dtype))
}

/// The exact results of a pass by name, in f64, and the bounds of their elements for a kernel of a profile
/// (a name, "usual", or a JSON file), on the threads of the current pool. Results in `stored` have types of their own.
pub fn bounds(
    problem: &Problem,
    pass: Pass,
    given: Tensors,
    profile: &str,
    stored: &[(String, Dtype)],
) -> Result<BTreeMap<String, (Tensor, Tensor)>, Refused> {
    let (mut inputs, dtype) = inputs(problem, pass, given)?;
    unit_loss(problem, pass, &mut inputs)?;
    let types = types((pass, stored), problem, dtype, &inputs)?;
    let claimed = options::claim(profile)?.of(dtype);
    let profile = claimed.ok_or_else(|| {
        Error::value("profile", "a claim: usual, a name or a file; auto needs results", "auto")
    })?;
    needs::afford_evaluation(problem, pass, dtype, "reference", true)?;
    let outputs = bounds::bounds(problem, pass, &types, &profile, &inputs)?.outputs;
    let pair = |x: &Bound| (Tensor::store(&x.value, x.stored), Tensor::round(&x.bound, Dtype::F64));
    Ok(outputs.iter().map(|(name, bound)| (name.clone(), pair(bound))).collect())
}

/// The types whose bounds are asked for.
fn types(
    (pass, stored): (Pass, &[(String, Dtype)]),
    problem: &Problem,
    dtype: Dtype,
    inputs: &Tensors,
) -> Result<Types, Error> {
    let operands = problem.operands(pass);
    let outputs = || operands.iter().filter(|x| x.role == Role::Output);
    let mut types = Types::reading(problem, dtype, inputs);
    for (name, own) in stored {
        if !outputs().any(|x| x.name == name && x.precision != Precision::Integer) {
            let reason = format!(
                "the pass returns no such floating-point numbers{}",
                advice::did_you_mean(name, outputs().map(|x| x.name))
            );
            return Err(Error::Unexpected { operand: name.clone(), reason });
        }
        types = types.with(name, *own);
    }
    Ok(types)
}

/// The profile of the bounds that are asked for.
fn profile(arguments: &Arguments, dtype: Dtype) -> Result<Option<Profile>, Failure> {
    let Some(claim) = &arguments.profile else { return Ok(None) };
    match options::claim(claim)?.of(dtype) {
        None => Err(Failure("--profile auto needs the results of a kernel".to_string())),
        profile => Ok(profile),
    }
}

/// The outputs, and their bounds where there is a profile.
fn evaluate(
    request: &Request<'_>,
    types: &Types,
    tier: &str,
    profile: Option<Profile>,
) -> Result<Tensors, Failure> {
    let &Request { problem, pass, inputs, .. } = request;
    let Some(profile) = profile else { return outputs(request, tier) };
    let bounds = bounds::bounds(problem, pass, types, &profile, inputs)?.outputs;
    let mut outputs = match tier {
        // The bounds know the exact values already.
        "reference" => bounds
            .iter()
            .map(|(name, bound)| (name.clone(), Tensor::store(&bound.value, bound.stored)))
            .collect(),
        tier => outputs(request, tier)?,
    };
    for (name, bound) in bounds {
        outputs.insert(format!("{name}{BOUND}"), Tensor::round(&bound.bound, Dtype::F64));
    }
    Ok(outputs)
}

fn outputs(request: &Request<'_>, tier: &str) -> Result<Tensors, Failure> {
    if tier == "reference" {
        // As a tier it would round to the storage type; here its f64 is wanted.
        return Ok(tiers::oracle(request)?);
    }
    let tier = options::tier(tier)?;
    let inputs = taken(request, &tier.name())?;
    let request = &Request { inputs: &inputs, ..*request };
    tiers::ask(&*tier, request).map_err(|refusal| match refusal {
        Refusal::Unsupported(reason) => {
            Failure(format!("{} does not offer this: {reason}", tier.name()))
        }
        Refusal::Fault(fault) => Failure(format!("{} {fault}", tier.name())),
    })
}

/// The operands in the types in which a tier takes them. Fails where one holds numbers that its type lacks.
fn taken(request: &Request<'_>, tier: &str) -> Result<Tensors, Error> {
    let &Request { problem, pass, dtype, inputs, .. } = request;
    let taken = usual(problem, pass, dtype, inputs)?;
    for (name, own) in &taken {
        if own.numbers(name)? != inputs[name].numbers(name)? {
            let expected = format!("{}, as {tier} takes it", own.type_name());
            let found = inputs[name].type_name().to_string();
            return Err(Error::Dtype { operand: name.clone(), expected, found });
        }
    }
    Ok(taken)
}

/// A tensor that no pass has is probably a misspelt one that this pass would take for zero.
fn reject_unknown_tensors(problem: &Problem, pass: Pass, tensors: &Tensors) -> Result<(), Error> {
    let tables = Pass::ALL.map(|pass| problem.table(pass));
    let known = || tables.iter().flat_map(|table| &table.operands).map(|operand| operand.name);
    let arrays = problem.arrays();
    let unknown = tensors.keys().find(|name| {
        !known().any(|known| known == *name) && !arrays.iter().any(|(array, _)| array == *name)
    });
    let Some(name) = unknown else { return Ok(()) };
    if let Some(option) = tables.iter().find_map(|table| table.option(name)) {
        return Err(Error::unexpected(name, Some(option)));
    }
    let advice = advice::did_you_mean(name, known());
    let reason = format!("{} {pass} has no such tensor{advice}", problem.algorithm());
    Err(Error::Unexpected { operand: name.clone(), reason })
}
