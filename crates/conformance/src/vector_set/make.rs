//! The files of a set.

use super::invalid::{INVALID, Invalid, refusal};
use super::manifest::{
    Entry, Flag, INDEX, Manifest, OutputType, ProbeOf, Refusal, SCHEMA, StoredFile, Validity,
};
use super::{CORE, Id, Listed, core, sha256};
use crate::bounds::bounds;
use crate::gates::generic;
use crate::profile::Profile;
use crate::questions::Question;
use crate::tensor::{Data, Stored, Tensor, Tensors};
use crate::types::Types;
use crate::typical::{Kernels, Typical};
use crate::vectors::to_bytes;
use crate::zoo::mutant;
use etalon_problem::{Dtype, Error, Role};
use ndarray::ArrayD;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The flag of every invalid vector.
const REFUSAL: &str = "takes-any-problem";

/// The place of the seal while it is computed.
const NO_SEAL: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// A function that is called, from any thread, for every vector that is done: with its number, the number of all, and
/// its id.
pub type Progress<'a> = &'a (dyn Fn(usize, usize, &str) + Sync);

/// The SHA-256 of an id with its problem and its inputs: their lengths, in eight bytes, and their bytes.
pub fn digest(id: &str, question: &Question) -> Result<String, String> {
    Ok(hash_of(id, &problem_text(question)?, &input_bytes(question)?))
}

fn hash_of(id: &str, problem: &str, inputs: &[u8]) -> String {
    let mut bytes = Vec::new();
    for part in [id.as_bytes(), problem.as_bytes(), inputs] {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part);
    }
    sha256(&bytes)
}

fn problem_text(question: &Question) -> Result<String, String> {
    let text = serde_json::to_string_pretty(&question.problem).map_err(|x| x.to_string())?;
    Ok(text + "\n")
}

fn input_bytes(question: &Question) -> Result<Vec<u8>, String> {
    let inputs = question.tensors().map_err(|error| error.to_string())?;
    to_bytes(Path::new("inputs"), &inputs).map_err(|error| error.to_string())
}

/// The exact results of a question as NAME.exact, with the bounds of a kernel of a profile as NAME.bound. Where the
/// inputs are generic, NAME.sigma is the rms error of simulated kernels. Bounds and sigma are rounded up to f32.
/// NAME.as_right lists elements of integers that are as right as the exact one: pairs of a place in row-major order
/// and a value.
pub fn expected(question: &Question, profile: &Profile) -> Result<Tensors, Error> {
    let Question { problem, pass, dtype, inputs } = question;
    let exact = bounds(problem, *pass, *dtype, profile, inputs)?;
    let mut tensors = Tensors::new();
    for (name, bound) in &exact.outputs {
        tensors.insert(format!("{name}.exact"), Tensor::store(&bound.value, bound.stored));
        tensors.insert(format!("{name}.bound"), rounded_up(&bound.bound));
        let pairs = bound.as_right.iter().flat_map(|(at, values)| values.iter().map(|x| [*at, *x]));
        let pairs: Vec<i64> = pairs.flatten().map(|x| x as i64).collect();
        if !pairs.is_empty() {
            let as_right = Tensor { shape: vec![pairs.len() / 2, 2], data: Data::I64(pairs) };
            tensors.insert(format!("{name}.as_right"), as_right);
        }
    }
    if generic(problem, *pass, inputs).is_ok() {
        let kernels = Kernels::new(problem, *pass, *dtype, profile, inputs, &exact)?;
        for (name, errors) in Typical::new(&kernels)?.errors {
            let count = errors.len().max(1) as f64;
            let squares = errors.iter().map(|x| x * x).reduce(|sum, x| sum + x);
            let sigma = squares.map(|sum| sum.mapv(|x| (x / count).sqrt()));
            sigma.map(|sigma| tensors.insert(format!("{name}.sigma"), rounded_up(&sigma)));
        }
    }
    Ok(tensors)
}

/// Numbers that are not negative in f32, none smaller than it was.
fn rounded_up(x: &ArrayD<f64>) -> Tensor {
    let up = |&x: &f64| {
        let near = x as f32;
        if f64::from(near) < x { near.next_up() } else { near }
    };
    Tensor { shape: x.shape().to_vec(), data: Data::F32(x.iter().map(up).collect()) }
}

/// The types of the results of a question.
pub(super) fn outputs(question: &Question) -> BTreeMap<String, OutputType> {
    let types = Types::from(question.dtype);
    let operands = question.problem.operands(question.pass).into_iter();
    let own = operands.filter(|x| x.role == Role::Output).map(|x| {
        let dtype = match types.of(&x) {
            Stored::Float(dtype) => dtype.to_string(),
            Stored::Integer => "i64".to_string(),
        };
        (x.name.to_string(), OutputType { shape: x.shape, dtype })
    });
    own.collect()
}

/// A vector in the making: its entry, its hash, and its files.
struct Made {
    entry: Entry,
    digest: String,
    files: Vec<(String, Vec<u8>)>,
}

impl Made {
    fn file(&mut self, name: String, content: Vec<u8>) -> StoredFile {
        let (bytes, sha256) = (content.len() as u64, sha256(&content));
        self.files.push((name.clone(), content));
        StoredFile { file: name, bytes, sha256 }
    }

    fn new(id: &str, result: Validity, flags: Vec<String>, problem: &str) -> Result<Self, String> {
        let of = id.split('.').next().unwrap_or_default();
        let algorithm = of.parse().map_err(|error: Error| error.to_string())?;
        let (bytes, text) = (problem.len() as u64, problem.as_bytes().to_vec());
        let problem = StoredFile { file: format!("{id}.json"), bytes, sha256: sha256(&text) };
        let files = vec![(problem.file.clone(), text)];
        let entry = Entry {
            id: id.to_string(),
            result,
            flags,
            algorithm,
            problem,
            error: None,
            pass: None,
            dtype: None,
            profile: None,
            tensors: None,
            outputs: BTreeMap::new(),
            probe: None,
        };
        Ok(Made { entry, digest: String::new(), files })
    }
}

