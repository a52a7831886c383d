//! Tensors of Python, borrowed: of any producer of a buffer (NumPy, array, memoryview) or of DLPack (PyTorch, JAX,
//! CuPy's on the host), of any strides.
//!
//! PyTorch's are had by the C exchange API of DLPack 1.3, in a tenth of the time of `__dlpack__`. Arrays of
//! `ml_dtypes.bfloat16` have neither a buffer nor DLPack: their bits are borrowed as whole numbers of 16 bits.

use crate::overlap::Place;
use etalon_conformance::tensor::{Data, Tensor};
use etalon_problem::{View, ViewMut};
use half::{bf16, f16};
use ndarray::{ArrayD, ArrayViewD, ArrayViewMutD, Axis, IxDyn, ShapeBuilder};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyCapsule, PyTuple, PyType};
use smallvec::SmallVec;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

/// A tensor, `DLTensor` of DLPack 1.
#[repr(C)]
#[derive(Clone, Copy)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLPackExchangeAPI` of DLPack 1.3, with the addresses of what is not called here.
#[repr(C)]
struct Exchange {
    major: u32,
    _minor: u32,
    _previous: usize,
    _allocator: usize,
    _managed_from: usize,
    _managed_to: usize,
    borrow: Option<Describe>,
    _stream: usize,
}

/// Describes a tensor without owning it; 0 where that has not failed.
type Describe = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// Devices whose memory this process reads: the host, and the host's memory that a GPU knows.
const HOST: [i32; 2] = [1, 3];

/// The type of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    F64,
    F32,
    Bf16,
    F16,
    I64,
    I32,
    Bool,
}

impl Kind {
    fn bytes(self) -> usize {
        match self {
            Kind::F64 | Kind::I64 => 8,
            Kind::F32 | Kind::I32 => 4,
            Kind::Bf16 | Kind::F16 => 2,
            Kind::Bool => 1,
        }
    }
}

/// The owner of borrowed memory.
enum Owner<'py> {
    Object(#[allow(dead_code, reason = "kept for its drop")] Bound<'py, PyAny>),
    Buffer(#[allow(dead_code, reason = "kept for its drop")] PyUntypedBuffer),
}

type Extents<T> = SmallVec<[T; 6]>;

/// A tensor that Python owns.
pub struct Borrowed<'py> {
    pub name: String,
    kind: Kind,
    /// The element with the lowest address: axes of negative strides end there.
    lowest: *mut u8,
    shape: Extents<usize>,
    /// In elements.
    strides: Extents<isize>,
    /// Its bytes in memory, unless it has no elements.
    pub place: Option<Place>,
    /// Its elements, where they are whole numbers of 32 bits: passes read those of 64.
    widened: Option<ArrayD<i64>>,
    _owner: Owner<'py>,
}

impl<'py> Borrowed<'py> {
    /// Borrows a tensor to be read.
    pub fn input(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut tensor = borrow(name, object, false)?;
        if tensor.kind == Kind::I32 {
            // SAFETY: as in `view`.
            let numbers = unsafe { tensor.array::<i32>() };
            tensor.widened = Some(numbers.mapv(i64::from));
        }
        Ok(tensor)
    }

    /// Borrows a tensor to be written, each of whose elements has memory of its own.
    pub fn output(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let tensor = borrow(name, object, true)?;
        match &tensor.place {
            Some(place) if !place.is_disjoint() => {
                let (shape, strides) = (&tensor.shape, &tensor.strides);
                Err(PyValueError::new_err(format!(
                    "`{name}` must have an element in memory for each of its own, found shape {shape:?} with strides \
                     {strides:?}"
                )))
            }
            _ => Ok(tensor),
        }
    }

    fn order(&self) -> ndarray::StrideShape<IxDyn> {
        let strides: Extents<usize> =
            self.strides.iter().map(|stride| stride.unsigned_abs()).collect();
        IxDyn(&self.shape).strides(IxDyn(&strides))
    }

    fn backward(&self) -> impl Iterator<Item = Axis> {
        self.strides.iter().enumerate().filter(|(_, stride)| **stride < 0).map(|(at, _)| Axis(at))
    }

