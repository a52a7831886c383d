//! What a pass will do on a device, and the memory that it takes: told without one.

use crate::options::Level;
use crate::target::Target;
use crate::unit::Unit;
use etalon_problem::{Blocking, Mode};

/// The steps of a pass of attention or attention_lse, every result being asked for, its operands dense, its sequences and
/// its mask those of the problem.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The device that is thought of.
    pub target: Target,
    /// The level whose kernels compute it.
    pub level: Level,
    /// The other levels that cannot compute it, and why.
    pub refusals: Vec<(Level, &'static str)>,
    /// How a backward pass is organised: never [`Mode::Auto`].
    pub mode: Option<Mode>,
    /// Queries and keys of a tile.
    pub blocking: Blocking,
    /// The tiles that the level has kernels for; the first is taken unless [`Options::blocking`](crate::Options::blocking) asks for another.
    pub blockings: Vec<Blocking>,
    /// The kernels, in their order. Those that compute what is not finite count no terms.
    pub steps: Vec<Step>,
    /// What is in the scratch memory.
    pub buffers: Vec<Buffer>,
}

/// A kernel of a pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Its name.
    pub kernel: &'static str,
    /// The level that it is one of.
    pub level: Level,
    /// How often it is launched.
    pub launches: usize,
    /// The blocks of a launch, and the threads of a block.
    pub blocks: usize,
    /// Threads of a block.
    pub threads: u32,
    /// The shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Multiplications and additions of products for each visible pair of a query and a key, in all launches; and what
    /// they are computed by.
    pub terms: usize,
    /// Which arithmetic computes them.
    pub unit: Unit,
    /// Bytes of partial sums that are written or read for each visible pair.
    pub partials: f64,
    /// Bytes of sums that are read and written beside.
    pub sums: usize,
    /// The blocks of a launch that have something to do, about.
    pub working: usize,
}

/// A part of the scratch memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// What is in it.
    pub name: &'static str,
    /// Its size.
    pub bytes: usize,
}

/// How fast the kernels of a device are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Flops a second of products by fused multiply-adds, by `mma.sync` and by `wgmma`.
    pub products: [f64; 3],
    /// Bytes a second of memory.
    pub memory: f64,
}

impl Rates {
    /// Those that the kernels of long sequences reached on an H100 (docs/gpu_results.md); of other devices nothing was measured.
    pub fn stated(target: &Target) -> Option<Rates> {
        let rates = Rates { products: [27e12, 260e12, 550e12], memory: 3.2e12 };
        target.is_hopper().then_some(rates)
    }

    fn of(&self, unit: Unit) -> f64 {
        self.products[unit as usize]
    }
}

impl Plan {
    /// The most bytes that the pass holds beside operands, results and tables.
    pub fn workspace_bytes(&self) -> usize {
        self.buffers.iter().fold(0, |sum, buffer| sum.saturating_add(buffer.bytes))
    }

    /// Multiplications and additions of products for each visible pair.
    pub fn terms(&self) -> usize {
        self.steps.iter().map(|step| step.terms).sum()
    }

    /// About how long it takes with so many visible pairs, in seconds.
    pub fn seconds(&self, pairs: u64, rates: &Rates) -> f64 {
        // A kernel begins when the one before has ended.
        const GAP: f64 = 3e-6;
        let step = |step: &Step| {
            // Blocks that a multiprocessor has at a time; where there are fewer, it waits.
            let at_once = if step.unit == Unit::Wgmma { 1 } else { 2 };
            let full = (at_once * self.target.multiprocessors) as f64;
            let busy = (step.working.max(1) as f64 / full).min(1.0);
            let products = pairs as f64 * 2.0 * step.terms as f64 / (rates.of(step.unit) * busy);
            let partials = (pairs as f64 * step.partials + step.sums as f64) / rates.memory;
            GAP * step.launches as f64 + products + partials
        };
        self.steps.iter().map(step).sum()
    }
}
