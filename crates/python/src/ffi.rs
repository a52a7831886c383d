//! Passes as calls of XLA, by its foreign function interface.
//!
//! XLA calls from threads of its own, without the interpreter's lock: nothing here touches Python. A call says in
//! attributes what it is: `problem` in JSON, `pass_`, and the names of its operands and results, `inputs` and
//! `outputs`, in their order and each separated by a space. A bool operand `mask` is the array of that name in the
//! problem. Operands may have axes in front of those that the problem gives them, all the same or 1 (`vmap` with
//! "expand_dims"): the pass is run once for each entry of these.

use crate::engine::{Engine, is_small};
use crate::problem::{Tier, multiplications};
use crate::xla::{self, Buffer, CallFrame, Code, Failed, data_type};
use arc_swap::ArcSwapOption;
use etalon_conformance::tensor::{Data, Tensor, Tensors};
use etalon_conformance::vectors;
use etalon_problem::{Error, Pass, Problem, View, ViewMut, Views, ViewsMut};
use etalon_simd::Options;
use half::{bf16, f16};
use ndarray::{ArrayView, ArrayViewMut, IxDyn};
use pyo3::prelude::*;
use rayon::prelude::*;
use std::collections::HashMap;
use std::ffi::CString;
use std::mem::offset_of;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

type Handler = unsafe extern "C" fn(*mut CallFrame) -> Failed;

/// The addresses of two handlers of XLA: one runs passes in memory of the host; one for all other platforms refuses.
#[pyfunction]
pub fn xla_handlers() -> (usize, usize) {
    let (run, refuse): (Handler, Handler) = (run, refuse);
    (run as usize, refuse as usize)
}

/// The reason why a call fails.
struct Failure {
    code: Code,
    text: String,
}

impl Failure {
    fn argument(text: impl Into<String>) -> Self {
        Failure { code: Code::InvalidArgument, text: text.into() }
    }

    fn internal(text: impl Into<String>) -> Self {
        Failure { code: Code::Internal, text: text.into() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error {
            Error::Unsupported { .. } => Code::Unimplemented,
            Error::Memory { .. } => Code::ResourceExhausted,
            _ => Code::InvalidArgument,
        };
        Failure { code, text: error.to_string() }
    }
}

/// # Safety
///
/// The frame is one of XLA.
unsafe extern "C" fn run(frame: *mut CallFrame) -> Failed {
    // SAFETY: the caller's promise.
    unsafe { respond(frame, call) }
}

/// # Safety
///
/// The frame is one of XLA.
unsafe extern "C" fn refuse(frame: *mut CallFrame) -> Failed {
    // SAFETY: the caller's promise.
    unsafe { respond(frame, elsewhere) }
}

fn elsewhere(_: &CallFrame) -> Result<(), Failure> {
    let text = "etalon.jax takes arrays of the CPU so far, found a call on another platform: move them with \
                jax.device_put(x, jax.devices(\"cpu\")[0])";
    Err(Failure { code: Code::Unimplemented, text: text.to_string() })
}

/// Does `work` with a frame, or answers what the handler is, which XLA asks once.
///
/// # Safety
///
/// The frame is one of XLA.
unsafe fn respond(frame: *mut CallFrame, work: fn(&CallFrame) -> Result<(), Failure>) -> Failed {
    // SAFETY: every frame begins with its size and its extensions; those are of the kind that they name.
    unsafe {
        if answer(&raw const (*frame).struct_size, (*frame).extension_start) {
            return std::ptr::null_mut();
        }
        if (*frame).struct_size < size_of::<CallFrame>() {
            no_words("XLA's call frame is shorter than that of version 0.3");
        }
    }
    // SAFETY: as large as the type, by the check above, and kept by XLA until the handler returns.
    let frame = unsafe { &*frame };
    let done = catch_unwind(AssertUnwindSafe(|| check_version(frame).and_then(|()| work(frame))));
    let done = done.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("");
        Err(Failure::internal(format!("a panic in etalon: {text}")))
    });
    match done {
        Ok(()) => std::ptr::null_mut(),
        Err(failure) => raise(frame, failure),
    }
}

