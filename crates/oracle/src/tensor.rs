//! Named tensors: what goes into a tier and comes out of it, in files and in memory alike.

pub use etalon_problem::Stored;

use etalon_problem::{
    Dtype, Error, Pass, Precision, Problem, Role, View, ViewMut, Views, ViewsMut,
};
use half::{bf16, f16};
use ndarray::{ArrayD, ArrayViewD, ArrayViewMutD, IxDyn};
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
        let values_in_order = values.iter().copied();
        let data = match dtype {
            Dtype::F64 => Data::F64(values_in_order.collect()),
            Dtype::F32 => Data::F32(values_in_order.map(|x| x as f32).collect()),
            Dtype::Bf16 => Data::Bf16(values_in_order.map(bf16::from_f64).collect()),
            Dtype::F16 => Data::F16(values_in_order.map(f16::from_f64).collect()),
        };
        Tensor { shape: values.shape().to_vec(), data }
    }

    /// The tensor that holds `values`, each rounded to the type in which it is stored. What no i64
    /// is near becomes the nearest one, NaN 0.
    pub fn store(values: &ArrayD<f64>, stored: Stored) -> Self {
        match stored {
            Stored::Float(dtype) => Tensor::round(values, dtype),
            Stored::Integer => {
                let data = Data::I64(values.iter().map(|x| x.round() as i64).collect());
                Tensor { shape: values.shape().to_vec(), data }
            }
        }
    }

    /// A tensor for results that nobody has written: NaN, or the least whole number.
    pub fn unwritten(shape: &[usize], stored: Stored) -> Self {
        let len = shape.iter().product();
        let data = match stored {
            Stored::Float(Dtype::F64) => Data::F64(vec![f64::NAN; len]),
            Stored::Float(Dtype::F32) => Data::F32(vec![f32::NAN; len]),
            Stored::Float(Dtype::Bf16) => Data::Bf16(vec![bf16::NAN; len]),
            Stored::Float(Dtype::F16) => Data::F16(vec![f16::NAN; len]),
            Stored::Integer => Data::I64(vec![i64::MIN; len]),
        };
        Tensor { shape: shape.to_vec(), data }
    }

    /// Its elements, to be read; an error that names it for flags.
    pub fn view(&self, name: &str) -> Result<View<'_>, Error> {
        fn of<'a, T>(shape: &[usize], x: &'a [T], name: &str) -> Result<ArrayViewD<'a, T>, Error> {
            ArrayViewD::from_shape(IxDyn(shape), x).map_err(|_| misshapen(name, shape, x.len()))
        }
        Ok(match &self.data {
            Data::F64(x) => of(&self.shape, x, name)?.into(),
            Data::F32(x) => of(&self.shape, x, name)?.into(),
            Data::Bf16(x) => of(&self.shape, x, name)?.into(),
            Data::F16(x) => of(&self.shape, x, name)?.into(),
            Data::I64(x) => of(&self.shape, x, name)?.into(),
            Data::Bool(_) => return Err(self.no_numbers(name)),
        })
    }

    /// Its elements, to be written; an error that names it for flags.
    pub fn view_mut(&mut self, name: &str) -> Result<ViewMut<'_>, Error> {
        fn of<'a, T>(
            shape: &[usize],
            x: &'a mut [T],
            name: &str,
        ) -> Result<ArrayViewMutD<'a, T>, Error> {
            let len = x.len();
            ArrayViewMutD::from_shape(IxDyn(shape), x).map_err(|_| misshapen(name, shape, len))
        }
        if let Data::Bool(_) = self.data {
            return Err(self.no_numbers(name));
        }
        Ok(match &mut self.data {
            Data::F64(x) => of(&self.shape, x, name)?.into(),
            Data::F32(x) => of(&self.shape, x, name)?.into(),
            Data::Bf16(x) => of(&self.shape, x, name)?.into(),
            Data::F16(x) => of(&self.shape, x, name)?.into(),
            Data::I64(x) => of(&self.shape, x, name)?.into(),
            Data::Bool(_) => return Err(misshapen(name, &self.shape, 0)),
        })
    }

    fn no_numbers(&self, name: &str) -> Error {
        Error::Dtype {
            operand: name.to_string(),
            expected: "f64, f32, bf16 or f16".to_string(),
            found: self.type_name().to_string(),
        }
    }

    /// Its number of elements.
    pub fn len(&self) -> usize {
        match &self.data {
            Data::F64(x) => x.len(),
            Data::F32(x) => x.len(),
            Data::Bf16(x) => x.len(),
            Data::F16(x) => x.len(),
            Data::I64(x) => x.len(),
            Data::Bool(x) => x.len(),
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its floating-point type, if it has one.
    pub fn dtype(&self) -> Option<Dtype> {
        match self.data {
            Data::F64(_) => Some(Dtype::F64),
            Data::F32(_) => Some(Dtype::F32),
            Data::Bf16(_) => Some(Dtype::Bf16),
            Data::F16(_) => Some(Dtype::F16),
            Data::I64(_) | Data::Bool(_) => None,
        }
    }

    /// In which type its numbers are stored, if it holds numbers.
    pub fn stored(&self) -> Option<Stored> {
        match self.data {
            Data::I64(_) => Some(Stored::Integer),
            _ => self.dtype().map(Stored::Float),
        }
    }

    /// The name of its element type.
    pub fn type_name(&self) -> &'static str {
        match self.data {
            Data::I64(_) => "i64",
            Data::Bool(_) => "bool",
            _ => self.dtype().map_or("", Dtype::name),
        }
    }

    /// As [`Tensor::to_f64`], but integers are numbers, too: exactly those up to 2⁵³.
    pub fn numbers(&self, name: &str) -> Result<ArrayD<f64>, Error> {
        match &self.data {
            Data::I64(x) => {
                let data = Data::F64(x.iter().map(|&x| x as f64).collect());
                Tensor { shape: self.shape.clone(), data }.to_f64(name)
            }
            _ => self.to_f64(name),
        }
    }

    /// Its elements in f64, exactly; an error that names it for integers and flags.
    pub fn to_f64(&self, name: &str) -> Result<ArrayD<f64>, Error> {
        let values: Vec<f64> = match &self.data {
            Data::F64(x) => x.clone(),
            Data::F32(x) => x.iter().map(|&x| f64::from(x)).collect(),
            Data::Bf16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Data::F16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Data::I64(_) | Data::Bool(_) => return Err(self.no_numbers(name)),
        };
        let len = values.len();
        ArrayD::from_shape_vec(IxDyn(&self.shape), values)
            .map_err(|_| misshapen(name, &self.shape, len))
    }
}

