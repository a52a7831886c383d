//! Borrowed tensors by name: what a tier reads, and where it writes.
//!
//! A tier has one door, `run(&problem, pass, &inputs, &mut outputs, &options)`. The inputs are
//! [`Views`], the outputs [`ViewsMut`]; both may have any strides.
//!
//! ```
//! use etalon_problem::{Attention, Dtype, Extents, Pass, Problem, Views, ViewsMut};
//! use ndarray::{Array3, Array4};
//!
//! let extents = Extents { batch: 1, query_heads: 2, key_heads: 1, queries: 5, keys: 5, dim: 8 };
//! let problem: Problem = Attention::new(extents).into();
//! let [q, kv] = [(1, 2, 5, 8), (1, 1, 5, 8)].map(Array4::<f32>::zeros);
//! let (mut o, mut lse) = (q.clone(), Array3::<f32>::zeros((1, 2, 5)));
//!
//! let inputs = Views::new().with("q", &q).with("k", &kv).with("v", &kv);
//! let outputs = ViewsMut::new().with("o", &mut o).with("lse", &mut lse);
//! assert_eq!(problem.check_call(Pass::Forward, &inputs, &outputs, false)?, Dtype::F32);
//! # Ok::<(), etalon_problem::Error>(())
//! ```

use crate::operand::find;
use crate::{Dtype, Error, Operand, Pass, Precision, Problem, Role, Table};
use half::{bf16, f16};
use ndarray::{Array, ArrayView, ArrayViewMut, Dimension, IxDyn};
use smallvec::SmallVec;
use std::fmt;

/// The type in which numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// As floating-point numbers.
    Float(Dtype),
    /// As i64.
    Integer,
}

impl Stored {
    /// The type of a tensor beside main tensors of type `storage`.
    pub fn of(precision: Precision, storage: Dtype) -> Self {
        match (precision, storage) {
            (Precision::Storage, storage) => Stored::Float(storage),
            (Precision::Wide, Dtype::F64) => Stored::Float(Dtype::F64),
            (Precision::Wide, _) => Stored::Float(Dtype::F32),
            (Precision::Integer, _) => Stored::Integer,
        }
    }

    /// The type of floating-point numbers, if it is one.
    pub fn dtype(self) -> Option<Dtype> {
        if let Stored::Float(dtype) = self { Some(dtype) } else { None }
    }

    /// The bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Stored::Float(dtype) => dtype.bytes(),
            Stored::Integer => size_of::<i64>(),
        }
    }
}

impl From<Dtype> for Stored {
    fn from(dtype: Dtype) -> Self {
        Stored::Float(dtype)
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stored::Float(dtype) => dtype.name(),
            Stored::Integer => "integers",
        })
    }
}

