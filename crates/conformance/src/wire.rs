//! Frames between two processes: a header and a table of tensors of fixed layout, so that a reader needs no library
//! for JSON or safetensors. `docs/protocol.md` is their description.

use crate::tensor::{Data, Tensor, Tensors};
use crate::vectors::{bytes_of, data_of};
use etalon_problem::{Mask, Problem, shortened};
use serde_json::Value;
use std::io::{self, ErrorKind, Read};
use std::ops::Range;

/// The first bytes of a frame. A stream that replaces the ends of lines is found by them.
pub const MAGIC: [u8; 8] = *b"etalon\r\n";

/// The version of frames and of what is said in them.
pub const VERSION: u32 = 1;

/// Bytes of the header, and of a row of the table.
const HEADER: usize = 64;
const ROW: usize = 128;

/// Bytes of the name of a tensor, the most axes, and the multiple at which its elements begin.
pub const NAME: usize = 48;
pub const AXES: usize = 6;
pub const ALIGN: usize = 64;

/// Bytes of the name of an element type.
const TYPE: usize = 8;

/// A tensor that is asked for, without its elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// The name of its element type.
    pub dtype: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// A tensor whose elements lie in a file that both processes see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// Its name, type and shape.
    pub tensor: Wanted,
    /// The file.
    pub file: File,
    /// The place of the first element in it, in bytes.
    pub at: usize,
}

/// A file that both processes see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum File {
    /// The file of the tensors that are given.
    Inputs,
    /// The file of the results.
    Outputs,
}

/// A frame.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Frame {
    /// The kind: of the live judge one of those in `docs/protocol.md`.
    pub kind: u32,
    /// The number of the request that it is, or answers.
    pub id: u64,
    /// A problem, or capabilities.
    pub json: Vec<u8>,
    /// Text: the same as the JSON in lines, or what an answer says.
    pub text: Vec<u8>,
    /// Tensors with their elements.
    pub tensors: Tensors,
    /// Tensors that are asked for.
    pub wanted: Vec<Wanted>,
    /// Tensors in files.
    pub placed: Vec<Placed>,
}

/// The most that a reader takes.
#[derive(Debug, Clone, Copy)]
pub struct Most {
    /// Rows of the table.
    pub tensors: u64,
    /// Bytes of JSON and of text, of each.
    pub text: u64,
    /// Bytes of elements.
    pub data: u64,
}

impl Most {
    /// Whatever there is memory for.
    pub const ANY: Most = Most { tensors: u64::MAX, text: u64::MAX, data: u64::MAX };
}

/// Bytes of an element, by the name of its type.
pub fn width(dtype: &str) -> Option<usize> {
    match dtype {
        "f64" | "i64" => Some(8),
        "f32" => Some(4),
        "bf16" | "f16" => Some(2),
        "bool" => Some(1),
        _ => None,
    }
}

/// The name of an element type.
pub fn type_name(data: &Data) -> &'static str {
    match data {
        Data::F64(_) => "f64",
        Data::F32(_) => "f32",
        Data::Bf16(_) => "bf16",
        Data::F16(_) => "f16",
        Data::I64(_) => "i64",
        Data::Bool(_) => "bool",
    }
}

impl Wanted {
    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * width(self.dtype).unwrap_or(0)
    }
}

/// A frame whose bytes have arrived and are not yet read.
pub struct Arrived {
    kind: u32,
    id: u64,
    table: Vec<u8>,
    data: Vec<u8>,
    json: Vec<u8>,
    text: Vec<u8>,
}

impl Frame {
    /// The bytes of its number.
    pub const ID: Range<usize> = 16..24;

