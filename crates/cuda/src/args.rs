//! Kernel arguments, declared once: [`kernel_args!`] makes of one list of fields a Rust struct, its declaration in
//! CUDA C, and the bytes of a launch.
//!
//! Addresses are symbols, a region and an offset, until a pass is enqueued; descriptors of the copy engine are encoded
//! then.

use crate::tensor_map::{Boxed, TensorMap};
use std::marker::PhantomData;

/// A type of a field of kernel arguments, laid out as C does.
pub(crate) trait Field: Copy {
    const SIZE: usize;
    /// Bytes that its address is a multiple of.
    const ALIGN: usize;

    /// The declaration in C of a variable.
    fn declare(name: &str) -> String;

    /// Adds the definitions in C that the declaration needs.
    fn define(_definitions: &mut Definitions) {}

    fn write(&self, at: usize, to: &mut Arguments);
}

/// Definitions of structs in C, each behind those that it needs.
#[derive(Default)]
pub(crate) struct Definitions {
    names: Vec<&'static str>,
    pub text: String,
}

impl Definitions {
    /// Adds a struct that is not there. The compiler checks its bytes.
    pub fn add(&mut self, name: &'static str, fields: &[String], bytes: usize) {
        self.names.push(name);
        let fields: String = fields.iter().map(|field| format!("  {field};\n")).collect();
        let check = format!("static_assert(sizeof({name}) == {bytes}, \"{name}\");");
        self.text.push_str(&format!("struct {name} {{\n{fields}}};\n{check}\n"));
    }

    pub fn has(&self, name: &str) -> bool {
        self.names.contains(&name)
    }
}

/// A name of kernel arguments in C, and what adds their definition.
pub(crate) type Declaration = (&'static str, fn(&mut Definitions));

macro_rules! declarations {
    ($($args:ty),+ $(,)?) => {
        &[$((<$args as $crate::args::Pointee>::NAME, <$args as $crate::args::Field>::define)),+]
    };
}
pub(crate) use declarations;

/// The bytes of a kernel's arguments, and where in them symbols stand.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Arguments {
    pub bytes: Vec<u8>,
    /// Offsets of addresses that are symbols.
    pub symbols: Vec<usize>,
    /// Offsets of descriptors, and what they describe.
    pub maps: Vec<(usize, Boxed)>,
}

