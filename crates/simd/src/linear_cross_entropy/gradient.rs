//! The gradients of logits, from the logits:
//!
//! ```text
//! (C4)  p_iv  = e^{z_iv − lse_i}
//! (C12) g_i, γ_i: what reaches the cross-entropy and lse² of token i through the loss
//! (C13) β_i  = g_i (1 − α) cw_{y_i} − dlogprob_i
//! (C14) λ_i  = g_i α CW/V + 2 γ_i lse_i + dlse_i
//! (C15) dz_iv = (β_i + λ_i) p_iv − dentropy_i p_iv (ln p_iv + entropy_i) − g_i (α/V) cw_v − [v = y_i] β_i
//! (C16) da_iv = r_iv dz_iv
//! (C20) dz_{i,y_i}: (p − 1) β_i in place of p β_i − β_i, with p − 1 = expm1(logprob_i)
//! ```

use super::logits::{LEAST, Link};
use super::operands::Cotangents;
use super::partial::Partial;
use super::tokens::{Token, Tokens};
use crate::exp::exp_difference;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::tile::BAND;
use crate::workspace::Parts;
use ndarray::ArrayView1;

/// Coefficients of a token in the gradients of its logits.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pull {
    /// β_i
    pub beta: f32,
    /// λ_i
    pub lambda: f32,
    /// g_i α/V
    pub eta: f32,
    pub dentropy: f32,
}

impl Pull {
    pub fn new(
        tokens: &Tokens<'_>,
        cotangents: &Cotangents<'_>,
        token: &Token,
        total: &Partial,
    ) -> Self {
        let at = |x: Option<ArrayView1<'_, f32>>| x.map_or(0.0, |x| f64::from(x[token.index]));
        let [g, gamma] = tokens.upstream(cotangents.dloss.as_ref(), token); // (C12)
        let alpha = tokens.problem.label_smoothing;
        let eta = if alpha > 0.0 { g * (alpha / tokens.problem.vocab as f64) } else { 0.0 };
        // Of α = 1 and α = 0 the other part is left out, whatever it would be.
        let own = if alpha < 1.0 { g * (1.0 - alpha) * f64::from(token.class_weight) } else { 0.0 };
        let beta = own - at(cotangents.dlogprob); // (C13)
        let smoothed = if alpha > 0.0 { eta * tokens.class_weights } else { 0.0 };
        let square = if gamma == 0.0 { 0.0 } else { 2.0 * gamma * total.lse() };
        let lambda = smoothed + square + at(cotangents.dlse); // (C14)
        Pull {
            beta: beta as f32,
            lambda: lambda as f32,
            eta: eta as f32,
            dentropy: at(cotangents.dentropy) as f32,
        }
    }

    /// (C15) of the target, with its weight.
    pub fn own(&self, total: &Partial, weight: f32, entropy: bool) -> f32 {
        let logprob = total.logprob();
        let (p, miss) = (logprob.exp() as f32, logprob.exp_m1() as f32); // (C20)
        let mut dz = miss * self.beta + p * self.lambda - self.eta * weight;
        if entropy {
            let shift = total.target - total.m;
            let shift = if shift < LEAST { LEAST } else { shift };
            dz -= self.dentropy * (p * (shift - total.mean_shift() as f32));
        }
        dz
    }
}

/// Coefficients of some tokens, side by side.
pub struct Pulls<'m> {
    m: &'m mut [f32],
    ln_l: &'m mut [f32],
    /// β + λ
    both: &'m mut [f32],
    eta: &'m mut [f32],
    dentropy: &'m mut [f32],
    mean_shift: &'m mut [f32],
}

impl<'m> Pulls<'m> {
    /// Room for `len` tokens.
    pub fn cut(parts: &mut Parts<'m>, len: usize) -> Self {
        Pulls {
            m: parts.room(len),
            ln_l: parts.room(len),
            both: parts.room(len),
            eta: parts.room(len),
            dentropy: parts.room(len),
            mean_shift: parts.room(len),
        }
    }