    /// Its bytes. Fails where a name or a shape has no place in the table.
    pub fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let count = self.tensors.len() + self.wanted.len() + self.placed.len();
        let mut table = Vec::with_capacity(count * ROW);
        let mut data: Vec<u8> = Vec::new();
        for (name, tensor) in &self.tensors {
            let bytes = bytes_of(&tensor.data);
            let place = (data.len(), bytes.len());
            table.extend(row(name, type_name(&tensor.data), 0, &tensor.shape, place)?);
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(ALIGN), 0);
        }
        for wanted @ Wanted { name, dtype, shape } in &self.wanted {
            table.extend(row(name, dtype, 1, shape, (0, wanted.bytes()))?);
        }
        for Placed { tensor: tensor @ Wanted { name, dtype, shape }, file, at } in &self.placed {
            let role = match file {
                File::Inputs => 2,
                File::Outputs => 3,
            };
            table.extend(row(name, dtype, role, shape, (*at, tensor.bytes()))?);
        }
        let lengths = [count, self.json.len(), self.text.len(), data.len(), 0];
        let mut bytes = Vec::with_capacity(HEADER + table.len() + data.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.kind.to_le_bytes());
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(lengths.into_iter().flat_map(|length| (length as u64).to_le_bytes()));
        [&table, &data, &self.json, &self.text].into_iter().for_each(|part| bytes.extend(part));
        Ok(bytes)
    }

    /// The next frame; `None` at the end of the stream. An error says what was expected and what was found.
    pub fn read(from: &mut impl Read, most: Most) -> io::Result<Option<Frame>> {
        Arrived::receive(from, most)?.map(Arrived::read).transpose()
    }
}

impl Arrived {
    /// The bytes of the next frame, in parts of the lengths that its header announces; `None` at the end of the
    /// stream. Fails as [`Frame::read`] does.
    pub fn receive(from: &mut impl Read, most: Most) -> io::Result<Option<Arrived>> {
        let mut header = Vec::new();
        from.take(HEADER as u64).read_to_end(&mut header)?;
        if header.is_empty() {
            return Ok(None);
        }
        let known = header.len().min(MAGIC.len());
        if header[..known] != MAGIC[..known] {
            return Err(wrong(format!(
                "is no frame: it must begin with {}, found {}",
                shown(&MAGIC),
                shown(&header)
            )));
        }
        if header.len() < HEADER {
            return Err(cut("header", HEADER as u64, header.len() as u64));
        }
        let word = |at: usize| number(&header[at..at + 8]);
        let [version, kind] = [8, 12].map(|at| number(&header[at..at + 4]) as u32);
        if version != VERSION {
            return Err(wrong(format!("has version {version}, expected {VERSION}")));
        }
        let [count, json, text, data, reserved] = [24, 32, 40, 48, 56].map(word);
        if reserved != 0 {
            return Err(wrong(format!(
                "has {reserved} in the last 8 bytes of its header, expected 0"
            )));
        }
        for (what, found, most) in [
            ("tensors", count, most.tensors),
            ("bytes of JSON", json, most.text),
            ("bytes of text", text, most.text),
            ("bytes of elements", data, most.data),
        ] {
            if found > most {
                return Err(wrong(format!("announces {found} {what}, expected at most {most}")));
            }
        }
        let size = count.checked_mul(ROW as u64);
        let size = size.ok_or_else(|| wrong(format!("announces {count} tensors")))?;
        let table = part(from, "table of tensors", size)?;
        let data = part(from, "elements", data)?;
        let json = part(from, "JSON", json)?;
        let text = part(from, "text", text)?;
        Ok(Some(Arrived { kind, id: word(16), table, data, json, text }))
    }

    /// The frame. An error says what was expected and what was found.
    pub fn read(self) -> io::Result<Frame> {
        self.rows(|_| true)
    }

    /// The frame without the tensors whose elements came with it.
    pub fn without_elements(self) -> io::Result<Frame> {
        self.rows(|row| number(&row[NAME + TYPE + 4..NAME + TYPE + 8]) != 0)
    }

    /// The frame with some rows of its table.
    fn rows(self, which: fn(&[u8]) -> bool) -> io::Result<Frame> {
        let Arrived { kind, id, table, data, json, text } = self;
        let (mut tensors, mut wanted, mut placed) = (Tensors::new(), Vec::new(), Vec::new());
        for (at, row) in table.chunks_exact(ROW).enumerate().filter(|(_, row)| which(row)) {
            match read_row(row, &data).map_err(|fault| wrong(format!("row {at} {fault}")))? {
                Row::Wanted(tensor) => wanted.push(tensor),
                Row::Placed(tensor) => placed.push(tensor),
                Row::Given(name, tensor) => {
                    if tensors.insert(name.clone(), tensor).is_some() {
                        return Err(wrong(format!("has two tensors `{name}`")));
                    }
                }
            }
        }
        Ok(Frame { kind, id, json, text, tensors, wanted, placed })
    }
}