/// A valid vector, with the bounds of a kernel of that profile.
fn valid(
    listed: &Listed,
    questions: usize,
    profile: &dyn Fn(Dtype) -> Profile,
) -> Result<Made, String> {
    let id = listed.id.to_string();
    let question = listed.id.question()?;
    let (text, inputs) = (problem_text(&question)?, input_bytes(&question)?);
    let profile = profile(question.dtype);
    let mut made = Made::new(&id, Validity::Valid, listed.flags.clone(), &text)?;
    made.digest = hash_of(&id, &text, &inputs);
    let mut tensors = question.tensors().map_err(|error| error.to_string())?;
    tensors.extend(expected(&question, &profile).map_err(|error| format!("{id}: {error}"))?);
    let name = format!("{id}.safetensors");
    let bytes = to_bytes(Path::new(&name), &tensors).map_err(|error| error.to_string())?;
    let tensors = made.file(name, bytes);
    let probe = listed.id.probe();
    let probe = probe.map(|(x, question)| ProbeOf { law: x.law, question, of: questions });
    made.entry = Entry {
        pass: Some(question.pass),
        dtype: Some(question.dtype),
        profile: Some(profile.name.to_string()),
        tensors: Some(tensors),
        outputs: outputs(&question),
        probe,
        ..made.entry
    };
    Ok(made)
}

fn invalid(of: &Invalid) -> Result<Made, String> {
    let flags = vec![REFUSAL.to_string()];
    let mut made = Made::new(of.id, Validity::Invalid, flags, of.problem)?;
    made.digest = hash_of(of.id, of.problem, &[]);
    let (_, text) = refusal(of.problem).ok_or_else(|| format!("{}: etalon takes it", of.id))?;
    made.entry.error = Some(Refusal { name: of.name.to_string(), text });
    Ok(made)
}

/// The SHA-256 of a set: of a line with the id and the hash of each vector.
pub fn whole<'a>(vectors: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let lines = vectors.into_iter().map(|(id, sha256)| format!("{id} {sha256}\n"));
    sha256(lines.collect::<String>().as_bytes())
}

/// The bugs by name.
pub fn flags<'a>(
    names: impl IntoIterator<Item = &'a str>,
) -> Result<BTreeMap<String, Flag>, String> {
    let names: BTreeSet<&str> = names.into_iter().collect();
    let flag = |name: &str| -> Result<Flag, String> {
        if name == REFUSAL {
            let text = "A problem that has no meaning is computed all the same.".to_string();
            return Ok(Flag { text, address: None });
        }
        let bug = mutant(name).ok_or_else(|| format!("there is no bug `{name}`"))?;
        let address = (!bug.address.is_empty()).then(|| bug.address.to_string());
        Ok(Flag { text: bug.story.to_string(), address })
    };
    names.into_iter().map(|name| Ok((name.to_string(), flag(name)?))).collect()
}

/// The files of the core set by name, the manifest last, on the threads of the current pool: bounds are those of
/// kernels of a profile, by storage type, which must have a name.
pub fn files(
    profile: &(dyn Fn(Dtype) -> Profile + Sync),
    progress: Progress<'_>,
) -> Result<Vec<(String, Vec<u8>)>, String> {
    let list = core().map_err(|error| error.to_string())?;
    let same_probe = |x: &&Listed, id: &Id| matches!((x.id.probe(), id.probe()), (Some((a, _)), Some((b, _))) if a == b);
    let questions = |id: &Id| list.iter().filter(|x| same_probe(x, id)).count();
    let done = AtomicUsize::new(0);
    let all = list.len();
    let make = |listed: &Listed| {
        let made = valid(listed, questions(&listed.id), profile)?;
        progress(done.fetch_add(1, Ordering::Relaxed) + 1, all, &made.entry.id);
        Ok(made)
    };
    let mut made = list.par_iter().map(make).collect::<Result<Vec<_>, String>>()?;
    for of in INVALID {
        made.push(invalid(of)?);
    }
    let digest = whole(made.iter().map(|x| (x.entry.id.as_str(), x.digest.as_str())));
    let flags = flags(made.iter().flat_map(|x| x.entry.flags.iter().map(String::as_str)))?;
    let (vectors, files): (Vec<Entry>, Vec<_>) =
        made.into_iter().map(|x| (x.entry, x.files)).unzip();
    let etalon = env!("CARGO_PKG_VERSION").to_string();
    let (set, seal) = (CORE.to_string(), NO_SEAL.to_string());
    let manifest = Manifest { schema: SCHEMA, etalon, set, digest, seal, flags, vectors };
    let text = serde_json::to_string_pretty(&manifest).map_err(|error| error.to_string())?;
    let mut files: Vec<(String, Vec<u8>)> = files.into_iter().flatten().collect();
    files.push((INDEX.to_string(), sealed(&text).into_bytes()));
    Ok(files)
}

/// The text of a manifest with the seal in its place.
fn sealed(text: &str) -> String {
    text.replacen(NO_SEAL, &sha256(text.as_bytes()), 1)
}

/// Tells whether a manifest is as it was written: its text with zeros in the place of the seal has that hash.
pub(super) fn is_sealed(text: &str, seal: &str) -> bool {
    seal.len() == NO_SEAL.len() && sha256(text.replacen(seal, NO_SEAL, 1).as_bytes()) == seal
}
