//! The structs that the typed functions of every tier take and return, made from the same rows as the
//! table of tensors.
//!
//! An algorithm writes its rows once, in the macro `tensors!`, which makes of them the table
//! ([`crate::Table`]) and the structs `Inputs`, `Output`, `Cotangents`, `Gradients` and so on, whose
//! fields are the tensors of those names. The traits here go from the structs to names and back.

use crate::{Error, Precision, View, ViewMut};
use half::{bf16, f16};
use ndarray::{
    Array, ArrayD, ArrayView, ArrayViewD, ArrayViewMut, ArrayViewMutD, Axis, Dimension, Ix0,
};
use std::fmt::Debug;

/// A number that tensors hold.
pub trait Scalar: Copy + Debug + PartialEq {
    /// The type of what a tier keeps in the type of its sums, beside tensors of this type.
    type Wide: Scalar;

    /// A view as the door of a tier takes it, if it takes such numbers.
    fn view(_: ArrayViewD<'_, Self>) -> Option<View<'_>> {
        None
    }

    /// The same of a place.
    fn view_mut(_: ArrayViewMutD<'_, Self>) -> Option<ViewMut<'_>> {
        None
    }
}

macro_rules! scalars {
    ($($number:ty: $wide:ty),*) => {$(
        impl Scalar for $number {
            type Wide = $wide;
            fn view(view: ArrayViewD<'_, Self>) -> Option<View<'_>> {
                Some(view.into())
            }
            fn view_mut(view: ArrayViewMutD<'_, Self>) -> Option<ViewMut<'_>> {
                Some(view.into())
            }
        }
    )*};
}
scalars!(f64: f64, f32: f32, bf16: f32, f16: f32, i64: i64);

/// One of three, by the type in which a tensor is stored.
#[derive(Debug, Clone)]
pub enum ByPrecision<S, W, I> {
    /// Of [`Precision::Storage`].
    Storage(S),
    /// Of [`Precision::Wide`].
    Wide(W),
    /// Of [`Precision::Integer`].
    Integer(I),
}

/// A borrowed tensor beside tensors of `T`.
pub type Borrowed<'a, T> =
    ByPrecision<ArrayViewD<'a, T>, ArrayViewD<'a, <T as Scalar>::Wide>, ArrayViewD<'a, i64>>;

/// A place of a result beside results of `T`.
pub type Place<'a, T> = ByPrecision<
    ArrayViewMutD<'a, T>,
    ArrayViewMutD<'a, <T as Scalar>::Wide>,
    ArrayViewMutD<'a, i64>,
>;

/// A result beside results of `T`.
pub type Owned<T> = ByPrecision<ArrayD<T>, ArrayD<<T as Scalar>::Wide>, ArrayD<i64>>;

/// Applies an expression to the tensor, of whichever precision.
macro_rules! each {
    ($any:expr, $x:ident => $body:expr) => {
        match $any {
            ByPrecision::Storage($x) => $body,
            ByPrecision::Wide($x) => $body,
            ByPrecision::Integer($x) => $body,
        }
    };
}

impl<'a, T: Scalar> Borrowed<'a, T> {
    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        each!(self, x => x.shape())
    }

    /// As the door of a tier takes it, if it takes such numbers.
    pub fn into_view(self) -> Option<View<'a>> {
        each!(self, x => Scalar::view(x))
    }
}

impl<'a, T: Scalar> Place<'a, T> {
    /// As the door of a tier takes it, if it takes such numbers.
    pub fn into_view(self) -> Option<ViewMut<'a>> {
        each!(self, x => Scalar::view_mut(x))
    }
}

/// A struct of borrowed tensors: what a pass reads.
pub trait Operands<'a, T: Scalar>: Sized {
    /// Hands over each by name, or nothing for one that is absent.
    fn each<'s>(&'s self, f: &mut dyn FnMut(&'static str, Option<Borrowed<'s, T>>));

    /// The tensors that `find` finds. Fails where one is missing that the struct always has, or has
    /// another number of axes or type.
    fn collect(
        find: &mut dyn FnMut(&'static str, Precision) -> Option<Borrowed<'a, T>>,
    ) -> Result<Self, Error>;
}

