//! `etalon probe`: the suite's probes as a folder of files, for a kernel in any language.

use crate::options::{self, one_of};
use crate::outcome::{Failure, Outcome, say};
use crate::page::quoted;
use crate::table::{Table, page};
use crate::units::counted;
use crate::{advice, memory, output};
use etalon_conformance::cases::storage;
use etalon_conformance::profile::Profile;
use etalon_conformance::questions::{Answers, Probe, Question, probes};
use etalon_conformance::report::{Status, Verdict};
use etalon_conformance::tensor::Tensors;
use etalon_conformance::vectors;
use etalon_problem::{Algorithm, Dtype, Error, Pass, shortened};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const FOLDERS: &str = "\
Every folder in DIR is a question: question.json has the algorithm, the pass and the type, problem.json and \
inputs.safetensors are as `eval` takes them. Your kernel writes outputs.safetensors beside them. A folder \
without it is not judged.";

#[derive(Debug, clap::Args)]
#[command(after_help = FOLDERS)]
pub struct Arguments {
    /// Writes the questions into this folder, which must not be there yet, or be empty.
    #[arg(long, value_name = "DIR", required_unless_present = "check", conflicts_with = "check")]
    out: Option<PathBuf>,
    /// Judges the answers in this folder.
    #[arg(long, value_name = "DIR")]
    check: Option<PathBuf>,
    /// Algorithms; all if absent.
    #[arg(long, value_name = "A,…", value_delimiter = ',', requires = "out",
        value_parser = one_of(Algorithm::ALL))]
    algorithm: Vec<Algorithm>,
    /// The storage type of the tensors.
    #[arg(long, default_value = "f32", conflicts_with = "check", value_parser = one_of(Dtype::ALL))]
    dtype: Dtype,
    /// The seed of the questions, decimal or 0x….
    #[arg(long, default_value = "0", conflicts_with = "check", value_parser = options::seed)]
    seed: u64,
    /// The arithmetic of the kernel, with --check: a profile of `etalon list` or declared in a file; usual: the
    /// one that goes with the type.
    #[arg(long, value_name = "NAME|FILE.json", default_value = "usual", conflicts_with = "out")]
    profile: String,
}

/// The file of a folder of probes that lists them.
const INDEX: &str = "probes.json";

/// The version of the form of these folders.
const SCHEMA: u32 = 1;

/// The most bytes of what an index lists, as characters of names.
const NAME: usize = 100;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    schema: u32,
    etalon: String,
    probes: Vec<Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    #[serde(flatten)]
    probe: Probe,
    /// Its questions, each a folder.
    folders: Vec<String>,
}

/// What a folder asks.
#[derive(Debug, Serialize, Deserialize)]
struct Asked {
    algorithm: String,
    pass: String,
    dtype: String,
}

pub fn run(arguments: &Arguments) -> Outcome {
    match (&arguments.out, &arguments.check) {
        (Some(folder), _) => write(arguments, folder),
        (None, Some(folder)) => judge(arguments, folder),
        (None, None) => Err(Failure("--out or --check is needed".to_string())),
    }
}

fn write(arguments: &Arguments, folder: &Path) -> Outcome {
    let wanted = |of: &Algorithm| {
        let named = arguments.algorithm.is_empty() || arguments.algorithm.contains(of);
        named && storage(*of).contains(&arguments.dtype)
    };
    let algorithms: Vec<Algorithm> = Algorithm::ALL.into_iter().filter(wanted).collect();
    let draft = output::Folder::new(folder)?;
    let (mut entries, mut number) = (Vec::new(), 0);
    for (probe, questions) in probes(&algorithms, arguments.dtype, arguments.seed) {
        let mut folders = Vec::new();
        for question in questions {
            number += 1;
            let Question { pass, .. } = question;
            let name = format!("{number:03}-{}-{}-{pass}", question.problem.algorithm(), probe.law);
            write_question(&draft, &name, &question)?;
            folders.push(name);
        }
        entries.push(Entry { probe, folders });
    }
    if entries.is_empty() {
        return Err(Failure(format!(
            "no probe is left of these algorithms in {}",
            arguments.dtype
        )));
    }
    let (probes, schema) = (entries.len(), SCHEMA);
    let index = Index { schema, etalon: env!("CARGO_PKG_VERSION").to_string(), probes: entries };
    draft.write(INDEX, serde_json::to_string_pretty(&index)?.as_bytes())?;
    draft.finish()?;
    let answers = "Answer each with outputs.safetensors in its folder, then:";
    let (probes, questions) = (counted(probes, "probe"), counted(number, "question"));
    say(&page(&format!("{probes}, {questions}. {answers}")))?;
    say(&format!("  etalon probe --check {}", quoted(folder)))?;
    Ok(Status::Passed)
}

fn write_question(draft: &output::Folder, name: &str, question: &Question) -> Result<(), Failure> {
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
    draft.write(&inputs, &vectors::to_bytes(Path::new(&inputs), &question.tensors())?)
}

/// The questions of a probe and their answers, in a folder each.
struct Folders<'a> {
    root: &'a Path,
    names: &'a [String],
}

