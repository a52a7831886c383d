//! Named tensors: what goes into a tier and comes out of it, in files and in memory alike.

pub use etalon_problem::Stored;

use etalon_problem::{
    Dtype, Error, Pass, Precision, Problem, Role, View, ViewMut, Views, ViewsMut,
};
use half::{bf16, f16};
use ndarray::{ArrayD, ArrayViewD, ArrayViewMutD};
use std::collections::BTreeMap;

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// The elements of a tensor in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub enum Data {
    /// IEEE binary64.
    F64(Vec<f64>),
    /// IEEE binary32.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// IEEE binary16.
    F16(Vec<f16>),
    /// Integers: targets and segment ids.
    I64(Vec<i64>),
    /// Flags: masks.
    Bool(Vec<bool>),
}

/// Applies an expression to the elements, whichever numbers they are, or another one to flags.
macro_rules! each {
    ($data:expr, $x:ident => $numbers:expr, $flags:ident => $other:expr) => {
        match $data {
            Data::F64($x) => $numbers,
            Data::F32($x) => $numbers,
            Data::Bf16($x) => $numbers,
            Data::F16($x) => $numbers,
            Data::I64($x) => $numbers,
            Data::Bool($flags) => $other,
        }
    };
}

impl Data {
    /// True if both hold the same floating-point numbers, bit by bit, NaNs included.
    pub fn same_bits(&self, other: &Data) -> bool {
        fn same<T: Copy, B: PartialEq>(a: &[T], b: &[T], bits: impl Fn(T) -> B) -> bool {
            a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| bits(a) == bits(b))
        }
        match (self, other) {
            (Data::F64(a), Data::F64(b)) => same(a, b, f64::to_bits),
            (Data::F32(a), Data::F32(b)) => same(a, b, f32::to_bits),
            (Data::Bf16(a), Data::Bf16(b)) => same(a, b, |x| x.to_bits()),
            (Data::F16(a), Data::F16(b)) => same(a, b, |x| x.to_bits()),
            _ => false,
        }
    }
}

/// A tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements.
    pub data: Data,
}

impl Tensor {
    /// The tensor that holds `values`, each rounded to `dtype`.
    pub fn round(values: &ArrayD<f64>, dtype: Dtype) -> Self {
        Tensor::store(values, Stored::Float(dtype))
    }

    /// The tensor that holds `values`, each rounded to the type in which it is stored. What no i64
    /// is near becomes the nearest one, NaN 0.
    pub fn store(values: &ArrayD<f64>, stored: Stored) -> Self {
        let in_order = values.iter().copied();
        let data = match stored {
            Stored::Float(Dtype::F64) => Data::F64(in_order.collect()),
            Stored::Float(Dtype::F32) => Data::F32(in_order.map(|x| x as f32).collect()),
            Stored::Float(Dtype::Bf16) => Data::Bf16(in_order.map(bf16::from_f64).collect()),
            Stored::Float(Dtype::F16) => Data::F16(in_order.map(f16::from_f64).collect()),
            Stored::Integer => Data::I64(in_order.map(|x| x.round() as i64).collect()),
        };
        Tensor { shape: values.shape().to_vec(), data }
    }

    /// A tensor for results that nobody has written: NaN, or the least whole number.
    pub fn unwritten(shape: &[usize], stored: Stored) -> Self {
        let nothing = if stored == Stored::Integer { f64::NEG_INFINITY } else { f64::NAN };
        Tensor::store(&ArrayD::from_elem(shape, nothing), stored)
    }