    /// The start of the elements as `ndarray` wants it, never null.
    fn start<T>(&self) -> *mut T {
        if self.lowest.is_null() { std::ptr::dangling_mut() } else { self.lowest.cast() }
    }

    /// # Safety
    ///
    /// `T` is the type of the elements.
    unsafe fn array<T>(&self) -> ArrayViewD<'_, T> {
        // SAFETY: `borrow` has checked that the pointer is aligned for `T`. The producer vouches for memory from the
        // lowest to the highest element, which the owner that `self` holds keeps alive.
        let mut view = unsafe { ArrayViewD::from_shape_ptr(self.order(), self.start::<T>()) };
        self.backward().for_each(|axis| view.invert_axis(axis));
        view
    }

    /// # Safety
    ///
    /// `T` is the type of the elements, and nothing else looks at them while the view lives.
    unsafe fn array_mut<T>(&self) -> ArrayViewMutD<'_, T> {
        // SAFETY: as in `array`; `output` has checked that no two elements share memory.
        let mut view = unsafe { ArrayViewMutD::from_shape_ptr(self.order(), self.start::<T>()) };
        self.backward().for_each(|axis| view.invert_axis(axis));
        view
    }

    /// Its elements, to be read.
    pub fn view(&self) -> PyResult<View<'_>> {
        // SAFETY: each type is that of `kind`.
        unsafe {
            Ok(match (self.kind, &self.widened) {
                (_, Some(numbers)) => numbers.into(),
                (Kind::F64, _) => self.array::<f64>().into(),
                (Kind::F32, _) => self.array::<f32>().into(),
                (Kind::Bf16, _) => self.array::<bf16>().into(),
                (Kind::F16, _) => self.array::<f16>().into(),
                (Kind::I64, _) => self.array::<i64>().into(),
                (Kind::I32 | Kind::Bool, _) => return Err(self.no_number()),
            })
        }
    }

    /// Its name and its elements, to be written.
    pub fn place_of_result(&mut self) -> PyResult<(&str, ViewMut<'_>)> {
        // SAFETY: each type is that of `kind`, and `self` is borrowed for as long as the view lives. That nobody else
        // reads or writes the elements is what a caller in Python promises, and is checked of the tensors of one call.
        let view = unsafe {
            match self.kind {
                Kind::F64 => self.array_mut::<f64>().into(),
                Kind::F32 => self.array_mut::<f32>().into(),
                Kind::Bf16 => self.array_mut::<bf16>().into(),
                Kind::F16 => self.array_mut::<f16>().into(),
                Kind::I64 => self.array_mut::<i64>().into(),
                Kind::I32 | Kind::Bool => return Err(self.no_number()),
            }
        };
        Ok((&self.name, view))
    }

    /// A copy of its elements, in row-major order.
    pub fn copied(&self) -> Tensor {
        fn list<T: Clone>(view: ArrayViewD<'_, T>) -> Vec<T> {
            view.iter().cloned().collect()
        }
        // SAFETY: each type is that of `kind`; flags are read as bytes.
        let data = unsafe {
            match self.kind {
                Kind::F64 => Data::F64(list(self.array())),
                Kind::F32 => Data::F32(list(self.array())),
                Kind::Bf16 => Data::Bf16(list(self.array())),
                Kind::F16 => Data::F16(list(self.array())),
                Kind::I64 => Data::I64(list(self.array())),
                Kind::I32 => Data::I64(self.array::<i32>().iter().map(|&x| x.into()).collect()),
                Kind::Bool => Data::Bool(self.array::<u8>().iter().map(|&x| x != 0).collect()),
            }
        };
        Tensor { shape: self.shape.to_vec(), data }
    }

    fn no_number(&self) -> PyErr {
        let found = if self.kind == Kind::I32 { "int32" } else { "bool" };
        PyTypeError::new_err(format!(
            "`{}` must hold float64, float32, bfloat16, float16 or int64, found {found}",
            self.name
        ))
    }
}

