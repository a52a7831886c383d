//! The set of test vectors: ids and inputs that never change, exact results, and that it notices what it says.

mod choose;
mod common;
mod damage;

use common::{notices, request};
use etalon_conformance::bounds::bounds;
use etalon_conformance::cases::Spec;
use etalon_conformance::gates::{g1, margins};
use etalon_conformance::profile::Profile;
use etalon_conformance::report::Verdict;
use etalon_conformance::tensor::values;
use etalon_conformance::tier::Tier;
use etalon_conformance::tiers::{Simd, ask};
use etalon_conformance::vector_set::{
    CORE, INDEX, INVALID, Listed, Manifest, Set, Validity, core, digest, files, recorded, refusal,
};
use etalon_conformance::zoo::{mutant, mutants};
use etalon_problem::{Algorithm, Dtype};
use etalon_reference::{Arithmetic, evaluate_in};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::{env, fs};
use tempfile::{TempDir, tempdir};

/// The most bytes of the core set.
const MOST: usize = 5_000_000;

/// The files of the set, made once.
static FILES: LazyLock<Vec<(String, Vec<u8>)>> =
    LazyLock::new(|| files(&Profile::flash, &|_, _, _| {}).unwrap());

/// The set in a folder.
fn written() -> TempDir {
    let folder = tempdir().unwrap();
    FILES.iter().for_each(|(name, content)| fs::write(folder.path().join(name), content).unwrap());
    folder
}

fn manifest() -> Manifest {
    let (_, text) = FILES.iter().find(|(name, _)| name == INDEX).unwrap();
    serde_json::from_slice(text).unwrap()
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/vector_set").join(name)
}

/// Writes the list anew: vectors that it lacks come in at its end, and none goes.
#[test]
#[ignore = "writes core.txt, in ten minutes; by hand after a new axis, probe or bug"]
fn renew() {
    let text = fs::read_to_string(source("core.txt")).unwrap();
    let head: Vec<&str> = text.lines().take_while(|line| line.starts_with('#')).collect();
    let known: BTreeMap<String, Listed> =
        core().unwrap().into_iter().map(|x| (x.id.to_string(), x)).collect();
    let lines = choose::lines();
    for line in &lines {
        let mut words = line.split(' ');
        let (id, sha256) = (words.next().unwrap(), words.next().unwrap());
        if let Some(known) = known.get(id) {
            assert_eq!(known.sha256, sha256, "{id} has become another vector: retire it");
        }
    }
    let text = head.into_iter().chain(lines.iter().map(String::as_str));
    fs::write(source("core.txt"), text.collect::<Vec<_>>().join("\n") + "\n").unwrap();
}

/// On any machine: hashes of ids, problems and inputs are those of the list, and theirs that of the release.
#[test]
fn ids_and_inputs_are_those_of_the_list() {
    let list = core().unwrap();
    let ids: BTreeSet<String> = list.iter().map(|x| x.id.to_string()).collect();
    assert_eq!(ids.len(), list.len(), "an id is there twice");
    list.par_iter().for_each(|Listed { id, sha256, .. }| {
        let found = digest(&id.to_string(), &id.question().unwrap()).unwrap();
        assert_eq!(*sha256, found, "{id} has become another vector");
    });
    let found = manifest().digest;
    let known = recorded(env!("CARGO_PKG_VERSION"), CORE);
    let line = format!("{} {CORE} {found}", env!("CARGO_PKG_VERSION"));
    assert_eq!(known, Some(found.as_str()), "releases.txt must have the line `{line}`");
}

#[test]
fn the_set_is_small_and_its_manifest_says_what_is_there() {
    let bytes: usize = FILES.iter().map(|(_, content)| content.len()).sum();
    assert!(bytes < MOST, "{bytes} bytes");
    let (valid, invalid) = (core().unwrap().len(), INVALID.len());
    let size = format!("{:.1} MB", bytes as f64 / 1e6);
    let words = format!("has {valid} valid and {invalid} invalid vectors, in {size}.");
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide.md");
    assert!(fs::read_to_string(guide).unwrap().contains(&words), "the guide must say `{words}`");
    let folder = written();
    let set = Set::read(folder.path()).unwrap();
    assert_eq!(set.manifest, manifest());
    for entry in &set.manifest.vectors {
        if entry.result == Validity::Valid {
            let loaded = set.load(entry, u64::MAX).unwrap();
            let question = entry.id.parse::<etalon_conformance::vector_set::Id>().unwrap();
            assert_eq!(loaded.question, question.question().unwrap(), "{}", entry.id);
        }
    }
}

/// The values of the axes of all algorithms that no vector of first order has.
#[test]
fn every_value_of_every_axis_has_a_vector() {
    let list = core().unwrap();
    let mut lacking = Vec::new();
    for algorithm in Algorithm::ALL {
        let own: Vec<&Spec> =
            list.iter().map(|x| x.id.spec()).filter(|x| x.algorithm == algorithm).collect();
        let have: BTreeSet<String> = own.iter().flat_map(|spec| spec.values()).collect();
        for (axis, names) in own[0].choices() {
            let large = |name: &&str| axis == "shape" && own[0].is_large_shape(name);
            let names = names.iter().filter(|name| !large(name));
            let values = names.map(|name| format!("{axis}={name}"));
            lacking
                .extend(values.filter(|x| !have.contains(x)).map(|x| format!("{algorithm} {x}")));
        }
        for pass in algorithm.passes() {
            assert!(
                list.iter().any(|x| x.id.spec().algorithm == algorithm && x.id.pass() == *pass)
            );
        }
        for dtype in etalon_conformance::cases::storage(algorithm) {
            assert!(own.iter().any(|spec| spec.dtype == *dtype), "{algorithm} {dtype}");
        }
    }
    assert!(lacking.is_empty(), "no vector has {lacking:?}");
}

