//! Times causal attention by faer's products, as a user of it writes it in Rust, and prints the result as JSON.
//!
//! ```sh
//! faer-attention [--heads H] [--length N] [--dim D] [--threads T] [--seconds S]
//! ```
//!
//! One run is the forward pass in f32, batch 1, N queries and N keys. A task is a head and a block of queries: the
//! product of its queries with the keys that they see, the softmax of its rows, the product with v. Matrices of scores
//! are allocated before the clock starts. As in `etalon bench`, the first run does not count, and the time is the
//! median of as many runs as fit into S seconds, but of three at least.
//!
//! Before it times anything, the program compares a short problem of the same dim with a plain evaluation in f64, and
//! exits with status 1 if they differ.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Queries of a task: of 16 to 512, 128 was the fastest for 2048 × 64 and 2048 × 128.
const BLOCK: usize = 128;

fn main() {
    let arguments = Arguments::parse().unwrap_or_else(|error| stop(2, &error));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(arguments.threads).build();
    let pool = pool.unwrap_or_else(|error| stop(1, &error.to_string()));
    pool.install(|| measure(&arguments)).unwrap_or_else(|error| stop(1, &error));
}

fn stop(status: i32, message: &str) -> ! {
    eprintln!("{message}");
    std::process::exit(status)
}

struct Arguments {
    heads: usize,
    length: usize,
    dim: usize,
    threads: usize,
    seconds: f64,
}

impl Arguments {
    fn parse() -> Result<Self, String> {
        let mut given = HashMap::new();
        let mut words = std::env::args().skip(1);
        while let Some(name) = words.next() {
            let value = words.next().ok_or_else(|| format!("{name} lacks a value, or is unknown"))?;
            given.insert(name, value);
        }
        let mut take = |name: &str, default: usize| match given.remove(name) {
            None => Ok(default),
            Some(text) => match text.parse() {
                Ok(number @ 1..) => Ok(number),
                _ => Err(format!("{name} must be a positive integer, not {text:?}")),
            },
        };
        let (heads, length) = (take("--heads", 8)?, take("--length", 2048)?);
        let (dim, threads) = (take("--dim", 64)?, take("--threads", 1)?);
        let seconds = given.remove("--seconds").unwrap_or_else(|| "1".to_owned());
        let seconds = match seconds.parse() {
            Ok(number) if (0.0..1e6).contains(&number) => number,
            _ => return Err(format!("--seconds must be a number from 0 to 1e6, not {seconds:?}")),
        };
        match given.keys().next() {
            Some(name) => Err(format!("{name} is unknown")),
            None => Ok(Arguments { heads, length, dim, threads, seconds }),
        }
    }
}

/// q, k, v and o, each `[heads, length, dim]` by rows.
struct Attention {
    length: usize,
    dim: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    /// A matrix of scores for each task.
    scores: Vec<Vec<f32>>,
}

impl Attention {
    fn new(heads: usize, length: usize, dim: usize) -> Self {
        let mut random = rand::rngs::StdRng::seed_from_u64(1);
        let mut normal = || {
            let numbers = StandardNormal.sample_iter(&mut random).take(heads * length * dim);
            numbers.collect::<Vec<f32>>()
        };
        let (q, k, v) = (normal(), normal(), normal());
        let tasks = heads * length.div_ceil(BLOCK);
        let scores = vec![vec![0.0; BLOCK.min(length) * length]; tasks];
        Attention { length, dim, o: vec![0.0; q.len()], q, k, v, scores }
    }

    fn run(&mut self) {
        let (length, dim) = (self.length, self.dim);
        let (q, k, v) = (&self.q, &self.k, &self.v);
        let o = self.o.chunks_mut(length * dim).enumerate();
        let blocks = o.flat_map(|(head, o)| {
            let o = o.chunks_mut(BLOCK * dim).enumerate();
            o.map(move |(block, o)| (head, block * BLOCK, o))
        });
        let tasks: Vec<_> = blocks.zip(&mut self.scores).collect();
        tasks.into_par_iter().for_each(|((head, first, o), scores)| {
            let at = head * length * dim;
            let rows = o.len() / dim;
            let keys = first + rows;
            let q = &q[at + first * dim..][..rows * dim];
            let seen = at..at + keys * dim;
            block(q, &k[seen.clone()], &v[seen], dim, first, &mut scores[..rows * keys], o);
        });
    }

