//! Rows and decays of a key head, for both passes of linear_attention.

use super::bugs;
use crate::zoo::job::Job;
use crate::zoo::rows::{Rows, add, off_by};
use etalon_problem::{LinearAttention, TokenSequence};
use std::ops::Range;

/// A key head of one sequence; tokens count within the sequence.
pub(super) struct Head<'a> {
    pub job: &'a Job,
    pub problem: &'a LinearAttention,
    pub scale: f32,
    pub s: TokenSequence,
    pub h: usize,
    /// The log-decay of every token; 0 where nothing decays.
    pub g: Vec<f32>,
    q: &'a Rows,
    k: &'a Rows,
    v: &'a Rows,
    dout: &'a Rows,
}

impl<'a> Head<'a> {
    pub fn new(job: &'a Job, problem: &'a LinearAttention, s: TokenSequence, h: usize) -> Self {
        let [q, k, v, dout] = ["q", "k", "v", "dout"].map(|name| job.input(name));
        let (gates, gammas) = (job.given("g"), job.given("g_gamma"));
        let g = |t: usize| match (gates, gammas) {
            (Some(g), _) => g.row([s.batch, h, s.start + t])[0],
            (None, Some(g_gamma)) => g_gamma.data[h],
            (None, None) => 0.0,
        };
        let g = (0..s.tokens).map(g).collect();
        Head { job, problem, scale: problem.scale as f32, s, h, g, q, k, v, dout }
    }

    /// Position of a token's rows in k and v.
    pub fn at(&self, t: usize) -> [usize; 3] {
        [self.s.batch, self.h, self.s.start + t]
    }

    pub fn key(&self, t: usize) -> &'a [f32] {
        self.k.row(self.at(t))
    }

    pub fn value(&self, t: usize) -> &'a [f32] {
        self.v.row(self.at(t))
    }

    pub fn query(&self, head: usize, t: usize) -> &'a [f32] {
        self.q.row([self.s.batch, head, self.s.start + t])
    }

    pub fn dout(&self, head: usize, t: usize) -> &'a [f32] {
        self.dout.row([self.s.batch, head, self.s.start + t])
    }

    /// The query heads that read this state, in the order of the sums over them.
    pub fn queries(&self) -> Vec<usize> {
        let (job, e) = (self.job, &self.problem.extents);
        let reads = |head: &usize| match job.is(bugs::STATE_OF_HEAD_MODULO) {
            true => head % e.key_heads == self.h,
            false => head / self.problem.group() == self.h,
        };
        let mut heads: Vec<usize> = (0..e.query_heads).filter(reads).collect();
        let turned = job.is(bugs::STATE_RACE) && job.run % 2 == 1;
        if job.style.backwards || turned {
            heads.reverse();
        }
        heads
    }

    pub fn chunks(&self) -> Vec<Range<usize>> {
        self.job.tiles(self.s.tokens).collect()
    }

    /// The block of a tensor of states that belongs to this head, D × E; without one 0.
    pub fn stored(&self, name: &str) -> Vec<f32> {
        match self.job.given(name) {
            Some(states) => states.matrix(self.s.index, self.h).to_vec(),
            None => vec![0.0; self.problem.extents.dim * self.problem.value_dim],
        }
    }

    /// e to the sum of the log-decays of `tokens`; nothing where one of them is a reset.
    pub fn left(&self, tokens: Range<usize>) -> Option<f32> {
        let sum: f32 = self.g[tokens].iter().sum();
        let forgets = sum == f32::NEG_INFINITY && !self.job.is(bugs::RESET_TIMES_ZERO);
        let off = if self.job.is(bugs::DECAY_OFF) && sum < 0.0 { off_by(16.0) } else { 1.0 };
        if forgets { None } else { Some(self.job.exp(sum, 0.0) * off) }
    }

    /// (R20): P_ij within a chunk that begins with `start`.
    pub fn pair(&self, start: usize, j: usize, i: usize) -> Option<f32> {
        let sum = |from: usize, to: usize| self.g[from..=to].iter().sum::<f32>();
        let exp = |x| self.job.exp(x, 0.0);
        match self.job.bug {
            Some(bugs::INVERSE_DECAY) => Some(exp(sum(start, i)) * (1.0 / exp(sum(start, j)))),
            Some(bugs::PREFIX_DIFFERENCE) => Some(exp(sum(0, i) - sum(0, j))),
            _ => self.left(j + 1..i + 1),
        }
    }

    /// α_i: how much token i sees of the state before its chunk.
    pub fn state(&self, start: usize, i: usize) -> Option<f32> {
        let first = match self.job.bug {
            Some(bugs::QUERY_DECAY_ONE_SHORT) => start + 1,
            Some(bugs::INITIAL_STATE_UNDECAYED) if start == 0 => 1,
            _ => start,
        };
        self.left(first..i + 1)
    }
}

/// x ← a x, or 0 at a reset.
pub(super) fn decay(x: &mut [f32], a: Option<f32>) {
    match a {
        Some(a) => x.iter_mut().for_each(|x| *x *= a),
        None => x.fill(0.0),
    }
}

/// x ← x + a uᵀ v
pub(super) fn add_outer(x: &mut [f32], a: f32, u: &[f32], v: &[f32]) {
    for (x, u) in x.chunks_exact_mut(v.len()).zip(u) {
        add(x, a * u, v);
    }
}
