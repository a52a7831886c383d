//! Decays between two places of a chunk, (R20).

use super::Cut;
use crate::aligned::Aligned;
use crate::exp::exp2;
use crate::lanes::{Isa, Lanes};
use crate::tile::{STRIDE, Tile};
use etalon_problem::Error;
use ndarray::ArrayView1;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// The log-decays of one key head in one sequence.
#[derive(Debug, Clone, Copy)]
pub enum Gates<'a> {
    /// None: every decay is 1.
    None,
    /// The same at every token.
    Constant(f32),
    /// One per token of the sequence.
    PerToken(ArrayView1<'a, f32>),
}

impl Gates<'_> {
    /// The sum of the log-decays of some tokens.
    pub fn sum(&self, tokens: Range<usize>) -> f64 {
        match self {
            Gates::None => 0.0,
            Gates::Constant(g) => f64::from(*g) * tokens.len() as f64,
            Gates::PerToken(g) => tokens.map(|t| f64::from(g[t])).sum(),
        }
    }
}

/// The decays of a chunk. Where one is 0, be it for a reset, what it would multiply is absent.
#[derive(Debug)]
pub struct Decays {
    /// α_i: from the chunk's begin to each token.
    pub alpha: Aligned,
    /// ω_j: from each token to the chunk's end.
    pub omega: Aligned,
    /// α_L: over the whole chunk.
    pub whole: f32,
    /// The first token that is seen from behind the chunk.
    pub first: usize,
    /// The first token that does not see what is before the chunk, be it none of them.
    pub reset: usize,
    /// Whether nothing decays.
    pub none: bool,
    /// The log-decays of the chunk.
    gates: Aligned,
    /// e^{g n} for n falling to 0, and zeros behind: what a token sees of those before it and of those
    /// after it. Of a constant gate alone.
    powers: Aligned,
    /// The constant gate that `powers` are of.
    constant: Option<f32>,
    /// Sums of log-decays from each token of the chunk to the one whose decays are asked for.
    sums: Aligned,
    /// Tokens of the chunk.
    len: usize,
}

/// Elements beyond the last of a chunk that a sweep of registers may touch.
const SPARE: usize = 32;

impl Decays {
    /// Room for a chunk.
    pub fn room(cut: &Cut) -> Result<Self, Error> {
        let zeros = |len| Aligned::zeros(len, "the decays of a chunk");
        let chunk = cut.chunk + SPARE;
        Ok(Decays {
            alpha: zeros(chunk)?,
            omega: zeros(chunk)?,
            whole: 1.0,
            first: 0,
            reset: 0,
            none: true,
            gates: zeros(chunk)?,
            powers: zeros(2 * chunk)?,
            constant: None,
            sums: zeros(chunk)?,
            len: 0,
        })
    }

    /// Bytes of its memory.
    pub fn bytes(&self) -> usize {
        let Decays { alpha, omega, gates, powers, sums, .. } = self;
        [alpha, omega, gates, powers, sums].map(Aligned::bytes).iter().sum()
    }

    /// The decays of some tokens of a sequence, at most a chunk.
    pub fn prepare(&mut self, level: crate::Level, gates: &Gates<'_>, tokens: Range<usize>) {
        self.len = tokens.len();
        self.none = matches!(gates, Gates::None);
        (self.first, self.reset) = (0, self.len);
        match gates {
            Gates::None => {
                self.alpha.fill(1.0);
                self.omega.fill(1.0);
                self.whole = 1.0;
                return;
            }
            Gates::Constant(g) => {
                self.gates.fill(*g);
                if self.constant.map(f32::to_bits) != Some(g.to_bits()) {
                    self.constant = Some(*g);
                    let zero = self.powers.len() / 2;
                    for (n, power) in self.powers[..zero].iter_mut().rev().enumerate() {
                        // n = 0 must be 1 also for a gate of −∞.
                        let log = if n == 0 { 0.0 } else { f64::from(*g) * n as f64 };
                        *power = log.exp() as f32;
                    }
                }
            }
            Gates::PerToken(g) => {
                self.constant = None;
                for (gate, t) in self.gates.iter_mut().zip(tokens) {
                    *gate = g[t];
                }
            }
        }
        let here = &self.gates[..self.len];
        let reset = |g: &f32| *g == f32::NEG_INFINITY;
        self.first = here.iter().rposition(reset).unwrap_or(0);
        self.reset = here.iter().position(reset).unwrap_or(self.len);
        let mut sum = 0.0f64;
        for (alpha, &g) in self.alpha.iter_mut().zip(here) {
            sum += f64::from(g);
            *alpha = sum as f32;
        }
        let mut sum = 0.0f64;
        for (omega, &g) in self.omega[..self.len].iter_mut().zip(here).rev() {
            *omega = sum as f32;
            sum += f64::from(g);
        }
        level.run(Exponentials([&mut self.alpha, &mut self.omega], self.len));
        self.whole = if self.len == 0 { 1.0 } else { self.alpha[self.len - 1] };
    }

