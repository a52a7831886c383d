//! A run in tables and lines, for a terminal and for Markdown.

use crate::units;
use etalon_conformance::report::{Counts, Group, Key, Report};
use etalon_problem::{Algorithm, Dtype, Pass};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

/// What a cell of the table shows.
pub const CELL: &str = "A cell: the worst margin, error ÷ proven bound (the number of checks).";

/// The table of a run: one row for each algorithm, pass and tier, one column for each storage
/// type, and the header before them.
pub fn rows(report: &Report) -> Vec<Vec<String>> {
    let groups = report.groups();
    let dtypes: BTreeSet<Dtype> = groups.keys().map(|key| key.dtype).collect();
    let mut header = ["algorithm", "pass", "tier"].map(String::from).to_vec();
    header.extend(dtypes.iter().map(Dtype::to_string));
    let mut rows = vec![header];
    let checked = groups.iter().filter(|(_, group)| group.checks > 0);
    let triples: BTreeSet<_> =
        checked.map(|(key, _)| (key.algorithm, key.pass, key.tier.clone())).collect();
    for (algorithm, pass, tier) in triples {
        let mut row = vec![algorithm.to_string(), pass.to_string(), tier.clone()];
        row.extend(dtypes.iter().map(|&dtype| {
            let key = Key { algorithm, pass, tier: tier.clone(), dtype };
            groups.get(&key).map_or("–".to_string(), cell)
        }));
        rows.push(row);
    }
    rows
}

/// In a few characters: the worst margin and the number of checks, or what is wrong.
fn cell(group: &Group) -> String {
    let margin =
        group.worst.as_ref().map_or("–".to_string(), |(margin, _)| units::digits(*margin));
    let checks = group.checks;
    match (group.failed, group.conventions, group.vacuous) {
        (0, 0, 0) if checks == 0 => "–".to_string(),
        (0, 0, 0) => format!("{margin} ({checks})"),
        (0, 0, vacuous) => format!("{vacuous} of {checks} VACUOUS"),
        (0, conventions, _) => format!("{conventions} of {checks} ANOTHER CONVENTION"),
        (failed, ..) => format!("{failed} of {checks} FAIL"),
    }
}

/// What was not checked, and why: a line for each reason.
pub fn not_checked(report: &Report) -> Vec<String> {
    let line = |(reason, what)| format!("{}: {reason}", places(what));
    report.not_checked().into_iter().map(line).collect()
}

/// Algorithms, passes and tiers in a few words: those with the same tiers are told together.
fn places(what: BTreeSet<(Algorithm, Pass, String)>) -> String {
    let mut tiers: BTreeMap<(Algorithm, Pass), BTreeSet<String>> = BTreeMap::new();
    for (algorithm, pass, tier) in what {
        tiers.entry((algorithm, pass)).or_default().insert(tier);
    }
    let mut parts = Vec::new();
    for (tiers, pairs) in by_value(tiers) {
        let mut passes: BTreeMap<Algorithm, BTreeSet<Pass>> = BTreeMap::new();
        for (algorithm, pass) in pairs {
            passes.entry(algorithm).or_default().insert(pass);
        }
        let mut names = Vec::new();
        for (passes, algorithms) in by_value(passes) {
            let all = |algorithm: &Algorithm| passes.len() == algorithm.passes().len();
            let passes =
                if algorithms.iter().all(all) { String::new() } else { join(&passes) + " of " };
            names.push(passes + &join(&algorithms));
        }
        parts.push(format!("{} ({})", names.join("; "), join(&tiers)));
    }
    parts.join("; ")
}

/// The keys that have the same value, by value.
fn by_value<K: Ord, V: Ord>(map: BTreeMap<K, V>) -> BTreeMap<V, BTreeSet<K>> {
    let mut values: BTreeMap<V, BTreeSet<K>> = BTreeMap::new();
    for (key, value) in map {
        values.entry(value).or_default().insert(key);
    }
    values
}

fn join(names: &BTreeSet<impl Display>) -> String {
    names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The run in one line.
pub fn headline(report: &Report) -> String {
    let Counts { checks, negative, not_checked } = report.counts();
    let verdict = if negative == 0 { "PASSED" } else { "FAILED" };
    let seed = report.about.seed;
    format!(
        "{verdict}: {checks} checks, {negative} negative, {not_checked} not offered, seed {seed}"
    )
}
