//! Borrowed tensors of the host as bytes in the order of their shape.

use crate::memory::{filled, reserved};
use bytemuck::Pod;
use etalon_problem::{Error, Result, View, ViewMut};
use ndarray::{ArrayViewD, ArrayViewMutD};

/// Calls `f` with the bytes of a tensor in row-major order; with a copy where its strides are others.
pub(crate) fn with_bytes(name: &str, view: &View<'_>, f: impl FnOnce(&[u8]) -> Result<()>) -> Result<()> {
    match view {
        View::F32(x) => packed(name, x, f),
        View::Bf16(x) => packed(name, x, f),
        View::F16(x) => packed(name, x, f),
        View::I64(x) => packed(name, x, f),
        View::F64(_) => Err(stored(name, view.stored())),
    }
}

fn packed<T: Pod>(name: &str, view: &ArrayViewD<'_, T>, f: impl FnOnce(&[u8]) -> Result<()>) -> Result<()> {
    if let Some(slice) = view.as_slice() {
        return f(bytemuck::cast_slice(slice));
    }
    let mut list = reserved(view.len(), &copy_of(name))?;
    list.extend(view.iter().copied());
    f(bytemuck::cast_slice(&list))
}

/// Writes the bytes that `f` writes, in row-major order, to the place of a result.
pub(crate) fn write_bytes(name: &str, place: ViewMut<'_>, f: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
    match place {
        ViewMut::F32(x) => unpacked(name, x, f),
        ViewMut::Bf16(x) => unpacked(name, x, f),
        ViewMut::F16(x) => unpacked(name, x, f),
        ViewMut::I64(x) => unpacked(name, x, f),
        other => Err(stored(name, other.stored())),
    }
}

fn unpacked<T: Pod>(
    name: &str,
    mut place: ArrayViewMutD<'_, T>,
    f: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<()> {
    if let Some(slice) = place.as_slice_mut() {
        return f(bytemuck::cast_slice_mut(slice));
    }
    let mut list = filled(T::zeroed(), place.shape(), &copy_of(name))?;
    f(bytemuck::cast_slice_mut(&mut list))?;
    place.iter_mut().zip(list).for_each(|(to, from)| *to = from);
    Ok(())
}

fn copy_of(name: &str) -> String {
    format!("a copy of `{name}`")
}

fn stored(name: &str, found: impl ToString) -> Error {
    let expected = "f32, bf16 or f16, which are what cuda stores".to_string();
    Error::Dtype { operand: name.to_string(), expected, found: found.to_string() }
}
