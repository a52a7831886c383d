//! The host of linear_attention: chunks of tokens, and a state between them.

mod backward;
mod forward;

use super::host::{self, Results, Style};
use super::mutant::Mutant;
use etalon_problem::{Decay, Error, LinearAttention, Pass, TokenSequence, TokenSequences};
use ndarray::{Array2, Array3, Array4, Ix1, Ix3, Ix4};
use std::ops::Range;

/// The outputs of a request.
pub(super) fn results(problem: &LinearAttention, asked: &host::Job<'_>) -> Result<Results, Error> {
    let job = Job::new(problem, asked)?;
    Ok(match asked.request.pass {
        Pass::Forward | Pass::Step => job.forward(),
        _ => job.backward(),
    })
}

/// One request in f32.
struct Job {
    problem: LinearAttention,
    style: Style,
    mutant: Option<Mutant>,
    run: usize,
    q: Array4<f32>,
    k: Array4<f32>,
    v: Array4<f32>,
    /// g_t of every token; 0 where nothing decays.
    g: Array3<f32>,
    initial: Option<Array4<f32>>,
    dout: Option<Array4<f32>>,
    dfinal: Option<Array4<f32>>,
}

impl Job {
    fn new(problem: &LinearAttention, asked: &host::Job<'_>) -> Result<Self, Error> {
        let &host::Job { style, mutant, run, request } = asked;
        let step = request.pass == Pass::Step;
        let mut problem = problem.clone();
        if step {
            problem.extents.tokens = 1;
            problem.sequences = TokenSequences::Dense;
            (problem.initial_state, problem.final_state) = (true, true);
        }
        let array = |name: &str| -> Result<Option<Array4<f32>>, Error> {
            let Some(tensor) = request.inputs.get(name) else { return Ok(None) };
            let mut values = tensor.to_f64(name)?.mapv(|x| x as f32);
            if step && values.ndim() == 3 {
                values = values.insert_axis(ndarray::Axis(2));
            }
            let axes = || Error::value(format!("axes of `{name}`"), "4", tensor.shape.len());
            values.into_dimensionality::<Ix4>().map(Some).map_err(|_| axes())
        };
        let some = |name: &str| {
            let missing =
                || Error::Missing { operand: name.to_string(), reason: "of the pass".to_string() };
            array(name)?.ok_or_else(missing)
        };
        let mut job = Job {
            g: Array3::zeros(problem.g_shape()),
            style,
            mutant,
            run,
            q: some("q")?,
            k: some("k")?,
            v: some("v")?,
            initial: array("initial_state")?,
            dout: array("dout")?,
            dfinal: array("dfinal_state")?,
            problem,
        };
        job.read_gates(asked, step)?;
        Ok(job)
    }

    fn read_gates(&mut self, asked: &host::Job<'_>, step: bool) -> Result<(), Error> {
        let inputs = asked.request.inputs;
        if let Some(g_gamma) = inputs.get("g_gamma") {
            let values = g_gamma.to_f64("g_gamma")?.into_dimensionality::<Ix1>();
            let values = values.map_err(|_| Error::value("axes of `g_gamma`", "1", "others"))?;
            for ((_, h, _), g) in self.g.indexed_iter_mut() {
                *g = values[h] as f32;
            }
        }
        if let Some(g) = inputs.get("g") {
            let mut values = g.to_f64("g")?.mapv(|g| g as f32);
            if step {
                values = values.insert_axis(ndarray::Axis(2));
            }
            let values = values.into_dimensionality::<Ix3>();
            self.g = values.map_err(|_| Error::value("axes of `g`", "3", "others"))?;
        }
        for s in self.problem.list_sequences() {
            for h in 0..self.problem.extents.key_heads {
                for t in s.start..s.start + s.tokens {
                    if self.g[[s.batch, h, t]].is_nan() || self.g[[s.batch, h, t]] > 0.0 {
                        return Err(Error::value("g", "at most 0", self.g[[s.batch, h, t]]));
                    }
                }
            }
        }
        Ok(())
    }

    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    fn scale(&self) -> f32 {
        match self.is(Mutant::ScaleByWidth) {
            true => (self.problem.scale / (self.problem.extents.dim as f64).sqrt()) as f32,
            false => self.problem.scale as f32,
        }
    }

    fn exp(&self, x: f32) -> f32 {
        if self.style.base2 { (x * std::f32::consts::LOG2_E).exp2() } else { x.exp() }
    }

