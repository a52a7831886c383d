//! `etalon verify`: every law on every tier present.

use super::table::table;
use super::{Failure, Outcome, options, say};
use etalon_conformance::cases::Depth;
use etalon_conformance::report::{self, Absent, Report};
use etalon_conformance::suite::{self, SuiteOptions};
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers;
use etalon_conformance::vectors::Draft;
use etalon_problem::{Algorithm, Error};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

/// As many negative verdicts are printed; reports hold all of them.
const SHOWN: usize = 20;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Tiers to judge (simd, simd/LEVEL, cuda, reference); all that are present if absent.
    #[arg(long, value_name = "T,…", value_delimiter = ',')]
    tier: Vec<String>,
    /// Algorithms; all if absent.
    #[arg(long, value_name = "A,…", value_delimiter = ',')]
    algorithm: Vec<Algorithm>,
    /// The level of the simd tier: portable, avx2, avx512, or all that this machine has.
    #[arg(long, value_name = "L", default_value = "all")]
    level: String,
    /// How much: core (under a minute on two cores), full, soak.
    #[arg(long, default_value = "core", value_parser = depth)]
    depth: Depth,
    /// The seed of the inputs, decimal or 0x….
    #[arg(long, default_value = "0", value_parser = options::seed)]
    seed: u64,
    /// Threads; as many as there are cores if absent.
    #[arg(long)]
    threads: Option<usize>,
    /// Writes a report: junit=PATH, json=PATH or md=PATH. May be given several times.
    #[arg(long, value_name = "KIND=PATH")]
    report: Vec<ReportFile>,
}

fn depth(name: &str) -> Result<Depth, Error> {
    Depth::ALL.into_iter().find(|depth| depth.name() == name).ok_or_else(|| {
        let names = Depth::ALL.map(Depth::name).join(", ");
        Error::value("depth", format!("one of {names}"), name)
    })
}

/// The form of a report.
#[derive(Debug, Clone, Copy)]
enum Form {
    Junit,
    Json,
    Markdown,
}

#[derive(Debug, Clone)]
struct ReportFile {
    form: Form,
    path: PathBuf,
}

impl FromStr for ReportFile {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || Error::value("report", "junit=PATH, json=PATH or md=PATH", text);
        let (form, path) = text.split_once('=').ok_or_else(wrong)?;
        let form = match form {
            "junit" => Form::Junit,
            "json" => Form::Json,
            "md" => Form::Markdown,
            _ => return Err(wrong()),
        };
        Ok(ReportFile { form, path: PathBuf::from(path) })
    }
}

impl Form {
    fn write(self, report: &Report) -> Result<String, Failure> {
        Ok(match self {
            Form::Junit => report::junit(report)?,
            Form::Json => report::json(report)?,
            Form::Markdown => report::markdown(report),
        })
    }
}

pub fn run(arguments: &Arguments) -> Outcome {
    let start = Instant::now();
    let (tiers, absent) = choose(arguments)?;
    // A path that cannot be written to shows now, not after the run.
    let drafts = arguments.report.iter().map(|file| Ok((file.form, Draft::new(&file.path)?)));
    let drafts = drafts.collect::<Result<Vec<_>, Failure>>()?;
    let pool = options::pool(arguments.threads)?;
    let mut options = SuiteOptions::own(tiers.iter().map(AsRef::as_ref).collect());
    options.depth = arguments.depth;
    options.seed = arguments.seed;
    if !arguments.algorithm.is_empty() {
        options.algorithms.clone_from(&arguments.algorithm);
    }
    let bar = progress_bar();
    let progress = |done: usize, all: usize, case: &str| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
        bar.set_message(case.to_string());
    };
    let mut report = pool.install(|| suite::run(&options, &progress));
    bar.finish_and_clear();
    report.absent.extend(absent);
    for (form, draft) in drafts {
        draft.finish(form.write(&report)?.as_bytes())?;
    }
    print(&report);
    say(&format!("{} ({:.1} s)", report.headline(), start.elapsed().as_secs_f64()));
    Ok(report.passed())
}

/// Tiers that are to be judged, and those that are not there.
type Choice = (Vec<Box<dyn Tier>>, Vec<Absent>);

fn choose(arguments: &Arguments) -> Result<Choice, Failure> {
    let (mut present, mut absent) = tiers::present();
    let wanted = |name: &str| {
        arguments.tier.is_empty() || arguments.tier.iter().any(|tier| options::is_named(name, tier))
    };
    for name in &arguments.tier {
        options::tier(name)?; // an unknown or absent tier that was asked for is an error
        if name == "reference" {
            present.push(Box::new(tiers::Reference));
        }
    }
    if arguments.level != "all" {
        let level = format!("simd/{}", arguments.level);
        options::tier(&level)?;
        let other = |name: &str| options::is_named(name, "simd") && name != level;
        present.retain(|tier| !other(&tier.name()));
        absent.retain(|absent| !other(&absent.tier));
    }
    present.retain(|tier| wanted(&tier.name()));
    absent.retain(|absent| wanted(&absent.tier));
    if present.is_empty() {
        return Err(Failure(
            "no tier is left to judge: --tier and --level exclude all".to_string(),
        ));
    }
    Ok((present, absent))
}

/// On a terminal a bar, in a pipe nothing.
fn progress_bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}");
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn print(report: &Report) {
    let mut rows = report.rows().into_iter();
    let mut table = table(&rows.next().unwrap_or_default());
    for row in rows {
        table.add_row(row);
    }
    say(&table.to_string());
    say("A cell: the worst margin, error ÷ proven bound (the number of checks).");
    let negative: Vec<_> = report.negative().collect();
    for (record, text) in negative.iter().take(SHOWN) {
        say(&format!("\n{} {} {}: {text}", record.tier, record.check, record.case));
    }
    if negative.len() > SHOWN {
        say(&format!("\n… and {} more; a report holds them all", negative.len() - SHOWN));
    }
    report.not_checked().iter().for_each(|line| say(&format!("not checked: {line}")));
    let absent = report.absent.iter();
    absent.for_each(|absent| say(&format!("absent: {}: {}", absent.tier, absent.reason)));
}
