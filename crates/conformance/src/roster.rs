//! The roster: what each algorithm brings to the suite. That is the grid of its cases, its host in the
//! zoo, and the known bugs of that.

pub mod attention;
pub mod lazy_attention;
pub mod linear_attention;
pub mod linear_cross_entropy;

use crate::cases::axes::{Grid, Names};
use crate::zoo::job::Job;
use crate::zoo::mutant::Mutant;
use crate::zoo::rows::Results;
use etalon_problem::{Algorithm, Attention, AttentionLse, Dtype, Error, Problem};

/// The grids and the bugs, each of one or more algorithms.
macro_rules! grids {
    ($($grid:ident($module:ident): $($algorithm:ident)|+;)*) => {
        /// A point of the grid of an algorithm.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Point {
            $(
                #[doc = concat!("Of `", stringify!($module), "`.")]
                $grid($module::Point),
            )*
        }

        impl Point {
            /// The storage types of the cases of an algorithm.
            pub(crate) fn storage(algorithm: Algorithm) -> &'static [Dtype] {
                match algorithm { $($(Algorithm::$algorithm)|+ => $module::Point::STORAGE),* }
            }

            /// Names of the axes of an algorithm, and of their values.
            pub(crate) fn axes(algorithm: Algorithm) -> Vec<Names> {
                match algorithm {
                    $($(Algorithm::$algorithm)|+ => {
                        let mut axes = $module::Point::axes();
                        $module::Point::restrict(algorithm, &mut axes);
                        axes
                    })*
                }
            }

            /// The shapes of an algorithm whose extents are large.
            pub(crate) fn large(algorithm: Algorithm) -> &'static [&'static str] {
                match algorithm { $($(Algorithm::$algorithm)|+ => $module::Point::LARGE),* }
            }

            /// Large shapes so thin that a run can afford each.
            pub(crate) fn thin(algorithm: Algorithm) -> &'static [&'static str] {
                match algorithm { $($(Algorithm::$algorithm)|+ => $module::Point::THIN),* }
            }

            /// Large shapes so dear that core depth has few cases of them.
            pub(crate) fn once(algorithm: Algorithm) -> &'static [&'static str] {
                match algorithm { $($(Algorithm::$algorithm)|+ => $module::Point::ONCE),* }
            }

            /// Values that a run of an algorithm must have together.
            pub(crate) fn together(
                algorithm: Algorithm,
            ) -> &'static [&'static [(&'static str, &'static str)]] {
                match algorithm { $($(Algorithm::$algorithm)|+ => $module::Point::TOGETHER),* }
            }

            /// The point of these names of values.
            pub(crate) fn parse(algorithm: Algorithm, names: &[&str]) -> Result<Self, Error> {
                match algorithm {
                    $($(Algorithm::$algorithm)|+ => $module::Point::parse(names).map(Point::$grid)),*
                }
            }
        }

        /// The known bugs of every algorithm.
        pub fn mutants() -> Vec<Mutant> {
            [$($module::MUTANTS),*].concat()
        }

        /// Applies an expression to the point of whichever grid.
        macro_rules! each {
            ($point:expr, $p:ident => $body:expr) => {
                match $point { $($crate::roster::Point::$grid($p) => $body),* }
            };
        }
        pub(crate) use each;
    };
}
grids! {
    Attention(attention): Attention | AttentionLse;
    LinearAttention(linear_attention): LinearAttention;
    LazyAttention(lazy_attention): LazyAttention;
    LinearCrossEntropy(linear_cross_entropy): LinearCrossEntropy;
}

/// The results of a request to the host of its algorithm.
pub(crate) fn results(job: &Job) -> Result<Results, Error> {
    match &job.problem {
        Problem::Attention(Attention { scores, .. })
        | Problem::AttentionLse(AttentionLse { scores }) => Ok(attention::results(job, scores)),
        Problem::LinearAttention(problem) => linear_attention::results(job, problem),
        Problem::LazyAttention(problem) => Ok(lazy_attention::results(job, problem)),
        Problem::LinearCrossEntropy(problem) => linear_cross_entropy::results(job, problem),
    }
}

/// The known bug of that name.
pub fn mutant(name: &str) -> Option<Mutant> {
    mutants().into_iter().find(|mutant| mutant.name == name)
}