    /// Its elements, to be read; an error that names it for flags.
    pub fn view(&self, name: &str) -> Result<View<'_>, Error> {
        let shape = self.shape.as_slice();
        let view = each!(&self.data,
            x => ArrayViewD::from_shape(shape, x).map(View::from),
            _flags => return Err(self.no_numbers(name))
        );
        view.map_err(|_| self.misshapen(name))
    }

    /// Its elements, to be written; an error that names it for flags.
    pub fn view_mut(&mut self, name: &str) -> Result<ViewMut<'_>, Error> {
        let (no_numbers, misshapen) = (self.no_numbers(name), self.misshapen(name));
        let shape = self.shape.as_slice();
        let view = each!(&mut self.data,
            x => ArrayViewMutD::from_shape(shape, x).map(ViewMut::from),
            _flags => return Err(no_numbers)
        );
        view.map_err(|_| misshapen)
    }

    fn no_numbers(&self, name: &str) -> Error {
        self.wrong_type(name, "f64, f32, bf16 or f16")
    }

    fn wrong_type(&self, name: &str, expected: &str) -> Error {
        Error::Dtype {
            operand: name.to_string(),
            expected: expected.to_string(),
            found: self.type_name().to_string(),
        }
    }

    fn misshapen(&self, name: &str) -> Error {
        let (operand, expected) = (name.to_string(), self.shape.clone());
        Error::Shape { operand, expected, found: vec![self.len()] }
    }

    /// Its number of elements.
    pub fn len(&self) -> usize {
        each!(&self.data, x => x.len(), flags => flags.len())
    }

    /// True where it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The type in which its numbers are stored, if it holds numbers.
    pub fn stored(&self) -> Option<Stored> {
        Some(match self.data {
            Data::F64(_) => Stored::Float(Dtype::F64),
            Data::F32(_) => Stored::Float(Dtype::F32),
            Data::Bf16(_) => Stored::Float(Dtype::Bf16),
            Data::F16(_) => Stored::Float(Dtype::F16),
            Data::I64(_) => Stored::Integer,
            Data::Bool(_) => return None,
        })
    }

    /// Its floating-point type, if it has one.
    pub fn dtype(&self) -> Option<Dtype> {
        self.stored().and_then(Stored::dtype)
    }

    /// The name of its element type; files have integers of 64 bits and of 32.
    pub fn type_name(&self) -> &'static str {
        match self.stored() {
            Some(Stored::Float(dtype)) => dtype.name(),
            Some(Stored::Integer) => "integers",
            None => "bool",
        }
    }

    /// The tensor in another type, if that has every one of its numbers; an error that names it for flags.
    pub fn narrowed(&self, name: &str, dtype: Dtype) -> Result<Option<Tensor>, Error> {
        let numbers = self.numbers(name)?;
        let same = |x: &f64| dtype.round(*x) == *x || x.is_nan();
        Ok(numbers.iter().all(same).then(|| Tensor::round(&numbers, dtype)))
    }

    /// Its elements in f64, exactly; an error that names it for integers and flags.
    pub fn to_f64(&self, name: &str) -> Result<ArrayD<f64>, Error> {
        if self.dtype().is_some() { self.numbers(name) } else { Err(self.no_numbers(name)) }
    }

    /// As [`Tensor::to_f64`], but integers are numbers, too: exactly those up to 2⁵³.
    pub fn numbers(&self, name: &str) -> Result<ArrayD<f64>, Error> {
        let values: Vec<f64> = match &self.data {
            Data::F64(x) => x.clone(),
            Data::F32(x) => x.iter().map(|&x| f64::from(x)).collect(),
            Data::Bf16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Data::F16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Data::I64(x) => x.iter().map(|&x| x as f64).collect(),
            Data::Bool(_) => return Err(self.no_numbers(name)),
        };
        ArrayD::from_shape_vec(self.shape.as_slice(), values).map_err(|_| self.misshapen(name))
    }
}

/// Tensors as the inputs of a tier.
pub fn views(tensors: &Tensors) -> Result<Views<'_>, Error> {
    tensors.iter().try_fold(Views::new(), |views, (name, x)| Ok(views.with(name, x.view(name)?)))
}

/// Tensors as the places of a tier's outputs.
pub fn views_mut(tensors: &mut Tensors) -> Result<ViewsMut<'_>, Error> {
    let mut places = tensors.iter_mut();
    places.try_fold(ViewsMut::new(), |views, (name, x)| Ok(views.with(name, x.view_mut(name)?)))
}

/// Arrays in f64 by name, each in row-major order.
pub type Values = BTreeMap<String, ArrayD<f64>>;

/// The operands of a pass in f64; of integers, exactly those up to 2⁵³. Fails unless every operand
/// that the pass cannot do without is there, and every operand has its shape.
pub fn values(problem: &Problem, pass: Pass, tensors: &Tensors) -> Result<Values, Error> {
    problem.check()?;
    let mut values = Values::new();
    for operand in problem.operands(pass).iter().filter(|operand| operand.role.is_given()) {
        let name = operand.name.to_string();
        let Some(tensor) = tensors.get(operand.name) else {
            if operand.role == Role::OptionalCotangent {
                continue;
            }
            let reason = format!("{} {pass} needs it", problem.algorithm());
            return Err(Error::Missing { operand: name, reason });
        };
        Error::expect_shape(operand.name, &operand.shape, &tensor.shape)?;
        let integers = operand.precision == Precision::Integer;
        let numbers = match (integers, tensor.stored()) {
            (false, _) => tensor.to_f64(operand.name)?,
            (true, Some(Stored::Integer)) => tensor.numbers(operand.name)?,
            (true, _) => return Err(tensor.wrong_type(operand.name, "i64 or i32")),
        };
        values.insert(name, numbers);
    }
    Ok(values)
}

/// The operands of a pass as a kernel takes them whose main tensors have this type, and nothing else: each
/// number rounded to where that stores it.
pub fn usual(
    problem: &Problem,
    pass: Pass,
    storage: Dtype,
    tensors: &Tensors,
) -> Result<Tensors, Error> {
    let operands = problem.operands(pass);
    let given = operands.iter().filter(|operand| operand.role.is_given());
    let given = given.filter_map(|operand| Some((operand, tensors.get(operand.name)?)));
    let taken = given.map(|(operand, tensor)| {
        let stored = Stored::of(operand.precision, storage);
        let taken = match tensor.stored() == Some(stored) {
            true => tensor.clone(),
            false => Tensor::store(&tensor.numbers(operand.name)?, stored),
        };
        Ok((operand.name.to_string(), taken))
    });
    taken.collect()
}
