//! A run in groups: tier × algorithm × pass × storage type.

use super::{Record, Report, Verdict};
use etalon_problem::{Algorithm, Dtype, Pass};
use std::collections::{BTreeMap, BTreeSet};

/// What a group of checks has in common; groups are listed in this order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The pass.
    pub pass: Pass,
    /// The tier's name.
    pub tier: String,
    /// The storage type.
    pub dtype: Dtype,
}

/// How a group of checks ended.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Group {
    /// Checks that were made: passed, failed, of another convention or vacuous.
    pub checks: usize,
    /// Those that failed.
    pub failed: usize,
    /// Those that follow another convention.
    pub conventions: usize,
    /// Those whose case was at fault.
    pub vacuous: usize,
    /// The largest margin of a check that has one, with its case.
    pub worst: Option<(f64, String)>,
    /// Why checks were not made.
    pub unsupported: BTreeSet<String>,
}

impl Group {
    fn add(&mut self, record: &Record) {
        match &record.verdict {
            Verdict::Unsupported(reason) => {
                self.unsupported.insert(reason.clone());
                return;
            }
            Verdict::Pass => {}
            Verdict::Fail(_) => self.failed += 1,
            Verdict::Convention(_) => self.conventions += 1,
            Verdict::Vacuous(_) => self.vacuous += 1,
        }
        self.checks += 1;
        if let Some(margin) = record.margin {
            let worse = self.worst.as_ref().is_none_or(|(worst, _)| margin > *worst);
            if worse {
                self.worst = Some((margin, record.case.clone()));
            }
        }
    }

    /// In a few characters: the worst margin and the number of checks, or what is wrong.
    pub fn cell(&self) -> String {
        let margin = self.worst.as_ref().map_or("–".to_string(), |(x, _)| format!("{x:.3}"));
        let checks = self.checks;
        match (self.failed, self.conventions, self.vacuous) {
            (0, 0, 0) if checks == 0 => "–".to_string(),
            (0, 0, 0) => format!("{margin} ({checks})"),
            (0, 0, vacuous) => format!("{vacuous} of {checks} VACUOUS"),
            (0, conventions, _) => format!("{conventions} of {checks} ANOTHER CONVENTION"),
            (failed, ..) => format!("{failed} of {checks} FAIL"),
        }
    }
}

impl Report {
    /// The checks by tier, algorithm, pass and storage type.
    pub fn groups(&self) -> BTreeMap<Key, Group> {
        let mut groups: BTreeMap<Key, Group> = BTreeMap::new();
        for record in &self.records {
            let Record { algorithm, pass, dtype, .. } = *record;
            let key = Key { algorithm, pass, tier: record.tier.clone(), dtype };
            groups.entry(key).or_default().add(record);
        }
        groups
    }

    /// The table of a run: one row for each algorithm, pass and tier, one column for each storage
    /// type, and the header before them.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let groups = self.groups();
        let dtypes: BTreeSet<Dtype> = groups.keys().map(|key| key.dtype).collect();
        let mut header = ["algorithm", "pass", "tier"].map(String::from).to_vec();
        header.extend(dtypes.iter().map(Dtype::to_string));
        let mut rows = vec![header];
        let triple = |key: &Key| (key.algorithm, key.pass, key.tier.clone());
        let triples: BTreeSet<_> = groups.keys().map(triple).collect();
        for (algorithm, pass, tier) in triples {
            let mut row = vec![algorithm.to_string(), pass.to_string(), tier.clone()];
            row.extend(dtypes.iter().map(|&dtype| {
                let key = Key { algorithm, pass, tier: tier.clone(), dtype };
                groups.get(&key).map_or("–".to_string(), Group::cell)
            }));
            rows.push(row);
        }
        rows
    }

    /// What was not checked, and why: each reason once, with those that gave it.
    pub fn not_checked(&self) -> Vec<String> {
        let mut reasons: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (key, group) in self.groups() {
            for reason in group.unsupported {
                let what = format!("{} {} {}", key.tier, key.algorithm, key.pass);
                reasons.entry(reason).or_default().insert(what);
            }
        }
        let join = |names: BTreeSet<String>| names.into_iter().collect::<Vec<_>>().join(", ");
        reasons.into_iter().map(|(reason, names)| format!("{}: {reason}", join(names))).collect()
    }

    /// The records whose verdict is negative.
    pub fn negative(&self) -> impl Iterator<Item = (&Record, &str)> {
        self.records.iter().filter_map(|record| match &record.verdict {
            Verdict::Fail(text) | Verdict::Convention(text) | Verdict::Vacuous(text) => {
                Some((record, text.as_str()))
            }
            Verdict::Pass | Verdict::Unsupported(_) => None,
        })
    }

    /// The run in one line.
    pub fn headline(&self) -> String {
        let supported = |record: &&Record| !matches!(record.verdict, Verdict::Unsupported(_));
        let checks = self.records.iter().filter(supported).count();
        format!("{checks} checks, {} negative, seed {}", self.negative().count(), self.seed)
    }
}
