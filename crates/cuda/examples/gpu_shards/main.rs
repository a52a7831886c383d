//! Linear cross-entropy with its classes in shards, one for each GPU of the machine: the results are compared with
//! those of one GPU, and the times with its.
//!
//! `cargo run --release -p etalon-cuda --example gpu_shards` has a thread for each GPU. It computes the partials of
//! its classes, gets those of all over NCCL, finishes the loss, and computes the gradients of its rows of w; of dh
//! every rank adds up the parts of some tokens and sends them to all. First a small problem in f32, of uneven shards,
//! must have the bits of one GPU and lie near f64. Then a large one in bf16 is timed: T 8192, D 2304, V 256,000.
//!
//! `--ranks N` for other than all GPUs: more ranks than GPUs share them, and copy in place of NCCL, as they do with
//! `--copies` or where NCCL fails; `--tokens --dim --vocab` for another large problem; `--grain TILES`: shards begin
//! at multiples of so many tiles of 256 classes, with 256 of them at quarters of the large problem's tree;
//! `--rounds N`; `--small`: the small problem alone. The exit status is not 0 if a bit differs that should not, or a
//! number is far off.

mod exchange;
mod memory;
mod ranks;
mod results;
mod tensors;

use cudarc::driver::CudaContext;
use etalon_cuda::linear_cross_entropy::shard::{Dh, TILE};
use etalon_cuda::{Level, Options, Precision, Settings, Workspace, probe};
use etalon_problem::{Dtype, LinearCrossEntropy, TokenOutputs};
use exchange::{Exchange, Outcome, by_copies, by_nccl};
use memory::Memory;
use ranks::{Alone, Rank, Work};
use results::{Results, distance, numbers};
use std::ops::Range;
use std::process::ExitCode;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};
use tensors::Host;

/// The arguments of the command line.
struct Arguments {
    ranks: usize,
    tokens: usize,
    dim: usize,
    vocab: usize,
    grain: Option<usize>,
    rounds: usize,
    copies: bool,
    small: bool,
}

impl Arguments {
    fn read(gpus: usize) -> Outcome<Arguments> {
        let mut all = Arguments {
            ranks: gpus,
            tokens: 8192,
            dim: 2304,
            vocab: 256_000,
            grain: None,
            rounds: 20,
            copies: false,
            small: false,
        };
        let mut list = std::env::args().skip(1);
        while let Some(name) = list.next() {
            let mut number = || -> Outcome<usize> {
                let text = list.next().ok_or_else(|| format!("{name} needs a number"))?;
                let number = text.parse().ok().filter(|&x| x > 0);
                Ok(number.ok_or_else(|| format!("{name} needs a number above 0, not {text}"))?)
            };
            match name.as_str() {
                "--ranks" => all.ranks = number()?,
                "--tokens" => all.tokens = number()?,
                "--dim" => all.dim = number()?,
                "--vocab" => all.vocab = number()?,
                "--grain" => all.grain = Some(number()?),
                "--rounds" => all.rounds = number()?,
                "--copies" => all.copies = true,
                "--small" => all.small = true,
                _ => return Err(format!("unknown argument {name}").into()),
            }
        }
        Ok(all)
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<bool> {
    let gpus = match probe() {
        Ok(gpus) => gpus,
        Err(absent) => {
            println!("skipped: {absent}");
            return Ok(true);
        }
    };
    let arguments = Arguments::read(gpus)?;
    let workspace = Workspace::with(Settings::user());
    for gpu in 0..gpus.min(arguments.ranks) {
        println!("GPU {gpu}: {}", workspace.describe(gpu)?);
    }
    let machine = Machine { workspace: &workspace, gpus, arguments: &arguments };
    let small = machine.small()?;
    if arguments.small {
        return Ok(small);
    }
    if workspace.capability(0)? != (9, 0) {
        println!("the large problem is for compute capability 9.0");
        return Ok(small);
    }
    Ok(machine.large()? && small)
}

/// The GPUs, and what they share.
struct Machine<'a> {
    workspace: &'a Workspace,
    gpus: usize,
    arguments: &'a Arguments,
}

/// Times and results of a problem.
struct Measured {
    /// Of one GPU, of all ranks, and of these without what they send to each other.
    times: Times,
    /// Of one GPU, if it was asked for.
    alone: Option<Results>,
    /// Of every rank.
    results: Vec<Results>,
}

/// Three times of the forward pass and of both passes.
type Times = [[Duration; 2]; 3];

impl Machine<'_> {
    fn memory(&self, gpu: usize) -> Outcome<Memory> {
        let context = CudaContext::new(gpu)?;
        // SAFETY: no slice of this context is used on another stream than its own.
        unsafe { context.disable_event_tracking() };
        Ok(Memory::new(context.new_stream()?))
    }

