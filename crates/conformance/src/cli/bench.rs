//! `etalon bench`: how fast the simd tier is, against the peak measured in the same run.

mod attention;
mod linear_attention;
mod masks;
mod tune;

use super::table::table;
use super::{Failure, Outcome, options, say};
use etalon_conformance::generate::Stream;
use etalon_conformance::vectors::Draft;
use etalon_problem::{
    Algorithm, Attention, AttentionLse, BiasExtents, Blocking, Decay, Dtype, Error, Extents, Pass,
    Scores,
};
use etalon_simd::{Element, Mode, Options, probe};
use half::{bf16, f16};
use masks::{Named, mask};
use ndarray::{Array, ShapeBuilder};
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tune::Best;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Algorithms; all if absent.
    #[arg(long, value_name = "A,…", value_delimiter = ',')]
    algorithm: Vec<Algorithm>,
    /// The level of the simd tier; the best of this machine if absent.
    #[arg(long, value_name = "L")]
    level: Option<String>,
    /// The storage type: f32, bf16, f16.
    #[arg(long, default_value = "f32")]
    dtype: Dtype,
    /// Queries and keys.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [512, 2048])]
    length: Vec<usize>,
    /// Elements of a query, a key and a value.
    #[arg(long, value_name = "D,…", value_delimiter = ',', default_values_t = [64, 128])]
    dim: Vec<usize>,
    /// Passes; all if absent.
    #[arg(long, value_name = "P,…", value_delimiter = ',')]
    pass: Vec<Pass>,
    /// Masks: full; causal; window=256, causal and reaching back so many keys; segments=512, causal
    /// within segments of so many; array=512, the same as an array of pairs.
    #[arg(long, value_name = "M,…", value_delimiter = ',', default_values = ["full", "causal"], value_parser = mask)]
    mask: Vec<Named>,
    /// Batch elements.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Query heads.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Key heads; as many as there are query heads if absent.
    #[arg(long, value_name = "H")]
    key_heads: Option<usize>,
    /// Tile sizes, as in `96x128`: queries × keys; what was measured to be best if absent.
    #[arg(long, value_name = "QxK", value_parser = options::blocking)]
    blocking: Option<Blocking>,
    /// The modes of a backward pass: auto, separate, fused, or, of attention_lse alone, gradient.
    #[arg(long, value_name = "M,…", value_delimiter = ',', default_value = "auto", value_parser = mode)]
    mode: Vec<Mode>,
    /// How linear_attention decays: none, per_head, per_token.
    #[arg(long, value_name = "D,…", value_delimiter = ',', default_value = "none", value_parser = decay)]
    decay: Vec<Decay>,
    /// c of S = c·tanh(s/c).
    #[arg(long, value_name = "C")]
    softcap: Option<f64>,
    /// Adds a bias for each head, and with it dbias.
    #[arg(long)]
    bias: bool,
    /// Searches tile sizes for every pass and prints the best, at many times the time.
    #[arg(long, conflicts_with = "blocking")]
    tune: bool,
    /// Threads; as many as there are cores if absent.
    #[arg(long)]
    threads: Option<usize>,
    /// A time is the median of as many runs as fit into this many seconds, but at least three.
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    seconds: f64,
    /// Also writes the figures as JSON.
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
}

fn decay(name: &str) -> Result<Decay, String> {
    match name {
        "none" => Ok(Decay::None),
        "per_head" => Ok(Decay::PerHead),
        "per_token" => Ok(Decay::PerToken),
        _ => Err("one of none, per_head, per_token".to_string()),
    }
}

fn mode(name: &str) -> Result<Mode, String> {
    match name {
        "auto" => Ok(Mode::Auto),
        "separate" => Ok(Mode::Separate),
        "fused" => Ok(Mode::FusedPartials),
        "gradient" => Ok(Mode::ForwardGradient),
        _ => Err("one of auto, separate, fused, gradient".to_string()),
    }
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Auto => "auto",
        Mode::Separate => "separate",
        Mode::FusedPartials => "fused",
        Mode::ForwardGradient => "gradient",
    }
}

/// One pass of one problem, timed.
#[derive(Debug, Serialize)]
struct Figure {
    algorithm: &'static str,
    pass: &'static str,
    mode: &'static str,
    mask: String,
    batch: usize,
    length: usize,
    dim: usize,
    heads: usize,
    key_heads: usize,
    /// Of the pass: two for each multiplication and addition of the products of visible pairs.
    flops: u64,
    runs: usize,
    median_ns: u128,
    gflops: f64,
    /// Of the peak.
    share: f64,
    /// GB/s of the states, of a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    gigabytes: Option<Bandwidth>,
    /// The best of the tile sizes that were searched.
    #[serde(skip_serializing_if = "Option::is_none")]
    best: Option<Best>,
}

