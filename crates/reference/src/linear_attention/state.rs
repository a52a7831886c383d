//! States: matrices `[D, E]`, and all those of a sequence without keeping them all.

use crate::scalar::Real;
use crate::tensor::{Matrix, MatrixMut, add_scaled, dot, filled};
use etalon_problem::Error;

/// A state H `[D, E]`, or the gradient of a loss by one.
pub(super) struct State<T> {
    elements: Vec<T>,
    width: usize,
}

impl<T: Real> State<T> {
    /// A state that holds 0.
    pub fn zero(dim: usize, width: usize) -> Result<Self, Error> {
        let elements = filled("a state", dim.saturating_mul(width), T::ZERO)?;
        Ok(State { elements, width })
    }

    /// The state that a tensor holds.
    pub fn read(source: Matrix<'_, T>, dim: usize, width: usize) -> Result<Self, Error> {
        let mut state = State::zero(dim, width)?;
        for (d, row) in state.rows_mut().enumerate() {
            row.copy_from_slice(source.row(d));
        }
        Ok(state)
    }

    /// Writes the state into a tensor.
    pub fn write(&self, target: &mut MatrixMut<'_, T>) {
        for (d, row) in self.rows().enumerate() {
            target.row(d).copy_from_slice(row);
        }
    }

    fn rows(&self) -> impl Iterator<Item = &[T]> {
        self.elements.chunks_exact(self.width)
    }

    fn rows_mut(&mut self) -> impl Iterator<Item = &mut [T]> {
        self.elements.chunks_exact_mut(self.width)
    }

    /// Becomes `other`.
    fn copy(&mut self, other: &Self) {
        self.elements.copy_from_slice(&other.elements);
    }

    /// H ← λ H; without a λ, at a reset, H ← 0, whatever H held.
    pub fn decay(&mut self, factor: Option<T>) {
        match factor {
            Some(factor) => self.elements.iter_mut().for_each(|x| *x = factor * *x),
            None => self.elements.fill(T::ZERO),
        }
    }

    /// H ← H + a xᵀ y
    pub fn add_outer(&mut self, a: T, x: &[T], y: &[T]) {
        for (row, &x) in self.rows_mut().zip(x) {
            add_scaled(row, a * x, y);
        }
    }

    /// x H
    pub fn apply(&self, x: &[T], product: &mut Vec<T>) {
        product.clear();
        product.resize(self.width, T::ZERO);
        for (row, &x) in self.rows().zip(x) {
            add_scaled(product, x, row);
        }
    }

    /// y Hᵀ
    pub fn apply_transposed(&self, y: &[T], product: &mut Vec<T>) {
        product.clear();
        product.extend(self.rows().map(|row| dot(y, row)));
    }

    /// <G, H> = Σ G_de H_de
    pub fn inner(&self, other: &Self) -> T {
        dot(&self.elements, &other.elements)
    }
}

/// The states of a sequence, to be asked for from the last to the first. Only every ⌊√n⌋-th of
/// them is kept; those between two kept ones are computed again, with the same roundings.
pub(super) struct States<T, F> {
    advance: F,
    steps: usize,
    stride: usize,
    /// The states before step 0, `stride`, 2 `stride`, …
    kept: Vec<State<T>>,
    /// The states before and after the steps of one stretch, which begins with step `first`.
    stretch: Vec<State<T>>,
    first: Option<usize>,
}

impl<T: Real, F: Fn(usize, &mut State<T>)> States<T, F> {
    /// `advance(t, H)` turns the state before step t into the state after it; `initial` is that
    /// before step 0.
    pub fn new(mut initial: State<T>, steps: usize, advance: F) -> Result<Self, Error> {
        let stride = steps.isqrt().max(1); // at most two states too many
        let blank = |state: &State<T>| State::zero(state.elements.len() / state.width, state.width);
        let (mut kept, mut stretch) = (Vec::new(), Vec::new());
        for t in 0..steps {
            if t.is_multiple_of(stride) {
                let mut copy = blank(&initial)?;
                copy.copy(&initial);
                kept.push(copy);
            }
            advance(t, &mut initial);
        }
        for _ in 0..=stride.min(steps) {
            stretch.push(blank(&initial)?);
        }
        Ok(States { advance, steps, stride, kept, stretch, first: None })
    }

    /// The states before and after step `t`, one of the steps.
    pub fn around(&mut self, t: usize) -> (&State<T>, &State<T>) {
        let first = t - t % self.stride;
        if self.first != Some(first) {
            self.first = Some(first);
            self.stretch[0].copy(&self.kept[first / self.stride]);
            for step in first..self.steps.min(first + self.stride) {
                let (before, after) = self.stretch[step - first..].split_at_mut(1);
                after[0].copy(&before[0]);
                (self.advance)(step, &mut after[0]);
            }
        }
        (&self.stretch[t - first], &self.stretch[t - first + 1])
    }
}
