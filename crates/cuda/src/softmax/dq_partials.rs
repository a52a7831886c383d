//! The gradient of q in the pass by keys: `kernels/attention/partials.cuh`.

use super::Steps;
use super::pair_args::{FusedArgs, PairArgs, PartialArgs};
use super::spec::Spec;
use crate::args::Field;
use crate::memory::{Layout, MemoryRange, memory};
use crate::options::Level;
use crate::step::Work;
use crate::variant::Variant;
use etalon_problem::{Mode, Pass, Result};

/// Shares of partial sums in their memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shares {
    /// The bytes of those of a tile of keys.
    pub each: usize,
    /// The tiles of keys of the longest sequence, and those that have memory at a time.
    pub tiles: usize,
    pub at_once: usize,
}

impl Shares {
    /// Shares where the mode of the pass has them: for `Auto` where all is in one launch and the tiles of keys that
    /// fit the budget keep the device busy. A caller that insists gets two at least: a tile, and the sums of those
    /// before.
    pub fn new(spec: &Spec) -> Option<Shares> {
        let (e, mode, budget) = (&spec.extents, spec.options.mode, spec.options.partials_budget);
        // The second order has such kernels of narrow operands alone, and there the mode is a hint.
        let narrow = spec.columns() <= 64;
        let may = match mode {
            Mode::Auto => narrow,
            Mode::FusedPartials => narrow || spec.pass == Pass::Backward,
            Mode::Separate | Mode::ForwardGradient => false,
        };
        let each = spec.rows().checked_mul(4 * e.dim.next_multiple_of(64)).filter(|&each| each > 0)?;
        let tiles = spec.counts.longest;
        if !spec.both || !may || tiles == 0 {
            return None;
        }
        if tiles <= budget / each {
            return Some(Shares { each, tiles, at_once: tiles });
        }
        // One holds the sums of the tiles before.
        let at_once = (budget / each).saturating_sub(1);
        let shares = Shares { each, tiles, at_once };
        if mode == Mode::FusedPartials {
            return Some(Shares { at_once: at_once.clamp(1, tiles), ..shares });
        }
        (at_once > 0 && shares.working(spec) >= 2 * spec.target.multiprocessors).then_some(shares)
    }

    /// The blocks of a launch that have memory, about.
    pub fn working(self, spec: &Spec) -> usize {
        self.at_once * (spec.counts.by_keys / self.tiles) * spec.extents.key_heads
    }

    /// The bytes of sums of the tiles before that are read and written between rounds.
    pub fn sums(self) -> usize {
        self.each.saturating_mul(2 * (self.tiles.div_ceil(self.at_once) - 1))
    }
}

/// Parts by tiles of keys, some of which have memory at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DqPartials {
    shares: Shares,
    range: MemoryRange,
    /// The sums of the tiles before.
    totals: MemoryRange,
}

impl DqPartials {
    pub fn new(spec: &Spec, level: Level, layout: &mut Layout) -> Result<Option<DqPartials>> {
        let by_keys = match (level, spec.pass) {
            (Level::Portable, Pass::Backward) => true,
            (Level::Portable, Pass::DoubleBackward) => !spec.has_tensor_second(),
            (Level::Sm80, _) => spec.insists(),
            _ => false,
        };
        let Some(shares) = Shares::new(spec).filter(|_| by_keys) else { return Ok(None) };
        let Shares { each, tiles, at_once } = shares;
        let partials = at_once.checked_mul(each).ok_or_else(|| memory(usize::MAX))?;
        let sums = if at_once < tiles { each } else { 0 };
        Ok(Some(DqPartials {
            shares,
            range: layout.named("partial sums of dq", partials)?,
            totals: layout.named("sums of dq of the tiles before", sums)?,
        }))
    }

    /// Adds launches of `fused` of a module, of so much work in all, with arguments that a function makes of the
    /// memory; and of `collect`, which adds up what these leave in the place of dq.
    pub fn run<A: Field>(
        &self,
        steps: &Steps<'_>,
        (variant, work): (&Variant, Work),
        fused: impl Fn(PartialArgs) -> Vec<A>,
        c: PairArgs,
    ) -> Result<()> {
        let (by_keys, by_rows) = (steps.key_blocks(), 4 * steps.query_blocks()); // the latter of 16 rows
        let Shares { tiles, at_once, .. } = self.shares;
        let threads = variant.threads();
        // A prediction counts all rounds as one.
        let (working, sums) = (self.shares.working(&steps.prepared.spec), self.shares.sums());
        let mut collected = Work { terms: 0, sums, ..work };
        let mut work = Work { working, ..work };
        for first in (0..tiles).step_by(at_once) {
            let end = tiles.min(first + at_once);
            let slots = PartialArgs {
                at: steps.at(self.range).into(),
                totals: steps.at(self.totals).into(),
                first: first as i32,
                end: end as i32,
                last: (end == tiles).into(),
            };
            for args in fused(slots) {
                steps.launch_work((variant, "fused"), (by_keys, threads), &args, work)?;
                work = Work { terms: 0, partials: 0.0, ..work };
            }
            steps.launch_work((variant, "collect"), (by_rows, threads), &FusedArgs { c, slots }, collected)?;
            collected = Work { partials: 0.0, sums: 0, ..collected };
        }
        Ok(())
    }
}
