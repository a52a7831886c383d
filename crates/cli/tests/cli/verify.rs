//! `etalon verify`.

use super::{etalon, refusal};
use serde_json::Value;
use std::fs;
use tempfile::tempdir;

/// The checks of a run, and the name of its part.
fn checks(part: Option<&str>) -> (Vec<String>, Value) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("report.json");
    let report = format!("json={}", path.to_str().unwrap());
    let mut arguments = vec!["verify", "--tier", "simd/portable", "--depth", "smoke"];
    arguments.extend(["--algorithm", "attention_lse", "--report", &report]);
    arguments.extend(part.into_iter().flat_map(|part| ["--part", part]));
    let output = etalon(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let last = text.lines().last().unwrap_or_default();
    let named = part.map(|part| format!(", part {part}, ")).unwrap_or_default();
    assert!(last.starts_with("PASSED") && last.contains(&named), "{last}");
    let report: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let records = report["records"].as_array().unwrap();
    // Offers that a tier lacks are recorded by every part.
    let records = records.iter().filter(|record| record["check"] != "offer");
    let name = |x: &Value| format!("{} {} {}", x["pass"], x["check"], x["case"]);
    let mut names: Vec<String> = records.map(name).collect();
    names.sort();
    (names, report["part"].clone())
}

#[test]
fn the_parts_of_a_run_are_the_run() {
    let (whole, part) = checks(None);
    assert_eq!(part, Value::Null);
    let mut all = Vec::new();
    for part in ["1/3", "2/3", "3/3"] {
        let (names, reported) = checks(Some(part));
        assert_eq!(reported, part);
        assert!(!names.is_empty() && names.len() < whole.len());
        all.extend(names);
    }
    all.sort();
    assert_eq!(all, whole);
}

/// Laws are asked of cases that are named: of none there is no verdict, and the reason is said.
#[test]
fn a_run_without_checks_is_undecided_and_says_why() {
    let arguments = ["verify", "--depth", "smoke", "--law", "bound", "--tier", "simd/portable"];
    let output = etalon(&arguments);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(
        text.starts_with("Nothing was checked: --law judges the cases that --case names.\n"),
        "{text}"
    );
    assert!(text.contains("\nUNDECIDED: 0 checks, ") && !text.contains("A cell:"), "{text}");
}

#[test]
fn a_part_that_is_none_is_refused() {
    for part in ["0/3", "4/3", "0/0", "1", "1/", "a/b", "-1/3"] {
        let line = refusal(&etalon(&["verify", &format!("--part={part}")]));
        assert!(line.contains("K/N with K from 1 to N"), "{line}");
    }
}
