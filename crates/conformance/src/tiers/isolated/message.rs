//! Messages between a suite and a process that answers its requests: the length of a header, the header as JSON, the
//! length of tensors, the tensors as a safetensors file. Lengths are little-endian, 8 bytes each.

use crate::tensor::Tensors;
use std::io::{self, Read, Write};

/// The name of what is read or written, in errors.
pub const WIRE: &str = "a message";

/// A message.
#[derive(Debug, Default)]
pub struct Message {
    pub header: Vec<u8>,
    pub tensors: Vec<u8>,
}

impl Message {
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        for part in [&self.header, &self.tensors] {
            to.write_all(&(part.len() as u64).to_le_bytes())?;
            to.write_all(part)?;
        }
        to.flush()
    }

    /// The next message; `None` at the end of the stream.
    pub fn read(from: &mut impl Read) -> io::Result<Option<Message>> {
        let mut first = [0; 8];
        let mut have = 0;
        while have < first.len() {
            match from.read(&mut first[have..])? {
                0 if have == 0 => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                more => have += more,
            }
        }
        let header = part(from, first)?;
        let mut second = [0; 8];
        from.read_exact(&mut second)?;
        Ok(Some(Message { header, tensors: part(from, second)? }))
    }
}

/// As many bytes as were announced: memory is taken as they come.
fn part(from: &mut impl Read, length: [u8; 8]) -> io::Result<Vec<u8>> {
    let (length, mut bytes) = (u64::from_le_bytes(length), Vec::new());
    let read = from.take(length).read_to_end(&mut bytes)? as u64;
    if read < length { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) }
}

/// The tensors of several lists, with the number of the list before each name.
pub fn numbered(lists: Vec<Tensors>) -> Tensors {
    let named = |(number, list): (usize, Tensors)| {
        list.into_iter().map(move |(name, x)| (format!("{number}/{name}"), x))
    };
    lists.into_iter().enumerate().flat_map(named).collect()
}

/// The reverse, of so many lists.
pub fn by_number(tensors: Tensors, count: usize) -> Result<Vec<Tensors>, String> {
    let mut lists: Vec<Tensors> = (0..count).map(|_| Tensors::new()).collect();
    for (name, x) in tensors {
        let parts =
            name.split_once('/').and_then(|(number, name)| Some((number.parse().ok()?, name)));
        let place =
            parts.and_then(|(number, name): (usize, _)| Some((lists.get_mut(number)?, name)));
        let (list, name) = place.ok_or_else(|| format!("a tensor {name} of no list"))?;
        list.insert(name.to_string(), x);
    }
    Ok(lists)
}

/// An error in words.
pub fn said(error: impl ToString) -> String {
    error.to_string()
}