    /// The heads that read the state of a key head.
    fn queries(&self, key_head: usize) -> Vec<usize> {
        let e = &self.problem.extents;
        let reads = |head: usize| match self.is(Mutant::StateOfHeadModulo) {
            true => head % e.key_heads == key_head,
            false => head / self.problem.group() == key_head,
        };
        let mut heads: Vec<usize> = (0..e.query_heads).filter(|&head| reads(head)).collect();
        let turned = self.is(Mutant::StateRace) && self.run % 2 == 1;
        if self.style.backwards || turned {
            heads.reverse();
        }
        heads
    }

    /// A key head of a sequence.
    fn head<'a>(&'a self, s: &'a TokenSequence, h: usize) -> Head<'a> {
        Head { job: self, s, h }
    }
}

/// A key head of one sequence; tokens count within the sequence.
struct Head<'a> {
    job: &'a Job,
    s: &'a TokenSequence,
    h: usize,
}

impl Head<'_> {
    fn g(&self, t: usize) -> f32 {
        if self.job.is(Mutant::DecayIgnored) { 0.0 } else { self.raw_g(t) }
    }

    fn raw_g(&self, t: usize) -> f32 {
        self.job.g[[self.s.batch, self.h, self.s.start + t]]
    }

    fn chunks(&self) -> Vec<Range<usize>> {
        let (n, tile) = (self.s.tokens, self.job.style.tile);
        let dropped = self.job.is(Mutant::TailOfTokensDropped) && n > tile;
        let end = if dropped { n - n % tile } else { n };
        (0..end).step_by(tile).map(|start| start..(start + tile).min(end)).collect()
    }

    /// e to the sum of the log-decays of `tokens`; nothing where one of them is a reset.
    fn left(&self, tokens: Range<usize>) -> Option<f32> {
        let sum: f32 = tokens.map(|t| self.g(t)).sum();
        let forgets = sum == f32::NEG_INFINITY && !self.job.is(Mutant::ResetTimesZero);
        if forgets { None } else { Some(self.job.exp(sum)) }
    }

    /// (R20): P_ij within a chunk that begins with `start`.
    fn pair(&self, start: usize, j: usize, i: usize) -> Option<f32> {
        let sum = |from: usize, to: usize| (from..=to).map(|t| self.g(t)).sum::<f32>();
        match self.job.mutant {
            Some(Mutant::InverseDecay) => {
                let (to_i, to_j) = (self.job.exp(sum(start, i)), self.job.exp(sum(start, j)));
                Some(to_i * (1.0 / to_j))
            }
            Some(Mutant::PrefixDifference) => Some(self.job.exp(sum(0, i) - sum(0, j))),
            _ => self.left(j + 1..i + 1),
        }
    }

    /// α_i: what token i sees of the state before its chunk.
    fn state(&self, start: usize, i: usize) -> Option<f32> {
        let first = match self.job.mutant {
            Some(Mutant::QueryDecayOneShort) => start + 1,
            Some(Mutant::InitialStateUndecayed) if start == 0 => 1,
            _ => start,
        };
        self.left(first..i + 1)
    }

    fn key(&self, t: usize, d: usize) -> f32 {
        self.job.k[[self.s.batch, self.h, self.s.start + t, d]]
    }

    fn value(&self, t: usize, e: usize) -> f32 {
        self.job.v[[self.s.batch, self.h, self.s.start + t, e]]
    }

    fn query(&self, head: usize, t: usize, d: usize) -> f32 {
        self.job.q[[self.s.batch, head, self.s.start + t, d]]
    }

    fn dim(&self) -> usize {
        self.job.problem.extents.dim
    }

    fn width(&self) -> usize {
        self.job.problem.value_dim
    }

    /// What a tensor of states holds for this head.
    fn stored(&self, states: &Option<Array4<f32>>) -> Array2<f32> {
        match states {
            Some(x) => x.slice(ndarray::s![self.s.index, self.h, .., ..]).to_owned(),
            None => Array2::zeros((self.dim(), self.width())),
        }
    }

    /// x ← a x, or 0 at a reset.
    fn decay(x: &mut Array2<f32>, a: Option<f32>) {
        match a {
            Some(a) => x.mapv_inplace(|x| a * x),
            None => x.fill(0.0),
        }
    }

    /// Whether the constant decay of a head is what decays.
    fn constant(&self) -> bool {
        self.job.problem.decay == Decay::PerHead
    }
}
