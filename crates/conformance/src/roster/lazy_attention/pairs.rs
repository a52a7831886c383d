//! Properties of a pair that both passes of lazy_attention use: its distance, its score, and its activity.

use super::bugs;
use crate::roster::attention::{Heads, Query, Score};
use crate::zoo::job::Job;
use crate::zoo::rows::through_bf16;
use etalon_problem::{Align, LazyAttention};

/// One request.
pub(super) struct Lazy<'a> {
    pub job: &'a Job,
    pub problem: &'a LazyAttention,
    pub heads: Heads<'a>,
}

impl<'a> Lazy<'a> {
    pub fn new(job: &'a Job, problem: &'a LazyAttention) -> Self {
        Lazy { job, problem, heads: Heads::new(job, &problem.scores) }
    }

    /// The column of the bias that belongs to a pair, if it has one.
    pub fn distance(&self, Query { sequence, i, .. }: Query, j: usize) -> Option<usize> {
        let reach = self.problem.bias?;
        let mut far = i as i64 - j as i64;
        if reach.align == Align::BottomRight {
            far += sequence.keys as i64 - sequence.queries as i64;
        }
        if self.job.is(bugs::DISTANCE_ACROSS_SEQUENCES) {
            far += sequence.query_start as i64 - sequence.key_start as i64;
        }
        if self.job.is(bugs::DISTANCE_WITHOUT_SIGN) {
            far = far.abs();
        }
        let far = usize::try_from(far).ok()?;
        match self.job.bug {
            Some(bugs::REACH_PLUS_ONE) if far == reach.width => Some(far - 1),
            Some(bugs::BIAS_CLAMPED) => Some(far.min(reach.width - 1)),
            Some(bugs::LAST_COLUMN_IGNORED) if far + 1 == reach.width => None,
            _ => Some(far).filter(|&far| far < reach.width),
        }
    }

    /// (E1), (E2)
    pub fn scores(&self, query: Query) -> Vec<Score> {
        let bias = self.job.input("bias");
        let of = |far| bias.row([query.h, far, 0])[0];
        self.heads.row(query, |j| self.distance(query, j).map_or(0.0, of))
    }

    pub fn tau(&self, query: Query) -> f32 {
        self.job.input("tau").data[query.h]
    }

    /// P + τ/n of a row with n visible keys, and whether that is active.
    pub fn raised(&self, query: Query, j: usize, n: usize, p: f32) -> (f32, bool) {
        let count = match self.job.bug {
            Some(bugs::ROW_NUMBER_AS_COUNT) => query.i + 1,
            Some(bugs::KEY_NUMBER_AS_COUNT) => j + 1,
            Some(bugs::LENGTH_AS_COUNT) => query.sequence.keys,
            _ => n,
        };
        let offset = self.tau(query) / count as f32;
        let raised = match self.job.bug {
            Some(bugs::INTEGER_DIVISION) => p + offset.trunc(),
            Some(bugs::THRESHOLD_IN_BF16) => through_bf16(through_bf16(p) + through_bf16(offset)),
            _ => p + offset,
        };
        let active = match self.job.bug {
            Some(bugs::KINK_IS_ACTIVE) => raised >= 0.0 || raised.is_nan(),
            Some(bugs::NAN_IS_INACTIVE) => raised > 0.0,
            _ => raised > 0.0 || raised.is_nan(),
        };
        (raised, active)
    }
}
