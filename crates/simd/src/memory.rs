//! Memory that may not be there: an error in place of an abort.

use bytemuck::{Zeroable, allocation::try_zeroed_vec};
use etalon_problem::Error;
use ndarray::{Array, Dimension, ShapeBuilder, ShapeError};

/// Zeros, or the error that there is no memory for them.
pub fn zeroed<T: Zeroable>(len: usize, what: &str) -> Result<Vec<T>, Error> {
    let bytes = len.saturating_mul(size_of::<T>());
    try_zeroed_vec(len).map_err(|()| Error::Memory { what: what.to_string(), bytes })
}

/// An empty list with room for `len` elements, or the error that there is no memory for them.
pub fn reserved<T>(len: usize, what: &str) -> Result<Vec<T>, Error> {
    let (mut list, bytes) = (Vec::new(), len.saturating_mul(size_of::<T>()));
    let short = |_| Error::Memory { what: what.to_string(), bytes };
    list.try_reserve_exact(len).map_err(short)?;
    Ok(list)
}

/// An array of zeros, or the error that there is no memory for it.
pub fn zeros<A: Zeroable, D: Dimension>(
    shape: impl ShapeBuilder<Dim = D>,
    what: &str,
) -> Result<Array<A, D>, Error> {
    let shape = shape.into_shape_with_order();
    let data = zeroed(shape.size(), what)?;
    let error = |error: ShapeError| Error::value(what, "an addressable array", error);
    Array::from_shape_vec(shape, data).map_err(error)
}
