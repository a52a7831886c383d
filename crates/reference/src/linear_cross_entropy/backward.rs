//! ```text
//! (C12) g_i, γ_i: what reaches the cross-entropy and lse² of token i through the loss
//! (C13) β_i  = g_i (1 − α) cw_{y_i} − dlogprob_i
//! (C14) λ_i  = g_i α CW/V + 2 γ_i lse_i + dlse_i
//! (C15) dz_iv = (β_i + λ_i) p_iv − dentropy_i p_iv (ln p_iv + entropy_i) − g_i (α/V) cw_v − [v = y_i] β_i
//! (C16) da_iv = r_iv dz_iv
//! (C17) dh_i  = Σ_v da_iv w_v
//! (C18) dw_v  = Σ_i da_iv h_i
//! (C19) dbias_v = Σ_i da_iv
//! (C20) dz_{i,y_i}: (p − 1) β_i in place of p β_i − β_i, with p − 1 = expm1(logprob_i)
//! ```

use super::forward::log_probability;
use super::head::{matrix, matrix_mut};
use super::shard::{Partial, Shard};
use super::tokens::{Token, at, scatter};
use super::tree::{fold, tiles};
use super::{Cotangents, Gradients, Inputs, Wanted, expected};
use crate::named::{Named, check};
use crate::parallel::try_map;
use crate::scalar::Real;
use crate::tensor::{add, filled, full, reserve};
use etalon_problem::{Error, LinearCrossEntropy, Pass};
use ndarray::{Array1, Array2, ArrayView2};
use std::ops::Range;

/// The gradients of <dloss, loss> + <dlse, lse> + <dlogprob, logprob> + <dentropy, entropy> by
/// the inputs.
pub fn backward<T: Real>(
    problem: &LinearCrossEntropy,
    inputs: &Inputs<'_, T>,
    cotangents: &Cotangents<'_, T>,
    wanted: Wanted,
) -> Result<Gradients<T>, Error> {
    let shard = Shard::new(problem, 0..problem.vocab, inputs)?;
    shard.backward(&shard.partials()?, cotangents, wanted)
}

