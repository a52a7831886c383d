//! Plans of the passes of linear attention.

use super::schedule::Schedule;
use super::{forward, step, two_sided};
use crate::known::Known;
use crate::{Buffer, Element, Options, Plan, Workspace};
use etalon_problem::{Blocking, Error, LinearAttention, Pass};
use std::iter::{once, successors};

/// The plan of a pass in rayon's current pool, every gradient being asked for; and the memory that it
/// allocates, [`Plan::workspace_bytes`]. `blocking` is chunk and micro-chunk.
pub fn plan<T: Element>(
    problem: &LinearAttention,
    pass: Pass,
    options: &Options,
) -> Result<Plan, Error> {
    let known = Known::of(&Workspace::new(), &problem.clone().into(), pass)?;
    let schedule = Schedule::new(problem, &known.tokens, pass, options, once(T::DTYPE))?;
    let (whole, interval) = (schedule.whole(), schedule.interval());
    let again = usize::from(interval > 1);
    let ways = if whole { 1 } else { 2 };
    let (mut buffers, products) = match pass {
        // q·k, P·v, q·S and kᵀ v; the last twice where spans of some chunks are worked on apart.
        Pass::Forward => (forward::buffers(&schedule), 4 + if whole { 0 } else { again }),
        // A, B, B K, Bᵀ Q and Aᵀ dO; dO Sᵀ, V Dᵀ, K D, qᵀ dout and kᵀ v. Of spans of some chunks the
        // last twice and, where they are worked on apart, the last but one.
        Pass::Backward => (two_sided::buffers(&schedule), 10 + again * ways),
        // The same of values and tangents: A, B and dq three times, in tiles of bf16 dq twice, what else is within a
        // chunk twice, and what has to do with states three times.
        Pass::DoubleBackward => {
            let within = if schedule.cut.bf16 { 14 } else { 15 };
            (two_sided::buffers(&schedule), within + 3 * 6 + 3 * again * ways)
        }
        Pass::Step => (step::buffers(problem), 2),
        Pass::Jvp | Pass::ForwardBackward => {
            return Err(Error::value("pass", "one of linear_attention in the simd tier", pass));
        }
    };
    buffers.push(Buffer::parts("tensors and sequences", 1, known.bytes()));
    Ok(Plan {
        blocking: Blocking { queries: schedule.cut.chunk, keys: schedule.cut.micro },
        mode: None,
        products,
        interval: (pass != Pass::Step).then_some(interval),
        strategy: None,
        together: if whole { schedule.threads().min(schedule.slots()) } else { schedule.slots() },
        buffers,
    })
}

/// Shared memory of a GPU that the backward pass of one chunk takes: the budget table of
/// [`crate::linear_attention`], for one micro-chunk at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedMemory {
    /// c: tokens of a micro-chunk.
    pub micro: usize,
    /// Columns of v, dout, dv and of the states that are worked on together. Slices of E are
    /// independent but for dq, dk, dg and dσ, which sum over them.
    pub slice: usize,
    /// Buffers in shared memory, in f32.
    pub buffers: Vec<Buffer>,
}

impl SharedMemory {
    fn new(dim: usize, micro: usize, slice: usize) -> Self {
        let f32s =
            |name, count: usize| Buffer::parts(name, 1, count.saturating_mul(size_of::<f32>()));
        let rows = |dim: usize, matrices| micro.saturating_mul(dim).saturating_mul(matrices);
        let buffers = vec![
            f32s("tiles of q, k, dq, dk", rows(dim, 4)),
            f32s("tiles of v, dout, dv", rows(slice, 3)),
            f32s("tiles of A and B", rows(micro, 2)),
            f32s("S and D", dim.saturating_mul(slice).saturating_mul(2)),
        ];
        SharedMemory { micro, slice, buffers }
    }

    /// All of it.
    pub fn bytes(&self) -> usize {
        self.buffers.iter().fold(0, |sum, buffer| sum.saturating_add(buffer.bytes))
    }
}

/// The widest slice of E, and for it the largest micro-chunk, of 16 to 64 tokens, that fit into so many
/// bytes of shared memory; `None` if not even 16 columns and tokens do.
pub fn shared_memory(problem: &LinearAttention, bytes: usize) -> Option<SharedMemory> {
    let (dim, width) = (problem.extents.dim, problem.value_dim.max(1));
    // Of E in equal parts, the widest first, and no part that alone exceeds the memory.
    let most = (bytes / size_of::<f32>()).min(width.saturating_add(LEAST - 1)) / LEAST * LEAST;
    let part = |most: usize| width.div_ceil(width.div_ceil(most)).next_multiple_of(LEAST);
    let first = Some(most).filter(|&most| most > 0).map(part);
    let mut slices = successors(first, |slice| Some(slice - LEAST).filter(|&x| x > 0).map(part));
    slices.find_map(|slice| {
        let plans = [64, 32, LEAST].map(|micro| SharedMemory::new(dim, micro, slice));
        plans.into_iter().find(|plan| plan.bytes() <= bytes)
    })
}

/// Rows and columns of a product of a tensor core.
const LEAST: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use etalon_problem::LinearExtents;

    fn fit(dim: usize, width: usize, kibibytes: usize) -> Option<(usize, usize, usize)> {
        let extents = LinearExtents { batch: 1, query_heads: 1, key_heads: 1, tokens: 1, dim };
        let problem = LinearAttention::new(extents).value_dim(width);
        let plan = shared_memory(&problem, kibibytes << 10)?;
        assert!(plan.bytes() <= kibibytes << 10);
        Some((plan.micro, plan.slice, plan.bytes()))
    }

    #[test]
    fn the_table_of_the_page_comes_out() {
        // c = 16: 16 c D + 12 c E + 8 c² + 8 D E.
        assert_eq!(SharedMemory::new(64, 16, 64).bytes(), (16 + 12 + 2 + 32) << 10);
        assert_eq!(SharedMemory::new(128, 16, 128).bytes(), (32 + 24 + 2 + 128) << 10);
    }

    #[test]
    fn slices_of_e_make_room() {
        // 64 × 64 fits everywhere; the larger the memory, the larger the micro-chunk.
        assert_eq!(fit(64, 64, 99), Some((32, 64, (32 + 24 + 8 + 32) << 10)));
        assert_eq!(fit(64, 64, 163), Some((32, 64, (32 + 24 + 8 + 32) << 10)));
        assert_eq!(fit(64, 64, 227), Some((64, 64, (64 + 48 + 32 + 32) << 10)));
        // 128 × 128 needs 186 KiB with 16 tokens, and so slices where there is less.
        assert_eq!(fit(128, 128, 227), Some((16, 128, (32 + 24 + 2 + 128) << 10)));
        assert_eq!(fit(128, 128, 163), Some((32, 64, (64 + 24 + 8 + 64) << 10)));
        assert_eq!(fit(128, 128, 99), Some((16, 48, (32 + 9 + 2 + 48) << 10)));
        assert_eq!(fit(4096, 16, 99), None, "a row of 4096 elements is 16 KiB");
    }
}
