//! The set of test vectors: problems with inputs, exact results and their bounds, as files that any language reads.
//! `docs/guide.md` describes the files.
//!
//! A list in this crate (`vector_set/core.txt`) names the vectors. A vector follows from its id alone: its problem
//! and its inputs to the bit on every machine, its exact results up to the errors of f64. The list holds a hash of
//! each, so that an id never stands for something else.

mod id;
mod invalid;
mod make;
mod manifest;
mod read;

pub use id::Id;
pub use invalid::{INVALID, Invalid, refusal};
pub use make::{digest, expected, files, flags, whole};
pub use manifest::{
    Entry, Flag, INDEX, Manifest, OutputType, ProbeOf, Refusal, SCHEMA, StoredFile, Validity,
};
pub use read::{Loaded, Set};

use etalon_problem::Error;
use sha2::{Digest, Sha256};
use std::fmt::Write;

/// The name of the set.
pub const CORE: &str = "core";

/// The list of the core set: a vector a line.
const LIST: &str = include_str!("vector_set/core.txt");

/// The hash of the set in every release: `VERSION SET SHA-256` a line.
const RELEASES: &str = include_str!("vector_set/releases.txt");

/// A line of the list.
#[derive(Debug, Clone)]
pub struct Listed {
    /// The vector.
    pub id: Id,
    /// The SHA-256 of its id, problem and inputs ([`digest`]), in hexadecimal.
    pub sha256: String,
    /// The names of the bugs that it is there to notice.
    pub flags: Vec<String>,
}

/// The vectors of the core set, in the order of the list.
pub fn core() -> Result<Vec<Listed>, Error> {
    let lines = LIST.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines.map(listed).collect()
}

fn listed(line: &str) -> Result<Listed, Error> {
    let mut words = line.split(' ');
    let (Some(id), Some(sha256)) = (words.next(), words.next()) else {
        return Err(Error::value("vector", "an id and a SHA-256", line));
    };
    let flags =
        words.next().map_or(Vec::new(), |list| list.split(',').map(str::to_string).collect());
    Ok(Listed { id: id.parse()?, sha256: sha256.to_string(), flags })
}

/// The recorded hash of a set of a version of etalon, if that is a release which this one knows.
pub fn recorded(version: &str, set: &str) -> Option<&'static str> {
    RELEASES.lines().find_map(|line| {
        let mut words = line.split(' ');
        (words.next() == Some(version) && words.next() == Some(set)).then(|| words.next())?
    })
}

/// SHA-256 in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}
