//! The macros that make the table of an algorithm, and the structs of its tensors, from its rows.

/// The number of axes of a list of axes; `(…)` stands for axes that depend on the problem.
macro_rules! dimension {
    ([]) => {
        ndarray::Ix0
    };
    ([$a:ident]) => {
        ndarray::Ix1
    };
    ([$a:ident $b:ident]) => {
        ndarray::Ix2
    };
    ([$a:ident $b:ident $c:ident]) => {
        ndarray::Ix3
    };
    ([$a:ident $b:ident $c:ident $d:ident]) => {
        ndarray::Ix4
    };
    (($axes:expr)) => {
        ndarray::IxDyn
    };
}

/// The type of the elements of a tensor beside tensors of `$T`.
macro_rules! element {
    (Storage $T:ident) => {
        $T
    };
    (Wide $T:ident) => {
        <$T as $crate::Scalar>::Wide
    };
    (Integer $T:ident) => {
        i64
    };
}

/// The type of a field that is read; optional where `$when` is no `always` and no `needed`.
macro_rules! operand {
    ($p:ident $a:lifetime $T:ident [] always) => { crate::structs::element!($p $T) };
    ($p:ident $a:lifetime $T:ident $axes:tt always) => {
        ndarray::ArrayView<$a, crate::structs::element!($p $T), crate::structs::dimension!($axes)>
    };
    ($p:ident $a:lifetime $T:ident $axes:tt needed) => {
        crate::structs::operand!($p $a $T $axes always)
    };
    ($p:ident $a:lifetime $T:ident $axes:tt $when:tt) => {
        Option<crate::structs::operand!($p $a $T $axes always)>
    };
}

/// The type of a field of results.
macro_rules! result {
    ($p:ident $T:ident [] always) => { crate::structs::element!($p $T) };
    ($p:ident $T:ident $axes:tt always) => {
        ndarray::Array<crate::structs::element!($p $T), crate::structs::dimension!($axes)>
    };
    ($p:ident $T:ident $axes:tt $when:tt) => {
        Option<crate::structs::result!($p $T $axes always)>
    };
}

/// The type of a field of places.
macro_rules! place {
    ($p:ident $a:lifetime $T:ident []) => { Option<&$a mut crate::structs::element!($p $T)> };
    ($p:ident $a:lifetime $T:ident $axes:tt) => {
        Option<ndarray::ArrayViewMut<
            $a,
            crate::structs::element!($p $T),
            crate::structs::dimension!($axes),
        >>
    };
}

/// A shape as documentation: "`[B, Hq, N, D]`", and the option that a tensor belongs to.
macro_rules! shape {
    ($axes:tt ($option:literal $set:expr)) => {
        concat!(crate::structs::shape!($axes), ", where the problem has `", $option, "`.")
    };
    ($axes:tt zero) => { concat!(crate::structs::shape!($axes), "; absent: zero.") };
    ($axes:tt $when:tt) => { concat!(crate::structs::shape!($axes), ".") };
    ([]) => { "One number" };
    ([$first:ident $($axis:ident)*]) => {
        concat!("`[", crate::operand::symbol!($first), $(", ", crate::operand::symbol!($axis),)* "]`")
    };
    (($axes:expr)) => { "In the shape of the forward pass" };
}

/// `Debug`, which cannot be derived where the types of fields are macros.
macro_rules! debug {
    ($Name:ident<$($lifetime:lifetime,)? T> $($field:ident)*) => {
        impl<T: $crate::Scalar> std::fmt::Debug for $Name<$($lifetime,)? T> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let mut fields = f.debug_struct(stringify!($Name));
                $(fields.field(stringify!($field), &self.$field);)*
                fields.finish()
            }
        }
    };
}

