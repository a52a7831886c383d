//! Operations of the laws on tensors: pick, change and compare elements, without a rounding.

use super::flaw::{Flaw, Judgement};
use crate::tensor::{Data, Stored, Tensor, Tensors};
use etalon_problem::{Dtype, Error};
use ndarray::{ArrayD, Dimension};

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

/// A result of a kernel. Of a kernel that does not return it nothing can be asked that needs it.
pub(crate) fn returned<'a>(outputs: &'a Tensors, name: &str) -> Result<&'a Tensor, Flaw> {
    outputs.get(name).ok_or_else(|| not_returned(name))
}

/// Nothing is asked of a result that a kernel does not return.
pub(crate) fn not_returned(name: &str) -> Flaw {
    Flaw::NotAsked(format!("the kernel does not return `{name}`"))
}

/// As [`returned`], as numbers.
pub(crate) fn result(outputs: &Tensors, name: &str) -> Result<ArrayD<f64>, Flaw> {
    Ok(returned(outputs, name)?.to_f64(name)?)
}

/// The entries `picks` of an axis, in this order; entries may repeat.
pub(crate) fn take(tensor: &Tensor, axis: usize, picks: &[usize]) -> Tensor {
    let mut shape = tensor.shape.clone();
    shape[axis] = picks.len();
    Tensor { shape, data: each!(&tensor.data, x => entries(&tensor.shape, x, axis, picks)) }
}

/// As [`take`], of the elements of an array in row-major order.
pub(crate) fn entries<T: Copy>(
    shape: &[usize],
    data: &[T],
    axis: usize,
    picks: &[usize],
) -> Vec<T> {
    let inner: usize = shape[axis + 1..].iter().product();
    let blocks = data.chunks((shape[axis] * inner).max(1));
    let picked = blocks.flat_map(|block| picks.iter().map(|p| &block[p * inner..(p + 1) * inner]));
    picked.flatten().copied().collect()
}

/// Every element replaced by `f(index, element)`, rounded to the tensor's own type. What `f`
/// leaves alone stays as it is, bit by bit (NaNs excepted).
pub(crate) fn map(
    tensor: &Tensor,
    mut f: impl FnMut(&[usize], f64) -> f64,
) -> Result<Tensor, Error> {
    fn mapped(tensor: &Tensor, f: &mut OfElement<'_>) -> Result<Tensor, Error> {
        let mut values = tensor.numbers("a tensor of the suite")?;
        change_each(&mut values, |at, x| *x = f(at, *x));
        Ok(Tensor::store(&values, tensor.stored().unwrap_or(Stored::Float(Dtype::F64))))
    }
    mapped(tensor, &mut f)
}

/// A number for an element, by its index. Called through a pointer, so that what calls it is compiled once and not
/// for every closure.
type OfElement<'a> = dyn FnMut(&[usize], f64) -> f64 + 'a;

/// Calls `f` with the index of every element and the element, in row-major order: iterators over indices of
/// any number of axes take ten times as long.
pub(crate) fn change_each(values: &mut ArrayD<f64>, mut f: impl FnMut(&[usize], &mut f64)) {
    let shape = values.shape().to_vec();
    let mut at = vec![0; shape.len()];
    for x in values {
        f(&at, x);
        for (i, &n) in at.iter_mut().zip(&shape).rev() {
            *i += 1;
            if *i < n {
                break;
            }
            *i = 0;
        }
    }
}

/// An array of `f(index)`, quick as [`change_each`].
pub(crate) fn from_indices(shape: &[usize], mut f: impl FnMut(&[usize]) -> f64) -> ArrayD<f64> {
    let mut values = ArrayD::zeros(shape);
    change_each(&mut values, |at, x| *x = f(at));
    values
}

/// The index of an element, by its number in row-major order.
pub(crate) fn index(shape: &[usize], number: usize) -> Vec<usize> {
    let mut left = number;
    let mut index = shape.to_vec();
    for i in index.iter_mut().rev() {
        let n = (*i).max(1);
        (*i, left) = (left % n, left / n);
    }
    index
}

/// The tensors with every element replaced by `f(name, index, element)`: as [`map`].
pub(crate) fn change(
    tensors: &Tensors,
    mut f: impl FnMut(&str, &[usize], f64) -> f64,
) -> Result<Tensors, Error> {
    fn changed(
        tensors: &Tensors,
        f: &mut dyn FnMut(&str, &[usize], f64) -> f64,
    ) -> Result<Tensors, Error> {
        let each = tensors.iter();
        each.map(|(name, x)| Ok((name.clone(), map(x, |at, x| f(name, at, x))?))).collect()
    }
    changed(tensors, &mut f)
}

