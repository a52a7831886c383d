//! Logits, a tile at a time:
//!
//! ```text
//! (C1)  a_iv = h_i·w_v + bias_v
//! (C2)  z_iv = (c/θ) tanh(σ a_iv / c)                  without a cap σ a_iv / θ
//! (C11) r_iv = dz_iv/da_iv = (σ/θ) (1 − tanh²(σ a_iv / c))
//! ```

use super::Inputs;
use crate::scalar::Real;
use crate::tensor::{add, contiguous, filled};
use etalon_problem::{Error, LinearCrossEntropy};
use ndarray::{ArrayView2, ArrayViewMut2};
use std::borrow::Cow;
use std::ops::Range;

/// The rows of w and the biases of a range of classes.
pub(super) struct Head<'a, T: Clone> {
    /// The classes that it holds.
    pub classes: Range<usize>,
    dim: usize,
    w: Cow<'a, [T]>,
    bias: Option<Cow<'a, [T]>>,
    pub link: Link<T>,
}

/// The map from a to z.
#[derive(Clone, Copy)]
pub(super) struct Link<T> {
    /// σ
    scale: T,
    /// c
    cap: Option<T>,
    /// θ
    temperature: T,
}

impl<T: Real> Link<T> {
    /// (C2)
    pub fn logit(&self, a: T) -> T {
        let scaled = a.times(self.scale);
        let z = self.cap.map_or(scaled, |cap| scaled.over(cap).tanh().times(cap));
        z.over(self.temperature)
    }

    /// (C11)
    pub fn slope(&self, a: T) -> T {
        let scaled = a.times(self.scale);
        let bend = self.cap.map_or(T::ONE, |cap| scaled.over(cap).tanh_slope());
        bend.times(self.scale).over(self.temperature)
    }
}

impl<'a, T: Real> Head<'a, T> {
    pub fn new(
        problem: &LinearCrossEntropy,
        classes: Range<usize>,
        inputs: &'a Inputs<'_, T>,
    ) -> Result<Self, Error> {
        let bias = inputs.bias.as_ref();
        Ok(Head {
            classes,
            dim: problem.dim,
            w: contiguous("w", inputs.w.view())?,
            bias: bias.map(|bias| contiguous("bias", bias.view())).transpose()?,
            link: Link {
                scale: T::from_f64(problem.logit_scale),
                cap: problem.softcap.map(T::from_f64),
                temperature: T::from_f64(problem.temperature),
            },
        })
    }

    /// The rows of w of a tile `[W, D]`.
    pub fn rows(&self, tile: &Range<usize>) -> ArrayView2<'_, T> {
        let [start, end] = [tile.start, tile.end].map(|v| (v - self.classes.start) * self.dim);
        matrix(&self.w[start..end], self.dim)
    }

    /// (C1) of some rows of h: `[rows, W]`, row by row.
    pub fn tile(&self, h: ArrayView2<'_, T>, tile: &Range<usize>) -> Result<Vec<T>, Error> {
        let mut a = filled("a tile of logits", h.nrows() * tile.len(), T::ZERO)?;
        T::add_product(matrix_mut(&mut a, tile.len()), h, self.rows(tile).reversed_axes());
        if let Some(bias) = &self.bias {
            let bias = &bias[tile.start - self.classes.start..][..tile.len()];
            a.chunks_exact_mut(tile.len()).for_each(|row| add(row, bias));
        }
        Ok(a)
    }
}

/// Rows of `width` elements, laid end to end.
pub(super) fn matrix<T>(data: &[T], width: usize) -> ArrayView2<'_, T> {
    let rows = data.len() / width;
    ArrayView2::from_shape((rows, width), data).expect("as many elements as the shape says")
}

/// The same, to be written.
pub(super) fn matrix_mut<T>(data: &mut [T], width: usize) -> ArrayViewMut2<'_, T> {
    let rows = data.len() / width;
    ArrayViewMut2::from_shape((rows, width), data).expect("as many elements as the shape says")
}
