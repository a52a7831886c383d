//! The forward pass of lazy attention: who computes which tile.

use super::cut::Cut;
use super::lazy_tile::{LazyScratch, LazyTile};
use super::operands::Operands;
use super::packs::{Operand, Packing};
use super::streamed::{Streamed, Tile};
use super::tasks::Task;
use crate::element::View;
use crate::workspace::Parts;
use crate::{Level, Options};
use etalon_problem::{Blocking, Error, Pass};
use ndarray::Ix1;

/// The blocking that was measured to be best: the weights of a tile of queries with all keys of a
/// sequence of a few thousand stay in the L2 cache, beside the keys and values of a tile.
const BLOCKING: Blocking = Blocking { queries: 48, keys: 192 };

/// The blocking in bf16.
const BF16: Blocking = Blocking { queries: 64, keys: 256 };

/// The cut of a forward pass, in bf16 where the options let it.
pub fn cut(operands: &Operands<'_>, options: &Options) -> Result<Cut, Error> {
    operands.cut(Pass::Forward, options, [BLOCKING, BF16])
}

/// A forward pass of lazy attention.
pub struct LazyForward<'a> {
    pub operands: &'a Operands<'a>,
    pub tau: View<'a, f32, Ix1>,
    /// True if Σ a P v is wanted beside o.
    pub pv: bool,
    pub level: Level,
}

impl LazyForward<'_> {
    /// The kernel of a tile of queries, which it packs.
    pub fn kernel<'t, 'a, 'm>(
        &self,
        task: &Task<'_>,
        tile: Tile<'a>,
        scratch: &'t mut LazyScratch<'m>,
    ) -> LazyTile<'t, 'a, 'm> {
        LazyTile {
            has_nonfinite: tile.pack(&mut scratch.q),
            rule: tile.rule,
            keys: tile.keys,
            rows: task.place.rows.clone(),
            dim: self.operands.scores.extents.dim,
            tau: self.tau[task.place.head],
            scratch,
        }
    }
}

impl Streamed for LazyForward<'_> {
    type Scratch<'m> = LazyScratch<'m>;

    fn operands(&self) -> &Operands<'_> {
        self.operands
    }

    fn packing(&self, options: &Options) -> Result<Packing<'_>, Error> {
        let Operands { scores, sequences, k, v, .. } = *self.operands;
        let cut = cut(self.operands, options)?;
        let keys = [Operand::across(Some(k)), Operand::along(v), Operand::NONE, Operand::NONE];
        Ok(Packing { scores, sequences, cut, keys, queries: [Operand::NONE; 4], lse: None })
    }

    fn products(&self) -> usize {
        if self.pv { 3 } else { 2 }
    }

    fn scratch<'m>(&self, parts: &mut Parts<'m>, cut: &Cut, keys: usize) -> LazyScratch<'m> {
        let dims = (self.operands.scores.extents.dim, self.operands.value_dim());
        LazyScratch::new(parts, cut, dims, keys, self.pv)
    }

    fn tile(&self, task: &mut Task<'_>, tile: Tile<'_>, scratch: &mut LazyScratch<'_>) {
        let bf16 = scratch.is_bf16();
        let kernel = self.kernel(task, tile, scratch);
        match bf16 {
            true => self.level.run_tiles(kernel).unwrap_or_default(),
            false => self.level.run(kernel),
        }
        task.write_numbers(scratch.lse);
        task.write(0, scratch.o, scratch.stride, 1.0);
        task.write(1, scratch.pv, scratch.stride, 1.0);
    }
}
