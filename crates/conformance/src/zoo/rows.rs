//! Tensors of the host, in f32, and the arithmetic that all its kernels share.

use half::bf16;
use ndarray::ArrayD;
use std::collections::BTreeMap;

/// Tensors by name.
pub(crate) type Results = BTreeMap<&'static str, Rows>;

/// An array of up to four axes in f32, most often `[batch, head, row, column]`; missing axes have
/// extent 1.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    pub data: Vec<f32>,
    pub shape: [usize; 4],
}

impl Rows {
    pub fn filled(shape: &[usize], value: f32) -> Self {
        let mut padded = [1; 4];
        padded.iter_mut().zip(shape).for_each(|(padded, &extent)| *padded = extent);
        Rows { data: vec![value; padded.iter().product()], shape: padded }
    }

    /// As many zeros.
    pub fn zeros(&self) -> Self {
        Rows::filled(&self.shape, 0.0)
    }

    pub fn of(array: &ArrayD<f64>) -> Self {
        let data = array.iter().map(|&x| x as f32).collect();
        Rows { data, ..Rows::filled(array.shape(), 0.0) }
    }

    fn start(&self, [b, h, i]: [usize; 3]) -> usize {
        ((b * self.shape[1] + h) * self.shape[2] + i) * self.shape[3]
    }

    pub fn row(&self, at: [usize; 3]) -> &[f32] {
        &self.data[self.start(at)..][..self.shape[3]]
    }

    pub fn row_mut(&mut self, at: [usize; 3]) -> &mut [f32] {
        let start = self.start(at);
        &mut self.data[start..][..self.shape[3]]
    }

    /// Position of row `i` of an array whose outer axes may be shared.
    pub fn shared(&self, [b, h, i]: [usize; 3]) -> [usize; 3] {
        [b.min(self.shape[0] - 1), h.min(self.shape[1] - 1), i]
    }

    /// The matrix of a batch element and a head.
    pub fn matrix(&self, b: usize, h: usize) -> &[f32] {
        &self.data[self.start([b, h, 0])..][..self.shape[2] * self.shape[3]]
    }

    pub fn matrix_mut(&mut self, b: usize, h: usize) -> &mut [f32] {
        let start = self.start([b, h, 0]);
        &mut self.data[start..][..self.shape[2] * self.shape[3]]
    }

    /// Replaces every element by a function of its index and of itself.
    pub fn each(&mut self, f: impl Fn([usize; 4], f32) -> f32) {
        let [_, y, z, w] = self.shape;
        for (n, x) in self.data.iter_mut().enumerate() {
            *x = f([n / w / z / y, n / w / z % y, n / w % z, n % w], *x);
        }
    }

    /// Sets the elements with such an index to 0.
    pub fn clear(&mut self, hit: impl Fn([usize; 4]) -> bool) {
        self.each(|at, x| if hit(at) { 0.0 } else { x });
    }

    /// Replaces every element by the one at another index.
    pub fn take(&mut self, from: impl Fn([usize; 4]) -> [usize; 4]) {
        let old = self.clone();
        self.each(|at, _| {
            let [b, h, i, c] = from(at);
            old.row([b, h, i])[c]
        });
    }
}

/// In eight partial sums, which compilers turn into vectors.
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [0f32; 8];
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<8>(), y.as_chunks::<8>());
    for (x, y) in x.iter().zip(y) {
        (0..8).for_each(|n| sums[n] += x[n] * y[n]);
    }
    let rest: f32 = x_rest.iter().zip(y_rest).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + rest
}

/// y ← y + a x
pub(crate) fn add(y: &mut [f32], a: f32, x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
}

/// The larger of two; NaN wins: `max` would drop it.
pub(crate) fn larger(x: f32, y: f32) -> f32 {
    if x.is_nan() || y.is_nan() { f32::NAN } else { x.max(y) }
}

/// The factor of what is so many roundoffs too large.
pub(crate) fn off_by(roundoffs: f32) -> f32 {
    1.0 + roundoffs * 0.5 * f32::EPSILON
}

/// Through bf16 and back.
pub(crate) fn through_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}
