//! States: matrices `[D, E]`, and all those of a sequence without keeping them all.

use crate::scalar::Real;
use crate::tensor::{MatrixMut, add_scaled, dot, reserve};
use etalon_problem::Error;

/// A state H `[D, E]`, or the gradient of a loss by one.
pub(super) struct State<T> {
    elements: Vec<T>,
    width: usize,
}

impl<T: Real> State<T> {
    /// The state with these rows of `width` elements, `elements` in all.
    pub fn new<'a>(
        elements: usize,
        width: usize,
        rows: impl Iterator<Item = &'a [T]>,
    ) -> Result<Self, Error> {
        let mut state = State { elements: reserve("a state", elements)?, width };
        rows.for_each(|row| state.elements.extend_from_slice(row));
        Ok(state)
    }

    fn copy(&self) -> Result<Self, Error> {
        State::new(self.elements.len(), self.width, self.rows())
    }

    /// Becomes `other`.
    fn set(&mut self, other: &Self) {
        self.elements.copy_from_slice(&other.elements);
    }

    /// Writes the state into a tensor.
    pub fn write(&self, target: &mut MatrixMut<'_, T>) {
        for (d, row) in self.rows().enumerate() {
            target.row(d).copy_from_slice(row);
        }
    }

    /// Its elements in row-major order.
    pub fn elements(&self) -> &[T] {
        &self.elements
    }

    fn rows(&self) -> impl Iterator<Item = &[T]> {
        self.elements.chunks_exact(self.width)
    }

    fn rows_mut(&mut self) -> impl Iterator<Item = &mut [T]> {
        self.elements.chunks_exact_mut(self.width)
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

    /// The product x H.
    pub fn apply(&self, x: &[T], product: &mut [T]) {
        product.fill(T::ZERO);
        for (row, &x) in self.rows().zip(x) {
            add_scaled(product, x, row);
        }
    }

    /// The product y Hᵀ.
    pub fn apply_transposed(&self, y: &[T], product: &mut [T]) {
        for (row, product) in self.rows().zip(product) {
            *product = dot(y, row);
        }
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
    /// `advance(t, H)` turns the state before step t into the state after it; `state` is that before
    /// step 0.
    pub fn new(mut state: State<T>, steps: usize, advance: F) -> Result<Self, Error> {
        let stride = steps.isqrt().max(1); // at most two states too many
        let mut kept = Vec::new();
        for t in 0..steps {
            if t.is_multiple_of(stride) {
                kept.push(state.copy()?);
            }
            advance(t, &mut state);
        }
        let stretch = (0..=stride.min(steps)).map(|_| state.copy()).collect::<Result<_, _>>()?;
        Ok(States { advance, steps, stride, kept, stretch, first: None })
    }

    /// The states before and after step `t`, one of the steps.
    pub fn around(&mut self, t: usize) -> (&State<T>, &State<T>) {
        let first = t - t % self.stride;
        if self.first != Some(first) {
            self.first = Some(first);
            self.stretch[0].set(&self.kept[first / self.stride]);
            for step in first..self.steps.min(first + self.stride) {
                let (before, after) = self.stretch[step - first..].split_at_mut(1);
                after[0].set(&before[0]);
                (self.advance)(step, &mut after[0]);
            }
        }
        (&self.stretch[t - first], &self.stretch[t - first + 1])
    }
}
