//! The forms of reports, and their files.

use crate::annotations::annotations;
use crate::badge::badge;
use crate::html::html;
use crate::junit::junit;
use crate::markdown::markdown;
use crate::options;
use crate::outcome::Failure;
use crate::output::{self, Given};
use crate::report::Report;
use etalon_conformance::vectors::Draft;
use etalon_problem::{Error, shortened};
use std::path::PathBuf;

/// A form of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A page with pictures.
    Html,
    /// For a pull request or the summary of a CI job.
    Markdown,
    /// For CI systems.
    Junit,
    /// For programs: everything.
    Json,
    /// For the output of a step of GitHub's actions.
    Annotations,
    /// For shields.io.
    Badge,
}

/// The most characters of a path in an error.
const SHOWN: usize = 300;

impl Form {
    const ALL: [(&'static str, Form); 6] = [
        ("html", Form::Html),
        ("md", Form::Markdown),
        ("junit", Form::Junit),
        ("json", Form::Json),
        ("annotations", Form::Annotations),
        ("badge", Form::Badge),
    ];
}

/// The reports of a command.
#[derive(Debug, clap::Args)]
pub struct Reports {
    /// Writes a report: html=PATH, md=PATH, junit=PATH, json=PATH, annotations=PATH or badge=PATH. May be
    /// given several times.
    #[arg(long = "report", value_name = "KIND=PATH", value_parser = file)]
    files: Vec<(Form, PathBuf)>,
}

/// Reads KIND=PATH.
fn file(text: &str) -> Result<(Form, PathBuf), Error> {
    options::report_file(text, &Form::ALL)
}

impl Reports {
    /// True if there are any.
    pub fn are_wanted(&self) -> bool {
        !self.files.is_empty()
    }

    /// True if one of them shows failures in detail.
    pub fn show_details(&self) -> bool {
        self.files.iter().any(|(form, _)| matches!(form, Form::Html | Form::Markdown))
    }

    /// Fails where a form is wanted that has nothing to show.
    pub fn refuse(&self, form: Form, reason: &str) -> Result<(), Failure> {
        let (name, _) = Form::ALL.into_iter().find(|(_, own)| *own == form).unwrap_or(Form::ALL[0]);
        match self.files.iter().any(|(own, _)| *own == form) {
            true => {
                Err(Failure(format!("--report {name}: there is none of this command: {reason}")))
            }
            false => Ok(()),
        }
    }

    /// Begins the files, of a command that reads some: a path that cannot be written to shows now, not after the run.
    pub fn begin(&self, given: &[Given<'_>]) -> Result<Drafts, Failure> {
        self.begin_beside(&[], given)
    }

    /// The same beside files that the command writes. No two may be the same: one would be lost.
    pub fn begin_beside(&self, others: &[&Draft], given: &[Given<'_>]) -> Result<Drafts, Failure> {
        let mut begun: Vec<(Form, Draft)> = Vec::new();
        for (form, path) in &self.files {
            let draft = Draft::new(path)?;
            let mut known = begun.iter().map(|(_, draft)| draft).chain(others.iter().copied());
            if known.any(|other| other.is_same_file(&draft)) {
                let path = shortened(&path.display().to_string(), SHOWN);
                return Err(Failure(format!("--report: {path} would be written twice")));
            }
            output::apart("--report", &draft, given)?;
            begun.push((*form, draft));
        }
        Ok(Drafts(begun))
    }
}

/// Files of reports that are begun.
pub struct Drafts(Vec<(Form, Draft)>);

impl Drafts {
    /// Writes all of them; `json` is the command's own. A command looks at the result after it has said its verdict.
    pub fn finish(
        self,
        report: &Report<'_>,
        json: &dyn Fn() -> Result<String, serde_json::Error>,
    ) -> Result<(), Failure> {
        self.0.into_iter().try_for_each(|(form, draft)| {
            let text = match form {
                Form::Html => html(report),
                Form::Markdown => markdown(report),
                Form::Junit => junit(report)?,
                Form::Json => json()?,
                Form::Annotations => annotations(report),
                Form::Badge => badge(report)?,
            };
            output::finish(draft, text.as_bytes())
        })
    }
}
