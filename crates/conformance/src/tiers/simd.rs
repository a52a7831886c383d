//! The simd tier: one [`Tier`] per level.

mod attention;
mod attention_lse;
mod linear_attention;

use crate::report::Absent;
use crate::tensor::{Data, Tensor, Tensors};
use crate::tier::{Answer, BackwardMode, Hints, Request, Tier};
use etalon_problem::{Algorithm, Dtype, Error, Pass, Problem};
use etalon_simd::{Element, Level, Mode, Options};
use half::{bf16, f16};
use ndarray::{Array, ArrayView, Dimension, IxDyn};
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
        let options = options(self.level, &request.hints);
        let run = || match request.dtype {
            Dtype::F32 => answer::<f32>(request, &options),
            Dtype::Bf16 => answer::<bf16>(request, &options),
            _ => answer::<f16>(request, &options),
        };
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

fn options(level: Level, hints: &Hints) -> Options {
    let mode = match hints.mode {
        BackwardMode::Auto => Mode::Auto,
        BackwardMode::Separate => Mode::Separate,
        BackwardMode::FusedPartials => Mode::FusedPartials,
        BackwardMode::ForwardGradient => Mode::ForwardGradient,
    };
    Options { level, blocking: hints.blocking, mode, ..Options::default() }
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

/// An element type that tensors hold.
trait Stored: Element {
    fn elements(data: &Data) -> Option<&[Self]>;
    fn data(elements: Vec<Self>) -> Data;
}

macro_rules! stored {
    ($type:ty, $variant:ident) => {
        impl Stored for $type {
            fn elements(data: &Data) -> Option<&[Self]> {
                if let Data::$variant(elements) = data { Some(elements) } else { None }
            }
            fn data(elements: Vec<Self>) -> Data {
                Data::$variant(elements)
            }
        }
    };
}
stored!(f32, F32);
stored!(bf16, Bf16);
stored!(f16, F16);

/// An operand that may be absent.
fn view<'a, T: Stored, D: Dimension>(
    inputs: &'a Tensors,
    name: &str,
) -> Result<Option<ArrayView<'a, T, D>>, Error> {
    let Some(tensor) = inputs.get(name) else { return Ok(None) };
    let elements = T::elements(&tensor.data).ok_or_else(|| Error::Dtype {
        operand: name.to_string(),
        expected: T::DTYPE.to_string(),
        found: tensor.type_name().to_string(),
    })?;
    let view = ArrayView::from_shape(IxDyn(&tensor.shape), elements);
    view.and_then(ArrayView::into_dimensionality).map(Some).map_err(|error| {
        Error::value(format!("`{name}`"), "of the rank and size of its operand", error)
    })
}

fn needed<'a, T: Stored, D: Dimension>(
    inputs: &'a Tensors,
    name: &str,
) -> Result<ArrayView<'a, T, D>, Error> {
    view(inputs, name)?.ok_or_else(|| Error::Missing {
        operand: name.to_string(),
        reason: "the pass needs it".to_string(),
    })
}

fn tensor<T: Stored, D: Dimension>(array: Array<T, D>) -> Option<Tensor> {
    let shape = array.shape().to_vec();
    Some(Tensor { shape, data: T::data(array.iter().copied().collect()) })
}

fn named<const N: usize>(outputs: [(&str, Option<Tensor>); N]) -> Tensors {
    outputs.into_iter().filter_map(|(name, tensor)| Some((name.to_string(), tensor?))).collect()
}

fn answer<T: Stored>(request: &Request<'_>, options: &Options) -> Result<Tensors, Error> {
    match request.problem {
        Problem::Attention(problem) => {
            attention::pass::<T>(problem, request.pass, request.inputs, options)
        }
        Problem::AttentionLse(problem) => {
            attention_lse::pass::<T>(problem, request.pass, request.inputs, options)
        }
        Problem::LinearAttention(problem) => {
            linear_attention::pass::<T>(problem, request.pass, request.inputs, options)
        }
        other => Err(Error::Unsupported {
            what: other.algorithm().to_string(),
            reason: "not written yet for simd".to_string(),
        }),
    }
}
