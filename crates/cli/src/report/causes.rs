//! Failures merged by their cause: a bug that shows in a thousand cases is one line.

use etalon_conformance::report::Record;
use etalon_problem::{Algorithm, Pass};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Records of one law and pass that show the same symptom, but for its numbers.
pub struct Cause<'a> {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The pass.
    pub pass: Pass,
    /// The law.
    pub check: &'a str,
    /// The records, in the order of the run; at least one.
    pub records: Vec<&'a Record>,
}

impl Cause<'_> {
    /// The symptom of the first record.
    pub fn symptom(&self) -> &str {
        self.records.first().and_then(|record| record.verdict.reason()).unwrap_or_default()
    }

    /// The law and the pass, with the number of cases, tiers and types.
    pub fn title(&self) -> String {
        let mut places: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for record in &self.records {
            let dtypes = places.entry(&record.tier).or_default();
            if !dtypes.contains(&record.dtype.name()) {
                dtypes.push(record.dtype.name());
            }
        }
        let places = places.iter().map(|(tier, dtypes)| format!("{tier} ({})", dtypes.join(", ")));
        let Cause { algorithm, pass, check, records } = self;
        let places = places.collect::<Vec<_>>().join(", ");
        format!("{algorithm} {pass}, {check}: {} × on {places}", records.len())
    }
}

/// Records by cause: those with the most records first, and of as many the earlier ones.
pub fn causes<'a>(records: impl Iterator<Item = &'a Record>) -> Vec<Cause<'a>> {
    let mut places = BTreeMap::new();
    let mut causes: Vec<Cause<'a>> = Vec::new();
    for record in records {
        let Record { algorithm, pass, check, verdict, .. } = record;
        let symptom = without_numbers(verdict.reason().unwrap_or_default());
        let key = (verdict.name(), *algorithm, *pass, check.as_str(), symptom);
        let at = *places.entry(key).or_insert(causes.len());
        match causes.get_mut(at) {
            Some(cause) => cause.records.push(record),
            None => {
                let (algorithm, pass) = (*algorithm, *pass);
                causes.push(Cause { algorithm, pass, check, records: vec![record] });
            }
        }
    }
    causes.sort_by_key(|cause| std::cmp::Reverse(cause.records.len()));
    causes
}

/// A text with a mark in the place of every number: the form of a symptom.
fn without_numbers(text: &str) -> String {
    const MOST: usize = 400;
    let is_part = |c: char| c.is_ascii_digit() || matches!(c, '.' | 'e' | '+' | '-');
    let mut form = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next().filter(|_| form.len() < MOST) {
        let run = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (word, after) = match run {
            0 => rest.split_at(c.len_utf8()),
            run => rest.split_at(run),
        };
        match word.contains(|c: char| c.is_ascii_digit()) {
            true => form.push('#'),
            // Writing to a string does not fail.
            false => _ = form.write_str(word),
        }
        rest = after;
    }
    form
}
