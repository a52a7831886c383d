//! `etalon explain`: a case or a problem in words, and how the simd tier and the cuda tier would go about it.

use crate::advice::read_problem;
use crate::options::{self, SIMD_DTYPES, one_of};
use crate::outcome::{Failure, Outcome, say};
use crate::plans::plans;
use crate::units::{counted, digits};
use crate::{cuda, memory, needs, sparsity};
use etalon_conformance::cases::{Case, Spec};
use etalon_conformance::laws;
use etalon_conformance::report::Status;
use etalon_conformance::tensor::Tensors;
use etalon_conformance::vectors;
use etalon_problem::{Blocking, Dtype, Error, Problem, Scores, Sequences, shortened};
use etalon_simd::{Level, Options};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
#[group(id = "subject", required = true, args = ["case", "problem"])]
pub struct Arguments {
    /// The name of a case, as in a report.
    case: Option<Spec>,
    /// A problem: its extents and options.
    #[arg(long, value_name = "P.json")]
    problem: Option<PathBuf>,
    /// The arrays that the problem's mask names, and of lazy_attention the inputs of its forward pass: then
    /// the sparsity of their weights is printed.
    #[arg(long = "in", value_name = "IN.safetensors", requires = "problem")]
    input: Option<PathBuf>,
    /// The storage type of the problem's tensors.
    #[arg(long, default_value = "f32", conflicts_with = "case", value_parser = one_of(SIMD_DTYPES))]
    dtype: Dtype,
    /// The level of the simd tier, that of pairs of bf16 also with -split2; the best of this machine in f32 if absent.
    #[arg(long, value_name = "L", value_parser = options::simd_level())]
    level: Option<Options>,
    #[command(flatten)]
    threads: options::Threads,
    #[command(flatten)]
    device: cuda::plans::Arguments,
    /// Tile sizes, as in 96x128: queries and keys.
    #[arg(long, value_name = "QxK", value_parser = options::blocking)]
    blocking: Option<Blocking>,
    /// The memory that a fused backward pass may use for partial sums of dq.
    #[arg(long, value_name = "BYTES", default_value_t = Options::default().partials_budget)]
    budget: usize,
    /// The memory that linear_cross_entropy may hold beside operands, results and 64 bytes for each token
    /// (in a double backward pass 100).
    #[arg(long, value_name = "BYTES", default_value_t = Options::default().memory_budget)]
    memory: usize,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let case = arguments.case.map(|spec| spec.build());
    let mut tensors = Tensors::new();
    let (name, problem, dtype) = match (&case, &arguments.problem) {
        (Some(case), _) => (case.name.clone(), case.problem.clone(), case.dtype),
        (None, Some(path)) => {
            let problem = read(path, arguments.input.as_deref(), &mut tensors)?;
            (shortened(&path.display().to_string(), PATH), problem, arguments.dtype)
        }
        (None, None) => return Err(Failure("a case or --problem is needed".to_string())),
    };
    needs::afford_lists(&problem)?;
    let mut text = format!("{name}: {} in {dtype}\n\n", problem.algorithm());
    let seen = problem.scores().map(Scores::visible_pairs);
    if let Some((scores, seen)) = problem.scores().zip(seen.as_ref()) {
        text += &pairs(scores, seen);
    }
    if let Some(case) = &case {
        text += &explain(case)?;
    }
    let options = Options {
        blocking: arguments.blocking.or(case.and_then(|case| case.blocking())),
        partials_budget: arguments.budget,
        memory_budget: arguments.memory,
        ..arguments.level.unwrap_or_else(|| Options::of_level(Level::best().in_f32()))
    };
    let pool = arguments.threads.pool()?;
    let seen = seen.and_then(Result::ok);
    let tiles = (options.blocking, options.partials_budget);
    let on_device = cuda::plans::plans(&problem, dtype, &arguments.device, tiles, seen)?;
    let plans = pool.install(|| plans(&problem, dtype, &options, seen))?;
    let sparsity = pool.install(|| sparsity::report(&problem, &tensors, &options))?;
    say(&format!("{}{plans}{on_device}{sparsity}", text.trim_end()))?;
    Ok(Status::Passed)
}

