//! What decides how a pass of attention or attention_lse is computed: its problem, what is wanted of it, the device.

use crate::softmax::counts::Counts;
use crate::target::Target;
use etalon_problem::{Dtype, Mode, Pass, Scores};

/// A pass, before there is memory or a kernel for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub scores: &'a Scores,
    /// E; `None` of attention_lse.
    pub value_dim: Option<usize>,
    pub pass: Pass,
    pub storage: Dtype,
    pub counts: Counts,
    /// Whether rows of what kernels multiply begin and end at multiples of 16 bytes.
    pub whole: bool,
    /// Whether the gradient of q is wanted beside another that is computed by keys.
    pub both: bool,
    pub target: Target,
}

impl Asked<'_> {
    /// Whether the problem has a softcap, a bias or an array of flags.
    pub fn has_options(&self) -> bool {
        self.scores.softcap.is_some() || self.scores.bias.is_some() || self.counts.flags.is_some()
    }

    /// The larger of D and E.
    pub fn columns(&self) -> usize {
        self.scores.extents.dim.max(self.value_dim.unwrap_or(1))
    }

    /// Whether the backward pass of the level sm80 has accumulators of its own.
    pub fn is_wide(&self) -> bool {
        self.columns() > 128
    }

    /// Whether there is a choice of one sweep or two, and a mode insists on one.
    pub fn insists(&self, mode: Mode) -> bool {
        self.pass == Pass::Backward && self.both && mode == Mode::FusedPartials
    }
}