/// An array of NumPy with the elements of a tensor.
pub fn array<'py>(py: Python<'py>, tensor: &Tensor) -> PyResult<Bound<'py, PyAny>> {
    fn bytes<T: Copy, const N: usize>(list: &[T], of: fn(T) -> [u8; N]) -> Vec<u8> {
        list.iter().flat_map(|&x| of(x)).collect()
    }
    let (kind, bytes) = match &tensor.data {
        Data::F64(list) => ("float64", bytes(list, f64::to_ne_bytes)),
        Data::F32(list) => ("float32", bytes(list, f32::to_ne_bytes)),
        Data::Bf16(list) => ("bfloat16", bytes(list, |x| x.to_bits().to_ne_bytes())),
        Data::F16(list) => ("float16", bytes(list, |x| x.to_bits().to_ne_bytes())),
        Data::I64(list) => ("int64", bytes(list, i64::to_ne_bytes)),
        Data::Bool(list) => ("bool", bytes(list, |x| [x.into()])),
    };
    let shape = PyTuple::new(py, &tensor.shape)?;
    let bytes = PyByteArray::new(py, &bytes);
    py.import("etalon._passes")?.call_method1("array", (kind, shape, bytes))
}

/// A tensor as its producer describes it; strides in elements.
struct Described<'py> {
    kind: Kind,
    at: *mut u8,
    shape: Extents<usize>,
    strides: Extents<isize>,
    owner: Owner<'py>,
}

fn borrow<'py>(
    name: &str,
    object: &Bound<'py, PyAny>,
    is_written: bool,
) -> PyResult<Borrowed<'py>> {
    let found = match exchange(object)? {
        Some(describe) => by_exchange(name, object, describe)?,
        None => match PyUntypedBuffer::get(object) {
            Ok(buffer) => by_buffer(name, buffer, is_written, false)?,
            Err(error) => by_bits_or_dlpack(name, object, is_written, error)?,
        },
    };
    let Described { kind, at, shape, strides, owner } = found;
    let bytes = kind.bytes();
    if !at.addr().is_multiple_of(bytes) {
        return Err(PyValueError::new_err(format!(
            "`{name}` must lie at a multiple of {bytes} bytes, found address {:#x}",
            at.addr()
        )));
    }
    let axes = || shape.iter().copied().zip(strides.iter().copied());
    let down = axes().filter(|(_, stride)| *stride < 0);
    let down =
        down.map(|(extent, stride)| stride.saturating_mul(extent.saturating_sub(1) as isize));
    let lowest = at.wrapping_offset(down.sum::<isize>() * bytes as isize);
    let in_bytes = axes().map(|(extent, stride)| (stride.unsigned_abs() * bytes, extent));
    let place = Place::new(lowest.addr(), bytes, in_bytes);
    let name = name.to_string();
    Ok(Borrowed { name, kind, lowest, shape, strides, place, widened: None, _owner: owner })
}

/// The exchange API of an object's type, if it has one.
fn exchange(object: &Bound<'_, PyAny>) -> PyResult<Option<Describe>> {
    /// The first types that were met. Each is kept, so that no other type is ever found at its address.
    static KNOWN: Mutex<Vec<(Py<PyType>, Option<Describe>)>> = Mutex::new(Vec::new());
    const MOST: usize = 64;
    let kind = object.get_type();
    {
        let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, api)) = known.iter().find(|(other, _)| other.is(&kind)) {
            return Ok(*api);
        }
    }
    let api = exchange_of(&kind)?;
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if known.len() < MOST {
        known.push((kind.unbind(), api));
    }
    Ok(api)
}

fn exchange_of(kind: &Bound<'_, PyType>) -> PyResult<Option<Describe>> {
    let name = pyo3::intern!(kind.py(), "__dlpack_c_exchange_api__");
    let capsule = kind.getattr_opt(name)?.and_then(|capsule| capsule.cast_into::<PyCapsule>().ok());
    let pointer = capsule.and_then(|x| x.pointer_checked(Some(c"dlpack_exchange_api")).ok());
    // SAFETY: DLPack says that a capsule of this name holds an API that lives as long as the process, and that every
    // version begins with its number.
    let api: Option<&'static Exchange> = pointer.map(|pointer| unsafe { pointer.cast().as_ref() });
    Ok(api.filter(|api| api.major == 1).and_then(|api| api.borrow))
}

