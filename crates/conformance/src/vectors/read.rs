//! Reading files that may be anything: damaged, without end, or larger than memory.

use super::Error;
use etalon_problem::shortened;
use safetensors::tensor::{Dtype, Metadata};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// The most bytes of a problem file: offsets of some million sequences.
pub const PROBLEM: u64 = 64 << 20;

/// The most bytes of the header of a safetensors file, as its format has it.
const HEADER: u64 = 100_000_000;

/// Bytes of the length that a safetensors file begins with.
const LENGTH: usize = size_of::<u64>();

fn unreadable(path: &Path, source: io::Error) -> Error {
    Error::Read { path: path.to_path_buf(), source }
}

/// Why a file cannot be read, without the numbers of an operating system where words will do.
pub fn why(path: &Path, source: &io::Error) -> String {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match (source.kind(), folder) {
        (ErrorKind::NotFound, Some(folder)) if !folder.exists() => {
            format!("there is no folder {}", folder.display())
        }
        (ErrorKind::NotFound, _) => "there is no such file".to_string(),
        (ErrorKind::IsADirectory, _) => "it is a folder, and a file in it is wanted".to_string(),
        _ => source.to_string(),
    }
}

/// First bytes of files that are taken for safetensors, and how to make one of them.
const OTHERS: [(&[u8], &str); 5] = [
    (
        b"PK\x03\x04",
        "it is a zip file, as torch.save and numpy.savez write: load it, and write it with \
        safetensors.torch.save_file or safetensors.numpy.save_file",
    ),
    (
        b"\x80",
        "it is a pickle, as torch.save wrote before 1.6: load it, and write it with \
        safetensors.torch.save_file",
    ),
    (
        b"\x93NUMPY",
        "it is an array of NumPy: load it, and write it with safetensors.numpy.save_file",
    ),
    (b"\x89HDF", "it is an HDF5 file: load it, and write it with safetensors.numpy.save_file"),
    (b"{", "it is JSON text"),
];

/// The actual format of the file, if its first bytes show it.
fn instead(bytes: &[u8]) -> Option<&'static str> {
    // A length of so little as 0x80, then the header, is a safetensors file.
    let header = bytes.get(LENGTH) == Some(&b'{');
    OTHERS.iter().find(|(first, _)| bytes.starts_with(first) && !header).map(|(_, words)| *words)
}

/// The error of a file that is not what its name says.
pub fn invalid(path: &Path, why: impl ToString) -> Error {
    let why = shortened(&why.to_string(), 300);
    Error::format(path, format!("no valid safetensors file, or cut short: {why}"))
}

/// A whole file, which must not be longer than this.
pub fn at_most(path: &Path, most: u64) -> Result<Vec<u8>, Error> {
    let file = File::open(path).map_err(|error| unreadable(path, error))?;
    let mut bytes = Vec::new();
    read_part(path, &file, most + 1, &mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(Error::format(path, format!("is longer than {most} bytes")));
    }
    Ok(bytes)
}

/// Reads so many bytes more, or as many as there are.
fn read_part(path: &Path, file: &File, bytes: u64, to: &mut Vec<u8>) -> Result<(), Error> {
    let read = file.take(bytes).read_to_end(to);
    read.map(drop).map_err(|error| unreadable(path, error))
}

/// The bytes of a safetensors file: those that its header announces and one more if there is one, so
/// that a file that is too long shows. Fails before it reads the tensors where they do not fit
/// `memory`, with what they become, or where the file has another length.
pub fn whole(path: &Path, memory: u64) -> Result<Vec<u8>, Error> {
    let file = File::open(path).map_err(|error| unreadable(path, error))?;
    let mut bytes = Vec::new();
    read_part(path, &file, LENGTH as u64, &mut bytes)?;
    let header = bytes.first_chunk().map(|&length| u64::from_le_bytes(length));
    let header = header.ok_or_else(|| invalid(path, "it has no header"))?;
    read_part(path, &file, 1, &mut bytes)?;
    if let Some(other) = instead(&bytes) {
        return Err(Error::format(path, format!("no safetensors file: {other}")));
    }
    if header > HEADER {
        return Err(invalid(path, format!("a header of {header} bytes, more than {HEADER}")));
    }
    read_part(path, &file, header.saturating_sub(1), &mut bytes)?;
    let text = &bytes[LENGTH..];
    if (text.len() as u64) < header {
        return Err(invalid(path, format!("{} of {header} bytes of the header", text.len())));
    }
    let metadata: Metadata = serde_json::from_slice(text).map_err(|error| invalid(path, error))?;
    let content = metadata.data_len() as u64;
    let all = (LENGTH as u64 + header).saturating_add(content);
    let length = file.metadata().ok().filter(|data| data.is_file()).map(|data| data.len());
    if let Some(found) = length.filter(|&found| found != all) {
        return Err(invalid(path, format!("its header announces {all} bytes, found {found}")));
    }
    let needed = all.saturating_add(parsed(&metadata));
    if needed > memory {
        return Err(Error::format(
            path,
            format!("takes {needed} bytes of memory to read, and {memory} are available"),
        ));
    }
    read_part(path, &file, content.saturating_add(1), &mut bytes)?;
    Ok(bytes)
}

/// Bytes of the tensors once they are read: those of I32 widen.
fn parsed(metadata: &Metadata) -> u64 {
    let bytes = metadata.tensors().into_values().map(|tensor| {
        let (start, end) = tensor.data_offsets;
        let bytes = end.saturating_sub(start) as u64;
        if tensor.dtype == Dtype::I32 { bytes.saturating_mul(2) } else { bytes }
    });
    bytes.fold(0, u64::saturating_add)
}
