//! Plans of the simd tier for a problem: modes, time and memory.

use crate::outcome::Failure;
use crate::table::Table;
use crate::units::{bytes, counted, digits, time};
use etalon_problem::{
    Blocking, Dtype, Error, Extents, LinearAttention, LinearCrossEntropy, Pass, Problem,
};
use etalon_simd::{
    Element, Mode, Options, Plan, attention, attention_lse, lazy_attention, linear_attention,
    linear_cross_entropy, probe,
};
use half::{bf16, f16};

/// The share of the peak by which a time is estimated: about that of long sequences.
pub const SHARE: f64 = 0.7;
/// The same of a matrix unit, which waits for exponentials and for what is stored: 0.19 to 0.29 of attention in
/// docs/benchmarks.md.
const SHARE_OF_BF16: f64 = 0.25;

/// Keys of a tile where every tile of keys has a partial dq of its own, as kernels of accelerators
/// keep it that know no order of their tiles.
const PARTIAL: usize = 128;

/// The passes in their modes; gradient is one of attention_lse and lazy_attention alone.
pub const MODES: [(Pass, Mode); 7] = [
    (Pass::Forward, Mode::Auto),
    (Pass::Forward, Mode::ForwardGradient),
    (Pass::Backward, Mode::Separate),
    (Pass::Backward, Mode::FusedPartials),
    (Pass::Backward, Mode::ForwardGradient),
    (Pass::DoubleBackward, Mode::Auto),
    (Pass::Jvp, Mode::Auto),
];

/// A pass in a mode.
struct Row {
    pass: Pass,
    mode: Mode,
    /// True if it is what [`Mode::Auto`] does.
    chosen: bool,
    plan: Plan,
}

/// A section on each pass and mode; empty for problems that the simd tier does not compute. Without the
/// number of visible pairs there are no times.
pub fn plans(
    problem: &Problem,
    dtype: Dtype,
    options: &Options,
    pairs: Option<u64>,
) -> Result<String, Failure> {
    if let Problem::LinearAttention(x) = problem {
        return Ok(explain_linear(problem, x, dtype, options)?);
    }
    if let Problem::LinearCrossEntropy(x) = problem {
        return Ok(explain_cross_entropy(problem, x, dtype, options)?);
    }
    let further = matches!(problem, Problem::AttentionLse(_) | Problem::LazyAttention(_));
    let mut rows = Vec::new();
    for (pass, mode) in
        MODES.into_iter().filter(|(_, mode)| further || *mode != Mode::ForwardGradient)
    {
        let of = |mode| plan(problem, pass, dtype, &Options { mode, ..*options });
        if let (Some(plan), Some(auto)) = (of(mode)?, of(Mode::Auto)?) {
            let chosen = mode != Mode::ForwardGradient && plan.mode == auto.mode;
            rows.push(Row { pass, mode, chosen, plan });
        }
    }
    let Some(scores) = problem.scores().filter(|_| !rows.is_empty()) else {
        return Ok(String::new());
    };
    let flops = pairs.map(|pairs| 2.0 * pairs as f64 * scores.extents.dim as f64);
    Ok(print(&rows, flops, dtype, options) + &partials(&scores.extents, &rows))
}

/// The plan of the simd tier for a pass, where it has one.
pub fn plan(
    problem: &Problem,
    pass: Pass,
    dtype: Dtype,
    options: &Options,
) -> Result<Option<Plan>, Error> {
    match dtype {
        Dtype::F32 => plan_of::<f32>(problem, pass, options).transpose(),
        Dtype::Bf16 => plan_of::<bf16>(problem, pass, options).transpose(),
        Dtype::F16 => plan_of::<f16>(problem, pass, options).transpose(),
        Dtype::F64 => Ok(None),
    }
}