fn by_exchange<'py>(
    name: &str,
    object: &Bound<'py, PyAny>,
    describe: Describe,
) -> PyResult<Described<'py>> {
    let mut tensor = MaybeUninit::<DlTensor>::uninit();
    // SAFETY: the object is of the type whose API this is, and the interpreter's lock is held.
    let failed = unsafe { describe(object.as_ptr().cast(), tensor.as_mut_ptr()) } != 0;
    if failed {
        return Err(PyErr::fetch(object.py()));
    }
    // SAFETY: written, since the call has not failed. Its lists live as long as the object.
    unsafe { described(name, &tensor.assume_init(), Owner::Object(object.clone())) }
}

/// # Safety
///
/// The lists of the tensor have `ndim` entries.
unsafe fn described<'py>(
    name: &str,
    tensor: &DlTensor,
    owner: Owner<'py>,
) -> PyResult<Described<'py>> {
    if !HOST.contains(&tensor.device_type) {
        return Err(PyValueError::new_err(format!(
            "`{name}` must be on the CPU, found a tensor of a device (DLPack device {}:{})",
            tensor.device_type, tensor.device_id
        )));
    }
    let kind = match (tensor.code, tensor.bits, tensor.lanes) {
        (2, 64, 1) => Kind::F64,
        (2, 32, 1) => Kind::F32,
        (2, 16, 1) => Kind::F16,
        (4, 16, 1) => Kind::Bf16,
        (0, 64, 1) => Kind::I64,
        (0, 32, 1) => Kind::I32,
        (6, 8, 1) => Kind::Bool,
        (code, bits, lanes) => {
            return Err(wrong_type(
                name,
                &format!("DLPack type {code} of {bits} bits and {lanes} lanes"),
            ));
        }
    };
    let axes = usize::try_from(tensor.ndim).unwrap_or(0);
    let list = |at: *const i64| {
        (0..axes).map(move |axis| {
            // SAFETY: the caller's promise.
            unsafe { *at.add(axis) }
        })
    };
    let shape: Extents<usize> =
        list(tensor.shape).map(|extent| usize::try_from(extent).unwrap_or(0)).collect();
    let strides = match tensor.strides.is_null() {
        true => dense(&shape),
        false => list(tensor.strides).map(|stride| stride as isize).collect(),
    };
    let at = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
    Ok(Described { kind, at, shape, strides, owner })
}

/// Strides of a tensor in row-major order.
fn dense(shape: &[usize]) -> Extents<isize> {
    let mut next = 1isize;
    let mut strides: Extents<isize> = shape
        .iter()
        .rev()
        .map(|&extent| {
            let stride = next;
            next = next.saturating_mul(extent as isize);
            stride
        })
        .collect();
    strides.reverse();
    strides
}

fn by_buffer<'py>(
    name: &str,
    buffer: PyUntypedBuffer,
    is_written: bool,
    is_bf16: bool,
) -> PyResult<Described<'py>> {
    if is_written && buffer.readonly() {
        return Err(PyValueError::new_err(format!(
            "`{name}` must be writable, found a read-only array"
        )));
    }
    let format = buffer.format().to_string_lossy();
    let of_host = format.trim_start_matches([
        '@',
        '=',
        if cfg!(target_endian = "little") { '<' } else { '>' },
    ]);
    let kind = match (of_host, buffer.item_size()) {
        ("d", 8) => Kind::F64,
        ("f", 4) => Kind::F32,
        ("e", 2) => Kind::F16,
        ("l" | "q" | "i", 8) => Kind::I64,
        ("l" | "i", 4) => Kind::I32,
        ("?", 1) => Kind::Bool,
        ("H", 2) if is_bf16 => Kind::Bf16,
        _ => return Err(wrong_type(name, &format!("a buffer of format {format:?}"))),
    };
    let bytes = kind.bytes() as isize;
    let strides = buffer.strides().iter();
    if let Some(stride) = strides.clone().find(|stride| **stride % bytes != 0) {
        return Err(PyValueError::new_err(format!(
            "`{name}` must have strides of whole elements of {bytes} bytes, found a stride of {stride} bytes"
        )));
    }
    let strides = strides.map(|stride| stride / bytes).collect();
    let (at, shape) = (buffer.buf_ptr().cast(), buffer.shape().iter().copied().collect());
    Ok(Described { kind, at, shape, strides, owner: Owner::Buffer(buffer) })
}

