//! Plans of the passes of linear cross-entropy.

use super::cut::{Cut, SweepSpec, TILE};
use super::named::lists_bytes;
use super::sweeps::sweeps;
use crate::known::Known;
use crate::{Buffer, Element, Options, Plan, Strategy, Workspace};
use etalon_problem::{Blocking, Dtype, Error, LinearCrossEntropy, Pass};

/// Bytes that are allocated together.
const PAGE: usize = 4 << 10;

/// The plan of a pass in rayon's current pool, every tangent being given and every gradient asked for in
/// arrays whose rows lie end to end; and the memory that it allocates, [`Plan::workspace_bytes`]. `blocking`
/// is tokens and classes whose logits exist at the same time.
pub fn plan<T: Element>(
    problem: &LinearCrossEntropy,
    pass: Pass,
    options: &Options,
) -> Result<Plan, Error> {
    of::<T>(problem, pass, false, options)
}

/// As [`plan`], with or without a filter.
pub fn of<T: Element>(
    problem: &LinearCrossEntropy,
    pass: Pass,
    filter: bool,
    options: &Options,
) -> Result<Plan, Error> {
    let known = Known::of(&Workspace::new(), &problem.clone().into(), pass)?;
    let dw_apart = T::DTYPE != Dtype::F32 && !problem.wide_gradients;
    let bf16 = options.pairs(T::DTYPE);
    let pieces = options.precision.pieces();
    let spec = match pass {
        Pass::Forward => SweepSpec { bf16, ..SweepSpec::default() },
        Pass::Backward | Pass::ForwardBackward => SweepSpec {
            totals: false,
            dh: true,
            dw: true,
            dbias: problem.bias,
            dw_apart,
            filter,
            bf16: bf16 && !filter,
            pieces,
            ..SweepSpec::default()
        },
        Pass::DoubleBackward => SweepSpec {
            totals: false,
            dh: true,
            dw: true,
            dbias: problem.bias,
            dw_apart,
            second: true,
            ddh: true,
            ddw: true,
            filter: false,
            bf16,
            pieces,
        },
        _ => {
            let expected = "one of linear_cross_entropy in the simd tier";
            return Err(Error::value("pass", expected, pass));
        }
    };
    let sweeps = sweeps(problem, options, spec);
    let count = sweeps.iter().flatten().count();
    let strategy = match count {
        _ if pass == Pass::Forward => None,
        1 => Some(Strategy::OnePass),
        2 => Some(Strategy::Recompute),
        _ => Some(Strategy::Separate),
    };
    // The sweeps take turns at the same memory: that of the largest is there.
    let largest = sweeps.iter().flatten().max_by_key(|cut| cut.bytes());
    let mut buffers = largest.map(Cut::buffers).unwrap_or_default();
    // A list takes whole pages.
    let lists = lists_bytes(problem, spec).saturating_add(PAGE).div_ceil(PAGE).saturating_mul(PAGE);
    buffers.push(Buffer::parts("sums of tokens", 1, lists));
    buffers.push(Buffer::parts("tensors", 1, known.bytes()));
    buffers.retain(|buffer| buffer.bytes > 0);
    let last = sweeps.iter().flatten().last();
    // Of logits and of their gradients: in the second order also those of h, w with ddw, ddh.
    let (logits, gradients) = match pass {
        Pass::Forward => (1, 0),
        Pass::DoubleBackward => (3, 4),
        _ => (1, 2),
    };
    Ok(Plan {
        blocking: Blocking {
            queries: last.map_or(1, |cut| cut.chunk.min(problem.tokens.max(1))),
            keys: last.map_or(1, |cut| cut.span.saturating_mul(TILE).min(problem.vocab)),
        },
        mode: None,
        products: logits * count + gradients,
        interval: None,
        strategy,
        together: last.map_or(1, |cut| cut.threads),
        buffers,
    })
}
