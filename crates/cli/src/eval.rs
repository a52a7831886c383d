//! `etalon eval`: one pass on the user's own tensors.

use crate::advice;
use crate::options::{self, one_of};
use crate::outcome::{Failure, Outcome};
use crate::{memory, needs, output};
use etalon_conformance::bounds;
use etalon_conformance::profile::Profile;
use etalon_conformance::report::Status;
use etalon_conformance::tensor::{Tensor, Tensors, views};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::{self, Refusal};
use etalon_conformance::vectors::{self, Draft};
use etalon_problem::{Algorithm, Blocking, Dtype, Error, Pass, Problem, ViewsMut};
use std::path::PathBuf;

const TENSORS: &str = "\
The tensors of IN and OUT carry the names of the formulas (q, k, v, dout, …): `etalon list` has them \
with their shapes. The main tensors share one type, f64, f32, bf16 or f16; sinks, dlse and the like \
are f32 (with f64: f64), targets i64.";

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
    #[command(flatten)]
    threads: options::Threads,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let Asked { problem, inputs, dtype } = arguments.question.read()?;
    let pass = arguments.question.pass;
    let profile = profile(arguments, dtype)?;
    let draft = Draft::new(&arguments.out)?;
    let hints = Hints { blocking: arguments.blocking, ..Hints::default() };
    let tier = &arguments.tier;
    needs::afford_evaluation(&problem, pass, dtype, tier, profile.is_some())?;
    let request = Request { problem: &problem, pass, dtype, inputs: &inputs, hints };
    let outputs = arguments.threads.pool()?.install(|| evaluate(&request, tier, profile))?;
    output::finish(draft, &vectors::to_bytes(&arguments.out, &outputs)?)?;
    Ok(Status::Passed)
}

/// A problem, the operands of a pass of it, checked, and their storage type.
pub struct Asked {
    pub problem: Problem,
    pub inputs: Tensors,
    pub dtype: Dtype,
}

impl Question {
    /// What its two files ask for.
    pub fn read(&self) -> Result<Asked, Failure> {
        let Question { algorithm, pass, problem: path, input } = self;
        let tensors = vectors::read_tensors(input, memory::available())?;
        let problem = advice::read_problem(path, input, &tensors)?;
        if problem.algorithm() != *algorithm {
            let (path, found) = (path.display(), problem.algorithm());
            return Err(Failure(format!("{path}: is a problem of {found}, not {algorithm}")));
        }
        let (inputs, dtype) = inputs(&problem, *pass, tensors).map_err(|error| {
            let axes = |name: &str| problem.operand(name).map(|operand| operand.axes);
            advice::on_tensors(&vectors::Error::content(input, error), axes)
        })?;
        Ok(Asked { problem, inputs, dtype })
    }
}

/// The operands of a pass, checked, and their storage type.
fn inputs(problem: &Problem, pass: Pass, mut tensors: Tensors) -> Result<(Tensors, Dtype), Error> {
    reject_unknown_tensors(problem, pass, &tensors)?;
    let operands = problem.operands(pass);
    tensors.retain(|name, _| operands.iter().any(|x| x.name == name && x.role.is_given()));
    // What a tier saves for later passes it computes again.
    let dtype = problem.check_call(pass, &views(&tensors)?, &ViewsMut::new(), true)?;
    Ok((tensors, dtype))
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
    tier: &str,
    profile: Option<Profile>,
) -> Result<Tensors, Failure> {
    let &Request { problem, pass, dtype, inputs, .. } = request;
    let Some(profile) = profile else { return outputs(request, tier) };
    let bounds = bounds::bounds(problem, pass, dtype, &profile, inputs)?.outputs;
    let mut outputs = match tier {
        // The bounds know the exact values already.
        "reference" => bounds
            .iter()
            .map(|(name, bound)| (name.clone(), Tensor::store(&bound.value, bound.stored)))
            .collect(),
        tier => outputs(request, tier)?,
    };
    for (name, bound) in bounds {
        outputs.insert(format!("{name}.bound"), Tensor::round(&bound.bound, Dtype::F64));
    }
    Ok(outputs)
}

fn outputs(request: &Request<'_>, tier: &str) -> Result<Tensors, Failure> {
    if tier == "reference" {
        // As a tier it would round to the storage type; here its f64 is wanted.
        return Ok(tiers::oracle(request)?);
    }
    let tier = options::tier(tier)?;
    tiers::ask(&*tier, request).map_err(|refusal| match refusal {
        Refusal::Unsupported(reason) => {
            Failure(format!("{} does not offer this: {reason}", tier.name()))
        }
        Refusal::Fault(fault) => Failure(format!("{} {fault}", tier.name())),
    })
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
