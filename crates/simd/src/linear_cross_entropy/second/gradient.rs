//! Motions of the gradients of logits, from the logits and their motions:
//!
//! ```text
//! (C23) ṗ_iv = p_iv (ż_iv − μ_i)
//! (C25) ṙ_iv = −(2σ/c) tanh(σ a_iv / c) ż_iv
//! (C26) X_iv = (β̇_i + λ̇_i) p_iv + (β_i + λ_i) ṗ_iv − cot_entropy_i p_iv q_iv
//!              − dentropy_i (ṗ_iv q_iv + p_iv (ż_iv − μ_i + Ḣ_i)) − ġ_i (α/V) cw_v − [v = y_i] β̇_i
//! (C27) x_iv = r_iv X_iv + ṙ_iv dz_iv
//! (C20) at v = y_i: (p − 1) β̇_i in place of p β̇_i − β̇_i
//! ```

use super::super::gradient::Pull;
use super::super::logits::{LEAST, Link};
use super::super::operands::Cotangents;
use super::super::partial::Partial;
use super::super::tokens::{Token, Tokens};
use super::motion::Motion;
use crate::exp::exp_difference;
use crate::lanes::{Isa, Kernel, Lanes};
use crate::tile::BAND;
use crate::workspace::Parts;

/// β̇, λ̇, ġ α/V and cot_entropy of a token: (C12)–(C14) of the second cotangents, and 2 γ μ.
pub fn pull_motion(
    tokens: &Tokens<'_>,
    [first, second]: [&Cotangents<'_>; 2],
    token: &Token,
    (total, motion): (&Partial, &Motion),
) -> Pull {
    let pull = Pull::new(tokens, second, token, total);
    let [_, gamma] = tokens.upstream(first.dloss.as_ref(), token);
    let square = if gamma == 0.0 { 0.0 } else { 2.0 * gamma * motion.lse(total) };
    Pull { lambda: (f64::from(pull.lambda) + square) as f32, ..pull }
}

/// (C15) and (C26) of the target of a token, with its weight.
fn own(
    [pull, moved]: [&Pull; 2],
    (total, motion): (&Partial, &Motion),
    weight: f32,
    entropy: bool,
) -> [f32; 2] {
    let (logprob, t) = (total.logprob(), motion.logprob(total));
    let (p, miss) = (logprob.exp(), logprob.exp_m1());
    let [beta, both] = [moved.beta, pull.beta + pull.lambda].map(f64::from);
    let mut x = miss * beta + p * (f64::from(moved.lambda) + t * both);
    if entropy {
        let shift = f64::from(total.target) - f64::from(total.m);
        let q = shift.max(f64::from(LEAST)) - total.mean_shift();
        let [dentropy, cot] = [pull.dentropy, moved.dentropy].map(f64::from);
        x -= p * (cot * q + dentropy * (t * q + t + motion.entropy(total)));
    }
    x -= f64::from(moved.eta) * f64::from(weight);
    [pull.own(total, weight, entropy), x as f32]
}

/// Coefficients of some tokens in both orders, side by side: see [`Pull`].
pub struct SecondPulls<'m> {
    m: &'m mut [f32],
    ln_l: &'m mut [f32],
    /// β + λ, and how it moves.
    both: &'m mut [f32],
    both_motion: &'m mut [f32],
    eta: &'m mut [f32],
    eta_motion: &'m mut [f32],
    dentropy: &'m mut [f32],
    cot_entropy: &'m mut [f32],
    mean_shift: &'m mut [f32],
    /// ṁ
    motion: &'m mut [f32],
    /// Σ p (ż − ṁ)
    mean: &'m mut [f32],
    /// Ḣ
    entropy: &'m mut [f32],
}

/// Elements of memory that [`SecondPulls`] of a band take.
pub const SECOND_PULLS: usize = 12 * BAND;

impl<'m> SecondPulls<'m> {
    /// Room for the tokens of a band.
    pub fn cut(parts: &mut Parts<'m>) -> Self {
        let mut room = || parts.room(BAND);
        SecondPulls {
            m: room(),
            ln_l: room(),
            both: room(),
            both_motion: room(),
            eta: room(),
            eta_motion: room(),
            dentropy: room(),
            cot_entropy: room(),
            mean_shift: room(),
            motion: room(),
            mean: room(),
            entropy: room(),
        }
    }

    /// Fills in the coefficients of some tokens; the others get 0, with m = ∞, and so gradients of 0.
    pub fn fill(
        &mut self,
        [pulls, moved]: [&[Pull]; 2],
        (totals, motions): (&[Partial], &[Motion]),
    ) {
        for all in [&mut *self.ln_l, self.both, self.both_motion, self.eta, self.eta_motion] {
            all.fill(0.0);
        }
        for all in [&mut *self.dentropy, self.cot_entropy, self.mean_shift, self.motion] {
            all.fill(0.0);
        }
        self.mean.fill(0.0);
        self.entropy.fill(0.0);
        self.m.fill(f32::INFINITY);
        let rows = pulls.iter().zip(moved).zip(totals.iter().zip(motions));
        for (i, ((pull, moved), (total, motion))) in rows.enumerate() {
            (self.m[i], self.ln_l[i]) = (total.m, total.ln_l() as f32);
            self.both[i] = pull.beta + pull.lambda;
            self.both_motion[i] = moved.beta + moved.lambda;
            (self.eta[i], self.eta_motion[i]) = (pull.eta, moved.eta);
            (self.dentropy[i], self.cot_entropy[i]) = (pull.dentropy, moved.dentropy);
            self.mean_shift[i] = total.mean_shift() as f32;
            (self.motion[i], self.mean[i]) = (motion.m, motion.mean(total) as f32);
            self.entropy[i] = motion.entropy(total) as f32;
        }
    }
}

