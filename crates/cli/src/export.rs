//! `etalon export`: the set of test vectors as files.

use crate::options::{self, Claim};
use crate::outcome::{Failure, Outcome, say};
use crate::output;
use crate::page::quoted;
use crate::progress::Progress;
use crate::table::page;
use crate::units::counted;
use etalon_conformance::profile::Profile;
use etalon_conformance::report::Status;
use etalon_conformance::vector_set::{INDEX, files};
use etalon_problem::Dtype;
use std::path::PathBuf;
use std::time::Duration;

const FILES: &str = "\
manifest.json lists the vectors; of each ID.json has the problem and ID.safetensors the inputs, exact results and \
bounds. A kernel writes the results of vector ID to ID.safetensors in another folder, or ID.refused for an invalid \
problem; `etalon check DIR OUTPUTS` judges them. docs/guide.md describes the files, and examples/vectors/reader.py \
reads them without etalon.";

#[derive(Debug, clap::Args)]
#[command(after_help = FILES)]
pub struct Arguments {
    /// The folder, which must not be there yet, or be empty.
    dir: PathBuf,
    /// The arithmetic to which the bounds belong: a profile of `etalon list`; usual: the one that goes with the type
    /// of q, or h.
    #[arg(long, value_name = "NAME", default_value = "usual")]
    profile: String,
    #[command(flatten)]
    threads: options::Threads,
}

/// Interval between lines of progress.
const INTERVAL: Duration = Duration::from_secs(10);

pub fn run(arguments: &Arguments) -> Outcome {
    let claim = options::claim(&arguments.profile)?;
    match claim {
        Claim::Auto => {
            return Err(Failure("--profile auto needs the results of a kernel".to_string()));
        }
        Claim::Profile(profile) if Profile::by_name(profile.name).is_err() => {
            let reason = "a file of one's own has no name that vectors could state: take a profile of `etalon list`";
            return Err(Failure(format!("--profile: {reason}")));
        }
        _ => {}
    }
    let profile = |dtype: Dtype| claim.of(dtype).unwrap_or_else(|| Profile::flash(dtype));
    let folder = output::Folder::new(&arguments.dir)?;
    let files = arguments.threads.pool()?.install(|| {
        let progress = Progress::on_terminal(INTERVAL);
        let files = files(&profile, &|done, all, what| progress.report(done, all, what));
        progress.finish();
        files
    })?;
    let vectors = files.iter().filter(|(name, _)| name.ends_with(".json") && name != INDEX);
    let (vectors, bytes) = (vectors.count(), files.iter().map(|(_, x)| x.len()).sum::<usize>());
    for (name, content) in &files {
        folder.write(name, content)?;
    }
    folder.finish()?;
    let (vectors, size) = (counted(vectors, "vector"), bytes as f64 / 1e6);
    let next = "Write the outputs of each to a folder of their own, as ID.safetensors, then:";
    say(&page(&format!("{vectors}, {size:.1} MB. {next}")))?;
    say(&format!("  etalon check {} OUTPUTS", quoted(&arguments.dir)))?;
    Ok(Status::Passed)
}