fn plan_of<T: Element>(
    problem: &Problem,
    pass: Pass,
    options: &Options,
) -> Option<Result<Plan, Error>> {
    let has = problem.algorithm().passes().contains(&pass);
    has.then(|| match problem {
        Problem::Attention(problem) => attention::plan::<T>(problem, pass, options),
        Problem::AttentionLse(problem) => attention_lse::plan::<T>(problem, pass, options),
        Problem::LinearAttention(problem) => linear_attention::plan::<T>(problem, pass, options),
        Problem::LazyAttention(problem) => lazy_attention::plan::<T>(problem, pass, options),
        Problem::LinearCrossEntropy(problem) => {
            linear_cross_entropy::plan::<T>(problem, pass, options)
        }
    })
}

/// The peak of all threads, of the matrix unit where that multiplies numbers of this type, in GFLOP/s; and the share
/// of it by which a time is estimated.
fn peak(dtype: Dtype, options: &Options) -> (f64, f64) {
    let in_bf16 = options.multiplies_bf16(Pass::Forward, dtype).then_some(options.level);
    match in_bf16.and_then(probe::bf16_gflops) {
        Some(peak) => (peak, SHARE_OF_BF16),
        None => (probe::fma_gflops(options.level), SHARE),
    }
}

fn print(rows: &[Row], flops: Option<f64>, dtype: Dtype, options: &Options) -> String {
    let threads = counted(rayon::current_num_threads(), "thread");
    let (peak, share) = peak(dtype, options);
    let mut table = Table::new(["pass", "mode", "", "products", "tiles", "about", "workspace"]);
    for Row { pass, mode, chosen, plan } in rows {
        let alone = rows.iter().filter(|row| row.pass == *pass).count() == 1;
        let seconds = |flops| flops * plan.products as f64 / (share * peak) * 1e-9;
        table.add_row([
            pass.name().to_string(),
            mode.name().to_string(),
            if *chosen && !alone { "chosen" } else { "" }.to_string(),
            plan.products.to_string(),
            format!("{}x{}", plan.blocking.queries, plan.blocking.keys),
            flops.map_or("–".to_string(), |flops| time(seconds(flops))),
            bytes(plan.workspace_bytes()),
        ]);
    }
    let mut text = format!(
        "\n\nThe simd tier, simd/{}, {threads}:\n{table}\n\
         Time: the products of visible pairs at {:.0} % of the peak, now {} GFLOP/s.\n\
         Workspace: the memory that a pass allocates beside operands and results. The {} pass has:\n",
        options.name(),
        100.0 * share,
        digits(peak),
        Pass::Backward
    );
    let backward = rows.iter().filter(|row| row.pass == Pass::Backward && row.chosen);
    for buffer in backward.flat_map(|row| &row.plan.buffers) {
        text += &format!("  {}: {}\n", buffer.name, bytes(buffer.bytes));
    }
    text
}

/// Chunks, kept states, buffers and the shared memory of a GPU.
fn explain_linear(
    problem: &Problem,
    x: &LinearAttention,
    dtype: Dtype,
    options: &Options,
) -> Result<String, Error> {
    let threads = counted(rayon::current_num_threads(), "thread");
    let caches = probe::caches();
    let mut text = format!("\n\nThe simd tier, simd/{}, {threads}", options.name());
    for cache in &caches {
        text += &format!(", L{} {}", cache.level, bytes(cache.bytes));
    }
    text += ":\n";
    for pass in [Pass::Forward, Pass::Backward, Pass::DoubleBackward, Pass::Step] {
        let Some(plan) = plan(problem, pass, dtype, options)? else { continue };
        text += &format!("  {pass}: ");
        if let Some(interval) = plan.interval {
            let Blocking { queries: chunk, keys: micro } = plan.blocking;
            let kept = if interval == 1 { "chunk".into() } else { format!("{interval} chunks") };
            text += &format!(
                "chunks of {chunk} tokens, micro-chunks of {micro}; a state kept every {kept}; {} of \
                 {} at once; ",
                plan.together,
                x.sequence_count() as u128 * x.extents.key_heads as u128,
            );
        }
        text += &format!("workspace {}\n", bytes(plan.workspace_bytes()));
        for buffer in &plan.buffers {
            text += &format!("    {}: {}", buffer.name, bytes(buffer.bytes));
            if buffer.count > 1 {
                text += &format!(", {} of {}", buffer.count, bytes(buffer.each()));
            }
            if let Some(cache) = caches.iter().find(|cache| buffer.each() <= cache.bytes) {
                text += &format!(" (L{})", cache.level);
            }
            text += "\n";
        }
    }
    text += "The backward pass of a chunk in the shared memory of a GPU, f32:\n";
    let mut table = Table::new(["shared memory", "micro-chunk", "slice of E", "buffers", "total"]);
    for kibibytes in SHARED {
        let cells = match linear_attention::shared_memory(x, kibibytes << 10) {
            Some(fit) => {
                let list = fit.buffers.iter().map(|b| format!("{}: {}", b.name, bytes(b.bytes)));
                let list = list.collect::<Vec<_>>().join("\n");
                [fit.micro.to_string(), fit.slice.to_string(), list, bytes(fit.bytes())]
            }
            None => ["–", "–", "does not fit", "–"].map(str::to_string),
        };
        table.add_row([format!("{kibibytes} KiB")].into_iter().chain(cells));
    }
    Ok(text + &table.to_string())
}

