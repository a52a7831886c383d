//! Plans of the cuda tier for a problem: levels, kernels, modes, time and memory, with a device or without.

use super::rates::Rates;
use crate::options::one_of;
use crate::outcome::Failure;
use crate::plans::MODES;
use crate::table::Table;
use crate::units::{bytes, digits, time};
use etalon_cuda::{Level, Options, Plan, Precision, Target, plan};
use etalon_problem::{Blocking, Dtype, Error, Mode, Pass, Problem};

/// A hypothetical device, and how it is asked to compute.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The architecture of the device of cuda: it need not be there.
    #[arg(long, value_name = "A", default_value = "sm_90", value_parser = Target::of)]
    arch: Target,
    /// The level of cuda; the best for each pass if absent.
    #[arg(long, value_name = "L", default_value = "auto", value_parser = one_of(Level::ALL))]
    cuda_level: Level,
    /// The permitted rounding within a pass of cuda.
    #[arg(long, value_name = "P", default_value = "flash", value_parser = one_of(Precision::ALL))]
    precision: Precision,
}

impl Arguments {
    /// The options of the cuda tier.
    fn options(&self, blocking: Option<Blocking>, partials_budget: usize) -> Options {
        let &Arguments { cuda_level: level, precision, .. } = self;
        Options { level, precision, blocking, partials_budget, ..Options::default() }
    }
}

/// A pass in a mode: its plan, or why there is none.
struct Row {
    pass: Pass,
    mode: Mode,
    /// True if it is what [`Mode::Auto`] does.
    chosen: bool,
    plan: Result<Plan, String>,
}

/// A section on each pass and mode, with tile sizes and the bytes of partial sums. Without the number of visible pairs
/// there are no times.
pub fn plans(
    problem: &Problem,
    dtype: Dtype,
    arguments: &Arguments,
    (blocking, partials_budget): (Option<Blocking>, usize),
    pairs: Option<u64>,
) -> Result<String, Failure> {
    if dtype == Dtype::F64 {
        return Ok(String::new());
    }
    let (target, options) = (&arguments.arch, arguments.options(blocking, partials_budget));
    let of = |pass, mode| plan(problem, pass, dtype, &Options { mode, ..options }, target);
    let mut rows = Vec::new();
    for (pass, mode) in forms(problem) {
        let usual = of(pass, Mode::Auto).ok();
        let plan = match of(pass, mode) {
            Ok(plan) => Ok(plan),
            Err(Error::Unsupported { reason, .. }) => Err(reason),
            Err(error) => return Err(error.into()),
        };
        let is = |plan: &Plan| usual.as_ref() == Some(plan);
        let chosen = mode != Mode::ForwardGradient && plan.as_ref().is_ok_and(is);
        rows.push(Row { pass, mode, chosen, plan });
    }
    let rates = Rates::stated(target);
    let about = |plan: &Plan| {
        let rates = rates.as_ref().filter(|_| plan.terms() > 0);
        let seconds = pairs.zip(rates).map(|(pairs, rates)| rates.seconds(plan, pairs));
        seconds.map_or("–".to_string(), time)
    };
    let beside = if matches!(problem, Problem::LinearAttention(_)) { SEED } else { "" };
    Ok(heading(target, arguments, &options)
        + &modes(&rows, about)
        + &choices(&rows)
        + &kernels(&rows)
        + &memory(&rows)
        + beside)
}

/// The passes of a problem, and the forms of those that have several.
fn forms(problem: &Problem) -> Vec<(Pass, Mode)> {
    let softmax = matches!(problem, Problem::Attention(_) | Problem::AttentionLse(_));
    if !softmax {
        return problem.algorithm().passes().iter().map(|&pass| (pass, Mode::Auto)).collect();
    }
    let further = matches!(problem, Problem::AttentionLse(_));
    MODES.into_iter().filter(|x| further || x.1 != Mode::ForwardGradient).collect()
}

/// The shared memory that the seed of linear attention has.
const SEED: &str = "\nThe seed's table has 76 KB of shared memory for a chunk of 64 tokens with D = E = 64 in f32, \
all buffers of which take\n160 KiB, of a micro-chunk of 16 30 KiB, and 32 KiB more of states: docs/errata.md. \
These kernels keep no state of f32 in\nshared memory.";

