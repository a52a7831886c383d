//! `etalon trace`: what a kernel that walks over tiles holds after each of them.

use crate::eval::{self, LoadedProblem, Question};
use crate::options::{self, one_of};
use crate::outcome::{Failure, Outcome, Refused, say};
use crate::page::quoted;
use crate::table::page;
use crate::units::{bytes, counted};
use crate::{memory, needs, output};
use etalon_conformance::report::Status;
use etalon_conformance::tensor::{Tensor, Tensors, values};
use etalon_conformance::traces::{Traced, trace, wanted};
use etalon_conformance::vectors::{Draft, trace_to_bytes};
use etalon_problem::{Blocking, Dtype, Error, Operand, Order, Pass, Problem, SinkPlace, Walk};
use std::path::PathBuf;

const TENSORS: &str = "\
OUT holds lse, o, p, dS, dq, dk and dv of attention, state and dstate of linear_attention, as far as the pass has \
them, in f64; NaN where right kernels may differ. The guide has their shapes. A kernel that writes such a file is \
judged by `etalon check … --trace FILE`.";

#[derive(Debug, clap::Args)]
#[command(after_help = TENSORS)]
pub struct Arguments {
    #[command(flatten)]
    question: Question,
    /// The file for the trace.
    #[arg(long, value_name = "OUT.safetensors")]
    out: PathBuf,
    /// Of attention: queries and keys of a tile, as in 64x128.
    #[arg(long, value_name = "QxK", value_parser = options::blocking)]
    tile: Option<Blocking>,
    /// Of linear attention: tokens of a chunk.
    #[arg(long, value_name = "C")]
    chunk: Option<usize>,
    /// The order in which the kernel visits the key tiles of a tile of queries.
    #[arg(long, value_name = "ORDER", default_value = "ascending", value_parser = one_of(Order::ALL))]
    key_order: Order,
    /// The order in which it visits the query tiles of a tile of keys.
    #[arg(long, value_name = "ORDER", default_value = "ascending", value_parser = one_of(Order::ALL))]
    query_order: Order,
    /// The place of sinks: before the first key tile, or after the last.
    #[arg(long, value_name = "PLACE", default_value = "last", value_parser = one_of(SinkPlace::ALL))]
    sinks: SinkPlace,
    /// Query heads of attention, or key heads of linear attention: all if absent.
    #[arg(long, value_name = "H,…", value_delimiter = ',')]
    heads: Option<Vec<usize>>,
    /// Rows of q, as in 0..256: all if absent. There is no dk and dv of some rows.
    #[arg(long, value_name = "START..END", value_parser = rows)]
    rows: Option<[usize; 2]>,
    /// These tensors alone.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    only: Vec<String>,
    /// The most MiB that OUT may take.
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    limit: u64,
    #[command(flatten)]
    threads: options::Threads,
}

/// Reads START..END.
fn rows(text: &str) -> Result<[usize; 2], Error> {
    let wrong = || Error::value("rows", "START..END, as in 0..256", text);
    let (start, end) = text.split_once("..").ok_or_else(wrong)?;
    let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
    Ok([number(start)?, number(end)?])
}

pub fn run(arguments: &Arguments) -> Outcome {
    let Arguments { tile, chunk, key_order: keys, query_order: queries, .. } = *arguments;
    let Arguments { sinks, rows, ref heads, ref question, ref out, .. } = *arguments;
    let walk = Walk { tile, chunk, keys, queries, sinks, heads: heads.clone(), rows };
    let LoadedProblem { problem, inputs, dtype, notes } = question.read()?;
    let pass = question.pass;
    let tensors = chosen(&problem, pass, &walk, &arguments.only)?;
    let size = size(&tensors);
    if size > u128::from(arguments.limit) << 20 {
        let (size, limit) = (bytes(usize::try_from(size).unwrap_or(usize::MAX)), arguments.limit);
        let advice =
            "take some --heads, --rows or tensors (--only), larger tiles, or another --limit";
        return Err(Failure(format!("the trace takes {size}, more than {limit} MiB: {advice}")));
    }
    afford(&problem, pass, dtype, size)?;
    let draft = Draft::new(out)?;
    output::apart("--out", &draft, &question.files())?;
    let names: Vec<&str> = tensors.iter().map(|x| x.name).collect();
    let exact = || exact(&problem, pass, &inputs, &walk, &names);
    let file = arguments.threads.pool()?.install(exact)?;
    output::finish(draft, &trace_to_bytes(out, &file, &walk)?)?;
    notes.iter().try_for_each(|note| say(&page(note)))?;
    let line = |x: &Operand| {
        let axes: Vec<&str> = x.axes.iter().map(|axis| axis.symbol()).collect();
        format!("  {:<7}[{}] {:?}", x.name, axes.join(", "), x.shape)
    };
    tensors.iter().try_for_each(|x| say(&line(x)))?;
    let (count, size) =
        (counted(tensors.len(), "tensor"), bytes(usize::try_from(size).unwrap_or(usize::MAX)));
    say(&page(&format!(
        "{count}, {size}. Your kernel's own, with the same metadata, is judged by"
    )))?;
    let [problem, input] = [&question.problem, &question.input].map(|path| quoted(path));
    let Question { algorithm, .. } = question;
    say(&format!(
        "  etalon check {algorithm} {pass} --problem {problem} --in {input} --trace FILE"
    ))?;
    Ok(Status::Passed)
}

/// The tensors that are asked for: all that the trace has, unless there is a list.
fn chosen(
    problem: &Problem,
    pass: Pass,
    walk: &Walk,
    only: &[String],
) -> Result<Vec<Operand>, Error> {
    if only.is_empty() {
        return walk.tensors(problem, pass);
    }
    let names: Vec<&str> = only.iter().map(String::as_str).collect();
    wanted(problem, pass, walk, &names)
}

/// Bytes of a trace in f64.
fn size(tensors: &[Operand]) -> u128 {
    tensors.iter().map(|x| x.len() as u128).sum::<u128>() * 8
}

/// The exact trace of the inputs of a program, in f64, as `etalon trace` writes it, on the threads of the current
/// pool; all of its tensors where `only` names none.
pub fn trace_of(
    problem: &Problem,
    pass: Pass,
    inputs: Tensors,
    walk: &Walk,
    only: &[String],
) -> Result<Tensors, Refused> {
    let (inputs, dtype) = eval::inputs(problem, pass, inputs)?;
    let tensors = chosen(problem, pass, walk, only)?;
    afford(problem, pass, dtype, size(&tensors))?;
    let names: Vec<&str> = tensors.iter().map(|x| x.name).collect();
    Ok(exact(problem, pass, &inputs, walk, &names)?)
}

/// These tensors of a trace.
fn exact(
    problem: &Problem,
    pass: Pass,
    inputs: &Tensors,
    walk: &Walk,
    names: &[&str],
) -> Result<Tensors, Error> {
    let traced = trace(problem, pass, &values(problem, pass, inputs)?, walk, names)?;
    let store = |own: &Traced<f64>| Tensor::round(&own.values, Dtype::F64);
    Ok(traced.iter().map(|own| (own.operand.name.to_string(), store(own))).collect())
}

/// Fails where there is no memory for the trace: its pieces, their tensors, and the bytes of the file.
fn afford(problem: &Problem, pass: Pass, dtype: Dtype, size: u128) -> Result<(), Failure> {
    let own = needs::evaluation(problem, pass, dtype, "reference", false);
    memory::afford("the trace", own + 4 * size)
}
