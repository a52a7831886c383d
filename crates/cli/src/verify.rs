//! `etalon verify`: every law on every tier present.

use crate::PROGRAM;
use crate::junit::junit;
use crate::live;
use crate::machine::{COMMIT, cpu};
use crate::markdown::markdown;
use crate::options;
use crate::outcome::{Failure, Outcome, say};
use crate::output::{self, Writer};
use crate::summary::{self, CELL};
use crate::table::Table;
use crate::units;
use chrono::{SecondsFormat, Utc};
use clap::builder::PossibleValuesParser;
use etalon_conformance::cases::{Depth, Spec};
use etalon_conformance::laws;
use etalon_conformance::report::{About, Absent, Record, Report, Simplest, json};
use etalon_conformance::suite::{self, Part, SuiteOptions};
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers::{self, Isolated, Server};
use etalon_problem::Error;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// As many negative verdicts are printed; reports hold all of them.
const SHOWN: usize = 20;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Tiers to check: simd, simd/LEVEL, cuda, cuda/LEVEL, reference; all that this machine has if absent.
    #[arg(long, value_name = "T,…", value_delimiter = ',')]
    tier: Vec<String>,
    /// The level of the simd tier: portable, avx2, avx512, or all that this machine has.
    #[arg(long, value_name = "L", default_value = "all")]
    level: String,
    /// The number of cases: smoke takes seconds, core about a minute on two cores, soak about an hour.
    #[arg(long, default_value = "core", value_parser = options::one_of(Depth::ALL))]
    depth: Depth,
    /// Judges one part of the cases alone, such as 2/5; all parts together are the whole run.
    #[arg(long, value_name = "K/N", value_parser = str::parse::<Part>)]
    part: Option<Part>,
    #[command(flatten)]
    run: options::Run,
    /// Judges these cases alone, by every law that applies; their names are those of reports.
    #[arg(long, value_name = "C,…", value_delimiter = ',', value_parser = str::parse::<Spec>,
        conflicts_with_all = ["depth", "algorithm", "seed"])]
    case: Vec<Spec>,
    /// The laws by which named cases are judged; all if absent.
    #[arg(long, value_name = "L,…", value_delimiter = ',', requires = "case", value_parser = laws())]
    law: Vec<String>,
    /// Passes though this share of the checks, from 0 to 1, is undecided.
    #[arg(long, value_name = "SHARE", default_value = "0", value_parser = options::share)]
    allow_undecided: f64,
    /// Computes cuda in this process, as debuggers want it; else in one of its own, so that a fault that ends the
    /// context of a device is one negative verdict.
    #[arg(long)]
    in_process: bool,
    /// Writes a report: junit=PATH, json=PATH or md=PATH. May be given several times.
    #[arg(long, value_name = "KIND=PATH", value_parser = report_file)]
    report: Vec<(Writer<Report>, PathBuf)>,
    #[command(flatten)]
    live: live::Arguments,
}

/// The names of all laws; some laws share one.
fn laws() -> PossibleValuesParser {
    let names: BTreeSet<&str> = laws::all().iter().map(|law| law.name).collect();
    PossibleValuesParser::new(names)
}

/// Reads KIND=PATH of a report of the suite.
pub fn report_file(text: &str) -> Result<(Writer<Report>, PathBuf), Error> {
    const FORMS: [(&str, Writer<Report>); 3] = [
        ("junit", |report| Ok(junit(report)?)),
        ("json", |report| Ok(json(report)?)),
        ("md", |report| Ok(markdown(report))),
    ];
    options::report_file(text, &FORMS)
}

pub fn run(arguments: &Arguments) -> Outcome {
    let (start, date) = (Instant::now(), Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true));
    let drafts = output::begin(&arguments.report)?;
    let (mut report, finding) = match arguments.live.is_wanted() {
        true => of_program(arguments)?,
        false => (of_tiers(arguments)?, None),
    };
    report.about = About { date: Some(date), cpu: cpu(), commit: COMMIT, ..report.about };
    output::finish_all(drafts, &report)?;
    if let Some(finding) = finding.as_ref().filter(|_| arguments.live.in_json()) {
        say(&finding.json()?)?;
        return Ok(report.status());
    }
    print(arguments, &report)?;
    for line in finding.iter().flat_map(live::Finding::lines) {
        say(&line)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    say(&format!("{}, {}", summary::headline(&report), units::time(seconds)))?;
    Ok(report.status())
}

