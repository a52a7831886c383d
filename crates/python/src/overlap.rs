//! Memory that tensors share.
//!
//! dq, dk and dv may be slices of one tensor: bytes of one lie between those of another, and none is shared. Whether
//! one is, is a question of whole numbers: Σ sᵢ xᵢ = Δ with 0 ≤ xᵢ < nᵢ, of the strides of both.

/// The place of a tensor: its lowest address, and the absolute strides and extents of its axes, in bytes, and 1 and
/// the bytes of an element as the last.
#[derive(Debug, Clone)]
pub struct Place {
    start: usize,
    axes: Vec<(usize, usize)>,
}

/// Steps of a search after which memory counts as shared. Layouts that occur take a few.
const STEPS: usize = 10_000;

impl Place {
    /// `None` for a tensor without elements.
    pub fn new(
        start: usize,
        bytes: usize,
        axes: impl Iterator<Item = (usize, usize)>,
    ) -> Option<Self> {
        let mut axes: Vec<_> =
            axes.chain([(1, bytes)]).filter(|(_, extent)| *extent != 1).collect();
        axes.sort_unstable_by_key(|&(stride, _)| std::cmp::Reverse(stride));
        let has_none = axes.iter().any(|&(_, extent)| extent == 0);
        (!has_none).then_some(Place { start, axes })
    }

    /// True if each of its elements certainly has bytes of its own: every stride is beyond what smaller ones reach.
    pub fn is_disjoint(&self) -> bool {
        (0..self.axes.len()).all(|at| self.axes[at].0 > reach(&self.axes[at + 1..]))
    }

    /// True unless no byte is certainly shared.
    pub fn shares(&self, other: &Place) -> bool {
        let (low, high) = if self.start <= other.start { (self, other) } else { (other, self) };
        let apart = high.start - low.start;
        if apart > reach(&low.axes) {
            return false;
        }
        // low.start + Σ s x = high.start + Σ t y; with y = n − 1 − y' all terms are positive.
        let mut axes: Vec<_> = low.axes.iter().chain(&high.axes).copied().collect();
        axes.sort_unstable_by_key(|&(stride, _)| std::cmp::Reverse(stride));
        axes.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            kept.1 += if same { next.1 - 1 } else { 0 };
            same
        });
        is_sum(&axes, apart + reach(&high.axes), &mut 0)
    }
}

/// Bytes from the first to the last byte, less one.
fn reach(axes: &[(usize, usize)]) -> usize {
    axes.iter()
        .map(|&(stride, extent)| stride.saturating_mul(extent - 1))
        .fold(0, usize::saturating_add)
}

/// True if `target` is a sum of multiples of the strides, each by less than its extent, or that took too many steps.
fn is_sum(axes: &[(usize, usize)], target: usize, steps: &mut usize) -> bool {
    *steps += 1;
    let [(stride, extent), rest @ ..] = axes else { return target == 0 };
    if *stride == 0 {
        return is_sum(rest, target, steps);
    }
    let least = target.saturating_sub(reach(rest)).div_ceil(*stride);
    let most = (target / stride).min(extent - 1);
    (least..=most).any(|x| *steps > STEPS || is_sum(rest, target - x * stride, steps))
}