/// Fails unless the interface is the one whose types are declared here, or a later one that only adds to it.
fn check_version(frame: &CallFrame) -> Result<(), Failure> {
    let found = api(frame).map(|api| &api.api_version);
    match found.map(|x| (x.major_version, x.minor_version)) {
        Some((xla::MAJOR, minor)) if minor >= xla::MINOR => Ok(()),
        found => Err(Failure::internal(format!(
            "etalon needs version {}.{} of XLA's foreign function interface, found {found:?}",
            xla::MAJOR,
            xla::MINOR
        ))),
    }
}

/// Fills the metadata that a frame asks for; false if it asks for none.
///
/// # Safety
///
/// The size is that of a frame, and the list that of its extensions.
unsafe fn answer(size: *const usize, extensions: *mut xla::ExtensionBase) -> bool {
    // SAFETY: the caller's promise. An extension of this kind is that struct, whose metadata may be written.
    unsafe {
        if *size < offset_of!(CallFrame, api) || extensions.is_null() {
            return false;
        }
        if (*extensions).kind != xla::METADATA {
            return false;
        }
        let metadata = (*extensions.cast::<xla::MetadataExtension>()).metadata;
        if (*metadata).struct_size < offset_of!(xla::Metadata, traits) + size_of::<u32>() {
            no_words("XLA's metadata are shorter than those of version 0.3");
        }
        (*metadata).api_version.major_version = xla::MAJOR;
        (*metadata).api_version.minor_version = xla::MINOR;
        (*metadata).traits = 0;
    }
    true
}

/// Ends the process: XLA has broken its own rules, and there is no way to report an error.
fn no_words(text: &str) -> ! {
    eprintln!("etalon: {text}");
    std::process::abort()
}

/// XLA's own functions, if there are as many as are declared here.
fn api(frame: &CallFrame) -> Option<&xla::Api> {
    if frame.api.is_null() {
        return None;
    }
    // SAFETY: the API of a frame lives as long as the process, and begins with its size, which is asked first.
    unsafe {
        let size = (*frame.api).struct_size;
        if size < size_of::<xla::Api>() { None } else { Some(&*frame.api) }
    }
}

/// Makes an error of XLA.
fn raise(frame: &CallFrame, failure: Failure) -> Failed {
    let create = api(frame).and_then(|api| api.error_create);
    let Some(create) = create else { no_words(&failure.text) };
    let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
    let mut arguments = xla::ErrorCreateArgs {
        struct_size: offset_of!(xla::ErrorCreateArgs, errc) + size_of::<Code>(),
        extension_start: std::ptr::null_mut(),
        message: text.as_ptr(),
        errc: failure.code,
    };
    // SAFETY: the function of this version, with arguments that live until it returns; it copies the text.
    unsafe { create(&mut arguments) }
}

/// A tensor of a call, in row-major order.
struct Operand<'a> {
    name: &'a str,
    dtype: u32,
    at: *mut u8,
    shape: Vec<usize>,
    /// Axes in front of those that the problem gives it.
    leading: usize,
    /// Its elements, where they are whole numbers of 32 bits: passes read those of 64.
    widened: Vec<i64>,
}

// SAFETY: XLA keeps the memory until the handler returns. Of an input it is only read, of an output each entry is
// written by the one thread that computes it (`place`), and `check_memory` has found no output in other memory.
unsafe impl Sync for Operand<'_> {}