/// How fast a step moves the states, and how fast this machine can.
#[derive(Debug, Clone, Copy, Serialize)]
struct Bandwidth {
    /// GB/s of the states, read and written.
    states: f64,
    /// GB/s of memory of their size that is read and written and nothing else, in the same run.
    memory: f64,
}

#[derive(Debug, Serialize)]
struct Figures<'a> {
    etalon: &'static str,
    level: &'a str,
    dtype: &'a str,
    threads: usize,
    /// GFLOP/s of fused multiply-adds on registers alone, in the same run.
    peak_gflops: f64,
    figures: Vec<Figure>,
}

pub fn run(arguments: &Arguments) -> Outcome {
    let level = options::level(arguments.level.as_deref())?;
    if arguments.dtype == Dtype::F64 {
        return Err(Error::value("dtype", "one of f32, bf16, f16", Dtype::F64).into());
    }
    let pool = options::pool(arguments.threads)?;
    let draft = arguments.json.as_deref().map(Draft::new).transpose()?;
    let threads = pool.current_num_threads();
    let peak = probe::fma_gflops(level, threads);
    let options = Options { level, blocking: arguments.blocking, ..Options::default() };
    let bench = Bench { arguments, options, peak };
    let figures = pool.install(|| match arguments.dtype {
        Dtype::F32 => bench.all::<f32>(),
        Dtype::Bf16 => bench.all::<bf16>(),
        _ => bench.all::<f16>(),
    })?;
    let figures = Figures {
        etalon: env!("CARGO_PKG_VERSION"),
        level: level.name(),
        dtype: arguments.dtype.name(),
        threads,
        peak_gflops: peak,
        figures,
    };
    print(&figures);
    if let Some(draft) = draft {
        draft.finish(serde_json::to_string_pretty(&figures)?.as_bytes())?;
    }
    Ok(true)
}

struct Bench<'a> {
    arguments: &'a Arguments,
    options: Options,
    peak: f64,
}

impl Bench<'_> {
    fn all<T: Element>(&self) -> Result<Vec<Figure>, Failure> {
        let Arguments { algorithm, length, dim, mask, batch, heads, key_heads, .. } =
            self.arguments;
        let wanted = |name| algorithm.is_empty() || algorithm.contains(&name);
        let mut figures = Vec::new();
        for &length in length {
            for &dim in dim {
                for Named { name, pattern } in mask {
                    let extents = Extents {
                        batch: *batch,
                        query_heads: *heads,
                        key_heads: key_heads.unwrap_or(*heads),
                        queries: length,
                        keys: length,
                        dim,
                    };
                    let bias =
                        self.arguments.bias.then_some(BiasExtents { batch: 1, heads: *heads });
                    let softcap = self.arguments.softcap;
                    let mask = pattern.mask(*batch, length);
                    let scores = Scores { softcap, bias, mask, ..Scores::new(extents) };
                    if wanted(Algorithm::Attention) {
                        let problem =
                            Attention { scores: scores.clone(), ..Attention::new(extents) };
                        self.attention::<T>(&problem, name, &mut figures)?;
                    }
                    if wanted(Algorithm::AttentionLse) {
                        self.attention_lse::<T>(&AttentionLse { scores }, name, &mut figures)?;
                    }
                }
                if wanted(Algorithm::LinearAttention) {
                    for &decay in &self.arguments.decay {
                        self.linear_attention::<T>(length, dim, decay, &mut figures)?;
                    }
                }
            }
        }
        Ok(figures)
    }

    fn wants(&self, pass: Pass) -> bool {
        self.arguments.pass.is_empty() || self.arguments.pass.contains(&pass)
    }

    /// Times a pass of so many flops, if it is wanted; a backward pass in every mode that the
    /// algorithm has.
    fn add(
        &self,
        figures: &mut Vec<Figure>,
        subject: &Subject,
        (pass, flops): (Pass, u64),
        run: &mut Run<'_>,
    ) -> Result<(), Failure> {
        if !self.wants(pass) {
            return Ok(());
        }
        let moded = pass == Pass::Backward && subject.algorithm != Algorithm::LinearAttention;
        let modes = if moded { &self.arguments.mode[..] } else { &[Mode::Auto] };
        for &mode in modes {
            if mode == Mode::ForwardGradient && subject.algorithm != Algorithm::AttentionLse {
                continue;
            }
            let options = Options { mode, ..self.options };
            let time = self.time(&mut || run(&options))?;
            let candidates = tune::candidates(subject.algorithm, pass);
            let best = match self.arguments.tune && !candidates.is_empty() {
                true => Some(tune::best(&candidates, &options, self.arguments.seconds, run)?),
                false => None,
            };
            figures.push(Figure { best, ..self.figure(subject, pass, mode, flops, time) });
        }
        Ok(())
    }

    /// The median time of a pass, and the number of runs. The first run, which warms the caches,
    /// does not count.
    fn time(&self, run: &mut dyn FnMut() -> Result<(), Error>) -> Result<(Duration, usize), Error> {
        run()?;
        let begin = Instant::now();
        let mut times = Vec::new();
        while times.len() < 3 || begin.elapsed().as_secs_f64() < self.arguments.seconds {
            let start = Instant::now();
            run()?;
            times.push(start.elapsed());
        }
        times.sort();
        Ok((times[times.len() / 2], times.len()))
    }

    fn figure(
        &self,
        subject: &Subject,
        pass: Pass,
        mode: Mode,
        flops: u64,
        (median, runs): (Duration, usize),
    ) -> Figure {
        let gflops = flops as f64 / median.as_nanos().max(1) as f64;
        Figure {
            algorithm: subject.algorithm.name(),
            pass: pass.name(),
            mode: mode_name(mode),
            mask: subject.what.clone(),
            batch: subject.batch,
            length: subject.length,
            dim: subject.dim,
            heads: subject.heads,
            key_heads: subject.key_heads,
            flops,
            runs,
            median_ns: median.as_nanos(),
            gflops,
            share: gflops / self.peak,
            gigabytes: None,
            best: None,
        }
    }
}