    /// Fills in the coefficients of some tokens; the others get 0, with m = ∞, and so gradients of 0.
    pub fn fill(&mut self, pulls: &[Pull], totals: &[Partial]) {
        for all in [&mut *self.ln_l, self.both, self.eta, self.dentropy, self.mean_shift] {
            all.fill(0.0);
        }
        self.m.fill(f32::INFINITY);
        for (i, (pull, total)) in pulls.iter().zip(totals).enumerate() {
            (self.m[i], self.ln_l[i]) = (total.m, total.ln_l() as f32);
            self.both[i] = pull.beta + pull.lambda;
            (self.eta[i], self.dentropy[i]) = (pull.eta, pull.dentropy);
            self.mean_shift[i] = total.mean_shift() as f32;
        }
    }
}

/// da in place of the logits of a tile of classes and of the tokens of a band.
pub struct LogitGradients<'a, 'm> {
    pub link: Link,
    /// The number of the first class.
    pub first: usize,
    pub weights: Option<&'a [f32]>,
    pub classes: usize,
    pub z: &'a mut [f32],
    pub tokens: &'a [Token],
    pub pulls: &'a [Pull],
    pub totals: &'a [Partial],
    /// The same side by side.
    pub side: &'a Pulls<'m>,
    /// True if some entropy has a cotangent, and if labels are smoothed.
    pub entropy: bool,
    pub smoothing: bool,
}

impl Kernel for LogitGradients<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let (count, lanes) = (self.tokens.len(), I::F32::N);
        // The gradients at the targets are computed apart, from logits that the rest writes over.
        let mut own = [0.0; BAND];
        for (i, own) in own.iter_mut().enumerate().take(count) {
            if let Some(place) = self.place(i) {
                let (total, weight) = (&self.totals[i], self.tokens[i].class_weight);
                *own = self.link.slope_of(self.z[place])
                    * self.pulls[i].own(total, weight, self.entropy);
            }
        }
        (0..count).step_by(lanes).for_each(|first| self.register(isa, first));
        for (i, &own) in own.iter().enumerate().take(count) {
            if let Some(place) = self.place(i) {
                self.z[place] = own;
            }
        }
        // Lanes of no token: 0, also where a weight is NaN or infinite.
        let end = count.next_multiple_of(lanes);
        for row in self.z.chunks_exact_mut(BAND).take(self.classes) {
            row[count..end].fill(0.0);
        }
    }
}

impl LogitGradients<'_, '_> {
    /// The place of the logit of the target of token `i`, if it is here.
    fn place(&self, i: usize) -> Option<usize> {
        let class = (self.tokens[i].target as usize).checked_sub(self.first)?;
        (class < self.classes).then_some(class * BAND + i)
    }

    /// (C15), (C16) of the tokens of one register, from number `at` on.
    #[inline(always)]
    fn register<I: Isa>(&mut self, isa: I, at: usize) {
        let read = |x: &[f32]| I::F32::load(isa, &x[at..]);
        let Pulls { m, ln_l, both, eta, dentropy, mean_shift } = self.side;
        let (m, ln_l, both, eta) = (read(m), read(ln_l), read(both), read(eta));
        let (dentropy, mean_shift) = (read(dentropy), read(mean_shift));
        let least = I::F32::splat(isa, LEAST);
        // Below it a product takes a hundred times as long; unlikely classes would all lie there.
        let (zero, least_normal) = (I::F32::splat(isa, 0.0), I::F32::splat(isa, f32::MIN_POSITIVE));
        for v in 0..self.classes {
            let place = &mut self.z[v * BAND + at..];
            let z = I::F32::load(isa, place);
            let shift = z - m;
            let p = exp_difference(isa, shift, ln_l); // (C4)
            let mut dz = p * both;
            if self.entropy {
                dz = dz - dentropy * (p * (least.max(shift) - mean_shift));
            }
            if self.smoothing {
                let weight = self.weights.map_or(1.0, |weights| weights[v]);
                dz = dz - eta * I::F32::splat(isa, weight);
            }
            let da = self.link.slope(isa, z) * dz; // (C16)
            let size = da.max(zero - da);
            size.select_less(least_normal, zero, da).store(place);
        }
    }
}
