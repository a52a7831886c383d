//! `etalon eval`: one pass on the user's own tensors.

use crate::advice;
use crate::options;
use crate::outcome::{Failure, Outcome};
use etalon_conformance::bounds;
use etalon_conformance::profile::Profile;
use etalon_conformance::tensor::{Stored, Tensor, Tensors};
use etalon_conformance::tier::{Hints, Request};
use etalon_conformance::tiers::{self, Refusal};
use etalon_conformance::vectors::{self, Draft};
use etalon_problem::{Algorithm, Blocking, Dtype, Error, Operand, Pass, Precision, Problem, Role};
use std::path::PathBuf;

const TENSORS: &str = "\
The tensors of IN and OUT carry the names of the formulas (q, k, v, dout, …): `etalon list` has them \
with their shapes. The main tensors share one type, f64, f32, bf16 or f16; sinks, dlse and the like \
are f32 (with f64: f64), targets i64.";

#[derive(Debug, clap::Args)]
#[command(after_help = TENSORS)]
pub struct Arguments {
    /// The algorithm.
    #[arg(value_parser = options::algorithm())]
    algorithm: Algorithm,
    /// The pass.
    #[arg(value_parser = options::pass())]
    pass: Pass,
    /// The problem: its extents and options.
    #[arg(long, value_name = "P.json")]
    problem: PathBuf,
    /// The inputs and cotangents, and the arrays that the mask names.
    #[arg(long = "in", value_name = "IN.safetensors")]
    input: PathBuf,
    /// The file for the outputs.
    #[arg(long, value_name = "OUT.safetensors")]
    out: PathBuf,
    /// The tier that evaluates: reference (outputs in f64), simd, simd/LEVEL, cuda.
    #[arg(long, default_value = "reference")]
    tier: String,
    /// Adds a tensor NAME.bound to each output NAME: the largest error of a kernel with this profile.
    #[arg(long, value_parser = options::profile())]
    profile: Option<Profile>,
    /// Tile sizes, as in 96x128: queries and keys.
    #[arg(long, value_name = "QxK", value_parser = options::blocking)]
    blocking: Option<Blocking>,
    #[command(flatten)]
    threads: options::Threads,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let tensors = vectors::read_tensors(&arguments.input)?;
    let problem = advice::read_problem(&arguments.problem, &arguments.input, &tensors)?;
    if problem.algorithm() != arguments.algorithm {
        let (path, found) = (arguments.problem.display(), problem.algorithm());
        return Err(Failure(format!(
            "{path}: is a problem of {found}, not {}",
            arguments.algorithm
        )));
    }
    let inputs = Inputs::new(&problem, arguments.pass, tensors).map_err(|error| {
        advice::on_tensors(&vectors::Error::content(&arguments.input, error), advice::ROWS)
    })?;
    let draft = Draft::new(&arguments.out)?;
    let outputs = arguments.threads.pool()?.install(|| inputs.evaluate(arguments))?;
    draft.finish(&vectors::to_bytes(&arguments.out, &outputs)?)?;
    Ok(true)
}

/// The operands of a pass, checked.
struct Inputs<'a> {
    problem: &'a Problem,
    pass: Pass,
    dtype: Dtype,
    tensors: Tensors,
}

impl<'a> Inputs<'a> {
    fn new(problem: &'a Problem, pass: Pass, mut tensors: Tensors) -> Result<Self, Error> {
        refuse_strangers(problem, pass, &tensors)?;
        let operands = problem.operands(pass);
        let operands: Vec<&Operand> = operands.iter().filter(|x| x.role.is_given()).collect();
        // The type of the first operand (q, or h) is that of the storage.
        let Some(first) = operands.first().map(|operand| operand.name) else {
            let passes: Vec<&str> = problem.algorithm().passes().iter().map(|x| x.name()).collect();
            return Err(Error::value("pass", format!("one of {}", passes.join(", ")), pass));
        };
        let dtype = tensors.get(first).and_then(Tensor::dtype).unwrap_or(Dtype::F32);
        let mut found = Tensors::new();
        for operand in operands {
            match tensors.remove(operand.name) {
                Some(tensor) => {
                    check(operand, &tensor, dtype, first)?;
                    found.insert(operand.name.to_string(), tensor);
                }
                None if operand.role == Role::OptionalCotangent => {}
                None => {
                    return Err(Error::Missing {
                        operand: operand.name.to_string(),
                        reason: format!("{} {pass} needs it", problem.algorithm()),
                    });
                }
            }
        }
        Ok(Inputs { problem, pass, dtype, tensors: found })
    }