impl Arguments {
    /// The bytes of structs, one behind the other: of a launch, or of a list.
    pub fn of<T: Field>(list: &[T]) -> Arguments {
        let mut all = Arguments { bytes: vec![0; list.len() * T::SIZE], ..Arguments::default() };
        list.iter().enumerate().for_each(|(n, x)| x.write(n * T::SIZE, &mut all));
        all
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

macro_rules! numbers {
    ($($number:ty = $name:literal),* $(,)?) => {$(
        impl Field for $number {
            const SIZE: usize = size_of::<$number>();
            const ALIGN: usize = size_of::<$number>();

            fn declare(name: &str) -> String {
                format!(concat!($name, " {}"), name)
            }

            fn write(&self, at: usize, to: &mut Arguments) {
                to.put(at, &self.to_ne_bytes());
            }
        }

        impl Pointee for $number {
            const NAME: &'static str = $name;
        }
    )*};
}

numbers! { i32 = "int", u32 = "u32", i64 = "i64", f32 = "float", f64 = "double" }

impl<T: Field, const N: usize> Field for [T; N] {
    const SIZE: usize = N * T::SIZE;
    const ALIGN: usize = T::ALIGN;

    fn declare(name: &str) -> String {
        T::declare(&format!("{name}[{N}]"))
    }

    fn define(definitions: &mut Definitions) {
        T::define(definitions);
    }

    fn write(&self, at: usize, to: &mut Arguments) {
        for (i, x) in self.iter().enumerate() {
            x.write(at + i * T::SIZE, to);
        }
    }
}

/// A type of what lies at an address.
pub(crate) trait Pointee: Copy {
    const NAME: &'static str;

    /// Adds its definition, if the sources of kernels do not have it.
    fn define(_definitions: &mut Definitions) {}
}

/// Pointees that the sources of kernels define.
macro_rules! pointees {
    ($($(#[$doc:meta])* $pointee:ident = $name:literal),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default)]
        pub(crate) struct $pointee;

        impl Pointee for $pointee {
            const NAME: &'static str = $name;
        }
    )*};
}
pub(crate) use pointees;

pointees! {
    /// An element in the storage type.
    Element = "element",
    /// Bytes that the kernel knows the type of.
    Untyped = "void",
    Byte = "u8",
    /// A number of 16 bits, of any type.
    Half = "u16",
}

/// An address; 0 where there is nothing.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pointer<T, const READS: bool>(pub u64, PhantomData<T>);

pub(crate) type Ptr<T> = Pointer<T, false>;
pub(crate) type ConstPtr<T> = Pointer<T, true>;

impl<T, const READS: bool> From<u64> for Pointer<T, READS> {
    fn from(address: u64) -> Self {
        Self(address, PhantomData)
    }
}

impl<T: Pointee, const READS: bool> Field for Pointer<T, READS> {
    const SIZE: usize = 8;
    const ALIGN: usize = 8;

    fn declare(name: &str) -> String {
        format!("{}{}* {name}", if READS { "const " } else { "" }, T::NAME)
    }

    fn define(definitions: &mut Definitions) {
        T::define(definitions);
    }

    fn write(&self, at: usize, to: &mut Arguments) {
        to.put(at, &self.0.to_ne_bytes());
        if self.0 != 0 {
            to.symbols.push(at);
        }
    }
}

impl Field for TensorMap {
    const SIZE: usize = 128;
    const ALIGN: usize = 128;

    fn declare(name: &str) -> String {
        format!("TensorMap {name}")
    }

    fn write(&self, at: usize, to: &mut Arguments) {
        if let Some(boxed) = self.boxed() {
            to.maps.push((at, boxed));
        }
    }
}

/// The layout in C of fields with these bytes and alignments: the offset of each, the bytes of all, their alignment.
pub(crate) const fn layout<const N: usize>(fields: [(usize, usize); N]) -> ([usize; N], usize, usize) {
    let (mut offsets, mut end, mut largest, mut i) = ([0; N], 0usize, 1, 0);
    while i < N {
        let (size, align) = fields[i];
        offsets[i] = end.next_multiple_of(align);
        end = offsets[i] + size;
        largest = if align > largest { align } else { largest };
        i += 1;
    }
    (offsets, end.next_multiple_of(largest), largest)
}

/// Declares kernel arguments, or parts of them: structs in Rust, and in CUDA C with the names behind `as`.
macro_rules! kernel_args {
    (
        $(#[$doc:meta])*
        $access:vis struct $args:ident as $name:literal {
            $($(#[$field_doc:meta])* $field_access:vis $($field:ident),+: $of:ty),+ $(,)?
        }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default)]
        $access struct $args {
            $($($field_access $field: $of),+),+
        }

        impl $args {
            /// The offset of each field, the bytes of all, and the alignment.
            const LAYOUT: ([usize; [$($(stringify!($field)),+),+].len()], usize, usize) =
                $crate::args::layout([$($({
                    type Of = $of;
                    let _ = stringify!($field);
                    (<Of as $crate::args::Field>::SIZE, <Of as $crate::args::Field>::ALIGN)
                }),+),+]);
        }

        impl $crate::args::Field for $args {
            const SIZE: usize = Self::LAYOUT.1;
            const ALIGN: usize = Self::LAYOUT.2;

            fn declare(name: &str) -> String {
                format!(concat!($name, " {}"), name)
            }

            fn define(definitions: &mut $crate::args::Definitions) {
                if !definitions.has($name) {
                    $(<$of as $crate::args::Field>::define(definitions);)+
                    let fields = [$($(<$of as $crate::args::Field>::declare(stringify!($field))),+),+];
                    definitions.add($name, &fields, <Self as $crate::args::Field>::SIZE);
                }
            }

            fn write(&self, at: usize, to: &mut $crate::args::Arguments) {
                let mut offsets = Self::LAYOUT.0.iter();
                $($($crate::args::Field::write(&self.$field, at + offsets.next().unwrap_or(&0), to);)+)+
            }
        }

        impl $crate::args::Pointee for $args {
            const NAME: &'static str = $name;

            fn define(definitions: &mut $crate::args::Definitions) {
                <$args as $crate::args::Field>::define(definitions);
            }
        }
    };
    ($($(#[$doc:meta])* $access:vis struct $args:ident as $name:literal $fields:tt)+) => {
        $($crate::args::kernel_args! { $(#[$doc])* $access struct $args as $name $fields })+
    };
}
pub(crate) use kernel_args;

/// Kernel arguments, 0 but for lists of fields: each is what a function makes of its name (`names`), or of the field
/// of this name of another struct (`fields`).
macro_rules! filled {
    (@ $args:ident { $($done:tt)* }) => {{
        #[allow(clippy::needless_update)] // lists may name all fields
        let args = $args { $($done)* ..$args::default() };
        args
    }};
    (@ $args:ident { $($done:tt)* } names($of:expr) [$($field:ident)+] $($rest:tt)*) => {
        $crate::args::filled!(@ $args { $($done)* $($field: $of(stringify!($field)).into(),)+ } $($rest)*)
    };
    (@ $args:ident { $($done:tt)* } fields($from:expr, $of:expr) [$($field:ident)+] $($rest:tt)*) => {
        $crate::args::filled!(@ $args { $($done)* $($field: $of($from.$field).into(),)+ } $($rest)*)
    };
    ($args:ident: $($lists:tt)+) => { $crate::args::filled!(@ $args {} $($lists)+) };
}
pub(crate) use filled;

/// An extent, as kernels count it.
pub(crate) fn int(extent: usize) -> i32 {
    extent as i32
}
