//! Reading a set: whatever is not as it was written is an error that names the file.

use super::make::{is_sealed, outputs};
use super::manifest::{Entry, INDEX, Manifest, OutputType, SCHEMA, StoredFile, Validity};
use super::{CORE, recorded, sha256};
use crate::bounds::{Bound, Bounds};
use crate::questions::Question;
use crate::tensor::{Data, Stored, Tensor, Tensors};
use crate::types::Types;
use crate::vectors::{Error, at_most, from_bytes, parse_json, parse_problem};
use etalon_problem::{Dtype, Error as ProblemError, Operand, Role, find, shortened};
use ndarray::{ArrayD, IxDyn};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The most bytes of a manifest.
const MANIFEST: u64 = 64 << 20;

/// The most characters of a name that an error repeats.
const NAME: usize = 200;

/// A set in a folder, of which the manifest and the list of files are as they were written.
#[derive(Debug, Clone)]
pub struct Set {
    root: PathBuf,
    /// The manifest.
    pub manifest: Manifest,
}

/// A valid vector with all that judges it.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The problem and its inputs.
    pub question: Question,
    /// The exact results with their bounds.
    pub bounds: Bounds,
}

fn wrong(path: &Path, reason: impl Into<String>) -> Error {
    Error::Format { path: path.to_path_buf(), reason: reason.into() }
}

impl Set {
    /// Reads the manifest of a folder. Fails where it is not as it was written, where its schema or its set is not one
    /// that this version of etalon knows, and where the folder holds other files or lacks some.
    pub fn read(root: &Path) -> Result<Set, Error> {
        let path = root.join(INDEX);
        let manifest = manifest(&path)?;
        check_entries(&manifest).map_err(|reason| wrong(&path, reason))?;
        let ours = manifest.etalon == env!("CARGO_PKG_VERSION");
        match recorded(&manifest.etalon, &manifest.set) {
            Some(digest) if digest != manifest.digest => {
                let found = shortened(&manifest.digest, NAME);
                let reason = format!(
                    "the digest of etalon {} must be {digest}, found {found}",
                    manifest.etalon
                );
                return Err(wrong(&path, reason));
            }
            None if ours => {
                let found = shortened(&manifest.set, NAME);
                return Err(wrong(&path, format!("`set` must be {CORE}, found {found}")));
            }
            _ => {}
        }
        let set = Set { root: root.to_path_buf(), manifest };
        set.check_folder()?;
        Ok(set)
    }

    /// The files that the manifest names.
    fn files(&self) -> impl Iterator<Item = &StoredFile> {
        self.manifest.vectors.iter().flat_map(|x| [Some(&x.problem), x.tensors.as_ref()]).flatten()
    }

    /// Fails unless the folder holds the manifest and the files that it names, and nothing else.
    fn check_folder(&self) -> Result<(), Error> {
        let mut expected: BTreeSet<&str> = self.files().map(|x| x.file.as_str()).collect();
        expected.insert(INDEX);
        let unreadable = |source| Error::Read { path: self.root.clone(), source };
        for found in fs::read_dir(&self.root).map_err(unreadable)? {
            let name = found.map_err(unreadable)?.file_name();
            let name = name.to_string_lossy();
            if !expected.remove(name.as_ref()) {
                let path = self.root.join(shortened(&name, NAME));
                return Err(wrong(&path, format!("no file of the set: {INDEX} does not name it")));
            }
        }
        match expected.first() {
            Some(name) => {
                Err(wrong(&self.root.join(name), format!("is missing: {INDEX} names it")))
            }
            None => Ok(()),
        }
    }

    /// The bytes of a file of the set. No more is read than it should have.
    fn bytes(&self, file: &StoredFile, memory: u64) -> Result<Vec<u8>, Error> {
        let path = self.root.join(&file.file);
        let length = length(&path)?;
        if length != file.bytes {
            let reason = format!("must have {} bytes, found {length}", file.bytes);
            return Err(wrong(&path, reason));
        }
        if length > memory / 4 {
            let reason =
                format!("takes {length} bytes and their numbers, and {memory} bytes are available");
            return Err(wrong(&path, reason));
        }
        let bytes = at_most(&path, length)?;
        match sha256(&bytes) {
            found if found == file.sha256 => Ok(bytes),
            found => {
                Err(wrong(&path, format!("its SHA-256 must be {}, found {found}", file.sha256)))
            }
        }
    }

    /// The text of a problem.
    pub fn problem(&self, entry: &Entry, memory: u64) -> Result<String, Error> {
        let bytes = self.bytes(&entry.problem, memory)?;
        let path = self.root.join(&entry.problem.file);
        String::from_utf8(bytes).map_err(|_| wrong(&path, "no JSON text: it is not UTF-8"))
    }

