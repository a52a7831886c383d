//! What a filter leaves out of dh and dw: `kernels/cross_entropy_filter.cu`.

use crate::cross_entropy::call::Call;
use crate::cross_entropy::plan::{Plan, SIDE, TILE};
use crate::gpu::Kernels;
use crate::queue::Queue;
use crate::room::{Layout, Room, memory};
use cudarc::driver::DeviceRepr;
use etalon_problem::linear_cross_entropy::Filter;
use etalon_problem::{Error, LinearCrossEntropy};

/// A filter, and where it keeps what it finds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Filtering {
    filter: Filter,
    of_tokens: Room,
    of_classes: Room,
    by_token: Room,
    by_class: Room,
    /// A byte for each band of tokens and tile of classes: 1 where it is left out.
    pub left_out: Room,
    /// B of (C37) and C of (C38).
    pub dh: Room,
    pub dw: Room,
}

/// `Filter` of `cross_entropy_filter.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Told {
    call: Call,
    left_out: u64,
    of_tokens: u64,
    of_classes: u64,
    by_token: u64,
    by_class: u64,
    dh: u64,
    dw: u64,
    eps: f32,
    most_dh: f32,
    most_dw: f32,
    diagonal: i32,
}

// SAFETY: the fields, their types and their order are those of `Filter` in `cross_entropy_filter.cu`, and it
// holds no reference of the host.
unsafe impl DeviceRepr for Told {}

impl Filtering {
    /// Lays its memory out. Fails where [`Filter::check`] does.
    pub fn new(
        filter: Filter,
        problem: &LinearCrossEntropy,
        plan: &Plan,
        layout: &mut Layout,
    ) -> Result<Filtering, Error> {
        filter.check()?;
        let (bands, tiles) = (problem.tokens.div_ceil(SIDE), problem.vocab.div_ceil(TILE));
        let mut room = |x: usize, y: usize, bytes: usize| {
            let all = x.checked_mul(y).and_then(|all| all.checked_mul(bytes));
            layout.room(all.ok_or_else(|| memory(usize::MAX))?)
        };
        Ok(Filtering {
            filter,
            of_tokens: room(problem.tokens, 1, 4)?,
            of_classes: room(tiles, 1, 4)?,
            by_token: room(plan.rows, plan.columns / TILE, 4)?,
            by_class: room(plan.rows / SIDE, plan.columns, 4)?,
            left_out: room(bands, tiles, 1)?,
            dh: room(problem.tokens, 1, 4)?,
            dw: room(problem.vocab, 1, 4)?,
        })
    }

    fn told(&self, call: &Call, scratch: u64) -> Told {
        let at = |room: Room| room.address(scratch);
        let (eps, most_dh, most_dw) = match self.filter {
            Filter::Below { eps } => (above(eps), f32::MAX, f32::MAX),
            Filter::Within { dh, dw } => (f32::INFINITY, below(dh), below(dw)),
        };
        Told {
            call: *call,
            left_out: at(self.left_out),
            of_tokens: at(self.of_tokens),
            of_classes: at(self.of_classes),
            by_token: at(self.by_token),
            by_class: at(self.by_class),
            dh: at(self.dh),
            dw: at(self.dw),
            eps,
            most_dh,
            most_dw,
            diagonal: 0,
        }
    }

    /// Before the first chunk: nothing is left out. Norms of the tokens that count and of the classes.
    pub fn begin(
        &self,
        (queue, kernels): (&Queue<'_>, &Kernels),
        call: &Call,
        scratch: u64,
    ) -> Result<(), Error> {
        for room in [self.left_out, self.dh, self.dw] {
            queue.fill(room.address(scratch), room.bytes, 0)?;
        }
        let blocks = (call.all as u64).div_ceil(8) + (call.vocab as u64).div_ceil(TILE as u64);
        queue.launch(kernels.get("norms")?, blocks, (256, 0), &self.told(call, scratch))
    }

    /// Which tiles of a chunk are left out, from its gradients of logits (C36).
    pub fn choose(
        &self,
        (queue, kernels): (&Queue<'_>, &Kernels),
        call: &Call,
        scratch: u64,
    ) -> Result<(), Error> {
        let told = self.told(call, scratch);
        let (bands, tiles) = (
            (call.count as u64).div_ceil(SIDE as u64),
            (call.classes as u64).div_ceil(TILE as u64),
        );
        queue.launch(kernels.get("measure")?, bands * tiles, (256, 0), &told)?;
        match self.filter {
            Filter::Below { .. } => {
                let blocks = (call.count as u64 + call.classes as u64).div_ceil(256);
                queue.launch(kernels.get("certify")?, blocks, (256, 0), &told)
            }
            Filter::Within { .. } => (0..(bands + tiles).saturating_sub(1)).try_for_each(|at| {
                let told = Told { diagonal: at as i32, ..told };
                let first = (at + 1).saturating_sub(tiles);
                queue.launch(kernels.get("choose")?, bands.min(at + 1) - first, (256, 0), &told)
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
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_rounded_to_the_safe_side() {
        let third = 1.0 / 3.0;
        assert!(f64::from(above(third)) > third && f64::from(below(third)) < third);
        assert_eq!((above(0.0), below(0.0), above(0.5), below(0.5)), (0.0, 0.0, 0.5, 0.5));
        assert_eq!((below(1e300), above(1e-300)), (f32::MAX, f32::from_bits(1)));
    }
}
