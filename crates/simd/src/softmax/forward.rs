//! The forward pass of attention and attention_lse, and the way to that of lazy attention.

use super::cut::Cut;
use super::forward_tile::{ForwardScratch, ForwardTile};
use super::lazy_forward::LazyForward;
use super::operands::Operands;
use super::packs::{Operand, Packing};
use super::schedule::{BF16, FIRST_ORDER};
use super::streamed::{Places, Streamed, Tile, plan_of, sweep};
use super::tasks::Task;
use crate::plan::Plan;
use crate::workspace::Parts;
use crate::{Level, Options, Workspace};
use etalon_problem::{Error, Pass};

/// Writes o, or with `derivative` ∂lse/∂q in its place, and lse.
pub fn run(
    workspace: &Workspace,
    operands: &Operands<'_>,
    places: Places<'_>,
    derivative: bool,
    options: &Options,
) -> Result<(), Error> {
    let (level, pv) = (options.level, places.pv.is_some());
    match operands.tau {
        Some(tau) => sweep(workspace, &LazyForward { operands, tau, pv, level }, places, options),
        None => sweep(workspace, &Forward { operands, derivative, level }, places, options),
    }
}

/// The plan of [`run`], with ∂lse/∂q or with Σ a P v if the algorithm has that.
pub fn plan(operands: &Operands<'_>, derivative: bool, options: &Options) -> Result<Plan, Error> {
    let level = options.level;
    match operands.tau {
        Some(tau) => plan_of(&LazyForward { operands, tau, pv: derivative, level }, options),
        None => plan_of(&Forward { operands, derivative, level }, options),
    }
}

/// A forward pass of attention or attention_lse.
struct Forward<'a> {
    operands: &'a Operands<'a>,
    /// True if ∂lse/∂q is wanted in place of o.
    derivative: bool,
    level: Level,
}

impl Forward<'_> {
    /// Columns of the result.
    fn width(&self) -> usize {
        let operands = self.operands;
        if self.derivative { operands.scores.extents.dim } else { operands.value_dim() }
    }
}

impl Streamed for Forward<'_> {
    type Scratch<'m> = ForwardScratch<'m>;

    fn operands(&self) -> &Operands<'_> {
        self.operands
    }

    fn packing(&self, options: &Options) -> Result<Packing<'_>, Error> {
        let Operands { scores, sequences, k, v, .. } = *self.operands;
        let cut = self.operands.cut(Pass::Forward, options, [FIRST_ORDER, BF16])?;
        let k = if self.derivative { Operand::both(Some(k)) } else { Operand::across(Some(k)) };
        let keys = [k, Operand::along(v), Operand::NONE, Operand::NONE];
        Ok(Packing { scores, sequences, cut, keys, queries: [Operand::NONE; 4], lse: None })
    }

    fn products(&self) -> usize {
        if self.width() == 0 { 1 } else { 2 }
    }

    fn scratch<'m>(&self, parts: &mut Parts<'m>, cut: &Cut, _: usize) -> ForwardScratch<'m> {
        ForwardScratch::new(parts, cut, self.operands.scores.extents.dim, self.width())
    }

    fn tile(&self, task: &mut Task<'_>, tile: Tile<'_>, scratch: &mut ForwardScratch<'_>) {
        let (has_nonfinite, bf16) = (tile.pack(&mut scratch.q), scratch.is_bf16());
        let kernel = ForwardTile {
            rule: tile.rule,
            keys: tile.keys,
            derivative: self.derivative,
            has_nonfinite,
            rows: task.place.rows.clone(),
            dim: self.operands.scores.extents.dim,
            width: self.width(),
            sink: self.operands.sinks.map(|sinks| sinks[task.place.head]),
            scratch: &mut *scratch,
        };
        match bf16 {
            true => self.level.run_tiles(kernel).unwrap_or_default(),
            false => self.level.run(kernel),
        }
        task.write_numbers(scratch.m);
        task.write(0, scratch.o, scratch.stride, 1.0);
    }
}