impl<'a> Operand<'a> {
    fn new(name: &'a str, buffer: &Buffer) -> Result<Self, Failure> {
        if buffer.struct_size < size_of::<Buffer>() {
            return Err(Failure::internal("XLA's buffer is shorter than that of version 0.3"));
        }
        let rank = usize::try_from(buffer.rank).unwrap_or(0);
        let extents = (0..rank).map(|axis| {
            // SAFETY: the list has as many entries as the buffer has axes.
            unsafe { *buffer.dims.add(axis) }
        });
        let shape = extents.map(|extent| usize::try_from(extent).unwrap_or(0)).collect();
        let (dtype, at) = (buffer.dtype, buffer.data.cast());
        let mut operand = Operand { name, dtype, at, shape, leading: 0, widened: Vec::new() };
        let bytes = operand.element()?;
        if !operand.at.addr().is_multiple_of(bytes) {
            let at = operand.at.addr();
            return Err(Failure::internal(format!(
                "`{name}` must lie at a multiple of {bytes} bytes, found address {at:#x}"
            )));
        }
        if operand.at.is_null() {
            if operand.count() > 0 {
                return Err(Failure::internal(format!("`{name}` has no memory")));
            }
            operand.at = std::ptr::without_provenance_mut(bytes);
        }
        if dtype == data_type::S32 {
            // SAFETY: as in `view`.
            let numbers = unsafe { operand.entry::<i32>(0..operand.count()) };
            operand.widened = numbers.iter().map(|&x| x.into()).collect();
        }
        Ok(operand)
    }

    /// The bytes of an element.
    fn element(&self) -> Result<usize, Failure> {
        Ok(match self.dtype {
            data_type::F64 | data_type::S64 => 8,
            data_type::F32 | data_type::S32 => 4,
            data_type::BF16 | data_type::F16 => 2,
            data_type::PRED => 1,
            found => {
                return Err(Failure::argument(format!(
                    "`{}` must hold float64, float32, bfloat16, float16, int64, int32 or bool, found XLA's \
                     type {found}",
                    self.name
                )));
            }
        })
    }

    fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Tells its own axes from those in front of them, which must be those of the call, or 1.
    fn lead(&mut self, rank: usize, lead: Option<&[usize]>) -> Result<(), Failure> {
        let (name, shape) = (self.name, &self.shape);
        self.leading = shape.len().checked_sub(rank).ok_or_else(|| {
            Failure::argument(format!("`{name}` must have {rank} axes, found shape {shape:?}"))
        })?;
        let own = &shape[..self.leading];
        let Some(lead) = lead else { return Ok(()) };
        let fits = own.len() == lead.len() && own.iter().zip(lead).all(|(x, y)| *x == 1 || x == y);
        if !fits {
            return Err(Failure::argument(format!(
                "`{name}` must have axes {lead:?}, or 1, before its own, found shape {shape:?}"
            )));
        }
        Ok(())
    }

    /// The elements of an entry of the axes in front, whose extents are `lead`.
    fn entry_of(&self, mut number: usize, lead: &[usize]) -> Range<usize> {
        let (own, mut step, mut at) = (&self.shape[..self.leading], 1, 0);
        for (&extent, &whole) in own.iter().zip(lead).rev() {
            at += if extent == 1 { 0 } else { number % whole * step };
            number /= whole;
            step *= extent;
        }
        let size: usize = self.shape[self.leading..].iter().product();
        at * size..(at + 1) * size
    }

    /// # Safety
    ///
    /// `T` is the type of the elements.
    unsafe fn entry<T>(&self, range: Range<usize>) -> &[T] {
        assert!(
            range.start <= range.end && range.end <= self.count(),
            "elements of `{}`",
            self.name
        );
        // SAFETY: the caller's promise, and XLA's for memory of the shape, in which the range is by the line above;
        // `new` has checked that it is aligned.
        unsafe { std::slice::from_raw_parts(self.at.cast::<T>().add(range.start), range.len()) }
    }

