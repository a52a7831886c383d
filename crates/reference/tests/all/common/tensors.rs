//! Tensors by name: random ones, dual ones, and how two of them are compared.

use etalon_problem::{Operand, Role};
use etalon_reference::scalar::Dual;
use ndarray::{ArrayD, ArrayView, Dimension, IxDyn};
use std::collections::BTreeMap;

/// Tensors by name.
pub type Tensors<T> = BTreeMap<String, ArrayD<T>>;

/// Numbers that look random and are the same everywhere: the output function of SplitMix64.
pub struct Random(pub u64);

impl Random {
    /// The numbers of a tensor: they depend on its name and on the seed.
    pub fn of(name: &str, seed: u64) -> Self {
        Random(name.bytes().fold(seed, |hash, byte| hash.wrapping_mul(257) + u64::from(byte)))
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [−1.5, 1.5): as large as the usual activations, without outliers.
    pub fn number(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64 * 3.0 - 1.5
    }

    /// Below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    pub fn tensor(&mut self, shape: &[usize]) -> ArrayD<f64> {
        ArrayD::from_shape_simple_fn(IxDyn(shape), || self.number())
    }
}

/// `point + ε·direction`, where what has no direction stands still.
pub fn dual(point: &Tensors<f64>, direction: &Tensors<f64>) -> Tensors<Dual<f64>> {
    let mut moved = convert(point, Dual::constant);
    for (name, x) in &mut moved {
        if let Some(direction) = direction.get(name) {
            x.zip_mut_with(direction, |x, &tangent| x.tangent = tangent);
        }
    }
    moved
}

/// Every element through `f`.
pub fn convert<T: Clone, U>(tensors: &Tensors<T>, f: impl Fn(T) -> U) -> Tensors<U> {
    present(tensors.iter().map(|(name, x)| Some((name.clone(), x.mapv(&f)))))
}

/// Tensors of a list that are there. They are inserted one by one: a map that is collected sorts its entries first,
/// and that sort would be compiled for every list and every type of number.
pub fn present<T>(list: impl IntoIterator<Item = Option<(String, ArrayD<T>)>>) -> Tensors<T> {
    let mut tensors = Tensors::new();
    for (name, x) in list.into_iter().flatten() {
        tensors.insert(name, x);
    }
    tensors
}

/// An operand that may be absent.
pub fn typed<'a, T, D: Dimension>(x: &'a Tensors<T>, name: &str) -> Option<ArrayView<'a, T, D>> {
    let view = x.get(name)?.view();
    Some(view.into_dimensionality().expect("the operand has as many axes as the problem says"))
}

/// An operand that must be there.
pub fn need<'a, T, D: Dimension>(x: &'a Tensors<T>, name: &str) -> ArrayView<'a, T, D> {
    typed(x, name).unwrap_or_else(|| panic!("the law gives no {name}"))
}

/// A sum and the sum of its absolute terms: the scale of its rounding errors.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sum {
    pub value: f64,
    pub magnitude: f64,
}

impl Sum {
    pub fn add(&mut self, term: f64) {
        self.value += term;
        self.magnitude += term.abs();
    }

    /// Adds Σ x y, if both are there.
    pub fn add_product(&mut self, x: Option<&ArrayD<f64>>, y: Option<&ArrayD<f64>>) {
        if let (Some(x), Some(y)) = (x, y) {
            assert_eq!(x.shape(), y.shape());
            x.iter().zip(y).for_each(|(x, y)| self.add(x * y));
        }
    }

    /// Fails unless both are the same number up to `tolerance` of their absolute terms.
    pub fn assert_equals(&self, other: &Sum, tolerance: f64, what: &str) {
        let (error, scale) = ((self.value - other.value).abs(), self.magnitude + other.magnitude);
        assert!(error <= tolerance * scale, "{what}: {self:?} against {other:?}");
    }
}

/// Fails unless the tensors agree up to `tolerance` of the largest element of `expected`, which is
/// taken to be at least `least`; what is not finite must stand at the same places.
pub fn assert_near(
    found: &ArrayD<f64>,
    expected: &ArrayD<f64>,
    tolerance: f64,
    least: f64,
    what: &str,
) {
    assert_eq!(found.shape(), expected.shape(), "{what}");
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(least, |scale, x| scale.max(x.abs()));
    for ((place, &found), &expected) in found.indexed_iter().zip(expected) {
        let same = found == expected || (found.is_nan() && expected.is_nan());
        assert!(
            same || (found - expected).abs() <= tolerance * scale,
            "{what} at {place:?}: {found:e}, expected {expected:e} (scale {scale:e})"
        );
    }
}

/// Every result that a pass announces is there, in its shape, and no other.
pub fn assert_announced<T>(operands: Vec<Operand>, results: &Tensors<T>, what: &str) {
    let announced = operands.into_iter().filter(|operand| operand.role == Role::Output);
    let announced: Vec<Operand> = announced.collect();
    assert_eq!(results.len(), announced.len(), "{what}");
    for Operand { name, shape, .. } in announced {
        assert_eq!(results[name].shape(), shape, "{what}: {name}");
    }
}
