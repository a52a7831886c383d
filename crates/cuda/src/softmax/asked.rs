//! What decides how a pass of attention or attention_lse is computed: its problem, what is wanted of it, the device.

use crate::softmax::rows::{Rows, SIDE};
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

/// How many tiles of 64 rows there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Of queries and of keys, of all sequences.
    pub by_queries: usize,
    pub by_keys: usize,
    /// Of the keys of the longest sequence.
    pub longest: usize,
    pub sequences: usize,
    /// Whether spans do not tell all pairs that count.
    pub flags: bool,
}

impl Counts {
    /// As kernels are told of them.
    pub fn of_rows(rows: &Rows) -> Counts {
        Counts {
            by_queries: rows.by_queries.len(),
            by_keys: rows.by_keys.len(),
            longest: rows.by_keys.iter().map(|task| task[3] as usize + 1).max().unwrap_or(0),
            sequences: rows.sequences.len(),
            flags: rows.allowed.is_some(),
        }
    }

    /// The same without their tables.
    pub fn of_scores(scores: &Scores) -> Counts {
        let list = scores.sequences();
        let tiles = |rows: usize| rows.div_ceil(SIDE);
        Counts {
            by_queries: list.iter().map(|s| tiles(s.queries)).sum(),
            by_keys: list.iter().map(|s| tiles(s.keys)).sum(),
            longest: list.iter().map(|s| tiles(s.keys)).max().unwrap_or(0),
            sequences: list.len(),
            // Of no mask some rows are spans and others not.
            flags: list.iter().any(|s| s.queries > 0 && scores.mask.row_span(s, 0).is_none()),
        }
    }
}

impl Asked<'_> {
    /// Whether the problem has a softcap, a bias or an array of flags.
    pub fn has_options(&self) -> bool {
        self.scores.softcap.is_some() || self.scores.bias.is_some() || self.counts.flags
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

#[cfg(test)]
mod tests {
    use super::*;
    use etalon_problem::{Extents, Mask, Sequences};

    #[test]
    fn tiles_are_counted_without_their_tables() {
        let extents =
            Extents { batch: 2, query_heads: 2, key_heads: 1, queries: 150, keys: 200, dim: 8 };
        let lengths = Sequences::Lengths { query: vec![130, 0], key: vec![65, 200] };
        for sequences in [Sequences::Dense, lengths] {
            let either = vec![Mask::window(2, 0), Mask::window(None, 0)];
            for mask in [Mask::Full, Mask::causal(), Mask::Or(either)] {
                let plain = Scores::new(extents);
                let scores = Scores { mask, sequences: sequences.clone(), ..plain };
                let rows = Rows::new(&scores).unwrap();
                assert_eq!(Counts::of_scores(&scores), Counts::of_rows(&rows), "{scores:?}");
            }
        }
    }
}