/// The most characters of a path, and numbers of a list, that are shown.
const PATH: usize = 200;
const LIST: usize = 32;

/// The most characters of a mask in words.
const MASK: usize = 2000;

/// The problem of a file, and the tensors of another.
fn read(path: &Path, input: Option<&Path>, tensors: &mut Tensors) -> Result<Problem, Failure> {
    if let Some(input) = input {
        *tensors = vectors::read_tensors(input, memory::available())?;
    }
    read_problem(path, input.unwrap_or(path), tensors)
}

/// Description of a case beside its problem.
fn explain(case: &Case) -> Result<String, Failure> {
    let mut text = format!("elements: {}\n", case.spec.few_words());
    text += &match case.blocking() {
        Some(tiles) => format!("tiles: {} queries × {} keys\n", tiles.queries, tiles.keys),
        None => "tiles: as the tier likes them\n".to_string(),
    };
    text += "\nThe problem file:\n";
    text += &serde_json::to_string_pretty(&case.problem)?;
    text += "\n\nTensors:\n";
    for (name, tensor) in &case.inputs {
        text += &format!("  {name} {:?} {}\n", tensor.shape, tensor.type_name());
    }
    for &pass in case.problem.algorithm().passes() {
        let laws = laws::all().into_iter().filter(|law| law.concerns(case, pass));
        let names: Vec<&str> = laws.map(|law| law.name).collect();
        text += &format!("\nLaws of {pass}: {}", names.join(", "));
    }
    Ok(text)
}

/// Visible pairs, in words.
fn pairs(scores: &Scores, seen: &Result<u64, Error>) -> String {
    let e = &scores.extents;
    let mut text = format!(
        "{}, {} on {}, {}, {}, {} in each\n",
        counted(e.batch, "batch element"),
        counted(e.query_heads, "query head"),
        counted(e.key_heads, "key head"),
        counted(e.queries, "query"),
        counted(e.keys, "key"),
        counted(e.dim, "element")
    );
    let mask = shortened(&scores.mask.describe(), MASK);
    text += &match seen {
        Ok(seen) => {
            // Each side is addressable, and so below 2⁶⁴.
            let all = (e.batch * e.query_heads * e.queries) as u128 * e.keys as u128;
            format!("a query sees {mask}: {seen} of {all} pairs\n")
        }
        Err(error) => format!("a query sees {mask}; the pairs are not counted: {error}\n"),
    };
    text += &format!("sequences: {}\n", sequences(scores));
    text += &format!("scores: {}\n", options(scores));
    text
}

fn sequences(scores: &Scores) -> String {
    match &scores.sequences {
        Sequences::Dense => "as long as the arrays".to_string(),
        Sequences::Lengths { query, key } => {
            format!("padded on the right, of {} queries and {} keys", list(query), list(key))
        }
        Sequences::Packed { cu_query, cu_key } => {
            format!("end to end, queries cut at {} and keys at {}", list(cu_query), list(cu_key))
        }
    }
}

/// Numbers, of very many the first.
fn list(numbers: &[usize]) -> String {
    if numbers.len() <= LIST {
        return format!("{numbers:?}");
    }
    format!("{:?} and {} more", &numbers[..LIST], numbers.len() - LIST)
}

fn options(scores: &Scores) -> String {
    let mut text = format!("q·k times {}", digits(scores.scale()));
    if let Some(cap) = scores.softcap {
        text += &format!(", softly capped at {cap}");
    }
    if let Some(bias) = scores.bias {
        let heads = if bias.heads == 1 { "all heads" } else { "each head" };
        text += &format!(", plus a bias for {heads}");
    }
    if scores.sinks {
        text += ", beside a sink for each head";
    }
    text
}
