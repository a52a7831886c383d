//! Tensors of the suite as structs of tensors, and results of either tier as tensors of the suite.

use crate::tensor::{Data, Tensor, Tensors, Values};
use etalon_problem::tensors::{ByPrecision, Operands, Results};
use etalon_problem::{Dtype, Error, Precision};
use etalon_reference::scalar::Real;
use etalon_simd::Element;
use half::{bf16, f16};
use ndarray::{ArrayD, ArrayViewD};

/// A type of which [`Data`] may hold elements.
pub(super) trait StoredNumber: Element {
    fn of(data: &Data) -> Option<&[Self]>;
}

macro_rules! stored_number {
    ($($number:ty: $Variant:ident),*) => {$(
        impl StoredNumber for $number {
            fn of(data: &Data) -> Option<&[Self]> {
                if let Data::$Variant(x) = data { Some(x) } else { None }
            }
        }
    )*};
}
stored_number!(f32: F32, bf16: Bf16, f16: F16);

/// The result of a function of `T`, the storage type of a request, and `G`, the type of its gradients.
macro_rules! of_types {
    ($request:expr, $problem:expr => $function:ident($($argument:expr),*)) => {
        match ($request.dtype, $problem.wide_gradients) {
            (Dtype::F32, _) => $function::<f32, f32>($($argument),*),
            (Dtype::Bf16, true) => $function::<half::bf16, f32>($($argument),*),
            (Dtype::Bf16, false) => $function::<half::bf16, half::bf16>($($argument),*),
            (Dtype::F16, true) => $function::<half::f16, f32>($($argument),*),
            (Dtype::F16, false) => $function::<half::f16, half::f16>($($argument),*),
            (Dtype::F64, _) => Err(Error::value("dtype", "f32, bf16 or f16", $request.dtype)),
        }
    };
}
pub(super) use of_types;

/// The tensors of a struct.
pub(super) fn operands<'a, T: StoredNumber, S: Operands<'a, T>>(
    tensors: &'a Tensors,
) -> Result<S, Error> {
    fn shaped<'a, E>(shape: &[usize], x: &'a [E]) -> Option<ArrayViewD<'a, E>> {
        ArrayViewD::from_shape(shape, x).ok()
    }
    S::collect(&mut |name, precision| {
        let Tensor { shape, data } = tensors.get(name)?;
        match (precision, data) {
            (Precision::Integer, Data::I64(x)) => shaped(shape, x).map(ByPrecision::Integer),
            (Precision::Wide, Data::F32(x)) => shaped(shape, x).map(ByPrecision::Wide),
            (Precision::Storage, x) => shaped(shape, T::of(x)?).map(ByPrecision::Storage),
            _ => None,
        }
    })
}

/// Results as the suite stores them: exactly.
pub(super) fn stored<T: Element>(results: impl Results<T>) -> Tensors {
    let mut tensors = Tensors::new();
    results.into_each(&mut |name, x| {
        let x = match x {
            ByPrecision::Storage(x) => Tensor::round(&x.mapv(|x| f64::from(x.to_f32())), T::DTYPE),
            ByPrecision::Wide(x) => Tensor::round(&x.mapv(f64::from), Dtype::F32),
            ByPrecision::Integer(x) => {
                Tensor { shape: x.shape().to_vec(), data: Data::I64(x.iter().copied().collect()) }
            }
        };
        tensors.insert(name.to_string(), x);
    });
    tensors
}

/// Results in f64.
pub(super) fn numbers<T: Real>(results: impl Results<T>) -> Values {
    let mut values = Values::new();
    results.into_each(&mut |name, x| {
        let x: ArrayD<f64> = match x {
            ByPrecision::Storage(x) => x.mapv(T::to_f64),
            ByPrecision::Wide(x) => x.mapv(|x| x.to_f64()),
            ByPrecision::Integer(x) => x.mapv(|x| x as f64),
        };
        values.insert(name.to_string(), x);
    });
    values
}
