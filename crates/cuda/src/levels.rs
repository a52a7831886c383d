//! The table of levels: which of them compute a pass, and why the others do not.
//!
//! ```
//! use etalon_cuda::levels::{offers, reasons};
//! use etalon_cuda::{Level, Options, Precision, Target};
//! use etalon_problem::{Algorithm, Dtype, Pass};
//!
//! let options = Options { level: Level::Sm90a, precision: Precision::Flash, ..Options::default() };
//! let of = |target: &Target| offers(&options, Algorithm::Attention, Pass::Forward, Dtype::Bf16, target);
//! assert!(of(&Target::of("sm_90")?).is_ok() && of(&Target::of("sm_80")?).is_err());
//! // Which problems a level refuses beside.
//! let (level, reasons) = &reasons(Algorithm::LinearCrossEntropy)[0];
//! assert!(*level == Level::Sm90a && reasons.contains(&"dim must be a multiple of 8 for sm90a"));
//! # Ok::<(), etalon_problem::Error>(())
//! ```

use crate::level_table::{Facts, LINEAR_ATTENTION, LINEAR_CROSS_ENTROPY, LevelTable};
use crate::options::{Level, Options, Precision};
use crate::softmax;
use crate::target::Target;
use etalon_problem::{Algorithm, Dtype, Error, Pass, Problem, Result, Table};

/// Fails with the table's reason where a device like `target` has no kernel for a pass in a storage type with the
/// level and the precision of the options, whatever the problem.
pub fn offers(options: &Options, algorithm: Algorithm, pass: Pass, storage: Dtype, target: &Target) -> Result<()> {
    has_kernels(algorithm, pass)?;
    let refuse = |reason: &str| Err(Error::unsupported(format!("{algorithm} {pass} in {storage}"), reason));
    if storage == Dtype::F64 {
        return refuse("cuda stores f32, bf16 or f16");
    }
    if options.level == Level::Sm90aSegments && algorithm != Algorithm::LinearAttention {
        return refuse("segments are those of linear_attention");
    }
    // Of 16-bit types the precision is a matter of the call: a level that computes with `flash` offers the pass.
    let precision = if storage == Dtype::F32 { options.precision } else { Precision::Flash };
    let facts = Facts { target: *target, pass, storage, precision };
    table(algorithm).offers(facts, options.level).map_or_else(refuse, |_| Ok(()))
}

/// The levels of an algorithm, the fastest first, each with every reason for which it may refuse a pass or a problem.
pub fn reasons(algorithm: Algorithm) -> Vec<(Level, Vec<&'static str>)> {
    table(algorithm).reasons()
}

fn table(algorithm: Algorithm) -> &'static dyn LevelTable {
    match algorithm {
        Algorithm::LinearAttention => &LINEAR_ATTENTION,
        Algorithm::LinearCrossEntropy => &LINEAR_CROSS_ENTROPY,
        Algorithm::LazyAttention => &softmax::LAZY_LEVELS,
        _ => &softmax::LEVELS,
    }
}

/// As [`offers`], before a device is asked: on one that has every level.
pub(crate) fn check(options: &Options, algorithm: Algorithm, pass: Pass, storage: Dtype) -> Result<()> {
    storage.refuse_f64()?;
    offers(options, algorithm, pass, storage, &Target::default())
}

/// The table of a pass of a problem that has passed its check. Fails where no level has a kernel.
pub(crate) fn table_of(problem: &Problem, pass: Pass) -> Result<Table> {
    has_kernels(problem.algorithm(), pass)?;
    problem.checked_table(pass)
}

fn has_kernels(algorithm: Algorithm, pass: Pass) -> Result<()> {
    match (algorithm, pass) {
        _ if !algorithm.passes().contains(&pass) => Err(algorithm.no_pass(pass)),
        (Algorithm::LazyAttention, pass) if !matches!(pass, Pass::Forward | Pass::Backward) => {
            Err(Error::unsupported(format!("{algorithm} {pass}"), "not written yet for cuda"))
        }
        _ => Ok(()),
    }
}
