//! Enumerations whose values have names.

/// An enumeration with the name of each value, and what it is called in errors.
///
/// ```
/// etalon_problem::named! {
///     /// The side of a mask.
///     Side, "side" {
///         /// Keys before the query.
///         Left = "left",
///         /// Keys after it.
///         Right = "right",
///     }
/// }
/// assert_eq!("right".parse(), Ok(Side::Right));
/// assert_eq!(Side::ALL.map(Side::name), ["left", "right"]);
/// ```
#[macro_export]
macro_rules! named {
    (
        $(#[$meta:meta])*
        $Type:ident, $what:literal { $($(#[$doc:meta])* $Value:ident = $name:literal,)* }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $Type {
            $($(#[$doc])* $Value,)*
        }

        impl $Type {
            /// Every one.
            pub const ALL: [$Type; [$($name),*].len()] = [$($Type::$Value),*];

            /// Its name: in Rust, in files, in reports and on the command line.
            pub fn name(self) -> &'static str {
                match self { $($Type::$Value => $name,)* }
            }
        }

        impl std::fmt::Display for $Type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $Type {
            type Err = $crate::Error;
            fn from_str(name: &str) -> Result<Self, $crate::Error> {
                <$Type>::ALL.into_iter().find(|item| item.name() == name).ok_or_else(|| {
                    let names = [$($name),*].join(", ");
                    $crate::Error::value($what, format!("one of {names}"), name)
                })
            }
        }
    };
}
