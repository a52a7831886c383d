//! Files: tensors as safetensors, problems as JSON, and writing that leaves nothing half done.

mod draft;
pub mod json;
mod problem;
mod read;

pub use draft::{Draft, Unfinished};
pub use problem::{parse_problem, read_problem, sequence_tensors, with_arrays};
pub(crate) use read::at_most;

use crate::tensor::{Data, Tensor, Tensors};
use etalon_problem::{Error as ProblemError, Walk, shortened};
use half::{bf16, f16};
use safetensors::tensor::{Dtype as Stored, TensorView};
use safetensors::{SafeTensors, View};
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The most characters of what a parser says about a file, which may repeat any part of it.
const LINE: usize = 600;

/// Faults of a file. Every message is one line that names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It cannot be read.
    #[error("{path}: cannot be read: {}", read::why(path, source))]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It cannot be written.
    #[error("{path}: cannot be written: {reason}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// It is not what it should be.
    #[error("{path}: {}", shortened(reason, LINE))]
    Format {
        /// The file.
        path: PathBuf,
        /// Its fault.
        reason: String,
    },
    /// Its content does not fit the problem.
    #[error("{path}: {}{source}", at_line(*line))]
    Content {
        /// The file.
        path: PathBuf,
        /// The line of a JSON file on which the value of the key stands, if there is one.
        line: Option<usize>,
        /// The misfit.
        source: ProblemError,
    },
}

/// The words for a line before an error.
fn at_line(line: Option<usize>) -> String {
    line.map_or(String::new(), |line| format!("line {line}: "))
}

impl Error {
    fn format(path: &Path, reason: impl Into<String>) -> Self {
        Error::Format { path: path.to_path_buf(), reason: reason.into() }
    }

    fn write(path: &Path, reason: impl ToString) -> Self {
        Error::Write { path: path.to_path_buf(), reason: reason.to_string() }
    }

    /// An error of the vocabulary that a file is to blame for.
    pub fn content(path: &Path, source: ProblemError) -> Self {
        Error::Content { path: path.to_path_buf(), line: None, source }
    }

    /// The same of a JSON file with this text: a value outside its domain comes with its line.
    pub fn meaning(path: &Path, text: &str, source: ProblemError) -> Self {
        let line = match &source {
            ProblemError::Value { name, found, .. } => json::line_of_value(text, name, found),
            _ => None,
        };
        Error::Content { path: path.to_path_buf(), line, source }
    }
}

/// Reads every tensor of a safetensors file. I32 becomes [`Data::I64`], U8 [`Data::Bool`] if it
/// holds nothing but 0 and 1; any other type but F64, F32, BF16, F16, I64 and BOOL is an error.
///
/// No more is read than the header of the file announces, and nothing for which there is no memory:
/// `memory` is what may be used, in bytes.
pub fn read_tensors(path: &Path, memory: u64) -> Result<Tensors, Error> {
    from_bytes(path, &read::whole(path, memory)?)
}

/// The tensors of these names, as [`read_tensors`] reads them, and the names of all others, in whatever types.
pub fn read_known(
    path: &Path,
    memory: u64,
    known: impl Fn(&str) -> bool,
) -> Result<(Tensors, Vec<String>), Error> {
    tensors_of(path, &read::whole(path, memory)?, known)
}

/// The tensors in the bytes of a safetensors file, as [`read_tensors`]; `path` is only named in errors.
pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Tensors, Error> {
    tensors_of(path, bytes, |_| true).map(|(tensors, _)| tensors)
}

fn tensors_of(
    path: &Path,
    bytes: &[u8],
    known: impl Fn(&str) -> bool,
) -> Result<(Tensors, Vec<String>), Error> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| read::invalid(path, error))?;
    let all = file.tensors().into_iter();
    let (own, others): (Vec<_>, Vec<_>) = all.partition(|(name, _)| known(name));
    let tensor = |(name, view): (String, TensorView<'_>)| match parse(&view) {
        Some(data) => Ok((name, Tensor { shape: view.shape().to_vec(), data })),
        None => {
            let (name, dtype) = (shortened(&name, 100), view.dtype());
            let expected = "F64, F32, BF16, F16, I64, I32, BOOL or U8 of 0 and 1";
            Err(Error::format(path, format!("`{name}` must hold {expected}, found {dtype:?}")))
        }
    };
    let tensors = own.into_iter().map(tensor).collect::<Result<_, _>>()?;
    let mut others: Vec<String> = others.into_iter().map(|(name, _)| name).collect();
    others.sort();
    Ok((tensors, others))
}

fn parse(view: &TensorView<'_>) -> Option<Data> {
    let bytes = view.data();
    match view.dtype() {
        Stored::F64 => data_of("f64", bytes),
        Stored::F32 => data_of("f32", bytes),
        Stored::BF16 => data_of("bf16", bytes),
        Stored::F16 => data_of("f16", bytes),
        Stored::I64 => data_of("i64", bytes),
        Stored::I32 => Some(Data::I64(elements(bytes, |x| i64::from(i32::from_le_bytes(x))))),
        Stored::BOOL | Stored::U8 => data_of("bool", bytes),
        _ => None,
    }
}

