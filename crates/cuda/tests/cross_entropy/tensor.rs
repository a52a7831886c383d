//! Tensors of any type.

use super::CLASSES;
use bytemuck::Pod;
use etalon_problem::{Dtype, Operand, Stored, ViewMut, Views, ViewsMut};
use half::{bf16, f16};
use ndarray::{ArrayD, Axis, IxDyn, Slice};
use std::ops::Range;

/// A tensor of any type.
#[derive(Debug, Clone)]
pub enum Tensor {
    F32(ArrayD<f32>),
    Bf16(ArrayD<bf16>),
    F16(ArrayD<f16>),
    I64(ArrayD<i64>),
}

impl Tensor {
    /// Small numbers that no rule repeats; targets of which every eleventh is ignored.
    pub fn new(operand: &Operand, storage: Dtype, seed: usize) -> Tensor {
        let mut at = seed;
        let mut next = || {
            at = at.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            at >> 40
        };
        let shape = IxDyn(&operand.shape);
        let number = |at: usize| (at % 257) as f32 / 128.0 - 1.0;
        let class = |at: usize| if at.is_multiple_of(11) { -100 } else { (at % CLASSES) as i64 };
        match Stored::of(operand.precision, storage) {
            Stored::Integer => Tensor::I64(ArrayD::from_shape_simple_fn(shape, || class(next()))),
            Stored::Float(Dtype::Bf16) => {
                let x = || bf16::from_f32(number(next()));
                Tensor::Bf16(ArrayD::from_shape_simple_fn(shape, x))
            }
            Stored::Float(Dtype::F16) => {
                let x = || f16::from_f32(number(next()));
                Tensor::F16(ArrayD::from_shape_simple_fn(shape, x))
            }
            _ => Tensor::F32(ArrayD::from_shape_simple_fn(shape, || number(next()))),
        }
    }

    /// Some rows of it.
    pub fn rows(&self, rows: Range<usize>) -> Tensor {
        let rows = Slice::from(rows);
        match self {
            Tensor::F32(x) => Tensor::F32(x.slice_axis(Axis(0), rows).to_owned()),
            Tensor::Bf16(x) => Tensor::Bf16(x.slice_axis(Axis(0), rows).to_owned()),
            Tensor::F16(x) => Tensor::F16(x.slice_axis(Axis(0), rows).to_owned()),
            Tensor::I64(x) => Tensor::I64(x.slice_axis(Axis(0), rows).to_owned()),
        }
    }

    pub fn shape(&self) -> &[usize] {
        match self {
            Tensor::F32(x) => x.shape(),
            Tensor::Bf16(x) => x.shape(),
            Tensor::F16(x) => x.shape(),
            Tensor::I64(x) => x.shape(),
        }
    }

    pub fn view_mut(&mut self) -> ViewMut<'_> {
        match self {
            Tensor::F32(x) => x.into(),
            Tensor::Bf16(x) => x.into(),
            Tensor::F16(x) => x.into(),
            Tensor::I64(x) => x.into(),
        }
    }

    pub fn read<'a>(&'a self, all: Views<'a>, name: &'a str) -> Views<'a> {
        match self {
            Tensor::F32(x) => all.with(name, x),
            Tensor::Bf16(x) => all.with(name, x),
            Tensor::F16(x) => all.with(name, x),
            Tensor::I64(x) => all.with(name, x),
        }
    }

    pub fn write<'a>(&'a mut self, all: ViewsMut<'a>, name: &'a str) -> ViewsMut<'a> {
        all.with(name, self.view_mut())
    }

    /// As numbers, of which those that are equal have the same bits but for the sign of 0.
    pub fn numbers(&self) -> Vec<f64> {
        match self {
            Tensor::F32(x) => x.iter().map(|&x| f64::from(x)).collect(),
            Tensor::Bf16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Tensor::F16(x) => x.iter().map(|x| x.to_f64()).collect(),
            Tensor::I64(x) => x.iter().map(|&x| x as f64).collect(),
        }
    }

    /// As they lie in memory.
    pub fn bytes(&self) -> Vec<u8> {
        pub fn of<T: Pod>(x: &ArrayD<T>) -> Vec<u8> {
            bytemuck::cast_slice(&x.iter().copied().collect::<Vec<_>>()).to_vec()
        }
        match self {
            Tensor::F32(x) => of(x),
            Tensor::Bf16(x) => of(x),
            Tensor::F16(x) => of(x),
            Tensor::I64(x) => of(x),
        }
    }

    pub fn stored(&self) -> Stored {
        match self {
            Tensor::F32(_) => Dtype::F32.into(),
            Tensor::Bf16(_) => Dtype::Bf16.into(),
            Tensor::F16(_) => Dtype::F16.into(),
            Tensor::I64(_) => Stored::Integer,
        }
    }
}
