//! The manifest: what stands in the folder of a set.

use etalon_problem::{Algorithm, Dtype, Pass};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The file of the manifest.
pub const INDEX: &str = "manifest.json";

/// The version of the form of a set: it grows when a key changes its meaning or goes.
pub const SCHEMA: u32 = 1;

/// A set of test vectors: what stands in which file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The version of this form: 1.
    pub schema: u32,
    /// The version of etalon that wrote the set.
    pub etalon: String,
    /// The name of the set.
    pub set: String,
    /// The SHA-256 of all ids, problems and inputs: the same on every machine.
    pub digest: String,
    /// The SHA-256 of this file with 64 zeros in the place of this value.
    pub seal: String,
    /// The bugs that vectors are there to notice, by name.
    pub flags: BTreeMap<String, Flag>,
    /// The vectors.
    pub vectors: Vec<Entry>,
}

/// A bug.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Flag {
    /// The mistake, in a sentence.
    pub text: String,
    /// Its public report, if there is one: an issue (owner/repository#number) or a commit (owner/repository@commit).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}

/// The two kinds of problem: with a meaning, and without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Validity {
    /// Results must lie within their bounds.
    Valid,
    /// Every implementation must refuse it.
    Invalid,
}

/// A vector.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its permanent name.
    pub id: String,
    /// Valid or invalid: there is no third.
    pub result: Validity,
    /// The bugs that it is there to notice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<String>,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The problem file.
    pub problem: StoredFile,
    /// Of an invalid problem: how etalon refuses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Refusal>,
    /// Of a valid one: the pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<Pass>,
    /// The storage type of the main tensors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Dtype>,
    /// The arithmetic to which the bounds belong: the name of a profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The file of inputs, exact results and bounds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensors: Option<StoredFile>,
    /// The results, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outputs: BTreeMap<String, OutputType>,
    /// The probe of which this is a question, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<ProbeOf>,
}

/// A file of the set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StoredFile {
    /// Its name.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// The SHA-256 of its bytes.
    pub sha256: String,
}

/// Shape and type of a result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OutputType {
    /// Its extents.
    pub shape: Vec<usize>,
    /// The type that its bounds hold for: f64, f32, bf16, f16 or i64. Results in a wider type are rounded to it first.
    pub dtype: String,
}

/// The refusal of a problem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Refusal {
    /// The key that is at fault.
    pub name: String,
    /// The error in etalon's words.
    pub text: String,
}

/// A question of a probe: inputs on which the right results of a kernel of any tiling are known to the last bit, or to
/// the last count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProbeOf {
    /// The law.
    pub law: String,
    /// The number of the question, from 1.
    pub question: usize,
    /// Number of the questions of this probe.
    pub of: usize,
}
