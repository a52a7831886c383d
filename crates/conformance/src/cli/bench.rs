//! `etalon bench`: how fast the simd tier is, against the peak measured in the same run.

use super::table::table;
use super::{Failure, Outcome, options, say};
use etalon_conformance::generate::Stream;
use etalon_conformance::vectors::Draft;
use etalon_problem::{
    Algorithm, Attention, AttentionLse, Dtype, Error, Extents, Mask, Pass, Scores,
};
use etalon_simd::{Element, Level, Options, attention, attention_lse, probe};
use half::{bf16, f16};
use ndarray::{Array, ShapeBuilder};
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

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
    /// Query heads, each with a key head of its own.
    #[arg(long, default_value_t = 4)]
    heads: usize,
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

/// One pass of one problem, timed.
#[derive(Debug, Serialize)]
struct Figure {
    algorithm: &'static str,
    pass: &'static str,
    mask: &'static str,
    length: usize,
    dim: usize,
    heads: usize,
    /// Of the pass: two for each multiplication and addition of the products of visible pairs.
    flops: u64,
    runs: usize,
    median_ns: u128,
    gflops: f64,
    /// Of the peak.
    share: f64,
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
    let level = level(arguments.level.as_deref())?;
    if arguments.dtype == Dtype::F64 {
        return Err(Error::value("dtype", "one of f32, bf16, f16", Dtype::F64).into());
    }
    let pool = options::pool(arguments.threads)?;
    let draft = arguments.json.as_deref().map(Draft::new).transpose()?;
    let threads = pool.current_num_threads();
    let peak = probe::fma_gflops(level, threads);
    let bench = Bench { arguments, options: Options { level, ..Options::default() }, peak };
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

fn level(name: Option<&str>) -> Result<Level, Failure> {
    let Some(name) = name else { return Ok(Level::best()) };
    Level::by_name(name).ok_or_else(|| {
        let names: Vec<&str> = Level::available().iter().map(|level| level.name()).collect();
        Error::value("level", format!("one of {}", names.join(", ")), name).into()
    })
}

struct Bench<'a> {
    arguments: &'a Arguments,
    options: Options,
    peak: f64,
}

impl Bench<'_> {
    fn all<T: Element>(&self) -> Result<Vec<Figure>, Failure> {
        let Arguments { algorithm, length, dim, heads, .. } = self.arguments;
        let wanted = |name| algorithm.is_empty() || algorithm.contains(&name);
        let mut figures = Vec::new();
        for &length in length {
            for &dim in dim {
                for (mask_name, mask) in [("full", Mask::Full), ("causal", Mask::causal())] {
                    let extents = Extents {
                        batch: 1,
                        query_heads: *heads,
                        key_heads: *heads,
                        queries: length,
                        keys: length,
                        dim,
                    };
                    if wanted(Algorithm::Attention) {
                        let problem = Attention::new(extents).mask(mask.clone());
                        figures.extend(self.attention::<T>(&problem, mask_name)?);
                    }
                    if wanted(Algorithm::AttentionLse) {
                        let problem = AttentionLse::new(extents).mask(mask);
                        figures.extend(self.attention_lse::<T>(&problem, mask_name)?);
                    }
                }
            }
        }
        Ok(figures)
    }

    fn attention<T: Element>(
        &self,
        problem: &Attention,
        mask: &'static str,
    ) -> Result<[Figure; 2], Failure> {
        problem.check()?;
        let scores = &problem.scores;
        let [q, k] =
            [("q", scores.q_shape()), ("k", scores.k_shape())].map(|(name, s)| made(name, s));
        let v = made::<T, _>("v", problem.v_shape());
        let dout = made::<T, _>("dout", problem.o_shape());
        let inputs = attention::Inputs::new(q.view(), k.view(), v.view());
        let cotangents = attention::Cotangents::new(dout.view());
        let out = attention::forward(problem, &inputs, &self.options)?;
        let forward =
            self.time(|| attention::forward(problem, &inputs, &self.options).map(drop))?;
        let backward = self.time(|| {
            attention::backward(problem, &inputs, &out, &cotangents, &self.options).map(drop)
        })?;
        // Forward q·k and p·v; backward q·k, dout·v, and the three products for dq, dk and dv.
        Ok([
            self.figure(Algorithm::Attention, Pass::Forward, scores, mask, 2, forward),
            self.figure(Algorithm::Attention, Pass::Backward, scores, mask, 5, backward),
        ])
    }

    fn attention_lse<T: Element>(
        &self,
        problem: &AttentionLse,
        mask: &'static str,
    ) -> Result<[Figure; 2], Failure> {
        problem.check()?;
        let scores = &problem.scores;
        let [q, k] = [("q", scores.q_shape()), ("k", scores.k_shape())]
            .map(|(name, s)| made::<T, _>(name, s));
        let dlse = made::<f32, _>("dlse", scores.row_shape());
        let inputs = attention_lse::Inputs::new(q.view(), k.view());
        let cotangents = attention_lse::Cotangents { dlse: dlse.view() };
        let out = attention_lse::forward(problem, &inputs, &self.options)?;
        let forward =
            self.time(|| attention_lse::forward(problem, &inputs, &self.options).map(drop))?;
        let backward = self.time(|| {
            attention_lse::backward(problem, &inputs, &out, &cotangents, &self.options).map(drop)
        })?;
        // Forward q·k; backward q·k and the products for dq and dk.
        Ok([
            self.figure(Algorithm::AttentionLse, Pass::Forward, scores, mask, 1, forward),
            self.figure(Algorithm::AttentionLse, Pass::Backward, scores, mask, 3, backward),
        ])
    }

    /// The median time of a pass, and the number of runs. The first run, which warms the caches,
    /// does not count.
    fn time(&self, mut run: impl FnMut() -> Result<(), Error>) -> Result<(Duration, usize), Error> {
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
        algorithm: Algorithm,
        pass: Pass,
        scores: &Scores,
        mask: &'static str,
        products: u64,
        (median, runs): (Duration, usize),
    ) -> Figure {
        let e = &scores.extents;
        let flops = 2 * products * scores.visible_pairs() * e.dim as u64;
        let gflops = flops as f64 / median.as_nanos().max(1) as f64;
        Figure {
            algorithm: algorithm.name(),
            pass: pass.name(),
            mask,
            length: e.queries,
            dim: e.dim,
            heads: e.query_heads,
            flops,
            runs,
            median_ns: median.as_nanos(),
            gflops,
            share: gflops / self.peak,
        }
    }
}

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
    let header =
        ["algorithm", "pass", "mask", "length", "dim", "Gflop", "ms", "runs", "GFLOP/s", "of peak"];
    let mut table = table(&header);
    for figure in &figures.figures {
        table.add_row([
            figure.algorithm.to_string(),
            figure.pass.to_string(),
            figure.mask.to_string(),
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
    let heads = figures.figures.first().map_or(0, |figure| figure.heads);
    say(&format!("{heads} heads, one batch element; a time is the median of its runs."));
    say("Flops: two for each term of the products of visible pairs, what is computed twice or \
         masked away not counted.");
}
