//! Decays between two places of a chunk, (R20).

use super::cut::Cut;
use crate::exp::exp;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::tile::{STRIDE, Tile};
use crate::workspace::Parts;
use etalon_problem::{Error, TokenSequence};
use ndarray::{ArrayView1, ArrayView3, s};
use std::ops::Range;

/// The log-decays of a problem, or their tangents.
#[derive(Debug, Clone, Copy, Default)]
pub struct Logs<'a> {
    /// One per key head, `[Hk]`.
    pub by_head: Option<ArrayView1<'a, f32>>,
    /// One per token, `[B, Hk, N]`.
    pub by_token: Option<ArrayView3<'a, f32>>,
}

impl<'a> Logs<'a> {
    /// The log-decays, or tangents, of a key head in a sequence.
    pub fn of(self, sequence: &TokenSequence, head: usize) -> Gates<'a> {
        let tokens = sequence.start..sequence.start + sequence.tokens;
        match (self.by_head, self.by_token) {
            (Some(list), _) => Gates::Constant(list[head]),
            (_, Some(g)) => Gates::PerToken(g.slice_move(s![sequence.batch, head, tokens])),
            _ => Gates::None,
        }
    }

    /// Fails if a log-decay of a head, or of a token that belongs to a sequence, is positive or NaN.
    pub fn check(&self, sequences: &[TokenSequence]) -> Result<(), Error> {
        for (head, &g) in self.by_head.iter().flatten().enumerate() {
            check_log_decay("g_gamma", &[head], g)?;
        }
        let Some(g) = &self.by_token else { return Ok(()) };
        for s in sequences {
            let here = g.slice(s![s.batch, .., s.start..s.start + s.tokens]);
            for ((head, t), &g) in here.indexed_iter() {
                check_log_decay("g", &[s.batch, head, s.start + t], g)?;
            }
        }
        Ok(())
    }

    /// The same of one token for every batch element, which has no axis of its own for the caller.
    pub fn check_step(&self) -> Result<(), Error> {
        Logs { by_token: None, ..*self }.check(&[])?;
        let mut tokens = self.by_token.iter().flat_map(|g| g.indexed_iter());
        tokens.try_for_each(|((b, head, _), &g)| check_log_decay("g", &[b, head], g))
    }
}

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

/// Numbers of the tokens of a chunk, log-decays or their tangents, and their sums between two places.
#[derive(Debug)]
struct Sums<'m> {
    each: &'m mut [f32],
    /// From behind each token to the one that was passed last.
    between: &'m mut [f32],
    /// Tokens of the chunk.
    len: usize,
}

/// Elements beyond the last of a chunk that a sweep of registers may touch.
const SPARE: usize = 32;

impl<'m> Sums<'m> {
    fn new(parts: &mut Parts<'m>, len: usize) -> Self {
        Sums { each: parts.room(len), between: parts.room(len), len: 0 }
    }
}

impl Sums<'_> {
    /// Reads the numbers, and sums them from the chunk's begin to each token and from behind each
    /// token to the chunk's end.
    fn prepare(&mut self, gates: &Gates<'_>, tokens: Range<usize>, [begin, end]: [&mut [f32]; 2]) {
        self.len = tokens.len();
        match gates {
            Gates::None => self.each.fill(0.0),
            Gates::Constant(g) => self.each.fill(*g),
            Gates::PerToken(g) => {
                for (each, t) in self.each.iter_mut().zip(tokens) {
                    *each = g[t];
                }
            }
        }
        let each = &self.each[..self.len];
        let mut sum = 0.0f64;
        for (to, &g) in begin.iter_mut().zip(each) {
            sum += f64::from(g);
            *to = sum as f32;
        }
        let mut sum = 0.0f64;
        for (to, &g) in end[..self.len].iter_mut().zip(each).rev() {
            *to = sum as f32;
            sum += f64::from(g);
        }
    }

    /// One token more: its number joins all sums, and its own begins with 0. The sums of some columns.
    #[inline(always)]
    fn pass<I: Isa>(&mut self, isa: I, i: usize, cols: &Range<usize>) -> &[f32] {
        let width = cols.len().next_multiple_of(I::F32::N);
        let between = &mut self.between[cols.start..][..width];
        // Beyond the last token are rows that only fill the register block.
        if i < self.len {
            let each = I::F32::splat(isa, self.each[i]);
            for sum in between.chunks_exact_mut(I::F32::N) {
                (I::F32::load(isa, sum) + each).store(sum);
            }
            if cols.contains(&i) {
                between[i - cols.start] = 0.0;
            }
        }
        between
    }
}