/// An array of NumPy that is a single number or of `ml_dtypes.bfloat16`, or any other producer of `__dlpack__`.
/// `error` says why it has no buffer.
fn by_bits_or_dlpack<'py>(
    name: &str,
    object: &Bound<'py, PyAny>,
    is_written: bool,
    error: PyErr,
) -> PyResult<Described<'py>> {
    let py = object.py();
    if object.hasattr(pyo3::intern!(py, "__array_interface__"))?
        && object.is_instance(numpy_array(py)?)?
    {
        return by_bits(name, object, is_written);
    }
    let Some(export) = object.getattr_opt(pyo3::intern!(py, "__dlpack__"))? else {
        let found = object.get_type().name()?;
        return Err(PyTypeError::new_err(format!(
            "`{name}` must be an array or a tensor (a buffer or __dlpack__), found {found}: {error}"
        )));
    };
    if is_written {
        let found = object.get_type().name()?;
        return Err(PyTypeError::new_err(format!(
            "`{name}` is written: it must be a NumPy array, a writable buffer or a PyTorch tensor, found {found}"
        )));
    }
    let capsule = export.call0().map_err(|error| {
        PyTypeError::new_err(format!(
            "`{name}` must be a tensor of the CPU that can be borrowed: {error}"
        ))
    })?;
    let pointer = capsule.cast::<PyCapsule>()?.pointer_checked(Some(c"dltensor"))?;
    // SAFETY: a capsule of this name holds a `DLManagedTensor`, which begins with the tensor. It is not renamed, so
    // that it frees what it holds when it is dropped: it is the owner.
    let tensor = unsafe { pointer.cast::<DlTensor>().as_ref() };
    // SAFETY: as the line above.
    unsafe { described(name, tensor, Owner::Object(capsule.clone())) }
}

/// An array of NumPy of which PyO3 or NumPy gives no buffer: of no axes, or of bfloat16.
fn by_bits<'py>(
    name: &str,
    array: &Bound<'py, PyAny>,
    is_written: bool,
) -> PyResult<Described<'py>> {
    let py = array.py();
    let is_single = array.getattr(pyo3::intern!(py, "ndim"))?.extract::<usize>()? == 0;
    let mut elements = match is_single {
        true => array.call_method1(pyo3::intern!(py, "reshape"), (1,))?,
        false => array.clone(),
    };
    let dtype = array.getattr(pyo3::intern!(py, "dtype"))?.getattr(pyo3::intern!(py, "name"))?;
    let is_bf16 = dtype.eq("bfloat16")?;
    if is_bf16 {
        elements =
            elements.call_method1(pyo3::intern!(py, "view"), (pyo3::intern!(py, "uint16"),))?;
    }
    let buffer =
        PyUntypedBuffer::get(&elements).map_err(|_| wrong_type(name, &format!("{dtype}")))?;
    let mut found = by_buffer(name, buffer, is_written, is_bf16)?;
    if is_single {
        (found.shape, found.strides) = (Extents::new(), Extents::new());
    }
    Ok(found)
}

/// numpy.ndarray.
fn numpy_array<'py>(py: Python<'py>) -> PyResult<&'py Bound<'py, PyType>> {
    static ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    ARRAY.import(py, "numpy", "ndarray")
}

fn wrong_type(name: &str, found: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "`{name}` must hold float64, float32, bfloat16, float16, int64, int32 or bool in the byte order of this machine, \
         found {found}"
    ))
}
