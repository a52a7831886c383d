//! What the passes of linear attention will do.

use super::spans::Work;
use super::{backward, forward, sequences};
use crate::{Element, Options, Plan};
use etalon_problem::{Blocking, Error, LinearAttention, Pass};

/// What a pass will do in rayon's current pool, every gradient being asked for; and what it allocates
/// for it, [`Plan::workspace_bytes`]. `blocking` is chunk and micro-chunk.
pub fn plan<T: Element>(
    problem: &LinearAttention,
    pass: Pass,
    options: &Options,
) -> Result<Plan, Error> {
    problem.check()?;
    crate::heads::check_counts(problem.extents.batch, problem.extents.query_heads)?;
    let sequences = sequences(problem);
    let work = Work::new(problem, &sequences, options)?;
    let slots = sequences.len() * problem.extents.key_heads;
    let threads = rayon::current_num_threads();
    let (buffers, products) = match pass {
        // q·k, P·v, q·S and kᵀ v; the last twice where spans are worked on apart.
        Pass::Forward => (forward::buffers(&work)?, if work.whole() { 4 } else { 5 }),
        // A, B, B K, Bᵀ Q and Aᵀ dO; dO Sᵀ, V Dᵀ, K D, qᵀ dout and, once for the states before spans
        // and once within them, kᵀ v; the first two of these twice where spans are worked on apart.
        Pass::Backward => (backward::buffers(&work)?, if work.whole() { 11 } else { 12 }),
        Pass::Step => (Vec::new(), 2),
        _ => return Err(Error::value("pass", "one of linear_attention in the simd tier", pass)),
    };
    Ok(Plan {
        blocking: Blocking { queries: work.cut.chunk, keys: work.cut.micro },
        mode: None,
        products,
        together: if work.whole() { threads.min(slots) } else { slots },
        buffers,
    })
}
