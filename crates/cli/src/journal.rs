//! The cases of a run that are done, in a file: a run that was cut goes on where it stopped.

use crate::outcome::Failure;
use etalon_conformance::report::Record;
use etalon_conformance::suite;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The choices that make a run: its records are those of no other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The version of etalon.
    pub etalon: String,
    pub candidate: String,
    /// Capabilities as they were read, and the choices of the command line.
    pub capabilities: String,
    pub choices: String,
    pub seed: u64,
}

/// A case with its records.
#[derive(Serialize)]
struct Done<'a> {
    case: &'a str,
    records: &'a [Record],
}

/// A file with the cases that are done.
pub struct Journal {
    known: HashMap<String, Vec<Record>>,
    file: Mutex<File>,
    path: PathBuf,
    /// Why a case could not be written.
    failed: Mutex<Option<String>>,
}

impl Journal {
    /// The seed of the run in a file, if that holds one.
    pub fn seed(path: &Path) -> Result<Option<u64>, Failure> {
        Ok(first(path, &content(path)?)?.map(|run| run.seed))
    }

    /// Opens a file, and begins it where it is empty. Fails where it holds another run.
    pub fn open(path: &Path, run: &Run) -> Result<Self, Failure> {
        let text = content(path)?;
        let wrong = |error: &dyn std::fmt::Display| {
            Failure(format!("{}: cannot be written: {error}", path.display()))
        };
        let file = OpenOptions::new().append(true).create(true).open(path);
        let mut file = file.map_err(|error| wrong(&error))?;
        match first(path, &text)? {
            None => {
                let line = serde_json::to_string(run)? + "\n";
                file.write_all(line.as_bytes()).map_err(|error| wrong(&error))?;
            }
            Some(other) => same(path, &other, run)?,
        }
        // A line that was cut ends here; its case is judged again.
        if !text.is_empty() && !text.ends_with('\n') {
            file.write_all(b"\n").map_err(|error| wrong(&error))?;
        }
        let known = text.lines().skip(1).filter_map(read_line).collect();
        let (file, failed) = (Mutex::new(file), Mutex::default());
        Ok(Journal { known, file, path: path.to_path_buf(), failed })
    }

    /// The number of cases that earlier runs have done.
    pub fn count(&self) -> usize {
        self.known.len()
    }

    /// Fails where a case could not be written.
    pub fn check(&self) -> Result<(), Failure> {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        match &*failed {
            Some(why) => Err(Failure(format!("{}: cannot be written: {why}", self.path.display()))),
            None => Ok(()),
        }
    }
}

impl suite::Journal for Journal {
    fn known(&self, case: &str) -> Option<Vec<Record>> {
        self.known.get(case).cloned()
    }

    fn keep(&self, case: &str, records: &[Record]) {
        let line = serde_json::to_string(&Done { case, records }).map_err(|x| x.to_string());
        let written = line.and_then(|line| {
            let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
            file.write_all((line + "\n").as_bytes()).map_err(|error| error.to_string())
        });
        if let Err(why) = written {
            self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
        }
    }
}

/// The text of a file; none where there is no file.
fn content(path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let read = File::open(path).and_then(|mut file| file.read_to_string(&mut text));
    match read {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Failure(format!("{}: cannot be read: {error}", path.display())))
        }
        _ => Ok(text),
    }
}

/// The run of a text, if there is any.
fn first(path: &Path, text: &str) -> Result<Option<Run>, Failure> {
    let Some(line) = text.lines().next() else { return Ok(None) };
    let run = serde_json::from_str(line).map_err(|error| {
        let path = path.display();
        Failure(format!("{path}: line 1 must be that of a run which --continue has begun: {error}"))
    });
    run.map(Some)
}

/// Fails where a file holds another run.
fn same(path: &Path, other: &Run, run: &Run) -> Result<(), Failure> {
    let parts = [
        ("version of etalon", &other.etalon, &run.etalon),
        ("candidate", &other.candidate, &run.candidate),
        ("capabilities", &other.capabilities, &run.capabilities),
        ("choices", &other.choices, &run.choices),
        ("seed", &format!("{:#x}", other.seed), &format!("{:#x}", run.seed)),
    ];
    match parts.into_iter().find(|(_, other, run)| other != run) {
        None => Ok(()),
        Some((what, other, run)) => {
            let path = path.display();
            Err(Failure(format!(
                "{path}: it holds another run, whose {what} was {other}, not {run}: name another file"
            )))
        }
    }
}

fn read_line(line: &str) -> Option<(String, Vec<Record>)> {
    let mut line: Value = serde_json::from_str(line).ok()?;
    let case = line["case"].as_str()?.to_string();
    let records = line["records"].as_array_mut()?.iter_mut();
    let records: Result<_, String> = records.map(|x| Record::from_json(x.take())).collect();
    Some((case, records.ok()?))
}
