//! What the laws do to tensors: pick, change and compare elements, without a rounding.

use crate::tensor::{Data, Stored, Tensor};
use etalon_problem::{Dtype, Error};
use ndarray::ArrayD;

/// Applies an expression to the elements, whatever their type.
macro_rules! each {
    ($data:expr, $x:ident => $body:expr) => {
        match $data {
            Data::F64($x) => Data::F64($body),
            Data::F32($x) => Data::F32($body),
            Data::Bf16($x) => Data::Bf16($body),
            Data::F16($x) => Data::F16($body),
            Data::I64($x) => Data::I64($body),
            Data::Bool($x) => Data::Bool($body),
        }
    };
}

/// The entries `picks` of an axis, in this order; entries may repeat.
pub(crate) fn take(tensor: &Tensor, axis: usize, picks: &[usize]) -> Tensor {
    let inner: usize = tensor.shape[axis + 1..].iter().product();
    let outer: usize = tensor.shape[..axis].iter().product();
    let length = tensor.shape[axis];
    let source: Vec<usize> = (0..outer)
        .flat_map(|o| picks.iter().flat_map(move |&p| (0..inner).map(move |i| (o, p, i))))
        .map(|(o, p, i)| (o * length + p) * inner + i)
        .collect();
    let mut shape = tensor.shape.clone();
    shape[axis] = picks.len();
    let data = each!(&tensor.data, x => source.iter().map(|&at| x[at]).collect());
    Tensor { shape, data }
}

/// The elements in f64; the tensor is known to hold numbers.
pub(crate) fn wide(tensor: &Tensor) -> Result<ArrayD<f64>, Error> {
    tensor.numbers("a tensor of the suite")
}

/// Every element replaced by `f(index, element)`, rounded to the tensor's own type. What `f`
/// leaves alone stays as it is, bit by bit (NaNs excepted).
pub(crate) fn map(
    tensor: &Tensor,
    mut f: impl FnMut(&[usize], f64) -> f64,
) -> Result<Tensor, Error> {
    let mut values = wide(tensor)?;
    for (index, x) in values.indexed_iter_mut() {
        *x = f(ndarray::Dimension::slice(&index), *x);
    }
    Ok(Tensor::store(&values, tensor.stored().unwrap_or(Stored::Float(Dtype::F64))))
}

/// The multi-index of an element.
pub(crate) fn index(shape: &[usize], mut at: usize) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for axis in (0..shape.len()).rev() {
        index[axis] = at % shape[axis].max(1);
        at /= shape[axis].max(1);
    }
    index
}

/// In which sense two tensors must be equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Equality {
    /// The same bits; two NaNs are equal.
    Bits,
    /// The same numbers: +0 equals −0, two NaNs are equal.
    Numbers,
}

/// The first element in which two tensors differ where `where_` holds, in words.
pub(crate) fn difference(
    name: &str,
    got: &Tensor,
    expected: &Tensor,
    equality: Equality,
    mut where_: impl FnMut(&[usize]) -> bool,
) -> Option<String> {
    if got.shape != expected.shape {
        return Some(format!("{name}: shape {:?}, expected {:?}", got.shape, expected.shape));
    }
    let (a, b) = match (wide(got), wide(expected)) {
        (Ok(a), Ok(b)) => (a, b),
        _ => return Some(format!("{name}: not a tensor of numbers")),
    };
    let same = |a: f64, b: f64| match equality {
        // Exact in f64, so that equal bits there are equal bits in the storage type.
        Equality::Bits => a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
        Equality::Numbers => a == b || (a.is_nan() && b.is_nan()),
    };
    let elements = a.iter().zip(b.iter()).enumerate();
    let mut unequal = elements.filter(|(_, (a, b))| !same(**a, **b));
    unequal.find_map(|(at, (a, b))| {
        let index = index(&got.shape, at);
        where_(&index).then(|| format!("{name}{index:?} = {a:e}, expected {b:e}"))
    })
}

/// Whether x is more than the limit; NaN is more than anything.
pub(crate) fn exceeds(x: f64, limit: f64) -> bool {
    x > limit || x.is_nan()
}

/// A value an eighth larger in size (0: an eighth), rounded to its type.
pub(crate) fn nudged(x: f64, dtype: Dtype) -> f64 {
    dtype.round(x + 0.125 * if x == 0.0 { 1.0 } else { x.abs() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::arr2;

    #[test]
    fn take_picks_along_an_axis() {
        let x = Tensor::round(&arr2(&[[1., 2., 3.], [4., 5., 6.]]).into_dyn(), Dtype::F32);
        let y = take(&x, 1, &[2, 0, 0]);
        assert_eq!(y.shape, [2, 3]);
        assert_eq!(y.data, Data::F32(vec![3., 1., 1., 6., 4., 4.]));
        assert_eq!(take(&x, 0, &[1]).data, Data::F32(vec![4., 5., 6.]));
    }

    #[test]
    fn a_difference_names_its_element() {
        let x = Tensor::round(&arr2(&[[1., 0.], [f64::NAN, 6.]]).into_dyn(), Dtype::F32);
        let y = Tensor::round(&arr2(&[[1., -0.], [f64::NAN, 7.]]).into_dyn(), Dtype::F32);
        let found = |equality| difference("x", &x, &y, equality, |_| true).unwrap();
        assert!(found(Equality::Bits).starts_with("x[0, 1]"));
        assert!(found(Equality::Numbers).starts_with("x[1, 1]"));
        assert!(difference("x", &x, &y, Equality::Numbers, |i| i[0] == 0).is_none());
    }
}