/// The elements of a type in little-endian bytes; nothing where the type is unknown, or flags are not 0 or 1.
pub(crate) fn data_of(dtype: &str, bytes: &[u8]) -> Option<Data> {
    Some(match dtype {
        "f64" => Data::F64(elements(bytes, f64::from_le_bytes)),
        "f32" => Data::F32(elements(bytes, f32::from_le_bytes)),
        "bf16" => Data::Bf16(elements(bytes, bf16::from_le_bytes)),
        "f16" => Data::F16(elements(bytes, f16::from_le_bytes)),
        "i64" => Data::I64(elements(bytes, i64::from_le_bytes)),
        "bool" if bytes.iter().all(|&byte| byte <= 1) => {
            Data::Bool(bytes.iter().map(|&byte| byte == 1).collect())
        }
        _ => return None,
    })
}

/// The elements as little-endian bytes.
pub(crate) fn bytes_of(data: &Data) -> Vec<u8> {
    match data {
        Data::F64(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Data::F32(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Data::Bf16(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Data::F16(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Data::I64(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Data::Bool(x) => x.iter().map(|&x| u8::from(x)).collect(),
    }
}

fn elements<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&bytes| read(bytes)).collect()
}

/// The tensors as the bytes of a safetensors file; `path` is only named in errors.
pub fn to_bytes(path: &Path, tensors: &Tensors) -> Result<Vec<u8>, Error> {
    with_metadata(path, tensors, None)
}

fn with_metadata(
    path: &Path,
    tensors: &Tensors,
    metadata: Option<HashMap<String, String>>,
) -> Result<Vec<u8>, Error> {
    let tensors = tensors.iter().map(|(name, tensor)| (name, InFile(tensor)));
    safetensors::serialize(tensors, metadata).map_err(|error| Error::write(path, error))
}

/// The key of the metadata of a trace: its value is the walk in JSON.
pub const TRACE: &str = "trace";

/// Reads the tensors of a trace, as [`read_tensors`] does, and the walk that the metadata of the file states.
pub fn read_trace(path: &Path, memory: u64) -> Result<(Tensors, Walk), Error> {
    let bytes = read::whole(path, memory)?;
    let tensors = from_bytes(path, &bytes)?;
    let header = SafeTensors::read_metadata(&bytes).map_err(|error| read::invalid(path, error))?;
    let walk = header.1.metadata().as_ref().and_then(|all| all.get(TRACE));
    let missing = r#"its metadata has no `trace`, such as {"tile": {"queries": 64, "keys": 128}} or {"chunk": 64}"#;
    let walk = walk.ok_or_else(|| Error::format(path, missing))?;
    Ok((tensors, parse_json(path, "`trace` in its metadata", walk)?))
}

/// The tensors of a trace with their walk as the bytes of a safetensors file; `path` is only named in errors.
pub fn trace_to_bytes(path: &Path, tensors: &Tensors, walk: &Walk) -> Result<Vec<u8>, Error> {
    let walk = serde_json::to_string(walk).map_err(|error| Error::write(path, error))?;
    with_metadata(path, tensors, Some([(TRACE.to_string(), walk)].into()))
}

/// Writes a safetensors file: the whole of it, or nothing.
pub fn write_tensors(path: &Path, tensors: &Tensors) -> Result<(), Error> {
    let draft = Draft::new(path)?;
    draft.finish(&to_bytes(path, tensors)?)
}

/// A tensor as it stands in a file.
struct InFile<'a>(&'a Tensor);

impl View for InFile<'_> {
    fn dtype(&self) -> Stored {
        match self.0.data {
            Data::F64(_) => Stored::F64,
            Data::F32(_) => Stored::F32,
            Data::Bf16(_) => Stored::BF16,
            Data::F16(_) => Stored::F16,
            Data::I64(_) => Stored::I64,
            Data::Bool(_) => Stored::BOOL,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(bytes_of(&self.0.data))
    }

    fn data_len(&self) -> usize {
        self.0.len() * self.dtype().bitsize() / 8
    }
}

/// The text of a problem file, without the mark that some editors put before it.
pub fn read_text(path: &Path) -> Result<String, Error> {
    let bytes = at_most(path, read::PROBLEM)?;
    let wide = matches!(bytes.get(..2), Some([0xff, 0xfe] | [0xfe, 0xff]));
    let text = String::from_utf8(bytes).map_err(|_| match wide {
        true => Error::format(path, "no JSON text: it is UTF-16; save it as UTF-8"),
        false => Error::format(path, "no JSON text: it is not UTF-8"),
    })?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_string).unwrap_or(text))
}

/// Parses the text of a JSON file, which is to be a valid `what`. Errors name the key and the line.
pub fn parse_json<T: DeserializeOwned>(path: &Path, what: &str, text: &str) -> Result<T, Error> {
    let wrong = |reason: String| Error::format(path, format!("not a valid {what}: {reason}"));
    json::parse(text).map_err(wrong)
}

#[cfg(test)]
mod tests;