    /// A valid vector. `memory` is what may be used, in bytes.
    pub fn load(&self, entry: &Entry, memory: u64) -> Result<Loaded, Error> {
        let Entry { id, pass: Some(pass), dtype: Some(dtype), tensors: Some(file), .. } = entry
        else {
            return Err(wrong(&self.root.join(INDEX), format!("{} is no valid vector", entry.id)));
        };
        let path = self.root.join(&file.file);
        let all = from_bytes(&path, &self.bytes(file, memory)?)?;
        let is_expected = |name: &str| name.contains('.');
        let (mut expected, mut inputs) = (Tensors::new(), Tensors::new());
        for (name, tensor) in all {
            let of = if is_expected(&name) { &mut expected } else { &mut inputs };
            of.insert(name, tensor);
        }
        let problem = self.root.join(&entry.problem.file);
        let problem = parse_problem(&problem, &self.problem(entry, memory)?, &path, &inputs)?;
        let arrays = problem.arrays();
        inputs.retain(|name, _| !arrays.iter().any(|(array, _)| array == name));
        let question = Question { problem, pass: *pass, dtype: *dtype, inputs };
        let misfit = |error| Error::content(&path, error);
        check_inputs(&question).map_err(misfit)?;
        let bounds = stored_bounds(&question, expected).map_err(misfit)?;
        if question.problem.algorithm() != entry.algorithm {
            let (expected, found) = (entry.algorithm, question.problem.algorithm());
            return Err(wrong(&path, format!("{id} must be of {expected}, found {found}")));
        }
        let expected = outputs(&question);
        if entry.outputs != expected {
            let differ = |name: &&String| entry.outputs.get(*name) != expected.get(*name);
            let names = expected.keys().chain(entry.outputs.keys());
            let name = names.into_iter().find(differ).map_or("", String::as_str);
            let [expected, found] = [&expected, &entry.outputs].map(|x| described(x.get(name)));
            let name = shortened(name, NAME);
            let reason = format!("the output `{name}` of {id} must be {expected}, found {found}");
            return Err(wrong(&self.root.join(INDEX), reason));
        }
        Ok(Loaded { question, bounds })
    }
}

/// Shape and type of a result in words.
fn described(output: Option<&OutputType>) -> String {
    let Some(OutputType { shape, dtype }) = output else { return "absent".to_string() };
    shortened(&format!("{dtype} {shape:?}"), NAME)
}

/// The length of a file. Others, such as pipes, would be waited for.
fn length(path: &Path) -> Result<u64, Error> {
    let found = fs::metadata(path);
    let found = found.map_err(|source| Error::Read { path: path.to_path_buf(), source })?;
    if found.is_file() { Ok(found.len()) } else { Err(wrong(path, "it is not a regular file")) }
}

/// Reads a manifest that is as it was written.
fn manifest(path: &Path) -> Result<Manifest, Error> {
    /// The key that every version has.
    #[derive(Deserialize)]
    struct Version {
        schema: Value,
    }
    length(path)?;
    let bytes = at_most(path, MANIFEST)?;
    let text =
        String::from_utf8(bytes).map_err(|_| wrong(path, "no JSON text: it is not UTF-8"))?;
    let Version { schema } = parse_json(path, "manifest", &text)?;
    if schema != SCHEMA {
        let found = shortened(&schema.to_string(), NAME);
        return Err(wrong(path, format!("`schema` must be {SCHEMA}, found {found}")));
    }
    let manifest: Manifest = parse_json(path, "manifest", &text)?;
    match is_sealed(&text, &manifest.seal) {
        true => Ok(manifest),
        false => {
            let reason =
                "it was changed: its SHA-256, with 64 zeros in the place of `seal`, is not `seal`";
            Err(wrong(path, reason))
        }
    }
}

/// Fails unless ids and names of files are plain and differ, and every vector has what it needs.
fn check_entries(manifest: &Manifest) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for entry in &manifest.vectors {
        let id = shortened(&entry.id, NAME);
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-=".contains(c);
        if entry.id.is_empty() || entry.id.starts_with('.') || !entry.id.chars().all(plain) {
            return Err(format!("an id must be letters, digits and . _ - =, found `{id}`"));
        }
        if !seen.insert(entry.id.as_str()) {
            return Err(format!("the id {id} is there twice"));
        }
        let files =
            [Some((&entry.problem, "json")), entry.tensors.as_ref().map(|x| (x, "safetensors"))];
        for (file, kind) in files.into_iter().flatten() {
            let expected = format!("{}.{kind}", entry.id);
            if file.file != expected {
                let found = shortened(&file.file, NAME);
                return Err(format!("a file of {id} must be {expected}, found {found}"));
            }
        }
        let has = [
            entry.pass.is_some(),
            entry.dtype.is_some(),
            entry.profile.is_some(),
            entry.tensors.is_some(),
        ];
        let whole = match entry.result {
            Validity::Valid => has == [true; 4] && entry.error.is_none(),
            Validity::Invalid => {
                has == [false; 4] && entry.error.is_some() && entry.probe.is_none()
            }
        };
        if !whole {
            let needs = match entry.result {
                Validity::Valid => "pass, dtype, profile and tensors, and no error",
                Validity::Invalid => "an error, and no pass, dtype, profile, tensors or probe",
            };
            return Err(format!("{id} must have {needs}"));
        }
        if let Some(name) = entry.flags.iter().find(|name| !manifest.flags.contains_key(*name)) {
            return Err(format!("the flag `{}` of {id} is not in `flags`", shortened(name, NAME)));
        }
    }
    Ok(())
}

