//! `etalon verify`: every law on every tier present.

use crate::diagnosis::studies;
use crate::form::Reports;
use crate::live;
use crate::machine::about;
use crate::options;
use crate::outcome::{Failure, Outcome, say};
use crate::report::{self, Study};
use crate::serve;
use crate::summary::{self, CELL};
use crate::table::Table;
use crate::units;
use clap::builder::PossibleValuesParser;
use etalon_conformance::cases::{Depth, Spec};
use etalon_conformance::laws;
use etalon_conformance::report::{About, Absent, Record, Report, Simplest, json};
use etalon_conformance::suite::{self, Part, SuiteOptions};
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers::{self, Isolated, Server};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// As many negative verdicts are printed; reports hold all of them.
const SHOWN: usize = 20;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Tiers to check: simd, simd/LEVEL, cuda, cuda/LEVEL, reference; all that this machine has if absent.
    #[arg(long, value_name = "T,…", value_delimiter = ',', conflicts_with = "candidate")]
    tier: Vec<String>,
    /// The level of the simd tier: portable, avx2, avx512, avx512bf16, amx, the last two also with -split2, or all
    /// that this machine has.
    #[arg(long, value_name = "L", default_value = "all", conflicts_with = "candidate")]
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
    #[arg(long, conflicts_with = "candidate")]
    in_process: bool,
    #[command(flatten)]
    reports: Reports,
    #[command(flatten)]
    live: live::Arguments,
}

/// The names of all laws; some laws share one.
fn laws() -> PossibleValuesParser {
    let names: BTreeSet<&str> = laws::all().iter().map(|law| law.name).collect();
    PossibleValuesParser::new(names)
}

pub fn run(arguments: &Arguments) -> Outcome {
    let (start, about) = (Instant::now(), about());
    let drafts = arguments.reports.begin(&arguments.live.files())?;
    let (mut run, finding, studies) = match arguments.live.is_wanted() {
        true => of_program(arguments)?,
        false => of_tiers(arguments)?,
    };
    let About { date, cpu, commit, .. } = about;
    run.about = About { date, cpu, commit, ..run.about };
    let (status, verdict) = (run.status(), summary::headline(&run));
    let seed = run.about.seed;
    let report = report::Report {
        command: "etalon verify",
        status,
        verdict: verdict.clone(),
        run,
        studies,
        tables: Vec::new(),
        notes: finding.as_ref().map_or(Vec::new(), |finding| finding.notes().to_vec()),
        replay: Box::new(move |record| replay(arguments, seed, record)),
    };
    let written = drafts.finish(&report, &|| json(&report.run));
    if let Some(finding) = finding.as_ref().filter(|_| arguments.live.in_json()) {
        say(&finding.json()?)?;
        return written.map(|()| status);
    }
    print(arguments, &report.run)?;
    for line in finding.iter().flat_map(live::Finding::lines) {
        say(&line)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    say(&format!("{verdict}, {}", units::time(seconds)))?;
    written.map(|()| status)
}

/// A run that is over, and its failures in detail.
type Judged = (Report, Option<live::Finding>, Vec<Study>);

/// The command that makes a check again: of one case, or where it is about many, of the whole run.
fn replay(arguments: &Arguments, seed: u64, record: &Record) -> String {
    let Record { tier, check, case, algorithm, .. } = record;
    let Arguments { live, depth, .. } = arguments;
    match (case.parse::<Spec>(), live.is_wanted()) {
        (Ok(_), true) => live.replay(case, check),
        (Ok(_), false) => format!("etalon verify --tier {tier} --case {case} --law {check}"),
        (Err(_), true) => live.repeat(*depth, seed),
        (Err(_), false) => {
            let of = format!("--tier {tier} --algorithm {algorithm}");
            format!("etalon verify {of} --depth {depth} --seed {seed}")
        }
    }
}

/// The run of a program that somebody brings.
fn of_program(arguments: &Arguments) -> Result<Judged, Failure> {
    let asked = live::Asked {
        run: &arguments.run,
        depth: arguments.depth,
        part: arguments.part,
        cases: &arguments.case,
        laws: &arguments.law,
        allow_undecided: arguments.allow_undecided,
        details: arguments.reports.show_details(),
    };
    let live::Judged { report, finding, studies } = live::judge(&arguments.live, &asked)?;
    Ok((report, Some(finding), studies))
}

/// The run of etalon's own tiers.
fn of_tiers(arguments: &Arguments) -> Result<Judged, Failure> {
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
    let details = arguments.reports.show_details();
    let (mut run, studies) = arguments.run.watch(|progress| {
        let run = suite::run(&options, progress);
        let replay = |record: &Record| replay(arguments, arguments.run.seed(), record);
        let studies = match details {
            true => studies(&run, &options.tiers, &|spec| spec.build(), &replay),
            false => Vec::new(),
        };
        (run, studies)
    })?;
    run.absent.extend(absent);
    Ok((run, None, studies))
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
    let server = Arc::new(Server::new(serve::command(&[])?));
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
