//! The list of planted bugs fits the sources: `cargo run -p etalon-conformance --example planted`
//! would otherwise find out, which nobody runs with every change.

#[path = "../../simd/tests/planted/bugs.rs"]
mod bugs;

use std::collections::{BTreeMap, BTreeSet};

#[test]
fn every_bug_can_be_planted() {
    let bugs = bugs::all();
    assert!(bugs.len() >= 40, "the list has {} bugs", bugs.len());
    let names: BTreeSet<&str> = bugs.iter().map(|bug| bug.name.as_str()).collect();
    assert_eq!(names.len(), bugs.len(), "names are unique");
    let mut files: BTreeMap<&str, String> = BTreeMap::new();
    for bug in &bugs {
        assert!(bug.new.contains("bug!()") && !bug.kind.is_empty(), "{}", bug.name);
        assert!(bug.story.ends_with('.'), "{}", bug.story);
        let source = files.entry(&bug.file).or_insert_with(|| {
            let path = format!("{}/../simd/src/{}", env!("CARGO_MANIFEST_DIR"), bug.file);
            std::fs::read_to_string(path).expect("a file of the simd crate")
        });
        *source = bug.plant(source, "false").unwrap_or_else(|| {
            panic!("{}: the text that it replaces is not once in {}", bug.name, bug.file)
        });
    }
}
