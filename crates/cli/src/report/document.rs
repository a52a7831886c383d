//! A report in sections, failures first: what HTML and Markdown show.

use super::{Cause, Report, causes};
use crate::page::{Block, Counted};
use crate::summary;
use crate::units::plural;
use etalon_conformance::check::Spread;
use etalon_conformance::report::{About, Record, Status};
use etalon_problem::{Algorithm, Pass};
use std::collections::BTreeMap;

/// A part of a report with a title.
pub struct Section {
    /// Its title.
    pub title: &'static str,
    /// The share of a page at which it ends at the latest, from 0 to 1: no part of a report takes the place of all
    /// others.
    pub end: f64,
    /// Its contents.
    pub blocks: Vec<Block>,
}

/// As many commands are listed of one cause.
const LISTED: usize = 100;

/// The sections of a report that have contents.
pub fn document(report: &Report<'_>) -> Vec<Section> {
    let run = &report.run;
    let (failed, others): (Vec<_>, Vec<_>) =
        report.studies.iter().partition(|study| study.status == Status::Failed);
    let studies = |of: Vec<&super::Study>| -> Vec<Block> {
        let blocks = |study: &super::Study| {
            let title = std::iter::once(Block::Title(study.title.clone()));
            title.chain(study.blocks.iter().cloned()).collect::<Vec<_>>()
        };
        of.into_iter().flat_map(blocks).collect()
    };
    let tables = report.tables.iter();
    let tables = tables
        .flat_map(|(title, rows)| [Block::Title((*title).to_string()), Block::Rows(rows.clone())]);
    let section = |title, end, blocks| Section { title, end, blocks };
    let sections = [
        section("Notes", 0.1, items(report.notes.clone())),
        section("Failures in detail", 0.6, studies(failed)),
        section("Failures by cause", 0.75, by_cause(report, run.negative())),
        section("Undecided by cause", 0.8, by_cause(report, run.undecided())),
        section("Matrix", 0.85, matrix(report)),
        section("Margins", 0.9, margins(report)),
        section("Tables", 0.94, tables.collect()),
        section("Outputs in detail", 0.96, studies(others)),
        section("Known failures", 0.97, by_cause(report, run.known.iter())),
        section("Not checked", 0.98, items(summary::not_checked(run))),
        section("Absent", 0.985, items(absent(report))),
        section("About this run", 0.99, vec![about(report)]),
    ];
    sections.into_iter().filter(|section| !section.blocks.is_empty()).collect()
}

fn items(items: Vec<String>) -> Vec<Block> {
    if items.is_empty() { Vec::new() } else { vec![Block::Items(items)] }
}

fn absent(report: &Report<'_>) -> Vec<String> {
    let lines = summary::absent(&report.run.absent).into_iter();
    lines.map(|(tiers, reason)| format!("{tiers}: {reason}")).collect()
}

/// Records merged by their cause, each with the commands that ask its cases again.
fn by_cause<'a>(report: &Report<'_>, records: impl Iterator<Item = &'a Record>) -> Vec<Block> {
    causes(records).iter().map(|cause| folded(report, cause)).collect()
}

fn folded(report: &Report<'_>, cause: &Cause<'_>) -> Block {
    let mut commands: Vec<String> = Vec::new();
    for record in &cause.records {
        let command = (report.replay)(record);
        // One command may stand for several records: all probes of a folder are judged together.
        if commands.last() != Some(&command) {
            commands.push(command);
        }
    }
    let hidden = commands.len().saturating_sub(LISTED);
    commands.truncate(LISTED);
    let first = cause.records.first().map_or("", |record| record.case.as_str());
    let mut blocks = vec![Block::Text(cause.symptom().to_string())];
    if !first.is_empty() {
        blocks.insert(0, Block::Text(format!("First in {first}:")));
    }
    blocks.push(Block::Code(commands));
    if hidden > 0 {
        blocks.push(Block::Text(format!("… and {hidden} more {}", plural(hidden, "command"))));
    }
    Block::Folded(cause.title(), blocks)
}

fn matrix(report: &Report<'_>) -> Vec<Block> {
    let rows = summary::matrix(&report.run);
    if rows.len() < 2 {
        return Vec::new();
    }
    vec![Block::Text(summary::CELL.to_string()), Block::Matrix(rows)]
}

/// Margins of checks by algorithm, pass and tier, and those of elements by output.
fn margins(report: &Report<'_>) -> Vec<Block> {
    let mut blocks = Vec::new();
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let mut checks: BTreeMap<(Algorithm, Pass, &str), (Spread, f64)> = BTreeMap::new();
    for record in &report.run.records {
        let Some(margin) = record.margin else { continue };
        let place = (record.algorithm, record.pass, record.tier.as_str());
        let (spread, worst) = checks.entry(place).or_insert_with(|| (Spread::default(), 0.0));
        spread.add(margin);
        *worst = worst.max(margin);
    }
    let rows = checks.into_iter().map(|((algorithm, pass, tier), (spread, worst))| {
        let names = names(&[&algorithm.to_string(), pass.name(), tier]);
        Counted { names, spread, worst }
    });
    let rows: Vec<Counted> = rows.collect();
    if !rows.is_empty() {
        blocks.push(Block::Title("The worst element of each check".to_string()));
        blocks.push(Block::Spreads(names(&["algorithm", "pass", "tier"]), rows));
    }
    let rows = report.studies.iter().flat_map(|study| {
        let row = |(output, spread, worst): &(&str, Spread, f64)| Counted {
            names: names(&[output, &study.title]),
            spread: spread.clone(),
            worst: *worst,
        };
        study.spreads.iter().map(row)
    });
    let rows: Vec<Counted> = rows.collect();
    if !rows.is_empty() {
        blocks.push(Block::Title("The elements of each output in detail".to_string()));
        blocks.push(Block::Spreads(names(&["output", "of"]), rows));
    }
    blocks
}

/// Place, time and settings.
fn about(report: &Report<'_>) -> Block {
    let About { date, cpu, commit, candidate, threads, depth, part, profile, seed, .. } =
        &report.run.about;
    let mut rows = vec![
        ("etalon", Some(env!("CARGO_PKG_VERSION").to_string())),
        ("commit", commit.map(str::to_string)),
        ("date", date.clone()),
        ("CPU", cpu.clone()),
        ("candidate", candidate.clone()),
        ("depth", Some((*depth).to_string())),
        ("part", part.clone()),
        ("profile", Some((*profile).to_string())),
        ("threads", (*threads > 0).then(|| threads.to_string())),
    ];
    if matches!(*depth, "smoke" | "core" | "full" | "soak" | "zoo") {
        rows.push(("seed", Some(seed.to_string())));
    }
    let known = rows.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let known = known.filter(|(_, value)| !value.is_empty());
    let rows = known.map(|(name, value)| vec![name.to_string(), value]);
    Block::Rows([vec!["".to_string(), "".to_string()]].into_iter().chain(rows).collect())
}
