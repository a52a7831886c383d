//! Every number of the simd tier that an extent may cross is crossed by cases of core depth, from either side:
//! the numbers are found in the sources, and `crates/simd/tests/thresholds.txt` says of each by which cases, or
//! why no extent is compared with it.

use etalon_conformance::cases::{Case, Depth, Spec, specs};
use etalon_problem::{Algorithm, Blocking, Problem};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const LIST: &str = include_str!("../../simd/tests/thresholds.txt");

/// Sources of the problem crate with numbers that the simd tier takes from there.
const SHARED: [&str; 1] = ["../../problem/src/linear_cross_entropy/shard/tree.rs"];

/// The sources of the simd tier, by their path within it.
fn sources() -> BTreeMap<String, String> {
    fn add(root: &Path, folder: PathBuf, found: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(folder).expect("a folder of the simd crate") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                add(root, path, found);
            } else if path.file_name().is_some_and(|name| name != "tests.rs") {
                let text = fs::read_to_string(&path).expect("a source file");
                let name = path.strip_prefix(root).expect("below the root").display().to_string();
                found.insert(name, text);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../simd/src");
    let mut found = BTreeMap::new();
    add(&root, root.clone(), &mut found);
    for file in SHARED {
        let text = fs::read_to_string(root.join(file)).expect("a source file that tiers share");
        found.insert(file.to_string(), text);
    }
    found
}

/// The types of which a constant may be a limit of extents.
const TYPES: [&str; 7] = ["usize", "u8", "u32", "u64", "i32", "i64", "Blocking"];

/// Contexts of a number with which something is compared, or into as many parts of which something is cut.
const BEFORE: [&str; 18] = [
    "< ",
    "> ",
    "<= ",
    ">= ",
    "== ",
    "!= ",
    "% ",
    "min(",
    "max(",
    "div_ceil(",
    "step_by(",
    "chunks(",
    "chunks_mut(",
    "chunks_exact(",
    "chunks_exact_mut(",
    "next_multiple_of(",
    "take(",
    "skip(",
];

/// Smaller numbers are not limits of extents but cases: none, one, a pair.
const LEAST: usize = 8;

/// The constants of a source, each with the text of its value, and the numbers that stand in its code.
fn numbers(source: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let code = source.lines().take_while(|line| !line.starts_with("#[cfg(test)]"));
    for line in code.map(|line| line.split("//").next().unwrap_or("")) {
        let words = line.trim().split_once("const ").filter(|(before, _)| {
            before.is_empty() || before.starts_with("pub") && !before.contains('=')
        });
        let constant = words.and_then(|(_, rest)| {
            let (name, rest) = rest.split_once(": ")?;
            let (of, value) = rest.trim_end_matches(';').split_once(" = ")?;
            TYPES.contains(&of).then(|| (name.to_string(), value.to_string()))
        });
        if let Some((name, value)) = constant {
            found.insert(name, value);
            continue;
        }
        for before in BEFORE {
            for (at, _) in line.match_indices(before) {
                // A shift is no comparison.
                if line[..at].ends_with(['<', '>']) {
                    continue;
                }
                let digits: String = line[at + before.len()..]
                    .chars()
                    .take_while(|x| x.is_ascii_digit() || *x == '_')
                    .collect();
                let is_whole = !line[at + before.len() + digits.len()..].starts_with('.');
                let number = digits.replace('_', "");
                if is_whole && number.parse::<usize>().is_ok_and(|number| number >= LEAST) {
                    found.insert(number.clone(), number);
                }
            }
        }
    }
    found
}

/// A product, a sum or a shift of numbers and of constants of any file; of a blocking one of its sizes.
fn value(text: &str, constants: &BTreeMap<String, String>) -> Option<usize> {
    if let Some((a, b)) = text.split_once(" + ") {
        return Some(value(a, constants)? + value(b, constants)?);
    }
    if let Some((a, b)) = text.split_once(" << ") {
        return Some(value(a, constants)? << value(b, constants)?);
    }
    if let Some((a, b)) = text.split_once(" * ") {
        return Some(value(a, constants)? * value(b, constants)?);
    }
    text.replace('_', "").parse().ok().or_else(|| value(constants.get(text)?, constants))
}

/// The value of a constant as a line of the list names it: a blocking with a field.
fn limit(name: &str, own: &BTreeMap<String, String>, all: &BTreeMap<String, String>) -> usize {
    let (name, field) = name.split_once('.').unwrap_or((name, ""));
    let text = own.get(name).unwrap_or_else(|| panic!("there is no {name} any more"));
    let text = match text.split_once(&format!("{field}: ")) {
        Some((_, rest)) if !field.is_empty() => rest.split([',', ' ']).next().unwrap_or(""),
        _ => text,
    };
    value(text, all).unwrap_or_else(|| panic!("{name} = {text} is no number"))
}

/// A measure of a case, in the unit of the constants that it is compared with.
fn measure(name: &str, case: &Case) -> Option<usize> {
    let blocking = |usual: Blocking| case.blocking().unwrap_or(usual);
    match (&case.problem, case.problem.scores()) {
        (problem, Some(scores)) => {
            let e = &scores.extents;
            let value_dim = match problem {
                Problem::Attention(x) => x.value_dim,
                Problem::LazyAttention(x) => x.value_dim,
                _ => 0,
            };
            let width = e.dim.max(value_dim);
            let of_lazy = blocking(Blocking::new(48, 192));
            Some(match name {
                "queries" => e.queries,
                "keys" => e.keys,
                "widths" => width,
                // Panels have at least 16 columns.
                "panels" => 16 * width,
                "rows_of_elements" => e.queries.max(e.keys) * width,
                "key_tiles" => e.keys.div_ceil(192),
                "slots" => e.batch * e.key_heads,
                "packed" => {
                    let keys = e.key_heads * e.keys * (e.dim + value_dim);
                    4 * e.batch * (keys + e.query_heads * e.queries * e.dim)
                }
                // Rows of tiles of weights lie 272 apart, and a tile has the columns of a register block at least. The
                // tile behind those that are kept must not be the last.
                "kept_weights" => {
                    let tiles = e.keys.div_ceil(of_lazy.keys.max(32)).saturating_sub(1);
                    tiles * of_lazy.queries.min(e.queries) * 272 * 4
                }
                _ => return None,
            })
        }
        (Problem::LinearAttention(x), _) => {
            let e = &x.extents;
            let chunks = e.tokens.div_ceil(blocking(Blocking::new(96, 48)).queries);
            let state = e.dim * x.value_dim;
            Some(match name {
                "tokens" => e.tokens,
                "widths" => e.dim.max(x.value_dim),
                "chunks" => chunks * e.batch * e.key_heads,
                "states" => e.batch * e.key_heads * state,
                // A register has at most 16 elements.
                "registers" => x.value_dim.div_ceil(16),
                "kept_states" => chunks * state * 4,
                _ => return None,
            })
        }
        (Problem::LinearCrossEntropy(x), _) => Some(match name {
            "tokens" => x.tokens,
            "classes" => x.vocab,
            "widths" => x.dim,
            "panels" => 16 * x.dim,
            "class_tiles" => x.vocab.div_ceil(256),
            "token_bands" => x.tokens.div_ceil(96),
            _ => return None,
        }),
        _ => None,
    }
}

/// The largest and the smallest measure of the cases of a shape.
fn of_shape(cases: &BTreeMap<String, Vec<Spec>>, shape: &str, name: &str) -> [usize; 2] {
    let specs = cases.get(shape).unwrap_or_else(|| panic!("no case of core depth is {shape}"));
    let all = specs.iter().map(|spec| {
        measure(name, &spec.build()).unwrap_or_else(|| panic!("{shape} has no measure {name}"))
    });
    let all: Vec<usize> = all.collect();
    [all.iter().copied().max(), all.iter().copied().min()].map(|x| x.expect("a case"))
}

#[test]
fn every_number_is_crossed_from_either_side() {
    let of_files: BTreeMap<String, BTreeMap<String, String>> =
        sources().into_iter().map(|(file, text)| (file, numbers(&text))).collect();
    let mut constants = BTreeMap::new();
    for (name, value) in of_files.values().flatten() {
        // Of constants of one name that other files use there is one value.
        constants.entry(name.clone()).or_insert_with(|| value.clone());
    }
    let mut cases: BTreeMap<String, Vec<Spec>> = BTreeMap::new();
    for algorithm in Algorithm::ALL {
        for spec in specs(algorithm, Depth::Core, 0) {
            cases.entry(format!("{algorithm}/{}", spec.shape())).or_default().push(spec);
        }
    }
    let mut listed = BTreeSet::new();
    for line in LIST.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        let [file, name, ..] = words[..] else { panic!("{line}: a file and a constant") };
        let own = of_files.get(file).unwrap_or_else(|| panic!("{line}: there is no such file"));
        let constant = name.split('.').next().unwrap_or(name);
        assert!(own.contains_key(constant), "{line}: the file has it no more");
        listed.insert((file.to_string(), constant.to_string()));
        match words[2..] {
            ["is", ..] => assert!(words.len() > 3, "{line}: what it is"),
            [measure, "above", above, "below", below] => {
                let limit = limit(name, own, &constants);
                let [most, _] = of_shape(&cases, above, measure);
                assert!(most > limit, "{line}: {most} is not above {limit}");
                let [_, least] = of_shape(&cases, below, measure);
                assert!(least <= limit, "{line}: {least} is above {limit}");
            }
            _ => panic!("{line}: `is …`, or a measure, `above` and `below` with shapes"),
        }
    }
    let found = of_files.iter().flat_map(|(file, own)| own.keys().map(move |name| (file, name)));
    let unlisted: Vec<_> = found
        .filter(|(file, name)| !listed.contains(&((*file).clone(), (*name).clone())))
        // Arguments of a macro are listed where they are given.
        .filter(|(file, name)| of_files[*file][*name] != "$lanes")
        .collect();
    assert!(unlisted.is_empty(), "not in crates/simd/tests/thresholds.txt: {unlisted:?}");
}

#[test]
fn numbers_are_found_wherever_they_stand() {
    let source = [
        "const WAVE: usize = 4 << 20;",
        "    pub(crate) const CUT: Blocking = Blocking { queries: 192, keys: 96 };",
        "const SLOW: f32 = 5.0;",
        "if rows >= 4_096 && x < 0.5 { y << 23 } // z > 77",
        "for x in y.chunks(64) {}",
        "const N: usize;",
        "if a == 7 {}",
        "#[cfg(test)]",
        "x > 99",
    ];
    let source = source.join("\n");
    let found = numbers(&source);
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(names, ["4096", "64", "CUT", "WAVE"]);
    let own = |name: &str| limit(name, &found, &found);
    assert_eq!(["WAVE", "CUT.queries", "CUT.keys", "64"].map(own), [4 << 20, 192, 96, 64]);
}
