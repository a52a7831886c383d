//! Operands and results by name, and the structs whose fields they are.

use crate::scalar::Real;
use etalon_problem::{Error, Table, check_operands};
use ndarray::{Array, ArrayD, ArrayView, ArrayViewD, Dimension};
use std::collections::BTreeMap;

/// Tensors by name. Whole numbers stand as numbers of `T`.
pub type Tensors<T> = BTreeMap<String, ArrayD<T>>;

/// Names with the shapes of those tensors that are there.
pub(crate) type Shapes<'a> = Vec<(&'static str, Option<&'a [usize]>)>;

/// Fails unless operands with these shapes are all that a pass needs, and none that it does not have.
pub(crate) fn check(table: &Table, given: &[Shapes<'_>]) -> Result<(), Error> {
    given.iter().try_for_each(|shapes| check_operands(table, shapes))
}

/// A field of a struct of operands.
pub(crate) trait Operand<'a, T>: Sized {
    /// The operand of this name; absent where the field may be.
    fn from_named(name: &str, tensors: &'a Tensors<T>) -> Result<Self, Error>;
    /// Its shape, if it is there.
    fn shape(&self) -> Option<&[usize]>;
    /// Its elements, if it is there.
    fn elements(&self) -> Option<ArrayViewD<'_, T>>;
}

impl<'a, T: Real, D: Dimension> Operand<'a, T> for ArrayView<'a, T, D> {
    fn from_named(name: &str, tensors: &'a Tensors<T>) -> Result<Self, Error> {
        let view = Option::<ArrayView<'a, T, D>>::from_named(name, tensors)?;
        view.ok_or_else(|| Error::missing(name, None))
    }
    fn shape(&self) -> Option<&[usize]> {
        Some(ArrayView::shape(self))
    }
    fn elements(&self) -> Option<ArrayViewD<'_, T>> {
        Some(self.view().into_dyn())
    }
}

impl<'a, T: Real, D: Dimension> Operand<'a, T> for Option<ArrayView<'a, T, D>> {
    fn from_named(name: &str, tensors: &'a Tensors<T>) -> Result<Self, Error> {
        let Some(array) = tensors.get(name) else { return Ok(None) };
        let (axes, found) = (D::NDIM.map_or(String::new(), |n| n.to_string()), array.ndim());
        let mismatch = |_| Error::value(format!("number of axes of `{name}`"), axes, found);
        array.view().into_dimensionality().map(Some).map_err(mismatch)
    }
    fn shape(&self) -> Option<&[usize]> {
        self.as_ref().map(|view| view.shape())
    }
    fn elements(&self) -> Option<ArrayViewD<'_, T>> {
        self.as_ref().map(|view| view.view().into_dyn())
    }
}

/// A number that may be absent.
impl<'a, T: Real> Operand<'a, T> for Option<T> {
    fn from_named(name: &str, tensors: &'a Tensors<T>) -> Result<Self, Error> {
        let view = Option::<ArrayView<'a, T, ndarray::Ix0>>::from_named(name, tensors)?;
        Ok(view.map(|number| number[()]))
    }
    fn shape(&self) -> Option<&[usize]> {
        self.as_ref().map(|_| &[][..])
    }
    fn elements(&self) -> Option<ArrayViewD<'_, T>> {
        self.as_ref().map(|number| ndarray::aview0(number).into_dyn())
    }
}

/// A field of a struct of results.
pub(crate) trait Outcome<T>: Sized {
    /// Its elements, if it is there.
    fn into_elements(self) -> Option<ArrayD<T>>;
    /// The result of this name.
    fn from_elements(name: &str, elements: Option<ArrayD<T>>) -> Result<Self, Error>;
}

impl<T: Real, D: Dimension> Outcome<T> for Option<Array<T, D>> {
    fn into_elements(self) -> Option<ArrayD<T>> {
        self.map(Array::into_dyn)
    }
    fn from_elements(name: &str, elements: Option<ArrayD<T>>) -> Result<Self, Error> {
        let mismatch = |_| Error::value(name, "a result with the axes of the pass", "others");
        elements.map(|x| x.into_dimensionality().map_err(mismatch)).transpose()
    }
}

