//! Arguments that several subcommands share.

use crate::advice::did_you_mean;
use crate::memory;
use crate::outcome::Failure;
use crate::progress::Progress;
use crate::units::counted;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use etalon_conformance::declared;
use etalon_conformance::profile::Profile;
use etalon_conformance::report::Absent;
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers;
use etalon_problem::{Algorithm, Blocking, Dtype, Error};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;

/// A blocking, written `QUERIESxKEYS`.
pub fn blocking(text: &str) -> Result<Blocking, Error> {
    let wrong = || Error::value("blocking", "QUERIESxKEYS, as in 96x128", text);
    let (queries, keys) = text.split_once('x').ok_or_else(wrong)?;
    let size = |text: &str| text.parse::<usize>().map_err(|_| wrong());
    let blocking = Blocking::new(size(queries)?, size(keys)?);
    blocking.check()?;
    Ok(blocking)
}

/// A seed, decimal or hexadecimal with 0x.
pub fn seed(text: &str) -> Result<u64, Error> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| Error::value("seed", "a number below 2⁶⁴, decimal or 0x…", text))
}

/// A share, from 0 to 1.
pub fn share(text: &str) -> Result<f64, Error> {
    let share = text.parse::<f64>().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| Error::value("share", "a number from 0 to 1", text))
}

/// The option for the number of threads.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Threads {
    /// Threads; as many as there are cores if absent.
    #[arg(long)]
    threads: Option<usize>,
}

impl Threads {
    /// A pool of so many threads.
    pub fn pool(self) -> Result<ThreadPool, Failure> {
        let most = rayon::max_num_threads();
        match self.threads {
            Some(0) => return Err(Error::value("threads", "at least 1", 0).into()),
            Some(threads) if threads > most => {
                return Err(Error::value("threads", format!("at most {most}"), threads).into());
            }
            _ => {}
        }
        let pool = ThreadPoolBuilder::new().num_threads(self.threads.unwrap_or(0));
        let threads = self.threads.unwrap_or_else(|| available_parallelism().map_or(1, Into::into));
        afford_threads(threads)?;
        let failed = |error| Failure(format!("{threads} threads cannot be started: {error}"));
        pool.stack_size(STACK).build().map_err(failed)
    }
}

/// Bytes of the stack of a thread.
const STACK: usize = 2 << 20;

/// Bytes of the address space that a thread takes beside its stack: a guard, and a stack for signals.
const BESIDE: usize = 64 << 10;

/// Bytes of the address space that the C library reserves for the allocations of a thread, as long as
/// there are fewer of these arenas than eight for each core.
const ARENA: usize = 64 << 20;

/// Fails where so many threads leave nothing of a limited address space: a thread that starts and then
/// gets no stack for its signals would end the command.
fn afford_threads(threads: usize) -> Result<(), Failure> {
    let Some(space) = memory::address_space() else { return Ok(()) };
    let cores = available_parallelism().map_or(1, usize::from);
    let arenas = threads.min(8 * cores) as u128 * ARENA as u128;
    let needed = threads as u128 * (STACK + BESIDE) as u128 + arenas;
    memory::within(&format!("starting {}", counted(threads, "thread")), needed, space)
}

/// The options of a run that judges.
#[derive(Debug, clap::Args)]
pub struct Run {
    /// Algorithms; all if absent.
    #[arg(long, value_name = "A,…", value_delimiter = ',', value_parser = one_of(Algorithm::ALL))]
    algorithm: Vec<Algorithm>,
    /// The seed of the inputs, decimal or 0x…; 0 if absent, and with --candidate one that nobody knows.
    #[arg(long, value_parser = seed)]
    pub seed: Option<u64>,
    #[command(flatten)]
    threads: Threads,
    /// Seconds between lines of progress on stderr, where it is no terminal.
    #[arg(long, value_name = "S", default_value_t = 10)]
    progress: u64,
}

impl Run {
    /// The algorithms that were asked for.
    pub fn algorithms(&self) -> Vec<Algorithm> {
        let wanted = |of: &Algorithm| self.algorithm.is_empty() || self.algorithm.contains(of);
        Algorithm::ALL.into_iter().filter(wanted).collect()
    }

    /// The seed of the inputs.
    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or(0)
    }

    /// Does work that tells of its progress.
    pub fn watch<R: Send>(
        &self,
        work: impl FnOnce(&(dyn Fn(usize, usize, &str) + Sync)) -> R + Send,
    ) -> Result<R, Failure> {
        let pool = self.threads.pool()?;
        let progress = Progress::new(Duration::from_secs(self.progress));
        let result = pool.install(|| work(&|done, all, what| progress.report(done, all, what)));
        progress.finish();
        Ok(result)
    }
}

