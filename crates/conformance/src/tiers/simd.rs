//! The simd tier: one [`Tier`] per level.

use crate::report::Absent;
use crate::tensor::{Stored, Tensor, Tensors, views, views_mut};
use crate::tier::{Answer, Request, Tier};
use etalon_problem::{Algorithm, Dtype, Error, Mode, Operand, Pass, Role};
use etalon_simd::{Level, Options};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread;

/// One level of the simd tier.
#[derive(Debug, Clone, Copy)]
pub struct Simd {
    level: Level,
}

/// Every level, narrowest first.
const LEVELS: [&str; 3] = ["portable", "avx2", "avx512"];

impl Simd {
    /// A level that this machine has.
    pub fn new(level: Level) -> Self {
        Simd { level }
    }

    /// The levels of this machine, and those that it lacks.
    pub fn levels() -> (Vec<Simd>, Vec<Absent>) {
        let absent = LEVELS.into_iter().filter(|name| Level::by_name(name).is_none());
        let absent = absent.map(|name| Absent {
            tier: format!("simd/{name}"),
            reason: format!("this CPU has no {name}"),
        });
        (Level::available().iter().copied().map(Simd::new).collect(), absent.collect())
    }
}

impl Tier for Simd {
    fn name(&self) -> String {
        format!("simd/{}", self.level)
    }

    fn offers(&self, algorithm: Algorithm, pass: Pass, dtype: Dtype) -> Result<(), String> {
        use Algorithm::{Attention, AttentionLse, LinearAttention};
        match (algorithm, pass) {
            (Attention | AttentionLse, Pass::Step) => {
                return Err(format!("{algorithm} has no {pass}"));
            }
            (Attention | AttentionLse, _) => {}
            (LinearAttention, Pass::Jvp) => return Err(format!("{algorithm} has no {pass}")),
            (LinearAttention, _) => {}
            _ => return Err("not written yet for simd".to_string()),
        }
        match dtype {
            Dtype::F64 => Err("simd stores f32, bf16 or f16".to_string()),
            _ => Ok(()),
        }
    }

    fn run(&self, request: &Request<'_>) -> Answer {
        if let Err(reason) = self.offers(request.problem.algorithm(), request.pass, request.dtype) {
            return Answer::Unsupported(reason);
        }
        let options = Options {
            level: self.level,
            blocking: request.hints.blocking,
            mode: request.hints.mode,
            recompute: request.hints.recompute,
            ..Options::default()
        };
        let run = || answer(request, &options);
        let outputs = match request.hints.threads.map(pool) {
            None => run(),
            // From a thread of no pool: a worker of another one would take up other work while it
            // waits here.
            Some(Ok(pool)) => thread::scope(|scope| {
                scope
                    .spawn(|| pool.install(run))
                    .join()
                    .unwrap_or_else(|panic| resume_unwind(panic))
            }),
            Some(Err(error)) => return Answer::Error(error),
        };
        match outputs {
            Ok(outputs) => Answer::Outputs(outputs),
            Err(Error::Unsupported { reason, .. }) => Answer::Unsupported(reason),
            Err(error) => Answer::Error(error.to_string()),
        }
    }
}

/// A pool of that many threads; each size is started once.
fn pool(threads: usize) -> Result<Arc<ThreadPool>, String> {
    static POOLS: LazyLock<Mutex<BTreeMap<usize, Arc<ThreadPool>>>> = LazyLock::new(Mutex::default);
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = pools.get(&threads) {
        return Ok(pool.clone());
    }
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = Arc::new(pool.map_err(|error| error.to_string())?);
    pools.insert(threads, pool.clone());
    Ok(pool)
}

/// The outputs of a request; what the pass reads again of the forward pass is from this tier's own.
fn answer(request: &Request<'_>, options: &Options) -> Result<Tensors, Error> {
    let &Request { problem, pass, dtype, .. } = request;
    let saved = saved(request, options)?;
    let mut inputs = views(request.inputs)?;
    for (name, tensor) in &saved {
        inputs = inputs.with(name, tensor.view(name)?);
    }
    let mut outputs = unwritten(&problem.operands(pass), dtype, |x| x.role == Role::Output);
    etalon_simd::run(problem, pass, &inputs, &mut views_mut(&mut outputs)?, options)?;
    Ok(outputs)
}

/// The outputs of the forward pass that a later pass reads.
fn saved(request: &Request<'_>, options: &Options) -> Result<Tensors, Error> {
    let &Request { problem, pass, dtype, inputs, .. } = request;
    let (with_optional, recompute) = (options.mode == Mode::ForwardGradient, options.recompute);
    let mut saved = unwritten(&problem.operands(pass), dtype, |x| match x.role {
        Role::Saved => !recompute,
        Role::OptionalSaved => with_optional,
        _ => false,
    });
    if !saved.is_empty() {
        let forward = problem.operands(Pass::Forward);
        let own = |name: &str| forward.iter().any(|x| x.name == name && x.role.is_given());
        let inputs = inputs.iter().filter(|(name, _)| own(name));
        let inputs: Tensors = inputs.map(|(name, x)| (name.clone(), x.clone())).collect();
        let places = &mut views_mut(&mut saved)?;
        etalon_simd::run(problem, Pass::Forward, &views(&inputs)?, places, options)?;
    }
    Ok(saved)
}

/// Places for some operands, which nobody has written.
fn unwritten(operands: &[Operand], dtype: Dtype, which: impl Fn(&Operand) -> bool) -> Tensors {
    let place = |x: &Operand| {
        (x.name.to_string(), Tensor::unwritten(&x.shape, Stored::of(x.precision, dtype)))
    };
    operands.iter().filter(|x| which(x)).map(place).collect()
}