impl Folders<'_> {
    fn folder(&self, number: usize) -> Result<PathBuf, String> {
        let missing = "it has fewer questions than this version of etalon asks";
        Ok(self.root.join(self.names.get(number).ok_or(missing)?))
    }

    fn read(&self, number: usize) -> Result<Question, Failure> {
        let folder = self.folder(number)?;
        let path = folder.join("question.json");
        let asked: Asked = vectors::json::parse(&vectors::read_text(&path)?).map_err(|error| {
            Failure(format!("{}: not a valid question: {error}", path.display()))
        })?;
        let (pass, dtype): (Pass, Dtype) = (asked.pass.parse()?, asked.dtype.parse()?);
        let input = folder.join("inputs.safetensors");
        let tensors = vectors::read_tensors(&input, memory::available())?;
        let problem = advice::read_problem(&folder.join("problem.json"), &input, &tensors)?;
        let arrays = problem.arrays();
        let mut inputs = tensors;
        inputs.retain(|name, _| !arrays.iter().any(|(array, _)| array == name));
        Ok(Question { problem, pass, dtype, inputs })
    }
}

impl Answers for Folders<'_> {
    fn question(&self, number: usize) -> Result<Question, String> {
        self.read(number).map_err(|Failure(reason)| reason)
    }

    fn answer(&self, number: usize) -> Result<Option<Tensors>, String> {
        let path = self.folder(number)?.join("outputs.safetensors");
        if !path.exists() {
            return Ok(None);
        }
        let outputs = vectors::read_tensors(&path, memory::available());
        outputs.map(Some).map_err(|error| error.to_string())
    }
}

fn judge(arguments: &Arguments, folder: &Path) -> Outcome {
    let path = folder.join(INDEX);
    let wrong = |reason: String| Failure(format!("{}: {reason}", path.display()));
    let index: Index = vectors::json::parse(&vectors::read_text(&path)?)
        .map_err(|error| wrong(format!("not a valid list of probes: {error}")))?;
    if index.schema != SCHEMA {
        return Err(Error::value("schema", SCHEMA.to_string(), index.schema).into());
    }
    let plain = |name: &String| Path::new(name).file_name().is_some_and(|x| x == name.as_str());
    let claim = options::claim(&arguments.profile)?;
    let mut verdicts = Vec::new();
    for Entry { probe, folders } in &index.probes {
        if let Some(name) = folders.iter().find(|name| !plain(name)) {
            return Err(wrong(Error::value("folders", "names of folders", name).to_string()));
        }
        let files = Folders { root: folder, names: folders };
        let profile = |dtype| claim.of(dtype).unwrap_or_else(|| Profile::flash(dtype));
        let verdict = probe.judge(profile, &files).map_err(|reason| {
            let name = folders.first().map_or("", String::as_str);
            wrong(format!("{}: {reason}", shortened(name, NAME)))
        })?;
        verdicts.push((probe, folders, verdict));
    }
    let failed = verdicts.iter().filter(|(.., verdict)| verdict.is_negative()).count();
    let passed = verdicts.iter().filter(|(.., verdict)| *verdict == Verdict::Pass).count();
    let silent = verdicts.len() - failed - passed;
    if passed + failed == 0 {
        let reason = "no folder holds outputs.safetensors: run your kernel on each first";
        return Err(Failure(format!("{}: {reason}", folder.display())));
    }
    say(&table(&verdicts))?;
    for (probe, folders, verdict) in &verdicts {
        if let Verdict::Fail(text) | Verdict::Vacuous(text) = verdict {
            say(&page(&format!("{} in {}: {text}", probe.law, folders.join(", "))))?;
        }
    }
    let word = if failed == 0 { "PASSED" } else { "FAILED" };
    let hold = if passed == 1 { "holds" } else { "hold" };
    let fail = if failed == 1 { "does" } else { "do" };
    let are = if silent == 1 { "is" } else { "are" };
    let passed = counted(passed, "probe");
    say(&format!("{word}: {passed} {hold}, {failed} {fail} not, {silent} {are} not answered"))?;
    Ok(if failed == 0 { Status::Passed } else { Status::Failed })
}

/// Probes by law and pass: how many hold, do not, and are not answered.
fn table(verdicts: &[(&Probe, &Vec<String>, Verdict)]) -> String {
    let mut counts: BTreeMap<(&str, &str, &str), [usize; 3]> = BTreeMap::new();
    for (probe, _, verdict) in verdicts {
        let algorithm = probe.case.split('/').next().unwrap_or_default();
        let counts = counts.entry((algorithm, &probe.law, &probe.pass)).or_default();
        let at = match verdict {
            Verdict::Pass => 0,
            Verdict::Unsupported(_) | Verdict::NotAsked(_) => 2,
            _ => 1,
        };
        counts[at] += 1;
    }
    let mut table = Table::new(["probe", "pass", "hold", "do not", "not answered"]);
    for ((algorithm, law, pass), counts) in counts {
        table.add_title(algorithm);
        let [good, bad, silent] = counts.map(|count| count.to_string());
        table.add_row([law, pass, &good, &bad, &silent]);
    }
    table.to_string()
}