/// The claimed arithmetic.
#[derive(Debug, Clone, Copy)]
pub enum Claim {
    /// The usual promise of kernels for the type of their results.
    Usual,
    /// The strictest that holds: no claim, so it decides nothing.
    Auto,
    /// This one.
    Profile(Profile),
}

impl Claim {
    /// The profile for results of that type; `None` for the strictest that holds.
    pub fn of(self, dtype: Dtype) -> Option<Profile> {
        match self {
            Claim::Usual => Some(Profile::flash(dtype)),
            Claim::Auto => None,
            Claim::Profile(profile) => Some(profile),
        }
    }
}

/// The JSON file of a profile, if the text is the name of one.
pub fn profile_file(text: &str) -> Option<&Path> {
    text.ends_with(".json").then(|| Path::new(text))
}

/// A profile by its name or from a JSON file; `usual`; `auto`.
pub fn claim(text: &str) -> Result<Claim, Failure> {
    if let Some(file) = profile_file(text) {
        return Ok(Claim::Profile(declared::read_profile(file)?));
    }
    match text {
        "usual" => Ok(Claim::Usual),
        "auto" => Ok(Claim::Auto),
        name => Profile::by_name(name).map(Claim::Profile).map_err(|error| {
            let names = Profile::named().map(|profile| profile.name).chain(["usual", "auto"]);
            Failure(format!("{error}, or a file FILE.json{}", did_you_mean(name, names)))
        }),
    }
}

/// One of these values by its name: clap lists the names and suggests the nearest.
pub fn one_of<T: Copy + Display + Send + Sync + 'static>(
    values: impl IntoIterator<Item = T>,
) -> impl TypedValueParser<Value = T> {
    one_of_named(values.into_iter().map(|value| (value.to_string(), value)))
}

/// A level of the simd tier and its precision by their name, as amx-split2.
pub fn simd_level() -> impl TypedValueParser<Value = etalon_simd::Options> {
    one_of_named(etalon_simd::Options::of_levels().map(|options| (options.name(), options)))
}

fn one_of_named<T: Copy + Send + Sync + 'static>(
    values: impl IntoIterator<Item = (String, T)>,
) -> impl TypedValueParser<Value = T> {
    let values: Vec<(String, T)> = values.into_iter().collect();
    let names: Vec<String> = values.iter().map(|(name, _)| name.clone()).collect();
    PossibleValuesParser::new(names).try_map(move |name| {
        let found = values.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| *value).ok_or("unknown name")
    })
}

/// Reads KIND=PATH, where the kind names one of these writers of reports.
pub fn report_file<W: Copy>(text: &str, forms: &[(&str, W)]) -> Result<(W, PathBuf), Error> {
    let kinds: Vec<String> = forms.iter().map(|(kind, _)| format!("{kind}=PATH")).collect();
    let wrong = || {
        let expected = match kinds.split_last() {
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
            None => String::new(),
        };
        Error::value("report", expected, text)
    };
    let (kind, path) = text.split_once('=').ok_or_else(wrong)?;
    let (_, write) = forms.iter().find(|(known, _)| *known == kind).ok_or_else(wrong)?;
    Ok((*write, PathBuf::from(path)))
}

/// The storage types of the simd tier.
pub const SIMD_DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// The tier of that name: `reference`, `simd` (its best level), `simd/LEVEL`, `cuda`.
pub fn tier(name: &str) -> Result<Box<dyn Tier>, Failure> {
    if name == "reference" {
        return Ok(Box::new(tiers::Reference));
    }
    let (present, absent) = tiers::present();
    let names: Vec<String> = present.iter().map(|tier| tier.name()).collect();
    // The levels of a tier stand in ascending order: the last one is the best.
    let found = present.into_iter().rev().find(|tier| is_named(&tier.name(), name));
    if let Some(tier) = found {
        return Ok(tier);
    }
    if let Some(Absent { tier, reason }) = absent.into_iter().find(|x| is_named(&x.tier, name)) {
        return Err(Error::Unsupported { what: format!("tier {tier}"), reason }.into());
    }
    let expected = format!("one of reference, {}", names.join(", "));
    let error = Error::value("tier", expected, name);
    let known = ["reference", "simd", "cuda"].into_iter().chain(names.iter().map(String::as_str));
    Err(Failure(format!("{error}{}", did_you_mean(name, known))))
}

/// True if a tier is the one of this name, or a level of it.
pub fn is_named(tier: &str, name: &str) -> bool {
    tier == name || tier.strip_prefix(name).is_some_and(|level| level.starts_with('/'))
}
