//! Weights of pairs of tokens in bf16, (R23) and (R29), from products of f32, and how they lie in tiles.

use super::scratch::{Scratch, Wanted};
use crate::lanes::Lanes;
use crate::lanes::matrix::{BLOCK, F32, Matrix, Pairing, SIDE, WORDS};

/// Weights from products, in registers: σ and ddσ.
#[derive(Clone, Copy)]
pub struct Made<M: Matrix> {
    scale: F32<M>,
    ddscale: F32<M>,
    /// True unless ddσ is 0, and unless all β are.
    scales: bool,
    pub bends: bool,
    /// True if w or dσ is wanted.
    passes: bool,
}

impl<M: Matrix> Made<M> {
    #[inline(always)]
    pub fn of(by: M, wanted: Wanted, scratch: &Scratch<'_>, ddscale: f32) -> Self {
        let (isa, Scratch { scale, log_tangents, .. }) = (by.isa(), scratch);
        Made {
            scale: F32::<M>::splat(isa, *scale),
            ddscale: F32::<M>::splat(isa, ddscale),
            scales: ddscale != 0.0,
            bends: !log_tangents.zero,
            passes: wanted.g || wanted.scale,
        }
    }

    /// A and B, each with its tangent, from P, β and the products s and t with theirs, where P is above 0; and what
    /// they give to dσ, and w.
    #[inline(always)]
    pub fn weigh<const SECOND: bool>(
        self,
        by: M,
        [p, beta]: [F32<M>; 2],
        mut products: [[F32<M>; 2]; 2],
    ) -> ([[F32<M>; 2]; 2], [F32<M>; 2]) {
        let Made { scale, ddscale, scales, bends, passes } = self;
        let zero = F32::<M>::splat(by.isa(), 0.0);
        let (mut decayed, mut weights) = ([[zero; 2]; 2], [[zero; 2]; 2]);
        for n in 0..2 {
            products[n][0] = zero.select_less(p, products[n][0], zero);
            decayed[n][0] = products[n][0] * p;
            weights[n][0] = scale * decayed[n][0];
            if SECOND {
                products[n][1] = zero.select_less(p, products[n][1], zero);
                let mut tangent = products[n][1];
                if bends {
                    let beta = zero.select_less(p, beta, zero);
                    tangent = beta.mul_add(products[n][0], tangent);
                }
                decayed[n][1] = tangent * p;
                weights[n][1] = scale * decayed[n][1];
                if scales {
                    weights[n][1] = ddscale.mul_add(decayed[n][0], weights[n][1]);
                }
            }
        }
        let [mut by_scale, mut w] = [zero; 2];
        if passes {
            let ([[s, of_s], _], [_, [t, of_t]]) = (decayed, products);
            let product = s * t;
            by_scale = product;
            if SECOND {
                by_scale = of_s.mul_add(t, s * of_t);
            }
            w = scale * by_scale;
            if SECOND && scales {
                w = ddscale.mul_add(product, w);
            }
        }
        (weights, [by_scale, w])
    }
}

/// Two registers of each of two rows of weights, from column `col` on, as pairs of queries.
#[inline(always)]
pub fn store_queries<M: Matrix>(
    by: M,
    x: [[F32<M>; 2]; 2],
    (words, pieces): (&mut [f32], usize),
    r: usize,
    col: usize,
) {
    for part in 0..2 {
        let col = col + part * F32::<M>::N;
        let to = col / SIDE * WORDS + r / 2 * SIDE + col % SIDE;
        Pairing::Stacked.store(by, [x[0][part], x[1][part]], (&mut *words, to), pieces);
    }
}

/// The same as pairs of keys, of so many columns.
#[inline(always)]
pub fn store_keys<M: Matrix>(
    by: M,
    x: [[F32<M>; 2]; 2],
    (words, pieces): (&mut [f32], usize),
    r: usize,
    (col, cols): (usize, usize),
) {
    for (h, pair) in x.into_iter().enumerate() {
        let tile = (r + h) / SIDE * (cols / BLOCK) + col / BLOCK;
        let to = tile * WORDS + (r + h) % SIDE * SIDE + col % BLOCK / 2;
        Pairing::Neighbours.store(by, pair, (&mut *words, to), pieces);
    }
}