fn heading(target: &Target, arguments: &Arguments, options: &Options) -> String {
    let (major, minor) = target.capability;
    let rates = match Rates::stated(target) {
        Some(Rates { products: [ffma, mma, wgmma], memory }) => {
            let [ffma, mma, wgmma, memory] = [ffma, mma, wgmma, memory].map(|x| digits(x * 1e-12));
            format!(
                "at the rates that kernels of long sequences reached on an H100: {ffma} TFLOP/s by fused\n\
                 multiply-adds, {mma} by mma.sync, {wgmma} by wgmma, and {memory} TB/s for partial sums; \
                 etalon bench --tune\nmeasures"
            )
        }
        None => "nothing was measured on such a device".to_string(),
    };
    format!(
        "\n\nThe cuda tier on compute capability {major}.{minor} ({} multiprocessors, {} for a block), precision {},\n\
         a budget of {} for partial sums:\nTime: {rates}.\n",
        target.multiprocessors,
        bytes(target.shared_memory as usize),
        arguments.precision,
        bytes(options.partials_budget),
    )
}

/// A row for each pass in each mode, then what is refused.
fn modes(rows: &[Row], about: impl Fn(&Plan) -> String) -> String {
    let header = ["pass", "mode", "", "level", "terms", "tiles", "about", "workspace"];
    let (mut table, mut refused) = (Table::new(header), String::new());
    for Row { pass, mode, chosen, plan } in rows {
        let plan = match plan {
            Ok(plan) => plan,
            Err(reason) => {
                refused += &format!("{pass}, {mode}: {reason}\n");
                continue;
            }
        };
        let alone = rows.iter().filter(|row| row.pass == *pass).count() == 1;
        table.add_row([
            pass.name().to_string(),
            mode.name().to_string(),
            if *chosen && !alone { "chosen" } else { "" }.to_string(),
            plan.level.name().to_string(),
            if plan.terms() > 0 { plan.terms().to_string() } else { "–".to_string() },
            plan.blocking.map_or("–".to_string(), |x| format!("{}x{}", x.queries, x.keys)),
            about(plan),
            bytes(plan.workspace_bytes()),
        ]);
    }
    format!(
        "{table}\nTerms: multiplications and additions for each visible pair. Workspace: the scratch memory of a call.\n{refused}"
    )
}

/// Permitted tile sizes, and the reasons why levels are not taken.
fn choices(rows: &[Row]) -> String {
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        let Ok(plan) = &row.plan else { continue };
        let words = plan.blockings.iter().map(|x| format!("{}x{}", x.queries, x.keys));
        let tiles = words.collect::<Vec<_>>().join(", ");
        let of = |other: &Row| {
            other.pass == row.pass && other.plan.as_ref().is_ok_and(|x| x.level == plan.level)
        };
        if !tiles.is_empty() && !rows[..number].iter().any(of) {
            text += &format!("Tiles of {} {}: {tiles}\n", row.pass, plan.level);
        }
        for (level, reason) in plan.refusals.iter().filter(|_| row.chosen) {
            text += &format!("  not {level}: {reason}\n");
        }
    }
    text
}

/// The kernels of what is chosen, in their order.
fn kernels(rows: &[Row]) -> String {
    let header =
        ["pass", "mode", "kernel", "level", "launches", "blocks", "threads", "shared memory"];
    let mut table = Table::new(header);
    for Row { pass, mode, plan, .. } in rows {
        for step in plan.iter().flat_map(|plan| &plan.steps) {
            table.add_row([
                pass.name().to_string(),
                mode.name().to_string(),
                step.kernel.to_string(),
                step.level.name().to_string(),
                step.launches.to_string(),
                step.blocks.to_string(),
                step.threads.to_string(),
                bytes(step.shared_bytes as usize),
            ]);
        }
    }
    format!("{table}\n")
}

/// The buffers of the backward passes that have names.
fn memory(rows: &[Row]) -> String {
    let mut text = String::new();
    for Row { pass, mode, plan, .. } in rows.iter().filter(|row| row.pass == Pass::Backward) {
        let Some(plan) = plan.as_ref().ok().filter(|plan| !plan.buffers.is_empty()) else {
            continue;
        };
        text += &format!("The {pass} pass, {mode}, has:\n");
        for (name, size) in &plan.buffers {
            text += &format!("  {name}: {}\n", bytes(*size));
        }
    }
    text.trim_end().to_string()
}