/// x in place of the logits and da in place of their motions, of a tile of classes and of the tokens of a
/// band.
pub struct LogitGradientMotions<'a, 'm> {
    pub link: Link,
    /// The number of the first class.
    pub first: usize,
    pub weights: Option<&'a [f32]>,
    pub classes: usize,
    pub z: &'a mut [f32],
    pub motion: &'a mut [f32],
    pub tokens: &'a [Token],
    /// The coefficients of the tokens, and their motions.
    pub pulls: [&'a [Pull]; 2],
    pub totals: &'a [Partial],
    pub motions: &'a [Motion],
    /// The same side by side.
    pub side: &'a SecondPulls<'m>,
    /// True if some entropy has a cotangent of either order, and if labels are smoothed.
    pub entropy: bool,
    pub smoothing: bool,
}

impl Kernel for LogitGradientMotions<'_, '_> {
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let (count, lanes) = (self.tokens.len(), I::F32::N);
        // The gradients at the targets are computed apart, from logits that the rest writes over.
        let mut own = [[0.0; 2]; BAND];
        for (i, own) in own.iter_mut().enumerate().take(count) {
            if let Some(place) = self.place(i) {
                *own = self.own(i, place);
            }
        }
        (0..count).step_by(lanes).for_each(|first| self.register(isa, first));
        for (i, &own) in own.iter().enumerate().take(count) {
            if let Some(place) = self.place(i) {
                [self.motion[place], self.z[place]] = own;
            }
        }
        // Lanes of no token: 0, also where a weight is NaN or infinite.
        let end = count.next_multiple_of(lanes);
        for plane in [&mut *self.z, self.motion] {
            for row in plane.chunks_exact_mut(BAND).take(self.classes) {
                row[count..end].fill(0.0);
            }
        }
    }
}

impl LogitGradientMotions<'_, '_> {
    /// The place of the logit of the target of token `i`, if it is here.
    fn place(&self, i: usize) -> Option<usize> {
        let class = (self.tokens[i].target as usize).checked_sub(self.first)?;
        (class < self.classes).then_some(class * BAND + i)
    }

    /// (C16) and (C27) of the target of token `i`.
    fn own(&self, i: usize, place: usize) -> [f32; 2] {
        let (total, weight) = (&self.totals[i], self.tokens[i].class_weight);
        let pulls = self.pulls.map(|pulls| &pulls[i]);
        let [dz, x] = own(pulls, (total, &self.motions[i]), weight, self.entropy);
        let (z, motion) = (self.z[place], self.motion[place]);
        let slope = self.link.slope_of(z);
        [slope * dz, slope * x + self.link.bend_of(z) * motion * dz]
    }

    /// (C15), (C16) and (C26), (C27) of the tokens of one register, from number `at` on.
    #[inline(always)]
    fn register<I: Isa>(&mut self, isa: I, at: usize) {
        let read = |x: &[f32]| I::F32::load(isa, &x[at..]);
        let side = self.side;
        let (m, ln_l) = (read(side.m), read(side.ln_l));
        let (both, both_motion) = (read(side.both), read(side.both_motion));
        let (eta, eta_motion) = (read(side.eta), read(side.eta_motion));
        let (dentropy, cot_entropy) = (read(side.dentropy), read(side.cot_entropy));
        let (mean_shift, entropy) = (read(side.mean_shift), read(side.entropy));
        let (motion_m, mean) = (read(side.motion), read(side.mean));
        let least = I::F32::splat(isa, LEAST);
        for v in 0..self.classes {
            let z_place = &mut self.z[v * BAND + at..];
            let motion_place = &mut self.motion[v * BAND + at..];
            let (z, motion) = (I::F32::load(isa, z_place), I::F32::load(isa, motion_place));
            let shift = z - m;
            let p = exp_difference(isa, shift, ln_l); // (C4)
            let t = (motion - motion_m) - mean; // ż − μ
            let mut dz = p * both;
            let mut x = t.mul_add(both, both_motion);
            if self.entropy {
                let q = least.max(shift) - mean_shift;
                dz = dz - dentropy * (p * q);
                x = x - cot_entropy * q - dentropy * (t.mul_add(q, t) + entropy);
            }
            x = p * x;
            if self.smoothing {
                let weight = I::F32::splat(isa, self.weights.map_or(1.0, |weights| weights[v]));
                dz = dz - eta * weight;
                x = x - eta_motion * weight;
            }
            let slope = self.link.slope(isa, z);
            x = slope * x; // (C27)
            if let Some(bend) = self.link.bend(isa, z) {
                x = x + bend * motion * dz;
            }
            normal(isa, slope * dz).store(motion_place); // (C16)
            normal(isa, x).store(z_place);
        }
    }
}

/// 0 in place of what is too small to be normal: products with that take a hundred times as long.
#[inline(always)]
fn normal<I: Isa>(isa: I, x: I::F32) -> I::F32 {
    let (zero, least) = (I::F32::splat(isa, 0.0), I::F32::splat(isa, f32::MIN_POSITIVE));
    let size = x.max(zero - x);
    size.select_less(least, zero, x)
}