/// A row of the table.
fn row(
    name: &str,
    dtype: &str,
    role: u32,
    shape: &[usize],
    (offset, bytes): (usize, usize),
) -> Result<Vec<u8>, String> {
    if name.len() > NAME || name.contains('\0') {
        let name = shortened(name, 100);
        return Err(format!("`{name}` is no name of at most {NAME} bytes without NUL"));
    }
    if shape.len() > AXES {
        return Err(format!("`{name}` has {} axes, the most are {AXES}", shape.len()));
    }
    let mut row = Vec::with_capacity(ROW);
    let padded = |row: &mut Vec<u8>, text: &str, to: usize| {
        row.extend(text.as_bytes());
        row.resize(to, 0);
    };
    padded(&mut row, name, NAME);
    padded(&mut row, dtype, NAME + TYPE);
    row.extend((shape.len() as u32).to_le_bytes());
    row.extend(role.to_le_bytes());
    let extents = (0..AXES).map(|axis| shape.get(axis).copied().unwrap_or(0));
    let numbers = extents.chain([offset, bytes]);
    row.extend(numbers.flat_map(|x| (x as u64).to_le_bytes()));
    Ok(row)
}

/// A row that was read.
enum Row {
    Given(String, Tensor),
    Wanted(Wanted),
    Placed(Placed),
}

fn read_row(row: &[u8], data: &[u8]) -> Result<Row, String> {
    let name = padded(&row[..NAME]).ok_or("has no name in UTF-8, padded with zeros")?;
    let of = |what: String| format!("(`{}`) {what}", shortened(&name, NAME));
    let types = ["f64", "f32", "bf16", "f16", "i64", "bool"];
    let found = padded(&row[NAME..NAME + TYPE]).unwrap_or_default();
    let dtype = types
        .into_iter()
        .find(|dtype| *dtype == found)
        .ok_or_else(|| of(format!("has type {found:?}, expected one of {}", types.join(", "))))?;
    let [rank, role] = [56, 60].map(|at| number(&row[at..at + 4]) as usize);
    if rank > AXES {
        return Err(of(format!("has {rank} axes, expected at most {AXES}")));
    }
    let words: Vec<u64> = row[64..].chunks_exact(8).map(number).collect();
    let (extents, rest) = (&words[..rank], &words[rank..AXES]);
    if rest.iter().any(|&x| x != 0) {
        return Err(of(format!("has {rank} axes and extents of others, {rest:?}")));
    }
    let shape: Option<Vec<usize>> = extents.iter().map(|&x| usize::try_from(x).ok()).collect();
    let elements = |shape: &Vec<usize>| shape.iter().try_fold(1_usize, |n, &x| n.checked_mul(x));
    let size = |shape: &Vec<usize>| elements(shape)?.checked_mul(width(dtype)?);
    let sized = shape.and_then(|shape| Some((size(&shape)?, shape)));
    let (size, shape) = sized.ok_or_else(|| of(format!("has shape {extents:?}: too large")))?;
    let [offset, bytes] = [words[AXES], words[AXES + 1]];
    if bytes != size as u64 {
        return Err(of(format!("has {bytes} bytes, expected {size} of {dtype} {shape:?}")));
    }
    match role {
        0 => {
            let range = usize::try_from(offset).ok().and_then(|at| Some(at..at.checked_add(size)?));
            let own = range.and_then(|range| data.get(range)).ok_or_else(|| {
                let all = data.len();
                of(format!("ends at byte {} of {all}", u128::from(offset) + size as u128))
            })?;
            let data =
                data_of(dtype, own).ok_or_else(|| of("holds flags that are not 0 or 1".into()))?;
            Ok(Row::Given(name, Tensor { shape, data }))
        }
        1 => Ok(Row::Wanted(Wanted { name, dtype, shape })),
        2 | 3 => {
            let at = usize::try_from(offset).map_err(|_| of(format!("begins at byte {offset}")))?;
            let file = if role == 2 { File::Inputs } else { File::Outputs };
            Ok(Row::Placed(Placed { tensor: Wanted { name, dtype, shape }, file, at }))
        }
        _ => Err(of(format!("has role {role}, expected 0 to 3"))),
    }
}

