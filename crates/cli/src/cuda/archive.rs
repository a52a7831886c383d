//! `etalon cuda`: what is done beforehand for machines with a GPU.

use crate::options::{Threads, one_of};
use crate::outcome::{Failure, Outcome, say};
use crate::progress::Progress;
use crate::units;
use etalon_conformance::report::Status;
use etalon_cuda::kernels::{ArchiveWriter, Compiler, Family, Variant, every_variant};
use etalon_cuda::{Level, Settings};
use etalon_problem::{Dtype, Error, Pass};
use rayon::prelude::*;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Compiles kernels into a folder, for machines without NVRTC. Needs no GPU.
    Archive(Archive),
}

#[derive(Debug, clap::Args)]
struct Archive {
    /// Architectures of the devices: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, …
    #[arg(long, value_name = "A,…", value_delimiter = ',', value_parser = architecture, required = true)]
    arch: Vec<(i32, i32)>,
    /// The archive: a new folder, or one that kernels are added to. If absent the user's own, which every
    /// command looks into.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The folder of NVRTC, of a toolkit, or of the site-packages with the wheel nvidia-cuda-nvrtc; where
    /// the loader looks for libraries if absent.
    #[arg(long, value_name = "DIR")]
    nvrtc: Option<PathBuf>,
    /// Levels; all if absent. The portable kernels are always archived: the other levels need them.
    #[arg(long, value_name = "L,…", value_delimiter = ',', value_parser = one_of(LEVELS))]
    level: Vec<Level>,
    /// Passes; all if absent.
    #[arg(long, value_name = "P,…", value_delimiter = ',', value_parser = one_of(PASSES))]
    pass: Vec<Pass>,
    /// Storage types; all if absent.
    #[arg(long, value_name = "T,…", value_delimiter = ',', value_parser = one_of(DTYPES))]
    dtype: Vec<Dtype>,
    /// Numbers of columns of q and k, at most: one kernel serves all up to 64, 128, 256. All if absent.
    #[arg(long, value_name = "D,…", value_delimiter = ',')]
    dim: Vec<usize>,
    #[command(flatten)]
    threads: Threads,
    /// Seconds between lines of progress on stderr, where it is no terminal.
    #[arg(long, value_name = "S", default_value_t = 10)]
    progress: u64,
}

const LEVELS: [Level; 3] = [Level::Portable, Level::Sm80, Level::Sm90a];
const PASSES: [Pass; 4] = [Pass::Forward, Pass::Backward, Pass::DoubleBackward, Pass::Jvp];
const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// The compute capability of an architecture. That of `sm_90a` is the one of `sm_90`: both name the same
/// devices, and kernels are compiled for the one or the other.
fn architecture(text: &str) -> Result<(i32, i32), Error> {
    let digits = text.strip_prefix("sm_").map(|name| name.strip_suffix('a').unwrap_or(name));
    let number = digits.and_then(|digits| digits.parse::<u16>().ok()).map(i32::from);
    let capability = number.map(|number| (number / 10, number % 10));
    capability.filter(|&capability| capability >= (8, 0)).ok_or_else(|| {
        Error::value("arch", "an architecture from sm_80 on, as in sm_80 or sm_90a", text)
    })
}

pub fn run(arguments: &Arguments) -> Outcome {
    match &arguments.command {
        Command::Archive(arguments) => archive(arguments),
    }
}

fn archive(arguments: &Archive) -> Outcome {
    let start = Instant::now();
    let work = arguments.work();
    if work.is_empty() {
        return Err(Failure("no kernel is of these storage types, widths and levels".into()));
    }
    let no_home = || Failure("there is no home folder: name one with --out".into());
    let folder = arguments.out.clone().or_else(Settings::user_archive).ok_or_else(no_home)?;
    let compiler = Compiler::find(arguments.nvrtc.as_deref())?;
    let writer = ArchiveWriter::new(&folder, compiler)?;
    let progress = Progress::new(Duration::from_secs(arguments.progress));
    let done = AtomicUsize::new(0);
    let add = |(variant, architecture): &(Variant, String)| {
        let new = writer.add(variant, architecture)?;
        let what = format!("{} for {architecture}", variant.describe());
        progress.report(done.fetch_add(1, Ordering::Relaxed) + 1, work.len(), &what);
        Ok(new)
    };
    let compiled: Result<usize, Error> =
        arguments.threads.pool()?.install(|| work.par_iter().map(add).sum());
    progress.finish();
    let (compiled, all) = (compiled?, writer.finish()?);
    say(&format!(
        "{compiled} of {} kernels compiled by NVRTC {}, in {}; {} has {all}",
        work.iter().map(|(variant, _)| variant.kernels().len()).sum::<usize>(),
        compiler.version(),
        units::time(start.elapsed().as_secs_f64()),
        folder.display(),
    ))?;
    Ok(Status::Passed)
}

impl Archive {
    /// The variants that were asked for, with the architecture that each is compiled for.
    fn work(&self) -> Vec<(Variant, String)> {
        let own = every_variant().into_iter().filter(|variant| self.wants(variant));
        let compilations = own.flat_map(|variant| {
            let of = |&device: &(i32, i32)| variant.family.architecture_on(device);
            let fits = |architecture: &String| variant.fits(architecture);
            let architectures: Vec<String> = self.arch.iter().filter_map(of).filter(fits).collect();
            architectures.into_iter().map(move |architecture| (variant.clone(), architecture))
        });
        let mut work: Vec<_> = compilations.collect();
        work.sort();
        work.dedup();
        work
    }

    fn wants(&self, variant: &Variant) -> bool {
        let second = |pass: &Pass| matches!(pass, Pass::DoubleBackward | Pass::Jvp);
        let by_family = match variant.family {
            Family::AttentionPortable
            | Family::LazyPortable
            | Family::LinearPortable
            | Family::CrossEntropyPortable
            | Family::CrossEntropyShards
            | Family::Move
            | Family::Tables
            | Family::PeakFfma => true,
            Family::AttentionPortableSecondOrder
            | Family::AttentionSm80SecondOrder
            | Family::AttentionSm90aSecondOrder
            | Family::LinearPortableSecondOrder => {
                self.pass.is_empty() || self.pass.iter().any(second)
            }
            Family::AttentionFallback => {
                self.level.is_empty() || self.level.iter().any(|x| *x != Level::Portable)
            }
            Family::AttentionSm80
            | Family::AttentionSm80Fused
            | Family::AttentionSm80Wide
            | Family::AttentionSm80F32
            | Family::LazySm80
            | Family::LinearSm80
            | Family::PeakMma => self.level.is_empty() || self.level.contains(&Level::Sm80),
            Family::AttentionSm90aForward
            | Family::AttentionSm90aBackward
            | Family::AttentionSm90aWide
            | Family::LazySm90aForward
            | Family::LazySm90aBackward
            | Family::CrossEntropySm90a
            | Family::LinearSm90a
            | Family::PeakWgmma => self.level.is_empty() || self.level.contains(&Level::Sm90a),
        };
        let of_type = |dtype: Dtype| self.dtype.is_empty() || self.dtype.contains(&dtype);
        let serves = |&dim: &usize| variant.serves(dim);
        by_family
            && variant.storage().is_none_or(of_type)
            && (self.dim.is_empty() || self.dim.iter().any(serves))
    }
}
