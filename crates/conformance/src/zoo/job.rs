//! One request to the host, its tensors in f32, and what all algorithms of the host share.

use super::mutant::Mutant;
use etalon_problem::{Pass, Problem};
use half::bf16;
use ndarray::ArrayD;
use std::collections::BTreeMap;
use std::ops::Range;

/// How the softmax runs over the key tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Softmax {
    /// A running maximum; sums are rescaled whenever it grows.
    Streaming,
    /// As streaming, but rescaled only when the maximum grows by more than 5.
    Lazy,
    /// The maximum first, in a sweep of its own.
    TwoPass,
}

/// Ways to compute the same: none of them may trip a law.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// Its name.
    pub name: &'static str,
    /// Keys, tokens or classes in a tile.
    pub tile: usize,
    /// How the softmax runs.
    pub softmax: Softmax,
    /// exp as a power of two.
    pub base2: bool,
    /// Rows are visited from the last to the first, which turns the sums of dk and dv around.
    pub backwards: bool,
}

/// The plain host.
pub const PLAIN: Style =
    Style { name: "plain", tile: 16, softmax: Softmax::Streaming, base2: false, backwards: false };

/// Correct but different: the controls.
pub const CONTROLS: [Style; 6] = [
    PLAIN,
    Style { name: "tile-of-1", tile: 1, ..PLAIN },
    Style { name: "tile-of-128", tile: 128, ..PLAIN },
    Style { name: "two-pass", softmax: Softmax::TwoPass, tile: 48, ..PLAIN },
    Style { name: "lazy-rescale", softmax: Softmax::Lazy, ..PLAIN },
    Style { name: "base-2-reversed", base2: true, backwards: true, ..PLAIN },
];

/// Tensors by name.
pub(super) type Results = BTreeMap<&'static str, Rows>;

/// One request.
pub(super) struct Job {
    pub style: Style,
    pub mutant: Option<Mutant>,
    /// How many requests came before it.
    pub run: usize,
    pub problem: Problem,
    pub pass: Pass,
    /// The inputs of the pass; a backward pass also has what the forward pass returned.
    pub inputs: BTreeMap<String, Rows>,
}

impl Job {
    pub fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// Whether the double backward pass differentiates as if the weights were constants.
    pub fn takes_weights_for_constants(&self) -> bool {
        self.is(Mutant::ConstantWeights) && self.pass == Pass::DoubleBackward
    }

    /// An input that may be absent.
    pub fn given(&self, name: &str) -> Option<&Rows> {
        self.inputs.get(name)
    }

    /// An input; one that is absent has empty rows.
    pub fn input(&self, name: &str) -> &Rows {
        static ABSENT: Rows = Rows { data: Vec::new(), shape: [0; 4] };
        self.given(name).unwrap_or(&ABSENT)
    }

    /// 0..n in tiles.
    pub fn tiles(&self, n: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + use<> {
        let dropped =
            [Mutant::KeyTailDropped, Mutant::TailOfTokensDropped, Mutant::ClassTailDropped];
        let tile = self.style.tile;
        let drops = n > tile && dropped.into_iter().any(|mutant| self.is(mutant));
        let end = if drops { n - n % tile } else { n };
        (0..end.div_ceil(tile)).map(move |at| at * tile..(at * tile + tile).min(end))
    }

    /// Rows 0..n in the order in which this style visits them.
    pub fn order(&self, n: usize) -> impl Iterator<Item = usize> + use<> {
        let backwards = self.style.backwards;
        (0..n).map(move |i| if backwards { n - 1 - i } else { i })
    }

    pub fn exp(&self, x: f32) -> f32 {
        match self.is(Mutant::ExpOfZero) && x == 0.0 {
            true => 1.0 + f32::EPSILON,
            false if self.style.base2 => (x * std::f32::consts::LOG2_E).exp2(),
            false => x.exp(),
        }
    }

    /// The running maximum after a tile whose maximum is `found`, and the factor by which that
    /// scales the sums so far.
    pub fn raise(&self, m: f32, found: f32) -> (f32, f32) {
        let new = larger(m, found);
        let far = new > m + 5.0 || m == f32::NEG_INFINITY || new.is_nan();
        match new == m || self.style.softmax == Softmax::Lazy && !far {
            true => (m, 1.0),
            false if m == f32::NEG_INFINITY => (new, 0.0),
            false => (new, self.exp(m - new)),
        }
    }
}

/// An array of up to four axes in f32, most often `[batch, head, row, column]`; missing axes have
/// extent 1.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    pub data: Vec<f32>,
    pub shape: [usize; 4],
}

impl Rows {
    pub fn filled(shape: &[usize], value: f32) -> Self {
        let mut padded = [1; 4];
        padded.iter_mut().zip(shape).for_each(|(padded, &extent)| *padded = extent);
        Rows { data: vec![value; padded.iter().product()], shape: padded }
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

    /// Where row `i` of an array lies whose outer axes may be shared.
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
pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [0f32; 8];
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<8>(), y.as_chunks::<8>());
    for (x, y) in x.iter().zip(y) {
        (0..8).for_each(|n| sums[n] += x[n] * y[n]);
    }
    let rest: f32 = x_rest.iter().zip(y_rest).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + rest
}

/// y ← y + a x
pub(super) fn add(y: &mut [f32], a: f32, x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += a * x);
}

/// The larger of two; NaN wins: `max` would drop it.
pub(super) fn larger(x: f32, y: f32) -> f32 {
    if x.is_nan() || y.is_nan() { f32::NAN } else { x.max(y) }
}

/// Through bf16 and back.
pub(super) fn through_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}
