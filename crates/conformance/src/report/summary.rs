//! A run in groups: tier × algorithm × pass × storage type.

use super::record::{Record, Report, Verdict};
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
}

impl Group {
    fn add(&mut self, record: &Record) {
        match &record.verdict {
            Verdict::Unsupported(_) => return,
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
}

/// How many checks a run made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Checks that were made.
    pub checks: usize,
    /// Those with a negative verdict.
    pub negative: usize,
    /// Checks that were not made because the tier does not offer them.
    pub not_checked: usize,
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

    /// What was not checked: each reason with the algorithms, passes and tiers that it was given for.
    pub fn not_checked(&self) -> BTreeMap<String, BTreeSet<(Algorithm, Pass, String)>> {
        let mut reasons: BTreeMap<String, BTreeSet<_>> = BTreeMap::new();
        for record in &self.records {
            if let Verdict::Unsupported(reason) = &record.verdict {
                let what = (record.algorithm, record.pass, record.tier.clone());
                reasons.entry(reason.clone()).or_default().insert(what);
            }
        }
        reasons
    }

    /// The number of checks.
    pub fn counts(&self) -> Counts {
        let unsupported = |record: &&Record| matches!(record.verdict, Verdict::Unsupported(_));
        let not_checked = self.records.iter().filter(unsupported).count();
        let checks = self.records.len() - not_checked;
        Counts { checks, negative: self.negative().count(), not_checked }
    }
}
