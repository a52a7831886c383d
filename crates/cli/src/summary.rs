//! A run in tables and lines, for a terminal and for Markdown.

use crate::units::{self, counted, digits};
use etalon_conformance::report::{About, Absent, Record, Report, Status, Verdict};
use etalon_problem::{Algorithm, Dtype, Pass};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

/// Legend of a cell of the table.
pub const CELL: &str = "A cell: the worst margin, error ÷ proven bound (the number of checks).";

type Place<'a> = (Algorithm, Pass, &'a str);

/// The table of a run: one row for each algorithm, pass and tier, one column for each storage
/// type, and the header before them.
pub fn rows(report: &Report) -> Vec<Vec<String>> {
    let words = |row: Vec<Cell>| row.into_iter().map(|(_, text)| text).collect();
    matrix(report).into_iter().map(words).collect()
}

/// A cell of the table: its verdict, unless it is a name or empty.
pub type Cell = (Option<Status>, String);

/// The same table with the verdict of each cell.
pub fn matrix(report: &Report) -> Vec<Vec<Cell>> {
    let mut groups: BTreeMap<Place<'_>, BTreeMap<Dtype, Vec<&Record>>> = BTreeMap::new();
    let made = |record: &&Record| record.verdict.is_check();
    for record in report.records.iter().filter(made) {
        let row = groups.entry((record.algorithm, record.pass, &record.tier)).or_default();
        row.entry(record.dtype).or_default().push(record);
    }
    let dtypes: BTreeSet<Dtype> = groups.values().flat_map(BTreeMap::keys).copied().collect();
    let name = |text: String| (None, text);
    let header = ["algorithm", "pass", "tier"].into_iter().map(String::from);
    let header = header.chain(dtypes.iter().map(Dtype::to_string));
    let mut rows = vec![header.map(name).collect()];
    for ((algorithm, pass, tier), row) in groups {
        let names = [algorithm.to_string(), pass.to_string(), tier.to_string()].into_iter();
        let cells =
            dtypes.iter().map(|dtype| row.get(dtype).map_or(name("–".into()), |x| cell(x)));
        rows.push(names.map(name).chain(cells).collect());
    }
    rows
}

/// In a few characters: the worst margin and the number of checks, or what is wrong.
fn cell(records: &[&Record]) -> Cell {
    let checks = records.len();
    let count = |name| records.iter().filter(|record| record.verdict.name() == name).count();
    let margin = records.iter().filter_map(|record| record.margin).max_by(f64::total_cmp);
    let worst =
        ["fail", "convention", "vacuous", "undecided"].into_iter().map(|name| (name, count(name)));
    let text = match worst.into_iter().find(|(_, count)| *count > 0) {
        None => format!("{} ({checks})", margin.map_or("–".to_string(), units::margin)),
        Some(("convention", count)) => format!("{count} of {checks} ANOTHER CONVENTION"),
        Some((name, count)) => format!("{count} of {checks} {}", name.to_uppercase()),
    };
    (records.iter().map(|record| record.verdict.status()).max(), text)
}

/// Omitted checks with their reason: a line for each.
pub fn not_checked(report: &Report) -> Vec<String> {
    let reasons = report.records.iter().filter_map(|record| match &record.verdict {
        Verdict::Unsupported(reason) | Verdict::NotAsked(reason) => {
            Some((reason, (record.algorithm, record.pass, record.tier.as_str())))
        }
        _ => None,
    });
    let lines = grouped(reasons).into_iter();
    lines.map(|(reason, places)| format!("{}: {reason}", words(places))).collect()
}

/// The tiers that are not there, and why: a line for each reason, which names levels of one tier together.
pub fn absent(tiers: &[Absent]) -> Vec<(String, &str)> {
    let mut lines: Vec<(&str, Vec<&str>)> = Vec::new();
    for absent in tiers {
        match lines.iter_mut().find(|(reason, _)| *reason == absent.reason) {
            Some((_, tiers)) => tiers.push(&absent.tier),
            None => lines.push((&absent.reason, vec![&absent.tier])),
        }
    }
    lines.into_iter().map(|(reason, tiers)| (levels(&tiers), reason)).collect()
}