impl<T: Real> Shard<'_, T> {
    /// The contribution of the classes to dh, and their own dw and dbias, from the totals of all classes `[T]`.
    pub fn backward(
        &self,
        totals: &[Partial<T>],
        cotangents: &Cotangents<'_, T>,
        wanted: Wanted,
    ) -> Result<Gradients<T>, Error> {
        let pulls = self.pulls(totals, cotangents)?;
        let dh = wanted.dh.then(|| self.hidden_gradient(&pulls)).transpose()?;
        Ok(Gradients { dh, ..self.head_gradients(&pulls, wanted)? })
    }

    /// The coefficients of every token that counts.
    pub(super) fn pulls(
        &self,
        totals: &[Partial<T>],
        cotangents: &Cotangents<'_, T>,
    ) -> Result<Vec<Pull<T>>, Error> {
        check(&self.problem.table(Pass::Backward), &[cotangents.shapes()])?;
        let rows = self.totals(totals)?;
        let mut pulls = reserve("what tokens pull with", self.tokens.counted.len())?;
        pulls.extend(rows.map(|(token, total)| self.pull(token, total, cotangents)));
        Ok(pulls)
    }

    fn pull(
        &self,
        token: &Token<T>,
        total: &Partial<T>,
        cotangents: &Cotangents<'_, T>,
    ) -> Pull<T> {
        let Cotangents { dloss, dlse, dlogprob, dentropy } = cotangents;
        let (g, gamma) = self.tokens.upstream(dloss.as_ref(), token); // (C12)
        let alpha = T::from_f64(self.problem.label_smoothing);
        let eta = g * (alpha / T::from_f64(self.problem.vocab as f64));
        let beta = g * (T::ONE - alpha) * token.class_weight - at(dlogprob, token); // (C13)
        let lse = total.lse();
        let lambda = eta * total.weight + gamma * (lse + lse) + at(dlse, token); // (C14)
        Pull {
            target: token.target,
            beta,
            lambda,
            eta,
            dentropy: at(dentropy, token),
            m: total.m,
            ln_l: total.ln_l(),
            mean_shift: total.mean_shift(),
            miss: log_probability(total).exp_m1(),
        }
    }

    /// (C16) of a block of tokens and a tile of classes: `[rows, W]`.
    pub(super) fn logit_gradients(
        &self,
        pulls: &[Pull<T>],
        h: ArrayView2<'_, T>,
        tile: &Range<usize>,
    ) -> Result<Vec<T>, Error> {
        let mut da = self.head.tile(h, tile)?;
        let (link, weights) = (&self.head.link, self.tokens.class_weights(tile));
        for (row, pull) in da.chunks_exact_mut(tile.len()).zip(pulls) {
            for (v, a) in row.iter_mut().enumerate() {
                let weight = weights.map_or(T::ONE, |weights| weights[v]);
                let dz = pull.dz(tile.start + v, link.logit(*a), weight);
                *a = (link.slope(*a) * dz).stored();
            }
        }
        Ok(da)
    }

    /// (C17), summed along the tree of tiles.
    fn hidden_gradient(&self, pulls: &[Pull<T>]) -> Result<Array2<T>, Error> {
        let dim = self.problem.dim;
        let tiles = tiles(&self.head.classes);
        let sum = |mut x: Vec<T>, y: Vec<T>| {
            add(&mut x, &y);
            Ok(x)
        };
        let blocks = try_map(self.tokens.blocks(), |(numbers, h)| {
            let mut leaf = |tile: &Range<usize>| {
                let da = self.logit_gradients(&pulls[numbers.clone()], h, tile)?;
                let mut part = filled("a part of dh", h.len(), T::ZERO)?;
                let (dh, da) = (matrix_mut(&mut part, dim), matrix(&da, tile.len()));
                T::add_product(dh, da, self.head.rows(tile));
                Ok(part)
            };
            fold(&tiles, &mut leaf, &sum)
        })?;
        let mut dh = full("dh", self.problem.h_shape(), T::ZERO)?;
        let rows = blocks.iter().flatten().flat_map(|rows| rows.chunks_exact(dim));
        scatter(&mut dh, &self.tokens.counted, rows);
        Ok(dh)
    }

    /// (C18) and (C19), block after block; without dh.
    fn head_gradients(&self, pulls: &[Pull<T>], wanted: Wanted) -> Result<Gradients<T>, Error> {
        let (classes, dim) = (self.head.classes.len(), self.problem.dim);
        let (want_w, want_bias) = (wanted.dw, wanted.dbias && self.problem.bias);
        let mut dw = want_w.then(|| full("dw", [classes, dim], T::ZERO)).transpose()?;
        let mut dbias = want_bias.then(|| full("dbias", [classes], T::ZERO)).transpose()?;
        let blocks = self.tokens.blocks();
        let mut w_rest = dw.as_mut().and_then(Array2::as_slice_mut).unwrap_or_default();
        let mut bias_rest = dbias.as_mut().and_then(Array1::as_slice_mut).unwrap_or_default();
        let cut = |tile: Range<usize>| {
            // There is nothing to cut off what is not wanted.
            let dw = w_rest.split_off_mut(..tile.len() * dim).unwrap_or_default();
            let dbias = bias_rest.split_off_mut(..tile.len()).unwrap_or_default();
            (tile, dw, dbias)
        };
        let wanted = (want_w || want_bias).then(|| tiles(&self.head.classes));
        let units = wanted.into_iter().flatten().map(cut).collect();
        try_map(units, |(tile, dw, dbias)| {
            for (numbers, h) in &blocks {
                let da = self.logit_gradients(&pulls[numbers.clone()], *h, &tile)?;
                if want_w {
                    let da = matrix(&da, tile.len()).reversed_axes();
                    T::add_product(matrix_mut(dw, dim), da, *h);
                }
                da.chunks_exact(tile.len()).for_each(|row| add(dbias, row));
            }
            Ok(())
        })?;
        Ok(Gradients { dh: None, dw, dbias })
    }
}

/// Coefficients of a token in the gradients of its logits.
pub(super) struct Pull<T> {
    target: usize,
    /// β_i
    pub beta: T,
    /// λ_i
    lambda: T,
    /// g_i α/V
    eta: T,
    dentropy: T,
    m: T,
    ln_l: T,
    /// Σ_v p_iv (z_iv − m)
    mean_shift: T,
    /// p_{i,y_i} − 1
    miss: T,
}

impl<T: Real> Pull<T> {
    /// (C15) of class `v` with the logit `z` and the class weight `weight`.
    fn dz(&self, v: usize, z: T, weight: T) -> T {
        let shift = z - self.m;
        let p = (shift - self.ln_l).exp(); // (C4)
        // ln p + entropy, without lse, which would cost digits where all logits are large
        let surprise = expected(p, shift - self.mean_shift);
        let pulled = if v == self.target { self.miss } else { p }; // (C20)
        pulled * self.beta + p * self.lambda - self.dentropy * surprise - self.eta * weight
    }
}