    /// Writes P_ij for the register block of tokens from `first` on, and the columns `cols`, into rows
    /// [`STRIDE`] apart; 0 where j > i. The blocks of the same columns are to be asked for in
    /// ascending order, the first with `begin`.
    #[inline(always)]
    pub fn rows<I: Isa>(
        &mut self,
        isa: I,
        first: usize,
        cols: Range<usize>,
        begin: bool,
        p: &mut [f32],
    ) {
        let width = cols.len().next_multiple_of(I::F32::N);
        if self.constant.is_some() {
            for r in 0..I::Tile::ROWS {
                // The power 0 belongs to column i.
                let from = self.powers.len() / 2 - 1 + cols.start - (first + r);
                let p = &mut p[r * STRIDE + cols.start..][..width];
                p.copy_from_slice(&self.powers[from..][..width]);
            }
            return;
        }
        if begin {
            self.sums.fill(f32::NEG_INFINITY);
            // What lies between the first column and the first row.
            for i in cols.start..first {
                self.pass(isa, i, &cols);
            }
        }
        for r in 0..I::Tile::ROWS {
            self.pass(isa, first + r, &cols);
            let p = p[r * STRIDE + cols.start..][..width].chunks_exact_mut(I::F32::N);
            let sums = self.sums[cols.start..][..width].chunks_exact(I::F32::N);
            for (p, sum) in p.zip(sums) {
                exp2(isa, I::F32::load(isa, sum) * I::F32::splat(isa, LOG2_E)).store(p);
            }
        }
    }

    /// One token more: its log-decay joins all sums, and its own begins with 0.
    #[inline(always)]
    fn pass<I: Isa>(&mut self, isa: I, i: usize, cols: &Range<usize>) {
        if i >= self.len {
            return; // a row that only fills the register block
        }
        let gate = I::F32::splat(isa, self.gates[i]);
        let width = cols.len().next_multiple_of(I::F32::N);
        for sum in self.sums[cols.start..][..width].chunks_exact_mut(I::F32::N) {
            (I::F32::load(isa, sum) + gate).store(sum);
        }
        if cols.contains(&i) {
            self.sums[i] = 0.0;
        }
    }
}

/// e to the first elements of some lists.
struct Exponentials<'a>([&'a mut [f32]; 2], usize);

impl crate::lanes::Kernel for Exponentials<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for list in self.0 {
            for x in list[..self.1.next_multiple_of(I::F32::N)].chunks_exact_mut(I::F32::N) {
                exp2(isa, I::F32::load(isa, x) * I::F32::splat(isa, LOG2_E)).store(x);
            }
        }
    }
}

/// Fails unless the log-decay of every head is at most 0.
pub fn check_constant(g_gamma: &Option<ArrayView1<'_, f32>>) -> Result<(), Error> {
    let mut heads = g_gamma.iter().flatten().enumerate();
    heads.try_for_each(|(head, &g)| check_log_decay("g_gamma", &[head], g))
}

/// Fails unless `g` is at most 0.
pub fn check_log_decay(name: &str, index: &[usize], g: f32) -> Result<(), Error> {
    if g <= 0.0 {
        return Ok(());
    }
    Err(Error::value(format!("{name}{index:?}"), "at most 0", g))
}
