//! Sums of products: their values, and sums of terms that err.

use super::model::{BEYOND, Model, floor, spread};

/// A sum, by the errors and the sizes of its terms; also a single term.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sum {
    pub error: f64,
    pub absolute: f64,
    pub terms: usize,
}

impl Sum {
    /// One term.
    pub fn term(error: f64, absolute: f64) -> Self {
        Sum { error, absolute, terms: 1 }
    }

    pub fn add(&mut self, other: Sum) {
        self.error += other.error;
        self.absolute += other.absolute;
        self.terms += other.terms;
    }

    /// The error once each term has been rounded by up to `gamma` of itself.
    pub fn summed(self, gamma: f64) -> f64 {
        self.error + spread(gamma, self.absolute + self.error)
    }

    /// The error of the sum where no term passes through more than so many roundings.
    pub fn chained(self, model: &Model, roundings: usize) -> f64 {
        self.summed(model.gamma(roundings)) + floor(self.absolute, model.eta)
    }
}

/// sum_c += weight · |x_c|, and `tiny` where that product may underflow.
pub(super) fn accumulate(sum: &mut [f64], weight: f64, x: &[f64], tiny: f64) {
    for (sum, x) in sum.iter_mut().zip(x) {
        // A weight that may be ∞ makes NaN of a 0, too.
        let product = if weight <= BEYOND[0] { weight * x.abs() } else { weight };
        *sum += product + floor(product, tiny);
    }
}

/// Σ x_c y_c and Σ |x_c y_c|.
pub(super) fn dots(x: &[f64], y: &[f64]) -> (f64, f64) {
    const WIDTH: usize = 8; // independent partial sums, so that they can share registers
    let (mut signed, mut absolute) = ([0.0; WIDTH], [0.0; WIDTH]);
    let (xs, ys) = (x.chunks_exact(WIDTH), y.chunks_exact(WIDTH));
    let rest = xs.remainder().iter().zip(ys.remainder());
    let rest = rest.fold((0.0, 0.0), |(s, a), (x, y)| (s + x * y, a + (x * y).abs()));
    for (x, y) in xs.zip(ys) {
        for lane in 0..WIDTH {
            signed[lane] += x[lane] * y[lane];
            absolute[lane] += (x[lane] * y[lane]).abs();
        }
    }
    (signed.iter().sum::<f64>() + rest.0, absolute.iter().sum::<f64>() + rest.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_of_every_length() {
        for n in 0..20 {
            let x: Vec<f64> = (0..n).map(f64::from).collect();
            let y: Vec<f64> = (0..n).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
            let signed: f64 =
                (0..n).map(|i| if i % 2 == 0 { f64::from(i) } else { -f64::from(i) }).sum();
            assert_eq!(dots(&x, &y), (signed, f64::from(n * (n - 1) / 2)));
        }
    }
}