/// Fails unless the inputs are those of the pass, in their shapes and types.
fn check_inputs(question: &Question) -> Result<(), ProblemError> {
    let Question { problem, pass, dtype, inputs } = question;
    let table = problem.checked_table(*pass)?;
    let mut all = Vec::new();
    for (name, tensor) in inputs {
        if !find(&table.operands, name).is_some_and(|x| x.role.is_given()) {
            return Err(ProblemError::unexpected(name, None));
        }
        all.push((name.as_str(), tensor.shape.as_slice(), tensor.view(name)?.stored()));
    }
    let found = table.check_tensors(all.into_iter(), std::iter::empty(), true)?;
    if found == *dtype {
        return Ok(());
    }
    let operand = table.operands.first().map_or("", |x| x.name).to_string();
    Err(ProblemError::Dtype { operand, expected: dtype.to_string(), found: found.to_string() })
}

/// The exact results and bounds of a file. Fails where they are not those of the pass.
fn stored_bounds(question: &Question, mut tensors: Tensors) -> Result<Bounds, ProblemError> {
    let types = Types::from(question.dtype);
    let operands = question.problem.operands(question.pass);
    let mut outputs = BTreeMap::new();
    for operand in operands.iter().filter(|x| x.role == Role::Output) {
        let stored = types.of(operand);
        outputs.insert(operand.name.to_string(), stored_bound(operand, stored, &mut tensors)?);
    }
    match tensors.keys().next() {
        Some(name) => Err(ProblemError::unexpected(name, None)),
        None => Ok(Bounds { outputs, power: None }),
    }
}

fn stored_bound(
    operand: &Operand,
    stored: Stored,
    tensors: &mut Tensors,
) -> Result<Bound, ProblemError> {
    let mut take = |part: &str, expected: Stored, optional: bool| {
        let name = format!("{}.{part}", operand.name);
        let Some(tensor) = tensors.remove(&name) else {
            return if optional { Ok(None) } else { Err(ProblemError::missing(&name, None)) };
        };
        ProblemError::expect_shape(&name, &operand.shape, &tensor.shape)?;
        if tensor.stored() != Some(expected) {
            let (expected, found) = (expected.to_string(), tensor.type_name().to_string());
            return Err(ProblemError::Dtype { operand: name, expected, found });
        }
        tensor.numbers(&name).map(Some)
    };
    let wide = Stored::of(operand.precision, Dtype::F64);
    let empty = || ArrayD::zeros(IxDyn(&operand.shape));
    let value = take("exact", wide, false)?.unwrap_or_else(empty);
    let bound = take("bound", Stored::Float(Dtype::F32), false)?.unwrap_or_else(empty);
    if bound.iter().any(|x| x.is_nan() || *x < 0.0) {
        return Err(ProblemError::value(
            format!("{}.bound", operand.name),
            "0 or more",
            "less, or NaN",
        ));
    }
    take("sigma", Stored::Float(Dtype::F32), true)?;
    let as_right = as_right(operand, tensors.remove(&format!("{}.as_right", operand.name)))?;
    let largest = stored.dtype().map_or(f64::INFINITY, Dtype::max);
    Ok(Bound { value, bound, stored: wide, largest, no_bound: BTreeMap::new(), as_right })
}

/// Elements of integers that are as right as the exact one.
fn as_right(
    operand: &Operand,
    tensor: Option<Tensor>,
) -> Result<BTreeMap<usize, Vec<usize>>, ProblemError> {
    let mut list: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    let Some(tensor) = tensor else { return Ok(list) };
    let name = format!("{}.as_right", operand.name);
    let Data::I64(pairs) = &tensor.data else {
        let (expected, found) = ("i64".to_string(), tensor.type_name().to_string());
        return Err(ProblemError::Dtype { operand: name, expected, found });
    };
    ProblemError::expect_shape(&name, &[pairs.len() / 2, 2], &tensor.shape)?;
    for pair in pairs.chunks_exact(2) {
        let numbers = (usize::try_from(pair[0]), usize::try_from(pair[1]));
        let (Ok(at), Ok(value)) = numbers else {
            return Err(ProblemError::value(
                name,
                "places and values of 0 or more",
                pair[0].min(pair[1]),
            ));
        };
        if at >= operand.len() {
            return Err(ProblemError::value(name, format!("places below {}", operand.len()), at));
        }
        list.entry(at).or_default().push(value);
    }
    Ok(list)
}
