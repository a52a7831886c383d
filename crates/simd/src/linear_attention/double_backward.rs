//! The double backward pass: the second order of a [`TwoSidedSweep`]. Its results are the tangents of
//! those of the backward pass, along the cotangents of the gradients and of the outputs.

use super::operands::Operands;
use super::scratch::Scratch;
use super::tangent::{Behind, Chunk};
use super::two_sided::{At, Body, TwoSidedSweep, write};
use crate::products::dot;
use ndarray::s;

/// The second order of a chunk.
pub struct Second {
    /// Whether the gradient by σ is computed.
    pub scale: bool,
}

impl Body for Second {
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
        let TwoSidedSweep { schedule, wanted, operands, .. } = sweep;
        let (rows, blank, wanted) = (at.rows(), at.blank, *wanted);
        let (len, shape, transposed) = (rows.len(), schedule.shape, schedule.transposed);
        Chunk { len, shape, transposed, wanted, blank, scratch }.run_at(schedule.options.level);
        let [dim, width] = scratch.strides;
        write(&mut at.to.dout, member, rows.clone(), scratch.gdout, width, 1.0);
        if self.scale {
            let head = at.place.head * schedule.problem.group() + member;
            add_scale(operands, at, head, scratch);
        }
        // gq = σ · tangent + ddσ · dq / σ
        let ([value, tangent], [scale, ddscale]) = (&mut scratch.dq, operands.scale);
        if at.to.q.is_some() && ddscale != 0.0 {
            let sum = tangent.iter_mut().zip(&**value);
            sum.for_each(|(x, y)| *x = scale * *x + ddscale * y);
            write(&mut at.to.q, member, rows, tangent, dim, 1.0);
        } else {
            write(&mut at.to.q, member, rows, tangent, dim, scale);
        }
    }
}

/// Adds what a chunk of a query head gives to gσ (R19), from dq / σ and its tangent.
fn add_scale(operands: &Operands<'_>, at: &mut At<'_, '_>, head: usize, scratch: &mut Scratch<'_>) {
    let Scratch { dq: [value, tangent], strides, row, .. } = scratch;
    for (operand, with) in operands.q.iter().zip([tangent, value]) {
        let Some(operand) = operand else { continue };
        let operand = at.place.rows(operand, head, &at.chunk);
        for (i, with) in (0..at.chunk.len()).zip(with.chunks(strides[0])) {
            operand.slice(s![i, ..]).read(row);
            at.sums[1] += f64::from(dot(row, &with[..row.len()]));
        }
    }
}