/// A vector notices each bug whose flag it has.
#[test]
fn flags_are_noticed() {
    let list = core().unwrap();
    let flagged: Vec<&Listed> = list.iter().filter(|x| !x.flags.is_empty()).collect();
    assert!(flagged.len() > 50, "{} vectors have flags", flagged.len());
    flagged.into_par_iter().for_each(|Listed { id, flags, .. }| {
        let bugs: Vec<_> = flags.iter().map(|name| mutant(name).expect(name)).collect();
        let found = notices(id, &bugs);
        let missed: Vec<&String> = flags.iter().filter(|x| !found.contains(&x.as_str())).collect();
        assert!(missed.is_empty(), "{id} does not notice {missed:?}");
    });
}

/// The names in backticks of the sentence of the guide that begins so, up to its colon.
fn named_in_the_guide(start: &str) -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide.md");
    let page = fs::read_to_string(path).unwrap();
    let (_, rest) = page.split_once(start).expect("the sentence");
    let sentence = rest.split(": ").next().unwrap_or_default();
    sentence.split('`').skip(1).step_by(2).map(str::to_string).collect()
}

#[test]
fn the_guide_names_the_bugs_that_no_vector_notices() {
    let flagged: BTreeSet<String> = core().unwrap().into_iter().flat_map(|x| x.flags).collect();
    let bugs: BTreeSet<String> = mutants().iter().map(|bug| bug.name.to_string()).collect();
    let unnoticed: BTreeSet<String> = bugs.difference(&flagged).cloned().collect();
    assert_eq!(named_in_the_guide("No vector notices "), unnoticed);
}

#[test]
fn invalid_problems_are_refused_for_what_is_named() {
    let mut ids = BTreeSet::new();
    for invalid in INVALID {
        assert!(ids.insert(invalid.id), "{} is there twice", invalid.id);
        let (name, text) = refusal(invalid.problem).expect(invalid.id);
        let named = name.as_deref() == Some(invalid.name) || text.contains(invalid.name);
        assert!(named, "{}: {name:?}, {text}", invalid.id);
    }
    // One that it takes is none.
    let valid = INVALID[0].problem.replace("\"query_heads\": 3", "\"query_heads\": 4");
    assert_eq!(refusal(&valid), None);
}

/// The results of the simd tier lie within the stored bounds, and those of a sum that is 1 % too large do not.
#[test]
fn the_simd_tier_passes() {
    let folder = written();
    let set = Set::read(folder.path()).unwrap();
    let tier = Simd::levels().0.pop().expect("a level");
    let valid = set.manifest.vectors.par_iter().filter(|x| x.result == Validity::Valid);
    let judged: usize = valid
        .map(|entry| {
            let loaded = set.load(entry, u64::MAX).unwrap();
            let request = request(&loaded.question);
            let algorithm = request.problem.algorithm();
            if tier.offers(algorithm, request.pass, request.dtype).is_err() {
                return 0;
            }
            let outputs = ask(&tier, &request).unwrap();
            let found = g1(&loaded.bounds, &outputs);
            assert_eq!(found.verdict, Verdict::Pass, "{}", entry.id);
            1
        })
        .sum();
    assert!(judged > 100, "{judged} vectors");
}

/// Exact results lie within the bound of f64 of those in twice its digits: whatever functions a machine has.
#[test]
fn exact_results_are_exact() {
    let folder = written();
    let set = Set::read(folder.path()).unwrap();
    let valid = set.manifest.vectors.par_iter().filter(|x| x.result == Validity::Valid);
    // Twice the digits take a hundred times as long.
    valid.filter(|x| x.tensors.as_ref().is_some_and(|x| x.bytes < 12_000)).for_each(|entry| {
        let loaded = set.load(entry, u64::MAX).unwrap();
        let (problem, pass) = (&loaded.question.problem, loaded.question.pass);
        let inputs = &loaded.question.inputs;
        let of_f64 = bounds(problem, pass, Dtype::F64, &Profile::strict(Dtype::F64), inputs);
        let mut of_f64 = of_f64.unwrap();
        let inputs = values(problem, pass, inputs).unwrap();
        let precise = evaluate_in(Arithmetic::DoubleDouble, problem, pass, &inputs).unwrap();
        for (name, bound) in &mut of_f64.outputs {
            bound.value = precise[name].clone();
            let stored = &loaded.bounds.outputs[name].value;
            let worst = margins(bound, stored).into_iter().fold(0.0, f64::max);
            assert!(worst <= 1.0, "{}: {name} is off by {worst} bounds of f64", entry.id);
        }
    });
}