/// Text before zeros.
fn padded(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|&x| x == 0).unwrap_or(bytes.len());
    let text = std::str::from_utf8(&bytes[..end]).ok()?;
    (end > 0 && bytes[end..].iter().all(|&x| x == 0)).then(|| text.to_string())
}

/// A little-endian number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// As many bytes as were announced: memory is taken as they come.
fn part(from: &mut impl Read, what: &str, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = from.take(length).read_to_end(&mut bytes)? as u64;
    if read < length { Err(cut(what, length, read)) } else { Ok(bytes) }
}

fn cut(what: &str, expected: u64, found: u64) -> io::Error {
    let text = format!("ends in its {what}, after {found} of {expected} bytes");
    io::Error::new(ErrorKind::UnexpectedEof, text)
}

fn wrong(what: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// The first bytes of something, as text.
fn shown(bytes: &[u8]) -> String {
    let first = &bytes[..bytes.len().min(40)];
    format!("\"{}\"", first.escape_ascii())
}

/// Prefix of the names of a mask's arrays, so that none is that of an operand.
pub const ARRAY: &str = "mask/";

/// Puts the arrays of a problem's mask among tensors, by names that no others have.
pub fn detach(problem: &mut Problem, tensors: &mut Tensors) {
    let Some(scores) = problem.scores_mut() else { return };
    let mut count = 0;
    let mut rename = |name: &mut String, shape: &[usize], data: Data| {
        *name = format!("{ARRAY}{count}");
        count += 1;
        tensors.insert(name.clone(), Tensor { shape: shape.to_vec(), data });
    };
    scores.mask.visit_mut(&mut |mask| match mask {
        Mask::Segments { query, key } => {
            for ids in [query, key] {
                rename(&mut ids.name, &ids.shape, Data::I64(ids.data.to_vec()));
            }
        }
        Mask::Array(flags) => {
            rename(&mut flags.name, &flags.shape, Data::Bool(flags.data.to_vec()));
        }
        _ => {}
    });
}

/// JSON as lines, `key.key value`: a list of numbers or words is one line, an empty object is `{}`.
pub fn in_lines(value: &Value) -> String {
    let mut lines = String::new();
    add_lines("", value, &mut lines);
    lines
}

fn add_lines(path: &str, value: &Value, lines: &mut String) {
    let plain = |value: &Value| match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let inner = |key: &str| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
    match value {
        Value::Object(map) if !map.is_empty() => {
            map.iter().for_each(|(key, value)| add_lines(&inner(key), value, lines));
        }
        Value::Array(list) if list.iter().any(|x| x.is_object() || x.is_array()) => {
            let items = list.iter().enumerate();
            items.for_each(|(at, value)| add_lines(&inner(&at.to_string()), value, lines));
        }
        Value::Array(list) => {
            let words: Vec<String> = list.iter().map(plain).collect();
            *lines += &format!("{path} {}\n", words.join(" "));
        }
        other => *lines += &format!("{path} {}\n", plain(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    fn frame() -> Frame {
        let tensor = |shape: &[usize], data| Tensor { shape: shape.to_vec(), data };
        let tensors = [
            ("q", tensor(&[1, 3], Data::F32(vec![1.0, f32::NAN, -0.0]))),
            ("ids", tensor(&[2], Data::I64(vec![-1, 1 << 40]))),
            ("mask/0", tensor(&[1, 1, 1, 2, 1, 1], Data::Bool(vec![true, false]))),
            ("none", tensor(&[0, 4], Data::Bf16(Vec::<bf16>::new()))),
            ("one", tensor(&[], Data::F64(vec![0.1]))),
        ];
        let wanted = Wanted { name: "o".into(), dtype: "f16", shape: vec![2, 3] };
        Frame {
            kind: 7,
            id: 1 << 50,
            json: b"{}".to_vec(),
            text: b"pass forward\n".to_vec(),
            tensors: tensors.map(|(name, x)| (name.to_string(), x)).into(),
            placed: [File::Inputs, File::Outputs]
                .map(|file| Placed { tensor: wanted.clone(), file, at: 64 })
                .into(),
            wanted: vec![wanted],
        }
    }

    fn read(bytes: &[u8]) -> Result<Option<Frame>, String> {
        Frame::read(&mut &bytes[..], Most::ANY).map_err(|error| error.to_string())
    }

    #[test]
    fn a_frame_is_read_as_it_was_written() {
        let bytes = frame().to_bytes().unwrap();
        let again = read(&bytes).unwrap().unwrap();
        assert_eq!(again.to_bytes().unwrap(), bytes);
        assert_eq!((again.kind, again.id, &again.wanted), (7, 1 << 50, &frame().wanted));
        assert_eq!(again.placed, frame().placed);
        assert!(again.tensors["q"].data.same_bits(&frame().tensors["q"].data));
        assert_eq!(again.tensors["one"].shape, [0; 0]);
        assert_eq!(read(&[]).unwrap(), None);
        for end in 1..bytes.len() {
            assert!(read(&bytes[..end]).unwrap_err().contains("ends in its"), "{end}");
        }
    }

    /// Every byte of the header and the table, set to others: an error or a frame, and no panic.
    #[test]
    fn no_byte_makes_it_panic() {
        let bytes = frame().to_bytes().unwrap();
        for at in 0..HEADER + 8 * ROW {
            for byte in [0, 1, 2, 8, 0x7f, 0x80, 0xff] {
                let mut other = bytes.clone();
                other[at] = byte;
                let most = Most { tensors: 100, text: 1000, data: 1000 };
                if let Err(error) = Frame::read(&mut &other[..], most) {
                    assert!(!error.to_string().is_empty());
                }
            }
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let bytes = frame().to_bytes().unwrap();
        let row = HEADER;
        for (at, byte, part) in [
            (0, b'E', "is no frame: it must begin with \"etalon\\r\\n\", found \"Etalon"),
            (8, 2, "has version 2, expected 1"),
            (63, 1, "in the last 8 bytes of its header, expected 0"),
            (31, 0xff, "announces"),
            (row, 0, "row 0 has no name"),
            (row + NAME, b'x', "has type \"x64\", expected one of f64, f32"),
            (row + 56, 7, "has 7 axes, expected at most 6"),
            (row + 60, 4, "has role 4, expected 0 to 3"),
            (row + 64, 3, "has 16 bytes, expected 24 of i64 [3]"),
            (row + 72, 1, "has 1 axes and extents of others"),
            (row + 113, 9, "ends at byte 2320 of 256"),
        ] {
            let mut other = bytes.clone();
            other[at] = byte;
            let error = read(&other).unwrap_err();
            assert!(error.contains(part), "{at}: {error}");
        }
        let most = Most { tensors: 10, text: 5, data: 1000 };
        let error = Frame::read(&mut &bytes[..], most).unwrap_err().to_string();
        assert_eq!(error, "announces 13 bytes of text, expected at most 5");
        let long = Frame {
            wanted: vec![Wanted { name: "n".repeat(49), dtype: "f32", shape: vec![] }],
            ..frame()
        };
        assert!(long.to_bytes().unwrap_err().contains("at most 48 bytes"));
    }

    #[test]
    fn json_stands_in_lines() {
        let value = serde_json::json!({
            "pass": "forward", "problem": { "mask": { "and": [{ "causal": {} }, { "window": { "left": 3 } }] },
            "scale": 0.5, "cu": [0, 3, 8] }
        });
        let lines = "pass forward\nproblem.cu 0 3 8\nproblem.mask.and.0.causal {}\n\
            problem.mask.and.1.window.left 3\nproblem.scale 0.5\n";
        assert_eq!(in_lines(&value), lines);
    }
}