impl<T: Real, D: Dimension> Outcome<T> for Array<T, D> {
    fn into_elements(self) -> Option<ArrayD<T>> {
        Some(self.into_dyn())
    }
    fn from_elements(name: &str, elements: Option<ArrayD<T>>) -> Result<Self, Error> {
        Option::from_elements(name, elements)?.ok_or_else(|| Error::missing(name, None))
    }
}

impl<T: Real> Outcome<T> for T {
    fn into_elements(self) -> Option<ArrayD<T>> {
        Some(ndarray::arr0(self).into_dyn())
    }
    fn from_elements(name: &str, elements: Option<ArrayD<T>>) -> Result<Self, Error> {
        let number: ndarray::Array0<T> = Outcome::from_elements(name, elements)?;
        Ok(number.into_scalar())
    }
}

impl<T: Real> Outcome<T> for i64 {
    fn into_elements(self) -> Option<ArrayD<T>> {
        T::from_f64(self as f64).into_elements()
    }
    fn from_elements(name: &str, elements: Option<ArrayD<T>>) -> Result<Self, Error> {
        T::from_elements(name, elements).map(|number| number.to_f64() as i64)
    }
}

impl<T: Real, D: Dimension> Outcome<T> for Option<Array<i64, D>> {
    fn into_elements(self) -> Option<ArrayD<T>> {
        self.map(|x| x.mapv(|number| T::from_f64(number as f64)).into_dyn())
    }
    fn from_elements(name: &str, elements: Option<ArrayD<T>>) -> Result<Self, Error> {
        let numbers: Option<Array<T, D>> = Outcome::from_elements(name, elements)?;
        Ok(numbers.map(|x| x.mapv(|number| number.to_f64() as i64)))
    }
}

/// Structs of operands: their fields are the tensors of those names.
macro_rules! operands {
    ($($type:ident { $($field:ident)* })*) => {$(
        #[allow(dead_code)] // not every struct of every algorithm goes every way
        impl<'a, T: crate::scalar::Real> $type<'a, T> {
            /// The operands of these names. Fails where one is missing that the algorithm cannot do
            /// without, or has another number of axes.
            pub fn from_named(
                tensors: &'a crate::named::Tensors<T>,
            ) -> Result<Self, etalon_problem::Error> {
                Ok($type {
                    $($field: crate::named::Operand::from_named(stringify!($field), tensors)?),*
                })
            }

            /// The names with the shapes of those that are there.
            pub(crate) fn shapes(&self) -> crate::named::Shapes<'_> {
                vec![$((stringify!($field), crate::named::Operand::shape(&self.$field))),*]
            }

            /// Those that are there.
            pub(crate) fn named(&self) -> Vec<(&'static str, ndarray::ArrayViewD<'_, T>)> {
                let all = [$((stringify!($field), crate::named::Operand::elements(&self.$field))),*];
                all.into_iter().filter_map(|(name, x)| Some((name, x?))).collect()
            }
        }
    )*};
}
pub(crate) use operands;

/// Structs of results: their fields are the tensors of those names.
macro_rules! results {
    ($($type:ident { $($field:ident)* })*) => {$(
        #[allow(dead_code)] // not every struct of every algorithm goes every way
        impl<T: crate::scalar::Real> $type<T> {
            /// The results that are there, by name.
            pub(crate) fn into_named(self) -> crate::named::Tensors<T> {
                use crate::named::Outcome;
                let all = [$((stringify!($field), self.$field.into_elements())),*];
                all.into_iter().filter_map(|(name, x)| Some((name.to_string(), x?))).collect()
            }

            /// The results of these names.
            pub(crate) fn from_named(
                mut tensors: crate::named::Tensors<T>,
            ) -> Result<Self, etalon_problem::Error> {
                use crate::named::Outcome;
                Ok($type {
                    $($field: Outcome::from_elements(
                        stringify!($field),
                        tensors.remove(stringify!($field)),
                    )?),*
                })
            }
        }
    )*};
}
pub(crate) use results;