/// What is timed.
struct Subject {
    algorithm: Algorithm,
    /// The mask, or the decay.
    what: String,
    batch: usize,
    heads: usize,
    key_heads: usize,
    length: usize,
    dim: usize,
}

/// A pass with other options.
type Run<'a> = dyn FnMut(&Options) -> Result<(), Error> + 'a;

/// An operand of bell-shaped numbers.
fn made<T: Element, S: ShapeBuilder>(name: &str, shape: S) -> Array<T, S::Dim> {
    let stream = Stream::new(0, name);
    let mut next = 0;
    Array::from_shape_simple_fn(shape, || {
        next += 1;
        T::from_f32(stream.normal(next) as f32)
    })
}

fn print(figures: &Figures<'_>) {
    say(&format!(
        "simd/{}, {}, {} thread(s); peak of fused multiply-adds in this run: {:.1} GFLOP/s",
        figures.level, figures.dtype, figures.threads, figures.peak_gflops
    ));
    let header = [
        "algorithm",
        "pass",
        "mode",
        "mask",
        "length",
        "dim",
        "Gflop",
        "ms",
        "runs",
        "GFLOP/s",
        "of peak",
    ];
    let mut table = table(&header);
    for figure in &figures.figures {
        table.add_row([
            figure.algorithm.to_string(),
            figure.pass.to_string(),
            if figure.mode == "auto" { String::new() } else { figure.mode.to_string() },
            figure.mask.clone(),
            figure.length.to_string(),
            figure.dim.to_string(),
            format!("{:.3}", figure.flops as f64 * 1e-9),
            format!("{:.3}", figure.median_ns as f64 * 1e-6),
            figure.runs.to_string(),
            format!("{:.1}", figure.gflops),
            format!("{:.0} %", 100.0 * figure.share),
        ]);
    }
    say(&table.to_string());
    let first = figures.figures.first();
    let [batch, heads, key_heads] =
        first.map_or([0; 3], |figure| [figure.batch, figure.heads, figure.key_heads]);
    say(&format!(
        "{heads} heads ({key_heads} of keys), {batch} batch element(s); a time is the median of its \
         runs."
    ));
    say(
        "Flops: two for each term of the products of visible pairs, of which a forward pass has 2, a \
         backward pass 5, a double backward pass 19, a jvp 5 (attention_lse: 1, 3, 13 and 3); of \
         linear_attention 4 D E + C (D + E) for each token, C the chunk, 2.5 times that \
         backward, and 36 D E + C (8 D + 7 E) in a double backward pass. What is computed twice or masked away is not counted.",
    );
    for figure in &figures.figures {
        let Figure { algorithm, pass, mask, dim, .. } = figure;
        let Some(Bandwidth { states, memory }) = figure.gigabytes else { continue };
        say(&format!(
            "{algorithm} {pass}, {mask}, {dim}: {states:.1} GB/s of the states, read and written; memory of \
             their size: {memory:.1}"
        ));
    }
    for figure in &figures.figures {
        let Figure { algorithm, pass, mode, mask, length, dim, .. } = figure;
        let Some(best) = &figure.best else { continue };
        say(&format!("{algorithm} {pass} ({mode}), {mask}, {length} × {dim}: {best}"));
    }
}
