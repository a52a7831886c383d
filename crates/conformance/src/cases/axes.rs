//! Axes of a grid: lists of named values, of which a point of the grid takes one each.

use crate::capabilities::Fit;
use etalon_problem::{Algorithm, Blocking, Dtype, Operand, Problem};
use ndarray::ArrayD;

/// The axis of the shapes.
pub(crate) const SHAPE: &str = "shape";

/// The storage type, in the place of an axis, where values must occur together.
pub(crate) const STORAGE: &str = "storage";

/// The name of an axis, and the names of its values.
pub(crate) type Names = (&'static str, Vec<&'static str>);

/// An axis, declared with the names of its values and, where a function tells it, what each stands for.
macro_rules! axis {
    (
        $axis:literal, $(#[$doc:meta])* $type:ident
        $(fn $stands_for:ident($($given:ident: $given_type:ty),*) -> $what:ty)?
        { $($(#[$item:meta])* $value:ident = $name:literal $(=> $meaning:expr)?),* $(,)? }
    ) => {
        etalon_problem::named! {
            $(#[$doc])*
            $type, $axis { $($(#[$item])* $value = $name,)* }
        }

        $crate::cases::axes::meanings! {
            $type $(fn $stands_for($($given: $given_type),*) -> $what)?
            { $($value $(=> $meaning)?,)* }
        }
    };
}
pub(crate) use axis;

/// Meanings of the values of an axis.
macro_rules! meanings {
    ($type:ident { $($value:ident,)* }) => {};
    (
        $type:ident fn $stands_for:ident($($given:ident: $given_type:ty),*) -> $what:ty
        { $($value:ident => $meaning:expr,)* }
    ) => {
        impl $type {
            /// The value's meaning.
            pub(crate) fn $stands_for(self, $($given: $given_type),*) -> $what {
                match self { $($type::$value => $meaning),* }
            }
        }
    };
}
pub(crate) use meanings;

/// The axes of a grid, in order, each with one line of documentation; and those declared that no other
/// grid has. A point of the grid is a value of each.
macro_rules! grid {
    ($(#[$about:meta])* $point:ident { $(
        #[doc = $doc:literal]
        $axis:ident: $type:ident $(= $name:literal $(fn $stands_for:ident $given:tt -> $what:ty)? {
            $($values:tt)*
        })?
    ),* $(,)? }) => {
        $($($crate::cases::axes::axis! {
            $name, #[doc = $doc] $type $(fn $stands_for $given -> $what)? { $($values)* }
        })?)*

        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $point { $(#[doc = $doc] pub $axis: $type),* }

        impl $point {
            /// Names of its axes, and of their values.
            pub fn axes() -> Vec<$crate::cases::axes::Names> {
                vec![$((stringify!($axis), $type::ALL.map($type::name).to_vec())),*]
            }

            /// The names of its values.
            pub fn names(&self) -> Vec<&'static str> {
                vec![$(self.$axis.name()),*]
            }

            /// The point of these names, as many as there are axes.
            pub fn parse(names: &[&str]) -> Result<Self, etalon_problem::Error> {
                let mut names = names.iter().copied();
                let mut next = || names.next().unwrap_or_default();
                Ok($point { $($axis: next().parse()?),* })
            }
        }
    };
}
pub(crate) use grid;

/// Makes the case at a point of the grid of an algorithm.
pub(crate) trait Grid {
    /// The storage types.
    const STORAGE: &'static [Dtype] = &[Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64];

    /// The shapes whose extents are large.
    const LARGE: &'static [&'static str];

    /// Large shapes so thin that a run can afford each.
    const THIN: &'static [&'static str];

    /// Large shapes so dear that core depth has the cases of [`TOGETHER`](Self::TOGETHER) alone, or else one.
    const ONCE: &'static [&'static str] = &[];

    /// Values of three axes or more that a run must have together, each with the name of its axis, or [`STORAGE`].
    const TOGETHER: &'static [&'static [(&'static str, &'static str)]] = &[];

    /// Takes from the axes the values that an algorithm of the grid does not have.
    fn restrict(_: Algorithm, _: &mut [Names]) {}

    /// The problem of this point. Its extents are drawn, then made to fit a kernel.
    fn problem(&self, algorithm: Algorithm, seed: u64, fit: Fit<'_>) -> Problem;

    /// The elements of an operand, before they are rounded to its type.
    fn values(&self, problem: &Problem, operand: &Operand, dtype: Dtype, seed: u64) -> ArrayD<f64>;

    /// True if an operand that may be absent is there.
    fn given(&self, operand: &Operand) -> bool;

    /// The tile sizes of its shape; `None`: any, so that also short cases have several tiles.
    fn blocking(&self) -> Option<Blocking> {
        None
    }

    /// True if the bounds must be small against the results: generic elements, and sums of many.
    fn is_rich(&self, problem: &Problem) -> bool;

    /// True if every element is drawn by itself, so that the errors of a kernel are random.
    fn is_generic(&self) -> bool;

    /// True if a small change of any input changes results by about as much.
    fn is_smooth(&self) -> bool;
}