/// The decays of a chunk. Where one is 0, be it for a reset, what it would multiply is absent.
#[derive(Debug)]
pub struct Decays<'m> {
    /// α_i: from the chunk's begin to each token.
    pub alpha: &'m mut [f32],
    /// ω_j: from each token to the chunk's end.
    pub omega: &'m mut [f32],
    /// α_L: over the whole chunk.
    pub whole: f32,
    /// The first token that is seen from behind the chunk.
    pub first: usize,
    /// The first token that does not see what is before the chunk, be it none of them.
    pub reset: usize,
    /// True if nothing decays.
    pub none: bool,
    /// The log-decays of the chunk.
    sums: Sums<'m>,
    /// e^{g n} for n falling to 0, and zeros behind: what a token sees of those before it and of those
    /// after it. Of a constant gate alone.
    powers: &'m mut [f32],
    /// The constant gate that `powers` are of.
    constant: Option<f32>,
}

impl<'m> Decays<'m> {
    /// For a chunk.
    pub fn new(parts: &mut Parts<'m>, cut: &Cut) -> Self {
        let len = cut.chunk + SPARE;
        Decays {
            alpha: parts.room(len),
            omega: parts.room(len),
            whole: 1.0,
            first: 0,
            reset: 0,
            none: true,
            sums: Sums::new(parts, len),
            powers: parts.zeros(2 * len),
            constant: None,
        }
    }
}

impl Decays<'_> {
    /// The decays of some tokens of a sequence, at most a chunk.
    pub fn prepare(&mut self, level: crate::Level, gates: &Gates<'_>, tokens: Range<usize>) {
        let len = tokens.len();
        self.none = matches!(gates, Gates::None);
        (self.first, self.reset) = (0, len);
        self.whole = 1.0;
        if self.none {
            self.alpha.fill(1.0);
            self.omega.fill(1.0);
            return;
        }
        self.sums.prepare(gates, tokens, [&mut *self.alpha, &mut *self.omega]);
        match gates {
            Gates::Constant(g) => self.tabulate(*g),
            _ => self.constant = None,
        }
        let here = &self.sums.each[..len];
        let reset = |g: &f32| *g == f32::NEG_INFINITY;
        self.first = here.iter().rposition(reset).unwrap_or(0);
        self.reset = here.iter().position(reset).unwrap_or(len);
        level.run(Exponentials([&mut *self.alpha, &mut *self.omega], len));
        self.whole = if len == 0 { 1.0 } else { self.alpha[len - 1] };
    }

    /// The powers of a constant gate.
    fn tabulate(&mut self, g: f32) {
        if self.constant.map(f32::to_bits) == Some(g.to_bits()) {
            return;
        }
        self.constant = Some(g);
        let zero = self.powers.len() / 2;
        for (n, power) in self.powers[..zero].iter_mut().rev().enumerate() {
            // n = 0 must be 1 also for a gate of −∞.
            let log = if n == 0 { 0.0 } else { f64::from(g) * n as f64 };
            *power = log.exp() as f32;
        }
    }

    /// Writes P_ij for the register block of tokens from `first` on, and the columns `cols`, into rows
    /// [`STRIDE`] apart; 0 where j > i. The blocks of the same columns are to be asked for in
    /// ascending order, from the one on that begins with the first of the columns.
    #[inline(always)]
    pub fn rows<I: Isa>(&mut self, isa: I, first: usize, cols: Range<usize>, p: &mut [f32]) {
        for r in 0..I::Short::ROWS {
            self.row(isa, first + r, cols.clone(), &mut p[r * STRIDE + cols.start..]);
        }
    }

    /// One row of [`Decays::rows`], of token `i`, from its first column on; to be asked for likewise.
    #[inline(always)]
    pub fn row<I: Isa>(&mut self, isa: I, i: usize, cols: Range<usize>, p: &mut [f32]) {
        let width = cols.len().next_multiple_of(I::F32::N);
        let p = &mut p[..width];
        match self.constant {
            Some(_) => p.copy_from_slice(self.powers_of(i, &cols, width)),
            None => self.exponentiate(isa, i, &cols, p),
        }
    }

    /// As [`Decays::row`], into `p` unless the row is there already: where it is.
    #[inline(always)]
    pub fn of_row<'p, I: Isa>(
        &'p mut self,
        isa: I,
        i: usize,
        cols: Range<usize>,
        p: &'p mut [f32],
    ) -> &'p [f32] {
        let width = cols.len().next_multiple_of(I::F32::N);
        if self.constant.is_some() {
            return self.powers_of(i, &cols, width);
        }
        self.exponentiate(isa, i, &cols, &mut p[..width]);
        &p[..width]
    }

    /// A row of a constant gate, whose power 0 belongs to column `i`.
    #[inline(always)]
    fn powers_of(&self, i: usize, cols: &Range<usize>, width: usize) -> &[f32] {
        &self.powers[self.powers.len() / 2 - 1 + cols.start - i..][..width]
    }

    /// A row of gates by token.
    #[inline(always)]
    fn exponentiate<I: Isa>(&mut self, isa: I, i: usize, cols: &Range<usize>, p: &mut [f32]) {
        if i == cols.start {
            self.sums.between.fill(f32::NEG_INFINITY);
        }
        let sums = self.sums.pass(isa, i, cols).chunks_exact(I::F32::N);
        for (p, sum) in p.chunks_exact_mut(I::F32::N).zip(sums) {
            exp(isa, I::F32::load(isa, sum)).store(p);
        }
    }
}