/// A struct of places: where a pass writes.
pub trait Places<'a, T: Scalar> {
    /// Hands over those that are there, by name.
    fn each(self, f: &mut dyn FnMut(&'static str, Place<'a, T>));
}

/// A struct of results.
pub trait Results<T: Scalar>: Sized {
    /// The results that `make` makes. Fails where one is missing that the struct always has.
    fn collect(
        make: &mut dyn FnMut(&'static str, Precision) -> Result<Option<Owned<T>>, Error>,
    ) -> Result<Self, Error>;

    /// Hands over the places of those that are there, by name.
    fn places<'s>(&'s mut self, f: &mut dyn FnMut(&'static str, Place<'s, T>));

    /// Hands over those that are there, by name.
    fn into_each(self, f: &mut dyn FnMut(&'static str, Owned<T>));
}

/// The places of two structs at once.
impl<'a, T: Scalar, A: Places<'a, T>, B: Places<'a, T>> Places<'a, T> for (A, B) {
    fn each(self, f: &mut dyn FnMut(&'static str, Place<'a, T>)) {
        self.0.each(f);
        self.1.each(f);
    }
}

/// Two structs of results at once: of a pass that has both.
impl<T: Scalar, A: Results<T>, B: Results<T>> Results<T> for (A, B) {
    fn collect(
        make: &mut dyn FnMut(&'static str, Precision) -> Result<Option<Owned<T>>, Error>,
    ) -> Result<Self, Error> {
        Ok((A::collect(make)?, B::collect(make)?))
    }

    fn places<'s>(&'s mut self, f: &mut dyn FnMut(&'static str, Place<'s, T>)) {
        self.0.places(f);
        self.1.places(f);
    }

    fn into_each(self, f: &mut dyn FnMut(&'static str, Owned<T>)) {
        self.0.into_each(f);
        self.1.into_each(f);
    }
}

/// A field of a struct of operands, over elements of `E`.
pub trait OperandField<'a, E>: Sized {
    /// Its elements, if it is there.
    fn elements(&self) -> Option<ArrayViewD<'_, E>>;
    /// The field that holds these elements.
    fn new(name: &str, view: Option<ArrayViewD<'a, E>>) -> Result<Self, Error>;
}

impl<'a, E, D: Dimension> OperandField<'a, E> for ArrayView<'a, E, D> {
    fn elements(&self) -> Option<ArrayViewD<'_, E>> {
        Some(self.view().into_dyn())
    }
    fn new(name: &str, view: Option<ArrayViewD<'a, E>>) -> Result<Self, Error> {
        Option::<Self>::new(name, view)?.ok_or_else(|| Error::missing(name, None))
    }
}

impl<'a, E, D: Dimension> OperandField<'a, E> for Option<ArrayView<'a, E, D>> {
    fn elements(&self) -> Option<ArrayViewD<'_, E>> {
        self.as_ref().map(|view| view.view().into_dyn())
    }
    fn new(name: &str, view: Option<ArrayViewD<'a, E>>) -> Result<Self, Error> {
        let Some(view) = view else { return Ok(None) };
        let found = view.ndim();
        view.into_dimensionality().map(Some).map_err(|_| wrong_axes::<D>(name, found))
    }
}

/// A number that may be absent.
impl<'a, E: Scalar> OperandField<'a, E> for Option<E> {
    fn elements(&self) -> Option<ArrayViewD<'_, E>> {
        self.as_ref().map(|number| ndarray::aview0(number).into_dyn())
    }
    fn new(name: &str, view: Option<ArrayViewD<'a, E>>) -> Result<Self, Error> {
        let view = Option::<ArrayView<'a, E, Ix0>>::new(name, view)?;
        Ok(view.map(|number| number[()]))
    }
}

