//! Tensors by name, as kernels take them: of any storage type, or of f32.

use crate::element::{Tensor, TensorMut};
use etalon_problem::{Dtype, Error, View, ViewMut, Views, ViewsMut};
use ndarray::{ArrayView, ArrayViewMut, Dimension};

/// The inputs of a pass. They have passed [`etalon_problem::Problem::check_call`].
#[derive(Clone, Copy)]
pub struct Inputs<'s, 'v>(pub &'s Views<'v>);

impl<'s> Inputs<'s, '_> {
    /// A tensor of the storage type, if it is there.
    pub fn tensor<D: Dimension>(self, name: &str) -> Result<Option<Tensor<'s, D>>, Error> {
        let Some(view) = self.0.get(name) else { return Ok(None) };
        let axes = |_| misshapen(name, view.shape().len());
        Ok(Some(match view {
            View::F32(x) => Tensor::F32(x.view().into_dimensionality().map_err(axes)?),
            View::Bf16(x) => Tensor::Bf16(x.view().into_dimensionality().map_err(axes)?),
            View::F16(x) => Tensor::F16(x.view().into_dimensionality().map_err(axes)?),
            View::F64(_) | View::I64(_) => return Err(stored(name, view.stored())),
        }))
    }

    /// A tensor of the storage type that every problem has.
    pub fn needed<D: Dimension>(self, name: &str) -> Result<Tensor<'s, D>, Error> {
        self.tensor(name)?.ok_or_else(|| Error::missing(name, None))
    }

    /// A tensor of i64 that every problem has.
    pub fn integer<D: Dimension>(self, name: &str) -> Result<ArrayView<'s, i64, D>, Error> {
        match self.0.get(name) {
            Some(View::I64(x)) => {
                let axes = |_| misshapen(name, x.shape().len());
                x.view().into_dimensionality().map_err(axes)
            }
            Some(other) => Err(stored(name, other.stored())),
            None => Err(Error::missing(name, None)),
        }
    }

    /// A tensor of f32 whatever the storage type, if it is there.
    pub fn float<D: Dimension>(self, name: &str) -> Result<Option<ArrayView<'s, f32, D>>, Error> {
        match self.tensor(name)? {
            None => Ok(None),
            Some(Tensor::F32(x)) => Ok(Some(x)),
            Some(other) => Err(stored(name, other.dtype())),
        }
    }
}

/// The place of a result of the storage type, if it has one.
pub fn place<'o, D: Dimension>(
    out: &mut ViewsMut<'o>,
    name: &str,
) -> Result<Option<TensorMut<'o, D>>, Error> {
    let Some(view) = out.take(name) else { return Ok(None) };
    let found = view.shape().len();
    let axes = |_| misshapen(name, found);
    Ok(Some(match view {
        ViewMut::F32(x) => TensorMut::F32(x.into_dimensionality().map_err(axes)?),
        ViewMut::Bf16(x) => TensorMut::Bf16(x.into_dimensionality().map_err(axes)?),
        ViewMut::F16(x) => TensorMut::F16(x.into_dimensionality().map_err(axes)?),
        other => return Err(stored(name, other.stored())),
    }))
}

/// The place of a result of f32, if it has one.
pub fn float_place<'o, D: Dimension>(
    out: &mut ViewsMut<'o>,
    name: &str,
) -> Result<Option<ArrayViewMut<'o, f32, D>>, Error> {
    match place(out, name)? {
        None => Ok(None),
        Some(TensorMut::F32(x)) => Ok(Some(x)),
        Some(TensorMut::Bf16(_)) => Err(stored(name, Dtype::Bf16)),
        Some(TensorMut::F16(_)) => Err(stored(name, Dtype::F16)),
    }
}

/// The place of a result of i64, if it has one.
pub fn integer_place<'o, D: Dimension>(
    out: &mut ViewsMut<'o>,
    name: &str,
) -> Result<Option<ArrayViewMut<'o, i64, D>>, Error> {
    let Some(view) = out.take(name) else { return Ok(None) };
    let found = view.shape().len();
    match view {
        ViewMut::I64(x) => Ok(Some(x.into_dimensionality().map_err(|_| misshapen(name, found))?)),
        other => Err(stored(name, other.stored())),
    }
}

fn misshapen(name: &str, axes: usize) -> Error {
    Error::value(format!("number of axes of `{name}`"), "that of its operand", axes)
}

fn stored(name: &str, found: impl ToString) -> Error {
    let expected = "f32, bf16 or f16, which are what simd stores".to_string();
    Error::Dtype { operand: name.to_string(), expected, found: found.to_string() }
}