/// The two kinds of views: one enum, one `From`, one set of questions for each.
macro_rules! views {
    ($(#[$doc:meta])* $name:ident, $array:ident, $many:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub enum $name<'a> {
            /// IEEE binary64.
            F64($array<'a, f64, IxDyn>),
            /// IEEE binary32.
            F32($array<'a, f32, IxDyn>),
            /// bfloat16.
            Bf16($array<'a, bf16, IxDyn>),
            /// IEEE binary16.
            F16($array<'a, f16, IxDyn>),
            /// Whole numbers.
            I64($array<'a, i64, IxDyn>),
        }

        impl $name<'_> {
            /// Its shape.
            pub fn shape(&self) -> &[usize] {
                match self {
                    $name::F64(x) => x.shape(),
                    $name::F32(x) => x.shape(),
                    $name::Bf16(x) => x.shape(),
                    $name::F16(x) => x.shape(),
                    $name::I64(x) => x.shape(),
                }
            }

            /// The same elements, to read.
            pub fn view(&self) -> View<'_> {
                match self {
                    $name::F64(x) => View::F64(x.view()),
                    $name::F32(x) => View::F32(x.view()),
                    $name::Bf16(x) => View::Bf16(x.view()),
                    $name::F16(x) => View::F16(x.view()),
                    $name::I64(x) => View::I64(x.view()),
                }
            }

            /// The type of its elements.
            pub fn stored(&self) -> Stored {
                match self {
                    $name::F64(_) => Stored::Float(Dtype::F64),
                    $name::F32(_) => Stored::Float(Dtype::F32),
                    $name::Bf16(_) => Stored::Float(Dtype::Bf16),
                    $name::F16(_) => Stored::Float(Dtype::F16),
                    $name::I64(_) => Stored::Integer,
                }
            }
        }

        impl<'a> $many<'a> {
            /// None.
            pub fn new() -> Self {
                Self::default()
            }

            /// Adds one; a second of the same name is refused by [`Problem::check_call`].
            pub fn with(mut self, name: &'a str, view: impl Into<$name<'a>>) -> Self {
                self.push(name, view.into());
                self
            }

            /// As [`Self::with`], in place.
            pub fn push(&mut self, name: &'a str, view: $name<'a>) {
                self.list.push((name, view));
            }

            /// Adds one, if it is there.
            pub fn with_some(self, name: &'a str, view: Option<impl Into<$name<'a>>>) -> Self {
                match view {
                    Some(view) => self.with(name, view),
                    None => self,
                }
            }

            /// Names and views.
            pub fn iter(&self) -> impl Iterator<Item = (&'a str, &$name<'a>)> + Clone {
                self.list.iter().map(|(name, view)| (*name, view))
            }

            /// The view of a name.
            pub fn get(&self, name: &str) -> Option<&$name<'a>> {
                self.list.iter().find(|(other, _)| *other == name).map(|(_, view)| view)
            }
        }
    };
}

views! {
    /// A tensor that is read.
    View, ArrayView, Views
}

views! {
    /// A tensor that is written.
    ViewMut, ArrayViewMut, ViewsMut
}

/// Inputs by name. The list holds those of any pass without an allocation.
#[derive(Debug, Default)]
pub struct Views<'a> {
    list: SmallVec<[(&'a str, View<'a>); 20]>,
}

/// Places of outputs by name. An output that has no place is not computed.
#[derive(Debug, Default)]
pub struct ViewsMut<'a> {
    list: SmallVec<[(&'a str, ViewMut<'a>); 10]>,
}

impl<'a> ViewsMut<'a> {
    /// Takes the place of an output.
    pub fn take(&mut self, name: &str) -> Option<ViewMut<'a>> {
        let at = self.list.iter().position(|(other, _)| *other == name)?;
        Some(self.list.swap_remove(at).1)
    }
}

macro_rules! from_arrays {
    ($($type:ty => $variant:ident),*) => {$(
        impl<'a, D: Dimension> From<ArrayView<'a, $type, D>> for View<'a> {
            fn from(view: ArrayView<'a, $type, D>) -> Self {
                View::$variant(view.into_dyn())
            }
        }

        impl<'a, D: Dimension> From<&'a Array<$type, D>> for View<'a> {
            fn from(array: &'a Array<$type, D>) -> Self {
                array.view().into()
            }
        }

        impl<'a, D: Dimension> From<ArrayViewMut<'a, $type, D>> for ViewMut<'a> {
            fn from(view: ArrayViewMut<'a, $type, D>) -> Self {
                ViewMut::$variant(view.into_dyn())
            }
        }

        impl<'a, D: Dimension> From<&'a mut Array<$type, D>> for ViewMut<'a> {
            fn from(array: &'a mut Array<$type, D>) -> Self {
                array.view_mut().into()
            }
        }
    )*};
}
from_arrays!(f64 => F64, f32 => F32, bf16 => Bf16, f16 => F16, i64 => I64);

impl Problem {
    /// Fails unless the problem is sound and these views are what a pass reads and may write: see
    /// [`Table::check_call`].
    pub fn check_call(
        &self,
        pass: Pass,
        inputs: &Views<'_>,
        outputs: &ViewsMut<'_>,
        recompute: bool,
    ) -> Result<Dtype, Error> {
        self.checked_table(pass)?.check_call(inputs, outputs, recompute)
    }

    /// The table of a pass, if the problem is sound and has the pass.
    pub fn checked_table(&self, pass: Pass) -> Result<Table, Error> {
        self.check()?;
        let table = self.table(pass);
        if table.operands.is_empty() {
            return Err(self.algorithm().no_pass(pass));
        }
        Ok(table)
    }
}

