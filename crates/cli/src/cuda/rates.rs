//! Speed of the kernels of a device, and the time of a plan that follows from it.

use etalon_cuda::kernels::{Step, Unit};
use etalon_cuda::{Plan, Target};

/// Speed of the kernels of a device.
pub struct Rates {
    /// Flops a second of products by fused multiply-adds, by `mma.sync` and by `wgmma`.
    pub products: [f64; 3],
    /// Bytes a second of memory.
    pub memory: f64,
}

impl Rates {
    /// The rates that kernels of long sequences reached on an H100 (docs/gpu_results.md); of other devices nothing was
    /// measured.
    pub fn stated(target: &Target) -> Option<Rates> {
        let rates = Rates { products: [27e12, 260e12, 550e12], memory: 3.2e12 };
        (target.capability == (9, 0)).then_some(rates)
    }

    /// About how long a plan takes with so many visible pairs, in seconds.
    pub fn seconds(&self, plan: &Plan, pairs: u64) -> f64 {
        // A kernel begins when the one before has ended.
        const GAP: f64 = 3e-6;
        let step = |step: &Step| {
            // Blocks that a multiprocessor has at a time; where there are fewer, it waits.
            let at_once = if step.unit == Unit::Wgmma { 1 } else { 2 };
            let full = (at_once * plan.target.multiprocessors) as f64;
            let busy = (step.working.max(1) as f64 / full).min(1.0);
            let products =
                pairs as f64 * 2.0 * step.terms as f64 / (self.products[step.unit as usize] * busy);
            let partials = (pairs as f64 * step.partials + step.sums as f64) / self.memory;
            GAP * step.launches as f64 + products + partials
        };
        plan.steps.iter().map(step).sum()
    }
}
