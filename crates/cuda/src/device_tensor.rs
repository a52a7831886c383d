//! Tensors in the memory of a device.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use etalon_problem::{Dtype, Error, Result, Stored, Table};
use smallvec::SmallVec;
use std::fmt;

/// The type of the elements of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// As an operand.
    Stored(Stored),
    /// Integers of 32 bits: lengths, offsets or ids of segments, which may also be i64.
    I32,
    /// Flags of a mask: bytes, of which 0 hides a pair.
    Bool,
}

impl Element {
    /// The bytes of one.
    pub fn bytes(self) -> usize {
        match self {
            Element::Stored(stored) => stored.bytes(),
            Element::I32 => 4,
            Element::Bool => 1,
        }
    }
}

impl From<Dtype> for Element {
    fn from(dtype: Dtype) -> Self {
        Element::Stored(dtype.into())
    }
}

impl From<Stored> for Element {
    fn from(stored: Stored) -> Self {
        Element::Stored(stored)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Element::Stored(stored) => stored.fmt(f),
            Element::I32 => f.write_str("i32"),
            Element::Bool => f.write_str("bool"),
        }
    }
}

/// A tensor in the memory of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceTensor {
    pub(crate) address: CUdeviceptr,
    pub(crate) shape: SmallVec<[usize; 4]>,
    /// In elements.
    pub(crate) strides: SmallVec<[i64; 4]>,
    pub(crate) element: Element,
}

impl DeviceTensor {
    /// A tensor that begins at an address, of floating-point numbers (a [`Dtype`]), of integers ([`Stored::Integer`])
    /// or of another [`Element`]; strides count elements and may be 0 or negative. Fails where there are not as many
    /// strides as axes.
    pub fn new(address: u64, shape: &[usize], strides: &[i64], element: impl Into<Element>) -> Result<DeviceTensor> {
        if shape.len() != strides.len() {
            return Err(Error::value("number of strides", shape.len().to_string(), strides.len()));
        }
        Ok(DeviceTensor { address, shape: shape.into(), strides: strides.into(), element: element.into() })
    }

    /// As [`DeviceTensor::new`], of elements that lie one after the other.
    pub fn dense(address: u64, shape: &[usize], element: impl Into<Element>) -> DeviceTensor {
        let mut strides: SmallVec<[i64; 4]> = SmallVec::from_elem(1, shape.len());
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis].saturating_mul(shape[axis] as i64);
        }
        DeviceTensor { address, shape: shape.into(), strides, element: element.into() }
    }

    /// The dense tensor in a slice of cudarc. Fails where the slice holds fewer elements.
    pub fn of<T>(
        slice: &CudaSlice<T>,
        stream: &CudaStream,
        shape: &[usize],
        element: impl Into<Element>,
    ) -> Result<DeviceTensor> {
        let element = element.into();
        let wanted = shape.iter().try_fold(element.bytes(), |n, &extent| n.checked_mul(extent));
        let found = slice.len() * size_of::<T>();
        if wanted.is_none_or(|wanted| wanted > found) {
            let expected = format!("at least those of {shape:?} in {element}");
            return Err(Error::value("bytes of a slice", expected, found));
        }
        Ok(DeviceTensor::dense(slice.device_ptr(stream).0, shape, element))
    }

    /// The same elsewhere.
    pub fn at(self, address: u64) -> DeviceTensor {
        DeviceTensor { address, ..self }
    }

    /// True if the copy engine may begin there.
    pub(crate) fn is_aligned(&self) -> bool {
        self.address.is_multiple_of(16)
    }

    /// True if another one differs in its address alone.
    pub(crate) fn is_like(&self, other: &DeviceTensor) -> bool {
        (&self.shape, &self.strides, self.element) == (&other.shape, &other.strides, other.element)
    }

    pub(crate) fn is_dense(&self) -> bool {
        self.is_like(&DeviceTensor::dense(0, &self.shape, self.element))
    }

    /// Fails unless its address is a multiple of what an element takes.
    pub(crate) fn check_whole(&self, name: &str) -> Result<()> {
        let bytes = self.element.bytes() as u64;
        if !self.address.is_multiple_of(bytes) {
            return Err(Error::value(name, format!("an address that is a multiple of {bytes}"), self.address));
        }
        Ok(())
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

type Listed<'a, 't> = (&'a str, &'t [usize], Stored);

/// Tensors of a device by name: what a pass reads, or where it writes.
#[derive(Debug, Clone, Default)]
pub struct DeviceTensors<'a> {
    pub(crate) list: Vec<(&'a str, DeviceTensor)>,
}

impl<'a> DeviceTensors<'a> {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one.
    pub fn with(mut self, name: &'a str, tensor: DeviceTensor) -> Self {
        self.list.push((name, tensor));
        self
    }

    /// The same tensors elsewhere: at these addresses, in their order. `None` where there are not as many.
    pub fn at(&self, addresses: &[u64]) -> Option<DeviceTensors<'a>> {
        let moved = |((name, x), &address): (&(&'a str, DeviceTensor), &u64)| (*name, x.clone().at(address));
        (self.list.len() == addresses.len())
            .then(|| DeviceTensors { list: self.list.iter().zip(addresses).map(moved).collect() })
    }

    pub(crate) fn get(&self, name: &str) -> Option<&DeviceTensor> {
        self.list.iter().find(|(other, _)| *other == name).map(|(_, tensor)| tensor)
    }

    /// All. Fails where one has elements that no operand has.
    pub(crate) fn operands(&self) -> Result<Vec<Listed<'a, '_>>> {
        let operands = self.list.iter().map(|(name, x)| match x.element {
            Element::Stored(stored) => Ok((*name, &x.shape[..], stored)),
            other => Err(Error::value(*name, "floating-point numbers or i64", other)),
        });
        operands.collect()
    }
}

/// An array that calls give, as it was when the pass was prepared. It has passed its check.
#[derive(Debug)]
pub(crate) struct GivenArray {
    pub name: String,
    pub tensor: DeviceTensor,
}

/// As [`Table::check_tensors`], of tensors of a device.
pub(crate) fn check(
    table: &Table,
    inputs: &DeviceTensors<'_>,
    outputs: &DeviceTensors<'_>,
    recompute: bool,
) -> Result<Dtype> {
    let (reads, writes) = (inputs.operands()?, outputs.operands()?);
    table.check_tensors(reads.into_iter(), writes.into_iter(), recompute)
}