    /// An entry, to be read.
    fn view(&self, range: Range<usize>) -> Result<View<'_>, Failure> {
        let shape = &self.shape[self.leading..];
        // SAFETY: each type is that of `dtype`.
        unsafe {
            Ok(match self.dtype {
                data_type::F64 => shaped(shape, self.entry::<f64>(range))?.into(),
                data_type::F32 => shaped(shape, self.entry::<f32>(range))?.into(),
                data_type::BF16 => shaped(shape, self.entry::<bf16>(range))?.into(),
                data_type::F16 => shaped(shape, self.entry::<f16>(range))?.into(),
                data_type::S64 => shaped(shape, self.entry::<i64>(range))?.into(),
                data_type::S32 => shaped(shape, &self.widened[range])?.into(),
                _ => return Err(self.no_number()),
            })
        }
    }

    /// An entry, to be written.
    ///
    /// # Safety
    ///
    /// Nobody else has a view of this entry.
    unsafe fn place(&self, range: Range<usize>) -> Result<ViewMut<'_>, Failure> {
        /// # Safety
        ///
        /// As that of `place` and of `entry`.
        unsafe fn of<'a, T>(
            operand: &'a Operand<'_>,
            range: Range<usize>,
        ) -> Result<ArrayViewMut<'a, T, IxDyn>, Failure> {
            let is_one = range.start <= range.end && range.end <= operand.count();
            assert!(is_one, "elements of `{}`", operand.name);
            // SAFETY: the caller's promise; memory, range and alignment as in `entry`.
            let elements = unsafe {
                std::slice::from_raw_parts_mut(operand.at.cast::<T>().add(range.start), range.len())
            };
            let shape = &operand.shape[operand.leading..];
            ArrayViewMut::from_shape(shape, elements).map_err(|x| Failure::internal(x.to_string()))
        }
        // SAFETY: each type is that of `dtype`, and the caller's promise.
        unsafe {
            Ok(match self.dtype {
                data_type::F64 => of::<f64>(self, range)?.into(),
                data_type::F32 => of::<f32>(self, range)?.into(),
                data_type::BF16 => of::<bf16>(self, range)?.into(),
                data_type::F16 => of::<f16>(self, range)?.into(),
                data_type::S64 => of::<i64>(self, range)?.into(),
                _ => return Err(self.no_number()),
            })
        }
    }

    fn no_number(&self) -> Failure {
        let found = if self.dtype == data_type::PRED { "bool" } else { "int32" };
        Failure::argument(format!(
            "`{}` must hold float64, float32, bfloat16, float16 or int64, found {found}",
            self.name
        ))
    }

    /// The addresses of its bytes.
    fn addresses(&self) -> Result<Range<usize>, Failure> {
        let start = self.at.addr();
        Ok(start..start + self.count() * self.element()?)
    }
}

fn shaped<'a, T>(shape: &[usize], elements: &'a [T]) -> Result<ArrayView<'a, T, IxDyn>, Failure> {
    ArrayView::from_shape(shape, elements).map_err(|error| Failure::internal(error.to_string()))
}

/// Runs the pass that a frame asks for.
fn call(frame: &CallFrame) -> Result<(), Failure> {
    if frame.stage != xla::EXECUTE {
        return Err(Failure::internal(format!("a call in stage {} of XLA", frame.stage)));
    }
    let pass: Pass = text(frame, "pass_")?.parse()?;
    let mut inputs = operands(&frame.args, text(frame, "inputs")?)?;
    let mut outputs = operands(&frame.rets, text(frame, "outputs")?)?;
    check_memory(&inputs, &outputs)?;
    let mask = inputs.iter().position(|x| x.dtype == data_type::PRED && x.name == "mask");
    let mut mask = mask.map(|at| inputs.remove(at));
    let problems = problems(text(frame, "problem")?, &mut mask)?;
    // Of a mask without entries there is nothing to compute.
    let Some(first) = problems.first() else { return Ok(()) };
    let table = first.checked_table(pass)?;
    let rank = |name: &str| {
        let found = table.operands.iter().find(|operand| operand.name == name);
        let words = || format!("`{name}` is no tensor of this pass, {pass} of the problem");
        found.map(|operand| operand.shape.len()).ok_or_else(|| Failure::argument(words()))
    };
    let Some(first) = outputs.first_mut() else { return Ok(()) };
    first.lead(rank(first.name)?, None)?;
    let lead = first.shape[..first.leading].to_vec();
    for operand in inputs.iter_mut().chain(&mut outputs) {
        operand.lead(rank(operand.name)?, Some(&lead))?;
    }
    if let Some(mask) = &mut mask {
        mask.lead(MASK_AXES, Some(&lead))?;
    }
    compute(pass, &problems, mask.as_ref(), &inputs, &outputs, &lead)
}

