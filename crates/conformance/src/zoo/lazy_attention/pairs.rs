//! What both passes of lazy_attention know of a pair: its distance, its score, and whether it is
//! active.

use crate::zoo::job::{Job, through_bf16};
use crate::zoo::mutant::Mutant;
use crate::zoo::scores::{Heads, Query, Score};
use etalon_problem::{Align, LazyAttention};

/// One request.
pub(super) struct Lazy<'a> {
    pub job: &'a Job,
    pub problem: &'a LazyAttention,
    pub heads: Heads<'a>,
    tau: &'a [f32],
}

impl<'a> Lazy<'a> {
    pub fn new(job: &'a Job, problem: &'a LazyAttention) -> Self {
        let tau = &job.input("tau").data;
        Lazy { job, problem, heads: Heads::new(job, &problem.scores), tau }
    }

    /// The column of the bias that belongs to a pair, if it has one.
    pub fn distance(&self, Query { sequence, i, .. }: Query, j: usize) -> Option<usize> {
        let reach = self.problem.bias?;
        let mut far = i as i64 - j as i64;
        if reach.align == Align::BottomRight {
            far += sequence.keys as i64 - sequence.queries as i64;
        }
        if self.job.is(Mutant::DistanceAcrossSequences) {
            far += sequence.query_start as i64 - sequence.key_start as i64;
        }
        if self.job.is(Mutant::DistanceWithoutSign) {
            far = far.abs();
        }
        let far = usize::try_from(far).ok()?;
        match self.job.mutant {
            Some(Mutant::ReachPlusOne) if far == reach.width => Some(far - 1),
            Some(Mutant::BiasClamped) => Some(far.min(reach.width - 1)),
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
        self.tau[query.h]
    }

    /// P + τ/n of a row with n visible keys, and whether that is active.
    pub fn raised(&self, query: Query, j: usize, n: usize, p: f32) -> (f32, bool) {
        let count = match self.job.mutant {
            Some(Mutant::RowNumberAsCount) => query.i + 1,
            Some(Mutant::KeyNumberAsCount) => j + 1,
            Some(Mutant::LengthAsCount) => query.sequence.keys,
            _ => n,
        };
        let offset = self.tau(query) / count as f32;
        let raised = match self.job.mutant {
            Some(Mutant::IntegerDivision) => p + offset.trunc(),
            Some(Mutant::ThresholdInBf16) => through_bf16(through_bf16(p) + through_bf16(offset)),
            _ => p + offset,
        };
        let active = match self.job.mutant {
            Some(Mutant::KinkIsActive) => raised >= 0.0 || raised.is_nan(),
            Some(Mutant::NanIsInactive) => raised > 0.0,
            _ => raised > 0.0 || raised.is_nan(),
        };
        (raised, active)
    }
}