fn misshapen(name: &str, shape: &[usize], found: usize) -> Error {
    Error::Shape { operand: name.to_string(), expected: shape.to_vec(), found: vec![found] }
}

/// Tensors as the inputs of a tier.
pub fn views(tensors: &Tensors) -> Result<Views<'_>, Error> {
    tensors.iter().try_fold(Views::new(), |views, (name, x)| Ok(views.with(name, x.view(name)?)))
}

/// Tensors as the places of a tier's outputs.
pub fn views_mut(tensors: &mut Tensors) -> Result<ViewsMut<'_>, Error> {
    let places = tensors.iter_mut();
    places
        .into_iter()
        .try_fold(ViewsMut::new(), |views, (name, x)| Ok(views.with(name, x.view_mut(name)?)))
}

/// Arrays in f64 by name, each in row-major order.
pub type Values = BTreeMap<String, ArrayD<f64>>;

/// The operands of a pass in f64; of integers, exactly those up to 2⁵³. Fails unless every operand
/// that the pass cannot do without is there, and every operand has its shape.
pub fn values(problem: &Problem, pass: Pass, tensors: &Tensors) -> Result<Values, Error> {
    problem.check()?;
    let mut values = Values::new();
    for operand in problem.operands(pass) {
        match (tensors.get(operand.name), operand.role) {
            (None, Role::OptionalCotangent) => {}
            (_, role) if !role.is_given() => {}
            (None, _) => {
                return Err(Error::Missing {
                    operand: operand.name.to_string(),
                    reason: format!("{} {pass} needs it", problem.algorithm()),
                });
            }
            (Some(tensor), _) => {
                Error::expect_shape(operand.name, &operand.shape, &tensor.shape)?;
                let numbers = match operand.precision {
                    Precision::Integer => integers(operand.name, tensor)?,
                    _ => tensor.to_f64(operand.name)?,
                };
                values.insert(operand.name.to_string(), numbers);
            }
        }
    }
    Ok(values)
}

fn integers(name: &str, tensor: &Tensor) -> Result<ArrayD<f64>, Error> {
    match tensor.stored() {
        Some(Stored::Integer) => tensor.numbers(name),
        _ => Err(Error::Dtype {
            operand: name.to_string(),
            expected: Stored::Integer.to_string(),
            found: tensor.type_name().to_string(),
        }),
    }
}