/// The tensors with NaN where `hit(name, index)` holds.
pub(crate) fn poison(
    tensors: &Tensors,
    hit: impl Fn(&str, &[usize]) -> bool,
) -> Result<Tensors, Error> {
    change(tensors, |name, at, x| if hit(name, at) { f64::NAN } else { x })
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
fn difference(
    name: &str,
    got: &Tensor,
    expected: &Tensor,
    equality: Equality,
    where_: &dyn Fn(&[usize]) -> bool,
) -> Option<String> {
    if got.shape != expected.shape {
        return Some(format!("{name}: shape {:?}, expected {:?}", got.shape, expected.shape));
    }
    if got.data.same_bits(&expected.data) {
        return None;
    }
    let (a, b) = match (got.numbers(name), expected.numbers(name)) {
        (Ok(a), Ok(b)) => (a, b),
        _ => return Some(format!("{name}: not a tensor of numbers")),
    };
    let same = |a: f64, b: f64| match equality {
        // Exact in f64, so that equal bits there are equal bits in the storage type.
        Equality::Bits => a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
        Equality::Numbers => a == b || (a.is_nan() && b.is_nan()),
    };
    let unequal = a.iter().zip(&b).enumerate().filter(|(_, (a, b))| !same(**a, **b));
    let mut placed = unequal.map(|(number, (a, b))| (index(&got.shape, number), a, b));
    let counted = placed.find(|(at, ..)| where_(at));
    counted.map(|(at, a, b)| format!("{name}{at:?} = {a:e}, expected {b:e}"))
}

/// The tensors that both have, by name.
pub(crate) fn both<'a>(
    a: &'a Tensors,
    b: &'a Tensors,
) -> impl Iterator<Item = (&'a str, &'a Tensor, &'a Tensor)> {
    a.iter().filter_map(|(name, x)| Some((name.as_str(), x, b.get(name)?)))
}

/// Every element of every tensor counts.
pub(crate) fn everywhere(_: &str, _: &[usize]) -> bool {
    true
}

/// Fails unless tensors of one name are equal where `counts(name, index)` holds.
pub(crate) fn same(
    got: &Tensors,
    expected: &Tensors,
    equality: Equality,
    counts: impl Fn(&str, &[usize]) -> bool,
) -> Judgement {
    for (name, got, expected) in both(got, expected) {
        if let Some(text) = difference(name, got, expected, equality, &|at| counts(name, at)) {
            return Err(Flaw::Fail(text));
        }
    }
    Ok(None)
}

/// Fails at the first element of a result of which `wrong(index, element)` says what is wrong with it,
/// after its name, its place and what it is.
pub(crate) fn each_element(
    name: &str,
    values: &ArrayD<f64>,
    mut wrong: impl FnMut(&[usize], f64) -> Option<String>,
) -> Judgement {
    fn judged(
        name: &str,
        values: &ArrayD<f64>,
        wrong: &mut dyn FnMut(&[usize], f64) -> Option<String>,
    ) -> Judgement {
        for (at, &x) in values.indexed_iter() {
            if let Some(wrong) = wrong(at.slice(), x) {
                return Err(Flaw::Fail(format!("{name}{:?} = {x:e}{wrong}", at.slice())));
            }
        }
        Ok(None)
    }
    judged(name, values, &mut wrong)
}

/// True if x is more than the limit; NaN is more than anything.
pub(crate) fn exceeds(x: f64, limit: f64) -> bool {
    x > limit || x.is_nan()
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
    fn elements_have_the_indices_of_their_numbers() {
        let mut x = ArrayD::zeros(vec![2, 3, 2]);
        let mut number = 0;
        change_each(&mut x, |at, _| {
            assert_eq!(at, index(&[2, 3, 2], number));
            number += 1;
        });
        assert_eq!((number, index(&[2, 3, 2], 9)), (12, vec![1, 1, 1]));
        change_each(&mut ArrayD::zeros(vec![3, 0]), |at, _| panic!("{at:?} of none"));
    }

    #[test]
    fn a_difference_names_its_element() {
        let x = Tensor::round(&arr2(&[[1., 0.], [f64::NAN, 6.]]).into_dyn(), Dtype::F32);
        let y = Tensor::round(&arr2(&[[1., -0.], [f64::NAN, 7.]]).into_dyn(), Dtype::F32);
        let found = |equality| difference("x", &x, &y, equality, &|_| true).unwrap();
        assert!(found(Equality::Bits).starts_with("x[0, 1]"));
        assert!(found(Equality::Numbers).starts_with("x[1, 1]"));
        assert!(difference("x", &x, &y, Equality::Numbers, &|i| i[0] == 0).is_none());
    }
}