/// A field of a struct of results, over elements of `E`.
pub trait ResultField<E>: Sized {
    /// The field that holds these elements.
    fn new(name: &str, elements: Option<ArrayD<E>>) -> Result<Self, Error>;
    /// View of the memory of its elements, if it is there.
    fn place(&mut self) -> Option<ArrayViewMutD<'_, E>>;
    /// Its elements, if it is there.
    fn into_elements(self) -> Option<ArrayD<E>>;
}

impl<E, D: Dimension> ResultField<E> for Option<Array<E, D>> {
    fn new(name: &str, elements: Option<ArrayD<E>>) -> Result<Self, Error> {
        let Some(elements) = elements else { return Ok(None) };
        let found = elements.ndim();
        elements.into_dimensionality().map(Some).map_err(|_| wrong_axes::<D>(name, found))
    }
    fn place(&mut self) -> Option<ArrayViewMutD<'_, E>> {
        self.as_mut().map(|x| x.view_mut().into_dyn())
    }
    fn into_elements(self) -> Option<ArrayD<E>> {
        self.map(Array::into_dyn)
    }
}

impl<E, D: Dimension> ResultField<E> for Array<E, D> {
    fn new(name: &str, elements: Option<ArrayD<E>>) -> Result<Self, Error> {
        Option::<Self>::new(name, elements)?.ok_or_else(|| Error::missing(name, None))
    }
    fn place(&mut self) -> Option<ArrayViewMutD<'_, E>> {
        Some(self.view_mut().into_dyn())
    }
    fn into_elements(self) -> Option<ArrayD<E>> {
        Some(self.into_dyn())
    }
}

impl<E: Scalar> ResultField<E> for E {
    fn new(name: &str, elements: Option<ArrayD<E>>) -> Result<Self, Error> {
        Array::<E, Ix0>::new(name, elements).map(Array::into_scalar)
    }
    fn place(&mut self) -> Option<ArrayViewMutD<'_, E>> {
        Some(self).place()
    }
    fn into_elements(self) -> Option<ArrayD<E>> {
        Some(ndarray::arr0(self).into_dyn())
    }
}

/// A field of a struct of results, borrowed as a field of a struct of operands.
pub trait Lend<'a> {
    /// The field that borrows it.
    type Borrowed;
    /// Borrows it.
    fn lend(&'a self) -> Self::Borrowed;
}

impl<'a, E: 'a, D: Dimension> Lend<'a> for Array<E, D> {
    type Borrowed = ArrayView<'a, E, D>;
    fn lend(&'a self) -> Self::Borrowed {
        self.view()
    }
}

impl<'a, F: Lend<'a>> Lend<'a> for Option<F> {
    type Borrowed = Option<F::Borrowed>;
    fn lend(&'a self) -> Self::Borrowed {
        self.as_ref().map(F::lend)
    }
}

/// A field of a struct of places, over elements of `E`.
pub trait PlaceField<'a, E> {
    /// View of the memory of its elements, if it is there.
    fn place(self) -> Option<ArrayViewMutD<'a, E>>;
}

impl<'a, E, D: Dimension> PlaceField<'a, E> for Option<ArrayViewMut<'a, E, D>> {
    fn place(self) -> Option<ArrayViewMutD<'a, E>> {
        self.map(ArrayViewMut::into_dyn)
    }
}

/// A number that may have no place.
impl<'a, E> PlaceField<'a, E> for Option<&'a mut E> {
    fn place(self) -> Option<ArrayViewMutD<'a, E>> {
        let one = self.map(|number| ArrayViewMut::from(std::slice::from_mut(number)));
        one.map(|one| one.index_axis_move(Axis(0), 0).into_dyn())
    }
}

fn wrong_axes<D: Dimension>(name: &str, found: usize) -> Error {
    let axes = D::NDIM.map_or(String::new(), |axes| axes.to_string());
    Error::value(format!("number of axes of `{name}`"), axes, found)
}
