//! Structs that are read as one of their fields.

/// Declares that a struct is read as a field: a pass of an algorithm as its parts.
macro_rules! read_as {
    ($struct:ty, $field:ident: $of:ty $(, $life:lifetime)?) => {
        impl $(<$life>)? std::ops::Deref for $struct {
            type Target = $of;

            fn deref(&self) -> &$of {
                &self.$field
            }
        }
    };
}
pub(crate) use read_as;
