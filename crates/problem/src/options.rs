//! The options of a problem, as a chain of calls.

/// Options of a problem, each with its arguments, its place in the problem and what it puts there.
macro_rules! options {
    ($Problem:ident {
        $(
            $(#[$doc:meta])*
            $name:ident($($argument:ident: $type:ty),*) => $($place:ident).+ = $value:expr;
        )*
    }) => {
        impl $Problem {
            $(
                $(#[$doc])*
                pub fn $name(mut self, $($argument: $type),*) -> Self {
                    self.$($place).+ = $value;
                    self
                }
            )*
        }
    };
}
pub(crate) use options;
