//! The host of lazy_attention: a sweep for lse, a sweep for o, a sweep for the gradients.

mod backward;
mod forward;

use super::attention::Rows;
use super::host::{self, Results, Style, through_bf16};
use super::mutant::Mutant;
use etalon_problem::{Error, LazyAttention, Pass, Sequence};
use std::collections::BTreeMap;
use std::ops::Range;

/// The outputs of a request.
pub(super) fn results(problem: &LazyAttention, asked: &host::Job<'_>) -> Result<Results, Error> {
    let job = Job::new(problem, asked)?;
    let forward = job.forward();
    let rows = match asked.request.pass {
        Pass::Forward => BTreeMap::from([("o", forward.o), ("lse", forward.lse)]),
        _ => job.backward(&forward),
    };
    Ok(rows.into_iter().map(|(name, rows)| (name, rows.data)).collect())
}

/// One request in f32.
struct Job<'a> {
    problem: &'a LazyAttention,
    style: Style,
    mutant: Option<Mutant>,
    q: Rows,
    k: Rows,
    v: Rows,
    bias: Rows,
    tau: Vec<f32>,
    dout: Rows,
    dlse: Option<Rows>,
}

impl<'a> Job<'a> {
    fn new(problem: &'a LazyAttention, asked: &host::Job<'_>) -> Result<Self, Error> {
        let &host::Job { style, mutant, request, .. } = asked;
        let rows = |name: &str| -> Result<Option<Rows>, Error> {
            let Some(tensor) = request.inputs.get(name) else { return Ok(None) };
            let mut shape = [1; 4];
            shape[..tensor.shape.len()].copy_from_slice(&tensor.shape);
            let mut rows = Rows::filled(shape, 0.0);
            rows.data = tensor.to_f64(name)?.iter().map(|&x| x as f32).collect();
            Ok(Some(rows))
        };
        let need = |name: &str| rows(name).map(Option::unwrap_or_default);
        Ok(Job {
            problem,
            style,
            mutant,
            q: need("q")?,
            k: need("k")?,
            v: need("v")?,
            bias: need("bias")?,
            tau: need("tau")?.data,
            dout: need("dout")?,
            dlse: rows("dlse")?,
        })
    }

    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// The key tiles of a sequence.
    fn tiles(&self, sequence: &Sequence) -> Vec<Range<usize>> {
        let (m, tile) = (sequence.keys, self.style.tile);
        (0..m).step_by(tile).map(|start| start..(start + tile).min(m)).collect()
    }

    fn group(&self) -> usize {
        self.problem.scores.group().max(1)
    }

    /// Where the bias of a pair lies, if it has one.
    fn distance(&self, sequence: &Sequence, i: usize, j: usize) -> Option<usize> {
        let reach = self.problem.bias?;
        let mut sequence = *sequence;
        let (mut i, mut j) = (i, j);
        if self.is(Mutant::DistanceFromTopLeft) {
            sequence.queries = sequence.keys;
        }
        if self.is(Mutant::DistanceAcrossSequences) {
            (i, j) = (i + sequence.query_start, j + sequence.key_start);
        }
        // Signed, and without an end.
        let wide = etalon_problem::DistanceBias { width: usize::MAX, ..reach };
        let mut far = wide.distance(&sequence, i, j);
        if self.is(Mutant::DistanceWithoutSign) && far.is_none() {
            let back = Sequence { queries: sequence.keys, keys: sequence.queries, ..sequence };
            far = wide.distance(&back, j, i);
        }
        let far = far?;
        let end = reach.width - usize::from(self.is(Mutant::LastColumnIgnored));
        match self.mutant {
            Some(Mutant::ReachPlusOne) if far == reach.width => Some(far - 1),
            Some(Mutant::BiasClamped) => Some(far.min(reach.width - 1)),
            _ => Some(far).filter(|&d| d < end),
        }
    }

    fn visible(&self, sequence: &Sequence, h: usize, i: usize, j: usize) -> bool {
        let hidden = self.is(Mutant::ReachIsAMask)
            && self.problem.bias.is_some()
            && self.distance(sequence, i, j).is_none();
        !hidden && self.problem.scores.mask.allows(sequence, h, i, j)
    }

    /// (E1), (E2).
    fn score(&self, sequence: &Sequence, h: usize, i: usize, j: usize) -> f32 {
        let &Sequence { batch, query_start, key_start, .. } = sequence;
        let q = self.q.row(batch, h, query_start + i);
        let k = self.k.row(batch, h / self.group(), key_start + j);
        let dot: f32 = q.iter().zip(k).map(|(a, b)| a * b).sum();
        let width = self.problem.bias.map_or(0, |reach| reach.width);
        let bias = self.distance(sequence, i, j).map_or(0.0, |d| self.bias.data[h * width + d]);
        self.problem.scores.scale() as f32 * dot + bias
    }

    /// τ/n of a row; the key counts in one mutant alone.
    fn offset(&self, h: usize, i: usize, j: usize, n: usize, keys: usize) -> f32 {
        let head = if self.is(Mutant::TauOfFirstHead) { 0 } else { h };
        let count = match self.mutant {
            Some(Mutant::RowNumberAsCount) => i + 1,
            Some(Mutant::KeyNumberAsCount) => j + 1,
            Some(Mutant::LengthAsCount) => keys,
            _ => n,
        };
        let offset = self.tau[head] / count as f32;
        if self.is(Mutant::IntegerDivision) { offset.trunc() } else { offset }
    }

    /// P + τ/n, and whether that is active.
    fn raised(&self, p: f32, offset: f32) -> (f32, bool) {
        let raised = match self.is(Mutant::ThresholdInBf16) {
            true => through_bf16(through_bf16(p) + through_bf16(offset)),
            false => p + offset,
        };
        let active = match self.mutant {
            Some(Mutant::KinkIsActive) => raised >= 0.0 || raised.is_nan(),
            Some(Mutant::NanIsInactive) => raised > 0.0,
            _ => raised > 0.0 || raised.is_nan(),
        };
        (raised, active)
    }

    fn exp(&self, x: f32) -> f32 {
        if self.is(Mutant::ExpOfZero) && x == 0.0 {
            return 1.0 + f32::EPSILON;
        }
        if self.style.base2 { (x * std::f32::consts::LOG2_E).exp2() } else { x.exp() }
    }
}
