//! Axes of a grid: lists of named values, of which a point of the grid takes one each.

use etalon_problem::Error;

/// An enumeration whose values have names.
pub trait Axis: Copy + PartialEq + 'static {
    /// What the axis is called in errors.
    const AXIS: &'static str;

    /// Every value of the axis.
    fn all() -> &'static [Self];

    /// Its name in the names of cases.
    fn name(self) -> &'static str;

    /// The value of that name.
    fn parse(name: &str) -> Result<Self, Error> {
        Self::all().iter().copied().find(|value| value.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Self::all().iter().map(|value| value.name()).collect();
            Error::value(
                format!("case.{}", Self::AXIS),
                format!("one of {}", names.join(", ")),
                name,
            )
        })
    }
}

/// An axis, declared with the names of its values.
macro_rules! axis {
    ($axis:literal, $(#[$doc:meta])* $type:ident { $($(#[$item:meta])* $variant:ident = $name:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $type { $($(#[$item])* $variant),* }

        impl $crate::cases::Axis for $type {
            const AXIS: &'static str = $axis;

            fn all() -> &'static [Self] {
                &[$($type::$variant),*]
            }

            fn name(self) -> &'static str {
                match self { $($type::$variant => $name),* }
            }
        }
    };
}
pub(crate) use axis;

/// A point of a grid: a value of each of its axes, in the order of the fields.
macro_rules! point {
    ($(#[$doc:meta])* $type:ident { $($(#[$item:meta])* $axis:ident: $kind:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $type { $($(#[$item])* pub $axis: $kind),* }

        impl $crate::cases::axes::Coordinates for $type {
            const AXES: &'static [&'static str] = &[$(<$kind as $crate::cases::Axis>::AXIS),*];

            fn sizes() -> Vec<usize> {
                vec![$(<$kind as $crate::cases::Axis>::all().len()),*]
            }

            fn at(indices: &[usize]) -> Option<Self> {
                let mut indices = indices.iter();
                let point = $type {
                    $($axis: *<$kind as $crate::cases::Axis>::all().get(*indices.next()?)?),*
                };
                Some(point)
            }

            fn names(&self) -> Vec<&'static str> {
                vec![$($crate::cases::Axis::name(self.$axis)),*]
            }

            fn parse(names: &[&str]) -> Result<Self, etalon_problem::Error> {
                let mut given = names.iter();
                let mut next = || given.next().copied().unwrap_or_default();
                Ok($type { $($axis: <$kind as $crate::cases::Axis>::parse(next())?),* })
            }
        }
    };
}
pub(crate) use point;

/// What [`point!`] makes of a list of axes.
pub(crate) trait Coordinates: Copy {
    /// What the axes are called.
    const AXES: &'static [&'static str];
    /// The number of values of each axis.
    fn sizes() -> Vec<usize>;
    /// The point with these indices into its axes.
    fn at(indices: &[usize]) -> Option<Self>;
    /// The names of its values.
    fn names(&self) -> Vec<&'static str>;
    /// The point of these names, as many as there are axes.
    fn parse(names: &[&str]) -> Result<Self, Error>;
}
