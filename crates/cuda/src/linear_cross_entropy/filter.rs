//! Tiles that a filter leaves out of dh and dw: `kernels/linear_cross_entropy/filter.cu`.

use super::args::{CrossEntropyArgs, FilterArgs};
use super::plan::{SIDE, TILE};
use super::prepared::{Filtering, Prepared, Steps};
use super::run::Run;
use crate::args::filled;
use etalon_problem::Result;
use etalon_problem::linear_cross_entropy::Filter;

impl Filtering {
    /// Fails where [`Filter::check`] does.
    pub fn new(filter: Filter, prepared: &mut Prepared<'_>) -> Result<Self> {
        filter.check()?;
        let Prepared { problem, plan, scratch, .. } = prepared;
        let (bands, tiles) = (problem.tokens.div_ceil(SIDE), problem.vocab.div_ceil(TILE));
        let mut range = |bytes, shape: &[usize]| scratch.array(bytes, shape);
        Ok(Filtering {
            filter,
            of_tokens: range(4, &[problem.tokens])?,
            of_classes: range(4, &[tiles])?,
            by_token: range(4, &[plan.rows, plan.columns / TILE])?,
            by_class: range(4, &[plan.rows / SIDE, plan.columns])?,
            left_out: range(1, &[bands, tiles])?,
            dh: range(4, &[problem.tokens])?,
            dw: range(4, &[problem.vocab])?,
        })
    }

    fn arguments(&self, steps: &Steps<'_>, args: &CrossEntropyArgs) -> FilterArgs {
        let at = |range| steps.at(range);
        let (eps, most_dh, most_dw) = match self.filter {
            Filter::Below { eps } => (above(eps), f32::MAX, f32::MAX),
            Filter::Within { dh, dw } => (f32::INFINITY, below(dh), below(dw)),
        };
        FilterArgs {
            c: *args,
            eps,
            most_dh,
            most_dw,
            ..filled!(FilterArgs: fields(self, at) [left_out of_tokens of_classes by_token by_class dh dw])
        }
    }

    /// Before the first chunk: nothing is left out. Norms of the tokens that count and of the classes.
    pub fn begin(&self, run: &Run<'_>) -> Result<()> {
        [self.left_out, self.dh, self.dw].into_iter().for_each(|range| run.steps.clear(range));
        let blocks = (run.args.all as usize).div_ceil(8) + (run.args.vocab as usize).div_ceil(TILE);
        run.launch("norms", (blocks, 256), &self.arguments(run.steps, &run.args))
    }

    /// The tiles of a chunk that are left out, from its gradients of logits (C36).
    pub fn choose(&self, run: &Run<'_>, args: &CrossEntropyArgs) -> Result<()> {
        let own = self.arguments(run.steps, args);
        let (count, classes) = (args.count as usize, args.classes as usize);
        let (bands, tiles) = (count.div_ceil(SIDE), classes.div_ceil(TILE));
        run.launch("measure", (bands * tiles, 256), &own)?;
        match self.filter {
            Filter::Below { .. } => run.launch("certify", ((count + classes).div_ceil(256), 256), &own),
            Filter::Within { .. } => (0..(bands + tiles).saturating_sub(1)).try_for_each(|at| {
                let args = FilterArgs { diagonal: at as i32, ..own };
                let first = (at + 1).saturating_sub(tiles);
                run.launch("choose", (bands.min(at + 1) - first, 256), &args)
            }),
        }
    }
}

/// The least f32 that is not below a number that is not negative.
fn above(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) < x { near.next_up() } else { near }
}

/// The largest finite f32 that is not above a number that is not negative.
fn below(x: f64) -> f32 {
    let near = (x as f32).min(f32::MAX);
    if f64::from(near) > x { near.next_down() } else { near }
}

#[cfg(test)]
#[path = "../../tests/units/linear_cross_entropy/filter.rs"]
mod tests;
