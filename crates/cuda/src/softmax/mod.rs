//! attention and attention_lse; and lazy_attention, which has their scores.

mod counts;
mod dq_partials;
mod draft;
mod fallback;
pub(crate) mod given;
mod hopper;
mod hopper_args;
mod hopper_backward;
mod hopper_lazy;
mod lazy;
mod lazy_args;
mod modules;
mod pair_args;
mod portable;
mod prepared;
mod rows;
mod second;
mod spec;
#[cfg(test)]
#[path = "../../tests/units/softmax/mod.rs"]
mod tests;
mod variants;
mod window;

pub(crate) use draft::{draft, draft_lazy, draft_stats};
pub(crate) use modules::chosen;
pub(crate) use spec::{LAZY_LEVELS, LEVELS};
pub(crate) use variants::{AttentionShape, Hopper, Lengths, Results, Visible};

use crate::args::{Declaration, Field, declarations};
use crate::step::{Grid, Work};
use crate::variant::KernelOf;
use etalon_problem::{Extents, Result, Scores, Sequences};
use given::TableArgs;
use hopper_args::{BackwardArgs, Elements, ForwardArgs, Packed, ScoreOptions, Shape, SpanTables};
use hopper_lazy::HopperLazyArgs;
use lazy_args::{LazyArgs, MeasureArgs};
use pair_args::{FallbackArgs, FusedArgs, PairArgs};
use second::{FusedSecondArgs, SecondArgs};

pub(crate) const ARGUMENTS: &[Declaration] = declarations! {
    PairArgs, FusedArgs, FallbackArgs, SecondArgs, FusedSecondArgs, LazyArgs, MeasureArgs, TableArgs,
    Shape, Packed, SpanTables, Elements, ScoreOptions, ForwardArgs, BackwardArgs, HopperLazyArgs
};

type Steps<'a> = crate::step::Steps<'a, prepared::Prepared<'a>>;

impl Steps<'_> {
    fn scores(&self) -> &Scores {
        self.prepared.scores
    }

    fn extents(&self) -> &Extents {
        &self.prepared.scores.extents
    }

    /// E; 0 of attention_lse.
    fn values(&self) -> usize {
        self.prepared.spec.value_dim.unwrap_or(0)
    }

    /// Blocks of a kernel that owns tiles of queries; below, of keys.
    fn query_blocks(&self) -> usize {
        self.prepared.spec.counts.by_queries * self.extents().query_heads
    }

    fn key_blocks(&self) -> usize {
        self.prepared.spec.counts.by_keys * self.extents().key_heads
    }

    /// Adds a launch that computes so many terms of each pair.
    fn launch_terms(&self, of: KernelOf<'_>, grid: Grid, args: &impl Field, terms: usize) -> Result<()> {
        self.launch_work(of, grid, args, Work::of(of.0, terms))
    }

    /// Adds fills of results with 0, and of lse with −∞, where kernels leave elements out: pairs of two sequences,
    /// too.
    fn fill_results(&self) -> Result<()> {
        let (leaves_rows, sequences) = (self.prepared.leaves_rows(), &self.prepared.scores.sequences);
        let leaves_pairs = matches!(sequences, Sequences::Packed { .. });
        let is_left = |name| leaves_rows || (leaves_pairs && ["dbias", "gbias"].contains(&name));
        for part in self.prepared.list.iter().filter(|part| !part.given && is_left(part.operand.name)) {
            let nothing = if part.operand.name == "lse" { f32::NEG_INFINITY } else { 0.0 };
            self.fill_part(part, nothing.to_bits())?;
        }
        Ok(())
    }
}
