//! The folder of a list of probes: what stands in which file.

use crate::outcome::Failure;
use crate::{advice, memory, output};
use etalon_conformance::capabilities::Capabilities;
use etalon_conformance::questions::{Answers, Given, Probe, Question};
use etalon_conformance::tensor::Tensors;
use etalon_conformance::vectors;
use etalon_problem::{Dtype, Error, Pass, Problem};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The file of a folder of probes that lists them.
pub const INDEX: &str = "probes.json";

/// The version of the form of these folders.
pub const SCHEMA: u32 = 2;

/// A list of probes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    pub schema: u32,
    pub etalon: String,
    /// The problems that somebody brought.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<Brought>,
    /// The problems that the kernel takes, if they were declared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Capabilities>,
    /// The probes that are asked.
    pub probes: Vec<Entry>,
    /// The others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_asked: Vec<NotAsked>,
}

/// A probe, and its questions, each a folder.
#[derive(Debug, Serialize, Deserialize)]
pub struct Entry {
    #[serde(flatten)]
    pub probe: Probe,
    pub folders: Vec<String>,
}

/// A probe that is not asked, and why.
#[derive(Debug, Serialize, Deserialize)]
pub struct NotAsked {
    #[serde(flatten)]
    pub probe: Probe,
    pub reason: String,
}

/// A problem that somebody brought: NAME.json has it, NAME.safetensors the arrays that its mask names.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Brought {
    pub name: String,
    pub dtype: Dtype,
    pub seed: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cotangents: Vec<String>,
}

/// The question of a folder.
#[derive(Debug, Serialize, Deserialize)]
struct Asked {
    algorithm: String,
    pass: String,
    dtype: String,
}

/// Tells whether a name is that of a file or folder in the folder, and leads nowhere else.
pub fn is_plain(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|x| x == name)
}

/// Writes a problem that somebody brought, with the arrays that its mask names.
pub fn write_given(draft: &output::Folder, given: &Given) -> Result<Brought, Failure> {
    let Given { name, problem, dtype, seed, cotangents } = given;
    draft.write(&format!("{name}.json"), serde_json::to_string_pretty(problem)?.as_bytes())?;
    if !problem.arrays().is_empty() {
        let (inputs, pass, dtype) = (Tensors::new(), Pass::Forward, *dtype);
        let question = Question { problem: problem.clone(), pass, dtype, inputs };
        let file = format!("{name}.safetensors");
        draft.write(&file, &vectors::to_bytes(Path::new(&file), &question.tensors()?)?)?;
    }
    let (name, cotangents) = (name.clone(), cotangents.clone());
    Ok(Brought { name, dtype: *dtype, seed: *seed, cotangents })
}

/// Reads a problem that somebody brought.
pub fn read_given(root: &Path, brought: &Brought) -> Result<Given, Failure> {
    let Brought { name, dtype, seed, cotangents } = brought;
    if !is_plain(name) {
        return Err(Error::value("problems", "names of files", name).into());
    }
    let [file, arrays] = ["json", "safetensors"].map(|kind| root.join(format!("{name}.{kind}")));
    let tensors = match arrays.exists() {
        true => vectors::read_tensors(&arrays, memory::available())?,
        false => Tensors::new(),
    };
    let problem = advice::read_problem(&file, &arrays, &tensors)?;
    let (name, cotangents) = (name.clone(), cotangents.clone());
    Ok(Given { name, problem, dtype: *dtype, seed: *seed, cotangents })
}

/// Writes a question into a folder of its own.
pub fn write_question(
    draft: &output::Folder,
    name: &str,
    question: &Question,
) -> Result<(), Failure> {
    let asked = Asked {
        algorithm: question.problem.algorithm().to_string(),
        pass: question.pass.to_string(),
        dtype: question.dtype.to_string(),
    };
    let file = |file: &str| format!("{name}/{file}");
    draft.write(&file("question.json"), serde_json::to_string_pretty(&asked)?.as_bytes())?;
    let problem = serde_json::to_string_pretty(&question.problem)?;
    draft.write(&file("problem.json"), problem.as_bytes())?;
    let inputs = file("inputs.safetensors");
    draft.write(&inputs, &vectors::to_bytes(Path::new(&inputs), &question.tensors()?)?)
}

/// The questions of a probe and their answers, in a folder each.
pub struct Folders<'a> {
    pub root: &'a Path,
    pub names: &'a [String],
}

impl Folders<'_> {
    fn folder(&self, number: usize) -> Result<PathBuf, String> {
        let missing = "it has fewer questions than this version of etalon asks";
        Ok(self.root.join(self.names.get(number).ok_or(missing)?))
    }

    fn read(&self, number: usize) -> Result<Question, Failure> {
        let folder = self.folder(number)?;
        let path = folder.join("question.json");
        let asked: Asked = vectors::parse_json(&path, "question", &vectors::read_text(&path)?)?;
        let (pass, dtype): (Pass, Dtype) = (asked.pass.parse()?, asked.dtype.parse()?);
        let input = folder.join("inputs.safetensors");
        let tensors = vectors::read_tensors(&input, memory::available())?;
        let problem: Problem =
            advice::read_problem(&folder.join("problem.json"), &input, &tensors)?;
        let arrays = problem.arrays();
        let mut inputs = tensors;
        inputs.retain(|name, _| !arrays.iter().any(|(array, _)| array == name));
        Ok(Question { problem, pass, dtype, inputs })
    }

    /// Tells whether any question is answered.
    pub fn any_answer(&self) -> bool {
        self.names.iter().any(|name| self.root.join(name).join(ANSWER).exists())
    }
}

/// The file of an answer.
const ANSWER: &str = "outputs.safetensors";

impl Answers for Folders<'_> {
    fn question(&self, number: usize) -> Result<Question, String> {
        self.read(number).map_err(|Failure(reason)| reason)
    }

    fn answer(&self, number: usize) -> Result<Option<Tensors>, String> {
        let path = self.folder(number)?.join(ANSWER);
        if !path.exists() {
            return Ok(None);
        }
        let outputs = vectors::read_tensors(&path, memory::available());
        outputs.map(Some).map_err(|error| error.to_string())
    }
}