    /// The largest absolute difference between o and the definition of causal attention in f64.
    fn max_error(&self) -> f64 {
        let rows = self.o.chunks_exact(self.dim).enumerate();
        let errors = rows.flat_map(|(row, found)| {
            let expected = self.defined_row(row);
            found.iter().zip(expected).map(|(&x, y)| (f64::from(x) - y).abs()).collect::<Vec<_>>()
        });
        errors.fold(0.0, |worst, x| if x <= worst { worst } else { x }) // NaN stays
    }

    fn defined_row(&self, row: usize) -> Vec<f64> {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let rows = |x: &[f32]| {
            let head = row / self.length * self.length;
            (head..=row).map(|j| wide(&x[j * self.dim..][..self.dim])).collect::<Vec<_>>()
        };
        let (q, k, v) = (wide(&self.q[row * self.dim..][..self.dim]), rows(&self.k), rows(&self.v));
        let scale = (self.dim as f64).sqrt();
        let dot = |k: &Vec<f64>| k.iter().zip(&q).map(|(k, q)| k * q).sum::<f64>() / scale;
        let scores: Vec<f64> = k.iter().map(dot).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let p: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = p.iter().sum();
        let mut o = vec![0.0; self.dim];
        for (p, v) in p.iter().zip(v) {
            o.iter_mut().zip(v).for_each(|(o, v)| *o += p / sum * v);
        }
        o
    }
}

/// Some queries, the first of which has the number `first`, and the keys that the last of them sees.
fn block(q: &[f32], k: &[f32], v: &[f32], dim: usize, first: usize, s: &mut [f32], o: &mut [f32]) {
    let (rows, keys) = (q.len() / dim, k.len() / dim);
    let q = MatRef::from_row_major_slice(q, rows, dim);
    let k = MatRef::from_row_major_slice(k, keys, dim);
    let v = MatRef::from_row_major_slice(v, keys, dim);
    let scale = 1.0 / (dim as f32).sqrt();
    let scores = MatMut::from_row_major_slice_mut(s, rows, keys);
    matmul(scores, Accum::Replace, q, k.transpose(), scale, Par::Seq);
    for (i, row) in s.chunks_exact_mut(keys).enumerate() {
        softmax(row, first + i + 1);
    }
    let scores = MatRef::from_row_major_slice(s, rows, keys);
    let o = MatMut::from_row_major_slice_mut(o, rows, dim);
    matmul(o, Accum::Replace, scores, v, 1.0, Par::Seq);
}

/// The softmax of a row whose first keys are seen; 0 for the others.
fn softmax(row: &mut [f32], seen: usize) {
    let (seen, hidden) = row.split_at_mut(seen);
    hidden.fill(0.0);
    let max = seen.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    seen.iter_mut().for_each(|s| *s = (*s - max).exp());
    let sum: f32 = seen.iter().sum();
    seen.iter_mut().for_each(|p| *p /= sum);
}

/// Two blocks of queries, the second of which is not full: the code that is timed, with its edges.
fn checked_error(dim: usize) -> Result<f64, String> {
    let mut small = Attention::new(2, BLOCK + 32, dim);
    small.run();
    let error = small.max_error();
    // Rounding in f32 stays below 1e-5 here; a wrong mask or scale changes elements by more than 0.1.
    if error <= 1e-4 { Ok(error) } else { Err(format!("the result is not causal attention: it is off by {error:e}")) }
}

/// The instruction set that faer's products choose: AVX-512 wants a nightly compiler.
fn level() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
        return "avx2";
    }
    if cfg!(target_arch = "aarch64") { "neon" } else { "other" }
}

fn measure(arguments: &Arguments) -> Result<(), String> {
    let error = checked_error(arguments.dim)?;
    let mut attention = Attention::new(arguments.heads, arguments.length, arguments.dim);
    attention.run();
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 3 || begin.elapsed() < Duration::from_secs_f64(arguments.seconds) {
        let start = Instant::now();
        attention.run();
        times.push(start.elapsed().as_nanos() as u64);
    }
    times.sort_unstable();
    let made = serde_json::json!({
        "version": "0.24.4",
        "level": level(),
        "dtype": "f32",
        "mask": "causal",
        "heads": arguments.heads,
        "length": arguments.length,
        "dim": arguments.dim,
        "threads": arguments.threads,
        "checked_error": error,
        "runs": times.len(),
        "median_ns": times[times.len() / 2],
    });
    println!("{made:#}");
    Ok(())
}