    fn evaluate(&self, arguments: &Arguments) -> Result<Tensors, Failure> {
        let request = Request {
            problem: self.problem,
            pass: self.pass,
            dtype: self.dtype,
            inputs: &self.tensors,
            hints: Hints { blocking: arguments.blocking, ..Hints::default() },
        };
        let bounds = match &arguments.profile {
            Some(profile) => {
                let (problem, pass) = (self.problem, self.pass);
                Some(bounds::bounds(problem, pass, self.dtype, profile, &self.tensors)?.outputs)
            }
            None => None,
        };
        let mut outputs = match &bounds {
            // The bounds know the exact values already.
            Some(bounds) if arguments.tier == "reference" => bounds
                .iter()
                .map(|(name, bound)| (name.clone(), Tensor::store(&bound.value, bound.stored)))
                .collect(),
            _ => self.outputs(&request, &arguments.tier)?,
        };
        for (name, bound) in bounds.into_iter().flatten() {
            outputs.insert(format!("{name}.bound"), Tensor::round(&bound.bound, Dtype::F64));
        }
        Ok(outputs)
    }

    fn outputs(&self, request: &Request<'_>, tier: &str) -> Result<Tensors, Failure> {
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
}

/// Fails unless a tensor has its shape and type: `first` says which type the storage has.
fn check(operand: &Operand, tensor: &Tensor, storage: Dtype, first: &str) -> Result<(), Error> {
    Error::expect_shape(operand.name, &operand.shape, &tensor.shape)?;
    let wide = if storage == Dtype::F64 { Dtype::F64 } else { Dtype::F32 };
    let (stored, expected) = match operand.precision {
        Precision::Storage if operand.name == first => {
            let dtype = tensor.dtype().unwrap_or(storage);
            (Stored::Float(dtype), "f64, f32, bf16 or f16".to_string())
        }
        Precision::Storage => (Stored::Float(storage), format!("{storage}, as {first} does")),
        Precision::Wide => (Stored::Float(wide), format!("{wide}, as {first} holds {storage}")),
        Precision::Integer => (Stored::Integer, Stored::Integer.to_string()),
    };
    if tensor.stored() == Some(stored) {
        return Ok(());
    }
    Err(Error::Dtype {
        operand: operand.name.to_string(),
        expected,
        found: tensor.type_name().to_string(),
    })
}

/// Options with an operand of their name.
const OPTIONS: [&str; 6] =
    ["sinks", "bias", "initial_state", "final_state", "class_weights", "token_weights"];

/// A tensor that no pass has is probably a misspelt one that this pass would take for zero.
fn refuse_strangers(problem: &Problem, pass: Pass, tensors: &Tensors) -> Result<(), Error> {
    let operands: Vec<Operand> =
        Pass::ALL.into_iter().flat_map(|pass| problem.operands(pass)).collect();
    let arrays = problem.arrays();
    let stranger = tensors.keys().find(|name| {
        !operands.iter().any(|operand| operand.name == *name)
            && !arrays.iter().any(|(array, _)| array == *name)
    });
    let Some(name) = stranger else { return Ok(()) };
    let option = OPTIONS.into_iter().find(|option| name.contains(option));
    let known = operands.iter().map(|operand| operand.name);
    Err(Error::Unexpected {
        operand: name.clone(),
        reason: match option {
            Some(option) => format!("the problem does not set `{option}`"),
            None => {
                let advice = advice::did_you_mean(name, known);
                format!("{} {pass} has no such tensor{advice}", problem.algorithm())
            }
        },
    })
}
