//! The backward pass: the first order of a [`TwoSidedSweep`].

use super::gradient::{Behind, Chunk};
use super::scratch::Scratch;
use super::two_sided::{At, Body, TwoSidedSweep, write};

/// The first order of a chunk.
pub struct First;

impl Body for First {
    fn behind(&self, sweep: &TwoSidedSweep<'_>, len: usize, scratch: &mut Scratch<'_>) {
        let TwoSidedSweep { schedule, wanted, .. } = *sweep;
        let (shape, transposed) = (schedule.shape, schedule.transposed);
        Behind { len, shape, transposed, wanted, scratch }.run_at(schedule.options.level);
    }

    fn head(
        &self,
        sweep: &TwoSidedSweep<'_>,
        at: &mut At<'_, '_>,
        member: usize,
        scratch: &mut Scratch<'_>,
    ) {
        let TwoSidedSweep { schedule, wanted, .. } = *sweep;
        let (rows, blank, dscale) = (at.rows(), at.blank, &mut at.sums[1]);
        let (len, transposed) = (rows.len(), schedule.transposed);
        Chunk { len, transposed, wanted, blank, scratch, dscale }.run_at(schedule.options.level);
        write(&mut at.to.q, member, rows, scratch.dq[0], scratch.strides[0], scratch.scale);
    }
}