/// Of every pass of linear cross-entropy what is held of the logits, and whether they are computed again.
fn explain_cross_entropy(
    problem: &Problem,
    x: &LinearCrossEntropy,
    dtype: Dtype,
    options: &Options,
) -> Result<String, Error> {
    let threads = counted(rayon::current_num_threads(), "thread");
    let (peak, share) = peak(dtype, options);
    let product = 2.0 * x.tokens as f64 * x.dim as f64 * x.vocab as f64;
    let mut text = format!(
        "\n\nThe simd tier, simd/{}, {threads}, a budget of {}:\n",
        options.name(),
        bytes(options.memory_budget)
    );
    for pass in [Pass::Forward, Pass::Backward, Pass::ForwardBackward, Pass::DoubleBackward] {
        let Some(plan) = plan(problem, pass, dtype, options)? else { continue };
        let Blocking { queries: tokens, keys: classes } = plan.blocking;
        let strategy = plan.strategy.map(|strategy| format!("{}, ", strategy.name()));
        text += &format!(
            "  {pass}: {}{}, {tokens} tokens by {classes} classes at a time, about {}; \
             workspace {}\n",
            strategy.unwrap_or_default(),
            counted(plan.products, "product"),
            time(product * plan.products as f64 / (share * peak) * 1e-9),
            bytes(plan.workspace_bytes())
        );
        for buffer in &plan.buffers {
            text += &format!("    {}: {}", buffer.name, bytes(buffer.bytes));
            if buffer.count > 1 {
                text += &format!(", {} of {}", buffer.count, bytes(buffer.each()));
            }
            text += "\n";
        }
    }
    text += &format!(
        "All logits at once would be {}.",
        bytes(x.tokens.saturating_mul(x.vocab).saturating_mul(4))
    );
    Ok(text)
}

/// KiB of shared memory of a block: of compute capability 8.6, 8.9 and 12.x, of 8.0, and of 9.0.
pub const SHARED: [usize; 3] = [99, 163, 227];

/// Memory of the sums of dq, and that of partials.
fn partials(e: &Extents, rows: &[Row]) -> String {
    let fused = rows.iter().find(|row| row.mode == Mode::FusedPartials);
    let sums = fused.into_iter().flat_map(|row| &row.plan.buffers);
    let sums = sums.filter(|buffer| buffer.name == "sums of dq").map(|buffer| buffer.bytes).sum();
    let dq = [e.batch, e.query_heads, e.queries, e.dim]
        .iter()
        .fold(size_of::<f32>(), |bytes, &extent| bytes.saturating_mul(extent));
    format!(
        "A fused backward pass that keeps a partial dq for every {PARTIAL} keys would hold {}; this \
         one keeps {} in sums that the tiles of keys take turns at.",
        bytes(dq.saturating_mul(e.keys.div_ceil(PARTIAL))),
        bytes(sums)
    )
}
