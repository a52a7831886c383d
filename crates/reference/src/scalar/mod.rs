//! The numbers that the formulas are written over.
//!
//! `f64` is the oracle. [`Quad`] computes the same with twice the digits and says how far off the
//! oracle is; [`Dual`] carries a derivative along and says whether the hand-written gradients are
//! the derivatives of what they claim; `f32` shows what the plain formula gives in single
//! precision.

mod dual;
mod product;
mod quad;

pub use dual::Dual;
pub use quad::Quad;

use etalon_problem::Scalar;
use ndarray::{ArrayView2, ArrayViewMut2};
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub, SubAssign};

/// A real number, as far as the formulas need one. Comparison is that of the value alone;
/// infinities and NaN behave as in IEEE 754.
pub trait Real:
    Scalar<Wide = Self>
    + PartialOrd
    + Send
    + Sync
    + Neg<Output = Self>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + SubAssign
    + 'static
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;

    /// The nearest number to `x`, a constant: without derivative.
    fn from_f64(x: f64) -> Self;
    /// The nearest f64 to the value.
    fn to_f64(self) -> f64;
    /// e^x.
    fn exp(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// The square root.
    fn sqrt(self) -> Self;
    /// The hyperbolic tangent, accurate relative to itself also near 0.
    fn tanh(self) -> Self;

    /// c · self of a c that does not move. A product with a derivative of 0 has none where self is
    /// infinite; here that is nothing, and the product moves as self does.
    fn times(self, c: Self) -> Self {
        c * self
    }

    /// self / c of a c that does not move: as [`Real::times`].
    fn over(self, c: Self) -> Self {
        self / c
    }

    /// tanh′(x) = 1 − tanh²(x), as 4e^{−2|x|} / (1 + e^{−2|x|})²: where tanh is near 1, the
    /// difference would have no digits left.
    fn tanh_slope(self) -> Self {
        let magnitude = if self < Self::ZERO { -self } else { self };
        let e = (-(magnitude + magnitude)).exp();
        let root = Self::ONE + e;
        Self::from_f64(4.0) * e / (root * root)
    }

    /// e^x − 1, accurate relative to itself also near 0: 2t / (1 − t) with t = tanh(x/2).
    fn exp_m1(self) -> Self {
        let half = Self::from_f64(0.5);
        if self < half && self > -half {
            let t = (half * self).tanh();
            (t + t) / (Self::ONE - t)
        } else {
            self.exp() - Self::ONE
        }
    }

    /// A weight as it multiplies a row in a product of matrices, for which a kernel may store it in less. The
    /// formulas round nothing; a number that knows its own error answers with one that knows that of this, too.
    fn stored(self) -> Self {
        self
    }

    /// c += a b: `[m, n]`, `[m, k]` and `[k, n]`; of extents that differ, the smaller counts.
    fn add_product(c: ArrayViewMut2<'_, Self>, a: ArrayView2<'_, Self>, b: ArrayView2<'_, Self>) {
        product::plain(c, a, b);
    }

    /// a of max(self, 0) = a·self: 1 above 0, and nothing at 0 and below; it does not move. NaN
    /// counts as above, so that it shows. A number that knows its own error answers with one that may
    /// be 0 or 1, where that error may decide.
    fn step(self) -> Option<Self> {
        (self.is_nan() || self > Self::ZERO).then_some(Self::ONE)
    }

    /// True if the value is NaN.
    fn is_nan(self) -> bool {
        self.to_f64().is_nan()
    }

    /// True if the value is neither NaN nor infinite.
    fn is_finite(self) -> bool {
        self.to_f64().is_finite()
    }
}

/// Implements the operators of a type of numbers, from their formulas; the comparison, which is that of one
/// field; and sums of its own type.
#[macro_export]
macro_rules! operators {
    (
        [$($generics:tt)*] $Number:ty, $x:ident, $y:ident;
        compare $field:tt,
        neg $neg:expr, add $add:expr, sub $sub:expr, mul $mul:expr, div $div:expr
    ) => {
        impl<$($generics)*> etalon_problem::Scalar for $Number {
            type Wide = Self;
        }
        impl<$($generics)*> PartialEq for $Number {
            #[inline]
            fn eq(&self, other: &Self) -> bool {
                self.$field == other.$field
            }
        }
        impl<$($generics)*> PartialOrd for $Number {
            #[inline]
            fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
                PartialOrd::partial_cmp(&self.$field, &other.$field)
            }
        }
        impl<$($generics)*> std::ops::Neg for $Number {
            type Output = Self;
            #[inline]
            fn neg(self) -> Self {
                let $x = self;
                $neg
            }
        }
        impl<$($generics)*> std::ops::AddAssign for $Number {
            #[inline]
            fn add_assign(&mut self, y: Self) {
                *self = *self + y;
            }
        }
        impl<$($generics)*> std::ops::SubAssign for $Number {
            #[inline]
            fn sub_assign(&mut self, y: Self) {
                *self = *self - y;
            }
        }
        $crate::operators! { @two [$($generics)*] $Number, $x, $y; Add add $add }
        $crate::operators! { @two [$($generics)*] $Number, $x, $y; Sub sub $sub }
        $crate::operators! { @two [$($generics)*] $Number, $x, $y; Mul mul $mul }
        $crate::operators! { @two [$($generics)*] $Number, $x, $y; Div div $div }
    };
    (@two [$($generics:tt)*] $Number:ty, $x:ident, $y:ident; $Op:ident $op:ident $value:expr) => {
        impl<$($generics)*> std::ops::$Op for $Number {
            type Output = Self;
            #[inline]
            fn $op(self, $y: Self) -> Self {
                let $x = self;
                $value
            }
        }
    };
}

macro_rules! primitive {
    ($type:ident $($own:item)*) => {
        impl Real for $type {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;

            fn from_f64(x: f64) -> Self {
                x as $type
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
            fn exp(self) -> Self {
                $type::exp(self)
            }
            fn ln(self) -> Self {
                $type::ln(self)
            }
            fn sqrt(self) -> Self {
                $type::sqrt(self)
            }
            fn tanh(self) -> Self {
                $type::tanh(self)
            }
            $($own)*
        }
    };
}

primitive! {
    f64

    fn add_product(c: ArrayViewMut2<'_, f64>, a: ArrayView2<'_, f64>, b: ArrayView2<'_, f64>) {
        product::blocked(c, a, b);
    }
}
primitive!(f32);