    /// A way for the ranks to each other: NCCL if it is there, and every rank has a GPU of its own.
    fn exchanges(&self, gpus: usize) -> Vec<Exchange> {
        let ranks = self.arguments.ranks;
        if ranks <= gpus && !self.arguments.copies {
            match by_nccl(&(0..ranks).collect::<Vec<_>>()) {
                Ok(exchanges) => return exchanges,
                Err(error) => println!("no NCCL: {error}"),
            }
        }
        by_copies(ranks)
    }

    /// All ranks, each in a thread, on so many GPUs; and one GPU with all classes, if it `compares`.
    fn measure(
        &self,
        host: &Host,
        (shards, kind): (&[Range<usize>], Dh),
        options: &Options,
        (gpus, rounds, compares): (usize, usize, bool),
    ) -> Outcome<Measured> {
        let barrier = Barrier::new(shards.len());
        type Found = (Times, Option<Results>, Results);
        let rank = |number: usize, exchange: Exchange| -> Outcome<Found> {
            let options = Options { device: (number % gpus).into(), ..*options };
            let memory = || self.memory(number % gpus);
            let alone =
                (number == 0 && compares).then(|| Alone::new(self.workspace, memory()?, host, &options)).transpose()?;
            let shard = (number, shards, kind);
            let rank = Rank::new(self.workspace, memory()?, host, shard, exchange, &options)?;
            let times = times(alone.as_ref(), &rank, rounds, &barrier)?;
            Ok((times, alone.map(|x| x.results()).transpose()?, rank.results()?))
        };
        let found: Vec<Outcome<Found>> = thread::scope(|scope| {
            let threads = self.exchanges(gpus).into_iter().enumerate().map(|(number, exchange)| {
                let rank = &rank;
                scope.spawn(move || {
                    let done = rank(number, exchange);
                    // The other ranks would wait for this one for ever.
                    done.inspect_err(|error| end(number, &error.to_string()))
                })
            });
            let threads: Vec<_> = threads.collect();
            let joined = threads.into_iter().map(|x| x.join());
            joined.map(|x| x.unwrap_or_else(|_| Err("a rank panicked".into()))).collect()
        });
        let found = found.into_iter().collect::<Outcome<Vec<_>>>()?;
        // A round ends with its last rank.
        let slowest = |of: usize, at: usize| found.iter().map(|x| x.0[of][at]).max();
        let times = [0, 1, 2].map(|of| [0, 1].map(|at| slowest(of, at).unwrap_or_default()));
        let (mut alone, mut results) = (None, Vec::new());
        for (_, of_alone, own) in found {
            alone = alone.or(of_alone);
            results.push(own);
        }
        Ok(Measured { times, alone, results })
    }

    /// f32 on the portable level: every bit is that of one GPU.
    fn small(&self) -> Outcome<bool> {
        let outputs = TokenOutputs { lse: true, ..TokenOutputs::default() };
        let problem = LinearCrossEntropy::new(300, 64, 11 * TILE + 99).outputs(outputs);
        let options = Options { level: Level::Portable, ..Options::default() };
        let (tiles, ranks) = (problem.vocab.div_ceil(TILE), self.arguments.ranks);
        if ranks > tiles {
            return Err(format!("at most {tiles} ranks").into());
        }
        // Uneven, and no nodes of the tree.
        let border = |rank: usize| problem.vocab.min((rank * tiles).div_ceil(ranks) * TILE);
        let shards: Vec<_> = (0..ranks).map(|rank| border(rank)..border(rank + 1)).collect();
        println!("\nf32, portable: T 300, D 64, classes {shards:?}");
        let host = Host::new(problem, Dtype::F32, true);
        let gpus = self.gpus.min(ranks);
        let found = self.measure(&host, (&shards, Dh::Nodes), &options, (gpus, 1, true))?;
        let alone = found.alone.unwrap_or_default();
        let same = compare(&host, &shards, &alone, &found.results, 0.0);
        let mut near = true;
        for (name, distance) in host.distances(&alone) {
            println!("  {name}: {distance:.1e} of the largest from f64");
            near &= distance < 1e-5;
        }
        Ok(same && near)
    }