/// Axes of a mask: batch, heads, queries, keys.
const MASK_AXES: usize = 4;

/// Computes all entries: small ones side by side, others one after the other, each by all threads.
fn compute(
    pass: Pass,
    problems: &[Arc<Problem>],
    mask: Option<&Operand<'_>>,
    inputs: &[Operand<'_>],
    outputs: &[Operand<'_>],
    lead: &[usize],
) -> Result<(), Failure> {
    if let Some(repeated) = outputs.iter().find(|x| x.shape[..x.leading] != *lead) {
        let (name, shape) = (repeated.name, &repeated.shape);
        return Err(Failure::argument(format!(
            "`{name}` is written and must have axes {lead:?} before its own, found shape {shape:?}"
        )));
    }
    let engine = Engine::get().map_err(|error| Failure::internal(error.to_string()))?;
    let entry = |number: usize| {
        let (mut views, mut places) = (Views::new(), ViewsMut::new());
        for x in inputs {
            views.push(x.name, x.view(x.entry_of(number, lead))?);
        }
        for x in outputs {
            // SAFETY: each number is computed once, and the entries of different numbers are apart: the axes in front
            // are those of the call, none of them repeated.
            places.push(x.name, unsafe { x.place(x.entry_of(number, lead)) }?);
        }
        let own = mask.map_or(0, |x| {
            let range = x.entry_of(number, lead);
            range.start / range.len().max(1)
        });
        let tier = Tier::usual(&views);
        Ok(tier.run(&engine, &problems[own], pass, &views, &mut places, Options::default())?)
    };
    let (count, each) = (lead.iter().product::<usize>(), multiplications(&problems[0]));
    engine.compute(each * count as f64, || {
        if count == 1 || !is_small(each) {
            return (0..count).try_for_each(entry);
        }
        let done: Vec<Result<(), Failure>> = (0..count).into_par_iter().map(entry).collect();
        done.into_iter().collect()
    })
}

/// Fails where a result would be written over another tensor of the call.
fn check_memory(inputs: &[Operand<'_>], outputs: &[Operand<'_>]) -> Result<(), Failure> {
    for (at, output) in outputs.iter().enumerate() {
        let own = output.addresses()?;
        for other in outputs[at + 1..].iter().chain(inputs) {
            let others = other.addresses()?;
            if own.start < others.end && others.start < own.end {
                let (name, other) = (output.name, other.name);
                return Err(Failure::argument(format!(
                    "`{name}` is written and must share no memory with `{other}`"
                )));
            }
        }
    }
    Ok(())
}

/// The problem of a text, or one for each entry of its mask.
fn problems(text: &str, mask: &mut Option<Operand<'_>>) -> Result<Vec<Arc<Problem>>, Failure> {
    let Some(mask) = mask else { return Ok(vec![known(text)?]) };
    mask.lead(MASK_AXES, None)?;
    let shape = mask.shape[mask.leading..].to_vec();
    let size = shape.iter().product::<usize>();
    let entries = mask.shape[..mask.leading].iter().product::<usize>();
    let made = (0..entries).map(|number| {
        // SAFETY: PRED is a byte.
        let flags = unsafe { mask.entry::<u8>(number * size..(number + 1) * size) };
        let data = Data::Bool(flags.iter().map(|&flag| flag != 0).collect());
        let tensors = Tensors::from([("mask".to_string(), Tensor { shape: shape.clone(), data })]);
        Ok(Arc::new(parsed(text, &tensors)?))
    });
    made.collect()
}

/// The problem of a text without arrays, read once.
fn known(text: &str) -> Result<Arc<Problem>, Failure> {
    /// Copied when one is added, so that no lock is there that a fork could leave taken.
    static KNOWN: ArcSwapOption<HashMap<String, Arc<Problem>>> = ArcSwapOption::const_empty();
    /// Texts after which the list begins anew.
    const MOST: usize = 256;
    if let Some(found) = KNOWN.load().as_ref().and_then(|known| known.get(text)) {
        return Ok(found.clone());
    }
    let made = Arc::new(parsed(text, &Tensors::new())?);
    KNOWN.rcu(|known| {
        let kept = known.as_deref().filter(|known| known.len() < MOST);
        let mut next = kept.cloned().unwrap_or_default();
        next.insert(text.to_string(), made.clone());
        Some(Arc::new(next))
    });
    Ok(made)
}

fn parsed(text: &str, tensors: &Tensors) -> Result<Problem, Failure> {
    let [own, of_arrays] = ["problem", "arrays"].map(Path::new);
    vectors::parse_problem(own, text, of_arrays, tensors).map_err(|error| match error {
        vectors::Error::Content { source, .. } => source.into(),
        error => Failure::argument(error.to_string()),
    })
}

/// The text of an attribute.
fn text<'a>(frame: &'a CallFrame, name: &str) -> Result<&'a str, Failure> {
    let attributes = &frame.attrs;
    let missing = || Failure::argument(format!("the call has no attribute `{name}` of text"));
    if attributes.struct_size < size_of::<xla::Attrs>() {
        return Err(Failure::internal("XLA's attributes are shorter than those of version 0.3"));
    }
    // SAFETY: the lists have as many entries as `size` says; a value is of the type that stands beside it, and all
    // of them live until the handler returns.
    let bytes = unsafe {
        let span = |x: *const xla::ByteSpan| match (*x).len {
            0 => &[],
            len => std::slice::from_raw_parts((*x).ptr, len),
        };
        let mut all = 0..usize::try_from(attributes.size).unwrap_or(0);
        let at = all.find(|&at| {
            *attributes.types.add(at) == xla::STRING
                && span(*attributes.names.add(at)) == name.as_bytes()
        });
        span((*attributes.attrs.add(at.ok_or_else(missing)?)).cast())
    };
    std::str::from_utf8(bytes).map_err(|_| missing())
}

/// The tensors of a list, with their names.
fn operands<'a>(list: &xla::Buffers, names: &'a str) -> Result<Vec<Operand<'a>>, Failure> {
    let count = usize::try_from(list.size).unwrap_or(0);
    if list.struct_size < size_of::<xla::Buffers>() {
        return Err(Failure::internal("XLA's list of buffers is shorter than that of version 0.3"));
    }
    let names: Vec<&str> = names.split_ascii_whitespace().collect();
    if names.len() != count {
        let found = names.len();
        return Err(Failure::argument(format!("{count} tensors have {found} names: {names:?}")));
    }
    let made = names.into_iter().enumerate().map(|(at, name)| {
        // SAFETY: the lists have as many entries as `size` says, and one of this type is a buffer.
        let buffer: Option<&Buffer> = unsafe {
            match *list.types.add(at) == xla::BUFFER {
                true => (*list.buffers.add(at)).cast::<Buffer>().as_ref(),
                false => None,
            }
        };
        let none = || Failure::argument(format!("`{name}` must be a buffer"));
        Operand::new(name, buffer.ok_or_else(none)?)
    });
    made.collect()
}