/// Tangents of the logarithms of the decays of a chunk. Behind a reset they are anything, and to be left
/// out as what the decay multiplies is.
#[derive(Debug)]
pub struct LogTangents<'m> {
    /// Of α_i.
    pub alpha: &'m mut [f32],
    /// Of ω_j.
    pub omega: &'m mut [f32],
    /// True if all are 0.
    pub zero: bool,
    /// Of α_L.
    pub whole: f32,
    sums: Sums<'m>,
}

impl<'m> LogTangents<'m> {
    /// For a chunk; of the first order there are none.
    pub fn new(parts: &mut Parts<'m>, cut: &Cut, order: usize) -> Self {
        let len = if order == 2 { cut.chunk + SPARE } else { 0 };
        let (alpha, omega) = (parts.room(len), parts.room(len));
        LogTangents { alpha, omega, zero: true, whole: 0.0, sums: Sums::new(parts, len) }
    }

    /// Prepares the tangents for some tokens of a sequence, at most a chunk.
    pub fn prepare(&mut self, tangents: &Gates<'_>, tokens: Range<usize>) {
        let len = tokens.len();
        self.zero = matches!(tangents, Gates::None);
        self.sums.prepare(tangents, tokens, [&mut *self.alpha, &mut *self.omega]);
        self.whole = if len == 0 { 0.0 } else { self.alpha[len - 1] };
    }

    /// The tangents of log α_i and of log ω_j, unless all are 0.
    #[inline(always)]
    pub fn lists(&self) -> [Option<&[f32]>; 2] {
        [&*self.alpha, &*self.omega].map(|list| (!self.zero).then_some(list))
    }

    /// Writes those of P_ij as [`Decays::rows`] writes P_ij; anything where j > i.
    #[inline(always)]
    pub fn rows<I: Isa>(&mut self, isa: I, first: usize, cols: Range<usize>, to: &mut [f32]) {
        for r in 0..I::Short::ROWS {
            self.row(isa, first + r, &cols, &mut to[r * STRIDE + cols.start..]);
        }
    }

    /// One row of [`LogTangents::rows`], as [`Decays::row`] is one of P.
    #[inline(always)]
    pub fn row<I: Isa>(&mut self, isa: I, i: usize, cols: &Range<usize>, to: &mut [f32]) {
        if i == cols.start {
            self.sums.between.fill(f32::NEG_INFINITY);
        }
        let sums = self.sums.pass(isa, i, cols);
        to[..sums.len()].copy_from_slice(sums);
    }
}

/// e to the first elements of some lists.
struct Exponentials<'a>([&'a mut [f32]; 2], usize);

impl Kernel for Exponentials<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        for list in self.0 {
            for x in list[..self.1.next_multiple_of(I::F32::N)].chunks_exact_mut(I::F32::N) {
                exp(isa, I::F32::load(isa, x)).store(x);
            }
        }
    }
}

/// Fails unless `g` is at most 0.
fn check_log_decay(name: &str, index: &[usize], g: f32) -> Result<(), Error> {
    if g <= 0.0 {
        return Ok(());
    }
    Err(Error::value(format!("{name}{index:?}"), "at most 0", g))
}