/// A struct of borrowed tensors.
macro_rules! operands {
    (
        $(#[$meta:meta])*
        $Name:ident { $($(#[$doc:meta])* $field:ident: $p:ident $axes:tt $when:tt,)* }
    ) => {
        $(#[$meta])*
        pub struct $Name<'a, T: $crate::Scalar> {
            $($(#[$doc])* #[doc = crate::structs::shape!($axes $when)]
            pub $field: crate::structs::operand!($p 'a T $axes $when),)*
        }

        impl<'a, T: $crate::Scalar> Copy for $Name<'a, T>
        where
            $(crate::structs::operand!($p 'a T $axes $when): Copy,)*
        {}

        #[allow(clippy::non_canonical_clone_impl, reason = "one with an `ArrayViewD` is no `Copy`")]
        impl<T: $crate::Scalar> Clone for $Name<'_, T> {
            fn clone(&self) -> Self {
                $Name { $($field: self.$field.clone(),)* }
            }
        }

        crate::structs::debug!($Name<'_, T> $($field)*);

        impl<'a, T: $crate::Scalar> $crate::tensors::Operands<'a, T> for $Name<'a, T> {
            fn each<'s>(
                &'s self,
                f: &mut dyn FnMut(&'static str, Option<$crate::tensors::Borrowed<'s, T>>),
            ) {
                use $crate::tensors::{ByPrecision, OperandField};
                $(
                    let x = OperandField::<crate::structs::element!($p T)>::elements(&self.$field);
                    f(stringify!($field), x.map(ByPrecision::$p));
                )*
            }

            fn collect(
                find: &mut dyn FnMut(
                    &'static str,
                    $crate::Precision,
                ) -> Option<$crate::tensors::Borrowed<'a, T>>,
            ) -> Result<Self, $crate::Error> {
                use $crate::tensors::{ByPrecision, OperandField};
                Ok($Name {
                    $($field: OperandField::<crate::structs::element!($p T)>::new(
                        stringify!($field),
                        match find(stringify!($field), $crate::Precision::$p) {
                            Some(ByPrecision::$p(x)) => Some(x),
                            _ => None,
                        },
                    )?,)*
                })
            }
        }

        impl<'a, T: $crate::Scalar> $Name<'a, T> {
            $(crate::structs::setter!($field: $p $axes $when);)*
        }
    };
}

/// A struct of borrowed tensors, each of which may be absent.
macro_rules! directions {
    (
        $(#[$meta:meta])*
        $Name:ident { $($(#[$doc:meta])* $field:ident: $p:ident $axes:tt $when:tt,)* }
    ) => {
        crate::structs::operands! {
            $(#[$meta])*
            $Name { $($(#[$doc])* $field: $p $axes $when,)* }
        }

        impl<T: $crate::Scalar> Default for $Name<'_, T> {
            fn default() -> Self {
                $Name { $($field: None,)* }
            }
        }
    };
}

/// The setter of a field that may be absent.
macro_rules! setter {
    ($field:ident: $p:ident $axes:tt always) => {};
    ($field:ident: $p:ident $axes:tt needed) => {};
    ($field:ident: $p:ident $axes:tt $when:tt) => {
        /// Adds the tensor.
pub fn $field(mut self, $field: crate::structs::operand!($p 'a T $axes always)) -> Self {
            self.$field = Some($field);
            self
        }
    };
}

/// A struct of results, and one of places for them.
macro_rules! results {
    (
        $(#[$meta:meta])*
        $Name:ident, $NameMut:ident {
            $($(#[$doc:meta])* $field:ident: $p:ident $axes:tt $when:tt,)*
        }
    ) => {
        $(#[$meta])*
        pub struct $Name<T: $crate::Scalar> {
            $($(#[$doc])* #[doc = crate::structs::shape!($axes $when)]
            pub $field: crate::structs::result!($p T $axes $when),)*
        }

        impl<T: $crate::Scalar> Clone for $Name<T> {
            fn clone(&self) -> Self {
                $Name { $($field: self.$field.clone(),)* }
            }
        }

        impl<T: $crate::Scalar> PartialEq for $Name<T> {
            fn eq(&self, other: &Self) -> bool {
                $(self.$field == other.$field)&&*
            }
        }

        crate::structs::debug!($Name<T> $($field)*);

        #[doc = concat!("Places in which [`", stringify!($Name), "`] is written; of any strides. A tensor without ",
            "a place is not computed, unless something else needs it.")]
        pub struct $NameMut<'a, T: $crate::Scalar> {
            $($(#[$doc])* #[doc = crate::structs::shape!($axes $when)]
            pub $field: crate::structs::place!($p 'a T $axes),)*
        }

        crate::structs::debug!($NameMut<'_, T> $($field)*);

        impl<T: $crate::Scalar> Default for $NameMut<'_, T> {
            fn default() -> Self {
                $NameMut { $($field: None,)* }
            }
        }

        impl<'a, T: $crate::Scalar> $crate::tensors::Places<'a, T> for $NameMut<'a, T> {
            fn each(self, f: &mut dyn FnMut(&'static str, $crate::tensors::Place<'a, T>)) {
                use $crate::tensors::{ByPrecision, PlaceField};
                $(if let Some(x) = self.$field.place() {
                    f(stringify!($field), ByPrecision::$p(x));
                })*
            }
        }

        impl<T: $crate::Scalar> $crate::tensors::Results<T> for $Name<T> {
            fn collect(
                make: &mut dyn FnMut(
                    &'static str,
                    $crate::Precision,
                ) -> Result<Option<$crate::tensors::Owned<T>>, $crate::Error>,
            ) -> Result<Self, $crate::Error> {
                use $crate::tensors::{ByPrecision, ResultField};
                Ok($Name {
                    $($field: ResultField::<crate::structs::element!($p T)>::new(
                        stringify!($field),
                        match make(stringify!($field), $crate::Precision::$p)? {
                            Some(ByPrecision::$p(x)) => Some(x),
                            _ => None,
                        },
                    )?,)*
                })
            }

            fn places<'s>(
                &'s mut self,
                f: &mut dyn FnMut(&'static str, $crate::tensors::Place<'s, T>),
            ) {
                use $crate::tensors::{ByPrecision, ResultField};
                $(if let Some(x) = ResultField::<crate::structs::element!($p T)>::place(&mut self.$field) {
                    f(stringify!($field), ByPrecision::$p(x));
                })*
            }

            fn into_each(self, f: &mut dyn FnMut(&'static str, $crate::tensors::Owned<T>)) {
                use $crate::tensors::{ByPrecision, ResultField};
                $(if let Some(x) = ResultField::<crate::structs::element!($p T)>::into_elements(self.$field) {
                    f(stringify!($field), ByPrecision::$p(x));
                })*
            }
        }
    };
}

/// The option that decides whether a row of the table is there.
macro_rules! option {
    (($option:literal $set:expr)) => {
        Some(($option, $set))
    };
    ($when:ident) => {
        None
    };
}

/// The axes of a row.
macro_rules! axes {
    ([$($axis:ident)*]) => { vec![$($crate::Axis::$axis),*] };
    (($axes:expr)) => { $axes.to_vec() };
}

/// The struct of the gradients: `each` is there, or only what is `wanted`.
macro_rules! gradients {
    (each $($body:tt)*) => {
        crate::structs::results! {
            /// Gradients of a loss by the inputs.
            Gradients, GradientsMut { $($body)* }
        }
    };
    (wanted $($(#[$doc:meta])* $field:ident: $p:ident $axes:tt $when:tt,)*) => {
        crate::structs::gradients! { each $($(#[$doc])* $field: $p $axes wanted,)* }
    };
}

/// The structs of the tangents, where the algorithm has a pass that takes them.
macro_rules! tangents {
    (jvp [$($inputs:tt)*] [$($outputs:tt)*]) => {
        crate::structs::directions! {
            /// A direction in which the inputs move. What is absent stands still.
            Tangents { $($inputs)* }
        }
        crate::structs::results! {
            /// Tangents of the outputs.
            OutputTangents, OutputTangentsMut { $($outputs)* }
        }
    };
    (no_jvp [$($inputs:tt)*] [$($outputs:tt)*]) => {};
}

/// The struct of the outputs that are `saved`, where an algorithm saves some; the list in brackets holds
/// those that were found so far.
macro_rules! saved {
    (
        [$($found:tt)*]
        $(#[$doc:meta])* $field:ident: $p:ident $axes:tt $when:tt saved,
        $($rest:tt)*
    ) => {
        crate::structs::saved! {
            [$($found)* $(#[$doc])* $field: $p $axes $when,]
            $($rest)*
        }
    };
    (
        [$($found:tt)*]
        $(#[$doc:meta])* $field:ident: $p:ident $axes:tt $when:tt unsaved,
        $($rest:tt)*
    ) => {
        crate::structs::saved! { [$($found)*] $($rest)* }
    };
    ([]) => {};
    ([$($(#[$doc:meta])* $field:ident: $p:ident $axes:tt $when:tt,)*]) => {
        crate::structs::operands! {
            /// The outputs of the forward pass that later passes read, borrowed, wherever they were written.
            OutputRef { $($(#[$doc])* $field: $p $axes $when,)* }
        }

        impl<'a, T: $crate::Scalar> From<&'a Output<T>> for OutputRef<'a, T> {
            fn from(output: &'a Output<T>) -> Self {
                OutputRef { $($field: $crate::tensors::Lend::lend(&output.$field),)* }
            }
        }

        impl<T: $crate::Scalar> Output<T> {
            /// Borrowed, for later passes.
            pub fn view(&self) -> OutputRef<'_, T> {
                self.into()
            }
        }
    };
}

/// The rows of an algorithm. Of a tensor x or y: its name, type and axes; when it is there (`always`,
/// under an option of the problem, or `optional`: where a tier offers it); and after `=>` the names
/// that belong to it, `dx, ddx, gx, tx` of an input and `dy, cot_y, gdy, ty` of an output, with the
/// equations that define them. `needed` marks an output whose cotangent the backward pass needs; an
/// absent one otherwise counts as `zero`. What is `saved`, later passes read again. `numbers` are
/// parameters of the problem that have derivatives. `wide` says whether gradients by the inputs have the
/// type of the accumulation.
macro_rules! tensors {
    (
        $Problem:ident as $problem:ident, gradients $mode:ident $((wide $wide:expr))?, $jvp:ident;
        inputs {$(
            $(#[$xdoc:meta])*
            $x:ident: $xp:ident $xaxes:tt $xwhen:tt $(becomes $becomes:ident)?
            $(=> $dx:ident $($dxeq:literal)?, $ddx:ident, $gx:ident $($gxeq:literal)?, $tx:ident)?;
        )*}
        numbers {$(
            $n:ident $value:tt $(.$part:ident)*
            => $dn:ident $($dneq:literal)?, $ddn:ident, $gn:ident $($gneq:literal)?, $tn:ident;
        )*}
        outputs {$(
            $(#[$ydoc:meta])*
            $y:ident: $yp:ident $yaxes:tt $ywhen:tt $ysaved:ident
            $(=> $yneed:ident $dy:ident, $coty:ident, $gdy:ident $($gdyeq:literal)?, $ty:ident $($tyeq:literal)?)?;
        )*}
    ) => {
        impl $Problem {
            /// The table of tensors.
            pub(crate) fn rows(&self) -> Vec<$crate::operand::Row> {
                use $crate::operand::Row;
                let $problem = self;
                let wide_gradients = [false, $($wide)?].contains(&true);
                vec![
                    $(Row {
                        axes: crate::structs::axes!($xaxes),
                        option: crate::structs::option!($xwhen),
                        $(becomes: Some(stringify!($becomes)),)?
                        $(companions: Some([stringify!($dx), stringify!($ddx), stringify!($gx), stringify!($tx)]),)?
                        wide_gradients,
                        ..Row::new(stringify!($x), true, $crate::Precision::$xp)
                    },)*
                    $(Row {
                        number: Some($value$(.$part)*),
                        companions: Some([stringify!($dn), stringify!($ddn), stringify!($gn), stringify!($tn)]),
                        ..Row::new(stringify!($n), true, $crate::Precision::Wide)
                    },)*
                    $(Row {
                        axes: crate::structs::axes!($yaxes),
                        option: crate::structs::option!($ywhen),
                        optional: stringify!($ywhen) == "optional",
                        saved: stringify!($ysaved) == "saved",
                        $(
                            needs_cotangent: stringify!($yneed) == "needed",
                            companions: Some([stringify!($dy), stringify!($coty), stringify!($gdy), stringify!($ty)]),
                        )?
                        ..Row::new(stringify!($y), false, $crate::Precision::$yp)
                    },)*
                ]
            }
        }

        crate::structs::operands! {
            /// Inputs of the forward pass.
            Inputs { $($(#[$xdoc])* $x: $xp $xaxes $xwhen,)* }
        }

        crate::structs::results! {
            /// Outputs of the forward pass.
            Output, OutputMut {
                $($(#[$ydoc])* $y: $yp $yaxes $ywhen,)*
            }
        }

        crate::structs::saved! { [] $($(#[$ydoc])* $y: $yp $yaxes $ywhen $ysaved,)* }

        crate::structs::operands! {
            /// Gradients of a loss by the outputs.
            Cotangents {
                $($(#[doc = concat!("By ", stringify!($y), ":")] $dy: $yp $yaxes $yneed,)?)*
            }
        }

        crate::structs::gradients! { $mode
            $($($(#[doc = concat!($dxeq, ":")])? $dx: $xp $xaxes $xwhen,)?)*
            $($(#[doc = concat!($dneq, ":")])? $dn: Wide [] always,)*
        }

        crate::structs::directions! {
            /// Gradients of a second loss by the gradients of the first, and by the outputs. What is
            /// absent is zero.
            SecondCotangents {
                $($(#[doc = concat!("By ", stringify!($dx), ":")] $ddx: $xp $xaxes zero,)?)*
                $(#[doc = concat!("By ", stringify!($dn), ":")] $ddn: Wide [] zero,)*
                $($(#[doc = concat!("By ", stringify!($y), ":")] $coty: $yp $yaxes zero,)?)*
            }
        }

        crate::structs::results! {
            /// Gradients of the second loss by everything that the backward pass reads.
            SecondGradients, SecondGradientsMut {
                $($(#[doc = concat!("By ", stringify!($x), $(", ", $gxeq,)? ":")] $gx: $xp $xaxes $xwhen,)?)*
                $(#[doc = concat!("By ", stringify!($n), $(", ", $gneq,)? ":")] $gn: Wide [] always,)*
                $($(#[doc = concat!("By ", stringify!($dy), $(", ", $gdyeq,)? ":")] $gdy: $yp $yaxes $ywhen,)?)*
            }
        }

        crate::structs::tangents! { $jvp
            [$($(#[doc = concat!("Of ", stringify!($x), ":")] $tx: $xp $xaxes zero,)?)*]
            [
                $($($(#[doc = concat!($tyeq, ":")])? $ty: $yp $yaxes $ywhen,)?)*
            ]
        }
    };
}

pub(crate) use {
    axes, debug, dimension, directions, element, gradients, operand, operands, option, place,
    result, results, saved, setter, shape, tangents, tensors,
};