    /// bf16 on the level sm90a: dh has the bits of one GPU where shards are quarters of the tree or put together of
    /// them, else it is summed in another order.
    fn large(&self) -> Outcome<bool> {
        let Arguments { tokens, dim, vocab, ranks, rounds, .. } = *self.arguments;
        let outputs = TokenOutputs { lse: true, ..TokenOutputs::default() };
        let problem = LinearCrossEntropy::new(tokens, dim, vocab).outputs(outputs);
        let (level, precision) = (Level::Sm90a, Precision::Flash);
        let options = Options { level, precision, memory_budget: 768 << 20, ..Options::default() };
        let tiles = vocab.div_ceil(TILE);
        let grain = self.arguments.grain.unwrap_or((tiles / (32 * ranks)).max(1).next_power_of_two());
        let border = |rank: usize| {
            let tile = (rank * tiles + ranks * grain / 2) / (ranks * grain) * grain;
            if rank == ranks { vocab } else { vocab.min(tile * TILE) }
        };
        let shards: Vec<_> = (0..ranks).map(|rank| border(rank)..border(rank + 1)).collect();
        println!("\nbf16, sm90a: T {tokens}, D {dim}, classes {shards:?}");
        let host = Host::new(problem, Dtype::Bf16, false);
        let gpus = self.gpus.min(ranks);
        let found = self.measure(&host, (&shards, Dh::Sum), &options, (gpus, rounds, true))?;
        for (what, at) in [("forward", 0), ("forward, dh, dw", 1)] {
            let [one, all, apart] = found.times.map(|x| 1e3 * x[at].as_secs_f64());
            let times = format!("{one:.3} ms on one GPU, {all:.3} ms on {gpus}: {:.2} x", one / all);
            println!("  {what}: {times}; {apart:.3} ms without exchange");
        }
        let alone = found.alone.unwrap_or_default();
        let quarter = (tiles.next_power_of_two() / 4).max(1) * TILE;
        let exact = shards.iter().all(|classes| classes.start % quarter == 0);
        // Two roundings to bf16, of sums of 256,000 terms in f32.
        let off = if exact && ranks.is_power_of_two() { 0.0 } else { 1e-2 };
        let near = compare(&host, &shards, &alone, &found.results, off);
        if gpus == 1 {
            return Ok(near);
        }
        let again = self.measure(&host, (&shards, Dh::Sum), &options, (1, 1, false))?;
        let mut same = true;
        for (number, (x, y)) in again.results.iter().zip(&found.results).enumerate() {
            same &= x == y;
            let bits = if x == y { "the bits of" } else { "OTHER BITS than" };
            println!("  rank {number}: {bits} the same shards on one GPU");
        }
        Ok(near && same)
    }
}

/// Ends the process.
fn end(rank: usize, error: &str) {
    eprintln!("rank {rank}: {error}");
    std::process::exit(1);
}

/// The median times of rounds in which all ranks begin together; after two that count nothing. A round has every kind
/// of work once, so that all meet the same clocks.
fn times(alone: Option<&Alone>, rank: &Rank, rounds: usize, barrier: &Barrier) -> Outcome<Times> {
    let (alone, rank) = (alone.map(|x| x as &dyn Work), rank as &dyn Work);
    let work = [alone, Some(rank), Some(rank)];
    let mut all: [[Vec<Duration>; 2]; 3] = Default::default();
    for round in 0..rounds + 2 {
        for (of, at) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] {
            barrier.wait();
            let begin = Instant::now();
            if let Some(work) = work[of] {
                work.enqueue(at == 1, of == 2)?;
                work.memory().stream.synchronize()?;
            }
            all[of][at].extend((round >= 2).then(|| begin.elapsed()));
        }
    }
    Ok(all.map(|of| {
        of.map(|mut times| {
            times.sort_unstable();
            times[times.len() / 2]
        })
    }))
}

/// Says of each result whether the ranks have the bits of one GPU. dh may be as far off as `dh_off` of its largest.
fn compare(host: &Host, shards: &[Range<usize>], alone: &Results, together: &[Results], dh_off: f64) -> bool {
    let mut right = true;
    for (&name, wanted) in alone {
        let row = host.problem.dim * host.storage.bytes();
        let of = |rank: usize| match name {
            "dw" => &wanted[shards[rank].start * row..shards[rank].end * row],
            _ => &wanted[..],
        };
        let same = together.iter().enumerate().all(|(rank, own)| own[name] == of(rank));
        let equal = together.windows(2).all(|pair| name == "dw" || pair[0][name] == pair[1][name]);
        if same {
            println!("  {name}: the bits of one GPU");
        } else {
            let storage = if name == "dh" { host.storage } else { Dtype::F32 };
            let off = distance(&numbers(&together[0][name], storage), &numbers(of(0), storage));
            println!("  {name}: other bits than one GPU, {off:.1e} of the largest off");
            right &= name == "dh" && off <= dh_off;
        }
        if !equal {
            println!("  {name}: OTHER BITS on some rank");
        }
        right &= equal;
    }
    right
}
