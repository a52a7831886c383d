//! "To add an option to attention" in CONTRIBUTING.md names the files that an option touches, as `softcap` does.

use crate::files::{below, root};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

/// Tells whether code has a word: neither comments, nor strings, nor the tests at the end of a file.
fn has_word(text: &str, word: &str) -> bool {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let of_line = |line: &str| {
        let line = line.split("//").next().unwrap_or_default().to_string();
        let outside: String = line.split('"').step_by(2).collect::<Vec<_>>().join(" ");
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        outside.split(|c| !is_part(c)).any(|part| part == word)
    };
    code.lines().any(of_line)
}

/// The section of a recipe, and what stands in it between backticks.
fn quoted(title: &str) -> Vec<String> {
    let page = fs::read_to_string(root().join("CONTRIBUTING.md")).expect("the page");
    let (_, rest) = page.split_once(&format!("\n## {title}\n")).expect("the recipe");
    let section = rest.split("\n## ").next().unwrap_or_default();
    section.split('`').skip(1).step_by(2).map(str::to_string).collect()
}

const RECIPE: &str = "To add an option to attention (all tiers)";

#[test]
fn the_recipe_of_an_option_names_the_files_that_one_touches() {
    let of_crate = |name: &str| {
        let files = below(&root().join(format!("crates/{name}/src")));
        let is_one = |path: &PathBuf| {
            // The softcap of linear_cross_entropy is another option.
            let other = path.to_string_lossy().contains("linear_cross_entropy");
            let is_rust =
                path.extension().is_some_and(|kind| kind == "rs") && !path.ends_with("tests.rs");
            is_rust && !other && has_word(&fs::read_to_string(path).expect("a text"), "softcap")
        };
        let root = root();
        let name = move |path: PathBuf| {
            let path = path.strip_prefix(&root).expect("a file of the workspace");
            path.to_string_lossy().replace('\\', "/")
        };
        files.into_iter().filter(is_one).map(name)
    };
    let crates = ["problem", "reference", "oracle", "simd", "cuda"];
    let found: BTreeSet<String> = crates.into_iter().flat_map(of_crate).collect();
    let is_one =
        |text: &String| crates.iter().any(|x| text.starts_with(&format!("crates/{x}/src/")));
    let named = quoted(RECIPE).into_iter().filter(|text| is_one(text) && text.ends_with(".rs"));
    assert_eq!(named.collect::<BTreeSet<_>>(), found);
}

/// Kernels have the softcap as `cap` in their arguments. The recipe names their files without a folder.
#[test]
fn the_recipe_of_an_option_names_the_kernels_that_one_touches() {
    let files = below(&root().join("crates/cuda/src/kernels"));
    let has_cap = |path: &PathBuf| has_word(&fs::read_to_string(path).expect("a text"), "cap");
    let name = |path: PathBuf| path.file_name().expect("a name").to_string_lossy().into_owned();
    let found = files.into_iter().filter(has_cap).map(name);
    let found: BTreeSet<String> = found.filter(|name| !name.contains("cross_entropy")).collect();
    let is_kernel = |text: &String| [".cu", ".cuh"].iter().any(|end| text.ends_with(end));
    let named: BTreeSet<String> = quoted(RECIPE).into_iter().filter(is_kernel).collect();
    assert_eq!(named, found);
}

#[test]
fn every_file_that_contributing_names_is_there() {
    let page = fs::read_to_string(root().join("CONTRIBUTING.md")).expect("the page");
    let quoted = page.split('`').skip(1).step_by(2);
    let is_path = |text: &&str| {
        let plain = |c: char| c.is_alphanumeric() || "/._-".contains(c);
        ["crates/", "docs/", "benches/", ".ci/"].iter().any(|start| text.starts_with(start))
            && text.chars().all(plain)
    };
    for path in quoted.filter(is_path) {
        assert!(root().join(path).exists(), "CONTRIBUTING.md names {path}");
    }
}
