//! Code that the instruction sets of x86-64 share: all but their intrinsics.

/// An instruction set from its features and intrinsics: its token with the gate, and its register.
///
/// Each operation is a function with the features enabled, in which the intrinsics are safe: of what
/// registers hold, to what a register holds or to a number.
macro_rules! x86_level {
    (
        token $isa:ident: $features:literal if $detected:expr;
        register $register:ident: $lanes:literal lanes in $raw:ty, flushes: $flushes:literal;
        tile $tile:ty, short $short:ty;
        memory { splat: $splat:ident, load: $load:ident, store: $store:ident }
        operators { $($trait:ident::$method:ident: $operator:ident),* }
        registers { $(fn $name:ident($a:ident $(, $b:ident)*) $body:block)* }
        numbers { $(fn $reduce:ident($x:ident) $reduced:block)* }
    ) => {
        #[doc = concat!("The token of ", $features, ".")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $isa(());

        #[doc = concat!("One register. A value exists only where there is ", $features, ".")]
        #[derive(Clone, Copy)]
        #[repr(transparent)]
        pub struct $register(pub(super) $raw);

        impl Isa for $isa {
            type F32 = $register;
            type Tile = $tile;
            type Short = $short;
        }

        impl $isa {
            /// The token, if this CPU has the features.
            pub fn detect() -> Option<Self> {
                $detected.then_some($isa(()))
            }

            /// Runs a kernel with the features enabled: the one gate into this instruction set.
            #[inline]
            pub fn enter<T>(self, kernel: impl Kernel<T>) -> T {
                #[target_feature(enable = $features)]
                fn gate<T>(isa: $isa, kernel: impl Kernel<T>) -> T {
                    kernel.run(isa)
                }
                // SAFETY: a token exists only where `detect` saw the features.
                unsafe { gate(self, kernel) }
            }
        }

        $(impl $trait for $register {
            type Output = Self;
            #[inline(always)]
            fn $method(self, b: Self) -> Self {
                #[target_feature(enable = $features)]
                #[inline]
                fn op(a: $raw, b: $raw) -> $raw {
                    $operator(a, b)
                }
                // SAFETY: a register is in hand, so the features are present.
                $register(unsafe { op(self.0, b.0) })
            }
        })*

        impl Lanes for $register {
            type Isa = $isa;
            const N: usize = $lanes;
            const FLUSHES: bool = $flushes;
            const FUSES: bool = true;

            #[inline(always)]
            fn splat(_: $isa, x: f32) -> Self {
                #[target_feature(enable = $features)]
                #[inline]
                fn op(x: f32) -> $raw {
                    $splat(x)
                }
                // SAFETY: a token is in hand, so the features are present.
                $register(unsafe { op(x) })
            }

            #[inline(always)]
            fn load(isa: $isa, x: &[f32]) -> Self {
                let x = &x[..$lanes];
                // SAFETY: as many elements as a register has lanes, by the slicing above.
                unsafe { Self::load_at(isa, x.as_ptr()) }
            }

            #[inline(always)]
            unsafe fn load_at(_: $isa, x: *const f32) -> Self {
                #[target_feature(enable = $features)]
                #[inline]
                unsafe fn op(x: *const f32) -> $raw {
                    // SAFETY: the caller vouches for as many readable elements as there are lanes.
                    unsafe { $load(x) }
                }
                // SAFETY: a token is in hand, so the features are present; the caller vouches for x.
                $register(unsafe { op(x) })
            }

            #[inline(always)]
            fn store(self, x: &mut [f32]) {
                #[target_feature(enable = $features)]
                #[inline]
                fn op(a: $raw, x: &mut [f32]) {
                    let x = &mut x[..$lanes];
                    // SAFETY: as many elements as a register has lanes, by the slicing above.
                    unsafe { $store(x.as_mut_ptr(), a) }
                }
                // SAFETY: a register is in hand, so the features are present.
                unsafe { op(self.0, x) }
            }

            $(#[inline(always)]
            fn $name(self $(, $b: Self)*) -> Self {
                #[target_feature(enable = $features)]
                #[inline]
                fn op($a: $raw $(, $b: $raw)*) -> $raw $body
                // SAFETY: a register is in hand, so the features are present.
                $register(unsafe { op(self.0 $(, $b.0)*) })
            })*

            $(#[inline(always)]
            fn $reduce(self) -> f32 {
                #[target_feature(enable = $features)]
                #[inline]
                fn op($x: $raw) -> f32 $reduced
                // SAFETY: a register is in hand, so the features are present.
                unsafe { op(self.0) }
            })*
        }
    };
}
pub(super) use x86_level;
