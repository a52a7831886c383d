//! The simd tier: one [`Tier`] per level.

use super::reference::has;
use super::{door, filters, shards};
use crate::profile::Profile;
use crate::report::Absent;
use crate::tensor::Tensors;
use crate::tier::{Choice, Filtered, Refusal, Request, Tier};
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Algorithm, Dtype, Pass};
use etalon_simd::{Level, Options, Precision, Workspace};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread;

/// One level of the simd tier: in f32, or with operands of bf16 that are multiplied as pairs.
#[derive(Debug, Clone, Copy)]
pub struct Simd {
    level: Level,
    precision: Precision,
}

/// Every level of f32, narrowest first.
const LEVELS: [&str; 3] = ["portable", "avx2", "avx512"];

/// Every level that multiplies bf16, with what it rounds.
const OF_PAIRS: [&str; 4] = ["avx512bf16-split2", "avx512bf16", "amx-split2", "amx"];

impl Simd {
    /// A level that this machine has, in f32.
    pub fn new(level: Level) -> Self {
        Simd { level: level.in_f32(), precision: Precision::Strict }
    }

    /// A level, with what it multiplies in bf16 by that precision.
    pub fn of(level: Level, precision: Precision) -> Self {
        Simd { level, precision }
    }

    /// The levels of this machine that multiply bf16, and those that it lacks.
    pub fn of_pairs() -> (Vec<Simd>, Vec<Absent>) {
        let lacking = OF_PAIRS.into_iter().filter(|name| Options::by_name(name).is_none());
        let levels = Options::of_levels().filter(|options| options.level.has_pairs());
        let levels = levels.map(|options| Simd::of(options.level, options.precision));
        (levels.collect(), lacking.map(absent).collect())
    }

    /// The levels of this machine, and those that it lacks.
    pub fn levels() -> (Vec<Simd>, Vec<Absent>) {
        let lacking = LEVELS.into_iter().filter(|name| Level::by_name(name).is_none());
        let levels = Level::available().iter().copied().map(Simd::new);
        (levels.collect(), lacking.map(absent).collect())
    }

    fn options(&self, request: &Request<'_>) -> Options {
        let usual = self.usual();
        Options {
            blocking: request.hints.blocking,
            mode: request.hints.mode,
            partials_budget: request.hints.partials_budget.unwrap_or(usual.partials_budget),
            memory_budget: request.hints.memory_budget.unwrap_or(usual.memory_budget),
            kept_states: request.hints.kept_states.unwrap_or(usual.kept_states),
            recompute: request.hints.recompute,
            ..usual
        }
    }
}

impl Simd {
    fn usual(&self) -> Options {
        Options { level: self.level, precision: self.precision, ..Options::default() }
    }

    fn run_in(&self, workspace: &Workspace, request: &Request<'_>) -> Result<Tensors, Refusal> {
        let options = self.options(request);
        let run = || {
            if let Some((problem, shards)) = shards::of(request) {
                return Ok(shards::simd(request, problem, &shards, workspace, &options)?);
            }
            door::outputs(request, &|problem, pass, inputs, outputs| {
                etalon_simd::run_in(workspace, problem, pass, inputs, outputs, &options)
            })
        };
        let Some(threads) = request.hints.threads else { return run() };
        let pool = pool(threads)?;
        // From a thread of no pool: a worker of another one would take up other work while it
        // waits here.
        let outputs = thread::scope(|scope| scope.spawn(|| pool.install(run)).join());
        outputs.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl Tier for Simd {
    fn name(&self) -> String {
        format!("simd/{}", self.usual().name())
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        has(algorithm, pass)?;
        let in_bf16 = || self.usual().multiplies_bf16(pass, dtype);
        match dtype {
            Dtype::F64 => Err("simd stores f32, bf16 or f16".to_string()),
            _ if !self.level.has_pairs() || in_bf16() => Ok(()),
            _ => Err(format!("computed as with {}", self.level.in_f32())),
        }
    }

    fn is_meant_for(&self, algorithm: Algorithm, _: Pass) -> bool {
        let usual = self.usual();
        let in_bf16 = |&pass: &Pass| usual.multiplies_bf16(pass, Dtype::Bf16);
        !self.level.has_pairs() || algorithm.passes().iter().any(in_bf16)
    }

    fn keeps_subnormals(&self) -> bool {
        !self.level.has_pairs()
    }

    fn gives_the_bits_beside_nan(&self) -> bool {
        !self.level.has_pairs()
    }

    fn has(&self, choice: Choice) -> bool {
        !self.level.has_pairs() || choice != Choice::Filter
    }

    fn profile(&self, dtype: Dtype) -> Profile {
        match self.precision {
            Precision::Strict => Profile::simd(dtype),
            Precision::Split2 => Profile::split2(),
            Precision::Flash => Profile::flash(dtype),
        }
    }

    fn run(&self, request: &Request<'_>) -> Result<Tensors, Refusal> {
        self.run_in(&Workspace::new(), request)
    }

    fn in_turn(&self, requests: &[Request<'_>]) -> Result<Option<Vec<Tensors>>, Refusal> {
        let workspace = Workspace::new();
        let answers = requests.iter().map(|request| {
            request.hints.stale.into_iter().for_each(|x| workspace.fill(x as f32));
            self.run_in(&workspace, request)
        });
        answers.collect::<Result<_, _>>().map(Some)
    }

    fn filtered(&self, request: &Request<'_>, filter: Filter) -> Result<Option<Filtered>, Refusal> {
        let in_f32 = !self.level.has_pairs();
        let Some(problem) = filters::of(request).filter(|_| in_f32) else { return Ok(None) };
        Ok(Some(filters::simd(request, problem, filter, &self.options(request))?))
    }
}

/// A level that this machine lacks.
fn absent(name: &str) -> Absent {
    let level = name.trim_end_matches("-split2");
    Absent { tier: format!("simd/{name}"), reason: Level::lacks(level) }
}

/// A pool of that many threads; each size is started once.
fn pool(threads: usize) -> Result<Arc<ThreadPool>, Refusal> {
    static POOLS: LazyLock<Mutex<BTreeMap<usize, Arc<ThreadPool>>>> = LazyLock::new(Mutex::default);
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = pools.get(&threads) {
        return Ok(pool.clone());
    }
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = Arc::new(pool.map_err(|error| Refusal::Fault(format!("failed: {error}")))?);
    pools.insert(threads, pool.clone());
    Ok(pool)
}