/// The run of a program that somebody brings.
fn of_program(arguments: &Arguments) -> Result<(Report, Option<live::Finding>), Failure> {
    let asked = live::Asked {
        run: &arguments.run,
        depth: arguments.depth,
        part: arguments.part,
        cases: &arguments.case,
        laws: &arguments.law,
        allow_undecided: arguments.allow_undecided,
    };
    let live::Judged { report, finding } = live::judge(&arguments.live, &asked)?;
    Ok((report, Some(finding)))
}

/// The run of etalon's own tiers.
fn of_tiers(arguments: &Arguments) -> Result<Report, Failure> {
    let (tiers, absent) = choose(arguments)?;
    let mut options = SuiteOptions::own(tiers.iter().map(AsRef::as_ref).collect());
    options.depth = arguments.depth;
    options.seed = arguments.run.seed();
    options.algorithms = arguments.run.algorithms();
    options.laws = arguments.law.clone();
    options.part = arguments.part;
    options.allow_undecided = arguments.allow_undecided;
    if !arguments.case.is_empty() {
        options.cases = arguments.case.clone();
        options.algorithms.retain(|of| arguments.case.iter().any(|spec| spec.algorithm == *of));
    }
    let mut report = arguments.run.watch(|progress| suite::run(&options, progress))?;
    report.absent.extend(absent);
    Ok(report)
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
    if !arguments.in_process {
        present = isolated(present)?;
    }
    absent.retain(|absent| wanted(&absent.tier));
    if present.is_empty() {
        return Err(Failure(
            "no tier is left to judge: --tier and --level exclude all".to_string(),
        ));
    }
    Ok((present, absent))
}

/// The same with those of cuda in a process of their own.
fn isolated(tiers: Vec<Box<dyn Tier>>) -> Result<Vec<Box<dyn Tier>>, Failure> {
    if !tiers.iter().any(|tier| options::is_named(&tier.name(), "cuda")) {
        return Ok(tiers);
    }
    let own = || match PROGRAM.get() {
        Some(program) => Ok(program.clone()),
        None => std::env::current_exe().map(|own| vec![own.into_os_string()]),
    };
    let mut command = own().map_err(|error| Failure(format!("this program: {error}")))?;
    command.push("serve".into());
    let server = Arc::new(Server::new(command));
    let isolate = |tier: Box<dyn Tier>| -> Box<dyn Tier> {
        match options::is_named(&tier.name(), "cuda") {
            true => Box::new(Isolated::new(tier, server.clone())),
            false => tier,
        }
    };
    Ok(tiers.into_iter().map(isolate).collect())
}

fn print(arguments: &Arguments, report: &Report) -> Result<(), Failure> {
    let by_law = arguments.case.is_empty() && !arguments.law.is_empty();
    say(&match report.checks() == 0 && by_law {
        true => "Nothing was checked: --law judges the cases that --case names.".to_string(),
        false => text(report),
    })
}

/// A run in words: the table, what is wrong or undecided, and what was not checked.
pub(crate) fn text(report: &Report) -> String {
    let mut lines = match report.checks() {
        0 => vec!["Nothing was checked.".to_string()],
        _ => vec![table(report), CELL.to_string()],
    };
    lines.extend(report.negative().chain(report.undecided()).take(SHOWN).map(|record| {
        let reason = record.verdict.reason().unwrap_or_default();
        let (tier, check, case) = (&record.tier, &record.check, &record.case);
        format!("\n{} {tier} {check} {case}: {reason}", record.verdict.status())
    }));
    lines.extend(report.simplest.iter().map(|simplest| {
        let Simplest { of: Record { tier, check, pass, .. }, case, reason } = simplest;
        format!("\nsimplest case for {check} of {pass} on {tier}: {case}: {reason}")
    }));
    let hidden = report.negative().chain(report.undecided()).skip(SHOWN).count();
    if hidden > 0 {
        lines.push(format!("\n… and {hidden} more; a report holds them all"));
    }
    lines.extend(summary::not_checked(report).iter().map(|line| format!("not checked: {line}")));
    let absent = summary::absent(&report.absent).into_iter();
    lines.extend(absent.map(|(tiers, reason)| format!("absent: {tiers}: {reason}")));
    lines.join("\n")
}

/// The table of a run, with the algorithms as titles.
fn table(report: &Report) -> String {
    let mut rows = summary::rows(report).into_iter();
    let mut table = Table::new(rows.next().into_iter().flatten().skip(1));
    for row in rows {
        table.add_title(&row[0]);
        table.add_row(row.into_iter().skip(1));
    }
    table.to_string()
}