/// Tiers in a few words: `cuda (portable, sm80)`.
fn levels(tiers: &[&str]) -> String {
    let mut names: Vec<(&str, Vec<&str>)> = Vec::new();
    for tier in tiers {
        let (name, level) = tier.split_once('/').unwrap_or((tier, ""));
        match names.iter_mut().find(|(known, _)| *known == name) {
            Some((_, levels)) => levels.push(level),
            None => names.push((name, vec![level])),
        }
    }
    let name = |(name, levels): (&str, Vec<&str>)| match levels.as_slice() {
        [""] => name.to_string(),
        [level] => format!("{name}/{level}"),
        levels => {
            let named = levels.iter().filter(|level| !level.is_empty());
            format!("{name} ({})", named.copied().collect::<Vec<_>>().join(", "))
        }
    };
    names.into_iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Places in a few words: algorithms with the same passes and tiers together, and no passes where an
/// algorithm has no others.
fn words(places: BTreeSet<Place<'_>>) -> String {
    let tiers =
        grouped(places.into_iter().map(|(algorithm, pass, tier)| ((algorithm, pass), tier)));
    // No passes stand for all of them.
    let unless_all = |(algorithm, passes): (Algorithm, BTreeSet<Pass>)| match passes.len() {
        n if n == algorithm.passes().len() => (algorithm, BTreeSet::new()),
        _ => (algorithm, passes),
    };
    let parts = by_value(tiers).into_iter().map(|(tiers, pairs)| {
        let passes = grouped(pairs).into_iter().map(unless_all).collect();
        let names = by_value(passes).into_iter().map(|(passes, algorithms)| {
            let passes = if passes.is_empty() { String::new() } else { join(&passes) + " of " };
            passes + &join(&algorithms)
        });
        format!("{} ({})", names.collect::<Vec<_>>().join("; "), join(&tiers))
    });
    parts.collect::<Vec<_>>().join("; ")
}

/// The values of each key.
fn grouped<K: Ord, V: Ord>(pairs: impl IntoIterator<Item = (K, V)>) -> BTreeMap<K, BTreeSet<V>> {
    let mut groups: BTreeMap<K, BTreeSet<V>> = BTreeMap::new();
    pairs.into_iter().for_each(|(key, value)| {
        groups.entry(key).or_default().insert(value);
    });
    groups
}

/// The keys that have the same value, by value.
fn by_value<K: Ord, V: Ord>(map: BTreeMap<K, V>) -> BTreeMap<V, BTreeSet<K>> {
    grouped(map.into_iter().map(|(key, value)| (value, key)))
}

fn join(names: &BTreeSet<impl Display>) -> String {
    names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The run in one line.
pub fn headline(report: &Report) -> String {
    let (status, checks, negative) = (report.status(), report.checks(), report.negative().count());
    let count = |wanted: fn(&Verdict) -> bool| {
        report.records.iter().filter(|record| wanted(&record.verdict)).count()
    };
    let undecided = count(|verdict| matches!(verdict, Verdict::Undecided(_)));
    let lacking = count(|verdict| matches!(verdict, Verdict::Unsupported(_)));
    let About { seed, part, allow_undecided, .. } = &report.about;
    let part = part.as_ref().map(|part| format!(", part {part}")).unwrap_or_default();
    let allowed = match undecided > 0 && status == Status::Passed {
        true => format!(" ({} % allowed)", digits(100.0 * allow_undecided)),
        false => String::new(),
    };
    let known = match report.known.len() {
        0 => String::new(),
        count => format!(", {count} known to fail"),
    };
    format!(
        "{status}: {}, {negative} negative{known}, {undecided} undecided{allowed}, {lacking} not offered, \
         seed {seed}{part}",
        counted(checks, "check")
    )
}