impl Table {
    /// Fails unless these views are what the pass reads and may write: every operand that it needs is
    /// there, each in its shape and type, and no other. A saved operand may be absent only where it may
    /// be computed anew, and an input that becomes an output only where that has a place. Returns the
    /// storage type: that of the first input.
    pub fn check_call(
        &self,
        inputs: &Views<'_>,
        outputs: &ViewsMut<'_>,
        recompute: bool,
    ) -> Result<Dtype, Error> {
        let inputs = inputs.iter().map(|(name, x)| (name, x.shape(), x.stored()));
        let outputs = outputs.iter().map(|(name, x)| (name, x.shape(), x.stored()));
        self.check_tensors(inputs, outputs, recompute)
    }

    /// As [`Table::check_call`], of tensors that are no views of the host: name, shape and type of each.
    pub fn check_tensors<'a>(
        &self,
        inputs: impl Iterator<Item = (&'a str, &'a [usize], Stored)> + Clone,
        outputs: impl Iterator<Item = (&'a str, &'a [usize], Stored)> + Clone,
        recompute: bool,
    ) -> Result<Dtype, Error> {
        let first = self.operands.first().map_or("", |operand| operand.name);
        let has = |name: &str, result: bool| match result {
            true => outputs.clone().any(|(other, ..)| other == name),
            false => inputs.clone().any(|(other, ..)| other == name),
        };
        let storage = match inputs.clone().find(|(name, ..)| *name == first) {
            Some((.., Stored::Float(dtype))) => dtype,
            _ => Dtype::F32,
        };
        let given = || {
            let inputs = inputs.clone().map(|(name, shape, stored)| (name, false, shape, stored));
            let outputs = outputs.clone().map(|(name, shape, stored)| (name, true, shape, stored));
            inputs.chain(outputs)
        };
        for (at, (name, result, shape, stored)) in given().enumerate() {
            let operand = find(&self.operands, name).filter(|x| is_result(x) == result);
            let operand = operand.ok_or_else(|| Error::unexpected(name, self.option(name)))?;
            if given().take(at).any(|(other, ..)| other == name) {
                let expected = if result { "one place" } else { "one tensor" };
                return Err(Error::value(name, expected, "two"));
            }
            check_view(operand, shape, stored, storage, first)?;
        }
        for operand in self.operands.iter().filter(|x| !has(x.name, false)) {
            match operand.role {
                Role::Input if operand.becomes.is_some_and(|x| has(x, true)) => {}
                Role::Input | Role::Cotangent => {
                    return Err(Error::missing(operand.name, operand.option));
                }
                Role::Saved if !recompute => {
                    let reason = "the forward pass returns it; set `recompute` to compute it anew";
                    let (operand, reason) = (operand.name.to_string(), reason.to_string());
                    return Err(Error::Missing { operand, reason });
                }
                _ => {}
            }
        }
        Ok(storage)
    }
}

fn is_result(operand: &Operand) -> bool {
    matches!(operand.role, Role::Output | Role::OptionalOutput)
}

/// Fails unless a view has the shape and type of its operand; `first` is the operand whose type is that
/// of the storage.
fn check_view(
    operand: &Operand,
    shape: &[usize],
    found: Stored,
    storage: Dtype,
    first: &str,
) -> Result<(), Error> {
    Error::expect_shape(operand.name, &operand.shape, shape)?;
    let stored = Stored::of(operand.precision, storage);
    if found == stored {
        return Ok(());
    }
    let expected = match operand.precision {
        _ if operand.name == first => "f64, f32, bf16 or f16".to_string(),
        Precision::Integer => stored.to_string(),
        // f64 beside f64, and f32 beside everything else.
        Precision::Wide if storage != Dtype::F64 => format!("{stored}, unless {first} holds f64"),
        Precision::Storage | Precision::Wide => format!("{stored}, as {first} does"),
    };
    let (operand, found) = (operand.name.to_string(), found.to_string());
    Err(Error::Dtype { operand, expected, found })
}
